//! `ruvllm serve`: the model behind the APIs of OpenAI, Anthropic and llama-server.
//!
//! Handlers read a request field by field (`fields.rs`), submit it to the library's `Scheduler`,
//! and tell what its `Stream` brings (`answer.rs`). A closed socket drops the handler, which drops
//! the stream, which cancels the request within a pass. What takes longer than a moment (templates,
//! tokens, grammars) runs on threads for such work.

mod api;
mod http;
mod in_memory;
mod jobs;
mod observe;

use crate::flags::template::{TRANSCRIPT, TRANSCRIPT_STOP, bos_text, eos_text};
use crate::flags::{
    ModelArgs, ResidenceArgs, SamplingArgs, SessionArgs, SonaArgs, SpeculationArgs, adapter_failure,
};
use crate::io::{
    Failure, json_object, measured, note, on_interrupt, parse_size, read_regular, read_text,
    unix_time,
};
use api::body::Budget;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use futures_util::future::{Either, select};
use http::cors::origin;
use http::error::ApiError;
use http::sending::Sending;
use http::{cors, page};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
pub use in_memory::InMemory;
use jobs::learning::Learner;
use observe::audit_log::{Witness, WitnessArgs};
use observe::log;
use observe::log::LogArgs;
use observe::metrics::Metrics;
use observe::telemetry::{Watch, Watchdog};
use ruvllm::chat::ChatTemplate;
use ruvllm::chat::tools::ToolFormat;
use ruvllm::exec::{
    CacheMode, Engine, KvType, PrefixOptions, Reuse, ScheduleOptions, Scheduler, Speculation,
};
use ruvllm::grammar::TokenTrie;
use ruvllm::lora::AdapterRegistry;
use ruvllm::sample::{SamplerBuilder, TokenMask};
use ruvllm::sona::pooled_layer;
use ruvllm::tokenizer::Tokenizer;
use ruvllm::{Error, Model, ScheduleError};
use serde_json::{Map, Value};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::TcpListener;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;
use subtle::ConstantTimeEq;
use tokio::sync::{Notify, Semaphore, watch as channel};

/// What made an answer.
const FINGERPRINT: &str = concat!("ruvllm-", env!("CARGO_PKG_VERSION"));
/// Connections at a time; more wait to be accepted.
const MAX_CONNECTIONS: usize = 4096;
/// Threads for what takes longer than a moment.
const MAX_BLOCKING: usize = 32;
/// How many of them compute vectors or scores.
const MAX_POOLING: usize = 4;
/// Bytes of a request's head that are read together; a head has at most twice as many.
const HEAD: usize = 32 << 10;
/// Most time until a new connection has sent the headers of a request, if `--timeout` is not less.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Most time from an answer to the headers of the next request on its connection: pools of clients
/// keep idle connections.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);

const EXAMPLES: &str = "\
Examples:
  ruvllm serve -m model.gguf
  ruvllm serve -m model.gguf --port 8081 --api-key secret -np 8 -c 8192
  ruvllm serve -m model.gguf --api-key-file keys --sona users --learn-per-user --sona-control manual.txt
  curl http://127.0.0.1:8080/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'

Clients of the OpenAI API take http://127.0.0.1:8080/v1 as their base URL. Ctrl-C or SIGTERM stops taking requests and
answers what is there; a second one ends at once.";

