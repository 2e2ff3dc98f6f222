//! The head of a model: the last norm, and logits.

use crate::compute::linear::Product;
use crate::compute::probe::HookPoint;
use crate::layers::context::{Context, Ends};
use crate::layers::outputs::{Outputs, Wanted};
use crate::layers::residual::Residual;
use crate::layers::rows::{Rows, SlotView};
use crate::model::Weights;

/// Logits that one task caps: some ten microseconds of work.
const LOGITS: usize = 4096;

/// Writes what is wanted of the rows with outputs in `s.x` to `outputs`.
pub(super) fn head(
    cx: &mut Context<'_, '_>,
    w: &Weights,
    s: &mut Residual<'_>,
    (outputs, wanted): (&mut Outputs, Wanted),
) {
    let (h, n_outputs) = (cx.h, Rows::Outputs.n_of(&cx.slots));
    if cx.rows == Rows::All {
        cx.gather(s.x, h.n_embd);
    }
    let normed = &mut s.normed[..n_outputs * h.n_embd];
    cx.norm(w.output_norm.as_ref(), &s.x[..n_outputs * h.n_embd], normed);
    cx.probe.tensor(HookPoint::ResultNorm, 0, normed);
    match wanted {
        Wanted::Logits => {}
        Wanted::Both if h.raw_states => {
            let raw = &s.x[..n_outputs * h.n_embd];
            outputs.states.extend_from_slice(raw);
        }
        Wanted::Both | Wanted::Raw | Wanted::States => outputs.states.extend_from_slice(normed),
    }
    let n_logits = cx.slots.iter().map(|slot| slot.n_logits()).sum();
    if wanted == Wanted::States || n_logits == 0 {
        return;
    }
    gather_logits(&cx.slots, normed, h.n_embd);
    let mut last = 0;
    for (end, slot) in cx.buffers.some_ends.iter_mut().zip(&*cx.slots) {
        last += slot.n_logits() as u32;
        *end = last;
    }
    let (logits, normed) = (&mut *outputs.logits, &normed[..n_logits * h.n_embd]);
    let products = &mut [Product::of(&w.output, logits, n_logits)];
    cx.of(Ends::Some, n_logits)
        .linear(normed, n_logits, products);
    if wanted != Wanted::Raw {
        let (transform, capped) = (h.logit_transform(), h.final_softcap.is_some());
        cx.threads
            .when(capped)
            .for_chunks(logits, LOGITS, |_, logits| transform.row(logits));
    }
    cx.probe.tensor(HookPoint::ResultOutput, 0, logits);
}

/// Of the rows with outputs, moves those with logits to the front.
fn gather_logits(slots: &[SlotView<'_>], rows: &mut [f32], n: usize) {
    let mut to = 0;
    for slot in slots {
        let from = slot.outputs(slot.first_output);
        to += from.len();
        rows.copy_within(from.start * n..from.end * n, (to - from.len()) * n);
    }
}
