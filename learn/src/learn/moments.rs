//! Moments: what the model predicted before each observed token, reduced to what later learning
//! needs.

use half::f16;
use ruvllm::arch::Arch;
use ruvllm::model::LogitTransform;

/// Number of most likely tokens kept of a distribution.
pub(crate) const TOP: usize = 64;
/// Number of tokens listed per moment: the observed one and [`TOP`] others.
pub(crate) const SLOTS: usize = TOP + 1;
/// Marks an empty slot, in vocabularies smaller than [`SLOTS`].
pub(crate) const NO_TOKEN: u32 = u32::MAX;

/// Largest value that is learnt or read from a file: sums of products of two such values stay
/// finite.
pub(crate) const LARGEST: f32 = 1e15;

/// Whether all values are at most [`LARGEST`] in magnitude, and none is NaN.
pub(crate) fn computable(values: &[f32]) -> bool {
    // Without a branch per value, so that it can be vectorised.
    values
        .iter()
        .fold(true, |all, x| all & (x.abs() <= LARGEST))
}

/// Returns `ln Σ exp(logits)`; leaves the probabilities in `p`.
pub(crate) fn softmax(arch: Arch, logits: &[f32], p: &mut Vec<f32>) -> f64 {
    p.clear();
    p.extend_from_slice(logits);
    arch.softmax(p);
    let best = (0..p.len())
        .max_by(|&i, &j| logits[i].total_cmp(&logits[j]))
        .unwrap_or(0);
    f64::from(logits[best]) - f64::from(p[best]).ln()
}

/// One prediction and the token that followed, see [`Samples`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample<'a> {
    /// Hidden state after the final norm, `(n_embd)`.
    pub(crate) h: &'a [f16],
    /// The observed token, then others in no particular order.
    pub(crate) ids: &'a [u32],
    /// The head's product for `ids`, without an adapter.
    pub(crate) raw: &'a [f32],
    /// `ln Σ exp` of the logits of all tokens not in `ids`, without an adapter.
    pub(crate) rest: f32,
}

/// The latest moments; the oldest is overwritten first. All memory is allocated at the start.
#[derive(Clone, Debug)]
pub(crate) struct Samples {
    n_embd: usize,
    capacity: usize,
    /// Number pushed so far, including those overwritten since.
    pushed: usize,
    h: Vec<f16>,
    ids: Vec<u32>,
    raw: Vec<f32>,
    rest: Vec<f32>,
}

impl Samples {
    pub(crate) fn new(n_embd: usize, capacity: usize) -> Samples {
        Samples {
            n_embd,
            capacity,
            pushed: 0,
            h: vec![f16::ZERO; capacity * n_embd],
            ids: vec![NO_TOKEN; capacity * SLOTS],
            raw: vec![0.0; capacity * SLOTS],
            rest: vec![0.0; capacity],
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.pushed.min(self.capacity)
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(crate) fn clear(&mut self) {
        self.pushed = 0;
    }

    /// The `n` latest, oldest first.
    pub(crate) fn latest(&self, n: usize) -> impl Iterator<Item = Sample<'_>> + Clone {
        (self.pushed - n.min(self.len())..self.pushed).map(|i| self.at(i % self.capacity))
    }

    /// All moments, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Sample<'_>> + Clone {
        self.latest(self.capacity)
    }

    /// Every other moment, at even or at odd places: two disjoint samples.
    pub(crate) fn half(&self, odd: bool) -> impl Iterator<Item = Sample<'_>> + Clone {
        self.iter().skip(usize::from(odd)).step_by(2)
    }

    fn at(&self, i: usize) -> Sample<'_> {
        Sample {
            h: &self.h[i * self.n_embd..][..self.n_embd],
            ids: &self.ids[i * SLOTS..][..SLOTS],
            raw: &self.raw[i * SLOTS..][..SLOTS],
            rest: self.rest[i],
        }
    }

    /// Stores a moment: hidden state `h`, the head's product `raw: (n_vocab)`, its probabilities
    /// `p` with their normaliser `lse`, and the observed token. Moments with values that are
    /// not [`computable`] are skipped; returns whether it was stored.
    pub(crate) fn push(
        &mut self,
        arch: Arch,
        transform: LogitTransform,
        h: &[f32],
        raw: &[f32],
        p: &[f32],
        lse: f64,
        token: u32,
    ) -> bool {
        let mut ids = [NO_TOKEN; SLOTS];
        ids[0] = token;
        top(p, token, &mut ids[1..]);
        let mut kept = [0.0; SLOTS];
        let mut rest = 1.0f64;
        for (&id, kept) in ids.iter().zip(&mut kept) {
            let Some(&value) = raw.get(id as usize) else {
                break;
            };
            *kept = value;
            rest -= (f64::from(transform.logit(value)) - lse).exp();
        }
        // Rounding leaves the remaining probability uncertain by about 1e-7.
        let rest = (lse + rest.max(1e-9).ln()) as f32;
        let fits = h
            .iter()
            .fold(true, |all, x| all & (x.abs() <= f16::MAX.to_f32()));
        if !(fits && computable(&kept) && computable(&[rest])) {
            return false;
        }
        let i = self.pushed % self.capacity;
        self.pushed += 1;
        arch.f32_to_f16(h, &mut self.h[i * self.n_embd..][..self.n_embd]);
        self.ids[i * SLOTS..][..SLOTS].copy_from_slice(&ids);
        self.raw[i * SLOTS..][..SLOTS].copy_from_slice(&kept);
        self.rest[i] = rest;
        true
    }

    /// Stores a moment read from a file, whose lengths were checked.
    pub(crate) fn push_raw(&mut self, moment: Sample<'_>) {
        let i = self.pushed % self.capacity;
        self.pushed += 1;
        self.h[i * self.n_embd..][..self.n_embd].copy_from_slice(moment.h);
        self.ids[i * SLOTS..][..SLOTS].copy_from_slice(moment.ids);
        self.raw[i * SLOTS..][..SLOTS].copy_from_slice(moment.raw);
        self.rest[i] = moment.rest;
    }
}

