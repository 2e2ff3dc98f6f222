//! Softmax attention over keys and values of earlier tokens.

pub(crate) mod spec;
pub(crate) mod weights;
