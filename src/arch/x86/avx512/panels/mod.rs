//! Panels of this level, by the contents of their words.

pub(in crate::arch) mod bytes;
pub(in crate::arch) mod floats;
pub(in crate::arch) mod integers;
