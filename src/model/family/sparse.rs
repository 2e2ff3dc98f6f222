//! Attention to chosen positions: DeepSeek V3.2, GLM 5, dots 3, MiniMax M3.

use crate::arch::{KV_BLOCK, MAX_HEAD_DIM};
use crate::layers::activation::spec::Activation;
use crate::layers::attention::latent::spec::LatentSpec;
use crate::layers::attention::spec::{AttnSpec, QkNorm};
use crate::layers::hparams::Hparams;
use crate::layers::indexer::spec::{IndexKind, IndexSpec, MAX_INDEX_DIM};
use crate::layers::layer::spec::FfnSpec;
use crate::layers::norm::spec::NormKind;
use crate::layers::rope::spec::{RopeId, RopeOrder};
use crate::model::ModelError;
use crate::model::family::deepseek;
use crate::model::keys::Keys;

/// DeepSeek V3.2: DeepSeek 3 with an index in every layer, rotated by halves.
pub(super) fn deepseek32(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = deepseek::deepseek2(keys)?;
    set_indexes(&mut h, keys, RopeOrder::NeoX)?;
    Ok(h)
}

/// GLM 5: some layers see what the layer before them chose.
pub(super) fn glm_dsa(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = deepseek::deepseek2(keys)?;
    set_indexes(&mut h, keys, RopeOrder::Norm)?;
    Ok(h)
}

/// dots 3: layers with windows have latent attention of other sizes, and no index.
pub(super) fn dots3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = deepseek::deepseek2(keys)?;
    h.set_windows(keys, None, 0)?;
    set_window_latent(&mut h, keys)?;
    let n_dims = h.ropes[0].n_dims;
    h.set_window_rope_of(keys, n_dims)?;
    set_indexes(&mut h, keys, RopeOrder::Norm)?;
    h.set_gates(keys);
    for attn in h.attention_mut() {
        if let Some(latent) = &mut attn.latent {
            latent.rot_norm = true;
        }
        attn.index = attn.index.filter(|_| attn.window.is_none());
    }
    Ok(h)
}

/// Gives layers with a window the sizes of latent attention under keys that end in `_swa`.
fn set_window_latent(h: &mut Hparams, keys: &Keys<'_>) -> Result<(), ModelError> {
    let size = |key: &str| keys.count(key, MAX_HEAD_DIM);
    let (kv_rank, head_dim, head_dim_v) = (
        size("attention.kv_lora_rank_swa")?,
        size("attention.key_length_mla_swa")?,
        size("attention.value_length_mla_swa")?,
    );
    // Those of the absorbed form follow from them.
    keys.ignore("attention.key_length_swa");
    keys.ignore("attention.value_length_swa");
    for attn in h.attention_mut().filter(|attn| attn.window.is_some()) {
        let Some(latent) = &mut attn.latent else {
            continue;
        };
        if latent.n_rot >= head_dim || kv_rank + latent.n_rot > MAX_HEAD_DIM || !latent.absorbed {
            return Err(ModelError::Inconsistent {
                what: format!(
                    "latent attention in windows with {} of {head_dim} dimensions rotated, and a latent of {kv_rank}",
                    latent.n_rot
                ),
            });
        }
        *latent = LatentSpec {
            kv_rank,
            n_plain: head_dim - latent.n_rot,
            head_dim_v,
            ..*latent
        };
        (attn.head_dim, attn.head_dim_v) = (kv_rank + latent.n_rot, kv_rank);
        attn.scale = 1.0 / (head_dim as f32).sqrt();
    }
    Ok(())
}

