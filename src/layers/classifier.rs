//! Head of a reranker, and pooling: specification and weights; `embed` computes them.

use crate::compute::weight::Linear;
use crate::layers::norm::weights::Norm;

/// How the vector of a text is made from the hidden states of its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The first token's.
    Cls,
    /// The last token's.
    Last,
}

/// Head of a reranker: from the pooled hidden states of a pair of texts to its score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClassifierSpec {
    /// How hidden states are pooled.
    pub pooling: Pooling,
    /// Output width of the matrix before the activation; `None`: there is neither.
    pub n_hidden: Option<usize>,
    /// That activation.
    pub activation: ClassifierActivation,
    /// Whether a norm without bias follows it.
    pub norm: bool,
    /// Outputs of the last matrix, of which the first is the score; `None`: there is no such
    /// matrix.
    pub n_label: Option<usize>,
    /// Whether the score is a probability: a softmax over the outputs.
    pub softmax: bool,
}

/// Activation in the head of a reranker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClassifierActivation {
    /// `tanh`.
    Tanh,
    /// GELU by the error function.
    GeluErf,
}

/// Weights of a reranker's head, as far as its specification has them.
#[derive(Clone, Debug)]
pub(crate) struct Classifier {
    pub(crate) hidden: Option<Linear>,
    pub(crate) norm: Option<Norm>,
    pub(crate) output: Option<Linear>,
}
