//! Flags that name a model and say how to run it, and what comes of them.

use super::output::{Failure, Progress, note, size};
use clap::Args;
use clap::builder::BoolishValueParser;
use ruvllm::exec::{KvType, MemoryEstimate, Session, SessionOptions};
use ruvllm::gguf::{Gguf, Header};
use ruvllm::lora::Adapter;
use ruvllm::model::{Model, Residence};
use ruvllm::tokenizer::Tokenizer;
use ruvllm::{AdapterError, ModelError};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The model in `models/`, so that the first command needs no download.
mod demo {
    pub(super) const NAME: &str = "ruvllm-rust-6m-q8_0.gguf";

    #[repr(align(64))]
    struct Aligned<T: ?Sized>(T);

    /// Aligned, so that tensors are used in place.
    static FILE: &Aligned<[u8]> =
        &Aligned(*include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/models/ruvllm-rust-6m-q8_0.gguf")));

    pub(super) fn bytes() -> &'static [u8] {
        &FILE.0
    }
}

/// Which model.
#[derive(Args)]
pub(super) struct ModelArgs {
    /// GGUF file, or any part of a split one [default: the built-in demo model]
    #[arg(short, long, value_name = "FILE", env = "LLAMA_ARG_MODEL")]
    pub(super) model: Option<PathBuf>,
}

impl ModelArgs {
    /// What to call it.
    pub(super) fn label(&self) -> String {
        match &self.model {
            Some(path) => path.display().to_string(),
            None => format!("built-in {}", demo::NAME),
        }
    }

    /// Its file name.
    pub(super) fn file_name(&self) -> OsString {
        self.model.as_deref().and_then(Path::file_name).unwrap_or(demo::NAME.as_ref()).to_owned()
    }

    /// Whether it is the built-in one.
    pub(super) fn is_demo(&self) -> bool {
        self.model.is_none()
    }

    /// The header alone.
    pub(super) fn header(&self) -> Result<Header, Failure> {
        match &self.model {
            Some(path) => Ok(Header::read(path)?),
            None => Ok(Header::parse(demo::bytes(), demo::bytes().len() as u64)?),
        }
    }

    /// The tokenizer, from the header alone.
    pub(super) fn tokenizer(&self) -> Result<Tokenizer, Failure> {
        let metadata = self.header()?.metadata;
        Tokenizer::from_metadata(&metadata).map_err(|error| Failure::Work(format!("{}: {error}", self.label())))
    }

    /// The file.
    pub(super) fn gguf(&self) -> Result<Gguf, Failure> {
        match &self.model {
            Some(path) => Ok(Gguf::open(path)?),
            None => Ok(Gguf::from_bytes(demo::bytes())?),
        }
    }

    /// The model, ready to run.
    pub(super) fn open(&self, residence: ResidenceArgs) -> Result<Model, Failure> {
        let gguf = self.gguf()?;
        let progress = Progress::new("loading", 1000);
        let model = Model::from_gguf(gguf, &mut |done| {
            progress.set((done * 1000.0) as u64);
            true
        });
        let model = model.map_err(|error| match error {
            ModelError::Arch(error) => error.into(),
            error => Failure::Work(format!("{}: {error}", self.label())),
        })?;
        residence.apply(model)
    }
}

/// Where weights are read from.
#[derive(Args, Clone, Copy, Default)]
pub(super) struct ResidenceArgs {
    /// Read weights from the mapped file only [default: decoding copies them to huge pages in the
    /// background if memory allows]
    #[arg(long, env = "LLAMA_ARG_MMAP", conflicts_with = "no_mmap", value_parser = BoolishValueParser::new())]
    mmap: bool,
    /// Copy weights to huge pages before starting
    #[arg(long, env = "LLAMA_ARG_NO_MMAP", value_parser = BoolishValueParser::new())]
    no_mmap: bool,
}

impl ResidenceArgs {
    /// `model` with weights there.
    pub(super) fn apply(self, model: Model) -> Result<Model, Failure> {
        let residence = match (self.mmap, self.no_mmap) {
            (true, _) => Residence::Mapped,
            (_, true) => Residence::Copied,
            _ => Residence::Background,
        };
        let progress = Progress::new("copying weights", 1000);
        let model = model.with_residence(residence, &mut |done| {
            progress.set((done * 1000.0) as u64);
            true
        });
        model.map_err(|error| Failure::Work(error.to_string()))
    }
}

/// More threads than machines have cores only take memory.
pub(super) const MAX_THREADS: i64 = 1024;

/// Positions are numbers of 31 bits.
const MAX_CTX: i64 = i32::MAX as i64;

/// Size of a session.
#[derive(Args)]
pub(super) struct SessionArgs {
    /// Tokens the context holds; 0 is as many as the model was trained for
    /// [default: the model's own, at most 4096]
    #[arg(short, long, value_name = "N", env = "LLAMA_ARG_CTX_SIZE", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(..=MAX_CTX))]
    ctx_size: Option<u32>,
    /// Most tokens of the prompt to compute at a time
    #[arg(short, long, value_name = "N", default_value_t = 2048, env = "LLAMA_ARG_BATCH", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    /// As --batch-size; the smaller one counts [short: -ub]
    #[arg(long, value_name = "N", default_value_t = 512, env = "LLAMA_ARG_UBATCH", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    ubatch_size: u32,
    /// Threads, at most 1024; 0 or less is as many as this process may use
    #[arg(short, long, value_name = "N", default_value_t = -1, env = "LLAMA_ARG_THREADS", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i32).range(..=MAX_THREADS))]
    threads: i32,
    #[command(flatten)]
    cache_type: CacheTypeArgs,
    #[command(flatten)]
    pub(super) lora: LoraArgs,
}

