//! Drafts: several tokens per pass, and the text that would come without (speculative decoding,
//! <https://arxiv.org/abs/2211.17192>).
//!
//! A [`Drafter`] guesses how a text goes on. One pass computes the last token and the guesses
//! behind it, each a generated row with the bits that it has alone. Then tokens are sampled from
//! these rows as they would be one after the other, with the same history and the same random
//! numbers: as long as the token sampled is the one that was guessed, the row behind it is already
//! there. So the text does not depend on who drafts, and how much; nothing is sampled that plain
//! decoding would not sample, and of guesses that were wrong the sequence is rewound.
//!
//! How much is drafted is decided by time alone ([`best_length`]): what a pass takes by its number
//! of rows, which the engine measures ([`RowTimes`]), and how often the guesses of a drafter come
//! true, by their grades ([`Speculator`]).

pub(crate) mod model;
pub(crate) mod mtp;
pub(crate) mod ngram;
pub(crate) mod passes;
pub(crate) mod trained;

use crate::clock::Timer;
use crate::engine::SessionError;
use crate::engine::batch::Slot;
use crate::engine::engine::Engine;
use crate::engine::row_times::RowTimes;
use crate::engine::sequence::Sequence;
use crate::layers::draft::MAX_DRAFT;
use std::fmt::Debug;
use std::ops::Range;
use std::time::Duration;

pub use model::ModelDrafter;
pub use mtp::MtpDrafter;
pub use ngram::{NgramDrafter, RecentTexts};
pub(crate) use passes::{Asked, DraftPasses};
pub use trained::TrainedDrafter;

/// Values of [`Draft::confidence`].
const N_CONFIDENCES: usize = 8;
/// A draft has to be expected to gain so much.
const MARGIN: f64 = 1.1;
/// A guess that takes this share of a pass is not made unless it is expected to pay.
const COSTLY: f64 = 0.01;
/// Most guesses while it is not known how long one takes.
const FIRST: usize = 3;
/// Steps after which a drafter that did not pay is asked again, at the earliest, and the share of the
/// time of these steps that it may take: it reads what came meanwhile.
const RETRY: usize = 256;
const RETRY_SHARE: f64 = 0.01;
/// Guesses that count for what is known of a drafter; older ones are forgotten.
const MEMORY: f64 = 32.0;
/// What is thought of a drafter before its first guesses were tested: how many come true, by grade,
/// as if [`PRIOR_WEIGHT`] of each had been. (Of n-grams in code and prose of this repository,
/// rounded down.)
const PRIOR: [f64; N_CONFIDENCES] = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8];
const PRIOR_WEIGHT: f64 = 2.0;

/// A token that may come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draft {
    /// The token.
    pub token: u32,
    /// How sure the drafter is, from 0 to 7. It need not be calibrated: for each grade it is
    /// measured how many guesses come true.
    pub confidence: u8,
}

/// Guesses how a text goes on. Whatever it guesses, the text stays the same; it only comes faster
/// or slower.
pub trait Drafter: Debug + Send + Sync {
    /// What it is called in statistics.
    fn name(&self) -> &'static str;

    /// The text goes on with `tokens`; those of the first call are its beginning.
    fn push(&mut self, tokens: &[u32]);

    /// Whether it reads the model's hidden states.
    fn reads_states(&self) -> bool {
        false
    }

    /// Layers of the model whose inputs it reads; the number of layers stands for what the last one
    /// leaves.
    fn reads_inputs(&self) -> &[usize] {
        &[]
    }

    /// Reads what it needs of the text's sequence for a draft of `n` tokens, before each
    /// [`Drafter::draft`]. The text has `n_text` tokens, which the sequence holds except for those
    /// that are computed next.
    fn read(&mut self, n: usize, seq: &Sequence, n_text: usize) {
        let _ = (n, seq, n_text);
    }