/// The model, and how it answers: what a server and a file of requests share.
#[derive(clap::Args)]
pub(super) struct AppArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    residence: ResidenceArgs,
    /// Requests that are computed side by side, each with a context of its own [short: -np]
    #[arg(long, value_name = "N", default_value_t = 16, env = "LLAMA_ARG_N_PARALLEL",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) parallel: u32,
    /// Most memory for adapters (--lora), such as 512M: those used least recently are read again
    /// when they are asked for [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    lora_budget: Option<u64>,
    /// Most tokens of an answer if the request says nothing; -1 is as many as the context holds
    #[arg(short, long, alias = "predict", value_name = "N", default_value_t = -1, env = "LLAMA_ARG_N_PREDICT",
          allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..))]
    n_predict: i64,
    /// Jinja file to use instead of the model's chat template
    #[arg(
        long,
        value_name = "FILE",
        alias = "template",
        env = "LLAMA_ARG_CHAT_TEMPLATE_FILE"
    )]
    chat_template_file: Option<PathBuf>,
    /// What the template is told besides the conversation, as in {"enable_thinking": false};
    /// requests may say otherwise
    #[arg(long, value_name = "JSON", env = "LLAMA_ARG_CHAT_TEMPLATE_KWARGS", value_parser = json_object)]
    chat_template_kwargs: Option<Map<String, Value>>,
    #[command(flatten)]
    speculation: SpeculationArgs,
    #[command(flatten)]
    session: SessionArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    app: AppArgs,
    /// Address to listen on; 0.0.0.0 is reached from other machines: set --api-key then
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1",
        env = "LLAMA_ARG_HOST"
    )]
    host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8080, env = "LLAMA_ARG_PORT")]
    port: u16,
    /// Name of the model in the API [default: its file name]
    #[arg(short, long, value_name = "NAME", env = "LLAMA_ARG_ALIAS")]
    alias: Option<String>,
    /// Key that requests have to bring; repeatable, or several separated by commas
    #[arg(
        long,
        value_name = "KEY",
        value_delimiter = ',',
        env = "LLAMA_API_KEY",
        hide_env_values = true
    )]
    api_key: Vec<String>,
    /// File with a key on each line; lines that begin with # are comments
    #[arg(long, value_name = "FILE", env = "LLAMA_ARG_API_KEY_FILE")]
    api_key_file: Option<PathBuf>,
    /// Requests that run or wait; more are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    max_requests: u32,
    /// Most memory for the bodies of requests that are being read, beyond 64 KiB for each; who
    /// finds no room is refused with status 429
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    body_budget: u64,
    /// Web pages that may send requests from browsers, as in https://example.com, separated by commas; * is any
    /// [default: none but the server's own]
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',', env = "LLAMA_ARG_CORS_ORIGINS", value_parser = origin)]
    cors_origins: Vec<HeaderValue>,
    /// Most milliseconds between two tokens that prompts of others may cause [default: twice what
    /// it is without]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    max_itl_ms: Option<u64>,
    /// Time for which a client may read nothing of its answer, or on a new connection (of ten
    /// seconds at most) send no request, then its connection is closed [short: -to]
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, env = "LLAMA_ARG_TIMEOUT", value_parser = positive)]
    timeout: f64,
    /// Time in one pass after which /health answers 503
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = positive)]
    watchdog_seconds: f64,
    /// With --sona: learn from each key's requests for that key alone
    #[arg(long, requires = "sona")]
    learn_per_user: bool,
    #[command(flatten)]
    sona: SonaArgs,
    #[command(flatten)]
    log: LogArgs,
    #[command(flatten)]
    witness: WitnessArgs,
}

/// A number of seconds above 0.
fn positive(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is no number"))?;
    if (0.001..=1e6).contains(&seconds) {
        Ok(seconds)
    } else {
        Err("expected 0.001 to 1000000".into())
    }
}

/// What handlers use.
struct App {
    model: Model,
    tokenizer: Arc<Tokenizer>,
    engine: Engine,
    scheduler: Scheduler,
    /// Who drafts for each request.
    speculation: Option<Speculation>,
    metrics: Metrics,
    witness: Option<Witness>,
    watchdog: Watchdog,
    name: String,
    path: String,
    created: u64,
    n_ctx: usize,
    n_parallel: usize,
    max_requests: usize,
    preparing: Arc<Semaphore>,
    /// Requests for vectors or scores that are computed side by side; more wait.
    pooling: Semaphore,
    template: ChatTemplate,
    /// What the template is told if a request says nothing else.
    kwargs: Map<String, Value>,
    tool_format: ToolFormat,
    bos: String,
    eos: String,
    /// Strings that end any answer.
    stop: Vec<String>,
    trie: TokenTrie,
    sampling: SamplerBuilder,
    /// Texts across which DRY sees no repetition, and their tokens.
    breakers: (Vec<String>, Vec<Vec<u32>>),
    mask: Option<Box<dyn TokenMask>>,
    seed: Option<u64>,
    max_tokens: Option<usize>,
    adapters: Vec<ServedAdapter>,
    registry: AdapterRegistry,
    /// By key; empty if nothing is learnt.
    learners: Vec<Arc<Learner>>,
    /// Whether the template knows the role `developer`.
    knows_developer: bool,
}

/// An adapter that requests may ask for.
struct ServedAdapter {
    /// Its file's, without the ending.
    name: String,
    path: PathBuf,
    /// What it is multiplied by if a request says nothing.
    scale: f32,
}

impl ServedAdapter {
    /// Its name in the registry: files may have one name, in several folders.
    fn key(&self) -> String {
        self.path.display().to_string()
    }
}

impl App {
    /// Keeps what was measured of passes, which says how much it pays to draft, for the next start.
    fn keep_measured(&self) {
        if self.speculation.is_some() {
            measured::keep(&self.engine, &self.path, None);
        }
    }

