//! Causal convolution of each channel by itself: a weighed sum of its values at this token and the ones before it. The
//! state are those before it.

use super::recurrent::Recurrence;
use crate::arch::Arch;
use crate::cache::CellShape;
use crate::model::{Conv, ConvSpec};

/// Most channels of a part.
const CHANNELS: usize = 256;

pub(super) struct CausalConv<'a> {
    pub(super) spec: ConvSpec,
    pub(super) w: &'a Conv,
    /// Whether `x/(1 + e⁻ˣ)` of the sums is given out.
    pub(super) silu: bool,
}

impl CausalConv<'_> {
    pub(super) fn cell(spec: ConvSpec) -> CellShape {
        CellShape { n_state: spec.n_channel * (spec.n_tap - 1), n_feed: spec.n_channel }
    }
}

impl Recurrence for CausalConv<'_> {
    fn n_parts(&self) -> usize {
        parts_of(self.spec.n_channel)
    }

    fn n_out(&self) -> usize {
        self.spec.n_channel
    }

    fn step(&self, _: Arch, part: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]) {
        let (n_tap, first) = (self.spec.n_tap, part * out.len());
        let n_past = n_tap - 1;
        for (i, out) in out.iter_mut().enumerate() {
            let channel = first + i;
            let (past, taps) = (&mut state[i * n_past..][..n_past], &self.w.taps[channel * n_tap..][..n_tap]);
            let mut sum = self.w.bias.get(channel).copied().unwrap_or(0.0);
            for (x, tap) in past.iter().zip(taps) {
                sum += x * tap;
            }
            sum += feed[channel] * taps[n_past];
            past.rotate_left(usize::from(n_past > 0));
            if let Some(last) = past.last_mut() {
                *last = feed[channel];
            }
            *out = if self.silu { silu(sum) } else { sum };
        }
    }
}

/// Parts of so many channels: each has the largest power of two that divides them, within bounds.
pub(super) fn parts_of(n_channel: usize) -> usize {
    n_channel / (1 << n_channel.trailing_zeros()).min(CHANNELS)
}

/// `x/(1 + e⁻ˣ)`.
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}
