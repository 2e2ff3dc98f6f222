//! Weights of recurrent mixers.

use super::{Binder, Linear};
use crate::error::ModelError;
use crate::model::spec::{ConvSpec, DeltaSpec, Mamba2Spec, MambaNorms, MambaSpec, RecurrentSpec};

/// Weights of a recurrent mixer.
#[derive(Clone, Debug)]
pub(crate) enum Recurrent {
    ShortConv(Box<ShortConv>),
    Mamba(Box<Mamba>),
    Mamba2(Box<Mamba2>),
    Delta(Box<Delta>),
}

impl Recurrent {
    /// From what it makes of tokens to the residual stream.
    pub(crate) fn output(&self) -> &Linear {
        match self {
            Recurrent::ShortConv(w) => &w.output,
            Recurrent::Mamba(w) => &w.output,
            Recurrent::Mamba2(w) => &w.output,
            Recurrent::Delta(w) => &w.output,
        }
    }
}

/// Weights of a convolution.
#[derive(Clone, Debug)]
pub(crate) struct Conv {
    /// `(n_channel, n_tap)`, the last of this token.
    pub(crate) taps: Vec<f32>,
    /// Of each channel; empty if there is none.
    pub(crate) bias: Vec<f32>,
}

/// Weights of a gated short convolution.
#[derive(Clone, Debug)]
pub(crate) struct ShortConv {
    /// To two gates and what is convolved.
    pub(crate) input: Linear,
    pub(crate) conv: Conv,
    pub(crate) output: Linear,
}

/// Weights of Mamba 1.
#[derive(Clone, Debug)]
pub(crate) struct Mamba {
    /// To what is convolved, and the gate.
    pub(crate) input: Linear,
    pub(crate) conv: Conv,
    /// From convolved channels to time steps of low rank, what goes into the state, and what comes out of it.
    pub(crate) x: Linear,
    /// Norms of these three; empty if there are none.
    pub(crate) norms: Vec<Vec<f32>>,
    /// To time steps.
    pub(crate) dt: Linear,
    /// How fast each value of a state is forgotten, negative: `(n_inner, n_state)`.
    pub(crate) a: Vec<f32>,
    /// Factors on what bypasses the state.
    pub(crate) d: Vec<f32>,
    pub(crate) output: Linear,
}

/// Weights of Mamba 2.
#[derive(Clone, Debug)]
pub(crate) struct Mamba2 {
    /// To the gate, what is convolved, and time steps.
    pub(crate) input: Linear,
    pub(crate) conv: Conv,
    pub(crate) dt_bias: Vec<f32>,
    /// How fast each head forgets, negative.
    pub(crate) a: Vec<f32>,
    /// Factors on what bypasses the state, by head.
    pub(crate) d: Vec<f32>,
    /// Of the output, group by group.
    pub(crate) norm: Option<Vec<f32>>,
    pub(crate) output: Linear,
}

/// Weights of a gated delta rule.
#[derive(Clone, Debug)]
pub(crate) struct Delta {
    pub(crate) input: DeltaInput,
    pub(crate) conv: Conv,
    /// How fast each head forgets, negative, and what is added to its rates.
    pub(crate) a: Vec<f32>,
    pub(crate) dt_bias: Vec<f32>,
    /// Of a head of the output.
    pub(crate) norm: Vec<f32>,
    pub(crate) output: Linear,
}

/// The matrices that a delta rule's input is multiplied by.
#[derive(Clone, Debug)]
pub(crate) enum DeltaInput {
    /// Strengths and rates in one, by key head (Qwen3-Next).
    Fused { qkv: Linear, gate: Linear, beta_rate: Linear },
    /// One for each (Qwen 3.5).
    Split { qkv: Linear, gate: Linear, beta: Linear, rate: Linear },
    /// Rates and gates of low rank (Kimi Linear).
    Low { qkv: Box<[Linear; 3]>, beta: Linear, rate: Box<[Linear; 2]>, gate: Box<[Linear; 2]> },
}

pub(super) fn bind(
    b: &Binder<'_>,
    n_embd: usize,
    spec: &RecurrentSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<Recurrent, ModelError> {
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, false);
    Ok(match spec {
        RecurrentSpec::ShortConv(spec) => Recurrent::ShortConv(Box::new(ShortConv {
            input: linear("shortconv.in_proj", n_embd, 3 * spec.n_channel)?,
            conv: conv(b, &name("shortconv.conv"), *spec)?,
            output: linear("shortconv.out_proj", spec.n_channel, n_embd)?,
        })),
        RecurrentSpec::Mamba(spec) => Recurrent::Mamba(Box::new(mamba(b, n_embd, spec, name)?)),
        RecurrentSpec::Mamba2(spec) => Recurrent::Mamba2(Box::new(mamba2(b, n_embd, spec, name)?)),
        RecurrentSpec::Delta(spec) => Recurrent::Delta(Box::new(delta(b, n_embd, spec, name)?)),
    })
}

