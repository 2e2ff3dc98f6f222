//! Flags that name a model and say how to run it, and what comes of them.

use crate::io::memory::parse_size;
use crate::io::{Failure, Progress, note, size};
use clap::Args;
use clap::builder::BoolishValueParser;
use ruvllm::arch::Arch;
use ruvllm::exec::{
    CacheMode, Engine, EngineOptions, KvTiers, KvType, PlanOptions, Preset, Session, SessionOptions,
};
use ruvllm::gguf::{Gguf, Header, Metadata, Value as MetadataValue};
use ruvllm::lora::Adapter;
use ruvllm::model::{Device, Model, OpenOptions, OpenStage, Residence};
use ruvllm::tokenizer::Tokenizer;
use ruvllm::{AdapterError, SystemMemory};
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The model in `models/`, so that the first command needs no download.
#[cfg(feature = "demo-model")]
mod demo {
    use super::Failure;

    pub(crate) const NAME: &str = "ruvllm-rust-6m-q8_0.gguf";

    #[repr(align(64))]
    struct Aligned<T: ?Sized>(T);

    /// Aligned, so that tensors are used in place.
    static FILE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    )));

    pub(crate) fn bytes() -> Result<&'static [u8], Failure> {
        Ok(&FILE.0)
    }
}

#[cfg(not(feature = "demo-model"))]
mod demo {
    use super::Failure;

    pub(crate) const NAME: &str = "demo model";

    pub(crate) fn bytes() -> Result<&'static [u8], Failure> {
        Err(Failure::Usage(
            "this build has no built-in model: name one with -m FILE".into(),
        ))
    }
}

/// Metadata of the built-in model.
pub(crate) fn demo_metadata() -> Result<Metadata, Failure> {
    let bytes = demo::bytes()?;
    Ok(Header::parse(bytes, bytes.len() as u64)?.metadata)
}

/// Which model.
#[derive(Args)]
pub(crate) struct ModelArgs {
    /// GGUF file, or any part of a split one [default: the built-in demo model]
    #[arg(short, long, value_name = "FILE", env = "LLAMA_ARG_MODEL")]
    model: Option<PathBuf>,
    /// Model of Hugging Face's hub, downloaded unless it is here: see `ruvllm pull` [short: -hf]
    #[cfg(feature = "pull")]
    #[arg(
        long,
        value_name = "OWNER/NAME[:QUANT]",
        env = "LLAMA_ARG_HF_REPO",
        conflicts_with = "model"
    )]
    hf_repo: Option<crate::pull::Name>,
    /// Where that one is, once it is needed.
    #[cfg(feature = "pull")]
    #[arg(skip)]
    fetched: std::sync::OnceLock<PathBuf>,
}

impl ModelArgs {
    /// Its file; none is the built-in one.
    #[cfg(feature = "pull")]
    fn path(&self) -> Result<Option<&Path>, Failure> {
        match (&self.hf_repo, self.fetched.get()) {
            (None, _) => Ok(self.model.as_deref()),
            (_, Some(path)) => Ok(Some(path)),
            (Some(name), None) => {
                let path = crate::pull::resolve(name)?;
                Ok(Some(self.fetched.get_or_init(|| path)))
            }
        }
    }

    /// Its file; none is the built-in one.
    #[cfg(not(feature = "pull"))]
    fn path(&self) -> Result<Option<&Path>, Failure> {
        Ok(self.model.as_deref())
    }

    /// What to call it.
    pub(crate) fn label(&self) -> String {
        match self.path() {
            Ok(Some(path)) => path.display().to_string(),
            Ok(None) => format!("built-in {}", demo::NAME),
            // It is not opened either.
            Err(_) => "the model".into(),
        }
    }

    /// Its file name.
    pub(crate) fn file_name(&self) -> OsString {
        let path = self.path().ok().flatten();
        path.and_then(Path::file_name)
            .unwrap_or(demo::NAME.as_ref())
            .to_owned()
    }

    /// Whether it is the built-in one.
    pub(crate) fn is_demo(&self) -> bool {
        matches!(self.path(), Ok(None))
    }

    /// The header alone.
    pub(crate) fn header(&self) -> Result<Header, Failure> {
        match self.path()? {
            Some(path) => Ok(Header::read(path)?),
            None => {
                let bytes = demo::bytes()?;
                Ok(Header::parse(bytes, bytes.len() as u64)?)
            }
        }
    }

    /// The tokenizer, from the header alone.
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer, Failure> {
        let metadata = self.header()?.metadata;
        Tokenizer::from_metadata(&metadata)
            .map_err(|error| Failure::Work(format!("{}: {error}", self.label())))
    }

