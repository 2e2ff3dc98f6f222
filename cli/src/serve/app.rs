//! What handlers use: the model, its scheduler, and how requests are answered unless they say
//! otherwise.

use super::args::{AppArgs, ServerArgs};
use super::auth::keys;
use super::background::in_background;
use super::blocking::blocking;
use super::entry::Entry;
use super::folder;
use super::http::error::ApiError;
use super::ids::{Caller, random};
use super::images::ImageReader;
use super::learner::Learner;
use super::memories::Memories;
use super::observe::audit_log::AuditLog;
use super::observe::metrics::Metrics;
use super::observe::telemetry::{Telemetry, Watchdog};
use super::slots::Slots;
use crate::flags::begin_trie;
use crate::flags::template::{Renderer, bos_text, eos_text, transcript_note};
use crate::flags::{ModelArgs, SessionArgs, adapter_failure, no_tokenizer};
use crate::io::{Failure, measured, note, unix_time};
use axum::http::StatusCode;
use ruvllm::KvType;
use ruvllm::SamplerOptions;
use ruvllm::Tokenizer;
use ruvllm::chat::LocalTime;
use ruvllm::chat::tools::ToolFormat;
use ruvllm::decode::Speculation;
use ruvllm::engine::{
    CacheMode, DrafterMemory, MemoryPlan, PlanOptions, PrefixOptions, Reuse, SharedThreads,
};
use ruvllm::grammar::TokenTrie;
use ruvllm::lora::AdapterRegistry;
use ruvllm::sample::TokenMask;
use ruvllm::scheduler::ScheduleError;
use ruvllm::scheduler::{ScheduleOptions, Scheduler};
use ruvllm::{Engine, SessionOptions};
use ruvllm::{Error, Model};
use ruvllm_learn::memory::IdleConsolidation;
use ruvllm_learn::sona::pooled_layer;
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;
use tokio::sync::Semaphore;

/// How many of them compute vectors or scores.
const MAX_POOLING: usize = 4;

/// Most adapters of a model.
const MAX_ADAPTERS: usize = 1024;

/// How many requests are prepared side by side.
fn preparing() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// What handlers use.
pub(super) struct App {
    pub(super) model: Model,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) engine: Engine,
    pub(super) scheduler: Scheduler,
    /// Who drafts for each request.
    pub(super) speculation: Option<Speculation>,
    pub(super) metrics: Metrics,
    pub(super) audit_log: Option<AuditLog>,
    pub(super) watchdog: Watchdog,
    pub(super) name: String,
    pub(super) path: String,
    pub(super) created: u64,
    /// The same in ISO 8601.
    pub(super) created_at: String,
    pub(super) n_ctx: usize,
    pub(super) n_parallel: usize,
    pub(super) max_requests: usize,
    pub(super) preparing: Arc<Semaphore>,
    /// Requests for vectors or scores that are computed side by side; more wait.
    pub(super) pooling: Semaphore,
    pub(super) template: Renderer,
    /// Whether the model has no template, so that conversations are transcripts.
    pub(super) is_transcript: bool,
    /// Whether texts of control tokens in messages of users become these tokens.
    pub(super) parses_user_special: bool,
    /// What the template is told if a request says nothing else.
    pub(super) kwargs: Map<String, Value>,
    pub(super) tool_format: ToolFormat,
    pub(super) bos: String,
    pub(super) eos: String,
    /// Strings that end any answer.
    pub(super) stop: Vec<String>,
    pub(super) sampling: SamplerOptions,
    /// Texts across which DRY sees no repetition, and their tokens.
    pub(super) breakers: (Vec<String>, Vec<Vec<u32>>),
    pub(super) mask: Option<Box<dyn TokenMask>>,
    pub(super) seed: Option<u64>,
    pub(super) max_tokens: Option<usize>,
    adapters: RwLock<Vec<Arc<ServedAdapter>>>,
    pub(super) registry: AdapterRegistry,
    /// Where new ones are.
    lora_dir: Option<PathBuf>,
    /// If they can be saved.
    pub(super) slots: Option<Slots>,
    /// By key; empty if nothing is learnt.
    pub(super) learners: Vec<Arc<Learner>>,
    /// What users have had remembered.
    pub(super) memories: Arc<Memories>,
    /// Consolidates them until it is dropped.
    consolidation: Option<IdleConsolidation>,
    /// Whether texts are shortened whose vectors are wanted, and that are too long.
    pub(super) embd_truncate: bool,
    /// Whether the template knows the role `developer`.
    pub(super) knows_developer: bool,
    /// If it reads images.
    pub(super) images: Option<ImageReader>,
}

