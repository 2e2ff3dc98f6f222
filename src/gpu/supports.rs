//! Models for whose passes there are kernels.

use crate::layers::attention::spec::{AttnSpec, QkNorm};
use crate::layers::conv::spec::ConvSpec;
use crate::layers::dense_ffn::spec::DenseSpec;
use crate::layers::gated_delta::spec::DeltaSpec;
use crate::layers::headed_mamba::spec::HeadedMambaSpec;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{FfnSpec, LayerSpec, Mixer};
use crate::layers::mamba::spec::MambaSpec;
use crate::layers::mamba2::spec::Mamba2Spec;
use crate::layers::moe::spec::{Gating, MoeSpec};
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
        n_loop: _,
        n_mtp: _,
        is_mtp,
        raw_states: _, // of blocks for multi-token prediction
        norm,
        norm_eps: _,
        embd_scale: _,
        token_types,
        final_norm: _,
        embd_norm: _,
        embd_norm_plain: _, // with such a norm
        learned_positions: _,
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
        per_layer_embd: _,
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
        (*is_mtp, "multi-token prediction"),
        (*token_types, "types of tokens"),
        (streams.is_some(), "several residual streams"),
        (hyper.is_some(), "hyper-connections"),
        (checkpoints.is_some(), "residual attention"),
        (switch.is_some(), "adapters that tokens choose"),
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
        post_norm_eps: _,
        biases: _,
        residual_scale: _,
        output_scale: _,
        embd_skip: _,
        ngrams: _, // with several streams
    } = spec;
    refuse(&[(*cross, "attention to an encoder's memory")])?;
    match norms {
        Norms::Before
        | Norms::BeforeFfn
        | Norms::After
        | Norms::Both
        | Norms::Shared
        | Norms::Parallel
        | Norms::BeforeAndLast => {}
        Norms::None => return Err(Unsupported("norms of residual streams")),
        Norms::Residual | Norms::OfStream => {
            return Err(Unsupported("norms of the residual stream"));
        }
    }
    match mixer {
        Mixer::Attention(spec) => attention(spec)?,
        Mixer::Recurrent(spec) => recurrent(spec)?,
        Mixer::Both(of_attention, spec) => {
            attention(of_attention)?;
            recurrent(spec)?;
        }
        Mixer::Compressed(_) => return Err(Unsupported("attention to compressed blocks")),
        Mixer::None => {}
    }
    match ffn {
        FfnSpec::Dense(spec) => dense(spec),
        FfnSpec::Moe(spec) => mixture(spec),
        FfnSpec::Beside(spec, moe, _) | FfnSpec::Both(spec, moe) => {
            dense(spec).and_then(|()| mixture(moe))
        }
        FfnSpec::None => Ok(()),
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
        RecurrentSpec::Mamba(MambaSpec {
            n_inner: _,
            n_state: _, // where a pass is planned
            dt_rank: _,
            n_tap: _,
            norms: _,
        })
        | RecurrentSpec::HeadedMamba(HeadedMambaSpec {
            n_inner: _,
            n_head: _,
            n_state: _, // where a pass is planned
            dt_rank: _,
            n_tap: _,
        }) => Ok(()),
        RecurrentSpec::Lightning(_) | RecurrentSpec::TimeMix(_) | RecurrentSpec::ChannelMix(_) => {
            Err(Unsupported(spec.name()))
        }
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
        chunked: _,
        rope: _,
        qk_norm,
        q_gains: _,
        clip,
        value_scale,
        value_norm,
        keys_as_values: _,
        shares_kv: _,
        alibi: _,
        relative,
        sinks: _,
        temperature: _,
        gated: _,
        gate_in_q: _,
        gate_by_head: _,
        gate_softplus: _,
        sub_norm: _,
        latent,
        index,
    } = spec;
    match qk_norm {
        None
        | Some(
            QkNorm::PerHead
            | QkNorm::PerHeadRotated
            | QkNorm::PlainRotated
            | QkNorm::Full
            | QkNorm::LayerFull
            | QkNorm::LayerByHead
            | QkNorm::RmsByHead,
        ) => {}
    }
    refuse(&[
        (
            latent.is_some() && (clip.is_some() || *value_scale != 1.0 || *value_norm),
            "latent attention whose keys and values are changed",
        ),
        (relative.is_some(), "biases by the distance of positions"),
        (!*causal, "attention to later tokens"),
        (index.is_some(), "attention to chosen positions"),
    ])
}

fn dense(spec: &DenseSpec) -> Result<(), Unsupported> {
    let DenseSpec {
        n_ff: _,
        activation: _,
        fused: _,
        sparsity,
        sub_norm: _,
    } = spec;
    refuse(&[(sparsity.is_some(), "sparse activations")])
}

fn mixture(spec: &MoeSpec) -> Result<(), Unsupported> {
    let MoeSpec {
        n_expert: _,
        n_used: _,
        n_ff: _,
        activation: _,
        gating,
        by_token,
        bias: _,
        groups: _, // by their number, where a pass is planned
        normalise: _,
        scale: _,
        routes_early: _,
        router_norm: _,
        output_scales: _,
        weighs_inputs: _,
        fused: _,
        latent: _,
        latent_norm: _,
        adjugate,
        shared: _,
    } = spec;
    match gating {
        Gating::Softmax | Gating::SoftmaxAfterTopK | Gating::Sigmoid | Gating::SqrtSoftplus => {}
        Gating::SparseMixer => return Err(Unsupported("the SparseMixer router")),
    }
    refuse(&[
        (*by_token, "experts by token"),
        (adjugate.is_some(), "adjugate experts"),
    ])
}
