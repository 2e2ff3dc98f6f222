//! Plans: the kernels of a pass, in order, over named buffers, derived from a model and the rows of
//! the pass. No GPU is used here: the runner gives each name a buffer of the size in the table of
//! kernels.
//!
//! A row's arithmetic depends only on its kind: products of generated rows use `matvec`, however
//! many there are, and their attention `attention_decode`; rows of a prompt use `matmul` and
//! `attention_prompt`, even a single one. The head computes all rows as generated ones.

mod adapters;
mod attention;
mod choices;
mod experts;
mod heads;
mod latent;
mod layer;
mod per_layer;
mod recurrent;
mod shape;

pub use shape::Shape;

use crate::arch::KvType;
use crate::compute::weight::{Linear, Weight};
use crate::gpu::GpuError;
use crate::gpu::kernels::*;
use crate::gpu::supports::supports;
use crate::gpu::{Batch, BatchSlot};
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::LayerSpec;
use crate::layers::norm::spec::NormKind;
use crate::layers::norm::weights::Norm;
use crate::layers::recurrent::cells;
use crate::layers::unsupported::Unsupported;
use crate::lora::Adapter;
use crate::model::{Model, Weights};
use crate::quant::DType;
use std::ops::Range;
use std::sync::Arc;

/// Set of rows of a batch: all, or those with outputs, stored contiguously.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Set {
    /// All rows.
    All,
    /// Rows with outputs.
    Outputs,
}

/// Name of a buffer of a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Name<'m> {
    /// Tensor of the file, by index.
    Tensor(usize),
    /// Values that never change: norms, biases. Identified by their address.
    Constant(&'m [f32]),
    /// Terms of an adapter, by its index in [`Plan::adapters`].
    Adapter(usize),
    /// Input, written by the host before the pass.
    Input(Input),
    /// Intermediate result, or output for the host.
    Intermediate(Intermediate),
    /// Keys and values of a layer, or its states, which kernels access by addresses of pages. Not
    /// bound to a kernel.
    Cache(usize),
}

/// Inputs written by the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// Tokens of all rows.
    Tokens,
    /// Positions of all rows.
    Positions,
    /// Factors on the queries of rows in a layer, by its index.
    Temperatures(Set, usize),
    /// Indices of the rows with outputs.
    OutputRows,
    /// Position of each row, and index of its page table.
    Rows(Set),
    /// Cosines and sines of a rope, by its index.
    Angles(Set, usize),
    /// Page tables of a group of layers, one sequence after the other.
    Pages(usize),
    /// Tiles of at most this many rows, see [`Plan::tiles`].
    Tiles(Set, u32),
    /// Rows and pages of each sequence's recurrent layers.
    Slots,
    /// Those pages.
    States,
    /// Rows of the table of embeddings for each layer, of all tokens.
    LayerEmbeddings,
    /// Terms of experts, see [`Plan::terms`].
    AdmissionConfig,
    /// The numbers below this one, for each row of the batch.
    Heads(u32),
}

