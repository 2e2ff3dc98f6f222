//! Models in other types: what each tensor becomes, guided by which importance matrix, and its rows
//! on their way.

mod importance;
mod plan;
mod rows;

pub(crate) use importance::{Importance, ImportanceFormat, Sums};
pub(crate) use plan::{Choice, NamedType, file_type, plan, tensor_type, writer};
pub(crate) use rows::Rows;
#[cfg(feature = "convert")]
pub(crate) use rows::{Change, Conversion};
