//! WebAssembly: a module either has the instructions of a level or does not load, so the build
//! decides (`RUSTFLAGS="-C target-feature=+simd128"`), not detection. Intrinsics are safe there.

pub(super) mod simd128;