/// The most likely tokens except `except`, in no particular order. Most values are read only once.
fn top(p: &[f32], except: u32, ids: &mut [u32]) {
    let n = ids.len().min(p.len() - 1);
    let (mut filled, mut least, mut bar) = (0, 0, f32::NEG_INFINITY);
    for (id, &value) in p.iter().enumerate() {
        if filled == n && value <= bar || id as u32 == except {
            continue;
        }
        let at = if filled < n { filled } else { least };
        ids[at] = id as u32;
        filled = (filled + 1).min(n);
        if filled == n {
            for (slot, &id) in ids[..n].iter().enumerate() {
                if slot == 0 || p[id as usize] < bar {
                    (least, bar) = (slot, p[id as usize]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::learn::moments::*;

    #[test]
    fn the_most_likely_are_kept() {
        let p: Vec<f32> = (0..500)
            .map(|i| ((i * 7919) % 500) as f32 / 125_000.0)
            .collect();
        let mut ids = [0; TOP];
        top(&p, 3, &mut ids);
        let mut expected: Vec<u32> = (0..500).filter(|&i| i != 3).collect();
        expected.sort_by(|&i, &j| p[j as usize].total_cmp(&p[i as usize]));
        let mut found = ids.to_vec();
        found.sort_by(|&i, &j| p[j as usize].total_cmp(&p[i as usize]));
        assert_eq!(found, expected[..TOP]);
    }

    #[test]
    fn what_cannot_be_computed_with_is_not_kept() {
        let arch = Arch::scalar();
        let transform = LogitTransform {
            scale: 1.0,
            cap: 0.0,
        };
        let mut moments = Samples::new(2, 2);
        let mut push = |h: f32, raw: f32, lse: f64, token: u32| {
            moments.push(
                arch,
                transform,
                &[0.5, h],
                &[raw, 0.0, 1.0],
                &[0.2, 0.3, 0.5],
                lse,
                token,
            )
        };
        assert!(push(1.0, 2.0, 2.5, 0) && push(1.0, 2.0, 2.5, 1));
        for unsound in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
            assert!(!push(unsound, 2.0, 2.5, 2) && !push(1.0, unsound, 2.5, 2));
            assert!(!push(1.0, 2.0, unsound.into(), 2));
        }
        assert!(moments.iter().map(|m| m.ids[0]).eq([0, 1]));
    }

    #[test]
    fn the_rest_completes_the_distribution() {
        let arch = Arch::scalar();
        for n_vocab in [10usize, 65, 300] {
            let raw: Vec<f32> = (0..n_vocab)
                .map(|i| ((i * 37 % 101) as f32) / 20.0)
                .collect();
            let transform = LogitTransform {
                scale: 0.5,
                cap: 3.0,
            };
            let logits: Vec<f32> = raw.iter().map(|&x| transform.logit(x)).collect();
            let mut p = Vec::new();
            let lse = softmax(arch, &logits, &mut p);
            let mut moments = Samples::new(4, 2);
            for token in [1, 2, 3] {
                moments.push(
                    arch,
                    transform,
                    &[0.0, 1.0, 2.0, token as f32],
                    &raw,
                    &p,
                    lse,
                    token,
                );
            }
            assert_eq!(moments.iter().map(|m| m.ids[0]).collect::<Vec<_>>(), [2, 3]);
            for m in moments.iter() {
                let kept = m.ids.iter().zip(m.raw).filter(|(id, _)| **id != NO_TOKEN);
                let sum: f64 = kept
                    .map(|(_, &raw)| f64::from(transform.logit(raw)).exp())
                    .sum();
                let total = (sum + f64::from(m.rest).exp()).ln();
                assert!((total - lse).abs() < 1e-6, "{n_vocab}: {total} {lse}");
            }
        }
    }
}
