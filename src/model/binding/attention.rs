//! Attention of a file.

use crate::layers::attention::latent::spec::LatentSpec;
use crate::layers::attention::latent::weights::Latent;
use crate::layers::attention::spec::{AttnSpec, QkNorm};
use crate::layers::attention::weights::Attn;
use crate::layers::cross::weights::CrossAttn;
use crate::layers::hparams::Hparams;
use crate::layers::indexer::spec::{IndexKind, IndexSpec};
use crate::layers::indexer::weights::Indexer;
use crate::layers::layer::spec::{Biases, LayerSpec};
use crate::model::ModelError;
use crate::model::binding::binder::{Binder, RELATIVE};

pub(super) fn attention(
    b: &Binder<'_>,
    h: &Hparams,
    (spec, source): (&AttnSpec, Option<&Attn>),
    biases: Biases,
    name: &dyn Fn(&str) -> String,
) -> Result<Attn, ModelError> {
    let (biased, n_embd) = (biases != Biases::Optional, h.n_embd);
    if let Some(latent) = &spec.latent {
        return latent_attention(b, n_embd, spec, latent, name);
    }
    let (n_q, n_k, n_v) = (
        spec.n_q() * if spec.gate_in_q { 2 } else { 1 },
        spec.n_k(),
        spec.n_v(),
    );
    let (wq, wk, wv) = if b.has(&name("attn_qkv.weight")) {
        let qkv = b.linear(&name("attn_qkv"), n_embd, n_q + n_k + n_v, biased)?;
        (
            qkv.rows(0..n_q),
            qkv.rows(n_q..n_q + n_k),
            qkv.rows(n_q + n_k..n_q + n_k + n_v),
        )
    } else {
        let wq = b.linear(&name("attn_q"), n_embd, n_q, biased)?;
        match source {
            Some(source) if spec.shares_kv => {
                // Gemma 3n's files have some of their own all the same.
                ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"]
                    .iter()
                    .for_each(|part| b.skip(&name(part)));
                (wq, source.wk.clone(), source.wv.clone())
            }
            _ => {
                let wk = b.linear(&name("attn_k"), n_embd, n_k, biased)?;
                let wv = match spec.keys_as_values {
                    true if n_k != n_v => {
                        return Err(ModelError::Inconsistent {
                            what: format!(
                                "keys of {n_k} values are none of {n_v} ({})",
                                name("attn_k")
                            ),
                        });
                    }
                    true => wk.clone(),
                    false => b.linear(&name("attn_v"), n_embd, n_v, biased)?,
                };
                (wq, wk, wv)
            }
        }
    };
    let norm = |part: &str, n: usize| {
        let width = match spec.qk_norm {
            None => return Ok(None),
            Some(QkNorm::PlainRotated) => return Ok(Some(vec![1.0; spec.head_dim])),
            Some(QkNorm::PerHead | QkNorm::PerHeadRotated) => spec.head_dim,
            Some(QkNorm::Full | QkNorm::LayerFull) => n,
            Some(QkNorm::LayerByHead | QkNorm::RmsByHead) => {
                let values = b.values(&name(part), &[spec.head_dim, n / spec.head_dim])?;
                return values
                    .map(Some)
                    .ok_or_else(|| ModelError::MissingTensor { name: name(part) });
            }
        };
        b.vector(&name(part), width).map(Some)
    };
    Ok(Attn {
        wq,
        wk,
        wv,
        q_norm: norm("attn_q_norm.weight", spec.n_q())?,
        k_norm: (!spec.shares_kv)
            .then(|| norm("attn_k_norm.weight", n_k))
            .transpose()?
            .flatten(),
        key_factors: None,
        qk_norm_biases: qk_norm_biases(b, spec, name)?,
        relative: relative_biases(b, h, spec, name)?,
        q_gains: spec
            .q_gains
            .then(|| gains(b, name, spec.n_head))
            .transpose()?,
        wo: b.linear(
            &output_name(b, name),
            spec.n_out(),
            n_embd,
            matches!(biases, Biases::All | Biases::Everywhere),
        )?,
        sinks: spec
            .sinks
            .then(|| b.vector(&name("attn_sinks.weight"), spec.n_head))
            .transpose()?,
        gate: (spec.gated && !spec.gate_in_q)
            .then(|| b.linear(&name("attn_gate"), n_embd, spec.n_gate(), false))
            .transpose()?,
        sub_norm: spec
            .sub_norm
            .then(|| b.vector(&name("attn_sub_norm.weight"), spec.n_out()))
            .transpose()?,
        latent: None,
        index: spec
            .index
            .filter(|index| !index.shared)
            .map(|index| plain_indexer(b, n_embd, &index, name))
            .transpose()?
            .map(Box::new),
    })
}

