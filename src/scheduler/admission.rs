//! Which requests are taken.

use crate::clock::Timer;
use crate::decode::answer::Answer;
use crate::decode::output::{TextWriter, Timings};
use crate::decode::speculative::ngram::RecentTexts;
use crate::decode::speculative::{Speculation, Speculator};
use crate::engine::engine::Engine;
use crate::engine::memory_plan::{PlanOptions, plan_options};
use crate::engine::options::{CacheMode, CachedTokens, SessionOptions};
use crate::engine::sequence::Sequence;
use crate::engine::{SessionError, context_shift};
use crate::kv::Reserved;
use crate::lora::Adapter;
use crate::scheduler::ScheduleError;
use crate::scheduler::live::{Dropped, Live, Permit, RequestRows};
use crate::scheduler::request::{Observer, Request, RequestId};
use crate::scheduler::stream::{self, Stream, Wake};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Sets of adapters that are remembered, and so kept in memory.
pub(super) const MAX_ADAPTED: usize = 16;

/// Tenants whose last texts are remembered.
pub(super) const MAX_TENANTS: usize = 32;

/// Options of a schedule. `..Default::default()` sets the remaining fields.
#[derive(Clone, Debug)]
pub struct ScheduleOptions {
    /// Options of each sequence. Its `n_batch` is the largest number of prompt rows in a pass.
    pub session: SessionOptions,
    /// Largest number of sequences computed concurrently. Default 16.
    pub n_parallel: usize,
    /// Largest number of requests that wait or run. Default 4096.
    pub max_requests: usize,
    /// Number of pieces waiting for a request's reader at which the request pauses. Default 64.
    pub n_pieces: usize,
    /// Limit on the time between two tokens of a sequence while prompts of others are computed.
    /// Default: twice the time without prompts.
    pub max_itl: Option<Duration>,
}

impl Default for ScheduleOptions {
    fn default() -> Self {
        let session = SessionOptions::default();
        ScheduleOptions {
            session,
            n_parallel: 16,
            max_requests: 4096,
            n_pieces: 64,
            max_itl: None,
        }
    }
}

/// Everything that admission depends on; does not change.
pub(crate) struct AdmissionConfig {
    pub(crate) engine: Engine,
    pub(crate) options: ScheduleOptions,
    /// An empty sequence, of which those of requests are forks.
    pub(crate) empty: Sequence,
    /// The same with adapters attached, the most recently used last. Forks of one share its
    /// generation of adapters, so that requests with the same adapters find each other's
    /// prefixes.
    pub(crate) adapted: Mutex<Vec<Sequence>>,
    /// Where the prefix cache is on: what drafters remember of each tenant, by salt, the most
    /// recently used last.
    pub(crate) recent: Mutex<Vec<(String, RecentTexts)>>,
    pub(crate) observer: Box<dyn Observer>,
    pub(crate) clock: Timer,
    pub(crate) n_requests: Arc<AtomicUsize>,
    pub(crate) next_id: AtomicU64,
    pub(crate) _reserved: Option<Reserved>,
}

/// If memory is limited, takes from the pages the buffers that passes need besides those of one
/// session: of more sequences, and of a prompt in pieces.
pub(super) fn reserve(
    engine: &Engine,
    options: &ScheduleOptions,
) -> Result<Option<Reserved>, SessionError> {
    let model = engine.model();
    if model.memory_limit().is_none() {
        return Ok(None);
    }
    let one = plan_options(options.session.clone(), engine.n_threads());
    // A device computes whole passes.
    let n_layered = if engine.runner().is_some() {
        0
    } else {
        options.session.n_batch
    };
    let pieces = PlanOptions {
        n_layered,
        ..one.clone()
    };
    model.check_memory(&pieces)?;
    let all = model.memory_plan(&PlanOptions {
        n_sequences: options.n_parallel,
        ..pieces
    })?;
    Ok(Some(
        engine
            .pool()
            .reserve(all.buffers - model.memory_plan(&one)?.buffers),
    ))
}

