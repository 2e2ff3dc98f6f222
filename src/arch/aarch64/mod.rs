//! Levels of 64-bit Arm.

pub(super) mod dotprod;
pub(super) mod i8mm;
pub(super) mod neon;
