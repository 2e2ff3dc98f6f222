//! TODO arch
