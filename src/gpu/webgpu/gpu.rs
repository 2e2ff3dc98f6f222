//! The [`Gpu`] of the shared runner on a [`Device`]: its pages lie in slabs.

use crate::gguf::Gguf;
use crate::gpu::kernels::Dispatch;
use crate::gpu::slabs::{SlabDevice, Slabs};
use crate::gpu::webgpu::device::{Buffer, Device};
use crate::gpu::{Call, Gpu, GpuError};
use crate::kv::DeviceMemory;
use std::sync::Arc;

/// Most bytes of a slab: offsets in words have 32 bits, and large buffers are rarely to be had.
const MAX_SLAB: u64 = 1 << 30;

/// A GPU with the memory of its pages.
pub struct WebGpu {
    slabs: Slabs<Device>,
}

impl WebGpu {
    /// A GPU without pages.
    pub fn new(device: Device) -> WebGpu {
        let max = device.max_binding().min(MAX_SLAB);
        let n = device.max_slabs() as usize;
        WebGpu {
            slabs: Slabs::new(device, max, n),
        }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.slabs.device()
    }
}

impl SlabDevice for Device {
    type Slab = Buffer;

    fn slab(&self, bytes: u64) -> Option<Buffer> {
        self.memory(usize::try_from(bytes).ok()?).ok()
    }

    fn read(&self, slab: &Buffer, at: u64, bytes: &mut [u8]) -> Result<(), String> {
        self.download_from(slab, at, bytes)
            .map_err(|e| e.to_string())
    }

    fn write(&self, slab: &Buffer, at: u64, bytes: &[u8]) -> Result<(), String> {
        self.upload(slab, at, bytes).map_err(|e| e.to_string())
    }

    fn copy(&self, from: (&Buffer, u64), to: (&Buffer, u64), bytes: u64) -> Result<(), String> {
        self.copy_part(from, to, bytes).map_err(|e| e.to_string())
    }
}

impl Gpu for WebGpu {
    type Buffer = Buffer;

    const LANGUAGE: &'static str = "WebGPU";

    fn name(&self) -> String {
        let info = self.device().info();
        format!("{}, {}", info.name, info.backend)
    }

    fn buffer(&self, bytes: usize) -> Result<Buffer, GpuError> {
        self.device().memory(bytes)
    }

    fn tensor(&self, gguf: &Gguf, index: usize) -> Result<(Buffer, bool), GpuError> {
        let info = &gguf.tensors()[index];
        if info.n_bytes > self.device().max_binding() {
            return Err(GpuError::Unsupported {
                what: format!(
                    "{} bytes of {}, of which this GPU's kernels see {}",
                    info.n_bytes,
                    info.name,
                    self.device().max_binding()
                ),
            });
        }
        Ok((self.device().copy_of(gguf, index)?, true))
    }

    fn shares_memory(&self) -> bool {
        false
    }

    fn page(&self, bytes: usize) -> Option<DeviceMemory> {
        self.slabs.page(bytes)
    }

    fn page_limit(&self) -> u64 {
        self.slabs.limit()
    }

    fn len(&self, buffer: &Buffer) -> usize {
        buffer.len()
    }

    fn write(&self, buffer: &mut Buffer, bytes: &[u8]) -> Result<(), GpuError> {
        self.device().upload(buffer, 0, bytes)
    }

    fn run(
        &self,
        calls: &[Call<'_, Buffer>],
        _pages: &[u64],
        reads: &mut [(&Buffer, &mut [u8])],
    ) -> Result<(), GpuError> {
        let calls: Vec<(&Dispatch, Vec<(&Buffer, u64)>)> = calls
            .iter()
            .map(|call| (call.dispatch, call.buffers.clone()))
            .collect();
        let slabs = self.slabs.buffers();
        let n = slabs.iter().rposition(Option::is_some).map_or(0, |i| i + 1);
        // A slab that is gone has no pages: any other can stand for it.
        let some = slabs.iter().flatten().next();
        let bound: Vec<&Buffer> = slabs[..n]
            .iter()
            .filter_map(|slab| slab.as_ref().or(some))
            .map(Arc::as_ref)
            .collect();
        let mut reads: Vec<(&Buffer, u64, &mut [u8])> = reads
            .iter_mut()
            .map(|(buffer, bytes)| (*buffer, 0, &mut **bytes))
            .collect();
        self.device().submit(&calls, &bound, &mut reads)
    }
}
