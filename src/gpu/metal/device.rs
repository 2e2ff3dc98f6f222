//! The system's Metal GPU and its memory.
//!
//! A pass is one command buffer with one encoder, whose kernels may overlap between the barriers of
//! the plan. Memory is shared with the CPU, which waits for the end of a pass before it accesses
//! it.

#![allow(unsafe_code)] // calls of Metal

use crate::gguf::Gguf;
use crate::gpu::GpuError;
use crate::gpu::check::{Handle, Stage};
use crate::gpu::kernels::{Dispatch, Element, THREADGROUP_MEMORY};
use crate::gpu::{Call, Gpu};
use crate::kv::{DeviceMemory, PageMemory};
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSError, NSString};
use objc2_metal::{
    MTLBarrierScope, MTLBuffer, MTLCommandBuffer, MTLCommandEncoder, MTLCommandQueue,
    MTLComputeCommandEncoder, MTLComputePipelineState, MTLCreateSystemDefaultDevice, MTLDevice,
    MTLDispatchType, MTLGPUFamily, MTLLibrary, MTLResource, MTLResourceOptions, MTLResourceUsage,
    MTLSize,
};
use std::collections::HashMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

type Pipeline = Retained<ProtocolObject<dyn MTLComputePipelineState>>;

/// Alignment in bytes of addresses and lengths of aliased memory: a page of Apple's CPUs.
pub const PAGE_BYTES: usize = 16384;

/// A GPU with its library of kernels.
pub struct Device {
    device: Retained<ProtocolObject<dyn MTLDevice>>,
    queue: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    library: Retained<ProtocolObject<dyn MTLLibrary>>,
    /// Kernels by full name, compiled for this GPU on first use.
    pipelines: Mutex<HashMap<String, Pipeline>>,
    pages: Arc<Pages>,
}

fn message(error: &NSError) -> String {
    error.localizedDescription().to_string()
}

impl Device {
    /// The system's GPU; `None` if it has none.
    ///
    /// # Errors
    /// [`GpuError`] if the GPU lacks what the kernels need (Metal 3, Apple family 7: M1, A14 and
    /// later), or the library cannot be compiled or loaded.
    pub fn system() -> Result<Option<Device>, GpuError> {
        let Some(device) = MTLCreateSystemDefaultDevice() else {
            return Ok(None);
        };
        let enough = device.supportsFamily(MTLGPUFamily::Metal3)
            && device.supportsFamily(MTLGPUFamily::Apple7)
            && device.maxThreadgroupMemoryLength() >= THREADGROUP_MEMORY as usize;
        if !enough {
            return Err(GpuError::TooOld {
                device: device.name().to_string(),
            });
        }
        let queue = device
            .newCommandQueue()
            .ok_or(GpuError::OutOfMemory { bytes: 0 })?;
        let library = library(&device).map_err(|e| GpuError::Library {
            message: message(&e),
        })?;
        Ok(Some(Device {
            device,
            queue,
            library,
            pipelines: Mutex::default(),
            pages: Arc::default(),
        }))
    }

    /// Bytes of memory that the GPU can use without slowing down.
    pub fn memory_limit(&self) -> u64 {
        self.device.recommendedMaxWorkingSetSize()
    }

