//! Failures of GPUs.

/// Why a GPU cannot compute a model, or did not compute a pass.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// There is no GPU.
    #[error("this machine has no such GPU; compute on the CPU (Device::Cpu, -ngl 0)")]
    NoDevice,
    /// The model, or a request, needs a kernel that does not exist.
    #[error("there is no GPU kernel for {what}; compute on the CPU (Device::Cpu, -ngl 0)")]
    Unsupported {
        /// The missing feature.
        what: String,
    },
    /// An Apple GPU lacks features that the kernels need.
    #[error("{device} is too old: Metal 3 and Apple family 7 (M1, A14) or later are needed")]
    TooOld {
        /// Name of the GPU.
        device: String,
    },
    /// The library of kernels cannot be compiled or loaded.
    #[error("the library of kernels cannot be loaded: {message}")]
    Library {
        /// The system's message.
        message: String,
    },
    /// A kernel is missing, or the GPU cannot run it.
    #[error("the kernel {kernel} cannot be loaded: {message}")]
    Kernel {
        /// Its full name.
        kernel: String,
        /// The system's message.
        message: String,
    },
    /// There is not enough memory.
    #[error("the GPU has no memory for {bytes} bytes")]
    OutOfMemory {
        /// Bytes requested; 0 for a queue or a pass.
        bytes: usize,
    },
    /// A buffer is shorter than required by the table of kernels.
    #[error("buffer {index} of the kernel {kernel} has {found} bytes instead of {needed}")]
    ShortBuffer {
        /// Full name of the kernel.
        kernel: String,
        /// Index of the buffer.
        index: usize,
        /// Bytes required.
        needed: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// The GPU is gone, with all that its memory held: its driver was restarted, or it was removed.
    #[error("the GPU is lost: {message}; compute on the CPU (Device::Cpu, -ngl 0)")]
    Lost {
        /// The system's message.
        message: String,
    },
    /// The GPU did not finish a pass.
    #[error("the GPU stopped: {message}")]
    Pass {
        /// The system's message.
        message: String,
    },
}
