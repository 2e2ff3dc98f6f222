//! How much memory engines and sessions take, and will take.

use crate::arch::Arch;
use crate::backward::driver::gradient_bytes;
use crate::backward::supports::supports;
use crate::compute::hook::TokenKind;
use crate::engine::SessionError;
use crate::engine::drafter_memory::{DrafterMemory, SmallModel, of_text};
use crate::engine::hidden_states::{KEPT_STATES, most_rows};
use crate::engine::options::{
    CacheMode, MAX_CTX, SessionOptions, checked_n_ctx, compute_bytes, kv_layout, n_ctx,
};
use crate::forward::buffer_bytes;
use crate::forward::sizes::sizes;
use crate::gguf::{Gguf, Header, Metadata};
use crate::kv::{DEFAULT_PREFIX_BUDGET, KvBytes, KvType, SeqKv};
use crate::layers::draft::MAX_DRAFT;
use crate::layers::hparams::Hparams;
use crate::layers::rows::SlotSize;
use crate::layers::sizes::Sizes;
use crate::lora::Adapter;
use crate::model::drafter::DraftModel;
use crate::model::{Model, WeightPlacement};
use crate::quant::DType;
use crate::system::default_threads;
use crate::tokenizer::Tokenizer;
use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// Contexts below are not recommended.
const FEW_TOKENS: usize = 512;

/// Bytes that an engine takes, with all its sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineMemory {
    /// Weights in the file.
    pub weights: u64,
    /// Copy of the weights in memory of this process.
    pub weights_copy: u64,
    /// Header of the file, in which the texts of tokens are, and the tables that find them.
    pub vocabulary: u64,
    /// Keys and values of sequences; shared pages count once.
    pub kv: KvBytes,
    /// Free pages of keys and values, kept for later use.
    pub kv_free: u64,
    /// Adapters that are attached to sequences, each once.
    pub adapters: u64,
    /// Buffers of a pass, and of each that is computed in pieces.
    pub buffers: u64,
}

impl EngineMemory {
    /// Sum of all.
    pub fn total(&self) -> u64 {
        self.weights
            + self.weights_copy
            + self.vocabulary
            + self.kv.total()
            + self.kv_free
            + self.adapters
            + self.buffers
    }
}

/// What a [`MemoryPlan`] is for. `..Default::default()` fills what you do not care about.
#[derive(Clone, Debug)]
pub struct PlanOptions {
    /// How each sequence runs.
    pub session: SessionOptions,
    /// Sequences at a time. Default 1.
    pub n_sequences: usize,
    /// Threads. Default: [`default_threads`].
    pub n_threads: Option<NonZeroUsize>,
    /// Tokens of a pass whose logits are wanted. Default 1.
    pub n_logits: usize,
    /// Most prompt rows that a [`Schedule`](crate::scheduler::Schedule) computes in pieces,
    /// between passes of those that decode: up to `n_batch`, as many as time allows; 0, the
    /// default: none.
    pub n_layered: usize,
    /// Adapters, attached to all sequences.
    pub adapters: Vec<Arc<Adapter>>,
    /// Drafters that have weights of their own; each drafts for all sequences.
    pub drafters: Vec<DrafterMemory>,
    /// Tokens of a text for which a session computes gradients of the last of them; 0, the
    /// default: none. The text is at the end of a full context.
    pub n_gradient: usize,
    /// Whether they are those of a divergence, too, as where control text is replayed: its logits
    /// have those of a reference beside them. Default no.
    pub has_divergence: bool,
    /// What the prefix cache may hold if [`SessionOptions::prefix`] stores sequences, see
    /// [`EngineOptions::prefix_budget`](crate::engine::EngineOptions). Default 1 GiB.
    pub prefix_budget: u64,
}

impl Default for PlanOptions {
    fn default() -> Self {
        SessionOptions::default().into()
    }
}

impl From<SessionOptions> for PlanOptions {
    /// Of one session.
    fn from(session: SessionOptions) -> PlanOptions {
        PlanOptions {
            session,
            n_sequences: 1,
            n_threads: None,
            n_logits: 1,
            n_layered: 0,
            adapters: Vec::new(),
            drafters: Vec::new(),
            n_gradient: 0,
            has_divergence: false,
            prefix_budget: DEFAULT_PREFIX_BUDGET,
        }
    }
}

