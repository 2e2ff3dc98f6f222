//! Time, on targets that have a clock: wasm32-unknown-unknown has none, and counts zero.

use std::time::{Duration, Instant, SystemTime};

const HAS_CLOCK: bool = !cfg!(all(target_arch = "wasm32", target_os = "unknown"));

/// Measures time from its creation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timer(Option<Instant>);

impl Timer {
    pub(crate) fn start() -> Timer {
        Timer(HAS_CLOCK.then(Instant::now))
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.0.map_or(Duration::ZERO, |started| started.elapsed())
    }
}

/// Milliseconds since 1970.
pub(crate) fn unix_millis() -> u64 {
    let now = HAS_CLOCK.then(|| SystemTime::now().duration_since(SystemTime::UNIX_EPOCH));
    now.map_or(0, |now| now.unwrap_or_default().as_millis() as u64)
}
