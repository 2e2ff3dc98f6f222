//! Hyper-parameters of a model: its sizes, and a specification of each layer.

use crate::layers::altup::spec::StreamsSpec;
use crate::layers::attention::spec::AttnSpec;
use crate::layers::classifier::{ClassifierSpec, Pooling};
use crate::layers::compressed::cache::kv_layers;
use crate::layers::cross::spec::EncoderSpec;
use crate::layers::diffusion::DiffusionSpec;
use crate::layers::hyper::spec::HyperSpec;
use crate::layers::indexer::spec::IndexSpec;
use crate::layers::layer::spec::LayerSpec;
use crate::layers::moe::spec::MoeSpec;
use crate::layers::ngram::spec::NgramSpec;
use crate::layers::norm::spec::NormKind;
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::layers::rope::spec::{Rope, RopeId};
use crate::layers::rwkv::spec::TimeMixRanks;
use crate::layers::stacks::spec::StacksSpec;
use crate::layers::switch::spec::SwitchSpec;

/// Hyper-parameters of a model, checked and complete: the executor reads nothing else.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Hparams {
    /// `general.architecture`.
    pub arch: String,
    /// Rows of the embedding table.
    pub n_vocab: usize,
    /// Context length the model was trained for.
    pub n_ctx_train: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Number of layers.
    pub n_layer: usize,
    /// Layers that one of the file's blocks consists of: RWKV's are two, a time mix and a channel
    /// mix.
    pub n_part: usize,
    /// Times that the file's blocks run, one loop after the other, with keys and values of their
    /// own: [`Hparams::layers`] has the layers of all loops.
    pub n_loop: usize,
    /// Blocks for multi-token prediction after those, which are no part of the model's own passes.
    pub n_mtp: usize,
    /// Whether this is such a block: its tokens come with hidden states.
    pub is_mtp: bool,
    /// Whether such blocks read hidden states, and hand them on, before the last norm.
    pub raw_states: bool,
    /// Kind of normalisation.
    pub norm: NormKind,
    /// Epsilon of all norms.
    pub norm_eps: f32,
    /// Factor on embeddings.
    pub embd_scale: f32,
    /// Whether embeddings of token types are added; every token has the first type.
    pub token_types: bool,
    /// Whether the last layer is followed by a norm.
    pub final_norm: bool,
    /// Whether embeddings have a norm.
    pub embd_norm: bool,
    /// Whether that norm has no weights, though others have some.
    pub embd_norm_plain: bool,
    /// Whether embeddings of positions are added to those of tokens: then no position may reach
    /// `n_ctx_train`.
    pub learned_positions: bool,
    /// Factor on logits.
    pub logit_scale: f32,
    /// Soft cap `c` of logits: `c·tanh(x/c)`.
    pub final_softcap: Option<f32>,
    /// Whether the head must have a bias. Otherwise that is up to the file, as is whether the head
    /// is a matrix of its own: where there is none, the embedding table replaces it.
    pub head_bias: bool,
    /// How vectors of texts are pooled from hidden states, if the file says.
    pub pooling: Option<Pooling>,
    /// Head that scores pairs of texts, if the model is a reranker.
    pub classifier: Option<ClassifierSpec>,
    /// Input and output widths of the matrices by which such vectors are then multiplied.
    pub dense: Vec<(usize, usize)>,
    /// Rotary position embeddings; layers refer to them by [`RopeId`].
    pub ropes: Vec<Rope>,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// For each layer, the index of the keys and values that it reads, among the layers that keep
    /// some; 0 for layers without attention.
    pub kv_layers: Vec<usize>,
    /// Several residual streams, if the model has them (Gemma 3n).
    pub streams: Option<StreamsSpec>,
    /// Width of the vector that each layer has for each token, if layers have such vectors (Gemma
    /// 3n, 4).
    pub per_layer_embd: Option<usize>,
    /// Several residual streams with hyper-connections.
    pub hyper: Option<HyperSpec>,
    /// Embeddings of several tokens that a layer adds to those streams.
    pub ngrams: Option<NgramSpec>,
    /// Layers from one checkpoint of the residual stream to the next, whose weighed mean parts of
    /// layers read.
    pub checkpoints: Option<usize>,
    /// Adapters in the file that tokens choose.
    pub switch: Option<SwitchSpec>,
    /// Two stacks of blocks that run in turn, if the model has them (HRM): [`Hparams::layers`] has
    /// the layers of all runs.
    pub stacks: Option<StacksSpec>,
    /// What stands before the names of the file's blocks and of the last norm: `enc.` or `dec.` in
    /// files that may have both.
    pub prefix: &'static str,
    /// The encoder before the model, which reads another text.
    pub encoder: Option<EncoderSpec>,
    /// How the model denoises, if it does not go on with texts; then attention is not causal.
    pub diffusion: Option<DiffusionSpec>,
}

