//! A sequence of tokens: the state that an engine keeps of it between passes.

use crate::compute::arena::reserve;
use crate::compute::hook::{Cut, OutputHook, OutputRows, TokenKind};
use crate::compute::pooling::{PooledStates, Pooling};
use crate::engine::SessionError;
use crate::engine::adapters::{AdapterId, Adapters, next_number};
use crate::engine::hidden_states::{KeptInputs, KeptStates};
use crate::engine::options::{CachedTokens, PrefixOptions, SessionOptions};
use crate::kv::{Counted, KvPolicy, KvPool, SeqKv};
use crate::layers::cross::memory::Memory;
use crate::layers::rope::RopeTables;
use crate::layers::spans::Spans;
use crate::lora::{Adapter, AdapterError, Attached};
use crate::model::Model;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Tokens for which a sequence reserves memory at first, so that few passes allocate.
const FEW_TOKENS: usize = 4096;
/// Purpose of the memory, for [`SessionError::OutOfMemory`].
const TOKENS: &str = "tokens";

/// Tokens with their keys and values, the adapters they are computed with, and a hook that follows
/// them.
///
/// [`Engine::step`](crate::Engine::step) appends to any number of sequences in one pass. A
/// [`Session`](crate::Session) is the simple interface to one.
pub struct Sequence {
    model: Model,
    pub(crate) kv: SeqKv,
    pub(crate) rope: Arc<RopeTables>,
    pub(crate) adapters: Adapters,
    pub(crate) hook: Option<Box<dyn OutputHook>>,
    /// Tokens it holds; the cache has keys and values of the first `kv.len()`, and a pass computes
    /// the others first.
    tokens: Vec<u32>,
    /// Kind of each token.
    kinds: Vec<TokenKind>,
    /// Positions that hold embeddings of images; the tokens there are placeholders.
    pub(crate) spans: Spans,
    /// What the model's encoder left of another text.
    pub(crate) memory: Option<Arc<Memory>>,
    /// How many tokens at the end are drafts that were computed, and no part of the text yet.
    drafts: usize,
    n_ctx: usize,
    /// See [`SessionOptions::exact`](crate::SessionOptions::exact).
    pub(crate) exact: bool,
    pub(crate) prefix: PrefixOptions,
    /// Of the last prompt.
    pub(super) cached: CachedTokens,
    /// Tokens that stay when the context is shifted, if it is at all.
    pub(crate) context_shift: Option<usize>,
    /// Tokens behind them that are gone.
    pub(crate) n_dropped: usize,
    /// Hidden states of its tokens, if they are pooled.
    pub(crate) pooling: Option<Pooling>,
    /// Hidden states of its last tokens, if they are kept.
    pub(crate) states: Option<KeptStates>,
    /// What layers read of them, if drafters do.
    pub(crate) inputs: KeptInputs,
    /// The level or device that computes it.
    pub(crate) device: String,
    /// Time that products with adapters took so far, divided by the number of threads.
    pub(crate) adapter_time: Duration,
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Sequence {{ position: {}, n_ctx: {}, .. }}",
            self.position(),
            self.n_ctx
        )
    }
}

impl Sequence {
    pub(crate) fn new(
        model: &Model,
        device: String,
        kv: SeqKv,
        n_ctx: usize,
        options: &SessionOptions,
    ) -> Result<Sequence, SessionError> {
        let mut seq = Sequence {
            rope: Arc::new(RopeTables::new(
                &model.hparams().ropes,
                &model.weights().rope_factors,
                n_ctx,
            )),
            model: model.clone(),
            kv,
            adapters: Adapters::default(),
            hook: None,
            tokens: Vec::new(),
            kinds: Vec::new(),
            spans: Spans::default(),
            memory: None,
            drafts: 0,
            n_ctx,
            exact: options.exact,
            prefix: options.prefix.clone(),
            cached: CachedTokens::default(),
            context_shift: options.context_shift,
            n_dropped: 0,
            pooling: options.pooled_layer.map(Pooling::new),
            states: None,
            inputs: KeptInputs::default(),
            device,
            adapter_time: Duration::ZERO,
        };
        seq.reserve(0)?;
        if options.keep_states {
            let mut states = KeptStates::new(model.hparams().n_embd, n_ctx)?;
            states.is_pinned = true;
            seq.states = Some(states);
        }
        Ok(seq)
    }

