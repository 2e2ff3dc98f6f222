//! Passes that a GPU computes, completely or for the last layers only.

use super::arena::Arena;
use super::batch::{Rows, Wanted, reserve};
use super::forward::{Pass, RopeTables, forward};
use super::probe::{NoProbe, Probe};
use crate::error::SessionError;
use crate::model::{Device, Model};
use crate::runner::{Batch, BatchOutputs, BatchSlot, Runner};
use crate::team::Crew;
use std::sync::Arc;

/// Purpose of the memory, for [`SessionError::OutOfMemory`].
const HIDDEN: &str = "hidden states";

/// Opens the runner of a device; `None` for the CPU.
///
/// # Errors
/// If the device does not exist, or it cannot compute the model.
pub(super) fn open_runner(model: &Model, device: Device) -> Result<Option<Arc<dyn Runner>>, SessionError> {
    let _ = model; // needed only by devices
    match device {
        Device::Cpu => Ok(None),
        #[cfg(feature = "metal")]
        Device::Metal { n_layers } => crate::metal::open(model, n_layers).map(Some).map_err(SessionError::from),
    }
}

/// Computes a pass on a runner; the CPU computes the layers before the runner's.
pub(super) fn offload(
    runner: &dyn Runner,
    pass: Pass<'_, '_>,
    crew: &Crew<'_>,
    arena: &mut Arena,
    probe: &dyn Probe,
) -> Result<(), SessionError> {
    let refuse = |what: &'static str| Err(SessionError::NotOnDevice { device: runner.name(), what });
    if probe.sees_all_rows() {
        return refuse("probes and gradients");
    }
    if (pass.cancelled)() {
        return Err(SessionError::Cancelled);
    }
    let Pass { model, slots, outputs, wanted, cancelled, adapter_nanos, at, .. } = pass;
    let (h, arch) = (model.hparams(), model.arch());
    let m: usize = slots.iter().map(|slot| slot.tokens.len()).sum();
    let mut hidden = Vec::new();
    if runner.first_layer() > 0 {
        reserve(&mut hidden, m.saturating_mul(h.n_embd), HIDDEN)?;
        hidden.resize(m * h.n_embd, 0.0);
        let (end, hidden) = (runner.first_layer(), Some(&mut hidden[..]));
        let (slots, outputs) = (&mut *slots, &mut *outputs);
        let pass = Pass { model, slots, outputs, wanted, cancelled, adapter_nanos, at, end, pause: None, hidden };
        forward(pass, crew, arena, &mut NoProbe)?;
    }
    let n_angles = RopeTables::n_angles(h, m);
    let (mut cos, mut sin) = (Vec::new(), Vec::new());
    for x in [&mut cos, &mut sin] {
        reserve(x, n_angles, HIDDEN)?;
        x.resize(n_angles, 0.0);
    }
    let mut tokens = Vec::with_capacity(m);
    let mut tables = Vec::with_capacity(slots.len());
    for slot in &*slots {
        slot.seq.rope.angles(arch, slot.pos(), (Rows::All.range(slot), m), &mut cos, &mut sin);
        tokens.extend_from_slice(slot.tokens);
        tables.push(slot.seq.kv.page_tables());
    }
    let places = slots.first().map_or(Vec::new(), |slot| slot.seq.kv.places());
    let batch_slots = slots.iter().zip(&tables).map(|(slot, tables)| {
        let rows = Rows::All.range(slot);
        BatchSlot {
            outputs: rows.start + slot.first_output..rows.end,
            rows,
            pos: slot.pos(),
            generated: slot.is_generated(),
            tables,
            adapters: &slot.seq.adapters.attached,
        }
    });
    let batch_slots = batch_slots.collect::<Vec<_>>();
    let batch = Batch { slots: &batch_slots, tokens: &tokens, hidden: &hidden, cos: &cos, sin: &sin, places: &places };
    let raw = wanted == Wanted::Raw;
    if raw {
        outputs.states.resize(outputs.logits.len() / h.n_vocab * h.n_embd, 0.0);
    }
    let states = raw.then_some(&mut outputs.states[..]);
    runner.pass(&batch, BatchOutputs { logits: &mut outputs.logits, states })
}
