//! What the server did, for Prometheus, under llama-server's names and, for routers, vLLM's.

use crate::io::unix_time;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use ruvllm::Engine;
use ruvllm::Finish;
use ruvllm::scheduler::ScheduleError;
use ruvllm::scheduler::{Observer, RequestId};
use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

type Seconds = Counter<f64, AtomicU64>;

/// Figures of all models of a server; clones are of the same.
#[derive(Clone)]
pub(crate) struct Metrics {
    /// Requests of one model that run.
    ids: Arc<Mutex<HashSet<RequestId>>>,
    prompt_tokens: Counter,
    prompt_seconds: Seconds,
    predicted_tokens: Counter,
    predicted_seconds: Seconds,
    drafted: Counter,
    accepted: Counter,
    requests: Counter,
    failed: Counter,
    preempted: Counter,
    /// Tokens of notes that prompts were told of their users' memory.
    pub(crate) memory_tokens: Counter,
    /// Lines that are not in the audit log.
    pub(crate) audit_lines_dropped: Counter,
    running: Gauge,
    waiting: Gauge,
    first_token: Histogram,
    between_tokens: Histogram,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            ids: Arc::default(),
            prompt_tokens: Counter::default(),
            prompt_seconds: Counter::default(),
            predicted_tokens: Counter::default(),
            predicted_seconds: Counter::default(),
            drafted: Counter::default(),
            accepted: Counter::default(),
            requests: Counter::default(),
            failed: Counter::default(),
            preempted: Counter::default(),
            memory_tokens: Counter::default(),
            audit_lines_dropped: Counter::default(),
            running: Gauge::default(),
            waiting: Gauge::default(),
            // From a millisecond to a minute and a half.
            first_token: Histogram::new(exponential_buckets(0.001, 2.0, 17)),
            between_tokens: Histogram::new(exponential_buckets(0.000_5, 2.0, 14)),
        }
    }
}

/// What `/metrics` tells of a model.
pub(crate) struct OfModel {
    pub(crate) name: String,
    /// If it is loaded.
    pub(crate) engine: Option<Engine>,
    /// `loaded`, `loading` or `unloaded`.
    pub(crate) state: &'static str,
    /// Names by which requests ask for it with an adapter.
    pub(crate) adapted: Vec<String>,
    /// What is learnt for each key.
    pub(crate) learning: Vec<Learning>,
    /// Images that were encoded.
    pub(crate) n_images: u64,
}

/// What is learnt for a key.
pub(crate) struct Learning {
    /// Which key, by its place.
    pub(crate) tenant: usize,
    /// Version that is in effect.
    pub(crate) version: u64,
    /// Samples that wait to be learnt from.
    pub(crate) n_pending: u64,
    /// Samples that were left out, since too many waited.
    pub(crate) n_dropped: u64,
    /// Whether learning failed the last time.
    pub(crate) is_failing: bool,
    /// What that version changed of the loss of text that was kept from it, in nats per token.
    pub(crate) loss_change: f64,
}

/// What is remembered for a key.
pub(crate) struct Remembered {
    /// Which key, by its place.
    pub(crate) tenant: usize,
    /// Entries, those that are new or changed, and their bytes.
    pub(crate) n_entries: usize,
    pub(crate) n_new: usize,
    pub(crate) bytes: u64,
    /// The adapter in effect, if there is one: its number, the questions that were kept from it, and
    /// those of them that it answers.
    pub(crate) adapter: Option<(u64, usize, usize)>,
}

impl Metrics {
    /// The same figures for another model, whose scheduler counts requests from 0, too.
    pub(crate) fn of_model(&self) -> Metrics {
        Metrics {
            ids: Arc::default(),
            ..self.clone()
        }
    }

