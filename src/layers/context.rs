//! What the components of layers compute with: the sequences of a pass, its threads, its rows.

use crate::arch::Arch;
use crate::compute::arena::Frame;
use crate::compute::linear::{Ctx, RowAdapters, RowCtx, Scratch, SlotAdapters};
use crate::compute::probe::{EvalCallback, HookPoint, ProductCallback};
use crate::gguf::Gguf;
use crate::layers::hparams::Hparams;
use crate::layers::indexer::selection::Selection;
use crate::layers::norm::norm;
use crate::layers::norm::weights::Norm;
use crate::layers::rope::RopeTables;
use crate::layers::rows::{Rows, SlotSize, SlotView};
use crate::layers::sizes::Sizes;
use crate::layers::switch::buffers::SwitchBuffers;
use crate::lora::Attached;
use crate::threads::PoolHandle;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicU64;

/// Context of a component in a pass.
pub(crate) struct Context<'a, 's> {
    pub(crate) arch: Arch,
    pub(crate) threads: &'a PoolHandle<'a>,
    pub(crate) gguf: &'a Gguf,
    pub(crate) h: &'a Hparams,
    pub(crate) slots: Slots<'a, 's>,
    /// Index of the layer.
    pub(crate) layer: usize,
    /// Rows that the layer computes; of the others it leaves keys and values, or a state.
    pub(crate) rows: Rows,
    /// Index of the next recurrence among those of all layers.
    pub(crate) cell: usize,
    pub(crate) buffers: ContextBuffers<'a>,
    /// See [`Ctx::adapter_nanos`].
    pub(crate) adapter_nanos: &'a AtomicU64,
    /// See [`Ctx::products`].
    pub(crate) products: Option<&'a dyn ProductCallback>,
    pub(crate) probe: &'a mut dyn EvalCallback,
}

/// Memory that all components share.
pub(crate) struct ContextBuffers<'a> {
    /// See [`RopeTables::angles`].
    pub(crate) cos: &'a mut [f32],
    pub(crate) sin: &'a mut [f32],
    /// Ends of each slot's rows: among all rows, among those that the last layer computes, and
    /// among those of one expert or those with logits.
    pub(crate) ends: &'a [u32],
    pub(crate) output_ends: &'a [u32],
    pub(crate) some_ends: &'a mut [u32],
    pub(crate) scratch: Scratch<'a>,
    pub(crate) switch: SwitchBuffers<'a>,
    /// Positions that rows see, if layers choose them.
    pub(crate) selection: Selection<'a>,
}

impl<'a> ContextBuffers<'a> {
    /// For slots of these sizes; `n_last` is the number of rows that the last layer computes.
    pub(crate) fn take<'k>(
        frame: &mut Frame<'a>,
        sizes: Sizes<'_>,
        slots: impl Iterator<Item = SlotSize<'k>> + Clone,
        n_last: usize,
    ) -> ContextBuffers<'a> {
        let m: usize = slots.clone().map(|slot| slot.n_tokens).sum();
        let n_slots = slots.clone().count();
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
        let n_generated: usize = slots
            .clone()
            .take_while(|slot| slot.is_generated)
            .map(|slot| slot.n_tokens)
            .sum();
        // With outputs, all rows of the last layer count as generated.
        let has_outputs = slots.clone().any(|slot| slot.n_outputs > 0);
        let most_generated = if has_outputs {
            n_generated.max(n_last)
        } else {
            n_generated
        };
        let longest = slots.clone().map(|slot| slot.n_past + slot.n_tokens);
        let longest = longest.max().unwrap_or(0);
        let rank = slots.map(|slot| slot.rank).max().unwrap_or(0);
        let n_angles = RopeTables::n_angles(sizes.h, m);
        ContextBuffers {
            cos: frame.take(n_angles),
            sin: frame.take(n_angles),
            ends,
            output_ends,
            some_ends: frame.take(n_slots),
            scratch: Scratch::take(
                frame,
                sizes.products(),
                (most_generated, m - n_generated),
                rank,
            ),
            switch: SwitchBuffers::take(frame, sizes.h, m),
            selection: Selection::take(frame, sizes.h, m, longest),
        }
    }
}

