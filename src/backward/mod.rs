//! Gradients of adapters through a forward pass; what a component computes for them is beside its
//! forward code, in `layers/…/backward.rs`.

mod buffers;
pub(crate) mod driver;
pub(crate) mod objective;
pub(crate) mod saved;
mod stage;
pub(crate) mod supports;
