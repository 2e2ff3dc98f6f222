//! Runs plans: allocates buffers for their names, writes inputs, reads results.

use crate::gpu::plan::{Input, Intermediate, Name, Plan, Set};
use crate::gpu::{Batch, BatchOutputs, BatchSlot, Call, Gpu, GpuError, Runner};
use crate::kv::{DeviceMemory, PagePlace};
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
    /// Weights, and buffers of passes, which grow on demand.
    buffers: Mutex<HashMap<Key, G::Buffer>>,
    /// Terms of the adapters of earlier passes. A weak reference keeps an adapter's address and
    /// values as they are: whoever changes it gets a new one.
    adapters: Mutex<Vec<(Weak<Adapter>, G::Buffer)>>,
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
            Name::Input(_) => Some(Key::Inputs),
            Name::Intermediate(scratch) => Some(Key::Intermediate(scratch)),
            Name::Adapter(_) | Name::Cache(_) => None,
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
        let slot = BatchSlot {
            rows: 0..1,
            outputs: 0..1,
            pos: 0,
            generated: true,
            tables: &[],
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
        };
        let plan = Plan::new(model, first_layer, &batch, false)?;
        let (mut buffers, mut copied) = (HashMap::new(), 0);
        for (name, _) in plan.commands.iter().flat_map(|command| &command.buffers) {
            let Some(key) = Key::of(*name).filter(|key| !buffers.contains_key(key)) else {
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
            buffers.insert(key, buffer);
        }
        Ok(GpuRunner {
            gpu,
            model: model.clone(),
            first_layer,
            embeds,
            copied,
            buffers: Mutex::new(buffers),
            adapters: Mutex::default(),
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &G {
        &self.gpu
    }

    /// The buffer of a name, which has at least `bytes` bytes.
    fn grown<'b>(
        &self,
        buffers: &'b mut HashMap<Key, G::Buffer>,
        key: Key,
        bytes: usize,
    ) -> Result<&'b mut G::Buffer, GpuError> {
        if let Some(buffer) = buffers.remove(&key)
            && self.gpu.len(&buffer) >= bytes
        {
            return Ok(buffers.entry(key).or_insert(buffer));
        }
        let buffer = self.gpu.buffer(bytes)?;
        Ok(buffers.entry(key).or_insert(buffer))
    }

    fn run(&self, batch: &Batch<'_>, outputs: BatchOutputs<'_>) -> Result<(), GpuError> {
        let plan = Plan::new(
            &self.model,
            self.first_layer,
            batch,
            outputs.states.is_some(),
        )?;
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut inputs, mut starts) = (Vec::<u8>::new(), Vec::new());
        for (name, bytes) in plan.sizes() {
            let bytes =
                usize::try_from(bytes).map_err(|_| GpuError::OutOfMemory { bytes: usize::MAX })?;
            let data = self.input(&plan, batch, name);
            if let Name::Input(input) = name {
                let start = inputs.len().next_multiple_of(ALIGN);
                inputs.resize(start, 0);
                inputs.extend(data.unwrap_or_default());
                inputs.resize(inputs.len().max(start + bytes), 0);
                starts.push((input, start as u64));
                continue;
            }
            let Some(key) = Key::of(name) else { continue };
            let buffer = self.grown(&mut buffers, key, bytes)?;
            if let Some(data) = data {
                self.gpu.write(buffer, &data)?;
            }
        }
        if !inputs.is_empty() {
            // Page tables grow all the time; what was bound stays so for longer.
            let room = inputs.len().max(1 << 16).next_power_of_two();
            let buffer = self.grown(&mut buffers, Key::Inputs, room)?;
            self.gpu.write(buffer, &inputs)?;
        }
        let mut adapters = self.adapters.lock().unwrap_or_else(PoisonError::into_inner);
        adapters.retain(|(adapter, _)| adapter.strong_count() > 0);
        let mut places = Vec::with_capacity(plan.adapters.len());
        for adapter in &plan.adapters {
            let known = adapters
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
                adapters.push((Arc::downgrade(adapter), buffer));
            }
            places.push(known.unwrap_or(adapters.len() - 1));
        }
        let mut calls = Vec::with_capacity(plan.commands.len());
        for command in &plan.commands {
            let buffers = command.buffers.iter().filter_map(|&(name, offset)| {
                let buffer = match name {
                    Name::Adapter(index) => &adapters[places[index]].1,
                    _ => buffers.get(&Key::of(name)?)?,
                };
                let start = match name {
                    Name::Input(input) => starts.iter().find(|(other, _)| *other == input)?.1,
                    _ => 0,
                };
                Some((buffer, start + offset))
            });
            calls.push(Call {
                dispatch: &command.dispatch,
                buffers: buffers.collect(),
                barrier: command.barrier,
            });
        }
        let pages: BTreeSet<u64> = batch
            .slots
            .iter()
            .flat_map(|slot| slot.tables)
            .flatten()
            .copied()
            .collect();
        let pages: Vec<u64> = pages.into_iter().filter(|&address| address != 0).collect();
        let normed = Intermediate::Normed(plan.outputs);
        let results = [
            (Intermediate::Logits, Some(outputs.logits)),
            (normed, outputs.states),
        ];
        let mut reads = Vec::new();
        for (scratch, values) in results {
            if let (Some(values), Some(buffer)) = (values, buffers.get(&Key::Intermediate(scratch)))
                && !values.is_empty()
            {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
                reads.push((buffer, bytes));
            }
        }
        self.gpu.run(&calls, &pages, &mut reads)
    }

    /// Data that the host writes to a buffer of the plan; `None` if kernels write it.
    fn input(&self, plan: &Plan<'_>, batch: &Batch<'_>, name: Name<'_>) -> Option<Vec<u8>> {
        let rows_of = |slot: &BatchSlot<'_>, set: Set| match set {
            Set::All => slot.rows.clone(),
            Set::Outputs => slot.outputs.clone(),
        };
        let rows = |set: Set| batch.slots.iter().flat_map(move |slot| rows_of(slot, set));
        let u32s = |values: Vec<u32>| bytemuck::cast_slice(&values).to_vec();
        let data = match name {
            Name::Intermediate(Intermediate::X(Set::All)) if !batch.hidden.is_empty() => {
                bytemuck::cast_slice(batch.hidden).to_vec()
            }
            Name::Input(Input::Tokens) => bytemuck::cast_slice(batch.tokens).to_vec(),
            Name::Input(Input::Terms) => bytemuck::cast_slice(&plan.terms).to_vec(),
            Name::Input(Input::OutputRows) => {
                u32s(rows(Set::Outputs).map(|row| row as u32).collect())
            }
            Name::Input(Input::Rows(set)) => {
                let mut table = 0;
                let mut data = Vec::new();
                for slot in batch.slots {
                    let position = |row: usize| (slot.pos + row - slot.rows.start) as u32;
                    data.extend(rows_of(slot, set).flat_map(|row| [position(row), table]));
                    table += slot.tables.first().map_or(0, Vec::len) as u32;
                }
                u32s(data)
            }
            Name::Input(Input::Angles(set, rope)) => {
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
            Name::Input(Input::Pages(group)) => {
                let pages: Vec<u64> = batch
                    .slots
                    .iter()
                    .flat_map(|slot| &slot.tables[group])
                    .copied()
                    .collect();
                bytemuck::cast_slice(&pages).to_vec()
            }
            Name::Input(input @ Input::Tiles(..)) => {
                let (_, tiles) = plan.tiles.iter().find(|(other, _)| *other == input)?;
                bytemuck::cast_slice(tiles).to_vec()
            }
            Name::Intermediate(_)
            | Name::Tensor(_)
            | Name::Constant(_)
            | Name::Adapter(_)
            | Name::Cache(_) => {
                return None;
            }
        };
        Some(data)
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
