//! Gated delta rule (arXiv 2412.06464), whose heads forget at a rate that depends on the token, or
//! (Kimi Delta Attention, arXiv 2510.26692) each of a head's key dimensions at its own.

pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::Arch;
use crate::compute::arena::Frame;
use crate::compute::linear::Product;
use crate::kv::CellShape;
use crate::layers::activation::sigmoid;
use crate::layers::conv::CausalConv;
use crate::layers::gated_delta::spec::DeltaSpec;
use crate::layers::gated_delta::weights::{Delta, DeltaInput};
use crate::layers::mamba2::softplus;
use crate::layers::recurrence::{Mixing, Recurrence};

/// Added to the squared length that a query or key is divided by, if nothing else is.
pub(crate) const EPS: f32 = 1e-6;

pub(crate) struct Buffers<'a> {
    /// Queries, keys and values before the convolution, `(m, n_channel)`, and behind it.
    channels: &'a mut [f32],
    convolved: &'a mut [f32],
    /// A product that is laid out anew, or of low rank.
    low: &'a mut [f32],
    /// Strengths, `(m, n_head)`, rates, `(m, n_rate)`, and gates, `(m, n_out)`.
    beta: &'a mut [f32],
    rate: &'a mut [f32],
    gate: &'a mut [f32],
    /// Queries, keys, values, strengths and rates: `(m, n_channel + n_head + n_rate)`.
    feed: &'a mut [f32],
    by_part: &'a mut [f32],
    out: &'a mut [f32],
}

impl<'a> Buffers<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, spec: &DeltaSpec, m: usize) -> Buffers<'a> {
        let (n_channel, n_out) = (spec.conv().n_channel, spec.n_out());
        Buffers {
            channels: frame.take(m * n_channel),
            convolved: frame.take(m * n_channel),
            low: frame.take(m * n_channel.max(2 * spec.n_head)),
            beta: frame.take(m * spec.n_head),
            rate: frame.take(m * spec.n_rate()),
            gate: frame.take(m * n_out),
            feed: frame.take(m * n_feed(spec)),
            by_part: frame.take(m * n_channel),
            out: frame.take(m * n_out),
        }
    }
}

/// Values that feed the rule.
pub(crate) fn n_feed(spec: &DeltaSpec) -> usize {
    spec.conv().n_channel + spec.n_head + spec.n_rate()
}

pub(crate) fn cells(spec: &DeltaSpec) -> [CellShape; 2] {
    let n_state = spec.n_out().saturating_mul(spec.head_dim_k);
    [
        CausalConv::cell(spec.conv()),
        CellShape {
            n_state,
            n_feed: n_feed(spec),
        },
    ]
}

/// Bytes of a part's state: it stays in the L1 cache from token to token.
const PART_BYTES: usize = 16 << 10;

/// [`Arch::delta_rule`] for each head's state, `(head_dim_k, head_dim_v)`, of which a part has some
/// columns.
pub(crate) struct Rule<'a>(pub(crate) &'a DeltaSpec);

/// Columns of a part: the largest power of two that divides a head's, within bounds.
pub(crate) fn columns(spec: &DeltaSpec) -> usize {
    let most = (PART_BYTES / size_of::<f32>() / spec.head_dim_k).max(1);
    1 << spec.head_dim_v.trailing_zeros().min(most.ilog2())
}

impl Recurrence for Rule<'_> {
    fn n_parts(&self) -> usize {
        self.0.n_out() / columns(self.0)
    }

    fn n_out(&self) -> usize {
        self.0.n_out()
    }

    fn step(&self, arch: Arch, part: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]) {
        let spec = self.0;
        let &DeltaSpec {
            n_head,
            n_head_k,
            head_dim_k: d_k,
            head_dim_v: d_v,
            by_channel,
            tiled,
            ..
        } = spec;
        let head = part * out.len() / d_v;
        // The head of queries and keys that this one of values shares with others.
        let head_k = if tiled {
            head % n_head_k
        } else {
            head / (n_head / n_head_k)
        };
        let (q, rest) = feed.split_at(n_head_k * d_k);
        let (k, rest) = rest.split_at(n_head_k * d_k);
        let (v, rest) = rest.split_at(n_head * d_v);
        let (beta, rate) = rest.split_at(n_head);
        let [q, k] = [q, k].map(|x| &x[head_k * d_k..][..d_k]);
        let v = &v[part * out.len()..][..out.len()];
        let rate = if by_channel {
            &rate[head * d_k..][..d_k]
        } else {
            &rate[head..=head]
        };
        arch.delta_rule(state, q, k, v, beta[head], rate, out);
    }
}

/// What the output matrix is multiplied by, `(m, n_out)`.
pub(crate) fn mix<'a>(
    pass: &mut Mixing<'_, '_, '_>,
    spec: &DeltaSpec,
    w: &Delta,
    (x, m): (&[f32], usize),
    frame: &mut Frame<'a>,
) -> &'a mut [f32] {
    let mut buffers = Buffers::take(frame, spec, m);
    project(pass, spec, &w.input, (x, m), &mut buffers);
    let n_channel = spec.conv().n_channel;
    let conv = CausalConv {
        spec: spec.conv(),
        w: &w.conv,
        silu: true,
    };
    pass.recur(
        &conv,
        (buffers.channels, n_channel),
        buffers.by_part,
        buffers.convolved,
    );
    fill_feed(pass, spec, w, m, &mut buffers);
    let Buffers {
        feed,
        by_part,
        out,
        gate,
        ..
    } = buffers;
    pass.recur(&Rule(spec), (feed, n_feed(spec)), by_part, out);
    let (arch, eps, n_out) = (pass.cx.arch, pass.cx.h.norm_eps, spec.n_out());
    pass.cx
        .threads
        .when(m > 1)
        .for_chunk_pairs(gate, n_out, out, n_out, |_, gate, out| {
            for head in out.chunks_exact_mut(spec.head_dim_v) {
                let factor = 1.0 / (arch.dot(head, head) / spec.head_dim_v as f32 + eps).sqrt();
                head.iter_mut()
                    .zip(&w.norm)
                    .for_each(|(x, norm)| *x = *x * factor * norm);
            }
            if spec.by_channel || spec.sigmoid_gate {
                arch.sigmoid_mul(gate, out)
            } else {
                arch.silu_mul(gate, out)
            }
        });
    gate
}

