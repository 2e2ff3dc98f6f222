//! A model that is ready to run: what its file says, and what it costs.

use crate::arch::Arch;
use crate::gguf::{Gguf, TensorInfo};
#[cfg(feature = "grammar")]
use crate::grammar::{GrammarError, TokenTrie};
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::LayerSpec;
use crate::layers::moe::spec::MoeSpec;
use crate::lora::{TargetModule, in_layer};
use crate::model::weights::Weights;
use crate::model::{DECODES, Device, ModelError, OpenOptions, WeightPlacement};
use crate::quant::DType;
use crate::tokenizer::Tokenizer;
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A model that is ready to run: a cheap handle to clone, `Send + Sync + 'static`.
#[derive(Clone)]
pub struct Model(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) gguf: Gguf,
    pub(super) hparams: Hparams,
    pub(super) weights: Weights,
    /// Its block for multi-token prediction, or why that cannot be used.
    pub(super) mtp: Result<Option<Model>, ModelError>,
    /// Its encoder.
    pub(super) encoder: Option<Model>,
    pub(super) tokenizer: Option<Arc<Tokenizer>>,
    pub(super) arch: Arch,
    pub(super) placement: WeightPlacement,
    pub(super) device: Device,
    pub(super) memory_limit: Option<u64>,
    pub(super) auto: bool,
    pub(super) unknown: Vec<String>,
    pub(super) decoded: AtomicU32,
    pub(super) fingerprint: OnceLock<u64>,
    /// The tree of its tokens, once a grammar needed it.
    #[cfg(feature = "grammar")]
    pub(super) token_trie: Mutex<Option<TokenTrie>>,
    /// State that sessions without an engine of their own share; only `engine` knows its type.
    pub(super) shared: Mutex<Option<Arc<dyn Any + Send + Sync>>>,
}

impl Inner {
    /// A model of a part of a file, computed with another model of that file.
    pub(super) fn part(
        gguf: &Gguf,
        hparams: Hparams,
        weights: Weights,
        tokenizer: Option<Arc<Tokenizer>>,
        arch: Arch,
    ) -> Inner {
        Inner {
            gguf: gguf.clone(),
            hparams,
            weights,
            mtp: Ok(None),
            encoder: None,
            tokenizer,
            arch,
            placement: WeightPlacement::Mapped,
            device: Device::Cpu,
            memory_limit: None,
            auto: false,
            unknown: Vec::new(),
            decoded: Default::default(),
            fingerprint: Default::default(),
            #[cfg(feature = "grammar")]
            token_trie: Default::default(),
            shared: Default::default(),
        }
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("hparams", self.hparams())
            .field("arch", &self.arch())
            .finish_non_exhaustive()
    }
}

