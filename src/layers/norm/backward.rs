//! Norms, backwards.

use crate::compute::linear::Ctx;
use crate::layers::hparams::Hparams;
use crate::layers::norm::spec::NormKind;
use crate::layers::norm::weights::Norm;

/// Adds to `dx` the gradient of the `x` of [`norm`](crate::layers::norm::norm).
pub(crate) fn norm_backward(
    ctx: Ctx<'_>,
    h: &Hparams,
    norm: Option<&Norm>,
    x: &[f32],
    dy: &[f32],
    dx: &mut [f32],
) {
    let n = h.n_embd;
    ctx.threads.when(dx.len() > n).for_chunks(dx, n, |i, dx| {
        let (x, dy) = (&x[i * n..][..n], &dy[i * n..][..n]);
        match (norm, h.norm) {
            (None, _) => ctx.arch.add(dx, dy),
            (Some(norm), NormKind::Rms | NormKind::RmsPlain) => {
                ctx.arch.rms_norm_backward(dx, dy, x, &norm.w, h.norm_eps)
            }
            (Some(norm), NormKind::Layer | NormKind::LayerNoBias | NormKind::LayerPlain) => {
                ctx.arch.layer_norm_backward(dx, dy, x, &norm.w, h.norm_eps)
            }
        }
    });
}
