//! Models on a level and sessions on engines, as tests make them.
#![allow(dead_code)] // each test program uses its part

use ruvllm::Model;
use ruvllm::Session;
use ruvllm::arch::Arch;
use ruvllm::engine::EngineOptions;
use ruvllm::gguf::Gguf;
use ruvllm::model::ModelError;
use ruvllm::model::OpenOptions;
use ruvllm::{Engine, SessionOptions};
use std::num::NonZeroUsize;

/// The level that `RUVLLM_ARCH` names, else the best one.
pub(crate) fn level() -> Arch {
    let name = std::env::var("RUVLLM_ARCH")
        .ok()
        .filter(|name| !name.is_empty());
    name.map_or_else(Arch::detect, |name| Arch::named(&name).unwrap())
}

/// Opens a model on [`level`].
pub(crate) fn open(gguf: Gguf) -> Result<Model, ModelError> {
    OpenOptions::new().arch(level()).open_gguf(gguf)
}

/// The same file on another level.
pub(crate) trait OnLevel {
    fn on(&self, arch: Arch) -> Model;
}

impl OnLevel for Model {
    fn on(&self, arch: Arch) -> Model {
        OpenOptions::new()
            .arch(arch)
            .open_gguf(self.gguf().clone())
            .unwrap()
    }
}

/// A session on an engine of `n_threads`.
pub(crate) fn session_on(model: &Model, n_threads: usize, options: &SessionOptions) -> Session {
    engine(model, n_threads).session_with(options).unwrap()
}

pub(crate) fn engine(model: &Model, n_threads: usize) -> Engine {
    Engine::new(
        model,
        &EngineOptions {
            n_threads: NonZeroUsize::new(n_threads),
            ..Default::default()
        },
    )
    .unwrap()
}

/// Passes and their logits in one call.
pub(crate) trait Pass {
    fn prefilled(&mut self, tokens: &[u32]) -> Vec<f32>;
    fn decoded(&mut self, token: u32) -> Vec<f32>;
}

impl Pass for Session {
    fn prefilled(&mut self, tokens: &[u32]) -> Vec<f32> {
        self.prefill(tokens).unwrap();
        self.logits().to_vec()
    }

    fn decoded(&mut self, token: u32) -> Vec<f32> {
        self.decode(token).unwrap();
        self.logits().to_vec()
    }
}
