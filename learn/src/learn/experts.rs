//! The predictors ("experts") of observed text, and their mixture.

use crate::learn::knn::KnnCache;
use crate::learn::mixture::{Bayes, Blend};
use crate::learn::moments::softmax;
use crate::learn::ngram::{Continuations, NgramCache, Sparse, probability};
use ruvllm::arch::Arch;

/// Losses of one or many tokens, in nats.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Losses {
    /// Number of tokens.
    pub n: usize,
    /// Loss of the base model.
    pub base: f64,
    /// Loss with the head adapter.
    pub adapter: f64,
    /// Loss of the base model combined with continuations of the same words.
    pub ngram: f64,
    /// Loss of the base model combined with continuations of similar hidden states.
    pub knn: f64,
    /// Loss of the mixture of all: in total at most `base + ln 2` since learning began.
    pub mixture: f64,
}

impl Losses {
    /// The losses, with their names in files.
    pub(crate) fn by_name(&self) -> [(&'static str, &f64); 5] {
        let Losses {
            base,
            adapter,
            ngram,
            knn,
            mixture,
            ..
        } = self;
        [
            ("learned.losses.base", base),
            ("learned.losses.adapter", adapter),
            ("learned.losses.ngram", ngram),
            ("learned.losses.neighbours", knn),
            ("learned.losses.mixture", mixture),
        ]
    }

    /// The losses, mutable, with their names in files.
    pub(crate) fn by_name_mut(&mut self) -> [(&'static str, &mut f64); 5] {
        let Losses {
            base,
            adapter,
            ngram,
            knn,
            mixture,
            ..
        } = self;
        [
            ("learned.losses.base", base),
            ("learned.losses.adapter", adapter),
            ("learned.losses.ngram", ngram),
            ("learned.losses.neighbours", knn),
            ("learned.losses.mixture", mixture),
        ]
    }
}

impl std::ops::AddAssign for Losses {
    fn add_assign(&mut self, other: Losses) {
        self.n += other.n;
        self.base += other.base;
        self.adapter += other.adapter;
        self.ngram += other.ngram;
        self.knn += other.knn;
        self.mixture += other.mixture;
    }
}

/// Prior weights: base, head adapter, n-gram cache, neighbours, and a mixture of these and a blend
/// of all, in which the best may change.
const PRIOR: [f64; 5] = [0.5, 0.1, 0.1, 0.1, 0.2];
/// Approximate rate at which the best of them changes, per token.
const SWITCH: f64 = 0.002;
/// Kinds of contexts for n-grams: longest match 0, 1, 2, 3, 4–5, 6–8, more; times whether its
/// counts are decisive.
const NGRAM_KINDS: usize = 7 * 2;
/// Kinds of contexts by the similarity of the nearest neighbour.
const KNN_KINDS: usize = 5;

/// All predictors besides the model.
#[derive(Clone, Debug)]
pub(crate) struct Experts {
    pub(crate) ngrams: NgramCache,
    pub(crate) neighbours: KnnCache,
    /// Blend of: base; single words; after one, two, more words.
    pub(crate) ngram_blend: Blend,
    /// Blend of: base; neighbours.
    pub(crate) knn_blend: Blend,
    /// Blend of: adapter; base; single words; after one, two, more words; neighbours.
    pub(crate) all_blend: Blend,
    pub(crate) switching: Bayes,
    pub(crate) bayes: Bayes,
}

/// What the caches predict for the next token.
struct Situation {
    words: Continuations,
    word_kind: usize,
    near: Sparse,
    near_kind: usize,
}

impl Experts {
    pub(crate) fn new(
        n_vocab: usize,
        n_embd: usize,
        cache_tokens: usize,
        neighbours: usize,
    ) -> Experts {
        Experts {
            ngrams: NgramCache::new(n_vocab, cache_tokens),
            neighbours: KnnCache::new(n_embd, neighbours),
            ngram_blend: Blend::new(&[0.8, 0.05, 0.05, 0.05, 0.05], NGRAM_KINDS),
            knn_blend: Blend::new(&[0.85, 0.15], KNN_KINDS),
            all_blend: Blend::new(
                &[0.5, 0.1, 0.05, 0.08, 0.09, 0.09, 0.09],
                NGRAM_KINDS * KNN_KINDS,
            ),
            switching: Bayes::switching(5, SWITCH),
            bayes: Bayes::new(&PRIOR),
        }
    }

    /// The blends, with their names in files.
    pub(crate) fn blends(&self) -> [(&'static str, &Blend); 3] {
        let Experts {
            ngram_blend,
            knn_blend,
            all_blend,
            ..
        } = self;
        [
            ("mixture.ngrams", ngram_blend),
            ("mixture.neighbours", knn_blend),
            ("mixture.all", all_blend),
        ]
    }

    /// The blends, mutable, with their names in files.
    pub(crate) fn blends_mut(&mut self) -> [(&'static str, &mut Blend); 3] {
        let Experts {
            ngram_blend,
            knn_blend,
            all_blend,
            ..
        } = self;
        [
            ("mixture.ngrams", ngram_blend),
            ("mixture.neighbours", knn_blend),
            ("mixture.all", all_blend),
        ]
    }

    fn situation(&mut self, arch: Arch, context: &[u32], h: &[f32]) -> Situation {
        let words = self.ngrams.continuations(context);
        let sure = words.orders.iter().rev().find(|o| !o.is_empty());
        let sure = sure.is_some_and(|o| o.iter().any(|(_, p)| *p > 0.7));
        let length = match words.longest {
            n @ 0..=3 => n,
            4..=5 => 4,
            6..=8 => 5,
            _ => 6,
        };
        let (near, likeness) = self.neighbours.continuations(arch, h);
        let near_kind = ((likeness - 0.5) * 10.0).clamp(0.0, KNN_KINDS as f32 - 1.0) as usize;
        Situation {
            words,
            word_kind: 2 * length + usize::from(sure),
            near,
            near_kind,
        }
    }

    /// Probability of a token by each expert, given those of the model, `base`, and of the adapted
    /// model, `adapted`; and the inputs of the blends: n-grams, neighbours, all. An expert
    /// without evidence gives the model's probability.
    fn parts(
        &self,
        s: &Situation,
        token: u32,
        base: f64,
        adapted: f64,
    ) -> ([f64; 5], [f64; 2], [f64; 7]) {
        let (count, total) = self.ngrams.count(token);
        let word = if total == 0 {
            base
        } else {
            f64::from(count) / total as f64
        };
        let or = |of: &Sparse, model: f64| {
            if of.is_empty() {
                model
            } else {
                probability(of, token)
            }
        };
        let [one, two, more] = [0, 1, 2].map(|i| &s.words.orders[i]);
        (
            [base, word, or(one, base), or(two, base), or(more, base)],
            [base, or(&s.near, base)],
            [
                adapted,
                base,
                word,
                or(one, adapted),
                or(two, adapted),
                or(more, adapted),
                or(&s.near, adapted),
            ],
        )
    }

    fn kinds(s: &Situation) -> [usize; 3] {
        [
            s.word_kind,
            s.near_kind,
            s.word_kind * KNN_KINDS + s.near_kind,
        ]
    }

    /// Scores a token that came after `context` and `h`, given its losses by the model and with the
    /// adapter; then shifts weight to the experts that predicted it.
    pub(crate) fn score(
        &mut self,
        arch: Arch,
        context: &[u32],
        h: &[f32],
        base: f64,
        adapter: f64,
        token: u32,
    ) -> Losses {
        let situation = self.situation(arch, context, h);
        let kinds = Self::kinds(&situation);
        let (words, near, all) = self.parts(&situation, token, (-base).exp(), (-adapter).exp());
        let ngram = self.ngram_blend.loss(kinds[0], &words, 0, base);
        let knn = self.knn_blend.loss(kinds[1], &near, 0, base);
        let blend = self.all_blend.loss(kinds[2], &all, 1, base);
        let switching = self
            .switching
            .learn(&[-base, -adapter, -ngram, -knn, -blend]);
        let mixture = self
            .bayes
            .learn(&[-base, -adapter, -ngram, -knn, -switching]);
        self.ngram_blend.learn(kinds[0], &words);
        self.knn_blend.learn(kinds[1], &near);
        self.all_blend.learn(kinds[2], &all);
        Losses {
            n: 1,
            base,
            adapter,
            ngram,
            knn,
            mixture,
        }
    }

    /// Stores that `token` came after `context` and `h`.
    pub(crate) fn keep(&mut self, arch: Arch, context: &[u32], h: &[f32], token: u32) {
        self.ngrams.observe(context, token);
        self.neighbours.observe(arch, h, token);
    }

    /// Replaces `logits`, those of the adapted model, by logarithms of the mixture's probabilities.
    /// `base` holds the logits of the base model.
    pub(crate) fn mix(
        &mut self,
        arch: Arch,
        context: &[u32],
        h: &[f32],
        base: &[f32],
        logits: &mut [f32],
    ) {
        let situation = self.situation(arch, context, h);
        let [word_kind, near_kind, kind] = Self::kinds(&situation);
        let outer: Vec<f64> = self.bayes.weights().collect();
        // Both layers are linear: their weights multiply.
        let mut weights: Vec<f64> = self.switching.weights().map(|w| outer[4] * w).collect();
        weights
            .iter_mut()
            .zip(&outer[..4])
            .for_each(|(w, outer)| *w += outer);
        let (mut p, mut q) = (Vec::new(), Vec::new());
        softmax(arch, base, &mut p);
        softmax(arch, logits, &mut q);
        for (token, logit) in logits.iter_mut().enumerate() {
            let (base, adapted) = (f64::from(p[token]), f64::from(q[token]));
            let (words, near, all) = self.parts(&situation, token as u32, base, adapted);
            let mixed = weights[0] * base
                + weights[1] * adapted
                + weights[2] * self.ngram_blend.probability(word_kind, &words)
                + weights[3] * self.knn_blend.probability(near_kind, &near)
                + weights[4] * self.all_blend.probability(kind, &all);
            *logit = mixed.max(1e-30).ln() as f32;
        }
    }
}
