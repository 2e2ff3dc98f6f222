//! How much of prompts is computed in a step, so that decoding sequences do not wait for them.
//!
//! A few rows of a prompt take almost as long as many, and many take longer than decoding sequences
//! are to wait. So a pass over many rows is computed in pieces, between passes of decoding
//! sequences (layered prefill, <https://arxiv.org/abs/2510.08055>). A piece ends where no time is left in the step: by what the decoding pass before it
//! took too long, the piece is shorter.

use crate::clock::Timer;
use crate::forward::{Cursor, N_PARTS, Part, Step};
use std::cell::RefCell;
use std::time::Duration;

/// Prompt rows of a panel: fewer take about as long.
const PANEL: usize = 16;
/// Prompt rows beside decoding ones until there are measurements, and at least: of fewer, each
/// takes much longer.
const LEAST_ROWS: usize = 64;
/// Steps in which a layer of the prompt rows is computed, about: more rows share each weight, but
/// tiles take longer.
const STEPS: f64 = 2.0;
/// Weight of the newest measurement in a moving average.
const NEWEST: f64 = 0.2;
/// Share of an average by which a measurement counts as another at most, so that the average of
/// passes is near their median.
const OUTLIER: f64 = 0.05;
/// If decoding takes longer beside prompts, as the machine has become slower, a step may take this
/// many times that time.
const BESIDE: f64 = 1.5;
/// Share of the limit that a step is to take at first, at least and at most.
const PLANNED: (f64, f64, f64) = (0.92, 0.8, 0.98);
/// Share of steps that may exceed the limit, and by how much the planned share is lowered after
/// each of them.
const TAIL: (f64, f64) = (0.005, 0.02);
/// Number of classes of decoding rows, by powers of two.
const N_BUCKETS: usize = 12;

/// Times of passes, as moving averages in seconds.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    /// Layers of the model; 1 if passes cannot be cut.
    n_layer: usize,
    /// Time of a pass with this many decoding rows without prompts, by the number's logarithm.
    decode: [Option<f64>; N_BUCKETS],
    /// The last ones beside prompts, as a multiple of it.
    beside: Option<f64>,
    /// Time of a prompt row in one layer.
    row: Option<f64>,
    /// Time of a prompt row between two places where a pass may pause, for each [`Part`] of each
    /// layer that begins a piece (see [`Step::piece`]).
    parts: Vec<Option<f64>>,
    /// Time of a prompt row so far in the layer that is computed.
    of_layer: f64,
    /// Share of the limit that a step is to take, lowered until few exceed it.
    planned: f64,
}

/// The part of a layer that a step is measured as.
fn part_of(step: Step) -> Part {
    match step {
        Step::Layer(_, part) => part,
        Step::Embed | Step::Head => Part::MixerInput,
    }
}

fn average(old: &mut Option<f64>, new: f64) {
    *old = Some(old.map_or(new, |old| old + NEWEST * (new - old)));
}

impl Pace {
    pub(crate) fn new(n_layer: usize) -> Pace {
        let parts = vec![None; n_layer * N_PARTS];
        Pace {
            n_layer,
            decode: [None; N_BUCKETS],
            beside: None,
            row: None,
            parts,
            of_layer: 0.0,
            planned: PLANNED.0,
        }
    }

    fn bucket(n_decode: usize) -> usize {
        (n_decode.max(1).ilog2() as usize).min(N_BUCKETS - 1)
    }

    /// Expected time of a pass of `n_decode` decoding rows, from the nearest class measured.
    fn decode(&self, n_decode: usize) -> Option<f64> {
        let bucket = Pace::bucket(n_decode);
        let (below, above) = self.decode.split_at(bucket);
        above
            .first()
            .copied()
            .flatten()
            .or_else(|| below.iter().rev().chain(&above[1..]).find_map(|&time| time))
    }

