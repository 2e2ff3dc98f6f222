//! A model: hyper-parameters, weights and tokenizer of one GGUF file, validated as a whole when
//! opened.
//!
//! [`Model`] is an immutable, cheap handle: clone it, send it to threads, keep it in structs.

mod adapters;
mod binding;
pub(crate) mod drafter;
mod drafter_memory;
mod encoder;
mod error;
mod family;
mod hparams;
mod keys;
#[allow(clippy::module_inception)]
pub(crate) mod model;
mod mtp;
pub mod quantize;
mod rope;
mod setters;
mod weights;

use crate::arch::Arch;
use crate::gguf::{Gguf, Value};
use crate::system::SystemMemory;
use crate::tokenizer::Tokenizer;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};

pub use crate::layers::activation::spec::Activation;
pub use crate::layers::altup::spec::StreamsSpec;
pub use crate::layers::attention::latent::spec::LatentSpec;
pub use crate::layers::attention::relative::spec::RelativeSpec;
pub use crate::layers::attention::spec::{AttnSpec, QkNorm, Temperature};
pub use crate::layers::classifier::{ClassifierActivation, ClassifierSpec, Pooling};
pub use crate::layers::compressed::spec::{BlockIndexSpec, BlocksSpec, CompressedSpec};
pub use crate::layers::conv::spec::ConvSpec;
pub use crate::layers::cross::spec::EncoderSpec;
pub use crate::layers::dense_ffn::spec::DenseSpec;
pub use crate::layers::gated_delta::spec::DeltaSpec;
pub use crate::layers::hparams::{Hparams, LogitTransform};
pub use crate::layers::hyper::spec::{HyperKind, HyperSpec};
pub use crate::layers::indexer::spec::{IndexKind, IndexSpec};
pub use crate::layers::layer::spec::{Biases, FfnSpec, LayerSpec, Mixer, OutputScale};
pub use crate::layers::mamba::spec::{MambaNorms, MambaSpec};
pub use crate::layers::mamba2::spec::Mamba2Spec;
pub use crate::layers::moe::spec::{ExpertGroups, Gating, MoeSpec, SharedSpec};
pub use crate::layers::ngram::spec::NgramSpec;
pub use crate::layers::norm::spec::{NormKind, Norms};
pub use crate::layers::recurrent::spec::RecurrentSpec;
pub use crate::layers::rope::spec::{Rope, RopeId, RopeOrder, RopeScaling};
pub use crate::layers::rwkv::spec::{ChannelMixSpec, TimeMixRanks, TimeMixSpec};
pub use crate::layers::switch::spec::SwitchSpec;
pub use error::ModelError;
pub use keys::Unknown;
use keys::UnknownNames;
use model::Inner;
pub(crate) use model::Model;
use quantize::{OnOpen, Recipe};
pub(crate) use weights::Weights;

/// Where weights are read from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WeightPlacement {
    /// From the mapped file: memory is shared with other processes that map it.
    #[default]
    Mapped,
    /// From the map at first. After [`DECODES`] decoded tokens a copy in huge pages is made in the
    /// background, if that leaves the same amount of memory free for other processes. Decoding
    /// then reads about a fifth faster, and the process holds the weights twice.
    Background,
    /// From such a copy, made when the model is opened.
    Copied,
}

/// Device that computes a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Device {
    /// The CPU.
    #[default]
    Cpu,
    /// The GPU of an Apple machine. Without one, making an engine fails with
    /// [`GpuError::NoDevice`](crate::gpu::GpuError::NoDevice).
    #[cfg(feature = "metal")]
    Metal {
        /// How many of the last layers the GPU computes; the CPU computes the others. `usize::MAX`
        /// for all.
        n_layers: usize,
    },
    /// A GPU of any maker, through Vulkan, Direct3D 12 or Metal. Without one, making an engine
    /// fails with [`GpuError::NoDevice`](crate::gpu::GpuError::NoDevice).
    #[cfg(feature = "webgpu")]
    Gpu {
        /// How many of the last layers the GPU computes; the CPU computes the others. `usize::MAX`
        /// for all.
        n_layers: usize,
        /// Its number among [`adapters`](crate::gpu::webgpu::adapters); `None` for the first that
        /// is not the CPU.
        adapter: Option<usize>,
    },
}

/// Tokens a model decodes before [`WeightPlacement::Background`] begins to copy, so that a process that
/// only reads a prompt does not copy.
pub const DECODES: u32 = 16;

/// A stage of opening a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenStage {
    /// Reading the header and binding tensors.
    Bind,
    /// Copying weights, with [`WeightPlacement::Copied`].
    Copy,
    /// Converting weights, with [`OpenOptions::quantize`].
    Quantize,
}

