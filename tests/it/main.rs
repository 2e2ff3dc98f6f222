//! The tests of the library in one program, which links once. `cargo test --release --test it
//! engine::` runs those of one module. A test that needs a process of its own is a file beside this
//! folder.

mod batch;
#[cfg(feature = "chat")]
mod calls;
#[cfg(feature = "chat")]
mod chat;
mod common;
#[cfg(feature = "chat")]
mod conformance_chat;
mod conformance_embeddings;
mod conformance_gguf;
#[cfg(feature = "grammar")]
mod conformance_grammar;
mod conformance_logits;
mod conformance_quant;
mod conformance_tokenizer;
#[cfg(feature = "chat")]
mod conversations;
mod demo;
mod digests;
mod encoder_decoder;
mod engine;
mod families;
mod generate;
mod gguf;
mod gradient;
#[cfg(feature = "grammar")]
mod grammar;
#[cfg(feature = "grammar")]
mod hostile;
mod instructions;
mod invariance;
mod kernels_backward;
mod kernels_elementwise;
mod kernels_gemm;
mod kernels_matvec;
mod kv;
mod lora;
mod measure;
mod merge_adapters;
mod mtp;
mod mutants;
mod pages;
mod plan;
mod prefix;
mod prefix_random;
mod quant;
mod quantize_open;
mod recurrent;
mod run;
mod sample;
mod schedule;
#[cfg(feature = "grammar")]
mod schemas;
mod shared_prompts;
mod shift;
mod shift_schedule;
mod speculate;
mod state;
#[cfg(feature = "grammar")]
mod strictness;
mod tiny;
mod tokenizer;
#[cfg(all(feature = "chat", feature = "grammar"))]
mod tool_schemas;
#[cfg(feature = "chat")]
mod tools;
mod trained;
#[cfg(feature = "vision")]
mod vision;
#[cfg(feature = "vision")]
mod vision_sharing;
