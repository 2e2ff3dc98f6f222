//! Weights of recurrent mixers.

use crate::compute::weight::Linear;
use crate::layers::gated_delta::weights::Delta;
use crate::layers::headed_mamba::weights::HeadedMamba;
use crate::layers::lightning::weights::Lightning;
use crate::layers::mamba::weights::Mamba;
use crate::layers::mamba2::weights::Mamba2;
use crate::layers::rwkv::weights::{ChannelMix, TimeMix};
use crate::layers::short_conv::weights::ShortConv;

/// Weights of a recurrent mixer.
#[derive(Clone, Debug)]
pub(crate) enum Recurrent {
    ShortConv(Box<ShortConv>),
    Mamba(Box<Mamba>),
    Mamba2(Box<Mamba2>),
    Delta(Box<Delta>),
    HeadedMamba(Box<HeadedMamba>),
    Lightning(Box<Lightning>),
    TimeMix(Box<TimeMix>),
    ChannelMix(Box<ChannelMix>),
}

impl Recurrent {
    /// From what it makes of tokens to the residual stream, if that is not its output already.
    pub(crate) fn output(&self) -> Option<&Linear> {
        match self {
            Recurrent::ShortConv(w) => Some(&w.output),
            Recurrent::Mamba(w) => Some(&w.output),
            Recurrent::Mamba2(w) => Some(&w.output),
            Recurrent::Delta(w) => Some(&w.output),
            Recurrent::HeadedMamba(w) => Some(&w.output),
            Recurrent::Lightning(w) => Some(&w.output),
            Recurrent::TimeMix(w) => Some(&w.output),
            Recurrent::ChannelMix(_) => None,
        }
    }
}
