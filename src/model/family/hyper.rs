//! Models with several residual streams: Hunyuan 4, GLM 5 Next.

use crate::layers::gated_delta::spec::DeltaSpec;
use crate::layers::hparams::Hparams;
use crate::layers::hyper::spec::{HyperKind, HyperSpec, MAX_HYPER};
use crate::layers::layer::spec::FfnSpec;
use crate::layers::norm::spec::NormKind;
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::layers::rope::spec::RopeOrder;
use crate::model::ModelError;
use crate::model::family::{clamps, deepseek, sparse};
use crate::model::keys::Keys;

/// Hunyuan 4: latent attention to chosen positions, with sinks and gates. It is rotated by pairs of
/// neighbours, as in llama.cpp, for which its files are made.
pub(super) fn hunyuan4(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut ffn = keys.sigmoid_mixture(0, true)?;
    clamps::set(keys, &mut ffn, clamps::before)?;
    let mut h = deepseek::latent(keys, ffn)?;
    h.ropes[0].order = RopeOrder::Norm;
    sparse::set_indexes(&mut h, keys, RopeOrder::Norm)?;
    h.attention_mut()
        .filter_map(|attn| attn.index.as_mut())
        .for_each(|index| index.rotates_last = true);
    h.set_sinks(keys);
    h.set_gates(keys);
    let key = "hyper_connection.magnitude";
    let magnitude = keys.positive(key)?.ok_or_else(|| keys.missing(key))?;
    h.hyper = Some(HyperSpec {
        kind: HyperKind::Independent { magnitude },
        weighs_last: true,
        ..connections(keys)?
    });
    Ok(h)
}

/// GLM 5 Next: delta attention, and latent attention without positions whose index has a key for
/// each group of positions.
pub(super) fn glm5(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    keys.only("attention.indexer.kpool_select_tail", &[1.0])?;
    let spec = RecurrentSpec::Delta(DeltaSpec {
        ..deepseek::bounded_kda(keys)?
    });
    let mut ffn = keys.sigmoid_mixture(0, true)?;
    clamps::set(keys, &mut ffn, clamps::before)?;
    let dense = clamps::limits(keys, "swiglu_clamp_shexp")?;
    for (ffn, limit) in ffn.iter_mut().zip(dense) {
        if let (FfnSpec::Dense(ffn), Some(limit)) = (ffn, limit) {
            ffn.activation = clamps::before(limit);
        }
    }
    let mut h = Hparams::hybrid(keys, NormKind::Rms, ffn, keys.attention_or(&spec)?)?;
    h.set_latent(keys)?;
    keys.only("rope.dimension_count", &[0.0])?;
    sparse::set_indexes(&mut h, keys, RopeOrder::Norm)?;
    h.ropes.clear();
    h.attention_mut().for_each(|attn| attn.rope = None);
    h.hyper = Some(manifold(keys, false)?);
    Ok(h)
}

/// Streams that a matrix mixes.
pub(super) fn manifold(keys: &Keys<'_>, weighs_last: bool) -> Result<HyperSpec, ModelError> {
    let n_iter = keys.count("hyper_connection.sinkhorn_iterations", 1 << 10)?;
    Ok(HyperSpec {
        kind: HyperKind::Manifold { n_iter },
        weighs_last,
        ..connections(keys)?
    })
}

/// What all have.
fn connections(keys: &Keys<'_>) -> Result<HyperSpec, ModelError> {
    let key = "hyper_connection.epsilon";
    Ok(HyperSpec {
        n_stream: keys.count("hyper_connection.count", MAX_HYPER)?,
        eps: keys.positive(key)?.ok_or_else(|| keys.missing(key))?,
        kind: HyperKind::Manifold { n_iter: 1 },
        weighs_last: false,
    })
}
