//! Thread pool of a forward pass.
//!
//! A forward pass is some hundred short parallel regions separated by serial work. Waking a thread
//! for each of them would cost more than the work, so a [`ThreadPool`]'s helpers stay awake for the
//! length of a pass: they watch one atomic word for the next region, claim its tasks one by one,
//! and go back to sleep in their pool shortly after the last region. A slow or preempted thread
//! delays only its own task; if a helper never comes, the others do its share. Tasks are cut by
//! output rows and never depend on the thread that runs them, so results are the same for any
//! number of threads.

#![allow(unsafe_code)] // regions borrow the caller's stack across threads

use crate::arch::ColumnsMut;
use crate::clock::Timer;
use crate::system::HAS_THREADS;
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Number of spins before a waiting thread begins to yield its core.
const SPINS: u32 = 4096;
/// Time that an idle helper stays awake: longer than the serial work between two regions or the
/// sampling between two tokens, too short to show up as CPU use.
const LINGER: Duration = Duration::from_micros(200);
/// The same in spins, where there is no clock.
const LINGER_SPINS: u32 = 16 * SPINS;
/// Bytes of small chunks that share a task.
const TASK_BYTES: usize = 16 << 10;
/// Tasks that each thread is left with at least, so that none waits long for the last.
const TASKS: usize = 16;

/// A region's task function, with the closure's type erased: the closure, the worker, the task.
type Call = unsafe fn(*const (), usize, usize);

