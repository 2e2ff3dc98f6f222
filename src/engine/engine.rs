//! Resources that the sessions of a model share: threads, the memory of a pass, and the order of
//! passes.

use crate::arch::KV_BLOCK;
use crate::clock::Timer;
use crate::compute::arena::{Arena, reuse};
use crate::compute::hook::TokenKind;
use crate::compute::probe::{EvalCallback, NoCallback};
use crate::engine::batch::Slot;
use crate::engine::engine_options::{EngineOptions, SharedThreads};
use crate::engine::memory_plan::{EngineMemory, plan_options, vocabulary_bytes};
use crate::engine::offload::{BatchBuffers, offload, open_runner};
use crate::engine::options::{
    CancelToken, SessionOptions, checked_n_ctx, compute_bytes, kv_layout, on_device,
};
use crate::engine::row_times::RowTimes;
use crate::engine::sequence::Sequence;
use crate::engine::turns::{TurnCounts, Turns};
use crate::engine::{SessionError, context_shift};
use crate::forward::{Cursor, Pass, Pause, forward};
use crate::gpu::{GpuError, Runner};
use crate::kv::{KeyCentres, KvLayout, KvPolicy, KvPool, KvTiers, KvType, PrefixFolder, SeqKv};
use crate::layers::outputs::{Outputs, Wanted};
use crate::layers::rows::{SlotRows, SlotView};
use crate::model::Model;
use crate::system::default_threads;
use crate::threads::{PoolHandle, ThreadPool};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use std::{fmt, io};

/// Default limit on the bytes of the folder below the prefix cache.
const PREFIX_FOLDER_BUDGET: u64 = 8 << 30;

/// A model and the threads that compute it: a handle that is cheap to clone, `Send + Sync +
/// 'static`.
///
/// All sessions of an engine share its threads and the memory of its passes. Passes are exclusive:
/// a call that comes while another session computes waits, in the order of arrival, and can be
/// cancelled meanwhile.
///
/// ```
/// use ruvllm::Engine;
/// use ruvllm::engine::EngineOptions;
/// use ruvllm::Model;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
/// let engine = Engine::new(&model, &EngineOptions { n_threads: 2.try_into().ok(), ..Default::default() })?;
/// let (mut one, mut other) = (engine.session()?, engine.session()?);
/// one.prefill(&[1, 2, 3])?;
/// other.prefill(&[1, 2, 3])?;
/// assert_eq!(one.logits(), other.logits());
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Engine {
    model: Model,
    core: Arc<Core>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine {{ n_threads: {}, .. }}", self.n_threads())
    }
}

/// A pass that is computed in pieces, with other passes in between, see [`Engine::step_piece`].
#[derive(Debug)]
pub(crate) struct PiecePass {
    /// Its buffers, which other passes leave alone.
    arena: Arena,
    /// Bytes of the buffers of all such passes of the engine.
    in_all: Arc<AtomicU64>,
    cursor: Cursor,
}

impl Drop for PiecePass {
    fn drop(&mut self) {
        self.in_all.fetch_sub(self.arena.bytes(), Ordering::Relaxed);
    }
}

impl PiecePass {
    /// Where it goes on.
    pub(crate) fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Forgets what was computed: the next pass begins with the first layer.
    pub(crate) fn restart(&mut self) {
        self.cursor = Cursor::default();
    }
}

/// A piece of a pass that is not computed at once.
pub(super) struct Chunk<'a> {
    cursor: &'a mut Cursor,
    arena: &'a mut Arena,
    pause: Pause<'a>,
}

/// State of an engine besides its model, so that a model can own its default engine.
struct Core {
    /// Shared with the engine of the model's block for multi-token prediction, and so is what
    /// follows.
    thread_pool: Arc<ThreadPool>,
    turns: Arc<Turns>,
    /// Buffers of the running pass.
    arena: Arc<Mutex<Arena>>,
    /// Bytes of the buffers of passes that are computed in pieces.
    of_piece_passes: Arc<AtomicU64>,
    /// Memory for keys and values.
    pool: KvPool,
    /// What computes in place of the CPU.
    runner: Option<Arc<dyn Runner>>,
    /// Whether the CPU goes on where that fails, and the failure after which it did.
    cpu_fallback: bool,
    failure: OnceLock<GpuError>,
    /// Buffers of the runner's passes.
    batch_buffers: Mutex<BatchBuffers>,
    /// What passes over generated rows took.
    times: Mutex<RowTimes>,
    /// Memory for what a pass sees of its slots.
    views: Mutex<Vec<SlotView<'static>>>,
    /// What keys have in common, once keys of few bits are asked for; none if they have nothing.
    centres: OnceLock<Option<Arc<KeyCentres>>>,
}

