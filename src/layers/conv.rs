//! Causal convolution of each channel by itself: a weighed sum of its values at this token and the
//! ones before it. The state are those before it: of each part, `(n_tap - 1, channels)`.

pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::Arch;
use crate::kv::CellShape;
use crate::layers::conv::spec::ConvSpec;
use crate::layers::conv::weights::Conv;
use crate::layers::recurrence::Recurrence;

/// Most channels of a part.
const CHANNELS: usize = 256;

pub(crate) struct CausalConv<'a> {
    pub(crate) spec: ConvSpec,
    pub(crate) w: &'a Conv,
    /// Whether `x/(1 + e⁻ˣ)` of the sums is given out.
    pub(crate) silu: bool,
}

impl CausalConv<'_> {
    pub(crate) fn cell(spec: ConvSpec) -> CellShape {
        CellShape {
            n_state: spec.n_channel * (spec.n_tap - 1),
            n_feed: spec.n_channel,
        }
    }
}

impl Recurrence for CausalConv<'_> {
    fn n_parts(&self) -> usize {
        parts_of(self.spec.n_channel)
    }

    fn n_out(&self) -> usize {
        self.spec.n_channel
    }

    fn step(&self, arch: Arch, part: usize, past: &mut [f32], feed: &[f32], out: &mut [f32]) {
        let n = out.len();
        let channels = part * n..(part + 1) * n;
        let x = &feed[channels.clone()];
        if self.w.bias.is_empty() {
            out.fill(0.0);
        } else {
            out.copy_from_slice(&self.w.bias[channels.clone()]);
        }
        arch.causal_conv(
            past,
            (&self.w.taps[channels.start..], self.spec.n_channel),
            x,
            out,
        );
        if self.silu {
            arch.silu_mul(out, &[1.0; CHANNELS][..n]);
        }
    }
}

/// Parts of so many channels: each has the largest power of two that divides them, within bounds.
pub(crate) fn parts_of(n_channel: usize) -> usize {
    n_channel / (1 << n_channel.trailing_zeros()).min(CHANNELS)
}

/// `x/(1 + e⁻ˣ)`.
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}
