//! Gated short convolution (LFM2, arXiv 2511.23404): `c·conv(b·x)`, where `b`, `c` and `x` are
//! products with the input.

pub(crate) mod weights;

use crate::compute::arena::Frame;
use crate::compute::linear::Product;
use crate::layers::conv::CausalConv;
use crate::layers::conv::spec::ConvSpec;
use crate::layers::recurrence::Mixing;
use crate::layers::short_conv::weights::ShortConv;

pub(crate) struct Buffers<'a> {
    /// `b`, `c`, `x`: `(m, 3·n_channel)`.
    input: &'a mut [f32],
    /// `b·x`, `(m, n_channel)`.
    feed: &'a mut [f32],
    by_part: &'a mut [f32],
    out: &'a mut [f32],
}

impl<'a> Buffers<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, spec: ConvSpec, m: usize) -> Buffers<'a> {
        let n = m * spec.n_channel;
        Buffers {
            input: frame.take(3 * n),
            feed: frame.take(n),
            by_part: frame.take(n),
            out: frame.take(n),
        }
    }
}

/// What the output matrix is multiplied by, `(m, n_channel)`.
pub(crate) fn mix<'a>(
    pass: &mut Mixing<'_, '_, '_>,
    spec: ConvSpec,
    w: &ShortConv,
    (x, m): (&[f32], usize),
    frame: &mut Frame<'a>,
) -> &'a mut [f32] {
    let Buffers {
        input,
        feed,
        by_part,
        out,
    } = Buffers::take(frame, spec, m);
    let n = spec.n_channel;
    pass.linear(x, m, &mut [Product::of(&w.input, input, m)]);
    for (feed, input) in feed.chunks_exact_mut(n).zip(input.chunks_exact(3 * n)) {
        let (b, x) = (&input[..n], &input[2 * n..]);
        feed.iter_mut()
            .zip(b.iter().zip(x))
            .for_each(|(feed, (b, x))| *feed = b * x);
    }
    pass.recur(
        &CausalConv {
            spec,
            w: &w.conv,
            silu: false,
        },
        (feed, n),
        by_part,
        out,
    );
    for (out, input) in out.chunks_exact_mut(n).zip(input.chunks_exact(3 * n)) {
        out.iter_mut()
            .zip(&input[n..2 * n])
            .for_each(|(out, c)| *out *= c);
    }
    out
}
