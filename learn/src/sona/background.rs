//! Thread that learns in the background.

use crate::clock::Timer;
use crate::sona::builder::SonaBuilder;
use crate::sona::learning::Sona;
use ruvllm::Engine;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// While others compute, it rests so many times as long as it computed: it takes at most 2 % of the
/// time.
const BUSY_REST: u32 = 49;
/// Time after which one that rests looks whether its owner waits.
const NAP: Duration = Duration::from_millis(10);
/// Longest time between two attempts of the background, after failures.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Whether somebody computes with an engine, or did since so many turns were begun.
pub(crate) fn is_busy_since(engine: &Engine, n_turns: u64) -> bool {
    let now = engine.turns();
    now.begun != n_turns || now.unfinished > 0
}

impl Sona {
    /// Begins to learn in the background, until the result is dropped.
    ///
    /// A thread looks at what is pending at each interval. It learns in passes of a few tokens, of
    /// which other passes wait for one at most, and rests after each for as long as it took, or
    /// 49 times as long if somebody else computes meanwhile.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(&self) -> std::io::Result<Background> {
        let (stop, stopped) = channel::<()>();
        let sona = self.clone();
        let SonaBuilder {
            background_interval_ms,
            background_min_samples,
            max_pending_samples,
            ..
        } = self.shared.options;
        let interval = Duration::from_millis(background_interval_ms);
        let thread = std::thread::Builder::new()
            .name("sona".into())
            .spawn(move || {
                let mut wait = interval;
                // Too many wait: until they are learnt it does not rest.
                let mut forced = false;
                while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                    // False if it is to end, or its owner waits.
                    let rest = |time: Duration| {
                        let timer = Timer::start();
                        loop {
                            let left = time.saturating_sub(timer.elapsed()).min(NAP);
                            let goes_on =
                                stopped.recv_timeout(left) == Err(RecvTimeoutError::Timeout);
                            if left.is_zero() || !goes_on || sona.has_owner() {
                                return goes_on && !sona.has_owner();
                            }
                        }
                    };
                    let outcome = sona.learn(background_min_samples, &mut |took| {
                        forced |= sona.state().pending.len() >= max_pending_samples;
                        if forced {
                            return rest(Duration::ZERO);
                        }
                        let engine = &sona.shared.engine;
                        let n_turns = engine.turns().begun;
                        rest(took)
                            && (!is_busy_since(engine, n_turns)
                                || rest(BUSY_REST.saturating_sub(1) * took))
                    });
                    let outcome = outcome.and_then(|learnt| {
                        forced &= learnt;
                        if !learnt {
                            sona.state().folder.sync()?;
                        }
                        Ok(())
                    });
                    // What fails, such as a full disk, is not tried again at once.
                    wait = if outcome.is_ok() {
                        interval
                    } else {
                        (2 * wait).clamp(interval, LONGEST_WAIT.max(interval))
                    };
                    sona.state().failure = outcome.err().map(|error| error.to_string());
                }
            })?;
        Ok(Background {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

/// The background at work; ends when this is dropped.
#[derive(Debug)]
#[must_use = "the background ends when this is dropped"]
pub struct Background {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop = None;
        // One that panicked has said so.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
