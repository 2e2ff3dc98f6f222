//! Optimiser of the head adapter: averaged gradients choose the direction, a line search its
//! length, and the bound on forgetting limits it.

use crate::learn::control::{Fisher, UPDATE_TOKENS, Whitening, directions};
use crate::learn::head::{Adapted, Gradient, Head, HeadRows, Ranks, Slots};
use crate::learn::moments::{NO_TOKEN, SLOTS, Sample, Samples, computable, softmax};
use crate::learn::slices::Slices;
use ruvllm::arch::Arch;
use ruvllm::model::LogitTransform;

/// Observed tokens before the first directions are chosen.
const FIRST_TOKENS: usize = 256;
/// Latest tokens on which the step length is evaluated.
const JUDGED: usize = 256;
/// Fraction of older evidence that remains after [`UPDATE_TOKENS`] tokens: half of all is from the
/// latest 34 times as many.
const EVIDENCE_KEPT: f64 = 0.98;
/// Fewest chunks that can be evidence for what was learnt: `n` equal gains sum up to `√n` of their
/// standard errors, so fewer never exceed two.
const LEAST_CHUNKS: u32 = 5;
/// Standard errors that evidence must exceed: the usual two, which chance exceeds about once in 44
/// times.
const LEAST_ERRORS: f64 = 2.0;
/// Step lengths that the line search tries besides zero, relative to the longest.
const LENGTHS: [f32; 8] = [1.0, 0.75, 0.55, 0.4, 0.28, 0.2, 0.1, 0.05];
/// Without control text, bound on the change of predictions of the observed text itself, in nats.
const BOUND_WITHOUT_CONTROL: f64 = 0.1;

/// A prediction error at a moment, as factors of rows of the head, by token, and of their mean.
pub(crate) type ErrorFactors = (Vec<(u32, f32)>, f32);

/// What an update learns from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum TrainingSignal {
    /// Text written by the user.
    Text,
    /// Answers, with the advantage of their rating: above (`> 0`) or below the mean.
    Answer(f32),
    /// For comparison: the text with its gradient negated.
    Opposite,
    /// For comparison: a random direction as long as the gradient.
    Chance,
}

/// Hyper-parameters of the optimiser.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rates {
    /// Bound on the mean `KL(base ‖ adapted)` over the control moments, and on the mean rise of
    /// their loss, in nats.
    pub(crate) max_divergence: f64,
    /// Factor on preconditioned gradients.
    pub(crate) rate: f32,
    /// Fraction of earlier learning that an update forgets.
    pub(crate) decay: f32,
    /// Weight of the consolidation penalty.
    pub(crate) consolidation: f32,
    /// `β` of negative preference optimisation (arXiv 2404.05868).
    pub(crate) npo_beta: f64,
}

/// Head adapter with the state of its optimiser.
#[derive(Clone, Debug)]
pub(crate) struct HeadLearner {
    pub(crate) head: Head,
    pub(crate) fisher: Fisher,
    pub(crate) control: Samples,
    pub(crate) recent: Samples,
    pub(crate) answer: Samples,
    /// Number of moments in `recent` that are not learnt from yet.
    pub(crate) fresh: usize,
    pub(crate) rates: Rates,
    /// Strength as learnt, and the bound within which it was.
    pub(crate) learnt: (f32, f64),
    pub(crate) transform: LogitTransform,
    pub(crate) n_updates: u64,
    /// Upper bound of the fraction of the last gradient that truncation left out.
    pub(crate) truncation: f64,
    error_bound: f64,
    /// Base prediction and `A·h` of the moments on which the bound is checked.
    bounded: Vec<(Adapted, Ranks)>,
    slots: Slots,
    row: Vec<f32>,
    /// `(rank, n_embd)`: the gradient of the model's confidence on ordinary text with respect to
    /// `B`.
    pub(crate) confidence: Vec<f32>,
    /// Number of tokens observed since directions were chosen.
    pub(crate) since_choice: usize,
    pub(crate) evidence: Evidence,
    /// Whether a rating is part of what was learnt.
    pub(crate) rated: bool,
}