    /// The engine that computes its passes, if it needs any: drafters of several texts share them.
    /// Before each [`Drafter::draft`], passes are computed as long as there is a next one.
    fn engine(&self) -> Option<&Engine> {
        None
    }

    /// Its part of the next pass for a draft of `n` tokens; the same if it is asked again before
    /// [`Drafter::end_pass`]. If it [reads](Drafter::reads_states) them, `states` are the
    /// model's hidden states, after its last norm, of tokens up to the one before the last of
    /// the text, that one's last; `(n, n_embd)`. There are none where they were not computed.
    fn next_pass<'a>(&'a mut self, n: usize, states: &'a [f32]) -> Option<Slot<'a>> {
        let _ = (n, states);
        None
    }

    /// What the pass computed of its part: the logits that were requested, `(n, n_vocab)`, and the
    /// hidden states of these rows, where they were. None if it failed.
    fn end_pass(&mut self, rows: Option<(&[f32], &[f32])>) {
        let _ = rows;
    }

    /// It may draft what it finds in `recent`, and leave its own text there when it is dropped.
    /// Called before the text begins.
    fn remember(&mut self, recent: &RecentTexts) {
        let _ = recent;
    }

    /// The text waits: gives back the memory of what was computed of it, which is computed again
    /// when it goes on.
    fn release(&mut self) {}

    /// Leaves in `draft`, which is empty, at most `n` tokens that may come next, in their order.
    fn draft(&mut self, n: usize, draft: &mut Vec<Draft>);

    /// A drafter in the same state that goes its own way.
    fn boxed_clone(&self) -> Box<dyn Drafter>;
}

/// Who drafts. The default is an [`NgramDrafter`].
///
/// ```
/// use ruvllm::decode::Speculation;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = ruvllm::Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
/// let mut session = model.session()?;
/// let mut sampler = ruvllm::Sampler::new(ruvllm::SamplerOptions { temperature: 0.0, ..Default::default() })?;
/// let generation = session.generate("Ownership is", &mut sampler)?.max_tokens(32);
/// let text = generation.speculate(Speculation::default()).text()?;
/// # assert!(!text.is_empty());
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Speculation {
    drafters: Vec<Box<dyn Drafter>>,
    length: Option<usize>,
}

impl Default for Speculation {
    fn default() -> Self {
        Speculation::by(NgramDrafter::default())
    }
}

impl Clone for Speculation {
    fn clone(&self) -> Self {
        let drafters = self
            .drafters
            .iter()
            .map(|drafter| drafter.boxed_clone())
            .collect();
        Speculation {
            drafters,
            length: self.length,
        }
    }
}

impl Speculation {
    /// By this drafter alone.
    pub fn by(drafter: impl Drafter + 'static) -> Speculation {
        Speculation {
            drafters: vec![Box::new(drafter)],
            length: None,
        }
    }

    /// By this one, too: at every step the draft that is expected to gain most is taken, of equal
    /// ones the first.
    #[must_use]
    pub fn and(mut self, drafter: impl Drafter + 'static) -> Speculation {
        self.drafters.push(Box::new(drafter));
        self
    }

    /// Lets the sequence keep what the drafters read of it from now on.
    pub(crate) fn keep(&self, seq: &mut Sequence) -> Result<(), SessionError> {
        keep(self.drafters.iter().map(|drafter| &**drafter), seq)
    }

    /// Drafts `n` tokens at every step, at most 15, even where that is slower than to draft none:
    /// for measurements and tests.
    #[must_use]
    pub fn fixed_length(mut self, n: usize) -> Speculation {
        self.length = Some(n);
        self
    }
}

/// Lets the sequence keep what the drafters read of it from now on.
fn keep<'a>(
    drafters: impl Iterator<Item = &'a dyn Drafter>,
    seq: &mut Sequence,
) -> Result<(), SessionError> {
    for drafter in drafters {
        if drafter.reads_states() {
            seq.keep_states()?;
        }
        let layers = drafter.reads_inputs();
        if !layers.is_empty() {
            seq.keep_inputs(layers)?;
        }
    }
    Ok(())
}

