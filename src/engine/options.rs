//! Options of sequences and sessions, and what cancels a call.

use crate::arch::KV_SPAN;
use crate::engine::SessionError;
use crate::kv::{KvLayout, KvPolicy, KvTiers, KvType, KvUse, LayerShape};
use crate::layers::attention::spec::AttnSpec;
use crate::layers::compressed::spec::CompressedSpec;
use crate::layers::hparams::Hparams;
use crate::layers::indexer::spec::{IndexKind, IndexSpec};
use crate::layers::layer::spec::LayerSpec;
use crate::layers::{compressed, ngram, recurrent, switch};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Positions are numbers of 31 bits.
pub(crate) const MAX_CTX: usize = u32::MAX as usize / 2;

/// Default context length of a session (or the model's own, if that is shorter).
pub const DEFAULT_CTX: usize = 4096;

/// Options of a session. `..Default::default()` sets the remaining fields.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Tokens the session can hold. Default: as many as the model was trained for, at most
    /// [`DEFAULT_CTX`].
    pub n_ctx: Option<usize>,
    /// Most tokens computed at a time in [`Session::prefill`](crate::Session::prefill).
    /// Default 512.
    pub n_batch: usize,
    /// Precision of keys, and of values unless `kv_type_v` is set. Default [`KvType::F16`].
    pub kv_type: KvType,
    /// Precision of values, if it differs.
    pub kv_type_v: Option<KvType>,
    /// Lower precision for older tokens; both precisions must be [`KvType::F16`] then.
    pub kv_tiers: Option<KvTiers>,
    /// Whether prompt tokens are computed like generated ones, with more exact activations and the
    /// same bits, which takes about twice the time. Default: no.
    pub exact: bool,
    /// How it uses the engine's prefix cache. Default: not at all.
    pub prefix: PrefixOptions,
    /// What a [`Generation`](crate::Generation) or a request of a
    /// [`Scheduler`](crate::scheduler::Scheduler) does when the context is full: `None`, it ends
    /// with [`StopReason::ContextFull`](crate::StopReason::ContextFull); or it goes on as
    /// by [`SessionCache::shift`](crate::session::SessionCache::shift), and so many tokens at the
    /// beginning stay. Default `None`.
    pub context_shift: Option<usize>,
    /// The layer after which the hidden states of tokens are pooled, as vectors of prompts and
    /// answers: not the last one, which computes few rows. Costs one addition per value.
    /// Passes of a device pool nothing. Default `None`.
    pub pooled_layer: Option<usize>,
    /// Whether the hidden states of its last tokens are kept, up to 512 of a prompt's, for a
    /// [`Drafter`](crate::decode::Drafter) that reads them.
    /// [`Generation::speculate`](crate::Generation::speculate) and
    /// [`Request::speculate`](crate::scheduler::Request::speculate) see to that, but too late
    /// for a prompt that is computed before. Takes the last layer's work for these tokens.
    /// Default: no.
    pub keep_states: bool,
    /// What cancels the session's calls, where several share it. Default: a token of its own, which
    /// [`Session::cancel_token`](crate::Session::cancel_token) returns.
    pub cancel: Option<CancelToken>,
}

impl Default for SessionOptions {
    fn default() -> Self {
        let kv_type = KvType::default();
        SessionOptions {
            n_ctx: None,
            n_batch: 512,
            kv_type,
            kv_type_v: None,
            kv_tiers: None,
            exact: false,
            prefix: PrefixOptions::default(),
            context_shift: None,
            pooled_layer: None,
            keep_states: false,
            cancel: None,
        }
    }
}

impl SessionOptions {
    /// Precision of keys and values, on which their bits depend.
    pub fn kv_policy(&self) -> KvPolicy {
        KvPolicy {
            k: self.kv_type,
            v: self.kv_type_v.unwrap_or(self.kv_type),
            tiers: self.kv_tiers,
        }
    }

    /// Bytes of keys and values that a token at position `pos` reads.
    pub fn kv_bytes_read(&self, h: &Hparams, pos: usize) -> u64 {
        kv_layout(h, self.kv_policy()).bytes_read(pos)
    }
}

