//! Mamba 1.

use crate::layers::conv::spec::ConvSpec;

/// Epsilon of norms without weights, which files lack (Hugging Face
/// `FalconMambaConfig.mixer_rms_eps`).
const PLAIN_EPS: f32 = 1e-6;

/// Mamba 1: each channel has a state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MambaSpec {
    /// Channels.
    pub n_inner: usize,
    /// Values of a channel's state.
    pub n_state: usize,
    /// Width of what time steps are products with.
    pub dt_rank: usize,
    /// Tokens that the convolution sees.
    pub n_tap: usize,
    /// Norms of time steps and of what goes into and out of the state.
    pub norms: MambaNorms,
}

/// Norms of Mamba 1 between its matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MambaNorms {
    /// None.
    #[default]
    None,
    /// With weights (Jamba).
    Weighted,
    /// Without weights (Falcon Mamba).
    Plain,
}

impl MambaSpec {
    /// The convolution before the state.
    pub(crate) fn conv(&self) -> ConvSpec {
        ConvSpec {
            n_channel: self.n_inner,
            n_tap: self.n_tap,
        }
    }

    /// Epsilon of its norms, where the model's is `of_model`.
    pub(crate) fn norm_eps(&self, of_model: f32) -> f32 {
        match self.norms {
            MambaNorms::Plain => PLAIN_EPS,
            MambaNorms::None | MambaNorms::Weighted => of_model,
        }
    }

    /// Channels whose states lie side by side: the largest power of two that divides them, within
    /// what a kernel computes together, so that it reads memory from front to back.
    pub(crate) fn n_block(&self) -> usize {
        (1 << self.n_inner.trailing_zeros()).min(64)
    }
}
