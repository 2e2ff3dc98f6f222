//! Timing, on targets that have a clock.

use std::time::Duration;

/// Measures time from its creation; always zero on wasm32-unknown-unknown, which has no clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timer(
    #[cfg(not(all(target_arch = "wasm32", target_os = "unknown")))] std::time::Instant,
);

impl Timer {
    pub(crate) fn start() -> Timer {
        Timer(
            #[cfg(not(all(target_arch = "wasm32", target_os = "unknown")))]
            std::time::Instant::now(),
        )
    }

    pub(crate) fn elapsed(&self) -> Duration {
        #[cfg(not(all(target_arch = "wasm32", target_os = "unknown")))]
        return self.0.elapsed();
        #[cfg(all(target_arch = "wasm32", target_os = "unknown"))]
        return Duration::ZERO;
    }
}

/// Milliseconds since 1970; always zero on wasm32-unknown-unknown.
pub(crate) fn unix_millis() -> u64 {
    #[cfg(not(all(target_arch = "wasm32", target_os = "unknown")))]
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    #[cfg(all(target_arch = "wasm32", target_os = "unknown"))]
    let now = Duration::ZERO;
    now.as_millis() as u64
}
