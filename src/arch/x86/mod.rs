//! Levels of x86-64.

pub(super) mod amx;
pub(super) mod avx2;
pub(super) mod avx512;
pub(super) mod avx512_bf16;
pub(super) mod avx_vnni;
