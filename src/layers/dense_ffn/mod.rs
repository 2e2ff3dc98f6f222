//! Dense feed-forward layers: `y = down(act(gate(x))·up(x))`, or `down(act(up(x)))`; some have a norm
//! before `down`.

pub(crate) mod backward;
pub(crate) mod spec;
pub(crate) mod weights;

use crate::compute::arena::{Frame, counted};
use crate::compute::linear::{Ctx, Product, RowCtx};
use crate::compute::probe::HookPoint;
use crate::compute::tiles::Tiles;
use crate::layers::activation::spec::Activation;
use crate::layers::activation::{
    clamp, gaussian_top_k, relu_mul, silu_clamped_mul, situ, squared_relu, xielu,
};
use crate::layers::context::Context;
use crate::layers::dense_ffn::weights::Ffn;
use crate::layers::norm::rms_factor;
use crate::layers::switch;
use crate::layers::switch::weights::SwitchLayer;

/// Buffers of a feed-forward layer, each `(m, n_ff)`.
pub(crate) struct FfnBuffers<'a> {
    pub(crate) gate: &'a mut [f32],
    pub(crate) up: &'a mut [f32],
}

impl<'a> FfnBuffers<'a> {
    fn take(frame: &mut Frame<'a>, m: usize, n_ff: usize) -> FfnBuffers<'a> {
        FfnBuffers {
            gate: frame.take(m * n_ff),
            up: frame.take(m * n_ff),
        }
    }

    /// Those of `m` rows, as the step before left them in `inner`.
    pub(crate) fn of(inner: &'a mut [u8], m: usize, n_ff: usize) -> FfnBuffers<'a> {
        FfnBuffers::take(&mut Frame::of(inner), m, n_ff)
    }
}

/// Bytes of its buffers for `m` rows.
pub(crate) fn bytes(m: usize, n_ff: usize) -> usize {
    counted(|frame| FfnBuffers::take(frame, m, n_ff))
}

/// The whole layer for `m` rows of `x`.
pub(crate) fn feed_forward(
    on: &mut RowCtx<'_, '_>,
    ffn: &Ffn,
    x: &[f32],
    m: usize,
    inner: &mut [u8],
    y: &mut [f32],
) {
    up(on, ffn, x, m, inner, &mut Tiles::at_once());
    activate(on.ctx, ffn, m, inner);
    down(on, ffn, m, inner, y, &mut Tiles::at_once());
}

/// First step: the products with `gate` and `up`.
pub(crate) fn up(
    on: &mut RowCtx<'_, '_>,
    ffn: &Ffn,
    x: &[f32],
    m: usize,
    inner: &mut [u8],
    tiles: &mut Tiles<'_>,
) {
    let FfnBuffers { gate, up } = FfnBuffers::of(inner, m, ffn.up.w.n_out);
    let up = Product::of(&ffn.up, up, m);
    match &ffn.gate {
        Some(w) => on.linear_tiles(x, m, &mut [Product::of(w, gate, m), up], tiles),
        None => on.linear_tiles(x, m, &mut [up], tiles),
    }
}

/// Shows what the first step computed to the probe.
pub(crate) fn show(cx: &mut Context<'_, '_>, ffn: &Ffn, inner: &mut [u8]) {
    let FfnBuffers { gate, up } = FfnBuffers::of(inner, cx.n_rows(), ffn.up.w.n_out);
    if ffn.gate.is_some() {
        cx.tap(HookPoint::FfnGate, gate);
    }
    cx.tap(HookPoint::FfnUp, up);
}

/// Adds what adapters in the file add to the first step's products with `x`.
pub(crate) fn add_switch(
    cx: &mut Context<'_, '_>,
    ffn: &Ffn,
    of_layer: &SwitchLayer,
    x: &[f32],
    inner: &mut [u8],
) {
    let (m, rows) = (cx.n_rows(), cx.rows);
    let FfnBuffers { gate, up } = FfnBuffers::of(inner, m, ffn.up.w.n_out);
    switch::add(cx, &of_layer.gate, rows, x, gate);
    switch::add(cx, &of_layer.up, rows, x, up);
}

/// Adds what they add to the last step's product `y`.
pub(crate) fn add_switch_down(
    cx: &mut Context<'_, '_>,
    ffn: &Ffn,
    of_layer: &SwitchLayer,
    inner: &mut [u8],
    y: &mut [f32],
) {
    let (m, rows) = (cx.n_rows(), cx.rows);
    let FfnBuffers { gate, .. } = FfnBuffers::of(inner, m, ffn.up.w.n_out);
    switch::add(cx, &of_layer.down, rows, gate, y);
}

/// Second step: the activation.
pub(crate) fn activate(ctx: Ctx<'_>, ffn: &Ffn, m: usize, inner: &mut [u8]) {
    let n_ff = ffn.up.w.n_out;
    let FfnBuffers { gate, up } = FfnBuffers::of(inner, m, n_ff);
    if let Some(n) = ffn.sparsity {
        ctx.threads
            .when(m > 1)
            .for_chunks(gate, n_ff, |_, gate| gaussian_top_k(gate, n));
    }
    let gated = ffn.activation.is_gated();
    act(ctx, ffn, m, gate, up);
    if let Some((norm, eps)) = &ffn.sub_norm {
        let x = if gated { gate } else { up };
        ctx.threads.when(m > 1).for_chunks(x, n_ff, |_, x| {
            let factor = rms_factor(ctx.arch, x, *eps);
            x.iter_mut()
                .zip(norm)
                .for_each(|(x, norm)| *x = *x * factor * norm);
        });
    }
}

/// Last step: the product with `down`.
pub(crate) fn down(
    on: &mut RowCtx<'_, '_>,
    ffn: &Ffn,
    m: usize,
    inner: &mut [u8],
    y: &mut [f32],
    tiles: &mut Tiles<'_>,
) {
    let FfnBuffers { gate, up } = FfnBuffers::of(inner, m, ffn.up.w.n_out);
    let x = if ffn.activation.is_gated() { gate } else { up };
    on.linear_tiles(x, m, &mut [Product::of(&ffn.down, y, m)], tiles);
}

/// The activation of `m` rows of a feed-forward layer; the result replaces `gate` or `up`.
pub(crate) fn act<'a>(
    ctx: Ctx<'_>,
    ffn: &Ffn,
    m: usize,
    gate: &'a mut [f32],
    up: &'a mut [f32],
) -> &'a [f32] {
    let (arch, workers, n_ff) = (ctx.arch, ctx.threads.when(m > 1), ffn.up.w.n_out);
    match ffn.activation {
        Activation::SwiGlu => workers.for_chunks(gate, n_ff, |i, gate| {
            arch.silu_mul(gate, &up[i * n_ff..][..n_ff])
        }),
        Activation::GeGlu => workers.for_chunks(gate, n_ff, |i, gate| {
            arch.gelu_mul(gate, &up[i * n_ff..][..n_ff])
        }),
        Activation::Gelu => workers.for_chunks(up, n_ff, |_, up| arch.gelu(up)),
        Activation::SquaredRelu => workers.for_chunks(up, n_ff, |_, up| squared_relu(up)),
        Activation::Relu => workers.for_chunks(up, n_ff, |_, up| clamp(up, 0.0, f32::INFINITY)),
        Activation::ReGlu => workers.for_chunks(gate, n_ff, |i, gate| {
            relu_mul(gate, &up[i * n_ff..][..n_ff])
        }),
        Activation::SwiGluOai => {
            workers.for_chunks(gate, n_ff, |i, gate| {
                arch.swiglu_oai(gate, &up[i * n_ff..][..n_ff])
            });
        }
        Activation::SwiGluClamped { limit } => {
            workers.for_chunk_pairs(gate, n_ff, up, n_ff, |_, gate, up| {
                clamp(gate, f32::NEG_INFINITY, limit);
                clamp(up, -limit, limit);
                arch.silu_mul(gate, up);
            });
        }
        Activation::SwiGluClampedAfter { limit } => {
            workers.for_chunk_pairs(gate, n_ff, up, n_ff, |_, gate, up| {
                clamp(up, -limit, limit);
                silu_clamped_mul(gate, up, limit);
            });
        }
        Activation::Situ { beta, linear } => {
            workers.for_chunks(gate, n_ff, |i, gate| {
                situ(gate, &up[i * n_ff..][..n_ff], beta, linear);
            });
        }
        Activation::GeGluErf => {
            workers.for_chunks(gate, n_ff, |i, gate| {
                arch.gelu_erf_mul(gate, &up[i * n_ff..][..n_ff])
            });
        }
        Activation::GeluErf => workers.for_chunks(up, n_ff, |_, up| arch.gelu_erf(up)),
        Activation::Xielu {
            alpha_p,
            alpha_n,
            beta,
            eps,
        } => {
            workers.for_chunks(up, n_ff, |_, up| xielu(up, (alpha_p, alpha_n, beta, eps)));
        }
    }
    if ffn.activation.is_gated() { gate } else { up }
}
