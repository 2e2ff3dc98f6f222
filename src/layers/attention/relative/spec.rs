//! Biases of scores by the distance of positions (T5, arXiv 1910.10683).

use std::ops::Range;

/// Biases of scores: one for each head and bucket of distances. Small distances have a bucket each,
/// larger ones share buckets whose sizes grow exponentially.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RelativeSpec {
    /// Number of buckets. Where tokens see later ones, half of them are for those.
    pub n_bucket: usize,
    /// Distance from which on all share the last bucket.
    pub max_distance: usize,
}

impl RelativeSpec {
    /// The bucket of a distance, of `n` buckets in one direction. The formula is computed in `f32`,
    /// as Hugging Face's `_relative_position_bucket` and llama.cpp compute it.
    fn bucket(&self, distance: usize, n: usize) -> usize {
        let exact = n / 2;
        if distance < exact {
            return distance;
        }
        let share =
            (distance as f32 / exact as f32).ln() / (self.max_distance as f32 / exact as f32).ln();
        (exact + (share * (n - exact) as f32) as usize).min(n - 1)
    }

    /// The keys of `keys` by bucket, in ascending order, as a query at `position` sees them: calls
    /// `each` with the keys of a bucket and its number.
    pub(crate) fn runs(
        &self,
        position: usize,
        keys: Range<usize>,
        causal: bool,
        mut each: impl FnMut(Range<usize>, usize),
    ) {
        let n = if causal {
            self.n_bucket
        } else {
            self.n_bucket / 2
        };
        let bucket = |key: usize| match key.checked_sub(position) {
            Some(later @ 1..) => n + self.bucket(later, n),
            _ => self.bucket(position - key, n),
        };
        let mut start = keys.start;
        while start < keys.end {
            let of_run = bucket(start);
            // Distances grow or shrink along a run, so that it ends where the bucket changes first.
            let (mut inside, mut outside) = (start, keys.end);
            if start <= position {
                outside = outside.min(position + 1);
            }
            while inside + 1 < outside {
                let middle = inside.midpoint(outside);
                if bucket(middle) == of_run {
                    inside = middle;
                } else {
                    outside = middle;
                }
            }
            each(start..outside, of_run);
            start = outside;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T5: RelativeSpec = RelativeSpec {
        n_bucket: 32,
        max_distance: 128,
    };

    /// Buckets of Hugging Face's `T5Attention._relative_position_bucket` (transformers 5).
    #[test]
    fn buckets_of_both_directions() {
        let of = |position: usize, n: usize, causal: bool| {
            let mut all = Vec::new();
            T5.runs(position, 0..n, causal, |keys, bucket| {
                all.extend(keys.map(|_| bucket));
            });
            all
        };
        assert_eq!(of(3, 6, false), [3, 2, 1, 0, 17, 18]);
        assert_eq!(of(3, 4, true), [3, 2, 1, 0]);
        let back = of(200, 201, true);
        let expected = [
            (0, 0),
            (15, 15),
            (16, 16),
            (18, 16),
            (19, 17),
            (20, 17),
            (21, 18),
            (26, 19),
            (27, 20),
            (31, 21),
            (35, 22),
            (40, 23),
            (52, 25),
            (64, 26),
            (90, 29),
            (112, 30),
            (113, 31),
            (128, 31),
            (200, 31),
        ];
        for (distance, bucket) in expected {
            assert_eq!(back[200 - distance], bucket, "distance {distance}");
        }
        let later = of(0, 200, false);
        for (distance, bucket) in [
            (7, 23),
            (8, 24),
            (12, 25),
            (16, 26),
            (32, 28),
            (64, 30),
            (91, 31),
            (199, 31),
        ] {
            assert_eq!(later[distance], bucket, "distance {distance}");
        }
    }

    #[test]
    fn runs_are_all_keys_once() {
        for (position, keys, causal) in [(0, 0..1, true), (700, 3..701, true), (99, 0..400, false)]
        {
            let (mut next, mut n_runs) = (keys.start, 0);
            T5.runs(position, keys.clone(), causal, |run, _| {
                assert!(run.start == next && run.end > run.start);
                (next, n_runs) = (run.end, n_runs + 1);
            });
            assert!(next == keys.end && n_runs <= 32);
        }
    }
}
