//! What the prefix cache saves: the time to the first token with and without it, and how much of
//! made-up traffic it finds again.

use ruvllm::Engine;
use ruvllm::Error;
use ruvllm::Session;
use ruvllm::SessionOptions;
use ruvllm::engine::{CacheMode, PrefixOptions, Reuse};
use std::time::Instant;

/// A kind of traffic. Requests come one after the other; each is a session of its own, as in a
/// server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// Four conversations that take turns, four turns each: a system prompt that all share, then
    /// messages and answers.
    Chat,
    /// Questions about two of eight documents: instructions, the documents in the order of their
    /// ranks, a question. The `i`-th document is asked for with a frequency of `1/i` (Zipf's
    /// law).
    Rag,
    /// A list of short inputs behind the same long instructions.
    Batch,
}

/// Tokens of a request, and of those how many are its answer.
struct Request {
    tokens: Vec<u32>,
    n_answer: usize,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Scenario; 3] = [Scenario::Chat, Scenario::Rag, Scenario::Batch];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Scenario::Chat => "chat",
            Scenario::Rag => "rag",
            Scenario::Batch => "batch",
        }
    }

    fn requests(self, n_vocab: usize) -> Vec<Request> {
        // Text number `i` of the traffic. Any tokens will do.
        let text = |i: usize, n: usize| {
            (0..n).map(move |at| ((at * 7919 + i * 104_729 + i) % n_vocab) as u32)
        };
        match self {
            Scenario::Chat => {
                let mut talks: Vec<Vec<u32>> = vec![text(0, 200).collect(); 4];
                let turns = (0..4).flat_map(|turn| (0..4).map(move |talk| (turn, talk)));
                turns
                    .map(|(turn, talk)| {
                        talks[talk].extend(text(1 + 4 * turn + talk, 40 + 24));
                        Request {
                            tokens: talks[talk].clone(),
                            n_answer: 24,
                        }
                    })
                    .collect()
            }
            Scenario::Rag => {
                let mut random = 1u32;
                let mut document = move || {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let total: f64 = (1..=8).map(|i| 1.0 / f64::from(i)).sum();
                    let mut left = f64::from(random) / 2f64.powi(32) * total;
                    (1..8)
                        .find(|&i| {
                            left -= 1.0 / i as f64;
                            left < 0.0
                        })
                        .unwrap_or(8)
                };
                (0..24)
                    .map(|i| {
                        let documents = [document(), document()];
                        let tokens =
                            text(0, 100).chain(documents.into_iter().flat_map(|d| text(d, 150)));
                        Request {
                            tokens: tokens.chain(text(100 + i, 30)).collect(),
                            n_answer: 0,
                        }
                    })
                    .collect()
            }
            Scenario::Batch => {
                let one = |i: usize| Request {
                    tokens: text(0, 500).chain(text(1 + i, 32)).collect(),
                    n_answer: 0,
                };
                (0..12).map(one).collect()
            }
        }
    }
}

/// Result of a [`Scenario`].
#[derive(Clone, Debug)]
pub struct ScenarioOutcome {
    /// The traffic.
    pub scenario: Scenario,
    /// Threads used.
    pub n_threads: usize,
    /// Number of requests.
    pub n_requests: usize,
    /// Tokens of all prompts.
    pub n_prompt: usize,
    /// Of these, tokens that were in the same place behind the same tokens in an earlier request,
    /// so that a cache without limits would have them.
    pub n_reusable: usize,
    /// Tokens that came from the cache.
    pub n_reused: usize,
    /// Pages of tokens that the cache did not have.
    pub n_pages: usize,
    /// Pages that the cache dropped to keep its budget.
    pub n_evicted: u64,
    /// Mean time from a request to its first token, in seconds, without the cache.
    pub without: f64,
    /// The same with the cache.
    pub with: f64,
}

impl ScenarioOutcome {
    /// Share of the tokens that a cache without limits would have that came from the cache.
    pub fn reused(&self) -> f64 {
        self.n_reused as f64 / self.n_reusable as f64
    }

    /// Share of the cached pages that were dropped.
    pub fn evicted(&self) -> f64 {
        self.n_evicted as f64 / self.n_pages as f64
    }
}

/// A session of `engine` that uses the prefix cache as `cache` says.
fn session(
    engine: &Engine,
    options: &SessionOptions,
    cache: CacheMode,
    n_ctx: usize,
) -> Result<Session, Error> {
    let prefix = PrefixOptions {
        reuse: Reuse::Any,
        ..cache.into()
    };
    let n_ctx = Some(options.n_ctx.unwrap_or(0).max(n_ctx));
    Ok(engine.session_with(&SessionOptions {
        n_ctx,
        prefix,
        ..options.clone()
    })?)
}

