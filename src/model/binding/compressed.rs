//! Attention to compressed blocks of a file.

use crate::layers::compressed::spec::{BlocksSpec, CompressedSpec};
use crate::layers::compressed::weights::{BlockIndex, Compressed, Compressor};
use crate::model::ModelError;
use crate::model::binding::binder::Binder;

pub(super) fn compressed(
    b: &Binder<'_>,
    n_embd: usize,
    spec: &CompressedSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<Compressed, ModelError> {
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, false);
    let &CompressedSpec {
        n_head,
        head_dim,
        q_rank,
        n_out_group,
        out_rank,
        ..
    } = spec;
    let n_out = n_head * head_dim;
    let index = spec.blocks.and_then(|blocks| Some((blocks, blocks.index?)));
    Ok(Compressed {
        q_a: linear("attn_q_a", n_embd, q_rank)?,
        q_a_norm: b.vector(&name("attn_q_a_norm.weight"), q_rank)?,
        q_b: linear("attn_q_b", q_rank, n_out)?,
        kv: linear("attn_kv", n_embd, head_dim)?,
        kv_norm: b.vector(&name("attn_kv_a_norm.weight"), head_dim)?,
        sinks: b.vector(&name("attn_sinks.weight"), n_head)?,
        out_a: linear("attn_output_a", n_out / n_out_group, n_out_group * out_rank)?,
        out_b: linear("attn_output_b", n_out_group * out_rank, n_embd)?,
        blocks: spec
            .blocks
            .map(|blocks| compressor(b, n_embd, (&blocks, head_dim), &name("attn_compressor")))
            .transpose()?,
        index: index
            .map(|(blocks, index)| {
                let n = index.head_dim;
                let part = name("indexer_compressor");
                Ok::<_, ModelError>(BlockIndex {
                    keys: compressor(b, n_embd, (&blocks, n), &part)?,
                    q: linear("indexer.attn_q_b", q_rank, index.n_head * n)?,
                    proj: linear("indexer.proj", n_embd, index.n_head)?,
                })
            })
            .transpose()?,
    })
}

/// What makes entries of `n` values.
fn compressor(
    b: &Binder<'_>,
    n_embd: usize,
    (spec, n): (&BlocksSpec, usize),
    name: &str,
) -> Result<Compressor, ModelError> {
    let n_given = spec.n_part() * n;
    let places = format!("{name}_ape.weight");
    Ok(Compressor {
        kv: b.linear(&format!("{name}_kv"), n_embd, n_given, false)?,
        gate: b.linear(&format!("{name}_gate"), n_embd, n_given, false)?,
        places: b
            .values(&places, &[n_given, spec.ratio])?
            .ok_or(ModelError::MissingTensor { name: places })?,
        norm: b.vector(&format!("{name}_norm.weight"), n)?,
    })
}
