//! What handlers use: the model, its scheduler, and how requests are answered unless they say
//! otherwise.

use super::args::{AppArgs, ServerArgs};
use super::blocking::blocking;
use super::http::budget::Budget;
use super::http::error::ApiError;
use super::ids::{Caller, random};
use super::learner::Learner;
use super::observe::audit_log::{AuditLog, AuditLogArgs};
use super::observe::metrics::Metrics;
use super::observe::telemetry::{Telemetry, Watchdog};
use crate::flags::begin_trie;
use crate::flags::template::{Renderer, bos_text, eos_text, transcript_note};
use crate::flags::{SessionArgs, adapter_failure, no_tokenizer};
use crate::io::{Failure, measured, note, unix_time};
use axum::http::HeaderValue;
use ruvllm::chat::LocalTime;
use ruvllm::chat::tools::ToolFormat;
use ruvllm::decode::Speculation;
use ruvllm::engine::{CacheMode, Engine, PrefixOptions, Reuse};
use ruvllm::grammar::TokenTrie;
use ruvllm::kv::KvType;
use ruvllm::lora::AdapterRegistry;
use ruvllm::sample::{SamplerBuilder, TokenMask};
use ruvllm::scheduler::{ScheduleOptions, Scheduler};
use ruvllm::tokenizer::Tokenizer;
use ruvllm::{Error, Model, ScheduleError};
use ruvllm_learn::sona::pooled_layer;
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::Semaphore;

/// How many of them compute vectors or scores.
const MAX_POOLING: usize = 4;

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
    pub(super) sampling: SamplerBuilder,
    /// Texts across which DRY sees no repetition, and their tokens.
    pub(super) breakers: (Vec<String>, Vec<Vec<u32>>),
    pub(super) mask: Option<Box<dyn TokenMask>>,
    pub(super) seed: Option<u64>,
    pub(super) max_tokens: Option<usize>,
    pub(super) adapters: Vec<ServedAdapter>,
    pub(super) registry: AdapterRegistry,
    /// By key; empty if nothing is learnt.
    pub(super) learners: Vec<Arc<Learner>>,
    /// Whether texts are shortened whose vectors are wanted, and that are too long.
    pub(super) embd_truncate: bool,
    /// Whether the template knows the role `developer`.
    pub(super) knows_developer: bool,
}

/// An adapter that requests may ask for.
pub(super) struct ServedAdapter {
    /// Its file's, without the ending.
    pub(super) name: String,
    pub(super) path: PathBuf,
    /// What it is multiplied by if a request says nothing.
    pub(super) scale: f32,
}

impl ServedAdapter {
    /// Its name in the registry: files may have one name, in several folders.
    pub(super) fn key(&self) -> String {
        self.path.display().to_string()
    }
}

impl App {
    /// Keeps what was measured of passes, which says how much it pays to draft, for the next start.
    pub(super) fn keep_measured(&self) {
        if self.speculation.is_some() {
            measured::keep(&self.engine, &self.path, None);
        }
    }

    /// The seed of a request that has none.
    pub(super) fn seed(&self) -> u64 {
        // 32 bits are easier to type again.
        self.seed.unwrap_or_else(|| random() >> 32)
    }

    /// The names by which requests ask for the model with an adapter.
    pub(super) fn adapted_names(&self) -> Vec<String> {
        self.adapters
            .iter()
            .map(|adapter| format!("{}:{}", self.name, adapter.name))
            .collect()
    }

    /// All names by which requests ask for it.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        std::iter::once(self.name.clone()).chain(self.adapted_names())
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

/// The application, once the model is there.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) app: Arc<OnceLock<Arc<App>>>,
    pub(super) keys: Arc<Vec<String>>,
    pub(super) bodies: Arc<Budget>,
    /// Pages of others that may ask.
    pub(super) origins: Arc<Vec<HeaderValue>>,
    /// Whether a field that the server does not know is an error.
    pub(super) strict: bool,
}

impl Shared {
    /// Of a server whose model is still to be loaded.
    pub(super) fn new(args: &ServerArgs, keys: Vec<String>) -> Result<Shared, Failure> {
        Ok(Shared {
            app: Arc::default(),
            keys: Arc::new(keys),
            bodies: Budget::new(usize::try_from(args.body_budget).unwrap_or(usize::MAX)),
            origins: Arc::new(args.cors_origins.clone()),
            strict: args.strict,
        })
    }

    pub(super) fn app(&self) -> Result<Arc<App>, ApiError> {
        self.app.get().cloned().ok_or_else(ApiError::loading)
    }

    /// The application, if it takes another request.
    pub(super) fn app_with_room(&self) -> Result<Arc<App>, ApiError> {
        let app = self.app()?;
        app.has_room()?;
        Ok(app)
    }
}

