//! TODO sample
