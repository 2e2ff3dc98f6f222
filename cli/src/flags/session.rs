//! Flags of a session: its context, cache, threads and adapters.

use super::cache_type::CacheTypeArgs;
use super::engine::engine;
use super::lora::LoraArgs;
use super::threads::ThreadsArg;
use crate::io::{Failure, note, size};
use clap::Args;
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::SystemMemory;
use ruvllm::engine::{CacheMode, EngineOptions, PlanOptions, SharedThreads};
use ruvllm::session::Profile;
use ruvllm::{Engine, SessionOptions};
use serde_json::{Map, Value};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

/// Positions are numbers of 31 bits.
const MAX_CTX: i64 = i32::MAX as i64;

/// Size of a session.
#[derive(Args)]
#[command(next_help_heading = "Context")]
pub(crate) struct SessionArgs {
    /// Size of the context in tokens (0: as the model was trained)
    /// [default: the model's own, at most 4096; of a server the model's own, as far as memory allows]
    #[arg(short, long, value_name = "N", env = "LLAMA_ARG_CTX_SIZE", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(..=MAX_CTX))]
    ctx_size: Option<u32>,
    /// Maximum number of prompt tokens computed at a time
    #[arg(short, long, value_name = "N", default_value_t = 2048, env = "LLAMA_ARG_BATCH", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    /// As --batch-size; the smaller one counts [short: -ub]
    #[arg(long, value_name = "N", default_value_t = 512, env = "LLAMA_ARG_UBATCH", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    ubatch_size: u32,
    #[command(flatten)]
    threads: ThreadsArg,
    /// Context size and KV cache types for a use: chat, long-chat, document or code; other flags win
    #[arg(long, value_name = "NAME")]
    preset: Option<Profile>,
    /// Compute prompts as generated tokens are: more exact, the same bits, about twice the time
    #[arg(long)]
    exact: bool,
    /// Prompt caching on disk: keep the KV cache of prompts in this folder, for later runs that begin
    /// with the same text
    #[arg(long, value_name = "DIR", help_heading = "KV cache")]
    prompt_cache: Option<PathBuf>,
    /// Maximum size of that folder in MiB; what was used least recently is removed
    #[arg(long, value_name = "N", help_heading = "KV cache", default_value_t = 8192, requires = "prompt_cache", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    prompt_cache_size: u32,
    #[command(flatten)]
    cache_type: CacheTypeArgs,
    #[command(flatten)]
    pub(crate) lora: LoraArgs,
}

impl SessionArgs {
    /// Options of the session, with these values where the flags are not given.
    pub(crate) fn options(&self, n_ctx: Option<usize>, kv_type: KvType) -> SessionOptions {
        let mut options = SessionOptions {
            n_ctx: self
                .ctx_size
                .map(|n| n as usize)
                .or(n_ctx)
                .filter(|&n| n > 0),
            n_batch: self.batch_size.min(self.ubatch_size) as usize,
            exact: self.exact,
            prefix: if self.prompt_cache.is_some() {
                CacheMode::On
            } else {
                CacheMode::Off
            }
            .into(),
            ..Default::default()
        };
        self.cache_type.apply(kv_type, &mut options);
        options
    }

    /// The same for `model`, where `-c 0` is the context it was trained for, with the options of
    /// --preset that no flag sets.
    pub(crate) fn for_model(&self, options: &SessionOptions, model: &Model) -> SessionOptions {
        let h = model.hparams();
        let mut options = options.clone();
        if self.ctx_size == Some(0) {
            options.n_ctx = Some(h.n_ctx_train);
        }
        let Some(preset) = self.preset.map(|preset| preset.options(h)) else {
            return options;
        };
        if self.ctx_size.is_none() {
            options.n_ctx = preset.n_ctx;
        }
        let CacheTypeArgs {
            cache_type_k,
            cache_type_v,
            kv_tiers,
            ..
        } = &self.cache_type;
        if kv_tiers.is_none() {
            options.kv_type = cache_type_k.unwrap_or(preset.kv_type);
            options.kv_type_v = cache_type_v.or(preset.kv_type_v);
            let has_types = cache_type_k.is_some() || cache_type_v.is_some();
            options.kv_tiers = preset.kv_tiers.filter(|_| !has_types);
        }
        options
    }

