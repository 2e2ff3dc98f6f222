//! Gradients of adapters through a forward pass.

mod attention;
mod buffers;
pub(crate) mod driver;
mod feed_forward;
pub(crate) mod objective;
pub(crate) mod saved;
pub(crate) mod supports;
pub(crate) mod tape;
