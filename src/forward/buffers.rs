//! The buffers of a forward pass: those of all components, which are its memory plan.

use crate::compute::arena::{Frame, counted};
use crate::forward::optional::Optional;
use crate::layers::context::ContextBuffers;
use crate::layers::layer::spec::{FfnSpec, LayerSpec, Mixer};
use crate::layers::moe::MoeBuffers;
use crate::layers::residual::Residual;
use crate::layers::rows::SlotSize;
use crate::layers::sizes::{Sizes, single_rows};
use crate::layers::{attention, compressed, dense_ffn, recurrent};

/// The buffers of a pass.
pub(super) struct Buffers<'a> {
    pub(super) residual: Residual<'a>,
    /// The output of a recurrent mixer beside attention, or of a dense layer beside a mixture.
    pub(super) beside: &'a mut [f32],
    /// See [`Mixing::first_values`](crate::layers::recurrence::Mixing::first_values).
    pub(super) first_values: &'a mut [f32],
    pub(super) moe: MoeBuffers<'a>,
    pub(super) optional: Optional<'a>,
    /// Room for the buffers of attention, of a recurrent mixer or of a dense feed-forward layer.
    pub(super) inner: &'a mut [u8],
}

/// Bytes of the buffers of a pass over slots of these sizes.
pub(crate) fn buffer_bytes<'k>(
    sizes: Sizes<'_>,
    slots: impl Iterator<Item = SlotSize<'k>> + Clone,
) -> u64 {
    let n_outputs = slots.clone().map(|slot| slot.n_outputs).sum();
    counted(|frame| take(frame, sizes, slots.clone(), n_outputs)) as u64
}

/// Takes the buffers of a pass whose last layer computes `n_last` rows.
pub(super) fn take<'a, 'k>(
    frame: &mut Frame<'a>,
    sizes: Sizes<'_>,
    slots: impl Iterator<Item = SlotSize<'k>> + Clone,
    n_last: usize,
) -> (ContextBuffers<'a>, Buffers<'a>) {
    let h = sizes.h;
    let m: usize = slots.clone().map(|slot| slot.n_tokens).sum();
    let is_both = |layer: &LayerSpec| {
        matches!(
            (&layer.mixer, &layer.ffn),
            (Mixer::Both(..), _) | (_, FfnSpec::Both(..) | FfnSpec::Beside(..))
        )
    };
    let has_both = h.layers.iter().any(is_both);
    let buffers = Buffers {
        residual: Residual::take(frame, m * h.n_embd),
        beside: frame.take(if has_both { m * h.n_embd } else { 0 }),
        first_values: frame.take(if h.shares_values() { m * h.n_embd } else { 0 }),
        moe: MoeBuffers::take(frame, h, m),
        optional: Optional::take(frame, h, m),
        inner: frame.take(inner_bytes(sizes, slots.clone(), m)),
    };
    (ContextBuffers::take(frame, sizes, slots, n_last), buffers)
}

/// Bytes of the largest [`Buffers::inner`] for `m` rows.
fn inner_bytes<'k>(
    sizes: Sizes<'_>,
    slots: impl Iterator<Item = SlotSize<'k>> + Clone,
    m: usize,
) -> usize {
    let h = sizes.h;
    let attention = h
        .attention()
        .map(|spec| attention::bytes(spec, slots.clone()));
    let recurrent = h.recurrent().map(|spec| recurrent::bytes(spec, m));
    let n_ff = h.layers.iter().map(|layer| layer.ffn.n_ff()).max();
    let ffn = dense_ffn::bytes(m.max(single_rows(h)), n_ff.unwrap_or(0));
    let compressed = h.layers.iter().filter_map(LayerSpec::compressed);
    let compressed = compressed.map(|spec| compressed::bytes(spec, slots.clone()));
    attention
        .chain(recurrent)
        .chain(compressed)
        .fold(ffn, usize::max)
}
