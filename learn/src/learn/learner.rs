//! Everything that a session learns, and the options of learning.

use crate::learn::LearnError;
use crate::learn::experts::{Experts, Losses};
use crate::learn::head::{Adapted, HeadRows, MAX_RANK};
use crate::learn::inner_layers::{CONTROL_TOKENS, Layers};
use crate::learn::moments::{SLOTS, softmax};
use crate::learn::optimiser::{HeadLearner, Rates};
use crate::learn::slices::Slices;
use crate::learn::topics::{Counts, TopicStatus};
use ruvllm::Model;
use ruvllm::arch::Arch;
use ruvllm::compute::{OutputRows, TokenKind};
use ruvllm::lora::{Adapter, Term};
use ruvllm::model::Hparams;

/// Limits and rates of a [`Learner`]. `..Default::default()` sets the remaining fields.
#[derive(Clone, Debug, PartialEq)]
pub struct LearnerOptions {
    /// Rank of the head adapter, 1 to [`MAX_RANK`]. Default 4.
    pub rank: usize,
    /// Bound on the mean `KL(base ‖ adapted)` over the control text, and on the mean rise of its
    /// loss, in nats per token. Default 0.0015: on other text of the kind, a perplexity up to
    /// about 0.3 % higher.
    pub max_divergence: f64,
    /// Number of moments of control text that are kept: half of them shape the adapter, the bound
    /// is checked on the other half. Default 2048.
    pub control_tokens: usize,
    /// Number of latest observed tokens that updates and their step lengths consider. Default
    /// 1024.
    pub recent_tokens: usize,
    /// Capacity of the n-gram cache in observed tokens. Default 65536.
    pub cache_tokens: usize,
    /// Capacity of the neighbour cache in hidden states; 0 means as many as fit 8 MiB. Default 0.
    pub neighbours: usize,
    /// Factor on the length of the steps. Default 1.
    pub rate: f32,
    /// Fraction of earlier learning that each update forgets. Default 0.005.
    pub decay: f32,
    /// Weight of elastic weight consolidation. Default 0.1.
    pub consolidation: f32,
    /// Whether generation uses the mixture of all experts instead of the adapted model. Default
    /// no.
    pub generate_with_mixture: bool,
}

impl Default for LearnerOptions {
    fn default() -> Self {
        LearnerOptions {
            rank: 4,
            max_divergence: 0.0015,
            control_tokens: 2048,
            recent_tokens: 1024,
            cache_tokens: 1 << 16,
            neighbours: 0,
            rate: 1.0,
            decay: 0.005,
            consolidation: 0.1,
            generate_with_mixture: false,
        }
    }
}

impl LearnerOptions {
    /// Bytes that learning adds to a session at its peak, for
    /// [`MemoryPlan::with_hooks`](ruvllm::engine::MemoryPlan::with_hooks): those of a learner, and
    /// logits and hidden states of all tokens of a batch of `n_batch`. What is learnt in inner
    /// layers is not in it.
    pub fn bytes(&self, h: &Hparams, n_batch: usize) -> u64 {
        let row = (h.n_embd + h.n_vocab) as u64 * 4;
        self.learner_bytes(h.n_embd, h.n_vocab)
            .saturating_add((n_batch as u64).saturating_mul(row))
    }

