//! Components of layers: what one computes, and the memory that it takes.

pub(crate) mod activation;
pub(crate) mod altup;
pub(crate) mod attention;
pub(crate) mod classifier;
pub(crate) mod compressed;
pub(crate) mod context;
pub(crate) mod conv;
pub(crate) mod dense_ffn;
pub(crate) mod embedding_skip;
pub(crate) mod gated_delta;
pub(crate) mod hparams;
pub(crate) mod hyper;
pub(crate) mod indexer;
pub(crate) mod layer;
pub(crate) mod mamba;
pub(crate) mod mamba2;
pub(crate) mod moe;
pub(crate) mod mtp;
pub(crate) mod ngram;
pub(crate) mod norm;
pub(crate) mod outputs;
pub(crate) mod per_layer_embedding;
pub(crate) mod recurrence;
pub(crate) mod recurrent;
pub(crate) mod residual;
pub(crate) mod residual_attention;
pub(crate) mod rope;
pub(crate) mod rows;
pub(crate) mod rwkv;
pub(crate) mod short_conv;
pub(crate) mod sizes;
pub(crate) mod switch;
pub(crate) mod unsupported;

pub use outputs::Outputs;
