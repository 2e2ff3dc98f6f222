//! The emulator as a [`Gpu`], so that Metal's own runner computes whole passes on it.

use crate::emulator::Emulator;
use ruvllm::gguf::Gguf;
use ruvllm::gpu::GpuError;
use ruvllm::gpu::check::{Handle, Stage};
use ruvllm::gpu::{Call, Gpu};
use ruvllm::kv::{DeviceMemory, PageMemory, SeparateMemory};
use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Alignment of buffers: what Metal gives at least.
const ALIGN: u64 = 16;

/// An emulated GPU. Clones are the same one.
#[derive(Clone)]
pub(crate) struct Emulated(Arc<Inner>);

struct Inner {
    emulator: Mutex<Emulator>,
    /// Pages by address.
    pages: Mutex<HashMap<u64, Handle>>,
    /// Whether the host accesses pages only as it would on a GPU with memory of its own.
    is_separate: bool,
    /// Passes, pages and copies of pages after which there are no more; a failure of a pass is
    /// one of the device, of a page one of memory.
    left: Mutex<Left>,
    /// Calls of the last pass that wait for what comes before.
    barriers: Mutex<Vec<usize>>,
    /// A call of the next passes that does not wait although it should.
    left_out: Mutex<Option<usize>>,
}

/// What still succeeds.
#[derive(Clone, Copy)]
pub(crate) struct Left {
    pub(crate) passes: usize,
    pub(crate) pages: usize,
}

pub(crate) struct Buffer {
    id: Handle,
    len: usize,
}

impl Emulated {
    pub(crate) fn start(program: &Path) -> Emulated {
        Emulated::new(program, false)
    }

    /// One whose pages are in memory of its own.
    pub(crate) fn separate(program: &Path) -> Emulated {
        Emulated::new(program, true)
    }

    fn new(program: &Path, is_separate: bool) -> Emulated {
        Emulated(Arc::new(Inner {
            is_separate,
            left: Mutex::new(Left {
                passes: usize::MAX,
                pages: usize::MAX,
            }),
            emulator: Mutex::new(Emulator::start(program)),
            pages: Mutex::default(),
            barriers: Mutex::default(),
            left_out: Mutex::default(),
        }))
    }

    /// Lets only so much succeed from now on.
    pub(crate) fn limit(&self, left: Left) {
        *self.0.left.lock().unwrap() = left;
    }

    /// Whether it is lost.
    fn lost(&self) -> Result<(), String> {
        match self.0.left.lock().unwrap().passes {
            0 => Err("no passes are left".to_string()),
            _ => Ok(()),
        }
    }

    /// Shuffles the threads of what is run, unless 0.
    pub(crate) fn shuffle(&self, seed: u32) {
        self.0.emulator.lock().unwrap().seed = seed;
    }

    /// Calls of the last pass that wait for what comes before.
    pub(crate) fn barriers(&self) -> Vec<usize> {
        self.0.barriers.lock().unwrap().clone()
    }

    /// Lets a call of the next passes not wait.
    pub(crate) fn leave_out(&self, barrier: Option<usize>) {
        *self.0.left_out.lock().unwrap() = barrier;
    }
}

impl Gpu for Emulated {
    type Buffer = Buffer;

    const LANGUAGE: &'static str = "Metal";

    fn name(&self) -> String {
        "emulated".to_string()
    }

    fn buffer(&self, bytes: usize) -> Result<Buffer, GpuError> {
        Ok(Buffer {
            id: self.0.emulator.lock().unwrap().empty(bytes as u64, ALIGN),
            len: bytes,
        })
    }

    fn tensor(&self, gguf: &Gguf, index: usize) -> Result<(Buffer, bool), GpuError> {
        let data = gguf.data(&gguf.tensors()[index]);
        Ok((
            Buffer {
                id: self.0.emulator.lock().unwrap().filled(data, ALIGN),
                len: data.len(),
            },
            true,
        ))
    }

    fn can_embed(&self, _bytes: u64) -> bool {
        true
    }

    fn shares_memory(&self) -> bool {
        !self.0.is_separate
    }

    fn page_limit(&self) -> u64 {
        u64::MAX
    }

