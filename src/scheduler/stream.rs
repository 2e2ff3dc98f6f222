//! The answer of a request, passed from the schedule to its reader.

use crate::compute::pooling::PooledStates;
use crate::decode::output::{Finish, TokenText};
use crate::scheduler::ScheduleError;
use crate::scheduler::request::RequestId;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Signals to the computing thread that there may be something to do.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    is_set: Mutex<bool>,
    set: Condvar,
}

impl Wake {
    pub(crate) fn set(&self) {
        *self.is_set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.set.notify_all();
    }

    /// Waits until the signal is set, at most for `timeout`, and resets it.
    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        let guard = self.is_set.lock().unwrap_or_else(PoisonError::into_inner);
        let mut guard = match timeout {
            None => self
                .set
                .wait_while(guard, |is_set| !*is_set)
                .unwrap_or_else(PoisonError::into_inner),
            Some(timeout) => {
                let outcome = self
                    .set
                    .wait_timeout_while(guard, timeout, |is_set| !*is_set);
                outcome.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        *guard = false;
    }
}

#[derive(Debug)]
struct Channel {
    state: Mutex<State>,
    moved: Condvar,
    is_cancelled: AtomicBool,
    /// Pieces that may wait for the reader before the request pauses.
    n_pieces: usize,
    wake: Arc<Wake>,
}

#[derive(Debug, Default)]
struct State {
    pieces: VecDeque<TokenText>,
    outcome: Option<Result<Finish, ScheduleError>>,
    pooled: PooledStates,
    /// Whether the reader lags behind: from `n_pieces` waiting pieces on, until half of them are
    /// left.
    is_paused: bool,
    /// Waker of the reader, if it is a waiting task.
    waker: Option<Waker>,
}

impl Channel {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes the reader.
    fn tell(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        let waker = state.waker.take();
        drop(state);
        self.moved.notify_all();
        waker.into_iter().for_each(Waker::wake);
    }
}

/// Both ends of a request's answer.
pub(crate) fn stream(id: RequestId, n_pieces: usize, wake: &Arc<Wake>) -> (Sender, Stream) {
    let channel = Arc::new(Channel {
        state: Mutex::default(),
        moved: Condvar::new(),
        is_cancelled: AtomicBool::new(false),
        n_pieces,
        wake: Arc::clone(wake),
    });
    (
        Sender(Arc::clone(&channel)),
        Stream {
            id,
            channel,
            finish: None,
            pooled: PooledStates::default(),
            is_over: false,
        },
    )
}

/// The schedule's end. If it is dropped without an outcome, the answer ends with
/// [`ScheduleError::Ended`].
#[derive(Debug)]
pub(crate) struct Sender(Arc<Channel>);

impl Sender {
    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.is_cancelled.load(Ordering::Relaxed)
    }

    /// Whether the reader lags so far behind that the request must pause.
    pub(crate) fn is_paused(&self) -> bool {
        self.0.lock().is_paused
    }

    pub(crate) fn send(&self, pieces: impl Iterator<Item = TokenText>) {
        self.0.tell(|state| {
            state.pieces.extend(pieces);
            state.is_paused |= state.pieces.len() >= self.0.n_pieces;
        });
    }

    pub(crate) fn end(&self, outcome: Result<Finish, ScheduleError>, pooled: PooledStates) {
        self.0.tell(|state| {
            if state.outcome.is_none() {
                (state.outcome, state.pooled) = (Some(outcome), pooled);
            }
        });
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.end(Err(ScheduleError::Ended), PooledStates::default());
    }
}

/// The pieces of a request's answer, as they come; nothing follows an error.
///
/// Iterating waits for the next piece, [`Stream::poll_next`] does not. At most
/// [`ScheduleOptions::n_pieces`](crate::scheduler::ScheduleOptions::n_pieces) pieces (and the
/// tokens that a grammar forces in one pass) wait for the reader: slow reading pauses this request,
/// and no other. Dropping the stream cancels the request within a pass.
#[derive(Debug)]
pub struct Stream {
    id: RequestId,
    channel: Arc<Channel>,
    finish: Option<Finish>,
    pooled: PooledStates,
    is_over: bool,
}

impl Stream {
    /// The request's number, as an [`Observer`](crate::scheduler::Observer) gets it.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// How the answer ended, once all of its pieces were read; `None` after an error.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Mean hidden states of prompt and answer, once all of its pieces were read; see
    /// [`SessionOptions::pooled_layer`](crate::SessionOptions::pooled_layer).
    pub fn take_pooled(&mut self) -> PooledStates {
        std::mem::take(&mut self.pooled)
    }

    /// Ends the request within a pass, as
    /// [`StopReason::Cancelled`](crate::StopReason::Cancelled).
    pub fn cancel(&self) {
        self.channel.is_cancelled.store(true, Ordering::Relaxed);
        self.channel.wake.set();
    }

    /// The next piece, if it is available; `Ready(None)` at the end. Otherwise the task of `cx` is
    /// woken when it arrives, as for futures.
    pub fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<TokenText, ScheduleError>>> {
        let channel = Arc::clone(&self.channel);
        let mut state = channel.lock();
        let piece = self.take(&mut state);
        if piece.is_pending() {
            state.waker = Some(cx.waker().clone());
        }
        piece
    }

    /// All remaining text.
    ///
    /// # Errors
    /// The first error of the answer.
    pub fn text(self) -> Result<String, ScheduleError> {
        self.map(|piece| Ok(piece?.text)).collect()
    }

    fn take(&mut self, state: &mut State) -> Poll<Option<Result<TokenText, ScheduleError>>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        if let Some(piece) = state.pieces.pop_front() {
            if state.is_paused && state.pieces.len() <= self.channel.n_pieces / 2 {
                state.is_paused = false;
                self.channel.wake.set();
            }
            return Poll::Ready(Some(Ok(piece)));
        }
        match state.outcome.take() {
            None => Poll::Pending,
            Some(outcome) => {
                self.is_over = true;
                Poll::Ready(match outcome {
                    Ok(finish) => {
                        self.finish = Some(finish);
                        self.pooled = std::mem::take(&mut state.pooled);
                        None
                    }
                    Err(error) => Some(Err(error)),
                })
            }
        }
    }
}

impl Iterator for Stream {
    type Item = Result<TokenText, ScheduleError>;

    fn next(&mut self) -> Option<Self::Item> {
        let channel = Arc::clone(&self.channel);
        let mut state = channel.lock();
        loop {
            if let Poll::Ready(piece) = self.take(&mut state) {
                return piece;
            }
            state = channel
                .moved
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.cancel();
    }
}
