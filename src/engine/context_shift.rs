//! Where the context of a sequence can be shifted.

use crate::arch::{Arch, KV_BLOCK};
use crate::engine::SessionError;
use crate::engine::options::SessionOptions;
use crate::layers::attention::spec::{AttnSpec, QkNorm};
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{LayerSpec, Mixer};
use crate::layers::rope::RopeTables;
use crate::layers::unsupported::{Unsupported, refuse};
use crate::model::Model;

/// Refuses a shift that [`SessionOptions::context_shift`] asks for where it cannot be.
pub(crate) fn check(
    model: &Model,
    n_ctx: usize,
    options: &SessionOptions,
) -> Result<(), SessionError> {
    let Some(keep) = options.context_shift else {
        return Ok(());
    };
    supports(model, options).map_err(|Unsupported(what)| SessionError::NoShift { what })?;
    // Behind them a page that goes and one that stays.
    let most = (n_ctx / KV_BLOCK)
        .checked_sub(2)
        .map(|pages| pages * KV_BLOCK);
    match most {
        Some(most) if keep <= most => Ok(()),
        most => {
            let expected = most.map_or_else(
                || format!("a context of at least {} tokens", 2 * KV_BLOCK),
                |most| format!("at most {most} tokens, as two pages of {KV_BLOCK} lie behind them"),
            );
            Err(SessionError::Option {
                option: "context_shift",
                value: keep,
                expected,
            })
        }
    }
}

/// Refuses models and caches whose keys cannot be turned to other positions.
fn supports(model: &Model, options: &SessionOptions) -> Result<(), Unsupported> {
    model_supports(model.hparams())?;
    let (w, policy) = (model.weights(), options.kv_policy());
    refuse(&[
        (w.rope_factors.short_long.is_some(), "learned rope factors"),
        (policy.tiers.is_some(), "precision by age"),
        (policy.k.bits() < 8, "keys of fewer than 8 bits"),
    ])
}

fn model_supports(h: &Hparams) -> Result<(), Unsupported> {
    let Hparams {
        arch: _,
        n_vocab: _,
        n_ctx_train: _,
        n_embd: _,
        n_layer: _,
        n_part: _,
        n_loop: _,
        n_mtp: _,
        is_mtp: _, // drafters begin anew
        raw_states: _,
        norm: _,
        norm_eps: _,
        embd_scale: _,
        token_types: _,
        final_norm: _,
        embd_norm: _,
        embd_norm_plain: _,
        learned_positions,
        logit_scale: _,
        final_softcap: _,
        head_bias: _,
        pooling: _,
        classifier: _,
        dense: _,
        ropes: _,
        layers,
        kv_layers: _, // shared keys are turned once
        streams: _,
        per_layer_embd: _,
        hyper: _,
        ngrams,
        checkpoints: _,
        switch,
        stacks: _,    // each run has keys of its own
        prefix: _,    // a name
        encoder: _,   // of another text
        diffusion: _, // no session
    } = h;
    if let Some(recurrent) = h.recurrent().next() {
        return Err(Unsupported(recurrent.name()));
    }
    refuse(&[
        (*learned_positions, "learned positions"),
        (ngrams.is_some(), "embeddings of several tokens"),
        (switch.is_some(), "adapters that tokens choose"),
    ])?;
    for layer in layers {
        let LayerSpec {
            mixer,
            cross: _, // another text's positions
            ffn: _,   // positions do not enter feed-forward layers
            norms: _,
            post_norm_eps: _,
            biases: _,
            residual_scale: _,
            output_scale: _,
            embd_skip: _,
            ngrams: _, // see `Hparams::ngrams`
        } = layer;
        match mixer {
            Mixer::Attention(spec) => attention(spec)?,
            Mixer::Recurrent(spec) | Mixer::Both(_, spec) => return Err(Unsupported(spec.name())),
            Mixer::Compressed(_) => return Err(Unsupported("attention to compressed blocks")),
            Mixer::None => {}
        }
    }
    Ok(())
}

fn attention(spec: &AttnSpec) -> Result<(), Unsupported> {
    let AttnSpec {
        n_head: _,
        n_head_kv: _,
        head_dim: _,
        head_dim_v: _,
        scale: _,
        softcap: _,
        window,
        causal: _,
        chunked: _, // with a window
        rope: _,
        qk_norm,
        q_gains: _,
        clip: _,
        value_scale: _,
        value_norm: _,
        keys_as_values: _, // values are a copy
        shares_kv: _,
        alibi: _,    // by the distance of positions
        relative: _, // likewise
        sinks: _,
        temperature: _, // of queries
        gated: _,
        gate_in_q: _,
        gate_by_head: _,
        gate_softplus: _,
        sub_norm: _,
        latent,
        index,
    } = spec;
    match qk_norm {
        // Without weights, norm and rotation commute.
        None
        | Some(
            QkNorm::PerHead
            | QkNorm::Full
            | QkNorm::LayerByHead
            | QkNorm::LayerFull
            | QkNorm::RmsByHead
            | QkNorm::PlainRotated,
        ) => {}
        Some(QkNorm::PerHeadRotated) => {
            return Err(Unsupported("norms of keys after their rotation"));
        }
    }
    refuse(&[
        (window.is_some(), "sliding windows"),
        (latent.is_some(), "latent attention"),
        (index.is_some(), "attention to chosen positions"),
    ])
}

impl RopeTables {
    /// Cosines and sines that turn keys back by `n` positions, in place of those of a token.
    pub(crate) fn back(&self, arch: Arch, n: usize) -> [Vec<f32>; 2] {
        let [mut cos, mut sin] = [0, 1].map(|_| vec![0.0; self.n_pairs()]);
        self.unscaled_angles(arch, n, &mut cos, &mut sin);
        sin.iter_mut().for_each(|sin| *sin = -*sin);
        [cos, sin]
    }
}
