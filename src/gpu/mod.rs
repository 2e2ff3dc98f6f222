//! GPUs that compute forward passes.
//!
//! An engine knows a GPU as a [`Runner`]. The kernels' table, the plan of a pass and the runner
//! that executes plans are shared by all languages of kernels; a folder for each language has the
//! device that it runs on.

#[cfg(any(feature = "metal", feature = "webgpu"))]
pub mod check;
#[cfg(any(feature = "metal", feature = "webgpu"))]
mod device;
mod error;
#[cfg(any(feature = "metal", feature = "webgpu"))]
mod gpu_runner;
#[cfg(any(feature = "metal", feature = "webgpu"))]
pub mod kernels;
#[cfg(feature = "metal")]
pub mod metal;
#[cfg(any(feature = "metal", feature = "webgpu"))]
pub mod plan;
mod runner;
#[cfg(any(feature = "metal", feature = "webgpu"))]
pub mod slabs;
#[cfg(any(feature = "metal", feature = "webgpu"))]
mod supports;
#[cfg(feature = "webgpu")]
pub mod webgpu;

#[cfg(any(feature = "metal", feature = "webgpu"))]
pub use device::{Call, Gpu};
pub use error::GpuError;
#[cfg(any(feature = "metal", feature = "webgpu"))]
pub use gpu_runner::GpuRunner;
pub use runner::{Batch, BatchOutputs, BatchSlot, Runner};