/// Cancels long calls from another thread: clone it, pass the clone on, and call
/// [`CancelToken::cancel`].
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Makes running and later calls fail with
    /// [`SessionError::Cancelled`](crate::SessionError::Cancelled).
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Allows calls again.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Whether it is set.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Bytes, roughly, of the buffers of a pass of `m` rows up to position `n_ctx`.
pub(crate) fn compute_bytes(h: &Hparams, m: usize, n_ctx: usize) -> u64 {
    let most = |sizes: &mut dyn Iterator<Item = usize>| sizes.max().unwrap_or(0);
    let attention = most(&mut h.attention().map(|a| {
        (2 * a.n_head + a.n_head_kv) * (a.head_dim + a.head_dim_v)
            + if a.gated { a.n_gate() + a.n_mixed() } else { 0 }
            + if a.sub_norm { a.n_mixed() } else { 0 }
            + if a.gate_in_q { 2 * a.n_q() } else { 0 }
    }));
    let compressed = |spec: &CompressedSpec| {
        let n_out = spec.n_head * spec.head_dim;
        let given = spec.blocks.map_or(0, |blocks| {
            let index = blocks.index.map_or(0, |x| (x.n_head + 5) * x.head_dim);
            5 * spec.head_dim + index
        });
        3 * n_out
            + 2 * spec.head_dim
            + 2 * spec.q_rank
            + 3 * spec.out_rank * spec.n_out_group
            + given
    };
    let of_layers = h.layers.iter().filter_map(LayerSpec::compressed);
    let attention = attention.max(most(&mut of_layers.map(compressed)));
    let attention = attention.max(most(
        &mut h
            .recurrent()
            .map(|spec| recurrent::bytes(spec, 1) / size_of::<f32>()),
    ));
    let n_ff = most(&mut h.layers.iter().map(|layer| layer.ffn.n_ff()));
    let moe = most(
        &mut h
            .mixtures()
            .map(|x| 2 * h.n_embd.max(x.latent.unwrap_or(0)) + x.n_expert),
    );
    let moe = moe + 2 * most(&mut h.mixtures().filter_map(|x| x.latent));
    // Inputs of products are kept in a second form, of at most 32 bits.
    let widest = most(&mut h.attention().map(|a| a.n_out()))
        .max(n_ff)
        .max(h.n_embd);
    let width = 3 * h.n_embd + attention.max(2 * n_ff) + widest + moe;
    // Positions that are chosen, and scores of which they are.
    let index = |a: &AttnSpec| {
        a.index.map_or(0, |x| {
            x.n_choice() * x.n_chosen().min(n_ctx) + x.n_head * x.head_dim
        })
    };
    let width = width + most(&mut h.attention().map(index));
    let scores = h.indexes().count().min(1) * 16 * n_ctx.next_power_of_two() * 4;
    let partial = most(&mut h.attention().map(|a| 4 * a.n_head * (a.head_dim_v + 2)));
    // The number of spans rounded up to a power of two, plus limits between precisions.
    let n_pieces = n_ctx.div_ceil(KV_SPAN).next_power_of_two() + 3;
    let partials = (n_pieces as u64).saturating_mul(partial as u64);
    (m as u64)
        .saturating_mul(width as u64 * 4)
        .saturating_add(partials)
        .saturating_add(scores as u64)
}

/// Context length of a session with these options.
pub(crate) fn n_ctx(h: &Hparams, options: &SessionOptions) -> usize {
    options.n_ctx.unwrap_or(h.n_ctx_train.min(DEFAULT_CTX))
}

