//! The safe methods of [`Arch`](super::Arch): they check shapes, then call a level's kernels.

mod attention;
mod kv;
mod products;
mod slices;

pub use attention::{AttnBackward, KvElement};
pub use products::TransposedProduct;