/// An adapter that requests may ask for.
pub(super) struct ServedAdapter {
    /// Its file's, without the ending.
    pub(super) name: String,
    pub(super) path: PathBuf,
    /// What it is multiplied by if a request names it alone.
    pub(super) own_scale: f32,
    /// What it is multiplied by if a request says nothing: the bits of a number.
    scale: AtomicU32,
}

impl ServedAdapter {
    /// Its name in the registry: files may have one name, in several folders.
    pub(super) fn key(&self) -> String {
        self.path.display().to_string()
    }

    /// What it is multiplied by if a request says nothing.
    pub(super) fn scale(&self) -> f32 {
        f32::from_bits(self.scale.load(Ordering::Relaxed))
    }

    pub(super) fn set_scale(&self, scale: f32) {
        self.scale.store(scale.to_bits(), Ordering::Relaxed);
    }
}

impl App {
    /// Keeps what was measured of passes, which says how much it pays to draft, for the next start.
    pub(super) fn keep_measured(&self) {
        if self.speculation.is_some() {
            measured::keep(&self.engine, &self.path, None);
        }
    }

    /// Adapters that requests may ask for.
    pub(super) fn adapters(&self) -> Vec<Arc<ServedAdapter>> {
        self.adapters
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Adds the adapter in a file of `--lora-dir`, or puts it in the place of one of that name if
    /// it `replaces` it. Requests have it if they name it.
    pub(super) fn add_adapter(
        &self,
        name: String,
        file: &str,
        replaces: bool,
    ) -> Result<(), ApiError> {
        let Some(folder) = &self.lora_dir else {
            let message = "adapters are loaded from a folder, and the server has no --lora-dir";
            return Err(ApiError::field("lora_path", message));
        };
        let adapter = ServedAdapter {
            path: folder::existing(folder, "lora_path", file)?,
            name,
            own_scale: 1.0,
            scale: AtomicU32::new(0.0f32.to_bits()),
        };
        let mut adapters = self
            .adapters
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let place = adapters.iter().position(|of| of.name == adapter.name);
        if place.is_some() && !replaces {
            let message = format!(
                "there is an adapter {:?}; load_inplace replaces it",
                adapter.name
            );
            return Err(ApiError::field("lora_name", message));
        }
        if place.is_none() && adapters.len() >= MAX_ADAPTERS {
            return Err(ApiError::wrong(format!(
                "there are {MAX_ADAPTERS} adapters: unload one first"
            )));
        }
        let key = adapter.key();
        // Read again if the file is another one by now.
        let is_used = adapters.iter().any(|of| of.path == adapter.path);
        if !is_used || replaces {
            self.registry.set(&key, &adapter.path);
        }
        if let Err(error) = self.registry.get(&key) {
            if !is_used {
                self.registry.remove(&key);
            }
            return Err(ApiError::field("lora_path", error));
        }
        match place {
            Some(i) => adapters[i] = Arc::new(adapter),
            None => adapters.push(Arc::new(adapter)),
        }
        Ok(())
    }

    /// Forgets an adapter; requests that run keep it.
    pub(super) fn remove_adapter(&self, name: &str) -> Result<(), ApiError> {
        let mut adapters = self
            .adapters
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let Some(i) = adapters.iter().position(|of| of.name == name) else {
            let message = format!("no adapter is called {name:?} here");
            return Err(ApiError::new(
                StatusCode::NOT_FOUND,
                "not_found_error",
                message,
            ));
        };
        let adapter = adapters.remove(i);
        if adapters.iter().all(|of| of.path != adapter.path) {
            self.registry.remove(&adapter.key());
        }
        Ok(())
    }

    /// The seed of a request that has none.
    pub(super) fn seed(&self) -> u64 {
        // 32 bits are easier to type again.
        self.seed.unwrap_or_else(|| random() >> 32)
    }

    /// The names by which requests ask for the model with an adapter.
    pub(super) fn adapted_names(&self) -> Vec<String> {
        self.adapters()
            .iter()
            .map(|adapter| format!("{}:{}", self.name, adapter.name))
            .collect()
    }

    /// All names by which requests ask for it.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        std::iter::once(self.name.clone()).chain(self.adapted_names())
    }

