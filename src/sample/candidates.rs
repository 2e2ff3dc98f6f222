//! Candidate tokens, and the three operations that every filter is made of: softmax, an ordered
//! prefix, and dropping.

use crate::sample::mask::is_set;
use std::cmp::Ordering;

/// Logits that are compared with the worst of the best before any is looked at alone.
const LOGITS: usize = 64;

/// One token that may still be chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    /// The token id: its index in the logits.
    pub(super) id: u32,
    /// The logit, as changed by the filters that ran so far. Never NaN.
    pub(super) logit: f32,
    /// The probability among the candidates; valid right after `softmax`.
    pub(super) p: f32,
}

impl Candidate {
    /// Best first: by descending logit, equal logits by ascending id. A total order, so that
    /// every sort and selection below gives the same result however it is computed.
    fn best_first(a: &Self, b: &Self) -> Ordering {
        b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
    }
}

/// The tokens that may still be chosen. Starts as the vocabulary; filters shrink it and change
/// its logits. The buffer is reused, so that sampling allocates nothing after the first token.
#[derive(Debug, Clone, Default)]
pub(super) struct Candidates {
    items: Vec<Candidate>,
    /// `items` is in [`Candidate::best_first`] order.
    sorted: bool,
}

impl Candidates {
    /// Starts over from `logits` plus the additive `bias` (token, value).
    ///
    /// A token whose logit is NaN or −∞ cannot be chosen and is left out; the ids in `bias` must
    /// be inside the vocabulary.
    pub(super) fn load(&mut self, logits: &[f32], bias: &[(u32, f32)]) {
        self.sorted = false;
        self.items.clear();
        // `+ 0.0` turns −0 into +0, which the total order would otherwise tell apart.
        self.items
            .extend(logits.iter().zip(0..).map(|(&logit, id)| Candidate {
                id,
                logit: logit + 0.0,
                p: 0.0,
            }));
        for &(id, value) in bias {
            self.items[id as usize].logit += value;
        }
        let possible = |c: &Candidate| c.logit > f32::NEG_INFINITY;
        if !self.items.iter().all(possible) {
            self.items.retain(possible);
        }
    }

    /// As [`Self::load`] without a bias and [`Self::keep_best`], in one pass over the logits, of which
    /// it writes none: of those that `allowed` has, if it is given.
    pub(super) fn load_best(&mut self, logits: &[f32], k: usize, allowed: Option<&[u32]>) {
        self.sorted = true;
        self.items.clear();
        if k == 0 {
            return;
        }
        self.sorted = false;
        let limit = (2 * k).max(64);
        // Greater logits may be among the best: those equal to the bar have a greater id than its
        // candidate. NaN and −∞ are greater than none.
        let mut bar = f32::NEG_INFINITY;
        for (part, id) in logits.chunks(LOGITS).zip((0..).step_by(LOGITS)) {
            if !part.iter().fold(false, |any, &logit| any | (logit > bar)) {
                continue;
            }
            for (&logit, id) in part.iter().zip(id..) {
                if logit > bar && allowed.is_none_or(|words| is_set(words, id)) {
                    self.items.push(Candidate {
                        id,
                        logit: logit + 0.0,
                        p: 0.0,
                    });
                    if self.items.len() == limit {
                        let (_, last, _) = self
                            .items
                            .select_nth_unstable_by(k - 1, Candidate::best_first);
                        bar = last.logit;
                        self.items.truncate(k);
                    }
                }
            }
        }
        self.sort();
        self.items.truncate(k);
    }

    /// The candidates, in unspecified order.
    pub(super) fn as_slice(&self) -> &[Candidate] {
        &self.items
    }

    /// Number of candidates left.
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether nothing is left to choose from.
    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// The best candidate; among equals the one with the smallest id.
    pub(super) fn best(&self) -> Option<Candidate> {
        if self.sorted {
            return self.items.first().copied();
        }
        self.items.iter().copied().min_by(Candidate::best_first)
    }

    /// Calls `f` on every candidate, to change its logit.
    pub(super) fn update(&mut self, mut f: impl FnMut(&mut Candidate)) {
        self.items.iter_mut().for_each(&mut f);
        self.sorted = false;
    }

    /// `logit /= t` with `t > 0`, which keeps the order. If that would overflow, the logits are
    /// made relative to the best one first, which gives the same probabilities.
    pub(super) fn divide(&mut self, t: f32) {
        if self.items.iter().any(|c| (c.logit / t).is_infinite())
            && let Some(best) = self.best().filter(|best| best.logit.is_finite())
        {
            self.items.iter_mut().for_each(|c| c.logit -= best.logit);
        }
        self.items.iter_mut().for_each(|c| c.logit /= t);
    }

    /// Keeps the candidates for which `keep` holds, in their order.
    pub(super) fn retain(&mut self, keep: impl FnMut(&Candidate) -> bool) {
        self.items.retain(keep);
    }

