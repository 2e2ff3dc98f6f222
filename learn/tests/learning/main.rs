//! The tests of learning in one program, which links once, with the models and sessions of the
//! library's tests.

mod behaviour;
#[allow(dead_code)] // the library's tests use all of it
#[path = "../../../tests/it/common/mod.rs"]
mod common;
mod learn;
mod memory;
#[path = "../../../tests/it/run/mod.rs"]
mod run;
mod sona;
#[path = "../../../tests/it/tiny/mod.rs"]
mod tiny;
mod train;
