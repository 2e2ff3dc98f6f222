//! Feed-forward layers, backwards.

use crate::compute::arena::Frame;
use crate::compute::linear::{Ctx, Product};
use crate::layers::activation::spec::Activation;
use crate::layers::activation::squared_relu;
use crate::layers::dense_ffn::weights::Ffn;
use crate::layers::tape::Tape;

/// Rows of all layers, `(m, n_ff)`.
pub(crate) struct Buffers<'a> {
    pub(crate) gate: &'a mut [f32],
    pub(crate) up: &'a mut [f32],
    inner: &'a mut [f32],
    dinner: &'a mut [f32],
}

impl<'a> Buffers<'a> {
    /// Those of `n` values.
    pub(crate) fn take(frame: &mut Frame<'a>, n: usize) -> Buffers<'a> {
        Buffers {
            gate: frame.take(n),
            up: frame.take(n),
            inner: frame.take(n),
            dinner: frame.take(n),
        }
    }

    /// For a layer whose inner values are to be computed, and whose output is not needed.
    pub(crate) fn rows(&mut self) -> FfnBuffers<'_> {
        FfnBuffers {
            gate: self.gate,
            up: self.up,
            inner: self.inner,
            dinner: self.dinner,
            y: None,
            kept: false,
        }
    }
}

/// Rows of a feed-forward layer; `y` for its output, if it is needed.
pub(crate) struct FfnBuffers<'b> {
    pub(crate) gate: &'b mut [f32],
    pub(crate) up: &'b mut [f32],
    pub(crate) inner: &'b mut [f32],
    pub(crate) dinner: &'b mut [f32],
    pub(crate) y: Option<&'b mut [f32]>,
    /// Whether `gate` and `up` are computed already.
    pub(crate) kept: bool,
}

/// Computes `dx` of `y = down(act(gate(x))·up(x))`, or of `down(act(up(x)))`.
pub(crate) fn feed_forward_backward(
    tape: &mut Tape<'_>,
    ffn: &Ffn,
    x: &[f32],
    m: usize,
    dy: &[f32],
    dx: Option<&mut [f32]>,
    b: FfnBuffers<'_>,
) {
    let Ctx { arch, threads, .. } = tape.ctx;
    let n_ff = ffn.up.w.n_out;
    let [gate, up, inner, dinner] = [b.gate, b.up, b.inner, b.dinner].map(|b| &mut b[..m * n_ff]);
    let workers = threads.when(m > 1);
    match &ffn.gate {
        _ if b.kept => {}
        Some(w_gate) => tape.linear(
            x,
            m,
            &mut [Product::of(w_gate, gate, m), Product::of(&ffn.up, up, m)],
        ),
        None => tape.linear(x, m, &mut [Product::of(&ffn.up, up, m)]),
    }
    workers.for_chunks(inner, n_ff, |i, inner| {
        let (gate, up) = (&gate[i * n_ff..][..n_ff], &up[i * n_ff..][..n_ff]);
        inner.copy_from_slice(if ffn.activation.is_gated() { gate } else { up });
        match ffn.activation {
            Activation::SwiGlu => arch.silu_mul(inner, up),
            Activation::GeGlu => arch.gelu_mul(inner, up),
            Activation::Gelu => arch.gelu(inner),
            Activation::SquaredRelu => squared_relu(inner),
            _ => refused(),
        }
    });
    if let Some(y) = b.y {
        tape.linear(inner, m, &mut [Product::of(&ffn.down, y, m)]);
    }
    tape.linear_backward(inner, m, &[(&ffn.down.w, dy)], Some(dinner));
    let dinner = &*dinner;
    workers.for_chunk_pairs(gate, n_ff, up, n_ff, |i, gate, up| {
        let dinner = &dinner[i * n_ff..][..n_ff];
        match ffn.activation {
            Activation::SwiGlu => arch.silu_mul_backward(gate, up, dinner),
            Activation::GeGlu => arch.gelu_mul_backward(gate, up, dinner),
            Activation::Gelu => arch.gelu_backward(up, dinner),
            Activation::SquaredRelu => up
                .iter_mut()
                .zip(dinner)
                .for_each(|(x, dy)| *x = 2.0 * x.max(0.0) * dy),
            _ => refused(),
        }
    });
    match &ffn.gate {
        Some(w_gate) => tape.linear_backward(x, m, &[(&w_gate.w, gate), (&ffn.up.w, up)], dx),
        None => tape.linear_backward(x, m, &[(&ffn.up.w, up)], dx),
    }
}

/// Called for features that `backward::supports` has refused before.
fn refused() {
    unreachable!("SessionTraining::gradient refuses this model");
}
