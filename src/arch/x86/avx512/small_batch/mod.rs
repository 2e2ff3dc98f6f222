//! Products of block formats with small batches: few rows of prompts, alone or with generated rows.

mod rounded;
mod tables;
mod transposed_sums;
mod transposed_weights;

pub(super) use tables::{blocks_of_32, halves, spans};
