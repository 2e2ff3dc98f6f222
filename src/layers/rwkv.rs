//! RWKV 6 and 7 (arXiv 2404.05892, 2503.14456): a time mix, whose heads have a matrix from keys to
//! values as state, and a channel mix. Both read a blend of each token's input with that of the
//! token before it.

pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::{Arch, MAX_HEAD_DIM};
use crate::compute::arena::Frame;
use crate::compute::linear::Product;
use crate::compute::weight::Linear;
use crate::kv::CellShape;
use crate::layers::activation::sigmoid;
use crate::layers::conv::spec::ConvSpec;
use crate::layers::conv::weights::Conv;
use crate::layers::conv::{CausalConv, silu};
use crate::layers::recurrence::{Mixing, Recurrence};
use crate::layers::rwkv::spec::{ChannelMixSpec, TimeMixSpec};
use crate::layers::rwkv::weights::{ChannelMix, TimeMix, TimeMix6, TimeMix7, TimeMixWeights};

/// Epsilon of the norm of each head's output.
const HEAD_EPS: f32 = 64e-5;
/// Added to the length that a key is divided by.
const MIN_LENGTH: f32 = 1e-12;
/// `e^-½`: a decay is at least `e^-e^-½`.
const DECAY: f32 = 0.606_530_66;

fn shift_spec(n_embd: usize) -> ConvSpec {
    ConvSpec {
        n_channel: n_embd,
        n_tap: 2,
    }
}

/// The inputs of the tokens before: what a convolution gives out that weighs only them.
fn shift(
    pass: &mut Mixing<'_, '_, '_>,
    w: &Conv,
    (x, n): (&[f32], usize),
    (by_part, out): (&mut [f32], &mut [f32]),
) {
    pass.recur(
        &CausalConv {
            spec: shift_spec(n),
            w,
            silu: false,
        },
        (x, n),
        by_part,
        out,
    );
}

/// `to = x + (before − x)·share`, row by row.
fn blend(to: &mut [f32], x: &[f32], before: &[f32], share: &[f32]) {
    let n = share.len();
    for ((to, x), before) in to
        .chunks_exact_mut(n)
        .zip(x.chunks_exact(n))
        .zip(before.chunks_exact(n))
    {
        for (i, to) in to.iter_mut().enumerate() {
            *to = x[i] + (before[i] - x[i]) * share[i];
        }
    }
}

pub(crate) struct ChannelBuffers<'a> {
    /// `(m, n_embd)`: inputs of the tokens before, a blend, and the receptance.
    before: &'a mut [f32],
    blend: &'a mut [f32],
    receptance: &'a mut [f32],
    by_part: &'a mut [f32],
    /// `(m, n_ff)`.
    key: &'a mut [f32],
    out: &'a mut [f32],
}

impl<'a> ChannelBuffers<'a> {
    pub(crate) fn take(
        frame: &mut Frame<'a>,
        spec: &ChannelMixSpec,
        m: usize,
    ) -> ChannelBuffers<'a> {
        let n = m * spec.n_embd;
        ChannelBuffers {
            before: frame.take(n),
            blend: frame.take(n),
            receptance: frame.take(n),
            by_part: frame.take(n),
            key: frame.take(m * spec.n_ff),
            out: frame.take(n),
        }
    }
}

pub(crate) fn channel_cells(spec: &ChannelMixSpec) -> [CellShape; 1] {
    [CausalConv::cell(shift_spec(spec.n_embd))]
}

