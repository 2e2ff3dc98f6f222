//! Passes on the GPU of Apple machines. Shaders are in `src/metal_shaders`; `device::Device` is the
//! [`Gpu`](crate::gpu::Gpu) on Apple's systems, an emulated one is in `tests/metal`.
//!
//! No Mac has run this yet. The emulated GPU cannot show whether Apple's compiler accepts the
//! shaders, whether calls of Metal do what their documentation says, real times, and fast math,
//! which the library is compiled without. [`check_device`] runs every kernel against the scalar
//! level on a real GPU.

#[cfg(target_vendor = "apple")]
pub mod device;

use crate::gpu::{GpuError, Runner};
#[cfg(target_vendor = "apple")]
use crate::gpu::{GpuRunner, check, kernels};
use crate::model::Model;
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
/// [`GpuError`] if it is too old, or the library of kernels cannot be compiled or loaded.
pub fn device_info() -> Result<Option<DeviceInfo>, GpuError> {
    #[cfg(target_vendor = "apple")]
    if let Some(device) = device::Device::system()? {
        let (memory_limit, families) = (device.memory_limit(), device.families());
        return Ok(Some(DeviceInfo {
            name: crate::gpu::Gpu::name(&device),
            memory_limit,
            families,
        }));
    }
    Ok(None)
}

/// Runs each case of [`check`](crate::gpu::check) on the system's GPU and reports its name and result.
///
/// # Errors
/// [`GpuError::NoDevice`] if the system has none, and as [`device_info`].
pub fn check_device(
    mut report: impl FnMut(&'static str, Result<(), String>),
) -> Result<(), GpuError> {
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
    Err(GpuError::NoDevice)
}

/// A runner on the system's GPU for the last `n_layers` layers of a model.
///
/// # Errors
/// [`GpuError::NoDevice`] if the system has none, and as [`GpuRunner::new`].
pub(crate) fn open(model: &Model, n_layers: usize) -> Result<Arc<dyn Runner>, GpuError> {
    #[cfg(target_vendor = "apple")]
    if let Some(device) = device::Device::system()? {
        return Ok(Arc::new(GpuRunner::new(device, model, n_layers)?));
    }
    let _ = (model, n_layers);
    Err(GpuError::NoDevice)
}
