//! What computes passes in place of the CPU: a GPU.
//!
//! An engine hands over whole passes. Keys and values stay in the pages of its pool, whose memory the runner gives and both
//! can reach: so forks, rewinds and copies on write are the CPU's business alone, and the first layers of a model can be
//! the CPU's, too.

use crate::cache::{PageMemory, PagePlace};
use crate::error::SessionError;
use std::ops::Range;

/// Computes the passes of one model.
pub trait Runner: Send + Sync {
    /// What computes, as `doctor` and messages call it.
    fn name(&self) -> String;

    /// The first layer that it computes, 0 for all of them. The layers before are the CPU's.
    fn first_layer(&self) -> usize;

    /// Memory for a page of keys and values; `None` if there is none left.
    fn page(&self, bytes: usize) -> Option<Box<dyn PageMemory>>;

    /// Computes a pass: appends keys and values to the pages, and writes what is asked for.
    ///
    /// # Errors
    /// If the device has no memory or gives up. What the pages held before is unharmed.
    fn pass(&self, batch: &Batch<'_>, outputs: BatchOutputs<'_>) -> Result<(), SessionError>;
}

/// The rows of a pass, one per token, slot by slot.
#[derive(Debug)]
pub struct Batch<'a> {
    /// Sequences, each with adjacent rows.
    pub slots: &'a [BatchSlot<'a>],
    /// Tokens of the rows.
    pub tokens: &'a [u32],
    /// What the CPU's layers left, `(rows, n_embd)`; empty if there are none.
    pub hidden: &'a [f32],
    /// Cosines of each rope of the model `(rows, n_dims/2)`, one rope after the other.
    pub cos: &'a [f32],
    /// Sines likewise.
    pub sin: &'a [f32],
    /// Where each layer lies in a page.
    pub places: &'a [PagePlace],
}

/// The rows of one sequence.
#[derive(Clone, Debug)]
pub struct BatchSlot<'a> {
    /// Its rows in the batch, which are not empty.
    pub rows: Range<usize>,
    /// Those with outputs: the last ones.
    pub outputs: Range<usize>,
    /// Position of the first row.
    pub pos: usize,
    /// Whether the tokens are generated (drafts included), not a prompt. A row's bits depend on it, and on no other row.
    pub generated: bool,
    /// Of each group of layers the addresses of the sequence's pages, by position divided by 64; 0 where a window has
    /// left one. All are equally long.
    pub tables: &'a [Vec<u64>],
}

/// Where results go, a row for each output of the batch.
#[derive(Debug)]
pub struct BatchOutputs<'a> {
    /// `(outputs, n_vocab)`.
    pub logits: &'a mut [f32],
    /// What the head read, `(outputs, n_embd)`. Where it is wanted, logits are the head's products alone.
    pub states: Option<&'a mut [f32]>,
}
