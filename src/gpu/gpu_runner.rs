//! Runs plans: allocates buffers for their names, writes inputs, reads results.

use crate::gpu::kernels::Dispatch;
use crate::gpu::plan::{Input, Intermediate, Name, Plan, Set, Shape};
use crate::gpu::{Batch, BatchOutputs, BatchSlot, Call, Gpu, GpuError, Runner};
use crate::kv::{CellPlace, DeviceMemory, PagePlace};
use crate::layers::per_layer_embedding::PerLayerInputs;
use crate::layers::recurrent;
use crate::lora::Adapter;
use crate::model::Model;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Computes the last layers of a model on a GPU, or all of them.
pub struct GpuRunner<G: Gpu> {
    gpu: G,
    model: Model,
    first_layer: usize,
    embeds: bool,
    /// Bytes of weights that are copies.
    copied: u64,
    passes: Mutex<Passes<G::Buffer>>,
}

/// What passes keep for later ones.
struct Passes<B> {
    /// Weights, and buffers of passes, which grow on demand.
    buffers: Vec<B>,
    indices: HashMap<Key, usize>,
    /// Terms of the adapters of earlier passes. A weak reference keeps an adapter's address and
    /// values as they are: whoever changes it gets a new one.
    adapters: Vec<(Weak<Adapter>, B)>,
    /// The last pass.
    planned: Planned,
}

/// A plan, for passes of its shape, with the places of its buffers.
#[derive(Default)]
struct Planned {
    /// `None` if no other pass has this plan.
    shape: Option<Shape>,
    commands: Vec<Placed>,
    /// First byte of each input, and its length.
    inputs: Vec<(Input, usize, usize)>,
    tiles: Vec<(Input, Vec<[u32; 2]>)>,
    terms: Vec<[u32; 4]>,
    /// Places of the residual stream, the head's inputs and the logits.
    stream: Option<usize>,
    states: Option<usize>,
    logits: Option<usize>,
}

/// A command with the places of its buffers.
struct Placed {
    dispatch: Dispatch,
    /// From which byte on each is used.
    buffers: Vec<(BufferIndex, u64)>,
    barrier: bool,
}

/// Where a buffer of a command is.
#[derive(Clone, Copy)]
enum BufferIndex {
    /// In [`Passes::buffers`].
    Buffer(usize),
    /// From this byte of the inputs on.
    Inputs(usize),
    /// In [`Passes::adapters`].
    Adapter(usize),
}

/// A [`Name`] without the plan's lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    Tensor(usize),
    /// Address and length of the values, which the model or the program keeps in place.
    Constant(usize, usize),
    /// All inputs of a pass, one behind the other: written at once.
    Inputs,
    Intermediate(Intermediate),
}

/// Alignment in bytes of an input among the others: no GPU wants more of a buffer's offset.
const ALIGN: usize = 256;

impl Key {
    fn of(name: Name<'_>) -> Option<Key> {
        match name {
            Name::Tensor(index) => Some(Key::Tensor(index)),
            Name::Constant(values) => Some(Key::Constant(values.as_ptr().addr(), values.len())),
            Name::Intermediate(scratch) => Some(Key::Intermediate(scratch)),
            Name::Input(_) | Name::Adapter(_) | Name::Cache(_) => None,
        }
    }
}