/// The output of a channel mix: `V·max(K·x, 0)²`, in RWKV 6 times `σ(R·x)`.
pub(crate) fn channel_mix<'a>(
    pass: &mut Mixing<'_, '_, '_>,
    spec: &ChannelMixSpec,
    w: &ChannelMix,
    (x, m): (&[f32], usize),
    frame: &mut Frame<'a>,
) -> &'a mut [f32] {
    let ChannelBuffers {
        before,
        blend: mixed,
        receptance,
        by_part,
        key,
        out,
    } = ChannelBuffers::take(frame, spec, m);
    shift(pass, &w.shift, (x, spec.n_embd), (by_part, before));
    blend(mixed, x, before, &w.share_key);
    pass.linear(mixed, m, &mut [Product::of(&w.key, key, m)]);
    crate::layers::activation::squared_relu(key);
    pass.linear(key, m, &mut [Product::of(&w.value, out, m)]);
    if let Some((share, w)) = &w.receptance {
        blend(mixed, x, before, share);
        pass.linear(mixed, m, &mut [Product::of(w, receptance, m)]);
        out.iter_mut()
            .zip(&*receptance)
            .for_each(|(out, r)| *out *= sigmoid(*r));
    }
    out
}

pub(crate) struct TimeBuffers<'a> {
    /// `(m, n_embd)`: inputs of the tokens before, a blend, products with such.
    before: &'a mut [f32],
    blend: &'a mut [f32],
    r: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
    decay: &'a mut [f32],
    gate: &'a mut [f32],
    rate: &'a mut [f32],
    /// Products of low rank, and a part of one.
    low: &'a mut [f32],
    part: &'a mut [f32],
    /// What feeds the states.
    feed: &'a mut [f32],
    by_part: &'a mut [f32],
    out: &'a mut [f32],
}

impl<'a> TimeBuffers<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, spec: &TimeMixSpec, m: usize) -> TimeBuffers<'a> {
        let n = m * spec.n_embd();
        TimeBuffers {
            before: frame.take(n),
            blend: frame.take(n),
            r: frame.take(n),
            k: frame.take(n),
            v: frame.take(n),
            decay: frame.take(n),
            gate: frame.take(n),
            rate: frame.take(n),
            low: frame.take(m * spec.most_rank()),
            part: frame.take(m * spec.most_rank()),
            feed: frame.take(spec.n_feed() * m),
            by_part: frame.take(n),
            out: frame.take(n),
        }
    }
}

pub(crate) fn time_cells(spec: &TimeMixSpec) -> [CellShape; 2] {
    let n_state = spec.n_embd().saturating_mul(spec.head_dim);
    [
        CausalConv::cell(shift_spec(spec.n_embd())),
        CellShape {
            n_state,
            n_feed: spec.n_feed(),
        },
    ]
}

/// [`Arch::rwkv6_step`] for each head's state; fed by `r, k, v, w`.
struct Rule6<'a> {
    spec: &'a TimeMixSpec,
    first: &'a [f32],
}

impl Recurrence for Rule6<'_> {
    fn n_parts(&self) -> usize {
        self.spec.n_head
    }

    fn n_out(&self) -> usize {
        self.spec.n_embd()
    }

    fn step(&self, arch: Arch, head: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]) {
        let (d, n) = (self.spec.head_dim, self.spec.n_embd());
        let [r, k, v, w] = [0, 1, 2, 3].map(|i| &feed[i * n + head * d..][..d]);
        arch.rwkv6_step(state, r, k, v, w, &self.first[head * d..][..d], out);
    }
}

/// [`Arch::rwkv7_step`] for each head's state; fed by `r, k, v, w, a, b`.
struct Rule7<'a>(&'a TimeMixSpec);

impl Recurrence for Rule7<'_> {
    fn n_parts(&self) -> usize {
        self.0.n_head
    }

    fn n_out(&self) -> usize {
        self.0.n_embd()
    }

    fn step(&self, arch: Arch, head: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]) {
        let (d, n) = (self.0.head_dim, self.0.n_embd());
        let [r, k, v, w, a, b] = [0, 1, 2, 3, 4, 5].map(|i| &feed[i * n + head * d..][..d]);
        arch.rwkv7_step(state, [r, k, w, a, b], v, out);
    }
}

/// [`Arch::rwkv7_step`] that removes nothing from a head's state; fed by `r, k, v, w`.
struct LinearRule<'a>(&'a TimeMixSpec);

