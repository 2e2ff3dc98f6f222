//! Weights of a model that drafts for another.

use crate::gguf::Gguf;
use crate::layers::draft::spec::{DraftKind, DraftSpec};
use crate::layers::draft::weights::{DraftInput, DraftKv, DraftLayer, DraftWeights};
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{FfnSpec, LayerSpec, OutputScale};
use crate::layers::norm::spec::Norms;
use crate::layers::norm::weights::Norm;
use crate::lora::TOKEN_EMBD;
use crate::model::ModelError;
use crate::model::binding::binder::Binder;
use crate::model::binding::feed_forward::dense;
use crate::model::binding::rope_factors;
use crate::model::keys::UnknownNames;
use crate::quant::DType;

/// Output rows of a drafter, and the token of each.
const TOKENS: &str = "d2t";

impl DraftWeights {
    /// Binds every tensor that a drafter has, for a target whose states have `n_target` values.
    pub(crate) fn bind(
        gguf: &Gguf,
        (h, spec): (&Hparams, &DraftSpec),
        n_target: usize,
    ) -> Result<DraftWeights, ModelError> {
        let b = Binder::new(gguf);
        let input = match spec.kind {
            DraftKind::Assistant => DraftInput::States {
                pre: b.linear("nextn.pre_projection", 2 * n_target, h.n_embd, false)?,
                post: b.linear("nextn.post_projection", h.n_embd, n_target, false)?,
            },
            DraftKind::Eagle3 { norm_before_fc, .. } => {
                let n = spec.inputs.len() * n_target;
                let norm = norm_before_fc.then(|| norm(&b, "enc.output_norm", n));
                DraftInput::Features {
                    fc: b.linear("fc", n, h.n_embd, false)?,
                    norm: norm.transpose()?,
                }
            }
            DraftKind::Dflash { .. } => DraftInput::Features {
                fc: b.linear("fc", spec.inputs.len() * n_target, h.n_embd, false)?,
                norm: Some(norm(&b, "enc.output_norm", h.n_embd)?),
            },
        };
        let layers = h.layers.iter().enumerate();
        let layers = layers
            .map(|(i, of_layer)| layer(&b, (h, spec), i, of_layer))
            .collect::<Result<Vec<_>, _>>()?;
        let tokens = tokens(&b, h.n_vocab)?;
        let n_out = tokens.as_ref().map_or(h.n_vocab, Vec::len);
        let token_embd = b.opt_weight(TOKEN_EMBD, h.n_embd, h.n_vocab, 1)?;
        let has_output = b.has("output.weight");
        // An assistant's is its head, too.
        if spec.kind == DraftKind::Assistant && token_embd.is_none() && !has_output {
            return Err(ModelError::MissingTensor {
                name: TOKEN_EMBD.into(),
            });
        }
        let weights = DraftWeights {
            input,
            layers,
            output_norm: norm(&b, "output_norm", h.n_embd)?,
            output: has_output
                .then(|| b.linear("output", h.n_embd, n_out, false))
                .transpose()?,
            token_embd,
            tokens,
            rope_factors: rope_factors(&b, h)?,
            shapes: Vec::new(),
        };
        b.none_ignored(h, &mut UnknownNames::default())?;
        b.uniform(h)?;
        Ok(DraftWeights {
            shapes: b.shapes.into_inner().into_iter().collect(),
            ..weights
        })
    }
}

fn norm(b: &Binder<'_>, name: &str, n: usize) -> Result<Norm, ModelError> {
    let w = b.vector(&format!("{name}.weight"), n)?;
    Ok(Norm { w, b: Vec::new() })
}

/// Layer `i`.
fn layer(
    b: &Binder<'_>,
    (h, spec): (&Hparams, &DraftSpec),
    i: usize,
    of_layer: &LayerSpec,
) -> Result<DraftLayer, ModelError> {
    let name = |part: &str| format!("blk.{i}.{part}");
    let (Some(attn), FfnSpec::Dense(ffn)) = (of_layer.attention(), &of_layer.ffn) else {
        return Err(ModelError::Inconsistent {
            what: format!("layer {i} of a drafter without attention"),
        });
    };
    let reads_both = matches!(spec.kind, DraftKind::Eagle3 { .. });
    let n_in = if reads_both { 2 * h.n_embd } else { h.n_embd };
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, false);
    let has_norm = attn.qk_norm.is_some();
    let head_norm = |part: &str| {
        let norm = has_norm.then(|| b.vector(&name(part), attn.head_dim));
        norm.transpose()
    };
    let kv = || {
        Ok::<_, ModelError>(DraftKv {
            wk: linear("attn_k", n_in, attn.n_k())?,
            wv: (!attn.keys_as_values)
                .then(|| linear("attn_v", n_in, attn.n_v()))
                .transpose()?,
            k_norm: head_norm("attn_k_norm.weight")?,
        })
    };
    let post = |part: &str| {
        let there = of_layer.norms == Norms::Both && b.has(&name(&format!("{part}.weight")));
        there.then(|| norm(b, &name(part), h.n_embd)).transpose()
    };
    let scale = match of_layer.output_scale {
        OutputScale::OfFile => b.vector(&name("layer_output_scale.weight"), 1)?[0],
        _ => 1.0,
    };
    Ok(DraftLayer {
        attn: attn.clone(),
        norm: norm(b, &name("attn_norm"), h.n_embd)?,
        feature_norm: reads_both
            .then(|| norm(b, &name("attn_norm_2"), h.n_embd))
            .transpose()?,
        wq: linear("attn_q", n_in, attn.n_q())?,
        q_norm: head_norm("attn_q_norm.weight")?,
        kv: (!attn.shares_kv).then(kv).transpose()?,
        sinks: attn
            .sinks
            .then(|| b.vector(&name("attn_sinks.weight"), attn.n_head))
            .transpose()?,
        wo: linear("attn_output", attn.n_out(), h.n_embd)?,
        post_attn_norm: post("post_attention_norm")?,
        ffn_norm: norm(b, &name("ffn_norm"), h.n_embd)?,
        ffn: dense(b, h, (of_layer, ffn), &name)?,
        post_ffn_norm: post("post_ffw_norm")?,
        scale,
    })
}

/// The token of each row of the output, if the file says so: numbers of the target's vocabulary.
fn tokens(b: &Binder<'_>, n_vocab: usize) -> Result<Option<Vec<u32>>, ModelError> {
    let Some(tensor) = b.gguf.tensor(TOKENS) else {
        return Ok(None);
    };
    let n = usize::try_from(tensor.dims.first().copied().unwrap_or(0));
    let n = n.ok().filter(|n| (1..=n_vocab).contains(n));
    let (Some(n), DType::I64) = (n, tensor.dtype) else {
        return Err(ModelError::TensorType {
            name: TOKENS.into(),
            found: format!("{} of shape {:?}", tensor.dtype, tensor.dims),
            expected: "I64, a number for each row of the output",
        });
    };
    b.shaped(TOKENS, &[n])?;
    let numbers = b.gguf.data(tensor).chunks_exact(8);
    let numbers = numbers.map(|b| i64::from_le_bytes(b.try_into().unwrap_or_default()));
    let of_row = |(index, number): (usize, i64)| match u32::try_from(number) {
        Ok(token) if (token as usize) < n_vocab => Ok(token),
        _ => Err(ModelError::TensorValue {
            name: TOKENS.into(),
            index,
            value: number as f32,
            expected: "tokens of the model that it drafts for",
        }),
    };
    numbers
        .enumerate()
        .map(of_row)
        .collect::<Result<_, _>>()
        .map(Some)
}
