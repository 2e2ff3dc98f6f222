//! What a dispatch binds and runs: memory and compiled kernels.

use crate::gpu::kernels::Dispatch;
use crate::gpu::webgpu::shaders::Instance;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A call with the buffers that it binds, each from a byte on.
pub(super) type Bound<'a> = (&'a Dispatch, Vec<(&'a Buffer, u64)>);

/// A compiled kernel.
pub(super) struct Pipeline {
    pub(super) number: u64,
    pub(super) instance: Instance,
    pub(super) raw: wgpu::ComputePipeline,
    pub(super) layout: wgpu::BindGroupLayout,
}

/// Memory of a GPU.
#[derive(Debug)]
pub struct Buffer {
    pub(super) raw: wgpu::Buffer,
    pub(super) number: u64,
    pub(super) len: usize,
    pub(super) dropped: Arc<Mutex<Vec<u64>>>,
}

impl Buffer {
    /// Its length in bytes.
    #[allow(clippy::len_without_is_empty)] // memory, not a collection
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        locked(&self.dropped).push(self.number);
    }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