impl Recurrence for LinearRule<'_> {
    fn n_parts(&self) -> usize {
        self.0.n_head
    }

    fn n_out(&self) -> usize {
        self.0.n_embd()
    }

    fn step(&self, arch: Arch, head: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]) {
        let (d, n) = (self.0.head_dim, self.0.n_embd());
        let [r, k, v, w] = [0, 1, 2, 3].map(|i| &feed[i * n + head * d..][..d]);
        let nothing = &[0.0; MAX_HEAD_DIM][..d];
        arch.rwkv7_step(state, [r, k, w, nothing, nothing], v, out);
    }
}

/// What the output matrix is multiplied by, `(m, n_embd)`.
pub(crate) fn time_mix<'a>(
    pass: &mut Mixing<'_, '_, '_>,
    spec: &TimeMixSpec,
    w: &TimeMix,
    (x, m): (&[f32], usize),
    frame: &mut Frame<'a>,
) -> &'a mut [f32] {
    let mut b = TimeBuffers::take(frame, spec, m);
    let n = spec.n_embd();
    shift(pass, &w.shift, (x, n), (b.by_part, b.before));
    match &w.weights {
        TimeMixWeights::Six(w6) => {
            blends(pass, (w, w6), (x, m), &mut b);
            six(pass, spec, (w, w6), m, &mut b);
        }
        TimeMixWeights::Linear(w6) => {
            blends(pass, (w, w6), (x, m), &mut b);
            linear(pass, spec, w6, m, &mut b);
        }
        TimeMixWeights::Seven(w7) => seven(pass, spec, (w, w7), (x, m), &mut b),
    }
    b.out
}

/// Products of RWKV 6 with blends, of which each has shares that depend on the token.
fn blends(
    pass: &mut Mixing<'_, '_, '_>,
    (w, w6): (&TimeMix, &TimeMix6),
    (x, m): (&[f32], usize),
    b: &mut TimeBuffers<'_>,
) {
    let TimeMix6 {
        share,
        low,
        up,
        shares,
        decay_low,
        decay_up,
        gate,
        ..
    } = w6;
    let n = share.len();
    blend(b.blend, x, b.before, share);
    let low_rows = &mut b.low[..m * low.w.n_out];
    pass.linear(b.blend, m, &mut [Product::of(low, low_rows, m)]);
    low_rows.iter_mut().for_each(|x| *x = x.tanh());
    let rank = low.w.n_out / 5;
    let targets = [4, 1, 2, 0, 3];
    for (i, target) in targets.into_iter().enumerate() {
        let part = &mut b.part[..m * rank];
        for (to, low) in part
            .chunks_exact_mut(rank)
            .zip(low_rows.chunks_exact(5 * rank))
        {
            to.copy_from_slice(&low[i * rank..][..rank]);
        }
        pass.linear(
            part,
            m,
            &mut [Product::of_weight(&up.matrix(i, 5), b.out, m)],
        );
        let share = &shares[i * n..][..n];
        let rows = b.blend.chunks_exact_mut(n).zip(b.out.chunks_exact(n));
        for ((to, change), (x, before)) in rows.zip(x.chunks_exact(n).zip(b.before.chunks_exact(n)))
        {
            for (j, to) in to.iter_mut().enumerate() {
                *to = x[j] + (before[j] - x[j]) * (share[j] + change[j]);
            }
        }
        let (matrix, to) = match target {
            0 => (&w.receptance, &mut *b.r),
            1 => (&w.key, &mut *b.k),
            2 => (&w.value, &mut *b.v),
            3 => (gate, &mut *b.gate),
            _ => {
                let part = &mut b.part[..m * decay_low.w.n_out];
                pass.linear(b.blend, m, &mut [Product::of(decay_low, part, m)]);
                part.iter_mut().for_each(|x| *x = x.tanh());
                pass.linear(part, m, &mut [Product::of(decay_up, b.decay, m)]);
                continue;
            }
        };
        let to = &mut to[..m * matrix.w.n_out];
        pass.linear(b.blend, m, &mut [Product::of(matrix, to, m)]);
    }
}

