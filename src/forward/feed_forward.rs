//! Dense feed-forward layers, and both kinds together.

use crate::compute::linear::{Ctx, Product, Scratch, linear_from};
use crate::compute::probe::Tap;
use crate::forward::buffers::FfnBuffers;
use crate::forward::{FFN_DOWN, LayerAt, Pause};
use crate::layers::activation::{clamp, gaussian_top_k, relu_mul, squared_relu, xielu};
use crate::model::{Activation, Ffn};

/// `y = down(act(gate(x))·up(x))`, or `down(act(up(x)))`; `show` is called with `gate(x)` and
/// `up(x)`.
pub(super) fn feed_forward(
    ctx: Ctx<'_>,
    scratch: &mut Scratch<'_>,
    ffn: &Ffn,
    x: &[f32],
    m: usize,
    inner: FfnBuffers<'_>,
    y: &mut [f32],
    show: impl FnMut(Tap, &[f32]),
) {
    feed_forward_from(
        ctx,
        scratch,
        ffn,
        x,
        m,
        inner,
        y,
        (&mut LayerAt::default(), None),
        show,
    );
}

/// [`feed_forward`] from where it paused to where it pauses; returns whether it is complete.
pub(super) fn feed_forward_from(
    ctx: Ctx<'_>,
    scratch: &mut Scratch<'_>,
    ffn: &Ffn,
    x: &[f32],
    m: usize,
    FfnBuffers { gate, up }: FfnBuffers<'_>,
    y: &mut [f32],
    (at, pause): (&mut LayerAt, Option<Pause<'_>>),
    mut show: impl FnMut(Tap, &[f32]),
) -> bool {
    if at.part != FFN_DOWN {
        let of_up = Product::of(&ffn.up, up, m);
        let is_complete = match &ffn.gate {
            Some(w) => linear_at(
                ctx,
                scratch,
                x,
                m,
                &mut [Product::of(w, gate, m), of_up],
                (&mut *at, pause),
            ),
            None => linear_at(ctx, scratch, x, m, &mut [of_up], (&mut *at, pause)),
        };
        if !is_complete {
            return false;
        }
        if ffn.gate.is_some() {
            show(Tap::FfnGate, gate);
        }
        show(Tap::FfnUp, up);
        if let Some(n) = ffn.sparsity {
            ctx.crew
                .when(m > 1)
                .for_chunks(gate, ffn.up.w.n_out, |_, gate| gaussian_top_k(gate, n));
        }
        activate(ctx, ffn, m, gate, up);
        if at.pauses_before(at.layer, FFN_DOWN, pause) {
            return false;
        }
    }
    let inner = if ffn.activation.is_gated() { gate } else { up };
    linear_at(
        ctx,
        scratch,
        inner,
        m,
        &mut [Product::of(&ffn.down, y, m)],
        (at, pause),
    )
}

/// [`linear`] from where it paused to where it pauses; returns whether it is complete.
pub(super) fn linear_at(
    ctx: Ctx<'_>,
    scratch: &mut Scratch<'_>,
    x: &[f32],
    m: usize,
    products: &mut [Product<'_>],
    (at, pause): (&mut LayerAt, Option<Pause<'_>>),
) -> bool {
    let here = *at;
    let pause = pause.map(|pause| move || pause(here));
    let pause = pause.as_ref().map(|pause| pause as &dyn Fn() -> bool);
    linear_from(ctx, scratch, x, m, products, &mut at.n_tiles, pause)
}

/// The activation of `m` rows of a feed-forward layer; the result replaces `gate` or `up`.
pub(super) fn activate<'a>(
    ctx: Ctx<'_>,
    ffn: &Ffn,
    m: usize,
    gate: &'a mut [f32],
    up: &'a mut [f32],
) -> &'a [f32] {
    let (arch, workers, n_ff) = (ctx.arch, ctx.crew.when(m > 1), ffn.up.w.n_out);
    match ffn.activation {
        Activation::SwiGlu => workers.for_chunks(gate, n_ff, |i, gate| {
            arch.silu_mul(gate, &up[i * n_ff..][..n_ff])
        }),
        Activation::GeGlu => workers.for_chunks(gate, n_ff, |i, gate| {
            arch.gelu_mul(gate, &up[i * n_ff..][..n_ff])
        }),
        Activation::Gelu => workers.for_chunks(up, n_ff, |_, up| arch.gelu(up)),
        Activation::SquaredRelu => workers.for_chunks(up, n_ff, |_, up| squared_relu(up)),
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
