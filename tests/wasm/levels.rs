//! Tests of `tests/it` that every instruction-set level has to pass, for WebAssembly: built for
//! `wasm32-wasip1` and run by `wasi.mjs`.

#![allow(dead_code)] // the modules they share have more than they use

#[path = "../it/common/mod.rs"]
mod common;
#[path = "../it/conformance_logits.rs"]
mod conformance_logits;
#[path = "../it/kernels_backward.rs"]
mod kernels_backward;
#[path = "../it/kernels_elementwise.rs"]
mod kernels_elementwise;
#[path = "../it/kernels_gemm.rs"]
mod kernels_gemm;
#[path = "../it/kernels_matvec.rs"]
mod kernels_matvec;
#[path = "../it/run/mod.rs"]
mod run;