    /// Bytes that a learner takes at its peak: all it holds when full, plus the temporary memory of
    /// calibration or of choosing directions, whichever is more.
    fn learner_bytes(&self, n_embd: usize, n_vocab: usize) -> u64 {
        let neighbours = if self.neighbours == 0 {
            (NEIGHBOUR_BYTES / (2 * n_embd)).max(1)
        } else {
            self.neighbours
        };
        let [n, n_vocab] = [n_embd, n_vocab].map(|n| n as u64);
        // Larger values are refused, so that nothing here overflows.
        let [rank, control, recent, cached, neighbours] = [
            self.rank,
            self.control_tokens,
            self.recent_tokens,
            self.cache_tokens,
            neighbours,
        ]
        .map(|n| n.min(MAX_SIZE) as u64);
        let slots = SLOTS as u64;
        let moments = (control + recent + ANSWER_TOKENS as u64) * (2 * n + 8 * slots + 4);
        let bounded = control.div_ceil(2) * (size_of::<Adapted>() as u64 + 16);
        let ngrams = 12 * cached + 8 * cached.next_power_of_two() + 4 * n_vocab;
        let nearest = neighbours * (2 * n + 16);
        let head = 4 * rank * (3 * n + n_vocab);
        let rows = 4 * (4 * n_vocab + 4 * (n + n_vocab));
        let sums = 8 * n_vocab + 20 * n_vocab.min(slots * control.max(recent));
        let control_text =
            4 * CONTROL_TOKENS as u64 + 8 * n_vocab.min(CONTROL_TOKENS as u64).next_power_of_two();
        let held = moments + bounded + ngrams + nearest + head + rows + sums + control_text;
        let whitened = control.max(recent).div_ceil(2);
        let whitening = 4 * (whitened * (n + whitened) + n);
        // Gradients and hidden states of the lesson, then either a copy of both or what is bounded,
        // anew.
        let lesson = 8 * recent * n;
        let choosing = whitening + lesson + bounded.max(lesson + 8 * rank * n);
        let calibrating = control * (4 * n + 8 * slots + 32);
        held + choosing.max(calibrating)
    }
}

/// Default size in bytes of the hidden states in the neighbour cache.
const NEIGHBOUR_BYTES: usize = 8 << 20;
/// Number of an answer's last tokens that a rating affects.
const ANSWER_TOKENS: usize = 512;
/// Upper bound of the sizes in [`LearnerOptions`], so that a file cannot request all memory.
const MAX_SIZE: usize = 1 << 20;
/// Upper bound of [`LearnerOptions::rate`].
const MAX_RATE: f64 = 100.0;
/// Weight of a new rating in the running mean.
const REWARD_RATE: f64 = 0.1;

fn in_range(option: &'static str, value: f64, max: f64) -> Result<(), LearnError> {
    if (0.0..=max).contains(&value) {
        return Ok(());
    }
    Err(LearnError::Option {
        option,
        value,
        expected: format!("0 to {max}"),
    })
}

/// Origin of the tokens of a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Source {
    /// Read, but not learnt from.
    Prompt,
    /// Generated: learnt from when it is rated.
    Answer,
    /// Text to learn from.
    Observed,
}

/// All that a session has learnt, and the state needed to learn more. Belongs to one model; can be
/// moved between sessions, and saved to a file.
///
/// ```
/// use ruvllm::Model;
/// use ruvllm_learn::{Learner, LearnerOptions, Learning};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # std::env::set_current_dir("..")?;
/// let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
/// let tokenizer = model.tokenizer().ok_or("no tokenizer")?;
/// let mut session = model.session()?;
/// session.set_learner(Learner::new(&model, &LearnerOptions::default())?)?;
/// for line in ["The gauge at Ossen Weir reads 1.84.", "The gauge at Ossen Weir reads 1.91."] {
///     session.clear();
///     let losses = session.observe(&tokenizer.encode(line, true, false))?; // scored, then learnt
///     println!("{:.2} nats without learning, {:.2} with", losses.base, losses.mixture);
/// }
/// session.learner().ok_or("gone")?.save(std::env::temp_dir().join("ruvllm-doc.learned"))?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Learner {
    pub(crate) fingerprint: u64,
    pub(super) arch: Arch,
    n_embd: usize,
    pub(super) n_vocab: usize,
    pub(crate) options: LearnerOptions,
    pub(crate) adapter: HeadLearner,
    pub(crate) experts: Experts,
    pub(crate) layers: Layers,
    pub(crate) mean_reward: f32,
    pub(crate) n_rewards: u32,
    /// Losses of all tokens observed so far.
    pub(crate) total: Losses,
    /// Seconds that the steps of the last update took: choosing directions, learning from text,
    /// making it effective.
    pub(crate) times: [f64; 3],
    /// Statistics of the head's rows; set when the learner is attached to a session.
    pub(crate) rows: Option<HeadRows>,
    /// `h` and the head's product of the last token, whose successor is not yet known.
    pending: Option<(Vec<f32>, Vec<f32>)>,
    /// Losses so far, while text is being observed.
    pub(super) recording: Option<Losses>,
    /// Memory for the next `pending`.
    spare: (Vec<f32>, Vec<f32>),
    p: Vec<f32>,
    logits: Vec<f32>,
}

