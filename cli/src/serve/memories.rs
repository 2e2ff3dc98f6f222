//! What users have had remembered: for one user, or for each key by itself.

use super::args::ServerArgs;
use super::auth::name_of;
use super::http::error::ApiError;
use super::ids::Caller;
use super::observe::metrics::Remembered;
use crate::flags::notes;
use crate::io::{Failure, note, read_text};
use ruvllm::lora::Adapter;
use ruvllm::{Engine, Model, Tokenizer};
use ruvllm_learn::memory::{
    ConsolidationReport, IdleConsolidation, IdleOptions, Memory, MemoryError, MemoryOptions, Notes,
};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A folder for each key, or one if there are no keys to tell users by; none without `--memory`.
#[derive(Default)]
pub(super) struct Memories(Vec<Arc<Mutex<Memory>>>);

impl Memories {
    pub(super) fn open(args: &ServerArgs, keys: &[String]) -> Result<Memories, Failure> {
        let Some(folder) = &args.memory else {
            return Ok(Memories::default());
        };
        let open = |folder: PathBuf| -> Result<Arc<Mutex<Memory>>, Failure> {
            let memory = Memory::open(&folder, &MemoryOptions::default())?;
            Ok(Arc::new(Mutex::new(memory)))
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

    /// Whether nothing is remembered for anybody.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What metrics tell of each.
    pub(super) fn figures(&self) -> Vec<Remembered> {
        let memories = self.0.iter().enumerate();
        let figures = memories.map(|(tenant, memory)| {
            let memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
            let version = memory.versions().last();
            Remembered {
                tenant,
                n_entries: memory.entries().len(),
                n_new: memory.n_unconsolidated(),
                bytes: memory.bytes(),
                adapter: version.map(|of| (of.number, of.n_asked, of.n_said)),
            }
        });
        figures.collect()
    }

    /// The caller's.
    pub(super) fn of(&self, caller: &Caller) -> Option<MutexGuard<'_, Memory>> {
        let memory = self.0.get(caller.tenant.parse().unwrap_or(0))?;
        Some(memory.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Begins to consolidate while there are no requests, if --memory-control says so.
    pub(super) fn consolidate(
        &self,
        args: &ServerArgs,
        engine: &Engine,
        tokenizer: &Tokenizer,
    ) -> Result<Option<IdleConsolidation>, Failure> {
        let Some(control) = &args.memory_control else {
            return Ok(None);
        };
        let control = tokenizer.encode(&read_text(control)?, true, false);
        let tell = |_, outcome: Result<ConsolidationReport, MemoryError>| match outcome {
            Ok(report) => note(match report.outcome {
                Ok(number) => format!(
                    "--memory: adapter {number} is in effect: it answers {} of {} questions that were kept from it",
                    report.n_said, report.n_asked
                ),
                Err(why) => format!("--memory: no adapter takes effect: {why}"),
            }),
            Err(error) => note(format!("--memory: nothing was consolidated: {error}")),
        };
        let (all, options) = (self.0.clone(), IdleOptions::default());
        Ok(Some(IdleConsolidation::start(
            all, engine, control, options, tell,
        )?))
    }

    /// What the model has learnt of the caller's memory.
    pub(super) fn adapter(
        &self,
        caller: &Caller,
        model: &Model,
    ) -> Result<Option<Arc<Adapter>>, ApiError> {
        let Some(mut memory) = self.of(caller) else {
            return Ok(None);
        };
        let adapter = memory.adapter(model);
        adapter.map_err(|error| ApiError::internal(error.to_string()))
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
