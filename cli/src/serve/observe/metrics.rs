//! What the server did, for Prometheus, under llama-server's names and, for routers, vLLM's.

use crate::io::unix_time;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use ruvllm::ScheduleError;
use ruvllm::decode::Finish;
use ruvllm::engine::Engine;
use ruvllm::scheduler::{Observer, RequestId};
use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

type Seconds = Counter<f64, AtomicU64>;

/// All figures; clones are of the same.
#[derive(Clone)]
pub(crate) struct Metrics {
    engine: Engine,
    /// Requests that run.
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
    /// Lines that are not in the audit log.
    pub(crate) audit_lines_dropped: Counter,
    running: Gauge,
    waiting: Gauge,
    first_token: Histogram,
    between_tokens: Histogram,
}

impl Metrics {
    pub(crate) fn new(engine: &Engine) -> Metrics {
        Metrics {
            engine: engine.clone(),
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
            audit_lines_dropped: Counter::default(),
            running: Gauge::default(),
            waiting: Gauge::default(),
            // From a millisecond to a minute and a half.
            first_token: Histogram::new(exponential_buckets(0.001, 2.0, 17)),
            between_tokens: Histogram::new(exponential_buckets(0.000_5, 2.0, 14)),
        }
    }

    /// All of them, as text. `adapters` are the models that requests may name besides the first.
    pub(crate) fn text(&self, adapters: &[String]) -> Result<String, std::fmt::Error> {
        let mut registry = Registry::default();
        let pool = self.engine.pool().stats();
        let kv_usage = Gauge::<f64, AtomicU64>::default();
        kv_usage.set(if pool.budget == u64::MAX {
            0.0
        } else {
            pool.used as f64 / pool.budget as f64
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
        kv_bytes.set(pool.used as i64);
        prefix_bytes.set(self.engine.pool().prefixes().bytes as i64);
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
            "ruvllm:requests_failed", "Requests that ended with an error", self.failed;
        }
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
        let was_running = if running {
            !ids.insert(id)
        } else {
            ids.remove(&id)
        };
        self.running.set(ids.len() as i64);
        was_running
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