    /// Keeps the hidden states of its last tokens from now on, see
    /// [`SessionOptions::keep_states`](crate::SessionOptions::keep_states).
    pub(crate) fn keep_states(&mut self) -> Result<(), SessionError> {
        if self.states.is_none() {
            let states = KeptStates::new(self.model.hparams().n_embd, self.n_ctx)?;
            self.states = Some(match self.limited_pool() {
                Some(pool) => states.lent(pool, self.n_ctx)?,
                None => states,
            });
        }
        Ok(())
    }

    /// The pool from whose budget drafters take their memory, if that is limited.
    pub(crate) fn limited_pool(&self) -> Option<&KvPool> {
        let is_limited = self.model.memory_limit().is_some();
        is_limited.then(|| self.kv.pool())
    }

    /// Keeps what these layers read of its last tokens from now on.
    pub(crate) fn keep_inputs(&mut self, layers: &[usize]) -> Result<(), SessionError> {
        let limited = self.limited_pool().cloned();
        let h = self.model.hparams();
        self.inputs
            .add(layers, (h.n_layer, h.n_embd), self.n_ctx, limited.as_ref())
    }

    /// Lets what is kept stay when the generation ends that wanted it.
    pub(crate) fn pin_kept(&mut self) {
        self.states
            .iter_mut()
            .for_each(|states| states.is_pinned = true);
        self.inputs.pin();
    }

    /// Tokens up to `end` will be computed, piece by piece: of those alone that are the last then,
    /// something is kept.
    pub(crate) fn expect(&mut self, end: usize) {
        self.states.iter_mut().for_each(|states| states.expect(end));
        self.inputs.expect(end);
    }

    /// Frees what a generation that ends wanted kept, unless it is to stay.
    pub(crate) fn release_kept(&mut self) {
        self.states = self.states.take().filter(|states| states.is_pinned);
        self.inputs.release();
    }

    /// Of the next `n` tokens, from `position` on, the first that the last layer is to compute for
    /// who reads what it leaves.
    pub(crate) fn first_kept(&self, position: usize, n: usize) -> usize {
        let of_states = self.states.as_ref();
        let first = of_states.map_or(n, |states| states.first_of(position, n));
        first.min(self.inputs.first_of(position, n))
    }

    /// A pass has computed `n` tokens from `position` on, the last layer those from `first` on.
    pub(crate) fn commit_inputs(&mut self, position: usize, (first, n): (usize, usize)) {
        self.inputs.commit(position, first, n);
    }

    /// What these layers read of tokens up to the one before `position`, that one's last; none
    /// where that one's is not there.
    pub(crate) fn inputs_before(&self, layers: &[usize], position: usize) -> &[f32] {
        self.inputs.before(layers, position)
    }

    /// Hidden states of tokens up to the one before `position`, that one's last; none where that
    /// one's is not there.
    pub(crate) fn states_before(&self, position: usize) -> &[f32] {
        self.states
            .as_ref()
            .map_or(&[], |states| states.before(position))
    }

    /// Precision of its keys and values.
    pub fn kv_policy(&self) -> KvPolicy {
        self.kv.policy()
    }

    /// The model it belongs to.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Largest number of tokens.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Tokens that were dropped by context shifts, which lay behind those that stay.
    pub fn n_dropped(&self) -> usize {
        self.n_dropped
    }

    /// Tokens of the last prompt that came from the prefix cache, which is used if the sequence is
    /// empty.
    pub fn cached_tokens(&self) -> CachedTokens {
        self.cached
    }

    /// Whether its context is shifted when it is full.
    pub(crate) fn shifts(&self) -> bool {
        self.context_shift.is_some() && self.spans.is_empty()
    }

