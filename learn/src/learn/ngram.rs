//! N-gram cache: counts of the tokens that followed the same context in the text observed so far.
//!
//! The text itself is kept, with chains of the positions where each token, and each pair of tokens,
//! was followed by another. A query walks the latest of these positions, so recent text counts
//! more, and measures how far back each matches the context: matches of any length are found (the
//! unbounded cache of Grave et al., arXiv 1711.02604, on tokens instead of states).

/// Most tokens of a context that are compared.
const LONGEST: usize = 16;
/// Most positions visited in each of the two chains.
const PLACES: usize = 160;
/// Separates unrelated texts, and marks the end of chains.
const NONE: u32 = u32::MAX;

/// Sparse distribution: `(token, probability)`, each token once.
pub(crate) type Sparse = Vec<(u32, f64)>;

pub(crate) fn probability(of: &Sparse, token: u32) -> f64 {
    of.iter()
        .find(|(t, _)| *t == token)
        .map_or(0.0, |(_, p)| *p)
}

/// Tokens that followed the context, by the length of the match. Empty if there was no match.
#[derive(Clone, Debug, Default)]
pub(crate) struct Continuations {
    /// By length of match: one token, two, and the longest of three or more (longer ones weigh
    /// more).
    pub(crate) orders: [Sparse; 3],
    /// Length of the longest match.
    pub(crate) longest: usize,
}

/// Text observed so far, at most `capacity` tokens: when it is full, the older half is dropped.
#[derive(Clone, Debug)]
pub(crate) struct NgramCache {
    capacity: usize,
    tokens: Vec<u32>,
    /// How often each token occurs in `tokens`.
    counts: Vec<u32>,
    total: u64,
    /// Latest position of each hash, and the previous one for each position: for one token and for
    /// two.
    last: [Vec<u32>; 2],
    before: [Vec<u32>; 2],
}

