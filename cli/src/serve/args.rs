//! Flags of the server, and of the model behind it.

use super::http::cors::origin;
use super::observe::audit_log::AuditLogArgs;
use super::observe::log::LogArgs;
use crate::flags::template::TemplateArgs;
use crate::flags::{
    LearnArgs, ModelArgs, PlacementArgs, ProjectorArgs, SamplingArgs, SessionArgs, SpeculationArgs,
};
use crate::io::{json_object, parse_size};
use axum::http::HeaderValue;
use clap::builder::BoolishValueParser;
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// The model, and how it answers: what a server and a file of requests share.
#[derive(clap::Args)]
#[command(next_help_heading = None::<&'static str>)]
pub(crate) struct AppArgs {
    #[command(flatten)]
    pub(super) model: ModelArgs,
    /// Maximum number of requests computed side by side (continuous batching), each with a context of
    /// its own [short: -np]
    #[arg(long, value_name = "N", default_value_t = 16, env = "LLAMA_ARG_N_PARALLEL",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) parallel: u32,
    /// Most memory for adapters (--lora), such as 512M: those used least recently are read again
    /// when they are asked for [default: no limit]
    #[arg(long, value_name = "SIZE", help_heading = "Adapters (LoRA)", value_parser = parse_size)]
    pub(super) lora_budget: Option<u64>,
    /// Folder of adapters that `POST /v1/load_lora_adapter` may name
    #[arg(long, value_name = "DIR", help_heading = "Adapters (LoRA)")]
    pub(super) lora_dir: Option<PathBuf>,
    /// Folder in which POST /slots/ID?action=save keeps the text of a slot
    #[arg(long, value_name = "DIR", help_heading = "KV cache")]
    pub(super) slot_save_path: Option<PathBuf>,
    /// Maximum number of tokens of an answer if the request sets none (-1: until the context is full)
    #[arg(short, long, aliases = ["predict", "max-tokens"], value_name = "N", default_value_t = -1, env = "LLAMA_ARG_N_PREDICT",
          allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..))]
    pub(super) n_predict: i64,
    /// When the context of a request is full, drop half of what lies behind the tokens of --keep and
    /// go on [default: end the answer]
    #[arg(long, help_heading = "Context", env = "LLAMA_ARG_CONTEXT_SHIFT", value_parser = BoolishValueParser::new())]
    pub(super) context_shift: bool,
    /// Tokens at the beginning that --context-shift keeps, rounded up to 64
    #[arg(
        long,
        value_name = "N",
        help_heading = "Context",
        default_value_t = 0,
        requires = "context_shift",
        allow_negative_numbers = true
    )]
    pub(super) keep: u32,
    /// Leave out the end of a text that has more tokens than the model takes, instead of refusing
    /// it, where its vector is wanted; a request may say otherwise (`truncate`)
    #[arg(long)]
    pub(super) embd_truncate: bool,
    /// What the template is told besides the conversation, as in {"enable_thinking": false};
    /// requests may say otherwise
    #[arg(long, value_name = "JSON", help_heading = "Chat template", env = "LLAMA_ARG_CHAT_TEMPLATE_KWARGS", value_parser = json_object)]
    pub(super) chat_template_kwargs: Option<Map<String, Value>>,
    /// Hosts whose images the server fetches for requests that name their addresses, separated by
    /// commas, as in images.example.com or example.com:8443 [default: none, images come as data]
    #[arg(
        long,
        value_name = "HOSTS",
        help_heading = "Images",
        value_delimiter = ','
    )]
    pub(super) allow_image_urls: Vec<String>,
    #[command(flatten)]
    pub(super) placement: PlacementArgs,
    #[command(flatten)]
    pub(super) template: TemplateArgs,
    #[command(flatten)]
    pub(super) projector: ProjectorArgs,
    #[command(flatten)]
    pub(super) speculation: SpeculationArgs,
    #[command(flatten)]
    pub(super) session: SessionArgs,
    #[command(flatten)]
    pub(super) sampling: SamplingArgs,
}

