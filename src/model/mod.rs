//! A model: hyper-parameters, weights and tokenizer of one GGUF file, judged as a whole when opened.
//!
//! [`Model`] is immutable and shared: any number of sessions can use one at the same time.

mod family;
mod hparams;
mod weights;

use crate::arch::Arch;
use crate::error::ModelError;
use crate::gguf::{Gguf, Metadata, TensorInfo};
use crate::quant::DType;
use crate::tokenizer::Tokenizer;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use family::Family;
pub(crate) use hparams::Finish;
use hparams::Keys;
pub use hparams::{Activation, Experts, Hparams, NormKind, QkNorm, Rope, RopeOrder, RopeScaling, Window};
pub use weights::Site;
pub(crate) use weights::{FeedForward, Ffn, Layer, Linear, Moe, Norm, Weight, Weights};

/// Called with the share of loading done, 0 to 1; returns whether to go on.
pub type Progress<'a> = dyn FnMut(f32) -> bool + 'a;

/// Where weights are read from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residence {
    /// From the mapped file, always: memory is shared with other processes that map it.
    Mapped,
    /// From the map at first. Once [`DECODES`] single tokens were computed, and if that leaves as much
    /// memory again to others, a copy in huge pages is made in the background: decoding then reads a
    /// fifth faster or so.
    #[default]
    Background,
    /// From such a copy, made when it is asked for.
    Copied,
}

/// Single tokens a model computes before [`Residence::Background`] begins to copy: a process that only
/// looks at a prompt does without.
pub const DECODES: u32 = 16;

/// Most rows of an embedding table.
const MAX_VOCAB: u64 = (1 << 24) - 1;

/// A model that is ready to run. Cheap to share behind an [`Arc`].
pub struct Model {
    gguf: Gguf,
    hparams: Hparams,
    weights: Weights,
    tokenizer: Option<Tokenizer>,
    arch: Arch,
    residence: Residence,
    decoded: AtomicU32,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("hparams", &self.hparams).field("arch", &self.arch).finish_non_exhaustive()
    }
}

impl Model {
    /// Opens the model in a GGUF file. The file is mapped, not read: this takes milliseconds whatever
    /// its size.
    ///
    /// # Errors
    /// If the file is unsound, or holds something this build cannot run. All of it is judged here:
    /// a model that opens can run.
    pub fn open(path: impl AsRef<Path>) -> Result<Model, ModelError> {
        Model::open_with(path, &mut |_| true)
    }

    /// Opens a model and reports progress; `progress` returning `false` cancels.
    ///
    /// # Errors
    /// As [`Model::open`]; [`ModelError::Cancelled`] if `progress` says so.
    pub fn open_with(path: impl AsRef<Path>, progress: &mut Progress<'_>) -> Result<Model, ModelError> {
        Model::from_gguf(Gguf::open(path)?, progress)
    }

    /// The model in a GGUF file that was opened by other means, for instance from memory.
    ///
    /// # Errors
    /// As [`Model::open_with`].
    pub fn from_gguf(gguf: Gguf, progress: &mut Progress<'_>) -> Result<Model, ModelError> {
        let hparams = Hparams::of(gguf.metadata(), gguf.tensors())?;
        if !progress(0.0) {
            return Err(ModelError::Cancelled);
        }
        let weights = Weights::bind(&gguf, &hparams, progress)?;
        let tokenizer = Tokenizer::opt_from_metadata(gguf.metadata())?;
        if let Some(n) = tokenizer.as_ref().map(Tokenizer::n_vocab).filter(|&n| n > hparams.n_vocab) {
            return Err(ModelError::Inconsistent {
                what: format!("the vocabulary has {n} tokens, the embedding table {} rows", hparams.n_vocab),
            });
        }
        Ok(Model {
            gguf,
            hparams,
            weights,
            tokenizer,
            arch: Arch::detect()?,
            residence: Residence::default(),
            decoded: AtomicU32::new(0),
        })
    }

    /// Runs on another instruction-set level than the detected one: for tests and comparisons.
    #[must_use]
    pub fn with_arch(mut self, arch: Arch) -> Model {
        self.arch = arch;
        self
    }

    /// Reads weights from elsewhere than [`Residence::default`] says. [`Residence::Copied`] copies now;
    /// `progress` is told, and may end that early.
    ///
    /// # Errors
    /// If there is no room for a copy.
    pub fn with_residence(mut self, residence: Residence, progress: &mut Progress<'_>) -> Result<Model, ModelError> {
        self.residence = residence;
        if residence == Residence::Copied {
            self.gguf
                .make_resident(progress)
                .map_err(|error| ModelError::NoRoom { n_bytes: self.gguf.file_size(), error })?;
        }
        Ok(self)
    }

    /// Does now what [`Residence::Background`] does sooner or later, so that measurements see the same
    /// all along.
    pub fn settle(&self) {
        if self.residence == Residence::Background && self.gguf.worth_residence() {
            // Without room for a copy the map serves as well.
            let _ = self.gguf.make_resident(&mut |_| true);
        }
    }

    /// Counts a single token.
    pub(crate) fn decoded(&self) {
        if self.residence == Residence::Background
            && self.decoded.load(Ordering::Relaxed) < DECODES
            && self.decoded.fetch_add(1, Ordering::Relaxed) + 1 == DECODES
            && self.gguf.worth_residence()
        {
            self.gguf.make_resident_in_background();
        }
    }