/// Evidence that what was learnt predicts which token comes where, from tokens not learnt yet:
/// whether each gets more weight than the other tokens of its chunk would get in its place. What
/// any text teaches, such as less confidence or token frequencies, gains nothing by this measure; a
/// text in random order gains nothing at all, whatever was learnt from it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Evidence {
    pub(crate) sum: f64,
    pub(crate) squares: f64,
    pub(crate) chunks: u32,
}

impl Evidence {
    /// Adds the gain of a chunk of `n` tokens; older gains fade.
    pub(crate) fn add(&mut self, gain: f64, n: usize) {
        // A gain of exactly 0 is that of identical tokens, which have no order.
        if gain.is_finite() && gain != 0.0 {
            let kept = EVIDENCE_KEPT.powf(n as f64 / UPDATE_TOKENS as f64);
            self.sum = kept * self.sum + gain;
            self.squares = kept * kept * self.squares + gain * gain;
            self.chunks = self.chunks.saturating_add(1);
        }
    }

    /// Whether the evidence is sufficient; `None` while it is too early to tell. If order means
    /// nothing, sums of chunks are independent.
    pub(crate) fn verdict(&self) -> Option<bool> {
        (self.chunks >= LEAST_CHUNKS).then(|| self.sum > LEAST_ERRORS * self.squares.sqrt())
    }
}

impl HeadLearner {
    pub(crate) fn new(
        rank: usize,
        n_embd: usize,
        n_vocab: usize,
        transform: LogitTransform,
        rates: Rates,
        sizes: [usize; 3],
    ) -> Self {
        let [control, recent, answer] = sizes.map(|n| Samples::new(n_embd, n));
        HeadLearner {
            head: Head::new(rank, n_embd, n_vocab),
            fisher: Fisher::new(n_embd),
            control,
            recent,
            answer,
            fresh: 0,
            rates,
            learnt: (0.0, rates.max_divergence),
            transform,
            n_updates: 0,
            truncation: 0.0,
            error_bound: 0.0,
            bounded: Vec::new(),
            slots: Slots::default(),
            row: Vec::new(),
            confidence: Vec::new(),
            since_choice: 0,
            evidence: Evidence::default(),
            rated: false,
        }
    }

    /// Loss of `token` by the adapted model; that of the base model while the adapter is idle, or
    /// if values from a file overflow.
    pub(crate) fn loss(
        &self,
        arch: Arch,
        h: &[f32],
        raw: &[f32],
        base_loss: f64,
        token: u32,
        p: &mut Vec<f32>,
        logits: &mut Vec<f32>,
    ) -> f64 {
        if self.head.is_idle() {
            return base_loss;
        }
        let loss = self.exact_loss(arch, h, raw, token, p, logits);
        if loss.is_finite() { loss } else { base_loss }
    }

