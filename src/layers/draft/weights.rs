//! Weights of a model that drafts for another.

use crate::compute::weight::{Linear, Weight};
use crate::layers::attention::spec::AttnSpec;
use crate::layers::dense_ffn::weights::Ffn;
use crate::layers::norm::weights::Norm;
use crate::layers::rope::weights::RopeFactors;
use crate::quant::DType;

/// Weights of a drafter: what is not there is the other model's.
#[derive(Clone, Debug)]
pub(crate) struct DraftWeights {
    pub(crate) input: DraftInput,
    pub(crate) layers: Vec<DraftLayer>,
    pub(crate) output_norm: Norm,
    pub(crate) token_embd: Option<Weight>,
    pub(crate) output: Option<Linear>,
    /// The token of each row of its output, if that has rows for some alone.
    pub(crate) tokens: Option<Vec<u32>>,
    pub(crate) rope_factors: RopeFactors,
    /// Every combination of format and row length among the matrices.
    pub(crate) shapes: Vec<(DType, usize)>,
}

/// How a drafter takes in what it reads of the other model.
#[derive(Clone, Debug)]
pub(crate) enum DraftInput {
    /// `fc·features`, and a norm before or behind.
    Features { fc: Linear, norm: Option<Norm> },
    /// `pre·[embedding; state]`, and `post`, which makes the next state.
    States { pre: Linear, post: Linear },
}

/// Weights of one layer of a drafter.
#[derive(Clone, Debug)]
pub(crate) struct DraftLayer {
    pub(crate) attn: AttnSpec,
    pub(crate) norm: Norm,
    /// Norm of the features beside the embeddings.
    pub(crate) feature_norm: Option<Norm>,
    pub(crate) wq: Linear,
    pub(crate) q_norm: Option<Vec<f32>>,
    /// If it has keys and values of its own.
    pub(crate) kv: Option<DraftKv>,
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) wo: Linear,
    pub(crate) post_attn_norm: Option<Norm>,
    pub(crate) ffn_norm: Norm,
    pub(crate) ffn: Ffn,
    pub(crate) post_ffn_norm: Option<Norm>,
    /// Factor on the residual stream behind it.
    pub(crate) scale: f32,
}

/// Matrices of keys and values; without one of values, these are normed keys.
#[derive(Clone, Debug)]
pub(crate) struct DraftKv {
    pub(crate) wk: Linear,
    pub(crate) wv: Option<Linear>,
    pub(crate) k_norm: Option<Vec<f32>>,
}
