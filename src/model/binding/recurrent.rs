//! Recurrent mixers of a file.

use crate::compute::weight::Linear;
use crate::layers::conv::spec::ConvSpec;
use crate::layers::conv::weights::{Conv, by_column};
use crate::layers::gated_delta::spec::DeltaSpec;
use crate::layers::gated_delta::weights::{Delta, DeltaInput};
use crate::layers::headed_mamba::spec::HeadedMambaSpec;
use crate::layers::headed_mamba::weights::HeadedMamba;
use crate::layers::lightning::weights::Lightning;
use crate::layers::mamba::spec::{MambaNorms, MambaSpec};
use crate::layers::mamba::weights::Mamba;
use crate::layers::mamba2::spec::Mamba2Spec;
use crate::layers::mamba2::weights::Mamba2;
use crate::layers::norm::weights::Norm;
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::layers::recurrent::weights::Recurrent;
use crate::layers::rwkv::spec::{TimeMixRanks, TimeMixSpec};
use crate::layers::rwkv::weights::{ChannelMix, TimeMix, TimeMix6, TimeMix7, TimeMixWeights};
use crate::layers::short_conv::weights::ShortConv;
use crate::model::ModelError;
use crate::model::binding::binder::Binder;

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
        RecurrentSpec::HeadedMamba(spec) => {
            Recurrent::HeadedMamba(Box::new(headed_mamba(b, n_embd, spec, name)?))
        }
        RecurrentSpec::Lightning(spec) => Recurrent::Lightning(Box::new(Lightning {
            qkv: linear("attn_qkv", n_embd, 3 * spec.n_out())?,
            gate: linear("attn_gate", n_embd, spec.n_out())?,
            norm: b.vector(&name("attn_norm_2.weight"), spec.n_out())?,
            output: linear("attn_output", spec.n_out(), n_embd)?,
        })),
        RecurrentSpec::TimeMix(spec) => Recurrent::TimeMix(Box::new(time_mix(b, spec, name)?)),
        RecurrentSpec::ChannelMix(spec) => {
            let share =
                |part: &str| b.vector(&name(&format!("channel_mix_lerp_{part}.weight")), n_embd);
            let gate = || {
                Ok::<_, ModelError>((
                    share("r")?,
                    linear("channel_mix_receptance", n_embd, n_embd)?,
                ))
            };
            Recurrent::ChannelMix(Box::new(ChannelMix {
                shift: shift(n_embd),
                share_key: share("k")?,
                key: linear("channel_mix_key", n_embd, spec.n_ff)?,
                value: linear("channel_mix_value", spec.n_ff, n_embd)?,
                receptance: spec.gated.then(gate).transpose()?,
            }))
        }
    })
}

/// Matrices of a product, two of low rank, or one of full rank under one of two names.
fn product_of_rank(
    b: &Binder<'_>,
    name: &dyn Fn(&str) -> String,
    part: &str,
    (n_in, rank, n_out): (usize, usize, usize),
) -> Result<Box<[Linear]>, ModelError> {
    let [down, up, whole] = ["_a", "_b", ""].map(|stage| name(&format!("ssm_{part}{stage}")));
    let has = |name: &str| b.has(&format!("{name}.weight"));
    Ok(if has(&up) {
        Box::new([
            b.linear(&down, n_in, rank, false)?,
            b.linear(&up, rank, n_out, false)?,
        ])
    } else if has(&whole) {
        Box::new([b.linear(&whole, n_in, n_out, false)?])
    } else {
        Box::new([b.linear(&down, n_in, n_out, false)?])
    })
}