    /// Number of tokens it holds, which is the position of the next one.
    pub fn position(&self) -> usize {
        self.tokens.len().saturating_sub(self.drafts)
    }

    /// The tokens it holds.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens[..self.position()]
    }

    /// Number of drafts behind its tokens.
    pub(crate) fn n_drafts(&self) -> usize {
        self.drafts
    }

    /// Makes its last `n` tokens drafts, to be [accepted](Sequence::accept_draft) one by one.
    pub(crate) fn set_drafts(&mut self, n: usize) {
        self.drafts = n;
    }

    /// Takes `token` into the text if it is the next draft.
    pub(crate) fn accept_draft(&mut self, token: u32) -> bool {
        let is_drafted = self.next_draft() == Some(token);
        if is_drafted {
            self.drafts -= 1;
            if self.drafts == 0 {
                self.kv.release();
            }
        }
        is_drafted
    }

    /// The next draft.
    pub(crate) fn next_draft(&self) -> Option<u32> {
        self.tokens.get(self.position()).copied()
    }

    /// Forgets the drafts that were not accepted, as if they had never been computed.
    pub(crate) fn drop_drafts(&mut self) {
        if self.drafts > 0 {
            self.truncate(self.position());
            self.kv.release();
        }
    }

    /// Kind of each token.
    pub(crate) fn kinds(&self) -> &[TokenKind] {
        &self.kinds
    }

    /// Number of last tokens that a pass must compute first.
    pub(crate) fn n_missing(&self) -> usize {
        self.tokens.len() - self.kv.len()
    }

    /// The longest run of missing tokens of one kind.
    pub(crate) fn missing(&self) -> (Vec<u32>, TokenKind) {
        let begin = self.kv.len();
        let kind = self.kinds[begin];
        let n = self.kinds[begin..]
            .iter()
            .take_while(|&&k| k == kind)
            .count();
        (self.tokens[begin..begin + n].to_vec(), kind)
    }

    /// Bytes of its tokens, of their hidden states where they are kept, and of an encoder's memory.
    pub(crate) fn token_bytes(&self) -> u64 {
        let tokens = self.tokens.capacity() * size_of::<u32>()
            + self.kinds.capacity() * size_of::<TokenKind>();
        let memory = self.memory.as_ref().map_or(0, |memory| memory.bytes());
        let states = self.states.as_ref().map_or(0, KeptStates::bytes);
        tokens as u64 + states + self.inputs.bytes() + memory
    }

    /// Reserves memory for `n` more tokens.
    pub(crate) fn reserve(&mut self, n: usize) -> Result<(), SessionError> {
        let n = self.tokens.len() + n;
        if n > self.tokens.capacity() || self.tokens.capacity() == 0 {
            let room = n.max(FEW_TOKENS).next_power_of_two().min(self.n_ctx).max(n);
            reserve(&mut self.tokens, room, TOKENS)?;
            reserve(&mut self.kinds, room, TOKENS)?;
        }
        Ok(())
    }

    /// Appends tokens that are computed, or that the next pass will compute. The memory must be
    /// [reserved](Sequence::reserve).
    pub(crate) fn push(&mut self, tokens: &[u32], kind: TokenKind) {
        self.tokens.extend_from_slice(tokens);
        self.kinds.resize(self.tokens.len(), kind);
    }

    /// Drops everything from `position` on. The next pass recomputes what a window has released.
    pub(crate) fn truncate(&mut self, position: usize) {
        self.tokens.truncate(position);
        self.kinds.truncate(position);
        self.spans.truncate(position);
        self.drafts = 0;
        self.kv.truncate(position);
        if let Some(pooling) = &mut self.pooling {
            pooling.truncate(position);
        }
        if let Some(states) = &mut self.states {
            states.truncate(position);
        }
        self.inputs.truncate(position);
        if position <= self.context_shift.unwrap_or(0) {
            self.n_dropped = 0;
        }
    }

    /// Forgets the tokens `gone`, whose pages were dropped.
    pub(crate) fn drop_tokens(&mut self, gone: Range<usize>) {
        self.n_dropped += gone.len();
        if let Some(pooling) = &mut self.pooling {
            pooling.shift(gone.len());
        }
        if let Some(states) = &mut self.states {
            states.shift(gone.clone());
        }
        self.inputs.shift(&gone);
        self.tokens.drain(gone.clone());
        self.kinds.drain(gone);
    }

    /// Replaces the contents by other tokens with their keys and values.
    pub(crate) fn replace(
        &mut self,
        tokens: &[u32],
        kinds: &[TokenKind],
        kv: SeqKv,
    ) -> Result<(), SessionError> {
        self.reserve(tokens.len().saturating_sub(self.position()))?;
        self.cut(0, Cut::Rewound);
        self.tokens.extend_from_slice(tokens);
        self.kinds.extend_from_slice(kinds);
        self.kv = kv;
        Ok(())
    }

    /// Calls the hook with the rows of a pass whose tokens begin at `new.start`, those with logits
    /// at `new.end`.
    pub(crate) fn follow(
        &mut self,
        new: Range<usize>,
        kind: TokenKind,
        states: &[f32],
        logits: &mut [f32],
    ) {
        let Some(hook) = &mut self.hook else { return };
        hook.rows(OutputRows {
            tokens: &self.tokens,
            start: new.start,
            first: new.end,
            kind,
            states,
            logits,
        });
    }

    /// Removes the last token.
    pub(crate) fn pop(&mut self) -> Option<u32> {
        let token = *self.tokens.last()?;
        self.truncate(self.tokens.len() - 1);
        Some(token)
    }

    /// [`Sequence::truncate`] with a notification of the hook.
    pub(crate) fn cut(&mut self, position: usize, cut: Cut) {
        self.truncate(position);
        if let Some(hook) = &mut self.hook {
            hook.cut(cut);
        }
    }

    /// Mean hidden states of the tokens computed since the last call; see
    /// [`SessionOptions::pooled_layer`].
    pub fn take_pooled(&mut self) -> PooledStates {
        self.pooling.as_mut().map(Pooling::take).unwrap_or_default()
    }

    /// An independent sequence that continues from the same point. Keys and values are shared until
    /// one of them writes.
    ///
    /// # Errors
    /// If there is no memory for its tokens.
    pub fn fork(&self) -> Result<Sequence, SessionError> {
        let mut fork = Sequence {
            model: self.model.clone(),
            kv: self.kv.fork(),
            rope: Arc::clone(&self.rope),
            adapters: self.adapters.clone(),
            hook: self.hook.as_ref().map(|hook| hook.fork()),
            tokens: Vec::new(),
            kinds: Vec::new(),
            spans: self.spans.clone(),
            memory: self.memory.clone(),
            drafts: 0,
            n_ctx: self.n_ctx,
            exact: self.exact,
            prefix: self.prefix.clone(),
            cached: self.cached,
            context_shift: self.context_shift,
            n_dropped: self.n_dropped,
            pooling: self.pooling.clone(),
            states: self.states.clone(),
            inputs: self.inputs.clone(),
            device: self.device.clone(),
            adapter_time: self.adapter_time,
        };
        fork.reserve(self.tokens.len())?;
        fork.tokens.extend_from_slice(&self.tokens);
        fork.kinds.extend_from_slice(&self.kinds);
        fork.truncate(self.position());
        Ok(fork)
    }
}

