//! How the head adapter learns: averaged gradients choose the direction, a search along it the length,
//! and the bound on forgetting the most it may be.

use super::control::{Fisher, Whitening, directions};
use super::head::{Adapted, Gradient, Head, HeadRows, Ranks, Slots};
use super::moments::{Moment, Moments, NO_TOKEN, SLOTS, softmax};
use crate::arch::Arch;
use crate::model::Finish;

/// Tokens that one update learns from.
pub(crate) const UPDATE_TOKENS: usize = 64;
/// Observed tokens before directions are chosen.
const FIRST_TOKENS: usize = 256;
/// Latest tokens that the length of the step is judged on.
const JUDGED: usize = 256;
/// Share of evidence that a new chunk leaves, and fewest chunks that can speak for what was learnt.
const EVIDENCE_KEPT: f64 = 0.98;
const LEAST_CHUNKS: u32 = 5;
/// Share of the length that the search along the direction tries, besides none.
const LENGTHS: [f32; 8] = [1.0, 0.75, 0.55, 0.4, 0.28, 0.2, 0.1, 0.05];
/// Without control text, the most that predictions of the observed text itself may move, in nats.
const BOUND_WITHOUT_CONTROL: f64 = 0.1;

/// What an update is to learn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lesson {
    /// What the user wrote.
    Text,
    /// The answers, by a rating above (`> 0`) or below the usual one.
    Answer(f32),
    /// For comparison: the opposite of the text.
    Opposite,
    /// For comparison: a direction by chance, as long as the gradient.
    Chance,
}

/// Knobs of the optimiser.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rates {
    /// Most mean `KL(base ‖ adapted)` over the control moments, and most mean rise of their loss, in nats.
    pub(crate) max_divergence: f64,
    /// What an update forgets of those before.
    pub(crate) decay: f32,
    /// Weight of the penalty for leaving what mattered.
    pub(crate) consolidation: f32,
    /// `β` of negative preference optimisation (arXiv 2404.05868).
    pub(crate) npo_beta: f64,
}

/// A head adapter that learns.
#[derive(Clone, Debug)]
pub(crate) struct HeadLearner {
    pub(crate) head: Head,
    pub(crate) fisher: Fisher,
    pub(crate) control: Moments,
    pub(crate) recent: Moments,
    pub(crate) answer: Moments,
    /// Of `recent`, those not learnt from yet.
    pub(crate) fresh: usize,
    pub(crate) rates: Rates,
    pub(crate) finish: Finish,
    pub(crate) n_updates: u64,
    /// Upper bound of the share of the last gradient that truncation left out.
    pub(crate) truncation: f64,
    error_bound: f64,
    /// Base prediction and `A·h` of the moments that the bound is judged on.
    bounded: Vec<(Adapted, Ranks)>,
    slots: Slots,
    row: Vec<f32>,
    /// `(rank, n_embd)`: along each, a change makes the model surer of ordinary text.
    pub(crate) confidence: Vec<f32>,
    /// Observed since directions were chosen.
    pub(crate) since_choice: usize,
    pub(crate) evidence: Evidence,
}

/// Whether what was learnt tells which token comes where, by tokens that are not learnt yet: each is given more
/// weight than the others of its chunk would get in its place, or not. What any text teaches, such as to be less
/// sure, or which tokens are frequent, gains nothing by this measure; a text in random order gains nothing at
/// all, whatever was learnt from it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Evidence {
    pub(crate) sum: f64,
    pub(crate) squares: f64,
    pub(crate) chunks: u32,
}

impl Evidence {
    /// A chunk's gain; older ones fade.
    fn add(&mut self, gain: f64) {
        if gain.is_finite() {
            self.sum = EVIDENCE_KEPT * self.sum + gain;
            self.squares = EVIDENCE_KEPT * EVIDENCE_KEPT * self.squares + gain * gain;
            self.chunks = self.chunks.saturating_add(1);
        }
    }