    fn page(&self, bytes: usize) -> Option<DeviceMemory> {
        {
            let mut left = self.0.left.lock().unwrap();
            left.pages = left.pages.checked_sub(1)?;
        }
        static UNIQUE: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "page-{}-{}",
            std::process::id(),
            UNIQUE.fetch_add(1, Ordering::Relaxed)
        );
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let file = std::fs::OpenOptions::new()
            .create_new(true)
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        file.set_len(bytes as u64).unwrap();
        // SAFETY: nobody else knows the file but the emulator, which writes to it only while it
        // runs a pass.
        let memory = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
        let (id, address) = self.0.emulator.lock().unwrap().shared(bytes as u64, &path);
        std::fs::remove_file(path).unwrap();
        self.0.pages.lock().unwrap().insert(address, id);
        let page = Page {
            memory,
            id,
            address,
            gpu: self.clone(),
        };
        Some(if self.0.is_separate {
            DeviceMemory::Separate(Box::new(Separate(page)))
        } else {
            DeviceMemory::Shared(Box::new(page))
        })
    }

    fn len(&self, buffer: &Buffer) -> usize {
        buffer.len
    }

    fn write(&self, buffer: &mut Buffer, bytes: &[u8]) -> Result<(), GpuError> {
        self.0.emulator.lock().unwrap().fill(buffer.id, 0, bytes);
        Ok(())
    }

    fn run(
        &self,
        calls: &[Call<'_, Buffer>],
        pages: &[u64],
        reads: &mut [(&Buffer, &mut [u8])],
    ) -> Result<(), GpuError> {
        self.lost().map_err(|message| GpuError::Lost { message })?;
        self.0.left.lock().unwrap().passes -= 1;
        self.lost().map_err(|message| GpuError::Lost { message })?;
        let pages: Vec<Handle> = pages
            .iter()
            .map(|page| self.0.pages.lock().unwrap()[page])
            .collect();
        let left_out = *self.0.left_out.lock().unwrap();
        let mut barriers = Vec::new();
        let mut emulator = self.0.emulator.lock().unwrap();
        for (i, call) in calls.iter().enumerate() {
            if call.barrier {
                barriers.push(i);
                if left_out != Some(i) {
                    emulator.fence();
                }
            }
            assert_eq!(
                call.buffers.len(),
                call.dispatch.lens.len(),
                "{}: buffers",
                call.dispatch.kernel()
            );
            let parts: Vec<_> = call
                .buffers
                .iter()
                .zip(&call.dispatch.lens)
                .map(|((b, offset), &len)| (b.id, *offset, len))
                .collect();
            for (&(_, offset, len), (buffer, _)) in parts.iter().zip(&call.buffers) {
                assert!(
                    offset + len <= buffer.len as u64,
                    "{}: a short buffer",
                    call.dispatch.kernel()
                );
            }
            let outcome = emulator.run_parts(call.dispatch, &parts, &pages);
            if let Err(message) = outcome {
                emulator.fence();
                return Err(GpuError::Pass { message });
            }
        }
        emulator.fence();
        *self.0.barriers.lock().unwrap() = barriers;
        for (buffer, bytes) in reads {
            let data = emulator.peek(buffer.id);
            bytes.copy_from_slice(&data[..bytes.len()]);
        }
        Ok(())
    }
}

/// A page: a file that both processes map.
struct Page {
    memory: memmap2::MmapMut,
    id: Handle,
    address: u64,
    gpu: Emulated,
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Page {{ address: {:#x} }}", self.address)
    }
}

impl PageMemory for Page {
    fn bytes(&self) -> &[u8] {
        &self.memory
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.gpu
            .0
            .emulator
            .lock()
            .unwrap()
            .take_for_written(self.id);
        &mut self.memory
    }

    fn address(&self) -> u64 {
        self.address
    }
}

/// The same, where the host has no access but by copying.
struct Separate(Page);

impl fmt::Debug for Separate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl SeparateMemory for Separate {
    fn address(&self) -> u64 {
        self.0.address
    }

    fn read(&self, bytes: &mut [u8]) -> Result<(), String> {
        self.0.gpu.lost()?;
        bytes.copy_from_slice(&self.0.memory);
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.0.gpu.lost()?;
        self.0.bytes_mut().copy_from_slice(bytes);
        Ok(())
    }

    fn copy(&mut self, from: u64) -> Result<(), String> {
        let gpu = self.0.gpu.clone();
        let from = gpu.0.pages.lock().unwrap()[&from];
        let bytes = gpu.0.emulator.lock().unwrap().peek(from);
        self.write(&bytes)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.gpu.0.pages.lock().unwrap().remove(&self.address);
        self.gpu.0.emulator.lock().unwrap().forget(self.id);
    }
}