fn mamba(
    b: &Binder<'_>,
    n_embd: usize,
    spec: &MambaSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<Mamba, ModelError> {
    let &MambaSpec {
        n_inner,
        n_state,
        dt_rank,
        norms,
        ..
    } = spec;
    let mut all = Vec::new();
    for (part, n) in [("dt", dt_rank), ("b", n_state), ("c", n_state)] {
        match norms {
            MambaNorms::None => {}
            MambaNorms::Weighted => {
                all.push(b.vector(&name(&format!("ssm_{part}_norm.weight")), n)?)
            }
            MambaNorms::Plain => all.push(vec![1.0; n]),
        }
    }
    let a = table(b, name("ssm_a"), &[n_state, n_inner])?;
    Ok(Mamba {
        input: b.linear(&name("ssm_in"), n_embd, 2 * n_inner, false)?,
        conv: conv(b, &name("ssm_conv1d"), spec.conv())?,
        x: b.linear(&name("ssm_x"), n_inner, dt_rank + 2 * n_state, false)?,
        norms: all,
        dt: b.linear(&name("ssm_dt"), dt_rank, n_inner, true)?,
        a: a.chunks(n_state * spec.n_block())
            .flat_map(|block| by_column(block, n_state))
            .collect(),
        d: b.vector(&name("ssm_d"), n_inner)?,
        output: b.linear(&name("ssm_out"), n_inner, n_embd, false)?,
    })
}

fn headed_mamba(
    b: &Binder<'_>,
    n_embd: usize,
    spec: &HeadedMambaSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<HeadedMamba, ModelError> {
    let &HeadedMambaSpec {
        n_inner,
        n_head,
        n_state,
        dt_rank,
        ..
    } = spec;
    // Files leave the suffixes of norms out.
    let norm = |part: &str, n: usize| b.vector(&name(&format!("ssm_{part}_norm")), n);
    Ok(HeadedMamba {
        input: b.linear(&name("ssm_in"), n_embd, 2 * n_inner, false)?,
        conv: conv(b, &name("ssm_conv1d"), spec.conv())?,
        x: b.linear(&name("ssm_x"), n_inner, 2 * n_state + dt_rank, false)?,
        norms: [
            norm("b", n_state)?,
            norm("c", n_state)?,
            norm("dt", dt_rank)?,
        ],
        dt: b.linear(&name("ssm_dt"), dt_rank, n_head, true)?,
        a: b.vector(&name("ssm_a"), n_head)?,
        d: b.vector(&name("ssm_d"), n_head)?,
        output: b.linear(&name("ssm_out"), n_inner, n_embd, false)?,
    })
}

fn mamba2(
    b: &Binder<'_>,
    n_embd: usize,
    spec: &Mamba2Spec,
    name: &dyn Fn(&str) -> String,
) -> Result<Mamba2, ModelError> {
    let &Mamba2Spec {
        n_inner,
        n_head,
        n_group,
        norm,
        ..
    } = spec;
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

fn delta(
    b: &Binder<'_>,
    n_embd: usize,
    spec: &DeltaSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<Delta, ModelError> {
    let &DeltaSpec {
        n_head,
        n_head_k,
        head_dim_k,
        head_dim_v,
        n_tap,
        by_channel,
        fused,
        bound,
        ..
    } = spec;
    let (n_k, n_out) = (n_head_k * head_dim_k, spec.n_out());
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, false);
    if by_channel {
        let mut taps = Vec::new();
        for (part, n) in [("q", n_k), ("k", n_k), ("v", n_out)] {
            taps.extend(table(
                b,
                name(&format!("ssm_conv1d_{part}.weight")),
                &[n_tap, 1, n],
            )?);
        }
        let [q, k, v] = [("attn_q", n_k), ("attn_k", n_k), ("attn_v", n_out)];
        let qkv = Box::new([
            linear(q.0, n_embd, q.1)?,
            linear(k.0, n_embd, k.1)?,
            linear(v.0, n_embd, v.1)?,
        ]);
        let product =
            |part: &str, n_out: usize| product_of_rank(b, name, part, (n_embd, head_dim_v, n_out));
        // A row, or a column.
        let is_row = b
            .gguf
            .tensor(&name("ssm_a"))
            .is_some_and(|t| t.dims.len() == 1);
        let mut a = match is_row {
            true => b.vector(&name("ssm_a"), n_head)?,
            false => table(b, name("ssm_a"), &[1, n_head])?,
        };
        if bound.is_some() {
            // Files differ in its sign.
            a.iter_mut().for_each(|a| *a = a.abs());
        }
        return Ok(Delta {
            input: DeltaInput::Low {
                qkv,
                beta: linear("ssm_beta", n_embd, n_head)?,
                rate: product("f", spec.n_rate())?,
                gate: product("g", n_out)?,
            },
            conv: Conv::new(&taps, n_tap, Vec::new()),
            a,
            dt_bias: b.vector(&name("ssm_dt.bias"), spec.n_rate())?,
            norm: b.vector(&name("ssm_norm.weight"), head_dim_v)?,
            output: linear("attn_output", n_out, n_embd)?,
        });
    }
    let (qkv, gate) = (
        linear("attn_qkv", n_embd, 2 * n_k + n_out)?,
        linear("attn_gate", n_embd, n_out)?,
    );
    Ok(Delta {
        input: if fused {
            DeltaInput::Fused {
                qkv,
                gate,
                beta_rate: linear("ssm_ba", n_embd, 2 * n_head)?,
            }
        } else {
            let (beta, rate) = (
                linear("ssm_beta", n_embd, n_head)?,
                linear("ssm_alpha", n_embd, n_head)?,
            );
            DeltaInput::Split {
                qkv,
                gate,
                beta,
                rate,
            }
        },
        conv: conv(b, &name("ssm_conv1d"), spec.conv())?,
        a: b.vector(&name("ssm_a"), n_head)?,
        dt_bias: b.vector(&name("ssm_dt.bias"), n_head)?,
        norm: b.vector(&name("ssm_norm.weight"), head_dim_v)?,
        output: linear("ssm_out", n_out, n_embd)?,
    })
}

/// A convolution that gives out the values of the token before.
fn shift(n_embd: usize) -> Conv {
    Conv::new(&[1.0, 0.0].repeat(n_embd), 2, Vec::new())
}

fn time_mix(
    b: &Binder<'_>,
    spec: &TimeMixSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<TimeMix, ModelError> {
    let n = spec.n_embd();
    let name = |part: &str| name(&format!("time_mix_{part}"));
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, false);
    let vector = |part: &str| b.vector(&name(&format!("{part}.weight")), n);
    let shares = |n_share: usize| table(b, name("lerp_fused.weight"), &[n, 1, 1, n_share]);
    let low = |part: &str, rank: usize| {
        Ok::<_, ModelError>([
            linear(&format!("{part}1"), n, rank)?,
            linear(&format!("{part}2"), rank, n)?,
        ])
    };
    let blends = |blend: usize, decay: usize, first: Vec<f32>| {
        Ok::<_, ModelError>(Box::new(TimeMix6 {
            share: vector("lerp_x")?,
            low: linear("w1", n, 5 * blend)?,
            up: b.weight(&name("w2.weight"), blend, n, 5)?,
            shares: shares(5)?,
            decay: vector("decay")?,
            decay_low: linear("decay_w1", n, decay)?,
            decay_up: linear("decay_w2", decay, n)?,
            first,
            gate: linear("gate", n, n)?,
        }))
    };
    let weights = match spec.ranks {
        TimeMixRanks::Six { blend, decay } => {
            let first = table(b, name("first.weight"), &[spec.head_dim, spec.n_head])?;
            TimeMixWeights::Six(blends(blend, decay, first)?)
        }
        TimeMixRanks::Linear { blend, decay, .. } => {
            TimeMixWeights::Linear(blends(blend, decay, Vec::new())?)
        }
        TimeMixRanks::Seven {
            decay,
            rate,
            residual,
            gate,
        } => {
            // The first layer's are not used; they have the rank of rates.
            let matrices = (vector("v0")?, low("v", residual.unwrap_or(rate))?);
            TimeMixWeights::Seven(Box::new(TimeMix7 {
                shares: shares(if gate.is_some() { 6 } else { 5 })?,
                decay: low("w", decay)?,
                decay_bias: vector("w0")?,
                residual: residual.map(|_| matrices),
                rate: low("a", rate)?,
                rate_bias: vector("a0")?,
                gate: gate.map(|rank| low("g", rank)).transpose()?,
                removal: vector("k_k")?,
                replacement: vector("k_a")?,
                bonus: vector("r_k")?,
            }))
        }
    };
    Ok(TimeMix {
        shift: shift(n),
        receptance: linear("receptance", n, n)?,
        key: linear("key", n, spec.n_key())?,
        value: linear("value", n, spec.n_key())?,
        norm: match spec.norm {
            false => None,
            true => Some(Norm {
                w: vector("ln")?,
                b: b.vector(&name("ln.bias"), n)?,
            }),
        },
        output: linear("output", n, n)?,
        weights,
    })
}

/// Values that are there.
fn table(b: &Binder<'_>, name: String, dims: &[usize]) -> Result<Vec<f32>, ModelError> {
    b.values(&name, dims)?
        .ok_or(ModelError::MissingTensor { name })
}

fn conv(b: &Binder<'_>, name: &str, spec: ConvSpec) -> Result<Conv, ModelError> {
    let ConvSpec { n_channel, n_tap } = spec;
    let taps = table(b, format!("{name}.weight"), &[n_tap, n_channel])?;
    let bias = b
        .opt_vector(&format!("{name}.bias"), n_channel)?
        .unwrap_or_default();
    Ok(Conv::new(&taps, n_tap, bias))
}