fn mamba(b: &Binder<'_>, n_embd: usize, spec: &MambaSpec, name: &dyn Fn(&str) -> String) -> Result<Mamba, ModelError> {
    let &MambaSpec { n_inner, n_state, dt_rank, norms, .. } = spec;
    let mut all = Vec::new();
    for (part, n) in [("dt", dt_rank), ("b", n_state), ("c", n_state)] {
        match norms {
            MambaNorms::None => {}
            MambaNorms::Weighted => all.push(b.vector(&name(&format!("ssm_{part}_norm.weight")), n)?),
            MambaNorms::Plain => all.push(vec![1.0; n]),
        }
    }
    Ok(Mamba {
        input: b.linear(&name("ssm_in"), n_embd, 2 * n_inner, false)?,
        conv: conv(b, &name("ssm_conv1d"), spec.conv())?,
        x: b.linear(&name("ssm_x"), n_inner, dt_rank + 2 * n_state, false)?,
        norms: all,
        dt: b.linear(&name("ssm_dt"), dt_rank, n_inner, true)?,
        a: table(b, name("ssm_a"), &[n_state, n_inner])?,
        d: b.vector(&name("ssm_d"), n_inner)?,
        output: b.linear(&name("ssm_out"), n_inner, n_embd, false)?,
    })
}

fn mamba2(
    b: &Binder<'_>,
    n_embd: usize,
    spec: &Mamba2Spec,
    name: &dyn Fn(&str) -> String,
) -> Result<Mamba2, ModelError> {
    let &Mamba2Spec { n_inner, n_head, n_group, norm, .. } = spec;
    let n_input = n_inner + spec.conv().n_channel + n_head;
    let norm = norm.then(|| table(b, name("ssm_norm.weight"), &[n_inner / n_group, n_group]));
    Ok(Mamba2 {
        input: b.linear(&name("ssm_in"), n_embd, n_input, false)?,
        conv: conv(b, &name("ssm_conv1d"), spec.conv())?,
        dt_bias: b.vector(&name("ssm_dt.bias"), n_head)?,
        a: table(b, name("ssm_a"), &[1, n_head])?,
        d: table(b, name("ssm_d"), &[1, n_head])?,
        norm: norm.transpose()?,
        output: b.linear(&name("ssm_out"), n_inner, n_embd, false)?,
    })
}

fn delta(b: &Binder<'_>, n_embd: usize, spec: &DeltaSpec, name: &dyn Fn(&str) -> String) -> Result<Delta, ModelError> {
    let &DeltaSpec { n_head, n_head_k, head_dim_k, head_dim_v, n_tap, by_channel, fused, .. } = spec;
    let (n_k, n_out) = (n_head_k * head_dim_k, spec.n_out());
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, false);
    if by_channel {
        let mut taps = Vec::new();
        for (part, n) in [("q", n_k), ("k", n_k), ("v", n_out)] {
            taps.extend(table(b, name(&format!("ssm_conv1d_{part}.weight")), &[n_tap, 1, n])?);
        }
        let [q, k, v] = [("attn_q", n_k), ("attn_k", n_k), ("attn_v", n_out)];
        let qkv = Box::new([linear(q.0, n_embd, q.1)?, linear(k.0, n_embd, k.1)?, linear(v.0, n_embd, v.1)?]);
        let low = |part: &str, n_out: usize| {
            let [down, up] = ["a", "b"].map(|stage| format!("ssm_{part}_{stage}"));
            Ok::<_, ModelError>(Box::new([linear(&down, n_embd, head_dim_v)?, linear(&up, head_dim_v, n_out)?]))
        };
        return Ok(Delta {
            input: DeltaInput::Low {
                qkv,
                beta: linear("ssm_beta", n_embd, n_head)?,
                rate: low("f", spec.n_rate())?,
                gate: low("g", n_out)?,
            },
            conv: Conv { taps, bias: Vec::new() },
            a: table(b, name("ssm_a"), &[1, n_head])?,
            dt_bias: b.vector(&name("ssm_dt.bias"), spec.n_rate())?,
            norm: b.vector(&name("ssm_norm.weight"), head_dim_v)?,
            output: linear("attn_output", n_out, n_embd)?,
        });
    }
    let (qkv, gate) = (linear("attn_qkv", n_embd, 2 * n_k + n_out)?, linear("attn_gate", n_embd, n_out)?);
    Ok(Delta {
        input: if fused {
            DeltaInput::Fused { qkv, gate, beta_rate: linear("ssm_ba", n_embd, 2 * n_head)? }
        } else {
            let (beta, rate) = (linear("ssm_beta", n_embd, n_head)?, linear("ssm_alpha", n_embd, n_head)?);
            DeltaInput::Split { qkv, gate, beta, rate }
        },
        conv: conv(b, &name("ssm_conv1d"), spec.conv())?,
        a: b.vector(&name("ssm_a"), n_head)?,
        dt_bias: b.vector(&name("ssm_dt.bias"), n_head)?,
        norm: b.vector(&name("ssm_norm.weight"), head_dim_v)?,
        output: linear("ssm_out", n_out, n_embd)?,
    })
}

/// Values that are there.
fn table(b: &Binder<'_>, name: String, dims: &[usize]) -> Result<Vec<f32>, ModelError> {
    b.values(&name, dims)?.ok_or(ModelError::MissingTensor { name })
}

fn conv(b: &Binder<'_>, name: &str, spec: ConvSpec) -> Result<Conv, ModelError> {
    let ConvSpec { n_channel, n_tap } = spec;
    let taps = table(b, format!("{name}.weight"), &[n_tap, n_channel])?;
    let bias = b.opt_vector(&format!("{name}.bias"), n_channel)?.unwrap_or_default();
    Ok(Conv { taps, bias })
}