fn six(
    pass: &mut Mixing<'_, '_, '_>,
    spec: &TimeMixSpec,
    (w, w6): (&TimeMix, &TimeMix6),
    m: usize,
    b: &mut TimeBuffers<'_>,
) {
    let (n, first) = (spec.n_embd(), &w6.first);
    let (r, k, v, decays) = (&*b.r, &*b.k, &*b.v, &*b.decay);
    pass.cx
        .threads
        .when(m > 1)
        .for_chunks(b.feed, 4 * n, |row, feed| {
            let row = row * n..(row + 1) * n;
            feed[..n].copy_from_slice(&r[row.clone()]);
            feed[n..2 * n].copy_from_slice(&k[row.clone()]);
            feed[2 * n..3 * n].copy_from_slice(&v[row.clone()]);
            let decays = feed[3 * n..].iter_mut().zip(&decays[row]).zip(&w6.decay);
            decays.for_each(|((to, x), bias)| *to = (-(x + bias).exp()).exp());
        });
    pass.recur(&Rule6 { spec, first }, (b.feed, 4 * n), b.by_part, b.out);
    norm_heads(pass.cx.arch, spec, w, b.out);
    b.out
        .iter_mut()
        .zip(&*b.gate)
        .for_each(|(out, gate)| *out *= silu(*gate));
}

/// RWKV 6 as linear attention: a token is in the state already when it is read, its keys count as
/// much as the state forgets for them, and gates are sigmoids.
fn linear(
    pass: &mut Mixing<'_, '_, '_>,
    spec: &TimeMixSpec,
    w6: &TimeMix6,
    m: usize,
    b: &mut TimeBuffers<'_>,
) {
    let (n, d, n_key) = (spec.n_embd(), spec.head_dim, spec.n_key());
    let n_group = n / n_key;
    let scale = 1.0 / (d as f32).sqrt();
    let (r, k, v, decays) = (&*b.r, &*b.k, &*b.v, &*b.decay);
    let workers = pass.cx.threads.when(m > 1);
    workers.for_chunks(b.feed, 4 * n, |row, feed| {
        let [r, decays] = [r, decays].map(|x| &x[row * n..][..n]);
        let [k, v] = [k, v].map(|x| &x[row * n_key..][..n_key]);
        for j in 0..n {
            // The key/value head of the head, and the place in it.
            let of_key = j / d / n_group * d + j % d;
            let decay = (-(decays[j] + w6.decay[j]).exp()).exp();
            feed[j] = r[j] * scale;
            feed[n + j] = k[of_key] * (1.0 - decay);
            feed[2 * n + j] = v[of_key];
            feed[3 * n + j] = decay;
        }
    });
    pass.recur(&LinearRule(spec), (b.feed, 4 * n), b.by_part, b.out);
    b.out
        .iter_mut()
        .zip(&*b.gate)
        .for_each(|(out, gate)| *out *= sigmoid(*gate));
}