/// Results of kernels, with llama.cpp's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Intermediate {
    /// Embeddings before their norm, and of positions.
    Embedded,
    Positions,
    /// Residual stream. The host writes it if the CPU has computed the first layers.
    X(Set),
    Normed(Set),
    Q,
    QNormed,
    K,
    KNormed,
    V,
    /// Partial results per split of keys.
    Partial,
    KqvOut,
    KqvNormed,
    AttnOut,
    /// Output of a recurrence beside attention.
    RecurrentOut,
    /// Queries, keys and values before a recurrent mixer's convolution, or what else is convolved.
    Channels,
    /// What a delta rule is fed with, and products that become a part of it.
    Feed,
    Beta,
    Rate,
    /// Convolved channels, and three parts of their products: time steps of low rank, what goes into a
    /// state and out of it.
    Convolved,
    OfConvolved(u8),
    /// What a recurrent mixer's output matrix is multiplied by.
    Mixed(Set),
    /// Queries with gates, as they come from one matrix.
    QGate,
    /// Gates of the output of attention.
    AttnGate,
    /// Of latent attention: low-rank queries, before and after their norm; heads as they come from
    /// their matrix.
    QLow,
    QLowNormed,
    QWhole,
    /// Latents with rotated parts of keys; both apart, latents before and after their norm.
    KvLow,
    KvLatent,
    KvNormed,
    KRotated,
    /// Keys and values of all heads, as they come from one matrix.
    KvWhole,
    /// What each head's matrix is multiplied by, and products; rows of each matrix.
    HeadsIn,
    HeadsOut,
    HeadCounts,
    HeadLists,
    /// Output of a branch, after its norm.
    Post,
    Gate,
    Up,
    InnerNormed,
    FfnOut,
    /// Of a dense layer beside a mixture, before and after its norm, and the mixture's input and
    /// output, after its norm.
    DenseOut,
    DenseNormed,
    BesideIn(Set),
    MoeNormed,
    /// Vectors of all layers for each token.
    PerLayer(Set),
    /// Embeddings that layers add again.
    Kept(Set),
    /// A router's own input, and its output.
    RouterIn,
    Router,
    Chosen,
    ExpertWeights,
    /// Rows of each expert: their number, and their indices.
    ExpertCounts,
    ExpertLists,
    ExpertIn,
    /// Shorter vectors that experts read, and the sum of what they write, before and after its norm.
    LatentIn,
    LatentOut,
    LatentNormed,
    /// Gates, then ups of experts.
    GateUp,
    ExpertOut,
    SharedOut,
    SharedGate,
    /// `A·x` of an adapter.
    Low,
    Logits,
}

/// A kernel with its buffers.
#[derive(Clone, Debug)]
pub struct Command<'m> {
    /// The kernel and its sizes.
    pub dispatch: Dispatch,
    /// Buffers before the arguments, with byte offsets.
    pub buffers: Vec<(Name<'m>, u64)>,
    /// Whether everything dispatched before must be finished. Between two such commands the order
    /// is free.
    pub barrier: bool,
}

/// The kernels of a pass.
#[derive(Debug)]
pub struct Plan<'m> {
    /// Commands in order.
    pub commands: Vec<Command<'m>>,
    /// First row and number of rows of each tile of [`ATTENTION_PROMPT`], by input.
    pub tiles: Vec<(Input, Vec<[u32; 2]>)>,
    /// Adapters of the batch. A buffer has the values of all terms, by site, each `A`, then `B`.
    pub adapters: Vec<Arc<Adapter>>,
    /// For [`LORA_EXPERTS`], one for each expert of a product.
    pub terms: Vec<[u32; 4]>,
    /// Set of the rows in the results: those with outputs, which may be all.
    pub outputs: Set,
}

/// Adjacent rows of a set that belong to one sequence.
#[derive(Clone, Copy, Debug)]
struct Part {
    first: u32,
    n: u32,
    pos: u32,
    generated: bool,
    /// Index of the sequence's slot; of a run, that of its first part.
    slot: usize,
}

/// Some rows of the batch, with their sequences.
#[derive(Clone, Debug)]
struct RowSet {
    set: Set,
    n: u32,
    parts: Vec<Part>,
}

