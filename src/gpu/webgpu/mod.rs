//! Passes on any GPU, through `wgpu`: Vulkan, Direct3D 12 or Metal. Shaders are in
//! `src/wgsl_shaders`, which [`shaders`] composes to a module per kernel instance; [`device`] runs
//! them, and [`WebGpu`] is what the shared runner runs on.

mod adapter;
mod buffer;
pub mod device;
mod gpu;
mod grid;
mod group;
mod joined;
mod pace;
pub mod shaders;
mod stage;

pub use adapter::{AdapterInfo, adapters};
pub use buffer::Buffer;
pub use device::{Device, Options};
pub use gpu::{Memory, WebGpu};
pub use stage::DeviceStage;

use crate::gpu::{GpuError, GpuRunner, Runner, check, kernels};
use crate::model::Model;
use std::sync::Arc;

/// Runs each case of [`check`] on adapter `index` of [`adapters`], and reports its name and result.
///
/// # Errors
/// As [`Device::open`].
pub fn check_device(
    index: usize,
    mut report: impl FnMut(&'static str, Result<(), String>),
) -> Result<(), GpuError> {
    let mut run = |device: &Device, name, case: &check::Case| {
        let mut stage = DeviceStage::new(device, device.max_slabs().min(2));
        let mut checker = check::Checker::new(&mut stage, kernels::FORMATS, true);
        report(name, (case.run)(&mut checker));
    };
    let device = Device::open(index, Options::default())?;
    for case in check::CASES {
        run(&device, case.name, case);
    }
    let options = Options {
        matrices: true,
        ..Options::default()
    };
    let device = Device::open(index, options)?;
    if device.info().matrix.is_some() {
        for case in check::CASES {
            match case.name {
                "matmul" => run(&device, "matmul with f16 matrices", case),
                "matmul_experts" => run(&device, "matmul_experts with f16 matrices", case),
                _ => {}
            }
        }
    }
    Ok(())
}

/// A runner for the last `n_layers` layers of a model, on an adapter of this number or on the first
/// that is not the CPU.
///
/// # Errors
/// [`GpuError::NoDevice`] if there is none, and as [`GpuRunner::new`].
pub(crate) fn open(
    model: &Model,
    n_layers: usize,
    adapter: Option<usize>,
) -> Result<Arc<dyn Runner>, GpuError> {
    let first = || adapters().iter().position(|adapter| !adapter.is_cpu);
    let index = adapter.or_else(first).ok_or(GpuError::NoDevice)?;
    let options = Options {
        matrices: std::env::var_os("RUVLLM_GPU_MATRICES").is_some_and(|value| value == "1"),
        ..Options::default()
    };
    let gpu = WebGpu::new(Device::open(index, options)?);
    Ok(Arc::new(GpuRunner::new(gpu, model, n_layers)?))
}