    /// `None` while it is too early to tell. If order means nothing, sums of chunks are independent, and two
    /// standard errors are exceeded by chance once in 44 times.
    fn verdict(&self) -> Option<bool> {
        (self.chunks >= LEAST_CHUNKS).then(|| self.sum > 2.0 * self.squares.sqrt())
    }
}

impl HeadLearner {
    pub(crate) fn new(
        rank: usize,
        n_embd: usize,
        n_vocab: usize,
        finish: Finish,
        rates: Rates,
        sizes: [usize; 3],
    ) -> Self {
        let [control, recent, answer] = sizes.map(|n| Moments::new(n_embd, n));
        HeadLearner {
            head: Head::new(rank, n_embd, n_vocab),
            fisher: Fisher::new(n_embd),
            control,
            recent,
            answer,
            fresh: 0,
            rates,
            finish,
            n_updates: 0,
            truncation: 0.0,
            error_bound: 0.0,
            bounded: Vec::new(),
            slots: Slots::default(),
            row: Vec::new(),
            confidence: Vec::new(),
            since_choice: 0,
            evidence: Evidence::default(),
        }
    }

    /// Loss of `token` by the adapted model, over the whole vocabulary; `p` is scratch.
    pub(crate) fn exact_loss(
        &self,
        arch: Arch,
        h: &[f32],
        raw: &[f32],
        token: u32,
        p: &mut Vec<f32>,
        logits: &mut Vec<f32>,
    ) -> f64 {
        logits.clear();
        logits.extend_from_slice(raw);
        self.head.add(arch, h, logits);
        self.finish.row(logits);
        let lse = softmax(arch, logits, p);
        lse - f64::from(logits[token as usize])
    }

    /// Keeps an observed moment for the next update.
    pub(crate) fn observed(&mut self, arch: Arch, h: &[f32], raw: &[f32], p: &[f32], lse: f64, token: u32) {
        self.recent.push(arch, self.finish, h, raw, p, lse, token);
        self.since_choice = self.since_choice.saturating_add(1);
        self.fresh = (self.fresh + 1).min(self.recent.len());
    }

    fn project(&self, arch: Arch, m: &Moment<'_>, row: &mut Vec<f32>) -> Ranks {
        row.resize(m.h.len(), 0.0);
        arch.f16_to_f32(m.h, row);
        self.head.project(arch, row)
    }

    pub(crate) fn is_undecided(&self) -> bool {
        self.head.a.iter().all(|&a| a == 0.0)
    }

    /// Whether directions are to be chosen: when there is enough to choose them from, and again when all of
    /// that has been replaced.
    pub(crate) fn is_due(&self) -> bool {
        match self.is_undecided() {
            true => self.recent.len() >= FIRST_TOKENS.min(self.recent.capacity()),
            false => self.since_choice >= self.recent.capacity(),
        }
    }

    /// The moments that a lesson's directions are chosen from.
    fn source(&self, lesson: Lesson) -> &Moments {
        if matches!(lesson, Lesson::Answer(_)) { &self.answer } else { &self.recent }
    }

