//! Times and speeds as they are told.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Seconds since 1970; 0 where the clock is before that.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}

/// Milliseconds below which 50, 95 and 99 of a hundred times are; nothing of no times.
pub(crate) fn percentiles(times: &[Duration]) -> Vec<f64> {
    let mut times = times.to_vec();
    times.sort_unstable();
    let percents: &[usize] = if times.is_empty() { &[] } else { &[50, 95, 99] };
    percents
        .iter()
        .map(|p| milliseconds(times[(times.len() * p).div_ceil(100) - 1]))
        .collect()
}

/// [`percentiles`] as a cell.
pub(crate) fn slashes(times: &[f64]) -> String {
    times
        .iter()
        .map(|time| format!("{time:.1}"))
        .collect::<Vec<_>>()
        .join("/")
}

/// Milliseconds to the microsecond.
pub(crate) fn milliseconds(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}

pub(crate) fn per_second(n: usize, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 {
        (n as f64 / seconds * 1e3).round() / 1e3
    } else {
        0.0
    }
}