    /// Records the time of a pass.
    pub(crate) fn note(&mut self, n_decode: usize, n_prompt: usize, time: Duration) {
        let of_decode = if n_decode > 0 {
            self.decode(n_decode)
        } else {
            Some(0.0)
        };
        match (n_prompt, of_decode) {
            (0, _) => {
                let (old, new) = (&mut self.decode[Pace::bucket(n_decode)], time.as_secs_f64());
                // No pass takes half of its time by chance, but the first ones may take many times
                // as long.
                *old = Some(match *old {
                    Some(old) if new > old / 2.0 => {
                        old + NEWEST * (new - old).clamp(-OUTLIER * old, OUTLIER * old)
                    }
                    _ => new,
                });
            }
            // Never 0: otherwise a slow decoding pass before would allow any number of rows.
            (_, Some(decode)) => {
                let of_prompt = time
                    .saturating_sub(Duration::from_secs_f64(decode))
                    .max(time / 20);
                // All layers but the last, of which a prompt needs little more than keys and
                // values.
                let n_layers = (self.n_layer - 1).max(1);
                average(
                    &mut self.row,
                    of_prompt.as_secs_f64() / (n_prompt.next_multiple_of(PANEL) * n_layers) as f64,
                );
            }
            (_, None) => {}
        }
    }

    /// Records the time of a step's decoding rows beside prompts.
    pub(crate) fn note_beside(&mut self, n_decode: usize, time: Duration) {
        match self.decode(n_decode).filter(|&decode| decode > 0.0) {
            Some(decode) => average(&mut self.beside, time.as_secs_f64() / decode),
            None => self.note(n_decode, 0, time),
        }
    }

    /// Limit of a step beside `n_decode` decoding rows, by default twice its time without prompts.
    fn limit(&self, n_decode: usize, max_itl: Option<Duration>) -> Option<f64> {
        let times = self.beside.map_or(2.0, |beside| (BESIDE * beside).max(2.0));
        max_itl
            .map(|limit| limit.as_secs_f64())
            .or_else(|| Some(times * self.decode(n_decode)?))
    }

    /// Prompt rows times layers for which there is time beside `n_decode` decoding rows.
    fn room(&self, n_decode: usize, max_itl: Option<Duration>) -> Option<f64> {
        let (decode, row) = (self.decode(n_decode)?, self.row.filter(|&row| row > 0.0)?);
        Some((self.planned * self.limit(n_decode, max_itl)? - decode) / row)
    }

    /// Number of prompt rows of the next pass over prompts, at most `n_batch`.
    pub(crate) fn rows(&self, n_decode: usize, max_itl: Option<Duration>, n_batch: usize) -> usize {
        if n_decode == 0 {
            return n_batch;
        }
        let steps = if self.n_layer > 1 { STEPS } else { 1.0 };
        // The cast saturates.
        let rows = self
            .room(n_decode, max_itl)
            .map_or(LEAST_ROWS, |room| (steps * room) as usize / PANEL * PANEL);
        rows.max(LEAST_ROWS).min(n_batch)
    }

    /// Whether there is time for all layers of a pass of `n_prompt` rows.
    pub(crate) fn has_time(
        &self,
        n_decode: usize,
        max_itl: Option<Duration>,
        n_prompt: usize,
    ) -> bool {
        let all = n_prompt.next_multiple_of(PANEL) * self.n_layer;
        n_decode == 0
            || all == 0
            || self.n_layer == 1
            || self
                .room(n_decode, max_itl)
                .is_some_and(|room| room >= all as f64)
    }

    /// For a pass of `n_prompt` rows that goes on from `at`: whether it pauses, as there is no time
    /// left in a step that began with `step`. Beside nobody who decodes there is.
    pub(crate) fn pause(
        &mut self,
        (n_decode, max_itl): (usize, Option<Duration>),
        n_prompt: usize,
        at: Cursor,
        step: Timer,
    ) -> impl Fn(Step) -> bool {
        if !at.is_begun() {
            self.of_layer = 0.0;
        }
        let at = at.step.piece(self.n_layer);
        let limit = if n_decode > 0 {
            self.limit(n_decode, max_itl)
        } else {
            None
        };
        let (rows, before) = (
            n_prompt.next_multiple_of(PANEL) as f64,
            step.elapsed().as_secs_f64(),
        );
        let state = RefCell::new((self, at, before));
        move |next| {
            let (pace, at, before) = &mut *state.borrow_mut();
            let now = step.elapsed().as_secs_f64();
            pace.note_part(*at, next, (now - *before) / rows);
            (*at, *before) = (next, now);
            limit.is_some_and(|limit| {
                now + rows * pace.part(next).unwrap_or(f64::INFINITY) > pace.planned * limit
            })
        }
    }

