//! Groups of flags that several commands have, and what comes of them: a model, an engine, a
//! session, a sampler, drafters, a learner. Knows no command.

mod cache_type;
mod demo;
mod diffusion;
mod engine;
#[cfg(feature = "grammar")]
mod grammar;
#[cfg(feature = "vision")]
mod images;
mod learn;
pub(crate) mod llama_cpp;
mod lora;
mod memory;
mod model;
#[cfg(feature = "chat")]
mod notes;
mod overwrite;
mod recipe;
pub(crate) mod renamed;
mod rope;
mod sampling;
mod session;
mod speculation;
#[cfg(feature = "chat")]
pub(crate) mod template;
mod text;
mod threads;

pub(crate) use cache_type::CacheTypeArgs;
pub(crate) use demo::demo_metadata;
pub(crate) use diffusion::DiffusionArgs;
pub(crate) use engine::{engine, tell_failure};
#[cfg(feature = "serve")]
pub(crate) use grammar::{begin_trie, lark_or_gbnf};
#[cfg(feature = "vision")]
pub(crate) use images::{ImageArgs, ProjectorArgs, parts};
#[cfg(feature = "serve")]
pub(crate) use learn::LearnArgs;
#[cfg(feature = "chat")]
pub(crate) use learn::Learning;
pub(crate) use learn::{both, earlier_file, judged_of, open_folder};
#[cfg(feature = "serve")]
pub(crate) use lora::adapter_failure;
pub(crate) use lora::{LoraArgs, open_adapter};
pub(crate) use memory::{
    entry_json, entry_line, memory_beside, memory_extent, memory_known, remember, verdict,
    widest_memory,
};
pub(crate) use model::*;
#[cfg(feature = "chat")]
pub(crate) use notes::{MemoryArgs, notes};
pub(crate) use overwrite::OverwriteArg;
pub(crate) use recipe::RecipeArgs;
#[cfg(feature = "chat")]
pub(crate) use sampling::SamplingArgs;
pub(crate) use session::{SessionArgs, kv_bytes, session};
pub(crate) use speculation::{Drafted, SpeculationArgs, drafter_memory, keep_for, speculate};
pub(crate) use text::{TextArgs, read};
pub(crate) use threads::{MAX_THREADS, ThreadsArg};
