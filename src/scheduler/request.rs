//! Requests, and who observes them.

use crate::decode::output::Finish;
use crate::decode::speculative::Speculation;
use crate::engine::options::CacheMode;
use crate::kv::KvType;
use crate::layers::spans::Spans;
use crate::lora::Adapter;
use crate::sample::Sampler;
use crate::scheduler::ScheduleError;
#[cfg(feature = "vision")]
use crate::session::EncodedPrompt;
use std::sync::Arc;
use std::time::Duration;

/// Identifies a request, in the order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A prompt to be continued, with options.
#[derive(Clone, Debug)]
pub struct Request {
    pub(super) tokens: Vec<u32>,
    /// Images among them.
    pub(super) spans: Spans,
    pub(super) sampler: Sampler,
    pub(super) max_tokens: usize,
    pub(super) stop: Vec<String>,
    pub(super) logprobs: Option<usize>,
    pub(super) prompt_logprobs: bool,
    pub(super) special: bool,
    pub(super) priority: i32,
    pub(super) deadline: Option<Duration>,
    pub(super) adapters: Vec<(Arc<Adapter>, f32)>,
    pub(super) salt: Option<String>,
    pub(super) cache: Option<CacheMode>,
    pub(super) min_cache_tokens: Option<usize>,
    pub(super) speculation: Option<Speculation>,
    pub(super) kv_type: Option<KvType>,
}

impl Request {
    /// Continues `tokens`, as [`Session::generate`](crate::Session::generate)
    /// does.
    pub fn new(tokens: Vec<u32>, sampler: Sampler) -> Request {
        Request {
            tokens,
            spans: Spans::default(),
            sampler,
            max_tokens: usize::MAX,
            stop: Vec::new(),
            logprobs: None,
            prompt_logprobs: false,
            special: false,
            priority: 0,
            deadline: None,
            adapters: Vec::new(),
            salt: None,
            cache: None,
            min_cache_tokens: None,
            speculation: None,
            kv_type: None,
        }
    }

    /// Continues a prompt with images, as
    /// [`Session::prefill_encoded`](crate::session::SessionImages::prefill_encoded) does; it is of
    /// [`Engine::encode_parts`](crate::Engine::encode_parts).
    #[cfg(feature = "vision")]
    pub fn of_prompt(prompt: EncodedPrompt, sampler: Sampler) -> Request {
        let (tokens, spans) = prompt.into_parts();
        Request {
            spans,
            ..Request::new(tokens, sampler)
        }
    }

    /// Sets the largest number of tokens.
    #[must_use]
    pub fn max_tokens(mut self, n: usize) -> Request {
        self.max_tokens = n;
        self
    }

    /// Sets stop strings, before which the text ends.
    #[must_use]
    pub fn stop<T: Into<String>>(mut self, stop: impl IntoIterator<Item = T>) -> Request {
        self.stop = stop.into_iter().map(Into::into).collect();
        self
    }

    /// Returns the log-probability of each token, and of the `n_top` most probable ones.
    #[must_use]
    pub fn logprobs(mut self, n_top: usize) -> Request {
        self.logprobs = Some(n_top);
        self
    }

    /// Returns the tokens of the prompt first, as pieces without text, with the
    /// [log-probabilities](Request::logprobs) that are requested; the first token, which nothing
    /// comes before, has none. All of the prompt is computed, and little of it at a time, as each
    /// of its tokens takes the time of a generated one in the head.
    #[must_use]
    pub fn prompt_logprobs(mut self) -> Request {
        self.prompt_logprobs = true;
        self
    }

    /// Returns special tokens as their texts, as needed by parsers of tool calls.
    #[must_use]
    pub fn special(mut self) -> Request {
        self.special = true;
        self
    }

    /// Sets the priority: a request goes before those of lower priority, and keeps its pages
    /// longer. Default 0. A request that has waited for 512 passes goes before newer ones of
    /// the next higher priority.
    #[must_use]
    pub fn priority(mut self, priority: i32) -> Request {
        self.priority = priority;
        self
    }

    /// Ends the request after this time, as
    /// [`StopReason::Deadline`](crate::StopReason::Deadline), with the text generated so
    /// far; never without a clock (wasm32).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Request {
        self.deadline = Some(deadline);
        self
    }

    /// Shares cached prefixes only with requests with this salt, one per tenant, instead of those
    /// with the schedule's [`PrefixOptions::salt`](crate::engine::PrefixOptions::salt).
    #[must_use]
    pub fn salt(mut self, salt: impl Into<String>) -> Request {
        self.salt = Some(salt.into());
        self
    }

    /// Says how it uses the prefix cache, instead of the schedule's
    /// [`PrefixOptions::cache`](crate::engine::PrefixOptions::cache): not at all, reading what is
    /// there, or leaving its own keys and values to others, too. Where the schedule does without
    /// the cache, every request does.
    ///
    /// ```
    /// # use ruvllm::engine::CacheMode;
    /// # use ruvllm::{Sampler, SamplerOptions};
    /// # use ruvllm::scheduler::Request;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let sampler = Sampler::new(SamplerOptions { temperature: 0.0, ..Default::default() })?;
    /// let private = Request::new(vec![1, 2, 3], sampler).cache(CacheMode::Off);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn cache(mut self, mode: CacheMode) -> Request {
        self.cache = Some(mode);
        self
    }

    /// Sets how many tokens a cached prefix has to have to be reused, and this request to be
    /// stored, instead of the schedule's
    /// [`PrefixOptions::min_cache_tokens`](crate::engine::PrefixOptions::min_cache_tokens).
    #[must_use]
    pub fn min_cache_tokens(mut self, n: usize) -> Request {
        self.min_cache_tokens = Some(n);
        self
    }

    /// Computes several of its tokens per pass where that is faster for all that run; the text
    /// stays the same. See [`Speculation`].
    #[must_use]
    pub fn speculate(mut self, speculation: Speculation) -> Request {
        self.speculation = Some(speculation);
        self
    }

    /// Keeps its keys and values in this precision instead of the schedule's, as where many long
    /// texts have to fit into little memory. Its text has the bits of a session of this
    /// [`kv_type`](crate::SessionOptions::kv_type).
    #[must_use]
    pub fn kv_type(mut self, kind: KvType) -> Request {
        self.kv_type = Some(kind);
        self
    }

    /// Computes it with an adapter; repeatable. See
    /// [`SessionAdapters::attach`](crate::session::SessionAdapters::attach).
    #[must_use]
    pub fn adapter(mut self, adapter: Arc<Adapter>, scale: f32) -> Request {
        self.adapters.push((adapter, scale));
        self
    }
}

/// Is notified of the events of every request, in this order, by the computing thread. A call
/// delays all requests.
pub trait Observer: Send + Sync {
    /// A step begins: at most one pass, and what is before and behind it.
    fn step_begins(&self) {}
    /// The step is over. After a panic it never is.
    fn step_ends(&self) {}
    /// The request was accepted; its prompt has `n_prompt` tokens.
    fn queued(&self, _id: RequestId, _n_prompt: usize) {}
    /// The request takes part in passes from now on; also after each preemption.
    fn admitted(&self, _id: RequestId) {}
    /// Its first token was chosen.
    fn first_token(&self, _id: RequestId) {}
    /// Its pages were given to others; it waits to be admitted again.
    fn preempted(&self, _id: RequestId) {}
    /// The request ended: with an answer, which may be cut short, or with an error.
    fn ended(&self, _id: RequestId, _outcome: Result<&Finish, &ScheduleError>) {}
}

/// An observer that ignores everything.
pub(crate) struct NoObserver;

impl Observer for NoObserver {}
