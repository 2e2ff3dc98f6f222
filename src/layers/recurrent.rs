//! Recurrent mixers: what they share.
//!
//! A recurrence has a state that every token changes, fed by values of that token, and gives some
//! values out. A mixer is products with matrices, which take all tokens of a pass together, and
//! recurrences between them, which take one token after the other: so neither the sizes of passes
//! nor their other tokens change a bit. The state is the sequence's, see `kv/sequence/recurrent.rs`.

pub(crate) mod spec;
pub(crate) mod weights;

use crate::compute::arena::{Frame, counted};
use crate::compute::linear::Product;
use crate::kv::CellShape;
use crate::layers::context::Context;
use crate::layers::conv::CausalConv;
use crate::layers::recurrence::Mixing;
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::layers::recurrent::weights::Recurrent;
use crate::layers::residual::Residual;
use crate::layers::rows::Rows;
use crate::layers::{gated_delta, headed_mamba, lightning, mamba, mamba2, rwkv, short_conv};

/// The recurrences of a mixer.
pub(crate) fn cells(spec: &RecurrentSpec) -> Vec<CellShape> {
    match spec {
        RecurrentSpec::ShortConv(spec) => vec![CausalConv::cell(*spec)],
        RecurrentSpec::Mamba(spec) => mamba::cells(spec).to_vec(),
        RecurrentSpec::Mamba2(spec) => mamba2::cells(spec).to_vec(),
        RecurrentSpec::Delta(spec) => gated_delta::cells(spec).to_vec(),
        RecurrentSpec::HeadedMamba(spec) => headed_mamba::cells(spec).to_vec(),
        RecurrentSpec::Lightning(spec) => lightning::cells(spec).to_vec(),
        RecurrentSpec::TimeMix(spec) => rwkv::time_cells(spec).to_vec(),
        RecurrentSpec::ChannelMix(spec) => rwkv::channel_cells(spec).to_vec(),
    }
}

/// Bytes of its buffers for `m` rows.
pub(crate) fn bytes(spec: &RecurrentSpec, m: usize) -> usize {
    match spec {
        RecurrentSpec::ShortConv(spec) => {
            counted(|frame| short_conv::Buffers::take(frame, *spec, m))
        }
        RecurrentSpec::Mamba(spec) => counted(|frame| mamba::Buffers::take(frame, spec, m)),
        RecurrentSpec::Mamba2(spec) => counted(|frame| mamba2::Buffers::take(frame, spec, m)),
        RecurrentSpec::Delta(spec) => counted(|frame| gated_delta::Buffers::take(frame, spec, m)),
        RecurrentSpec::HeadedMamba(spec) => {
            counted(|frame| headed_mamba::Buffers::take(frame, spec, m))
        }
        RecurrentSpec::Lightning(spec) => counted(|frame| lightning::Buffers::take(frame, spec, m)),
        RecurrentSpec::TimeMix(spec) => counted(|frame| rwkv::TimeBuffers::take(frame, spec, m)),
        RecurrentSpec::ChannelMix(spec) => {
            counted(|frame| rwkv::ChannelBuffers::take(frame, spec, m))
        }
    }
}

/// Recurrent mixer on `s.normed`; leaves its output for the rows of the layer in `s.branch`. All
/// rows change the state.
pub(crate) fn mixer(
    cx: &mut Context<'_, '_>,
    (spec, w): (&RecurrentSpec, &Recurrent),
    s: &mut Residual<'_>,
    inner: &mut [u8],
    first_values: &mut [f32],
) {
    let n_embd = cx.h.n_embd;
    let mut pass = Mixing {
        cx: &mut *cx,
        first_values,
    };
    let m = s.normed.len() / n_embd;
    let mixed = mix(&mut pass, (spec, w), (s.normed, m), &mut Frame::of(inner));
    let n_in = w.output().map_or(n_embd, |output| output.w.n_in);
    if cx.rows == Rows::Outputs {
        cx.gather(mixed, n_in);
    }
    let m = cx.n_rows();
    if m == 0 {
        return;
    }
    let (mixed, branch) = (&mixed[..m * n_in], &mut s.branch[..m * n_embd]);
    match w.output() {
        Some(w) => cx
            .of_rows()
            .linear(mixed, m, &mut [Product::of(w, branch, m)]),
        None => branch.copy_from_slice(mixed),
    }
}

/// What the mixer makes of `m` rows of `x`, to be multiplied by its output matrix if it has one.
fn mix<'a>(
    pass: &mut Mixing<'_, '_, '_>,
    (spec, w): (&RecurrentSpec, &Recurrent),
    (x, m): (&[f32], usize),
    frame: &mut Frame<'a>,
) -> &'a mut [f32] {
    match (spec, w) {
        (RecurrentSpec::ShortConv(spec), Recurrent::ShortConv(w)) => {
            short_conv::mix(pass, *spec, w, (x, m), frame)
        }
        (RecurrentSpec::Mamba(spec), Recurrent::Mamba(w)) => {
            mamba::mix(pass, spec, w, (x, m), frame)
        }
        (RecurrentSpec::Mamba2(spec), Recurrent::Mamba2(w)) => {
            mamba2::mix(pass, spec, w, (x, m), frame)
        }
        (RecurrentSpec::Delta(spec), Recurrent::Delta(w)) => {
            gated_delta::mix(pass, spec, w, (x, m), frame)
        }
        (RecurrentSpec::HeadedMamba(spec), Recurrent::HeadedMamba(w)) => {
            headed_mamba::mix(pass, spec, w, (x, m), frame)
        }
        (RecurrentSpec::Lightning(spec), Recurrent::Lightning(w)) => {
            lightning::mix(pass, spec, w, (x, m), frame)
        }
        (RecurrentSpec::TimeMix(spec), Recurrent::TimeMix(w)) => {
            rwkv::time_mix(pass, spec, w, (x, m), frame)
        }
        (RecurrentSpec::ChannelMix(spec), Recurrent::ChannelMix(w)) => {
            rwkv::channel_mix(pass, spec, w, (x, m), frame)
        }
        _ => unreachable!("weights are bound by specification"),
    }
}
