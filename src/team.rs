//! The threads of a forward pass.
//!
//! A forward pass is some hundred short parallel regions separated by serial work. Waking a thread
//! for each of them would cost more than the work, so a [`Team`]'s helpers stay awake for the length
//! of a pass: they watch one atomic word for the next region, claim its tasks one by one, and go back
//! to sleep in their pool a moment after the last region. Whoever is slow or preempted delays only
//! the task it holds; a helper that never comes costs nothing but its share. Tasks are cut by
//! output rows and never depend on who runs them, so results are the same for any number of threads.

#![allow(unsafe_code)] // regions borrow the caller's stack across threads

use crate::arch::ColumnsMut;
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Spins before a waiting thread begins to yield its core.
const SPINS: u32 = 4096;
/// How long an idle helper stays awake: longer than the serial work between two regions or the
/// sampling between two tokens, too short to be seen as CPU use.
const LINGER: Duration = Duration::from_micros(200);

/// A region's task function, with the closure's type erased.
type Call = unsafe fn(*const (), usize);

struct Shared {
    /// `region << 32 | next task`. Claiming is a compare-exchange on the whole word, so a late
    /// helper can never take a task of a region that it has not looked at.
    state: AtomicU64,
    call: AtomicPtr<()>,
    closure: AtomicPtr<()>,
    n_tasks: AtomicUsize,
    /// Tasks of the current region that have ended.
    n_done: AtomicUsize,
    /// Helpers inside [`Shared::help`].
    n_helpers: AtomicUsize,
    /// Whether a pass is under way: helpers linger while it is.
    in_pass: AtomicBool,
    /// Whether a region is: the fields above describe one.
    in_region: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Task number of a word that offers nothing.
const CLOSED: u64 = u32::MAX as u64;

impl Shared {
    /// Claims and runs tasks of the current region until none is left; whether it ran any.
    fn work(&self) -> bool {
        let mut worked = false;
        loop {
            let state = self.state.load(Ordering::Acquire);
            let task = (state & CLOSED) as usize;
            let n_tasks = self.n_tasks.load(Ordering::Acquire);
            let call = self.call.load(Ordering::Acquire);
            let closure = self.closure.load(Ordering::Acquire);
            if task >= n_tasks {
                return worked;
            }
            if self.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                continue;
            }
            // The word did not change between the loads above and the claim, and the fields are only
            // rewritten while the word is closed: they belong to the region of the claimed task. That needs
            // their loads to acquire and their stores to release: else a core that reorders stores could
            // show a field of the next region before it shows the word closed.
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                // SAFETY: `call` was stored by `Crew::run` from a value of this type.
                let call = unsafe { std::mem::transmute::<*mut (), Call>(call) };
                // SAFETY: `closure` is the one `call` was made for, and `Crew::run` keeps it alive
                // until `n_done` counts this task.
                unsafe { call(closure, task) }
            }));
            if let Err(payload) = outcome {
                self.panic.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(payload);
            }
            self.n_done.fetch_add(1, Ordering::Release);
            worked = true;
        }
    }

    /// A helper's life: work while there is any, linger a little, leave.
    fn help(&self) {
        let mut idle_since: Option<Instant> = None;
        let mut spins = 0u32;
        loop {
            if self.work() {
                idle_since = None;
                spins = 0;
                continue;
            }
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
                continue;
            }
            std::thread::yield_now();
            let since = *idle_since.get_or_insert_with(Instant::now);
            if since.elapsed() > LINGER && !self.in_pass.load(Ordering::Relaxed) {
                self.n_helpers.fetch_sub(1, Ordering::SeqCst);
                // A pass that began in between may have counted on this helper: then stay.
                if !self.in_pass.load(Ordering::SeqCst) {
                    return;
                }
                self.n_helpers.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
}

/// A set of threads that can run one forward pass at a time.
#[derive(Debug)]
pub struct Team {
    pool: Option<Arc<rayon::ThreadPool>>,
    n_threads: usize,
    shared: Arc<Shared>,
    /// Held by the pass under way.
    entered: Mutex<()>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl Team {
    /// A team of `n_threads`, the caller of each pass being one of them.
    ///
    /// # Errors
    /// If the system gives no more threads.
    pub fn new(n_threads: usize) -> Result<Team, rayon::ThreadPoolBuildError> {
        let n_threads = n_threads.max(1);
        let pool = match n_threads {
            1 => None,
            n => Some(Arc::new(
                rayon::ThreadPoolBuilder::new().num_threads(n - 1).thread_name(|i| format!("ruvllm-{i}")).build()?,
            )),
        };
        Ok(Team::with_pool(pool))
    }

    /// A team of the caller and all threads of `pool`.
    pub fn with_pool(pool: Option<Arc<rayon::ThreadPool>>) -> Team {
        Team {
            n_threads: 1 + pool.as_ref().map_or(0, |p| p.current_num_threads()),
            pool,
            shared: Arc::new(Shared {
                state: AtomicU64::new(CLOSED),
                call: AtomicPtr::default(),
                closure: AtomicPtr::default(),
                n_tasks: AtomicUsize::new(0),
                n_done: AtomicUsize::new(0),
                n_helpers: AtomicUsize::new(0),
                in_pass: AtomicBool::new(false),
                in_region: AtomicBool::new(false),
                panic: Mutex::new(None),
            }),
            entered: Mutex::new(()),
        }
    }

    /// Threads that work on a pass, the caller included.
    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// Runs `f` with the team awake. If another pass holds the team, `f` gets a crew of the calling
    /// thread alone: slower, never wrong, never blocked.
    pub(crate) fn enter<R>(&self, f: impl FnOnce(&Crew<'_>) -> R) -> R {
        let guard = match (&self.pool, self.entered.try_lock()) {
            (Some(pool), Ok(guard)) => Some((pool, guard)),
            // A panic inside a region is handed on after all of it has ended: the state is sound.
            (Some(pool), Err(std::sync::TryLockError::Poisoned(e))) => Some((pool, e.into_inner())),
            _ => None,
        };
        let Some((pool, _guard)) = guard else {
            return f(&Crew::alone());
        };
        /// Lets the helpers go, also when `f` panics.
        struct Pass<'a>(&'a Shared);
        impl Drop for Pass<'_> {
            fn drop(&mut self) {
                self.0.in_pass.store(false, Ordering::Relaxed);
            }
        }
        let pass = Pass(&self.shared);
        self.shared.in_pass.store(true, Ordering::SeqCst);
        for _ in self.shared.n_helpers.load(Ordering::SeqCst)..self.n_threads - 1 {
            self.shared.n_helpers.fetch_add(1, Ordering::SeqCst);
            let shared = Arc::clone(&self.shared);
            pool.spawn(move || shared.help());
        }
        let result = f(&Crew { shared: Some(&self.shared), n_threads: self.n_threads });
        drop(pass);
        result
    }
}

/// The threads of a pass that is under way; splits work among them.
#[derive(Debug)]
pub(crate) struct Crew<'t> {
    shared: Option<&'t Shared>,
    n_threads: usize,
}

