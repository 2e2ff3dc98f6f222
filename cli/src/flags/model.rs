//! Flags that name a model and say how to run it, and what comes of them.

use super::demo;
use super::recipe::RecipeArgs;
use super::rope::RopeArgs;
#[cfg(feature = "convert")]
use crate::convert::{Conversions, OutType, open_converted};
use crate::io::{Failure, Progress, parse_size};
use crate::quantize::file_type;
use clap::Args;
use clap::builder::BoolishValueParser;
use ruvllm::Model;
use ruvllm::Tokenizer;
use ruvllm::arch::Arch;
use ruvllm::gguf::{Gguf, Header, Value as MetadataValue};
use ruvllm::model::quantize::Recipe;
use ruvllm::model::{Device, OpenOptions, OpenStage, WeightPlacement};
use ruvllm::quant::FileType;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Which model.
#[derive(Args, Default)]
pub(crate) struct ModelArgs {
    /// GGUF file, or any part of a split one, or a folder of Hugging Face; `serve` takes several
    /// [default: the built-in demo model]
    #[arg(short, long, value_name = "FILE", env = "LLAMA_ARG_MODEL")]
    model: Vec<PathBuf>,
    /// Model of Hugging Face's hub, downloaded unless it is here: see `ruvllm pull`; `serve` takes
    /// several [short: -hf]
    #[cfg(feature = "pull")]
    #[arg(
        long,
        value_name = "OWNER/NAME[:QUANT]",
        env = "LLAMA_ARG_HF_REPO",
        conflicts_with = "model"
    )]
    hf_repo: Vec<ruvllm::hub::ModelName>,
    /// Where that one is, once it is needed.
    #[cfg(feature = "pull")]
    #[arg(skip)]
    fetched: std::sync::OnceLock<PathBuf>,
}