/// Name of the output matrix: T5's files have a shorter one.
fn output_name(b: &Binder<'_>, name: &dyn Fn(&str) -> String) -> String {
    let of_t5 = name("attn_o");
    match b.has(&format!("{of_t5}.weight")) {
        true => of_t5,
        false => name("attn_output"),
    }
}

/// Biases of layer norms of queries and keys.
fn qk_norm_biases(
    b: &Binder<'_>,
    spec: &AttnSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<Option<[Vec<f32>; 2]>, ModelError> {
    if spec.qk_norm != Some(QkNorm::LayerFull) {
        return Ok(None);
    }
    Ok(Some([
        b.vector(&name("attn_q_norm.bias"), spec.n_q())?,
        b.vector(&name("attn_k_norm.bias"), spec.n_k())?,
    ]))
}

/// Biases of scores by distance: the layer's or, where it has none, the first layer's.
fn relative_biases(
    b: &Binder<'_>,
    h: &Hparams,
    spec: &AttnSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<Option<Vec<f32>>, ModelError> {
    let Some(relative) = spec.relative else {
        return Ok(None);
    };
    let first = format!("{}blk.0.{RELATIVE}", h.prefix);
    let own = Some(name(RELATIVE)).filter(|own| b.has(own));
    let name = own.unwrap_or(first);
    let values = b.values(&name, &[spec.n_head, relative.n_bucket])?;
    values.map(Some).ok_or(ModelError::MissingTensor { name })
}

/// Attention to an encoder's memory, with heads like those of the layer's mixer.
pub(super) fn cross(
    b: &Binder<'_>,
    h: &Hparams,
    spec: &LayerSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<Option<CrossAttn>, ModelError> {
    let Some(attn) = spec.attention() else {
        return Ok(None);
    };
    // Hugging Face's files have one, which it does not use.
    b.skip(&name("cross_attn_rel_b.weight"));
    let linear = |part: &str, n_in: usize, n_out: usize| {
        let name = name(&format!("cross_attn_{part}"));
        b.linear(&name, n_in, n_out, false)
    };
    Ok(Some(CrossAttn {
        norm: b.norm(&name("cross_attn_norm"), h)?,
        q: linear("q", h.n_embd, attn.n_q())?,
        k: linear("k", h.n_embd, attn.n_k())?,
        v: linear("v", h.n_embd, attn.n_v())?,
        output: linear("o", attn.n_out(), h.n_embd)?,
    }))
}

/// Factors on query heads, under the name of a norm (Talkie).
fn gains(
    b: &Binder<'_>,
    name: &dyn Fn(&str) -> String,
    n_head: usize,
) -> Result<Vec<f32>, ModelError> {
    let name = name("attn_q_norm.weight");
    let gains = b.values(&name, &[1, n_head])?;
    gains.ok_or(ModelError::MissingTensor { name })
}

fn latent_attention(
    b: &Binder<'_>,
    n_embd: usize,
    spec: &AttnSpec,
    latent: &LatentSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<Attn, ModelError> {
    let &LatentSpec {
        q_rank,
        kv_rank,
        n_plain,
        n_rot,
        head_dim_v,
        absorbed,
        rot_norm,
    } = latent;
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, false);
    let n_q = spec.n_head * latent.head_dim();
    let (q_a, wq) = match q_rank {
        Some(rank) => {
            let norm = b.vector(&name("attn_q_a_norm.weight"), rank)?;
            (
                Some((linear("attn_q_a", n_embd, rank)?, norm)),
                linear("attn_q_b", rank, n_q)?,
            )
        }
        None => (None, linear("attn_q", n_embd, n_q)?),
    };
    let wv = if absorbed {
        b.stack(&name("attn_v_b"), kv_rank, head_dim_v, spec.n_head, false)?
    } else {
        linear("attn_kv_b", kv_rank, spec.n_head * (n_plain + head_dim_v))?
    };
    let k_b = absorbed.then(|| b.weight(&name("attn_k_b.weight"), n_plain, kv_rank, spec.n_head));
    Ok(Attn {
        wq,
        wk: linear("attn_kv_a_mqa", n_embd, kv_rank + n_rot)?,
        wv,
        q_norm: None,
        k_norm: None,
        key_factors: None,
        qk_norm_biases: None,
        relative: None,
        q_gains: None,
        wo: linear("attn_output", spec.n_mixed(), n_embd)?,
        sinks: spec
            .sinks
            .then(|| b.vector(&name("attn_sinks.weight"), spec.n_head))
            .transpose()?,
        gate: spec
            .gated
            .then(|| linear("attn_gate", n_embd, spec.n_gate()))
            .transpose()?,
        sub_norm: None,
        latent: Some(Box::new(Latent {
            q_a,
            kv_norm: b.vector(&name("attn_kv_a_norm.weight"), kv_rank)?,
            k_b: k_b.transpose()?,
            rot_norm: rot_norm
                .then(|| b.vector(&name("attn_k_norm.weight"), n_rot))
                .transpose()?,
        })),
        index: match (&spec.index, q_rank) {
            (Some(index), Some(rank)) if !index.shared => {
                Some(Box::new(indexer(b, (n_embd, rank), index, name)?))
            }
            _ => None,
        },
    })
}

/// Index of positions, of a layer's input and the low-rank vectors of its queries.
fn indexer(
    b: &Binder<'_>,
    (n_embd, q_rank): (usize, usize),
    spec: &IndexSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<Indexer, ModelError> {
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, false);
    let n = spec.head_dim;
    let pool = |n_group: usize| {
        let places = name("indexer_compressor_ape.weight");
        let values = b.values(&places, &[n, n_group])?;
        Ok::<_, ModelError>((
            linear("indexer_compressor_gate", n_embd, n)?,
            values.ok_or(ModelError::MissingTensor { name: places })?,
        ))
    };
    Ok(Indexer {
        q: linear("indexer.attn_q_b", q_rank, spec.n_head * n)?,
        q_norm: None,
        k: linear("indexer.attn_k", n_embd, n)?,
        k_norm: b.vector(&name("indexer.k_norm.weight"), n)?,
        k_norm_bias: Some(b.vector(&name("indexer.k_norm.bias"), n)?),
        proj: Some(linear("indexer.proj", n_embd, spec.n_head)?),
        pool: (spec.kind == IndexKind::Pooled)
            .then(|| pool(spec.n_group))
            .transpose()?,
    })
}

/// Index of positions, of a layer's input alone.
fn plain_indexer(
    b: &Binder<'_>,
    n_embd: usize,
    spec: &IndexSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<Indexer, ModelError> {
    let linear = |part: &str, n_out: usize| b.linear(&name(part), n_embd, n_out, false);
    let n = spec.head_dim;
    Ok(Indexer {
        q: linear("indexer.q_proj", spec.n_head * n)?,
        q_norm: Some(b.vector(&name("indexer.q_norm.weight"), n)?),
        k: linear("indexer.k_proj", n)?,
        k_norm: b.vector(&name("indexer.k_norm.weight"), n)?,
        k_norm_bias: None,
        proj: None,
        pool: None,
    })
}