    /// The file.
    pub(crate) fn gguf(&self) -> Result<Gguf, Failure> {
        match self.path()? {
            Some(path) => Ok(Gguf::open(path)?),
            None => Ok(Gguf::from_bytes(demo::bytes()?)?),
        }
    }

    /// The model, ready to run.
    pub(crate) fn open(&self, residence: &ResidenceArgs) -> Result<Model, Failure> {
        open(self.gguf()?, residence, &self.label())
    }
}

/// The model in a file that is called `label`, on the level that `RUVLLM_ARCH` asks for, with
/// progress.
pub(crate) fn open(gguf: Gguf, residence: &ResidenceArgs, label: &str) -> Result<Model, Failure> {
    let mut bar: Option<(OpenStage, Progress)> = None;
    let options = OpenOptions::new()
        .arch(level()?)
        .residence(residence.residence());
    let options = residence
        .memory_limit
        .into_iter()
        .fold(options, OpenOptions::memory_limit);
    let overrides = residence.override_kv.iter().cloned();
    let options = overrides.fold(options, |options, (key, value)| {
        options.override_kv(key, value)
    });
    let options = options
        .device(residence.device.device())
        .progress(|stage, share| {
            if bar.as_ref().is_none_or(|(shown, _)| *shown != stage) {
                bar = None; // clears the line before the next bar is drawn
                bar = Some((
                    stage,
                    Progress::new(
                        if stage == OpenStage::Copy {
                            "copying weights"
                        } else {
                            "loading"
                        },
                        1000,
                    ),
                ));
            }
            if let Some((_, bar)) = &bar {
                bar.set((share * 1000.0) as u64);
            }
            true
        });
    options
        .open_gguf(gguf)
        .map_err(|error| Failure::Work(format!("{label}: {error}")))
}

/// The instruction-set level that `RUVLLM_ARCH` names, if it is set, else the best of this CPU.
pub(crate) fn level() -> Result<Arch, Failure> {
    match forced_level() {
        Some(name) => Ok(Arch::named(&name)?),
        None => Ok(Arch::detect()),
    }
}

/// `RUVLLM_ARCH`, if it is set.
pub(crate) fn forced_level() -> Option<String> {
    std::env::var("RUVLLM_ARCH")
        .ok()
        .filter(|name| !name.is_empty())
}

/// What computes.
#[derive(Args, Clone, Copy, Default)]
struct DeviceArgs {
    /// How many of the last layers the GPU computes, 0 for none [default: all if there is an Apple
    /// GPU] [short: -ngl]
    #[cfg(any(feature = "metal", target_os = "macos"))]
    #[arg(
        long,
        alias = "gpu-layers",
        value_name = "N",
        env = "LLAMA_ARG_N_GPU_LAYERS"
    )]
    n_gpu_layers: Option<usize>,
}

impl DeviceArgs {
    #[cfg(any(feature = "metal", target_os = "macos"))]
    fn device(self) -> Device {
        match self.n_gpu_layers {
            Some(0) => Device::Cpu,
            None if !cfg!(target_os = "macos") => Device::Cpu,
            n => Device::Metal {
                n_layers: n.unwrap_or(usize::MAX),
            },
        }
    }

    #[cfg(not(any(feature = "metal", target_os = "macos")))]
    fn device(self) -> Device {
        Device::Cpu
    }
}

/// Where weights are read from, and what computes.
#[derive(Args, Default)]
pub(crate) struct ResidenceArgs {
    #[command(flatten)]
    device: DeviceArgs,
    /// Read weights from the mapped file only [default: decoding copies them to huge pages in the
    /// background if memory allows]
    #[arg(long, env = "LLAMA_ARG_MMAP", conflicts_with = "no_mmap", value_parser = BoolishValueParser::new())]
    mmap: bool,
    /// Copy weights to huge pages before starting
    #[arg(long, env = "LLAMA_ARG_NO_MMAP", value_parser = BoolishValueParser::new())]
    no_mmap: bool,
    /// Most memory to take with everything: 512M, 8G, …; what does not fit is refused before it is
    /// begun
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory_limit: Option<u64>,
    /// Give a metadata key another value than the file does, for instance
    /// llama.rope.freq_base=float:1e6; types are int, float, bool and str; may be given more
    /// than once
    #[arg(long, value_name = "KEY=TYPE:VALUE", value_parser = override_kv)]
    override_kv: Vec<(String, MetadataValue)>,
}

