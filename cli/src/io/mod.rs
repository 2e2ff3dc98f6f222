//! What comes into the program and what leaves it: terminal, files, JSON, sizes, times, tables, and
//! what is told of a machine and of a model. Knows no flag and no command.

pub(crate) mod bars;
#[cfg(feature = "chat")]
pub(crate) mod conversations;
mod failure;
mod input;
mod interrupt;
mod json;
#[cfg(feature = "chat")]
pub(crate) mod lines;
pub(crate) mod measured;
pub(crate) mod memory;
mod output;
#[cfg(feature = "vision")]
pub(crate) mod picture;
pub(crate) mod plot;
mod progress;
pub(crate) mod runnable;
mod size;
#[cfg(feature = "chat")]
pub(crate) mod slash;
pub(crate) mod table;
mod terminal;
mod time;

pub(crate) use failure::{Failure, check_overwrite};
pub(crate) use input::*;
pub(crate) use interrupt::on_interrupt;
pub(crate) use json::*;
pub(crate) use output::{print, print_json};
pub(crate) use progress::Progress;
pub(crate) use size::{count, parse_size, size};
pub(crate) use terminal::*;
pub(crate) use time::*;
