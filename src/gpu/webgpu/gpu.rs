//! The [`Gpu`] of the shared runner on a [`Device`]: its pages lie in slabs.

use crate::gguf::{Gguf, TensorInfo};
use crate::gpu::kernels::{Dispatch, MATMUL, MATVEC, MatmulArgs, MatvecArgs};
use crate::gpu::slabs::{SlabDevice, Slabs};
use crate::gpu::webgpu::buffer::Buffer;
use crate::gpu::webgpu::device::Device;
use crate::gpu::{Call, Gpu, GpuError};
use crate::kv::DeviceMemory;
use std::sync::Arc;

/// A kernel with its buffers, each from a byte on.
type Step<'a> = (Dispatch, Vec<(&'a Buffer, u64)>);

/// Raised with every change of what kernels compute: keys and values of before are then computed
/// again.
const KERNELS: u32 = 2;

/// Most bytes of a slab: offsets in words have 32 bits, and large buffers are rarely to be had.
const MAX_SLAB: u64 = 1 << 30;

/// A buffer; or several, of which each has some rows of weights that are longer than what a kernel
/// can see of a buffer.
pub struct Memory {
    /// First byte of each part, and its buffer.
    parts: Vec<(u64, Buffer)>,
    len: usize,
}

impl Memory {
    fn whole(buffer: Buffer) -> Memory {
        Memory {
            len: buffer.len(),
            parts: vec![(0, buffer)],
        }
    }

    /// The part with the byte at `offset`, how many bytes begin there, and where in the part.
    fn part(&self, offset: u64) -> (&Buffer, u64, u64) {
        let i = self.parts.partition_point(|(first, _)| *first <= offset) - 1;
        let (first, buffer) = &self.parts[i];
        (
            buffer,
            buffer.len() as u64 - (offset - first),
            offset - first,
        )
    }
}

/// A GPU with the memory of its pages.
pub struct WebGpu {
    slabs: Slabs<Device>,
    /// Most bytes of weights in a buffer.
    most: u64,
}

impl WebGpu {
    /// A GPU without pages.
    pub fn new(device: Device) -> WebGpu {
        let most = device.max_binding();
        WebGpu::with_weights_of(device, most)
    }

    /// One whose buffers have at most so many bytes of weights, whatever the device can do.
    pub fn with_weights_of(device: Device, most: u64) -> WebGpu {
        let max = device.max_binding().min(MAX_SLAB);
        let n = device.max_slabs() as usize;
        WebGpu {
            slabs: Slabs::new(device, max, n),
            most,
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

/// A product with weights of several parts, for each part and row of activations: rows of
/// activations have the same bits alone. `None` for a kernel that cannot be split.
fn split<'a>(call: &Call<'a, Memory>) -> Option<Vec<Step<'a>>> {
    let d = call.dispatch;
    // Both have the same arguments.
    let args: MatvecArgs = match d.name {
        "matvec" | "matmul" => bytemuck::pod_read_unaligned(&d.args),
        _ => return None,
    };
    let [(w, w_at), (x, x_at), (y, y_at)] = call.buffers[..] else {
        return None;
    };
    let (mut steps, mut first) = (Vec::new(), 0);
    while first < args.n_out {
        let row_bytes = u64::from(args.row_bytes);
        let (weights, left, at) = w.part(w_at + u64::from(first) * row_bytes);
        let n_out = u32::try_from(left / row_bytes).map_or(u32::MAX, |n| n.min(args.n_out - first));
        if n_out == 0 {
            return None; // parts end with rows
        }
        for row in 0..args.n_rows {
            let (n_in, n_rows, row_bytes) = (args.n_in, 1, args.row_bytes);
            let dispatch = if d.name == "matvec" {
                let args = MatvecArgs {
                    n_in,
                    n_out,
                    n_rows,
                    row_bytes,
                };
                MATVEC.dispatch(d.format, 1, &args)
            } else {
                let args = MatmulArgs {
                    n_in,
                    n_out,
                    n_rows,
                    row_bytes,
                };
                MATMUL.dispatch(d.format, 0, &args)
            };
            let x_at = x_at + 4 * u64::from(row) * u64::from(n_in);
            let y_at = y_at + 4 * (u64::from(row) * u64::from(args.n_out) + u64::from(first));
            let (x, y) = (&x.parts[0].1, &y.parts[0].1);
            steps.push((dispatch, vec![(weights, at), (x, x_at), (y, y_at)]));
        }
        first += n_out;
    }
    Some(steps)
}

impl Gpu for WebGpu {
    type Buffer = Memory;

