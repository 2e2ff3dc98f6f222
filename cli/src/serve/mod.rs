//! Models behind the APIs of OpenAI, Anthropic, llama-server and Ollama.
//!
//! Handlers read a request field by field (`http/fields.rs`), submit it to the library's
//! `Scheduler` (`jobs/`), and tell what its `Stream` brings in the words of an API (`api/`). A
//! closed socket drops the handler, which drops the stream, which cancels the request within a
//! pass. What takes longer than a moment (templates, tokens, grammars) runs on threads for such
//! work.
//!
//! What is listed above may use what is listed below it: `in_memory` and `listen` (connections),
//! `routes`, `api`, `jobs`, `models` and `app`, `images`, `preset`, `entry`, `auth`, `folder`, `slots`, `learner`, `memories`, `args`, `observe`,
//! `blocking`, `http`, `ids`.

mod api;
mod app;
mod args;
mod auth;
mod background;
mod blocking;
mod entry;
mod folder;
mod http;
mod ids;
mod images;
mod in_memory;
mod jobs;
mod learner;
mod listen;
mod memories;
mod models;
mod observe;
mod preset;
mod routes;
mod slots;

pub(crate) use args::{AppArgs, ServerArgs};
pub use in_memory::InMemory;
pub(crate) use listen::listen;
pub(crate) use routes::local;