    /// Records the time of a prompt row from one place where a pass may pause to the next.
    fn note_part(&mut self, at: Step, next: Step, time: f64) {
        average(
            &mut self.parts[at.layer() * N_PARTS + part_of(at) as usize],
            time,
        );
        self.of_layer += time;
        if at.layer() < next.layer() {
            let of_layer = std::mem::take(&mut self.of_layer);
            // The last layer is no measure of others: a prompt needs little more of it than keys
            // and values.
            if next.layer() < self.n_layer {
                average(&mut self.row, of_layer);
            }
        }
    }

    /// Expected time of a prompt row until the pass may pause again, if need be by layers before.
    fn part(&self, next: Step) -> Option<f64> {
        let n_layers = next.layer().saturating_add(1).min(self.n_layer);
        let layers = self.parts.chunks_exact(N_PARTS).take(n_layers);
        layers.rev().find_map(|parts| parts[part_of(next) as usize])
    }

    /// Records the time of a step that had pieces of prompts, so that less than a hundredth of them
    /// takes longer than the limit.
    pub(crate) fn note_step(&mut self, n_decode: usize, max_itl: Option<Duration>, time: Duration) {
        let Some(limit) = self.limit(n_decode, max_itl) else {
            return;
        };
        let (tail, step) = TAIL;
        let exceeds = f64::from(u8::from(time.as_secs_f64() > limit));
        self.planned = (self.planned + step * (tail - exceeds)).clamp(PLANNED.1, PLANNED.2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    /// A pace that has measured 20 ms for 4 decoding rows and half a millisecond for a row of a
    /// prompt in all of 10 layers, a tenth of it in each of the first three parts, four and
    /// three in the others.
    fn measured() -> Pace {
        let mut pace = Pace::new(10);
        for _ in 0..50 {
            pace.note(4, 0, MS(20));
            pace.note(0, 160, MS(9 * 8));
            for (layer, (part, tenths)) in (0..10).flat_map(|layer| {
                [1, 1, 1, 4, 3]
                    .into_iter()
                    .enumerate()
                    .map(move |p| (layer, p))
            }) {
                let next = if part + 1 < PIECES.len() {
                    at(layer, part + 1)
                } else {
                    at(layer + 1, 0)
                };
                pace.note_part(at(layer, part), next, 5e-6 * f64::from(tenths));
            }
        }
        pace.planned = 0.901;
        pace
    }

    /// The parts of a layer that begin pieces.
    const PIECES: [Part; 5] = [
        Part::MixerInput,
        Part::Place,
        Part::AttnOutput,
        Part::FfnInput,
        Part::FfnActivate,
    ];

    fn at(layer: usize, piece: usize) -> Step {
        Step::Layer(layer, PIECES[piece])
    }

    /// A pass that goes on there.
    fn from(step: Step) -> Cursor {
        let mut cursor = Cursor::default();
        cursor.step = step;
        cursor
    }

    #[test]
    fn a_step_takes_what_is_left_of_the_limit() {
        let pace = Pace::new(10);
        assert_eq!(
            (pace.rows(0, None, 512), pace.has_time(0, None, 512)),
            (512, true)
        );
        assert_eq!(
            (pace.rows(4, None, 512), pace.has_time(4, None, 512)),
            (LEAST_ROWS, false)
        );
        let pace = measured();
        // In 0.9 · 40 - 20 ms half a layer of 640 rows, or ten of up to 32.
        assert_eq!(
            (pace.rows(4, None, 1000), pace.rows(4, None, 32)),
            (640, 32)
        );
        assert_eq!(
            [17, 32, 33].map(|n| pace.has_time(4, None, n)),
            [true, true, false]
        );
        // Even if the limit is below the time of decoding, prompts advance slowly.
        assert_eq!(
            (
                pace.rows(4, Some(MS(1)), 512),
                pace.has_time(4, Some(MS(1)), 16)
            ),
            (LEAST_ROWS, false)
        );
        // All at once if there is time, or nobody decodes, or there is no prompt.
        assert_eq!(
            (
                pace.rows(4, Some(MS(9000)), 512),
                pace.has_time(4, Some(MS(9000)), 512)
            ),
            (512, true)
        );
        assert_eq!(
            (
                pace.rows(0, Some(MS(1)), 512),
                pace.has_time(0, Some(MS(1)), 512)
            ),
            (512, true)
        );
        assert!(pace.has_time(4, Some(MS(1)), 0));
        // Other numbers of rows: as for the nearest number measured.
        assert_eq!(pace.rows(64, None, 1000), pace.rows(1, None, 1000));
    }

    #[test]
    fn a_piece_ends_before_what_takes_too_long() {
        let mut pace = measured();
        let mut pauses = |max_itl: u64, n_decode: usize, n_prompt: usize, next: Step| {
            pace.pause(
                (n_decode, Some(MS(max_itl))),
                n_prompt,
                Cursor::default(),
                Timer::start(),
            )(next)
        };
        // 1,600 rows take 8, 8, 8, 32 and 24 ms.
        assert!(!pauses(10, 4, 1600, at(1, 1)) && pauses(10, 4, 1600, at(1, 3)));
        assert!(!pauses(30, 4, 1600, at(1, 4)) && pauses(0, 4, 1, at(1, 1)));
        assert!(!pauses(0, 0, 1600, at(1, 1)));
        // What was never measured could take any time; otherwise other layers tell.
        let mut pace = Pace::new(10);
        pace.note(4, 0, MS(20));
        let pauses = |pace: &mut Pace, at: Cursor, next: Step| {
            pace.pause((4, None), 16, at, Timer::start())(next)
        };
        assert!(pauses(&mut pace, Cursor::default(), at(0, 1)));
        assert!(!pauses(&mut pace, from(at(0, 1)), at(1, 0)));
    }

    #[test]
    fn few_steps_take_longer_than_the_limit() {
        let mut pace = measured();
        (0..600).for_each(|_| pace.note_step(4, None, MS(39)));
        assert!(pace.planned > 0.95, "{}", pace.planned);
        let before = pace.rows(4, None, 10_000);
        (0..5).for_each(|_| pace.note_step(4, None, MS(41)));
        assert!(pace.rows(4, None, 10_000) < before);
        (0..100).for_each(|_| pace.note_step(4, None, MS(41)));
        assert_eq!(pace.planned, PLANNED.1);
    }

    #[test]
    fn the_limit_is_that_without_prompts() {
        let mut pace = measured();
        (0..50).for_each(|_| pace.note_beside(4, MS(25)));
        assert_eq!(pace.limit(4, None), Some(0.04));
        // Unless the machine has become slower, for whatever reason.
        (0..50).for_each(|_| pace.note_beside(4, MS(40)));
        assert!((pace.limit(4, None).unwrap() - 0.06).abs() < 1e-4);
        // Until there is any other measurement.
        let mut pace = Pace::new(10);
        pace.note_beside(4, MS(30));
        assert_eq!(pace.limit(4, None), Some(0.06));
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
        // A pass that others delayed counts little, a first one that took long is forgotten.
        let decode = pace.decode(2).unwrap();
        pace.note(2, 0, MS(1000));
        assert!(pace.decode(2).unwrap() < 1.02 * decode);
        pace.note(2, 0, MS(4));
        assert_eq!(pace.decode(2), Some(0.004));
        // Without a clock all times are zero.
        let mut none = Pace::new(4);
        none.note(2, 0, Duration::ZERO);
        none.note(0, 7, Duration::ZERO);
        assert_eq!(
            (none.rows(2, None, 512), none.has_time(2, None, 7)),
            (LEAST_ROWS, false)
        );
    }
}