/// Most bytes that a model takes with sequences that fill their contexts: what
/// [`Engine::memory`](crate::Engine::memory)
/// and [`SessionState::memory`](crate::session::SessionState::memory) will tell at the peak, see
/// [`Model::memory_plan`].
///
/// Not in it: checkpoints of conversations where layers have windows (two windows more). Pages make
/// room for these where [`EngineOptions::kv_budget`](crate::engine::EngineOptions) says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// Tokens of a context.
    pub n_ctx: usize,
    /// Weights in the mapped file, or in the memory that it was opened from.
    pub weights: u64,
    /// Weights in a copy in huge pages. Where one is made, the pages of a map are given back.
    pub weights_copy: u64,
    /// Header of the file, in which the texts of tokens are, and the tables that find them.
    pub vocabulary: u64,
    /// Keys and values of all sequences, each filled by one prompt.
    pub kv: u64,
    /// Those of sequences that ended, in a full prefix cache. They make room for the others where
    /// there is a limit, and so do not count in it.
    pub prefixes: u64,
    /// Buffers of the largest pass, and of prompt rows that are computed in pieces beside others.
    pub buffers: u64,
    /// Tokens, logits and hidden states.
    pub rest: u64,
    /// Adapters.
    pub adapters: u64,
    /// Drafters: their weights, and for each sequence their keys, values and buffers, and what they
    /// read of the model.
    pub drafters: u64,
    /// What the [hooks](crate::compute::OutputHook) of the sessions add; 0 without one.
    pub hooks: u64,
    /// Gradients of an adapter, and the rows that are kept for them.
    pub gradients: u64,
}

impl MemoryPlan {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.needed().saturating_add(self.prefixes)
    }

    /// All but the prefix cache, which gives way.
    pub fn needed(&self) -> u64 {
        [
            self.weights_copy,
            self.vocabulary,
            self.kv,
            self.buffers,
            self.rest,
            self.adapters,
            self.drafters,
            self.hooks,
            self.gradients,
        ]
        .into_iter()
        .fold(self.weights, u64::saturating_add)
    }

    /// Adds what the hooks of the sessions take.
    #[must_use]
    pub fn with_hooks(mut self, bytes: u64) -> MemoryPlan {
        self.hooks = self.hooks.saturating_add(bytes);
        self
    }

    /// The plan for a model of which the header alone is there, on the best level of this CPU.
    ///
    /// # Errors
    /// If the context or batch makes no sense.
    pub fn of_header(
        header: &Header,
        h: &Hparams,
        options: &PlanOptions,
    ) -> Result<MemoryPlan, SessionError> {
        Ok(MemoryPlan {
            vocabulary: header_vocabulary(header),
            ..MemoryPlan::without_vocabulary(header, h, options)?
        })
    }

    /// The same without the vocabulary, which takes time to measure.
    fn without_vocabulary(
        header: &Header,
        h: &Hparams,
        options: &PlanOptions,
    ) -> Result<MemoryPlan, SessionError> {
        let matrices = header
            .tensors
            .iter()
            .filter(|t| t.dims.len() > 1 && t.dtype.format().is_some());
        let shapes: BTreeSet<_> = matrices.map(|t| (t.dtype, t.dims[0] as usize)).collect();
        let shapes: Vec<(DType, usize)> = shapes.into_iter().collect();
        let n_threads = n_threads(options);
        let sizes = Sizes {
            h,
            arch: Arch::detect(),
            shapes: &shapes,
            n_threads,
        };
        let weights = header.tensors.iter().map(|t| t.n_bytes).sum();
        plan(sizes, weights, options)
    }
}

/// What drafters take, some of which are models with a plan of their own.
impl DrafterMemory {
    /// That of a file's drafter for `target`.
    ///
    /// # Errors
    /// If the file is invalid, or is a trained drafter of another model.
    pub fn open(gguf: Gguf, target: &Model) -> Result<DrafterMemory, SessionError> {
        let trained = DraftModel::open(gguf.clone(), target).map_err(SessionError::Drafter)?;
        if let Some(model) = trained {
            return Ok(DrafterMemory::of_trained(Arc::new(model)));
        }
        let h = Hparams::of(gguf.metadata(), gguf.tensors()).map_err(SessionError::Drafter)?;
        let vocabulary = header_vocabulary(gguf.header());
        let model = SmallModel {
            gguf,
            h,
            vocabulary,
        };
        Ok(DrafterMemory::of_model(model))
    }