impl<'a, 's> Context<'a, 's> {
    /// At the beginning of layer `layer`.
    pub(crate) fn new(
        (arch, gguf, h): (Arch, &'a Gguf, &'a Hparams),
        threads: &'a PoolHandle<'a>,
        slots: &'a mut [SlotView<'s>],
        buffers: ContextBuffers<'a>,
        adapter_nanos: &'a AtomicU64,
        probe: &'a mut dyn EvalCallback,
    ) -> Context<'a, 's> {
        Context {
            arch,
            threads,
            gguf,
            h,
            slots: Slots(slots),
            layer: 0,
            rows: Rows::All,
            cell: 0,
            buffers,
            adapter_nanos,
            products: None,
            probe,
        }
    }

    /// Whether the layer is the model's last one.
    pub(crate) fn is_last(&self) -> bool {
        self.layer + 1 == self.h.n_layer
    }

    /// Number of rows that the layer computes.
    pub(crate) fn n_rows(&self) -> usize {
        self.rows.n_of(&self.slots)
    }

    /// Number of those computed as generated tokens, which come first. In the last layer, except
    /// for its keys and values, and in the head these are all rows, as usually one row of a prompt
    /// is left; unless there are no outputs and only a probe sees the rows, as before a backward
    /// pass, or only hidden states of whole texts are wanted.
    pub(crate) fn n_generated(&self) -> usize {
        let has_outputs = self
            .slots
            .iter()
            .any(|slot| slot.n_outputs() > 0 && !slot.keeps_kind);
        if self.is_last() && has_outputs {
            self.n_rows()
        } else {
            self.rows.n_generated(&self.slots)
        }
    }

    /// For products of the rows that the layer computes.
    pub(crate) fn of_rows(&mut self) -> RowCtx<'_, 'a> {
        let n_generated = self.n_generated();
        let ends = match self.rows {
            Rows::All => Ends::All,
            Rows::Outputs => Ends::Outputs,
        };
        self.of(ends, n_generated)
    }

    /// For products of all rows of the pass, each as what it is.
    pub(crate) fn of_all(&mut self) -> RowCtx<'_, 'a> {
        let n_generated = Rows::All.n_generated(&self.slots);
        self.of(Ends::All, n_generated)
    }

    /// For products of rows of slots up to these ends, the first `n_generated` as generated tokens.
    pub(crate) fn of(&mut self, ends: Ends, n_generated: usize) -> RowCtx<'_, 'a> {
        let buffers = &mut self.buffers;
        let ends = match ends {
            Ends::All => buffers.ends,
            Ends::Outputs => buffers.output_ends,
            Ends::Some => &*buffers.some_ends,
        };
        let adapters = match &*self.slots {
            [slot] => RowAdapters::All(slot.adapters),
            slots if slots.iter().all(|slot| slot.adapters.is_empty()) => RowAdapters::All(&[]),
            _ => RowAdapters::Slots {
                slots: &self.slots,
                ends,
            },
        };
        RowCtx {
            ctx: Ctx {
                arch: self.arch,
                threads: self.threads,
                gguf: self.gguf,
                adapters,
                n_generated,
                adapter_nanos: Some(self.adapter_nanos),
                products: self.products,
            },
            scratch: &mut buffers.scratch,
        }
    }

    /// For products without adapters and for what has no products.
    pub(crate) fn plain(&self) -> Ctx<'a> {
        Ctx {
            adapter_nanos: Some(self.adapter_nanos),
            products: self.products,
            ..Ctx::without_adapters(self.arch, self.threads, self.gguf, 0)
        }
    }

    /// Applies a norm to each row of `x`; copies it if there is no norm.
    pub(crate) fn norm(&self, of: Option<&Norm>, x: &[f32], y: &mut [f32]) {
        norm(self.plain(), self.h, of, x, y);
    }

    /// Shows a tensor of the layer to the probe.
    pub(crate) fn tap(&mut self, tap: HookPoint, values: &[f32]) {
        self.probe.tensor(tap, self.layer, values);
    }

    /// Computes the angles of ropes at the positions of all rows.
    pub(crate) fn angles(&mut self) {
        let (m, buffers) = (Rows::All.n_of(&self.slots), &mut self.buffers);
        for slot in &*self.slots {
            let rows = (Rows::All.range(slot), m);
            let (cos, sin) = (&mut *buffers.cos, &mut *buffers.sin);
            if slot.spans.has_grids() {
                let turns = |i: usize| slot.spans.turns(slot.pos() + i);
                slot.rope.angles_by_axis(self.arch, turns, rows, cos, sin);
            } else {
                slot.rope.angles(self.arch, slot.pos(), rows, cos, sin);
            }
        }
    }

    /// Adds the rows `x` of sequences whose hidden states are pooled after this layer.
    pub(crate) fn pool(&mut self, x: &[f32]) {
        let (arch, layer, n) = (self.arch, self.layer, self.h.n_embd);
        for slot in &mut *self.slots {
            let (position, kind, rows) = (slot.pos(), slot.kind, Rows::All.range(slot));
            if let Some(pooling) = slot.pooling.as_mut().filter(|of| of.layer == layer) {
                pooling.add(arch, kind, position, &x[rows.start * n..rows.end * n], n);
            }
        }
    }

    /// Keeps the rows `x` that `layer` reads, of sequences whose drafters read them.
    pub(crate) fn keep_inputs(&mut self, rows: Rows, layer: usize, x: &[f32]) {
        let n = self.h.n_embd;
        for slot in &mut *self.slots {
            let (first, row, n_rows) = rows.of(slot);
            let of = (first, slot.tokens.len());
            for inputs in &mut *slot.inputs {
                inputs.keep(layer, of, &x[row * n..(row + n_rows) * n]);
            }
        }
    }

    /// Adds the embeddings that images have for the outputs of this layer.
    pub(crate) fn add_deep(&self, x: &mut [f32]) {
        let n = self.h.n_embd;
        for slot in self.slots.iter().filter(|slot| !slot.spans.is_empty()) {
            let (first, row, n_rows) = self.rows.of(slot);
            for (i, x) in x[row * n..][..n_rows * n].chunks_exact_mut(n).enumerate() {
                if let Some(deep) = slot.spans.deep(slot.pos() + first + i, self.layer) {
                    self.arch.add(x, deep);
                }
            }
        }
    }

    /// Moves the rows that the last layer computes, of `n` values, to the front of all `rows`.
    pub(crate) fn gather(&self, rows: &mut [f32], n: usize) {
        for slot in &*self.slots {
            let from = slot.row + slot.first_last();
            rows.copy_within(from * n..(from + slot.n_outputs()) * n, slot.output * n);
        }
    }
}

