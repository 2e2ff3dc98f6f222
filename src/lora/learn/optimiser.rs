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
        self.fresh = (self.fresh + 1).min(self.recent.len());
    }

    fn project(&self, arch: Arch, m: &Moment<'_>, row: &mut Vec<f32>) -> Ranks {
        row.resize(m.h.len(), 0.0);
        arch.f16_to_f32(m.h, row);
        self.head.project(arch, row)
    }

    /// Whether directions have yet to be chosen, by [`HeadLearner::choose`].
    pub(crate) fn is_undecided(&self) -> bool {
        self.head.a.iter().all(|&a| a == 0.0)
    }

    /// Whether there is enough to choose directions from.
    pub(crate) fn can_choose(&self) -> bool {
        self.recent.len() >= FIRST_TOKENS.min(self.recent.capacity())
    }

    /// The moments that directions are chosen from, with the base model's error of each as parts of
    /// `∂loss/∂h = Σ rows·W + rest·mean`.
    pub(crate) fn errors(&self) -> Vec<(Vec<(u32, f32)>, f32)> {
        self.recent.iter().map(|m| errors(self.finish, &m)).collect()
    }

    /// The same of the control moments.
    pub(crate) fn control_errors(&self) -> Vec<(Vec<(u32, f32)>, f32)> {
        self.control.iter().map(|m| errors(self.finish, &m)).collect()
    }

    /// Chooses `A` and a first `B`, given `∂loss/∂h: (n, n_embd)` of [`HeadLearner::errors`].
    pub(crate) fn choose(&mut self, arch: Arch, g: &[f32], lesson: Lesson) {
        let n = self.head.b.len() / self.head.rank;
        let mut h = vec![0.0; g.len()];
        self.recent.iter().zip(h.chunks_exact_mut(n)).for_each(|(m, h)| arch.f16_to_f32(m.h, h));
        // The bound is judged on the other half: what is fitted to a sample looks better on it than it is.
        let whitening = match self.control.len() {
            0 => Whitening::new(arch, self.recent.half(false), n),
            _ => Whitening::new(arch, self.control.half(false), n),
        };
        (self.head.a, self.head.b) = directions(arch, &whitening, &self.fisher.gamma, g, &h, self.head.rank);
        match lesson {
            Lesson::Opposite => self.head.b.iter_mut().for_each(|b| *b = -*b),
            Lesson::Chance => {
                let length = arch.dot(&self.head.b, &self.head.b).sqrt();
                self.head.b = random(self.head.b.len(), length, self.n_updates);
            }
            Lesson::Text | Lesson::Answer(_) => {}
        }
        self.fresh = 0;
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
        let n = self.fisher.gamma.len();
        let mean_gamma = self.fisher.gamma.iter().sum::<f32>() / n as f32;
        let effective: Vec<f32> = self.head.b.iter().map(|b| self.head.scale * b).collect();
        let penalty = self.fisher.penalty_gradient(&self.head.a, &effective);
        for (i, (b, (g, p))) in self.head.b.iter_mut().zip(gradient.iter().zip(&penalty)).enumerate() {
            let preconditioner = 1.0 / (self.fisher.gamma[i % n] + 0.1 * mean_gamma);
            *b = (1.0 - decay) * *b - preconditioner * (g + consolidation * p);
        }
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
fn errors(finish: Finish, m: &Moment<'_>) -> (Vec<(u32, f32)>, f32) {
    let logits: Vec<f32> = m.raw.iter().map(|&raw| finish.logit(raw)).collect();
    let listed = || m.ids.iter().zip(&logits).filter(|(id, _)| **id != NO_TOKEN);
    let max = listed().fold(m.rest, |max, (_, &l)| max.max(l));
    let lse = max + ((m.rest - max).exp() + listed().map(|(_, l)| (l - max).exp()).sum::<f32>()).ln();
    let mut rows = Vec::with_capacity(SLOTS);
    for (i, (&id, &logit)) in listed().enumerate() {
        let came = if i == 0 { 1.0 } else { 0.0 };
        rows.push((id, ((logit - lse).exp() - came) * finish.slope(logit)));
    }
    (rows, (m.rest - lse).exp() * finish.scale)
}