/// Shapes of the keys and values that the layers of a model store.
pub(crate) fn kv_layout(h: &Hparams, policy: KvPolicy) -> KvLayout {
    let shape = |a: &AttnSpec| LayerShape {
        window: a.window,
        n_head_kv: a.n_head_kv,
        head_dim: a.head_dim,
        head_dim_v: a.head_dim_v,
        use_of: match (a.index, a.relative) {
            (None, None) => KvUse::Attention,
            _ => KvUse::Chosen,
        },
    };
    let index = |index: &IndexSpec| LayerShape {
        window: None,
        n_head_kv: 1,
        head_dim: index.head_dim,
        head_dim_v: match index.kind {
            IndexKind::Pooled => index.head_dim,
            _ => 0,
        },
        use_of: KvUse::Index,
    };
    let layers = h.attention().filter(|a| !a.shares_kv).map(shape);
    let compressed = h.layers.iter().filter_map(LayerSpec::compressed);
    let compressed = compressed.flat_map(compressed::cache::kv_layers);
    let layout = KvLayout::new(
        policy,
        layers.chain(h.indexes().map(index)).chain(compressed),
    );
    let choice = h.switch.iter().map(|_| switch::CELL);
    let of_layers = h.layers.iter().flat_map(|layer| {
        let ngrams = h.ngrams.as_ref().filter(|_| layer.ngrams);
        let ngrams = ngrams.map(|spec| ngram::cells(h, spec));
        let mixer = layer.recurrent().map(recurrent::cells);
        let cells = ngrams.into_iter().flatten();
        cells.chain(mixer.into_iter().flatten())
    });
    layout.with_recurrences(choice.chain(of_layers))
}

/// A layout where a GPU with memory of its own computes the layers from `first_layer` on, of those
/// that GPUs compute: only mixers have recurrences.
pub(crate) fn on_device(h: &Hparams, layout: KvLayout, first_layer: usize) -> KvLayout {
    let before = &h.layers[..first_layer.min(h.layers.len())];
    let mixers = before.iter().filter_map(LayerSpec::recurrent);
    let attention = before.iter().filter_map(LayerSpec::attention);
    layout.with_device(
        attention.filter(|spec| !spec.shares_kv).count(),
        mixers.map(|spec| recurrent::cells(spec).len()).sum(),
    )
}

/// Context length of a session with these options.
pub(crate) fn checked_n_ctx(h: &Hparams, options: &SessionOptions) -> Result<usize, SessionError> {
    let n_ctx = n_ctx(h, options);
    if n_ctx == 0 || n_ctx > MAX_CTX {
        return Err(SessionError::Option {
            option: "n_ctx",
            value: n_ctx,
            expected: "1 to 2^31 - 1".into(),
        });
    }
    if h.learned_positions && n_ctx > h.n_ctx_train {
        let expected = format!(
            "at most {}, as the model has so many positions",
            h.n_ctx_train
        );
        return Err(SessionError::Option {
            option: "n_ctx",
            value: n_ctx,
            expected,
        });
    }
    if options.n_batch == 0 {
        return Err(SessionError::Option {
            option: "n_batch",
            value: 0,
            expected: "at least 1".into(),
        });
    }
    Ok(n_ctx)
}

/// Use of the engine's prefix cache by a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// Neither reads nor stores.
    #[default]
    Off,
    /// Begins with stored prefixes, but stores nothing.
    ReadOnly,
    /// Begins with stored prefixes, and stores its own contents when it ends.
    On,
}

/// Which cached tokens a prompt matches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reuse {
    /// Tokens that came in prompts: logits have the bits of a run without cache.
    #[default]
    Prompt,
    /// Also generated tokens, whose arithmetic is more exact: logits have the bits of the run that
    /// generated them.
    Any,
}

/// Options of a sequence for the engine's prefix cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixOptions {
    /// Whether it is used. Default: no.
    pub cache: CacheMode,
    /// Sequences with fewer tokens are not stored, and shorter prefixes not reused. Default 0.
    pub min_cache_tokens: usize,
    /// Which cached tokens match. Default [`Reuse::Prompt`].
    pub reuse: Reuse,
    /// Sequences find only those stored with the same salt: with one per tenant, their prompts
    /// stay separate.
    pub salt: String,
}

impl From<CacheMode> for PrefixOptions {
    fn from(cache: CacheMode) -> PrefixOptions {
        PrefixOptions {
            cache,
            ..PrefixOptions::default()
        }
    }
}

/// Tokens of a prompt whose keys and values came from the prefix cache, by how they were computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedTokens {
    /// Computed as prompts.
    pub prompt: usize,
    /// Computed as generated tokens, see [`Reuse::Any`].
    pub generated: usize,
}

impl CachedTokens {
    /// Sum of both.
    pub fn total(&self) -> usize {
        self.prompt + self.generated
    }
}
