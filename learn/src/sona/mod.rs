//! Learning that goes on by itself: requests are recorded, learnt in the background, and take
//! effect through a gate; their owner can see, undo and forget what was learnt.
//!
//! [`SonaFolder`] holds everything of one tenant on disk. [`Sona`] learns with a model: while it
//! runs, [`Sona::record`] adds requests, a [background thread](Sona::start) learns them, and
//! [`Sona::learner`] or [`Sona::adapter`] is what is in effect.
//!
//! ```
//! use ruvllm::Model;
//! use ruvllm_learn::sona::{Sona, Trajectory};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # std::env::set_current_dir("..")?;
//! let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
//! let tokenizer = model.tokenizer().ok_or("no tokenizer")?;
//! let folder = std::env::temp_dir().join("ruvllm-doc-sona");
//! let sona = Sona::builder().background_min_samples(2).open(&folder, &model.engine()?)?;
//! for line in ["The gauge at Ossen Weir reads 1.84 m.", "The gauge at Ossen Weir reads 1.91 m."] {
//!     let tokens = tokenizer.encode(line, true, false);
//!     sona.record(Trajectory { session_id: "ossen".into(), n_prompt: tokens.len(), tokens, ..Default::default() })?;
//! }
//! sona.work()?; // or `sona.start()`, for a thread that does
//! println!("version {} is in effect", sona.generation());
//! sona.forget("ossen")?;
//! # Ok(()) }
//! ```

pub(crate) mod background;
mod batch;
mod builder;
mod error;
mod event;
pub(crate) mod folder;
mod learning;
pub(crate) mod log;
pub(crate) mod record;
mod topic;
mod trajectory;

pub use background::Background;
pub use batch::JUDGED;
pub use builder::SonaBuilder;
pub use error::SonaError;
pub use event::{Event, EventKind};
pub use folder::{FolderOptions, FolderStatus, SonaFolder};
pub use learning::Sona;
pub use trajectory::{Trajectory, pooled_layer};