    /// All of them, as text, for models of which `n_loads` were loaded so far.
    pub(crate) fn text(
        &self,
        models: &[OfModel],
        n_loads: u64,
        memories: &[Remembered],
    ) -> Result<String, std::fmt::Error> {
        let mut registry = Registry::default();
        let engines = || models.iter().filter_map(|model| model.engine.as_ref());
        let adapters: Vec<_> = models
            .iter()
            .flat_map(|model| &model.adapted)
            .map(String::as_str)
            .collect();
        let (mut used, mut budget) = (0u64, 0u64);
        for stats in engines().map(|engine| engine.pool().stats()) {
            (used, budget) = (
                used.saturating_add(stats.used),
                budget.saturating_add(stats.budget),
            );
        }
        let kv_usage = Gauge::<f64, AtomicU64>::default();
        kv_usage.set(if budget == u64::MAX || budget == 0 {
            0.0
        } else {
            used as f64 / budget as f64
        });
        let mean = |n: &Counter, seconds: &Seconds| {
            let gauge = Gauge::<f64, AtomicU64>::default();
            gauge.set(if seconds.get() > 0.0 {
                n.get() as f64 / seconds.get()
            } else {
                0.0
            });
            gauge
        };
        let (kv_bytes, prefix_bytes) = (Gauge::<i64>::default(), Gauge::<i64>::default());
        kv_bytes.set(used as i64);
        prefix_bytes.set(
            engines()
                .map(|engine| engine.pool().prefixes().bytes)
                .sum::<u64>() as i64,
        );
        // All adapters are ready at any time: a router may send any of them here.
        let lora_info = Family::<Vec<(&str, String)>, Gauge<i64>>::default();
        let labels = [
            ("max_lora", adapters.len().to_string()),
            ("running_lora_adapters", adapters.join(",")),
            ("waiting_lora_adapters", String::new()),
        ];
        lora_info
            .get_or_create(&labels.into())
            .set(unix_time() as i64);
        macro_rules! register {
            ($($name:literal, $help:literal, $metric:expr;)+) => {
                $(registry.register($name, $help, $metric.clone());)+
            };
        }
        register! {
            "llamacpp:prompt_tokens", "Tokens of prompts that were computed", self.prompt_tokens;
            "llamacpp:prompt_seconds", "Time that prompts took", self.prompt_seconds;
            "llamacpp:tokens_predicted", "Tokens generated", self.predicted_tokens;
            "llamacpp:tokens_predicted_seconds", "Time that generated tokens took", self.predicted_seconds;
            "llamacpp:prompt_tokens_seconds", "Tokens of prompts per second", mean(&self.prompt_tokens, &self.prompt_seconds);
            "llamacpp:predicted_tokens_seconds", "Generated tokens per second of a request",
                mean(&self.predicted_tokens, &self.predicted_seconds);
            "llamacpp:requests_processing", "Requests that run", self.running;
            "llamacpp:requests_deferred", "Requests that wait", self.waiting;
            "llamacpp:kv_cache_usage_ratio", "Share of the pool of keys and values in use", kv_usage;
            "vllm:num_requests_running", "Requests that run", self.running;
            "vllm:num_requests_waiting", "Requests that wait", self.waiting;
            "vllm:kv_cache_usage_perc", "Share of the pool of keys and values in use", kv_usage;
            "vllm:prompt_tokens", "Tokens of prompts that were computed", self.prompt_tokens;
            "vllm:generation_tokens", "Tokens generated", self.predicted_tokens;
            "vllm:lora_requests_info", "Adapters that requests may name, and when this was told", lora_info;
            "vllm:num_preemptions", "Times that a request lost its pages", self.preempted;
            "vllm:spec_decode_num_draft_tokens", "Tokens drafted", self.drafted;
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were chosen, too", self.accepted;
            "vllm:request_success", "Requests that ended without an error", self.requests;
            "vllm:time_to_first_token_seconds", "Time to the first token", self.first_token;
            "vllm:time_per_output_token_seconds", "Time per generated token of a request", self.between_tokens;
            "ruvllm:kv_cache_bytes", "Bytes of keys and values of requests and of the prefix cache", kv_bytes;
            "ruvllm:prefix_cache_bytes", "Bytes of keys and values that the prefix cache holds", prefix_bytes;
            "ruvllm:witness_lines_dropped", "Lines that are not in the audit log", self.audit_lines_dropped;
            "ruvllm:memory_tokens", "Tokens of notes that prompts were told of a memory", self.memory_tokens;
            "ruvllm:requests_failed", "Requests that ended with an error", self.failed;
        }
        prefixes(&mut registry, engines());
        of_models(&mut registry, models, n_loads);
        of_memories(&mut registry, memories);
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }

