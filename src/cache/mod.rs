//! TODO cache
