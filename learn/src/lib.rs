//! Learning during use, and training of adapters, for models that [`ruvllm`] runs.
//!
//! | what | where |
//! |---|---|
//! | a session that learns from text and ratings | [`Learner`], [`Learning`] |
//! | learning in the background, with a history that can be undone | [`sona`] |
//! | adapters trained on examples and preferences | [`train`] |
//! | texts that are found again, with verdicts | [`memory`] |
//! | gain and cost of learning on a text | [`mod@bench`] |
//!
//! It is a guest of the engine: a learner is a session's
//! [`OutputHook`](ruvllm::compute::OutputHook), what is learnt in inner layers is an
//! [`Adapter`](ruvllm::lora::Adapter), and both compute with what `ruvllm` offers to everybody.
//!
//! Memory that cannot be had aborts the process, as elsewhere in Rust, where `ruvllm` itself gives
//! an error.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod bench;
mod clock;
mod learn;
pub mod memory;
pub mod sona;
pub mod train;

pub use learn::{LearnError, Learner, LearnerOptions, Learning, Losses, MAX_RANK, TopicStatus};
