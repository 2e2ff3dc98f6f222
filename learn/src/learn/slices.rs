//! Long work in short slices.

use crate::clock::Timer;
use std::time::Duration;

/// Time after which a slice ends where it can: a quarter of the millisecond that it may take, as
/// what cannot be interrupted takes up to the rest.
const SLICE_TIME: Duration = Duration::from_micros(250);

/// Rests after a slice that took so long; false: gives up.
pub(crate) type Pause<'p> = &'p mut dyn FnMut(Duration) -> bool;

/// The current slice of work that can be interrupted.
pub(crate) struct Slices<'p> {
    timer: Timer,
    pause: Option<Pause<'p>>,
    goes_on: bool,
}

impl<'p> Slices<'p> {
    /// Slices with rests between them.
    pub(crate) fn new(pause: Pause<'p>) -> Slices<'p> {
        Slices {
            timer: Timer::start(),
            pause: Some(pause),
            goes_on: true,
        }
    }

    /// One slice, however long.
    pub(crate) fn whole() -> Slices<'static> {
        Slices {
            timer: Timer::start(),
            pause: None,
            goes_on: true,
        }
    }

    /// Ends the slice if it is long enough; `None`: gives up, or has given up before.
    pub(crate) fn tick(&mut self) -> Option<()> {
        if let Some(pause) = self.pause.as_mut().filter(|_| self.goes_on) {
            let took = self.timer.elapsed();
            if took >= SLICE_TIME {
                self.goes_on = pause(took);
                self.timer = Timer::start();
            }
        }
        self.goes_on.then_some(())
    }

    /// Whether it has not given up.
    pub(crate) fn goes_on(&self) -> bool {
        self.goes_on
    }
}
