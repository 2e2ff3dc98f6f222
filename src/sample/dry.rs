//! DRY, "don't repeat yourself": penalises a token that would extend a sequence already in the
//! history, by an amount that grows exponentially with the length of the repetition. Unlike a
//! repetition penalty it leaves ordinary words and punctuation alone.
//!
//! Proposed by p-e-w in text-generation-webui (pull request 5677); parameters, the treatment of
//! sequence breakers and their defaults follow llama.cpp.

use crate::sample::candidates::{Candidates, TokenTable};
use crate::sample::penalties::window;

/// The DRY filter.
#[derive(Debug, Clone)]
pub(super) struct Dry {
    /// Scale of the penalty; 0 is off.
    pub(super) multiplier: f32,
    /// Growth per repeated token; below 1 is off.
    pub(super) base: f32,
    /// Repetitions shorter than this are free.
    pub(super) allowed_length: usize,
    /// Number of last tokens considered: 0 is off, −1 means the whole history.
    pub(super) last_n: i32,
    /// Token sequences across which nothing counts as a repetition, sorted, as a vocabulary has
    /// thousands of them.
    pub(super) breakers: Vec<Vec<u32>>,
    pub(super) z: Vec<usize>,
    pub(super) longest: TokenTable,
}

impl Default for Dry {
    fn default() -> Self {
        Self {
            multiplier: 0.0,
            base: 1.75,
            allowed_length: 2,
            last_n: -1,
            breakers: Vec::new(),
            z: Vec::new(),
            longest: TokenTable::default(),
        }
    }
}

impl Dry {
    /// Let `n(t)` be the length of the longest suffix of the history that also occurs earlier,
    /// followed there by `t`, and that contains no breaker. Where `n(t) ≥ allowed_length`:
    ///
    /// `l_t ← l_t − multiplier · base^(n(t) − allowed_length)`
    ///
    /// A token that is a breaker itself is never penalised. Takes linear time in the history.
    pub(super) fn apply(&mut self, candidates: &mut Candidates, history: &[u32], n_vocab: usize) {
        if self.multiplier == 0.0 || self.base < 1.0 {
            return;
        }
        let history = window(history, self.last_n);
        let limit = self.tokens_since_breaker(history);
        if history.len() <= self.allowed_length || limit < self.allowed_length {
            return;
        }

        common_suffixes(history, &mut self.z);
        self.longest.clear(n_vocab);
        for back in 1..history.len() {
            let n = self.z[back].min(limit);
            if n > 0 && n >= self.allowed_length {
                // `history` without its last `back` tokens ends in the repeated sequence; the
                // token after it is the one that would repeat.
                let next = history[history.len() - back];
                let n = u32::try_from(n).unwrap_or(u32::MAX);
                self.longest.update(next, |m| m.max(n));
            }
        }
        if self.longest.is_empty() {
            return;
        }
        let (longest, breakers) = (&self.longest, &self.breakers);
        let (multiplier, base) = (f64::from(self.multiplier), f64::from(self.base));
        let allowed = self.allowed_length as f64;
        candidates.update(|c| {
            let n = longest.at(c.id);
            if n > 0 && breakers.binary_search_by(|b| b[..].cmp(&[c.id])).is_err() {
                let penalty = multiplier * base.powf(f64::from(n) - allowed);
                // Bounded, because ∞ − ∞ would be NaN.
                c.logit -= penalty.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32;
            }
        });
    }

    /// Number of tokens after the last breaker.
    fn tokens_since_breaker(&self, history: &[u32]) -> usize {
        for i in 0..history.len() {
            let tail = &history[history.len() - 1 - i..];
            let first = self.breakers.partition_point(|b| b[..] < tail[..1]);
            let alike = self.breakers[first..]
                .iter()
                .take_while(|b| b[0] == tail[0]);
            let longest = alike.filter(|b| tail.starts_with(b)).map(Vec::len).max();
            if let Some(len) = longest {
                return tail.len() - len;
            }
        }
        history.len()
    }
}

/// `z[back]` = length of the longest common suffix of `tokens` and `tokens` without its last
/// `back`, by the Z algorithm (Gusfield, "Algorithms on Strings, Trees and Sequences", 1.4) read
/// from the end. `z[0]` is not used.
fn common_suffixes(tokens: &[u32], z: &mut Vec<usize>) {
    let n = tokens.len();
    let at = |i: usize| tokens[n - 1 - i];
    z.clear();
    z.resize(n, 0);
    // `left..right` is the match that reaches furthest back.
    let (mut left, mut right) = (0, 0);
    for k in 1..n {
        let mut len = if k < right {
            z[k - left].min(right - k)
        } else {
            0
        };
        while k + len < n && at(len) == at(k + len) {
            len += 1;
        }
        z[k] = len;
        if k + len > right {
            (left, right) = (k, k + len);
        }
    }
}

/// Longest rest of a breaker after its first token, in tokens. Bounds the scan; llama.cpp's value.
const MAX_TAIL: usize = 20;

