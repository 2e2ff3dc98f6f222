//! Weights of a layer.

use crate::layers::altup::weights::AltUp;
use crate::layers::attention::weights::Attn;
use crate::layers::compressed::weights::Compressed;
use crate::layers::cross::weights::CrossAttn;
use crate::layers::dense_ffn::weights::Ffn;
use crate::layers::hyper::weights::HyperLayer;
use crate::layers::moe::weights::Moe;
use crate::layers::ngram::weights::Ngrams;
use crate::layers::norm::weights::Norm;
use crate::layers::per_layer_embedding::PerLayer;
use crate::layers::recurrent::weights::Recurrent;
use crate::layers::residual_attention::ResidualScores;
use crate::layers::switch::weights::SwitchLayer;

/// Weights of one layer; an absent norm is skipped.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub(crate) attn_norm: Option<Norm>,
    pub(crate) attn: Option<Attn>,
    pub(crate) recurrent: Option<Recurrent>,
    pub(crate) compressed: Option<Box<Compressed>>,
    /// Attention to an encoder's memory.
    pub(crate) cross: Option<Box<CrossAttn>>,
    pub(crate) post_attn_norm: Option<Norm>,
    /// Norm of the sum of the layer's input and what `post_attn_norm` leaves of the residual stream
    /// (Jina BERT 2 of code).
    pub(crate) input_norm: Option<Norm>,
    pub(crate) ffn_norm: Option<Norm>,
    pub(crate) ffn: FeedForward,
    pub(crate) post_ffn_norm: Option<Norm>,
    pub(crate) per_layer: Option<PerLayer>,
    pub(crate) alt_up: Option<Box<AltUp>>,
    /// Factor on the residual stream after the layer.
    pub(crate) output_scale: Option<f32>,
    /// Factor on the embeddings that are added after the layer.
    pub(crate) embd_skip: Option<f32>,
    /// How it reads and changes several residual streams.
    pub(crate) hyper: Option<Box<HyperLayer>>,
    /// Embeddings of several tokens that it adds.
    pub(crate) ngrams: Option<Box<Ngrams>>,
    /// How it reads checkpoints of the residual stream.
    pub(crate) residual_scores: Option<ResidualScores>,
    /// Adapters of its matrices that tokens choose.
    pub(crate) switch: Option<Box<SwitchLayer>>,
}

/// Feed-forward part of a layer.
#[derive(Clone, Debug)]
pub(crate) enum FeedForward {
    Dense(Box<Ffn>),
    Moe(Box<Moe>),
    Both(Box<Both>),
    Beside(Box<Beside>),
    None,
}

/// A dense layer beside a mixture, without norms of their outputs.
#[derive(Clone, Debug)]
pub(crate) struct Beside {
    pub(crate) dense: Ffn,
    pub(crate) moe: Moe,
    /// Norm of the layer's input, if the mixture reads that.
    pub(crate) moe_norm: Option<Norm>,
    /// Factor on the sum of both.
    pub(crate) scale: f32,
}

/// A dense layer beside a mixture, with norms of both.
#[derive(Clone, Debug)]
pub(crate) struct Both {
    pub(crate) dense: Ffn,
    /// Norm of the dense layer's output.
    pub(crate) post_dense_norm: Norm,
    /// Norms of the mixture's input and output.
    pub(crate) moe_norm: Norm,
    pub(crate) moe: Moe,
    pub(crate) post_moe_norm: Norm,
}