    /// The adapted model's error at each moment of a lesson's source, as parts of
    /// `∂loss/∂h = Σ rows·W + rest·mean`.
    pub(crate) fn errors(&self, arch: Arch, lesson: Lesson) -> Vec<(Vec<(u32, f32)>, f32)> {
        let mut row = Vec::new();
        let of = |m: Moment<'_>| {
            let z = self.project(arch, &m, &mut row);
            errors(self.finish, &m, &self.head.adapted(self.finish, &m, &z, self.head.scale))
        };
        self.source(lesson).iter().map(of).collect()
    }

    /// How much surer of the control text each direction makes the model; its sum with the head's rows is
    /// [`HeadLearner::confidence`].
    pub(crate) fn surer(&mut self, arch: Arch) -> Gradient {
        let mut row = std::mem::take(&mut self.row);
        let z: Vec<Ranks> = self.control.half(false).map(|m| self.project(arch, &m, &mut row)).collect();
        self.row = row;
        self.head.confidence(self.finish, self.control.half(false).zip(z), &mut self.slots)
    }

    /// The diagonal of the preconditioner.
    fn preconditioner(&self) -> Vec<f32> {
        let gamma = &self.fisher.gamma;
        let mean = gamma.iter().sum::<f32>() / gamma.len() as f32;
        gamma.iter().map(|y| 1.0 / (y + 0.1 * mean)).collect()
    }

    /// Takes from each row of `B` what makes the model surer, or less sure, of ordinary text: that is no
    /// knowledge, and uses up the bound. The shortest way there, in the metric of the preconditioner.
    pub(crate) fn steady(&mut self) {
        let preconditioner = self.preconditioner();
        let n = preconditioner.len();
        for (q, b) in self.confidence.chunks_exact(n).zip(self.head.b.chunks_exact_mut(n)) {
            let (mut over, mut under) = (0.0f64, f64::MIN_POSITIVE);
            for ((q, b), p) in q.iter().zip(&*b).zip(&preconditioner) {
                over += f64::from(q * b);
                under += f64::from(q * q * p);
            }
            let factor = (over / under) as f32;
            b.iter_mut().zip(q).zip(&preconditioner).for_each(|((b, q), p)| *b -= factor * q * p);
        }
    }

    /// The same of the control moments, by the base model.
    pub(crate) fn control_errors(&self) -> Vec<(Vec<(u32, f32)>, f32)> {
        self.control.iter().map(|m| errors(self.finish, &m, &self.head.base(self.finish, &m))).collect()
    }

    /// Chooses `A` and a first `B`, given `∂loss/∂h: (n, n_embd)` of [`HeadLearner::errors`].
    pub(crate) fn choose(&mut self, arch: Arch, g: &[f32], lesson: Lesson) {
        let n = self.head.b.len() / self.head.rank;
        let mut h = vec![0.0; g.len()];
        self.source(lesson).iter().zip(h.chunks_exact_mut(n)).for_each(|(m, h)| arch.f16_to_f32(m.h, h));
        let flipped: Vec<f32>;
        let unwanted = matches!(lesson, Lesson::Answer(a) if a < 0.0);
        let g = if unwanted || lesson == Lesson::Opposite {
            flipped = g.iter().map(|g| -g).collect();
            &flipped[..]
        } else {
            g
        };
        // The bound is judged on the other half: what is fitted to a sample looks better on it than it is.
        let whitening = match self.control.len() {
            0 => Whitening::new(arch, self.recent.half(false), n),
            _ => Whitening::new(arch, self.control.half(false), n),
        };
        let undecided = self.is_undecided();
        self.since_choice = 0;
        let (old_a, old_b) = (std::mem::take(&mut self.head.a), std::mem::take(&mut self.head.b));
        let old = if undecided { (&[][..], &[][..]) } else { (&old_a[..], &old_b[..]) };
        (self.head.a, self.head.b) = directions(arch, &whitening, &self.fisher.gamma, g, &h, old, self.head.rank);
        match lesson {
            Lesson::Chance => {
                let length = arch.dot(&self.head.b, &self.head.b).sqrt();
                self.head.b = random(self.head.b.len(), length, self.n_updates);
            }
            Lesson::Text | Lesson::Opposite | Lesson::Answer(_) => {}
        }
        if !matches!(lesson, Lesson::Answer(_)) {
            self.fresh = 0;
        }
        self.reproject(arch);
    }

    /// To be called after `A` or the control moments have changed.
    pub(crate) fn reproject(&mut self, arch: Arch) {
        let mut row = std::mem::take(&mut self.row);
        let bounded = |m: Moment<'_>| (self.head.base(self.finish, &m), self.project(arch, &m, &mut row));
        self.bounded = self.control.half(true).map(bounded).collect();
        self.row = row;
    }

    /// The gradient of a lesson, by `∂/∂(s·B)`, averaged over its tokens; `None` if there are none.
    pub(crate) fn gradient(&mut self, arch: Arch, rows: &HeadRows, lesson: Lesson) -> Option<Gradient> {
        let (moments, n) = match lesson {
            Lesson::Answer(_) => (&self.answer, self.answer.len()),
            _ => (&self.recent, self.fresh),
        };
        // The oldest that are still fresh.
        let taken = n.min(if matches!(lesson, Lesson::Answer(_)) { n } else { UPDATE_TOKENS });
        if taken == 0 || self.is_undecided() {
            return None;
        }
        let mut row = std::mem::take(&mut self.row);
        let z: Vec<Ranks> = moments.latest(n).take(taken).map(|m| self.project(arch, &m, &mut row)).collect();
        if !matches!(lesson, Lesson::Answer(_)) {
            let tokens: Vec<usize> = moments.latest(n).take(taken).map(|m| m.ids[0] as usize).collect();
            self.evidence.add(self.head.pairing(&tokens, &z));
        }
        let weight = match lesson {
            Lesson::Text | Lesson::Chance => 1.0,
            Lesson::Opposite => -1.0,
            Lesson::Answer(a) if a >= 0.0 => a,
            Lesson::Answer(a) => {
                // NPO: the further the answer has fallen below the base model's, the less it is pushed.
                let change: f64 = moments
                    .latest(n)
                    .zip(&z)
                    .map(|(m, z)| {
                        self.head.loss(self.finish, &m, z, 0.0) - self.head.loss(self.finish, &m, z, self.head.scale)
                    })
                    .sum();
                a * (2.0 / (1.0 + (-self.rates.npo_beta * change).exp())) as f32
            }
        } / taken as f32;
        let parts = moments.latest(n).take(taken).zip(&z).map(|(m, &z)| (m, z, weight));
        let gradient = self.head.gradient(self.finish, rows, parts, &mut self.slots);
        self.row = row;
        self.error_bound = gradient.error_bound;
        Some(gradient)
    }

    /// Takes a step, given the gradient `(rank, n_embd)` that [`HeadLearner::gradient`] prepared.
    pub(crate) fn step(&mut self, lesson: Lesson, gradient: &[f32]) {
        let length = gradient.iter().map(|g| f64::from(g * g)).sum::<f64>().sqrt();
        self.truncation = self.error_bound / length.max(f64::MIN_POSITIVE);
        let by_chance;
        let gradient = if lesson == Lesson::Chance {
            by_chance = random(gradient.len(), length as f32, self.n_updates);
            &by_chance[..]
        } else {
            gradient
        };
        let Rates { decay, consolidation, .. } = self.rates;
        let preconditioner = self.preconditioner();
        let effective: Vec<f32> = self.head.b.iter().map(|b| self.head.scale * b).collect();
        let penalty = self.fisher.penalty_gradient(&self.head.a, &effective);
        for (i, (b, (g, p))) in self.head.b.iter_mut().zip(gradient.iter().zip(&penalty)).enumerate() {
            *b = (1.0 - decay) * *b - preconditioner[i % preconditioner.len()] * (g + consolidation * p);
        }
        self.steady();
        match lesson {
            Lesson::Answer(_) => self.answer.clear(),
            _ => self.fresh -= self.fresh.min(UPDATE_TOKENS),
        }
        self.n_updates += 1;
    }

    /// Mean `KL(base ‖ adapted)` over the control text at a scale; 0 without one.
    pub(crate) fn divergence(&self, scale: f32) -> f64 {
        self.mean_divergence(self.control.half(true), &self.bounded, scale).0
    }

    /// Means of the divergence and of the rise of the loss.
    fn mean_divergence<'a>(
        &self,
        moments: impl Iterator<Item = Moment<'a>>,
        bounded: &[(Adapted, Ranks)],
        scale: f32,
    ) -> (f64, f64) {
        let (mut divergence, mut rise) = (0.0, 0.0);
        for (m, (base, z)) in moments.zip(bounded) {
            let (d, r) = self.head.divergence(self.finish, &m, base, z, scale);
            (divergence, rise) = (divergence + d, rise + r);
        }
        let n = bounded.len().max(1) as f64;
        (divergence / n, rise / n)
    }

    /// Sets the scale: the best length along the direction for recent text, within the bound. To be
    /// called when `W·B` is up to date.
    pub(crate) fn settle(&mut self, arch: Arch, lesson: Lesson) {
        let mut row = std::mem::take(&mut self.row);
        let n = self.recent.len().min(JUDGED);
        let judged: Vec<Ranks> = self.recent.latest(n).map(|m| self.project(arch, &m, &mut row)).collect();
        self.row = row;
        let longest = match self.control.len() {
            0 => {
                let bases = self.recent.latest(n).map(|m| self.head.base(self.finish, &m));
                let bounded: Vec<(Adapted, Ranks)> = bases.zip(judged.iter().copied()).collect();
                let divergence = |scale| self.mean_divergence(self.recent.latest(n), &bounded, scale).0;
                self.longest(BOUND_WITHOUT_CONTROL, divergence)
            }
            // A rise of the loss on control text is worse than a change that is neutral there.
            _ => self.longest(self.rates.max_divergence, |scale| {
                let (divergence, rise) = self.mean_divergence(self.control.half(true), &self.bounded, scale);
                divergence.max(rise)
            }),
        };
        let sign = if lesson == Lesson::Opposite { -1.0 } else { 1.0 };
        let loss = |scale: f32| -> f64 {
            let losses = self.recent.latest(n).zip(&judged).map(|(m, z)| self.head.loss(self.finish, &m, z, scale));
            sign * losses.sum::<f64>()
        };
        self.head.scale = match lesson {
            // A rating says nothing about the length: as long as before, within the bound.
            Lesson::Answer(_) if self.head.scale > 0.0 => self.head.scale.min(longest),
            Lesson::Answer(_) => longest * LENGTHS[LENGTHS.len() / 2],
            // Until text can tell, only ratings take effect; then, nothing that unseen text speaks against.
            Lesson::Text if self.evidence.verdict().is_none() => self.head.scale.min(longest),
            Lesson::Text if self.evidence.verdict() == Some(false) => 0.0,
            _ => {
                let lengths = LENGTHS.map(|share| share * longest);
                let best = lengths.into_iter().chain([0.0]).map(|scale| (loss(scale), scale));
                best.min_by(|x, y| x.0.total_cmp(&y.0)).map_or(0.0, |(_, scale)| scale)
            }
        };
    }

    /// The largest scale whose divergence is within the bound, to a few per cent: found by secants on
    /// the divergence, which grows with about the square of the scale, then by halving.
    fn longest(&self, bound: f64, divergence: impl Fn(f32) -> f64) -> f32 {
        if self.head.wb.iter().all(|&x| x == 0.0) {
            return 0.0;
        }
        let (mut within, mut beyond) = (0.0f32, f32::INFINITY);
        let mut scale = if self.head.scale > 0.0 { self.head.scale } else { 1.0 };
        for _ in 0..24 {
            let found = divergence(scale);
            if found <= bound {
                within = within.max(scale);
                if found > 0.9 * bound {
                    break;
                }
            } else {
                beyond = beyond.min(scale);
            }
            let factor = (0.96 * bound / found.max(1e-12)).sqrt().clamp(0.02, 16.0) as f32;
            let next = scale * if factor.is_finite() { factor } else { 0.1 };
            scale = if next > within && next < beyond {
                next
            } else {
                0.5 * (within + beyond.min(4.0 * within.max(scale)))
            };
        }
        within
    }
}

/// A vector of this length in a direction by chance.
fn random(n: usize, length: f32, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut x: Vec<f32> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
    .take(n)
    .collect();
    let norm = x.iter().map(|x| x * x).sum::<f32>().sqrt();
    x.iter_mut().for_each(|x| *x *= length / norm);
    x
}

/// The base model's error at a moment: of each listed token, and of the rest together.
fn errors(finish: Finish, m: &Moment<'_>, p: &Adapted) -> (Vec<(u32, f32)>, f32) {
    let mut rows = Vec::with_capacity(SLOTS);
    for (i, &id) in m.ids.iter().enumerate().filter(|(_, id)| **id != NO_TOKEN) {
        let came = if i == 0 { 1.0 } else { 0.0 };
        rows.push((id, (p.log_p[i].exp() - came) * p.slope[i]));
    }
    (rows, p.log_rest.exp() * finish.scale)
}
