//! AltUp (arXiv 2301.13310), as Gemma 3n has it: the residual stream is several streams. Before a
//! layer all are predicted from all, the layer computes on the first one, and its change corrects
//! all of them.

pub(crate) mod spec;
pub(crate) mod weights;

use crate::compute::arena::Frame;
use crate::compute::linear::{Ctx, Product, RowCtx};
use crate::layers::altup::spec::MAX_STREAMS;
use crate::layers::altup::weights::{AltUp, AltUpEnds, Laurel};
use crate::layers::context::Context;
use crate::layers::hparams::Hparams;
use crate::layers::norm::{norm, rms_factor};

/// Lower bound of the mean square that a stream is divided by (Hugging Face `Gemma3nTextModel`).
const MIN_SQUARE: f32 = 1e-5;

/// Streams of `m` tokens, and the side path of a layer.
pub(crate) struct Streams<'a> {
    /// `(m, n_stream, n_embd)`.
    all: &'a mut [f32],
    /// Room for one of them, and for `n_stream` numbers of each token.
    room: &'a mut [f32],
    router: &'a mut [f32],
    /// The middle of the side path, `(m, laurel_rank)`, and its output, `(m, n_embd)`.
    low: &'a mut [f32],
    side: &'a mut [f32],
}

impl<'a> Streams<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, h: &Hparams, m: usize) -> Streams<'a> {
        let (n_stream, rank, n) = h.streams.map_or((0, 0, 0), |spec| {
            (spec.n_stream, spec.laurel_rank, h.n_embd)
        });
        Streams {
            all: frame.take(m * n_stream * n),
            room: frame.take(m * n),
            router: frame.take(m * n_stream),
            low: frame.take(m * rank),
            side: frame.take(m * n),
        }
    }

    /// Keeps only the rows that the last layer computes.
    pub(crate) fn gather(&mut self, cx: &Context<'_, '_>) {
        if let Some(spec) = cx.h.streams {
            let (n, width) = (cx.h.n_embd, spec.n_stream * cx.h.n_embd);
            cx.gather(self.all, width);
            cx.gather(self.side, n);
            self.all = &mut std::mem::take(&mut self.all)[..cx.n_rows() * width];
        }
    }

    /// Computes the side path of a layer on `normed`, a learned residual of low rank (arXiv
    /// 2411.07501). `product` has as much room.
    pub(crate) fn side_path(
        &mut self,
        cx: &mut Context<'_, '_>,
        w: &Laurel,
        normed: &[f32],
        product: &mut [f32],
    ) {
        let (h, m) = (cx.h, normed.len() / cx.h.n_embd);
        let (low, side) = (
            &mut self.low[..m * w.left.w.n_out],
            &mut self.side[..m * h.n_embd],
        );
        let mut on = cx.of_all();
        on.linear(normed, m, &mut [Product::of(&w.left, low, m)]);
        on.linear(low, m, &mut [Product::of(&w.right, product, m)]);
        norm(on.ctx, h, Some(&w.norm), product, side);
        on.arch.add(side, normed);
    }

    /// Joins the side path to the residual stream `x` behind the mixer.
    pub(crate) fn join(&self, x: &mut [f32]) {
        x.iter_mut()
            .zip(&*self.side)
            .for_each(|(x, side)| *x = (*x + side) * std::f32::consts::FRAC_1_SQRT_2);
    }

    /// Makes the streams from embeddings `x`: themselves, and products with them, of the same
    /// magnitude.
    pub(crate) fn begin(&mut self, cx: &mut Context<'_, '_>, w: &AltUpEnds, x: &[f32]) {
        let (h, on) = (cx.h, &mut cx.of_all());
        let (n, m) = (h.n_embd, x.len() / h.n_embd);
        let n_stream = w.project.len() + 1;
        for (row, all) in self.all.chunks_exact_mut(n_stream * n).enumerate() {
            all[..n].copy_from_slice(&x[row * n..][..n]);
        }
        for (i, w) in w.project.iter().enumerate() {
            on.linear(x, m, &mut [Product::of_weight(w, self.room, m)]);
            for (row, all) in self.all.chunks_exact_mut(n_stream * n).enumerate() {
                let from = &self.room[row * n..][..n];
                let factor = magnitude_ratio(on.ctx, &x[row * n..][..n], from);
                all[(i + 1) * n..][..n]
                    .iter_mut()
                    .zip(from)
                    .for_each(|(to, x)| *to = x * factor);
            }
        }
    }

    /// Writes the mean of the streams to `x`, the others first multiplied and brought to the
    /// magnitude of the first. `product` has as much room as `x`.
    pub(crate) fn end(
        &mut self,
        cx: &mut Context<'_, '_>,
        w: &AltUpEnds,
        (x, product): (&mut [f32], &mut [f32]),
    ) {
        let (h, on) = (cx.h, &mut cx.of_rows());
        let (n, m) = (h.n_embd, x.len() / h.n_embd);
        let n_stream = w.unproject.len() + 1;
        let share = 1.0 / n_stream as f32;
        self.active(h, x);
        x.iter_mut().for_each(|x| *x *= share);
        for (i, w) in w.unproject.iter().enumerate() {
            let room = &mut self.room[..m * n];
            for (room, all) in room
                .chunks_exact_mut(n)
                .zip(self.all.chunks_exact(n_stream * n))
            {
                room.copy_from_slice(&all[(i + 1) * n..][..n]);
            }
            on.linear(room, m, &mut [Product::of_weight(w, product, m)]);
            let rows = x
                .chunks_exact_mut(n)
                .zip(self.all.chunks_exact(n_stream * n));
            for ((x, all), product) in rows.zip(product.chunks_exact(n)) {
                on.arch.add_scaled(
                    x,
                    product,
                    share * magnitude_ratio(on.ctx, &all[..n], product),
                );
            }
        }
    }

    /// Predicts all streams, `s_i + Σ_j c_ij·s_j`, and writes the first of them to `x`.
    pub(crate) fn predict(&mut self, cx: &mut Context<'_, '_>, w: &AltUp, x: &mut [f32]) {
        let (h, on) = (cx.h, &mut cx.of_all());
        let (n, n_stream) = (h.n_embd, w.router.w.n_out);
        self.active(h, x);
        self.route(on, h, w, x);
        let router = &*self.router;
        on.threads
            .when(x.len() > n)
            .for_chunks(self.all, n_stream * n, |row, all| {
                let router = &router[row * n_stream..][..n_stream];
                let mut coefficients = [0.0; MAX_STREAMS * MAX_STREAMS];
                for (c, w) in coefficients
                    .iter_mut()
                    .zip(w.predict.chunks_exact(n_stream))
                {
                    *c = w.iter().zip(router).map(|(w, r)| w * r).sum();
                }
                for k in 0..n {
                    let mut old = [0.0; MAX_STREAMS];
                    (0..n_stream).for_each(|j| old[j] = all[j * n + k]);
                    for i in 0..n_stream {
                        let change = (0..n_stream)
                            .map(|j| coefficients[i * n_stream + j] * old[j])
                            .sum::<f32>();
                        all[i * n + k] = old[i] + change;
                    }
                }
            });
        self.active(h, x);
    }

    /// Corrects all streams by what the layer made, `x`, of the first one's prediction, and writes
    /// the first one, scaled, to `x`.
    pub(crate) fn correct(&mut self, cx: &mut Context<'_, '_>, w: &AltUp, x: &mut [f32]) {
        let (h, on) = (cx.h, &mut cx.of_rows());
        let (n, n_stream) = (h.n_embd, w.router.w.n_out);
        self.route(on, h, w, x);
        let router = &*self.router;
        on.threads.when(x.len() > n).for_chunk_pairs(
            self.all,
            n_stream * n,
            x,
            n,
            |row, all, x| {
                let router = &router[row * n_stream..][..n_stream];
                x.iter_mut()
                    .zip(&*all)
                    .for_each(|(x, predicted)| *x -= predicted);
                for (stream, w) in all
                    .chunks_exact_mut(n)
                    .zip(w.correct.chunks_exact(n_stream))
                {
                    let coefficient = 1.0 + w.iter().zip(router).map(|(w, r)| w * r).sum::<f32>();
                    on.arch.add_scaled(stream, x, coefficient);
                }
                x.iter_mut()
                    .zip(&*all)
                    .zip(&w.scale)
                    .for_each(|((x, active), scale)| *x = active * scale);
            },
        );
    }

    /// Adds `x` to all streams but the first.
    pub(crate) fn add(&mut self, cx: &Context<'_, '_>, x: &[f32]) {
        let (n, m) = (cx.h.n_embd, x.len() / cx.h.n_embd);
        let width = self.all.len() / m;
        for (all, x) in self.all.chunks_exact_mut(width).zip(x.chunks_exact(n)) {
            all[n..]
                .chunks_exact_mut(n)
                .for_each(|stream| cx.arch.add(stream, x));
        }
    }

    /// Copies the first stream to `x`.
    fn active(&self, h: &Hparams, x: &mut [f32]) {
        let (n, m) = (h.n_embd, x.len() / h.n_embd);
        let width = self.all.len() / m;
        for (x, all) in x.chunks_exact_mut(n).zip(self.all.chunks_exact(width)) {
            x.copy_from_slice(&all[..n]);
        }
    }

    /// How much each stream counts, by the first: `tanh(W·norm(x)/n_embd)`.
    fn route(&mut self, on: &mut RowCtx<'_, '_>, h: &Hparams, w: &AltUp, x: &[f32]) {
        let (m, n_stream) = (x.len() / h.n_embd, w.router.w.n_out);
        let (room, router) = (&mut self.room[..x.len()], &mut self.router[..m * n_stream]);
        norm(on.ctx, h, Some(&w.norm), x, room);
        on.linear(room, m, &mut [Product::of(&w.router, router, m)]);
        let scale = 1.0 / h.n_embd as f32;
        router.iter_mut().for_each(|r| *r = (*r * scale).tanh());
    }
}

/// Factor that gives `x` the root mean square of `target`.
fn magnitude_ratio(ctx: Ctx<'_>, target: &[f32], x: &[f32]) -> f32 {
    let square = ctx.arch.dot(target, target) / target.len() as f32;
    square.sqrt() * rms_factor(ctx.arch, x, 0.0).min(1.0 / MIN_SQUARE.sqrt())
}