    /// The seed of a request that has none.
    fn seed(&self) -> u64 {
        // 32 bits are easier to type again.
        self.seed.unwrap_or_else(|| random() >> 32)
    }

    /// The names by which requests ask for the model with an adapter.
    fn adapted_names(&self) -> Vec<String> {
        self.adapters
            .iter()
            .map(|adapter| format!("{}:{}", self.name, adapter.name))
            .collect()
    }

    /// All names by which requests ask for it.
    fn names(&self) -> impl Iterator<Item = String> {
        std::iter::once(self.name.clone()).chain(self.adapted_names())
    }

    /// Refuses a request that would find the queue full, before its template, grammar or text is
    /// prepared.
    fn has_room(&self) -> Result<(), ApiError> {
        let max = self.max_requests;
        if self.scheduler.n_requests() < max {
            Ok(())
        } else {
            Err(ScheduleError::QueueFull { max }.into())
        }
    }

    /// Refuses a request for more answers than there ever is room for: it would be told to come
    /// again for ever.
    fn can_hold(&self, n_answers: usize) -> Result<(), ApiError> {
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
    async fn prepare<T: Send + 'static>(
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
}

/// The application, once the model is there.
#[derive(Clone)]
struct Shared {
    app: Arc<OnceLock<Arc<App>>>,
    keys: Arc<Vec<String>>,
    bodies: Arc<Budget>,
    /// Pages of others that may ask.
    origins: Arc<Vec<HeaderValue>>,
}

impl Shared {
    /// Of a server whose model is still to be loaded.
    fn new(args: &Args) -> Result<Shared, Failure> {
        Ok(Shared {
            app: Arc::default(),
            keys: Arc::new(keys(args)?),
            bodies: Budget::new(usize::try_from(args.body_budget).unwrap_or(usize::MAX)),
            origins: Arc::new(args.cors_origins.clone()),
        })
    }

    fn app(&self) -> Result<Arc<App>, ApiError> {
        self.app.get().cloned().ok_or_else(ApiError::loading)
    }

    /// The application, if it takes another request.
    fn app_with_room(&self) -> Result<Arc<App>, ApiError> {
        let app = self.app()?;
        app.has_room()?;
        Ok(app)
    }
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    // Addresses of IPv6 are written in brackets where a port follows.
    let host = args
        .host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(&args.host);
    let listener = TcpListener::bind((host, args.port)).map_err(|error| {
        Failure::Work(format!(
            "cannot listen on {}:{}: {error}",
            args.host, args.port
        ))
    })?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let (shared, args) = (Shared::new(&args)?, Arc::new(args));
    args.log.start()?;
    if !address.ip().is_loopback() && shared.keys.is_empty() {
        args.log.say(format!(
            "warning: {address} is reached by others, and no --api-key is set"
        ));
    }
    let (stop, stopped) = channel::channel(0u32);
    let interrupt = stop.clone();
    on_interrupt(move || interrupt.send_modify(|n| *n += 1))?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime
        .worker_threads(2)
        .max_blocking_threads(MAX_BLOCKING)
        .thread_keep_alive(Duration::from_secs(2));
    let runtime = runtime.enable_all().build()?;
    let (failed, failure) = mpsc::channel();
    let (of_loader, to) = (Arc::clone(&args), shared.clone());
    let loader = move || match load(&of_loader, &to.keys) {
        Ok(app) => {
            let ready = format!("{} is ready on http://{address}", app.name);
            drop(to.app.set(Arc::new(app)));
            of_loader.log.say(ready);
        }
        Err(end) => {
            let _ = failed.send(end);
            stop.send_modify(|n| *n += 2);
        }
    };
    // Its end is not awaited: it may take as long as the download of a model.
    std::thread::Builder::new()
        .name("loader".into())
        .spawn(loader)?;
    runtime.block_on(serve(listener, router(shared.clone()), stopped, &args))?;
    // Streams that nobody reads any more end with it.
    runtime.shutdown_timeout(Duration::from_secs(1));
    if let Some(app) = shared.app.get() {
        app.witness.iter().for_each(Witness::flush);
        app.keep_measured();
    }
    match failure.try_recv() {
        Ok(failure) => Err(failure),
        Err(_) if shared.app.get().is_none() => Err(Failure::Interrupted),
        Err(_) => Ok(()),
    }
}

fn keys(args: &Args) -> Result<Vec<String>, Failure> {
    let of_file = args
        .api_key_file
        .as_deref()
        .map(read_text)
        .transpose()?
        .unwrap_or_default();
    let lines = of_file.lines().filter(|line| !line.starts_with('#'));
    let keys = args
        .api_key
        .iter()
        .map(String::as_str)
        .chain(lines)
        .map(str::trim);
    let keys: Vec<_> = keys
        .filter(|key| !key.is_empty())
        .map(str::to_owned)
        .collect();
    if keys.is_empty() && args.api_key_file.is_some() {
        return Err(Failure::Usage(
            "--api-key-file: there is no key in it".into(),
        ));
    }
    Ok(keys)
}

fn load(args: &Args, keys: &[String]) -> Result<App, Failure> {
    let mut app = App::open(
        &args.app,
        Purpose {
            alias: args.alias.clone(),
            learns: args.sona.sona.is_some(),
            reuse: Reuse::Any,
            max_requests: args.max_requests as usize,
            max_itl: args.max_itl_ms.map(Duration::from_millis),
            watchdog: Duration::from_secs_f64(args.watchdog_seconds),
            witness: Some(&args.witness),
        },
    )?;
    app.learners = Learner::all(args, keys, &app.engine)?;
    Ok(app)
}

/// What an application is for.
struct Purpose<'a> {
    alias: Option<String>,
    /// Whether requests will have adapters that are learnt.
    learns: bool,
    reuse: Reuse,
    max_requests: usize,
    max_itl: Option<Duration>,
    watchdog: Duration,
    witness: Option<&'a WitnessArgs>,
}

