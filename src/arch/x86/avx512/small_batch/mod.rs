//! Products of block formats with few rows of prompts, and with rows of both kinds.

mod rounded;
mod tables;
mod transposed_sums;
mod transposed_weights;

pub(super) use tables::{blocks_of_32, halves, spans};
