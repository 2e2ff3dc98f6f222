//! The shared attention on four lanes.
//!
//! Instructions per product of the widest register tile, four query rows that share the loads of keys
//! (`tests/neon_instructions.py`), and what four 128-bit pipes at 4.4 GHz make of it at most: 0.50 for `f32`,
//! 35 billion products per second; 0.58 for half precision, 30. One query row takes 0.5 and 0.75, less than
//! the caches of a core deliver for.

use super::elementwise::zero;
use crate::arch::AttnParams;
use crate::arch::lanes::{attention, attention_backward_kernels};
use half::f16;

#[target_feature(enable = "neon")]
pub(super) fn attention_f32(out: &mut [f32], q: &[f32], k: &[f32], v: &[f32], ranges: &[(u32, u32)], p: &AttnParams) {
    attention::attention(zero(), out, q, k, v, ranges, p);
}

#[target_feature(enable = "neon")]
pub(super) fn attention_f16(out: &mut [f32], q: &[f32], k: &[f16], v: &[f16], ranges: &[(u32, u32)], p: &AttnParams) {
    attention::attention(zero(), out, q, k, v, ranges, p);
}

attention_backward_kernels!("neon", zero());