/// What became of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DraftStats {
    /// Passes that computed generated tokens; of a single drafter, those with drafts of its own.
    pub n_passes: usize,
    /// Tokens drafted.
    pub n_drafted: usize,
    /// Of them, those that were sampled, too.
    pub n_accepted: usize,
    /// Time that drafting took.
    pub time: Duration,
}

/// A drafter, and what is known of it.
#[derive(Debug)]
struct Tracked {
    drafter: Box<dyn Drafter>,
    /// How many guesses of each grade come true, as a moving average; and how many were tested, up
    /// to [`MEMORY`].
    accepted: [(f64, f64); N_CONFIDENCES],
    /// The same of all grades.
    accepted_of_all: (f64, f64),
    /// Seconds that a guess takes, as a moving average, and steps since it was last asked.
    cost: f64,
    n_skipped: usize,
    /// Seconds that it took when it was last asked again though it had not paid.
    retry_time: f64,
    /// Its newest draft, and how many tokens of it have come true: so it is tested also where
    /// nobody computes it.
    draft: Vec<Draft>,
    n_true: usize,
    /// For each guess of the draft, how probable it is that all up to it come true.
    p: Vec<f64>,
    /// How many tokens the next draft is to have, and its share of the time of passes for it.
    n_asked: usize,
    in_passes: Duration,
    stats: DraftStats,
}

impl Tracked {
    fn new(drafter: Box<dyn Drafter>) -> Tracked {
        Tracked {
            drafter,
            accepted: PRIOR.map(|p| (p, PRIOR_WEIGHT)),
            accepted_of_all: (0.5, PRIOR_WEIGHT),
            cost: 0.0,
            // The first draft is not measured: who makes it reads the prompt.
            n_skipped: 2,
            retry_time: 0.0,
            draft: Vec::new(),
            n_true: 0,
            p: Vec::new(),
            n_asked: 0,
            in_passes: Duration::ZERO,
            stats: DraftStats::default(),
        }
    }

    /// Tests the draft with tokens that came, and lets the drafter have them.
    fn push(&mut self, tokens: &[u32]) {
        for &token in tokens {
            let Some(guess) = self.draft.get(self.n_true) else {
                break;
            };
            let is_true = guess.token == token;
            let of_grade = &mut self.accepted[usize::from(guess.confidence).min(N_CONFIDENCES - 1)];
            for (mean, n) in [of_grade, &mut self.accepted_of_all] {
                *n = (*n + 1.0).min(MEMORY);
                *mean += (f64::from(u8::from(is_true)) - *mean) / *n;
            }
            self.n_true += 1;
            if !is_true {
                self.draft.clear();
            }
        }
        self.drafter.push(tokens);
    }

    /// Of at most `n` guesses, as many as are expected to pay in a pass of `n_rows` rows without
    /// drafts, of `n_texts` that may have as many, if passes take `times`: all, if to guess
    /// takes no time, few as long as that is not known.
    fn worth(&mut self, times: &RowTimes, (n_rows, n_texts): (usize, usize), n: usize) -> usize {
        let Some(plain) = times.estimate(n_rows) else {
            return 0;
        };
        if self.cost == 0.0 {
            return n.min(FIRST);
        }
        if self.cost <= COSTLY * plain {
            return n;
        }
        let accepted = self.accepted_of_all.0;
        let p = std::iter::successors(Some(accepted), |p| Some(p * accepted));
        let length = best_length(times, n_rows, (n_texts, self.cost), p.take(n));
        self.n_skipped += 1;
        if length == 0 && self.retries(plain) {
            n.min(1)
        } else {
            length
        }
    }

