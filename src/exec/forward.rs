//! One forward pass: tokens of some sequences in, logits out. Read this file first.
//!
//! A batch has slots, one for each sequence, and each slot has some tokens at adjacent positions.
//! Every matrix is row-major with one row per token, slot by slot. Products and norms process all
//! rows together; everything that depends on a sequence (positions, keys and values, adapters) is
//! processed slot by slot.

use super::activation::{gaussian_top_k, relu_mul, squared_relu, xielu};
use super::alt_up::Streams;
use super::arena::{Arena, Frame, counted};
use super::batch::{Adapters, Outputs, Rows, Slot, SlotSize, Wanted};
use super::latent::LatentBuffers;
use super::linear::{
    Ctx, MAX_EXPERTS, Product, RowAdapters, Scratch, Sizes, linear, linear_from, single_rows,
};
use super::probe::{Probe, Tap};
use super::recurrent::{self, Mixing};
use crate::arch::{Arch, AttnParams, AttnPartial, KV_BLOCK, MAX_HEAD_DIM};
use crate::exec::SessionError;
use crate::gguf::Gguf;
use crate::model::{
    Activation, Attn, AttnSpec, Both, FeedForward, Ffn, FfnSpec, Gating, Hparams, Laurel, Layer,
    LayerSpec, MAX_EXPERT, Mixer, Model, Moe, MoeSpec, MtpInput, Norm, NormKind, Norms, PerLayer,
    PerLayerInputs, QkNorm, Recurrent, RecurrentSpec, RopeId, RopeOrder, Temperature, Weight,
    Weights,
};
use crate::team::Crew;
use std::ops::Range;
use std::sync::atomic::AtomicU64;

/// Query rows that one attention task handles at a time.
const ATTN_ROWS: usize = 128;
/// Pieces of one token's keys that one task merges: a few microseconds of work.
const FEW_PIECES: usize = 16;
/// Logits that one task caps: some ten microseconds of work.
const LOGITS: usize = 4096;
/// Most query heads that can share a key/value head: bounds the rows of a task.
pub(super) const MAX_GROUP: usize = 1024;

/// Rows of a sum of experts' outputs that one task handles.
const SUM_ROWS: usize = 16;
/// Lower bound of the sum that divides the weights of a token's experts: the smallest normal `f16`,
/// as in llama.cpp.
const MIN_WEIGHT_SUM: f32 = 6.103_515_6e-5;

/// The ropes of a model with the frequencies for a session, which depend on its context length.
#[derive(Clone, Debug)]
pub(crate) struct RopeTables {
    ropes: Vec<RopeTable>,
}

#[derive(Clone, Debug)]
struct RopeTable {
    order: RopeOrder,
    /// Frequency of each pair of dimensions.
    frequencies: Vec<f32>,
    /// Factor on cosines and sines.
    factor: f32,
    /// Number of pairs of the ropes before it.
    first: usize,
}

impl RopeTables {
    pub(crate) fn new(model: &Model, n_ctx: usize) -> RopeTables {
        let w = model.weights();
        let mut ropes = Vec::<RopeTable>::new();
        for rope in &model.hparams().ropes {
            let factors = match &w.rope_factors_short_long {
                Some((_, long)) if n_ctx > rope.n_ctx_orig => Some(long),
                Some((short, _)) => Some(short),
                None => w.rope_factors.as_ref(),
            };
            let (frequencies, factor) =
                rope.frequencies(factors.filter(|_| rope.factors).map(Vec::as_slice));
            let first = ropes
                .last()
                .map_or(0, |last| last.first + last.frequencies.len());
            ropes.push(RopeTable {
                order: rope.order,
                frequencies,
                factor,
                first,
            });
        }
        RopeTables { ropes }
    }

    /// Identifies tables: a hash (FNV-1a) of everything on which angles depend.
    pub(super) fn fingerprint(&self) -> u64 {
        let of_table = |table: &RopeTable| {
            let values = table
                .frequencies
                .iter()
                .chain([&table.factor])
                .map(|x| x.to_bits());
            values
                .chain([table.order as u32, table.first as u32])
                .collect::<Vec<u32>>()
        };
        let values = self.ropes.iter().flat_map(of_table);
        values.fold(0xcbf2_9ce4_8422_2325, |hash, x| {
            (hash ^ u64::from(x)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    /// Number of cosines, or sines, for `m` tokens.
    pub(super) fn n_angles(h: &Hparams, m: usize) -> usize {
        h.ropes.iter().map(|rope| m * rope.n_dims / 2).sum()
    }

    /// Cosines and sines of the positions from `pos` on, for the rows `rows` of `m`: `(m,
    /// n_dims/2)` for each rope, one after the other.
    pub(super) fn angles(
        &self,
        arch: Arch,
        pos: usize,
        (rows, m): (Range<usize>, usize),
        cos: &mut [f32],
        sin: &mut [f32],
    ) {
        for RopeTable {
            frequencies,
            factor,
            first,
            ..
        } in &self.ropes
        {
            let n = frequencies.len();
            let begin = m * first + rows.start * n;
            let [cos, sin] =
                [&mut *cos, &mut *sin].map(|x| x[begin..][..rows.len() * n].chunks_exact_mut(n));
            for (i, (cos, sin)) in cos.zip(sin).enumerate() {
                arch.rope_angles(cos, sin, frequencies, (pos + i) as f32, *factor);
            }
        }
    }

    /// Pairs of dimensions that all ropes together turn.
    pub(super) fn n_pairs(&self) -> usize {
        self.ropes.iter().map(|rope| rope.frequencies.len()).sum()
    }

    /// [`RopeTables::angles`] of one position, without the factors on keys and queries.
    pub(super) fn unscaled_angles(&self, arch: Arch, pos: usize, cos: &mut [f32], sin: &mut [f32]) {
        for RopeTable {
            frequencies, first, ..
        } in &self.ropes
        {
            let pairs = *first..first + frequencies.len();
            arch.rope_angles(
                &mut cos[pairs.clone()],
                &mut sin[pairs],
                frequencies,
                pos as f32,
                1.0,
            );
        }
    }

    /// A rope by the angles of `m` tokens.
    pub(super) fn rotation<'a>(
        &self,
        arch: Arch,
        id: RopeId,
        m: usize,
        cos: &'a [f32],
        sin: &'a [f32],
    ) -> Rotation<'a> {
        let RopeTable {
            order,
            ref frequencies,
            first,
            ..
        } = self.ropes[id.index()];
        let n_pairs = frequencies.len();
        let [cos, sin] = [cos, sin].map(|x| &x[m * first..][..m * n_pairs]);
        Rotation {
            arch,
            order,
            n_pairs,
            cos,
            sin,
        }
    }
}

/// A rope at the positions of some tokens.
#[derive(Clone, Copy)]
pub(super) struct Rotation<'a> {
    arch: Arch,
    order: RopeOrder,
    n_pairs: usize,
    /// `(m, n_pairs)`.
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Rotation<'_> {
    /// Rotates a head of `token`.
    pub(super) fn apply(&self, token: usize, head: &mut [f32]) {
        let [cos, sin] = [self.cos, self.sin].map(|x| &x[token * self.n_pairs..][..self.n_pairs]);
        let x = &mut head[..2 * self.n_pairs];
        match self.order {
            RopeOrder::Norm => self.arch.rope_norm(x, cos, sin),
            RopeOrder::NeoX => self.arch.rope_neox(x, cos, sin),
        }
    }
}

/// Inputs and outputs of a pass.
pub(crate) struct Pass<'a, 's> {
    pub(crate) model: &'a Model,
    /// Slots, whose rows are already numbered.
    pub(crate) slots: &'a mut [Slot<'s>],
    /// Has memory for the rows with logits.
    pub(crate) outputs: &'a mut Outputs,
    /// Outputs requested for rows with outputs.
    pub(crate) wanted: Wanted,
    /// Called before every layer; `true` cancels the pass.
    pub(crate) cancelled: &'a dyn Fn() -> bool,
    /// See [`Ctx::adapter_nanos`].
    pub(crate) adapter_nanos: &'a AtomicU64,
    /// What comes next; it is computed from there to layer `end`, or to where it pauses, and moved
    /// there. What was left in the arena before is still there: a pass of the same size takes
    /// the same buffers.
    pub(crate) at: &'a mut LayerAt,
    pub(crate) end: usize,
    /// If it may pause.
    pub(crate) pause: Option<Pause<'a>>,
    /// If layers are left to a device, the destination of the residual stream, `(rows, n_embd)`.
    pub(crate) hidden: Option<&'a mut [f32]>,
}

/// Parts of a layer: products before attention, attention, the product behind it, the first
/// products of a dense feed-forward layer, its last one. Other mixers and feed-forward layers are
/// one part, and so is the whole last layer of the model, as little of it is computed for a prompt.
pub(crate) const N_PARTS: usize = 5;
const ATTEND: usize = 1;
const ATTENDED: usize = 2;
const FFN: usize = 3;
const FFN_DOWN: usize = 4;
/// Regions of a slot's attention that may pause, at most, and tiles per thread in each of them, at
/// least.
const N_PIECES: usize = 16;
const LEAST_TILES: usize = 2;

/// What of a pass is to be computed next.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LayerAt {
    pub(crate) layer: usize,
    pub(crate) part: usize,
    /// Tiles of that part's products, or of attention, that are computed.
    n_tiles: usize,
    /// The layer's first recurrence.
    cell: usize,
}

impl LayerAt {
    /// Whether something was computed.
    pub(crate) fn is_begun(self) -> bool {
        (self.layer, self.part) != (0, 0)
    }

    /// Goes on to a part; returns whether the pass pauses before it.
    fn pauses_before(&mut self, layer: usize, part: usize, pause: Option<Pause<'_>>) -> bool {
        *self = LayerAt {
            layer,
            part,
            n_tiles: 0,
            cell: self.cell,
        };
        pause.is_some_and(|pause| pause(*self))
    }
}

/// Is called between two parts of a pass, or pieces of a part's products, with what comes next;
/// `true` pauses the pass.
pub(crate) type Pause<'a> = &'a dyn Fn(LayerAt) -> bool;

/// What all products of a pass need.
#[derive(Clone, Copy)]
pub(super) struct Base<'a> {
    pub(super) arch: Arch,
    pub(super) crew: &'a Crew<'a>,
    gguf: &'a Gguf,
    adapter_nanos: &'a AtomicU64,
}

impl<'a> Base<'a> {
    /// For products whose rows have these adapters, the first `n_generated` being those of
    /// generated tokens.
    pub(super) fn with(self, adapters: RowAdapters<'a>, n_generated: usize) -> Ctx<'a> {
        let Base {
            arch,
            crew,
            gguf,
            adapter_nanos,
        } = self;
        Ctx {
            arch,
            crew,
            gguf,
            adapters,
            n_generated,
            adapter_nanos: Some(adapter_nanos),
        }
    }
}

/// The adapters of rows, those of slot `i` up to `ends[i]`.
pub(super) fn row_adapters<'a>(slots: &'a Adapters<'a, '_>, ends: &'a [u32]) -> RowAdapters<'a> {
    match slots.0 {
        [slot] => RowAdapters::All(&slot.seq.adapters.attached),
        _ if slots
            .0
            .iter()
            .all(|slot| slot.seq.adapters.attached.is_empty()) =>
        {
            RowAdapters::All(&[])
        }
        _ => RowAdapters::Slots { slots, ends },
    }
}

/// The buffers of a pass.
struct Buffers<'a> {
    x: &'a mut [f32],
    normed: &'a mut [f32],
    branch: &'a mut [f32],
    /// The output of a recurrent mixer beside attention, of a side path, or of a dense layer
    /// beside a mixture.
    beside: &'a mut [f32],
    /// What layers have for tokens, `(m, n_layer·n)`, and the rows of their table; `n` values for
    /// each row of a layer.
    per_layer: &'a mut [f32],
    per_layer_table: &'a mut [f32],
    per_layer_gate: &'a mut [f32],
    /// Of a block for multi-token prediction, normed embeddings and states side by side, `(m,
    /// 2·n_embd)`.
    mtp: &'a mut [f32],
    streams: Streams<'a>,
    /// See [`Mixing::first_values`].
    first_values: &'a mut [f32],
    /// The middle of a layer's side path.
    laurel: &'a mut [f32],
    /// Room for [`AttnBuffers`], [`FfnBuffers`], or those of a recurrent mixer.
    inner: &'a mut [u8],
    /// See [`RopeTables::angles`].
    cos: &'a mut [f32],
    sin: &'a mut [f32],
    /// Ends of each slot's rows: among all rows, among those that the last layer computes, and
    /// among those of one expert or those with logits.
    ends: &'a [u32],
    output_ends: &'a [u32],
    expert_ends: &'a mut [u32],
    moe: MoeBuffers<'a>,
    scratch: Scratch<'a>,
}

