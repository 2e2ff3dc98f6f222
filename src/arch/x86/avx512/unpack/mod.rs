//! Block formats as planes, the operands of products with one row and with small batches.

mod grids;
mod k_quants;
pub(super) mod planes;
mod small_blocks;
