//! Models in other types: what each tensor becomes, as users say it, and its rows on their way.

mod knapsack;
mod plan;
mod rows;

pub(crate) use knapsack::{Candidate, choose};
pub(crate) use plan::*;
pub(crate) use rows::Rows;
