//! How much of prompts is computed in a step, so that decoding sequences do not wait for them.
//!
//! Few rows of a prompt take almost as long as the weights that they read, many rows longer than a decoding sequence is to
//! wait. So a pass over many rows is computed some layers at a time, between passes of decoding sequences (layered prefill,
//! <https://arxiv.org/abs/2510.08055>).

use std::time::Duration;

/// Rows of a panel: fewer take as long.
const PANEL: usize = 16;
/// Prompt rows beside decoding ones until there are measurements.
const FIRST_ROWS: usize = 64;
/// Share of the limit that a step is planned to take: some take longer than planned.
const PLANNED: f64 = 0.85;
/// Weight of the newest measurement in a moving average.
const NEWEST: f64 = 0.2;
/// Number of classes of decoding rows, by powers of two.
const N_BUCKETS: usize = 12;

/// Times of passes, as moving averages in seconds.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    /// Parts into which a pass over prompts can be cut.
    n_layer: usize,
    /// Time of a pass with this many decoding rows, by the number's logarithm.
    decode: [Option<f64>; N_BUCKETS],
    /// Time of a prompt row in all layers.
    row: Option<f64>,
}

fn average(old: &mut Option<f64>, new: f64) {
    *old = Some(old.map_or(new, |old| old + NEWEST * (new - old)));
}

impl Pace {
    pub(super) fn new(n_layer: usize) -> Pace {
        Pace { n_layer, decode: [None; N_BUCKETS], row: None }
    }

    fn bucket(n_decode: usize) -> usize {
        (n_decode.max(1).ilog2() as usize).min(N_BUCKETS - 1)
    }

    /// Expected time of a pass of `n_decode` decoding rows, from the nearest class measured.
    pub(super) fn decode(&self, n_decode: usize) -> Option<f64> {
        let bucket = Pace::bucket(n_decode);
        let (below, above) = self.decode.split_at(bucket);
        above.first().copied().flatten().or_else(|| below.iter().rev().chain(&above[1..]).find_map(|&time| time))
    }

    /// Records the time of a pass of decoding rows.
    pub(super) fn note(&mut self, n_decode: usize, time: Duration) {
        average(&mut self.decode[Pace::bucket(n_decode)], time.as_secs_f64());
    }

    /// Records the time that so many layers of `n` prompt rows took.
    pub(super) fn note_prompt(&mut self, n: usize, n_layers: usize, time: f64) {
        average(&mut self.row, time * self.n_layer as f64 / (n * n_layers) as f64);
    }

    /// Time for prompts, and that of a prompt row, in a step with `n_decode` decoding rows that is to take at most `max_itl`,
    /// by default twice its time without prompts.
    fn room(&self, n_decode: usize, max_itl: Option<Duration>) -> Option<(f64, f64)> {
        let (decode, row) = (self.decode(n_decode)?, self.row.filter(|&row| row > 0.0)?);
        let limit = max_itl.map_or(2.0 * decode, |limit| limit.as_secs_f64());
        Some((PLANNED * limit - decode, row))
    }

    /// Number of prompt rows of which there is time for a layer, at most `n_batch`.
    pub(super) fn rows(&self, n_decode: usize, max_itl: Option<Duration>, n_batch: usize) -> usize {
        if n_decode == 0 {
            return n_batch;
        }
        let rows = self.room(n_decode, max_itl).map_or(FIRST_ROWS, |(room, row)| {
            // The cast saturates.
            (room * self.n_layer as f64 / row / PANEL as f64).round() as usize * PANEL
        });
        rows.max(PANEL).min(n_batch)
    }

    /// Number of layers of `n` prompt rows for which there is time, at least one.
    pub(super) fn layers(&self, n_decode: usize, max_itl: Option<Duration>, n: usize) -> usize {
        if n_decode == 0 {
            return self.n_layer;
        }
        let layers =
            self.room(n_decode, max_itl).map_or(1.0, |(room, row)| room * self.n_layer as f64 / (row * n as f64));
        (layers as usize).clamp(1, self.n_layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn a_step_takes_what_is_left_of_the_limit() {
        let mut pace = Pace::new(10);
        assert_eq!((pace.rows(0, None, 512), pace.rows(4, None, 512)), (512, FIRST_ROWS));
        assert_eq!((pace.layers(0, None, 512), pace.layers(4, None, 512)), (10, 1));
        for _ in 0..50 {
            pace.note(4, MS(20));
            pace.note_prompt(40, 2, 0.004);
        }
        // Half a millisecond per row and 20 layers: of 14 ms there is time for a layer of 280 rows, or for seven of 40.
        assert_eq!((pace.rows(4, None, 512), pace.layers(4, None, 40)), (288, 7));
        assert_eq!((pace.rows(5, None, 32), pace.layers(4, None, 288)), (32, 1));
        assert_eq!((pace.rows(4, Some(MS(28)), 512), pace.layers(4, Some(MS(28)), 20)), (80, 3));
        // Even if the limit is below the time of decoding, prompts advance slowly.
        assert_eq!((pace.rows(4, Some(MS(1)), 512), pace.layers(4, Some(MS(1)), 16)), (PANEL, 1));
        // All at once if there is time.
        assert_eq!((pace.rows(4, Some(MS(9000)), 512), pace.layers(4, Some(MS(9000)), 512)), (512, 10));
        // Other numbers of rows: as for the nearest number measured.
        assert_eq!((pace.rows(64, None, 512), pace.rows(1, None, 512)), (288, 288));
    }

    #[test]
    fn without_a_clock_there_is_a_pace() {
        let mut pace = Pace::new(4);
        pace.note(2, Duration::ZERO);
        pace.note_prompt(7, 1, 0.0);
        assert_eq!((pace.rows(2, None, 512), pace.layers(2, None, 7)), (FIRST_ROWS, 1));
    }
}
