//! Long work in short slices.

use crate::clock::Timer;
use std::time::Duration;

/// Time after which a slice ends where it can: half of the millisecond that it may take.
const SLICE_TIME: Duration = Duration::from_micros(500);

/// Rests after a slice that took so long; false: gives up.
pub(crate) type Pause<'p> = &'p mut dyn FnMut(Duration) -> bool;

/// The current slice of work that can be interrupted.
pub(crate) struct Slices<'p> {
    timer: Timer,
    pause: Option<Pause<'p>>,
}

impl<'p> Slices<'p> {
    /// Slices with rests between them.
    pub(crate) fn new(pause: Pause<'p>) -> Slices<'p> {
        Slices { timer: Timer::start(), pause: Some(pause) }
    }

    /// One slice, however long.
    pub(crate) fn whole() -> Slices<'static> {
        Slices { timer: Timer::start(), pause: None }
    }

    /// Ends the slice if it is long enough; `None`: gives up.
    pub(crate) fn tick(&mut self) -> Option<()> {
        let Some(pause) = &mut self.pause else { return Some(()) };
        let took = self.timer.elapsed();
        if took >= SLICE_TIME {
            let goes_on = pause(took);
            self.timer = Timer::start();
            return goes_on.then_some(());
        }
        Some(())
    }
}
