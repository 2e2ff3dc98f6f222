//! The residual stream, to which each component adds what it computes.

use crate::compute::arena::Frame;
use crate::layers::context::Context;
use crate::layers::layer::spec::LayerSpec;
use crate::layers::layer::weights::Layer;
use crate::layers::norm::spec::Norms;
use crate::layers::norm::weights::Norm;
use crate::layers::norm::{norm, norm_with};

/// Buffers of the residual stream, each `(rows, n_embd)`.
pub(crate) struct Residual<'a> {
    /// The residual stream.
    pub(crate) x: &'a mut [f32],
    /// What a component reads: mostly the stream after a norm.
    pub(crate) normed: &'a mut [f32],
    /// What a component adds to the stream.
    pub(crate) branch: &'a mut [f32],
}

impl<'a> Residual<'a> {
    /// `n` values each.
    pub(crate) fn take(frame: &mut Frame<'a>, n: usize) -> Residual<'a> {
        Residual {
            x: frame.take(n),
            normed: frame.take(n),
            branch: frame.take(n),
        }
    }

    /// Keeps only the first `n` values.
    pub(crate) fn keep(&mut self, n: usize) {
        for rows in [&mut self.x, &mut self.normed, &mut self.branch] {
            *rows = &mut std::mem::take(rows)[..n];
        }
    }

    /// Input of a component, in `normed`: the norm of the stream, or of the mean of earlier layers
    /// that residual attention left in `branch`. The stream goes on from its norm, if it does so in
    /// this layer.
    pub(crate) fn enter(
        &mut self,
        cx: &Context<'_, '_>,
        (spec, w): (&LayerSpec, &Layer),
        norm: Option<&Norm>,
    ) {
        let x = match w.residual_scores {
            Some(_) => &*self.branch,
            None => &*self.x,
        };
        cx.norm(norm, x, self.normed);
        if spec.norms == Norms::OfStream {
            self.x.copy_from_slice(self.normed);
        }
    }

    /// `x += scale · norm(branch)`, or `x = norm(x + scale · branch)`, where `post` is that norm; or
    /// `x = scale · x + branch`.
    pub(crate) fn add(&mut self, cx: &Context<'_, '_>, spec: &LayerSpec, post: Option<&Norm>) {
        let Residual { x, normed, branch } = self;
        let (ctx, h) = (cx.plain(), cx.h);
        let (scale, of_stream) = (
            spec.residual_scale,
            matches!(spec.norms, Norms::Residual | Norms::BeforeAndLast),
        );
        let branch = match post {
            Some(_) if !of_stream => {
                let eps = spec.post_norm_eps.unwrap_or(h.norm_eps);
                norm_with(ctx, h, eps, post, branch, normed);
                &**normed
            }
            _ => &**branch,
        };
        ctx.threads
            .when(x.len() > h.n_embd)
            .for_chunks(x, h.n_embd, |i, x| {
                let branch = &branch[i * h.n_embd..][..h.n_embd];
                match scale {
                    scale if spec.norms == Norms::OfStream => {
                        x.iter_mut().for_each(|x| *x *= scale);
                        ctx.arch.add(x, branch);
                    }
                    1.0 => ctx.arch.add(x, branch),
                    scale => ctx.arch.add_scaled(x, branch, scale),
                }
            });
        if of_stream {
            norm(ctx, h, post, x, normed);
            x.copy_from_slice(normed);
        }
    }

    /// `x = second(x + first(x + branch))`, of norms.
    pub(crate) fn add_twice(&mut self, cx: &Context<'_, '_>, first: Option<&Norm>, second: &Norm) {
        let Residual { x, normed, branch } = self;
        let (ctx, h) = (cx.plain(), cx.h);
        ctx.arch.add(branch, x);
        norm(ctx, h, first, branch, normed);
        ctx.arch.add(x, normed);
        norm(ctx, h, Some(second), x, normed);
        x.copy_from_slice(normed);
    }
}
