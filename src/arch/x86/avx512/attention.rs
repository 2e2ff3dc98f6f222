//! The shared attention on sixteen lanes.

use super::elementwise::zero;
use super::kv::load_kv;
use crate::arch::generic::instances::attention_kernels;

attention_kernels!("avx512f,avx512bw,avx512vl,avx512dq", zero());
