//! Hyper-connections: what parts of layers read of several residual streams, and how they change
//! them.

mod low_rank;
pub(crate) mod spec;
pub(crate) mod weights;

use crate::compute::arena::Frame;
use crate::compute::linear::{Product, RowAdapters, RowCtx};
use crate::layers::activation::sigmoid;
use crate::layers::context::Context;
use crate::layers::hparams::Hparams;
use crate::layers::hyper::spec::{HyperKind, HyperSpec, MAX_HYPER};
use crate::layers::hyper::weights::{Connection, Weighed};
use crate::layers::norm::rms_factor;

/// Streams of the rows of a pass.
pub(crate) struct HyperStreams<'a> {
    /// `(m, n_stream, n_embd)`, and the same normed.
    all: &'a mut [f32],
    normed: &'a mut [f32],
    /// Weights, `(m, n_weight)`: first those of inputs, then of outputs, then of streams.
    weights: &'a mut [f32],
    /// With gates, `(m, n_stream, n_embd)`, and the middle of what makes them, `(m, rank)`.
    gates: &'a mut [f32],
    low: &'a mut [f32],
}

impl<'a> HyperStreams<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, h: &Hparams, m: usize) -> HyperStreams<'a> {
        let (n, n_weight) = h
            .hyper
            .map_or((0, 0), |spec| (spec.n_stream * h.n_embd, spec.n_weight()));
        let rank = match h.hyper.map(|spec| spec.kind) {
            Some(HyperKind::LowRank { rank }) => rank,
            _ => 0,
        };
        HyperStreams {
            all: frame.take(m * n),
            normed: frame.take(m * n),
            weights: frame.take(m * n_weight),
            gates: frame.take(if rank > 0 { m * n } else { 0 }),
            low: frame.take(m * rank),
        }
    }

    /// Makes all streams the embeddings `x`.
    pub(crate) fn begin(&mut self, h: &Hparams, x: &[f32]) {
        let n = h.n_embd;
        let width = self.all.len() / x.len() * n;
        for (all, x) in self.all.chunks_exact_mut(width).zip(x.chunks_exact(n)) {
            all.chunks_exact_mut(n)
                .for_each(|stream| stream.copy_from_slice(x));
        }
    }

    /// All streams, to change.
    pub(crate) fn all_mut(&mut self) -> &mut [f32] {
        self.all
    }

    /// Keeps only the rows that the last layer computes.
    pub(crate) fn gather(&mut self, cx: &Context<'_, '_>) {
        let Some(spec) = cx.h.hyper else { return };
        let (m, n) = (cx.n_rows(), spec.n_stream * cx.h.n_embd);
        cx.gather(self.all, n);
        cx.gather(self.weights, spec.n_weight());
        self.all = &mut std::mem::take(&mut self.all)[..m * n];
        self.normed = &mut std::mem::take(&mut self.normed)[..m * n];
        self.weights = &mut std::mem::take(&mut self.weights)[..m * spec.n_weight()];
        if let HyperKind::LowRank { rank } = spec.kind {
            self.gates = &mut std::mem::take(&mut self.gates)[..m * n];
            self.low = &mut std::mem::take(&mut self.low)[..m * rank];
        }
    }

    /// Computes the weights of a part of a layer, and writes what it reads to `x`.
    pub(crate) fn read(
        &mut self,
        mut on: RowCtx<'_, '_>,
        (h, spec, w): (&Hparams, &HyperSpec, &Connection),
        x: &mut [f32],
    ) {
        let n_weight = spec.n_weight();
        let w = match w {
            Connection::Weighed(w) => w,
            Connection::LowRank(w) => return self.read_low_rank(&mut on, (h, spec, w), x),
        };
        self.products(&mut on, h, w);
        let threads = on.threads.when(x.len() > h.n_embd);
        threads.for_chunks(self.weights, n_weight, |_, weights| spec.weigh(w, weights));
        let (all, weights) = (&*self.all, &*self.weights);
        threads.for_chunks(x, h.n_embd, |row, x| {
            let all = &all[row * spec.n_stream * h.n_embd..];
            sum(all, &weights[row * n_weight..][..spec.n_stream], x);
        });
    }

    /// Adds the output `branch` of a part to the streams.
    pub(crate) fn write(&mut self, cx: &Context<'_, '_>, spec: &HyperSpec, branch: &[f32]) {
        let (arch, n, n_stream, n_weight) = (cx.arch, cx.h.n_embd, spec.n_stream, spec.n_weight());
        let weights = &*self.weights;
        let threads = cx.threads.when(branch.len() > n);
        threads.for_chunks(self.all, n_stream * n, |row, all| {
            let weights = &weights[row * n_weight..][..n_weight];
            let first = match spec.kind {
                HyperKind::LowRank { .. } => 0,
                HyperKind::Independent { .. } | HyperKind::Manifold { .. } => n_stream,
            };
            let (outputs, matrix) = weights[first..].split_at(n_stream);
            if !matrix.is_empty() {
                mix(all, matrix, n_stream);
            }
            for (stream, weight) in all.chunks_exact_mut(n).zip(outputs) {
                arch.add_scaled(stream, &branch[row * n..][..n], *weight);
            }
        });
    }

    /// Writes what the head reads to `x`.
    pub(crate) fn end(
        &mut self,
        mut on: RowCtx<'_, '_>,
        (h, spec, w): (&Hparams, &HyperSpec, Option<&Connection>),
        x: &mut [f32],
    ) {
        let n_stream = spec.n_stream;
        let threads = on.threads.when(x.len() > h.n_embd);
        if let Some(Connection::LowRank(w)) = w {
            return self.read_low_rank(&mut on, (h, spec, w), x);
        }
        if let Some(Connection::Weighed(w)) = w {
            self.products(&mut on, h, w);
            threads.for_chunks(self.weights, n_stream, |_, weights| {
                for (weight, base) in weights.iter_mut().zip(&w.base) {
                    *weight = sigmoid(*weight * w.scale[0] + base) + spec.eps;
                }
            });
        } else {
            self.weights.fill(1.0 / n_stream as f32);
        }
        let (all, weights) = (&*self.all, &*self.weights);
        threads.for_chunks(x, h.n_embd, |row, x| {
            let all = &all[row * n_stream * h.n_embd..];
            sum(all, &weights[row * n_stream..][..n_stream], x);
        });
    }

    /// Products of the normed streams, at the beginning of `weights`.
    fn products(&mut self, on: &mut RowCtx<'_, '_>, h: &Hparams, w: &Weighed) {
        let (arch, n) = (on.arch, w.w.w.n_in);
        let m = self.all.len() / n;
        let all = &*self.all;
        on.threads
            .when(m > 1)
            .for_chunks(self.normed, n, |row, to| {
                let all = &all[row * n..][..n];
                let factor = rms_factor(arch, all, h.norm_eps);
                to.iter_mut().zip(all).for_each(|(to, x)| *to = x * factor);
            });
        on.ctx.adapters = RowAdapters::All(&[]);
        let weights = &mut self.weights[..m * w.w.w.n_out];
        on.linear(self.normed, m, &mut [Product::of(&w.w, weights, m)]);
    }
}

