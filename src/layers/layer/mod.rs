//! Layers: their parts and how these are put together.

pub(crate) mod spec;
pub(crate) mod weights;
