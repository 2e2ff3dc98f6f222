//! Passes that a GPU computes, completely or for the last layers only.

use crate::compute::arena::{Arena, reuse};
use crate::compute::probe::{EvalCallback, NoCallback};
use crate::engine::SessionError;
use crate::forward::{Pass, forward};
use crate::gpu::{Batch, BatchOutputs, BatchSlot, Runner};
use crate::kv::{CellPlace, PagePlace, StatePage};
use crate::layers::outputs::Wanted;
use crate::layers::rope::RopeTables;
use crate::layers::rows::{Rows, SlotView};
use crate::model::{Device, Model};
use crate::threads::PoolHandle;
use std::sync::Arc;

/// Memory for what a runner is handed with a pass; it is reused by the next one.
#[derive(Debug, Default)]
pub(crate) struct BatchBuffers {
    /// Hidden states, cosines and sines, tokens.
    arena: Arena,
    pages: BatchPages,
    /// Empty between passes.
    slots: Vec<BatchSlot<'static>>,
}

/// Where a runner finds keys, values and states.
#[derive(Debug, Default)]
struct BatchPages {
    /// Page tables of all slots.
    tables: Vec<Vec<u64>>,
    /// Pages of recurrent layers of each slot.
    states: Vec<Vec<StatePage>>,
    places: Vec<PagePlace>,
    cells: Vec<CellPlace>,
}

impl BatchPages {
    fn look_up(&mut self, slots: &[SlotView<'_>]) {
        self.places.clear();
        let first = slots.iter().take(1);
        self.places
            .extend(first.clone().flat_map(|slot| slot.kv.places()));
        self.cells.clear();
        self.cells.extend(first.flat_map(|slot| slot.kv.cells()));
        let tables = slots.iter().flat_map(|slot| slot.kv.page_tables());
        fill(&mut self.tables, tables);
        let states = slots.iter();
        let states = states.map(|slot| slot.kv.state_pages(slot.tokens.len()));
        fill(&mut self.states, states);
    }
}

impl BatchBuffers {
    /// Bytes of the arena.
    pub(crate) fn bytes(&self) -> u64 {
        self.arena.bytes()
    }
}

/// Opens the runner of a device; `None` for the CPU.
///
/// # Errors
/// If the device does not exist, or it cannot compute the model.
pub(crate) fn open_runner(
    model: &Model,
    device: Device,
) -> Result<Option<Arc<dyn Runner>>, SessionError> {
    let _ = model; // needed only by devices
    match device {
        Device::Cpu => Ok(None),
        #[cfg(feature = "metal")]
        Device::Metal { n_layers } => crate::gpu::metal::open(model, n_layers)
            .map(Some)
            .map_err(SessionError::from),
        #[cfg(feature = "webgpu")]
        Device::Gpu { n_layers, adapter } => crate::gpu::webgpu::open(model, n_layers, adapter)
            .map(Some)
            .map_err(SessionError::from),
    }
}

/// Computes a pass on a runner; the CPU computes the layers before the runner's.
pub(crate) fn offload(
    runner: &dyn Runner,
    buffers: &mut BatchBuffers,
    pass: Pass<'_, '_>,
    threads: &PoolHandle<'_>,
    arena: &mut Arena,
    probe: &dyn EvalCallback,
) -> Result<(), SessionError> {
    if probe.sees_all_rows() {
        return Err(SessionError::NotOnDevice {
            device: runner.name(),
            what: "probes and gradients",
        });
    }
    if (pass.cancelled)() {
        return Err(SessionError::Cancelled);
    }
    let Pass {
        model,
        slots,
        outputs,
        wanted,
        cancelled,
        adapter_nanos,
        cursor,
        ..
    } = pass;
    let (h, arch) = (model.hparams(), model.arch());
    let m: usize = slots.iter().map(|slot| slot.tokens.len()).sum();
    let n_hidden = if !runner.embeds() {
        m.saturating_mul(h.n_embd)
    } else {
        0
    };
    let n_angles = RopeTables::n_angles(h, m);
    let BatchBuffers {
        arena: own,
        pages,
        slots: batch_slots,
    } = buffers;
    let (hidden, cos, sin, tokens) = own.plan(|f| {
        (
            f.take::<f32>(n_hidden),
            f.take::<f32>(n_angles),
            f.take::<f32>(n_angles),
            f.take::<u32>(m),
        )
    })?;
    if !runner.embeds() {
        let (end, hidden) = (runner.first_layer(), Some(&mut *hidden));
        let (slots, outputs) = (&mut *slots, &mut *outputs);
        let pass = Pass {
            model,
            slots,
            outputs,
            wanted,
            cancelled,
            adapter_nanos,
            cursor,
            end,
            pause: None,
            hidden,
        };
        forward(pass, threads, arena, &mut NoCallback)?;
    }
    for slot in &*slots {
        let rows = Rows::All.range(slot);
        slot.rope
            .angles(arch, slot.pos(), (rows.clone(), m), cos, sin);
        tokens[rows].copy_from_slice(slot.tokens);
    }
    pages.look_up(slots);
    let of_batch = batch_slots_of(slots, pages, std::mem::take(batch_slots));
    let raw = wanted == Wanted::Raw;
    if raw {
        outputs
            .states
            .resize(outputs.logits.len() / h.n_vocab * h.n_embd, 0.0);
    }
    let batch = Batch {
        slots: &of_batch,
        tokens,
        hidden,
        cos,
        sin,
        places: &pages.places,
        cells: &pages.cells,
    };
    let outputs = BatchOutputs {
        logits: &mut outputs.logits,
        states: raw.then_some(&mut outputs.states[..]),
    };
    let outcome = runner.pass(&batch, outputs);
    *batch_slots = reuse(of_batch);
    Ok(outcome?)
}

/// Writes lists, in order, into memory of an earlier pass.
fn fill<T>(lists: &mut Vec<Vec<T>>, from: impl Iterator<Item = impl Iterator<Item = T>>) {
    for (i, list) in from.enumerate() {
        if i == lists.len() {
            lists.push(Vec::new());
        }
        lists[i].clear();
        lists[i].extend(list);
    }
}

/// What a runner has to know of each slot.
fn batch_slots_of<'a>(
    slots: &'a [SlotView<'_>],
    pages: &'a BatchPages,
    memory: Vec<BatchSlot<'static>>,
) -> Vec<BatchSlot<'a>> {
    let mut rest = &pages.tables[..];
    let mut of_batch = reuse(memory);
    for (slot, states) in slots.iter().zip(&pages.states) {
        let rows = Rows::All.range(slot);
        let (tables, others) = rest.split_at(slot.kv.page_tables().len());
        rest = others;
        of_batch.push(BatchSlot {
            outputs: rows.start + slot.first_output..rows.end,
            rows,
            pos: slot.pos(),
            generated: slot.is_generated(),
            tables,
            states,
            adapters: slot.adapters,
        });
    }
    of_batch
}
