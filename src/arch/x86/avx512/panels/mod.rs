//! The panels of this level, by what their words hold.

pub(in crate::arch) mod bytes;
pub(in crate::arch) mod floats;
pub(in crate::arch) mod integers;