    /// Whether it computes or prepares anything.
    pub(super) fn is_busy(&self) -> bool {
        self.scheduler.n_requests() > 0
            || self.pooling.available_permits() < MAX_POOLING
            || self.preparing.available_permits() < preparing()
    }

    /// Refuses a request that would find the queue full, before its template, grammar or text is
    /// prepared.
    pub(super) fn has_room(&self) -> Result<(), ApiError> {
        let max = self.max_requests;
        if self.scheduler.n_requests() < max {
            Ok(())
        } else {
            Err(ScheduleError::QueueFull { max }.into())
        }
    }

    /// Refuses a request for more answers than there ever is room for: it would be told to come
    /// again for ever.
    pub(super) fn can_hold(&self, n_answers: usize) -> Result<(), ApiError> {
        let max = self.max_requests;
        if n_answers <= max {
            return Ok(());
        }
        Err(ApiError::wrong(format!(
            "{n_answers} answers are asked for, and at most {max} are computed or wait here"
        )))
    }

    /// Does what makes a request of a conversation: template, tokens, grammar. One at a time for
    /// each core, so that passes keep theirs.
    pub(super) async fn prepare<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let permit = Arc::clone(&self.preparing).acquire_owned().await;
        // While it waited, others may have come.
        self.has_room()?;
        blocking(move || {
            let _permit = permit;
            work()
        })
        .await
    }

    /// The tree of tokens for grammars, for which the first request may have to wait.
    pub(super) fn trie(&self) -> Result<TokenTrie, ApiError> {
        Ok(self.model.token_trie().map_err(Error::from)?)
    }

    /// Who learns from a caller's requests.
    pub(super) fn learner(&self, caller: &Caller) -> Option<&Arc<Learner>> {
        self.learners.get(caller.tenant.parse().unwrap_or(0))
    }
}

/// What an application is for.
pub(super) struct Purpose<'a> {
    pub(super) model: &'a ModelArgs,
    /// Its name, if that is not its file's.
    pub(super) alias: Option<String>,
    /// Threads that it computes on, if not its own.
    pub(super) threads: Option<SharedThreads>,
    /// Models that share the memory.
    pub(super) n_models: u64,
    /// Whether others answer while it is loaded.
    pub(super) is_beside_others: bool,
    /// Refuses a model of so many bytes, or makes room for it.
    pub(super) has_room: &'a mut dyn FnMut(u64) -> Result<(), Failure>,
    /// Whether requests will have adapters that are learnt.
    pub(super) learns: bool,
    pub(super) reuse: Reuse,
    pub(super) max_requests: usize,
    pub(super) max_itl: Option<Duration>,
    pub(super) watchdog: Duration,
    pub(super) audit_log: Option<AuditLog>,
    pub(super) metrics: Metrics,
    /// Whether this executable can be started again to render templates.
    pub(super) isolates_templates: bool,
}

impl Purpose<'_> {
    /// Does a part of the load so that answers of other models go on meanwhile.
    fn beside_answers<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, Failure> {
        Ok(match self.is_beside_others {
            true => in_background(work)?,
            false => work(),
        })
    }
}