impl RowSet {
    fn new(set: Set, slots: &[BatchSlot<'_>]) -> Result<RowSet, GpuError> {
        let mut parts = Vec::new();
        let mut first = 0;
        for (i, slot) in slots.iter().enumerate() {
            let rows = if set == Set::All {
                &slot.rows
            } else {
                &slot.outputs
            };
            let (n, pos) = (
                size(rows.len())?,
                size(slot.pos + rows.start - slot.rows.start)?,
            );
            if n > 0 {
                parts.push(Part {
                    first,
                    n,
                    pos,
                    generated: slot.generated,
                    slot: i,
                });
            }
            first += n;
        }
        Ok(RowSet {
            set,
            n: first,
            parts,
        })
    }

    /// Adjacent rows of one kind, joined.
    fn runs(&self) -> Vec<Part> {
        let mut runs = Vec::<Part>::new();
        for &part in &self.parts {
            match runs.last_mut() {
                Some(run) if run.generated == part.generated => run.n += part.n,
                _ => runs.push(part),
            }
        }
        runs
    }

    /// The parts that make up a run.
    fn parts_of(&self, run: Part) -> impl Iterator<Item = &Part> {
        self.parts
            .iter()
            .filter(move |part| (run.first..run.first + run.n).contains(&part.first))
    }
}

/// Sink scores for heads without sinks.
static NO_SINKS: [f32; MAX_HEADS] = [-1e30; MAX_HEADS];
/// Expert biases for files without them.
static NO_BIAS: [f32; MAX_EXPERTS as usize] = [0.0; MAX_EXPERTS as usize];
/// Weights of norms that have none, or others for each head.
static ONES: [f32; MAX_VALUES as usize] = [1.0; MAX_VALUES as usize];
/// Most query heads of a layer.
const MAX_HEADS: usize = 1024;

fn refused(what: String) -> GpuError {
    GpuError::Unsupported { what }
}

/// A size as a 32-bit kernel argument.
fn size(n: usize) -> Result<u32, GpuError> {
    u32::try_from(n).map_err(|_| refused(format!("a batch of {n} values")))
}

/// Bits per value of a precision that the kernels read.
fn bits(kind: KvType) -> Result<u32, GpuError> {
    match kind {
        KvType::F16 | KvType::Q8 | KvType::Q6 | KvType::Q5 | KvType::Q4 => size(kind.bits()),
        KvType::F32 | KvType::Bf16 => Err(refused(format!("keys or values in {kind}"))),
    }
}

/// Bytes of `n` rows of `width` 32-bit values.
fn bytes(n: u32, width: u32) -> u64 {
    u64::from(n) * u64::from(width) * 4
}

impl<'m> Plan<'m> {
    /// Plans a pass of `batch` through the layers of `model` from `first_layer` on; if `raw`, the
    /// logits are the head's bare products.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] if the model has a feature without a kernel.
    pub fn new(
        model: &'m Model,
        first_layer: usize,
        batch: &Batch<'_>,
        raw: bool,
    ) -> Result<Plan<'m>, GpuError> {
        Planner::new(model, batch)?.pass(first_layer, batch, raw)
    }

