//! Kernels written once over a vector type, and instantiated by each level under its
//! `#[target_feature]`.
//!
//! Only what differs between instruction sets in spelling and width is shared this way: `f32`
//! arithmetic. Integer dot products differ in shape and stay in the levels' own files.

pub(in crate::arch) mod attention;
pub(super) mod attention_backward;
pub(in crate::arch) mod attention_codes;
mod elementwise;
pub(super) mod instances;
pub(super) mod kv_blocks;
pub(super) mod lanes;
pub(super) mod matvec;
pub(super) mod packing;
#[cfg(any(target_arch = "x86_64", target_feature = "simd128"))]
pub(super) mod panels;
mod recurrence;

/// The source of the kernels of `declared.rs`.
pub(super) mod slices {
    pub(in crate::arch) use super::elementwise::*;
    pub(in crate::arch) use super::recurrence::*;
}

#[cfg(test)]
pub(super) use lanes::tests;
