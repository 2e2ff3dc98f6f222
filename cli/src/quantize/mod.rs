//! Models in other types: what each tensor becomes, guided by which importance matrix, and its rows
//! on their way.

mod importance;
mod knapsack;
mod plan;
mod rows;

pub(crate) use importance::{Importance, ImportanceFormat, Sums};
pub(crate) use knapsack::{Candidate, choose};
pub(crate) use plan::{Choice, NamedType, file_type, plan, tensor_type};
pub(crate) use rows::Rows;
