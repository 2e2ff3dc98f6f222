//! Gates of the output of attention: factors from the layer's input, for each value or for each
//! head.

use crate::compute::linear::Ctx;
use crate::layers::activation::sigmoid;
use crate::layers::attention::spec::AttnSpec;
use crate::layers::mamba2::softplus;

/// The output `attn` of `m` rows, `(m, n_mixed)`, gated by the products in `gate`, `(m, n_gate)`. It
/// lies in one of the buffers if there is a gate; `gated` has room for gates of heads, or by
/// softplus.
pub(super) fn apply<'a>(
    ctx: Ctx<'_>,
    spec: &AttnSpec,
    attn: &'a [f32],
    (gate, gated): (&'a mut [f32], &'a mut [f32]),
    m: usize,
) -> &'a [f32] {
    let (arch, workers, n) = (ctx.arch, ctx.threads.when(m > 1), spec.n_mixed());
    if !spec.gated {
        return attn;
    }
    if !spec.gate_by_head && !spec.gate_softplus {
        workers.for_chunks(gate, n, |row, gate| {
            arch.sigmoid_mul(gate, &attn[row * n..][..n])
        });
        return gate;
    }
    let (gate, n_gate) = (&*gate, spec.n_gate());
    let n_each = n / n_gate;
    workers.for_chunks(gated, n, |row, gated| {
        let attn = attn[row * n..][..n].chunks_exact(n_each);
        let of_row = gate[row * n_gate..].iter().zip(attn);
        for (to, (&gate, attn)) in gated.chunks_exact_mut(n_each).zip(of_row) {
            let factor = if spec.gate_softplus {
                softplus(gate)
            } else {
                sigmoid(gate)
            };
            to.iter_mut().zip(attn).for_each(|(to, x)| *to = x * factor);
        }
    });
    gated
}