impl Sequence {
    /// Attaches an adapter: adds `scale·ΔW` to the weights with which this sequence is computed,
    /// besides adapters attached before. Other sequences are not affected.
    ///
    /// Its tokens stay, as after [`Sequence::set_scale`] and [`Sequence::detach`]: the next pass
    /// computes their keys and values again, with the weights that it has then. If the adapter
    /// changes the output head alone, they stay, too.
    ///
    /// # Errors
    /// If the adapter is for another model, or the scale is not finite. Nothing has changed then.
    pub fn attach(&mut self, adapter: Arc<Adapter>, scale: f32) -> Result<AdapterId, AdapterError> {
        let attached = Attached::new(self.model().base(), adapter, scale)?;
        self.release_for(attached.is_behind_layers());
        self.adapters.counted.push(self.counted(&attached));
        let id = AdapterId(next_number());
        self.adapters.attached.push(attached);
        self.adapters.ids.push(id);
        self.adapters_changed();
        Ok(id)
    }

    /// Changes the scale of an adapter; 0 leaves it attached without effect or cost. Tokens stay, see
    /// [`Sequence::attach`].
    ///
    /// # Errors
    /// If the adapter is not attached, or the scale is not finite.
    pub fn set_scale(&mut self, id: AdapterId, scale: f32) -> Result<(), AdapterError> {
        let i = self.adapters.index(id)?;
        let adapter = Arc::clone(&self.adapters.attached[i].adapter);
        let attached = Attached::new(self.model().base(), adapter, scale)?;
        self.replace_adapter(i, attached);
        Ok(())
    }

