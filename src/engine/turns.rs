//! Turns of callers: first come, first served.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Interval at which a waiting caller checks whether it was cancelled.
const POLL: Duration = Duration::from_millis(5);

/// Turns of callers: first come, first served.
#[derive(Debug, Default)]
pub(super) struct Turns {
    pub(super) queue: Mutex<Queue>,
    pub(super) moved: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Tickets of waiting callers; the first one has its turn.
    pub(super) tickets: VecDeque<u64>,
    pub(super) last: u64,
}

/// Turns of those who compute with an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TurnCounts {
    /// Those that were asked for so far.
    pub begun: u64,
    /// Of them, those that have not ended: one computes, the others wait for it.
    pub unfinished: usize,
}

/// A caller's turn, which ends on drop.
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    pub(super) fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn counts(&self) -> TurnCounts {
        let queue = self.lock();
        TurnCounts {
            begun: queue.last,
            unfinished: queue.tickets.len(),
        }
    }

    /// Waits for a turn; returns `None` if `cancelled` meanwhile.
    pub(super) fn wait(&self, cancelled: impl Fn() -> bool) -> Option<Turn<'_>> {
        let mut queue = self.lock();
        queue.last += 1;
        let ticket = queue.last;
        queue.tickets.push_back(ticket);
        while queue.tickets.front() != Some(&ticket) {
            if cancelled() {
                queue.tickets.retain(|&t| t != ticket);
                return None;
            }
            (queue, _) = self
                .moved
                .wait_timeout(queue, POLL)
                .unwrap_or_else(PoisonError::into_inner);
        }
        Some(Turn(self))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.lock().tickets.pop_front();
        self.0.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn turns_are_exclusive_and_in_order() {
        let (turns, inside, order) = (
            Turns::default(),
            AtomicUsize::new(0),
            Mutex::new(Vec::new()),
        );
        let first = turns.wait(|| false);
        std::thread::scope(|s| {
            for i in 0..4 {
                let (turns, inside, order) = (&turns, &inside, &order);
                s.spawn(move || {
                    let turn = turns.wait(|| false);
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    order.lock().unwrap().push(i);
                    inside.fetch_sub(1, Ordering::SeqCst);
                    drop(turn);
                });
                while turns.lock().tickets.len() < i + 2 {
                    std::thread::yield_now();
                }
            }
            drop(first);
        });
        assert_eq!(order.into_inner().unwrap(), [0, 1, 2, 3]);
    }

    #[test]
    fn one_that_waits_can_be_cancelled() {
        let turns = Turns::default();
        let first = turns.wait(|| false).unwrap();
        assert!(turns.wait(|| true).is_none());
        assert_eq!(turns.lock().tickets.len(), 1);
        drop(first);
        assert!(
            turns.wait(|| true).is_some(),
            "who need not wait has its turn"
        );
    }
}