/// Ends of the rows of slots.
#[derive(Clone, Copy)]
pub(crate) enum Ends {
    /// See [`ContextBuffers::ends`].
    All,
    /// See [`ContextBuffers::output_ends`].
    Outputs,
    /// See [`ContextBuffers::some_ends`].
    Some,
}

/// The sequences of a pass.
pub(crate) struct Slots<'a, 's>(&'a mut [SlotView<'s>]);

impl<'s> Slots<'_, 's> {
    /// The embedding of an image in row `row` of the pass.
    pub(crate) fn image(&self, row: usize) -> Option<&[f32]> {
        let slot = &self.0[self.0.partition_point(|slot| slot.row <= row) - 1];
        slot.spans.embedding(slot.pos() + row - slot.row)
    }

    /// The slot of row `row` of the pass, and its token.
    pub(crate) fn token(&self, row: usize) -> (&SlotView<'s>, usize) {
        let slot = &self.0[self.0.partition_point(|slot| slot.row <= row) - 1];
        (slot, slot.tokens[row - slot.row] as usize)
    }
}

impl<'s> Deref for Slots<'_, 's> {
    type Target = [SlotView<'s>];

    fn deref(&self) -> &[SlotView<'s>] {
        self.0
    }
}

impl<'s> DerefMut for Slots<'_, 's> {
    fn deref_mut(&mut self) -> &mut [SlotView<'s>] {
        self.0
    }
}

impl SlotAdapters for Slots<'_, '_> {
    fn of(&self, slot: usize) -> &[Attached] {
        self.0[slot].adapters
    }
}
