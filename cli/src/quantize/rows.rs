//! Rows of tensors on their way from one type to another: what `quantize` and `convert` share.

use crate::flags::ThreadsArg;
use crate::io::{Failure, Progress, on_interrupt};
use rayon::prelude::*;
use ruvllm::gguf::GgufError;
use ruvllm::quant::QuantError;
use ruvllm::quant::{DType, dequantize_row, quantize_row};
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Elements to convert between two looks at the interrupt flag.
const SLAB: usize = 1 << 22;

/// Converts rows, with a bar and an eye on Ctrl-C.
pub(crate) struct Rows {
    pool: rayon::ThreadPool,
    interrupted: Arc<AtomicBool>,
    progress: Progress,
    /// Elements converted.
    done: Cell<u64>,
    failure: RefCell<Option<Failure>>,
}

/// What happens to the values of a row.
#[derive(Clone, Copy)]
pub(crate) struct Conversion<'c> {
    /// Values of a row.
    pub(crate) n: usize,
    pub(crate) from: DType,
    pub(crate) to: DType,
    /// Applied to each row, by its number.
    pub(crate) change: Option<&'c Change<'c>>,
    /// The importance of the weights of a row, for each matrix, and the rows of a matrix.
    pub(crate) importance: Option<(&'c [f32], usize)>,
}

/// Changes the values of a row.
pub(crate) type Change<'c> = dyn Fn(usize, &mut [f32]) + Sync + 'c;

impl Rows {
    /// For `total` elements in all, on so many threads.
    pub(crate) fn new(
        what: &'static str,
        total: u64,
        threads: ThreadsArg,
    ) -> Result<Rows, Failure> {
        let pool = threads.pool().build()?;
        let interrupted = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&interrupted);
        // Without a handler, Ctrl-C would leave half of a temporary file behind.
        on_interrupt(move || flag.store(true, Ordering::Relaxed))?;
        let progress = Progress::new(what, total);
        Ok(Rows {
            pool,
            interrupted,
            progress,
            done: Cell::new(0),
            failure: RefCell::new(None),
        })
    }

    /// For files that are made in memory: without a bar, and Ctrl-C ends the program.
    pub(crate) fn in_memory(threads: ThreadsArg) -> Result<Rows, Failure> {
        let pool = threads.pool().build()?;
        let progress = Progress::hidden();
        Ok(Rows {
            pool,
            interrupted: Arc::default(),
            progress,
            done: Cell::new(0),
            failure: RefCell::new(None),
        })
    }

    /// Writes `n_rows` rows of the tensor `name`, of which `row` gives the bytes.
    pub(crate) fn write<'a>(
        &self,
        name: &str,
        n_rows: usize,
        row: impl Fn(usize) -> Cow<'a, [u8]> + Sync,
        conversion: Conversion<'_>,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let Conversion {
            n,
            from,
            to,
            change,
            importance,
        } = conversion;
        let importance = |row: usize| {
            importance.map(|(all, rows_per_matrix)| &all[row / rows_per_matrix * n..][..n])
        };
        let copy = from == to && change.is_none();
        let to_bytes = n / to.block().0 as usize * to.block().1 as usize;
        let slab_rows = (SLAB / n).clamp(1, n_rows.max(1));
        let mut converted = vec![0; if copy { 0 } else { slab_rows * to_bytes }];
        for first in (0..n_rows).step_by(slab_rows) {
            if self.interrupted.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let slab = first..n_rows.min(first + slab_rows);
            if copy {
                let damaged = self.pool.install(|| {
                    slab.clone()
                        .into_par_iter()
                        .find_map_first(|i| not_finite(from, &row(i), n).map(|error| (i, error)))
                });
                if let Some((i, error)) = damaged {
                    return Err(self.fail(name, i, &error));
                }
                slab.clone().try_for_each(|i| out.write_all(&row(i)))?;
            } else {
                let converted = &mut converted[..slab.len() * to_bytes];
                let outcome = self.pool.install(|| {
                    slab.clone()
                        .into_par_iter()
                        .zip(converted.par_chunks_exact_mut(to_bytes))
                        .try_for_each_init(
                            || vec![0.0; n],
                            |values, (i, into)| -> Result<(), (usize, QuantError)> {
                                let failed = |error| (i, error);
                                dequantize_row(from, &row(i), values).map_err(failed)?;
                                if let Some(change) = change {
                                    change(i, values);
                                }
                                quantize_row(to, values, importance(i), into).map_err(failed)
                            },
                        )
                });
                if let Err((i, error)) = outcome {
                    return Err(self.fail(name, i, &error));
                }
                out.write_all(converted)?;
            }
            self.done.set(self.done.get() + (slab.len() * n) as u64);
            self.progress.set(self.done.get());
        }
        Ok(())
    }

    /// Notes why a row cannot be converted.
    fn fail(&self, name: &str, row: usize, error: &QuantError) -> io::Error {
        let text = format!("tensor {name}, row {row}: {error}");
        *self.failure.borrow_mut() = Some(Failure::Work(text));
        io::ErrorKind::InvalidData.into()
    }

    /// What became of the file.
    pub(crate) fn finish<T>(self, written: Result<T, GgufError>) -> Result<T, Failure> {
        match (self.failure.take(), written) {
            _ if self.interrupted.load(Ordering::Relaxed) => Err(Failure::Interrupted),
            (Some(failure), _) => Err(failure),
            (None, written) => Ok(written?),
        }
    }
}

/// A value of a row that is infinite or NaN: such a row is no weight. Tables of integers have none.
fn not_finite(dtype: DType, row: &[u8], n: usize) -> Option<QuantError> {
    dtype.format()?;
    let mut values = vec![0.0; n];
    if let Err(error) = dequantize_row(dtype, row, &mut values) {
        return Some(error);
    }
    let index = values.iter().position(|x| !x.is_finite())?;
    Some(QuantError::NotFinite {
        index,
        value: values[index],
    })
}