impl App {
    pub(super) fn open(args: &AppArgs, purpose: Purpose<'_>) -> Result<App, Failure> {
        let model = purpose.beside_answers(|| purpose.model.open(&args.placement))??;
        let tokenizer = model
            .tokenizer()
            .ok_or_else(|| no_tokenizer(purpose.model))?
            .clone();
        let template = args.template.source(model.chat_template())?;
        if template.is_transcript {
            note(transcript_note(&purpose.model.label()));
        }
        let renderer = if purpose.isolates_templates {
            Renderer::new(&template.source)?
        } else {
            Renderer::here(&template.source)?
        };
        let images = ImageReader::open(args, purpose.model, &model, &renderer)?;
        let drafter = args.speculation.memory(&model)?;
        let plan_of = |options: &SessionOptions| plan(args, options, &model, drafter.as_ref());
        let options = session_options(args, &purpose, &model, &plan_of)?;
        let registry = AdapterRegistry::new(&model, args.lora_budget.unwrap_or(u64::MAX));
        let adapters = served_adapters(args, &registry)?;
        let plan = plan_of(&options)?;
        (purpose.has_room)(plan.needed())?;
        purpose.beside_answers(|| begin_trie(&model))?;
        let kv_budget = kv_budget(&model, &plan, purpose.n_models);
        let engine =
            args.session
                .engine_on(purpose.threads, &model, purpose.learns, &options, kv_budget)?;
        let n_ctx = engine.sequence(&options)?.n_ctx();
        let speculation = args.speculation.begin(&engine, n_ctx, &args.session)?;
        let metrics = purpose.metrics;
        let watchdog = Watchdog::new(purpose.watchdog);
        let schedule = ScheduleOptions {
            session: options,
            n_parallel: args.parallel as usize,
            max_requests: purpose.max_requests,
            max_itl: purpose.max_itl,
            ..Default::default()
        };
        let audit_log = purpose.audit_log;
        let telemetry = Telemetry {
            metrics: metrics.clone(),
            audit_log: audit_log.clone(),
            watchdog: watchdog.clone(),
        };
        let scheduler = Scheduler::observed(&engine, &schedule, telemetry).map_err(Error::from)?;
        let file_name = purpose.model.file_name().to_string_lossy().into_owned();
        Ok(App {
            learners: Vec::new(),
            memories: Arc::default(),
            consolidation: None,
            sampling: args.sampling.options(model.gguf().metadata(), &tokenizer)?,
            breakers: args.sampling.breakers(&tokenizer),
            mask: args.sampling.mask(&model)?,
            seed: args.sampling.given_seed(),
            name: purpose.alias.unwrap_or(file_name),
            path: purpose.model.label(),
            created: unix_time(),
            created_at: LocalTime::now_utc().strftime("%Y-%m-%dT%H:%M:%SZ"),
            n_ctx,
            n_parallel: schedule.n_parallel,
            max_requests: schedule.max_requests,
            preparing: Arc::new(Semaphore::new(preparing())),
            pooling: Semaphore::new(MAX_POOLING),
            template: renderer,
            is_transcript: template.is_transcript,
            parses_user_special: args.template.parse_user_special,
            kwargs: args.chat_template_kwargs.clone().unwrap_or_default(),
            embd_truncate: args.embd_truncate,
            knows_developer: template.source.contains("developer"),
            images,
            tool_format: ToolFormat::of(&template.source),
            bos: bos_text(Some(&tokenizer)),
            eos: eos_text(Some(&tokenizer)),
            max_tokens: usize::try_from(args.n_predict).ok(),
            model,
            tokenizer,
            engine,
            scheduler,
            speculation,
            metrics,
            audit_log,
            watchdog,
            stop: template.stops,
            adapters: RwLock::new(adapters),
            lora_dir: args.lora_dir.clone(),
            slots: args
                .slot_save_path
                .clone()
                .map(|folder| Slots::new(folder, schedule.session.clone())),
            registry,
        })
    }
}

/// Options of each sequence.
fn session_options(
    args: &AppArgs,
    purpose: &Purpose<'_>,
    model: &Model,
    plan: &dyn Fn(&SessionOptions) -> Result<MemoryPlan, Failure>,
) -> Result<SessionOptions, Failure> {
    let mut usual = args.session.options(None, KvType::default());
    usual.keep_states = args.speculation.reads_states();
    let mut options = args.session.for_server(&usual, model, plan)?;
    // One `-c` is for all models: one with fewer positions has those.
    let h = model.hparams();
    if purpose.n_models > 1 && h.learned_positions {
        options.n_ctx = options.n_ctx.map(|n| n.min(h.n_ctx_train));
    }
    options.prefix = PrefixOptions {
        cache: CacheMode::On,
        reuse: purpose.reuse,
        ..Default::default()
    };
    if purpose.learns {
        options.pooled_layer = pooled_layer(model);
    }
    if args.context_shift {
        if purpose.learns {
            let message = "--context-shift: there is none with --learn, which sees every token";
            return Err(Failure::Usage(message.into()));
        }
        options.context_shift = Some(args.keep as usize);
    }
    Ok(options)
}

/// What a session takes with these options, and a drafter, for all requests that are computed at a
/// time.
fn plan(
    args: &AppArgs,
    options: &SessionOptions,
    model: &Model,
    drafter: Option<&DrafterMemory>,
) -> Result<MemoryPlan, Failure> {
    let mut plan = model.memory_plan(&PlanOptions {
        drafters: drafter.into_iter().cloned().collect(),
        ..options.clone().into()
    })?;
    let others = u64::from(args.parallel).saturating_sub(1);
    let of_text = drafter.map_or(0, |drafter| drafter.of_text(plan.n_ctx, options.n_batch));
    let of_others = others.saturating_mul(of_text);
    plan.drafters = plan.drafters.saturating_add(of_others);
    Ok(plan)
}

