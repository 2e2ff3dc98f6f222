//! The shared attention on sixteen lanes.

use super::elementwise::zero;
use crate::arch::AttnParams;
use crate::arch::lanes::{attention, attention_backward_kernels};
use half::f16;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn attention_f32(out: &mut [f32], q: &[f32], k: &[f32], v: &[f32], ranges: &[(u32, u32)], p: &AttnParams) {
    attention::attention(zero(), out, q, k, v, ranges, p);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(in crate::arch) fn attention_f16(
    out: &mut [f32],
    q: &[f32],
    k: &[f16],
    v: &[f16],
    ranges: &[(u32, u32)],
    p: &AttnParams,
) {
    attention::attention(zero(), out, q, k, v, ranges, p);
}

attention_backward_kernels!("avx512f,avx512bw,avx512vl,avx512dq", zero());
