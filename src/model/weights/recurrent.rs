//! Weights of recurrent mixers.

use super::{Binder, Linear};
use crate::error::ModelError;
use crate::model::spec::{ConvSpec, RecurrentSpec};

/// Weights of a recurrent mixer.
#[derive(Clone, Debug)]
pub(crate) enum Recurrent {
    ShortConv(ShortConv),
}

impl Recurrent {
    /// From what it makes of tokens to the residual stream.
    pub(crate) fn output(&self) -> &Linear {
        match self {
            Recurrent::ShortConv(w) => &w.output,
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

pub(super) fn bind(
    b: &Binder<'_>,
    n_embd: usize,
    spec: &RecurrentSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<Recurrent, ModelError> {
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, false);
    Ok(match spec {
        RecurrentSpec::ShortConv(spec) => Recurrent::ShortConv(ShortConv {
            input: linear("shortconv.in_proj", n_embd, 3 * spec.n_channel)?,
            conv: conv(b, &name("shortconv.conv"), *spec)?,
            output: linear("shortconv.out_proj", spec.n_channel, n_embd)?,
        }),
    })
}

fn conv(b: &Binder<'_>, name: &str, spec: ConvSpec) -> Result<Conv, ModelError> {
    let ConvSpec { n_channel, n_tap } = spec;
    let taps = format!("{name}.weight");
    let taps = b.values(&taps, &[n_tap, n_channel])?.ok_or(ModelError::MissingTensor { name: taps })?;
    let bias = b.opt_vector(&format!("{name}.bias"), n_channel)?.unwrap_or_default();
    Ok(Conv { taps, bias })
}
