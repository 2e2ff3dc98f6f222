//! TODO exec
