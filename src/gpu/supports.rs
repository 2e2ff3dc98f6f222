//! Models for whose passes there are kernels.

use crate::layers::activation::spec::Activation;
use crate::layers::attention::spec::{AttnSpec, QkNorm};
use crate::layers::conv::spec::ConvSpec;
use crate::layers::dense_ffn::spec::DenseSpec;
use crate::layers::gated_delta::spec::DeltaSpec;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{FfnSpec, LayerSpec, Mixer, OutputScale};
use crate::layers::mamba2::spec::Mamba2Spec;
use crate::layers::moe::spec::{Gating, MoeSpec, SharedSpec};
use crate::layers::norm::spec::{NormKind, Norms};
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::layers::unsupported::{Unsupported, refuse};

/// Refuses what has no kernel. Sizes and formats are checked where a pass is planned.
pub(crate) fn supports(h: &Hparams) -> Result<(), Unsupported> {
    let Hparams {
        arch: _,
        n_vocab: _,
        n_ctx_train: _,
        n_embd: _,
        n_layer: _,
        n_part: _,
        n_loop,
        n_mtp: _,
        is_mtp,
        raw_states: _, // of blocks for multi-token prediction
        norm,
        norm_eps: _,
        embd_scale: _,
        token_types,
        final_norm: _,
        embd_norm,
        embd_norm_plain: _, // with such a norm
        learned_positions,
        logit_scale: _,
        final_softcap: _,
        head_bias: _,
        pooling: _,
        classifier: _,
        dense: _,
        ropes: _,
        layers,
        kv_layers: _, // other layers' keys and values, see `AttnSpec::shares_kv`
        streams,
        per_layer_embd,
        hyper,
        ngrams: _, // with hyper-connections
        checkpoints,
        switch,
        stacks,
        prefix: _,
        encoder: _,   // layers read it
        diffusion: _, // attention is not causal
    } = h;
    match norm {
        NormKind::Rms
        | NormKind::RmsPlain
        | NormKind::Layer
        | NormKind::LayerNoBias
        | NormKind::LayerPlain => {}
    }
    refuse(&[
        (*n_loop > 1, "several loops over the layers"),
        (*is_mtp, "multi-token prediction"),
        (*embd_norm, "a norm of embeddings"),
        (*token_types, "types of tokens"),
        (*learned_positions, "learned positions"),
        (streams.is_some(), "several residual streams"),
        (hyper.is_some(), "hyper-connections"),
        (checkpoints.is_some(), "residual attention"),
        (switch.is_some(), "adapters that tokens choose"),
        (per_layer_embd.is_some(), "embeddings for each layer"),
        (stacks.is_some(), "stacks of layers that run in turn"),
    ])?;
    layers.iter().try_for_each(layer)
}

fn layer(spec: &LayerSpec) -> Result<(), Unsupported> {
    let LayerSpec {
        mixer,
        cross,
        ffn,
        norms,
        post_norm_eps,
        biases: _,
        residual_scale: _,
        output_scale,
        embd_skip,
        ngrams: _, // with several streams
    } = spec;
    refuse(&[
        (post_norm_eps.is_some(), "norms with several epsilons"),
        (*embd_skip, "embeddings that are added to layers"),
        (*cross, "attention to an encoder's memory"),
    ])?;
    match norms {
        Norms::Before | Norms::BeforeFfn | Norms::After | Norms::Both | Norms::Shared => {}
        Norms::None => return Err(Unsupported("norms of residual streams")),
        Norms::BeforeAndLast => return Err(Unsupported("a norm between two loops")),
        Norms::Parallel => return Err(Unsupported("two norms of one residual stream")),
        Norms::Residual | Norms::OfStream => {
            return Err(Unsupported("norms of the residual stream"));
        }
    }
    match output_scale {
        OutputScale::None => {}
        OutputScale::OfFile | OutputScale::Half => {
            return Err(Unsupported("factors behind layers"));
        }
    }
    match mixer {
        Mixer::Attention(spec) => attention(spec)?,
        Mixer::Recurrent(spec) => recurrent(spec)?,
        Mixer::Both(_, spec) => return Err(Unsupported(spec.name())),
        Mixer::Compressed(_) => return Err(Unsupported("attention to compressed blocks")),
        Mixer::None => return Err(Unsupported("half layers")),
    }
    match ffn {
        FfnSpec::Dense(spec) => dense(spec),
        FfnSpec::Moe(spec) => mixture(spec),
        FfnSpec::Both(..) | FfnSpec::Beside(..) => Err(Unsupported("mixtures beside dense layers")),
        FfnSpec::None => Err(Unsupported("half layers")),
    }
}

