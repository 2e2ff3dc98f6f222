//! DeepSeek V4: attention to a window and to compressed blocks, several residual streams, and first
//! layers whose experts follow from the token.

use crate::arch::{KV_BLOCK, MAX_HEAD_DIM};
use crate::layers::compressed::spec::{BlockIndexSpec, BlocksSpec, CompressedSpec};
use crate::layers::hparams::Hparams;
use crate::layers::indexer::spec::MAX_INDEX_DIM;
use crate::layers::layer::spec::{FfnSpec, Mixer};
use crate::layers::norm::spec::NormKind;
use crate::layers::rope::spec::{RopeId, RopeOrder, RopeScaling};
use crate::model::ModelError;
use crate::model::family::{clamps, hyper};
use crate::model::keys::Keys;

/// Positions of a block of which entries overlap, and are chosen.
const OVERLAPPING: usize = 4;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut ffn = keys.mixture(0, true)?;
    clamps::set(keys, &mut ffn, clamps::before)?;
    let n_hashed = keys.opt_u64("hash_layer_count")?.unwrap_or(0);
    for moe in ffn
        .iter_mut()
        .filter_map(FfnSpec::moe_mut)
        .take(n_hashed as usize)
    {
        (moe.by_token, moe.bias) = (true, false);
    }
    let mut h = Hparams::llama(keys, NormKind::Rms, ffn)?;
    keys.ignore("embedding_length_out"); // that of all streams
    h.hyper = Some(hyper::manifold(keys, true)?);
    set_ropes(&mut h, keys)?;
    let size = |key: &str, most: usize| keys.count(key, most);
    let ratios = keys.opt_counts("attention.compress_ratios", 0..=1 << 12)?;
    let ratios = ratios.ok_or_else(|| keys.missing("attention.compress_ratios"))?;
    let window = size("attention.sliding_window", 1 << 28)?;
    let (q_rank, n_out_group, out_rank) = (
        size("attention.q_lora_rank", 1 << 17)?,
        size("attention.output_group_count", 1 << 10)?,
        size("attention.output_lora_rank", 1 << 17)?,
    );
    let has_index = ratios.contains(&OVERLAPPING);
    let index = match has_index {
        false => None,
        true => Some(BlockIndexSpec {
            n_head: size("attention.indexer.head_count", 1 << 10)?,
            head_dim: size("attention.indexer.key_length", MAX_INDEX_DIM)?,
            top_k: size("attention.indexer.top_k", 1 << 20)?,
        }),
    };
    let n_rot = h.ropes[0].n_dims;
    for (layer, ratio) in h.layers.iter_mut().zip(ratios) {
        let Some(attn) = layer.attention() else {
            continue;
        };
        let (n_head, head_dim) = (attn.n_head, attn.head_dim);
        let fits = [attn.n_head_kv, attn.head_dim_v] == [1, head_dim]
            && n_head.is_multiple_of(n_out_group)
            && head_dim <= MAX_HEAD_DIM
            && index.is_none_or(|index| n_rot <= index.head_dim);
        if !fits {
            return Err(ModelError::Inconsistent {
                what: format!(
                    "attention to compressed blocks with {n_head} heads of {head_dim} and {} for {} keys, outputs in {n_out_group} groups, {n_rot} dimensions rotated",
                    attn.head_dim_v, attn.n_head_kv
                ),
            });
        }
        if ratio == 1 || ratio > 1 && !KV_BLOCK.is_multiple_of(ratio) && ratio % KV_BLOCK != 0 {
            return Err(ModelError::OutOfRange {
                key: format!("{}.attention.compress_ratios", keys.arch),
                value: ratio.to_string(),
                expected: format!("0, or divisors and multiples of {KV_BLOCK} from 2 on"),
            });
        }
        layer.mixer = Mixer::Compressed(CompressedSpec {
            n_head,
            head_dim,
            q_rank,
            window,
            rope: RopeId(usize::from(ratio > 0)),
            n_out_group,
            out_rank,
            blocks: (ratio > 0).then_some(BlocksSpec {
                ratio,
                overlaps: ratio == OVERLAPPING,
                index: index.filter(|_| ratio == OVERLAPPING),
            }),
        });
    }
    h.kv_layers = vec![0; h.n_layer];
    Ok(h)
}

/// The rope of layers without entries, which is not scaled, and that of the others.
fn set_ropes(h: &mut Hparams, keys: &Keys<'_>) -> Result<(), ModelError> {
    let mut rope = h.ropes[0];
    rope.order = RopeOrder::Norm;
    (rope.attn_factor, rope.yarn_magnitude) = (1.0, false);
    let mut compressed = rope;
    rope.scaling = RopeScaling::None;
    compressed.theta = keys
        .positive("attention.compress_rope_freq_base")?
        .unwrap_or(rope.theta);
    h.ropes = vec![rope, compressed];
    Ok(())
}
