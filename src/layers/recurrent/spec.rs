//! Recurrent mixer of one layer.

use crate::layers::conv::spec::ConvSpec;
use crate::layers::gated_delta::spec::DeltaSpec;
use crate::layers::headed_mamba::spec::HeadedMambaSpec;
use crate::layers::lightning::spec::LightningSpec;
use crate::layers::mamba::spec::MambaSpec;
use crate::layers::mamba2::spec::Mamba2Spec;
use crate::layers::rwkv::spec::{ChannelMixSpec, TimeMixSpec};

/// Recurrent mixer of one layer.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RecurrentSpec {
    /// Gated short convolution (LFM2).
    ShortConv(ConvSpec),
    /// Mamba 1 (arXiv 2312.00752).
    Mamba(MambaSpec),
    /// Mamba 2 (arXiv 2405.21060).
    Mamba2(Mamba2Spec),
    /// Gated delta rule (arXiv 2412.06464).
    Delta(DeltaSpec),
    /// Mamba of PLaMo 2.
    HeadedMamba(HeadedMambaSpec),
    /// Lightning attention (arXiv 2401.04658).
    Lightning(LightningSpec),
    /// Time mix of RWKV (arXiv 2404.05892, 2503.14456).
    TimeMix(TimeMixSpec),
    /// Channel mix of RWKV.
    ChannelMix(ChannelMixSpec),
}

impl RecurrentSpec {
    /// What it is.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            RecurrentSpec::ShortConv(_) => "short convolutions",
            RecurrentSpec::Mamba(_) | RecurrentSpec::Mamba2(_) | RecurrentSpec::HeadedMamba(_) => {
                "state spaces"
            }
            RecurrentSpec::Lightning(_) => "lightning attention",
            RecurrentSpec::Delta(_) => "delta rules",
            RecurrentSpec::TimeMix(_) | RecurrentSpec::ChannelMix(_) => "RWKV",
        }
    }
}
