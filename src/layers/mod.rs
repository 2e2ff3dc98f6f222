//! Components of layers: what one computes, and the memory that it takes.

pub(crate) mod activation;
pub(crate) mod altup;
pub(crate) mod attention;
pub(crate) mod context;
mod conv;
pub(crate) mod dense_ffn;
pub(crate) mod embedding;
mod gated_delta;
mod mamba;
mod mamba2;
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
mod rwkv;
mod short_conv;

pub use outputs::Outputs;
