//! The engine of a model: the CPU computes where the GPU cannot.

use crate::io::{Failure, note, size};
use ruvllm::Model;
use ruvllm::engine::EngineOptions;
use ruvllm::model::Device;
use ruvllm::{Engine, SessionOptions};
use std::num::NonZeroUsize;

/// An engine for `model` and sessions whose adapters learn or do not. The CPU computes, with a
/// note, where the GPU cannot.
pub(crate) fn engine(
    model: &Model,
    n_threads: Option<NonZeroUsize>,
    learns: bool,
    options: &SessionOptions,
    engine_options: EngineOptions,
) -> Result<Engine, Failure> {
    let engine_options = EngineOptions {
        n_threads,
        cpu_fallback: true,
        ..engine_options
    };
    let on_cpu = |why: &str| {
        note(format!("computing on the CPU: {why}"));
        Ok(Engine::new(
            model,
            &EngineOptions {
                device: Some(Device::Cpu),
                ..engine_options.clone()
            },
        )?)
    };
    if model.device() != Device::Cpu && learns {
        return on_cpu("the GPU does without gradients");
    }
    if let Some(what) = options
        .kv_policy()
        .not_on_gpu()
        .filter(|_| model.device() != Device::Cpu)
    {
        return on_cpu(&format!("the GPU does without {what}"));
    }
    match Engine::new(model, &engine_options) {
        Err(ruvllm::SessionError::Gpu(error)) => on_cpu(&error.to_string()),
        engine => {
            let engine = engine?;
            if let Some(bytes) = engine
                .runner()
                .filter(|runner| runner.shares_memory())
                .map(|runner| runner.copied_bytes())
                .filter(|&bytes| bytes > 0)
            {
                note(format!(
                    "{} of weights were copied for the GPU: they are not mapped, or not aligned",
                    size(bytes)
                ));
            }
            Ok(engine)
        }
    }
}

/// Says that a GPU failed, and the CPU went on.
pub(crate) fn tell_failure(engine: &Engine) {
    if let Some(error) = engine.gpu_failure() {
        note(format!("the CPU went on: {error}"));
    }
}
