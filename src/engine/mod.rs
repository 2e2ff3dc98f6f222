//! The engine: sequences, the rows of a forward pass, memory, threads.

pub(crate) mod adapters;
pub(crate) mod batch;
pub(crate) mod context_shift;
pub(crate) mod encode;
#[allow(clippy::module_inception)]
pub(crate) mod engine;
mod engine_options;
mod error;
mod fallback;
pub(crate) mod hidden_states;
pub(crate) mod identity;
pub(crate) mod memory_plan;
pub(crate) mod offload;
pub(crate) mod options;
mod output_head;
mod prefix_reuse;
pub(crate) mod row_times;
pub(crate) mod sequence;
pub(crate) mod threads;
mod turns;

pub use crate::layers::Outputs;
pub use adapters::AdapterId;
pub use batch::Slot;
pub use engine::Engine;
pub use engine_options::{EngineOptions, MAX_THREADS, SharedThreads};
pub use error::SessionError;
pub use memory_plan::{EngineMemory, MemoryPlan, PlanOptions, Recommendation};
pub use options::{
    CacheMode, CachedTokens, CancelToken, DEFAULT_CTX, PrefixOptions, Reuse, SessionOptions,
};
pub use output_head::OutputHead;
pub use sequence::Sequence;
pub use threads::default_threads;
