//! Consolidation by itself, while nobody else computes.

use crate::memory::{
    Consolidation, ConsolidationOptions, ConsolidationProgress, ConsolidationReport, Memory,
    MemoryError,
};
use crate::sona::background::is_busy_since;
use ruvllm::{CancelToken, Engine};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval at which one that rests looks whether it is to end, and one that computes whether somebody
/// waits.
const NAP: Duration = Duration::from_millis(2);
/// Time without requests before work that gave way goes on.
const PAUSE: Duration = Duration::from_secs(1);

/// When memories are consolidated by themselves.
#[derive(Clone, Debug, PartialEq)]
pub struct IdleOptions {
    /// Entries that are new, changed or corrected, from which on it is due. Default 16.
    pub due: usize,
    /// Time without a request before it begins. Default 30 seconds.
    pub quiet: Duration,
    /// How it is done.
    pub consolidation: ConsolidationOptions,
}

impl Default for IdleOptions {
    fn default() -> Self {
        IdleOptions {
            due: 16,
            quiet: Duration::from_secs(30),
            consolidation: ConsolidationOptions::default(),
        }
    }
}

/// Consolidates memories on a thread of its own, one after the other, until it is dropped. A request
/// that comes meanwhile waits for no more than a part of a pass, and nothing is done until it is
/// answered. What an end interrupts goes on with the next beginning.
#[derive(Debug)]
#[must_use = "consolidation ends when this is dropped"]
pub struct IdleConsolidation {
    is_ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl IdleConsolidation {
    /// Begins. `control` is text that the model must stay good at; `tell` is called with what came of
    /// each consolidation, and the place of its memory among `memories`.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(
        memories: Vec<Arc<Mutex<Memory>>>,
        engine: &Engine,
        control: Vec<u32>,
        options: IdleOptions,
        tell: impl Fn(usize, Result<ConsolidationReport, MemoryError>) + Send + 'static,
    ) -> std::io::Result<IdleConsolidation> {
        let is_ended = Arc::new(AtomicBool::new(false));
        let idle = Idle {
            is_ended: Arc::clone(&is_ended),
            engine: engine.clone(),
            control,
            options,
        };
        let thread = std::thread::Builder::new().name("consolidation".into());
        let thread = thread.spawn(move || {
            // What failed is not tried again before something changes.
            let mut failed_at = vec![None; memories.len()];
            while idle.is_quiet_for(idle.options.quiet) {
                for (i, memory) in memories.iter().enumerate() {
                    let n_new = locked(memory).n_unconsolidated();
                    if n_new < idle.options.due || failed_at[i] == Some(n_new) {
                        continue;
                    }
                    let outcome = idle.consolidate(memory);
                    failed_at[i] = outcome.is_err().then_some(n_new);
                    if let Some(outcome) = outcome.transpose() {
                        tell(i, outcome);
                    }
                }
            }
        })?;
        Ok(IdleConsolidation {
            is_ended,
            thread: Some(thread),
        })
    }
}

impl Drop for IdleConsolidation {
    fn drop(&mut self) {
        self.is_ended.store(true, Ordering::Relaxed);
        // One that panicked has said so.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn locked(memory: &Mutex<Memory>) -> MutexGuard<'_, Memory> {
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Idle {
    is_ended: Arc<AtomicBool>,
    engine: Engine,
    control: Vec<u32>,
    options: IdleOptions,
}

impl Idle {
    fn is_ended(&self) -> bool {
        self.is_ended.load(Ordering::Relaxed)
    }

    /// Waits until nobody has computed for so long; false if it is to end.
    fn is_quiet_for(&self, time: Duration) -> bool {
        let (mut turns, mut quiet) = (self.engine.turns().begun, Duration::ZERO);
        while quiet < time {
            if self.is_ended() {
                return false;
            }
            std::thread::sleep(NAP);
            quiet += NAP;
            if is_busy_since(&self.engine, turns) {
                (turns, quiet) = (self.engine.turns().begun, Duration::ZERO);
            }
        }
        !self.is_ended()
    }

    /// To the end, unless its owner ends or what it learns is forgotten meanwhile.
    fn consolidate(
        &self,
        memory: &Mutex<Memory>,
    ) -> Result<Option<ConsolidationReport>, MemoryError> {
        let options = &self.options.consolidation;
        let mut of = locked(memory).consolidation(&self.engine, &self.control, options)?;
        let mut turns = self.engine.turns().begun;
        loop {
            if is_busy_since(&self.engine, turns) && !self.is_quiet_for(PAUSE) {
                return Ok(None);
            }
            let tokens = of.cancel_tokens();
            let step = self.step(&mut of, &tokens);
            turns = self.engine.turns().begun;
            match step {
                Ok(Some(_)) => {}
                Ok(None) => return locked(memory).conclude(&of).map(Some),
                // The part is done again when nobody waits.
                Err(_) if tokens.iter().any(CancelToken::is_cancelled) => {
                    if !self.is_quiet_for(PAUSE) {
                        return Ok(None);
                    }
                }
                Err(error) => return Err(error),
            }
            if self.is_ended() || !locked(memory).save_consolidation(&of)? {
                return Ok(None);
            }
        }
    }

    /// A step, which gives way to who waits.
    fn step(
        &self,
        of: &mut Consolidation,
        tokens: &[CancelToken],
    ) -> Result<Option<ConsolidationProgress>, MemoryError> {
        tokens.iter().for_each(CancelToken::reset);
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    if self.engine.turns().unfinished > 1 || self.is_ended() {
                        tokens.iter().for_each(CancelToken::cancel);
                    }
                    std::thread::sleep(NAP);
                }
            });
            let step = of.step();
            is_done.store(true, Ordering::Relaxed);
            step
        })
    }
}