/// Callback for the progress of opening, as a share from 0 to 1 of the stage; returning `false`
/// cancels.
type Progress<'p> = Box<dyn FnMut(OpenStage, f32) -> bool + 'p>;

/// Options for opening a model.
///
/// ```
/// use ruvllm::model::{OpenOptions, WeightPlacement};
///
/// # fn main() -> Result<(), ruvllm::model::ModelError> {
/// let model = OpenOptions::new()
///     .placement(WeightPlacement::Background)
///     .progress(|stage, share| {
///         println!("{stage:?}: {:.0} %", 100.0 * share);
///         true // go on
///     })
///     .open("models/ruvllm-rust-6m-q8_0.gguf")?;
/// # Ok(()) }
/// ```
#[derive(Default)]
pub struct OpenOptions<'p> {
    arch: Option<Arch>,
    placement: WeightPlacement,
    unknown: Unknown,
    device: Device,
    overrides: Vec<(String, Value)>,
    memory_limit: Option<u64>,
    auto: bool,
    quantize: Option<Recipe>,
    quantize_cache: Option<PathBuf>,
    progress: Option<Progress<'p>>,
}

impl fmt::Debug for OpenOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OpenOptions {
            arch,
            placement,
            unknown,
            device,
            ..
        } = self;
        write!(
            f,
            "OpenOptions {{ arch: {arch:?}, residence: {placement:?}, unknown: {unknown:?}, device: {device:?}, .. }}"
        )
    }
}

