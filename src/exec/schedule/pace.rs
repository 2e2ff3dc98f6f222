//! Number of prompt rows in a pass, limited so that decoding sequences do not wait for them.

use std::time::Duration;

/// Prompt rows of a panel: fewer take as long, unless the level has kernels for few rows.
const PANEL: usize = 16;
/// Prompt rows that every pass takes at least with such kernels, so that prompts advance whatever the limit: with fewer,
/// decoding rows wait less, but prompts keep less than 0.4 of their speed (docs/drafts.md).
const FEW: usize = 8;
/// Prompt rows beside decoding ones until there are measurements.
const FIRST_CHUNK: usize = 32;
/// Weight of the newest measurement in a moving average.
const NEWEST: f64 = 0.2;
/// Number of classes of decoding rows, by powers of two.
const N_BUCKETS: usize = 12;

/// Times of passes, as moving averages in seconds.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    /// Prompt rows that every pass takes at least.
    least: usize,
    /// Time of a pass with this many decoding rows, by the number's logarithm.
    decode: [Option<f64>; N_BUCKETS],
    /// Time per prompt row in a pass without decoding rows, and that it adds to a pass with some.
    row_alone: Option<f64>,
    row_beside: Option<f64>,
}

fn average(old: &mut Option<f64>, new: f64) {
    *old = Some(old.map_or(new, |old| old + NEWEST * (new - old)));
}

impl Pace {
    /// For a level that has kernels for up to `few` prompt rows, see [`Arch::gemm_few`](crate::arch::Arch::gemm_few).
    pub(super) fn new(few: usize) -> Pace {
        let least = if few < FEW { PANEL } else { FEW };
        Pace { least, decode: [None; N_BUCKETS], row_alone: None, row_beside: None }
    }

    fn bucket(n_decode: usize) -> usize {
        (n_decode.max(1).ilog2() as usize).min(N_BUCKETS - 1)
    }

    /// Expected time of a pass of `n_decode` decoding rows, from the nearest class measured.
    fn decode(&self, n_decode: usize) -> Option<f64> {
        let bucket = Pace::bucket(n_decode);
        let (below, above) = self.decode.split_at(bucket);
        above.first().copied().flatten().or_else(|| below.iter().rev().chain(&above[1..]).find_map(|&time| time))
    }

    /// Records the time of a pass.
    pub(super) fn note(&mut self, n_decode: usize, n_prompt: usize, time: Duration) {
        let time = time.as_secs_f64();
        match (n_decode, n_prompt) {
            (0, 0) => {}
            (_, 0) => average(&mut self.decode[Pace::bucket(n_decode)], time),
            (0, _) => average(&mut self.row_alone, time / n_prompt as f64),
            _ => {
                if let Some(decode) = self.decode(n_decode) {
                    // Never 0: otherwise a slow decoding pass before would allow any number of rows.
                    let rows = (time - decode).max(0.05 * time);
                    average(&mut self.row_beside, rows / n_prompt as f64);
                }
            }
        }
    }

    /// Number of prompt rows for a pass with `n_decode` decoding rows, so that it takes at most `max_itl`, by default
    /// twice its time without prompt rows; at most `n_batch`.
    pub(super) fn chunk(&self, n_decode: usize, max_itl: Option<Duration>, n_batch: usize) -> usize {
        if n_decode == 0 {
            return n_batch;
        }
        let rows = match (self.decode(n_decode), self.row_beside.or(self.row_alone)) {
            (Some(decode), Some(row)) if row > 0.0 => {
                let limit = max_itl.map_or(2.0 * decode, |limit| limit.as_secs_f64());
                // The cast saturates.
                ((limit - decode) / row).round() as usize
            }
            _ => FIRST_CHUNK,
        };
        rows.max(self.least).min(n_batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn a_chunk_takes_what_is_left_of_the_limit() {
        let mut pace = Pace::new(0);
        assert_eq!((pace.chunk(0, None, 512), pace.chunk(4, None, 512)), (512, FIRST_CHUNK));
        for _ in 0..50 {
            pace.note(4, 0, MS(20));
            pace.note(4, 40, MS(20 + 40 / 2));
        }
        // Half a millisecond per row: 20 ms are 40 rows.
        assert_eq!(pace.chunk(4, None, 512), 40);
        assert_eq!(pace.chunk(5, None, 32), 32);
        assert_eq!(pace.chunk(4, Some(MS(120)), 512), 200);
        // Even if the limit is below the time of decoding, prompts advance slowly.
        assert_eq!(pace.chunk(4, Some(MS(1)), 512), PANEL);
        // Other numbers of rows: as for the nearest number measured.
        assert_eq!(pace.chunk(64, None, 512), 40);
        assert_eq!(pace.chunk(1, None, 512), 40);
    }

    #[test]
    fn what_takes_longer_gets_smaller_chunks() {
        let mut pace = Pace::new(0);
        (0..20).for_each(|_| pace.note(2, 0, MS(10)));
        (0..20).for_each(|_| pace.note(0, 100, MS(10)));
        assert_eq!(pace.chunk(2, None, 512), 100);
        (0..30).for_each(|_| pace.note(2, 100, MS(60)));
        assert_eq!(pace.chunk(2, None, 512), 20);
        // Without a clock all times are zero.
        let mut none = Pace::new(12);
        none.note(2, 0, Duration::ZERO);
        none.note(2, 7, Duration::ZERO);
        assert_eq!(none.chunk(2, None, 512), FIRST_CHUNK);
    }
}