    /// Bytes that all texts share: its weights, and those of a model's vocabulary and buffers, for
    /// texts of at most `n_ctx` tokens.
    pub fn shared(&self, n_ctx: usize) -> u64 {
        let of_model = |plan: MemoryPlan| plan.weights + plan.vocabulary + plan.buffers;
        match self.trained() {
            Some(model) => model.weight_bytes(),
            None => self.plan(n_ctx).map_or(0, of_model),
        }
    }

    /// Most bytes that it takes for a text of at most `n_ctx` tokens, whose prompts are computed
    /// `n_batch` at a time: its keys and values, buffers of a trained one, and what that reads of
    /// the model.
    pub fn of_text(&self, n_ctx: usize, n_batch: usize) -> u64 {
        match self.trained() {
            Some(model) => of_text(model, n_ctx, n_batch),
            None => self.plan(n_ctx).map_or(0, |plan| plan.kv + plan.rest),
        }
    }

    /// The plan of a model; none where it can have no such context, and drafts nothing.
    fn plan(&self, n_ctx: usize) -> Option<MemoryPlan> {
        let SmallModel {
            gguf,
            h,
            vocabulary,
        } = self.model()?;
        let session = SessionOptions {
            n_ctx: Some(n_ctx),
            ..Default::default()
        };
        let plan = MemoryPlan::without_vocabulary(gguf.header(), h, &session.into()).ok()?;
        Some(MemoryPlan {
            vocabulary: *vocabulary,
            ..plan
        })
    }
}

/// Options that fit into memory: see [`Model::recommend`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Recommendation {
    /// Its context and precision are the recommended ones.
    pub session: SessionOptions,
    /// Threads.
    pub n_threads: usize,
    /// What that takes.
    pub plan: MemoryPlan,
}

impl Model {
    /// Most bytes that this model takes with sequences that fill their contexts.
    ///
    /// ```
    /// use ruvllm::SessionOptions;
    /// use ruvllm::engine::PlanOptions;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let model = ruvllm::Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
    /// let session = SessionOptions { n_ctx: Some(256), ..Default::default() };
    /// let plan = model.memory_plan(&PlanOptions { n_sequences: 4, ..session.into() })?;
    /// println!("{} bytes, {} of them keys and values", plan.total(), plan.kv);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the context or batch makes no sense.
    pub fn memory_plan(&self, options: &PlanOptions) -> Result<MemoryPlan, SessionError> {
        let weights = self.gguf().tensors().iter().map(|t| t.n_bytes).sum();
        let mut plan = plan(sizes(self, n_threads(options)), weights, options)?;
        if let Some(block) = self
            .mtp()
            .ok()
            .flatten()
            .filter(|_| options.session.keep_states)
        {
            let of_block = block.memory_plan(&block_plan_options(block, options))?;
            plan.kv = plan.kv.saturating_add(of_block.kv);
            plan.buffers = plan.buffers.max(of_block.buffers);
            plan.rest = plan.rest.saturating_add(of_block.rest);
        }
        let has_gradient = options.n_gradient > 0 && supports(self.hparams()).is_ok();
        if let Some(adapter) = options.adapters.last().filter(|_| has_gradient) {
            let rank = options
                .adapters
                .iter()
                .map(|adapter| adapter.max_rank())
                .sum();
            let (n, threads) = (options.n_gradient.min(plan.n_ctx), n_threads(options));
            let (at, pairs) = ((n, plan.n_ctx - n), options.has_divergence);
            let [buffers, rows] = gradient_bytes((self, threads), adapter, rank, at, pairs);
            plan.buffers = plan.buffers.max(buffers);
            plan.gradients = rows.saturating_add(adapter.bytes());
        }
        let copied = match self.placement() {
            WeightPlacement::Mapped => 0,
            WeightPlacement::Background if !self.gguf().worth_copying() => {
                self.gguf().resident_bytes()
            }
            WeightPlacement::Background | WeightPlacement::Copied => weights,
        };
        // What is copied out of a map is given back to it.
        let left = if self.gguf().is_map() {
            weights.saturating_sub(copied)
        } else {
            weights
        };
        Ok(MemoryPlan {
            weights: left,
            weights_copy: copied,
            vocabulary: vocabulary_bytes(self),
            ..plan
        })
    }

