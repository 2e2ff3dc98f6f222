//! Components of layers: what one computes, and the memory that it takes.

pub(crate) mod activation;
pub(crate) mod altup;
pub(crate) mod attention;
pub(crate) mod classifier;
pub(crate) mod context;
pub(crate) mod conv;
pub(crate) mod dense_ffn;
pub(crate) mod diffusion;
pub(crate) mod gated_delta;
pub(crate) mod headed_mamba;
pub(crate) mod hparams;
pub(crate) mod layer;
pub(crate) mod lightning;
pub(crate) mod mamba;
pub(crate) mod mamba2;
pub(crate) mod moe;
pub(crate) mod mtp;
pub(crate) mod norm;
pub(crate) mod outputs;
pub(crate) mod per_layer_embedding;
pub(crate) mod recurrence;
pub(crate) mod recurrent;
pub(crate) mod residual;
pub(crate) mod rope;
pub(crate) mod rows;
pub(crate) mod rwkv;
pub(crate) mod short_conv;
pub(crate) mod sizes;
pub(crate) mod stacks;
pub(crate) mod unsupported;

pub use outputs::Outputs;
