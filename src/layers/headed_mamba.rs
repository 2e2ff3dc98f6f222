//! Mamba of PLaMo 2: a convolution, then a state space whose heads each forget at one rate that
//! depends on the token; what goes into and out of the state, and the time steps, are products with
//! convolved channels, and have norms; the output is gated.

pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::Arch;
use crate::compute::arena::Frame;
use crate::compute::linear::Product;
use crate::kv::CellShape;
use crate::layers::conv::{CausalConv, silu};
use crate::layers::headed_mamba::spec::HeadedMambaSpec;
use crate::layers::headed_mamba::weights::HeadedMamba;
use crate::layers::mamba2::softplus;
use crate::layers::norm::rms_factor;
use crate::layers::recurrence::{Mixing, Recurrence};

pub(crate) struct Buffers<'a> {
    /// Gate and what is convolved, head by head: `(m, 2·n_inner)`.
    input: &'a mut [f32],
    /// `(m, n_inner)`, before and after the convolution.
    channels: &'a mut [f32],
    convolved: &'a mut [f32],
    /// `b`, `c` and time steps of low rank: `(m, 2·n_state + dt_rank)`; time steps by themselves,
    /// `(m, dt_rank)`.
    low: &'a mut [f32],
    dt_low: &'a mut [f32],
    /// `(m, n_head)`.
    dt: &'a mut [f32],
    /// Channels, `b`, `c` and time steps.
    feed: &'a mut [f32],
    by_part: &'a mut [f32],
    out: &'a mut [f32],
}

impl<'a> Buffers<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, spec: &HeadedMambaSpec, m: usize) -> Buffers<'a> {
        let &HeadedMambaSpec {
            n_inner,
            n_head,
            n_state,
            dt_rank,
            ..
        } = spec;
        Buffers {
            input: frame.take(m * 2 * n_inner),
            channels: frame.take(m * n_inner),
            convolved: frame.take(m * n_inner),
            low: frame.take(m * (2 * n_state + dt_rank)),
            dt_low: frame.take(m * dt_rank),
            dt: frame.take(m * n_head),
            feed: frame.take(m * spec.n_feed()),
            by_part: frame.take(m * n_inner),
            out: frame.take(m * n_inner),
        }
    }
}

/// `S = e^(dt·a)·S + dt·x·bᵀ`, `y = S·c + d·x` for each head's `x` and state `S: (head_dim,
/// n_state)`, which is kept transposed.
struct Scan<'a> {
    spec: &'a HeadedMambaSpec,
    w: &'a HeadedMamba,
}

pub(crate) fn cells(spec: &HeadedMambaSpec) -> [CellShape; 2] {
    [
        CausalConv::cell(spec.conv()),
        CellShape {
            n_state: spec.n_inner.saturating_mul(spec.n_state),
            n_feed: spec.n_feed(),
        },
    ]
}

impl Recurrence for Scan<'_> {
    fn n_parts(&self) -> usize {
        self.spec.n_head
    }

    fn n_out(&self) -> usize {
        self.spec.n_inner
    }

    fn step(&self, arch: Arch, head: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]) {
        let (x, rest) = feed.split_at(self.spec.n_inner);
        let (b, rest) = rest.split_at(self.spec.n_state);
        let (c, dt) = rest.split_at(self.spec.n_state);
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
    spec: &HeadedMambaSpec,
    w: &HeadedMamba,
    (x, m): (&[f32], usize),
    frame: &mut Frame<'a>,
) -> &'a mut [f32] {
    let Buffers {
        input,
        channels,
        convolved,
        low,
        dt_low,
        dt,
        feed,
        by_part,
        out,
    } = Buffers::take(frame, spec, m);
    let &HeadedMambaSpec {
        n_inner,
        n_head,
        n_state,
        dt_rank,
        ..
    } = spec;
    let (width, n_low, n_feed) = (n_inner / n_head, 2 * n_state + dt_rank, spec.n_feed());
    pass.linear(x, m, &mut [Product::of(&w.input, input, m)]);
    for (to, input) in channels
        .chunks_exact_mut(width)
        .zip(input.chunks_exact(2 * width))
    {
        to.copy_from_slice(&input[width..]);
    }
    let conv = CausalConv {
        spec: spec.conv(),
        w: &w.conv,
        silu: true,
    };
    pass.recur(&conv, (channels, n_inner), by_part, convolved);
    pass.linear(convolved, m, &mut [Product::of(&w.x, low, m)]);
    let (arch, eps) = (pass.cx.arch, pass.cx.h.norm_eps);
    for (low, dt_low) in low
        .chunks_exact_mut(n_low)
        .zip(dt_low.chunks_exact_mut(dt_rank))
    {
        let (b, rest) = low.split_at_mut(n_state);
        let (c, dt) = rest.split_at_mut(n_state);
        for (x, norm) in [b, c, &mut *dt].into_iter().zip(&w.norms) {
            let factor = rms_factor(arch, x, eps);
            x.iter_mut()
                .zip(norm)
                .for_each(|(x, norm)| *x = *x * factor * norm);
        }
        dt_low.copy_from_slice(dt);
    }
    pass.linear(dt_low, m, &mut [Product::of(&w.dt, dt, m)]);
    let (convolved, dt, low) = (&*convolved, &*dt, &*low);
    let workers = pass.cx.threads.when(m > 1);
    workers.for_chunks(feed, n_feed, |row, feed| {
        feed[..n_inner].copy_from_slice(&convolved[row * n_inner..][..n_inner]);
        feed[n_inner..][..2 * n_state].copy_from_slice(&low[row * n_low..][..2 * n_state]);
        let dt = &dt[row * n_head..][..n_head];
        feed[n_inner + 2 * n_state..]
            .iter_mut()
            .zip(dt)
            .for_each(|(to, dt)| *to = softplus(*dt));
    });
    pass.recur(&Scan { spec, w }, (feed, n_feed), by_part, out);
    let workers = pass.cx.threads.when(m > 1);
    workers.for_chunk_pairs(out, width, input, 2 * width, |_, out, input| {
        out.iter_mut()
            .zip(&*input)
            .for_each(|(out, gate)| *out *= silu(*gate));
    });
    out
}
