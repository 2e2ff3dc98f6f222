//! Streams of whose normed values a part reads the gated mean.

use crate::compute::linear::{Product, RowAdapters, RowCtx};
use crate::layers::activation::sigmoid;
use crate::layers::conv::silu;
use crate::layers::hparams::Hparams;
use crate::layers::hyper::HyperStreams;
use crate::layers::hyper::spec::HyperSpec;
use crate::layers::hyper::weights::LowRank;

impl HyperStreams<'_> {
    /// Writes what a part or the head reads to `x`, and computes the weights of a part's output.
    pub(super) fn read_low_rank(
        &mut self,
        on: &mut RowCtx<'_, '_>,
        (h, spec, w): (&Hparams, &HyperSpec, &LowRank),
        x: &mut [f32],
    ) {
        let (n, n_stream, m) = (h.n_embd, spec.n_stream, x.len() / h.n_embd);
        let (arch, width, share) = (on.arch, n * n_stream, 1.0 / n_stream as f32);
        let threads = on.threads.when(m > 1);
        let all = &*self.all;
        threads.for_chunks(self.normed, n, |i, to| {
            let (stream, norm) = (&all[i * n..][..n], &w.norm[i % n_stream * n..][..n]);
            arch.rms_norm(to, stream, norm, h.norm_eps);
        });
        on.ctx.adapters = RowAdapters::All(&[]);
        let low = &mut self.low[..m * w.down.w.n_out];
        on.linear(self.normed, m, &mut [Product::of(&w.down, low, m)]);
        low.iter_mut().for_each(|x| *x = silu(*x * share));
        on.linear(low, m, &mut [Product::of(&w.up, self.gates, m)]);
        if let Some(inject) = &w.inject {
            let weights = &mut self.weights[..m * n_stream];
            on.linear(self.normed, m, &mut [Product::of(inject, weights, m)]);
            weights
                .iter_mut()
                .for_each(|x| *x = 2.0 * sigmoid(*x * share));
        }
        let (normed, gates) = (&*self.normed, &*self.gates);
        threads.for_chunks(x, n, |row, x| {
            let streams = row * width..(row + 1) * width;
            let (normed, gates) = (&normed[streams.clone()], &gates[streams]);
            for (d, x) in x.iter_mut().enumerate() {
                let of_stream = |i: usize| normed[i * n + d] * sigmoid(gates[i * n + d]);
                *x = share * (0..n_stream).map(of_stream).sum::<f32>();
            }
        });
    }
}