    /// Requests that run, in the order they came.
    pub(crate) fn running(&self) -> Vec<Option<u64>> {
        let ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ids: Vec<_> = ids.iter().map(|id| Some(id.0)).collect();
        ids.sort_unstable();
        ids
    }

    /// Whether it is running from now on; whether it was before.
    fn set_running(&self, id: RequestId, running: bool) -> bool {
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        let before = ids.len() as i64;
        let was_running = if running {
            !ids.insert(id)
        } else {
            ids.remove(&id)
        };
        self.running.inc_by(ids.len() as i64 - before);
        was_running
    }
}

/// What became of prompts in the prefix caches of models that are loaded.
fn prefixes<'a>(registry: &mut Registry, engines: impl Iterator<Item = &'a Engine>) {
    let mut sums = [0u64; 6];
    for engine in engines {
        let of = engine.pool().prefixes();
        let figures = [
            of.lookups,
            of.hits,
            of.partial_hits,
            of.misses(),
            of.evictions,
            of.tokens_reused,
        ];
        for (sum, n) in sums.iter_mut().zip(figures) {
            *sum += n;
        }
    }
    let names = [
        ("lookups", "Prompts that were looked up in the prefix cache"),
        ("hits", "Prompts of which a beginning was found"),
        (
            "partial_hits",
            "Of them, those of which something was left to compute besides the last token",
        ),
        ("misses", "Prompts of which nothing was found"),
        ("evictions", "Ends of prefixes that made room for others"),
        ("tokens_saved", "Tokens of prompts that were not computed"),
    ];
    for ((name, help), sum) in names.into_iter().zip(sums) {
        let counter = Counter::<u64>::default();
        counter.inc_by(sum);
        registry.register(format!("ruvllm:prefix_cache_{name}"), help, counter);
    }
}

