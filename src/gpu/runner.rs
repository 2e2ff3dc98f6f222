//! Interface of a device that computes passes instead of the CPU: a GPU.
//!
//! An engine hands over whole passes. Keys and values stay in the pages of its pool, whose memory
//! is allocated by the runner. Where the CPU can access it, forks, rewinds and copies on write are
//! the CPU's alone; otherwise a page has the CPU's layers in the CPU's memory and the others on the
//! device, which copies them itself.

use crate::gpu::GpuError;
use crate::kv::{CellPlace, DeviceMemory, PagePlace, StatePage};
use crate::lora::Attached;
use std::ops::Range;

/// Computes passes of one model.
pub trait Runner: Send + Sync {
    /// Name of the device, for `doctor` and messages.
    fn name(&self) -> String;

    /// Index of the first layer that it computes, 0 for all of them. The CPU computes the layers
    /// before.
    fn first_layer(&self) -> usize;

    /// Whether it looks up the embeddings of tokens itself. Otherwise the CPU does, which hands over
    /// hidden states as after layers of its own.
    fn embeds(&self) -> bool {
        self.first_layer() == 0
    }

    /// Bytes of weights that it had to copy, as it cannot use them where they are.
    fn copied_bytes(&self) -> u64;

    /// Whether the CPU can access the memory of pages.
    fn shares_memory(&self) -> bool;

    /// Allocates memory for a page of keys and values, or for the device's part of one if memory is
    /// not shared; `None` if there is none left.
    fn page(&self, bytes: usize) -> Option<DeviceMemory>;

    /// Most bytes of all pages.
    fn page_limit(&self) -> u64;

    /// Computes a pass: appends keys and values to the pages, writes states, and the requested
    /// outputs.
    ///
    /// # Errors
    /// If the device has no memory or fails. Earlier contents of the pages are unchanged, but for
    /// inputs of recurrent layers.
    fn pass(&self, batch: &Batch<'_>, outputs: BatchOutputs<'_>) -> Result<(), GpuError>;
}

/// The rows of a pass, one per token, slot by slot.
#[derive(Debug)]
pub struct Batch<'a> {
    /// The slots: sequences, each with adjacent rows.
    pub slots: &'a [BatchSlot<'a>],
    /// Tokens of the rows.
    pub tokens: &'a [u32],
    /// Hidden states after the CPU's layers, `(rows, n_embd)`; empty if the CPU computes nothing.
    pub hidden: &'a [f32],
    /// Cosines of each rope of the model `(rows, n_dims/2)`, one rope after the other.
    pub cos: &'a [f32],
    /// Sines likewise.
    pub sin: &'a [f32],
    /// Position of the data of each layer with keys and values in a page.
    pub places: &'a [PagePlace],
    /// Position of each recurrence's data in its pages.
    pub cells: &'a [CellPlace],
}

/// The rows of one sequence.
#[derive(Clone, Debug)]
pub struct BatchSlot<'a> {
    /// Its rows in the batch; never empty.
    pub rows: Range<usize>,
    /// Its rows with outputs, the last ones.
    pub outputs: Range<usize>,
    /// Position of the first row.
    pub pos: usize,
    /// Whether the tokens were generated (including drafts) rather than read from a prompt. The
    /// bits of a row depend on this, but on no other row.
    pub generated: bool,
    /// For each group of layers, the addresses of the sequence's pages, by position divided by 64;
    /// 0 for pages that have left a window. All tables have the same length.
    pub tables: &'a [Vec<u64>],
    /// Pages of recurrent layers: the state that the pass begins with; the last tokens' inputs, with
    /// the position of the first row, up to which they are replayed from that state on; those that
    /// states are written to, at ascending positions, the last behind the last row. Empty without
    /// recurrent layers.
    pub states: &'a [StatePage],
    /// Its adapters, whose terms are added to products in this order.
    #[cfg_attr(not(any(feature = "metal", feature = "webgpu")), allow(dead_code))]
    // the CPU has the sessions' own
    pub(crate) adapters: &'a [Attached],
}

/// Destination of the results, with a row for each output of the batch.
#[derive(Debug)]
pub struct BatchOutputs<'a> {
    /// Logits, `(outputs, n_vocab)`.
    pub logits: &'a mut [f32],
    /// The head's inputs, `(outputs, n_embd)`. If they are requested, logits are the head's bare
    /// products.
    pub states: Option<&'a mut [f32]>,
}
