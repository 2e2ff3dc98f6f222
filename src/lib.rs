//! Large-language-model inference inside your own process: open a GGUF file, get text.
//!
//! ```
//! use ruvllm::{Model, Sampler, SamplerOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
//! let mut session = model.session()?;
//! let mut sampler = Sampler::new(SamplerOptions { temperature: 0.0, ..Default::default() })?;
//! let mut text = String::new();
//! for piece in session.generate("Ownership is", &mut sampler)?.max_tokens(16) {
//!     text += &piece?.text;
//! }
//! assert!(!text.is_empty());
//! # Ok(()) }
//! ```
//!
//! Below that, token by token:
//!
//! ```
//! # use ruvllm::Model;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
//! let tokens = model.tokenizer().unwrap().encode("Ownership is", true, false);
//! let mut session = model.session()?;
//! session.prefill(&tokens)?;
//! assert_eq!(session.logits().len(), model.hparams().n_vocab);
//! let mut other = session.fork()?; // continues from the same point, independently
//! other.decode(7)?;
//! session.rewind(1)?; // as if only the first token had been seen
//! # Ok(()) }
//! ```
//!
//! # From task to type
//!
//! | to | take |
//! |---|---|
//! | continue a text | [`Session::generate`] with a [`Sampler`] |
//! | answer messages | `chat::ChatTemplate` (feature `chat`), then the same |
//! | answer many requests side by side, as a web service does (continuous batching) | [`scheduler::Scheduler`]; in a loop of your own [`scheduler::Schedule`] |
//! | compute several sequences in one pass | [`Engine::step`] |
//! | write JSON, or what a grammar describes | `grammar::Grammar` (feature `grammar`) and [`Sampler::set_mask`] |
//! | draft (speculative decoding) | [`Generation::speculate`] |
//! | reuse what prompts share (prompt caching) | [`SessionOptions::prefix`], [`Session::cache`] |
//! | keep a conversation | [`session::KeptSessions`] |
//! | make vectors of texts, order documents | [`Embedder`], [`Reranker`] |
//! | add LoRA adapters | [`lora::Adapter`], [`Session::adapters`]; to train them `ruvllm-learn` |
//! | know what fits into memory | [`Model::memory_plan`] |
//! | quantise while opening | [`model::OpenOptions::quantize`] |
//! | look into a file | [`gguf::Gguf`] |
//! | open a model of Hugging Face's hub | `Model::from_hub` (feature `hub`) |
//!
//! # Features
//!
//! | feature | what |
//! |---|---|
//! | `chat` | chat templates |
//! | `metal` | Apple GPUs: no Mac has run them yet, an emulated one has |
//! | `vision` | images: encoders of 13 kinds |
//! | `grammar` | output that obeys a JSON Schema, a regular expression, a GBNF or Lark grammar |
//! | `hub` | models by name, from Hugging Face's hub |
//! | `webgpu` | any GPU, through Vulkan, Direct3D 12 or Metal |
//!
//! None is on by default; without them, the crate has five dependencies.
//!
//! # Promise
//!
//! No file, prompt or token id causes undefined behaviour, a panic or an abort. Memory is bounded
//! by the size of the file and the context asked for; if there is no memory for cache, logits or
//! buffers of a pass, that is an error and the session is unchanged. Input that is not understood
//! is an error, never ignored.
//!
//! There are three exceptions. A chat template can take any amount of memory for texts *and lists*
//! that it never prints, until the process aborts, and leave a thread behind that computes forever,
//! though the call itself ends (see the module `chat`). Small allocations that fail, and those of
//! gradients, abort as everywhere in Rust. And a mapped file that another program
//! truncates while it is in use ends the process (see [`gguf`] for how to avoid it).
//!
//! # Reading order
//!
//! [`model`] (what is run), [`session`] (one text), [`engine`] (many sequences in one forward
//! pass), [`scheduler`] (many requests), [`decode`] (from logits to text), [`Embedder`] (vectors of
//! texts), [`kv`] (keys and values), [`lora`] (adapters), [`gguf`] (the file), [`quant`] (its
//! formats), [`arch`] (the kernels), [`tokenizer`], [`sample`], `chat` (templates, and an example
//! of a whole conversation). In the source, begin with `forward/mod.rs`; `ARCHITECTURE.md` has the
//! map. Learning is a package of its own, `ruvllm-learn`.

#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod arch;
mod backward;
#[cfg(feature = "chat")]
pub mod chat;
mod clock;
pub mod compute;
pub mod decode;
mod embed;
pub mod engine;
mod error;
mod forward;
pub mod gguf;
pub mod gpu;
#[cfg(feature = "grammar")]
pub mod grammar;
#[cfg(feature = "hub")]
pub mod hub;
pub mod kv;
mod layers;
pub mod lora;
pub mod model;
pub mod quant;
pub mod sample;
pub mod scheduler;
pub mod session;
mod system;
mod threads;
pub mod tokenizer;
#[cfg(feature = "vision")]
pub mod vision;

pub use arch::kv::KvType;
pub use decode::generate::Generation;
pub use decode::output::{Finish, StopReason, TokenText};
pub use embed::{Embedder, Reranker};
pub use engine::engine::Engine;
pub use engine::error::SessionError;
pub use engine::options::{CancelToken, SessionOptions};
pub use error::{Error, Result};
pub use model::model::Model;
pub use sample::options::SamplerOptions;
pub use sample::sampler::Sampler;
pub use session::session::Session;
pub use system::SystemMemory;
pub use tokenizer::tokenizer::Tokenizer;

/// Runs the examples of these pages as tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/guide/learning.md")]
    struct Learning;
    #[doc = include_str!("../docs/guide/prefix-cache.md")]
    struct PrefixCache;
}
