//! The shared attention on sixteen lanes.

use crate::arch::avx512::elementwise::zero;
use crate::arch::avx512::kv::load_kv;
use crate::arch::kv::kv_kernels;
use crate::arch::lanes::attention_kernels;

kv_kernels!("avx512f,avx512bw,avx512vl,avx512dq");
attention_kernels!("avx512f,avx512bw,avx512vl,avx512dq", zero());
