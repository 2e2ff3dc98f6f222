//! The shared attention on eight lanes.

use crate::arch::avx2::elementwise::zero;
use crate::arch::kv::{kv_kernels, load_kernel};
use crate::arch::lanes::attention_kernels;

kv_kernels!("avx2,fma,f16c");
load_kernel!("avx2,fma,f16c");
attention_kernels!("avx2,fma,f16c", zero());