    /// Keeps candidates with at least this logit.
    pub(super) fn retain_logit(&mut self, min: f32) {
        if self.sorted {
            let n = self.items.partition_point(|c| c.logit >= min);
            self.items.truncate(n);
        } else {
            self.items.retain(|c| c.logit >= min);
        }
    }

    /// `p_i = exp(l_i − l_max) / Σ_j exp(l_j − l_max)`, summed in f64.
    ///
    /// Candidates at the maximum weigh exactly 1, so that infinite logits are defined, too: they
    /// share all of the probability.
    pub(super) fn softmax(&mut self) {
        let Some(best) = self.best() else { return };
        let mut sum = 0.0f64;
        for c in &mut self.items {
            c.p = if c.logit == best.logit {
                1.0
            } else {
                (c.logit - best.logit).exp()
            };
            sum += f64::from(c.p);
        }
        for c in &mut self.items {
            c.p = (f64::from(c.p) / sum) as f32;
        }
    }

    /// Shannon entropy `−Σ p ln p` in nats; needs [`Self::softmax`].
    pub(super) fn entropy(&self) -> f32 {
        let terms = self
            .items
            .iter()
            .filter(|c| c.p > 0.0)
            .map(|c| f64::from(c.p));
        -terms.map(|p| p * p.ln()).sum::<f64>() as f32
    }

    /// Sorts best first.
    pub(super) fn sort(&mut self) {
        if !self.sorted {
            self.items.sort_unstable_by(Candidate::best_first);
            self.sorted = true;
        }
    }

    /// Keeps the `k` best (all if there are fewer), sorted.
    ///
    /// One pass: every candidate better than the k-th best so far is appended to a small front
    /// buffer, which is cut back to `k` whenever it has doubled. For a whole vocabulary this is
    /// little more than a comparison per token, where a full sort is `n log n`.
    pub(super) fn keep_best(&mut self, k: usize) {
        if k < self.items.len() && !self.sorted {
            let limit = (2 * k).max(64).min(self.items.len());
            let mut kept = 0;
            let mut bar: Option<Candidate> = None;
            for i in 0..self.items.len() {
                let c = self.items[i];
                if bar.is_some_and(|bar| Candidate::best_first(&bar, &c) != Ordering::Greater) {
                    continue;
                }
                self.items[kept] = c;
                kept += 1;
                if kept == limit && k > 0 {
                    let front = &mut self.items[..kept];
                    bar = Some(*front.select_nth_unstable_by(k - 1, Candidate::best_first).1);
                    kept = k;
                }
            }
            self.items.truncate(kept);
        }
        self.sort();
        self.items.truncate(k);
    }

    /// Drops the `n` best of sorted candidates.
    pub(super) fn drop_best(&mut self, n: usize) {
        debug_assert!(self.sorted);
        self.items.drain(..n);
    }

    /// Keeps the shortest prefix in `order` whose probabilities reach the target: `reached` is
    /// called with the running sum after each candidate. Needs [`Self::softmax`].
    ///
    /// Sorts only as many candidates as necessary.
    pub(super) fn keep_mass(
        &mut self,
        order: impl Fn(&Candidate, &Candidate) -> Ordering,
        reached: impl Fn(f64) -> bool,
    ) {
        let n = self.items.len();
        let (mut done, mut sum) = (0, 0.0f64);
        let mut step = 256;
        while done < n {
            let rest = &mut self.items[done..];
            let part = step.min(rest.len());
            if part < rest.len() {
                rest.select_nth_unstable_by(part - 1, &order);
            }
            rest[..part].sort_unstable_by(&order);
            for i in done..done + part {
                sum += f64::from(self.items[i].p);
                if reached(sum) {
                    self.items.truncate(i + 1);
                    return;
                }
            }
            done += part;
            step *= 8;
        }
    }

    /// [`Self::keep_mass`] from the most probable down; leaves the candidates sorted.
    pub(super) fn keep_best_mass(&mut self, reached: impl Fn(f64) -> bool) {
        if self.sorted {
            let mut sum = 0.0;
            let end = self.items.iter().position(|c| {
                sum += f64::from(c.p);
                reached(sum)
            });
            self.items.truncate(end.map_or(self.items.len(), |i| i + 1));
        } else {
            self.keep_mass(Candidate::best_first, reached);
            self.sorted = true;
        }
    }

    /// [`Self::keep_mass`] in ascending order of `score`; leaves the candidates unsorted.
    pub(super) fn keep_scored_mass(
        &mut self,
        score: impl Fn(&Candidate) -> f32,
        reached: impl Fn(f64) -> bool,
    ) {
        let order = |a: &Candidate, b: &Candidate| {
            score(a)
                .total_cmp(&score(b))
                .then_with(|| Candidate::best_first(a, b))
        };
        self.keep_mass(order, reached);
        self.sorted = false;
    }
}

/// A number per token id, cheap to clear: counts for filters that look at the history.
#[derive(Debug, Clone, Default)]
pub(super) struct TokenTable {
    values: Vec<u32>,
    touched: Vec<u32>,
}