    /// Whether it is asked again though it did not pay: where a pass takes `plain` seconds, what it
    /// has to read is to take a small share of the time that has passed.
    fn retries(&self, plain: f64) -> bool {
        let n = self.n_skipped;
        n.is_multiple_of(RETRY) && self.retry_time <= RETRY_SHARE * plain * n as f64
    }

    /// Its part of the next pass for the draft that was asked for.
    fn next_pass<'a>(&'a mut self, states: &'a [f32]) -> Option<Slot<'a>> {
        if self.n_asked > 0 {
            self.drafter.next_pass(self.n_asked, states)
        } else {
            None
        }
    }

    /// Guesses how the text of `n_text` tokens goes on, behind its passes.
    fn guess(&mut self, n_vocab: usize, (seq, n_text): (&Sequence, usize)) {
        self.draft.clear();
        self.n_true = 0;
        let in_passes = std::mem::take(&mut self.in_passes);
        let n = self.n_asked;
        if n == 0 {
            self.p.clear();
            return;
        }
        let timer = Timer::start();
        self.drafter.read(n, seq, n_text);
        self.drafter.draft(n, &mut self.draft);
        self.draft.truncate(n);
        let time = timer.elapsed() + in_passes;
        if self.n_skipped >= RETRY {
            self.retry_time = time.as_secs_f64();
        }
        // Who reads what came while it was not asked is not measured.
        if self.n_skipped <= 1 && !self.draft.is_empty() {
            let cost = time.as_secs_f64() / self.draft.len() as f64;
            self.cost += (cost - self.cost) * if self.cost > 0.0 { 0.2 } else { 1.0 };
        }
        self.stats.time += time;
        self.n_skipped = 0;
        let in_vocabulary = self
            .draft
            .iter()
            .take_while(|guess| (guess.token as usize) < n_vocab)
            .count();
        self.draft.truncate(in_vocabulary);
        let (mut p, accepted) = (1.0, &self.accepted);
        let all = self.draft.iter().map(|guess| {
            p *= accepted[usize::from(guess.confidence).min(N_CONFIDENCES - 1)].0;
            p
        });
        self.p.clear();
        self.p.extend(all);
    }
}

/// Drafts for one sequence, and learns how often they come true.
#[derive(Debug)]
pub(crate) struct Speculator {
    drafters: Vec<Tracked>,
    length: Option<usize>,
    /// Tokens of the text that the drafters have.
    n_pushed: usize,
    /// Whose draft is computed.
    current: usize,
}

impl Speculator {
    pub(crate) fn new(speculation: Speculation) -> Speculator {
        let drafters = speculation.drafters.into_iter().map(Tracked::new).collect();
        Speculator {
            drafters,
            length: speculation.length,
            n_pushed: 0,
            current: 0,
        }
    }

    /// Lets the drafters look in `recent`, see [`Drafter::remember`].
    pub(crate) fn remember(mut self, recent: &RecentTexts) -> Speculator {
        self.drafters
            .iter_mut()
            .for_each(|tracked| tracked.drafter.remember(recent));
        self
    }

    /// Lets the sequence keep what drafters read of it from now on.
    ///
    /// # Errors
    /// If there is no memory for that: who reads it drafts nothing.
    pub(crate) fn keep(&self, seq: &mut Sequence) -> Result<(), SessionError> {
        keep(self.drafters.iter().map(|tracked| &*tracked.drafter), seq)
    }

    /// Lets the drafters give back their memory, see [`Drafter::release`].
    pub(crate) fn release(&mut self) {
        for tracked in &mut self.drafters {
            tracked.draft.clear();
            tracked.p.clear();
            tracked.drafter.release();
        }
    }

    /// Tells the drafters how the text went on, and asks each for as many guesses as pay, at most
    /// `n`.
    fn ask(&mut self, text: &[u32], n: usize, times: &RowTimes, rows: (usize, usize)) {
        let new = text.get(self.n_pushed..).unwrap_or(&[]);
        for tracked in &mut self.drafters {
            let timer = Timer::start();
            tracked.push(new);
            tracked.n_asked = match self.length {
                Some(length) => n.min(length).min(MAX_DRAFT),
                None => tracked.worth(times, rows, n.min(MAX_DRAFT)),
            };
            tracked.stats.time += timer.elapsed();
        }
        self.n_pushed = text.len();
    }

