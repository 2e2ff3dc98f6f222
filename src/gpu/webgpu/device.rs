//! A GPU through `wgpu`: adapters, buffers, compiled kernels, passes.
//!
//! A pass is a few submissions, each a compute pass; `wgpu` puts barriers between dispatches. The
//! arguments are written at once, to one buffer of which each dispatch sees 256 bytes; what a
//! dispatch binds is kept for later passes with the same buffers. The CPU waits for a pass only
//! when it reads a result, or submits the next but one.

#![allow(unsafe_code)] // shaders without checks

use crate::gguf::Gguf;
use crate::gpu::GpuError;
use crate::gpu::kernels::Access;
use crate::gpu::webgpu::adapter::{AdapterInfo, MATRICES, described, matrix, raw_adapters, ready};
use crate::gpu::webgpu::buffer::{Bound, Buffer, Pipeline, locked};
use crate::gpu::webgpu::grid::grid;
use crate::gpu::webgpu::group::{Group, Joins, Known, instance};
use crate::gpu::webgpu::pace::Pace;
use crate::gpu::webgpu::shaders::{Instance, declaration};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Bytes of the arguments' buffer per dispatch: the alignment of uniform buffers that WebGPU
/// promises.
const ARGS_BYTES: usize = 256;
/// Bytes that are uploaded at a time.
const UPLOAD: usize = 32 << 20;
/// Most dispatches per submission.
const PART: usize = 96;
/// Dispatches of the first submission, for which the GPU waits. Each has half as many again as the one
/// before, so that the CPU encodes it while the GPU computes that one.
const FIRST_PART: usize = 24;
/// Alignment of what is mapped for the CPU.
const MAP_ALIGNMENT: u64 = wgpu::MAP_ALIGNMENT;
/// Bytes behind the end of a buffer that kernels may read, without using their values.
const SPARE: u64 = 16;

/// How a device is opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Kernels check the bounds of buffers and arrays, as those of a web page would. Otherwise
    /// only what the driver checks by itself is checked.
    pub checked: bool,
    /// Nothing above the limits that every adapter has.
    pub default_limits: bool,
    /// Prompts are multiplied by cooperative matrices, rounded to `f16`, where the adapter has them.
    pub matrices: bool,
}

/// A GPU with its compiled kernels. Clones are the same one.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    device: wgpu::Device,
    queue: wgpu::Queue,
    info: AdapterInfo,
    limits: wgpu::Limits,
    options: Options,
    pipelines: Mutex<HashMap<Instance, Arc<Pipeline>>>,
    changes: Mutex<Vec<(String, String)>>,
    /// See [`Device::force_lanes`].
    lanes: AtomicU32,
    /// See [`Device::force_outs`].
    outs: AtomicU32,
    /// See [`Device::group_products`].
    group: AtomicU32,
    /// See [`Device::join_calls`].
    join: AtomicBool,
    /// Layout of the arguments' binding.
    args_layout: wgpu::BindGroupLayout,
    passes: Mutex<Passes>,
    /// Numbers of buffers that no longer exist.
    dropped: Arc<Mutex<Vec<u64>>>,
    next: AtomicU64,
    /// First failure that no call returned: the device is lost, or `wgpu` refuses something.
    failure: Arc<Mutex<Option<GpuError>>>,
}

/// What bindings depend on: the number of the kernel, and those of the buffers with their offsets.
type Key = (u64, Vec<(u64, u64)>);

/// What passes keep for later ones.
#[derive(Default)]
struct Passes {
    /// The arguments' buffer and what it contains.
    args: Option<(wgpu::Buffer, wgpu::BindGroup)>,
    written: Vec<u8>,
    /// The dispatches of the last pass.
    known: Vec<Known>,
    bound: HashMap<Key, wgpu::BindGroup>,
    /// Number of bindings that were made.
    made: u64,
    /// Where results are copied to for the CPU.
    staging: Option<wgpu::Buffer>,
    /// What is copied within a buffer.
    between: Option<wgpu::Buffer>,
    submitted: Option<wgpu::SubmissionIndex>,
    pace: Pace,
}

