//! The flag that says how many threads compute.

use clap::Args;
use std::num::NonZeroUsize;

/// More threads than machines have cores only take memory.
pub(crate) const MAX_THREADS: i64 = 1024;

/// Threads that compute.
#[derive(Args, Clone, Copy)]
pub(crate) struct ThreadsArg {
    /// CPU threads, at most 1024 (0 or less: as many as this process may use)
    #[arg(short, long, value_name = "N", help_heading = None::<&'static str>, default_value_t = -1, env = "LLAMA_ARG_THREADS", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i32).range(..=MAX_THREADS))]
    threads: i32,
}

impl ThreadsArg {
    /// How many; without a number as many as this process may use.
    pub(crate) fn number(self) -> Option<NonZeroUsize> {
        usize::try_from(self.threads)
            .ok()
            .and_then(NonZeroUsize::new)
    }

    /// A pool of that size.
    pub(crate) fn pool(self) -> rayon::ThreadPoolBuilder {
        rayon::ThreadPoolBuilder::new().num_threads(self.number().map_or(0, NonZeroUsize::get))
    }
}