/// Queries, keys and values before the convolution, strengths, rates and gates: products of `x`,
/// `(m, n_embd)`.
fn project(
    pass: &mut Mixing<'_, '_, '_>,
    spec: &DeltaSpec,
    input: &DeltaInput,
    (x, m): (&[f32], usize),
    buffers: &mut Buffers<'_>,
) {
    let Buffers {
        channels,
        low,
        beta,
        rate,
        gate,
        ..
    } = buffers;
    let &DeltaSpec {
        n_head, n_head_k, ..
    } = spec;
    match input {
        DeltaInput::Fused {
            qkv,
            gate: w_gate,
            beta_rate,
        } => {
            pass.linear(
                x,
                m,
                &mut [Product::of(qkv, channels, m), Product::of(w_gate, gate, m)],
            );
            // By key head: strengths of its heads, then their rates.
            let (low, n) = (&mut low[..m * 2 * n_head], n_head / n_head_k);
            pass.linear(x, m, &mut [Product::of(beta_rate, low, m)]);
            let to = beta.chunks_exact_mut(n).zip(rate.chunks_exact_mut(n));
            for ((beta, rate), low) in to.zip(low.chunks_exact(2 * n)) {
                beta.copy_from_slice(&low[..n]);
                rate.copy_from_slice(&low[n..]);
            }
        }
        DeltaInput::Split {
            qkv,
            gate: w_gate,
            beta: w_beta,
            rate: w_rate,
        } => {
            pass.linear(
                x,
                m,
                &mut [Product::of(qkv, channels, m), Product::of(w_gate, gate, m)],
            );
            pass.linear(
                x,
                m,
                &mut [Product::of(w_beta, beta, m), Product::of(w_rate, rate, m)],
            );
        }
        DeltaInput::Low {
            qkv,
            beta: w_beta,
            rate: w_rate,
            gate: w_gate,
        } => {
            let mut first = 0;
            for w in &**qkv {
                let n = w.w.n_out;
                let part = &mut low[..m * n];
                pass.linear(x, m, &mut [Product::of(w, part, m)]);
                for (to, part) in channels
                    .chunks_exact_mut(spec.conv().n_channel)
                    .zip(part.chunks_exact(n))
                {
                    to[first..first + n].copy_from_slice(part);
                }
                first += n;
            }
            pass.linear(x, m, &mut [Product::of(w_beta, beta, m)]);
            for (w, to) in [(w_rate, &mut **rate), (w_gate, &mut **gate)] {
                match &**w {
                    [down, up] => {
                        let low = &mut low[..m * down.w.n_out];
                        pass.linear(x, m, &mut [Product::of(down, low, m)]);
                        pass.linear(low, m, &mut [Product::of(up, to, m)]);
                    }
                    whole => {
                        let mut products = [Product::of(&whole[0], to, m)];
                        pass.linear(x, m, &mut products);
                    }
                }
            }
        }
    }
}

/// What the rule is fed with: normalised queries and keys, values, strengths `σ(β)` and shares that
/// are kept, `exp(a · softplus(x + b))`.
fn fill_feed(
    pass: &Mixing<'_, '_, '_>,
    spec: &DeltaSpec,
    w: &Delta,
    m: usize,
    buffers: &mut Buffers<'_>,
) {
    let &DeltaSpec {
        n_head,
        n_head_k,
        head_dim_k: d_k,
        by_channel,
        ..
    } = spec;
    let (n_channel, n_k, n_rate) = (spec.conv().n_channel, n_head_k * d_k, spec.n_rate());
    let arch = pass.cx.arch;
    let scale = 1.0 / (d_k as f32).sqrt();
    let length_eps = spec.length_eps.unwrap_or(EPS);
    let (convolved, beta, rate) = (&*buffers.convolved, &*buffers.beta, &*buffers.rate);
    let feed = &mut *buffers.feed;
    pass.cx
        .threads
        .when(m > 1)
        .for_chunks(feed, n_feed(spec), |row, feed| {
            feed[..n_channel].copy_from_slice(&convolved[row * n_channel..][..n_channel]);
            for (i, head) in feed[..2 * n_k].chunks_exact_mut(d_k).enumerate() {
                let length = (arch.dot(head, head) + length_eps).sqrt();
                let factor = if i < n_head_k {
                    scale / length
                } else {
                    1.0 / length
                };
                head.iter_mut().for_each(|x| *x *= factor);
            }
            let (to_beta, to_rate) = feed[n_channel..].split_at_mut(n_head);
            to_beta
                .iter_mut()
                .zip(&beta[row * n_head..])
                .for_each(|(to, x)| *to = sigmoid(*x));
            let of_head = if by_channel { d_k } else { 1 };
            for (i, (to, x)) in to_rate.iter_mut().zip(&rate[row * n_rate..]).enumerate() {
                let (a, x) = (w.a[i / of_head], x + w.dt_bias[i]);
                let log = match spec.bound {
                    Some(bound) => bound * sigmoid(a * x),
                    None => a * softplus(x),
                };
                *to = log.exp();
            }
        });
}
