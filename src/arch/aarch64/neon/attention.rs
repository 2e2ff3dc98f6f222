//! The shared attention on four lanes.
//!
//! Instructions per product of the widest register tile, four query rows that share the loads of
//! values (`tests/neon_instructions.py`), and what four 128-bit pipes at 4.4 GHz make of it at
//! most: 0.53 for `f32`, 33 billion products per second; 0.61 for half precision, 29. Executed
//! for heads of 128, softmax and prefetching included: 0.61 and 0.64; for one query row 1.09 and
//! 1.17, which reads 64 and 30 GB/s.

use super::elementwise::zero;
use crate::arch::generic::instances::attention_kernels;
use crate::arch::kv::{kv_kernels, load_kernel};

kv_kernels!("neon");
load_kernel!("neon");
attention_kernels!("neon", zero());
