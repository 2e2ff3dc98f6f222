//! Failures of GPUs.

#[cfg(feature = "metal")]
use crate::gpu::metal::MetalError;

/// Why a GPU cannot compute a model, or did not compute a pass.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// A GPU of Apple's.
    #[cfg(feature = "metal")]
    #[error(transparent)]
    Metal(#[from] MetalError),
}
