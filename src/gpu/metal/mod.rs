//! Passes on the GPU of Apple machines. Shaders are in `src/metal_shaders`, [`kernels`] describes
//! their buffers, [`plan`] lists the kernels of a pass, and [`MetalRunner`] runs passes on any
//! [`Gpu`]: `device::Device` on Apple's systems, an emulated one in `tests/metal`.
//!
//! No Mac has run this yet. The emulated GPU cannot show whether Apple's compiler accepts the
//! shaders, whether calls of Metal do what their documentation says, real times, and fast math,
//! which the library is compiled without. [`check_device`] runs every kernel against the scalar
//! level on a real GPU.

pub mod check;
#[cfg(target_vendor = "apple")]
pub mod device;
mod error;
pub mod kernels;
pub mod plan;
mod runner;
mod supports;

pub use error::MetalError;
pub use runner::MetalRunner;

use crate::gguf::Gguf;
use crate::gpu::Runner;
use crate::kv::PageMemory;
use crate::model::Model;
use kernels::Dispatch;
use std::sync::Arc;

/// What `ruvllm doctor` reports about a GPU.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Name of the GPU.
    pub name: String,
    /// Bytes of memory that it can use without slowing down.
    pub memory_limit: u64,
    /// Families of GPUs whose features it has, by their names in Metal.
    pub families: Vec<&'static str>,
}

/// The system's GPU, if it has one.
///
/// # Errors
/// [`MetalError`] if it is too old, or the library of kernels cannot be compiled or loaded.
pub fn device_info() -> Result<Option<DeviceInfo>, MetalError> {
    #[cfg(target_vendor = "apple")]
    if let Some(device) = device::Device::system()? {
        let (memory_limit, families) = (device.memory_limit(), device.families());
        return Ok(Some(DeviceInfo {
            name: device.name(),
            memory_limit,
            families,
        }));
    }
    Ok(None)
}

/// Runs each case of [`check`] on the system's GPU and reports its name and result.
///
/// # Errors
/// [`MetalError::NoDevice`] if the system has none, and as [`device_info`].
pub fn check_device(
    mut report: impl FnMut(&'static str, Result<(), String>),
) -> Result<(), MetalError> {
    #[cfg(target_vendor = "apple")]
    if let Some(device) = device::Device::system()? {
        for case in check::CASES {
            let mut stage = device::DeviceStage::new(&device);
            let mut checker = check::Checker::new(&mut stage, kernels::FORMATS, true);
            report(case.name, (case.run)(&mut checker));
        }
        return Ok(());
    }
    let _ = &mut report;
    Err(MetalError::NoDevice)
}

/// A runner on the system's GPU for the last `n_layers` layers of a model.
///
/// # Errors
/// [`MetalError::NoDevice`] if the system has none, and as [`MetalRunner::new`].
pub(crate) fn open(model: &Model, n_layers: usize) -> Result<Arc<dyn Runner>, MetalError> {
    #[cfg(target_vendor = "apple")]
    if let Some(device) = device::Device::system()? {
        return Ok(Arc::new(MetalRunner::new(device, model, n_layers)?));
    }
    let _ = (model, n_layers);
    Err(MetalError::NoDevice)
}

/// Operations of a GPU that [`MetalRunner`] uses. Memory is shared with the CPU.
pub trait Gpu: Send + Sync {
    /// A buffer in its memory.
    type Buffer: Send + Sync;

    /// Name, as the system gives it.
    fn name(&self) -> String;

    /// Makes an uninitialised buffer.
    ///
    /// # Errors
    /// [`MetalError::OutOfMemory`].
    fn buffer(&self, bytes: usize) -> Result<Self::Buffer, MetalError>;

    /// Makes a read-only buffer with a tensor of a file: the file's memory itself, if possible.
    /// Also returns whether it is a copy.
    ///
    /// # Errors
    /// [`MetalError::OutOfMemory`].
    fn tensor(&self, gguf: &Gguf, index: usize) -> Result<(Self::Buffer, bool), MetalError>;

    /// Allocates memory for a page of keys and values.
    fn page(&self, bytes: usize) -> Option<Box<dyn PageMemory>>;

    /// Length of a buffer in bytes.
    fn len(&self, buffer: &Self::Buffer) -> usize;

    /// Writes to the start of a buffer, which must be long enough.
    ///
    /// # Errors
    /// [`MetalError`] if the GPU is lost.
    fn write(&self, buffer: &mut Self::Buffer, bytes: &[u8]) -> Result<(), MetalError>;

    /// Reads from the start of a buffer, which must be long enough.
    ///
    /// # Errors
    /// [`MetalError`] if the GPU is lost.
    fn read(&self, buffer: &Self::Buffer, bytes: &mut [u8]) -> Result<(), MetalError>;

    /// Runs a pass and waits for it. `pages` are the addresses of all pages that its kernels
    /// access.
    ///
    /// # Errors
    /// [`MetalError`] if there is no memory, a kernel cannot be loaded, or the GPU stops.
    fn run(&self, calls: &[Call<'_, Self::Buffer>], pages: &[u64]) -> Result<(), MetalError>;
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