/// What an application is for.
pub(super) struct Purpose<'a> {
    pub(super) alias: Option<String>,
    /// Whether requests will have adapters that are learnt.
    pub(super) learns: bool,
    pub(super) reuse: Reuse,
    pub(super) max_requests: usize,
    pub(super) max_itl: Option<Duration>,
    pub(super) watchdog: Duration,
    pub(super) audit_log: Option<&'a AuditLogArgs>,
    /// Whether this executable can be started again to render templates.
    pub(super) isolates_templates: bool,
}

impl App {
    pub(super) fn open(args: &AppArgs, purpose: Purpose<'_>) -> Result<App, Failure> {
        let model = args.model.open(&args.residence)?;
        let tokenizer = model
            .tokenizer()
            .ok_or_else(|| no_tokenizer(&args.model))?
            .clone();
        begin_trie(&model);
        let template = args.template.source(model.chat_template())?;
        if template.is_transcript {
            note(transcript_note(&args.model.label()));
        }
        let renderer = if purpose.isolates_templates {
            Renderer::new(&template.source)?
        } else {
            Renderer::here(&template.source)?
        };
        let mut options = args
            .session
            .for_server(&args.session.options(None, KvType::default()), &model)?;
        options.prefix = PrefixOptions {
            cache: CacheMode::On,
            reuse: purpose.reuse,
            ..Default::default()
        };
        if purpose.learns {
            options.pooled_layer = pooled_layer(&model);
        }
        options.keep_states = args.speculation.reads_states();
        let registry = AdapterRegistry::new(&model, args.lora_budget.unwrap_or(u64::MAX));
        let adapters = served_adapters(args, &registry)?;
        let kv_budget = SessionArgs::kv_budget(&options, &model)?;
        let engine = args
            .session
            .engine(&model, purpose.learns, &options, kv_budget)?;
        let n_ctx = engine.sequence(&options)?.n_ctx();
        let speculation = args.speculation.begin(&engine, n_ctx, &args.session)?;
        let metrics = Metrics::new(&engine);
        let watchdog = Watchdog::new(purpose.watchdog);
        let schedule = ScheduleOptions {
            session: options,
            n_parallel: args.parallel as usize,
            max_requests: purpose.max_requests,
            max_itl: purpose.max_itl,
            ..Default::default()
        };
        let audit_log = purpose
            .audit_log
            .map(|audit_log| audit_log.open(&metrics.audit_lines_dropped))
            .transpose()?
            .flatten();
        let telemetry = Telemetry {
            metrics: metrics.clone(),
            audit_log: audit_log.clone(),
            watchdog: watchdog.clone(),
        };
        let scheduler = Scheduler::observed(&engine, &schedule, telemetry).map_err(Error::from)?;
        let file_name = args.model.file_name().to_string_lossy().into_owned();
        Ok(App {
            learners: Vec::new(),
            sampling: args.sampling.builder(model.gguf().metadata(), &tokenizer)?,
            breakers: args.sampling.breakers(&tokenizer),
            mask: args.sampling.mask(&model)?,
            seed: args.sampling.given_seed(),
            name: purpose.alias.unwrap_or(file_name),
            path: args.model.label(),
            created: unix_time(),
            created_at: LocalTime::now_utc().strftime("%Y-%m-%dT%H:%M:%SZ"),
            n_ctx,
            n_parallel: schedule.n_parallel,
            max_requests: schedule.max_requests,
            preparing: Arc::new(Semaphore::new(
                std::thread::available_parallelism().map_or(1, |n| n.get()),
            )),
            pooling: Semaphore::new(MAX_POOLING),
            template: renderer,
            is_transcript: template.is_transcript,
            parses_user_special: args.template.parse_user_special,
            kwargs: args.chat_template_kwargs.clone().unwrap_or_default(),
            embd_truncate: args.embd_truncate,
            knows_developer: template.source.contains("developer"),
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
            adapters,
            registry,
        })
    }
}

/// The application of a server. `isolates_templates` is as in [`Purpose`].
pub(super) fn load(
    args: &ServerArgs,
    keys: &[String],
    isolates_templates: bool,
) -> Result<App, Failure> {
    let mut app = App::open(
        &args.app,
        Purpose {
            alias: args.alias.clone(),
            learns: args.learn.folder.is_some(),
            reuse: Reuse::Any,
            max_requests: args.max_requests as usize,
            max_itl: args.max_itl_ms.map(Duration::from_millis),
            watchdog: Duration::from_secs_f64(args.watchdog_seconds),
            audit_log: Some(&args.audit_log),
            isolates_templates,
        },
    )?;
    app.learners = Learner::all(args, keys, &app.engine)?;
    Ok(app)
}

/// The adapters of --lora and --lora-scaled; `registry` knows their files.
fn served_adapters(
    args: &AppArgs,
    registry: &AdapterRegistry,
) -> Result<Vec<ServedAdapter>, Failure> {
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
            scale,
        };
        registry.set(adapter.key(), path);
        // A damaged file is better found now.
        registry
            .get(&adapter.key())
            .map_err(adapter_failure(path))?;
        adapters.push(adapter);
    }
    Ok(adapters)
}
