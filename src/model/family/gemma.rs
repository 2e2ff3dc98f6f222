//! Gemma 1 to 3. Norm weights are `1 + w` in the file already.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::QkNorm;
use crate::layers::hparams::Hparams;
use crate::layers::norm::spec::{NormKind, Norms};
use crate::model::ModelError;
use crate::model::keys::Keys;

pub(super) fn gemma1(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::Rms, keys.dense(Activation::GeGlu)?)?;
    h.embd_scale = (h.n_embd as f32).sqrt();
    Ok(h)
}

pub(super) fn gemma2(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = gemma(keys, 46)?;
    h.set_windows(keys, Some(4096), 2)?;
    let softcap = keys.positive("attn_logit_softcapping")?.unwrap_or(50.0);
    h.attention_mut()
        .for_each(|attn| attn.softcap = Some(softcap));
    h.final_softcap = Some(keys.positive("final_logit_softcapping")?.unwrap_or(30.0));
    Ok(h)
}

pub(super) fn gemma3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = gemma(keys, 62)?;
    h.set_windows(keys, None, 6)?;
    h.set_window_rope(keys.positive("rope.freq_base_swa")?.unwrap_or(10000.0));
    h.attention_mut()
        .for_each(|attn| attn.qk_norm = Some(QkNorm::PerHead));
    h.final_softcap = keys.positive("final_logit_softcapping")?;
    Ok(h)
}

/// EmbeddingGemma: Gemma 3 with bidirectional attention, and dense modules after it.
pub(super) fn embedding(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = gemma3(keys)?;
    keys.only("attention.causal", &[0.0])?;
    h.attention_mut().for_each(|attn| attn.causal = false);
    for i in 2.. {
        let sizes =
            ["in", "out"].map(|part| keys.opt_count(&format!("dense_{i}_feat_{part}"), 1 << 17));
        let [Some(n_in), Some(n_out)] = sizes.map(|size| size.transpose()) else {
            break;
        };
        h.dense.push((n_in?, n_out?));
    }
    // Files may name modules that they do not contain.
    if !keys.has("dense_2.weight") {
        h.dense.clear();
    }
    let widths = h.dense.iter().scan(h.n_embd, |n, &(n_in, n_out)| {
        Some(std::mem::replace(n, n_out) == n_in)
    });
    if !widths.into_iter().all(|fits| fits) {
        return Err(ModelError::Inconsistent {
            what: format!("dense modules of {:?} for vectors of {}", h.dense, h.n_embd),
        });
    }
    Ok(h)
}

/// Shared by Gemma 2 and 3. The 27B models, recognised by their layer count, scale queries by
/// `(n_embd/n_head)^-½`, all others by `head_dim^-½`, unless the file says otherwise (ours do, if
/// need be).
fn gemma(keys: &Keys<'_>, layers_27b: usize) -> Result<Hparams, ModelError> {
    let mut h = gemma1(keys)?;
    h.set_norms(Norms::Both);
    if h.n_layer == layers_27b {
        let n_embd = h.n_embd;
        h.attention_mut()
            .for_each(|attn| attn.scale = 1.0 / ((n_embd / attn.n_head) as f32).sqrt());
    }
    if let Some(scale) = keys.positive("attention.scale")? {
        h.attention_mut().for_each(|attn| attn.scale = scale);
    }
    Ok(h)
}