impl Crew<'_> {
    /// Threads that may take part.
    pub(crate) fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// This crew, or the caller alone unless `worthwhile`: for work smaller than sharing it.
    pub(crate) fn when(&self, worthwhile: bool) -> Crew<'_> {
        if worthwhile { Crew { shared: self.shared, n_threads: self.n_threads } } else { Crew::alone() }
    }

    /// The calling thread alone.
    pub(crate) fn alone() -> Crew<'static> {
        Crew { shared: None, n_threads: 1 }
    }

    /// Calls `f(0) … f(n_tasks − 1)`, each once, in any order, on any threads, and returns when all
    /// have ended.
    ///
    /// # Panics
    /// If a task panics, after the others have ended, or runs a region of this crew itself.
    pub(crate) fn run<F: Fn(usize) + Sync>(&self, n_tasks: usize, f: F) {
        let Some(shared) = self.shared.filter(|_| n_tasks > 1) else {
            (0..n_tasks).for_each(f);
            return;
        };
        assert!((n_tasks as u64) < CLOSED, "{n_tasks} tasks in one region");
        unsafe fn call<F: Fn(usize)>(f: *const (), task: usize) {
            // SAFETY: `f` points to the `F` that `run` borrowed when it stored this function.
            let f = unsafe { &*f.cast::<F>() };
            f(task);
        }
        // A second region would tell the helpers that the first has ended.
        assert!(!shared.in_region.swap(true, Ordering::Relaxed), "a region within a region");
        let region = (shared.state.load(Ordering::Relaxed) >> 32) + 1;
        // Closed: no helper can claim while the fields change (see `Shared::work`).
        shared.state.store(region << 32 | CLOSED, Ordering::Relaxed);
        let call: Call = call::<F>;
        shared.call.store(call as *mut (), Ordering::Release);
        shared.closure.store((&raw const f).cast_mut().cast(), Ordering::Release);
        shared.n_tasks.store(n_tasks, Ordering::Release);
        shared.n_done.store(0, Ordering::Relaxed);
        shared.state.store(region << 32, Ordering::Release);
        shared.work();
        let mut spins = 0u32;
        while shared.n_done.load(Ordering::Acquire) < n_tasks {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        shared.in_region.store(false, Ordering::Relaxed);
        let panic = shared.panic.lock().unwrap_or_else(|e| e.into_inner()).take();
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Cuts the columns of the matrices of `items` into tiles, all in one region, and calls `f` with the
    /// item, the tile's range and its view: `view` tells an item's matrix and the width of its tiles.
    #[expect(clippy::needless_pass_by_ref_mut)] // that the items are borrowed exclusively is what makes it sound
    pub(crate) fn for_tiles<'m, T: Sync, V, F>(&self, items: &mut [T], view: V, f: F)
    where
        V: Fn(&T) -> (&ColumnsMut<'m>, usize) + Sync,
        F: Fn(&T, Range<usize>, &mut ColumnsMut<'m>) + Sync,
    {
        let items = &*items;
        let n_tiles = |item: &T| {
            let (y, tile) = view(item);
            y.cols().div_ceil(tile)
        };
        self.run(items.iter().map(n_tiles).sum(), |mut task| {
            for item in items {
                let n_tiles = n_tiles(item);
                if task < n_tiles {
                    let (y, tile) = view(item);
                    let start = task * tile;
                    let cols = tile.min(y.cols() - start);
                    // SAFETY: each task is run once and has columns of its own, and nobody else can
                    // use the views, which are borrowed exclusively while the region lasts.
                    let mut part = unsafe { y.tile(start, cols) };
                    return f(item, start..start + cols, &mut part);
                }
                task -= n_tiles;
            }
        });
    }

    /// Cuts `y` into chunks of `chunk` values and calls `f` with each chunk's index and values.
    pub(crate) fn for_chunks<T: Send, F>(&self, y: &mut [T], chunk: usize, f: F)
    where
        F: Fn(usize, &mut [T]) + Sync,
    {
        let len = y.len();
        let base = SendPtr(y.as_mut_ptr());
        self.run(len.div_ceil(chunk), |i| {
            let start = i * chunk;
            // SAFETY: `start` lies inside `y`.
            let ptr = unsafe { base.ptr().add(start) };
            // SAFETY: each task has a chunk of its own inside `y`, which is borrowed exclusively.
            f(i, unsafe { std::slice::from_raw_parts_mut(ptr, chunk.min(len - start)) });
        });
    }
}

impl Crew<'_> {
    /// Cuts `a` and `b` into as many chunks and calls `f` with the index of a pair of chunks and both.
    ///
    /// # Panics
    /// If the numbers of chunks differ.
    pub(crate) fn for_chunk_pairs<A: Send, B: Send, F>(
        &self,
        a: &mut [A],
        a_chunk: usize,
        b: &mut [B],
        b_chunk: usize,
        f: F,
    ) where
        F: Fn(usize, &mut [A], &mut [B]) + Sync,
    {
        let (a_len, b_len) = (a.len(), b.len());
        assert_eq!(a_len.div_ceil(a_chunk), b_len.div_ceil(b_chunk), "pairs of chunks");
        let base = SendPtr(b.as_mut_ptr());
        self.for_chunks(a, a_chunk, |i, a| {
            let start = i * b_chunk;
            // SAFETY: `start` lies inside `b`.
            let ptr = unsafe { base.ptr().add(start) };
            // SAFETY: each task has a chunk of its own inside `b`, which is borrowed exclusively.
            f(i, a, unsafe { std::slice::from_raw_parts_mut(ptr, b_chunk.min(b_len - start)) });
        });
    }
}

struct SendPtr<T>(*mut T);
impl<T> SendPtr<T> {
    fn ptr(&self) -> *mut T {
        self.0
    }
}
// SAFETY: only used to make disjoint exclusive slices of `T: Send`.
unsafe impl<T: Send> Sync for SendPtr<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for n_threads in 1..=4 {
            let team = Team::new(n_threads).unwrap();
            team.enter(|crew| {
                for n_tasks in [0, 1, 2, 3, 7, 64, 1000] {
                    let counts: Vec<AtomicUsize> = (0..n_tasks).map(|_| AtomicUsize::new(0)).collect();
                    crew.run(n_tasks, |i| {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
            });
        }
    }

    #[test]
    fn many_regions_in_many_passes() {
        let team = Team::new(3).unwrap();
        let total = AtomicUsize::new(0);
        for _ in 0..50 {
            team.enter(|crew| {
                for _ in 0..100 {
                    crew.run(5, |i| {
                        total.fetch_add(i, Ordering::Relaxed);
                    });
                }
            });
        }
        assert_eq!(total.into_inner(), 50 * 100 * 10);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_survives() {
        let team = Team::new(2).unwrap();
        let caught =
            catch_unwind(AssertUnwindSafe(|| team.enter(|crew| crew.run(8, |i| assert_ne!(i, 5, "task five")))));
        assert!(caught.is_err());
        team.enter(|crew| crew.run(8, |_| ()));
    }

    #[test]
    fn two_passes_at_once_both_end() {
        let team = Team::new(2).unwrap();
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    for _ in 0..200 {
                        team.enter(|crew| {
                            let mut y = vec![0.0; 1000];
                            crew.for_chunks(&mut y, 7, |i, chunk| chunk.fill(i as f32));
                            assert!(y.iter().enumerate().all(|(j, &v)| v == (j / 7) as f32));
                        });
                    }
                });
            }
        });
    }

    #[test]
    fn columns_are_disjoint_and_complete() {
        let team = Team::new(2).unwrap();
        team.enter(|crew| {
            let (mut a, mut b) = (vec![0.0; 3 * 10], vec![0.0; 3 * 7]);
            crew.for_tiles(
                &mut [(0, 4, ColumnsMut::new(&mut a, 3, 10)), (1, 3, ColumnsMut::new(&mut b, 3, 7))],
                |(_, tile, y)| (y, *tile),
                |(m, ..), range, view| {
                    for i in 0..view.rows() {
                        for (c, y) in range.clone().zip(view.row(i)) {
                            *y += (100 * m + 10 * i + c) as f32;
                        }
                    }
                },
            );
            for (m, y, cols) in [(0, &a, 10), (1, &b, 7)] {
                for (j, &v) in y.iter().enumerate() {
                    assert_eq!(v, (100 * m + 10 * (j / cols) + j % cols) as f32);
                }
            }
        });
    }
}
