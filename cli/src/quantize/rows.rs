//! A converter of rows with a bar and an eye on Ctrl-C: what `quantize` and `convert` share.

use crate::io::{Failure, Progress, on_interrupt};
use ruvllm::gguf::GgufError;
use ruvllm::quant::{Converter, RowError};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Converts rows while a file is written.
pub(crate) struct Rows {
    pub(crate) converter: Converter<'static>,
    interrupted: Arc<AtomicBool>,
}

impl Rows {
    /// For `total` elements in all, on so many threads.
    pub(crate) fn new(
        what: &'static str,
        total: u64,
        n_threads: Option<NonZeroUsize>,
    ) -> Result<Rows, Failure> {
        let interrupted = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&interrupted);
        // Without a handler, Ctrl-C would leave half of a temporary file behind.
        on_interrupt(move || flag.store(true, Ordering::Relaxed))?;
        Rows::with(Progress::new(what, total), interrupted, n_threads)
    }

    /// For files that are made in memory: Ctrl-C ends the program.
    pub(crate) fn in_memory(
        progress: Progress,
        n_threads: Option<NonZeroUsize>,
    ) -> Result<Rows, Failure> {
        Rows::with(progress, Arc::default(), n_threads)
    }

    fn with(
        progress: Progress,
        interrupted: Arc<AtomicBool>,
        n_threads: Option<NonZeroUsize>,
    ) -> Result<Rows, Failure> {
        let flag = Arc::clone(&interrupted);
        let tell = move |done| {
            progress.set(done);
            !flag.load(Ordering::Relaxed)
        };
        let failed = |error| Failure::Work(format!("no threads to convert with: {error}"));
        Ok(Rows {
            converter: Converter::new(n_threads, tell).map_err(failed)?,
            interrupted,
        })
    }

    /// Whether somebody has stopped the program.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// What became of the file.
    pub(crate) fn finish<T>(self, written: Result<T, GgufError>) -> Result<T, Failure> {
        if self.is_interrupted() {
            return Err(Failure::Interrupted);
        }
        match written {
            Err(GgufError::Io { path, error }) => Err(match error.downcast::<RowError>() {
                Ok(error) => Failure::Work(error.to_string()),
                Err(error) => GgufError::Io { path, error }.into(),
            }),
            written => Ok(written?),
        }
    }
}