impl ModelArgs {
    /// Its file; none is the built-in one.
    #[cfg(feature = "pull")]
    fn path(&self) -> Result<Option<&Path>, Failure> {
        // Of a flag given twice the last counts.
        match (self.hf_repo.last(), self.fetched.get()) {
            (None, _) => Ok(self.local_path()),
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
        Ok(self.local_path())
    }

    /// The file that a flag names.
    pub(crate) fn local_path(&self) -> Option<&Path> {
        self.model.last().map(PathBuf::as_path)
    }

    /// The model in a file.
    #[cfg(feature = "serve")]
    pub(crate) fn of_file(path: PathBuf) -> ModelArgs {
        let mut args = ModelArgs::default();
        args.model.push(path);
        args
    }

    /// Each of the models that the flags name, with the name of the hub if it has one; the built-in
    /// one if there are none.
    #[cfg(feature = "serve")]
    pub(crate) fn each(&self) -> Vec<(Option<String>, ModelArgs)> {
        let files = self.model.iter().cloned();
        let all = files.map(|path| (None, ModelArgs::of_file(path)));
        #[cfg(feature = "pull")]
        let all = all.chain(self.hf_repo.iter().map(|name| {
            let model = ModelArgs {
                hf_repo: vec![name.clone()],
                ..ModelArgs::default()
            };
            (Some(name.to_string()), model)
        }));
        all.collect()
    }

    /// Its file, for what lies beside it; none is the built-in one.
    #[cfg(feature = "vision")]
    pub(crate) fn file(&self) -> Result<Option<&Path>, Failure> {
        self.path()
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

    /// The seed of texts of the built-in model, if it is that.
    pub(crate) fn demo_seed(&self) -> Option<u64> {
        self.is_demo().then_some(demo::SEED)
    }

    /// The header alone.
    pub(crate) fn header(&self) -> Result<Header, Failure> {
        match self.path()? {
            Some(path) => {
                refuse_folder(path)?;
                Ok(Header::read(path)?)
            }
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
            Some(path) => {
                refuse_folder(path)?;
                Ok(Gguf::open(path)?)
            }
            None => Ok(Gguf::from_bytes(demo::bytes()?)?),
        }
    }

    /// The model, ready to run.
    pub(crate) fn open(&self, placement: &PlacementArgs) -> Result<Model, Failure> {
        let label = self.label();
        #[cfg(feature = "convert")]
        if let Some(folder) = self.path()?.filter(|path| path.is_dir()) {
            let recipe = placement.recipe()?;
            let what = Conversions {
                folder,
                outtype: recipe.as_ref().map_or(OutType::Auto, OutType::Mix),
                no_mtp: false,
                n_threads: None,
                verbose: false,
            };
            let gguf = open_converted(&what, placement.quantize_cache.as_deref())?;
            return open_with(OpenOptions::new(), gguf, placement, &label);
        }
        open(self.gguf()?, placement, &label)
    }
}

/// Refuses a folder where only a file will do.
fn refuse_folder(path: &Path) -> Result<(), Failure> {
    match path.is_dir() {
        false => Ok(()),
        true => Err(Failure::Work(format!(
            "{}: a folder, and this needs a GGUF file; `ruvllm convert` makes one of it",
            path.display()
        ))),
    }
}

/// The model in a file that is called `label`, on the level that `RUVLLM_ARCH` asks for, with
/// progress.
pub(crate) fn open(gguf: Gguf, placement: &PlacementArgs, label: &str) -> Result<Model, Failure> {
    let recipe = placement.recipe()?.into_iter();
    let options = recipe.fold(OpenOptions::new(), OpenOptions::quantize);
    let cache = placement.quantize_cache.iter();
    let options = cache.fold(options, OpenOptions::quantize_cache);
    open_with(options, gguf, placement, label)
}

/// [`open`] with options to begin with.
fn open_with(
    options: OpenOptions<'_>,
    gguf: Gguf,
    placement: &PlacementArgs,
    label: &str,
) -> Result<Model, Failure> {
    let mut bar: Option<(OpenStage, Progress)> = None;
    let options = options.arch(level()?).placement(placement.placement());
    let options = placement
        .memory_limit
        .into_iter()
        .fold(options, OpenOptions::memory_limit);
    let arch = gguf
        .metadata()
        .str("general.architecture")
        .unwrap_or_default();
    let overrides = placement.rope.overrides(arch).into_iter();
    let overrides = overrides.chain(placement.override_kv.iter().cloned());
    let options = overrides.fold(options, |options, (key, value)| {
        options.override_kv(key, value)
    });
    let options = options
        .device(placement.device.device())
        .progress(|stage, share| {
            if bar.as_ref().is_none_or(|(shown, _)| *shown != stage) {
                bar = None; // clears the line before the next bar is drawn
                bar = Some((
                    stage,
                    Progress::new(
                        match stage {
                            OpenStage::Copy => "copying weights",
                            OpenStage::Quantize => "quantising",
                            _ => "loading",
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
#[command(next_help_heading = "Weights and devices")]
struct DeviceArgs {
    /// How many of the last layers the GPU computes, 0 for none [default: all if there is an Apple
    /// GPU, or with --device] [short: -ngl]
    #[cfg(any(feature = "metal", feature = "webgpu", target_os = "macos"))]
    #[arg(
        long,
        alias = "gpu-layers",
        value_name = "N",
        env = "LLAMA_ARG_N_GPU_LAYERS"
    )]
    n_gpu_layers: Option<usize>,
    /// Which GPU: its number in `ruvllm doctor`, or `none` [default: the first that is not the
    /// CPU] [short: -dev]
    #[cfg(feature = "webgpu")]
    #[arg(long, value_name = "N", env = "LLAMA_ARG_DEVICE", value_parser = adapter)]
    device: Option<Adapter>,
}

/// The value of `--device`.
#[cfg(feature = "webgpu")]
#[derive(Clone, Copy)]
enum Adapter {
    None,
    Number(usize),
}

#[cfg(feature = "webgpu")]
fn adapter(text: &str) -> Result<Adapter, String> {
    match text {
        "none" => Ok(Adapter::None),
        number => number.parse().map(Adapter::Number).map_err(|_| {
            "expected none, or a number of the list of GPUs in `ruvllm doctor`".into()
        }),
    }
}

impl DeviceArgs {
    #[cfg(any(feature = "metal", feature = "webgpu", target_os = "macos"))]
    fn device(self) -> Device {
        #[cfg(feature = "webgpu")]
        match (self.device, self.n_gpu_layers) {
            (Some(Adapter::None), _) => return Device::Cpu,
            (Some(Adapter::Number(adapter)), n) if n != Some(0) => {
                return Device::Gpu {
                    n_layers: n.unwrap_or(usize::MAX),
                    adapter: Some(adapter),
                };
            }
            _ => {}
        }
        match self.n_gpu_layers {
            Some(0) => Device::Cpu,
            None if !cfg!(target_os = "macos") => Device::Cpu,
            n => own_gpu(n.unwrap_or(usize::MAX)),
        }
    }

    #[cfg(not(any(feature = "metal", feature = "webgpu", target_os = "macos")))]
    fn device(self) -> Device {
        Device::Cpu
    }
}

/// The GPU that is taken if none is named: Apple's by Metal.
#[cfg(any(feature = "metal", target_os = "macos"))]
fn own_gpu(n_layers: usize) -> Device {
    #[cfg(all(feature = "webgpu", not(target_os = "macos")))]
    return Device::Gpu {
        n_layers,
        adapter: None,
    };
    #[cfg(not(all(feature = "webgpu", not(target_os = "macos"))))]
    Device::Metal { n_layers }
}

/// The GPU that is taken if none is named.
#[cfg(all(feature = "webgpu", not(any(feature = "metal", target_os = "macos"))))]
fn own_gpu(n_layers: usize) -> Device {
    Device::Gpu {
        n_layers,
        adapter: None,
    }
}

/// Where weights are read from, and what computes.
#[derive(Args, Default)]
#[command(next_help_heading = "Weights and devices")]
pub(crate) struct PlacementArgs {
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
    /// Quantise the weights of an F16, BF16 or F32 model while it is opened, in memory
    #[arg(short, long, value_name = "TYPE", value_parser = file_type)]
    quantize: Option<FileType>,
    /// Keep what -q makes in this folder, and take it from there next time
    #[arg(long, value_name = "DIR", requires = "quantize")]
    quantize_cache: Option<PathBuf>,
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Give a metadata key another value than the file does, for instance
    /// llama.rope.freq_base=float:1e6; types are int, float, bool and str; may be given more
    /// than once
    #[arg(long, value_name = "KEY=TYPE:VALUE", value_parser = override_kv)]
    override_kv: Vec<(String, MetadataValue)>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    rope: RopeArgs,
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

impl PlacementArgs {
    /// Most bytes that everything may take, if that is limited.
    #[cfg(feature = "serve")]
    pub(crate) fn memory_limit(&self) -> Option<u64> {
        self.memory_limit
    }

    /// How the model is quantised while it is opened, if it is.
    fn recipe(&self) -> Result<Option<Recipe>, Failure> {
        let recipe = |file_type| self.recipe.recipe(file_type);
        self.quantize.map(recipe).transpose()
    }

    fn placement(&self) -> WeightPlacement {
        match (self.mmap, self.no_mmap) {
            (true, _) => WeightPlacement::Mapped,
            (_, true) => WeightPlacement::Copied,
            _ => WeightPlacement::Background,
        }
    }
}

/// Refusal of a model without a vocabulary.
pub(crate) fn no_tokenizer(model: &ModelArgs) -> Failure {
    Failure::Work(format!(
        "{}: this file has no tokenizer, so only `ruvllm logits` can use it",
        model.label()
    ))
}
