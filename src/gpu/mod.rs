//! GPUs that compute forward passes: the interface, and a folder for each language of kernels.

mod error;
#[cfg(feature = "metal")]
pub mod metal;
mod runner;

pub use error::GpuError;
pub use runner::{Batch, BatchOutputs, BatchSlot, Runner};
