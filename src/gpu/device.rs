//! Operations of a device that runs the kernels of plans: what a language of kernels implements.

use crate::gguf::Gguf;
use crate::gpu::GpuError;
use crate::gpu::kernels::Dispatch;
use crate::kv::DeviceMemory;

/// Operations of a GPU that [`GpuRunner`](crate::gpu::GpuRunner) uses. They happen
/// in the order of their calls.
pub trait Gpu: Send + Sync {
    /// A buffer in its memory.
    type Buffer: Send + Sync;

    /// Name of the language of its kernels, for messages.
    const LANGUAGE: &'static str;

    /// Name, as the system gives it.
    fn name(&self) -> String;

    /// Makes an uninitialised buffer.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`].
    fn buffer(&self, bytes: usize) -> Result<Self::Buffer, GpuError>;

    /// Makes a read-only buffer with a tensor of a file: the file's memory itself, if possible.
    /// Also returns whether it is a copy.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`].
    fn tensor(&self, gguf: &Gguf, index: usize) -> Result<(Self::Buffer, bool), GpuError>;

    /// Whether its kernel can look up rows of an embedding table of this many bytes.
    fn can_embed(&self, bytes: u64) -> bool;

    /// Whether the CPU accesses the memory of its pages.
    fn shares_memory(&self) -> bool;

    /// Allocates memory for a page of keys and values, or for the part of one that is the GPU's if
    /// memory is not shared.
    fn page(&self, bytes: usize) -> Option<DeviceMemory>;

    /// Most bytes of all pages.
    fn page_limit(&self) -> u64;

    /// Length of a buffer in bytes.
    fn len(&self, buffer: &Self::Buffer) -> usize;

    /// Writes to the start of a buffer, which must be long enough.
    ///
    /// # Errors
    /// [`GpuError`] if the GPU is lost.
    fn write(&self, buffer: &mut Self::Buffer, bytes: &[u8]) -> Result<(), GpuError>;

    /// Runs a pass, waits for it, and reads from the start of buffers, which must be long enough.
    /// `pages` are the addresses of all pages that its kernels access.
    ///
    /// # Errors
    /// [`GpuError`] if there is no memory, a kernel cannot be loaded, or the GPU stops.
    fn run(
        &self,
        calls: &[Call<'_, Self::Buffer>],
        pages: &[u64],
        reads: &mut [(&Self::Buffer, &mut [u8])],
    ) -> Result<(), GpuError>;
}

/// A kernel with its buffers. Only plans make these, which ensures that a kernel reads only what
/// was written.
#[derive(Debug)]
#[non_exhaustive]
pub struct Call<'a, B> {
    /// The kernel and its sizes.
    pub dispatch: &'a Dispatch,
    /// Buffers before the arguments, with byte offsets; they have the lengths given in the table
    /// of kernels.
    pub buffers: Vec<(&'a B, u64)>,
    /// Whether everything before must be finished first. Calls between two such may overlap.
    pub barrier: bool,
}

impl<B> Clone for Call<'_, B> {
    fn clone(&self) -> Self {
        Call {
            dispatch: self.dispatch,
            buffers: self.buffers.clone(),
            barrier: self.barrier,
        }
    }
}