impl Learner {
    /// A learner that has learnt nothing yet.
    ///
    /// # Errors
    /// If an option is invalid.
    pub fn new(model: &Model, options: &LearnerOptions) -> Result<Learner, LearnError> {
        let h = model.hparams();
        let mut options = options.clone();
        if options.neighbours == 0 {
            options.neighbours = (NEIGHBOUR_BYTES / (2 * h.n_embd)).clamp(1, MAX_SIZE);
        }
        let sizes = [
            ("rank", options.rank, MAX_RANK.min(h.n_embd)),
            ("control_tokens", options.control_tokens, 1 << 13),
            ("recent_tokens", options.recent_tokens, 1 << 13),
            ("cache_tokens", options.cache_tokens, MAX_SIZE),
            ("neighbours", options.neighbours, MAX_SIZE),
        ];
        for (option, value, max) in sizes {
            if value == 0 || value > max {
                return Err(LearnError::Option {
                    option,
                    value: value as f64,
                    expected: format!("1 to {max}"),
                });
            }
        }
        if options.cache_tokens < 64 || options.recent_tokens < 64 {
            let (option, value) = (
                "cache_tokens and recent_tokens",
                options.cache_tokens.min(options.recent_tokens),
            );
            return Err(LearnError::Option {
                option,
                value: value as f64,
                expected: "at least 64".into(),
            });
        }
        let numbers = [
            ("max_divergence", options.max_divergence, 10.0),
            ("rate", f64::from(options.rate), MAX_RATE),
            ("decay", f64::from(options.decay), 1.0),
            ("consolidation", f64::from(options.consolidation), 1e6),
        ];
        for (option, value, max) in numbers {
            in_range(option, value, max)?;
        }
        let rates = Rates {
            max_divergence: options.max_divergence,
            rate: options.rate,
            decay: options.decay,
            consolidation: options.consolidation,
            npo_beta: 0.1,
        };
        let transform = h.logit_transform();
        let sizes = [options.control_tokens, options.recent_tokens, ANSWER_TOKENS];
        Ok(Learner {
            fingerprint: model.fingerprint(),
            arch: model.arch(),
            n_embd: h.n_embd,
            n_vocab: h.n_vocab,
            adapter: HeadLearner::new(options.rank, h.n_embd, h.n_vocab, transform, rates, sizes),
            experts: Experts::new(
                h.n_vocab,
                h.n_embd,
                options.cache_tokens,
                options.neighbours,
            ),
            layers: Layers::default(),
            options,
            mean_reward: 0.0,
            n_rewards: 0,
            total: Losses::default(),
            times: [0.0; 3],
            rows: None,
            pending: None,
            recording: None,
            spare: Default::default(),
            p: Vec::new(),
            logits: Vec::new(),
        })
    }

    /// The options, with defaults filled in.
    pub fn options(&self) -> &LearnerOptions {
        &self.options
    }

    /// Sets whether generation uses the mixture of all experts.
    pub fn set_generate_with_mixture(&mut self, on: bool) {
        self.options.generate_with_mixture = on;
    }

    /// Sets [`LearnerOptions::rate`] for what is learnt from now on.
    ///
    /// # Errors
    /// If it is out of its range.
    pub fn set_rate(&mut self, rate: f32) -> Result<(), LearnError> {
        in_range("rate", f64::from(rate), MAX_RATE)?;
        (self.options.rate, self.adapter.rates.rate) = (rate, rate);
        Ok(())
    }

    /// Number of updates of the adapter so far.
    pub fn n_updates(&self) -> u64 {
        self.adapter.n_updates
    }

    /// Milliseconds that the steps of the last update took: choosing the directions onto which
    /// hidden states are projected, 0 except once every [`LearnerOptions::recent_tokens`]
    /// tokens; learning, per 64 tokens; making it effective (the product of head and adapter,
    /// the bound on forgetting, the length of the step).
    pub fn last_times(&self) -> [f64; 3] {
        self.times.map(|seconds| 1e3 * seconds)
    }

    /// Losses over all tokens observed so far, each scored before anything was learnt from it.
    pub fn losses(&self) -> Losses {
        self.total
    }

    /// Number of moments of control text; without any, the bound on forgetting is weak.
    pub fn n_control(&self) -> usize {
        self.adapter.control.len()
    }