    const LANGUAGE: &'static str = "WebGPU";

    fn name(&self) -> String {
        let info = self.device().info();
        // Saved keys and values name the device, and have other bits with matrices.
        let matrices = info.matrix.map_or("", |_| ", f16 matrices");
        format!(
            "{}, {}, kernels {KERNELS}{matrices}",
            info.name, info.backend
        )
    }

    fn buffer(&self, bytes: usize) -> Result<Memory, GpuError> {
        if bytes as u64 > self.device().max_binding() {
            return Err(GpuError::OutOfMemory { bytes });
        }
        Ok(Memory::whole(self.device().memory(bytes)?))
    }

    fn tensor(&self, gguf: &Gguf, index: usize) -> Result<(Memory, bool), GpuError> {
        let (tensor, most) = (&gguf.tensors()[index], self.most);
        if tensor.n_bytes <= most {
            return Ok((Memory::whole(self.device().copy_of(gguf, index)?), true));
        }
        let data = gguf.data(tensor);
        let TensorInfo { name, dims, .. } = tensor;
        let n_rows: u64 = dims.iter().skip(1).product();
        let row_bytes = tensor.n_bytes / n_rows.max(1);
        let rows = most / row_bytes.max(1);
        if dims.len() != 2 || rows == 0 {
            return Err(GpuError::Unsupported {
                what: format!(
                    "{name} of {} bytes, as this GPU's kernels see {most} of a buffer",
                    tensor.n_bytes
                ),
            });
        }
        let (mut parts, mut first) = (Vec::new(), 0);
        for bytes in data.chunks((rows * row_bytes) as usize) {
            let buffer = self.device().memory(bytes.len())?;
            self.device().upload(&buffer, 0, bytes)?;
            parts.push((first, buffer));
            first += bytes.len() as u64;
        }
        let len = data.len();
        Ok((Memory { parts, len }, true))
    }

    fn can_embed(&self, bytes: u64) -> bool {
        bytes <= self.most
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

    fn len(&self, buffer: &Memory) -> usize {
        buffer.len
    }

    fn write(&self, buffer: &mut Memory, bytes: &[u8]) -> Result<(), GpuError> {
        // Only weights have several parts.
        self.device().upload(&buffer.parts[0].1, 0, bytes)
    }

    fn run(
        &self,
        calls: &[Call<'_, Memory>],
        _pages: &[u64],
        reads: &mut [(&Memory, &mut [u8])],
    ) -> Result<(), GpuError> {
        let is_split = |call: &Call<'_, Memory>| {
            let bytes = call.dispatch.lens.first();
            call.buffers.first().is_some_and(|(w, at)| {
                w.parts.len() > 1 && bytes.is_some_and(|&bytes| w.part(*at).1 < bytes)
            })
        };
        let pieces = calls
            .iter()
            .map(|call| {
                if !is_split(call) {
                    return Ok(None);
                }
                let steps = split(call).ok_or_else(|| GpuError::Unsupported {
                    what: format!("{} with weights in several buffers", call.dispatch.kernel()),
                });
                steps.map(Some)
            })
            .collect::<Result<Vec<_>, GpuError>>()?;
        let mut steps: Vec<(&Dispatch, Vec<(&Buffer, u64)>)> = Vec::with_capacity(calls.len());
        for (call, pieces) in calls.iter().zip(&pieces) {
            match pieces {
                Some(pieces) => {
                    let pieces = pieces.iter().map(|(d, buffers)| (d, buffers.clone()));
                    steps.extend(pieces);
                }
                None => {
                    let buffers = call.buffers.iter().map(|&(memory, at)| {
                        let (buffer, _, at) = memory.part(at);
                        (buffer, at)
                    });
                    steps.push((call.dispatch, buffers.collect()));
                }
            }
        }
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
            .map(|(memory, bytes)| (&memory.parts[0].1, 0, &mut **bytes))
            .collect();
        self.device().submit(&steps, &bound, &mut reads)
    }
}