/// `KEY=TYPE:VALUE`.
fn override_kv(text: &str) -> Result<(String, MetadataValue), String> {
    let parts = text
        .split_once('=')
        .and_then(|(key, rest)| Some((key, rest.split_once(':')?)));
    let Some((key, (kind, value))) = parts.filter(|(key, _)| !key.is_empty()) else {
        return Err("expected KEY=TYPE:VALUE".into());
    };
    let wrong = |what: &str| format!("{value:?} is not {what}");
    let value = match kind {
        "int" => MetadataValue::I64(value.parse().map_err(|_| wrong("an integer"))?),
        "float" => MetadataValue::F32(value.parse().map_err(|_| wrong("a number"))?),
        "bool" => MetadataValue::Bool(value.parse().map_err(|_| wrong("true or false"))?),
        "str" => MetadataValue::String(value.into()),
        _ => {
            return Err(format!(
                "{kind:?} is none of the types int, float, bool and str"
            ));
        }
    };
    Ok((key.to_owned(), value))
}

impl ResidenceArgs {
    fn residence(&self) -> Residence {
        match (self.mmap, self.no_mmap) {
            (true, _) => Residence::Mapped,
            (_, true) => Residence::Copied,
            _ => Residence::Background,
        }
    }
}

/// More threads than machines have cores only take memory.
pub(crate) const MAX_THREADS: i64 = 1024;

/// Threads that compute.
#[derive(Args, Clone, Copy)]
pub(crate) struct ThreadsArg {
    /// Threads, at most 1024; 0 or less is as many as this process may use
    #[arg(short, long, value_name = "N", default_value_t = -1, env = "LLAMA_ARG_THREADS", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i32).range(..=MAX_THREADS))]
    threads: i32,
}

impl ThreadsArg {
    /// How many; without a number as many as this process may use.
    pub(crate) fn number(self) -> Option<NonZeroUsize> {
        usize::try_from(self.threads)
            .ok()
            .and_then(NonZeroUsize::new)
    }

    /// A pool of that size.
    pub(crate) fn pool(self) -> rayon::ThreadPoolBuilder {
        rayon::ThreadPoolBuilder::new().num_threads(self.number().map_or(0, NonZeroUsize::get))
    }
}

/// Positions are numbers of 31 bits.
const MAX_CTX: i64 = i32::MAX as i64;

/// Size of a session.
#[derive(Args)]
pub(crate) struct SessionArgs {
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
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    cache_type: CacheTypeArgs,
    /// Context and types of the cache for a use: chat, long-chat, document or code; other flags
    /// win
    #[arg(long, value_name = "NAME")]
    preset: Option<Preset>,
    /// Compute prompts as generated tokens are: more exact, the same bits, about twice the time
    #[arg(long)]
    exact: bool,
    /// Keep keys and values of prompts in this folder, for later runs that begin with the same
    /// text
    #[arg(long, value_name = "DIR")]
    prompt_cache: Option<PathBuf>,
    /// Most MiB that the folder takes; what was used least recently goes
    #[arg(long, value_name = "N", default_value_t = 8192, requires = "prompt_cache", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    prompt_cache_size: u32,
    #[command(flatten)]
    pub(crate) lora: LoraArgs,
}

/// Precision of keys and values.
#[derive(Args)]
pub(crate) struct CacheTypeArgs {
    /// Type of keys in the cache: f32, f16, bf16, q8_0, q6_0, q5_0 or q4_0 [default: f16; for
    /// `logits` f32] [short: -ctk]
    #[arg(long, value_name = "TYPE", env = "LLAMA_ARG_CACHE_TYPE_K")]
    cache_type_k: Option<KvType>,
    /// Type of values in the cache [default: f16; for `logits` f32] [short: -ctv]
    #[arg(long, value_name = "TYPE", env = "LLAMA_ARG_CACHE_TYPE_V")]
    cache_type_v: Option<KvType>,
    /// Keep the first page and the last RECENT tokens in f16, up to MIDDLE back in q8_0, the rest
    /// in q4_0
    #[arg(long, value_name = "RECENT,MIDDLE", num_args = 0..=1, require_equals = true,
        default_missing_value = "256,2048", value_parser = tiers)]
    kv_tiers: Option<KvTiers>,
    /// Type of keys and values, of fewer bits, of texts that begin while 85 % of the memory for
    /// them are in use. Then answers depend on what else is computed
    #[arg(long, value_name = "TYPE")]
    kv_pressure: Option<KvType>,
}

