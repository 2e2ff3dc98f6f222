//! Rows of tensors on their way from one type to another, on several threads, a slab at a time.

use super::feedback::{Feedback, Moments};
use crate::quant::{DType, QuantError, check_finite, dequantize_row, quantize_row};
use rayon::prelude::*;
use std::borrow::Cow;
use std::cell::Cell;
use std::io::{self, Write};
use std::num::NonZeroUsize;

/// Elements of a slab: what is converted between two calls of the progress callback, and is held in
/// memory in its new type.
const SLAB: usize = 1 << 22;

/// Rows that a thread converts at a time.
const PANEL: usize = 16;

/// A change of the values of the row with that number.
pub type RowChange<'c> = dyn Fn(usize, &mut [f32]) + Sync + 'c;

/// What happens to the values of a row.
#[derive(Clone, Copy)]
pub struct Conversion<'c> {
    /// Values of a row.
    pub n: usize,
    /// Type of the rows that are given.
    pub from: DType,
    /// Type of the rows that are written.
    pub to: DType,
    /// Applied to the values of each row, with its number.
    pub change: Option<&'c RowChange<'c>>,
    /// Rows of each matrix of a stack.
    pub rows_per_matrix: usize,
    /// The importance of the weights of a row, for each matrix of a stack.
    pub importance: Option<&'c [f32]>,
    /// Feedback of errors for each matrix of a stack, or for none; where it is known, importances do
    /// not count.
    pub feedback: &'c [Option<Feedback>],
}

impl std::fmt::Debug for Conversion<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} x {} -> {}", self.n, self.from, self.to)
    }
}

/// A row that cannot be converted.
#[derive(Debug, thiserror::Error)]
#[error("tensor {tensor}, row {row}: {error}")]
#[non_exhaustive]
pub struct RowError {
    /// Name of the tensor.
    pub tensor: String,
    /// Index of the row.
    pub row: usize,
    /// What is wrong with it.
    pub error: QuantError,
}

/// Square sums of a conversion: how far what was written is from what was given.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    /// `Σ (y − x)²` over the values.
    pub squared_error: f64,
    /// `Σ x²`.
    pub squares: f64,
}

impl Loss {
    /// Error relative to the values, as a root mean square; 0 for values that are all 0.
    pub fn relative(self) -> f64 {
        match self.squares > 0.0 {
            true => (self.squared_error / self.squares).sqrt(),
            false => 0.0,
        }
    }
}

impl std::ops::Add for Loss {
    type Output = Loss;

    fn add(self, other: Loss) -> Loss {
        Loss {
            squared_error: self.squared_error + other.squared_error,
            squares: self.squares + other.squares,
        }
    }
}

/// Progress callback: elements converted so far; returning `false` cancels.
type Progress<'p> = Box<dyn Fn(u64) -> bool + 'p>;

/// Converts the rows of tensors while a file is written, see
/// [`Writer::tensor_with`](crate::gguf::Writer::tensor_with).
pub struct Converter<'p> {
    pool: rayon::ThreadPool,
    progress: Progress<'p>,
    done: Cell<u64>,
}

impl std::fmt::Debug for Converter<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Converter of {} elements", self.done.get())
    }
}

impl<'p> Converter<'p> {
    /// A converter on `n_threads` threads, or as many as this process may use. `progress` is called
    /// with the number of elements converted so far; returning `false` cancels.
    ///
    /// # Errors
    /// If the system starts no more threads.
    pub fn new(
        n_threads: Option<NonZeroUsize>,
        progress: impl Fn(u64) -> bool + 'p,
    ) -> io::Result<Converter<'p>> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(n_threads.map_or(0, NonZeroUsize::get))
            .build()
            .map_err(io::Error::other)?;
        Ok(Converter {
            pool,
            progress: Box::new(progress),
            done: Cell::new(0),
        })
    }

    /// What such inputs of the matrices of a stack say, on the converter's threads; nothing where they
    /// are not usable.
    pub(crate) fn feedback(&self, moments: Vec<Moments>) -> Vec<Option<Feedback>> {
        let all = || moments.into_iter().map(Feedback::new).collect();
        self.pool.install(all)
    }

    /// Writes `n_rows` rows of the tensor `name`, of which `row` gives the bytes.
    ///
    /// # Errors
    /// A [`RowError`] within an [`io::Error`]; one of the kind `Interrupted` if the callback
    /// cancels; or that of `out`.
    pub fn write<'a>(
        &self,
        name: &str,
        n_rows: usize,
        row: impl Fn(usize) -> Cow<'a, [u8]> + Sync,
        conversion: Conversion<'_>,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        self.write_slabs(name, n_rows, &row, conversion, out, None)
    }

    /// [`write`](Self::write), with what the new type loses.
    ///
    /// # Errors
    /// As there.
    pub fn write_measured<'a>(
        &self,
        name: &str,
        n_rows: usize,
        row: impl Fn(usize) -> Cow<'a, [u8]> + Sync,
        conversion: Conversion<'_>,
        out: &mut dyn Write,
    ) -> io::Result<Loss> {
        let mut loss = Loss::default();
        self.write_slabs(name, n_rows, &row, conversion, out, Some(&mut loss))?;
        Ok(loss)
    }

    fn write_slabs<'a>(
        &self,
        name: &str,
        n_rows: usize,
        row: &(dyn Fn(usize) -> Cow<'a, [u8]> + Sync),
        conversion: Conversion<'_>,
        out: &mut dyn Write,
        mut loss: Option<&mut Loss>,
    ) -> io::Result<()> {
        let n = conversion.n;
        let failed = |(row, error)| {
            io::Error::other(RowError {
                tensor: name.to_owned(),
                row,
                error,
            })
        };
        let to_bytes = n / conversion.to.block().0 as usize * conversion.to.block().1 as usize;
        let slab_rows = (SLAB / n).clamp(1, n_rows.max(1));
        let copies = conversion.is_copy();
        let mut converted = vec![0; if copies { 0 } else { slab_rows * to_bytes }];
        for first in (0..n_rows).step_by(slab_rows) {
            if !(self.progress)(self.done.get()) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let slab = first..n_rows.min(first + slab_rows);
            if copies {
                let check = |i| conversion.check(&row(i)).err().map(|error| (i, error));
                let rows = slab.clone().into_par_iter();
                if let Some(damaged) = self.pool.install(|| rows.find_map_first(check)) {
                    return Err(failed(damaged));
                }
                slab.clone().try_for_each(|i| out.write_all(&row(i)))?;
            } else {
                let converted = &mut converted[..slab.len() * to_bytes];
                let measures = loss.is_some();
                let panels = converted.par_chunks_mut(PANEL * to_bytes).enumerate();
                let losses = self.pool.install(|| {
                    panels
                        .map_init(Panel::default, |panel, (p, into)| {
                            let first = slab.start + p * PANEL;
                            panel.convert(&conversion, first, row, into, measures)
                        })
                        .try_reduce(Loss::default, |a, b| Ok(a + b))
                });
                let losses = losses.map_err(failed)?;
                if let Some(loss) = &mut loss {
                    **loss = **loss + losses;
                }
                out.write_all(converted)?;
            }
            self.done.set(self.done.get() + (slab.len() * n) as u64);
        }
        if !(self.progress)(self.done.get()) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(())
    }
}

