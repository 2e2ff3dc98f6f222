//! Qwen 4 (experimental): Qwen 3.5 with hyper-connections, embeddings of several tokens, and
//! attention to chosen groups of positions.

use crate::arch::KV_BLOCK;
use crate::layers::hparams::Hparams;
use crate::layers::hyper::spec::{HyperKind, HyperSpec, MAX_HYPER};
use crate::layers::indexer::spec::{IndexKind, IndexSpec, MAX_INDEX_DIM};
use crate::layers::layer::spec::Mixer;
use crate::layers::ngram::MAX_GRAM;
use crate::layers::ngram::spec::NgramSpec;
use crate::layers::norm::spec::Norms;
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::layers::rope::spec::RopeId;
use crate::model::ModelError;
use crate::model::family::{qwen, sparse};
use crate::model::keys::{Keys, MAX_TAPS};

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = qwen::qwen35moe(keys)?;
    for layer in &mut h.layers {
        if let Mixer::Recurrent(RecurrentSpec::Delta(delta)) = &mut layer.mixer {
            delta.sigmoid_gate = true;
        }
    }
    h.set_norms(Norms::None);
    h.final_norm = false;
    h.hyper = Some(HyperSpec {
        n_stream: keys.count("hyper_connection.count", MAX_HYPER)?,
        eps: 0.0,
        kind: HyperKind::LowRank {
            rank: keys.count("hyper_connection.low_rank", 1 << 17)?,
        },
        weighs_last: true,
    });
    set_indexes(&mut h, keys)?;
    if let Some((layer, ngrams)) = ngrams(keys)? {
        h.layers[layer].ngrams = true;
        h.ngrams = Some(ngrams);
    }
    Ok(h)
}

/// Indexes of the layers that have the tensors. Converters write 0 for the positions of a group,
/// which are 4 in Hugging Face's configuration (`indexer_compress_ratio`).
fn set_indexes(h: &mut Hparams, keys: &Keys<'_>) -> Result<(), ModelError> {
    let ratios = keys.opt_counts("attention.compress_ratios", 0..=KV_BLOCK)?;
    let ratios = ratios.unwrap_or_else(|| vec![0; keys.n_layer]);
    let n_rot = h.ropes.first().map_or(0, |rope| rope.n_dims);
    for (i, (layer, ratio)) in h.layers.iter_mut().zip(ratios).enumerate() {
        let Some(attn) = layer.attention_mut() else {
            continue;
        };
        if ratio == 0 && !keys.has_in_layer(i, "indexer.q_proj.weight") {
            continue;
        }
        let n_group = if ratio == 0 { 4 } else { ratio };
        let index = IndexSpec {
            shared: false,
            kind: IndexKind::Mean,
            n_head: keys.count("attention.indexer.head_count", 1 << 10)?,
            head_dim: keys.count("attention.indexer.key_length", MAX_INDEX_DIM)?,
            top_k: keys.count("attention.indexer.top_k", 1 << 20)?,
            rope: Some(RopeId(0)),
            rotates_last: false,
            n_group,
        };
        sparse::check_groups(&index)?;
        if n_rot > index.head_dim {
            return Err(ModelError::Inconsistent {
                what: format!(
                    "an index of {} dimensions, {n_rot} of them rotated",
                    index.head_dim
                ),
            });
        }
        attn.index = Some(index);
    }
    Ok(())
}

/// Embeddings of several tokens, if a layer adds some.
fn ngrams(keys: &Keys<'_>) -> Result<Option<(usize, NgramSpec)>, ModelError> {
    if !keys.has_key("ple.layers") {
        return Ok(None);
    }
    let wrong = |what: String| ModelError::Inconsistent { what };
    let layer = match keys.u64s("ple.layers")?[..] {
        [layer] if layer < keys.n_layer as u64 => layer as usize,
        ref layers => {
            return Err(wrong(format!(
                "embeddings of several tokens in layers {layers:?}, not in one of {}",
                keys.n_layer
            )));
        }
    };
    let n_gram = keys.count("ple.ngram_size", MAX_GRAM)?;
    let n_each = keys.count("ple.heads_per_ngram", 1 << 10)?;
    let multipliers = keys.u64s("ple.layer_multipliers")?;
    let (offsets, sizes) = (
        keys.u64s("ple.head_offsets")?,
        keys.u64s("ple.head_vocab_sizes")?,
    );
    let n_hash = n_gram.saturating_sub(1) * n_each;
    if n_hash == 0 || multipliers.len() != n_gram || [offsets.len(), sizes.len()] != [n_hash; 2] {
        return Err(wrong(format!(
            "embeddings of up to {n_gram} tokens, {n_each} of each number, with {} factors, {} offsets and {} sizes",
            multipliers.len(),
            offsets.len(),
            sizes.len()
        )));
    }
    let n_row = keys.n_rows("per_layer_token_embd.weight").unwrap_or(0);
    let hashes: Vec<_> = offsets.into_iter().zip(sizes).collect();
    let fits = |&(first, n): &(u64, u64)| n > 0 && first.checked_add(n).is_some_and(|n| n <= n_row);
    if !hashes.iter().all(fits) {
        return Err(wrong(format!(
            "{}.ple.head_offsets and head_vocab_sizes beyond the {n_row} rows of their table",
            keys.arch
        )));
    }
    let eos = keys.token("ple.eos_token_id")?;
    let spec = NgramSpec {
        n_gram,
        n_tap: match keys.count("ple.conv_kernel", MAX_TAPS)? {
            1 => {
                return Err(ModelError::OutOfRange {
                    key: format!("{}.ple.conv_kernel", keys.arch),
                    value: "1".into(),
                    expected: format!("2 to {MAX_TAPS}"),
                });
            }
            n => n,
        },
        eos,
        n_row_embd: keys.count("embedding_length_per_layer_input", 1 << 17)?,
        n_row: usize::try_from(n_row).unwrap_or(usize::MAX),
        multipliers,
        hashes,
    };
    Ok(Some((layer, spec)))
}