fn tiers(text: &str) -> Result<KvTiers, String> {
    let numbers = text
        .split_once(',')
        .and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    let (recent, middle) = numbers.ok_or("expected two numbers of tokens, as in 256,2048")?;
    Ok(KvTiers { recent, middle })
}

impl CacheTypeArgs {
    /// Sets what the flags say in `options`, `default` where they are not given.
    pub(crate) fn apply(&self, default: KvType, options: &mut SessionOptions) {
        // Precision by age begins with half precision, whatever a program's default is.
        let default = if self.kv_tiers.is_some() {
            KvType::F16
        } else {
            default
        };
        options.kv_type = self.cache_type_k.unwrap_or(default);
        options.kv_type_v = Some(self.cache_type_v.unwrap_or(default));
        options.kv_tiers = self.kv_tiers;
        options.kv_pressure = self.kv_pressure;
    }
}

/// Adapters.
#[derive(Args)]
pub(crate) struct LoraArgs {
    /// LoRA adapter to add to the model's weights; repeatable, or several separated by commas
    #[arg(long, value_name = "FILE", value_delimiter = ',')]
    lora: Vec<PathBuf>,
    /// The same, with a factor on what it adds
    #[arg(long, value_name = "FILE:SCALE", value_delimiter = ',')]
    lora_scaled: Vec<String>,
}

impl LoraArgs {
    /// Their files with their scales.
    pub(crate) fn files(&self) -> Result<Vec<(&Path, f32)>, Failure> {
        let scaled = self.lora_scaled.iter().map(|text| {
            let parts = text
                .rsplit_once(':')
                .and_then(|(path, scale)| Some((Path::new(path), scale.parse().ok()?)));
            parts
                .filter(|(_, scale): &(_, f32)| scale.is_finite())
                .ok_or_else(|| {
                    Failure::Usage(format!(
                        "--lora-scaled {text}: expected FILE:SCALE, a finite number"
                    ))
                })
        });
        self.lora
            .iter()
            .map(|path| Ok((path.as_path(), 1.0)))
            .chain(scaled)
            .collect()
    }

    /// The adapters with their scales.
    pub(crate) fn open(&self, model: &Model) -> Result<Vec<(Arc<Adapter>, f32)>, Failure> {
        let files = self.files()?.into_iter();
        files
            .map(|(path, scale)| Ok((Arc::new(open_adapter(path, model)?), scale)))
            .collect()
    }
}

/// The adapter in a file.
pub(crate) fn open_adapter(path: &Path, model: &Model) -> Result<Adapter, Failure> {
    Adapter::open(path, model).map_err(adapter_failure(path))
}

/// What to say of an adapter in a file.
pub(crate) fn adapter_failure(path: &Path) -> impl Fn(AdapterError) -> Failure + '_ {
    move |error| match error {
        AdapterError::Gguf(error) => Failure::Work(error.to_string()), // names the file
        error => Failure::Work(format!("{}: {error}", path.display())),
    }
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

    /// An engine for sessions that learn or do not.
    pub(crate) fn engine(
        &self,
        model: &Model,
        learns: bool,
        options: &SessionOptions,
    ) -> Result<Engine, Failure> {
        let engine_options = EngineOptions {
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

/// Bytes of a session's keys and values by precision, as JSON.
pub(crate) fn kv_bytes(session: &Session) -> Value {
    session
        .memory()
        .kv
        .iter()
        .map(|(kind, bytes)| (kind.name().to_owned(), bytes.into()))
        .collect::<Map<_, _>>()
        .into()
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
    let mut session = args.engine(model, false, options)?.session_with(options)?;
    for (adapter, scale) in adapters {
        session.attach(adapter, scale)?;
    }
    let adapters = session
        .adapters()
        .map(|(_, adapter, _)| Arc::clone(adapter))
        .collect();
    let n_threads = NonZeroUsize::new(session.n_threads());
    let plan = PlanOptions {
        n_logits: rows,
        n_threads,
        adapters,
        ..options.clone().into()
    };
    let plan = model.check_memory(&plan)?;
    let need = plan.needed() - plan.weights - plan.weights_copy;
    if let Some(memory) = SystemMemory::now().filter(|memory| need > memory.available) {
        note(format!(
            "warning: a full context of {} tokens takes {}, but {} of memory are free; use a smaller -c",
            session.n_ctx(),
            size(need),
            size(memory.available)
        ));
    }
    let trained = model.hparams().n_ctx_train;
    if session.n_ctx() > trained {
        note(format!(
            "warning: a context of {} tokens, but the model was trained for {trained}",
            session.n_ctx()
        ));
    }
    Ok(session)
}
