//! Lightning attention (arXiv 2401.04658, MiniMax 01): linear attention whose heads forget at constant
//! rates; the output is normed and gated.

pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::Arch;
use crate::compute::arena::Frame;
use crate::compute::linear::Product;
use crate::kv::CellShape;
use crate::layers::conv::silu;
use crate::layers::lightning::spec::LightningSpec;
use crate::layers::lightning::weights::Lightning;
use crate::layers::recurrence::{Mixing, Recurrence};

pub(crate) struct Buffers<'a> {
    /// Queries, keys and values, `(m, n_head, 3·head_dim)`.
    feed: &'a mut [f32],
    /// `(m, n_out)`.
    by_part: &'a mut [f32],
    out: &'a mut [f32],
    gate: &'a mut [f32],
}

impl<'a> Buffers<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, spec: &LightningSpec, m: usize) -> Buffers<'a> {
        let n = m * spec.n_out();
        Buffers {
            feed: frame.take(3 * n),
            by_part: frame.take(n),
            out: frame.take(n),
            gate: frame.take(n),
        }
    }
}

/// `S = decay·S + k·vᵀ`, `o = Sᵀ·q` for each head's state `S: (head_dim, head_dim)`.
struct Scan<'a>(&'a LightningSpec);

pub(crate) fn cells(spec: &LightningSpec) -> [CellShape; 1] {
    [CellShape {
        n_state: spec.n_out().saturating_mul(spec.head_dim),
        n_feed: 3 * spec.n_out(),
    }]
}

impl Recurrence for Scan<'_> {
    fn n_parts(&self) -> usize {
        self.0.n_head
    }

    fn n_out(&self) -> usize {
        self.0.n_out()
    }

    fn step(&self, arch: Arch, head: usize, state: &mut [f32], feed: &[f32], out: &mut [f32]) {
        let d = self.0.head_dim;
        let [q, k, v] = [0, 1, 2].map(|i| &feed[(3 * head + i) * d..][..d]);
        arch.ssm_step(state, k, q, self.0.decay(head), 1.0, v, out);
    }
}

/// What the output matrix is multiplied by, `(m, n_out)`.
pub(crate) fn mix<'a>(
    pass: &mut Mixing<'_, '_, '_>,
    spec: &LightningSpec,
    w: &Lightning,
    (x, m): (&[f32], usize),
    frame: &mut Frame<'a>,
) -> &'a mut [f32] {
    let Buffers {
        feed,
        by_part,
        out,
        gate,
    } = Buffers::take(frame, spec, m);
    let n = spec.n_out();
    let products = &mut [Product::of(&w.qkv, feed, m), Product::of(&w.gate, gate, m)];
    pass.linear(x, m, products);
    let workers = pass.cx.threads.when(m > 1);
    workers.for_chunks(feed, 3 * n, |_, feed| {
        feed.iter_mut().for_each(|x| *x = silu(*x))
    });
    pass.recur(&Scan(spec), (feed, 3 * n), by_part, out);
    let (arch, eps) = (pass.cx.arch, pass.cx.h.norm_eps);
    let workers = pass.cx.threads.when(m > 1);
    // Outputs by part are read no longer.
    workers.for_chunk_pairs(by_part, n, out, n, |_, normed, out| {
        arch.rms_norm(normed, out, &w.norm, eps);
    });
    workers.for_chunk_pairs(gate, n, by_part, n, |_, gate, normed| {
        arch.sigmoid_mul(gate, normed);
    });
    gate
}
