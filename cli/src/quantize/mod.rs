//! Rows of tensors on their way from one type to another.

pub(crate) mod rows;