    /// Mean `KL(base ‖ adapted)` over the control text, in nats; 0 without one. With inner layers
    /// the most that both can have in any topic, as each is measured alone.
    pub fn divergence(&self) -> f64 {
        self.divergence_of_both(self.adapter.divergence(self.adapter.head.scale))
    }

    /// What [`Sona`](crate::sona::Sona) learnt in inner layers.
    pub fn topics(&self) -> Vec<TopicStatus> {
        self.layers.topics.status(self.layers.ordinary())
    }

    /// The topic whose adapter of inner layers has its effect.
    pub fn topic(&self) -> Option<u32> {
        self.layers.chosen
    }

    /// Gives the adapter of a topic its effect, or none; a learner that belongs to a session is to
    /// be set again.
    pub fn set_topic(&mut self, topic: Option<u32>) {
        self.set_topic_in_slices(topic, &mut Slices::whole());
    }

    pub(crate) fn set_topic_in_slices(&mut self, topic: Option<u32>, slices: &mut Slices<'_>) {
        self.layers.chosen = topic;
        self.share_bound(slices);
    }

    /// The topic to whose text a text belongs rather than to none, by how often it uses each token.
    pub fn nearest_topic(&self, text: &[u32]) -> Option<u32> {
        self.layers
            .topics
            .nearest(&Counts::of(text), self.layers.ordinary(), self.n_vocab)
    }

    /// Strength of the adapter; 0 while it changes nothing.
    pub fn scale(&self) -> f32 {
        self.adapter.head.scale
    }

    /// The adapter alone, as one that any LoRA implementation can apply: of the head, where `A`,
    /// and `W·B` in place of `B`, change the output, and of inner layers, if a
    /// [topic](Learner::set_topic) is chosen.
    ///
    /// # Errors
    /// If `model` is another one, nothing has been learnt yet, or what was learnt has no effect.
    pub fn to_adapter(&self, model: &Model) -> Result<Adapter, LearnError> {
        self.check(model)?;
        let head = &self.adapter.head;
        let inner = self.layers.adapter().map(|adapter| Adapter::clone(adapter));
        if head.is_idle() || head.wb.iter().all(|&x| x == 0.0) {
            let none = if self.n_updates() == 0 {
                LearnError::NothingLearnt
            } else {
                LearnError::NoEffect
            };
            return inner.ok_or(none);
        }
        let mut adapter = inner.unwrap_or_else(|| Adapter::empty(model));
        let site = model.output_site();
        let term = Term::new(head.rank, head.a.clone(), head.wb.clone());
        let factor = head.scale / adapter.scale(&term);
        let b = head.wb.iter().map(|x| factor * x).collect();
        adapter.set_term(site, Term::new(head.rank, head.a.clone(), b));
        Ok(adapter)
    }

    /// # Errors
    /// If the learner was made for another model.
    pub(crate) fn check(&self, model: &Model) -> Result<(), LearnError> {
        let (found, expected) = (self.fingerprint, model.fingerprint());
        if found == expected {
            Ok(())
        } else {
            Err(LearnError::OtherModel { found, expected })
        }
    }

    /// Drops the pending token and the answer: the text does not continue.
    pub(crate) fn interrupt(&mut self) {
        self.end_text();
        self.adapter.answer.clear();
    }

    /// Drops the pending token; the answer can still be rated.
    pub(crate) fn end_text(&mut self) {
        self.pending = None;
    }

    /// Processes the rows of a pass: learns from the tokens, and turns the head's products into
    /// logits.
    pub(super) fn follow(&mut self, arch: Arch, rows: OutputRows<'_>, slices: &mut Slices<'_>) {
        let (n_embd, n_vocab) = (self.n_embd, self.n_vocab);
        let OutputRows {
            tokens,
            start,
            first,
            kind,
            states,
            logits,
            ..
        } = rows;
        let source = match kind {
            _ if self.recording.is_some() => Source::Observed,
            TokenKind::Prompt => Source::Prompt,
            TokenKind::Generated => Source::Answer,
        };
        let mut losses = self.came(arch, source, &tokens[..start], tokens[start]);
        for (i, (h, raw)) in states
            .chunks_exact(n_embd)
            .zip(logits.chunks_exact_mut(n_vocab))
            .enumerate()
        {
            let (context, rest) = tokens.split_at(first + i + 1);
            self.predicted(arch, context, h, raw, rest.is_empty());
            if let Some(&next) = rest.first() {
                losses += self.came(arch, source, context, next);
            }
            slices.tick();
        }
        if let Some(recorded) = &mut self.recording {
            *recorded += losses;
        }
    }

