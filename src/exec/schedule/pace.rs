//! How much of prompts is computed in a step, so that decoding sequences do not wait for them.
//!
//! A few rows of a prompt take almost as long as many, and many take longer than decoding sequences are to wait. So a pass
//! over many rows is computed some layers at a time, between passes of decoding sequences (layered prefill,
//! <https://arxiv.org/abs/2510.08055>).

use std::time::Duration;

/// Prompt rows of a panel: fewer take about as long.
const PANEL: usize = 16;
/// Prompt rows beside decoding ones until there are measurements.
const FIRST_ROWS: usize = 64;
/// Share of the limit that a step is to take: some take longer than others.
const PLANNED: f64 = 0.9;
/// Weight of the newest measurement in a moving average.
const NEWEST: f64 = 0.2;
/// Number of classes of decoding rows, by powers of two.
const N_BUCKETS: usize = 12;

/// Times of passes, as moving averages in seconds.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    /// Layers of the model; 1 if passes cannot be cut.
    pub(super) n_layer: usize,
    /// Time of a pass with this many decoding rows, by the number's logarithm.
    decode: [Option<f64>; N_BUCKETS],
    /// Time of a prompt row in one layer.
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
    fn decode(&self, n_decode: usize) -> Option<f64> {
        let bucket = Pace::bucket(n_decode);
        let (below, above) = self.decode.split_at(bucket);
        above.first().copied().flatten().or_else(|| below.iter().rev().chain(&above[1..]).find_map(|&time| time))
    }

    /// Records the time of a pass.
    pub(super) fn note(&mut self, n_decode: usize, n_prompt: usize, time: Duration) {
        let of_decode = if n_decode > 0 { self.decode(n_decode) } else { Some(0.0) };
        match (n_prompt, of_decode) {
            (0, _) => average(&mut self.decode[Pace::bucket(n_decode)], time.as_secs_f64()),
            // Never 0: otherwise a slow decoding pass before would allow any number of rows.
            (_, Some(decode)) => {
                let of_prompt = time.saturating_sub(Duration::from_secs_f64(decode)).max(time / 20);
                // All layers but the last, of which a prompt needs little more than keys and values.
                self.note_layers(n_prompt, (self.n_layer - 1).max(1), of_prompt);
            }
            (_, None) => {}
        }
    }

    /// Records the time of so many layers of prompt rows.
    pub(super) fn note_layers(&mut self, n_prompt: usize, n_layers: usize, time: Duration) {
        average(&mut self.row, time.as_secs_f64() / (n_prompt.next_multiple_of(PANEL) * n_layers) as f64);
    }

    /// Prompt rows times layers for which there is time beside `n_decode` decoding rows, so that a step takes at most
    /// `max_itl`, by default twice its time without prompts.
    fn room(&self, n_decode: usize, max_itl: Option<Duration>) -> Option<f64> {
        let (decode, row) = (self.decode(n_decode)?, self.row.filter(|&row| row > 0.0)?);
        let limit = max_itl.map_or(2.0 * decode, |limit| limit.as_secs_f64());
        Some((PLANNED * limit - decode) / row)
    }

    /// Number of prompt rows of a pass of which there is time for one layer, at most `n_batch`.
    pub(super) fn rows(&self, n_decode: usize, max_itl: Option<Duration>, n_batch: usize) -> usize {
        if n_decode == 0 {
            return n_batch;
        }
        // The cast saturates.
        let rows = self.room(n_decode, max_itl).map_or(FIRST_ROWS, |room| room as usize / PANEL * PANEL);
        rows.max(PANEL).min(n_batch)
    }

    /// Number of layers of a pass of `n_prompt` rows for which there is time, at least one.
    pub(super) fn layers(&self, n_decode: usize, max_itl: Option<Duration>, n_prompt: usize) -> usize {
        if n_decode == 0 || n_prompt == 0 {
            return self.n_layer;
        }
        let layers = self.room(n_decode, max_itl).map_or(1.0, |room| room / n_prompt.next_multiple_of(PANEL) as f64);
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
        let limits = |pace: &Pace, n_decode: usize, max_itl: Option<u64>, n_prompt: usize| {
            (pace.rows(n_decode, max_itl.map(MS), 512), pace.layers(n_decode, max_itl.map(MS), n_prompt))
        };
        assert_eq!(limits(&pace, 0, None, 512), (512, 10));
        assert_eq!(limits(&pace, 4, None, 512), (FIRST_ROWS, 1));
        for _ in 0..50 {
            pace.note(4, 0, MS(20));
            // Almost half a millisecond per row in all layers, also of rows that do not fill a panel.
            pace.note_layers(80, 2, Duration::from_micros(7900));
            pace.note_layers(70, 2, Duration::from_micros(7900));
            pace.note(4, 80, Duration::from_micros(20_000 + 9 * 3950));
            pace.note(0, 160, Duration::from_micros(9 * 7900));
        }
        // In 0.9 · 40 - 20 ms a layer of 320 rows, or six of 40, which take as long as 48.
        assert_eq!(limits(&pace, 4, None, 40), (320, 6));
        assert_eq!(limits(&pace, 4, Some(40), 320), (320, 1));
        assert_eq!(pace.rows(4, None, 32), 32);
        // Even if the limit is below the time of decoding, prompts advance slowly.
        assert_eq!(limits(&pace, 4, Some(1), 16), (PANEL, 1));
        // All at once if there is time, or nobody decodes, or there is no prompt.
        assert_eq!(limits(&pace, 4, Some(9000), 512), (512, 10));
        assert_eq!((limits(&pace, 0, Some(1), 512), pace.layers(4, Some(MS(1)), 0)), ((512, 10), 10));
        // Other numbers of rows: as for the nearest number measured.
        assert_eq!(limits(&pace, 64, None, 512), limits(&pace, 1, None, 512));
    }

    #[test]
    fn what_takes_longer_gets_less() {
        let mut pace = Pace::new(1);
        pace.note(2, 0, MS(10));
        pace.note(2, 64, MS(11));
        let before = pace.rows(2, None, 512);
        (0..30).for_each(|_| pace.note(2, 64, MS(40)));
        assert!(pace.rows(2, None, 512) < before);
        // Never any number, though a slow decoding pass came before.
        (0..30).for_each(|_| pace.note(2, 64, MS(5)));
        assert!(pace.rows(2, None, 1 << 20) < 1 << 12);
        // Without a clock all times are zero.
        let mut none = Pace::new(4);
        none.note(2, 0, Duration::ZERO);
        none.note_layers(7, 1, Duration::ZERO);
        assert_eq!((none.rows(2, None, 512), none.layers(2, None, 7)), (FIRST_ROWS, 1));
    }
}
