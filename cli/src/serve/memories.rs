//! What users have had remembered: for one user, or for each key by itself.

use super::args::ServerArgs;
use super::auth::name_of;
use super::http::error::ApiError;
use super::ids::Caller;
use crate::flags::notes;
use crate::io::Failure;
use ruvllm::Tokenizer;
use ruvllm_learn::memory::{Memory, MemoryOptions, Notes};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A folder for each key, or one if there are no keys to tell users by; none without `--memory`.
#[derive(Default)]
pub(super) struct Memories(Vec<Mutex<Memory>>);

impl Memories {
    pub(super) fn open(args: &ServerArgs, keys: &[String]) -> Result<Memories, Failure> {
        let Some(folder) = &args.memory else {
            return Ok(Memories::default());
        };
        let open = |folder: PathBuf| -> Result<Mutex<Memory>, Failure> {
            Ok(Mutex::new(Memory::open(
                &folder,
                &MemoryOptions::default(),
            )?))
        };
        let all: Result<Vec<_>, _> = match keys {
            [] => open(folder.clone()).map(|memory| vec![memory]),
            keys => keys
                .iter()
                .map(|key| open(folder.join(name_of(key))))
                .collect(),
        };
        all.map(Memories)
    }

    /// The caller's.
    pub(super) fn of(&self, caller: &Caller) -> Option<MutexGuard<'_, Memory>> {
        let memory = self.0.get(caller.tenant.parse().unwrap_or(0))?;
        Some(memory.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What the caller has had remembered and is like a question; empty if nothing is.
    pub(super) fn notes(
        &self,
        caller: &Caller,
        question: &str,
        tokenizer: &Tokenizer,
    ) -> Result<Notes, ApiError> {
        let Some(mut memory) = self.of(caller) else {
            return Ok(Notes::default());
        };
        let notes = notes(&mut memory, question, tokenizer);
        notes.map_err(|error| ApiError::internal(error.to_string()))
    }
}
