//! The adapters of this machine, and what they offer.

use crate::gpu::webgpu::shaders::Matrix;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// What is known about an adapter without opening it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AdapterInfo {
    /// Name of the GPU and of its driver.
    pub name: String,
    /// Interface that reaches it: Vulkan, Dx12, Metal.
    pub backend: String,
    /// Whether it is the CPU, which a program then uses better directly.
    pub is_cpu: bool,
    /// Whether its memory is its own.
    pub is_discrete: bool,
    /// Largest buffer, in bytes.
    pub max_buffer: u64,
    /// Largest part of a buffer that a kernel sees, in bytes.
    pub max_binding: u64,
    /// Buffers per kernel.
    pub max_buffers: u32,
    /// Optional features that kernels could use, by their names in `wgpu`.
    pub features: Vec<String>,
    /// Of a device that uses them, the cooperative matrices that multiply prompts by weights, except
    /// those in `f32`: both are rounded to `f16`.
    pub matrix: Option<Matrix>,
}

/// Waits for a future of `wgpu`, which outside browsers is ready, or becomes so without being
/// woken.
pub(super) fn ready<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    loop {
        match future
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::yield_now(),
        }
    }
}

/// Adapters of this machine, of every interface but OpenGL, which has no compute shaders to speak
/// of. On Windows, Vulkan comes first.
pub(super) fn raw_adapters() -> Vec<wgpu::Adapter> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends: wgpu::Backends::VULKAN | wgpu::Backends::DX12 | wgpu::Backends::METAL,
        flags: wgpu::InstanceFlags::empty(),
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    let mut adapters = ready(instance.enumerate_adapters(wgpu::Backends::all()));
    adapters.retain(|a| a.get_downlevel_capabilities().is_webgpu_compliant());
    adapters.sort_by_key(|a| match a.get_info().device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    });
    adapters
}

pub(super) fn described(adapter: &wgpu::Adapter) -> AdapterInfo {
    let (info, limits) = (adapter.get_info(), adapter.limits());
    let features = adapter.features().iter_names();
    let ours = ["SUBGROUP", "SHADER_F16", "EXPERIMENTAL_COOPERATIVE_MATRIX"];
    AdapterInfo {
        name: match info.driver.as_str() {
            "" => info.name,
            driver => format!("{} ({driver})", info.name),
        },
        backend: info.backend.to_string(),
        is_cpu: info.device_type == wgpu::DeviceType::Cpu,
        is_discrete: info.device_type == wgpu::DeviceType::DiscreteGpu,
        max_buffer: limits.max_buffer_size,
        max_binding: limits.max_storage_buffer_binding_size,
        max_buffers: limits.max_storage_buffers_per_shader_stage,
        features: features
            .map(|(name, _)| name.to_string())
            .filter(|name| ours.contains(&name.as_str()))
            .collect(),
        matrix: None,
    }
}

/// What reaches the cooperative matrices.
pub(super) const MATRICES: wgpu::Features =
    wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX.union(wgpu::Features::SHADER_F16);

/// The cooperative matrices of an adapter that kernels can use: square ones of `f16` with sums in
/// `f32`, the largest first, by subgroups that always have as many threads.
pub(super) fn matrix(adapter: &wgpu::Adapter) -> Option<Matrix> {
    let (info, limits) = (adapter.get_info(), adapter.limits());
    if !adapter.features().contains(MATRICES) || info.subgroup_min_size != info.subgroup_max_size {
        return None;
    }
    let offered = adapter.cooperative_matrix_properties();
    let found = [16, 8].into_iter().find(|&side| {
        offered.iter().any(|p| {
            (p.m_size, p.n_size, p.k_size) == (side, side, side)
                && p.ab_type == wgpu::CooperativeScalarType::F16
                && p.cr_type == wgpu::CooperativeScalarType::F32
        })
    });
    let matrix = Matrix {
        side: found?,
        subgroup: info.subgroup_max_size,
    };
    let has_room = matrix.workgroup_bytes() <= limits.max_compute_workgroup_storage_size
        && matrix.threads() <= wgpu::Limits::default().max_compute_invocations_per_workgroup;
    (has_room && matrix.fits()).then_some(matrix)
}

/// Adapters of this machine, graphics cards first and the CPU last.
pub fn adapters() -> Vec<AdapterInfo> {
    raw_adapters().iter().map(described).collect()
}
