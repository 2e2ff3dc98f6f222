//! The shared attention on four lanes.

use super::elementwise::zero;
use crate::arch::generic::instances::attention_kernels;
use crate::arch::kv::{kv_kernels, load_kernel};

kv_kernels!("simd128");
load_kernel!("simd128");
attention_kernels!("simd128", zero());