    /// Loss of `token` by the adapted model over the whole vocabulary; leaves the probabilities in
    /// `p` and the logits in `logits`.
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
        self.transform.row(logits);
        let lse = softmax(arch, logits, p);
        lse - f64::from(logits[token as usize])
    }

    /// Stores an observed moment for the next update.
    pub(crate) fn observed(
        &mut self,
        arch: Arch,
        h: &[f32],
        raw: &[f32],
        p: &[f32],
        lse: f64,
        token: u32,
    ) {
        if self
            .recent
            .push(arch, self.transform, h, raw, p, lse, token)
        {
            self.since_choice = self.since_choice.saturating_add(1);
            self.fresh = (self.fresh + 1).min(self.recent.len());
        }
    }

    fn project(&self, arch: Arch, m: &Sample<'_>, row: &mut Vec<f32>) -> Ranks {
        row.resize(m.h.len(), 0.0);
        arch.f16_to_f32(m.h, row);
        self.head.project(arch, row)
    }

    pub(crate) fn is_undecided(&self) -> bool {
        self.head.a.iter().all(|&a| a == 0.0)
    }

    /// Whether directions should be chosen: when there are enough tokens for it, and again when all
    /// of these have been replaced.
    pub(crate) fn is_due(&self) -> bool {
        if self.is_undecided() {
            self.recent.len() >= FIRST_TOKENS.min(self.recent.capacity())
        } else {
            self.since_choice >= self.recent.capacity()
        }
    }

    /// Moments from which a lesson's directions are chosen.
    fn source(&self, lesson: TrainingSignal) -> &Samples {
        if matches!(lesson, TrainingSignal::Answer(_)) {
            &self.answer
        } else {
            &self.recent
        }
    }

    /// The adapted model's prediction error at each moment of a lesson's source, as factors of
    /// `∂loss/∂h = Σ rows·W + rest·mean`. `None` if `slices` gave up.
    pub(crate) fn errors(
        &self,
        arch: Arch,
        lesson: TrainingSignal,
        slices: &mut Slices<'_>,
    ) -> Option<Vec<ErrorFactors>> {
        let mut row = Vec::new();
        let of = |m: Sample<'_>| {
            slices.tick()?;
            let z = self.project(arch, &m, &mut row);
            Some(errors(
                self.transform,
                &m,
                &self.head.adapted(self.transform, &m, &z, self.head.scale),
            ))
        };
        self.source(lesson).iter().map(of).collect()
    }

    /// Confidence gradient over the control text; combined with the head's rows it becomes
    /// [`HeadLearner::confidence`].
    pub(crate) fn surer(&mut self, arch: Arch, slices: &mut Slices<'_>) -> Gradient {
        let (mut row, mut slots) = (
            std::mem::take(&mut self.row),
            std::mem::take(&mut self.slots),
        );
        let each = self.control.half(false).map(|m| {
            slices.tick();
            let z = self.project(arch, &m, &mut row);
            (m, z)
        });
        let gradient = self.head.confidence(self.transform, each, &mut slots);
        (self.row, self.slots) = (row, slots);
        gradient
    }

    /// Removes from each row of `B` the component that changes the model's confidence on ordinary
    /// text: that is no knowledge, and uses up the bound. Takes the shortest way in the metric
    /// of the preconditioner.
    pub(crate) fn steady(&mut self) {
        let old = self.head.b.clone();
        let preconditioner = self.fisher.preconditioner();
        let n = preconditioner.len();
        for (q, b) in self
            .confidence
            .chunks_exact(n)
            .zip(self.head.b.chunks_exact_mut(n))
        {
            let (mut over, mut under) = (0.0f64, f64::MIN_POSITIVE);
            let product = |x: &f32, y: &f32| f64::from(*x) * f64::from(*y);
            for ((q, b), p) in q.iter().zip(&*b).zip(&preconditioner) {
                over += product(q, b);
                under += f64::from(*q) * product(q, p);
            }
            let factor = over / under;
            b.iter_mut()
                .zip(q)
                .zip(&preconditioner)
                .for_each(|((b, q), p)| *b -= (factor * product(q, p)) as f32);
        }
        if !computable(&self.head.b) {
            self.head.b = old;
        }
    }

    /// The base model's prediction error at each control moment, in the form of
    /// [`HeadLearner::errors`].
    pub(crate) fn control_errors(&self) -> Vec<ErrorFactors> {
        self.control
            .iter()
            .map(|m| errors(self.transform, &m, &self.head.base(self.transform, &m)))
            .collect()
    }

    /// Chooses `A`, and an initial `B`, for a lesson and what was learnt before; `g` is the
    /// `∂loss/∂h: (n, n_embd)` of [`HeadLearner::errors`]. `None` if `slices` gave up; nothing
    /// is changed then.
    pub(crate) fn choose(
        &mut self,
        arch: Arch,
        g: &[f32],
        lesson: TrainingSignal,
        slices: &mut Slices<'_>,
    ) -> Option<()> {
        let n = self.head.b.len() / self.head.rank;
        let mut h = vec![0.0; g.len()];
        self.source(lesson)
            .iter()
            .zip(h.chunks_exact_mut(n))
            .for_each(|(m, h)| arch.f16_to_f32(m.h, h));
        let flipped: Vec<f32>;
        let unwanted = matches!(lesson, TrainingSignal::Answer(a) if a < 0.0);
        let g = if unwanted || lesson == TrainingSignal::Opposite {
            flipped = g.iter().map(|g| -g).collect();
            &flipped[..]
        } else {
            g
        };
        // The bound is checked on the other half: on the sample that it was fitted to, the adapter
        // would look better than it is.
        let whitening = match self.control.len() {
            0 => Whitening::new(arch, self.recent.half(false), n, slices)?,
            _ => Whitening::new(arch, self.control.half(false), n, slices)?,
        };
        let undecided = self.is_undecided();
        let old = if undecided {
            (&[][..], &[][..])
        } else {
            (&self.head.a[..], &self.head.b[..])
        };
        let rank = self.head.rank;
        let preconditioner = self.fisher.preconditioner();
        let mut chosen = (vec![0.0; rank * n], vec![0.0; rank * n]);
        // If the earlier directions cannot be continued, they are dropped.
        for old in [old, (&[][..], &[][..])] {
            let (a, b) = directions(arch, &whitening, &preconditioner, g, &h, old, rank, slices)?;
            if computable(&a) && computable(&b) {
                chosen = (a, b);
                break;
            }
        }
        (self.head.a, self.head.b) = chosen;
        self.since_choice = 0;
        match lesson {
            TrainingSignal::Chance => {
                let length = arch.dot(&self.head.b, &self.head.b).sqrt();
                self.head.b = random(self.head.b.len(), length, self.n_updates);
            }
            TrainingSignal::Text | TrainingSignal::Opposite | TrainingSignal::Answer(_) => {}
        }
        if !matches!(lesson, TrainingSignal::Answer(_)) {
            self.fresh = 0;
        }
        self.reproject(arch, slices);
        Some(())
    }

    /// Updates `A·h`; to be called after `A` or the control moments have changed.
    pub(crate) fn reproject(&mut self, arch: Arch, slices: &mut Slices<'_>) {
        let mut row = std::mem::take(&mut self.row);
        let bounded = |m: Sample<'_>| {
            slices.tick();
            (
                self.head.base(self.transform, &m),
                self.project(arch, &m, &mut row),
            )
        };
        self.bounded = self.control.half(true).map(bounded).collect();
        self.row = row;
    }

    /// Gradient of a lesson with respect to `s·B`, averaged over its tokens; `None` if there are
    /// none.
    pub(crate) fn gradient(
        &mut self,
        arch: Arch,
        rows: &HeadRows,
        lesson: TrainingSignal,
    ) -> Option<Gradient> {
        let (moments, n, least, most) = match lesson {
            TrainingSignal::Answer(_) => (&self.answer, self.answer.len(), 1, self.answer.len()),
            // A single token has no order, so there could be no evidence for it: it waits for the
            // next.
            _ => (&self.recent, self.fresh, 2, UPDATE_TOKENS),
        };
        // The oldest moments not learnt from yet.
        let taken = n.min(most);
        if taken < least || self.is_undecided() {
            return None;
        }
        let mut row = std::mem::take(&mut self.row);
        let z: Vec<Ranks> = moments
            .latest(n)
            .take(taken)
            .map(|m| self.project(arch, &m, &mut row))
            .collect();
        if !matches!(lesson, TrainingSignal::Answer(_)) {
            let tokens: Vec<usize> = moments
                .latest(n)
                .take(taken)
                .map(|m| m.ids[0] as usize)
                .collect();
            self.evidence.add(self.head.pairing(&tokens, &z), taken);
        }
        let weight = match lesson {
            TrainingSignal::Text | TrainingSignal::Chance => 1.0,
            TrainingSignal::Opposite => -1.0,
            TrainingSignal::Answer(a) if a >= 0.0 => a,
            TrainingSignal::Answer(a) => {
                // NPO: the further the answer has fallen below the base model, the less it is
                // pushed.
                let change: f64 = moments
                    .latest(n)
                    .zip(&z)
                    .map(|(m, z)| {
                        self.head.loss(self.transform, &m, z, 0.0)
                            - self.head.loss(self.transform, &m, z, self.head.scale)
                    })
                    .sum();
                a * (2.0 / (1.0 + (-self.rates.npo_beta * change).exp())) as f32
            }
        } / taken as f32;
        let parts = moments
            .latest(n)
            .take(taken)
            .zip(&z)
            .map(|(m, &z)| (m, z, weight));
        let gradient = self
            .head
            .gradient(self.transform, rows, parts, &mut self.slots);
        self.row = row;
        self.error_bound = gradient.error_bound;
        Some(gradient)
    }

    /// Takes a step along the gradient `(rank, n_embd)`, computed from [`HeadLearner::gradient`].
    pub(crate) fn step(&mut self, lesson: TrainingSignal, gradient: &[f32]) {
        let length = gradient
            .iter()
            .map(|g| f64::from(g * g))
            .sum::<f64>()
            .sqrt();
        self.truncation = self.error_bound / length.max(f64::MIN_POSITIVE);
        let by_chance;
        let gradient = if lesson == TrainingSignal::Chance {
            by_chance = random(gradient.len(), length as f32, self.n_updates);
            &by_chance[..]
        } else {
            gradient
        };
        let Rates {
            rate,
            decay,
            consolidation,
            ..
        } = self.rates;
        let preconditioner = self.fisher.preconditioner();
        let old = self.head.b.clone();
        let effective: Vec<f32> = self.head.b.iter().map(|b| self.head.scale * b).collect();
        let penalty = self.fisher.penalty_gradient(&self.head.a, &effective);
        for (i, (b, (g, p))) in self
            .head
            .b
            .iter_mut()
            .zip(gradient.iter().zip(&penalty))
            .enumerate()
        {
            *b = (1.0 - decay) * *b
                - rate * preconditioner[i % preconditioner.len()] * (g + consolidation * p);
        }
        if !computable(&self.head.b) {
            self.head.b = old;
        }
        self.steady();
        match lesson {
            TrainingSignal::Answer(_) => {
                self.answer.clear();
                self.rated = true;
            }
            _ => self.fresh -= self.fresh.min(UPDATE_TOKENS),
        }
        self.n_updates = self.n_updates.saturating_add(1);
    }

    /// Mean `KL(base ‖ adapted)` over the control text at a scale; 0 without one.
    pub(crate) fn divergence(&self, scale: f32) -> f64 {
        if scale == 0.0 || self.bounded.is_empty() {
            return 0.0;
        }
        self.mean_divergence(
            self.control.half(true),
            &self.bounded,
            scale,
            &mut Slices::whole(),
        )
        .0
    }

    /// Means of the divergence and of the rise of the loss; infinite if there are no moments or
    /// numbers overflow, so that no bound holds.
    fn mean_divergence<'a>(
        &self,
        moments: impl Iterator<Item = Sample<'a>>,
        bounded: &[(Adapted, Ranks)],
        scale: f32,
        slices: &mut Slices<'_>,
    ) -> (f64, f64) {
        let (mut divergence, mut rise) = (0.0, 0.0);
        for (m, (base, z)) in moments.zip(bounded) {
            slices.tick();
            let (d, r) = self.head.divergence(self.transform, &m, base, z, scale);
            (divergence, rise) = (divergence + d, rise + r);
        }
        if bounded.is_empty() || !(divergence + rise).is_finite() {
            return (f64::INFINITY, f64::INFINITY);
        }
        let n = bounded.len() as f64;
        (divergence / n, rise / n)
    }

    /// Sets the scale: the best step length for recent text, within the bound. To be called when
    /// `W·B` is up to date.
    pub(crate) fn settle(&mut self, arch: Arch, lesson: TrainingSignal, slices: &mut Slices<'_>) {
        let judged = self.judged(arch, slices);
        let longest = self.longest(&judged, slices);
        let sign = if lesson == TrainingSignal::Opposite {
            -1.0
        } else {
            1.0
        };
        let mut loss = |scale: f32| -> f64 {
            let moments = self.recent.latest(JUDGED).zip(&judged);
            let losses = moments.map(|(m, z)| {
                slices.tick();
                self.head.loss(self.transform, &m, z, scale)
            });
            sign * losses.sum::<f64>()
        };
        let kept = self.head.scale.min(longest);
        self.head.scale = match (lesson, self.evidence.verdict()) {
            // A rating gives no step length: the previous one is kept, within the bound.
            (TrainingSignal::Answer(_), _) if self.head.scale > 0.0 => kept,
            (TrainingSignal::Answer(_), _) => longest * LENGTHS[LENGTHS.len() / 2],
            // Until there is evidence from text, only ratings take effect.
            (TrainingSignal::Text, None) => kept,
            // Evidence against what was learnt disables it, unless a rating is part of it, which
            // text cannot judge.
            (TrainingSignal::Text, Some(false)) if self.rated => kept,
            (TrainingSignal::Text, Some(false)) => 0.0,
            _ => {
                let lengths = LENGTHS.map(|share| share * longest);
                let none = (!self.rated).then_some(0.0);
                let best = lengths
                    .into_iter()
                    .chain(none)
                    .map(|scale| (loss(scale), scale));
                // What is no number is no gain.
                best.filter(|(loss, _)| !loss.is_nan())
                    .min_by(|x, y| x.0.total_cmp(&y.0))
                    .map_or(0.0, |(_, scale)| scale)
            }
        };
        self.keep();
    }

    /// Makes the scale the one that was learnt.
    pub(crate) fn keep(&mut self) {
        self.learnt = (self.head.scale, self.rates.max_divergence);
    }

    /// Sets the bound, and the scale to as much of what was learnt as fits: the divergence grows
    /// with the square of the scale, as long as it is small; where it is more,
    /// [`HeadLearner::limit`] reduces the scale.
    pub(crate) fn share(&mut self, bound: f64) {
        let (scale, of) = self.learnt;
        let factor = if bound == of {
            1.0
        } else {
            (bound / of).sqrt() as f32
        };
        self.head.scale = if factor.is_finite() {
            factor * scale
        } else {
            0.0
        };
        self.rates.max_divergence = bound;
    }

    /// Reduces the scale to the bound. To be called when `W·B` is up to date.
    pub(crate) fn limit(&mut self, arch: Arch, slices: &mut Slices<'_>) {
        let judged = self.judged(arch, slices);
        self.head.scale = self.head.scale.min(self.longest(&judged, slices));
    }

    /// `A·h` of the latest observed moments.
    fn judged(&mut self, arch: Arch, slices: &mut Slices<'_>) -> Vec<Ranks> {
        let mut row = std::mem::take(&mut self.row);
        let project = |m: Sample<'_>| {
            slices.tick();
            self.project(arch, &m, &mut row)
        };
        let judged = self.recent.latest(JUDGED).map(project).collect();
        self.row = row;
        judged
    }

    /// The largest scale within the bound on forgetting.
    fn longest(&self, judged: &[Ranks], slices: &mut Slices<'_>) -> f32 {
        if self.control.len() == 0 {
            let bases = self
                .recent
                .latest(JUDGED)
                .map(|m| self.head.base(self.transform, &m));
            let bounded: Vec<(Adapted, Ranks)> = bases.zip(judged.iter().copied()).collect();
            let divergence = |scale| {
                self.mean_divergence(self.recent.latest(JUDGED), &bounded, scale, slices)
                    .0
            };
            return self.longest_within(BOUND_WITHOUT_CONTROL, divergence);
        }
        // Also bounds the rise of the loss on control text, which is worse than a neutral change of
        // the same size.
        self.longest_within(self.rates.max_divergence, |scale| {
            let (divergence, rise) =
                self.mean_divergence(self.control.half(true), &self.bounded, scale, slices);
            divergence.max(rise)
        })
    }

    /// The largest scale whose divergence is within the bound, to a few per cent: found by the
    /// secant method on the divergence, which grows with about the square of the scale, then by
    /// bisection.
    fn longest_within(&self, bound: f64, mut divergence: impl FnMut(f32) -> f64) -> f32 {
        if self.head.wb.iter().all(|&x| x == 0.0) {
            return 0.0;
        }
        let (mut within, mut beyond) = (0.0f32, f32::INFINITY);
        let mut scale = if self.head.scale > 0.0 {
            self.head.scale
        } else {
            1.0
        };
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

/// Random vector of this length.
pub(crate) fn random(n: usize, length: f32, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut x: Vec<f32> = std::iter::repeat_with(|| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
    .take(n)
    .collect();
    let norm = x.iter().map(|x| x * x).sum::<f32>().sqrt();
    x.iter_mut()
        .for_each(|x| *x *= length / norm.max(f32::MIN_POSITIVE));
    x
}

/// Error of predictions `p` at a moment: of each listed token, and of the rest together.
fn errors(transform: LogitTransform, m: &Sample<'_>, p: &Adapted) -> ErrorFactors {
    let mut rows = Vec::with_capacity(SLOTS);
    for (i, &id) in m.ids.iter().enumerate().filter(|(_, id)| **id != NO_TOKEN) {
        let came = if i == 0 { 1.0 } else { 0.0 };
        rows.push((id, (p.log_p[i].exp() - came) * p.slope[i]));
    }
    (rows, p.log_rest.exp() * transform.scale)
}
