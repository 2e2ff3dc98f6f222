//! Attention of a file.

use crate::layers::attention::latent::spec::LatentSpec;
use crate::layers::attention::latent::weights::Latent;
use crate::layers::attention::spec::{AttnSpec, QkNorm};
use crate::layers::attention::weights::Attn;
use crate::layers::layer::spec::Biases;
use crate::model::ModelError;
use crate::model::binding::binder::Binder;

pub(super) fn attention(
    b: &Binder<'_>,
    n_embd: usize,
    (spec, source): (&AttnSpec, Option<&Attn>),
    biases: Biases,
    name: &dyn Fn(&str) -> String,
) -> Result<Attn, ModelError> {
    let biased = biases != Biases::Optional;
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
            Some(QkNorm::Full) => n,
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
        k_norm: if spec.shares_kv {
            None
        } else {
            norm("attn_k_norm.weight", n_k)?
        },
        wo: b.linear(
            &name("attn_output"),
            spec.n_out(),
            n_embd,
            matches!(biases, Biases::All | Biases::Everywhere),
        )?,
        sinks: spec
            .sinks
            .then(|| b.vector(&name("attn_sinks.weight"), spec.n_head))
            .transpose()?,
        gate: (spec.gated && !spec.gate_in_q)
            .then(|| b.linear(&name("attn_gate"), n_embd, spec.n_out(), false))
            .transpose()?,
        sub_norm: spec
            .sub_norm
            .then(|| b.vector(&name("attn_sub_norm.weight"), spec.n_out()))
            .transpose()?,
        latent: None,
    })
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
        wo: linear("attn_output", spec.n_mixed(), n_embd)?,
        sinks: None,
        gate: None,
        sub_norm: None,
        latent: Some(Box::new(Latent {
            q_a,
            kv_norm: b.vector(&name("attn_kv_a_norm.weight"), kv_rank)?,
            k_b: k_b.transpose()?,
        })),
    })
}
