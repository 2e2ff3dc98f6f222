//! Components of layers: what one computes, and the memory that it takes.

pub(crate) mod activation;
pub(crate) mod altup;
mod conv;
mod gated_delta;
pub(crate) mod latent;
mod mamba;
mod mamba2;
pub(crate) mod norm;
pub(crate) mod outputs;
pub(crate) mod recurrence;
pub(crate) mod recurrent;
pub(crate) mod rope;
pub(crate) mod rows;
mod rwkv;
mod short_conv;

pub use outputs::Outputs;