/// Most bytes for keys and values of a model that is one of `n_models`: an equal part of what there
/// is for one, at least a whole context.
fn kv_budget(model: &Model, plan: &MemoryPlan, n_models: u64) -> Option<u64> {
    let for_one = match (n_models, model.memory_limit()) {
        (2.., Some(limit)) => Some(limit.saturating_sub(plan.needed() - plan.kv)),
        _ => SessionArgs::kv_budget(plan, model),
    };
    for_one.map(|bytes| (bytes / n_models.max(1)).max(plan.kv))
}

/// What loads the models of a server, and what they share.
pub(super) struct Loader {
    args: Arc<ServerArgs>,
    keys: Arc<Vec<String>>,
    /// As in [`Purpose`].
    isolates_templates: bool,
    threads: OnceLock<SharedThreads>,
    pub(super) metrics: Metrics,
    audit_log: Option<AuditLog>,
    memories: Arc<Memories>,
}

impl Loader {
    pub(super) fn new(args: Arc<ServerArgs>, isolates_templates: bool) -> Result<Loader, Failure> {
        let (metrics, keys) = (Metrics::default(), keys(&args)?);
        Ok(Loader {
            memories: Arc::new(Memories::open(&args, &keys)?),
            keys: Arc::new(keys),
            isolates_templates,
            threads: OnceLock::new(),
            audit_log: args.audit_log.open(&metrics.audit_lines_dropped)?,
            metrics,
            args,
        })
    }

    pub(super) fn args(&self) -> &ServerArgs {
        &self.args
    }

    pub(super) fn keys(&self) -> Arc<Vec<String>> {
        Arc::clone(&self.keys)
    }

    pub(super) fn memories(&self) -> Arc<Memories> {
        Arc::clone(&self.memories)
    }

    /// Writes what waits to be written.
    pub(super) fn flush(&self) {
        self.audit_log.iter().for_each(AuditLog::flush);
    }

    /// Loads a model, one of several or the only one.
    pub(super) fn open(
        &self,
        entry: &Entry,
        is_one_of_several: bool,
        has_room: &mut dyn FnMut(u64) -> Result<(), Failure>,
    ) -> Result<App, Failure> {
        let args = &*self.args;
        let app_args = entry.args.as_deref().unwrap_or(&args.app);
        let learns = args.learn.folder.is_some();
        if is_one_of_several && (learns || args.memory_control.is_some()) {
            let flag = if learns {
                "--learn"
            } else {
                "--memory-control"
            };
            let message = format!("{flag}: one server learns for one model, and there are several");
            return Err(Failure::Usage(message));
        }
        let own_name = entry.name().map(str::to_owned);
        let mut app = App::open(
            app_args,
            Purpose {
                model: &entry.model,
                alias: own_name,
                threads: self.threads.get().cloned(),
                n_models: if is_one_of_several {
                    u64::from(args.models.models_max.max(1))
                } else {
                    1
                },
                is_beside_others: is_one_of_several && self.threads.get().is_some(),
                has_room,
                learns,
                reuse: Reuse::Any,
                max_requests: args.max_requests as usize,
                max_itl: args.max_itl_ms.map(Duration::from_millis),
                watchdog: Duration::from_secs_f64(args.watchdog_seconds),
                audit_log: self.audit_log.as_ref().map(AuditLog::of_model),
                metrics: self.metrics.of_model(),
                isolates_templates: self.isolates_templates,
            },
        )?;
        let _ = self.threads.set(app.engine.threads());
        app.learners = Learner::all(args, &self.keys, &app.engine)?;
        app.memories = self.memories();
        app.consolidation = app
            .memories
            .consolidate(args, &app.engine, &app.tokenizer)?;
        Ok(app)
    }
}

/// The adapters of --lora and --lora-scaled; `registry` knows their files.
fn served_adapters(
    args: &AppArgs,
    registry: &AdapterRegistry,
) -> Result<Vec<Arc<ServedAdapter>>, Failure> {
    let mut adapters = Vec::new();
    for (path, scale) in args.session.lora.files()? {
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let adapter = ServedAdapter {
            name,
            path: path.to_owned(),
            own_scale: scale,
            scale: AtomicU32::new(scale.to_bits()),
        };
        registry.set(adapter.key(), path);
        // A damaged file is better found now.
        registry
            .get(&adapter.key())
            .map_err(adapter_failure(path))?;
        adapters.push(Arc::new(adapter));
    }
    Ok(adapters)
}