/// Buffers of attention; keys and values have `m_kv` rows, the other buffers `m`.
struct AttnBuffers<'a> {
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
    /// Queries and outputs by KV head, slot by slot: `(n_head_kv, m_padded, n_group, head_dim)`.
    q_by_head: &'a mut [f32],
    out_by_head: &'a mut [f32],
    attn: &'a mut [f32],
    gate: &'a mut [f32],
    /// Queries and gates as they come from their matrix.
    q_gate: &'a mut [f32],
    latent: LatentBuffers<'a>,
    /// Partial results of slots with one row: an [`AttnPartial`] for each of `(slot, n_head_kv,
    /// n_pieces)`.
    partials: &'a mut [f32],
}

/// Sizes of [`AttnBuffers`].
#[derive(Clone, Copy)]
struct AttnSizes {
    m_kv: usize,
    m: usize,
    /// The number of rows, padded slot by slot to whole tiles.
    m_padded: usize,
    /// Number of slots with one row, times the pieces of the longest sequence.
    n_partials: usize,
}

impl AttnSizes {
    fn of<'k>(
        spec: &AttnSpec,
        slots: impl Iterator<Item = SlotSize<'k>> + Clone,
        rows: Rows,
    ) -> AttnSizes {
        let sizes = || slots.clone().map(|slot| rows.n(&slot)).filter(|&n| n > 0);
        let longest = slots
            .clone()
            .map(|slot| slot.n_past + slot.n_tokens)
            .max()
            .unwrap_or(0);
        let n_pieces = slots
            .clone()
            .map(|slot| slot.layout.max_pieces(longest))
            .max()
            .unwrap_or(0);
        AttnSizes {
            m_kv: slots.clone().map(|slot| slot.n_tokens).sum(),
            m: sizes().sum(),
            m_padded: sizes().map(|n| attn_tiles(spec, n).1).sum(),
            n_partials: sizes().filter(|&n| n == 1).count() * n_pieces,
        }
    }
}

impl<'a> AttnBuffers<'a> {
    fn take(frame: &mut Frame<'a>, spec: &AttnSpec, sizes: AttnSizes) -> AttnBuffers<'a> {
        let (
            n_q,
            n_attn,
            AttnSizes {
                m_kv,
                m,
                m_padded,
                n_partials,
            },
        ) = (spec.n_q(), spec.n_out(), sizes);
        AttnBuffers {
            q: frame.take(m * n_q),
            k: frame.take(m_kv * spec.n_k()),
            v: frame.take(m_kv * spec.n_v()),
            q_by_head: frame.take(m_padded * n_q),
            out_by_head: frame.take(m_padded * n_attn),
            attn: frame.take(m * n_attn),
            gate: frame.take(if spec.gated { m * n_attn } else { 0 }),
            q_gate: frame.take(if spec.gate_in_q { 2 * m * n_q } else { 0 }),
            latent: LatentBuffers::take(frame, spec, m_kv, m),
            partials: frame.take(n_partials * AttnPartial::len(spec.n_head, spec.head_dim_v)),
        }
    }
}

/// Buffers of a feed-forward layer.
struct FfnBuffers<'a> {
    gate: &'a mut [f32],
    up: &'a mut [f32],
}

impl<'a> FfnBuffers<'a> {
    fn take(frame: &mut Frame<'a>, m: usize, n_ff: usize) -> FfnBuffers<'a> {
        FfnBuffers {
            gate: frame.take(m * n_ff),
            up: frame.take(m * n_ff),
        }
    }
}

/// Buffers of a mixture of experts.
struct MoeBuffers<'a> {
    /// `(m, n_expert)`.
    router: &'a mut [f32],
    /// `(m, n_used)`.
    chosen: &'a mut [u32],
    weights: &'a mut [f32],
    /// Indices in `chosen`, in the order in which their experts are computed.
    slots: &'a mut [u32],
    x: &'a mut [f32],
    y: &'a mut [f32],
    /// What experts read, and the sum of what they write, if those are shorter vectors.
    latent: &'a mut [f32],
}

/// Tokens per attention task, and the padded number of tokens, which is never 0.
pub(super) fn attn_tiles(spec: &AttnSpec, m: usize) -> (usize, usize) {
    let m = m.max(1);
    let tile = (ATTN_ROWS / spec.n_group()).clamp(1, m);
    (tile, m.next_multiple_of(tile))
}

/// Runs `f` with memory for products of `m` rows with any matrix of the model, outside of a pass;
/// rows count as generated.
pub(crate) fn with_scratch(
    model: &Model,
    crew: &Crew<'_>,
    arena: &mut Arena,
    m: usize,
    f: impl FnOnce(&mut Scratch<'_>),
) -> Result<(), SessionError> {
    f(&mut arena
        .plan(|frame| Scratch::take(frame, Sizes::of(model, crew.n_threads()), (m, 0), 0))?);
    Ok(())
}

/// Bytes of the buffers of a pass over slots of these sizes.
pub(super) fn buffer_bytes<'k>(
    sizes: Sizes<'_>,
    slots: impl Iterator<Item = SlotSize<'k>> + Clone,
) -> u64 {
    let n_outputs = slots.clone().map(|slot| slot.n_outputs).sum();
    counted(|frame| Buffers::take(frame, sizes, slots.clone(), n_outputs)) as u64
}

impl<'a> Buffers<'a> {
    fn take<'k>(
        frame: &mut Frame<'a>,
        sizes: Sizes<'_>,
        slots: impl Iterator<Item = SlotSize<'k>> + Clone,
        n_last: usize,
    ) -> Buffers<'a> {
        let h = sizes.h;
        let (m, n_slots): (usize, usize) = (
            slots.clone().map(|slot| slot.n_tokens).sum(),
            slots.clone().count(),
        );
        let most = |size: fn(&MoeSpec) -> usize| h.mixtures().map(size).max().unwrap_or(0);
        let (n_expert, n_used) = (most(|x| x.n_expert), most(|x| x.n_used));
        let n_latent = most(|x| x.latent.unwrap_or(0));
        let n_expert_io = h.n_embd.max(n_latent);
        let (m_moe, m_single) = (if n_expert > 0 { m } else { 0 }, single_rows(h));
        // Where a prompt's last row alone is left, it is taken like the row of a slot with one.
        let attention = h
            .attention()
            .flat_map(|spec| [Rows::All, Rows::Outputs].map(|rows| (spec, rows)));
        let attention = attention.map(|(spec, rows)| {
            counted(|frame| {
                AttnBuffers::take(frame, spec, AttnSizes::of(spec, slots.clone(), rows))
            })
        });
        let recurrent = h.recurrent().map(|spec| recurrent::bytes(spec, m));
        let is_both = |layer: &LayerSpec| {
            matches!(
                (&layer.mixer, &layer.ffn),
                (Mixer::Both(..), _) | (_, FfnSpec::Both(..))
            )
        };
        let has_both = h.layers.iter().any(is_both) || h.streams.is_some();
        let (n_stream, laurel_rank) = h
            .streams
            .map_or((0, 0), |spec| (spec.n_stream, spec.laurel_rank));
        let n_ff = h
            .layers
            .iter()
            .map(|layer| layer.ffn.n_ff())
            .max()
            .unwrap_or(0);
        let ffn = counted(|frame| FfnBuffers::take(frame, m.max(m_single), n_ff));
        let n_angles = RopeTables::n_angles(h, m);
        let mut ends = |rows: Rows| {
            let ends = frame.take::<u32>(n_slots);
            let mut last = 0;
            for (end, slot) in ends.iter_mut().zip(slots.clone()) {
                last += rows.n(&slot) as u32;
                *end = last;
            }
            &*ends
        };
        let [ends, output_ends] = [ends(Rows::All), ends(Rows::Outputs)];
        let rank = slots.clone().map(|slot| slot.rank).max().unwrap_or(0);
        let n_generated: usize = slots
            .clone()
            .take_while(|slot| slot.is_generated)
            .map(|slot| slot.n_tokens)
            .sum();
        // With outputs, all rows of the last layer count as generated.
        let has_outputs = slots.clone().any(|slot| slot.n_outputs > 0);
        let n_rows = (
            if has_outputs {
                n_generated.max(n_last)
            } else {
                n_generated
            },
            m - n_generated,
        );
        Buffers {
            x: frame.take(m * h.n_embd),
            normed: frame.take(m * h.n_embd),
            branch: frame.take(m * h.n_embd),
            beside: frame.take(if has_both { m * h.n_embd } else { 0 }),
            per_layer: frame.take(m * h.n_layer * h.per_layer_embd.unwrap_or(0)),
            per_layer_table: frame.take(m * h.n_layer * h.per_layer_embd.unwrap_or(0)),
            per_layer_gate: frame.take(m * h.per_layer_embd.unwrap_or(0)),
            mtp: frame.take(if h.is_mtp { 2 * m * h.n_embd } else { 0 }),
            streams: Streams {
                all: frame.take(m * n_stream * h.n_embd),
                room: frame.take(if n_stream > 0 { m * h.n_embd } else { 0 }),
                router: frame.take(m * n_stream),
            },
            first_values: frame.take(if h.shares_values() { m * h.n_embd } else { 0 }),
            laurel: frame.take(m * laurel_rank),
            inner: frame.take(attention.chain(recurrent).fold(ffn, usize::max)),
            cos: frame.take(n_angles),
            sin: frame.take(n_angles),
            ends,
            output_ends,
            expert_ends: frame.take(n_slots),
            moe: MoeBuffers {
                router: frame.take(m_moe * n_expert),
                chosen: frame.take(m_moe * n_used),
                weights: frame.take(m_moe * n_used),
                slots: frame.take(m_moe * n_used),
                x: frame.take(m_moe * n_expert_io),
                y: frame.take(m_moe.max(m_single) * n_expert_io),
                latent: frame.take(2 * m_moe * n_latent),
            },
            scratch: Scratch::take(frame, sizes, n_rows, rank),
        }
    }

    /// Keeps only the first `m` rows.
    fn keep_rows(&mut self, m: usize, n_embd: usize) {
        for rows in [&mut self.x, &mut self.normed, &mut self.branch] {
            *rows = &mut std::mem::take(rows)[..m * n_embd];
        }
    }
}