impl Conversion<'_> {
    /// Whether rows keep their bytes.
    fn is_copy(&self) -> bool {
        self.from == self.to && self.change.is_none()
    }

    /// Refuses a row that has a value which is infinite or NaN: such a row is no weight. Tables of
    /// integers have none.
    fn check(&self, row: &[u8]) -> Result<(), QuantError> {
        if self.from.format().is_none() {
            return Ok(());
        }
        let mut values = vec![0.0; self.n];
        dequantize_row(self.from, row, &mut values)?;
        check_finite(&values)
    }

    /// The values of row `i`.
    fn values(&self, i: usize, row: &[u8], values: &mut [f32]) -> Result<(), QuantError> {
        dequantize_row(self.from, row, values)?;
        if let Some(change) = self.change {
            change(i, values);
        }
        Ok(())
    }

    /// Packs rows of one matrix from row `first` on.
    fn pack(
        &self,
        first: usize,
        values: &[f32],
        into: &mut [u8],
    ) -> Result<(), (usize, QuantError)> {
        let matrix = first / self.rows_per_matrix;
        let mut rows = values.chunks_exact(self.n).zip(first..);
        let feedback = self.feedback.get(matrix).and_then(Option::as_ref);
        let pack = self
            .to
            .format()
            .and_then(|format| format.quantize_with_feedback);
        if let (Some(pack), Some(feedback)) = (pack, feedback) {
            rows.try_for_each(|(row, i)| check_finite(row).map_err(|error| (i, error)))?;
            pack(values, feedback, into);
            return Ok(());
        }
        let row_bytes = into.len() / (values.len() / self.n);
        let importance = self.importance.map(|all| &all[matrix * self.n..][..self.n]);
        for ((row, i), into) in rows.zip(into.chunks_exact_mut(row_bytes)) {
            quantize_row(self.to, row, importance, into).map_err(|error| (i, error))?;
        }
        Ok(())
    }
}

/// Rows that are converted together.
#[derive(Default)]
struct Panel {
    values: Vec<f32>,
    written: Vec<f32>,
}

impl Panel {
    /// Converts rows from `first` on, as many as `into` holds; the loss if that is measured.
    fn convert<'a>(
        &mut self,
        conversion: &Conversion<'_>,
        first: usize,
        row: &(dyn Fn(usize) -> Cow<'a, [u8]> + Sync),
        into: &mut [u8],
        measures: bool,
    ) -> Result<Loss, (usize, QuantError)> {
        let n = conversion.n;
        let row_bytes = n / conversion.to.block().0 as usize * conversion.to.block().1 as usize;
        let n_rows = into.len() / row_bytes;
        self.values.resize(n_rows * n, 0.0);
        for (values, i) in self.values.chunks_exact_mut(n).zip(first..) {
            let outcome = conversion.values(i, &row(i), values);
            outcome.map_err(|error| (i, error))?;
        }
        // Those of one matrix after the other.
        let rows_per_matrix = conversion.rows_per_matrix;
        let mut done = 0;
        while done < n_rows {
            let left = rows_per_matrix - (first + done) % rows_per_matrix;
            let end = n_rows.min(done + left);
            let (values, into) = (
                &self.values[done * n..end * n],
                &mut into[done * row_bytes..end * row_bytes],
            );
            conversion.pack(first + done, values, into)?;
            done = end;
        }
        if !measures {
            return Ok(Loss::default());
        }
        self.written.resize(n_rows * n, 0.0);
        loss_of(conversion.to, into, &self.values, &mut self.written)
            .map_err(|error| (first, error))
    }
}

/// The loss of values that became `blocks`.
fn loss_of(
    to: DType,
    blocks: &[u8],
    values: &[f32],
    written: &mut [f32],
) -> Result<Loss, QuantError> {
    dequantize_row(to, blocks, written)?;
    let (mut squared_error, mut squares) = (0.0, 0.0);
    for (&x, &y) in values.iter().zip(&*written) {
        squared_error += f64::from(y - x).powi(2);
        squares += f64::from(x).powi(2);
    }
    Ok(Loss {
        squared_error,
        squares,
    })
}