fn recurrent(spec: &RecurrentSpec) -> Result<(), Unsupported> {
    match spec {
        RecurrentSpec::ShortConv(ConvSpec {
            n_channel: _,
            n_tap: _, // where a pass is planned
        }) => Ok(()),
        RecurrentSpec::Delta(DeltaSpec {
            n_head: _,
            n_head_k: _,
            head_dim_k: _, // where a pass is planned
            head_dim_v: _,
            n_tap: _,
            tiled: _,
            by_channel: _,
            fused: _,
            bound: _,
            length_eps: _,
            sigmoid_gate: _,
        }) => Ok(()),
        RecurrentSpec::Mamba2(Mamba2Spec {
            n_inner: _,
            n_head: _,
            n_group: _,
            n_state: _, // where a pass is planned
            n_tap: _,
            norm: _,
        }) => Ok(()),
        RecurrentSpec::Mamba(_)
        | RecurrentSpec::HeadedMamba(_)
        | RecurrentSpec::Lightning(_)
        | RecurrentSpec::TimeMix(_)
        | RecurrentSpec::ChannelMix(_) => Err(Unsupported(spec.name())),
    }
}

fn attention(spec: &AttnSpec) -> Result<(), Unsupported> {
    let AttnSpec {
        n_head: _,
        n_head_kv: _,
        head_dim: _,
        head_dim_v: _,
        scale: _,
        softcap: _,
        window: _,
        causal,
        chunked,
        rope: _,
        qk_norm,
        q_gains,
        clip,
        value_scale,
        value_norm,
        keys_as_values,
        shares_kv,
        alibi,
        relative,
        sinks: _,
        temperature,
        gated,
        gate_in_q,
        gate_by_head: _,  // with a gate
        gate_softplus: _, // with a gate
        sub_norm,
        latent,
        index,
    } = spec;
    match qk_norm {
        None | Some(QkNorm::PerHead | QkNorm::Full) => {}
        Some(QkNorm::PerHeadRotated | QkNorm::PlainRotated) => {
            return Err(Unsupported("norms of rotated queries and keys"));
        }
        Some(QkNorm::RmsByHead) => return Err(Unsupported("norms of each query and key head")),
        Some(QkNorm::LayerByHead | QkNorm::LayerFull) => {
            return Err(Unsupported("layer norms of queries and keys"));
        }
    }
    refuse(&[
        (clip.is_some(), "clamped queries, keys and values"),
        (*q_gains, "factors on query heads"),
        (*value_scale != 1.0, "a factor on values"),
        (*value_norm, "norms of values"),
        (*keys_as_values, "keys that serve as values"),
        (*shares_kv, "keys and values of other layers"),
        (alibi.is_some(), "ALiBi"),
        (relative.is_some(), "biases by the distance of positions"),
        (temperature.is_some(), "attention temperature"),
        (*gated || *gate_in_q, "gated attention"),
        (!*causal, "attention to later tokens"),
        (*chunked, "attention in chunks"),
        (*sub_norm, "norms before output matrices"),
        (latent.is_some(), "latent attention"),
        (index.is_some(), "attention to chosen positions"),
    ])
}

fn dense(spec: &DenseSpec) -> Result<(), Unsupported> {
    let DenseSpec {
        n_ff: _,
        activation,
        fused: _,
        sparsity,
        sub_norm,
    } = spec;
    activates(*activation)?;
    refuse(&[
        (sparsity.is_some(), "sparse activations"),
        (*sub_norm, "norms before output matrices"),
    ])
}

fn mixture(spec: &MoeSpec) -> Result<(), Unsupported> {
    let MoeSpec {
        n_expert: _,
        n_used: _,
        n_ff: _,
        activation,
        gating,
        by_token,
        bias: _,
        groups: _, // by their number, where a pass is planned
        normalise: _,
        scale: _,
        routes_early,
        router_norm,
        output_scales,
        weighs_inputs,
        fused,
        latent,
        latent_norm: _, // with such a vector
        adjugate,
        shared,
    } = spec;
    activates(*activation)?;
    match gating {
        Gating::Softmax | Gating::SoftmaxAfterTopK | Gating::Sigmoid => {}
        Gating::SqrtSoftplus => return Err(Unsupported("a router of roots of softplus")),
        Gating::SparseMixer => return Err(Unsupported("the SparseMixer router")),
    }
    if let Some(SharedSpec {
        n_ff: _,
        gated: _,
        activation: Some(activation),
    }) = shared
    {
        activates(*activation)?;
    }
    refuse(&[
        (*by_token, "experts by token"),
        (*routes_early, "a router that reads the layer's input"),
        (*router_norm, "a norm of the router's input"),
        (*output_scales, "factors on the outputs of experts"),
        (*weighs_inputs, "experts with weighed inputs"),
        (*fused, "experts whose gate and up are one matrix"),
        (latent.is_some(), "experts of a latent vector"),
        (adjugate.is_some(), "adjugate experts"),
    ])
}

fn activates(activation: Activation) -> Result<(), Unsupported> {
    match activation {
        Activation::SwiGlu
        | Activation::GeGlu
        | Activation::Gelu
        | Activation::SquaredRelu
        | Activation::SwiGluOai => Ok(()),
        Activation::SwiGluClamped { .. } | Activation::SwiGluClampedAfter { .. } => {
            Err(Unsupported("clamped SwiGLU"))
        }
        Activation::ReGlu
        | Activation::Relu
        | Activation::GeGluErf
        | Activation::GeluErf
        | Activation::Situ { .. }
        | Activation::Xielu { .. } => Err(Unsupported(
            "the activation ReLU, ReGLU, SiTU, xIELU, or GELU by the error function",
        )),
    }
}
