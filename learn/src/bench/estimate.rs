//! Means with intervals.

/// A value with the interval that contains 95 % of its bootstrap resamples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// The value.
    pub value: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
}

impl Estimate {
    /// `Σ sums / Σ sizes`, with its interval when chunks are resampled with replacement.
    pub fn of_ratio(sums: &[f64], sizes: &[usize]) -> Estimate {
        let sizes: Vec<f64> = sizes.iter().map(|&n| n as f64).collect();
        if sums.is_empty() {
            Estimate::default()
        } else {
            bootstrap(sums.iter().copied(), &sizes, RESAMPLES)
        }
    }
}

/// Bootstrap resamples of [`Estimate::of_ratio`].
const RESAMPLES: usize = 2000;

/// `Σ sums / Σ sizes`, with its spread when chunks are resampled with replacement. Chunks of text
/// depend on each other less than tokens do.
pub(super) fn bootstrap(sums: impl Iterator<Item = f64>, sizes: &[f64], n: usize) -> Estimate {
    let sums: Vec<f64> = sums.collect();
    let ratio = |picked: &mut dyn Iterator<Item = usize>| {
        let (mut sum, mut size) = (0.0, 0.0);
        for i in picked {
            sum += sums[i];
            size += sizes[i];
        }
        sum / f64::max(size, 1.0)
    };
    let mut state = 1u64;
    let mut draw = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize * sums.len()) >> 31
    };
    let mut resampled: Vec<f64> = (0..n.max(1))
        .map(|_| ratio(&mut (0..sums.len()).map(|_| draw())))
        .collect();
    resampled.sort_by(f64::total_cmp);
    let quantile = |q: f64| resampled[((resampled.len() - 1) as f64 * q).round() as usize];
    Estimate {
        value: ratio(&mut (0..sums.len())),
        low: quantile(0.025),
        high: quantile(0.975),
    }
}
