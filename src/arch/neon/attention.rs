//! The shared attention on four lanes.
//!
//! Instructions per product of the widest register tile, four query rows that share the loads of keys
//! (`tests/neon_instructions.py`), and what four 128-bit pipes at 4.4 GHz make of it at most: 0.50 for `f32`,
//! 35 billion products per second; 0.58 for half precision, 30. One query row takes 0.5 and 0.75, less than
//! the caches of a core deliver for.

use super::elementwise::zero;
use crate::arch::kv::{kv_kernels, load_kernel};
use crate::arch::lanes::attention_kernels;

kv_kernels!("neon");
load_kernel!("neon");
attention_kernels!("neon", zero());
