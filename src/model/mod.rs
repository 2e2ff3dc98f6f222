//! TODO model