impl Default for Hparams {
    /// A llama without sizes and layers.
    fn default() -> Hparams {
        Hparams {
            arch: String::new(),
            n_vocab: 0,
            n_ctx_train: 0,
            n_embd: 0,
            n_layer: 0,
            n_part: 1,
            n_loop: 1,
            n_mtp: 0,
            is_mtp: false,
            raw_states: false,
            norm: NormKind::Rms,
            norm_eps: 0.0,
            embd_scale: 1.0,
            token_types: false,
            final_norm: true,
            embd_norm: false,
            embd_norm_plain: false,
            learned_positions: false,
            logit_scale: 1.0,
            final_softcap: None,
            head_bias: false,
            pooling: None,
            classifier: None,
            dense: Vec::new(),
            ropes: Vec::new(),
            layers: Vec::new(),
            kv_layers: Vec::new(),
            streams: None,
            hyper: None,
            ngrams: None,
            checkpoints: None,
            switch: None,
            per_layer_embd: None,
            stacks: None,
            prefix: "",
            encoder: None,
            diffusion: None,
        }
    }
}

/// Turns products of the head into logits: `scale`, then `cap·tanh(x/cap)` unless `cap` is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitTransform {
    /// Factor on the products.
    pub scale: f32,
    /// Bound on the absolute value of logits; 0: none.
    pub cap: f32,
}

impl LogitTransform {
    /// The logit for a product `raw`.
    pub fn logit(self, raw: f32) -> f32 {
        let x = self.scale * raw;
        if self.cap > 0.0 {
            self.cap * (x / self.cap).tanh()
        } else {
            x
        }
    }

    /// Derivative of [`LogitTransform::logit`], given its result.
    pub fn slope(self, logit: f32) -> f32 {
        let x = if self.cap > 0.0 {
            logit / self.cap
        } else {
            0.0
        };
        self.scale * (1.0 - x * x)
    }

    /// Turns a whole row of products into logits, in place.
    pub fn row(self, logits: &mut [f32]) {
        if self.scale != 1.0 {
            logits.iter_mut().for_each(|x| *x *= self.scale);
        }
        if self.cap > 0.0 {
            logits
                .iter_mut()
                .for_each(|x| *x = self.cap * (*x / self.cap).tanh());
        }
    }
}

impl Hparams {
    /// How the head's products become logits.
    pub fn logit_transform(&self) -> LogitTransform {
        LogitTransform {
            scale: self.logit_scale,
            cap: self.final_softcap.unwrap_or(0.0),
        }
    }

    /// The layers' indexes of positions, in their order.
    pub(crate) fn indexes(&self) -> impl Iterator<Item = &IndexSpec> {
        let indexes = self.attention().filter_map(|attn| attn.index.as_ref());
        indexes.filter(|index| !index.shared)
    }

    /// The cache's first layer of the attention to compressed blocks of layer `i`: they follow those
    /// of indexes.
    pub(crate) fn compressed_kv_layer(&self, i: usize) -> usize {
        let n_kv = self.attention().filter(|attn| !attn.shares_kv).count();
        let before = self.layers[..i].iter().filter_map(LayerSpec::compressed);
        let n_before: usize = before.map(|spec| kv_layers(spec).count()).sum();
        n_kv + self.indexes().count() + n_before
    }

    /// The cache's layer of the index of layer `i`: they follow keys and values.
    pub(crate) fn index_kv_layer(&self, i: usize) -> usize {
        let n_kv = self.attention().filter(|attn| !attn.shares_kv).count();
        let before = self.layers[..i].iter().filter_map(LayerSpec::attention);
        let is_own = |attn: &&AttnSpec| attn.index.is_some_and(|index| !index.shared);
        n_kv + before.filter(is_own).count()
    }

    /// The attention of every layer that has one, to modify.
    pub(crate) fn attention_mut(&mut self) -> impl Iterator<Item = &mut AttnSpec> {
        self.layers.iter_mut().filter_map(LayerSpec::attention_mut)
    }

    /// The attention of every layer that has one.
    pub fn attention(&self) -> impl Iterator<Item = &AttnSpec> {
        self.layers.iter().filter_map(LayerSpec::attention)
    }

    /// The recurrent mixer of every layer that has one.
    pub fn recurrent(&self) -> impl Iterator<Item = &RecurrentSpec> {
        self.layers.iter().filter_map(LayerSpec::recurrent)
    }

    /// Whether layers read the first one's values (RWKV 7).
    pub(crate) fn shares_values(&self) -> bool {
        let reads = |spec: &RecurrentSpec| match spec {
            RecurrentSpec::TimeMix(spec) => matches!(spec.ranks, TimeMixRanks::Seven { .. }),
            _ => false,
        };
        self.recurrent().any(reads)
    }

    /// Layers of one loop over the file's blocks.
    pub(crate) fn n_own(&self) -> usize {
        self.stacks
            .map_or(self.layers.len() / self.n_loop, |stacks| 2 * stacks.n_layer)
    }

    /// The layer of such a loop whose weights layer `i` has.
    pub(crate) fn own(&self, i: usize) -> usize {
        self.stacks
            .map_or_else(|| i % self.n_own(), |stacks| stacks.own(i))
    }

    /// Times that a layer of such a loop runs.
    pub(crate) fn n_runs(&self, own: usize) -> usize {
        self.stacks.map_or(self.n_loop, |stacks| stacks.n_runs(own))
    }

    /// The mixtures of experts among the layers.
    pub fn mixtures(&self) -> impl Iterator<Item = &MoeSpec> {
        self.layers.iter().filter_map(|layer| layer.ffn.moe())
    }

    /// The rope that a layer refers to.
    pub fn rope(&self, id: RopeId) -> &Rope {
        &self.ropes[id.0]
    }
}