fn seven(
    pass: &mut Mixing<'_, '_, '_>,
    spec: &TimeMixSpec,
    (w, w7): (&TimeMix, &TimeMix7),
    (x, m): (&[f32], usize),
    b: &mut TimeBuffers<'_>,
) {
    let (n, d, arch) = (spec.n_embd(), spec.head_dim, pass.cx.arch);
    let share = |i: usize| &w7.shares[i * n..][..n];
    // A product of low rank, its middle changed by `change`.
    let mut low = |pass: &mut Mixing<'_, '_, '_>,
                   x: &[f32],
                   w: &[Linear; 2],
                   change: fn(f32) -> f32,
                   to: &mut [f32]| {
        let low = &mut b.low[..m * w[0].w.n_out];
        pass.linear(x, m, &mut [Product::of(&w[0], low, m)]);
        low.iter_mut().for_each(|x| *x = change(*x));
        pass.linear(low, m, &mut [Product::of(&w[1], to, m)]);
    };
    blend(b.blend, x, b.before, share(0));
    pass.linear(b.blend, m, &mut [Product::of(&w.receptance, b.r, m)]);
    blend(b.blend, x, b.before, share(1));
    low(pass, b.blend, &w7.decay, f32::tanh, b.decay);
    blend(b.blend, x, b.before, share(2));
    pass.linear(b.blend, m, &mut [Product::of(&w.key, b.k, m)]);
    blend(b.blend, x, b.before, share(3));
    pass.linear(b.blend, m, &mut [Product::of(&w.value, b.v, m)]);
    match &w7.residual {
        // The first layer's values are blended into those of the others.
        None => pass.first_values[..m * n].copy_from_slice(b.v),
        Some((bias, matrices)) => {
            low(pass, b.blend, matrices, |x| x, b.out);
            let first = pass.first_values.chunks_exact(n);
            for ((v, out), first) in
                b.v.chunks_exact_mut(n)
                    .zip(b.out.chunks_exact(n))
                    .zip(first)
            {
                for (j, v) in v.iter_mut().enumerate() {
                    *v += (first[j] - *v) * sigmoid(out[j] + bias[j]);
                }
            }
        }
    }
    blend(b.blend, x, b.before, share(4));
    low(pass, b.blend, &w7.rate, |x| x, b.rate);
    if let Some(gate) = &w7.gate {
        blend(b.blend, x, b.before, share(5));
        low(pass, b.blend, gate, sigmoid, b.gate);
    } else {
        b.gate.fill(1.0);
    }
    let (r, v, rate, decay) = (&*b.r, &*b.v, &*b.rate, &*b.decay);
    pass.cx
        .threads
        .when(m > 1)
        .for_chunk_pairs(b.feed, 6 * n, b.k, n, |row, feed, k| {
            let [r, v, rate, decay] = [r, v, rate, decay].map(|x| &x[row * n..][..n]);
            for head in 0..spec.n_head {
                let here = head * d..(head + 1) * d;
                let mut square = 0.0;
                for j in here.clone() {
                    let removed = k[j] * w7.removal[j];
                    square += removed * removed;
                    feed[4 * n + j] = -removed;
                }
                let length = f32::sqrt(square).max(MIN_LENGTH);
                for j in here {
                    let rate = sigmoid(rate[j] + w7.rate_bias[j]);
                    let removed = feed[4 * n + j] / length;
                    (feed[4 * n + j], feed[5 * n + j]) = (removed, -removed * rate);
                    k[j] += k[j] * w7.replacement[j] * (rate - 1.0);
                    feed[3 * n + j] = (-DECAY * sigmoid(decay[j] + w7.decay_bias[j])).exp();
                }
            }
            feed[..n].copy_from_slice(r);
            feed[n..2 * n].copy_from_slice(k);
            feed[2 * n..3 * n].copy_from_slice(v);
        });
    pass.recur(&Rule7(spec), (b.feed, 6 * n), b.by_part, b.out);
    norm_heads(arch, spec, w, b.out);
    for (i, out) in b.out.chunks_exact_mut(d).enumerate() {
        let (here, head) = (i * d..(i + 1) * d, i % spec.n_head * d);
        let (r, k) = (&b.r[here.clone()], &b.k[here.clone()]);
        let bonus: f32 = r
            .iter()
            .zip(k)
            .zip(&w7.bonus[head..])
            .map(|((r, k), w)| r * k * w)
            .sum();
        for ((out, v), gate) in out.iter_mut().zip(&b.v[here.clone()]).zip(&b.gate[here]) {
            *out = (*out + bonus * v) * gate;
        }
    }
}

/// A layer norm of each head, if there is one.
fn norm_heads(arch: Arch, spec: &TimeMixSpec, w: &TimeMix, x: &mut [f32]) {
    let Some(norm) = &w.norm else { return };
    let d = spec.head_dim;
    let mut from = [0.0; MAX_HEAD_DIM];
    let from = &mut from[..d];
    for (i, x) in x.chunks_exact_mut(d).enumerate() {
        let head = i % spec.n_head * d;
        from.copy_from_slice(x);
        arch.layer_norm(
            x,
            from,
            &norm.w[head..][..d],
            &norm.b[head..][..d],
            HEAD_EPS,
        );
    }
}
