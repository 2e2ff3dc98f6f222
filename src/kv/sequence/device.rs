//! What a device that computes passes is told of a sequence's pages.

use crate::kv::KvType;
use crate::kv::layout::LayerAt;
use crate::kv::page::{Page, PageSize};
use crate::kv::sequence::SeqKv;
use std::sync::Arc;

/// Position of a layer in the pages of its group, and how its keys and values are stored; offsets
/// are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PagePlace {
    /// Index of its group, and of the sequence's page table.
    pub group: usize,
    /// Offset of the keys' blocks, one per head.
    pub keys: usize,
    /// Offset of the values' blocks.
    pub values: usize,
    /// Precision of keys and of values.
    pub types: [KvType; 2],
    /// Whether keys, and values, are stored [transformed](crate::arch::Arch::hadamard).
    pub transformed: [bool; 2],
}

/// Position of a recurrence in the pages of states and of inputs, in values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CellPlace {
    /// First value of its state.
    pub state: usize,
    /// First value of its inputs, rows of 64 positions: that of position `p` is row `p % 64`.
    pub feeds: usize,
}

/// A page of recurrent layers on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StatePage {
    /// Position of the sequence.
    pub pos: usize,
    /// Address; 0 for states that are zeros, as before the first token.
    pub address: u64,
}

/// First byte that counts for a GPU: one with memory of its own has nothing of what comes before.
fn start(size: PageSize) -> usize {
    if size.on_host < size.bytes {
        size.on_host
    } else {
        0
    }
}

impl SeqKv {
    /// Position of each layer in pages of the first tier.
    pub(crate) fn places(&self) -> impl Iterator<Item = PagePlace> {
        let place = |at: &LayerAt| {
            let ([keys, values], group) = (at.at[0], &self.layout.groups[at.group]);
            let start = start(group.forms[0].page_size());
            PagePlace {
                group: at.group,
                keys: keys.saturating_sub(start),
                values: values.saturating_sub(start),
                types: group.forms[0].types,
                transformed: group.transformed,
            }
        };
        self.layout.layers.iter().map(place)
    }

    /// For each group, the GPU addresses of its pages; 0 for pages that have left the window.
    pub(crate) fn page_tables(&self) -> impl ExactSizeIterator<Item = impl Iterator<Item = u64>> {
        let address = |page: &Option<Arc<Page>>| page.as_ref().map_or(0, |page| page.address());
        let recurrences = self.layout.recurrences.as_ref();
        let n_table = recurrences.map_or(self.tables.len(), |recurrences| recurrences.table);
        self.tables[..n_table]
            .iter()
            .map(move |table| table.iter().map(address))
    }

    /// Position of each recurrence.
    pub(crate) fn cells(&self) -> impl Iterator<Item = CellPlace> {
        let recurrences = self.layout.recurrences.iter();
        recurrences.flat_map(|recurrences| {
            let starts = recurrences
                .sizes()
                .map(|size| start(size) / size_of::<f32>());
            let cells = recurrences.states.iter().zip(&recurrences.feeds);
            cells.map(move |(state, feeds)| CellPlace {
                state: state.start.saturating_sub(starts[0]),
                feeds: feeds.start.saturating_sub(starts[1]),
            })
        })
    }
}