impl AdmissionConfig {
    pub(crate) fn new(
        engine: &Engine,
        options: &ScheduleOptions,
        observer: Box<dyn Observer>,
    ) -> Result<AdmissionConfig, SessionError> {
        let session = &options.session;
        let sizes = [
            ("n_batch", session.n_batch),
            ("n_parallel", options.n_parallel),
            ("max_requests", options.max_requests),
            ("n_pieces", options.n_pieces),
        ];
        if let Some((option, value)) = sizes.into_iter().find(|(_, value)| *value == 0) {
            return Err(SessionError::Option {
                option,
                value,
                expected: "at least 1".into(),
            });
        }
        Ok(AdmissionConfig {
            engine: engine.clone(),
            options: options.clone(),
            empty: engine.sequence(session)?,
            adapted: Mutex::default(),
            recent: Mutex::default(),
            observer,
            clock: Timer::start(),
            n_requests: Arc::default(),
            next_id: AtomicU64::new(0),
            _reserved: reserve(engine, options)?,
        })
    }

    pub(crate) fn n_requests(&self) -> usize {
        self.n_requests.load(Ordering::Relaxed)
    }

    pub(super) fn place(&self) -> Result<Permit, ScheduleError> {
        let max = self.options.max_requests;
        let before = self.n_requests.fetch_add(1, Ordering::Relaxed);
        let place = Permit(Arc::clone(&self.n_requests));
        if before < max {
            Ok(place)
        } else {
            Err(ScheduleError::QueueFull { max })
        }
    }

    /// Refuses what could never be computed.
    pub(crate) fn judge(
        &self,
        request: Request,
        wake: &Arc<Wake>,
    ) -> Result<(Box<Live>, Stream), ScheduleError> {
        let place = self.place()?;
        let mut writer = TextWriter::new(self.engine.model(), request.special);
        if !writer.has_text() {
            return Err(SessionError::NoTokenizer.into());
        }
        self.engine.check(&self.empty, &request.tokens)?;
        if let Some(width) = request.spans.width() {
            self.engine.cpu_only("images")?;
            if width != self.engine.model().hparams().n_embd {
                return Err(SessionError::OtherModel.into());
            }
        }
        let layout = match request.kv_type {
            Some(kind) => {
                let own = SessionOptions {
                    kv_type: kind,
                    kv_type_v: None,
                    kv_tiers: None,
                    ..self.options.session.clone()
                };
                context_shift::check(self.engine.model(), self.empty.n_ctx(), &own)?;
                self.engine.layout(kind.into())?
            }
            None => Arc::clone(self.empty.kv.layout()),
        };
        writer.set_stop(request.stop);
        (writer.max_tokens, writer.logprobs) = (request.max_tokens, request.logprobs);
        let n_prompt = request.tokens.len();
        let prefix = &self.options.session.prefix;
        let cache = match prefix.cache {
            CacheMode::Off => CacheMode::Off,
            usual => request.cache.unwrap_or(usual),
        };
        let lasts_until = |time| self.clock.elapsed().saturating_add(time);
        let mut answer = Answer::new(writer);
        answer.text.tokens = request.tokens;
        answer.speculator = request
            .speculation
            .map(|speculation| self.speculator(speculation, request.salt.as_deref(), cache));
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let (sender, stream) = stream::stream(id, self.options.n_pieces, wake);
        let live = Live {
            id,
            rank: (0, id.0),
            priority: request.priority,
            deadline: request.deadline.map(lasts_until),
            sampler: request.sampler,
            answer,
            spans: request.spans,
            adapters: request.adapters,
            salt: request.salt,
            cache,
            min_cache_tokens: request.min_cache_tokens.unwrap_or(prefix.min_cache_tokens),
            sender,
            n_prompt,
            n_unseen: usize::from(request.prompt_logprobs) * n_prompt,
            kinds: Vec::new(),
            dropped: Dropped::default(),
            layout,
            n_cached: CachedTokens::default(),
            n_read: n_prompt,
            read_to: None,
            has_begun: false,
            seq: None,
            pooling: None,
            rows: RequestRows::default(),
            is_reading: false,
            since: Timer::start(),
            timings: Timings::default(),
            _place: place,
        };
        self.sequence(&live)?;
        let of_adapters = live
            .adapters
            .iter()
            .map(|(adapter, _)| adapter.bytes())
            .sum();
        let need = live
            .layout
            .bytes_read(live.n_prompt)
            .saturating_add(of_adapters);
        let stats = self.engine.pool().stats();
        let budget = stats.budget.saturating_sub(stats.reserved);
        if need > budget {
            return Err(ScheduleError::PoolTooSmall { need, budget });
        }
        Ok((Box::new(live), stream))
    }

