//! Shapes of passes: what a plan depends on.

use crate::gpu::Batch;
use crate::gpu::plan::attention::{Window, splits};
use crate::kv::{CellPlace, PagePlace};
use crate::model::Model;
use std::ops::Range;

/// What a plan without adapters depends on besides the model and the layers that are computed: two
/// passes of one shape have the same plan.
#[derive(Debug, Default, PartialEq)]
pub struct Shape {
    slots: Vec<SlotShape>,
    places: Vec<PagePlace>,
    cells: Vec<CellPlace>,
    /// Splits of the keys of each generated row, for one window after the other.
    splits: Vec<u32>,
    embeds: bool,
    raw: bool,
}

#[derive(Debug, PartialEq)]
struct SlotShape {
    rows: Range<usize>,
    outputs: Range<usize>,
    generated: bool,
    n_pages: usize,
    n_states: usize,
}

impl Shape {
    /// The shape of a pass; `None` if it has adapters, whose terms are part of a plan.
    pub(in crate::gpu) fn of(model: &Model, batch: &Batch<'_>, raw: bool) -> Option<Shape> {
        if batch.slots.iter().any(|slot| !slot.adapters.is_empty()) {
            return None;
        }
        let mut windows = Vec::new();
        for attention in model.hparams().attention() {
            let window = Window::of(attention);
            if !windows.contains(&window) {
                windows.push(window);
            }
        }
        let mut all = Vec::new();
        for window in windows {
            for slot in batch.slots.iter().filter(|slot| slot.generated) {
                let positions = slot.pos..slot.pos + slot.rows.len();
                all.extend(positions.map(|pos| splits(pos as u32, window)));
            }
        }
        let slots = batch.slots.iter().map(|slot| SlotShape {
            rows: slot.rows.clone(),
            outputs: slot.outputs.clone(),
            generated: slot.generated,
            n_pages: slot.tables.first().map_or(0, Vec::len),
            n_states: slot.states.len(),
        });
        Some(Shape {
            slots: slots.collect(),
            places: batch.places.to_vec(),
            cells: batch.cells.to_vec(),
            splits: all,
            embeds: batch.hidden.is_empty(),
            raw,
        })
    }
}