impl<G: Gpu> GpuRunner<G> {
    /// A runner for the last `n_layers` layers of `model`, or all if it has fewer. On return, their
    /// weights are accessible to the GPU.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] if the model has a feature without a kernel;
    /// [`GpuError::OutOfMemory`].
    pub fn new(gpu: G, model: &Model, n_layers: usize) -> Result<GpuRunner<G>, GpuError> {
        let h = model.hparams();
        let first_layer = h.n_layer.saturating_sub(n_layers);
        // A pass of one token uses the same parts of the model as any other pass.
        let places = vec![PagePlace::default(); h.attention().count()];
        let cells = vec![
            CellPlace::default();
            h.recurrent().map(|spec| recurrent::cells(spec).len()).sum()
        ];
        let slot = BatchSlot {
            rows: 0..1,
            outputs: 0..1,
            pos: 0,
            generated: true,
            tables: &[],
            states: &[],
            adapters: &[],
        };
        let (table, _) = model.weights().token_embd.place();
        let table = model.gguf().tensors()[table].n_bytes;
        let embeds = first_layer == 0 && gpu.can_embed(table);
        let hidden = if embeds { &[][..] } else { &[0.0] };
        let batch = Batch {
            slots: &[slot],
            tokens: &[0],
            hidden,
            cos: &[],
            sin: &[],
            places: &places,
            cells: &cells,
        };
        let plan = Plan::new(model, first_layer, &batch, false)?;
        let (mut buffers, mut indices, mut copied) = (Vec::new(), HashMap::new(), 0);
        for (name, _) in plan.commands.iter().flat_map(|command| &command.buffers) {
            let Some(key) = Key::of(*name).filter(|key| !indices.contains_key(key)) else {
                continue;
            };
            let buffer = match name {
                Name::Tensor(index) => {
                    let (buffer, is_copy) = gpu.tensor(model.gguf(), *index)?;
                    copied += if is_copy { gpu.len(&buffer) as u64 } else { 0 };
                    buffer
                }
                Name::Constant(values) => {
                    let bytes: &[u8] = bytemuck::cast_slice(values);
                    let mut buffer = gpu.buffer(bytes.len())?;
                    gpu.write(&mut buffer, bytes)?;
                    buffer
                }
                Name::Adapter(_) | Name::Input(_) | Name::Intermediate(_) | Name::Cache(_) => {
                    continue;
                }
            };
            indices.insert(key, buffers.len());
            buffers.push(buffer);
        }
        Ok(GpuRunner {
            gpu,
            model: model.clone(),
            first_layer,
            embeds,
            copied,
            passes: Mutex::new(Passes {
                buffers,
                indices,
                adapters: Vec::new(),
                planned: Planned::default(),
            }),
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &G {
        &self.gpu
    }

    /// Index of the buffer of a key, which has at least `bytes` bytes.
    fn grown(
        &self,
        passes: &mut Passes<G::Buffer>,
        key: Key,
        bytes: usize,
    ) -> Result<usize, GpuError> {
        let known = passes.indices.get(&key).copied();
        if let Some(index) = known.filter(|&i| self.gpu.len(&passes.buffers[i]) >= bytes) {
            return Ok(index);
        }
        let buffer = self.gpu.buffer(bytes)?;
        match known {
            Some(index) => passes.buffers[index] = buffer,
            None => {
                passes.indices.insert(key, passes.buffers.len());
                passes.buffers.push(buffer);
            }
        }
        Ok(known.unwrap_or(passes.buffers.len() - 1))
    }

    /// Plans a pass, whose shape is to be set, and finds its buffers.
    fn plan(
        &self,
        passes: &mut Passes<G::Buffer>,
        batch: &Batch<'_>,
        raw: bool,
    ) -> Result<Planned, GpuError> {
        let plan = Plan::new(&self.model, self.first_layer, batch, raw)?;
        let (mut inputs, mut end) = (Vec::new(), 0);
        for (name, bytes) in plan.sizes() {
            let bytes =
                usize::try_from(bytes).map_err(|_| GpuError::OutOfMemory { bytes: usize::MAX })?;
            if let Name::Input(input) = name {
                let start = usize::next_multiple_of(end, ALIGN);
                end = start + bytes;
                inputs.push((input, start, bytes));
            } else if let Some(key) = Key::of(name) {
                self.grown(passes, key, bytes)?;
            }
        }
        // Page tables grow all the time; what was bound stays so for longer.
        let room = end.max(1 << 16).next_power_of_two();
        self.grown(passes, Key::Inputs, room)?;
        let adapters = self.copied_adapters(passes, &plan.adapters)?;
        let place = |name: Name<'_>| match name {
            Name::Adapter(index) => Some(BufferIndex::Adapter(adapters[index])),
            Name::Input(input) => {
                let (_, start, _) = inputs.iter().find(|(other, ..)| *other == input)?;
                Some(BufferIndex::Inputs(*start))
            }
            name => Some(BufferIndex::Buffer(*passes.indices.get(&Key::of(name)?)?)),
        };
        let commands = plan.commands.into_iter().map(|command| {
            let buffers = command.buffers.iter();
            let buffers = buffers.filter_map(|&(name, offset)| Some((place(name)?, offset)));
            Placed {
                dispatch: command.dispatch,
                buffers: buffers.collect(),
                barrier: command.barrier,
            }
        });
        let commands = commands.collect();
        let of = |scratch| {
            let key = Key::Intermediate(scratch);
            passes.indices.get(&key).copied()
        };
        Ok(Planned {
            shape: None,
            commands,
            tiles: plan.tiles,
            terms: plan.terms,
            stream: of(Intermediate::X(Set::All)),
            states: of(Intermediate::Normed(plan.outputs)),
            logits: of(Intermediate::Logits),
            inputs,
        })
    }

    /// Indices of adapters in [`Passes::adapters`], to which those are added that are not there.
    fn copied_adapters(
        &self,
        passes: &mut Passes<G::Buffer>,
        adapters: &[Arc<Adapter>],
    ) -> Result<Vec<usize>, GpuError> {
        let copied = &mut passes.adapters;
        copied.retain(|(adapter, _)| adapter.strong_count() > 0);
        let mut indices = Vec::with_capacity(adapters.len());
        for adapter in adapters {
            let known = copied
                .iter()
                .position(|(other, _)| other.as_ptr() == Arc::as_ptr(adapter));
            if known.is_none() {
                let values: Vec<f32> = adapter
                    .terms()
                    .flat_map(|(_, term)| [term.a(), term.b()].concat())
                    .collect();
                let bytes: &[u8] = bytemuck::cast_slice(&values);
                let mut buffer = self.gpu.buffer(bytes.len())?;
                self.gpu.write(&mut buffer, bytes)?;
                copied.push((Arc::downgrade(adapter), buffer));
            }
            indices.push(known.unwrap_or(copied.len() - 1));
        }
        Ok(indices)
    }

    fn run(&self, batch: &Batch<'_>, outputs: BatchOutputs<'_>) -> Result<(), GpuError> {
        let raw = outputs.states.is_some();
        let passes = &mut *self.passes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut planned = std::mem::take(&mut passes.planned);
        let shape = Shape::of(&self.model, batch, raw);
        if shape.is_none() || planned.shape != shape {
            planned = self.plan(passes, batch, raw)?;
            planned.shape = shape;
        }
        let mut inputs = Vec::<u8>::new();
        for &(input, start, bytes) in &planned.inputs {
            inputs.resize(start, 0);
            inputs.extend(self.input(&planned, batch, input));
            inputs.resize(inputs.len().max(start + bytes), 0);
        }
        let index = self.grown(passes, Key::Inputs, inputs.len())?;
        self.gpu.write(&mut passes.buffers[index], &inputs)?;
        if let Some(stream) = planned.stream.filter(|_| !batch.hidden.is_empty()) {
            let bytes = bytemuck::cast_slice(batch.hidden);
            self.gpu.write(&mut passes.buffers[stream], bytes)?;
        }
        let buffer = |place: BufferIndex| match place {
            BufferIndex::Buffer(index) => (&passes.buffers[index], 0),
            BufferIndex::Inputs(start) => (&passes.buffers[index], start as u64),
            BufferIndex::Adapter(index) => (&passes.adapters[index].1, 0),
        };
        let calls = planned.commands.iter().map(|command| {
            let buffers = command.buffers.iter().map(|&(place, offset)| {
                let (buffer, start) = buffer(place);
                (buffer, start + offset)
            });
            Call {
                dispatch: &command.dispatch,
                buffers: buffers.collect(),
                barrier: command.barrier,
            }
        });
        let calls: Vec<Call<'_, G::Buffer>> = calls.collect();
        let of_slot = |slot: &BatchSlot<'_>| {
            let states = slot.states.iter().map(|page| page.address);
            let pages: Vec<u64> = slot
                .tables
                .iter()
                .flatten()
                .copied()
                .chain(states)
                .collect();
            pages
        };
        let pages: BTreeSet<u64> = batch.slots.iter().flat_map(of_slot).collect();
        let pages: Vec<u64> = pages.into_iter().filter(|&address| address != 0).collect();
        let results = [
            (planned.logits, Some(outputs.logits)),
            (planned.states, outputs.states),
        ];
        let mut reads = Vec::new();
        for (index, values) in results {
            if let (Some(index), Some(values)) = (index, values)
                && !values.is_empty()
            {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
                reads.push((&passes.buffers[index], bytes));
            }
        }
        self.gpu.run(&calls, &pages, &mut reads)?;
        passes.planned = planned;
        Ok(())
    }

    /// Rows of the table of embeddings for each layer, times the root of a layer's width.
    fn layer_embeddings(&self, tokens: &[u32]) -> Vec<u8> {
        let Some(PerLayerInputs { table, norm, .. }) = &self.model.weights().per_layer else {
            return Vec::new();
        };
        let (arch, gguf) = (self.model.arch(), self.model.gguf());
        let (mut rows, factor) = (
            vec![0.0; tokens.len() * table.n_in],
            (norm.len() as f32).sqrt(),
        );
        for (row, &token) in rows.chunks_exact_mut(table.n_in).zip(tokens) {
            let token = token as usize;
            let data = table.data_of_rows(gguf, token..token + 1);
            arch.dequantize(table.dtype, data, row);
            row.iter_mut().for_each(|x| *x *= factor);
        }
        bytemuck::cast_slice(&rows).to_vec()
    }

    /// Data of an input.
    fn input(&self, planned: &Planned, batch: &Batch<'_>, input: Input) -> Vec<u8> {
        let rows_of = |slot: &BatchSlot<'_>, set: Set| match set {
            Set::All => slot.rows.clone(),
            Set::Outputs => slot.outputs.clone(),
        };
        let rows = |set: Set| batch.slots.iter().flat_map(move |slot| rows_of(slot, set));
        let u32s = |values: Vec<u32>| bytemuck::cast_slice(&values).to_vec();
        match input {
            Input::Tokens => bytemuck::cast_slice(batch.tokens).to_vec(),
            Input::LayerEmbeddings => self.layer_embeddings(batch.tokens),
            Input::AdmissionConfig => bytemuck::cast_slice(&planned.terms).to_vec(),
            Input::Positions => u32s(
                batch
                    .slots
                    .iter()
                    .flat_map(|slot| slot.pos..slot.pos + slot.rows.len())
                    .map(|position| position as u32)
                    .collect(),
            ),
            Input::Temperatures(set, layer) => {
                let attn = self.model.hparams().layers[layer].attention();
                let temperature = attn.and_then(|attn| attn.temperature);
                let factors = batch.slots.iter().flat_map(|slot| {
                    let position = |row: usize| slot.pos + row - slot.rows.start;
                    let factor = move |row| temperature.map_or(1.0, |t| t.at(position(row)));
                    rows_of(slot, set).map(factor)
                });
                bytemuck::cast_slice(&factors.collect::<Vec<f32>>()).to_vec()
            }
            Input::Heads(n) => {
                let n_rows = batch.slots.iter().map(|slot| slot.rows.len()).sum();
                u32s((0..n_rows).flat_map(|_| 0..n).collect())
            }
            Input::OutputRows => u32s(rows(Set::Outputs).map(|row| row as u32).collect()),
            Input::Rows(set) => {
                let mut table = 0;
                let mut data = Vec::new();
                for slot in batch.slots {
                    let position = |row: usize| (slot.pos + row - slot.rows.start) as u32;
                    data.extend(rows_of(slot, set).flat_map(|row| [position(row), table]));
                    table += slot.tables.first().map_or(0, Vec::len) as u32;
                }
                u32s(data)
            }
            Input::Angles(set, rope) => {
                let ropes = &self.model.hparams().ropes;
                let n_pairs = ropes[rope].n_dims / 2;
                let first = batch.tokens.len()
                    * ropes[..rope]
                        .iter()
                        .map(|rope| rope.n_dims / 2)
                        .sum::<usize>();
                let mut data = Vec::<f32>::new();
                for row in rows(set) {
                    let [cos, sin] =
                        [batch.cos, batch.sin].map(|x| &x[first + row * n_pairs..][..n_pairs]);
                    data.extend(cos.iter().zip(sin).flat_map(|(cos, sin)| [cos, sin]));
                }
                bytemuck::cast_slice(&data).to_vec()
            }
            Input::Pages(group) => {
                let pages: Vec<u64> = batch
                    .slots
                    .iter()
                    .flat_map(|slot| &slot.tables[group])
                    .copied()
                    .collect();
                bytemuck::cast_slice(&pages).to_vec()
            }
            Input::Slots => {
                let mut first = 0;
                let slots = batch.slots.iter().map(|slot| {
                    let n = slot.states.len();
                    first += n;
                    [slot.rows.start, slot.rows.len(), first - n, n].map(|n| n as u32)
                });
                bytemuck::cast_slice(&slots.collect::<Vec<_>>()).to_vec()
            }
            Input::States => {
                let pages = batch.slots.iter().flat_map(|slot| slot.states);
                let pages = pages.map(|page| {
                    let [low, high] = bytemuck::cast::<u64, [u32; 2]>(page.address);
                    [low, high, page.pos as u32, 0]
                });
                bytemuck::cast_slice(&pages.collect::<Vec<_>>()).to_vec()
            }
            Input::Tiles(..) => {
                let of_input = planned.tiles.iter().filter(|(other, _)| *other == input);
                let tiles: Vec<[u32; 2]> = of_input.flat_map(|(_, tiles)| tiles).copied().collect();
                bytemuck::cast_slice(&tiles).to_vec()
            }
        }
    }
}

impl<G: Gpu> Runner for GpuRunner<G> {
    fn name(&self) -> String {
        format!("{} ({})", G::LANGUAGE, self.gpu.name())
    }

    fn first_layer(&self) -> usize {
        self.first_layer
    }

    fn embeds(&self) -> bool {
        self.embeds
    }

    fn copied_bytes(&self) -> u64 {
        self.copied
    }

    fn shares_memory(&self) -> bool {
        self.gpu.shares_memory()
    }

    fn page(&self, bytes: usize) -> Option<DeviceMemory> {
        self.gpu.page(bytes)
    }

    fn page_limit(&self) -> u64 {
        self.gpu.page_limit()
    }

    fn pass(&self, batch: &Batch<'_>, outputs: BatchOutputs<'_>) -> Result<(), GpuError> {
        self.run(batch, outputs)
    }
}