    /// Families whose features it has.
    pub fn families(&self) -> Vec<&'static str> {
        let families = [
            (MTLGPUFamily::Apple7, "Apple7"),
            (MTLGPUFamily::Apple8, "Apple8"),
            (MTLGPUFamily::Apple9, "Apple9"),
            (MTLGPUFamily::Apple10, "Apple10"),
            (MTLGPUFamily::Metal3, "Metal3"),
            (MTLGPUFamily::Metal4, "Metal4"),
        ];
        families
            .into_iter()
            .filter(|(family, _)| self.device.supportsFamily(*family))
            .map(|(_, name)| name)
            .collect()
    }

    /// Makes an uninitialised buffer.
    fn memory(&self, bytes: usize) -> Result<Buffer, GpuError> {
        let options = MTLResourceOptions::StorageModeShared;
        // Metal has no buffers of zero bytes.
        let buffer = self
            .device
            .newBufferWithLength_options(bytes.max(16), options);
        let buffer = buffer.ok_or(GpuError::OutOfMemory { bytes })?;
        Ok(Buffer {
            raw: Raw(buffer),
            start: 0,
            len: bytes,
            file: None,
        })
    }

    /// Makes a read-only buffer that aliases a part of a file's memory, without copying. `None` if
    /// Metal refuses.
    fn alias(&self, gguf: &Gguf, bytes: &[u8]) -> Option<Buffer> {
        let start = bytes.as_ptr() as usize % PAGE_BYTES;
        let all = (start + bytes.len())
            .next_multiple_of(PAGE_BYTES)
            .max(PAGE_BYTES);
        let first = NonNull::from(bytes).cast::<u8>();
        // SAFETY: maps begin and end at pages, so that the pages in which the bytes lie are mapped
        // whole.
        let page = unsafe { first.sub(start) };
        let options = MTLResourceOptions::StorageModeShared;
        // SAFETY: whole pages, which stay mapped as long as the buffer's `file` does; without a
        // deallocator Metal frees nothing, and kernels only read weights.
        let buffer = unsafe {
            self.device
                .newBufferWithBytesNoCopy_length_options_deallocator(
                    page.cast(),
                    all,
                    options,
                    None,
                )
        };
        Some(Buffer {
            raw: Raw(buffer?),
            start,
            len: bytes.len(),
            file: Some(gguf.clone()),
        })
    }

    fn pipeline(&self, name: &str) -> Result<Pipeline, GpuError> {
        let mut pipelines = self
            .pipelines
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = pipelines.get(name) {
            return Ok(pipeline.clone());
        }
        let failed = |message: String| GpuError::Kernel {
            kernel: name.to_string(),
            message,
        };
        let function = self.library.newFunctionWithName(&NSString::from_str(name));
        let function = function.ok_or_else(|| failed("it is not in the library".to_string()))?;
        let pipeline = self
            .device
            .newComputePipelineStateWithFunction_error(&function);
        let pipeline = pipeline.map_err(|e| failed(message(&e)))?;
        pipelines.insert(name.to_string(), pipeline.clone());
        Ok(pipeline)
    }
}

type Library = Result<Retained<ProtocolObject<dyn MTLLibrary>>, Retained<NSError>>;

/// The library that `build.rs` compiled.
#[cfg(metallib)]
fn library(device: &ProtocolObject<dyn MTLDevice>) -> Library {
    static BYTES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/ruvllm.metallib"));
    device.newLibraryWithData_error(&dispatch2::DispatchData::from_static_bytes(BYTES))
}

/// The library, compiled from source now: `build.rs` found no compiler.
#[cfg(not(metallib))]
fn library(device: &ProtocolObject<dyn MTLDevice>) -> Library {
    use objc2_metal::{MTLCompileOptions, MTLLanguageVersion};
    let options = MTLCompileOptions::new();
    options.setLanguageVersion(MTLLanguageVersion::Version3_0);
    #[allow(deprecated)] // its replacement is not in macOS 13
    options.setFastMathEnabled(false);
    let source = NSString::from_str(include_str!(concat!(env!("OUT_DIR"), "/ruvllm.metal")));
    device.newLibraryWithSource_options_error(&source, Some(&options))
}

/// A Metal buffer that can be sent between threads.
struct Raw(Retained<ProtocolObject<dyn MTLBuffer>>);

// SAFETY: Metal's buffers may be used and released on any thread; their contents are only accessed
// through `&mut` and `&` of their owners, and by passes, which are waited for.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Raw {
    /// Pointer to the byte at offset `start`.
    ///
    /// # Safety
    /// The buffer must have that many bytes.
    unsafe fn at(&self, start: usize) -> NonNull<u8> {
        // SAFETY: as the caller promises.
        unsafe { self.0.contents().cast::<u8>().add(start) }
    }
}

/// Memory of the GPU, shared with the CPU.
pub struct Buffer {
    raw: Raw,
    /// Offset in Metal's buffer.
    start: usize,
    len: usize,
    /// The file that an alias points into, kept mapped.
    file: Option<Gguf>,
}

impl Buffer {
    /// Writes `bytes` at `offset`.
    ///
    /// # Panics
    /// If they do not fit, or the buffer aliases a file.
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        let fits = offset <= self.len && bytes.len() <= self.len - offset;
        assert!(fits && self.file.is_none(), "Buffer::write: out of bounds");
        // SAFETY: within the buffer, as was checked.
        let to = unsafe { self.raw.at(offset) };
        // SAFETY: as above; the buffer is exclusive, and passes are waited for before their borrow
        // of it ends.
        unsafe { to.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
    }
}

/// Single kernels on the system's GPU, for [`check`](super::check).
pub struct DeviceStage<'a> {
    device: &'a Device,
    buffers: Vec<Result<Buffer, GpuError>>,
}