impl TokenTable {
    /// Sets all numbers to zero, for ids below `n_vocab`.
    pub(super) fn clear(&mut self, n_vocab: usize) {
        for id in self.touched.drain(..) {
            self.values[id as usize] = 0;
        }
        self.values.resize(n_vocab.max(self.values.len()), 0);
    }

    /// The number of this token.
    pub(super) fn at(&self, id: u32) -> u32 {
        self.values[id as usize]
    }

    /// Updates the number of a token; ids outside the vocabulary are ignored.
    pub(super) fn update(&mut self, id: u32, f: impl Fn(u32) -> u32) {
        if let Some(v) = self.values.get_mut(id as usize) {
            if *v == 0 {
                self.touched.push(id);
            }
            *v = f(*v);
        }
    }

    /// Whether every number is zero.
    pub(super) fn is_empty(&self) -> bool {
        self.touched.is_empty()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use crate::sample::candidates::*;
    use proptest::prelude::*;

    pub(crate) fn candidates(logits: &[f32]) -> Candidates {
        let mut c = Candidates::default();
        c.load(logits, &[]);
        c
    }

    /// Ids in ascending order: the set that a filter kept.
    pub(crate) fn ids(c: &Candidates) -> Vec<u32> {
        let mut ids: Vec<u32> = c.items.iter().map(|c| c.id).collect();
        ids.sort_unstable();
        ids
    }

    #[test]
    fn impossible_tokens_are_left_out() {
        let c = candidates(&[f32::NAN, 1.0, f32::NEG_INFINITY, f32::INFINITY, -0.0]);
        assert_eq!(ids(&c), [1, 3, 4]);
        assert_eq!(c.best().map(|c| c.id), Some(3));
    }

    #[test]
    fn infinite_logits_share_the_probability() {
        let mut c = candidates(&[f32::INFINITY, 3.0, f32::INFINITY]);
        c.softmax();
        assert_eq!(
            c.items.iter().map(|c| c.p).collect::<Vec<_>>(),
            [0.5, 0.0, 0.5]
        );
    }

    #[test]
    fn softmax_by_hand() {
        let mut c = candidates(&[0.0, 2f32.ln(), 5f32.ln()]);
        c.softmax();
        // Each p is two roundings away from the exact 1/8, 2/8, 5/8, and the logits one more.
        for (c, p) in c.items.iter().zip([0.125, 0.25, 0.625]) {
            assert!((c.p - p).abs() <= 4.0 * f32::EPSILON, "{} {p}", c.p);
        }
    }

    #[test]
    fn uniform_entropy_is_ln_n() {
        let mut c = candidates(&[1.5; 64]);
        c.softmax();
        assert!((c.entropy() - 64f32.ln()).abs() <= 2.0 * f32::EPSILON * 64f32.ln());
    }

    #[test]
    fn the_table_forgets() {
        let mut t = TokenTable::default();
        t.clear(4);
        t.update(2, |n| n + 1);
        t.update(9, |n| n + 1);
        assert_eq!((t.at(2), t.at(3)), (1, 0));
        t.clear(4);
        assert!(t.is_empty() && t.at(2) == 0);
    }

    proptest! {
        // Few distinct values, so that ties at every cut are common.
        #[test]
        fn keep_best_is_a_sorted_prefix(
            logits in prop::collection::vec((-8i8..8).prop_map(f32::from), 0..700),
            k in 0usize..200,
        ) {
            let mut all = candidates(&logits);
            all.sort();
            let mut some = candidates(&logits);
            some.keep_best(k);
            prop_assert_eq!(&some.items, &all.items[..k.min(logits.len())]);
        }

        #[test]
        fn the_best_are_found_while_loading(
            logits in prop::collection::vec(prop_oneof![
                9 => (-8i8..8).prop_map(f32::from),
                1 => prop::sample::select(vec![f32::NAN, f32::NEG_INFINITY, f32::INFINITY, -0.0]),
            ], 0..700),
            k in 0usize..200,
            words in prop::option::of(prop::collection::vec(any::<u32>(), 22)),
        ) {
            let mut all = candidates(&logits);
            if let Some(words) = &words {
                all.retain(|c| is_set(words, c.id));
            }
            all.keep_best(k);
            let mut some = Candidates::default();
            some.load_best(&logits, k, words.as_deref());
            prop_assert_eq!(&some.items, &all.items);
        }

        #[test]
        fn keep_mass_sorts_only_in_appearance(
            logits in prop::collection::vec((-8i8..8).prop_map(f32::from), 1..3000),
            target in 0f64..1.0,
        ) {
            let mut lazy = candidates(&logits);
            lazy.softmax();
            let mut eager = lazy.clone();
            eager.sort();
            lazy.keep_best_mass(|sum| sum >= target);
            eager.keep_best_mass(|sum| sum >= target);
            prop_assert_eq!(lazy.items, eager.items);
        }
    }
}
