//! What a pass takes, by its number of rows.

use std::time::Duration;

/// Most rows that are told apart.
const MAX_ROWS: usize = 64;
/// Weight of the newest measurement.
const NEWEST: f64 = 0.2;
/// Passes after which a measurement is too old: the machine may have been busy then.
const OLD: u64 = 1024;
/// What each row beyond the first adds at least, as a share of the first, as far as nobody measured
/// it.
const LEAST_SLOPE: f64 = 0.05;

/// Time of passes over so many generated rows, each with logits, as measured: a moving average, and
/// what it says of numbers that were not measured.
#[derive(Clone, Debug)]
pub(crate) struct RowTimes {
    /// Seconds, and the pass of the last measurement, by the number of rows less one; 0 seconds
    /// were never measured.
    rows: [(f64, u64); MAX_ROWS],
    n_passes: u64,
}

impl Default for RowTimes {
    fn default() -> Self {
        RowTimes {
            rows: [(0.0, 0); MAX_ROWS],
            n_passes: 0,
        }
    }
}

impl RowTimes {
    /// Learns from a pass over `n` rows.
    pub(crate) fn note(&mut self, n: usize, time: Duration) {
        let is_old = self.get(n).is_none();
        // A first pass that others delayed: `n` rows never take longer than `n` passes.
        let most = self.get(1).map_or(f64::INFINITY, |one| one * n as f64);
        self.n_passes += 1;
        let (n_passes, time) = (self.n_passes, time.as_secs_f64());
        if let Some((mean, pass)) = n.checked_sub(1).and_then(|i| self.rows.get_mut(i)) {
            // One pass that others delayed is not to count for more than twice what it would take.
            let time = time.min(if is_old { most } else { 2.0 * *mean });
            *mean += (time - *mean) * if is_old { 1.0 } else { NEWEST };
            *pass = n_passes;
            // Fewer rows never take longer. Whoever always drafts would not measure them again.
            let most = *mean;
            let fewer = self.rows[..n - 1].iter_mut().filter(|_| most > 0.0);
            fewer.for_each(|(mean, _)| *mean = mean.min(most));
        }
    }

    /// What was measured, by number of rows.
    pub(crate) fn measured(&self) -> Vec<(usize, Duration)> {
        (1..=MAX_ROWS)
            .filter_map(|n| Some((n, Duration::from_secs_f64(self.get(n)?))))
            .collect()
    }

    /// Begins with what was measured before, as far as nothing was measured since.
    pub(crate) fn assume(&mut self, measured: &[(usize, Duration)]) {
        for &(n, time) in measured {
            if self.get(n).is_none() {
                self.note(n, time);
            }
        }
    }

    /// What was measured, unless that is too old; nothing without a clock.
    fn get(&self, n: usize) -> Option<f64> {
        let &(time, pass) = self.rows.get(n.checked_sub(1)?)?;
        (time > 0.0 && self.n_passes - pass < OLD).then_some(time)
    }

    /// Seconds that a pass over `n` rows is expected to take, if any pass was measured: on the line
    /// between the nearest measurements, or that of the first and the last.
    pub(crate) fn estimate(&self, n: usize) -> Option<f64> {
        if !(1..=MAX_ROWS).contains(&n) {
            return None;
        }
        if let Some(time) = self.get(n) {
            return Some(time);
        }
        let measured = |n: usize| Some((n, self.get(n)?));
        let below = (1..n).rev().find_map(measured);
        let above = (n + 1..=MAX_ROWS).find_map(measured);
        let line = |(n0, t0): (usize, f64), slope: f64| t0 + (n as f64 - n0 as f64) * slope;
        match (below, above) {
            (None, None) => None,
            (Some(below), Some(above)) => Some(line(
                below,
                (above.1 - below.1) / (above.0 - below.0) as f64,
            )),
            // Fewer rows never take longer.
            (None, Some(above)) => Some(above.1),
            (Some(below), None) => {
                let first = (1..n).find_map(measured).unwrap_or(below);
                let slope = (below.1 - first.1) / (below.0 - first.0).max(1) as f64;
                Some(line(
                    below,
                    slope.max(LEAST_SLOPE * first.1 / first.0 as f64),
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn close(a: Option<f64>, b: f64) {
        assert!(a.is_some_and(|a| (a - b).abs() < 1e-9), "{a:?} {b}");
    }

    #[test]
    fn what_was_not_measured_lies_on_a_line() {
        let mut times = RowTimes::default();
        assert_eq!(times.estimate(1), None);
        times.note(1, MS(10));
        close(times.estimate(1), 0.01);
        close(times.estimate(5), 0.01 + 4.0 * 0.0005);
        times.note(5, MS(30));
        close(times.estimate(3), 0.02);
        close(times.estimate(9), 0.05);
        assert_eq!(
            (times.estimate(0), times.estimate(MAX_ROWS + 1)),
            (None, None)
        );
        // Outside the table nothing is learnt.
        times.note(0, MS(1));
        times.note(MAX_ROWS + 1, MS(1));
        // A delay counts little.
        times.note(1, MS(10_000));
        close(times.estimate(1), 0.012);
        times.note(2, MS(10_000));
        close(times.estimate(2), 0.024);
    }

    #[test]
    fn fewer_rows_take_no_longer() {
        let mut times = RowTimes::default();
        // Others delayed the only pass over one row.
        times.note(1, MS(40));
        times.note(3, MS(12));
        close(times.estimate(1), 0.012);
        close(times.estimate(2), 0.012);
        times.note(2, MS(11));
        close(times.estimate(1), 0.011);
        close(times.estimate(3), 0.012);
    }

    #[test]
    fn old_measurements_are_forgotten() {
        let mut times = RowTimes::default();
        times.note(4, MS(9));
        times.note(1, MS(1));
        close(times.estimate(4), 0.009);
        (0..OLD).for_each(|_| times.note(1, MS(1)));
        close(times.estimate(4), 0.001 + 3.0 * 0.00005);
    }

    #[test]
    fn what_was_measured_before_is_a_beginning() {
        let (mut times, mut later) = (RowTimes::default(), RowTimes::default());
        times.note(1, MS(10));
        times.note(4, MS(16));
        assert_eq!(times.measured(), [(1, MS(10)), (4, MS(16))]);
        later.note(4, MS(20));
        later.assume(
            &[
                times.measured(),
                vec![(0, MS(1)), (MAX_ROWS + 1, MS(1)), (2, Duration::ZERO)],
            ]
            .concat(),
        );
        close(later.estimate(1), 0.01);
        close(later.estimate(4), 0.02);
        close(later.estimate(2), 0.01 + 0.01 / 3.0);
    }

    #[test]
    fn without_a_clock_nothing_is_known() {
        let mut times = RowTimes::default();
        (1..5).for_each(|n| times.note(n, Duration::ZERO));
        assert_eq!(times.estimate(2), None);
    }
}
