//! What comes into the program and what leaves it.

mod input;
pub(crate) mod measured;
pub(crate) mod memory;
mod output;

pub(crate) use input::*;
pub(crate) use output::*;
