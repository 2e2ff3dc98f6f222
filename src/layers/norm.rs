//! Norms of rows and heads.

pub(crate) mod backward;
pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::Arch;
use crate::compute::linear::Ctx;
use crate::layers::attention::spec::{AttnSpec, QkNorm};
use crate::layers::attention::weights::Attn;
use crate::layers::hparams::Hparams;
use crate::layers::norm::spec::NormKind;
use crate::layers::norm::weights::Norm;

/// `1/√(mean(x²) + eps)`.
pub(crate) fn rms_factor(arch: Arch, x: &[f32], eps: f32) -> f32 {
    1.0 / (arch.dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// Applies a norm to each row of `x`; copies it if there is no norm.
pub(crate) fn norm(ctx: Ctx<'_>, h: &Hparams, norm: Option<&Norm>, x: &[f32], y: &mut [f32]) {
    norm_with(ctx, h, h.norm_eps, norm, x, y);
}

/// [`norm`] with another epsilon than the model's.
pub(crate) fn norm_with(
    ctx: Ctx<'_>,
    h: &Hparams,
    eps: f32,
    norm: Option<&Norm>,
    x: &[f32],
    y: &mut [f32],
) {
    let Some(norm) = norm else {
        return y.copy_from_slice(x);
    };
    ctx.threads
        .when(y.len() > h.n_embd)
        .for_chunks(y, h.n_embd, |i, y| {
            let x = &x[i * h.n_embd..][..h.n_embd];
            norm_row_with(ctx.arch, h.norm, eps, norm, x, y);
        });
}

pub(crate) fn norm_row(arch: Arch, h: &Hparams, norm: &Norm, x: &[f32], y: &mut [f32]) {
    norm_row_with(arch, h.norm, h.norm_eps, norm, x, y);
}

fn norm_row_with(arch: Arch, kind: NormKind, eps: f32, norm: &Norm, x: &[f32], y: &mut [f32]) {
    match kind {
        NormKind::Rms | NormKind::RmsPlain => arch.rms_norm(y, x, &norm.w, eps),
        NormKind::Layer | NormKind::LayerNoBias | NormKind::LayerPlain => {
            arch.layer_norm(y, x, &norm.w, &norm.b, eps)
        }
    }
}

/// Norms of each stream of a row, with the weights of all streams.
pub(crate) fn norm_streams(arch: Arch, eps: f32, norm: &[f32], x: &mut [f32], n_embd: usize) {
    for (x, norm) in x.chunks_exact_mut(n_embd).zip(norm.chunks_exact(n_embd)) {
        let factor = rms_factor(arch, x, eps);
        x.iter_mut()
            .zip(norm)
            .for_each(|(x, w)| *x = *x * factor * w);
    }
}

/// Norms of single query and key heads.
pub(crate) fn head_norms<'a>(
    spec: &AttnSpec,
    w: &'a Attn,
) -> (Option<&'a Vec<f32>>, Option<&'a Vec<f32>>) {
    let per_head = spec.qk_norm.is_some_and(|norm| {
        !matches!(
            norm,
            QkNorm::Full | QkNorm::LayerFull | QkNorm::LayerByHead | QkNorm::RmsByHead
        )
    });
    (
        w.q_norm.as_ref().filter(|_| per_head),
        w.k_norm.as_ref().filter(|_| per_head),
    )
}