/// Gives all layers an index, or the choice of the layer before; `order` is that of its rotated
/// pairs.
pub(super) fn set_indexes(
    h: &mut Hparams,
    keys: &Keys<'_>,
    order: RopeOrder,
) -> Result<(), ModelError> {
    let types = keys.bools("attention.indexer.types")?;
    let types = types.unwrap_or_else(|| vec![true; keys.n_layer]);
    let rope = match h.ropes[0] {
        rope if rope.n_dims == 0 => None,
        rope if rope.order == order => Some(RopeId(0)),
        mut rope => {
            rope.order = order;
            h.ropes.push(rope);
            Some(RopeId(h.ropes.len() - 1))
        }
    };
    let pool = keys.opt_count("attention.indexer.kpool", KV_BLOCK)?;
    let index = IndexSpec {
        shared: false,
        n_head: keys.count("attention.indexer.head_count", 1 << 10)?,
        head_dim: keys.count("attention.indexer.key_length", MAX_INDEX_DIM)?,
        top_k: keys.count("attention.indexer.top_k", 1 << 20)?,
        rope,
        rotates_last: false,
        kind: match pool {
            Some(_) => IndexKind::Pooled,
            None => IndexKind::Weighed,
        },
        n_group: pool.unwrap_or(1),
    };
    let n_rot = rope.map_or(0, |id| h.rope(id).n_dims);
    let has_rank = |latent: LatentSpec| latent.q_rank.is_some();
    if n_rot > index.head_dim || !h.attention().all(|attn| attn.latent.is_some_and(has_rank)) {
        return Err(ModelError::Inconsistent {
            what: format!(
                "an index of {} dimensions, {n_rot} of them rotated, beside attention without low-rank queries",
                index.head_dim
            ),
        });
    }
    check_groups(&index)?;
    let mut has_choice = false;
    for (layer, is_own) in h.layers.iter_mut().zip(types) {
        let Some(attn) = layer.attention_mut() else {
            continue;
        };
        has_choice |= is_own;
        if attn.window.is_none() && !has_choice {
            return Err(ModelError::Inconsistent {
                what: "a layer without an index before all layers with one".into(),
            });
        }
        attn.index = Some(IndexSpec {
            shared: !is_own,
            ..index
        });
    }
    Ok(())
}

pub(super) fn check_groups(index: &IndexSpec) -> Result<(), ModelError> {
    let &IndexSpec { n_group, top_k, .. } = index;
    if KV_BLOCK.is_multiple_of(n_group) && top_k.is_multiple_of(n_group) {
        return Ok(());
    }
    Err(ModelError::Inconsistent {
        what: format!("an index that chooses {top_k} positions in groups of {n_group}"),
    })
}

/// MiniMax M3: key/value heads choose blocks of positions, except in the first, dense layers.
pub(super) fn minimax3(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut ffn = keys.sigmoid_mixture(0, true)?;
    for ffn in &mut ffn {
        match ffn {
            FfnSpec::Dense(dense) => dense.activation = Activation::SwiGluOai,
            FfnSpec::Moe(moe) => moe.activation = Activation::SwiGluOai,
            FfnSpec::Both(..) | FfnSpec::Beside(..) | FfnSpec::None => {}
        }
    }
    let is_dense: Vec<bool> = ffn.iter().map(|ffn| ffn.moe().is_none()).collect();
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    // Positions have scores of their own, so blocks need not fit into pages.
    let n_group = keys.count("attention.indexer.block_size", 1 << 12)?;
    let index = IndexSpec {
        shared: false,
        kind: IndexKind::Largest {
            n_local: keys.count("attention.indexer.local_blocks", 1 << 10)?,
        },
        n_head: keys.count("attention.indexer.head_count", 1 << 10)?,
        head_dim: keys.count("attention.indexer.key_length", MAX_INDEX_DIM)?,
        top_k: n_group * keys.count("attention.indexer.top_k", 1 << 16)?,
        rope: Some(RopeId(0)),
        rotates_last: false,
        n_group,
    };
    let fits = |attn: &AttnSpec| attn.n_head_kv == index.n_head;
    if h.ropes[0].n_dims > index.head_dim || !h.attention().all(fits) {
        return Err(ModelError::Inconsistent {
            what: format!(
                "an index of {} heads of {} dimensions, other than key/value heads or fewer than are rotated",
                index.n_head, index.head_dim
            ),
        });
    }
    for (attn, is_dense) in h.attention_mut().zip(is_dense) {
        attn.qk_norm = Some(QkNorm::PerHead);
        attn.index = (!is_dense).then_some(index);
    }
    Ok(h)
}
