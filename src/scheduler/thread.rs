//! A schedule on its own thread.

use crate::engine::engine::Engine;
use crate::scheduler::ScheduleError;
use crate::scheduler::admission::{AdmissionConfig, ScheduleOptions};
use crate::scheduler::live::Live;
use crate::scheduler::request::{NoObserver, Observer, Request};
use crate::scheduler::schedule::Schedule;
use crate::scheduler::stream::{Stream, Wake};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Requests on an engine, computed concurrently by a separate thread: a handle that is cheap to
/// clone, `Send + Sync + 'static`.
///
/// When the last handle is dropped, requests whose [`Stream`]s still exist are computed to their
/// ends.
///
/// ```
/// use ruvllm::scheduler::{Request, ScheduleOptions, Scheduler};
/// use ruvllm::{Model, Sampler, SamplerOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
/// let scheduler = Scheduler::new(&model.engine()?, &ScheduleOptions::default())?;
/// let tokenizer = model.tokenizer().unwrap();
/// let sampler = Sampler::new(SamplerOptions { temperature: 0.0, ..Default::default() })?;
/// let urgent = Request::new(tokenizer.encode_prompt("Ownership is"), sampler).max_tokens(8).priority(1);
/// for piece in scheduler.submit(urgent)? {
///     print!("{}", piece?.text);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Scheduler(Arc<Handle>);

/// State shared by all handles.
struct Handle {
    terms: Arc<AdmissionConfig>,
    inbox: Arc<Inbox>,
}

/// Messages to the thread.
#[derive(Default)]
struct Inbox {
    wake: Arc<Wake>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    #[expect(clippy::vec_box)] // moved from list to list, never copied
    requests: Vec<Box<Live>>,
    /// Whether the last handle was dropped.
    is_closed: bool,
    /// Whether the thread has ended; before the last handle is dropped only after a panic.
    is_over: bool,
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scheduler {{ engine: {:?}, .. }}", self.0.terms.engine)
    }
}

impl Scheduler {
    /// A scheduler for `engine`, which can be shared, as passes are exclusive.
    ///
    /// # Errors
    /// If an option is invalid, there is not enough memory, or the system cannot start a thread.
    pub fn new(engine: &Engine, options: &ScheduleOptions) -> Result<Scheduler, ScheduleError> {
        Scheduler::observed(engine, options, NoObserver)
    }

    /// As [`Scheduler::new`], with an observer of every request.
    ///
    /// # Errors
    /// As [`Scheduler::new`].
    pub fn observed(
        engine: &Engine,
        options: &ScheduleOptions,
        observer: impl Observer + 'static,
    ) -> Result<Scheduler, ScheduleError> {
        let terms = Arc::new(AdmissionConfig::new(engine, options, Box::new(observer))?);
        let inbox = Arc::<Inbox>::default();
        let schedule = Schedule::on(Arc::clone(&terms), Arc::clone(&inbox.wake));
        let drive = {
            let inbox = Arc::clone(&inbox);
            move || inbox.drive(schedule)
        };
        let thread = std::thread::Builder::new()
            .name("ruvllm-schedule".into())
            .spawn(drive);
        thread.map_err(|error| ScheduleError::Thread {
            error: error.to_string(),
        })?;
        Ok(Scheduler(Arc::new(Handle { terms, inbox })))
    }

    /// Submits a request; the answer comes through the [`Stream`].
    ///
    /// # Errors
    /// If the request could never be computed, or there are too many requests.
    pub fn submit(&self, request: Request) -> Result<Stream, ScheduleError> {
        let Handle { terms, inbox } = &*self.0;
        let (live, stream) = terms.judge(request, &inbox.wake)?;
        inbox.tell(|state| {
            if state.is_over {
                return Err(ScheduleError::Ended);
            }
            state.requests.push(live);
            Ok(stream)
        })
    }

    /// Number of requests that wait or run.
    pub fn n_requests(&self) -> usize {
        self.0.terms.n_requests()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.inbox.tell(|state| state.is_closed = true);
    }
}

/// On drop, ends requests that nothing will take out of the inbox any more.
struct Over<'a>(&'a Inbox);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.tell(|state| {
            state.is_over = true;
            state.requests.clear();
        });
    }
}

impl Inbox {
    fn tell<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let told = change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.wake.set();
        told
    }

    /// Loop of the thread: runs passes while there is something to compute, and sleeps otherwise.
    fn drive(&self, mut schedule: Schedule) {
        let _over = Over(self);
        let mut requests = Vec::new();
        loop {
            let is_closed = {
                let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                std::mem::swap(&mut requests, &mut state.requests);
                state.is_closed
            };
            requests.drain(..).for_each(|live| schedule.accept(live));
            if !schedule.step() {
                if is_closed && schedule.is_empty() {
                    return;
                }
                self.wake.wait(schedule.next_deadline());
            }
        }
    }
}
