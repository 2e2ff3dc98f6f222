//! A bar for work that takes long.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A bar on a terminal for work that takes over a second; nothing otherwise. It is drawn by a
/// thread of its own, since a single step of the work may take longer than that. While there are
/// several, the last one is drawn.
pub(crate) struct Progress {
    shared: Arc<Shared>,
    painter: Option<JoinHandle<()>>,
}

/// Bars that are there.
static N_BARS: AtomicU64 = AtomicU64::new(0);

#[derive(Default)]
struct Shared {
    done: AtomicU64,
    ended: Mutex<bool>,
    wake: Condvar,
}

impl Progress {
    pub(crate) fn new(what: &'static str, total: u64) -> Progress {
        let shared = Arc::<Shared>::default();
        let painter = io::stderr().is_terminal().then(|| {
            let (shared, bars) = (
                Arc::clone(&shared),
                N_BARS.fetch_add(1, Ordering::Relaxed) + 1,
            );
            std::thread::spawn(move || shared.paint(what, total, bars))
        });
        Progress { shared, painter }
    }

    /// One that shows nothing: what is printed tells how far the work is.
    pub(crate) fn hidden() -> Progress {
        Progress {
            shared: Arc::default(),
            painter: None,
        }
    }

    pub(crate) fn set(&self, done: u64) {
        self.shared.done.store(done, Ordering::Relaxed);
    }
}

impl Shared {
    /// Draws the bar that is number `bars` of those that are there.
    fn paint(&self, what: &'static str, total: u64, bars: u64) {
        let start = Instant::now();
        let mut wait = Duration::from_secs(1);
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        while !*ended {
            ended = self
                .wake
                .wait_timeout(ended, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            if !*ended && N_BARS.load(Ordering::Relaxed) == bars {
                let line = bar(
                    what,
                    self.done.load(Ordering::Relaxed),
                    total,
                    start.elapsed(),
                );
                let _ = write!(io::stderr(), "\r{line}\x1b[K");
                wait = Duration::from_millis(200);
            }
        }
        // Only a bar that was drawn is wiped off.
        if wait < Duration::from_secs(1) {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// `what`, 30 characters of bar, percent and seconds.
fn bar(what: &str, done: u64, total: u64, elapsed: Duration) -> String {
    const WIDTH: u64 = 30;
    let done = done.min(total);
    let share = |n| u128::from(done) * u128::from(n) / u128::from(total.max(1));
    let filled = "#".repeat(share(WIDTH) as usize);
    format!(
        "{what} [{filled:<30}] {:>3} % {} s",
        share(100),
        elapsed.as_secs()
    )
}

impl Drop for Progress {
    fn drop(&mut self) {
        *self
            .shared
            .ended
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.wake.notify_all();
        if let Some(painter) = self.painter.take() {
            // A painter that panicked has nothing to say about the work.
            let _ = painter.join();
            N_BARS.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_fill() {
        let bar = |done, total| bar("loading", done, total, Duration::from_secs(7));
        assert_eq!(bar(0, 8), format!("loading [{}]   0 % 7 s", " ".repeat(30)));
        assert_eq!(
            bar(4, 8),
            format!("loading [{}{}]  50 % 7 s", "#".repeat(15), " ".repeat(15))
        );
        assert_eq!(bar(9, 8), format!("loading [{}] 100 % 7 s", "#".repeat(30)));
        assert_eq!(bar(0, 0), format!("loading [{}]   0 % 7 s", " ".repeat(30)));
    }
}
