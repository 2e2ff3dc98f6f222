//! Mamba 1 (arXiv 2312.00752): a convolution, then a state space in which each channel has a rate
//! at which it forgets for each of its values, that depends on the token; the output is gated.

pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::Arch;
use crate::compute::arena::Frame;
use crate::compute::linear::Product;
use crate::kv::CellShape;
use crate::layers::conv::{CausalConv, parts_of};
use crate::layers::mamba::spec::{MambaNorms, MambaSpec};
use crate::layers::mamba::weights::Mamba;
use crate::layers::mamba2::softplus;
use crate::layers::recurrence::{Mixing, Recurrence};

pub(crate) struct Buffers<'a> {
    /// What is convolved, and the gate: `(m, 2·n_inner)`.
    input: &'a mut [f32],
    /// `(m, n_inner)`, before and after the convolution.
    channels: &'a mut [f32],
    convolved: &'a mut [f32],
    /// Time steps of low rank, `b` and `c`: `(m, dt_rank + 2·n_state)`; time steps by themselves,
    /// `(m, dt_rank)`.
    low: &'a mut [f32],
    dt_low: &'a mut [f32],
    /// `(m, n_inner)`.
    dt: &'a mut [f32],
    /// Channels, time steps, `b` and `c`: `(m, 2·n_inner + 2·n_state)`.
    feed: &'a mut [f32],
    by_part: &'a mut [f32],
    out: &'a mut [f32],
}

impl<'a> Buffers<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, spec: &MambaSpec, m: usize) -> Buffers<'a> {
        let &MambaSpec {
            n_inner,
            n_state,
            dt_rank,
            ..
        } = spec;
        Buffers {
            input: frame.take(m * 2 * n_inner),
            channels: frame.take(m * n_inner),
            convolved: frame.take(m * n_inner),
            low: frame.take(m * (dt_rank + 2 * n_state)),
            dt_low: frame.take(m * dt_rank),
            dt: frame.take(m * n_inner),
            feed: frame.take(m * (2 * n_inner + 2 * n_state)),
            by_part: frame.take(m * n_inner),
            out: frame.take(m * n_inner),
        }
    }
}

/// `s = e^(dt·a)·s + dt·x·b`, `y = c·s + d·x` for each channel's `x` and state `s: (n_state)`,
/// which lies transposed for each [`MambaSpec::n_block`] channels.
struct Scan<'a> {
    spec: &'a MambaSpec,
    w: &'a Mamba,
}

pub(crate) fn cells(spec: &MambaSpec) -> [CellShape; 2] {
    let n_feed = 2 * spec.n_inner + 2 * spec.n_state;
    [
        CausalConv::cell(spec.conv()),
        CellShape {
            n_state: spec.n_inner * spec.n_state,
            n_feed,
        },
    ]
}

impl Recurrence for Scan<'_> {
    fn n_parts(&self) -> usize {
        parts_of(self.spec.n_inner)
    }

    fn n_out(&self) -> usize {
        self.spec.n_inner
    }

    fn step(&self, arch: Arch, part: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]) {
        let &MambaSpec {
            n_inner, n_state, ..
        } = self.spec;
        let (x, rest) = feed.split_at(n_inner);
        let (dt, rest) = rest.split_at(n_inner);
        let (b, c) = rest.split_at(n_state);
        let first = part * out.len();
        let channels = first..first + out.len();
        let (x, dt, d) = (
            &x[channels.clone()],
            &dt[channels.clone()],
            &self.w.d[channels.clone()],
        );
        let a = &self.w.a[channels.start * n_state..channels.end * n_state];
        let n = self.spec.n_block();
        let blocks = state
            .chunks_exact_mut(n * n_state)
            .zip(a.chunks_exact(n * n_state))
            .zip(out.chunks_exact_mut(n));
        for (((state, a), out), (dt, x)) in blocks.zip(dt.chunks_exact(n).zip(x.chunks_exact(n))) {
            arch.ssm_step_by_state(state, a, b, c, dt, x, out);
        }
        out.iter_mut()
            .zip(d)
            .zip(x)
            .for_each(|((out, d), x)| *out += d * x);
    }
}

/// What the output matrix is multiplied by, `(m, n_inner)`.
pub(crate) fn mix<'a>(
    pass: &mut Mixing<'_, '_, '_>,
    spec: &MambaSpec,
    w: &Mamba,
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
    let &MambaSpec {
        n_inner,
        n_state,
        dt_rank,
        norms,
        ..
    } = spec;
    let n_low = dt_rank + 2 * n_state;
    pass.linear(x, m, &mut [Product::of(&w.input, input, m)]);
    for (to, input) in channels
        .chunks_exact_mut(n_inner)
        .zip(input.chunks_exact(2 * n_inner))
    {
        to.copy_from_slice(&input[..n_inner]);
    }
    let conv = CausalConv {
        spec: spec.conv(),
        w: &w.conv,
        silu: true,
    };
    pass.recur(&conv, (channels, n_inner), by_part, convolved);
    pass.linear(convolved, m, &mut [Product::of(&w.x, low, m)]);
    let (arch, eps) = (pass.cx.arch, spec.norm_eps(pass.cx.h.norm_eps));
    if norms != MambaNorms::None {
        for low in low.chunks_exact_mut(n_low) {
            let (dt, rest) = low.split_at_mut(dt_rank);
            let (b, c) = rest.split_at_mut(n_state);
            for (x, norm) in [dt, b, c].into_iter().zip(&w.norms) {
                let factor = 1.0 / (arch.dot(x, x) / x.len() as f32 + eps).sqrt();
                x.iter_mut()
                    .zip(norm)
                    .for_each(|(x, norm)| *x = *x * factor * norm);
            }
        }
    }
    for (to, low) in dt_low
        .chunks_exact_mut(dt_rank)
        .zip(low.chunks_exact(n_low))
    {
        to.copy_from_slice(&low[..dt_rank]);
    }
    pass.linear(dt_low, m, &mut [Product::of(&w.dt, dt, m)]);
    let (threads, n_feed) = (pass.cx.threads.when(m > 1), 2 * n_inner + 2 * n_state);
    let (convolved, dt, low) = (&*convolved, &*dt, &*low);
    threads.for_chunks(feed, n_feed, |row, feed| {
        feed[..n_inner].copy_from_slice(&convolved[row * n_inner..][..n_inner]);
        let dt = &dt[row * n_inner..][..n_inner];
        feed[n_inner..]
            .iter_mut()
            .zip(dt)
            .for_each(|(to, dt)| *to = softplus(*dt));
        feed[2 * n_inner..].copy_from_slice(&low[row * n_low..][dt_rank..n_low]);
    });
    pass.recur(
        &Scan { spec, w },
        (feed, 2 * n_inner + 2 * n_state),
        by_part,
        out,
    );
    let threads = pass.cx.threads.when(m > 1);
    threads.for_chunk_pairs(out, n_inner, input, 2 * n_inner, |_, out, input| {
        let gate = &mut input[n_inner..];
        arch.silu_mul(gate, out);
        out.copy_from_slice(gate);
    });
    out
}
