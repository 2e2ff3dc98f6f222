//! What measures: a file for each subcommand of `ruvllm bench`, and what several of them share.

pub(crate) mod batch;
mod behaviour;
pub(crate) mod divergence;
pub(crate) mod feedback;
pub(crate) mod formats;
#[cfg(feature = "vision")]
pub(crate) mod images;
pub(crate) mod kernels;
pub(crate) mod learning;
mod lists;
mod models;
pub(crate) mod perplexity;
pub(crate) mod probed;
pub(crate) mod replay;
mod scenarios;
pub(crate) mod speed;
pub(crate) mod target;
pub(crate) mod tasks;