impl Device {
    /// Opens adapter `index` of [`adapters`](crate::gpu::webgpu::adapters).
    ///
    /// # Errors
    /// [`GpuError::NoDevice`] if there is none, [`GpuError::Library`] if it cannot be opened.
    pub fn open(index: usize, options: Options) -> Result<Device, GpuError> {
        let adapters = raw_adapters();
        let adapter = adapters.get(index).ok_or(GpuError::NoDevice)?;
        let (offered, mut limits) = (adapter.limits(), wgpu::Limits::default());
        if !options.default_limits {
            limits.max_buffer_size = offered.max_buffer_size;
            limits.max_storage_buffer_binding_size = offered.max_storage_buffer_binding_size;
            limits.max_storage_buffers_per_shader_stage =
                offered.max_storage_buffers_per_shader_stage.min(16);
            limits.min_storage_buffer_offset_alignment =
                offered.min_storage_buffer_offset_alignment;
        }
        let mut descriptor = wgpu::DeviceDescriptor::default();
        let matrix = matrix(adapter).filter(|_| options.matrices);
        if let Some(matrix) = matrix {
            limits.max_compute_workgroup_storage_size = limits
                .max_compute_workgroup_storage_size
                .max(matrix.workgroup_bytes());
            descriptor.required_features = MATRICES;
            // SAFETY: `wgpu` asks to accept bugs of its experimental features. Kernels use of them only
            // products of matrices from and to workgroup memory, within its bounds and where all
            // threads come by; `tests/webgpu` runs them.
            descriptor.experimental_features = unsafe { wgpu::ExperimentalFeatures::enabled() };
        }
        descriptor.required_limits = limits.clone();
        let (device, queue) =
            ready(adapter.request_device(&descriptor)).map_err(|e| GpuError::Library {
                message: e.to_string(),
            })?;
        Ok(Device::of(
            device,
            queue,
            AdapterInfo {
                matrix,
                ..described(adapter)
            },
            limits,
            options,
        ))
    }

