//! Single kernels on a device, for the checks.

use crate::gpu::check::{Handle, Stage};
use crate::gpu::kernels::{Access, Dispatch};
use crate::gpu::webgpu::buffer::Buffer;
use crate::gpu::webgpu::device::Device;
use crate::gpu::webgpu::shaders::declaration;

/// What a byte is that nobody wrote: floats of it are NaN.
const UNWRITTEN: u8 = 0xFF;
/// Bytes before and between the pages of a slab.
const GAP: usize = 64;

/// A [`Stage`] that keeps all contents on the CPU's side and copies them for each call. Pages lie
/// alternately in as many buffers as it is given, behind each other.
pub struct DeviceStage<'a> {
    device: &'a Device,
    slabs: u32,
    buffers: Vec<Vec<u8>>,
    /// Place of each page: its buffer and the byte where it begins.
    places: Vec<(Handle, usize, usize)>,
    /// Bytes of each slab.
    lens: Vec<usize>,
}

impl<'a> DeviceStage<'a> {
    /// A stage whose pages lie in `slabs` buffers.
    pub fn new(device: &'a Device, slabs: u32) -> DeviceStage<'a> {
        DeviceStage {
            device,
            slabs,
            buffers: Vec::new(),
            places: Vec::new(),
            lens: vec![GAP; slabs as usize],
        }
    }
}

impl DeviceStage<'_> {
    /// Seconds that a kernel takes, of `n` times in one pass after another one. The buffers need no
    /// contents that make sense, as long as the kernel ends.
    ///
    /// # Errors
    /// A description of the failure.
    pub fn seconds(
        &self,
        dispatch: &Dispatch,
        buffers: &[Vec<u8>],
        n: usize,
    ) -> Result<f64, crate::gpu::GpuError> {
        let mut made = Vec::new();
        for bytes in buffers {
            let buffer = self.device.memory(bytes.len())?;
            self.device.upload(&buffer, 0, bytes)?;
            made.push(buffer);
        }
        let bound: Vec<(&Buffer, u64)> = made.iter().map(|buffer| (buffer, 0)).collect();
        let calls = vec![(dispatch, bound); n];
        let mut seconds = 0.0;
        for _ in 0..2 {
            let mut last = [0; 4];
            let start = std::time::Instant::now();
            let mut read = (&made[made.len() - 1], 0, &mut last[..]);
            self.device
                .submit(&calls, &[], std::slice::from_mut(&mut read))?;
            seconds = start.elapsed().as_secs_f64() / n as f64;
        }
        Ok(seconds)
    }
}

impl Stage for DeviceStage<'_> {
    fn multiplies_halves(&self) -> bool {
        self.device.info().matrix.is_some()
    }

    fn empty(&mut self, bytes: u64, _align: u64) -> Handle {
        self.buffers.push(vec![UNWRITTEN; bytes as usize]);
        Handle(self.buffers.len() as u32 - 1)
    }

    fn fill(&mut self, buffer: Handle, offset: u64, data: &[u8]) {
        self.buffers[buffer.0 as usize][offset as usize..][..data.len()].copy_from_slice(data);
    }

    fn point(&mut self, into: Handle, offset: u64, target: Handle) {
        let slab = self.places.len() % self.slabs as usize;
        let start = self.lens[slab];
        let len = self.buffers[target.0 as usize].len();
        self.lens[slab] = (start + len).next_multiple_of(16) + GAP;
        self.places.push((target, slab, start));
        let address = slab as u64 | (start as u64 / 4) << 32;
        self.fill(into, offset, &address.to_le_bytes());
    }

    fn read(&mut self, buffer: Handle) -> Result<Vec<u8>, String> {
        Ok(self.buffers[buffer.0 as usize].clone())
    }

    fn run(
        &mut self,
        dispatch: &Dispatch,
        buffers: &[Handle],
        pages: &[Handle],
    ) -> Result<(), String> {
        let upload = |bytes: &[u8]| {
            let buffer = self.device.memory(bytes.len())?;
            self.device.upload(&buffer, 0, bytes)?;
            Ok(buffer)
        };
        let made = buffers
            .iter()
            .map(|b| upload(&self.buffers[b.0 as usize]))
            .collect::<Result<Vec<Buffer>, crate::gpu::GpuError>>()
            .map_err(|e| e.to_string())?;
        let mut slabs = Vec::new();
        for (slab, &len) in self.lens.iter().enumerate() {
            let mut bytes = vec![UNWRITTEN; len];
            for (page, _, start) in self.places.iter().filter(|place| place.1 == slab) {
                let contents = &self.buffers[page.0 as usize];
                bytes[*start..][..contents.len()].copy_from_slice(contents);
            }
            slabs.push((upload(&bytes).map_err(|e| e.to_string())?, bytes));
        }
        let call = (dispatch, made.iter().map(|buffer| (buffer, 0)).collect());
        let bound: Vec<&Buffer> = slabs.iter().map(|(buffer, _)| buffer).collect();
        self.device
            .submit(&[call], &bound, &mut [])
            .map_err(|e| e.to_string())?;

        let d = declaration(dispatch.name).ok_or("no such kernel")?;
        for ((&handle, buffer), (.., access)) in buffers.iter().zip(&made).zip(&d.buffers) {
            if *access != Access::Read {
                let bytes = &mut self.buffers[handle.0 as usize];
                self.device
                    .download(buffer, bytes)
                    .map_err(|e| e.to_string())?;
            }
        }
        if !pages.is_empty() {
            for (slab, (buffer, before)) in slabs.iter().enumerate() {
                let mut bytes = vec![0; before.len()];
                self.device
                    .download(buffer, &mut bytes)
                    .map_err(|e| e.to_string())?;
                let mut outside = before.clone();
                for (page, _, start) in self.places.iter().filter(|place| place.1 == slab) {
                    let to = &mut self.buffers[page.0 as usize];
                    let len = to.len();
                    to.copy_from_slice(&bytes[*start..][..len]);
                    outside[*start..][..len].copy_from_slice(&bytes[*start..][..len]);
                }
                if outside != bytes {
                    return Err("out of bounds: write between pages".to_string());
                }
            }
        }
        Ok(())
    }
}
