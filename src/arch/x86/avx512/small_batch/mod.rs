//! Products of block formats with small batches: few prefill rows, alone or mixed with decode rows.

mod rounded;
mod tables;
mod transposed_sums;
mod transposed_weights;

pub(super) use tables::{blocks_of_32, halves, spans};
