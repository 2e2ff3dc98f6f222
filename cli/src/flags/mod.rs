//! Groups of flags that several commands have, and what comes of them.

#[cfg(feature = "grammar")]
mod grammar;
mod learning;
pub(crate) mod llama_cpp;
mod model;
mod sampling;
mod speculation;

#[cfg(feature = "grammar")]
pub(crate) use grammar::GrammarArgs;
#[cfg(feature = "chat")]
pub(crate) use learning::Learning;
pub(crate) use learning::{Folder, LearningArgs};
pub(crate) use model::*;
pub(crate) use sampling::SamplingArgs;
pub(crate) use speculation::{Drafted, SpeculationArgs, speculate};