impl NgramCache {
    pub(crate) fn new(n_vocab: usize, capacity: usize) -> NgramCache {
        let buckets = capacity.next_power_of_two();
        NgramCache {
            capacity,
            tokens: Vec::with_capacity(capacity),
            counts: vec![0; n_vocab],
            total: 0,
            last: [vec![NONE; buckets], vec![NONE; buckets]],
            before: [Vec::with_capacity(capacity), Vec::with_capacity(capacity)],
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// The text, with [`u32::MAX`] between unrelated pieces.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Fills an empty cache with the result of [`NgramCache::tokens`].
    pub(crate) fn restore(&mut self, tokens: &[u32]) {
        tokens[tokens.len().saturating_sub(self.capacity)..]
            .iter()
            .for_each(|&token| self.push(token));
    }

    /// Number of times that `token` was observed, and number of all tokens.
    pub(crate) fn count(&self, token: u32) -> (u32, u64) {
        (self.counts[token as usize], self.total)
    }

    /// Adds a token that came after `context`.
    pub(crate) fn observe(&mut self, context: &[u32], token: u32) {
        let context = &context[context.len().saturating_sub(LONGEST)..];
        if !self.tokens.ends_with(context) {
            self.push(NONE);
            context.iter().for_each(|&t| self.push(t));
        }
        self.push(token);
    }

    fn push(&mut self, token: u32) {
        if self.tokens.len() == self.capacity {
            let kept = self.tokens.split_off(self.capacity / 2);
            self.tokens.clear();
            self.before.iter_mut().for_each(Vec::clear);
            self.last.iter_mut().for_each(|last| last.fill(NONE));
            self.counts.fill(0);
            self.total = 0;
            kept.into_iter().for_each(|t| self.push(t));
        }
        let place = self.tokens.len() as u32;
        for order in [1, 2] {
            let bucket = self
                .tokens
                .len()
                .checked_sub(order)
                .map(|at| self.bucket(&self.tokens[at..]));
            let previous = match bucket {
                Some(bucket) if token != NONE => {
                    std::mem::replace(&mut self.last[order - 1][bucket], place)
                }
                _ => NONE,
            };
            self.before[order - 1].push(previous);
        }
        self.tokens.push(token);
        if token != NONE {
            self.counts[token as usize] += 1;
            self.total += 1;
        }
    }

    fn bucket(&self, key: &[u32]) -> usize {
        let hash = key.iter().fold(0u64, |h, &t| {
            (h ^ u64::from(t))
                .wrapping_mul(0x9E37_79B9_7F4A_7C15)
                .rotate_left(29)
        });
        (hash >> 16) as usize & (self.last[0].len() - 1)
    }

    /// Tokens that followed the end of `context`.
    pub(crate) fn continuations(&self, context: &[u32]) -> Continuations {
        let mut found = Continuations::default();
        for order in [1, 2] {
            let Some(at) = context.len().checked_sub(order) else {
                break;
            };
            let mut place = self.last[order - 1][self.bucket(&context[at..])];
            for _ in 0..PLACES {
                if place == NONE {
                    break;
                }
                let before = self.tokens[..place as usize].iter().rev();
                let agree = before
                    .zip(context.iter().rev())
                    .take(LONGEST)
                    .take_while(|(x, y)| x == y && **x != NONE)
                    .count();
                let token = self.tokens[place as usize];
                if agree >= order {
                    add(&mut found.orders[order - 1], token, 1.0);
                    found.longest = found.longest.max(agree);
                }
                if order == 2 && agree > 2 {
                    add(&mut found.orders[2], token, 2f64.powi(2 * agree as i32));
                }
                place = self.before[order - 1][place as usize];
            }
        }
        for sparse in &mut found.orders {
            let sum: f64 = sparse.iter().map(|(_, p)| p).sum();
            sparse.iter_mut().for_each(|(_, p)| *p /= sum);
        }
        found
    }
}

pub(crate) fn add(sparse: &mut Sparse, token: u32, weight: f64) {
    match sparse.iter_mut().find(|(t, _)| *t == token) {
        Some((_, sum)) => *sum += weight,
        None => sparse.push((token, weight)),
    }
}

#[cfg(test)]
mod tests {
    use crate::learn::ngram::*;

    #[test]
    fn longer_agreement_is_found_and_wins() {
        let mut cache = NgramCache::new(100, 64);
        let text = [1, 2, 3, 4, 5, 9, 3, 4, 6, 9, 3, 4, 6, 1, 2, 3, 4];
        text.iter()
            .enumerate()
            .for_each(|(i, &t)| cache.observe(&text[..i], t));
        assert_eq!(cache.tokens(), text);
        let found = cache.continuations(&text);
        assert_eq!(found.longest, 4);
        assert!(
            probability(&found.orders[0], 6) > 0.6,
            "6 follows 4 twice, 5 once"
        );
        assert!(
            probability(&found.orders[2], 5) > 0.8,
            "after 1 2 3 4 came 5"
        );
        assert_eq!(cache.count(3), (4, 17));
    }

    #[test]
    fn it_forgets_the_older_half() {
        let mut cache = NgramCache::new(300, 32);
        (0..300).for_each(|i| cache.push(i));
        assert!(cache.tokens().len() <= 32);
        assert_eq!(*cache.tokens().last().unwrap(), 299);
        assert_eq!(cache.count(0).0, 0);
        assert!(
            cache
                .continuations(&[0, 1])
                .orders
                .iter()
                .all(Vec::is_empty)
        );
        assert_eq!(cache.continuations(&[296, 297]).orders[1], [(298, 1.0)]);
    }

    #[test]
    fn unconnected_texts_do_not_agree_across() {
        let mut cache = NgramCache::new(10, 64);
        cache.observe(&[1, 2], 3);
        cache.observe(&[5], 6);
        assert_eq!(cache.tokens(), [NONE, 1, 2, 3, NONE, 5, 6]);
        assert!(
            cache
                .continuations(&[1, 2, 3])
                .orders
                .iter()
                .all(Vec::is_empty)
        );
    }
}