/// What is remembered.
fn of_memories(registry: &mut Registry, memories: &[Remembered]) {
    let mut gauge = |name: &str, help: &str, figure: fn(&Remembered) -> u64| {
        let family = Family::<Vec<(&'static str, String)>, Gauge<i64>>::default();
        for of in memories {
            let labels = vec![("tenant", of.tenant.to_string())];
            family.get_or_create(&labels).set(figure(of) as i64);
        }
        registry.register(format!("ruvllm:memory_{name}"), help, family);
    };
    if memories.is_empty() {
        return;
    }
    gauge("entries", "Entries that are remembered", |of| {
        of.n_entries as u64
    });
    gauge(
        "new_entries",
        "Entries that the latest consolidation did not know",
        |of| of.n_new as u64,
    );
    gauge("bytes", "Bytes of entries", |of| of.bytes);
    gauge(
        "adapter_version",
        "Adapter of what is remembered that is in effect, 0 if none is",
        |of| of.adapter.map_or(0, |adapter| adapter.0),
    );
    gauge(
        "questions_asked",
        "Questions that were kept from that adapter",
        |of| of.adapter.map_or(0, |adapter| adapter.1 as u64),
    );
    gauge(
        "questions_answered",
        "Those of them that it answers",
        |of| of.adapter.map_or(0, |adapter| adapter.2 as u64),
    );
}

/// Which models are loaded, and what is learnt.
fn of_models(registry: &mut Registry, models: &[OfModel], n_loads: u64) {
    type Labels = Vec<(&'static str, String)>;
    let states = Family::<Labels, Gauge<i64>>::default();
    let (versions, pending, failing) = (
        Family::<Labels, Gauge<i64>>::default(),
        Family::<Labels, Gauge<i64>>::default(),
        Family::<Labels, Gauge<i64>>::default(),
    );
    let dropped = Family::<Labels, Counter>::default();
    let losses = Family::<Labels, Gauge<f64, AtomicU64>>::default();
    for model in models {
        for state in ["loaded", "loading", "unloaded"] {
            let labels = vec![("model", model.name.clone()), ("state", state.to_owned())];
            states
                .get_or_create(&labels)
                .set(i64::from(state == model.state));
        }
        for of in &model.learning {
            let labels = vec![
                ("model", model.name.clone()),
                ("tenant", of.tenant.to_string()),
            ];
            versions.get_or_create(&labels).set(of.version as i64);
            pending.get_or_create(&labels).set(of.n_pending as i64);
            failing.get_or_create(&labels).set(i64::from(of.is_failing));
            dropped.get_or_create(&labels).inc_by(of.n_dropped);
            losses.get_or_create(&labels).set(of.loss_change);
        }
    }
    let loads = Counter::<u64>::default();
    loads.inc_by(n_loads);
    registry.register(
        "ruvllm:model_state",
        "1 for the state of each model",
        states,
    );
    registry.register("ruvllm:model_loads", "Times that a model was loaded", loads);
    let images = Counter::<u64>::default();
    images.inc_by(models.iter().map(|model| model.n_images).sum());
    registry.register(
        "ruvllm:images_encoded",
        "Images that were encoded, not found among those that were before",
        images,
    );
    if models.iter().any(|model| !model.learning.is_empty()) {
        registry.register(
            "ruvllm:sona_version",
            "Version of what is learnt that is in effect",
            versions,
        );
        registry.register(
            "ruvllm:sona_pending_samples",
            "Samples that wait to be learnt from",
            pending,
        );
        registry.register(
            "ruvllm:sona_failing",
            "1 if learning failed the last time",
            failing,
        );
        registry.register(
            "ruvllm:sona_loss_change",
            "What the version in effect changed of the loss of text that was kept from it, in nats per token",
            losses,
        );
        registry.register(
            "ruvllm:sona_dropped_samples",
            "Samples that were left out, since too many waited",
            dropped,
        );
    }
}

impl Observer for Metrics {
    fn queued(&self, _id: RequestId, _n_prompt: usize) {
        self.waiting.inc();
    }

    fn admitted(&self, id: RequestId) {
        self.waiting.dec();
        self.set_running(id, true);
    }

    fn preempted(&self, id: RequestId) {
        self.preempted.inc();
        self.waiting.inc();
        self.set_running(id, false);
    }

    fn ended(&self, id: RequestId, outcome: Result<&Finish, &ScheduleError>) {
        if !self.set_running(id, false) {
            self.waiting.dec();
        }
        match outcome {
            Err(_) => drop(self.failed.inc()),
            Ok(finish) => {
                let timings = &finish.timings;
                self.requests.inc();
                self.prompt_tokens.inc_by(finish.n_prompt as u64);
                self.prompt_seconds.inc_by(timings.prefill.as_secs_f64());
                self.predicted_tokens.inc_by(finish.n_generated as u64);
                self.drafted.inc_by(finish.drafts.n_drafted as u64);
                self.accepted.inc_by(finish.drafts.n_accepted as u64);
                self.predicted_seconds.inc_by(timings.decode.as_secs_f64());
                if finish.n_generated > 0 {
                    self.first_token.observe(timings.first_token.as_secs_f64());
                }
                if finish.n_generated > 1 {
                    self.between_tokens
                        .observe(timings.decode.as_secs_f64() / (finish.n_generated - 1) as f64);
                }
            }
        }
    }
}
