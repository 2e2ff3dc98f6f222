//! Mamba 2 (arXiv 2405.21060): a convolution, then a state space whose heads each forget at one
//! rate that depends on the token; the output is gated, and normed if the file has a norm.

pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::Arch;
use crate::compute::arena::Frame;
use crate::compute::linear::Product;
use crate::kv::CellShape;
use crate::layers::conv::CausalConv;
use crate::layers::mamba2::spec::Mamba2Spec;
use crate::layers::mamba2::weights::Mamba2;
use crate::layers::recurrence::{Mixing, Recurrence};

pub(crate) struct Buffers<'a> {
    /// Gate, what is convolved, and time steps: `(m, n_inner + n_channel + n_head)`.
    input: &'a mut [f32],
    /// `(m, n_channel)`.
    channels: &'a mut [f32],
    /// Convolved channels and time steps, `(m, n_channel + n_head)`.
    feed: &'a mut [f32],
    by_part: &'a mut [f32],
    /// `(m, n_inner)`.
    out: &'a mut [f32],
}

impl<'a> Buffers<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, spec: &Mamba2Spec, m: usize) -> Buffers<'a> {
        let (n_channel, n_head) = (spec.conv().n_channel, spec.n_head);
        Buffers {
            input: frame.take(m * (spec.n_inner + n_channel + n_head)),
            channels: frame.take(m * n_channel),
            feed: frame.take(m * (n_channel + n_head)),
            by_part: frame.take(m * n_channel),
            out: frame.take(m * spec.n_inner),
        }
    }
}

/// `S = e^(dt·a)·S + dt·x·bᵀ`, `y = S·c + d·x` for each head's `x` and state `S: (head_dim,
/// n_state)`, which is kept transposed; `b` and `c` are shared by the heads of a group.
struct Scan<'a> {
    spec: &'a Mamba2Spec,
    w: &'a Mamba2,
}

fn scan_cell(spec: &Mamba2Spec) -> CellShape {
    CellShape {
        n_state: spec.n_inner * spec.n_state,
        n_feed: spec.conv().n_channel + spec.n_head,
    }
}

pub(crate) fn cells(spec: &Mamba2Spec) -> [CellShape; 2] {
    [CausalConv::cell(spec.conv()), scan_cell(spec)]
}

impl Recurrence for Scan<'_> {
    fn n_parts(&self) -> usize {
        self.spec.n_head
    }

    fn n_out(&self) -> usize {
        self.spec.n_inner
    }

    fn step(&self, arch: Arch, head: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]) {
        let &Mamba2Spec {
            n_inner,
            n_head,
            n_group,
            n_state,
            ..
        } = self.spec;
        let (x, rest) = feed.split_at(n_inner);
        let (b, rest) = rest.split_at(n_group * n_state);
        let (c, dt) = rest.split_at(n_group * n_state);
        let group = head / (n_head / n_group);
        let [b, c] = [b, c].map(|x| &x[group * n_state..][..n_state]);
        let (x, dt) = (&x[head * out.len()..][..out.len()], dt[head]);
        let decay = (dt * self.w.a[head]).exp();
        arch.ssm_step(state, b, c, decay, dt, x, out);
        out.iter_mut()
            .zip(x)
            .for_each(|(out, x)| *out += self.w.d[head] * x);
    }
}

/// What the output matrix is multiplied by, `(m, n_inner)`.
pub(crate) fn mix<'a>(
    pass: &mut Mixing<'_, '_, '_>,
    spec: &Mamba2Spec,
    w: &Mamba2,
    (x, m): (&[f32], usize),
    frame: &mut Frame<'a>,
) -> &'a mut [f32] {
    let Buffers {
        input,
        channels,
        feed,
        by_part,
        out,
    } = Buffers::take(frame, spec, m);
    let (n_inner, n_head, n_channel) = (spec.n_inner, spec.n_head, spec.conv().n_channel);
    let n_input = n_inner + n_channel + n_head;
    pass.linear(x, m, &mut [Product::of(&w.input, input, m)]);
    for (to, input) in channels
        .chunks_exact_mut(n_channel)
        .zip(input.chunks_exact(n_input))
    {
        to.copy_from_slice(&input[n_inner..][..n_channel]);
    }
    let conv = CausalConv {
        spec: spec.conv(),
        w: &w.conv,
        silu: true,
    };
    let convolved = &mut feed[..m * n_channel];
    pass.recur(&conv, (channels, n_channel), by_part, convolved);
    channels.copy_from_slice(convolved);
    let (given, convolved) = (&*input, &*channels);
    pass.cx
        .threads
        .when(m > 1)
        .for_chunks(feed, n_channel + n_head, |row, feed| {
            feed[..n_channel].copy_from_slice(&convolved[row * n_channel..][..n_channel]);
            let dt = feed[n_channel..]
                .iter_mut()
                .zip(&given[row * n_input + n_inner + n_channel..]);
            dt.zip(&w.dt_bias)
                .for_each(|((to, dt), bias)| *to = softplus(dt + bias));
        });
    pass.recur(&Scan { spec, w }, (feed, n_channel + n_head), by_part, out);
    let (arch, eps, width) = (pass.cx.arch, pass.cx.h.norm_eps, n_inner / spec.n_group);
    pass.cx
        .threads
        .when(m > 1)
        .for_chunk_pairs(out, n_inner, input, n_input, |_, out, input| {
            let gate = &mut input[..n_inner];
            arch.silu_mul(gate, out);
            out.copy_from_slice(gate);
            if let Some(norm) = &w.norm {
                for (out, norm) in out.chunks_exact_mut(width).zip(norm.chunks_exact(width)) {
                    let factor = 1.0 / (arch.dot(out, out) / width as f32 + eps).sqrt();
                    out.iter_mut()
                        .zip(norm)
                        .for_each(|(out, norm)| *out = *out * factor * norm);
                }
            }
        });
    out
}

/// `ln(1 + eˣ)`.
pub(crate) fn softplus(x: f32) -> f32 {
    // Beyond it the difference is less than `f32` can tell.
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