    /// Detaches an adapter, and returns it. Tokens stay, see [`Sequence::attach`].
    ///
    /// # Errors
    /// If it is not attached.
    pub fn detach(&mut self, id: AdapterId) -> Result<Arc<Adapter>, AdapterError> {
        let i = self.adapters.index(id)?;
        self.release_for(self.adapters.attached[i].is_behind_layers());
        self.adapters.ids.remove(i);
        self.adapters.counted.remove(i);
        let attached = self.adapters.attached.remove(i);
        self.adapters_changed();
        Ok(attached.adapter)
    }

    /// The attached adapters with their scales, in order of attachment.
    pub fn adapters(&self) -> impl Iterator<Item = (AdapterId, &Arc<Adapter>, f32)> {
        let Adapters { attached, ids, .. } = &self.adapters;
        ids.iter()
            .zip(attached)
            .map(|(&id, a)| (id, &a.adapter, a.scale))
    }

    /// Identifies the weights with which the sequence is computed: 0 without adapters, and a number
    /// never used before after every change of them. Keys and values can be exchanged between
    /// sequences with the same model and generation; a [fork](Sequence::fork) has its parent's.
    pub fn adapter_generation(&self) -> u64 {
        self.adapters.generation
    }

    /// Puts another adapter in the place of one.
    pub(crate) fn replace_adapter(&mut self, i: usize, attached: Attached) {
        let both = [&self.adapters.attached[i], &attached];
        self.release_for(both.iter().all(|of| of.is_behind_layers()));
        self.adapters.counted[i] = self.counted(&attached);
        self.adapters.attached[i] = attached;
        self.adapters_changed();
    }

    /// Counts its adapters in the pool's budget, or no more. Those of an empty sequence that others
    /// are forked from do not count; no adapter is replaced in it.
    pub(crate) fn count_adapters(&mut self, count: bool) {
        let all = self.adapters.attached.iter().filter(|_| count);
        self.adapters.counted = all.map(|attached| self.counted(attached)).collect();
    }

    fn counted(&self, attached: &Attached) -> Arc<Counted> {
        self.kv.pool().count(
            Arc::as_ptr(&attached.adapter).addr(),
            attached.adapter.bytes(),
        )
    }

    /// Lets go of what the weights so far computed, before they change: to the prefix cache, which
    /// has it where they come back. What is computed before a change behind the layers stays.
    fn release_for(&mut self, is_behind_layers: bool) {
        if !is_behind_layers {
            self.unload();
            if let Some(states) = &mut self.states {
                states.truncate(0);
            }
            self.inputs.truncate(0);
        }
        if let Some(hook) = &mut self.hook {
            hook.cut(Cut::Rewound);
        }
    }

    fn adapters_changed(&mut self) {
        self.adapters.generation = if self.adapters.attached.is_empty() {
            0
        } else {
            next_number()
        };
    }
}