impl App {
    fn open(args: &AppArgs, purpose: Purpose<'_>) -> Result<App, Failure> {
        let model = args.model.open(&args.residence)?;
        let tokenizer = model
            .tokenizer()
            .ok_or_else(|| crate::flags::no_tokenizer(&args.model))?
            .clone();
        let mut stop = Vec::new();
        let source = match (&args.chat_template_file, model.chat_template()) {
            (Some(path), _) => read_regular(path)?,
            (None, Some(source)) => source.to_owned(),
            (None, None) => {
                note(
                    "The model has no chat template: conversations go on after \"User:\" and \"Assistant:\".",
                );
                stop.push(TRANSCRIPT_STOP.to_owned());
                TRANSCRIPT.to_owned()
            }
        };
        let mut options = args
            .session
            .for_model(&args.session.options(None, KvType::default()), &model);
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
        let engine = args.session.engine(&model, purpose.learns, &options)?;
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
        let witness = purpose
            .witness
            .map(|witness| witness.open(&metrics.witness_dropped))
            .transpose()?
            .flatten();
        let watch = Watch {
            metrics: metrics.clone(),
            witness: witness.clone(),
            watchdog: watchdog.clone(),
        };
        let scheduler = Scheduler::observed(&engine, &schedule, watch).map_err(Error::from)?;
        let file_name = args.model.file_name().to_string_lossy().into_owned();
        Ok(App {
            learners: Vec::new(),
            sampling: args.sampling.builder(model.gguf().metadata(), &tokenizer)?,
            breakers: args.sampling.breakers(&tokenizer),
            mask: args.sampling.mask(&tokenizer)?,
            seed: args.sampling.given_seed(),
            trie: TokenTrie::new(&tokenizer)?,
            name: purpose.alias.unwrap_or(file_name),
            path: args.model.label(),
            created: unix_time(),
            n_ctx,
            n_parallel: schedule.n_parallel,
            max_requests: schedule.max_requests,
            preparing: Arc::new(Semaphore::new(
                std::thread::available_parallelism().map_or(1, |n| n.get()),
            )),
            pooling: Semaphore::new(MAX_POOLING),
            template: ChatTemplate::parse(&source)?,
            kwargs: args.chat_template_kwargs.clone().unwrap_or_default(),
            knows_developer: source.contains("developer"),
            tool_format: ToolFormat::of(&source),
            bos: bos_text(Some(&tokenizer)),
            eos: eos_text(Some(&tokenizer)),
            max_tokens: usize::try_from(args.n_predict).ok(),
            model,
            tokenizer,
            engine,
            scheduler,
            speculation,
            metrics,
            witness,
            watchdog,
            stop,
            adapters,
            registry,
        })
    }
}

/// A server without a socket: its requests come from this process, which limits their number.
pub(super) fn local(args: &AppArgs) -> Result<Router, Failure> {
    let purpose = Purpose {
        alias: None,
        learns: false,
        // An answer does not depend on those before.
        reuse: Reuse::Prompt,
        max_requests: usize::MAX,
        max_itl: None,
        watchdog: Duration::MAX,
        witness: None,
    };
    let app = Arc::new(Arc::new(App::open(args, purpose)?).into());
    Ok(router(Shared {
        app,
        keys: Arc::default(),
        bodies: Budget::new(usize::MAX),
        origins: Arc::default(),
    }))
}