impl Core {
    fn new(
        model: &Model,
        options: &EngineOptions,
        runner: Option<Arc<dyn Runner>>,
    ) -> Result<Core, SessionError> {
        let SharedThreads {
            thread_pool,
            turns,
            arena,
        } = match &options.threads {
            Some(threads) => threads.clone(),
            None => SharedThreads::start(
                options
                    .n_threads
                    .map_or_else(default_threads, NonZeroUsize::get),
            )?,
        };
        let n_threads = thread_pool.n_threads();
        let mut budget = options.kv_budget.unwrap_or(u64::MAX);
        if let Some(limit) = model.memory_limit() {
            let plan = model.memory_plan(&plan_options(SessionOptions::default(), n_threads))?;
            budget = budget.min(limit.saturating_sub(plan.needed() - plan.kv));
        }
        let pool = match &runner {
            Some(runner) => {
                let runner = Arc::clone(runner);
                let budget = budget.min(runner.page_limit());
                let is_shared = runner.shares_memory();
                KvPool::with_source(budget, is_shared, move |bytes| runner.page(bytes))
            }
            None => KvPool::new(budget),
        };
        if let Some(bytes) = options.prefix_budget {
            pool.set_prefix_budget(bytes);
        }
        let pool = match &options.prefix_folder {
            Some(path) => {
                let folder = PrefixFolder::open(
                    path,
                    options.prefix_folder_budget.unwrap_or(PREFIX_FOLDER_BUDGET),
                );
                let refused = |error: io::Error| SessionError::PrefixFolder {
                    path: path.clone(),
                    error: error.to_string(),
                };
                pool.with_folder(folder.map_err(refused)?)
            }
            None => pool,
        };
        let (of_piece_passes, batch_buffers, times) =
            (Arc::default(), Mutex::default(), Mutex::default());
        Ok(Core {
            thread_pool,
            turns,
            arena,
            of_piece_passes,
            pool,
            runner,
            cpu_fallback: options.cpu_fallback,
            failure: OnceLock::new(),
            batch_buffers,
            times,
            views: Mutex::default(),
            centres: OnceLock::new(),
        })
    }
}

impl Engine {
    /// An engine of its own for `model`, besides the one that [`Model::session`] uses.
    ///
    /// # Errors
    /// If an option makes no sense, the system gives no more threads, or there is no such device,
    /// or it cannot compute the model.
    pub fn new(model: &Model, options: &EngineOptions) -> Result<Engine, SessionError> {
        let runner = open_runner(model, options.device.unwrap_or(model.device()))?;
        Ok(Engine {
            model: model.clone(),
            core: Arc::new(Core::new(model, options, runner)?),
        })
    }