impl<'p> OpenOptions<'p> {
    /// Defaults: the best level of the CPU, weights from the map, unknown keys and tensors refused.
    pub fn new() -> OpenOptions<'p> {
        OpenOptions::default()
    }

    /// Sets the instruction-set level to run on. Default: the best one of the CPU.
    #[must_use]
    pub fn arch(mut self, arch: Arch) -> Self {
        self.arch = Some(arch);
        self
    }

    /// Sets where weights are read from. Default [`WeightPlacement::Mapped`].
    #[must_use]
    pub fn placement(mut self, placement: WeightPlacement) -> Self {
        self.placement = placement;
        self
    }

    /// Sets what happens to unknown metadata keys and tensors. Default [`Unknown::Refuse`].
    #[must_use]
    pub fn unknown(mut self, unknown: Unknown) -> Self {
        self.unknown = unknown;
        self
    }

    /// Sets the device that computes the model. Default [`Device::Cpu`]. Whether it can is checked
    /// when an engine is made.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// Replaces or adds the value of a metadata key (`--override-kv`) of the architecture,
    /// `general` or `tokenizer`.
    #[must_use]
    pub fn override_kv(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        let (key, value) = (key.into(), value.into());
        self.overrides.retain(|(other, _)| *other != key);
        self.overrides.push((key, value));
        self
    }

    /// Most bytes of memory that the model may take together with an engine and its sessions. A
    /// model whose weights exceed it is refused, and so is a session whose context does not
    /// fit; keys and values of an engine share what is left. Default: no limit.
    #[must_use]
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = Some(bytes);
        self
    }

    /// Sessions that are created without options get a context and a precision of keys and values
    /// that fit into the memory limit. Without one, the limit is nine tenths of the memory
    /// available now ([`SystemMemory`]).
    #[must_use]
    pub fn auto(mut self) -> Self {
        self.auto = true;
        self
    }

    /// Quantises the weights of an F16, BF16 or F32 file by this recipe, or to the types of a mix
    /// ([`FileType`](crate::quant::FileType)), on as many threads as the process may use. The result is in memory; the file stays as it is, and takes
    /// none but for rows under way. Default: weights are used as they are.
    #[must_use]
    pub fn quantize(mut self, recipe: impl Into<Recipe>) -> Self {
        self.quantize = Some(recipe.into());
        self
    }

    /// Keeps what [`quantize`](Self::quantize) makes in a folder, by a hash of the file's
    /// contents and of the recipe, and maps it from there; it is made once. Default: in memory alone.
    #[must_use]
    pub fn quantize_cache(mut self, folder: impl Into<PathBuf>) -> Self {
        self.quantize_cache = Some(folder.into());
        self
    }

    /// Calls `progress` with the share of a stage that is done, 0 to 1; returning `false` cancels.
    #[must_use]
    pub fn progress(mut self, progress: impl FnMut(OpenStage, f32) -> bool + 'p) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// Opens the model in a GGUF file.
    ///
    /// # Errors
    /// If the file is invalid, or contains something this build cannot run: a model that opens can
    /// run. [`ModelError::Cancelled`] if `progress` returns `false`, [`ModelError::NoRoom`] if
    /// there is no memory for a copy.
    pub fn open(self, path: impl AsRef<Path>) -> Result<Model, ModelError> {
        self.open_gguf(Gguf::open(path)?)
    }

    /// Opens the model in a GGUF file that was opened by other means, for instance from memory.
    ///
    /// # Errors
    /// As [`OpenOptions::open`].
    pub fn open_gguf(self, gguf: Gguf) -> Result<Model, ModelError> {
        let gguf = if self.overrides.is_empty() {
            gguf
        } else {
            gguf.overriding(&self.overrides)
        };
        let mut progress = self.progress.unwrap_or_else(|| Box::new(|_, _| true));
        let mut unknown = UnknownNames {
            policy: self.unknown,
            ..Default::default()
        };
        let hparams = Hparams::of_with(gguf.metadata(), gguf.tensors(), &mut unknown)?;
        let ignored = |key: &str| {
            let section = key.split_once('.').map(|(section, _)| section);
            !section
                .is_some_and(|section| ["general", "tokenizer", &hparams.arch].contains(&section))
        };
        if let Some((key, _)) = self.overrides.iter().find(|(key, _)| ignored(key)) {
            return Err(ModelError::UnknownKey {
                key: key.clone(),
                arch: hparams.arch,
            });
        }
        if !progress(OpenStage::Bind, 0.0) {
            return Err(ModelError::Cancelled);
        }
        let available = || SystemMemory::now().map(|memory| memory.available / 10 * 9);
        let memory_limit = self
            .memory_limit
            .or_else(|| self.auto.then(available).flatten());
        let gguf = match self
            .quantize
            .map(|recipe| OnOpen::new(recipe, self.quantize_cache))
        {
            None => gguf,
            Some(on_open) => on_open.apply(gguf, memory_limit, &mut |share| {
                progress(OpenStage::Quantize, share)
            })?,
        };
        let weights = Weights::bind(&gguf, &hparams, &mut unknown, &mut |share| {
            progress(OpenStage::Bind, share)
        })?;
        let tokenizer = Tokenizer::opt_from_metadata(gguf.metadata())?;
        check_vocabulary(tokenizer.as_ref(), &hparams)?;
        let need = gguf.tensors().iter().map(|t| t.n_bytes).sum();
        if let Some(limit) = memory_limit.filter(|&limit| need > limit) {
            return Err(ModelError::MemoryLimit { need, limit });
        }
        if self.placement == WeightPlacement::Copied {
            let mut cancelled = false;
            let copied = gguf.make_resident(&mut |share| {
                cancelled = !progress(OpenStage::Copy, share);
                !cancelled
            });
            if cancelled {
                return Err(ModelError::Cancelled);
            }
            copied.map_err(|error| ModelError::NoRoom {
                n_bytes: gguf.file_size(),
                error,
            })?;
        }
        let tokenizer = tokenizer.map(Arc::new);
        let arch = self.arch.unwrap_or_else(Arch::detect);
        let encoder = encoder::bind(&gguf, &hparams, tokenizer.as_ref(), arch, &mut unknown)?;
        let mtp = mtp::bind(
            &gguf,
            &hparams,
            &weights,
            tokenizer.as_ref(),
            arch,
            &mut unknown.names,
        );
        Ok(Model(Arc::new(Inner {
            gguf,
            hparams,
            weights,
            mtp,
            encoder,
            tokenizer,
            arch,
            // A GPU reads the map itself.
            placement: if self.device == Device::Cpu {
                self.placement
            } else {
                WeightPlacement::Mapped
            },
            device: self.device,
            memory_limit,
            auto: self.auto,
            unknown: unknown.names,
            decoded: AtomicU32::new(0),
            fingerprint: OnceLock::new(),
            #[cfg(feature = "grammar")]
            token_trie: Default::default(),
            shared: Default::default(),
        })))
    }
}

/// Refuses a vocabulary with tokens that have no embedding.
fn check_vocabulary(tokenizer: Option<&Tokenizer>, hparams: &Hparams) -> Result<(), ModelError> {
    match tokenizer
        .map(Tokenizer::n_vocab)
        .filter(|&n| n > hparams.n_vocab)
    {
        None => Ok(()),
        Some(n) => Err(ModelError::Inconsistent {
            what: format!(
                "the vocabulary has {n} tokens, the embedding table {} rows",
                hparams.n_vocab
            ),
        }),
    }
}

/// `general.architecture` of everything this build can run.
pub fn supported_architectures() -> impl Iterator<Item = &'static str> {
    family::FAMILIES.iter().map(|f| f.arch)
}