/// Sends the requests of `scenario` to `engine`, first without and then with its prefix cache,
/// which it empties.
///
/// # Errors
/// If a session cannot be made, or is too small.
pub fn scenario(
    engine: &Engine,
    scenario: Scenario,
    options: &SessionOptions,
) -> Result<ScenarioOutcome, Error> {
    let requests = scenario.requests(engine.model().hparams().n_vocab);
    let n_ctx = requests
        .iter()
        .map(|request| request.tokens.len())
        .max()
        .unwrap_or(0);
    let seconds = |cache: CacheMode| -> Result<(f64, usize), Error> {
        let (mut total, mut reused) = (0.0, 0);
        for Request { tokens, n_answer } in &requests {
            let (prompt, answer) = tokens.split_at(tokens.len() - n_answer);
            let start = Instant::now();
            let mut session = session(engine, options, cache, n_ctx)?;
            session.prefill(prompt)?;
            total += start.elapsed().as_secs_f64();
            reused += session.sequence().cached_tokens().total();
            if cache == CacheMode::On {
                answer.iter().try_for_each(|&token| session.decode(token))?;
            }
        }
        Ok((total / requests.len() as f64, reused))
    };
    let (without, _) = seconds(CacheMode::Off)?;
    engine.pool().clear_prefixes();
    let before = engine.pool().prefixes().evictions;
    let (with, n_reused) = seconds(CacheMode::On)?;
    let mut outcome = ScenarioOutcome {
        scenario,
        n_threads: engine.n_threads(),
        n_requests: requests.len(),
        n_prompt: 0,
        n_reusable: 0,
        n_reused,
        n_pages: 0,
        n_evicted: engine.pool().prefixes().evictions - before,
        without,
        with,
    };
    for (i, Request { tokens, n_answer }) in requests.iter().enumerate() {
        let same = |other: &Request| {
            tokens
                .iter()
                .zip(&other.tokens)
                .take_while(|(a, b)| a == b)
                .count()
        };
        let n_same = requests[..i].iter().map(same).max().unwrap_or(0);
        let n_prompt = tokens.len() - n_answer;
        outcome.n_prompt += n_prompt;
        // The last token is computed in any case, for its logits.
        outcome.n_reusable += n_same.min(n_prompt - 1);
        outcome.n_pages += (tokens.len() - n_same).div_ceil(ruvllm::arch::KV_BLOCK);
    }
    Ok(outcome)
}

/// Times to the first token after a prompt that begins with cached tokens, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct FirstToken {
    /// Cached tokens.
    pub n_prefix: usize,
    /// Tokens of the prompt behind these.
    pub n_suffix: usize,
    /// Threads used.
    pub n_threads: usize,
    /// Without the cache.
    pub without: f64,
    /// With it, at best.
    pub with: f64,
    /// Of the suffix alone, in a session that holds the prefix, at best: what no cache can save.
    pub suffix: f64,
}

/// Measures the time to the first token for each combination of `prefixes` and `suffixes`: once
/// without the prefix cache of `engine`, which is emptied, and `repetitions` times with it.
///
/// # Errors
/// If a session cannot be made, or is too small.
pub fn first_tokens(
    engine: &Engine,
    (prefixes, suffixes): (&[usize], &[usize]),
    options: &SessionOptions,
    repetitions: usize,
) -> Result<Vec<FirstToken>, Error> {
    let n_vocab = engine.model().hparams().n_vocab;
    let n_ctx = prefixes.iter().max().unwrap_or(&0) + suffixes.iter().max().unwrap_or(&0);
    let tokens: Vec<u32> = (0..n_ctx).map(|i| (i * 7919 % n_vocab) as u32).collect();
    let timed = |cache: CacheMode, tokens: &[u32]| -> Result<f64, Error> {
        let start = Instant::now();
        session(engine, options, cache, n_ctx)?.prefill(tokens)?;
        Ok(start.elapsed().as_secs_f64())
    };
    let mut all = Vec::new();
    for &n_prefix in prefixes {
        engine.pool().clear_prefixes();
        timed(CacheMode::On, &tokens[..n_prefix])?;
        let mut held = session(engine, options, CacheMode::ReadOnly, n_ctx)?;
        held.prefill(&tokens[..n_prefix])?;
        for &n_suffix in suffixes {
            let (prompt, n_threads) = (&tokens[..n_prefix + n_suffix], engine.n_threads());
            let without = timed(CacheMode::Off, prompt)?;
            let mut row = FirstToken {
                n_prefix,
                n_suffix,
                n_threads,
                without,
                with: without,
                suffix: f64::INFINITY,
            };
            for _ in 0..repetitions.max(1) {
                row.with = row.with.min(timed(CacheMode::ReadOnly, prompt)?);
                held.rewind(n_prefix)?;
                let start = Instant::now();
                held.prefill(&prompt[n_prefix..])?;
                row.suffix = row.suffix.min(start.elapsed().as_secs_f64());
            }
            all.push(row);
        }
    }
    Ok(all)
}