struct Shared {
    /// `region << 32 | next task`. Claiming is a compare-exchange on the whole word, so a late
    /// helper can never claim a task of a region that it has not seen.
    state: AtomicU64,
    call: AtomicPtr<()>,
    closure: AtomicPtr<()>,
    n_tasks: AtomicUsize,
    /// Tasks of the current region that have ended.
    n_done: AtomicUsize,
    /// Helpers inside [`Shared::help`], or about to enter it.
    n_helpers: AtomicUsize,
    /// Seat `i` is taken while worker `i + 1` is awake; worker 0 is the caller of the forward pass.
    seats: Box<[AtomicBool]>,
    /// Whether a pass is running: helpers stay awake during it.
    in_pass: AtomicBool,
    /// Whether a region is running, which the fields above then describe.
    in_region: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Task number of a word without tasks to claim.
const CLOSED: u64 = u32::MAX as u64;

impl Shared {
    /// Claims and runs tasks of the current region as `worker` until none is left; returns whether
    /// it ran any.
    fn work(&self, worker: usize) -> bool {
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
            if self
                .state
                .compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed)
                .is_err()
            {
                continue;
            }
            // The word did not change between the loads above and the claim, and the fields are
            // only rewritten while the word is closed: they belong to the region of the
            // claimed task. This requires that their loads acquire and their stores
            // release: otherwise a core that reorders stores could show a field of the next region
            // before it shows the word closed.
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                // SAFETY: `call` was stored by `PoolHandle::region` from a value of this type.
                let call = unsafe { std::mem::transmute::<*mut (), Call>(call) };
                // SAFETY: `closure` is the one `call` was made for, and `PoolHandle::region` returns
                // only after `n_done` counted this task.
                unsafe { call(closure, worker, task) }
            }));
            if let Err(payload) = outcome {
                self.panic
                    .lock()
                    .unwrap_or_else(|e| e.into_inner())
                    .get_or_insert(payload);
            }
            self.n_done.fetch_add(1, Ordering::Release);
            worked = true;
        }
    }

    /// Loop of a helper: takes a seat, works while there are tasks, stays awake a little longer,
    /// leaves.
    fn help(&self) {
        loop {
            let seat = self
                .seats
                .iter()
                .position(|taken| !taken.swap(true, Ordering::Acquire));
            if let Some(seat) = seat {
                self.stay(1 + seat);
                self.seats[seat].store(false, Ordering::Release);
            }
            self.n_helpers.fetch_sub(1, Ordering::SeqCst);
            // A pass that began in the meantime may have counted on this helper: then it comes
            // back. If there was no free seat, all others are awake.
            if seat.is_none() || !self.in_pass.load(Ordering::SeqCst) {
                return;
            }
            self.n_helpers.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Works as `worker` until, outside of a pass, there were no tasks for a while.
    fn stay(&self, worker: usize) {
        let mut idle_since: Option<Timer> = None;
        let mut spins = 0u32;
        loop {
            if self.work(worker) {
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
            let since = *idle_since.get_or_insert_with(Timer::start);
            let has_lingered = since.elapsed() > LINGER || !HAS_THREADS && spins > LINGER_SPINS;
            if has_lingered && !self.in_pass.load(Ordering::Relaxed) {
                return;
            }
        }
    }
}

/// Threads beside the caller's: a pool of their own, or where the standard library has no threads, those
/// that the host has started for rayon's pool of the whole program.
#[derive(Debug)]
enum Helpers {
    Own(rayon::ThreadPool),
    OfHost(usize),
}

impl Helpers {
    fn start(n: usize) -> Result<Helpers, String> {
        if !HAS_THREADS {
            let n_host = rayon::current_num_threads();
            // Where the host has started none, the pool is the caller's own thread.
            let is_alone = rayon::current_thread_index().is_some();
            return Ok(Helpers::OfHost(if is_alone { 0 } else { n.min(n_host) }));
        }
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(n)
            .thread_name(|i| format!("ruvllm-{i}"));
        threads
            .build()
            .map(Helpers::Own)
            .map_err(|error| error.to_string())
    }

    fn count(&self) -> usize {
        match self {
            Helpers::Own(pool) => pool.current_num_threads(),
            Helpers::OfHost(n) => *n,
        }
    }

    fn spawn(&self, task: impl FnOnce() + Send + 'static) {
        match self {
            Helpers::Own(pool) => pool.spawn(task),
            Helpers::OfHost(_) => rayon::spawn(task),
        }
    }
}

/// Thread pool: a set of threads that can run one forward pass at a time.
#[derive(Debug)]
pub(crate) struct ThreadPool {
    helpers: Option<Helpers>,
    n_threads: usize,
    shared: Arc<Shared>,
    /// Locked by the running pass.
    entered: Mutex<()>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl ThreadPool {
    /// A pool of `n_threads`, including the caller of each forward pass.
    ///
    /// # Errors
    /// If the system cannot start more threads.
    pub(crate) fn new(n_threads: usize) -> Result<ThreadPool, String> {
        let helpers = match n_threads {
            0 | 1 => None,
            n => Some(Helpers::start(n - 1)?),
        };
        let n_helpers = helpers.as_ref().map_or(0, Helpers::count);
        Ok(ThreadPool {
            n_threads: 1 + n_helpers,
            helpers,
            shared: Arc::new(Shared {
                state: AtomicU64::new(CLOSED),
                call: AtomicPtr::default(),
                closure: AtomicPtr::default(),
                n_tasks: AtomicUsize::new(0),
                n_done: AtomicUsize::new(0),
                n_helpers: AtomicUsize::new(0),
                seats: (0..n_helpers).map(|_| AtomicBool::new(false)).collect(),
                in_pass: AtomicBool::new(false),
                in_region: AtomicBool::new(false),
                panic: Mutex::new(None),
            }),
            entered: Mutex::new(()),
        })
    }

    /// Number of threads that work on a forward pass, including the caller.
    pub(crate) fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// Runs `f` with the pool awake. If another forward pass is using the pool, `f` gets a handle
    /// of only the calling thread: slower, but never wrong and never blocked.
    pub(crate) fn enter<R>(&self, f: impl FnOnce(&PoolHandle<'_>) -> R) -> R {
        let guard = match (&self.helpers, self.entered.try_lock()) {
            (Some(helpers), Ok(guard)) => Some((helpers, guard)),
            // A panic inside a region is propagated only after all its tasks have ended: the state
            // is consistent.
            (Some(helpers), Err(std::sync::TryLockError::Poisoned(e))) => {
                Some((helpers, e.into_inner()))
            }
            _ => None,
        };
        let Some((helpers, _guard)) = guard else {
            return f(&PoolHandle::alone());
        };
        /// Releases the helpers, also when `f` panics.
        struct PassGuard<'a>(&'a Shared);
        impl Drop for PassGuard<'_> {
            fn drop(&mut self) {
                self.0.in_pass.store(false, Ordering::Relaxed);
            }
        }
        let pass = PassGuard(&self.shared);
        self.shared.in_pass.store(true, Ordering::SeqCst);
        for _ in self.shared.n_helpers.load(Ordering::SeqCst)..self.n_threads - 1 {
            self.shared.n_helpers.fetch_add(1, Ordering::SeqCst);
            let shared = Arc::clone(&self.shared);
            helpers.spawn(move || shared.help());
        }
        let result = f(&PoolHandle {
            shared: Some(&self.shared),
            n_threads: self.n_threads,
        });
        drop(pass);
        result
    }
}

/// A matrix that [`PoolHandle::for_tiles`] computes in tiles of columns.
pub(crate) struct Tiled<'m, T> {
    pub(crate) y: ColumnsMut<'m>,
    /// Columns per tile; the last tile may have fewer.
    pub(crate) width: usize,
    /// Data from which it is computed.
    pub(crate) item: T,
}

impl<T> Tiled<'_, T> {
    fn n_tiles(&self) -> usize {
        self.y.cols().div_ceil(self.width)
    }
}

