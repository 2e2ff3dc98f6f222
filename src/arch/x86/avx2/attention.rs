//! The shared attention on eight lanes.

use super::elementwise::zero;
use crate::arch::generic::instances::attention_kernels;
use crate::arch::kv::{kv_kernels, load_kernel};

kv_kernels!("avx2,fma,f16c");
load_kernel!("avx2,fma,f16c");
attention_kernels!("avx2,fma,f16c", zero());