    /// The file.
    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    /// The hyper-parameters.
    pub fn hparams(&self) -> &Hparams {
        &self.hparams
    }

    /// The tokenizer, if the file has one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// The instruction-set level this model runs on.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// The chat template of the file, as its author wrote it.
    pub fn chat_template(&self) -> Option<&str> {
        self.gguf.metadata().opt_str("tokenizer.chat_template").ok().flatten()
    }

    /// Number of weights.
    pub fn n_params(&self) -> u64 {
        self.gguf.tensors().iter().map(|t| t.dims.iter().product::<u64>()).sum()
    }

    /// Tells models apart: a hash of the metadata, the tensor table and samples of the weights. Not meant
    /// to withstand forgery.
    pub fn fingerprint(&self) -> u64 {
        self.gguf.fingerprint()
    }

    /// Bytes of weights that one token has to read: of experts those used, of the embedding table
    /// nothing unless it serves as the head, too.
    pub fn bytes_per_token(&self) -> u64 {
        let tied = self.gguf.tensor("output.weight").is_none();
        let bytes = |t: &TensorInfo| match self.hparams.experts {
            Some(x) if t.name.contains("_exps.") => t.n_bytes * x.n_used as u64 / x.n_expert as u64,
            _ if t.name == "token_embd.weight" && !tied => 0,
            _ => t.n_bytes,
        };
        self.gguf.tensors().iter().map(bytes).sum()
    }

    /// Operations that a token of a prompt takes with `depth` tokens before it: a multiplication and an
    /// addition for every weight it meets, and for every key and value. The last layer makes no more than a key
    /// and a value of it.
    pub fn flops_per_token(&self, depth: usize) -> u64 {
        let h = &self.hparams;
        let weights = |t: &TensorInfo| match h.experts {
            _ if t.dims.len() < 2 => 0,
            Some(x) if t.name.contains("_exps.") => t.n_elems() * x.n_used as u64 / x.n_expert as u64,
            _ => t.n_elems(),
        };
        let last = h.n_layer - 1;
        let in_layer = |t: &&TensorInfo| {
            t.name
                .strip_prefix("blk.")
                .and_then(|name| name.split('.').next()?.parse().ok())
                .is_some_and(|i: usize| i < last)
        };
        let layers: u64 = self.gguf.tensors().iter().filter(in_layer).map(weights).sum();
        let heads = h.head_dim + h.head_dim_v;
        let attention = last * h.n_head * heads * depth;
        let last_layer = h.n_embd * h.n_head_kv * heads;
        2 * (layers + (attention + last_layer) as u64)
    }

    /// The type of most weights in its layers.
    pub fn main_type(&self) -> DType {
        let mut n_elems = BTreeMap::<DType, u64>::new();
        for t in self.gguf.tensors().iter().filter(|t| t.name.starts_with("blk.")) {
            *n_elems.entry(t.dtype).or_default() += t.n_elems();
        }
        n_elems.into_iter().max_by_key(|&(_, n)| n).map_or(DType::F32, |(dtype, _)| dtype)
    }

    /// The matrices that adapters can change; an adapter counts them in this order.
    pub fn sites(&self) -> &Arc<[Site]> {
        &self.weights.sites
    }

    /// The Frobenius norm of each of [`Model::sites`], estimated from at most 64 of its rows.
    pub fn site_norms(&self) -> Vec<f32> {
        self.sites().iter().map(|site| self.weights.site_norm(&self.gguf, site)).collect()
    }

    pub(crate) fn weights(&self) -> &Weights {
        &self.weights
    }
}

impl Hparams {
    /// The hyper-parameters of a file, from its header alone.
    ///
    /// # Errors
    /// If its architecture is not supported or a parameter makes no sense.
    pub fn of(metadata: &Metadata, tensors: &[TensorInfo]) -> Result<Hparams, ModelError> {
        if let Some(kind) = metadata.opt_str("general.type")?.filter(|&t| t != "model") {
            let what = match kind {
                "adapter" => "an adapter (give it with --lora, besides its model)".into(),
                "learned" => "what was learnt with a model (give its folder with --learn)".into(),
                other => format!("something of type {other:?}"),
            };
            return Err(ModelError::NotAModel { what });
        }
        let arch = metadata
            .opt_str("general.architecture")?
            .ok_or_else(|| ModelError::MissingKey { key: "general.architecture".into() })?;
        let family = Family::of(arch)?;
        if tensors.is_empty() {
            return Err(ModelError::NotAModel { what: "a vocabulary without weights".into() });
        }
        let keys = Keys::new(arch, metadata);
        let mut hparams = (family.hparams)(&keys)?;
        keys.none_ignored()?;
        let Some(embd) = tensors.iter().find(|t| t.name == "token_embd.weight") else {
            return Err(ModelError::MissingTensor { name: "token_embd.weight".into() });
        };
        // Binding checks the other dimensions.
        let n_vocab = embd.dims.get(1).copied().unwrap_or(1);
        if n_vocab > MAX_VOCAB {
            return Err(ModelError::TensorShape {
                name: embd.name.clone(),
                found: embd.dims.clone(),
                expected: vec![hparams.n_embd as u64, MAX_VOCAB],
            });
        }
        hparams.n_vocab = n_vocab as usize;
        Ok(hparams)
    }
}

/// `general.architecture` of everything this build can run.
pub fn supported_architectures() -> impl Iterator<Item = &'static str> {
    family::FAMILIES.iter().map(|f| f.arch)
}