/// Moves the rows that the last layer computes to the front.
fn gather(slots: &[Slot<'_>], rows: &mut [f32], n: usize) {
    for slot in slots {
        let from = slot.row + slot.first_last();
        rows.copy_within(from * n..(from + slot.n_outputs()) * n, slot.output * n);
    }
}

/// Of those, moves the rows with logits to the front.
fn gather_logits(slots: &[Slot<'_>], rows: &mut [f32], n: usize) {
    let mut to = 0;
    for slot in slots {
        let from = slot.outputs(slot.first_output);
        to += from.len();
        rows.copy_within(from.start * n..from.end * n, (to - from.len()) * n);
    }
}

/// Runs a pass and writes the requested logits into `outputs`. After an error the cache contains
/// nothing new that is valid.
pub(crate) fn forward(
    pass: Pass<'_, '_>,
    crew: &Crew<'_>,
    arena: &mut Arena,
    probe: &mut dyn Probe,
) -> Result<(), SessionError> {
    let Pass {
        model,
        slots,
        outputs,
        wanted,
        cancelled,
        adapter_nanos,
        at,
        end,
        pause,
        hidden,
    } = pass;
    let (h, w) = (model.hparams(), model.weights());
    let base = Base {
        arch: model.arch(),
        crew,
        gguf: model.gguf(),
        adapter_nanos,
    };
    let n_outputs = slots.iter().map(Slot::n_outputs).sum();
    let m: usize = slots.iter().map(|slot| slot.tokens.len()).sum();
    let n_last = if probe.sees_all_rows() { m } else { n_outputs };
    let sizes = Sizes::of(model, crew.n_threads());
    let mut b =
        arena.plan(|frame| Buffers::take(frame, sizes, slots.iter().map(Slot::size), n_last))?;
    if !at.is_begun() {
        for slot in &*slots {
            slot.seq.rope.angles(
                base.arch,
                slot.pos(),
                (Rows::All.range(slot), m),
                b.cos,
                b.sin,
            );
        }

        embed(base, h, w, slots, b.x, b.normed);
        if let Some(w) = &w.mtp {
            mtp_inputs(base, h, w, slots, &mut b);
        }
        probe.tensor(Tap::InpEmbd, 0, b.x);

        if let Some(w) = &w.per_layer {
            per_layer_inputs(base, h, w, slots, &mut b);
        }

        if let Some(w) = &w.alt_up {
            let slots = Adapters(slots);
            let ctx = base.with(row_adapters(&slots, b.ends), Rows::All.n_generated(slots.0));
            b.streams.begin(ctx, &mut b.scratch, h, w, b.x);
        }
    }

    // Which rows are left; once only those with logits are, all of them.
    let mut rows = Rows::All;
    for (i, (spec, layer)) in h
        .layers
        .iter()
        .zip(&w.layers)
        .enumerate()
        .take(end)
        .skip(at.layer)
    {
        if cancelled() {
            return Err(SessionError::Cancelled);
        }
        let (ctx, is_last) = (base.with(RowAdapters::All(&[]), 0), i + 1 == w.layers.len());
        // Of tokens without logits nobody reads more of the last layer than keys and values, or a
        // state.
        if is_last && !probe.sees_all_rows() {
            rows = Rows::Outputs;
        }
        let pause_here = pause.filter(|_| !is_last);
        if at.part < FFN {
            if !first_half(
                base,
                h,
                (spec, layer),
                rows,
                slots,
                &mut b,
                (&mut *at, pause_here),
                probe,
            )? {
                return Ok(());
            }
            if rows == Rows::Outputs && n_outputs == 0 {
                at.pauses_before(h.n_layer, 0, pause);
                return Ok(());
            }
            if at.pauses_before(i, FFN, pause_here) {
                return Ok(());
            }
        }
        let n_rows = b.x.len() / h.n_embd;
        match &layer.ffn {
            FeedForward::Dense(ffn) => {
                let show = |tap: Tap, values: &[f32]| probe.tensor(tap, i, values);
                let (n_generated, slots) = (n_generated(is_last, rows, slots), Adapters(slots));
                let adapters = row_adapters(
                    &slots,
                    if rows == Rows::All {
                        b.ends
                    } else {
                        b.output_ends
                    },
                );
                let ctx = base.with(adapters, n_generated);
                let inner = FfnBuffers::take(&mut Frame::of(b.inner), n_rows, ffn.up.w.n_out);
                let steps = (&mut *at, pause_here);
                if !feed_forward_from(
                    ctx,
                    &mut b.scratch,
                    ffn,
                    b.normed,
                    n_rows,
                    inner,
                    b.branch,
                    steps,
                    show,
                ) {
                    return Ok(());
                }
            }
            FeedForward::Moe(moe) => {
                let n_generated = n_generated(is_last, rows, slots);
                experts(
                    base,
                    h,
                    moe,
                    (n_generated, n_rows),
                    &Adapters(slots),
                    rows,
                    &mut b,
                );
            }
            FeedForward::Both(ffn) => {
                let n_generated = n_generated(is_last, rows, slots);
                both(
                    base,
                    h,
                    ffn,
                    (n_generated, n_rows),
                    &Adapters(slots),
                    rows,
                    &mut b,
                );
            }
            FeedForward::None => {}
        }
        if spec.ffn != FfnSpec::None {
            probe.tensor(Tap::FfnOut, i, b.branch);
            add_branch(
                ctx,
                h,
                spec,
                layer.post_ffn_norm.as_ref(),
                b.x,
                b.branch,
                b.normed,
            );
        }
        if let Some(w) = &layer.per_layer {
            let (n_generated, slots) = (n_generated(is_last, rows, slots), Adapters(slots));
            let adapters = row_adapters(
                &slots,
                if rows == Rows::All {
                    b.ends
                } else {
                    b.output_ends
                },
            );
            let with_adapters = base.with(adapters, n_generated);
            if let Some(w) = &layer.alt_up {
                b.streams.correct(with_adapters, &mut b.scratch, h, w, b.x);
            }
            per_layer(with_adapters, h, w, i, &mut b);
            if layer.alt_up.is_some() {
                norm(ctx, h, Some(&w.norm), b.branch, b.normed);
                b.streams.add(ctx, h, b.normed);
            } else {
                add_branch(ctx, h, spec, Some(&w.norm), b.x, b.branch, b.normed);
            }
        }
        if let Some(scale) = layer.output_scale {
            b.x.iter_mut().for_each(|x| *x *= scale);
        }
        probe.tensor(Tap::LOut, i, b.x);
        if rows == Rows::All {
            pool(base.arch, slots, i, b.x, h.n_embd);
        }
        if at.pauses_before(i + 1, 0, pause) && !is_last {
            return Ok(());
        }
    }

    if end < h.n_layer {
        hidden
            .into_iter()
            .for_each(|hidden| hidden.copy_from_slice(b.x));
        return Ok(());
    }
    if let Some(w) = &w.alt_up {
        let (n_generated, slots) = (n_generated(true, rows, slots), Adapters(slots));
        let ends = if rows == Rows::All {
            b.ends
        } else {
            b.output_ends
        };
        let ctx = base.with(row_adapters(&slots, ends), n_generated);
        b.streams.end(ctx, &mut b.scratch, h, w, (b.x, b.branch));
    }
    if n_outputs > 0 {
        if rows == Rows::All {
            gather(slots, b.x, h.n_embd);
        }
        let (x, normed) = (
            &b.x[..n_outputs * h.n_embd],
            &mut b.normed[..n_outputs * h.n_embd],
        );
        let slots = Adapters(slots);
        let ctx = base.with(row_adapters(&slots, b.output_ends), n_outputs);
        norm(ctx, h, w.output_norm.as_ref(), x, normed);
        probe.tensor(Tap::ResultNorm, 0, normed);
        if wanted != Wanted::Logits {
            outputs.states.extend_from_slice(normed);
        }
        if wanted == Wanted::States {
            return Ok(());
        }
        let n_logits = slots.0.iter().map(Slot::n_logits).sum();
        if n_logits == 0 {
            return Ok(());
        }
        gather_logits(slots.0, normed, h.n_embd);
        let mut last = 0;
        for (end, slot) in b.expert_ends.iter_mut().zip(slots.0) {
            last += slot.n_logits() as u32;
            *end = last;
        }
        let ctx = base.with(row_adapters(&slots, b.expert_ends), n_logits);
        let (logits, normed) = (&mut *outputs.logits, &normed[..n_logits * h.n_embd]);
        linear(
            ctx,
            &mut b.scratch,
            normed,
            n_logits,
            &mut [Product::of(&w.output, logits, n_logits)],
        );
        if wanted != Wanted::Raw {
            let (finish, capped) = (h.logit_finish(), h.final_softcap.is_some());
            ctx.crew
                .when(capped)
                .for_chunks(logits, LOGITS, |_, logits| finish.row(logits));
        }
        probe.tensor(Tap::ResultOutput, 0, logits);
    }
    Ok(())
}

/// A layer up to what its feed-forward layer reads, in `b.normed` and `b.x`; returns whether it did
/// not pause. Of the rows that nobody reads it only leaves keys and values, or a state.
fn first_half(
    base: Base<'_>,
    h: &Hparams,
    (spec, layer): (&LayerSpec, &Layer),
    rows: Rows,
    slots: &mut [Slot<'_>],
    b: &mut Buffers<'_>,
    (at, pause): (&mut LayerAt, Option<Pause<'_>>),
    probe: &mut dyn Probe,
) -> Result<bool, SessionError> {
    let i = at.layer;
    let (ctx, is_last) = (base.with(RowAdapters::All(&[]), 0), i + 1 == h.n_layer);
    let (has_mixer, has_ffn) = (spec.mixer != Mixer::None, spec.ffn != FfnSpec::None);
    if (at.part, at.n_tiles) == (0, 0) {
        if let Some(w) = &layer.alt_up {
            let slots = Adapters(slots);
            let ctx = base.with(row_adapters(&slots, b.ends), Rows::All.n_generated(slots.0));
            b.streams.predict(ctx, &mut b.scratch, h, w, b.x);
        }
        if has_mixer {
            norm(ctx, h, layer.attn_norm.as_ref(), b.x, b.normed);
            probe.tensor(Tap::AttnNorm, i, b.normed);
            if let Some(w) = &layer.alt_up {
                let slots = Adapters(slots);
                let ctx = base.with(row_adapters(&slots, b.ends), Rows::All.n_generated(slots.0));
                laurel(ctx, h, &w.laurel, b);
            }
        }
    }
    if has_mixer && !mixer(base, h, (spec, layer), rows, slots, b, (at, pause), probe)? {
        return Ok(false);
    }
    if rows == Rows::Outputs {
        let n_outputs = slots.iter().map(Slot::n_outputs).sum();
        if n_outputs == 0 {
            return Ok(true);
        }
        gather(slots, b.x, h.n_embd);
        gather(
            slots,
            b.per_layer,
            h.n_layer * h.per_layer_embd.unwrap_or(0),
        );
        if let Some(spec) = h.streams {
            gather(slots, b.streams.all, spec.n_stream * h.n_embd);
            gather(slots, b.beside, h.n_embd);
            b.streams.all =
                &mut std::mem::take(&mut b.streams.all)[..n_outputs * spec.n_stream * h.n_embd];
        }
        b.keep_rows(n_outputs, h.n_embd);
    }
    let n_rows = b.x.len() / h.n_embd;
    if let FeedForward::Moe(moe) = &layer.ffn
        && moe.spec.routes_early
    {
        let n_generated = n_generated(is_last, rows, slots);
        let ends = if rows == Rows::All {
            b.ends
        } else {
            b.output_ends
        };
        route(
            base,
            moe,
            (n_generated, n_rows),
            &Adapters(slots),
            ends,
            b.x,
            (&mut b.moe, &mut b.scratch),
        );
    }
    if spec.norms == Norms::Parallel {
        norm(ctx, h, layer.ffn_norm.as_ref(), b.x, b.normed);
    }
    if has_mixer {
        add_branch(
            ctx,
            h,
            spec,
            layer.post_attn_norm.as_ref(),
            b.x,
            b.branch,
            b.normed,
        );
    }
    if layer.alt_up.is_some() {
        let side = &b.beside[..b.x.len()];
        b.x.iter_mut()
            .zip(side)
            .for_each(|(x, side)| *x = (*x + side) * std::f32::consts::FRAC_1_SQRT_2);
    }
    probe.tensor(Tap::FfnInp, i, b.x);

    if has_ffn && !matches!(spec.norms, Norms::Shared | Norms::Parallel) {
        norm(ctx, h, layer.ffn_norm.as_ref(), b.x, b.normed);
        probe.tensor(Tap::FfnNorm, i, b.normed);
    }
    Ok(true)
}

/// Adds the rows of sequences whose hidden states are pooled after layer `i`.
fn pool(arch: Arch, slots: &mut [Slot<'_>], i: usize, x: &[f32], n: usize) {
    for slot in slots {
        let (position, rows) = (slot.pos(), Rows::All.range(slot));
        if let Some(pooling) = slot
            .seq
            .pooling
            .as_mut()
            .filter(|pooling| pooling.layer == i)
        {
            pooling.add(
                arch,
                slot.kind,
                position,
                &x[rows.start * n..rows.end * n],
                n,
            );
        }
    }
}

/// Number of rows computed as generated tokens, which come first. In the last layer, except for its
/// keys and values, and in the head these are all rows, as usually one row of a prompt is left;
/// unless there are no outputs and only a probe sees the rows, as before a backward pass, or only
/// hidden states of whole texts are wanted.
fn n_generated(is_last: bool, rows: Rows, slots: &[Slot<'_>]) -> usize {
    let has_outputs = slots
        .iter()
        .any(|slot| slot.n_outputs() > 0 && !slot.keeps_kind);
    if is_last && has_outputs {
        slots.iter().map(|slot| rows.of(slot).2).sum()
    } else {
        rows.n_generated(slots)
    }
}

/// Looks up and scales the embeddings of all tokens, and adds those of positions.
fn embed(
    base: Base<'_>,
    h: &Hparams,
    w: &Weights,
    slots: &[Slot<'_>],
    x: &mut [f32],
    buffer: &mut [f32],
) {
    let (arch, table) = (base.arch, &w.token_embd);
    let look_up = |table: &Weight, i: usize, x: &mut [f32]| {
        let bytes = table.row_bytes();
        arch.dequantize(table.dtype, &table.data(base.gguf)[i * bytes..][..bytes], x);
    };
    base.crew.when(x.len() > h.n_embd).for_chunk_pairs(
        x,
        h.n_embd,
        buffer,
        h.n_embd,
        |row, x, buffer| {
            let slot = &slots[slots.partition_point(|slot| slot.row <= row) - 1];
            let token = slot.tokens[row - slot.row] as usize;
            look_up(table, token, x);
            // A product with a one-hot vector: it selects one column of `A`.
            for (term, factor) in slot
                .seq
                .adapters
                .attached
                .iter()
                .filter_map(|a| a.term(table.site))
            {
                for (a, b) in term
                    .a()
                    .chunks_exact(h.n_vocab)
                    .zip(term.b().chunks_exact(h.n_embd))
                {
                    arch.add_scaled(x, b, factor * a[token]);
                }
            }
            if h.embd_scale != 1.0 {
                x.iter_mut().for_each(|x| *x *= h.embd_scale);
            }
            if let Some(table) = &w.position_embd {
                look_up(table, slot.pos() + row - slot.row, buffer);
                arch.add(x, buffer);
            }
            if let Some(first) = &w.token_types {
                arch.add(x, first);
            }
            if let Some(norm) = &w.embd_norm {
                buffer.copy_from_slice(x);
                norm_row(arch, h, norm, buffer, x);
            }
        },
    );
}

/// Replaces the embeddings of tokens in `b.x` by the inputs of a block for multi-token prediction.
fn mtp_inputs(base: Base<'_>, h: &Hparams, w: &MtpInput, slots: &[Slot<'_>], b: &mut Buffers<'_>) {
    let (n, m) = (h.n_embd, b.x.len() / h.n_embd);
    let x = &*b.x;
    base.crew.when(m > 1).for_chunks(b.mtp, 2 * n, |row, both| {
        let slot = &slots[slots.partition_point(|slot| slot.row <= row) - 1];
        let (embd, state) = both.split_at_mut(n);
        norm_row(base.arch, h, &w.embd_norm, &x[row * n..][..n], embd);
        norm_row(
            base.arch,
            h,
            &w.state_norm,
            &slot.states[(row - slot.row) * n..][..n],
            state,
        );
    });
    let ctx = base.with(RowAdapters::All(&[]), Rows::All.n_generated(slots));
    linear(
        ctx,
        &mut b.scratch,
        b.mtp,
        m,
        &mut [Product::of(&w.proj, b.x, m)],
    );
}

/// Computes in `b.per_layer` the layers' vectors for tokens, whose embeddings are in `b.x`.
fn per_layer_inputs(
    base: Base<'_>,
    h: &Hparams,
    w: &PerLayerInputs,
    slots: &[Slot<'_>],
    b: &mut Buffers<'_>,
) {
    let (arch, n, m) = (base.arch, w.proj.n_out, b.x.len() / h.n_embd);
    let adapters = Adapters(slots);
    let ctx = base.with(
        row_adapters(&adapters, b.ends),
        Rows::All.n_generated(slots),
    );
    linear(
        ctx,
        &mut b.scratch,
        b.x,
        m,
        &mut [Product::of_weight(&w.proj, b.per_layer, m)],
    );
    let (table, bytes) = (w.table.data(base.gguf), w.table.row_bytes());
    let (scale, table_scale) = (1.0 / (h.n_embd as f32).sqrt(), (w.norm.len() as f32).sqrt());
    base.crew.when(m > 1).for_chunk_pairs(
        b.per_layer,
        n,
        b.per_layer_table,
        n,
        |row, x, of_token| {
            let slot = &slots[slots.partition_point(|slot| slot.row <= row) - 1];
            let token = slot.tokens[row - slot.row] as usize;
            arch.dequantize(w.table.dtype, &table[token * bytes..][..bytes], of_token);
            let layers = x
                .chunks_exact_mut(w.norm.len())
                .zip(of_token.chunks_exact(w.norm.len()));
            for (x, of_token) in layers {
                x.iter_mut().for_each(|x| *x *= scale);
                let factor = rms_factor(arch, x, h.norm_eps);
                for ((x, w), of_token) in x.iter_mut().zip(&w.norm).zip(of_token) {
                    *x = (*x * factor * w + of_token * table_scale)
                        * std::f32::consts::FRAC_1_SQRT_2;
                }
            }
        },
    );
}

/// `1/√(mean(x²) + eps)`.
pub(super) fn rms_factor(arch: Arch, x: &[f32], eps: f32) -> f32 {
    1.0 / (arch.dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// Computes in `b.branch` what layer `i` adds from its vectors for tokens.
fn per_layer(ctx: Ctx<'_>, h: &Hparams, w: &PerLayer, i: usize, b: &mut Buffers<'_>) {
    let (n, m) = (w.gate.w.n_out, b.x.len() / h.n_embd);
    let gate = &mut b.per_layer_gate[..m * n];
    linear(
        ctx,
        &mut b.scratch,
        b.x,
        m,
        &mut [Product::of(&w.gate, gate, m)],
    );
    let of_tokens = &*b.per_layer;
    let times = |row: usize, gate: &mut [f32]| {
        ctx.arch
            .gelu_mul(gate, &of_tokens[(row * h.n_layer + i) * n..][..n])
    };
    ctx.crew.when(m > 1).for_chunks(gate, n, times);
    linear(
        ctx,
        &mut b.scratch,
        gate,
        m,
        &mut [Product::of(&w.proj, b.branch, m)],
    );
}

/// Computes in `b.beside` a layer's side path on `b.normed`.
fn laurel(ctx: Ctx<'_>, h: &Hparams, w: &Laurel, b: &mut Buffers<'_>) {
    let m = b.normed.len() / h.n_embd;
    let (low, side) = (
        &mut b.laurel[..m * w.left.w.n_out],
        &mut b.beside[..m * h.n_embd],
    );
    linear(
        ctx,
        &mut b.scratch,
        b.normed,
        m,
        &mut [Product::of(&w.left, low, m)],
    );
    linear(
        ctx,
        &mut b.scratch,
        low,
        m,
        &mut [Product::of(&w.right, b.branch, m)],
    );
    norm(ctx, h, Some(&w.norm), b.branch, side);
    ctx.arch.add(side, b.normed);
}

/// Applies a norm to each row of `x`; copies it if there is no norm.
pub(super) fn norm(ctx: Ctx<'_>, h: &Hparams, norm: Option<&Norm>, x: &[f32], y: &mut [f32]) {
    let Some(norm) = norm else {
        return y.copy_from_slice(x);
    };
    ctx.crew
        .when(y.len() > h.n_embd)
        .for_chunks(y, h.n_embd, |i, y| {
            norm_row(ctx.arch, h, norm, &x[i * h.n_embd..][..h.n_embd], y);
        });
}

fn norm_row(arch: Arch, h: &Hparams, norm: &Norm, x: &[f32], y: &mut [f32]) {
    match h.norm {
        NormKind::Rms => arch.rms_norm(y, x, &norm.w, h.norm_eps),
        NormKind::Layer | NormKind::LayerNoBias | NormKind::LayerPlain => {
            arch.layer_norm(y, x, &norm.w, &norm.b, h.norm_eps)
        }
    }
}

/// `x += scale · norm(branch)`, or `x = norm(x + scale · branch)`.
fn add_branch(
    ctx: Ctx<'_>,
    h: &Hparams,
    spec: &LayerSpec,
    post: Option<&Norm>,
    x: &mut [f32],
    branch: &[f32],
    normed: &mut [f32],
) {
    let (scale, of_stream) = (spec.residual_scale, spec.norms == Norms::Residual);
    let branch = match post {
        Some(_) if !of_stream => {
            norm(ctx, h, post, branch, normed);
            &*normed
        }
        _ => branch,
    };
    ctx.crew
        .when(x.len() > h.n_embd)
        .for_chunks(x, h.n_embd, |i, x| {
            let branch = &branch[i * h.n_embd..][..h.n_embd];
            match scale {
                1.0 => ctx.arch.add(x, branch),
                scale => ctx.arch.add_scaled(x, branch, scale),
            }
        });
    if of_stream {
        norm(ctx, h, post, x, normed);
        x.copy_from_slice(normed);
    }
}

/// Mixer of a layer on `b.normed`; leaves its output for `rows` in `b.branch`. Returns whether it
/// did not pause.
fn mixer(
    base: Base<'_>,
    h: &Hparams,
    (spec, layer): (&LayerSpec, &Layer),
    rows: Rows,
    slots: &mut [Slot<'_>],
    b: &mut Buffers<'_>,
    (at, pause): (&mut LayerAt, Option<Pause<'_>>),
    probe: &mut dyn Probe,
) -> Result<bool, SessionError> {
    if let (Some(spec), Some(w)) = (spec.recurrent(), &layer.recurrent) {
        recurrent(base, h, (spec, w), (at.layer, &mut at.cell), rows, slots, b);
    }
    let (Some(attn), Some(w)) = (spec.attention(), &layer.attn) else {
        return Ok(true);
    };
    let is_both = matches!(spec.mixer, Mixer::Both(..));
    if is_both {
        b.beside.copy_from_slice(b.branch);
    }
    let is_complete = attention(
        base,
        h,
        (attn, w),
        rows,
        slots,
        b,
        (at, pause.filter(|_| !is_both)),
        probe,
    )?;
    if is_both {
        base.arch.add(b.branch, b.beside);
    }
    Ok(is_complete)
}

/// Recurrent mixer of layer `i`, as [`mixer`]. All rows change the state.
fn recurrent(
    base: Base<'_>,
    h: &Hparams,
    (spec, w): (&RecurrentSpec, &Recurrent),
    (i, cell): (usize, &mut usize),
    rows: Rows,
    slots: &mut [Slot<'_>],
    b: &mut Buffers<'_>,
) {
    let m = b.normed.len() / h.n_embd;
    let (scratch, eps) = (&mut b.scratch, h.norm_eps);
    let first_values = &mut *b.first_values;
    let mut pass = Mixing {
        base,
        slots: &mut *slots,
        ends: b.ends,
        scratch,
        eps,
        cell: *cell,
        first_values,
    };
    let mixed = recurrent::mix(&mut pass, (spec, w), (b.normed, m), &mut Frame::of(b.inner));
    *cell = pass.cell;
    let n_generated = n_generated(i + 1 == h.n_layer, rows, slots);
    let n_in = w.output().map_or(h.n_embd, |output| output.w.n_in);
    if rows == Rows::Outputs {
        gather(slots, mixed, n_in);
    }
    let m = slots.iter().map(|slot| rows.of(slot).2).sum();
    if m > 0 {
        let (slots, ends) = (
            Adapters(slots),
            if rows == Rows::All {
                b.ends
            } else {
                b.output_ends
            },
        );
        let ctx = base.with(row_adapters(&slots, ends), n_generated);
        let branch = &mut b.branch[..m * h.n_embd];
        match w.output() {
            Some(w) => linear(
                ctx,
                &mut b.scratch,
                &mixed[..m * n_in],
                m,
                &mut [Product::of(w, branch, m)],
            ),
            None => branch.copy_from_slice(&mixed[..m * n_in]),
        }
    }
}

/// Attention of a layer on `b.normed`; leaves its output for `rows` in `b.branch`. Of the other
/// rows it only puts keys and values into the cache. Returns whether it did not pause.
fn attention(
    base: Base<'_>,
    h: &Hparams,
    (spec, w): (&AttnSpec, &Attn),
    rows: Rows,
    slots: &mut [Slot<'_>],
    b: &mut Buffers<'_>,
    (at, pause): (&mut LayerAt, Option<Pause<'_>>),
    probe: &mut dyn Probe,
) -> Result<bool, SessionError> {
    let (Base { arch, crew, .. }, i) = (base, at.layer);
    let sizes = AttnSizes::of(spec, slots.iter().map(Slot::size), rows);
    let AttnSizes { m_kv, m, .. } = sizes;
    let latent_spec = spec.latent.as_ref().zip(w.latent.as_deref());
    let n_generated = n_generated(i + 1 == h.n_layer, rows, slots);
    let ends = if rows == Rows::All {
        b.ends
    } else {
        b.output_ends
    };
    let AttnBuffers {
        q,
        k,
        v,
        q_by_head,
        out_by_head,
        attn,
        gate,
        q_gate,
        mut latent,
        partials,
    } = AttnBuffers::take(&mut Frame::of(b.inner), spec, sizes);
    let from_wq = if spec.gate_in_q {
        &mut *q_gate
    } else {
        &mut *q
    };
    if at.part < ATTEND {
        let (slots, n_generated_kv) = (Adapters(slots), Rows::All.n_generated(slots));
        let ctx = base.with(row_adapters(&slots, b.ends), n_generated_kv);
        let at_once =
            (m, n_generated) == (m_kv, n_generated_kv) && latent_spec.is_none() && !spec.shares_kv;
        if at_once {
            let products = &mut [
                Product::of(&w.wq, from_wq, m),
                Product::of(&w.wk, k, m),
                Product::of(&w.wv, v, m),
            ];
            if !linear_at(
                ctx,
                &mut b.scratch,
                b.normed,
                m,
                products,
                (&mut *at, pause),
            ) {
                return Ok(false);
            }
        } else {
            if let Some((of, weights)) = latent_spec {
                let (ctx, x) = ((ctx, &mut b.scratch), (&*b.normed, m_kv));
                latent.keys_values(ctx, (spec, of, w, weights), h.norm_eps, x, k, v);
            } else if !spec.shares_kv {
                let products = &mut [Product::of(&w.wk, k, m_kv), Product::of(&w.wv, v, m_kv)];
                linear(ctx, &mut b.scratch, b.normed, m_kv, products);
            }
            if rows == Rows::Outputs {
                gather(slots.0, b.normed, h.n_embd);
            }
            if m > 0 {
                let (ctx, x) = (
                    base.with(row_adapters(&slots, ends), n_generated),
                    &b.normed[..m * h.n_embd],
                );
                match latent_spec {
                    Some((of, weights)) => {
                        latent.queries(
                            (ctx, &mut b.scratch),
                            (spec, of, w, weights),
                            h.norm_eps,
                            (x, m),
                            from_wq,
                        );
                    }
                    None => linear(
                        ctx,
                        &mut b.scratch,
                        x,
                        m,
                        &mut [Product::of(&w.wq, from_wq, m)],
                    ),
                }
            }
        }
        if at.pauses_before(i, ATTEND, pause) {
            return Ok(false);
        }
    }
    // What follows changes queries, and the cache.
    let is_new = at.part == ATTEND && at.n_tiles == 0;
    if is_new {
        if spec.gate_in_q {
            let d = spec.head_dim;
            let to = q.chunks_exact_mut(d).zip(gate.chunks_exact_mut(d));
            for ((q, gate), from) in to.zip(q_gate.chunks_exact(2 * d)) {
                q.copy_from_slice(&from[..d]);
                gate.copy_from_slice(&from[d..]);
            }
        }
        probe.tensor(Tap::Qcur, i, q);
        if let Some(clip) = spec.clip {
            for x in [&mut *q, k, v] {
                x.iter_mut().for_each(|x| *x = x.clamp(-clip, clip));
            }
        }
        if spec.value_scale != 1.0 {
            v.iter_mut().for_each(|v| *v *= spec.value_scale);
        }
        if spec.qk_norm == Some(QkNorm::Full) {
            for (x, norm) in [(&mut *q, &w.q_norm), (&mut *k, &w.k_norm)] {
                let Some(norm) = norm else { continue };
                crew.when(x.len() > norm.len())
                    .for_chunks(x, norm.len(), |_, row| {
                        let factor = rms_factor(arch, row, h.norm_eps);
                        row.iter_mut()
                            .zip(norm)
                            .for_each(|(x, w)| *x = *x * factor * w);
                    });
            }
        }
        if spec.qk_norm == Some(QkNorm::LayerByHead) {
            for (x, norm) in [(&mut *q, &w.q_norm), (&mut *k, &w.k_norm)] {
                let Some(norm) = norm else { continue };
                crew.when(x.len() > norm.len())
                    .for_chunks(x, norm.len(), |_, row| {
                        for (x, w) in row
                            .chunks_exact_mut(spec.head_dim)
                            .zip(norm.chunks_exact(spec.head_dim))
                        {
                            let (from, no_bias) = (
                                &mut [0.0; MAX_HEAD_DIM][..x.len()],
                                &[0.0; MAX_HEAD_DIM][..x.len()],
                            );
                            from.copy_from_slice(x);
                            arch.layer_norm(x, from, w, no_bias, h.norm_eps);
                        }
                    });
            }
        }
    }
    let (q_norm, k_norm) = head_norms(spec, w);
    // The model decides which dimensions form pairs; a session's angles are already in `cos` and
    // `sin`.
    let rotation = spec
        .rope
        .map(|id| slots[0].seq.rope.rotation(arch, id, m_kv, b.cos, b.sin));
    let first_rotated = spec.latent.map_or(0, |latent| spec.head_dim - latent.n_rot);
    let rotate = |row: usize, x: &mut [f32]| {
        rotation
            .iter()
            .for_each(|rotation| rotation.apply(row, &mut x[first_rotated..]))
    };
    let norm_last = matches!(
        spec.qk_norm,
        Some(QkNorm::PerHeadRotated | QkNorm::PlainRotated)
    );
    let place = |row: usize, from: &[f32], norm: Option<&Vec<f32>>, to: &mut [f32]| match norm {
        Some(w) if norm_last => {
            let mut buffer = [0.0; MAX_HEAD_DIM];
            let buffer = &mut buffer[..from.len()];
            buffer.copy_from_slice(from);
            rotate(row, buffer);
            arch.rms_norm(to, buffer, w, h.norm_eps);
        }
        Some(w) => {
            arch.rms_norm(to, from, w, h.norm_eps);
            rotate(row, to);
        }
        None => {
            to.copy_from_slice(from);
            rotate(row, to);
        }
    };
    let (d, kv_layer) = (spec.head_dim, h.kv_layers[i]);
    let workers = crew.when(m_kv > 1);
    if is_new && !spec.shares_kv {
        if spec.value_norm {
            workers.for_chunks(v, spec.head_dim_v, |_, v| {
                let factor = rms_factor(arch, v, h.norm_eps);
                v.iter_mut().for_each(|v| *v *= factor);
            });
        }
        workers.for_chunks(k, spec.n_k(), |row, k| {
            let mut buffer = [0.0; MAX_HEAD_DIM];
            for k in k.chunks_exact_mut(d) {
                place(row, k, k_norm, &mut buffer[..d]);
                k.copy_from_slice(&buffer[..d]);
            }
        });
        probe.tensor(Tap::K, i, k);
        probe.tensor(Tap::V, i, v);
        for slot in &mut *slots {
            let (pos, range) = (slot.pos(), Rows::All.range(slot));
            let [k, v] = [(&*k, spec.n_k()), (&*v, spec.n_v())]
                .map(|(x, n)| &x[range.start * n..range.end * n]);
            slot.seq.kv.append(&workers, arch, kv_layer, pos, k, v)?;
            slot.seq.kv.convert(crew, arch, kv_layer);
        }
    }
    if m == 0 {
        return Ok(true);
    }

    // Slots with one row are processed together, each of the others alone.
    let (mut q_rest, mut out_rest, mut partials) = (&mut *q_by_head, &mut *out_by_head, partials);
    let q = Queries {
        values: q,
        norm: q_norm,
        place: &place,
        temperature: spec.temperature,
    };
    let layer = AttnLayer {
        arch,
        crew,
        spec,
        sinks: w.sinks.as_deref(),
        i: kv_layer,
        rows,
    };
    // Those of slots before, and those that were there.
    let (mut n_before, n_at_first) = (0, at.n_tiles);
    let mut rest = if at.part == ATTEND { &*slots } else { &[] };
    while let Some(first) = rest.first() {
        let n_rows = rows.of(first).2;
        let single = |slot: &Slot<'_>| rows.of(slot).2 == 1;
        let n = if n_rows == 1 {
            rest.iter().take_while(|slot| single(slot)).count()
        } else {
            1
        };
        let (group, tail) = rest.split_at(n);
        rest = tail;
        if n_rows == 0 {
            continue;
        }
        let m_padded = if n_rows == 1 {
            n
        } else {
            attn_tiles(spec, n_rows).1
        };
        let (q_here, q_tail) = q_rest.split_at_mut(m_padded * spec.n_q());
        let (out, out_tail) = out_rest.split_at_mut(m_padded * spec.n_out());
        (q_rest, out_rest) = (q_tail, out_tail);
        let n_tiles = if n_rows == 1 {
            1
        } else {
            layer.n_tiles(n_rows)
        };
        if n_rows == 1 && at.n_tiles == n_before {
            partials = layer.single_rows(group, &q, q_here, out, partials);
            at.n_tiles += 1;
        }
        let mut queries = (at.n_tiles == n_before).then_some(&q);
        let least = crew.n_threads() * LEAST_TILES;
        let at_once = if pause.is_some() {
            n_tiles.div_ceil(N_PIECES).max(least)
        } else {
            n_tiles
        };
        while at.n_tiles < n_before + n_tiles {
            if at.n_tiles > n_at_first && pause.is_some_and(|pause| pause(*at)) {
                return Ok(false);
            }
            let start = at.n_tiles - n_before;
            let tiles = start..(start + at_once).min(n_tiles);
            at.n_tiles += tiles.len();
            layer.many_rows(first, queries.take(), q_here, out, tiles);
        }
        n_before += n_tiles;
    }
    if at.part == ATTEND && at.pauses_before(i, ATTENDED, pause) {
        return Ok(false);
    }
    probe.tensor(Tap::QByHead, i, q_by_head);

    // For slots with one row, the output by head is the output.
    let (attn, by_head) = (attn, &*out_by_head);
    let all_single = slots.iter().all(|slot| rows.of(slot).2 <= 1);
    let attn = if all_single {
        by_head
    } else {
        let mut by_head = by_head;
        for slot in &*slots {
            let (_, row, n) = rows.of(slot);
            if n > 0 {
                let here = &mut attn[row * spec.n_out()..][..n * spec.n_out()];
                let (from, tail) = by_head.split_at(attn_tiles(spec, n).1 * spec.n_out());
                layer.by_row(from, here);
                by_head = tail;
            }
        }
        &*attn
    };
    probe.tensor(Tap::KqvOut, i, attn);
    let branch = &mut b.branch[..m * h.n_embd];
    let slots = Adapters(slots);
    let ctx = base.with(row_adapters(&slots, ends), n_generated);
    if let Some(w) = &w.gate {
        linear(
            ctx,
            &mut b.scratch,
            &b.normed[..m * h.n_embd],
            m,
            &mut [Product::of(w, gate, m)],
        );
    }
    let attn = match spec.gated {
        true => {
            let n = spec.n_out();
            let workers = base.crew.when(m > 1);
            workers.for_chunks(gate, n, |row, gate| {
                base.arch.sigmoid_mul(gate, &attn[row * n..][..n])
            });
            &*gate
        }
        false => attn,
    };
    let attn = match &spec.latent {
        Some(of) if of.absorbed => latent.values((ctx, &mut b.scratch), (spec, of, w), m, attn),
        _ => attn,
    };
    linear(
        ctx,
        &mut b.scratch,
        attn,
        m,
        &mut [Product::of(&w.wo, branch, m)],
    );
    probe.tensor(Tap::AttnOut, i, branch);
    Ok(true)
}

type Place<'a> = dyn Fn(usize, &[f32], Option<&Vec<f32>>, &mut [f32]) + Sync + 'a;

/// Queries of a layer, and the application of their norm and rotation.
struct Queries<'a> {
    /// `(m, n_head·head_dim)`.
    values: &'a [f32],
    norm: Option<&'a Vec<f32>>,
    /// Writes a head of a row among all rows of the pass, after norm and rotation.
    place: &'a Place<'a>,
    temperature: Option<Temperature>,
}

impl Queries<'_> {
    /// Writes head `head` of row `row` of the values; it is row `pass_row` of the pass and has
    /// position `position`.
    fn write(
        &self,
        (row, pass_row, position): (usize, usize, usize),
        head: usize,
        spec: &AttnSpec,
        to: &mut [f32],
    ) {
        let from = &self.values[row * spec.n_q() + head * spec.head_dim..][..spec.head_dim];
        (self.place)(pass_row, from, self.norm, to);
        if let Some(temperature) = self.temperature {
            let factor = temperature.at(position);
            to.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// Attention of one layer, slot by slot.
struct AttnLayer<'a> {
    arch: Arch,
    crew: &'a Crew<'a>,
    spec: &'a AttnSpec,
    /// Sinks of each query head.
    sinks: Option<&'a [f32]>,
    /// Layer whose keys and values are read.
    i: usize,
    rows: Rows,
}

impl AttnLayer<'_> {
    /// Positions that the slot's row `j` of [`AttnLayer::rows`] sees.
    fn range(&self, slot: &Slot<'_>, j: usize) -> (u32, u32) {
        let end = slot.pos() + self.rows.of(slot).0 + j + 1;
        if !self.spec.causal {
            let (half, n) = (
                self.spec.window.map(|size| size / 2),
                slot.pos() + slot.tokens.len(),
            );
            let range = half.map_or((0, n), |half| {
                (
                    (end - 1).saturating_sub(half),
                    n.min(end.saturating_add(half)),
                )
            });
            return (range.0 as u32, range.1 as u32);
        }
        let start = match self.spec.window {
            Some(size) if self.spec.chunked => (end - 1) / size * size,
            Some(size) => end.saturating_sub(size),
            None => 0,
        };
        (start as u32, end as u32)
    }

    /// Clears rows of KV head `head`, whose query heads alternate, except for the sinks: these are
    /// keys before all others with values of 0.
    fn begin(&self, partial: &mut AttnPartial<'_>, head: usize) {
        partial.clear();
        if let Some(sinks) = self.sinks {
            let n_group = self.spec.n_group();
            let sinks = sinks[head * n_group..][..n_group].iter().cycle();
            partial
                .max
                .iter_mut()
                .zip(sinks)
                .for_each(|(max, sink)| *max = *sink);
            partial.sum.fill(1.0);
        }
    }

    /// Attention of slots with one row each, stored one after the other. A task takes a head of one
    /// slot and a piece of its keys; the bits are those of a task that takes all pieces in
    /// turn, see `arch/attention.rs`.
    fn single_rows<'p>(
        &self,
        slots: &[Slot<'_>],
        q: &Queries<'_>,
        q_by_head: &mut [f32],
        out: &mut [f32],
        partials: &'p mut [f32],
    ) -> &'p mut [f32] {
        let AttnLayer {
            arch,
            crew,
            spec,
            i,
            rows,
            ..
        } = *self;
        let (n_group, d, d_v) = (spec.n_group(), spec.head_dim, spec.head_dim_v);
        let crew_of = crew.when(slots.len() > 1);
        crew_of.for_chunks(q_by_head, spec.n_q(), |s, to| {
            let (first, row, _) = rows.of(&slots[s]);
            for (j, to) in to.chunks_exact_mut(d).enumerate() {
                q.write(
                    (row, slots[s].row + first, slots[s].pos() + first),
                    j,
                    spec,
                    to,
                );
                slots[s].seq.kv.transform_query(arch, i, to);
            }
        });
        let q_by_head = &*q_by_head;
        let pieces = |s: usize| slots[s].seq.kv.pieces(i, self.range(&slots[s], 0));
        let n_pieces = (0..slots.len())
            .map(|s| pieces(s).count())
            .max()
            .unwrap_or(0);
        let len = AttnPartial::len(n_group, d_v);
        let (partials, rest) = partials.split_at_mut(slots.len() * spec.n_head_kv * n_pieces * len);
        crew.for_chunks(partials, len, |task, values| {
            let (row, piece) = (task / n_pieces, task % n_pieces);
            let (s, head) = (row / spec.n_head_kv, row % spec.n_head_kv);
            let mut partial = AttnPartial::of(values, n_group);
            if piece == 0 {
                self.begin(&mut partial, head);
            } else {
                partial.clear();
            }
            if let Some(piece) = pieces(s).nth(piece) {
                let range = self.range(&slots[s], 0);
                // Most groups are small, and filling the largest takes as long as reading some
                // keys.
                let (small, large);
                let ranges: &[_] = if n_group <= 16 {
                    small = [range; 16];
                    &small
                } else {
                    large = [range; MAX_GROUP];
                    &large
                };
                let q = &q_by_head[row * n_group * d..][..n_group * d];
                let kv = &slots[s].seq.kv;
                let params = attn_params(spec, head, slots[s].is_generated());
                kv.attention(
                    arch,
                    (i, head),
                    piece,
                    &mut partial,
                    q,
                    &ranges[..n_group],
                    &params,
                );
            }
        });
        let workers = crew.when(slots.len() * n_pieces > FEW_PIECES);
        workers.for_chunk_pairs(
            out,
            n_group * d_v,
            partials,
            n_pieces * len,
            |row, out, partials| {
                let (total, rest) = partials.split_at_mut(len);
                let mut total = AttnPartial::of(total, n_group);
                let params = attn_params(spec, 0, true);
                let n = pieces(row / spec.n_head_kv).count();
                for partial in rest.chunks_exact_mut(len).take(n - 1) {
                    arch.attention_merge(&mut total, &AttnPartial::of(partial, n_group), &params);
                }
                arch.attention_finish(&mut total, &params);
                out.copy_from_slice(total.out);
            },
        );
        rest
    }

    /// Number of tiles of a slot with `m` rows.
    fn n_tiles(&self, m: usize) -> usize {
        let (tile, m_padded) = attn_tiles(self.spec, m);
        self.spec.n_head_kv * (m_padded / tile)
    }

    /// Attention of a slot with several rows. A task takes one of the tiles, a head and some rows,
    /// through all pieces of keys. Queries are written first if they are given.
    fn many_rows(
        &self,
        slot: &Slot<'_>,
        q: Option<&Queries<'_>>,
        q_by_head: &mut [f32],
        out: &mut [f32],
        tiles: Range<usize>,
    ) {
        let AttnLayer {
            arch,
            crew,
            spec,
            i,
            rows,
            ..
        } = *self;
        let (n_group, d, d_v) = (spec.n_group(), spec.head_dim, spec.head_dim_v);
        let (first, row, m) = rows.of(slot);
        let (tile, m_padded) = attn_tiles(spec, m);
        if let Some(q) = q {
            crew.for_chunks(q_by_head, m_padded * n_group * d, |head, to| {
                for (j, to) in to.chunks_exact_mut(d).take(m * n_group).enumerate() {
                    let (token, q_head) = (j / n_group, head * n_group + j % n_group);
                    let at = first + token;
                    q.write(
                        (row + token, slot.row + at, slot.pos() + at),
                        q_head,
                        spec,
                        to,
                    );
                    slot.seq.kv.transform_query(arch, i, to);
                }
            });
        }
        let q_by_head = &*q_by_head;
        let (per_head, size) = (m_padded / tile, tile * n_group * d_v);
        crew.for_chunks(
            &mut out[tiles.start * size..tiles.end * size],
            size,
            |task, out| {
                let task = tiles.start + task;
                let (head, token) = (task / per_head, task % per_head * tile);
                let n_rows = tile.min(m - token) * n_group;
                let (mut ranges, mut max, mut sum) =
                    ([(0, 0); MAX_GROUP], [0.0; MAX_GROUP], [0.0; MAX_GROUP]);
                for (j, to) in ranges[..n_rows].iter_mut().enumerate() {
                    *to = self.range(slot, token + j / n_group);
                }
                let ranges = &ranges[..n_rows];
                let q = &q_by_head[(head * m_padded + token) * n_group * d..][..n_rows * d];
                let (kv, params) = (&slot.seq.kv, attn_params(spec, head, slot.is_generated()));
                let mut next = 0;
                while next < n_rows {
                    // If precision depends on age, the rows of a page are processed together.
                    let page = |row: usize| (ranges[row].1 as usize - 1) / KV_BLOCK;
                    let same = (next..n_rows)
                        .take_while(|&row| !kv.is_tiered(i) || page(row) == page(next));
                    let rows = next..next + same.count();
                    next = rows.end;
                    let (q, ranges) = (&q[rows.start * d..rows.end * d], &ranges[rows.clone()]);
                    let out = &mut out[rows.start * d_v..rows.end * d_v];
                    let mut total = AttnPartial {
                        out,
                        max: &mut max[rows.clone()],
                        sum: &mut sum[rows],
                    };
                    self.begin(&mut total, head);
                    let add = |total: &mut AttnPartial<'_>,
                               ranges: &[(u32, u32)],
                               params: &AttnParams| {
                        for piece in kv.pieces(i, (ranges[0].0, ranges[ranges.len() - 1].1)) {
                            kv.attention(arch, (i, head), piece, total, q, ranges, params);
                        }
                    };
                    if spec.causal || params.slope == 0.0 {
                        add(&mut total, ranges, &params);
                    } else {
                        // ALiBi on both sides. Scores of later keys count positions from the end of
                        // the text; to compensate, scores of earlier keys
                        // are raised by the same excess.
                        let (n, own) = (ranges[0].1, (slot.pos() + first + token) as u32);
                        let mut split = [(0, 0); MAX_GROUP];
                        let split = &mut split[..ranges.len()];
                        split
                            .iter_mut()
                            .zip(own..)
                            .for_each(|(range, own)| *range = (0, own + 1));
                        add(&mut total, split, &params);
                        let raise = |own: u32| params.slope * (n - 1 - own) as f32;
                        total
                            .max
                            .iter_mut()
                            .zip(own..)
                            .for_each(|(max, own)| *max += raise(own));
                        split
                            .iter_mut()
                            .zip(own..)
                            .for_each(|(range, own)| *range = (own + 1, n));
                        add(
                            &mut total,
                            split,
                            &AttnParams {
                                slope: -params.slope,
                                ..params
                            },
                        );
                    }
                    arch.attention_finish(&mut total, &params);
                }
            },
        );
    }

    /// Copies a slot's output by head, `(n_head_kv, m_padded, n_group, head_dim_v)`, to rows `(m,
    /// n_head·head_dim_v)`.
    fn by_row(&self, by_head: &[f32], to: &mut [f32]) {
        let width = self.spec.n_group() * self.spec.head_dim_v;
        let m_padded = by_head.len() / self.spec.n_out();
        self.crew.for_chunks(to, self.spec.n_out(), |row, to| {
            for (head, to) in to.chunks_exact_mut(width).enumerate() {
                to.copy_from_slice(&by_head[(head * m_padded + row) * width..][..width]);
            }
        });
    }
}

/// Norms of single query and key heads.
pub(super) fn head_norms<'a>(
    spec: &AttnSpec,
    w: &'a Attn,
) -> (Option<&'a Vec<f32>>, Option<&'a Vec<f32>>) {
    let per_head = spec
        .qk_norm
        .is_some_and(|norm| !matches!(norm, QkNorm::Full | QkNorm::LayerByHead));
    (
        w.q_norm.as_ref().filter(|_| per_head),
        w.k_norm.as_ref().filter(|_| per_head),
    )
}

/// Parameters of attention kernels for the query heads of KV head `head`.
pub(super) fn attn_params(spec: &AttnSpec, head: usize, exact: bool) -> AttnParams {
    let &AttnSpec {
        head_dim,
        head_dim_v,
        scale,
        softcap,
        ..
    } = spec;
    // With a slope there is one query head, and everything is computed in `f32`.
    let slope = spec.slope(head);
    AttnParams {
        head_dim,
        head_dim_v,
        scale,
        softcap: softcap.unwrap_or(0.0),
        slope,
        exact: exact || slope != 0.0,
    }
}

/// `y = down(act(gate(x))·up(x))`, or `down(act(up(x)))`; `show` is called with `gate(x)` and
/// `up(x)`.
fn feed_forward(
    ctx: Ctx<'_>,
    scratch: &mut Scratch<'_>,
    ffn: &Ffn,
    x: &[f32],
    m: usize,
    inner: FfnBuffers<'_>,
    y: &mut [f32],
    show: impl FnMut(Tap, &[f32]),
) {
    feed_forward_from(
        ctx,
        scratch,
        ffn,
        x,
        m,
        inner,
        y,
        (&mut LayerAt::default(), None),
        show,
    );
}

/// [`feed_forward`] from where it paused to where it pauses; returns whether it is complete.
fn feed_forward_from(
    ctx: Ctx<'_>,
    scratch: &mut Scratch<'_>,
    ffn: &Ffn,
    x: &[f32],
    m: usize,
    FfnBuffers { gate, up }: FfnBuffers<'_>,
    y: &mut [f32],
    (at, pause): (&mut LayerAt, Option<Pause<'_>>),
    mut show: impl FnMut(Tap, &[f32]),
) -> bool {
    if at.part != FFN_DOWN {
        let of_up = Product::of(&ffn.up, up, m);
        let is_complete = match &ffn.gate {
            Some(w) => linear_at(
                ctx,
                scratch,
                x,
                m,
                &mut [Product::of(w, gate, m), of_up],
                (&mut *at, pause),
            ),
            None => linear_at(ctx, scratch, x, m, &mut [of_up], (&mut *at, pause)),
        };
        if !is_complete {
            return false;
        }
        if ffn.gate.is_some() {
            show(Tap::FfnGate, gate);
        }
        show(Tap::FfnUp, up);
        if let Some(n) = ffn.sparsity {
            ctx.crew
                .when(m > 1)
                .for_chunks(gate, ffn.up.w.n_out, |_, gate| gaussian_top_k(gate, n));
        }
        activate(ctx, ffn, m, gate, up);
        if at.pauses_before(at.layer, FFN_DOWN, pause) {
            return false;
        }
    }
    let inner = if ffn.activation.is_gated() { gate } else { up };
    linear_at(
        ctx,
        scratch,
        inner,
        m,
        &mut [Product::of(&ffn.down, y, m)],
        (at, pause),
    )
}

/// [`linear`] from where it paused to where it pauses; returns whether it is complete.
fn linear_at(
    ctx: Ctx<'_>,
    scratch: &mut Scratch<'_>,
    x: &[f32],
    m: usize,
    products: &mut [Product<'_>],
    (at, pause): (&mut LayerAt, Option<Pause<'_>>),
) -> bool {
    let here = *at;
    let pause = pause.map(|pause| move || pause(here));
    let pause = pause.as_ref().map(|pause| pause as &dyn Fn() -> bool);
    linear_from(ctx, scratch, x, m, products, &mut at.n_tiles, pause)
}

/// The activation of `m` rows of a feed-forward layer; the result replaces `gate` or `up`.
fn activate<'a>(
    ctx: Ctx<'_>,
    ffn: &Ffn,
    m: usize,
    gate: &'a mut [f32],
    up: &'a mut [f32],
) -> &'a [f32] {
    let (arch, workers, n_ff) = (ctx.arch, ctx.crew.when(m > 1), ffn.up.w.n_out);
    match ffn.activation {
        Activation::SwiGlu => workers.for_chunks(gate, n_ff, |i, gate| {
            arch.silu_mul(gate, &up[i * n_ff..][..n_ff])
        }),
        Activation::GeGlu => workers.for_chunks(gate, n_ff, |i, gate| {
            arch.gelu_mul(gate, &up[i * n_ff..][..n_ff])
        }),
        Activation::Gelu => workers.for_chunks(up, n_ff, |_, up| arch.gelu(up)),
        Activation::SquaredRelu => workers.for_chunks(up, n_ff, |_, up| squared_relu(up)),
        Activation::ReGlu => workers.for_chunks(gate, n_ff, |i, gate| {
            relu_mul(gate, &up[i * n_ff..][..n_ff])
        }),
        Activation::SwiGluOai => {
            workers.for_chunks(gate, n_ff, |i, gate| {
                arch.swiglu_oai(gate, &up[i * n_ff..][..n_ff])
            });
        }
        Activation::GeGluErf => {
            workers.for_chunks(gate, n_ff, |i, gate| {
                arch.gelu_erf_mul(gate, &up[i * n_ff..][..n_ff])
            });
        }
        Activation::GeluErf => workers.for_chunks(up, n_ff, |_, up| arch.gelu_erf(up)),
        Activation::Xielu {
            alpha_p,
            alpha_n,
            beta,
            eps,
        } => {
            workers.for_chunks(up, n_ff, |_, up| xielu(up, (alpha_p, alpha_n, beta, eps)));
        }
    }
    if ffn.activation.is_gated() { gate } else { up }
}

/// Computes the outputs of a mixture's router for `m` rows of `x`, in `moe`.
fn route(
    base: Base<'_>,
    moe: &Moe,
    (n_generated, m): (usize, usize),
    slots: &Adapters<'_, '_>,
    ends: &[u32],
    x: &[f32],
    (to, scratch): (&mut MoeBuffers<'_>, &mut Scratch<'_>),
) {
    let ctx = base.with(row_adapters(slots, ends), n_generated);
    let router = &mut to.router[..m * moe.spec.n_expert];
    linear(
        ctx,
        scratch,
        x,
        m,
        &mut [Product::of(&moe.router, router, m)],
    );
}

/// Mixture of experts on `b.normed`, `m` rows of `n`; leaves its output in `b.branch`. Experts are
/// processed in their order, so a token's sum does not depend on the other tokens of the pass.
fn experts(
    base: Base<'_>,
    h: &Hparams,
    moe: &Moe,
    (n_generated, m): (usize, usize),
    slots: &Adapters<'_, '_>,
    rows: Rows,
    b: &mut Buffers<'_>,
) {
    let (n_expert, n_used) = (moe.spec.n_expert, moe.spec.n_used);
    let crew = base.crew.when(m > 1);
    let ends = if rows == Rows::All {
        b.ends
    } else {
        b.output_ends
    };
    let ctx = base.with(row_adapters(slots, ends), n_generated);
    if let Some(of_router) = &moe.router_norm {
        // Nobody reads this buffer yet.
        let normed = &mut b.branch[..m * h.n_embd];
        norm(ctx, h, Some(of_router), b.x, normed);
        route(
            base,
            moe,
            (n_generated, m),
            slots,
            ends,
            normed,
            (&mut b.moe, &mut b.scratch),
        );
    } else if !moe.spec.routes_early {
        route(
            base,
            moe,
            (n_generated, m),
            slots,
            ends,
            b.normed,
            (&mut b.moe, &mut b.scratch),
        );
    }
    let router = &mut b.moe.router[..m * n_expert];
    let (chosen, weights) = (
        &mut b.moe.chosen[..m * n_used],
        &mut b.moe.weights[..m * n_used],
    );
    choose_experts(ctx, moe, router, chosen, weights);
    // What experts read, and where their outputs are added up.
    let latent = std::mem::take(&mut b.moe.latent);
    let (n, input, sum) = match &moe.latent {
        None => (h.n_embd, &*b.normed, &mut *b.branch),
        Some((down, _)) => {
            let n = down.w.n_out;
            let (input, sum) = latent[..2 * m * n].split_at_mut(m * n);
            linear(
                ctx,
                &mut b.scratch,
                b.normed,
                m,
                &mut [Product::of(down, input, m)],
            );
            (n, &*input, sum)
        }
    };
    sum.fill(0.0);
    let weighs_inputs = moe.spec.weighs_inputs;
    if m == 1 && n_generated == 1 && !weighs_inputs {
        let slot = slots.0.iter().find(|slot| rows.of(slot).2 == 1);
        let adapters = slot.map_or(&[][..], |slot| &slot.seq.adapters.attached);
        let ctx = base.with(RowAdapters::All(adapters), 1);
        experts_of_one(
            ctx,
            moe,
            (&input[..n], &mut sum[..n]),
            (&mut b.moe, b.inner, &mut b.scratch),
        );
    } else {
        let (chosen, weights) = (&*chosen, &*weights);
        let ends_by_expert = sort_by_expert(chosen, b.moe.slots);
        let mut first = 0;
        for (e, &end) in ends_by_expert[..n_expert].iter().enumerate() {
            let slots_of_expert = &b.moe.slots[std::mem::replace(&mut first, end)..end];
            let n_rows = slots_of_expert.len();
            if n_rows == 0 {
                continue;
            }
            let token = |i: usize| slots_of_expert[i] as usize / n_used;
            let rows_before = |token: usize| {
                slots_of_expert.partition_point(|&slot| (slot as usize) < token * n_used)
            };
            for (of_expert, &end) in b.expert_ends.iter_mut().zip(ends) {
                *of_expert = rows_before(end as usize) as u32;
            }
            let ctx = base.with(row_adapters(slots, b.expert_ends), rows_before(n_generated));
            let (x, y) = (&mut b.moe.x[..n_rows * n], &mut b.moe.y[..n_rows * n]);
            let workers = ctx.crew.when(n_rows > 1);
            let weight = |i: usize| weights[slots_of_expert[i] as usize];
            workers.for_chunks(x, n, |i, x| {
                x.copy_from_slice(&input[token(i) * n..][..n]);
                if weighs_inputs {
                    let weight = weight(i);
                    x.iter_mut().for_each(|x| *x *= weight);
                }
            });
            let expert = moe.expert(e);
            let inner = FfnBuffers::take(&mut Frame::of(b.inner), n_rows, expert.up.w.n_out);
            feed_forward(ctx, &mut b.scratch, &expert, x, n_rows, inner, y, |_, _| ());
            let y = &*y;
            workers.for_chunks(sum, SUM_ROWS * n, |chunk, sum| {
                let tokens = chunk * SUM_ROWS..chunk * SUM_ROWS + sum.len() / n;
                for i in rows_before(tokens.start)..rows_before(tokens.end) {
                    let sum = &mut sum[(token(i) - tokens.start) * n..][..n];
                    ctx.arch.add_scaled(
                        sum,
                        &y[i * n..][..n],
                        if weighs_inputs { 1.0 } else { weight(i) },
                    );
                }
            });
        }
    }
    if let Some((_, up)) = &moe.latent {
        linear(
            ctx,
            &mut b.scratch,
            &latent[m * n..2 * m * n],
            m,
            &mut [Product::of(up, b.branch, m)],
        );
    }
    b.moe.latent = latent;
    let Some(shared) = &moe.shared else { return };
    let n = h.n_embd;
    let strength = moe.shared_gate.as_ref().map(|gate| {
        let strength = &mut b.moe.router[..m];
        linear(
            ctx,
            &mut b.scratch,
            b.normed,
            m,
            &mut [Product::of_weight(gate, strength, m)],
        );
        &*strength
    });
    let y = &mut b.moe.y[..m * n];
    let inner = FfnBuffers::take(&mut Frame::of(b.inner), m, shared.up.w.n_out);
    feed_forward(
        ctx,
        &mut b.scratch,
        shared,
        b.normed,
        m,
        inner,
        y,
        |_, _| (),
    );
    let y = &*y;
    crew.for_chunks(b.branch, n, |i, branch| {
        let y = &y[i * n..][..n];
        match strength {
            Some(strength) => ctx.arch.add_scaled(branch, y, sigmoid(strength[i])),
            None => ctx.arch.add(branch, y),
        }
    });
}

/// A dense layer on `b.normed` beside a mixture on the residual stream; leaves the sum of their
/// outputs in `b.branch`.
fn both(
    base: Base<'_>,
    h: &Hparams,
    w: &Both,
    (n_generated, m): (usize, usize),
    slots: &Adapters<'_, '_>,
    rows: Rows,
    b: &mut Buffers<'_>,
) {
    let ends = if rows == Rows::All {
        b.ends
    } else {
        b.output_ends
    };
    let ctx = base.with(row_adapters(slots, ends), n_generated);
    let inner = FfnBuffers::take(&mut Frame::of(b.inner), m, w.dense.up.w.n_out);
    feed_forward(
        ctx,
        &mut b.scratch,
        &w.dense,
        b.normed,
        m,
        inner,
        b.branch,
        |_, _| (),
    );
    let dense = &mut b.beside[..m * h.n_embd];
    norm(ctx, h, Some(&w.post_dense_norm), b.branch, dense);
    norm(ctx, h, Some(&w.moe_norm), b.x, b.normed);
    experts(base, h, &w.moe, (n_generated, m), slots, rows, b);
    norm(ctx, h, Some(&w.post_moe_norm), b.branch, b.normed);
    b.branch.copy_from_slice(b.normed);
    base.arch.add(b.branch, &b.beside[..m * h.n_embd]);
}

/// The experts of a single generated token, [`MAX_EXPERTS`] at a time: their gates and ups are one
/// parallel region, their downs another.
fn experts_of_one(
    ctx: Ctx<'_>,
    moe: &Moe,
    (input, sum): (&[f32], &mut [f32]),
    (buffers, inner, scratch): (&mut MoeBuffers<'_>, &mut [u8], &mut Scratch<'_>),
) {
    let MoeBuffers {
        chosen,
        weights,
        slots,
        y,
        ..
    } = buffers;
    let n = input.len();
    let slots = &mut slots[..moe.spec.n_used];
    slots.iter_mut().zip(0..).for_each(|(slot, i)| *slot = i);
    slots.sort_unstable_by_key(|&slot| (chosen[slot as usize], slot));
    for slots in slots.chunks(MAX_EXPERTS) {
        let m = slots.len();
        let experts: [Ffn; MAX_EXPERTS] =
            std::array::from_fn(|i| moe.expert(chosen[slots[i.min(m - 1)] as usize] as usize));
        let n_ff = moe.spec.n_ff;
        let FfnBuffers { gate, up } = FfnBuffers::take(&mut Frame::of(inner), m, n_ff);
        let mut n_products = 0;
        let mut products: [Product<'_>; 2 * MAX_EXPERTS] = {
            let outputs = experts
                .iter()
                .zip(gate.chunks_exact_mut(n_ff).zip(up.chunks_exact_mut(n_ff)));
            let mut products = outputs.flat_map(|(ffn, (gate, up))| {
                let gate = ffn.gate.as_ref().map(|w| Product::of(w, gate, 1));
                gate.into_iter().chain([Product::of(&ffn.up, up, 1)])
            });
            std::array::from_fn(|_| {
                let product = products.next();
                n_products += usize::from(product.is_some());
                product.unwrap_or_else(|| Product::of(&experts[0].up, &mut [], 0))
            })
        };
        linear(ctx, scratch, input, 1, &mut products[..n_products]);
        let inner = activate(
            Ctx {
                crew: &ctx.crew.when(false),
                ..ctx
            },
            &experts[0],
            m,
            gate,
            up,
        );
        let y = &mut y[..m * n];
        let mut outputs = y.chunks_exact_mut(n);
        let mut products: [Product<'_>; MAX_EXPERTS] = std::array::from_fn(|i| {
            Product::of_row(&experts[i].down, outputs.next().unwrap_or_default(), i)
        });
        linear(
            Ctx {
                n_generated: m,
                ..ctx
            },
            scratch,
            inner,
            m,
            &mut products[..m],
        );
        for (&slot, y) in slots.iter().zip(y.chunks_exact(n)) {
            ctx.arch.add_scaled(sum, y, weights[slot as usize]);
        }
    }
}

/// Sorts the indices of `chosen` by the expert chosen there, and returns where those of each expert
/// end.
fn sort_by_expert(chosen: &[u32], slots: &mut [u32]) -> [usize; MAX_EXPERT] {
    let mut ends = [0; MAX_EXPERT];
    chosen.iter().for_each(|&e| ends[e as usize] += 1);
    let mut sum = 0;
    for end in &mut ends {
        (*end, sum) = (sum, sum + *end);
    }
    for (slot, &e) in (0..).zip(chosen) {
        slots[ends[e as usize]] = slot;
        ends[e as usize] += 1;
    }
    ends
}

pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Turns the router's outputs into scores, and the scores of each token's experts into weights.
pub(super) fn choose_experts(
    ctx: Ctx<'_>,
    moe: &Moe,
    router: &mut [f32],
    chosen: &mut [u32],
    weights: &mut [f32],
) {
    let spec = &moe.spec;
    let (arch, n_expert) = (ctx.arch, spec.n_expert);
    let workers = ctx.crew.when(router.len() > n_expert);
    workers.for_chunks(router, n_expert, |_, scores| match spec.gating {
        Gating::Softmax => arch.softmax(scores),
        Gating::Sigmoid => scores.iter_mut().for_each(|score| *score = sigmoid(*score)),
        Gating::SoftmaxAfterTopK | Gating::SparseMixer => {}
    });
    let router = &*router;
    workers.for_chunk_pairs(
        chosen,
        spec.n_used,
        weights,
        spec.n_used,
        |token, chosen, weights| {
            let scores = &router[token * n_expert..][..n_expert];
            choose(spec, scores, moe.bias.as_deref(), chosen);
            weigh(arch, spec, scores, chosen, weights);
            if let Some(scales) = &moe.output_scales {
                weights
                    .iter_mut()
                    .zip(chosen)
                    .for_each(|(weight, e)| *weight *= scales[*e as usize]);
            }
        },
    );
}

/// The weights of the chosen experts.
fn weigh(arch: Arch, spec: &MoeSpec, scores: &[f32], chosen: &[u32], weights: &mut [f32]) {
    chosen
        .iter()
        .zip(&mut *weights)
        .for_each(|(&e, weight)| *weight = scores[e as usize]);
    match spec.gating {
        Gating::SoftmaxAfterTopK => arch.softmax(weights),
        Gating::SparseMixer => sparse_mixer(scores, chosen, weights),
        Gating::Softmax | Gating::Sigmoid => {}
    }
    if spec.normalise {
        let sum = divisor(weights.iter().sum());
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    if spec.scale != 1.0 {
        weights.iter_mut().for_each(|w| *w *= spec.scale);
    }
}

/// The weight of each pick among the experts that were not picked before it and whose scores are
/// close to its own.
fn sparse_mixer(scores: &[f32], chosen: &[u32], weights: &mut [f32]) {
    /// `2·router_jitter_noise` of Phi 3.5 MoE, which is not in its files.
    const DISTANCE: f32 = 0.02;
    for (i, weight) in weights.iter_mut().enumerate() {
        let best = scores[chosen[i] as usize];
        let left = (0..scores.len())
            .filter(|&e| !chosen[..i].contains(&(e as u32)))
            .map(|e| scores[e]);
        let close = left.filter(|score| best - score <= DISTANCE * score.abs().max(best));
        *weight = 1.0 / close.map(|score| (score - best).exp()).sum::<f32>();
    }
}

/// The divisor of the weights of a token's experts, which sum to `sum`.
pub(super) fn divisor(sum: f32) -> f32 {
    sum.max(MIN_WEIGHT_SUM)
}

/// The experts with the largest sums of score and `bias`, best first, the first among equals; NaN
/// is less than any number. A group counts as much as its two best experts, or, where scores are
/// probabilities (DeepSeek 2), its best one.
fn choose(spec: &MoeSpec, scores: &[f32], bias: Option<&[f32]>, chosen: &mut [u32]) {
    let score = |e: usize| {
        let score = scores[e] + bias.map_or(0.0, |bias| bias[e]);
        if score.is_nan() {
            f32::NEG_INFINITY
        } else {
            score
        }
    };
    let mut open = [true; MAX_EXPERT];
    let mut group_size = scores.len();
    if let Some(groups) = spec.groups {
        group_size /= groups.n_group;
        open = [false; MAX_EXPERT];
        let group_score = |group: usize| {
            let mut best = [f32::NEG_INFINITY; 2];
            for e in group * group_size..(group + 1) * group_size {
                let score = score(e);
                if score > best[0] {
                    best = [score, best[0]];
                } else if score > best[1] {
                    best[1] = score;
                }
            }
            if group_size > 1 && spec.gating != Gating::Softmax {
                best[0] + best[1]
            } else {
                best[0]
            }
        };
        for _ in 0..groups.n_used {
            open[largest(
                (0..groups.n_group).filter(|&group| !open[group]),
                group_score,
            )] = true;
        }
    }
    let candidates = (0..scores.len())
        .step_by(group_size)
        .zip(open)
        .filter(|(_, open)| *open);
    let mut n = 0;
    for e in candidates.flat_map(|(first, _)| first..first + group_size) {
        let is_less = |other: &u32| score(*other as usize) < score(e);
        if n < chosen.len() {
            n += 1;
        } else if !is_less(&chosen[n - 1]) {
            continue;
        }
        // It takes its place among the best so far, of which the last makes room.
        let at = chosen[..n - 1].iter().position(is_less).unwrap_or(n - 1);
        chosen.copy_within(at..n - 1, at + 1);
        chosen[at] = e as u32;
    }
}

/// The one of `items` with the largest score, the first among equals.
fn largest(items: impl Iterator<Item = usize>, score: impl Fn(usize) -> f32) -> usize {
    let mut best = None;
    for item in items {
        let score = score(item);
        if best.is_none_or(|(_, max)| score > max) {
            best = Some((item, score));
        }
    }
    best.map_or(0, |(item, _)| item)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ExpertGroups;

    fn spec(gating: Gating, groups: Option<(usize, usize)>) -> MoeSpec {
        MoeSpec {
            n_expert: 6,
            n_used: 2,
            n_ff: 1,
            activation: Activation::SwiGlu,
            gating,
            bias: false,
            groups: groups.map(|(n_group, n_used)| ExpertGroups { n_group, n_used }),
            normalise: true,
            scale: 3.0,
            routes_early: false,
            router_norm: false,
            output_scales: false,
            weighs_inputs: false,
            fused: false,
            latent: None,
            shared: None,
        }
    }

    fn weights(spec: &MoeSpec, scores: &[f32], chosen: &[u32]) -> Vec<f32> {
        let mut weights = vec![0.0; chosen.len()];
        weigh(Arch::scalar(), spec, scores, chosen, &mut weights);
        weights
    }

    #[test]
    fn weights_are_divided_by_no_less_than_the_least_f16() {
        let spec = spec(Gating::Sigmoid, None);
        let floor = half::f16::MIN_POSITIVE.to_f32();
        assert_eq!(
            weights(&spec, &[0.0, 1e-5, 2e-5, 0.0, 0.0, 0.0], &[2, 1]),
            [2e-5 / floor * 3.0, 1e-5 / floor * 3.0]
        );
        assert_eq!(
            weights(&spec, &[0.0, 0.25, 0.75, 0.0, 0.0, 0.0], &[2, 1]),
            [0.75 * 3.0, 0.25 * 3.0]
        );
        let of_chosen = weights(
            &self::spec(Gating::SoftmaxAfterTopK, None),
            &[9.0, 1.0, 1.0, 9.0, 9.0, 9.0],
            &[2, 1],
        );
        assert_eq!(of_chosen, [1.5, 1.5]);
    }

    #[test]
    fn experts_of_the_best_groups_are_chosen() {
        let mut chosen = [0; 2];
        let scores = [0.9, 0.1, 0.6, 0.5, 0.4, 0.7];
        choose(&spec(Gating::Sigmoid, None), &scores, None, &mut chosen);
        assert_eq!(chosen, [0, 5]);
        // Groups weigh 1.0, 1.1 and 1.1.
        choose(
            &spec(Gating::Sigmoid, Some((3, 1))),
            &scores,
            None,
            &mut chosen,
        );
        assert_eq!(chosen, [2, 3]);
        choose(
            &spec(Gating::Sigmoid, Some((3, 2))),
            &scores,
            None,
            &mut chosen,
        );
        assert_eq!(chosen, [5, 2]);
        choose(
            &spec(Gating::Sigmoid, Some((3, 1))),
            &scores,
            Some(&[0.3, 0.0, 0.0, 0.0, 0.0, 0.0]),
            &mut chosen,
        );
        assert_eq!(chosen, [0, 1]);
        choose(
            &spec(Gating::Softmax, Some((3, 1))),
            &[f32::NAN; 6],
            None,
            &mut chosen,
        );
        assert_eq!(chosen, [0, 1]);
        choose(
            &spec(Gating::Softmax, None),
            &[0.1, f32::NAN, 0.2, 0.2, 0.1, 0.1],
            None,
            &mut chosen,
        );
        assert_eq!(chosen, [2, 3]);
    }
}
