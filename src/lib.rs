//! Large-language-model inference inside your own process.

#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod arch;
pub mod bench;
pub mod cache;
#[cfg(feature = "chat")]
pub mod chat;
mod error;
pub mod exec;
pub mod gguf;
pub mod lora;
pub mod model;
pub mod quant;
pub mod sample;
pub mod tokenizer;

pub use error::*;