impl<'a> DeviceStage<'a> {
    /// A stage without buffers.
    pub fn new(device: &'a Device) -> DeviceStage<'a> {
        DeviceStage {
            device,
            buffers: Vec::new(),
        }
    }

    fn buffer(&self, handle: Handle) -> Result<&Buffer, String> {
        self.buffers[handle.0 as usize]
            .as_ref()
            .map_err(GpuError::to_string)
    }
}

impl Stage for DeviceStage<'_> {
    fn empty(&mut self, bytes: u64, _align: u64) -> Handle {
        self.buffers.push(self.device.memory(bytes as usize));
        Handle(self.buffers.len() as u32 - 1)
    }

    fn fill(&mut self, buffer: Handle, offset: u64, data: &[u8]) {
        // If the buffer could not be allocated, reading it reports the error.
        if let Ok(buffer) = &mut self.buffers[buffer.0 as usize] {
            buffer.write(offset as usize, data);
        }
    }

    fn point(&mut self, into: Handle, offset: u64, target: Handle) {
        let address = self
            .buffer(target)
            .map_or(0, |target| target.raw.0.gpuAddress());
        self.fill(into, offset, &address.to_le_bytes());
    }

    fn read(&mut self, buffer: Handle) -> Result<Vec<u8>, String> {
        let buffer = self.buffer(buffer)?;
        let mut bytes = vec![0; buffer.len];
        self.device.read(buffer, &mut bytes);
        Ok(bytes)
    }

    fn run(
        &mut self,
        dispatch: &Dispatch,
        buffers: &[Handle],
        pages: &[Handle],
    ) -> Result<(), String> {
        let buffers = buffers
            .iter()
            .map(|&b| Ok((self.buffer(b)?, 0)))
            .collect::<Result<Vec<_>, String>>()?;
        for (&(buffer, _), &len) in buffers.iter().zip(&dispatch.lens) {
            assert!(
                buffer.len as u64 >= len,
                "{}: a short buffer",
                dispatch.kernel()
            );
        }
        let pages = pages
            .iter()
            .map(|&page| self.buffer(page))
            .collect::<Result<Vec<_>, String>>()?;
        let call = Call {
            dispatch,
            buffers,
            barrier: false,
        };
        self.device
            .submit(&[call], &mut pages.into_iter().map(|page| &page.raw))
            .map_err(|e| e.to_string())
    }
}

/// A page of keys and values in GPU memory.
struct Page {
    buffer: Arc<Raw>,
    len: usize,
    address: u64,
    /// The device's table of pages.
    pages: Arc<Pages>,
}

/// Pages by address.
type Pages = Mutex<HashMap<u64, Arc<Raw>>>;

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Page {{ address: {:#x}, len: {} }}",
            self.address, self.len
        )
    }
}

impl PageMemory for Page {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the buffer has that many bytes.
        let first = unsafe { self.buffer.at(0) };
        // SAFETY: as above; no pass writes to a page while it is read here, since passes write only
        // to pages of sequences that they borrow.
        unsafe { std::slice::from_raw_parts(first.as_ptr(), self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the buffer has that many bytes.
        let first = unsafe { self.buffer.at(0) };
        // SAFETY: as above; `self` is exclusive, and a pass borrows the sequence that holds it.
        unsafe { std::slice::from_raw_parts_mut(first.as_ptr(), self.len) }
    }

    fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.pages
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.address);
    }
}

impl Gpu for Device {
    type Buffer = Buffer;

    const LANGUAGE: &'static str = "Metal";

    fn name(&self) -> String {
        self.device.name().to_string()
    }

    fn buffer(&self, bytes: usize) -> Result<Buffer, GpuError> {
        self.memory(bytes)
    }

    fn tensor(&self, gguf: &Gguf, index: usize) -> Result<(Buffer, bool), GpuError> {
        let bytes = gguf.data(&gguf.tensors()[index]);
        // Files that are not mapped, whose tensors are not aligned, or that Metal refuses to alias,
        // are copied.
        if gguf.is_mapped()
            && bytes
                .as_ptr()
                .addr()
                .is_multiple_of(Element::Weights.align() as usize)
            && let Some(buffer) = self.alias(gguf, bytes)
        {
            return Ok((buffer, false));
        }
        let mut buffer = self.memory(bytes.len())?;
        self.write(&mut buffer, bytes)?;
        Ok((buffer, true))
    }

    fn can_embed(&self, _bytes: u64) -> bool {
        true
    }

