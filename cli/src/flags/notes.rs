//! What was told in earlier conversations, and the notes that a question gets of it.

use crate::io::Failure;
use ruvllm::{Session, Tokenizer};
use ruvllm_learn::memory::{Memory, MemoryError, MemoryOptions, Notes, NotesOptions};
use std::path::PathBuf;

/// Where what was told is remembered.
#[derive(clap::Args)]
#[command(next_help_heading = "Learning")]
pub(crate) struct MemoryArgs {
    /// Remember in this folder, across conversations, what /remember and /correct say; what is like
    /// a message is told to the model before it (see `ruvllm memory`), and what was consolidated is known without
    #[arg(id = "memory", long = "memory", value_name = "DIR")]
    folder: Option<PathBuf>,
}

impl MemoryArgs {
    /// The memory of the folder, which is made if it does not exist; none without the flag. What the
    /// model has learnt of it takes effect in the session.
    pub(crate) fn open(&self, session: &mut Session) -> Result<Option<Memory>, Failure> {
        let Some(folder) = &self.folder else {
            return Ok(None);
        };
        let mut memory = Memory::open(folder, &MemoryOptions::default())?;
        if let Some(adapter) = memory.adapter(session.model())? {
            session.adapters().attach(adapter, 1.0)?;
        }
        Ok(Some(memory))
    }
}

/// Notes for a question by its words, which cost no pass of a model; with `notes.text` empty,
/// nothing is like it.
pub(crate) fn notes(
    memory: &mut Memory,
    question: &str,
    tokenizer: &Tokenizer,
) -> Result<Notes, MemoryError> {
    memory.notes(question, None, tokenizer, &NotesOptions::default())
}