    /// Takes the guesses of whoever is expected to gain most.
    fn choose(&mut self, n_vocab: usize, of: (&Sequence, usize)) {
        self.drafters
            .iter_mut()
            .for_each(|tracked| tracked.guess(n_vocab, of));
        let gain = |tracked: &Tracked| tracked.p.iter().sum::<f64>();
        self.current = 0;
        for i in 1..self.drafters.len() {
            if gain(&self.drafters[i]) > gain(&self.drafters[self.current]) {
                self.current = i;
            }
        }
    }

    /// The tokens `gone` of the text are about to be dropped from it: drafters are told of them
    /// before, also where none was asked yet.
    pub(crate) fn shifted(&mut self, text: &[u32], gone: &Range<usize>) {
        let new = text.get(self.n_pushed..gone.end).unwrap_or(&[]);
        self.drafters
            .iter_mut()
            .for_each(|tracked| tracked.push(new));
        self.n_pushed = self.n_pushed.max(gone.end) - gone.len();
    }

    /// `n` tokens that were dropped are in the text again.
    pub(crate) fn unshifted(&mut self, n: usize) {
        self.n_pushed += n;
    }

    /// For each guess, how probable it is to be accepted, in descending order.
    fn probabilities(&self) -> &[f64] {
        self.drafters
            .get(self.current)
            .map_or(&[], |tracked| &tracked.p)
    }

    /// The first `n` tokens of the draft, which a pass is to compute.
    fn take(&mut self, n: usize) -> impl Iterator<Item = u32> {
        let tracked = &mut self.drafters[self.current];
        tracked.stats.n_passes += usize::from(n > 0);
        tracked.stats.n_drafted += n;
        tracked.draft[..n].iter().map(|guess| guess.token)
    }

    /// So many tokens of the draft that was taken were sampled, too.
    pub(crate) fn accepted(&mut self, n: usize) {
        if let Some(tracked) = self.drafters.get_mut(self.current) {
            tracked.stats.n_accepted += n;
        }
    }

    /// What became of each drafter's drafts.
    pub(crate) fn by_drafter(&self) -> impl Iterator<Item = (&'static str, DraftStats)> {
        self.drafters
            .iter()
            .map(|tracked| (tracked.drafter.name(), tracked.stats))
    }

    /// The same of all, without a number of passes.
    pub(crate) fn stats(&self) -> DraftStats {
        let mut all = DraftStats::default();
        for (_, stats) in self.by_drafter() {
            all.n_drafted += stats.n_drafted;
            all.n_accepted += stats.n_accepted;
            all.time += stats.time;
        }
        all
    }
}

/// How many drafts a pass that has `n_rows` rows without them is to take from each of `n_texts` so
/// that most tokens per second are expected, if each takes `cost` seconds to guess. The drafts have
/// probabilities `p` to be accepted, in descending order.
fn best_length(
    times: &RowTimes,
    n_rows: usize,
    (n_texts, cost): (usize, f64),
    p: impl Iterator<Item = f64>,
) -> usize {
    let Some(plain) = times.estimate(n_rows) else {
        return 0;
    };
    let (mut best, mut n) = (MARGIN * n_rows as f64 / plain, 0);
    let mut expected = n_rows as f64;
    for (i, p) in (1..).zip(p) {
        expected += n_texts as f64 * p;
        let Some(time) = times.estimate(n_rows + n_texts * i) else {
            break;
        };
        let rate = expected / (time + (n_texts * i) as f64 * cost);
        if rate > best {
            (best, n) = (rate, i);
        }
    }
    n
}
