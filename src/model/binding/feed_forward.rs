//! Feed-forward layers of a file: dense ones and mixtures of experts.

use crate::compute::weight::{Linear, Weight};
use crate::layers::dense_ffn::spec::DenseSpec;
use crate::layers::dense_ffn::weights::Ffn;
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{Biases, FfnSpec, LayerSpec};
use crate::layers::layer::weights::{Beside, Both, FeedForward};
use crate::layers::moe::spec::{AdjugateSpec, MoeSpec};
use crate::layers::moe::weights::Moe;
use crate::layers::norm::weights::Norm;
use crate::model::ModelError;
use crate::model::binding::binder::Binder;

pub(super) fn feed_forward(
    b: &Binder<'_>,
    h: &Hparams,
    spec: &LayerSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<FeedForward, ModelError> {
    Ok(match &spec.ffn {
        FfnSpec::None => FeedForward::None,
        FfnSpec::Dense(ffn) => FeedForward::Dense(Box::new(dense(b, h, (spec, ffn), name)?)),
        FfnSpec::Moe(moe) => FeedForward::Moe(Box::new(mixture(b, h, (spec, moe), name)?)),
        FfnSpec::Both(ffn, moe) => FeedForward::Both(Box::new(Both {
            dense: dense(b, h, (spec, ffn), name)?,
            post_dense_norm: b.norm(&name("post_ffw_norm_1"), h)?,
            moe_norm: b.norm(&name("pre_ffw_norm_2"), h)?,
            moe: mixture(b, h, (spec, moe), name)?,
            post_moe_norm: b.norm(&name("post_ffw_norm_2"), h)?,
        })),
        FfnSpec::Beside(ffn, moe, beside) => FeedForward::Beside(Box::new(Beside {
            dense: dense(b, h, (spec, ffn), name)?,
            moe: mixture(b, h, (spec, moe), name)?,
            moe_norm: beside
                .reads_input
                .then(|| b.norm(&name("ffn_norm_exps"), h))
                .transpose()?,
            scale: beside.scale,
        })),
    })
}

/// A dense feed-forward layer.
pub(super) fn dense(
    b: &Binder<'_>,
    &Hparams {
        n_embd, norm_eps, ..
    }: &Hparams,
    (spec, ffn): (&LayerSpec, &DenseSpec),
    name: &dyn Fn(&str) -> String,
) -> Result<Ffn, ModelError> {
    let biased = matches!(spec.biases, Biases::All | Biases::Everywhere);
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, biased);
    let down = linear("ffn_down", ffn.n_ff, n_embd)?;
    let sub_norm = match ffn.sub_norm {
        true => Some((b.vector(&name("ffn_sub_norm.weight"), ffn.n_ff)?, norm_eps)),
        false => None,
    };
    let (gate, up) = if ffn.fused {
        let both = linear("ffn_up", n_embd, 2 * ffn.n_ff)?;
        (
            Some(both.rows(0..ffn.n_ff)),
            both.rows(ffn.n_ff..2 * ffn.n_ff),
        )
    } else {
        let gate = ffn
            .activation
            .is_gated()
            .then(|| linear("ffn_gate", n_embd, ffn.n_ff));
        (gate.transpose()?, linear("ffn_up", n_embd, ffn.n_ff)?)
    };
    Ok(Ffn {
        activation: ffn.activation,
        sparsity: ffn.sparsity,
        sub_norm,
        gate,
        up,
        down,
    })
}

