//! A memory of what was taught and corrected: texts with verdicts, found again by their words and
//! by vectors of a model, and told to the model as a few marked notes before a question. Once there
//! is enough of it, it can be learnt by an adapter ([`Consolidation`]), which is judged before it takes
//! effect.
//!
//! ```
//! use ruvllm::Model;
//! use ruvllm_learn::memory::{Memory, MemoryOptions, NewEntry, NotesOptions, Vectors};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # std::env::set_current_dir("..")?;
//! let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
//! let vectors = Vectors::new(&model.engine()?)?;
//! let folder = std::env::temp_dir().join(format!("ruvllm-doc-memory-{}", std::process::id()));
//! let mut memory = Memory::open(&folder, &MemoryOptions::default())?;
//! let text = "The gauge at Ossen Weir is read by Talvo Renning.";
//! memory.remember(NewEntry::taught(text), Some(&vectors))?;
//! let tokenizer = model.tokenizer().ok_or("no tokenizer")?;
//! let question = "Who reads the gauge at Ossen Weir?";
//! let notes = memory.notes(question, Some(&vectors), tokenizer, &NotesOptions::default())?;
//! assert!(notes.text.contains("Talvo Renning") && notes.n_tokens <= 96);
//! let prompt = format!("{}{question}", notes.text);
//! memory.forget(notes.numbers[0])?;
//! assert!(memory.entries().is_empty());
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok(()) }
//! ```

mod consolidation;
mod continued;
mod entry;
mod error;
mod folder;
mod idle;
mod index;
mod notes;
mod question_file;
mod questions;
mod vectors;
mod versions;
mod words;

pub use consolidation::{
    Consolidation, ConsolidationOptions, ConsolidationProgress, ConsolidationReport, Stage,
};
pub use entry::{Entry, NewEntry, Verdict};
pub use error::MemoryError;
pub use folder::{Memory, MemoryOptions};
pub use idle::{IdleConsolidation, IdleOptions};
pub use index::Hit;
pub use notes::{Notes, NotesOptions};
pub use questions::{QuestionAnswer, QuestionOptions};
pub use vectors::Vectors;
pub use versions::Version;
