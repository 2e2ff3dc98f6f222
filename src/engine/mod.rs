//! The engine: sequences, the rows of a forward pass, memory, threads.

pub(crate) mod adapters;
pub(crate) mod batch;
pub(crate) mod context_shift;
pub(crate) mod drafter_memory;
pub(crate) mod encode;
#[allow(clippy::module_inception)]
pub(crate) mod engine;
mod engine_options;
pub(crate) mod error;
mod fallback;
pub(crate) mod hidden_states;
pub(crate) mod identity;
mod key_centres;
pub(crate) mod memory_plan;
pub(crate) mod offload;
pub(crate) mod options;
mod output_head;
mod prefix_reuse;
pub(crate) mod row_times;
pub(crate) mod sequence;
mod shift;
mod turns;

pub use crate::layers::Outputs;
pub use crate::system::default_threads;
pub use adapters::AdapterId;
pub use batch::Slot;
pub use drafter_memory::DrafterMemory;
pub use engine_options::{EngineOptions, MAX_THREADS, SharedThreads};
pub(crate) use error::SessionError;
pub use memory_plan::{EngineMemory, MemoryPlan, PlanOptions, Recommendation};
pub use options::{CacheMode, CachedTokens, DEFAULT_CTX, PrefixOptions, Reuse};
pub use output_head::OutputHead;
pub use sequence::Sequence;
pub use turns::TurnCounts;