/// The server: what it serves, to whom, and what it tells.
#[derive(clap::Args)]
#[command(next_help_heading = "Server")]
pub(crate) struct ServerArgs {
    /// Address to listen on; 0.0.0.0 is reached from other machines: set --api-key then. unix:PATH, or
    /// a path that ends in .sock, is a socket in the file system
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1",
        env = "LLAMA_ARG_HOST"
    )]
    pub(super) host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8080, env = "LLAMA_ARG_PORT")]
    pub(super) port: u16,
    /// Name of the model in the API [default: its file name]
    #[arg(short, long, value_name = "NAME", env = "LLAMA_ARG_ALIAS")]
    pub(super) alias: Option<String>,
    /// Key that requests have to bring; repeatable, or several separated by commas
    #[arg(
        long,
        value_name = "KEY",
        value_delimiter = ',',
        env = "LLAMA_API_KEY",
        hide_env_values = true
    )]
    pub(super) api_key: Vec<String>,
    /// File with a key on each line; lines that begin with # are comments
    #[arg(long, value_name = "FILE", env = "LLAMA_ARG_API_KEY_FILE")]
    pub(super) api_key_file: Option<PathBuf>,
    /// Maximum number of requests that run or wait; more are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) max_requests: u32,
    /// Most memory for the bodies of requests that are being read, beyond 64 KiB for each; who
    /// finds no room is refused with status 429
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    pub(super) body_budget: u64,
    /// Web pages that may send requests from browsers, as in https://example.com, separated by commas; * is any
    /// [default: none but the server's own]
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',', env = "LLAMA_ARG_CORS_ORIGINS", value_parser = origin)]
    pub(super) cors_origins: Vec<HeaderValue>,
    /// Refuse requests with a field that the server does not know, instead of naming it in the
    /// answer's header x-ruvllm-ignored
    #[arg(long)]
    pub(super) strict: bool,
    /// Most milliseconds between two tokens that prompts of others may cause [default: twice what
    /// it is without]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) max_itl_ms: Option<u64>,
    /// Time for which a client may read nothing of its answer, or on a new connection (of ten
    /// seconds at most) send no request, then its connection is closed [short: -to]
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, env = "LLAMA_ARG_TIMEOUT", value_parser = positive)]
    pub(super) timeout: f64,
    /// Time in one pass after which /health answers 503
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = positive)]
    pub(super) watchdog_seconds: f64,
    /// With --learn: learn from each key's requests for that key alone
    #[arg(long, requires = "learn", help_heading = "Learning")]
    pub(super) learn_per_user: bool,
    /// Remember in this folder what POST /memory says, for each key by itself; what is like a
    /// question is told to the model before it, unless the request says "use_memory": false
    #[arg(long, value_name = "DIR", help_heading = "Learning")]
    pub(super) memory: Option<PathBuf>,
    /// With --memory: train an adapter on each key's entries while there are no requests, once 16 are
    /// new; the model must stay good at this text
    #[arg(
        long,
        value_name = "FILE",
        requires = "memory",
        help_heading = "Learning"
    )]
    pub(super) memory_control: Option<PathBuf>,
    /// The flags as they were given, for models with more of their own.
    #[arg(skip)]
    pub(crate) given: Vec<OsString>,
    #[command(flatten)]
    pub(super) app: AppArgs,
    #[cfg(all(feature = "tls", not(any(windows, target_vendor = "apple"))))]
    #[command(flatten)]
    pub(super) tls: super::http::tls::TlsArgs,
    #[command(flatten)]
    pub(super) models: ModelsArgs,
    #[command(flatten)]
    pub(super) learn: LearnArgs,
    #[command(flatten)]
    pub(super) log: LogArgs,
    #[command(flatten)]
    pub(super) audit_log: AuditLogArgs,
}

/// Several models in one server.
#[derive(clap::Args)]
#[command(next_help_heading = "Several models")]
pub(super) struct ModelsArgs {
    /// Folder of GGUF files that requests may name; each is loaded when it is first asked for
    #[arg(long, value_name = "DIR", env = "LLAMA_ARG_MODELS_DIR")]
    pub(super) models_dir: Option<PathBuf>,
    /// File with a section for each model, and its flags without their dashes: [name], then
    /// model = FILE, ctx-size = 8192; those of [*] are for all
    #[arg(long, value_name = "FILE", env = "LLAMA_ARG_MODELS_PRESET")]
    pub(super) models_preset: Option<PathBuf>,
    /// Maximum number of loaded models; the least recently used one is unloaded first (0: as many as
    /// fit into memory)
    #[arg(long, value_name = "N", default_value_t = 4, env = "LLAMA_ARG_MODELS_MAX", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(..=1024))]
    pub(super) models_max: u32,
    /// Unload a model that nobody has asked for in so many seconds; -1 is never
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true,
          value_parser = clap::value_parser!(i64).range(-1..))]
    sleep_idle_seconds: i64,
}

impl ModelsArgs {
    /// For how long an idle model stays, if not for ever.
    pub(super) fn sleep_idle(&self) -> Option<Duration> {
        u64::try_from(self.sleep_idle_seconds)
            .ok()
            .map(Duration::from_secs)
    }
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
