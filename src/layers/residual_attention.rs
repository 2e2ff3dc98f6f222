//! Residual attention (Kimi K3): parts of layers read a weighed mean of the residual stream and of
//! what it was at checkpoints, at which it begins anew.

use crate::arch::Arch;
use crate::compute::arena::Frame;
use crate::layers::context::Context;
use crate::layers::hparams::Hparams;
use crate::layers::norm::rms_factor;

/// Most checkpoints.
pub(crate) const MAX_CHECKPOINTS: usize = 256;

/// What scores checkpoints and the stream, by products with their norms, in each part of a layer.
#[derive(Clone, Debug)]
pub(crate) struct ResidualScores {
    pub(crate) mixer: Vec<f32>,
    pub(crate) ffn: Vec<f32>,
}

/// Checkpoints of the rows of a pass: for each of them `(m, n_embd)`.
pub(crate) struct Checkpoints<'a> {
    all: &'a mut [f32],
    /// Rows of the pass.
    m: usize,
}

impl<'a> Checkpoints<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, h: &Hparams, m: usize) -> Checkpoints<'a> {
        let n = h.checkpoints.map_or(0, |each| h.n_layer.div_ceil(each));
        Checkpoints {
            all: frame.take(n * m * h.n_embd),
            m,
        }
    }

    /// Keeps only the rows that the last layer computes.
    pub(crate) fn gather(&mut self, cx: &Context<'_, '_>) {
        let n = cx.h.n_embd;
        if cx.h.checkpoints.is_some() {
            self.all
                .chunks_exact_mut(self.m * n)
                .for_each(|checkpoint| cx.gather(checkpoint, n));
        }
    }

    /// Before the mixer of the layer: writes what it reads to `y`, and begins the stream `x` anew if
    /// there is a checkpoint.
    pub(crate) fn begin_layer(
        &mut self,
        cx: &Context<'_, '_>,
        w: &ResidualScores,
        x: &mut [f32],
        y: &mut [f32],
    ) {
        let Some(each) = cx.h.checkpoints else { return };
        self.mix(cx, cx.layer.div_ceil(each), &w.mixer, x, y);
        if cx.layer.is_multiple_of(each) {
            self.all[cx.layer / each * x.len()..][..x.len()].copy_from_slice(x);
            x.fill(0.0);
        }
    }

    /// Writes what the feed-forward layer, or behind the last one the head, reads to `y`.
    pub(crate) fn read(&self, cx: &Context<'_, '_>, w: &[f32], x: &[f32], y: &mut [f32]) {
        if let Some(each) = cx.h.checkpoints {
            self.mix(cx, cx.layer / each + 1, w, x, y);
        }
    }

    /// Mean of the first `n_past` checkpoints and of `x`.
    fn mix(&self, cx: &Context<'_, '_>, n_past: usize, w: &[f32], x: &[f32], y: &mut [f32]) {
        let (arch, eps, n, m, all) = (cx.arch, cx.h.norm_eps, cx.h.n_embd, self.m, &*self.all);
        cx.threads.when(y.len() > n).for_chunks(y, n, |row, y| {
            let of = |i: usize| match i {
                i if i < n_past => &all[(i * m + row) * n..][..n],
                _ => &x[row * n..][..n],
            };
            mean((arch, eps), w, n_past + 1, &of, y);
        });
    }
}

/// `y = Σ weight_i·of(i)`, where weights are the softmax of `w·norm(of(i))`.
fn mean<'x>(
    (arch, eps): (Arch, f32),
    w: &[f32],
    n: usize,
    of: &dyn Fn(usize) -> &'x [f32],
    y: &mut [f32],
) {
    let mut weights = [0.0; MAX_CHECKPOINTS + 1];
    let weights = &mut weights[..n];
    for (i, weight) in weights.iter_mut().enumerate() {
        *weight = rms_factor(arch, of(i), eps) * arch.dot(of(i), w);
    }
    arch.softmax(weights);
    y.fill(0.0);
    for (i, weight) in weights.iter().enumerate() {
        arch.add_scaled(y, of(i), *weight);
    }
}