    /// Processes `token`, which came after `context`; the row that predicted it was given to
    /// [`Learner::predicted`].
    fn came(&mut self, arch: Arch, source: Source, context: &[u32], token: u32) -> Losses {
        if source != Source::Answer {
            self.adapter.answer.clear();
        }
        let Some((h, raw)) = self.pending.take() else {
            return Losses::default();
        };
        let losses = match source {
            Source::Prompt => Losses::default(),
            Source::Answer => {
                let lse = self.base_softmax(arch, &raw);
                let HeadLearner {
                    answer, transform, ..
                } = &mut self.adapter;
                answer.push(arch, *transform, &h, &raw, &self.p, lse, token);
                Losses::default()
            }
            Source::Observed => self.met(arch, context, &h, &raw, token),
        };
        self.spare = (h, raw);
        losses
    }

    /// Scores a token that came after `context`, `h` and `raw`, then stores it to learn from,
    /// unless the model's values are not finite.
    pub(crate) fn met(
        &mut self,
        arch: Arch,
        context: &[u32],
        h: &[f32],
        raw: &[f32],
        token: u32,
    ) -> Losses {
        let lse = self.base_softmax(arch, raw);
        let base_loss = lse - f64::from(self.logits[token as usize]);
        if !base_loss.is_finite() {
            let loss = base_loss;
            return Losses {
                n: 1,
                base: loss,
                adapter: loss,
                ngram: loss,
                knn: loss,
                mixture: loss,
            };
        }
        self.adapter.observed(arch, h, raw, &self.p, lse, token);
        let Learner {
            adapter, p, logits, ..
        } = self;
        let adapter_loss = adapter.loss(arch, h, raw, base_loss, token, p, logits);
        let losses = self
            .experts
            .score(arch, context, h, base_loss, adapter_loss, token);
        self.experts.keep(arch, context, h, token);
        self.total += losses;
        losses
    }

    fn base_softmax(&mut self, arch: Arch, raw: &[f32]) -> f64 {
        self.logits.clear();
        self.logits.extend_from_slice(raw);
        self.adapter.transform.row(&mut self.logits);
        softmax(arch, &self.logits, &mut self.p)
    }

    /// Processes a row of hidden state and head product; `raw` becomes the logits that the session
    /// returns: those of the mixture if the row is the `last` of a call and generation uses it.
    fn predicted(&mut self, arch: Arch, context: &[u32], h: &[f32], raw: &mut [f32], last: bool) {
        let (mut h_kept, mut raw_kept) = self
            .pending
            .take()
            .unwrap_or_else(|| std::mem::take(&mut self.spare));
        h_kept.clear();
        h_kept.extend_from_slice(h);
        raw_kept.clear();
        raw_kept.extend_from_slice(raw);
        if !self.adapter.head.is_idle() {
            self.adapter.head.add(arch, h, raw);
            // Without a branch per value, since this runs for every token.
            if !raw.iter().fold(true, |finite, x| finite & x.is_finite()) {
                raw.copy_from_slice(&raw_kept);
            }
        }
        self.adapter.transform.row(raw);
        if last && self.options.generate_with_mixture {
            self.logits.clear();
            self.logits.extend_from_slice(&raw_kept);
            self.adapter.transform.row(&mut self.logits);
            self.experts.mix(arch, context, h, &self.logits, raw);
        }
        self.pending = Some((h_kept, raw_kept));
    }

    /// Difference of a rating from the running mean, which then moves towards the rating.
    pub(crate) fn advantage(&mut self, reward: f32) -> f32 {
        let mean = f64::from(self.mean_reward);
        let advantage = f64::from(reward) - mean;
        let rate = if self.n_rewards == 0 {
            1.0
        } else {
            REWARD_RATE.max(1.0 / (f64::from(self.n_rewards) + 1.0))
        };
        self.mean_reward = (mean + rate * advantage) as f32;
        self.n_rewards = self.n_rewards.saturating_add(1);
        (advantage as f32).clamp(f32::MIN, f32::MAX)
    }
}