fn router(shared: Shared) -> Router {
    let protected = api::protected()
        .fallback(async || {
            ApiError::new(
                StatusCode::NOT_FOUND,
                "not_found_error",
                "there is nothing at this path",
            )
        })
        .method_not_allowed_fallback(not_allowed)
        .layer(from_fn_with_state(shared.clone(), authorize));
    let all = api::public()
        .merge(page::routes())
        .method_not_allowed_fallback(not_allowed)
        .merge(protected);
    all.layer(from_fn_with_state(shared.clone(), cors::allow))
        .layer(from_fn(log::name_and_log))
        .with_state(shared)
}

async fn not_allowed(method: Method) -> ApiError {
    let message = format!("this path takes no {method}");
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "invalid_request_error",
        message,
    )
}

/// Whose request it is.
#[derive(Clone)]
struct Caller {
    /// The request's name.
    request: Arc<str>,
    path: Arc<str>,
    /// Each key is a tenant of its own, who sees no other's cached prompts.
    tenant: Arc<str>,
}

/// Lets requests with a key pass, if there are keys.
async fn authorize(State(shared): State<Shared>, mut request: Request, next: Next) -> Response {
    let key = key_of(request.headers(), &shared.keys);
    if key.is_none() && !shared.keys.is_empty() {
        let message =
            "the key is missing or wrong: expected the header \"Authorization: Bearer KEY\"";
        return ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message)
            .into_response();
    }
    if let (Some(key), Some(caller)) = (key, request.extensions_mut().get_mut::<Caller>()) {
        caller.tenant = key.to_string().into();
    }
    next.run(request).await
}

/// Which of `keys` is there. All of them are compared, each in a time that tells nothing of where
/// they differ.
fn key_of(headers: &HeaderMap, keys: &[String]) -> Option<usize> {
    let bearer = headers
        .get(header::AUTHORIZATION)
        .map(HeaderValue::as_bytes);
    let bearer = bearer.and_then(|value| value.split_at_checked("Bearer ".len()));
    let bearer = bearer
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"Bearer "))
        .map(|(_, key)| key);
    let given = bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes))?;
    let is_it = |key: &String| bool::from(key.as_bytes().ct_eq(given));
    keys.iter().enumerate().fold(
        None,
        |found, (i, key)| if is_it(key) { Some(i) } else { found },
    )
}

/// Serves connections until `stopped`, then answers what was asked; the second time it ends at
/// once.
async fn serve(
    listener: TcpListener,
    router: Router,
    mut stopped: channel::Receiver<u32>,
    args: &Args,
) -> Result<(), Failure> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (graceful, permits) = (
        GracefulShutdown::new(),
        Arc::new(Semaphore::new(MAX_CONNECTIONS)),
    );
    let http = http_builder();
    loop {
        let accept = async {
            let permit = Arc::clone(&permits).acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, accepted) =
            match select(pin!(accept), pin!(stopped.wait_for(|&n| n > 0))).await {
                Either::Left((accepted, _)) => accepted,
                Either::Right(_) => break,
            };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Most often there are no descriptors left, for a while.
                tracing::warn!(target: log::HTTP, %error, "a connection was not accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // Tokens are sent one by one.
        let _ = stream.set_nodelay(true);
        let asked = Arc::new(Notify::new());
        let (service, begins) = (TowerToHyperService::new(router.clone()), Arc::clone(&asked));
        let service = service_fn(move |request| {
            begins.notify_one();
            service.call(request)
        });
        let limit = Duration::from_secs_f64(args.timeout);
        let stream = TokioIo::new(Sending::new(stream, limit));
        let connection = graceful.watch(http.serve_connection(stream, service));
        tokio::spawn(async move {
            let mut connection = pin!(connection);
            let first = tokio::time::timeout(limit.min(HEADER_TIMEOUT), asked.notified());
            if let Either::Right((Ok(()), _)) = select(connection.as_mut(), pin!(first)).await {
                // A client that went away is no failure of the server.
                let _ = connection.await;
            }
            drop(permit);
        });
    }
    drop(listener);
    if *stopped.borrow() < 2 {
        args.log.say("ending; what was asked is answered first");
        select(
            pin!(graceful.shutdown()),
            pin!(stopped.wait_for(|&n| n > 1)),
        )
        .await;
    }
    Ok(())
}

/// How connections are served.
fn http_builder() -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(IDLE_TIMEOUT)
        .max_buf_size(HEAD);
    http
}

/// Does what may take longer than a moment.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(ApiError::internal(error.to_string())))
}

/// A new identifier.
fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}", random())
}

/// 64 bits that nobody knows before.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