    /// The longest context, as long as the model was trained for at most, that fits into `bytes`
    /// with everything else, and the most precise keys and values of those of `options` and
    /// [`KvType::Q8`] that it fits with; `None` if 512 tokens do not fit.
    ///
    /// # Errors
    /// As [`Model::memory_plan`].
    pub fn recommend(
        &self,
        options: &PlanOptions,
        bytes: u64,
    ) -> Result<Option<Recommendation>, SessionError> {
        let mut n_ctx = self.hparams().n_ctx_train.min(MAX_CTX);
        loop {
            for q8 in [false, true] {
                let mut options = options.clone();
                options.session.n_ctx = Some(n_ctx);
                if q8 {
                    let policy = options.session.kv_policy();
                    if policy.tiers.is_some() {
                        continue;
                    }
                    let at_most_q8 = |kind: KvType| if kind.bits() > 8 { KvType::Q8 } else { kind };
                    options.session.kv_type = at_most_q8(policy.k);
                    options.session.kv_type_v = Some(at_most_q8(policy.v));
                }
                let plan = self.memory_plan(&options)?;
                if plan.needed() <= bytes {
                    let n_threads = n_threads(&options);
                    return Ok(Some(Recommendation {
                        session: options.session,
                        n_threads,
                        plan,
                    }));
                }
            }
            if n_ctx / 2 < FEW_TOKENS {
                return Ok(None);
            }
            n_ctx /= 2;
        }
    }

    /// Options of a session that was asked for without any: where the model was opened with
    /// [`OpenOptions::auto`](crate::model::OpenOptions::auto), the recommended ones.
    ///
    /// # Errors
    /// [`SessionError::MemoryLimit`] if none fit.
    pub fn session_options(&self) -> Result<SessionOptions, SessionError> {
        let (true, Some(limit)) = (self.is_auto(), self.memory_limit()) else {
            return Ok(SessionOptions::default());
        };
        let options = PlanOptions::default();
        match self.recommend(&options, limit)? {
            Some(recommended) => Ok(recommended.session),
            None => self.check_memory(&options).map(|_| options.session),
        }
    }

    /// [`Model::memory_plan`], within the limit that the model was opened with.
    ///
    /// # Errors
    /// [`SessionError::MemoryLimit`], which says what would fit, or as [`Model::memory_plan`].
    pub fn check_memory(&self, options: &PlanOptions) -> Result<MemoryPlan, SessionError> {
        let plan = self.memory_plan(options)?;
        match self.memory_limit().filter(|&limit| plan.needed() > limit) {
            None => Ok(plan),
            Some(limit) => {
                let fits = self.recommend(options, limit)?;
                // What it asked for does not fit, so this is a smaller one.
                let fits = fits.map(|fits| {
                    let policy = fits.session.kv_policy();
                    (fits.plan.n_ctx.min(plan.n_ctx), policy.k, policy.v)
                });
                Err(SessionError::MemoryLimit {
                    n_ctx: plan.n_ctx,
                    need: plan.needed(),
                    limit,
                    fits,
                })
            }
        }
    }
}

/// Bytes of what a model has beside its weights.
pub(crate) fn vocabulary_bytes(model: &Model) -> u64 {
    let gguf = model.gguf();
    let header = gguf.header().data_offset;
    vocabulary(header, gguf.metadata(), model.tokenizer().map(|t| &**t))
}

/// Bytes of the file's header, of its arrays as they were read, and of the tokenizer's tables.
fn vocabulary(header: u64, metadata: &Metadata, tokenizer: Option<&Tokenizer>) -> u64 {
    header + metadata.bytes() + tokenizer.map_or(0, Tokenizer::bytes)
}

/// Bytes of the vocabulary of a model of which the header alone is there.
fn header_vocabulary(header: &Header) -> u64 {
    let tokenizer = Tokenizer::opt_from_metadata(&header.metadata);
    let tokenizer = tokenizer.ok().flatten();
    vocabulary(header.data_offset, &header.metadata, tokenizer.as_ref())
}

fn n_threads(options: &PlanOptions) -> usize {
    options
        .n_threads
        .map_or_else(default_threads, NonZeroUsize::get)
}