/// Precision of keys and values.
#[derive(Args)]
pub(super) struct CacheTypeArgs {
    /// Type of the key/value cache: f32 or f16 [default: f16; for `logits` f32] [short: -ctk]
    #[arg(long, value_name = "TYPE", env = "LLAMA_ARG_CACHE_TYPE_K")]
    cache_type_k: Option<KvType>,
    /// The same; keys and values have one type, so name either or both alike [short: -ctv]
    #[arg(long, value_name = "TYPE", env = "LLAMA_ARG_CACHE_TYPE_V")]
    cache_type_v: Option<KvType>,
}

impl CacheTypeArgs {
    /// The type, `default` where the flags are not given.
    pub(super) fn kv_type(&self, default: KvType) -> Result<KvType, Failure> {
        match (self.cache_type_k, self.cache_type_v) {
            (Some(k), Some(v)) if k != v => {
                Err(Failure::Usage("keys and values have one type: give -ctk and -ctv the same, or only one".into()))
            }
            (k, v) => Ok(k.or(v).unwrap_or(default)),
        }
    }
}

/// Adapters.
#[derive(Args)]
pub(super) struct LoraArgs {
    /// LoRA adapter to add to the model's weights; repeatable, or several separated by commas
    #[arg(long, value_name = "FILE", value_delimiter = ',')]
    lora: Vec<PathBuf>,
    /// The same, with a factor on what it adds
    #[arg(long, value_name = "FILE:SCALE", value_delimiter = ',')]
    lora_scaled: Vec<String>,
}

impl LoraArgs {
    /// The adapters with their scales.
    pub(super) fn open(&self, model: &Model) -> Result<Vec<(Arc<Adapter>, f32)>, Failure> {
        let scaled = self.lora_scaled.iter().map(|text| {
            let parts = text.rsplit_once(':').and_then(|(path, scale)| Some((Path::new(path), scale.parse().ok()?)));
            parts
                .filter(|(_, scale): &(_, f32)| scale.is_finite())
                .ok_or_else(|| Failure::Usage(format!("--lora-scaled {text}: expected FILE:SCALE, a finite number")))
        });
        let all = self.lora.iter().map(|path| Ok((path.as_path(), 1.0))).chain(scaled);
        all.map(|part| {
            let (path, scale) = part?;
            let adapter = Adapter::open(path, model);
            let adapter = adapter.map_err(|error| match error {
                AdapterError::Gguf(error) => Failure::Work(error.to_string()), // names the file
                error => Failure::Work(format!("{}: {error}", path.display())),
            })?;
            Ok((Arc::new(adapter), scale))
        })
        .collect()
    }
}

impl SessionArgs {
    /// Options of the session, with these values where the flags are not given.
    pub(super) fn options(&self, n_ctx: Option<usize>, kv_type: KvType) -> Result<SessionOptions, Failure> {
        Ok(SessionOptions {
            n_ctx: self.ctx_size.map(|n| n as usize).or(n_ctx),
            n_batch: self.batch_size.min(self.ubatch_size) as usize,
            kv_type: self.cache_type.kv_type(kv_type)?,
            n_threads: usize::try_from(self.threads).unwrap_or(0),
            ..SessionOptions::default()
        })
    }
}

/// A session with the adapters that the flags name, to be asked for the logits of up to `rows` tokens at a time;
/// warns when a full context would not fit into memory.
pub(super) fn session<'m>(
    model: &'m Model,
    options: &SessionOptions,
    lora: &LoraArgs,
    rows: usize,
) -> Result<Session<'m>, Failure> {
    let mut session = model.session_with(options)?;
    for (adapter, scale) in lora.open(model)? {
        session.attach(adapter, scale)?;
    }
    let rows = rows.min(options.n_batch).min(session.n_ctx());
    let need = MemoryEstimate::of(model.hparams(), options).with_logits(model.hparams(), rows);
    let rank = session.adapters().map(|(_, adapter, _)| adapter.max_rank()).sum();
    let need = need.with_adapters(rank, options).total();
    if let Some(free) = available_memory().filter(|&free| need > free) {
        note(format!(
            "warning: a full context of {} tokens takes {}, but {} of memory are free; use a smaller -c",
            session.n_ctx(),
            size(need),
            size(free)
        ));
    }
    let trained = model.hparams().n_ctx_train;
    if session.n_ctx() > trained {
        note(format!("warning: a context of {} tokens, but the model was trained for {trained}", session.n_ctx()));
    }
    Ok(session)
}

/// A value of `/proc/meminfo` in bytes.
pub(super) fn meminfo(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Memory that can be had without swapping, where the system tells.
pub(super) fn available_memory() -> Option<u64> {
    meminfo("MemAvailable")
}
