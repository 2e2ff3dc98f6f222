//! Models in other types: what each tensor becomes, and its rows on their way.

mod plan;
mod rows;

pub(crate) use plan::{file_type, plan, writer};
pub(crate) use rows::Rows;
#[cfg(feature = "convert")]
pub(crate) use rows::{Change, Conversion};