    fn of(
        device: wgpu::Device,
        queue: wgpu::Queue,
        info: AdapterInfo,
        limits: wgpu::Limits,
        options: Options,
    ) -> Device {
        let failure = Arc::new(Mutex::new(None));
        let failed = Arc::clone(&failure);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            locked(&failed).get_or_insert_with(|| match error {
                wgpu::Error::OutOfMemory { .. } => GpuError::OutOfMemory { bytes: 0 },
                error => GpuError::Pass {
                    message: error.to_string(),
                },
            });
        }));
        let lost = Arc::clone(&failure);
        device.set_device_lost_callback(move |_, message| {
            *locked(&lost) = Some(GpuError::Lost { message });
        });
        let args_layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: None,
            entries: &[layout_entry(0, wgpu::BufferBindingType::Uniform, true)],
        });
        Device(Arc::new(Inner {
            device,
            queue,
            info,
            limits,
            options,
            pipelines: Mutex::default(),
            changes: Mutex::default(),
            lanes: AtomicU32::new(0),
            outs: AtomicU32::new(0),
            group: AtomicU32::new(3),
            join: AtomicBool::new(true),
            args_layout,
            passes: Mutex::default(),
            dropped: Arc::default(),
            next: AtomicU64::new(0),
            failure,
        }))
    }

    /// The adapter.
    pub fn info(&self) -> &AdapterInfo {
        &self.0.info
    }

    /// Largest buffer that a kernel can read as a whole, in bytes.
    pub fn max_binding(&self) -> u64 {
        let limits = &self.0.limits;
        limits
            .max_storage_buffer_binding_size
            .min(limits.max_buffer_size - SPARE)
            .min(u64::from(u32::MAX))
    }

    /// Most buffers in which the pages of a pass may lie: what the kernel with the most other
    /// buffers, the attention of prompts with six, leaves.
    pub fn max_slabs(&self) -> u32 {
        (self.0.limits.max_storage_buffers_per_shader_stage - 6).min(4)
    }

    /// Lets as many threads share a row of weights in products of few rows, 32, 64 or 128, instead
    /// of a number that suits the shape; 0 undoes that.
    pub fn force_lanes(&self, lanes: u32) {
        self.0.lanes.store(lanes, Ordering::Relaxed);
        locked(&self.0.passes).known.clear();
    }

    /// Computes up to this many products, 1 to 3, by one dispatch, 3 unless this is called. No bit
    /// depends on it.
    pub fn group_products(&self, most: u32) {
        self.0.group.store(most, Ordering::Relaxed);
        locked(&self.0.passes).known.clear();
    }

    /// Lets each team of threads take as many rows of weights in products of one row, 4 or 8, instead
    /// of a number that suits the shape; 0 undoes that. No bit depends on it.
    pub fn force_outs(&self, outs: u32) {
        self.0.outs.store(outs, Ordering::Relaxed);
        locked(&self.0.passes).known.clear();
    }

    /// Computes calls together for which there is a kernel, unless this is called with `false`. No
    /// bit depends on it.
    pub fn join_calls(&self, join: bool) {
        self.0.join.store(join, Ordering::Relaxed);
        locked(&self.0.passes).known.clear();
    }

    /// Number of dispatches of the last pass.
    pub fn dispatches(&self) -> usize {
        locked(&self.0.passes).known.len()
    }

    /// Number of bindings that passes made, which does not grow with passes of the same shape.
    pub fn bindings_made(&self) -> u64 {
        locked(&self.0.passes).made
    }

    /// Gives the device up, as if it was lost.
    pub fn destroy(&self) {
        self.0.device.destroy();
    }

    fn number(&self) -> u64 {
        self.0.next.fetch_add(1, Ordering::Relaxed)
    }

    /// The failure since the last call, if there was one; a lost device stays lost.
    fn check(&self) -> Result<(), GpuError> {
        match locked(&self.0.failure).as_ref() {
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        }
    }

    /// Makes a buffer with undefined contents.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`]; [`GpuError::Pass`] if the device is lost.
    pub fn memory(&self, bytes: usize) -> Result<Buffer, GpuError> {
        let raw = self.raw(
            bytes as u64 + SPARE,
            wgpu::BufferUsages::STORAGE
                | wgpu::BufferUsages::COPY_SRC
                | wgpu::BufferUsages::COPY_DST,
        )?;
        Ok(Buffer {
            raw,
            number: self.number(),
            len: bytes,
            dropped: Arc::clone(&self.0.dropped),
        })
    }

    fn raw(&self, bytes: u64, usage: wgpu::BufferUsages) -> Result<wgpu::Buffer, GpuError> {
        self.check()?;
        let refused = GpuError::OutOfMemory {
            bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
        };
        if bytes > self.0.limits.max_buffer_size {
            return Err(refused);
        }
        let no_memory = self
            .0
            .device
            .push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let raw = self.0.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: bytes.next_multiple_of(wgpu::COPY_BUFFER_ALIGNMENT),
            usage,
            mapped_at_creation: false,
        });
        if ready(no_memory.pop()).is_some() {
            return Err(refused);
        }
        self.check()?;
        Ok(raw)
    }

    /// Writes to a part of a buffer, which must be long enough; `offset` is a multiple of 4.
    ///
    /// # Errors
    /// [`GpuError::Pass`] if the device is lost.
    pub fn upload(&self, to: &Buffer, offset: u64, bytes: &[u8]) -> Result<(), GpuError> {
        for (i, bytes) in bytes.chunks(UPLOAD).enumerate() {
            let at = offset + (i * UPLOAD) as u64;
            let whole = bytes.len() / 4 * 4;
            self.0.queue.write_buffer(&to.raw, at, &bytes[..whole]);
            if whole < bytes.len() {
                let mut last = [0; 4];
                last[..bytes.len() - whole].copy_from_slice(&bytes[whole..]);
                self.0.queue.write_buffer(&to.raw, at + whole as u64, &last);
            }
            if bytes.len() == UPLOAD {
                let submitted = self.0.queue.submit([]);
                self.wait(submitted)?;
            }
        }
        self.check()
    }

    /// Makes a buffer with a tensor of a file.
    ///
    /// # Errors
    /// As [`Device::memory`].
    pub fn copy_of(&self, gguf: &Gguf, index: usize) -> Result<Buffer, GpuError> {
        let data = gguf.data(&gguf.tensors()[index]);
        let buffer = self.memory(data.len())?;
        self.upload(&buffer, 0, data)?;
        Ok(buffer)
    }

    fn wait(&self, submission: wgpu::SubmissionIndex) -> Result<(), GpuError> {
        let waited = self.0.device.poll(wgpu::PollType::Wait {
            submission_index: Some(submission),
            timeout: None,
        });
        self.check()?;
        waited.map(|_| ()).map_err(|e| GpuError::Lost {
            message: e.to_string(),
        })
    }

    /// Reads from the start of a buffer, after all passes before.
    ///
    /// # Errors
    /// [`GpuError`] if the device is lost, or there is no memory.
    pub fn download(&self, from: &Buffer, bytes: &mut [u8]) -> Result<(), GpuError> {
        self.download_from(from, 0, bytes)
    }

    /// Reads from byte `at` of a buffer on, a multiple of 4, after all passes before.
    ///
    /// # Errors
    /// As [`Device::download`].
    pub fn download_from(&self, from: &Buffer, at: u64, bytes: &mut [u8]) -> Result<(), GpuError> {
        let mut passes = locked(&self.0.passes);
        let encoder = self.0.device.create_command_encoder(&Default::default());
        self.collect(&mut passes, encoder, &mut [(from, at, bytes)])
    }

    /// Submits commands, waits for them, and reads parts of buffers, each from a byte on.
    fn collect(
        &self,
        passes: &mut Passes,
        mut encoder: wgpu::CommandEncoder,
        parts: &mut [(&Buffer, u64, &mut [u8])],
    ) -> Result<(), GpuError> {
        let whole = |bytes: &[u8]| (bytes.len() as u64).next_multiple_of(MAP_ALIGNMENT);
        let size: u64 = parts.iter().map(|(_, _, bytes)| whole(bytes)).sum();
        if passes.staging.as_ref().is_none_or(|b| b.size() < size) {
            passes.staging = None;
            passes.staging = Some(self.raw(
                size.max(MAP_ALIGNMENT).next_power_of_two(),
                wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            )?);
        }
        let Some(staging) = passes.staging.as_ref() else {
            return Err(GpuError::OutOfMemory {
                bytes: usize::try_from(size).unwrap_or(usize::MAX),
            });
        };
        let mut to = 0;
        for (from, at, bytes) in parts.iter() {
            // Buffers have spare bytes behind their end.
            let n = (bytes.len() as u64).next_multiple_of(wgpu::COPY_BUFFER_ALIGNMENT);
            encoder.copy_buffer_to_buffer(&from.raw, *at, staging, to, Some(n));
            to += whole(bytes);
        }
        let submission = self.0.queue.submit([encoder.finish()]);
        passes.submitted = None; // the wait is for it, too
        if size == 0 {
            return self.wait(submission);
        }
        let slice = staging.slice(..size);
        let mapped = Arc::new(Mutex::new(None));
        let result = Arc::clone(&mapped);
        slice.map_async(wgpu::MapMode::Read, move |mapped| {
            *locked(&result) = Some(mapped);
        });
        self.wait(submission)?;
        let failed = |message: String| GpuError::Pass { message };
        match locked(&mapped).take() {
            Some(Ok(())) => {}
            Some(Err(e)) => return Err(failed(e.to_string())),
            None => return Err(failed("a result did not arrive".to_string())),
        }
        let view = slice
            .get_mapped_range()
            .map_err(|e| failed(e.to_string()))?;
        let mut at = 0;
        for (_, _, bytes) in parts.iter_mut() {
            bytes.copy_from_slice(&view[at..at + bytes.len()]);
            at += whole(bytes) as usize;
        }
        drop(view);
        staging.unmap();
        Ok(())
    }

    /// Copies between two places that do not overlap, each a buffer and a byte of it; all are
    /// multiples of 4.
    ///
    /// # Errors
    /// [`GpuError::Pass`] if the device is lost.
    pub fn copy_part(
        &self,
        (from, at): (&Buffer, u64),
        (to, to_at): (&Buffer, u64),
        bytes: u64,
    ) -> Result<(), GpuError> {
        let mut encoder = self.0.device.create_command_encoder(&Default::default());
        let size = bytes.next_multiple_of(wgpu::COPY_BUFFER_ALIGNMENT);
        if from.number == to.number {
            // A copy must not be within a buffer.
            let mut passes = locked(&self.0.passes);
            if passes.between.as_ref().is_none_or(|b| b.size() < size) {
                passes.between = None;
                passes.between = Some(self.raw(
                    size,
                    wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
                )?);
            }
            if let Some(between) = &passes.between {
                encoder.copy_buffer_to_buffer(&from.raw, at, between, 0, Some(size));
                encoder.copy_buffer_to_buffer(between, 0, &to.raw, to_at, Some(size));
            }
        } else {
            encoder.copy_buffer_to_buffer(&from.raw, at, &to.raw, to_at, Some(size));
        }
        self.0.queue.submit([encoder.finish()]);
        self.check()
    }

    /// Compiles a kernel, or returns it as it was compiled before.
    ///
    /// # Errors
    /// [`GpuError::Kernel`] if `wgpu` refuses it.
    pub fn compile(&self, instance: &Instance) -> Result<(), GpuError> {
        self.pipeline(instance).map(|_| ())
    }

    fn pipeline(&self, instance: &Instance) -> Result<Arc<Pipeline>, GpuError> {
        if let Some(pipeline) = locked(&self.0.pipelines).get(instance) {
            return Ok(Arc::clone(pipeline));
        }
        let text = instance
            .source_with(&locked(&self.0.changes))
            .map_err(|message| GpuError::Kernel {
                kernel: instance.full_name(),
                message,
            })?;
        let pipeline = Arc::new(self.compiled(instance, &text)?);
        locked(&self.0.pipelines).insert(*instance, Arc::clone(&pipeline));
        Ok(pipeline)
    }

    /// Lets shaders have other texts for some of [`FILES`](crate::gpu::webgpu::shaders::FILES), by
    /// their names, as tests do.
    pub fn change_shaders(&self, changes: Vec<(String, String)>) {
        *locked(&self.0.changes) = changes;
        locked(&self.0.pipelines).clear();
        locked(&self.0.passes).known.clear();
    }

    fn compiled(&self, instance: &Instance, text: &str) -> Result<Pipeline, GpuError> {
        let refused = |message: String| GpuError::Kernel {
            kernel: instance.full_name(),
            message,
        };
        self.check()?;
        let d = declaration(instance.name).ok_or_else(|| refused("no such kernel".to_string()))?;
        let mut entries = Vec::new();
        for &(_, _, access) in &d.buffers {
            entries.push((access == Access::Read, entries.len() as u32));
        }
        for _ in instance.more.iter().flatten() {
            entries.push((true, entries.len() as u32));
            entries.push((false, entries.len() as u32));
        }
        for _ in 0..instance.slabs {
            entries.push((!instance.writes_pages(), entries.len() as u32));
        }
        let entries: Vec<_> = entries
            .into_iter()
            .map(|(read_only, i)| {
                layout_entry(i, wgpu::BufferBindingType::Storage { read_only }, false)
            })
            .collect();
        let device = &self.0.device;
        let invalid = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let descriptor = wgpu::ShaderModuleDescriptor {
            label: None,
            source: wgpu::ShaderSource::Wgsl(text.into()),
        };
        let module = if self.0.options.checked {
            device.create_shader_module(descriptor)
        } else {
            // SAFETY: kernels stay within the lengths of the table, which a pass checks, and end:
            // `tests/webgpu` runs each of them with checks of bounds.
            unsafe {
                device.create_shader_module_trusted(
                    descriptor,
                    wgpu::ShaderRuntimeChecks::unchecked(),
                )
            }
        };
        let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: None,
            entries: &entries,
        });
        let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: None,
            bind_group_layouts: &[Some(&layout), Some(&self.0.args_layout)],
            immediate_size: 0,
        });
        let raw = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: None,
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        });
        if let Some(error) = ready(invalid.pop()) {
            return Err(refused(error.to_string()));
        }
        self.check()?;
        Ok(Pipeline {
            number: self.number(),
            instance: *instance,
            raw,
            layout,
        })
    }

    /// Submits a pass, and waits for it if there are parts of buffers to read, each from a byte on.
    /// `slabs` are the buffers in which pages lie.
    ///
    /// # Errors
    /// [`GpuError`] if a buffer is too short, a kernel cannot be compiled, or the device is lost.
    pub(super) fn submit(
        &self,
        calls: &[Bound<'_>],
        slabs: &[&Buffer],
        reads: &mut [(&Buffer, u64, &mut [u8])],
    ) -> Result<(), GpuError> {
        self.check()?;
        let passes = &mut *locked(&self.0.passes);
        let dropped = std::mem::take(&mut *locked(&self.0.dropped));
        if !dropped.is_empty() {
            passes.known.clear();
            let gone = |(number, _): &(u64, u64)| dropped.contains(number);
            passes
                .bound
                .retain(|(_, buffers), _| !buffers.iter().any(gone));
        }
        self.make_room(passes, calls.len() * ARGS_BYTES)?;
        if calls.is_empty() {
            let encoder = self.0.device.create_command_encoder(&Default::default());
            return self.collect(passes, encoder, reads);
        }
        let (start, most) = (Instant::now(), passes.pace.most());
        let (mut first, mut begin, mut submitted, mut n) = (0, 0, None, FIRST_PART);
        let mut all = 0.0;
        while first < calls.len() {
            let mut args = vec![0u8; n * ARGS_BYTES];
            let (mut step, mut operations) = (begin, 0.0);
            while step < begin + n && first < calls.len() && operations < most {
                let args = &mut args[(step - begin) * ARGS_BYTES..][..ARGS_BYTES];
                let rest = &calls[first..];
                let known = passes.known.get(step);
                let n_same = known.map_or(0, |known| known.n_same(rest, slabs));
                if n_same > 0 {
                    args.copy_from_slice(&passes.written[step * ARGS_BYTES..][..ARGS_BYTES]);
                    first += n_same;
                } else {
                    passes.known.truncate(step);
                    let group = Group::next(rest, self.joins(slabs));
                    first += group.n_calls();
                    let bound = self.bind(passes, &group, slabs, args)?;
                    let grid = grid(&group.dispatch, &bound.0.instance, &group.more_outs())?;
                    passes.known.push(Known::new(&group, slabs, bound, grid));
                }
                operations += passes.known[step].operations;
                step += 1;
            }
            self.write_args(passes, begin, &args[..(step - begin) * ARGS_BYTES]);
            let encoder = self.encoded(passes, begin..step);
            begin = step;
            n = (n * 3 / 2).min(PART);
            all += operations;
            if first == calls.len() {
                passes.known.truncate(step);
                if !reads.is_empty() {
                    let result = self.collect(passes, encoder, reads);
                    passes.pace.took(all, start.elapsed().as_secs_f64());
                    return result;
                }
            }
            submitted = Some(self.0.queue.submit([encoder.finish()]));
        }
        match std::mem::replace(&mut passes.submitted, submitted) {
            Some(before) => self.wait(before),
            None => self.check(),
        }
    }

    /// What may be computed by one dispatch, with pages in these buffers.
    fn joins(&self, slabs: &[&Buffer]) -> Joins {
        let most = self.0.limits.max_storage_buffers_per_shader_stage as usize;
        Joins {
            products: self.0.group.load(Ordering::Relaxed) as usize,
            kernels: self.0.join.load(Ordering::Relaxed),
            buffers: most.saturating_sub(slabs.len()),
        }
    }

    /// Commands for some steps of a pass.
    fn encoded(&self, passes: &Passes, steps: Range<usize>) -> wgpu::CommandEncoder {
        let mut encoder = self.0.device.create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        let args = passes.args.as_ref().map(|(_, bound)| bound);
        let mut last = None;
        for (i, step) in steps.clone().zip(&passes.known[steps]) {
            if last != Some(step.pipeline.number) {
                pass.set_pipeline(&step.pipeline.raw);
                last = Some(step.pipeline.number);
            }
            pass.set_bind_group(0, &step.bound, &[]);
            pass.set_bind_group(1, args, &[(i * ARGS_BYTES) as u32]);
            let [x, y, z] = step.grid;
            pass.dispatch_workgroups(x, y, z);
        }
        drop(pass);
        encoder
    }

    /// Finds or makes the bindings of a call, and writes its arguments.
    fn bind(
        &self,
        passes: &mut Passes,
        group: &Group<'_, '_>,
        slabs: &[&Buffer],
        args: &mut [u8],
    ) -> Result<(Arc<Pipeline>, wgpu::BindGroup), GpuError> {
        let kernel = || group.dispatch.kernel();
        let refused = |message: String| GpuError::Kernel {
            kernel: kernel(),
            message,
        };
        let bindings = group
            .bindings()
            .ok_or_else(|| refused("no such kernel".to_string()))?;
        for (index, binding) in bindings.iter().enumerate() {
            let found = (binding.buffer.len as u64).saturating_sub(binding.offset);
            if found < binding.len {
                return Err(GpuError::ShortBuffer {
                    kernel: kernel(),
                    index,
                    needed: binding.len,
                    found,
                });
            }
        }
        let align = u64::from(self.0.limits.min_storage_buffer_offset_alignment);
        let starts: Vec<(u64, u64)> = bindings
            .iter()
            .map(|b| (b.offset / align * align, b.offset % align))
            .collect();
        let forced = [&self.0.lanes, &self.0.outs].map(|n| n.load(Ordering::Relaxed));
        let instance = instance(
            group,
            &bindings,
            &starts,
            slabs.len() as u32,
            forced,
            self.0.info.matrix,
        );
        let mut units = Vec::with_capacity(bindings.len());
        for (b, &(_, rest)) in bindings.iter().zip(&starts) {
            let unit = match instance.vectors_of(b.format, b.element, b.access) {
                true => 16,
                false => b.element.size(),
            };
            if rest % unit != 0 {
                return Err(refused(format!("an offset is no multiple of {unit} bytes")));
            }
            units.push((rest / b.element.size()) as u32);
        }
        group.write_args(&units, args);
        let pipeline = self.pipeline(&instance)?;
        let mut key: Vec<(u64, u64)> = bindings
            .iter()
            .zip(&starts)
            .map(|(b, (start, _))| (b.buffer.number, *start))
            .collect();
        let used = &slabs[..instance.slabs as usize];
        key.extend(used.iter().map(|slab| (slab.number, 0)));
        let key = (pipeline.number, key);
        if let Some(bound) = passes.bound.get(&key) {
            return Ok((pipeline, bound.clone()));
        }
        let all = bindings.iter().zip(&starts);
        let all = all.map(|(b, (start, _))| (b.buffer, *start));
        let all = all.chain(used.iter().map(|slab| (*slab, 0)));
        let most = self.0.limits.max_storage_buffer_binding_size / 4 * 4;
        let entries: Vec<_> = all
            .enumerate()
            .map(|(i, (buffer, offset))| wgpu::BindGroupEntry {
                binding: i as u32,
                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer: &buffer.raw,
                    offset,
                    size: (buffer.raw.size() - offset).min(most).try_into().ok(),
                }),
            })
            .collect();
        let made = self.0.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.layout,
            entries: &entries,
        });
        passes.made += 1;
        passes.bound.insert(key, made.clone());
        Ok((pipeline, made))
    }

    /// Makes the arguments' buffer if it has fewer bytes.
    fn make_room(&self, passes: &mut Passes, bytes: usize) -> Result<(), GpuError> {
        if bytes <= passes.written.len() {
            return Ok(());
        }
        let bytes = bytes.next_power_of_two();
        let buffer = self.raw(
            bytes as u64,
            wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
        )?;
        let bound = self.0.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &self.0.args_layout,
            entries: &[wgpu::BindGroupEntry {
                binding: 0,
                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer: &buffer,
                    offset: 0,
                    size: (ARGS_BYTES as u64).try_into().ok(),
                }),
            }],
        });
        passes.args = Some((buffer, bound));
        passes.written = vec![0; bytes]; // as `wgpu` makes buffers
        Ok(())
    }

    /// Writes the arguments from dispatch `first` on, unless they are those of the pass before.
    fn write_args(&self, passes: &mut Passes, first: usize, args: &[u8]) {
        let at = first * ARGS_BYTES;
        let written = &mut passes.written[at..at + args.len()];
        if let Some((buffer, _)) = passes.args.as_ref().filter(|_| written != args) {
            self.0.queue.write_buffer(buffer, at as u64, args);
            written.copy_from_slice(args);
        }
    }
}

fn layout_entry(
    binding: u32,
    ty: wgpu::BufferBindingType,
    has_dynamic_offset: bool,
) -> wgpu::BindGroupLayoutEntry {
    wgpu::BindGroupLayoutEntry {
        binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty,
            has_dynamic_offset,
            min_binding_size: None,
        },
        count: None,
    }
}