    /// An engine whose passes are computed by `runner`, made for this model.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn with_runner(
        model: &Model,
        options: &EngineOptions,
        runner: Arc<dyn Runner>,
    ) -> Result<Engine, SessionError> {
        Ok(Engine {
            model: model.clone(),
            core: Arc::new(Core::new(model, options, Some(runner))?),
        })
    }

    /// The runner that computes instead of the CPU, if there is one, and it has not failed.
    pub fn runner(&self) -> Option<&dyn Runner> {
        self.core
            .runner
            .as_deref()
            .filter(|_| self.gpu_failure().is_none())
    }

    /// The failure after which the CPU took over, see [`EngineOptions::cpu_fallback`].
    pub fn gpu_failure(&self) -> Option<&GpuError> {
        self.core.failure.get()
    }

    pub(super) fn has_cpu_fallback(&self) -> bool {
        self.core.cpu_fallback
    }

    /// Lets the runner compute nothing from now on.
    pub(super) fn fail(&self, failure: GpuError) {
        let _ = self.core.failure.set(failure); // the first one stays
    }

    /// An engine for `block`, the model's for multi-token prediction: with the same threads and
    /// buffers, and a pool of its own, so that the text finds as much room as without.
    pub(crate) fn for_block(&self, block: &Model, kv_budget: u64) -> Engine {
        let (thread_pool, turns, arena) = (
            Arc::clone(&self.core.thread_pool),
            Arc::clone(&self.core.turns),
            Arc::clone(&self.core.arena),
        );
        let (pool, of_piece_passes, times) =
            (KvPool::new(kv_budget), Arc::default(), Mutex::default());
        let batch_buffers = Mutex::default();
        let core = Core {
            thread_pool,
            turns,
            arena,
            of_piece_passes,
            pool,
            runner: None,
            cpu_fallback: false,
            failure: OnceLock::new(),
            batch_buffers,
            times,
            views: Mutex::default(),
            // Its passes read what another model computed.
            centres: OnceLock::from(None),
        };
        Engine {
            model: block.clone(),
            core: Arc::new(core),
        }
    }

    /// Whether it is a handle of the same engine.
    pub(crate) fn same(&self, other: &Engine) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }

    /// The model it computes.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Number of threads, including the caller's.
    pub fn n_threads(&self) -> usize {
        self.core.thread_pool.n_threads()
    }

    /// Its threads, for [`EngineOptions::threads`] of an engine for another model.
    pub fn threads(&self) -> SharedThreads {
        SharedThreads {
            thread_pool: Arc::clone(&self.core.thread_pool),
            turns: Arc::clone(&self.core.turns),
            arena: Arc::clone(&self.core.arena),
        }
    }

    /// Current memory use; waits for a running pass.
    pub fn memory(&self) -> EngineMemory {
        let (gguf, pool) = (self.model().gguf(), self.pool().stats());
        EngineMemory {
            weights: gguf.tensors().iter().map(|t| t.n_bytes).sum(),
            weights_copy: gguf.resident_bytes(),
            vocabulary: vocabulary_bytes(self.model()),
            kv: pool.by_type,
            kv_free: pool.free,
            adapters: pool.adapters,
            buffers: self.buffer_bytes(),
        }
    }

    /// The pool of its sequences' keys and values.
    pub fn pool(&self) -> &KvPool {
        &self.core.pool
    }

    /// An empty sequence for [`Engine::step`].
    ///
    /// # Errors
    /// If an option is invalid, or there is no memory for its tokens.
    pub fn sequence(&self, options: &SessionOptions) -> Result<Sequence, SessionError> {
        let h = self.model.hparams();
        let n_ctx = checked_n_ctx(h, options)?;
        let policy = options.kv_policy();
        let layout = self.layout(policy)?;
        if let Some(KvTiers { recent, middle }) = policy.tiers {
            if (policy.k, policy.v) != (KvType::F16, KvType::F16) {
                return Err(SessionError::TiersNeedF16 {
                    k: policy.k,
                    v: policy.v,
                });
            }
            if middle < recent {
                let expected = format!("at least {recent}, where the tier before it ends");
                return Err(SessionError::Option {
                    option: "kv_tiers.middle",
                    value: middle,
                    expected,
                });
            }
        }
        if self.model.memory_limit().is_some() {
            self.model
                .check_memory(&plan_options(options.clone(), self.n_threads()))?;
        }
        if options.context_shift.is_some() {
            self.cpu_only("context shift")?;
        }
        context_shift::check(&self.model, n_ctx, options)?;
        if let Some(layer) = options
            .pooled_layer
            .filter(|&layer| layer >= h.n_layer.saturating_sub(1))
        {
            let expected = format!("below {}, the last layer", h.n_layer.saturating_sub(1));
            return Err(SessionError::Option {
                option: "pooled_layer",
                value: layer,
                expected,
            });
        }
        let device = self
            .runner()
            .map_or_else(|| self.model.arch().name().to_owned(), Runner::name);
        let kv = SeqKv::new(self.core.pool.clone(), layout);
        Sequence::new(&self.model, device, kv, n_ctx, options)
    }

    /// Layout of keys and values in this precision.
    ///
    /// # Errors
    /// If the engine's device does not have it.
    pub(crate) fn layout(&self, policy: KvPolicy) -> Result<Arc<KvLayout>, SessionError> {
        if let Some(what) = policy.not_on_gpu() {
            self.cpu_only(what)?;
        }
        let h = self.model.hparams();
        let layout = kv_layout(h, policy);
        let layout = match self.runner() {
            Some(runner) if !runner.shares_memory() => on_device(h, layout, runner.first_layer()),
            Some(_) => layout,
            None if layout.has_small_keys() => layout.centred(self.centres()),
            None => layout,
        };
        Ok(Arc::new(layout))
    }

    /// What keys have in common, once that is known.
    pub(super) fn known_centres(&self) -> &OnceLock<Option<Arc<KeyCentres>>> {
        &self.core.centres
    }

    /// Computes one pass: appends each slot's tokens to its sequence, and writes the logits to
    /// `outputs`. Without slots it does nothing.
    ///
    /// Tokens that a sequence holds but whose keys and values were released, as after a rewind
    /// across a window, are recomputed first.
    ///
    /// # Errors
    /// If a slot has no tokens, they do not fit or are not in the vocabulary, or its sequence
    /// belongs to another model; if the call is cancelled, or there is not enough memory. The
    /// sequences are then unchanged.
    pub fn step(
        &self,
        slots: &mut [Slot<'_>],
        outputs: &mut Outputs,
        cancel: &CancelToken,
    ) -> Result<(), SessionError> {
        self.pass(slots, outputs, false, cancel, &mut NoCallback)
    }

    /// A pass for [`Engine::step_piece`].
    pub(crate) fn piece_pass(&self) -> PiecePass {
        PiecePass {
            arena: Arena::default(),
            in_all: Arc::clone(&self.core.of_piece_passes),
            cursor: Cursor::default(),
        }
    }

    /// Computes a pass of the CPU over `slots` up to where it pauses; returns whether it is
    /// complete, as after [`Engine::step`]. Until then it is to be called with the same slots,
    /// and nobody else may touch their sequences; after an error the pass begins anew.
    pub(crate) fn step_piece(
        &self,
        slots: &mut [Slot<'_>],
        outputs: &mut Outputs,
        cancel: &CancelToken,
        pass: &mut PiecePass,
        pause: Pause<'_>,
    ) -> Result<bool, SessionError> {
        let before = pass.arena.bytes();
        let piece = Chunk {
            cursor: &mut pass.cursor,
            arena: &mut pass.arena,
            pause,
        };
        let outcome = self.advance(slots, outputs, false, cancel, &mut NoCallback, Some(piece));
        // An arena for which there was no memory is empty.
        pass.in_all
            .fetch_add(pass.arena.bytes().wrapping_sub(before), Ordering::Relaxed);
        if !matches!(outcome, Ok(false)) {
            pass.restart();
        }
        outcome
    }

    /// [`Engine::step`]; if `raw`, the logits are the head's bare products, and hidden states are
    /// returned, too.
    pub(crate) fn pass(
        &self,
        slots: &mut [Slot<'_>],
        outputs: &mut Outputs,
        raw: bool,
        cancel: &CancelToken,
        probe: &mut dyn EvalCallback,
    ) -> Result<(), SessionError> {
        self.advance(slots, outputs, raw, cancel, probe, None)
            .map(drop)
    }

    /// Advances a pass; returns whether it is complete.
    fn advance(
        &self,
        slots: &mut [Slot<'_>],
        outputs: &mut Outputs,
        raw: bool,
        cancel: &CancelToken,
        probe: &mut dyn EvalCallback,
        piece: Option<Chunk<'_>>,
    ) -> Result<bool, SessionError> {
        if slots.is_empty() {
            outputs.clear();
            return Ok(true);
        }
        let h = self.model.hparams();
        if h.diffusion.is_some() {
            return Err(SessionError::Denoises);
        }
        if h.attention().any(|attn| !attn.causal) {
            return Err(SessionError::Encoder);
        }
        for slot in &mut *slots {
            self.check(slot.seq, slot.rows.tokens)?;
            slot.seq.reserve(slot.rows.tokens.len())?;
        }
        for slot in &mut *slots {
            if !slot.seq.spans.is_empty() {
                self.cpu_only("images")?;
            }
            self.compute_missing(slot.seq, outputs, cancel)?;
        }
        let is_whole = piece.is_none();
        match self.advance_once(slots, outputs, raw, cancel, probe, piece) {
            Err(error) if is_whole && self.falls_back(&error) => {
                for slot in &mut *slots {
                    self.compute_missing(slot.seq, outputs, cancel)?;
                }
                self.advance_once(slots, outputs, raw, cancel, probe, None)
            }
            outcome => outcome,
        }
    }

    /// [`Engine::advance`] where nothing is missing.
    fn advance_once(
        &self,
        slots: &mut [Slot<'_>],
        outputs: &mut Outputs,
        raw: bool,
        cancel: &CancelToken,
        probe: &mut dyn EvalCallback,
        piece: Option<Chunk<'_>>,
    ) -> Result<bool, SessionError> {
        let has_hooks = slots.iter().any(|slot| slot.seq.hook.is_some());
        if !raw && self.runner().is_none() {
            for slot in slots.iter_mut().filter(|slot| slot.seq.hook.is_none()) {
                let (position, n) = (slot.pos(), slot.rows.tokens.len());
                let first = slot.seq.first_kept(position, n);
                slot.rows.first_state = slot.rows.first_state.min(first);
            }
        }
        let has_states = slots
            .iter()
            .any(|slot| slot.rows.first_state < slot.rows.tokens.len());
        let wanted = match (raw || has_hooks, has_states) {
            (true, _) => Wanted::Raw,
            (false, true) => Wanted::Both,
            (false, false) => Wanted::Logits,
        };
        let outcome = self.compute(slots, outputs, wanted, cancel, probe, piece);
        if !matches!(outcome, Ok(true)) {
            outputs.clear();
            return outcome;
        }
        let (model, transform) = (&self.model, self.model.hparams().logit_transform());
        let (n_vocab, n_embd) = (model.hparams().n_vocab, model.hparams().n_embd);
        for slot in slots {
            let (start, of_logits) = (slot.pos(), outputs.of_logits(slot.rows.index));
            let of_states = |first: usize| {
                slot.rows.outputs(first).start * n_embd..slot.rows.outputs(first).end * n_embd
            };
            let (of_logit_rows, of_kept) = (
                of_states(slot.rows.first_output),
                of_states(slot.rows.first_state),
            );
            let Slot { seq, rows } = slot;
            let SlotRows {
                tokens,
                kind,
                first_output,
                first_state,
                ..
            } = rows;
            if let Some(states) = seq.states.as_mut().filter(|_| has_states) {
                states.append(start + *first_state, &outputs.states[of_kept]);
            }
            seq.commit_inputs(start, ((*first_output).min(*first_state), tokens.len()));
            seq.kv.commit_at(
                tokens.len(),
                seq.spans.last_end(start..start + tokens.len()),
            );
            seq.push(tokens, *kind);
            if *kind == TokenKind::Generated {
                model.decoded();
            }
            let logits = &mut outputs.logits[of_logits];
            if seq.hook.is_some() {
                let states = &outputs.states[of_logit_rows];
                seq.follow(start..start + *first_output, *kind, states, logits);
            } else if has_hooks && !raw {
                // They were left as the head's products for the hooks of other slots.
                logits
                    .chunks_exact_mut(n_vocab)
                    .for_each(|row| transform.row(row));
            }
        }
        Ok(true)
    }

    /// Refuses `what` if a device computes passes.
    pub(crate) fn cpu_only(&self, what: &'static str) -> Result<(), SessionError> {
        match self.runner() {
            Some(runner) => Err(SessionError::NotOnDevice {
                device: runner.name(),
                what,
            }),
            None => Ok(()),
        }
    }

    pub(crate) fn check(&self, seq: &Sequence, tokens: &[u32]) -> Result<(), SessionError> {
        let n_vocab = self.model.hparams().n_vocab;
        if tokens.is_empty() {
            return Err(SessionError::NoTokens);
        }
        let (n_ctx, n_past) = (seq.n_ctx(), seq.position());
        if tokens.len() > n_ctx - n_past {
            return Err(SessionError::ContextFull {
                n_ctx,
                n_past,
                n_new: tokens.len(),
            });
        }
        if let Some(&token) = tokens.iter().find(|&&t| t as usize >= n_vocab) {
            return Err(SessionError::TokenOutOfRange { token, n_vocab });
        }
        if !seq.model().same(&self.model) {
            return Err(SessionError::OtherModel);
        }
        // A hook takes placeholders for tokens.
        if seq.hook.is_some() && !seq.spans.is_empty() {
            return Err(SessionError::HasImages {
                what: "learning from a text while it is read",
                instead: "; detach the learner",
            });
        }
        if self.model.encoder().is_some() && seq.memory.is_none() {
            return Err(SessionError::NotEncoded);
        }
        Ok(())
    }

    /// Computes the logits of rows of a whole text, as [`Engine::states`] does states.
    pub(crate) fn logits_of(
        &self,
        slot: Slot<'_>,
        outputs: &mut Outputs,
        cancel: &CancelToken,
    ) -> Result<(), SessionError> {
        self.check(slot.seq, slot.rows.tokens)?;
        let (slots, wanted) = (&mut [slot], Wanted::Logits);
        self.compute(slots, outputs, wanted, cancel, &mut NoCallback, None)
            .map(drop)
    }

    /// Computes the hidden states of the slots' rows with outputs, without logits; sequences are
    /// unchanged.
    pub(crate) fn states(
        &self,
        slots: &mut [Slot<'_>],
        outputs: &mut Outputs,
        cancel: &CancelToken,
        probe: &mut dyn EvalCallback,
    ) -> Result<(), SessionError> {
        for slot in &mut *slots {
            self.check(slot.seq, slot.rows.tokens)?;
        }
        self.compute(slots, outputs, Wanted::States, cancel, probe, None)
            .map(drop)
    }

    pub(super) fn compute(
        &self,
        slots: &mut [Slot<'_>],
        outputs: &mut Outputs,
        wanted: Wanted,
        cancel: &CancelToken,
        probe: &mut dyn EvalCallback,
        piece: Option<Chunk<'_>>,
    ) -> Result<bool, SessionError> {
        slots
            .iter_mut()
            .enumerate()
            .for_each(|(i, slot)| slot.rows.index = i);
        slots.sort_unstable_by_key(|slot| (!slot.rows.is_generated(), slot.rows.index));
        let outcome = self.compute_sorted(slots, outputs, wanted, cancel, probe, piece);
        if outcome.is_err() {
            for slot in &mut *slots {
                slot.seq.kv.abandon();
            }
        }
        slots.sort_unstable_by_key(|slot| slot.rows.index);
        outcome
    }

    /// Computes slots that are sorted: those of generated tokens come first.
    fn compute_sorted(
        &self,
        slots: &mut [Slot<'_>],
        outputs: &mut Outputs,
        wanted: Wanted,
        cancel: &CancelToken,
        probe: &mut dyn EvalCallback,
        piece: Option<Chunk<'_>>,
    ) -> Result<bool, SessionError> {
        let h = self.model.hparams();
        // On 32-bit systems sizes could overflow: if twice the estimate does not, they do not.
        if usize::BITS < u64::BITS {
            let m = slots.iter().map(|slot| slot.rows.tokens.len()).sum();
            let longest = slots
                .iter()
                .map(|slot| slot.pos() + slot.rows.tokens.len())
                .max()
                .unwrap_or(0);
            let bytes = compute_bytes(h, m, longest).saturating_mul(2);
            if usize::try_from(bytes).is_err() {
                return Err(SessionError::OutOfMemory {
                    what: "buffers",
                    bytes,
                });
            }
        }
        let (is_whole, mut from_start) = (piece.is_none(), Cursor::default());
        let (cursor, own_arena, pause) = match piece {
            Some(Chunk {
                cursor,
                arena,
                pause,
            }) => (cursor, Some(arena), Some(pause)),
            None => (&mut from_start, None, None),
        };
        let is_begun = cursor.is_begun();
        let (mut row, mut output) = (0, 0);
        for slot in &mut *slots {
            (slot.rows.row, slot.rows.output) = (row, output);
            row += slot.rows.tokens.len();
            output += slot.rows.n_outputs();
            if !is_begun {
                slot.seq.kv.reserve(slot.rows.tokens.len())?;
            }
        }
        outputs.prepare(
            slots.iter().map(|slot| &slot.rows),
            (h.n_vocab, h.n_embd),
            wanted,
        )?;
        let cancelled = || cancel.is_cancelled();
        let adapter_nanos = AtomicU64::new(0);
        let (is_complete, time) = self.enter(cancel, |threads, arena| {
            let timer = Timer::start();
            let arena = own_arena.unwrap_or(arena);
            let mut memory = self
                .core
                .views
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let mut views = reuse(std::mem::take(&mut *memory));
            views.extend(slots.iter_mut().map(Slot::view));
            let pass = Pass {
                model: &self.model,
                slots: &mut views,
                outputs,
                wanted,
                cancelled: &cancelled,
                adapter_nanos: &adapter_nanos,
                cursor,
                end: h.n_layer,
                pause,
                hidden: None,
            };
            let outcome = match self.runner() {
                Some(runner) => offload(
                    runner,
                    &mut self.batch_buffers(),
                    pass,
                    threads,
                    arena,
                    probe,
                )
                .map(|()| true),
                None => forward(pass, threads, arena, probe).map_err(SessionError::from),
            };
            *memory = reuse(views);
            outcome.map(|is_complete| (is_complete, timer.elapsed()))
        })??;
        let is_decoding =
            |slot: &Slot<'_>| slot.rows.kind == TokenKind::Generated && slot.rows.first_output == 0;
        if slots.iter().all(is_decoding) && is_whole {
            self.times().note(row, time);
        }
        let adapter_time = Duration::from_nanos(adapter_nanos.into_inner());
        slots
            .iter_mut()
            .for_each(|slot| slot.seq.adapter_time += adapter_time);
        Ok(is_complete)
    }

    /// What passes over generated rows took.
    pub(crate) fn times(&self) -> MutexGuard<'_, RowTimes> {
        self.core
            .times
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Times of passes over so many generated rows, as measured by this engine. They say how much
    /// it pays to draft; another process can begin with them, see [`Engine::assume_row_times`].
    pub fn row_times(&self) -> Vec<(usize, Duration)> {
        self.times().measured()
    }

    /// Begins with [`Engine::row_times`] that the same model took on the same machine before: what
    /// is measured from now on takes their place. They change no text, whatever they are.
    pub fn assume_row_times(&self, times: &[(usize, Duration)]) {
        self.times().assume(times);
    }

    /// How many drafts the next pass can compute of `seq`, the first at position `next`, so that
    /// nothing is left of those that are rejected. A hook has to see the text's tokens and no
    /// others. And drafts share the page of the token before them: for a guess no page is
    /// taken, which another sequence, or the pool's budget, may need.
    pub(crate) fn n_draftable(&self, seq: &Sequence, next: usize) -> usize {
        if seq.hook.is_some() {
            return 0;
        }
        (next.next_multiple_of(KV_BLOCK) - next).min(seq.n_ctx().saturating_sub(next))
    }

    /// Bytes of the buffers of a pass.
    pub(crate) fn buffer_bytes(&self) -> u64 {
        let arena = self
            .core
            .arena
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .bytes();
        arena + self.core.of_piece_passes.load(Ordering::Relaxed) + self.batch_buffers().bytes()
    }

    fn batch_buffers(&self) -> MutexGuard<'_, BatchBuffers> {
        self.core
            .batch_buffers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Turns of those who compute: passes, and other work of its threads.
    pub fn turns(&self) -> TurnCounts {
        self.core.turns.counts()
    }

    /// Runs `f` with all threads and the arena, after earlier callers.
    pub(crate) fn enter<R>(
        &self,
        cancel: &CancelToken,
        f: impl FnOnce(&PoolHandle<'_>, &mut Arena) -> R,
    ) -> Result<R, SessionError> {
        let _turn = self
            .core
            .turns
            .wait(|| cancel.is_cancelled())
            .ok_or(SessionError::Cancelled)?;
        let mut arena = self
            .core
            .arena
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Ok(self
            .core
            .thread_pool
            .enter(|threads| f(threads, &mut arena)))
    }
}

impl Model {
    /// The engine that [`Model::session`] uses, made when it is first asked for.
    ///
    /// # Errors
    /// If the system gives no threads.
    pub fn engine(&self) -> Result<Engine, SessionError> {
        let core = self.shared(|| {
            Core::new(
                self,
                &EngineOptions::default(),
                open_runner(self, self.device())?,
            )
            .map(Arc::new)
        })?;
        Ok(Engine {
            model: self.clone(),
            core,
        })
    }
}
