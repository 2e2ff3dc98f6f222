//! Options of an engine, and threads that several engines share.

use crate::compute::arena::Arena;
use crate::engine::SessionError;
use crate::engine::turns::Turns;
use crate::model::Device;
use crate::threads::ThreadPool;
use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Most threads of an engine: a larger number is probably a typing error, and would stall the
/// machine.
pub const MAX_THREADS: usize = 1024;

/// Options of an engine. `..Default::default()` sets the remaining fields.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// Threads, the caller's included. Default:
    /// [`default_threads`](crate::engine::default_threads).
    pub n_threads: Option<NonZeroUsize>,
    /// Most bytes that keys and values of all sequences take, together with the adapters that are
    /// attached to them. Default: as many as there are, or as the model's memory limit leaves.
    /// Above 85 % of them the prefix cache, and then requests that wait for their readers,
    /// give pages back, down to 70 %.
    pub kv_budget: Option<u64>,
    /// Of them, those of the prefix cache. Default 1 GiB. See
    /// [`KvPool::set_prefix_budget`](crate::kv::KvPool::set_prefix_budget).
    pub prefix_budget: Option<u64>,
    /// Folder in which the prefix cache outlives the process: sequences store their whole pages
    /// there, too, and any number of processes can share it. Default: none.
    pub prefix_folder: Option<PathBuf>,
    /// Limit on the bytes of the folder. Default 8 GiB.
    pub prefix_folder_budget: Option<u64>,
    /// Device that computes passes. Default: the device for which the model was opened.
    pub device: Option<Device>,
    /// Threads of another engine, which [`Engine::threads`](crate::Engine::threads) returns: `n_threads` is theirs then.
    /// Passes of all engines that share threads are exclusive, in the order in which they are
    /// asked for, so that two models that have work alternate. Default: threads of its own.
    pub threads: Option<SharedThreads>,
    /// Whether the CPU goes on where the device fails: it is lost, or has no memory left. Keys and
    /// values that only the device had are computed again, and the tokens from there on have the
    /// CPU's bits. Otherwise, the default, such a failure is an error of the call.
    pub cpu_fallback: bool,
}

/// Threads that compute, the order of passes on them, and the memory of a pass: a handle that
/// engines of several models share, so that each can use the whole machine and none slows another
/// down by more than its own pass.
#[derive(Clone)]
pub struct SharedThreads {
    pub(super) thread_pool: Arc<ThreadPool>,
    pub(super) turns: Arc<Turns>,
    pub(super) arena: Arc<Mutex<Arena>>,
}

impl SharedThreads {
    pub(super) fn start(n_threads: usize) -> Result<SharedThreads, SessionError> {
        if n_threads > MAX_THREADS {
            let expected = format!("at most {MAX_THREADS}");
            return Err(SessionError::Option {
                option: "n_threads",
                value: n_threads,
                expected,
            });
        }
        let thread_pool = ThreadPool::new(n_threads)
            .map_err(|error| SessionError::Threads { n_threads, error })?;
        Ok(SharedThreads {
            thread_pool: Arc::new(thread_pool),
            turns: Arc::default(),
            arena: Arc::default(),
        })
    }
}

impl fmt::Debug for SharedThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedThreads {{ n: {} }}", self.thread_pool.n_threads())
    }
}