    fn shares_memory(&self) -> bool {
        true
    }

    fn page_limit(&self) -> u64 {
        u64::MAX
    }

    fn page(&self, bytes: usize) -> Option<DeviceMemory> {
        let buffer = Arc::new(self.memory(bytes).ok()?.raw);
        let address = buffer.0.gpuAddress();
        let pages = Arc::clone(&self.pages);
        pages
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(address, Arc::clone(&buffer));
        Some(DeviceMemory::Shared(Box::new(Page {
            buffer,
            len: bytes,
            address,
            pages,
        })))
    }

    fn len(&self, buffer: &Buffer) -> usize {
        buffer.len
    }

    fn write(&self, buffer: &mut Buffer, bytes: &[u8]) -> Result<(), GpuError> {
        buffer.write(0, bytes);
        Ok(())
    }

    fn run(
        &self,
        calls: &[Call<'_, Buffer>],
        pages: &[u64],
        reads: &mut [(&Buffer, &mut [u8])],
    ) -> Result<(), GpuError> {
        let known = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        let pages: Vec<Arc<Raw>> = pages
            .iter()
            .filter_map(|address| known.get(address))
            .cloned()
            .collect();
        drop(known);
        self.submit(calls, &mut pages.iter().map(|page| &**page))?;
        for (buffer, bytes) in reads {
            self.read(buffer, bytes);
        }
        Ok(())
    }
}

impl Device {
    /// Reads from the start of a buffer.
    fn read(&self, buffer: &Buffer, bytes: &mut [u8]) {
        assert!(bytes.len() <= buffer.len, "Device::read: out of bounds");
        // SAFETY: within the buffer, as was checked.
        let from = unsafe { buffer.raw.at(buffer.start) };
        // SAFETY: as above; passes are waited for before their borrow of the buffer ends.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut *bytes).cast(), bytes.len()) };
    }

    /// Runs calls, whose kernels access `pages` by their addresses, and waits for them.
    fn submit(
        &self,
        calls: &[Call<'_, Buffer>],
        pages: &mut dyn Iterator<Item = &Raw>,
    ) -> Result<(), GpuError> {
        // Looked up before anything is encoded, so that an error leaves no encoder behind.
        let pipelines = calls
            .iter()
            .map(|call| self.pipeline(&call.dispatch.kernel()))
            .collect::<Result<Vec<_>, _>>()?;
        autoreleasepool(|_| {
            let commands = self
                .queue
                .commandBuffer()
                .ok_or(GpuError::OutOfMemory { bytes: 0 })?;
            let encoder =
                commands.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent);
            let encoder = encoder.ok_or(GpuError::OutOfMemory { bytes: 0 })?;
            for page in pages {
                let resource: &ProtocolObject<dyn MTLResource> = ProtocolObject::from_ref(&*page.0);
                encoder
                    .useResource_usage(resource, MTLResourceUsage::Read | MTLResourceUsage::Write);
            }
            for (call, pipeline) in calls.iter().zip(&pipelines) {
                if call.barrier {
                    encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
                }
                encode(&encoder, call, pipeline);
            }
            encoder.endEncoding();
            commands.commit();
            commands.waitUntilCompleted();
            match commands.error() {
                Some(error) => Err(GpuError::Pass {
                    message: message(&error),
                }),
                None => Ok(()),
            }
        })
    }
}

fn encode(
    encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>,
    call: &Call<'_, Buffer>,
    pipeline: &ProtocolObject<dyn MTLComputePipelineState>,
) {
    let d = call.dispatch;
    encoder.setComputePipelineState(pipeline);
    for (index, (buffer, offset)) in call.buffers.iter().enumerate() {
        let offset = buffer.start + *offset as usize;
        // SAFETY: the buffer is borrowed until the pass has finished, and has the length in the
        // table of kernels, as plans ensure.
        unsafe { encoder.setBuffer_offset_atIndex(Some(&buffer.raw.0), offset, index) };
    }
    let args = NonNull::from(d.args.as_slice()).cast();
    // SAFETY: Metal copies the bytes; the index follows those of the buffers.
    unsafe { encoder.setBytes_length_atIndex(args, d.args.len(), call.buffers.len()) };
    let size = |[width, height, depth]: [u32; 3]| MTLSize {
        width: width as usize,
        height: height as usize,
        depth: depth as usize,
    };
    encoder.dispatchThreadgroups_threadsPerThreadgroup(size(d.grid), size([d.threads, 1, 1]));
}