    /// An empty sequence for a request.
    pub(super) fn sequence(&self, live: &Live) -> Result<Sequence, ScheduleError> {
        let mut seq = if live.adapters.is_empty() {
            self.empty.fork()?
        } else {
            self.adapted(&live.adapters)?
        };
        if seq.kv_policy() != live.layout.policy() {
            seq.kv.restart(Arc::clone(&live.layout));
        }
        if let Some(salt) = &live.salt {
            seq.prefix.salt.clone_from(salt);
        }
        (seq.prefix.cache, seq.prefix.min_cache_tokens) = (live.cache, live.min_cache_tokens);
        seq.spans = live.spans.clone();
        Ok(seq)
    }

    pub(super) fn speculator(
        &self,
        speculation: Speculation,
        salt: Option<&str>,
        cache: CacheMode,
    ) -> Speculator {
        let prefix = &self.options.session.prefix;
        let speculator = Speculator::new(speculation);
        // Drafters remember what the cache would: a private text is in neither.
        if cache != CacheMode::On {
            return speculator;
        }
        let salt = salt.unwrap_or(&prefix.salt);
        let mut tenants = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let known = tenants.iter().position(|(of, _)| of == salt);
        let tenant = known.map_or_else(
            || (salt.to_owned(), RecentTexts::default()),
            |i| tenants.remove(i),
        );
        let speculator = speculator.remember(&tenant.1);
        if tenants.len() == MAX_TENANTS {
            tenants.remove(0);
        }
        tenants.push(tenant);
        speculator
    }

    /// An empty sequence with these adapters.
    pub(super) fn adapted(
        &self,
        adapters: &[(Arc<Adapter>, f32)],
    ) -> Result<Sequence, ScheduleError> {
        let wanted = || {
            adapters
                .iter()
                .map(|(adapter, scale)| (Arc::as_ptr(adapter), scale.to_bits()))
        };
        let attached = |seq: &Sequence| {
            seq.adapters()
                .map(|(_, a, scale)| (Arc::as_ptr(a), scale.to_bits()))
                .eq(wanted())
        };
        let mut known = self.adapted.lock().unwrap_or_else(PoisonError::into_inner);
        // What nobody else holds, nobody can ask for again.
        known.retain(|seq| {
            seq.adapters()
                .all(|(_, adapter, _)| Arc::strong_count(adapter) > 1)
        });
        let mut seq = match known.iter().position(attached) {
            Some(i) => known.remove(i),
            None => {
                let mut seq = self.empty.fork()?;
                for (adapter, scale) in adapters {
                    seq.attach(Arc::clone(adapter), *scale)?;
                }
                seq
            }
        };
        let mut fork = seq.fork()?;
        fork.count_adapters(true);
        seq.count_adapters(false);
        if known.len() == MAX_ADAPTED {
            known.remove(0);
        }
        known.push(seq);
        Ok(fork)
    }
}