/// Number of tiles of all `matrices`.
pub(crate) fn n_tiles<T>(matrices: &[Tiled<'_, T>]) -> usize {
    matrices.iter().map(Tiled::n_tiles).sum()
}

/// Handle of the threads of a running forward pass; splits work among them.
#[derive(Debug)]
pub(crate) struct PoolHandle<'t> {
    shared: Option<&'t Shared>,
    n_threads: usize,
}

impl PoolHandle<'_> {
    /// Number of threads that may take part.
    pub(crate) fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// This handle if `worthwhile`, otherwise one of the caller alone: for work too small to be
    /// shared.
    pub(crate) fn when(&self, worthwhile: bool) -> PoolHandle<'_> {
        if worthwhile {
            PoolHandle {
                shared: self.shared,
                n_threads: self.n_threads,
            }
        } else {
            PoolHandle::alone()
        }
    }

    /// A handle of only the calling thread.
    pub(crate) fn alone() -> PoolHandle<'static> {
        PoolHandle {
            shared: None,
            n_threads: 1,
        }
    }

    /// Calls `f(0) … f(n_tasks − 1)`, each once, in any order, on any threads, and returns when all
    /// have ended.
    ///
    /// # Panics
    /// If a task panics, after the others have ended, or runs a region of this crew itself.
    pub(crate) fn run<F: Fn(usize) + Sync>(&self, n_tasks: usize, f: F) {
        self.run_as_workers(n_tasks, |_, task| f(task));
    }

    /// As [`PoolHandle::run`]; `f` also gets the number of the worker that runs the task, which is below
    /// [`PoolHandle::n_threads`] and belongs to one thread at a time.
    fn run_as_workers<F: Fn(usize, usize) + Sync>(&self, n_tasks: usize, f: F) {
        unsafe fn call<F: Fn(usize, usize)>(f: *const (), worker: usize, task: usize) {
            // SAFETY: `f` points to the `F` that `run_as_workers` borrowed when it named this
            // function.
            let f = unsafe { &*f.cast::<F>() };
            f(worker, task);
        }
        // SAFETY: `call::<F>` takes an `F`, whose calls may be made by any threads at once, and `f`
        // lives until the region has ended.
        unsafe { self.region(n_tasks, call::<F>, (&raw const f).cast()) }
    }

    /// Region of `n_tasks` tasks. Compiled once, as each closure would otherwise have a copy of it.
    ///
    /// # Safety
    /// `call` may be called with `closure` by any threads at once until this returns.
    unsafe fn region(&self, n_tasks: usize, call: Call, closure: *const ()) {
        let Some(shared) = self.shared.filter(|_| n_tasks > 1) else {
            for task in 0..n_tasks {
                // SAFETY: as the caller promises.
                unsafe { call(closure, 0, task) }
            }
            return;
        };
        assert!((n_tasks as u64) < CLOSED, "{n_tasks} tasks in one region");
        // A second region would make helpers believe that the first has ended.
        assert!(
            !shared.in_region.swap(true, Ordering::Relaxed),
            "a region within a region"
        );
        let region = (shared.state.load(Ordering::Relaxed) >> 32) + 1;
        // Closed: no helper can claim while the fields change (see `Shared::work`).
        shared.state.store(region << 32 | CLOSED, Ordering::Relaxed);
        shared.call.store(call as *mut (), Ordering::Release);
        shared.closure.store(closure.cast_mut(), Ordering::Release);
        shared.n_tasks.store(n_tasks, Ordering::Release);
        shared.n_done.store(0, Ordering::Relaxed);
        shared.state.store(region << 32, Ordering::Release);
        shared.work(0);
        let mut spins = 0u32;
        while shared.n_done.load(Ordering::Acquire) < n_tasks {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop()
            } else {
                std::thread::yield_now()
            }
        }
        shared.in_region.store(false, Ordering::Relaxed);
        let panic = shared
            .panic
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .take();
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Cuts the columns of `matrices` into tiles, all in one region, and calls `f` with the
    /// matrix's item, the tile's columns and its view, and a part of `workspace`: each worker has
    /// one of [`PoolHandle::n_threads`] equal parts, with the contents that earlier tasks left there.
    pub(crate) fn for_tiles<T: Sync, W: Send, F>(
        &self,
        matrices: &mut [Tiled<'_, T>],
        workspace: &mut [W],
        f: F,
    ) where
        F: Fn(&T, Range<usize>, &mut ColumnsMut<'_>, &mut [W]) + Sync,
    {
        self.for_some_tiles(0..n_tiles(matrices), matrices, workspace, f);
    }

    /// [`PoolHandle::for_tiles`] of some of the tiles.
    #[expect(clippy::needless_pass_by_ref_mut)] // that the matrices are borrowed exclusively is what makes it sound
    pub(crate) fn for_some_tiles<T: Sync, W: Send, F>(
        &self,
        tiles: Range<usize>,
        matrices: &mut [Tiled<'_, T>],
        workspace: &mut [W],
        f: F,
    ) where
        F: Fn(&T, Range<usize>, &mut ColumnsMut<'_>, &mut [W]) + Sync,
    {
        let share = workspace.len() / self.n_threads;
        let workspace = SendPtr(workspace.as_mut_ptr());
        // Shared from here on, but only among the tasks.
        let matrices = &*matrices;
        self.run_as_workers(tiles.len(), |worker, task| {
            let mut tile = tiles.start + task;
            for m in matrices {
                if tile < m.n_tiles() {
                    let start = tile * m.width;
                    let cols = m.width.min(m.y.cols() - start);
                    // SAFETY: each task is run once and has its own columns, and nothing else can
                    // use the views, which are borrowed exclusively while the
                    // region lasts.
                    let mut tile = unsafe { m.y.tile(start, cols) };
                    // SAFETY: `worker` is below the number of shares.
                    let part = unsafe { workspace.ptr().add(worker * share) };
                    // SAFETY: one thread at a time is this worker, and tasks do not nest;
                    // `workspace` is borrowed exclusively while the region
                    // lasts.
                    let part = unsafe { std::slice::from_raw_parts_mut(part, share) };
                    return f(&m.item, start..start + cols, &mut tile, part);
                }
                tile -= m.n_tiles();
            }
        });
    }

    /// Cuts `y` into chunks of `chunk` values and calls `f` with each chunk's index and values.
    /// Small chunks share a task, as claiming one takes as long as a row of some hundred
    /// values, as long as every thread has tasks enough.
    pub(crate) fn for_chunks<T: Send, F>(&self, y: &mut [T], chunk: usize, f: F)
    where
        F: Fn(usize, &mut [T]) + Sync,
    {
        let len = y.len();
        let base = SendPtr(y.as_mut_ptr());
        let n_chunks = len.div_ceil(chunk);
        let at_once = (TASK_BYTES / (chunk * size_of::<T>()).max(1))
            .min(n_chunks / (self.n_threads * TASKS))
            .max(1);
        self.run(n_chunks.div_ceil(at_once), |task| {
            for i in (task * at_once..n_chunks).take(at_once) {
                let start = i * chunk;
                // SAFETY: `start` lies inside `y`.
                let ptr = unsafe { base.ptr().add(start) };
                // SAFETY: each chunk belongs to one task and lies inside `y`, which is borrowed
                // exclusively.
                f(i, unsafe {
                    std::slice::from_raw_parts_mut(ptr, chunk.min(len - start))
                });
            }
        });
    }
}

impl PoolHandle<'_> {
    /// Cuts `a` and `b` into the same number of chunks and calls `f` with the index of each pair of
    /// chunks and both chunks.
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
        assert_eq!(
            a_len.div_ceil(a_chunk),
            b_len.div_ceil(b_chunk),
            "pairs of chunks"
        );
        let base = SendPtr(b.as_mut_ptr());
        self.for_chunks(a, a_chunk, |i, a| {
            let start = i * b_chunk;
            // SAFETY: `start` lies inside `b`.
            let ptr = unsafe { base.ptr().add(start) };
            // SAFETY: each task has a chunk of its own inside `b`, which is borrowed exclusively.
            f(i, a, unsafe {
                std::slice::from_raw_parts_mut(ptr, b_chunk.min(b_len - start))
            });
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
    use crate::threads::*;

    #[test]
    fn every_task_runs_once() {
        for n_threads in 1..=if cfg!(miri) { 2 } else { 4 } {
            let thread_pool = ThreadPool::new(n_threads).unwrap();
            thread_pool.enter(|threads| {
                for n_tasks in [0, 1, 2, 3, 7, 64] {
                    let counts: Vec<AtomicUsize> =
                        (0..n_tasks).map(|_| AtomicUsize::new(0)).collect();
                    threads.run(n_tasks, |i| {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
            });
        }
    }

    #[test]
    fn many_regions_in_many_passes() {
        let thread_pool = ThreadPool::new(3).unwrap();
        let total = AtomicUsize::new(0);
        let (n_passes, n_regions) = if cfg!(miri) { (3, 5) } else { (50, 100) };
        for _ in 0..n_passes {
            thread_pool.enter(|threads| {
                for _ in 0..n_regions {
                    threads.run(5, |i| {
                        total.fetch_add(i, Ordering::Relaxed);
                    });
                }
            });
        }
        assert_eq!(total.into_inner(), n_passes * n_regions * 10);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_survives() {
        let thread_pool = ThreadPool::new(2).unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| {
            thread_pool.enter(|threads| threads.run(8, |i| assert_ne!(i, 5, "task five")))
        }));
        assert!(caught.is_err());
        thread_pool.enter(|threads| threads.run(8, |_| ()));
    }

    #[test]
    fn two_passes_at_once_both_end() {
        let thread_pool = ThreadPool::new(2).unwrap();
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    for _ in 0..if cfg!(miri) { 3 } else { 200 } {
                        thread_pool.enter(|threads| {
                            let mut y = vec![0.0; 1000];
                            threads.for_chunks(&mut y, 7, |i, chunk| chunk.fill(i as f32));
                            assert!(y.iter().enumerate().all(|(j, &v)| v == (j / 7) as f32));
                        });
                    }
                });
            }
        });
    }

    #[test]
    fn columns_are_disjoint_and_complete() {
        let thread_pool = ThreadPool::new(2).unwrap();
        thread_pool.enter(|threads| {
            let (mut a, mut b) = (vec![0.0; 3 * 10], vec![0.0; 3 * 7]);
            let mut matrices = [
                Tiled {
                    y: ColumnsMut::new(&mut a, 3, 10),
                    width: 4,
                    item: 0,
                },
                Tiled {
                    y: ColumnsMut::new(&mut b, 3, 7),
                    width: 3,
                    item: 1,
                },
            ];
            threads.for_tiles(&mut matrices, &mut [(); 0], |m, range, view, _| {
                for i in 0..view.rows() {
                    for (c, y) in range.clone().zip(view.row(i)) {
                        *y += (100 * m + 10 * i + c) as f32;
                    }
                }
            });
            for (m, y, cols) in [(0, &a, 10), (1, &b, 7)] {
                for (j, &v) in y.iter().enumerate() {
                    assert_eq!(v, (100 * m + 10 * (j / cols) + j % cols) as f32);
                }
            }
        });
    }

    #[test]
    fn a_workspace_has_one_user_at_a_time() {
        for n_threads in 1..=if cfg!(miri) { 2 } else { 4 } {
            let thread_pool = ThreadPool::new(n_threads).unwrap();
            // Consecutive passes while helpers come and go.
            for _ in 0..if cfg!(miri) { 2 } else { 30 } {
                thread_pool.enter(|threads| {
                    let (mut y, mut workspace) =
                        (vec![0.0; 64], vec![0usize; 3 * n_threads + n_threads - 1]);
                    let mut matrix = [Tiled {
                        y: ColumnsMut::new(&mut y, 1, 64),
                        width: 1,
                        item: (),
                    }];
                    threads.for_tiles(&mut matrix, &mut workspace, |(), columns, y, part| {
                        assert_eq!(part.len(), 3);
                        for _ in 0..if cfg!(miri) { 2 } else { 20 } {
                            part.fill(columns.start);
                            std::thread::yield_now();
                            assert!(part.iter().all(|&user| user == columns.start));
                        }
                        y.row(0)[0] = columns.start as f32;
                    });
                    assert!(y.iter().enumerate().all(|(i, &y)| y == i as f32));
                });
                std::thread::sleep(LINGER / 2);
            }
        }
    }
}
