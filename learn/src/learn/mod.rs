//! Learning during use: a small adapter after the final norm, caches of observed text, a mixture
//! that is never much worse than the model alone, and a bound on what is forgotten.
//!
//! A [`Learner`] is attached to a session as its [`OutputHook`](ruvllm::compute::OutputHook).

mod control;
mod error;
mod experts;
mod head;
mod inner_layers;
mod knn;
mod layers;
mod learner;
pub(crate) mod learning;
mod mixture;
mod moments;
mod ngram;
mod optimiser;
pub(crate) mod rein;
mod slices;
mod state;
pub(crate) mod teacher;
mod topics;
pub(crate) mod windows;

pub use error::LearnError;
pub use experts::Losses;
pub use head::MAX_RANK;
pub use learner::{Learner, LearnerOptions};
pub use learning::Learning;
pub use topics::TopicStatus;

pub(crate) use control::UPDATE_TOKENS;
pub(crate) use experts::Experts;
pub(crate) use head::{HeadRows, Ranks};
pub(crate) use inner_layers::Layers;
pub(crate) use moments::softmax;
pub(crate) use optimiser::{Evidence, HeadLearner, TrainingSignal, random};
pub(crate) use slices::{Pause, Slices};
pub(crate) use state::{number, put, topics_in, values};