    /// Inputs and intermediate buffers, with their sizes in bytes.
    pub fn sizes(&self) -> Vec<(Name<'m>, u64)> {
        let mut sizes = Vec::<(Name<'m>, u64)>::new();
        for command in &self.commands {
            for (&(name, offset), len) in command.buffers.iter().zip(&command.dispatch.lens) {
                if let Name::Input(_) | Name::Intermediate(_) = name {
                    match sizes.iter_mut().find(|(other, _)| *other == name) {
                        Some((_, size)) => *size = (*size).max(offset + len),
                        None => sizes.push((name, offset + len)),
                    }
                }
            }
        }
        sizes
    }
}

/// Builds a [`Plan`].
struct Planner<'m, 'b> {
    model: &'m Model,
    h: &'m Hparams,
    batch: &'b Batch<'b>,
    plan: Plan<'m>,
    /// Buffers used by the commands since the last barrier, and whether they are written.
    touched: Vec<(Name<'m>, Range<u64>, bool)>,
    /// Number of pages in all tables.
    n_pages: u32,
    /// For each of [`Plan::adapters`], the index of the first value of each site's term.
    first_values: Vec<Vec<usize>>,
    /// Rows still being computed.
    rows: RowSet,
    /// Rows and number of heads for which products of each head have lists already.
    heads_listed: Option<(Set, u32)>,
    /// A branch that is not yet added to the residual stream, and its factor.
    pending: Option<(Name<'m>, f32)>,
    /// Recurrences of the layers before the one that is planned.
    cells_before: usize,
}

use Name::Intermediate as Left;

impl<'m, 'b> Planner<'m, 'b> {
    fn new(model: &'m Model, batch: &'b Batch<'b>) -> Result<Planner<'m, 'b>, GpuError> {
        Ok(Planner {
            model,
            h: model.hparams(),
            batch,
            plan: Plan {
                commands: Vec::new(),
                tiles: Vec::new(),
                adapters: Vec::new(),
                terms: Vec::new(),
                outputs: Set::All,
            },
            first_values: Vec::new(),
            touched: Vec::new(),
            n_pages: size(
                batch
                    .slots
                    .iter()
                    .map(|slot| slot.tables.first().map_or(0, Vec::len))
                    .sum(),
            )?,
            rows: RowSet::new(Set::All, batch.slots)?,
            heads_listed: None,
            pending: None,
            cells_before: 0,
        })
    }

    /// Adds a command; `cache` is the layer whose pages it accesses, and whether it writes to them.
    fn push<A: Args>(
        &mut self,
        (kernel, format, variant): (&Kernel<A>, DType, u32),
        args: &A,
        buffers: &[(Name<'m>, u64)],
        cache: Option<(usize, bool)>,
    ) {
        let dispatch = kernel.dispatch(format, variant, args);
        let mut touches: Vec<(Name<'m>, Range<u64>, bool)> = buffers
            .iter()
            .zip(&dispatch.lens)
            .zip(kernel.buffers)
            .map(|((&(name, offset), len), buffer)| {
                (name, offset..offset + len, buffer.access != Access::Read)
            })
            .collect();
        // Weights are never written, so they need no barriers.
        touches.retain(|(name, ..)| matches!(name, Name::Input(_) | Name::Intermediate(_)));
        touches.extend(cache.map(|(layer, written)| (Name::Cache(layer), 0..1, written)));
        let barrier = touches.iter().any(|(name, range, written)| {
            self.touched.iter().any(|(other, before, was_written)| {
                name == other
                    && (*written || *was_written)
                    && range.start < before.end
                    && before.start < range.end
            })
        });
        if barrier {
            self.touched.clear();
        }
        self.touched.extend(touches);
        self.plan.commands.push(Command {
            dispatch,
            buffers: buffers.to_vec(),
            barrier,
        });
    }

    /// [`Planner::push`] for a kernel without format, variant and pages.
    fn plain<A: Args>(&mut self, kernel: &Kernel<A>, args: &A, buffers: &[Name<'m>]) {
        let buffers: Vec<_> = buffers.iter().map(|&name| (name, 0)).collect();
        self.push((kernel, DType::F32, 0), args, &buffers, None);
    }

    fn n_embd(&self) -> Result<u32, GpuError> {
        size(self.h.n_embd)
    }

    /// Residual stream of the rows still being computed.
    fn x(&self) -> Name<'m> {
        Left(Intermediate::X(self.rows.set))
    }

    fn pass(
        mut self,
        first_layer: usize,
        batch: &Batch<'_>,
        raw: bool,
    ) -> Result<Plan<'m>, GpuError> {
        supports(self.h).map_err(|Unsupported(what)| refused(what.to_string()))?;
        let (n_vocab, n_layer, embd_scale) = (self.h.n_vocab, self.h.n_layer, self.h.embd_scale);
        // Every field of the weights is named: a new one must be computed or refused.
        let w = self.model.weights();
        let Weights {
            token_embd,
            mtp: _, // this and what is not named is in `supports`
            hyper: _,
            residual_scores: _,
            per_layer,
            position_embd,
            token_types: _,
            embd_norm,
            stacks: _,
            layers,
            output_norm,
            output,
            dense: _,
            rope_factors: _, // in the angles
            shapes: _,
            classifier: _,
            alt_up: _,
            sites: _,
        } = w;
        let outputs = RowSet::new(Set::Outputs, batch.slots)?;
        if batch.hidden.is_empty() {
            let x = match embd_norm {
                Some(_) => Left(Intermediate::Embedded),
                None => self.x(),
            };
            self.look_up(token_embd, Input::Tokens, embd_scale, x)?;
            self.embed_terms(token_embd, x)?;
            if let Some(table) = position_embd {
                let positions = Left(Intermediate::Positions);
                self.look_up(table, Input::Positions, 1.0, positions)?;
                let n = size(self.rows.n as usize * self.h.n_embd)?;
                let args = AddScaledArgs { n, scale: 1.0 };
                self.plain(&ADD_SCALED, &args, &[x, positions]);
            }
            if let Some(norm) = embd_norm {
                self.norm(norm, self.h.norm_eps, x, self.x())?;
            }
        }
        let is_kept = self.h.layers.iter().any(|spec| spec.embd_skip);
        if first_layer > 0 && (per_layer.is_some() || is_kept) {
            let what = "embeddings that layers read, unless the GPU computes all layers";
            return Err(refused(what.to_string()));
        }
        if let Some(w) = per_layer {
            self.per_layer_inputs(w)?;
        }
        if is_kept {
            self.copy_stream(self.x(), Left(Intermediate::Kept(Set::All)))?;
        }
        for (i, spec) in self.h.layers.iter().enumerate() {
            let last = i + 1 == n_layer;
            if i >= first_layer {
                if self.source(i, spec) < first_layer {
                    let what = "keys and values of layers that the CPU computes";
                    return Err(refused(what.to_string()));
                }
                self.layer(i, spec, &layers[i], last.then_some(&outputs))?;
            }
            self.cells_before += spec.recurrent().map_or(0, |spec| cells(spec).len());
        }
        if outputs.n == 0 {
            return Ok(self.plan);
        }
        let normed = self.enter(output_norm.as_ref())?;
        // As generated rows, whose kernels are faster for few rows: few rows of a prompt have
        // logits.
        self.rows
            .parts
            .iter_mut()
            .for_each(|part| part.generated = true);
        self.linear(output, normed, Left(Intermediate::Logits))?;
        let finish = self.h.logit_transform();
        if !raw && (finish.scale != 1.0 || finish.cap > 0.0) {
            let n = size(self.rows.n as usize * n_vocab)?;
            let args = FinishLogitsArgs {
                n,
                scale: finish.scale,
                softcap: finish.cap,
            };
            self.plain(&FINISH_LOGITS, &args, &[Left(Intermediate::Logits)]);
        }
        Ok(self.plan)
    }

    /// Looks up rows of a table of embeddings.
    fn look_up(
        &mut self,
        table: &Weight,
        indices: Input,
        scale: f32,
        x: Name<'m>,
    ) -> Result<(), GpuError> {
        let args = EmbedArgs {
            n_embd: self.n_embd()?,
            n_vocab: size(table.n_out)?,
            n_rows: self.rows.n,
            row_bytes: size(table.row_bytes())?,
            scale,
        };
        let (rows, format) = self.weight(table)?;
        let buffers = [rows, (Name::Input(indices), 0), (x, 0)];
        self.push((&EMBED, format, 0), &args, &buffers, None);
        Ok(())
    }

    /// Buffer of a matrix, and the format of its kernels.
    fn weight(&self, w: &Weight) -> Result<((Name<'m>, u64), DType), GpuError> {
        let (tensor, first_byte) = w.place();
        if !FORMATS.contains(&w.dtype) {
            let name = &self.model.gguf().tensors()[tensor].name;
            return Err(refused(format!("the format {} of {name}", w.dtype)));
        }
        if w.scale != 1.0 {
            let name = &self.model.gguf().tensors()[tensor].name;
            return Err(refused(format!("a factor on {name}")));
        }
        Ok(((Name::Tensor(tensor), first_byte as u64), w.dtype))
    }

    /// `y = x·Wᵀ` for the current rows, with the adapters' terms.
    fn product(&mut self, w: &Weight, x: Name<'m>, y: Name<'m>) -> Result<(), GpuError> {
        let (matrix, format) = self.weight(w)?;
        let (n_in, n_out, row_bytes) = (size(w.n_in)?, size(w.n_out)?, size(w.row_bytes())?);
        for run in self.rows.runs() {
            let n_rows = run.n;
            let buffers = [
                matrix,
                (x, bytes(run.first, n_in)),
                (y, bytes(run.first, n_out)),
            ];
            if run.generated {
                let variant = *MATVEC.variants.iter().find(|&&v| v >= n_rows).unwrap_or(&8);
                let args = MatvecArgs {
                    n_in,
                    n_out,
                    n_rows,
                    row_bytes,
                };
                self.push((&MATVEC, format, variant), &args, &buffers, None);
            } else {
                let args = MatmulArgs {
                    n_in,
                    n_out,
                    n_rows,
                    row_bytes,
                };
                self.push((&MATMUL, format, 0), &args, &buffers, None);
            }
        }
        self.terms(w, x, y)
    }

    /// `y = x·Wᵀ + b` for the current rows.
    fn linear(&mut self, linear: &'m Linear, x: Name<'m>, y: Name<'m>) -> Result<(), GpuError> {
        self.product(&linear.w, x, y)?;
        if let Some(b) = &linear.b {
            let args = AddBiasArgs {
                n: size(linear.w.n_out)?,
                n_rows: self.rows.n,
            };
            self.plain(&ADD_BIAS, &args, &[y, Name::Constant(b)]);
        }
        Ok(())
    }

    /// RMS norm of rows, which are as long as its weights.
    fn row_norm(
        &mut self,
        w: &'m [f32],
        eps: f32,
        x: Name<'m>,
        y: Name<'m>,
    ) -> Result<(), GpuError> {
        let args = NormArgs {
            n: size(w.len())?,
            n_rows: self.rows.n,
            eps,
        };
        self.plain(&RMS_NORM, &args, &[x, Name::Constant(w), y]);
        Ok(())
    }

    /// Norm of rows of the residual stream or of a branch.
    fn norm(&mut self, norm: &'m Norm, eps: f32, x: Name<'m>, y: Name<'m>) -> Result<(), GpuError> {
        let args = NormArgs {
            n: self.n_embd()?,
            n_rows: self.rows.n,
            eps,
        };
        let w = Name::Constant(&norm.w);
        match self.h.norm {
            NormKind::Rms | NormKind::RmsPlain => self.plain(&RMS_NORM, &args, &[x, w, y]),
            NormKind::Layer | NormKind::LayerNoBias | NormKind::LayerPlain => {
                self.plain(&LAYER_NORM, &args, &[x, w, Name::Constant(&norm.b), y])
            }
        }
        Ok(())
    }

    /// Adds the pending branch to the residual stream; returns the input of the next branch: the
    /// stream, after its norm if there is one.
    fn enter(&mut self, norm: Option<&'m Norm>) -> Result<Name<'m>, GpuError> {
        let (x, normed) = (self.x(), Left(Intermediate::Normed(self.rows.set)));
        let (n, n_rows, eps) = (self.n_embd()?, self.rows.n, self.h.norm_eps);
        match (self.pending.take(), norm) {
            (None, None) => return Ok(x),
            (None, Some(norm)) => self.norm(norm, eps, x, normed)?,
            (Some((branch, scale)), None) => {
                let n = size(n_rows as usize * self.h.n_embd)?;
                self.plain(&ADD_SCALED, &AddScaledArgs { n, scale }, &[x, branch]);
                return Ok(x);
            }
            (Some((branch, branch_scale)), Some(norm)) => {
                let args = NormAddArgs {
                    n,
                    n_rows,
                    eps,
                    branch_scale,
                };
                let w = Name::Constant(&norm.w);
                match self.h.norm {
                    NormKind::Rms | NormKind::RmsPlain => {
                        self.plain(&RMS_NORM_ADD, &args, &[x, branch, w, normed])
                    }
                    NormKind::Layer | NormKind::LayerNoBias | NormKind::LayerPlain => self.plain(
                        &LAYER_NORM_ADD,
                        &args,
                        &[x, branch, w, Name::Constant(&norm.b), normed],
                    ),
                }
            }
        }
        Ok(normed)
    }

    /// Stores a branch of a layer, after its norm if there is one, as pending.
    fn leave(
        &mut self,
        branch: Intermediate,
        norm: Option<&'m Norm>,
        spec: &LayerSpec,
    ) -> Result<(), GpuError> {
        let branch = match norm {
            Some(norm) => {
                let eps = spec.post_norm_eps.unwrap_or(self.h.norm_eps);
                self.norm(norm, eps, Left(branch), Left(Intermediate::Post))?;
                Intermediate::Post
            }
            None => branch,
        };
        self.pending = Some((Left(branch), spec.residual_scale));
        Ok(())
    }

    /// Copies the rows, of `width` values, that have outputs.
    fn gather(&mut self, from: Name<'m>, to: Intermediate, n_outputs: u32, width: u32) {
        let args = EmbedArgs {
            n_embd: width,
            n_vocab: self.rows.n,
            n_rows: n_outputs,
            row_bytes: 4 * width,
            scale: 1.0,
        };
        self.plain(
            &EMBED,
            &args,
            &[from, Name::Input(Input::OutputRows), Left(to)],
        );
    }
}