/// The plan, with `weights` bytes of weights in the file.
fn plan(sizes: Sizes<'_>, weights: u64, options: &PlanOptions) -> Result<MemoryPlan, SessionError> {
    let (h, session) = (sizes.h, &options.session);
    let n_ctx = checked_n_ctx(h, session)?;
    let n_batch = session.n_batch.min(n_ctx);
    let (n_sequences, n_logits) = (options.n_sequences, options.n_logits.min(n_batch));
    let layout = Arc::new(kv_layout(h, session.kv_policy()));
    let kv = SeqKv::peak_bytes(&layout, n_ctx, n_batch, n_sequences);
    let rank = options
        .adapters
        .iter()
        .map(|adapter| adapter.max_rank())
        .sum();
    let drafters = &options.drafters;
    let n_last = drafters.iter().map(DrafterMemory::n_last).max();
    let n_last = if session.keep_states {
        KEPT_STATES
    } else {
        n_last.unwrap_or(0)
    };
    let n_outputs = n_logits.max(n_last.min(n_batch));
    let prompt = SlotSize {
        layout: &layout,
        n_past: n_ctx - n_batch,
        n_tokens: n_batch,
        n_outputs,
        is_generated: session.exact,
        rank,
    };
    let token = SlotSize {
        n_past: n_ctx - 1,
        n_tokens: 1,
        n_outputs: 1,
        is_generated: true,
        ..prompt
    };
    let others = std::iter::repeat_n(token, n_sequences.saturating_sub(1));
    let n_layered = options.n_layered.min(n_batch);
    let layered = SlotSize {
        n_past: n_ctx - n_layered,
        n_tokens: n_layered,
        n_outputs: 1,
        ..prompt
    };
    let layered = (n_layered > 0).then_some(layered);
    // On 32-bit systems sizes could wrap: what the estimate doubled does not reach does not.
    let rough = compute_bytes(
        h,
        n_batch
            .saturating_add(n_sequences)
            .saturating_add(n_layered),
        n_ctx,
    );
    let buffers = if usize::try_from(rough.saturating_mul(2)).is_err() {
        rough
    } else {
        let at_once = buffer_bytes(sizes, others.clone().chain([prompt]))
            .max(buffer_bytes(sizes, others.chain([token])));
        at_once + layered.map_or(0, |layered| buffer_bytes(sizes, std::iter::once(layered)))
    };
    let of_drafters = drafters
        .iter()
        .map(|drafter| drafter.buffers(sizes.arch, sizes.n_threads, n_ctx));
    let buffers = buffers.max(of_drafters.max().unwrap_or(0));
    let n = n_sequences as u64;
    let of_drafters = drafters
        .iter()
        .map(|drafter| n.saturating_mul(drafter.of_text(n_ctx, n_batch)) + drafter.shared(n_ctx));
    let of_tokens = n_ctx as u64 * (size_of::<u32>() + size_of::<TokenKind>()) as u64;
    let logits = n_logits as u64 * 4 * h.n_vocab as u64;
    let n_states = if session.keep_states {
        most_rows(n_ctx) + KEPT_STATES.min(n_batch).max(n_logits)
    } else {
        0
    };
    let states = n_states as u64 * 4 * h.n_embd as u64;
    Ok(MemoryPlan {
        n_ctx,
        weights,
        weights_copy: 0,
        vocabulary: 0,
        kv,
        prefixes: if session.prefix.cache == CacheMode::On {
            options.prefix_budget
        } else {
            0
        },
        buffers,
        rest: n.saturating_mul(of_tokens.saturating_add(logits).saturating_add(states)),
        adapters: options.adapters.iter().map(|adapter| adapter.bytes()).sum(),
        drafters: of_drafters.fold(0, u64::saturating_add),
        hooks: 0,
        gradients: 0,
    })
}

/// What counts for the memory limit of a model. Buffers of no fewer tokens than by default are
/// counted, so that what is left for pages does not depend on a session.
pub(crate) fn plan_options(mut session: SessionOptions, n_threads: usize) -> PlanOptions {
    session.n_batch = session.n_batch.max(SessionOptions::default().n_batch);
    PlanOptions {
        n_threads: NonZeroUsize::new(n_threads),
        ..session.into()
    }
}

/// What `block` takes beside the model, whose plan is that of `options`.
fn block_plan_options(block: &Model, options: &PlanOptions) -> PlanOptions {
    let &PlanOptions {
        n_sequences,
        n_threads,
        ref session,
        ..
    } = options;
    PlanOptions {
        n_sequences,
        n_threads,
        ..block_options(block, session).into()
    }
}

/// Options of the block's sequence, for a text in a session with `options`.
pub(crate) fn block_options(block: &Model, options: &SessionOptions) -> SessionOptions {
    let n_ctx = n_ctx(block.hparams(), options).max(1);
    let (kv_type, kv_type_v) = (options.kv_type, options.kv_type_v);
    let (n_batch, n_ctx) = (most_rows(n_ctx), Some(n_ctx.saturating_add(MAX_DRAFT)));
    SessionOptions {
        n_ctx,
        n_batch,
        kv_type,
        kv_type_v,
        ..SessionOptions::default()
    }
}