impl HyperSpec {
    /// Turns the products of a row into weights.
    fn weigh(&self, w: &Weighed, weights: &mut [f32]) {
        let n = self.n_stream;
        for (i, (weight, base)) in weights.iter_mut().zip(&w.base).enumerate() {
            *weight = *weight * w.scale[(i / n).min(w.scale.len() - 1)] + base;
        }
        let (inputs, rest) = weights.split_at_mut(n);
        let (outputs, matrix) = rest.split_at_mut(n);
        inputs.iter_mut().for_each(|x| *x = sigmoid(*x) + self.eps);
        match self.kind {
            HyperKind::Independent { magnitude } => outputs
                .iter_mut()
                .for_each(|x| *x = magnitude * sigmoid(*x) + self.eps),
            HyperKind::Manifold { n_iter } => {
                outputs.iter_mut().for_each(|x| *x = 2.0 * sigmoid(*x));
                project(matrix, n, self.eps, n_iter);
            }
            HyperKind::LowRank { .. } => {}
        }
    }
}

/// Makes rows and columns of a matrix, `(n, n)`, sum to about 1: a softmax of each row, then
/// divisions by the sums of columns and rows in turns (Sinkhorn and Knopp 1967).
fn project(matrix: &mut [f32], n: usize, eps: f32, n_iter: usize) {
    for row in matrix.chunks_exact_mut(n) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|x| *x = (*x - max).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|x| *x = *x / sum + eps);
    }
    for i in 0..n_iter {
        if i > 0 {
            for row in matrix.chunks_exact_mut(n) {
                let sum = row.iter().sum::<f32>() + eps;
                row.iter_mut().for_each(|x| *x /= sum);
            }
        }
        for column in 0..n {
            let sum = (0..n).map(|row| matrix[row * n + column]).sum::<f32>() + eps;
            (0..n).for_each(|row| matrix[row * n + column] /= sum);
        }
    }
}

/// `x = Σ weight_i·stream_i`.
fn sum(all: &[f32], weights: &[f32], x: &mut [f32]) {
    let n = x.len();
    for (d, x) in x.iter_mut().enumerate() {
        let weighed = weights.iter().enumerate();
        *x = weighed.map(|(i, weight)| weight * all[i * n + d]).sum();
    }
}

/// Replaces stream `i` by `Σ_j matrix_ji·stream_j`.
fn mix(all: &mut [f32], matrix: &[f32], n_stream: usize) {
    let n = all.len() / n_stream;
    for d in 0..n {
        let mut old = [0.0; MAX_HYPER];
        (0..n_stream).for_each(|j| old[j] = all[j * n + d]);
        for i in 0..n_stream {
            all[i * n + d] = (0..n_stream)
                .map(|j| matrix[j * n_stream + i] * old[j])
                .sum();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projected_matrices_sum_to_one() {
        let mut matrix = [0.3, -1.0, 2.0, 0.5, 0.0, -0.7, 1.5, 1.0, 0.2];
        project(&mut matrix, 3, 1e-6, 40);
        for i in 0..3 {
            let row: f32 = matrix[3 * i..3 * i + 3].iter().sum();
            let column: f32 = (0..3).map(|j| matrix[3 * j + i]).sum();
            assert!((row - 1.0).abs() < 1e-4 && (column - 1.0).abs() < 1e-4);
        }
    }

    #[test]
    fn streams_are_mixed_by_columns() {
        let mut all = [1.0, 2.0, 10.0, 20.0];
        mix(&mut all, &[1.0, 0.5, 0.0, 2.0], 2);
        assert_eq!(all, [1.0, 2.0, 20.5, 41.0]);
    }
}
