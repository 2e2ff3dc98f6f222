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