/// The token sequences in which a sequence breaker, a text, can appear in a history; the input of
/// [`dry_sequence_breakers`](crate::SamplerOptions::dry_sequence_breakers).
///
/// A breaker is rarely a single token: `":"` is also part of `"):"`, and `"\n"` may be the end of
/// one token or the beginning of the next. So each token of the vocabulary whose text contains
/// `breaker` is a sequence by itself, and each token that ends in a prefix of `breaker` is one
/// together with the tokens of the missing rest.
///
/// `pieces` are the vocabulary's (id, text) pairs and `encode` tokenises without adding special
/// tokens. An empty breaker has no sequences.
pub fn breaker_sequences<'a>(
    breaker: &[u8],
    pieces: impl IntoIterator<Item = (u32, &'a [u8])>,
    mut encode: impl FnMut(&[u8]) -> Vec<u32>,
) -> Vec<Vec<u32>> {
    let mut sequences = Vec::new();
    if breaker.is_empty() {
        return sequences;
    }
    for (id, piece) in pieces {
        if piece.windows(breaker.len()).any(|w| w == breaker) {
            sequences.push(vec![id]);
            continue;
        }
        for overlap in 1..breaker.len().min(piece.len() + 1) {
            let (head, missing) = breaker.split_at(overlap);
            if piece.ends_with(head) {
                let mut sequence = vec![id];
                sequence.extend(encode(missing).into_iter().take(MAX_TAIL));
                if !sequences.contains(&sequence) {
                    sequences.push(sequence);
                }
            }
        }
    }
    sequences
}

#[cfg(test)]
mod tests {
    use crate::sample::candidates::tests::candidates;
    use crate::sample::dry::*;
    use proptest::prelude::*;

    /// The definition in the documentation of [`Dry::apply`], literally.
    fn brute_force(dry: &Dry, history: &[u32], token: u32) -> f64 {
        if dry.breakers.iter().any(|b| b[..] == [token]) {
            return 0.0;
        }
        let n = history.len();
        let mut longest = None;
        for len in 1..n {
            let suffix = &history[n - len..];
            if dry
                .breakers
                .iter()
                .any(|b| suffix.windows(b.len()).any(|w| w == &b[..]))
            {
                break;
            }
            // Ends before the last token, so that a token follows.
            if (0..n - len).any(|i| &history[i..i + len] == suffix && history[i + len] == token) {
                longest = Some(len);
            }
        }
        match longest {
            Some(len) if len >= dry.allowed_length => {
                let e = len as i32 - dry.allowed_length as i32;
                f64::from(dry.multiplier) * f64::from(dry.base).powi(e)
            }
            _ => 0.0,
        }
    }

    fn penalties(dry: &mut Dry, history: &[u32], n_vocab: usize) -> Vec<f32> {
        let mut c = candidates(&vec![0.0; n_vocab]);
        dry.apply(&mut c, history, n_vocab);
        c.as_slice().iter().map(|c| -c.logit).collect()
    }

    #[test]
    fn by_hand() {
        // a b c c b c y a b c: after "a b c" came c (3 tokens), after "b c" y (2), after "c" b (1).
        let (a, b, c, y) = (0, 1, 2, 3);
        let history = [a, b, c, c, b, c, y, a, b, c];
        let mut dry = Dry {
            multiplier: 0.8,
            base: 2.0,
            ..Dry::default()
        };
        assert_eq!(penalties(&mut dry, &history, 4), [0.0, 0.0, 1.6, 0.8]);
        dry.allowed_length = 1;
        assert_eq!(penalties(&mut dry, &history, 4), [0.0, 0.8, 3.2, 1.6]);
        dry.breakers = vec![vec![b]];
        assert_eq!(penalties(&mut dry, &history, 4), [0.0, 0.0, 0.8, 0.8]);
        dry.breakers = vec![vec![a, b]];
        assert_eq!(penalties(&mut dry, &history, 4), [0.0, 0.8, 0.8, 0.8]);
        dry.last_n = 3;
        assert_eq!(penalties(&mut dry, &history, 4), [0.0; 4]);
    }

    #[test]
    fn long_repetitions_stay_finite() {
        let mut dry = Dry {
            multiplier: f32::MAX,
            base: f32::MAX,
            ..Dry::default()
        };
        assert_eq!(penalties(&mut dry, &[1; 5000], 2), [0.0, f32::MAX]);
    }

    #[test]
    fn breakers_overlap_with_tokens() {
        let vocabulary: [&[u8]; 7] = [b"ab", b"xa", b"b", b"a", b"xaby", b"ba", b"c"];
        let pieces = (0..).zip(vocabulary);
        let encode = |text: &[u8]| vec![if text == b"b" { 2 } else { 6 }];
        let found = breaker_sequences(b"ab", pieces, encode);
        assert_eq!(
            found,
            [vec![0], vec![1, 2], vec![3, 2], vec![4], vec![5, 2]]
        );
        assert!(breaker_sequences(b"", [(0, &b"a"[..])], |_| vec![]).is_empty());
    }

    proptest! {
        #[test]
        fn equals_the_definition(
            history in prop::collection::vec(0u32..4, 0..40),
            allowed_length in 1usize..4,
            breakers in prop::collection::btree_set(prop::collection::vec(0u32..4, 1..2), 0..4),
        ) {
            let breakers = Vec::from_iter(breakers);
            let mut dry = Dry { multiplier: 1.0, base: 2.0, allowed_length, breakers, ..Dry::default() };
            let got = penalties(&mut dry, &history, 4);
            for t in 0..4 {
                prop_assert_eq!(f64::from(got[t as usize]), brute_force(&dry, &history, t));
            }
        }
    }
}