    /// The same for a server, which has requests of any length: the model's own context unless the
    /// flags say otherwise, or the longest half, quarter and so on of it for which `plan` fits into the
    /// memory that there is.
    #[cfg(feature = "serve")]
    pub(crate) fn for_server(
        &self,
        options: &SessionOptions,
        model: &Model,
        plan: impl Fn(&SessionOptions) -> Result<ruvllm::engine::MemoryPlan, Failure>,
    ) -> Result<SessionOptions, Failure> {
        let mut options = self.for_model(options, model);
        if self.ctx_size.is_some() || self.preset.is_some() {
            return Ok(options);
        }
        let bytes = model.memory_limit().or_else(crate::io::memory::to_fill);
        let least = ruvllm::engine::DEFAULT_CTX.min(model.hparams().n_ctx_train);
        let mut n_ctx = model.hparams().n_ctx_train.min(MAX_CTX as usize);
        while let Some(bytes) = bytes
            && n_ctx > least
        {
            options.n_ctx = Some(n_ctx);
            if plan(&options)?.needed() <= bytes {
                break;
            }
            n_ctx = (n_ctx / 2).max(least);
        }
        options.n_ctx = Some(n_ctx);
        Ok(options)
    }

    /// Most bytes for keys and values of all of a server's sequences: what the model and a pass
    /// leave of the memory that there is, at least a whole context. Not set where --memory-limit
    /// says it, or the system does not tell.
    #[cfg(feature = "serve")]
    pub(crate) fn kv_budget(plan: &ruvllm::engine::MemoryPlan, model: &Model) -> Option<u64> {
        let bytes = crate::io::memory::to_fill().filter(|_| model.memory_limit().is_none());
        bytes.map(|bytes| bytes.saturating_sub(plan.needed() - plan.kv).max(plan.kv))
    }

    /// An engine for sessions that learn or do not, with so many bytes for their keys and values,
    /// if that is limited.
    pub(crate) fn engine(
        &self,
        model: &Model,
        learns: bool,
        options: &SessionOptions,
        kv_budget: Option<u64>,
    ) -> Result<Engine, Failure> {
        self.engine_on(None, model, learns, options, kv_budget)
    }

    /// Where encoded images are kept, and how many bytes they may take: beside the keys and values
    /// of prompts, an eighth as much.
    #[cfg(feature = "vision")]
    pub(crate) fn image_folder(&self) -> Option<(PathBuf, u64)> {
        let folder = self.prompt_cache.as_ref()?.join("images");
        Some((folder, (u64::from(self.prompt_cache_size) << 20) / 8))
    }

    /// The same on the threads of another engine, if there is one.
    pub(crate) fn engine_on(
        &self,
        threads: Option<SharedThreads>,
        model: &Model,
        learns: bool,
        options: &SessionOptions,
        kv_budget: Option<u64>,
    ) -> Result<Engine, Failure> {
        let engine_options = EngineOptions {
            kv_budget,
            threads,
            prefix_folder: self.prompt_cache.clone(),
            prefix_folder_budget: Some(u64::from(self.prompt_cache_size) << 20),
            ..Default::default()
        };
        engine(
            model,
            self.threads.number(),
            learns,
            options,
            engine_options,
        )
    }
}

/// A session with the adapters that the flags name, to be asked for the logits of up to `rows`
/// tokens at a time; warns when a full context would not fit into memory.
pub(crate) fn session(
    model: &Model,
    args: &SessionArgs,
    options: &SessionOptions,
    rows: usize,
) -> Result<Session, Failure> {
    let options = &args.for_model(options, model);
    let adapters = args.lora.open(model)?;
    let mut session = args
        .engine(model, false, options, None)?
        .session_with(options)?;
    for (adapter, scale) in adapters {
        session.adapters().attach(adapter, scale)?;
    }
    let adapters = session
        .sequence()
        .adapters()
        .map(|(_, adapter, _)| Arc::clone(adapter))
        .collect();
    let n_threads = NonZeroUsize::new(session.engine().n_threads());
    let plan = PlanOptions {
        n_logits: rows,
        n_threads,
        adapters,
        ..options.clone().into()
    };
    let plan = model.check_memory(&plan)?;
    let need = plan.needed() - plan.weights - plan.weights_copy - plan.vocabulary;
    if let Some(memory) = SystemMemory::now().filter(|memory| need > memory.available) {
        note(format!(
            "warning: a full context of {} tokens takes {}, but {} of memory are free; use a smaller -c",
            session.sequence().n_ctx(),
            size(need),
            size(memory.available)
        ));
    }
    let trained = model.hparams().n_ctx_train;
    if session.sequence().n_ctx() > trained {
        note(format!(
            "warning: a context of {} tokens, but the model was trained for {trained}",
            session.sequence().n_ctx()
        ));
    }
    Ok(session)
}

/// Bytes of a session's keys and values by precision, as JSON.
pub(crate) fn kv_bytes(session: &Session) -> Value {
    session
        .state()
        .memory()
        .kv
        .iter()
        .map(|(kind, bytes)| (kind.name().to_owned(), bytes.into()))
        .collect::<Map<_, _>>()
        .into()
}