fn mixture(
    b: &Binder<'_>,
    h: &Hparams,
    (spec, x): (&LayerSpec, &MoeSpec),
    name: &dyn Fn(&str) -> String,
) -> Result<Moe, ModelError> {
    let n_embd = h.n_embd;
    let activation = x.activation;
    let biased = spec.biases == Biases::Everywhere;
    let stack = |part: &str, n_in: usize, n_out: usize| {
        b.stack(&name(part), n_in, n_out, x.n_expert, biased)
    };
    // For other mixtures it is not known whether biases are added.
    let router = if biased {
        b.linear(&name("ffn_gate_inp"), n_embd, x.n_expert, true)?
    } else {
        Linear {
            w: b.weight(&name("ffn_gate_inp.weight"), n_embd, x.n_expert, 1)?,
            b: None,
        }
    };
    let bias = name("exp_probs_b.bias");
    let bias = if b.has(&bias) {
        bias
    } else {
        name("exp_probs_b")
    };
    let bias = x.bias.then(|| b.vector(&bias, x.n_expert)).transpose()?;
    let by_token = x.by_token.then(|| {
        b.indices(
            &name("ffn_gate_tid2eid.weight"),
            (x.n_used, h.n_vocab),
            x.n_expert,
        )
    });
    let width = x.latent.unwrap_or(n_embd);
    let (gate, up) = if x.fused {
        (None, stack("ffn_gate_up_exps", width, 2 * x.n_ff)?)
    } else {
        let gate = activation
            .is_gated()
            .then(|| stack("ffn_gate_exps", width, x.n_ff));
        (gate.transpose()?, stack("ffn_up_exps", width, x.n_ff)?)
    };
    let stacked = Ffn {
        activation,
        sparsity: None,
        sub_norm: None,
        gate,
        up,
        down: stack("ffn_down_exps", x.n_ff, width)?,
    };
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, false);
    let latent = match x.latent {
        None => None,
        Some(n) => {
            // Under one of two names.
            let routed = b.has(&name("ffn_routed_down.weight"));
            let [down, up] = match routed {
                true => ["ffn_routed_down", "ffn_routed_up"],
                false => ["ffn_latent_down", "ffn_latent_up"],
            };
            Some((linear(down, n_embd, n)?, linear(up, n, n_embd)?))
        }
    };
    let latent_norm = x.latent.filter(|_| x.latent_norm);
    let latent_norm = latent_norm.map(|n| b.vector(&name("ffn_routed_norm.weight"), n));
    let (shared, shared_gate) = shared_expert(b, n_embd, x, name)?;
    let router_norm = router_norm(b, n_embd, x, name)?;
    // Those of NVFP4 experts are factors of the matrices already.
    let output_scales = x.output_scales && stacked.down.w.scales.is_none();
    let output_scales = output_scales
        .then(|| b.vector(&name("ffn_down_exps.scale"), x.n_expert))
        .transpose()?;
    let adjugate = x
        .adjugate
        .as_ref()
        .map(|adjugate| adjugates(b, n_embd, (x, adjugate), &router, name));
    Ok(Moe {
        spec: x.clone(),
        adjugate: adjugate.transpose()?.map(Box::new),
        router,
        router_norm,
        latent,
        latent_norm: latent_norm.transpose()?,
        output_scales,
        by_token: by_token.transpose()?,
        bias,
        stacked,
        shared,
        shared_gate,
    })
}

/// The expert that every token uses, and the matrix of its gate.
fn shared_expert(
    b: &Binder<'_>,
    n_embd: usize,
    x: &MoeSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<(Option<Ffn>, Option<Weight>), ModelError> {
    let Some(shared) = x.shared else {
        return Ok((None, None));
    };
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, false);
    let activation = shared.activation.unwrap_or(x.activation);
    let ffn = Ffn {
        activation,
        sparsity: None,
        sub_norm: None,
        gate: activation
            .is_gated()
            .then(|| linear("ffn_gate_shexp", n_embd, shared.n_ff))
            .transpose()?,
        up: linear("ffn_up_shexp", n_embd, shared.n_ff)?,
        down: linear("ffn_down_shexp", shared.n_ff, n_embd)?,
    };
    let gate = shared
        .gated
        .then(|| b.weight(&name("ffn_gate_inp_shexp.weight"), n_embd, 1, 1));
    Ok((Some(ffn), gate.transpose()?))
}

/// The norm of a router's input.
fn router_norm(
    b: &Binder<'_>,
    n_embd: usize,
    x: &MoeSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<Option<Norm>, ModelError> {
    // Gemma 4 divides by the root of the width in addition.
    let scales = x
        .router_norm
        .then(|| b.vector(&name("ffn_gate_inp.scale"), n_embd))
        .transpose()?;
    Ok(scales.map(|w| {
        let width = (n_embd as f32).sqrt();
        Norm {
            w: w.iter().map(|w| w / width).collect(),
            b: Vec::new(),
        }
    }))
}

/// The experts behind those of a mixture, with the same router.
fn adjugates(
    b: &Binder<'_>,
    n_embd: usize,
    (moe, x): (&MoeSpec, &AdjugateSpec),
    router: &Linear,
    name: &dyn Fn(&str) -> String,
) -> Result<Moe, ModelError> {
    let n = moe.n_expert / x.n_group;
    let stack = |part: &str, n_in: usize, n_out: usize| b.stack(&name(part), n_in, n_out, n, false);
    Ok(Moe {
        spec: MoeSpec {
            n_expert: n,
            n_used: moe.n_used.min(n),
            n_ff: x.n_ff,
            ..MoeSpec::default()
        },
        router: router.clone(),
        router_norm: None,
        latent: None,
        latent_norm: None,
        by_token: None,
        output_scales: None,
        bias: None,
        stacked: Ffn {
            activation: moe.activation,
            sparsity: None,
            sub_norm: None,
            gate: Some(stack("ffn_gate_chexps", n_embd, x.n_ff)?),
            up: stack("ffn_up_chexps", n_embd, x.n_ff)?,
            down: stack("ffn_down_chexps", x.n_ff, n_embd)?,
        },
        adjugate: None,
        shared: None,
        shared_gate: None,
    })
}