impl Model {
    /// Opens the model in a GGUF file with default options. The file is mapped, not read: this
    /// takes milliseconds whatever its size.
    ///
    /// # Errors
    /// As [`OpenOptions::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Model, ModelError> {
        OpenOptions::new().open(path)
    }

    /// Opens the model in a GGUF file that was opened by other means, for instance from memory.
    ///
    /// # Errors
    /// As [`OpenOptions::open`].
    pub fn from_gguf(gguf: Gguf) -> Result<Model, ModelError> {
        OpenOptions::new().open_gguf(gguf)
    }

    /// Does now what [`WeightPlacement::Background`] would do later, so that measurements see the same
    /// memory throughout.
    pub fn settle(&self) {
        if self.0.placement == WeightPlacement::Background && self.gguf().worth_copying() {
            // If there is no memory for a copy, the map is used.
            let _ = self.gguf().make_resident(&mut |_| true);
        }
    }

    /// Counts one decoded token.
    pub(crate) fn decoded(&self) {
        let Inner {
            gguf,
            placement,
            decoded,
            ..
        } = &*self.0;
        if *placement == WeightPlacement::Background
            && decoded.load(Ordering::Relaxed) < DECODES
            && decoded.fetch_add(1, Ordering::Relaxed) + 1 == DECODES
            && gguf.worth_copying()
        {
            gguf.make_resident_in_background();
        }
    }

    /// Whether both are handles of the same opened model.
    pub(crate) fn same(&self, other: &Model) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// State that the sessions of this model share, made by the first caller that succeeds.
    pub(crate) fn shared<T: Any + Send + Sync, E>(
        &self,
        make: impl FnOnce() -> Result<Arc<T>, E>,
    ) -> Result<Arc<T>, E> {
        let mut shared = self.0.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Ok(made)) = shared.clone().map(Arc::downcast) {
            return Ok(made);
        }
        let made = make()?;
        *shared = Some(Arc::clone(&made) as _);
        Ok(made)
    }

    /// The file.
    pub fn gguf(&self) -> &Gguf {
        &self.0.gguf
    }

    /// Metadata keys and tensors that were ignored, as [`Unknown::Report`](crate::model::Unknown::Report) allows, and tensors of
    /// blocks for multi-token prediction that are not used.
    pub fn unknown(&self) -> &[String] {
        &self.0.unknown
    }

    /// Whether the file has a block for multi-token prediction that can draft, see
    /// [`MtpDrafter`](crate::decode::speculative::mtp::MtpDrafter).
    ///
    /// # Errors
    /// What is wrong with the one it has. The model runs without it; [`Model::unknown`] has the
    /// names of its tensors.
    pub fn has_mtp(&self) -> Result<bool, &ModelError> {
        self.mtp().map(|block| block.is_some())
    }

    /// That block, as a model of one layer whose tokens come with hidden states.
    pub(crate) fn mtp(&self) -> Result<Option<&Model>, &ModelError> {
        self.0.mtp.as_ref().map(Option::as_ref)
    }

    /// The model's encoder, if it has one besides a decoder.
    pub(crate) fn encoder(&self) -> Option<&Model> {
        self.0.encoder.as_ref()
    }

    /// The hyper-parameters.
    pub fn hparams(&self) -> &Hparams {
        &self.0.hparams
    }

    /// The tokenizer, if the file has one.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.0.tokenizer.as_ref()
    }

    /// The tree of its tokens, for grammars: built by the first call, for which others wait.
    ///
    /// # Errors
    /// [`GrammarError::NoTokenizer`], and as [`TokenTrie::new`].
    #[cfg(feature = "grammar")]
    pub fn token_trie(&self) -> Result<TokenTrie, GrammarError> {
        let mut kept = self
            .0
            .token_trie
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(trie) = &*kept {
            return Ok(trie.clone());
        }
        let tokenizer = self.tokenizer().ok_or(GrammarError::NoTokenizer)?;
        Ok(kept.insert(TokenTrie::new(tokenizer)?).clone())
    }

    /// The instruction-set level this model runs on.
    pub fn arch(&self) -> Arch {
        self.0.arch
    }

    /// What computes this model.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// Where weights are read from.
    pub(crate) fn placement(&self) -> WeightPlacement {
        self.0.placement
    }

    /// Most bytes of memory that it may take with an engine and its sessions: see
    /// [`OpenOptions::memory_limit`].
    pub fn memory_limit(&self) -> Option<u64> {
        self.0.memory_limit
    }

    /// Whether it was opened with [`OpenOptions::auto`].
    pub(crate) fn is_auto(&self) -> bool {
        self.0.auto
    }

    /// The chat template of the file, as its author wrote it.
    pub fn chat_template(&self) -> Option<&str> {
        self.gguf()
            .metadata()
            .opt_str("tokenizer.chat_template")
            .ok()
            .flatten()
    }

    /// Number of parameters.
    pub fn n_params(&self) -> u64 {
        self.gguf()
            .tensors()
            .iter()
            .map(|t| t.dims.iter().product::<u64>())
            .sum()
    }

    /// Hash that tells models apart: of the metadata, the tensor table and samples of the weights.
    /// Not secure against forgery.
    pub fn fingerprint(&self) -> u64 {
        *self.0.fingerprint.get_or_init(|| self.gguf().fingerprint())
    }

    /// Tensors that passes multiply by: without blocks for multi-token prediction, and tables, from
    /// which only rows are read.
    fn multiplied(&self) -> impl Iterator<Item = &TensorInfo> {
        let n_layer = self.hparams().n_layer;
        let is_run = move |t: &&TensorInfo| in_layer(&t.name).is_none_or(|(i, _)| i < n_layer);
        self.gguf().tensors().iter().filter(is_run).filter(|t| {
            !["position_embd.weight", "per_layer_token_embd.weight"].contains(&&*t.name)
        })
    }

    /// Bytes of weights that are read per token: only the experts used; the embedding table only if
    /// it serves as the head, too.
    pub fn bytes_per_token(&self) -> u64 {
        let tied = self.gguf().tensor("output.weight").is_none();
        let bytes = |t: &TensorInfo| match self.experts_of(t) {
            Some(x) => self.n_runs(t) * (t.n_bytes * x.n_used as u64 / x.n_expert as u64),
            _ if t.name == "token_embd.weight" && !tied => 0,
            _ => self.n_runs(t) * t.n_bytes,
        };
        self.multiplied().map(bytes).sum()
    }

    /// [`Model::bytes_per_token`] for a pass over `rows` tokens: the experts are those that so many
    /// tokens use on average, if all are chosen equally often.
    pub fn bytes_per_pass(&self, rows: usize) -> u64 {
        let more = |t: &TensorInfo| match self.experts_of(t) {
            Some(x) => {
                let used = x.n_used as f64 / x.n_expert as f64;
                let of_rows = 1.0 - (1.0 - used).powf(rows as f64);
                self.n_runs(t) * (t.n_bytes as f64 * (of_rows - used)) as u64
            }
            None => 0,
        };
        self.bytes_per_token() + self.multiplied().map(more).sum::<u64>()
    }

    /// Operations for a generated token with `depth` tokens before it: a multiplication and an
    /// addition for every weight used, the head's included, and for every key and value.
    pub fn flops_per_row(&self, depth: usize) -> u64 {
        let h = self.hparams();
        let tied = self.gguf().tensor("output.weight").is_none();
        let weights = |t: &TensorInfo| match self.experts_of(t) {
            _ if t.dims.len() < 2 || t.name == "token_embd.weight" && !tied => 0,
            Some(x) => self.n_runs(t) * (t.n_elems() * x.n_used as u64 / x.n_expert as u64),
            _ => self.n_runs(t) * t.n_elems(),
        };
        let attention: usize = h
            .attention()
            .map(|a| a.n_head * (a.head_dim + a.head_dim_v))
            .sum();
        2 * (self.multiplied().map(weights).sum::<u64>() + (attention * depth) as u64)
    }

    /// Operations for a token of a prompt with `depth` tokens before it: a multiplication and an
    /// addition for every weight used, and for every key and value. The last layer computes
    /// only the token's key and value.
    pub fn flops_per_token(&self, depth: usize) -> u64 {
        let h = self.hparams();
        let weights = |t: &TensorInfo| match self.experts_of(t) {
            _ if t.dims.len() < 2 => 0,
            Some(x) => t.n_elems() * x.n_used as u64 / x.n_expert as u64,
            _ => t.n_elems(),
        };
        let last = h.n_layer - 1;
        // The last layer's block runs once less.
        let last_block = h.n_own() - 1;
        let n_whole = |t: &TensorInfo| match in_layer(&t.name) {
            Some((i, _)) if i < last_block => h.n_runs(i) as u64,
            Some(_) => h.n_runs(last_block) as u64 - 1,
            None => 0,
        };
        let layers: u64 = self.multiplied().map(|t| n_whole(t) * weights(t)).sum();
        let attention = h.layers[..last].iter().filter_map(LayerSpec::attention);
        let attention: usize = attention
            .map(|a| a.n_head * (a.head_dim + a.head_dim_v))
            .sum();
        let last_layer = h.layers[last]
            .attention()
            .map_or(0, |a| h.n_embd * (a.n_k() + a.n_v()));
        2 * (layers + (attention * depth + last_layer) as u64)
    }

    /// Times that a pass multiplies by a tensor.
    fn n_runs(&self, t: &TensorInfo) -> u64 {
        in_layer(&t.name).map_or(1, |(i, _)| self.hparams().n_runs(i) as u64)
    }

    /// The mixture to which a tensor of stacked experts belongs.
    fn experts_of(&self, t: &TensorInfo) -> Option<&MoeSpec> {
        let (layer, part) = in_layer(&t.name)?;
        self.hparams()
            .layers
            .get(layer)?
            .ffn
            .moe()
            .filter(|_| part.contains("_exps."))
    }

    /// The type that holds most of the layers' weights.
    pub fn main_type(&self) -> DType {
        let mut n_elems = BTreeMap::<DType, u64>::new();
        for t in self
            .gguf()
            .tensors()
            .iter()
            .filter(|t| t.name.starts_with("blk."))
        {
            *n_elems.entry(t.dtype).or_default() += t.n_elems();
        }
        n_elems
            .into_iter()
            .max_by_key(|&(_, n)| n)
            .map_or(DType::F32, |(dtype, _)| dtype)
    }

    /// Matrices that adapters can change; adapters index them in this order.
    pub fn sites(&self) -> &Arc<[TargetModule]> {
        &self.weights().sites
    }

    /// Index of the output head in [`Model::sites`].
    pub fn output_site(&self) -> usize {
        self.weights().output.w.site
    }

    /// The Frobenius norm of each of [`Model::sites`], estimated from at most 64 of its rows.
    pub fn site_norms(&self) -> Vec<f32> {
        self.sites()
            .iter()
            .map(|site| self.weights().site_norm(self.gguf(), site))
            .collect()
    }

    pub(crate) fn weights(&self) -> &Weights {
        &self.0.weights
    }
}
