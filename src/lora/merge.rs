//! Merging adapters into weights.

use crate::arch::Arch;
use crate::gguf::{Gguf, TensorInfo, Writer};
use crate::lora::AdapterError;
use crate::lora::adapter::{Adapter, Attached, Term};
use crate::lora::file::sites_by_tensor;
use crate::lora::site::{Base, TargetModule};
use crate::quant::{DType, QuantError, dequantize_row, quantize_row};
use rayon::prelude::*;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

/// Number of values converted between two calls of the progress function.
const SLAB: usize = 1 << 22;
/// Most rows of a tensor on which it is measured how much of a change is left.
const MEASURED_ROWS: usize = 128;

/// The tensors of the file `gguf` of the model `base` with `adapters` in them; those that change
/// take the type `dtype`, or keep theirs.
fn jobs<'a>(
    (gguf, arch, base): (&'a Gguf, Arch, Base<'a>),
    adapters: &[(Arc<Adapter>, f32)],
    dtype: Option<DType>,
) -> Result<Vec<Job<'a>>, AdapterError> {
    let adapters = adapters
        .iter()
        .map(|(adapter, scale)| Attached::new(base, Arc::clone(adapter), *scale));
    let adapters: Arc<[Attached]> = adapters.collect::<Result<_, _>>()?;
    let by_tensor = sites_by_tensor(base.sites);
    let job = |name: &str, from: &'a TensorInfo| -> Result<Job<'a>, AdapterError> {
        let sites = by_tensor.get(name).cloned().unwrap_or_default();
        let changes = sites
            .clone()
            .any(|i| adapters.iter().any(|a| a.term(i).is_some()));
        let to = dtype.filter(|_| changes).unwrap_or(from.dtype);
        if changes {
            let format = to.format().ok_or_else(|| QuantError::NotAWeight {
                dtype: to.to_string(),
            })?;
            if format.quantize.is_none() {
                return Err(QuantError::ReadOnly {
                    dtype: to.to_string(),
                }
                .into());
            }
            if !from.dims[0].is_multiple_of(format.block_elems as u64) {
                let (name, n) = (name.to_owned(), from.dims[0]);
                return Err(AdapterError::RowLength {
                    name,
                    n,
                    dtype: to.to_string(),
                    block: format.block_elems,
                });
            }
        }
        Ok(Job {
            gguf,
            arch,
            all_sites: base.sites,
            name: name.to_owned(),
            from,
            to,
            sites,
            adapters: changes.then(|| Arc::clone(&adapters)),
        })
    };
    let mut jobs = gguf
        .tensors()
        .iter()
        .map(|t| job(&t.name, t))
        .collect::<Result<Vec<_>, _>>()?;
    if gguf.tensor("output.weight").is_none()
        && let Some(table) = gguf.tensor("token_embd.weight")
    {
        let head = job("output.weight", table)?;
        if head.adapters.is_some()
            || jobs
                .iter()
                .any(|job| job.from == table && job.adapters.is_some())
        {
            jobs.push(head);
        }
    }
    Ok(jobs)
}

/// [`Model::merged`](crate::Model::merged) of the file `model.0` of the model `model.2`.
pub(crate) fn merge<'a>(
    model: (&'a Gguf, Arch, Base<'a>),
    adapters: &[(Arc<Adapter>, f32)],
    dtype: Option<DType>,
    progress: &'a dyn Fn(u64) -> bool,
) -> Result<Writer<'a>, AdapterError> {
    let (gguf, jobs) = (model.0, jobs(model, adapters, dtype)?);
    let mut writer = Writer::new();
    for (key, value) in gguf
        .metadata()
        .iter()
        .filter(|(key, _)| !key.starts_with("split."))
    {
        writer.metadata(key, value.clone());
    }
    let mut before = 0;
    for job in jobs {
        let start = before;
        before += job.from.n_elems();
        writer.tensor_with(job.name.clone(), &job.from.dims, job.to, move |out| {
            job.write(out, &|done| progress(start + done))
        });
    }
    Ok(writer)
}

/// [`Model::kept_by_merging`](crate::Model::kept_by_merging).
pub(crate) fn kept(
    model: (&Gguf, Arch, Base<'_>),
    adapters: &[(Arc<Adapter>, f32)],
    dtype: Option<DType>,
) -> Result<f64, AdapterError> {
    let (mut kept, mut wanted) = (0.0, 0.0);
    for job in jobs(model, adapters, dtype)? {
        if let Some(adapters) = &job.adapters {
            let (of_kept, of_wanted) = job.kept(adapters)?;
            kept += of_kept;
            wanted += of_wanted;
        }
    }
    Ok(if wanted > 0.0 { kept / wanted } else { 1.0 })
}

/// One tensor to write.
struct Job<'a> {
    gguf: &'a Gguf,
    arch: Arch,
    all_sites: &'a [TargetModule],
    name: String,
    /// Tensor from which it is made.
    from: &'a TensorInfo,
    to: DType,
    sites: Range<usize>,
    /// `None` if the tensor does not change.
    adapters: Option<Arc<[Attached]>>,
}

impl Job<'_> {
    fn write(&self, out: &mut dyn Write, progress: &dyn Fn(u64) -> bool) -> io::Result<()> {
        let data = self.gguf.data(self.from);
        let n = self.from.dims[0] as usize;
        let row_bytes = |dtype: DType| n / dtype.block().0 as usize * dtype.block().1 as usize;
        let (from_bytes, to_bytes) = (row_bytes(self.from.dtype), row_bytes(self.to));
        let slab_rows = (SLAB / n).max(1);
        let mut merged = vec![
            0;
            if self.adapters.is_some() {
                slab_rows * to_bytes
            } else {
                0
            }
        ];
        for (i, slab) in data.chunks(slab_rows * from_bytes).enumerate() {
            let first = i * slab_rows;
            let n_rows = slab.len() / from_bytes;
            if let Some(adapters) = &self.adapters {
                let merged = &mut merged[..n_rows * to_bytes];
                let rows = slab
                    .par_chunks_exact(from_bytes)
                    .zip(merged.par_chunks_exact_mut(to_bytes));
                rows.enumerate().try_for_each_init(
                    || vec![0.0; n],
                    |values, (r, (from, to))| {
                        let converted =
                            dequantize_row(self.from.dtype, from, values).and_then(|()| {
                                self.change(adapters, first + r, values);
                                quantize_row(self.to, values, None, to)
                            });
                        converted.map_err(|e| {
                            io::Error::other(format!(
                                "tensor {:?}, row {}: {e}",
                                self.name,
                                first + r
                            ))
                        })
                    },
                )?;
                out.write_all(merged)?;
            } else {
                out.write_all(slab)?;
            }
            if !progress(((first + n_rows) * n) as u64) {
                return Err(io::ErrorKind::Interrupted.into());
            }
        }
        Ok(())
    }

    /// Products of the change `d` with what writing leaves of it, and with itself, over some rows.
    fn kept(&self, adapters: &[Attached]) -> Result<(f64, f64), QuantError> {
        let data = self.gguf.data(self.from);
        let n = self.from.dims[0] as usize;
        let row_bytes = |dtype: DType| n / dtype.block().0 as usize * dtype.block().1 as usize;
        let (from_bytes, to_bytes) = (row_bytes(self.from.dtype), row_bytes(self.to));
        let n_rows = data.len() / from_bytes;
        let rows = (0..n_rows).step_by(n_rows.div_ceil(MEASURED_ROWS).max(1));
        let (mut base, mut change) = (vec![0.0; n], vec![0.0; n]);
        let (mut values, mut written) = (vec![0.0; n], vec![0; to_bytes]);
        let (mut kept, mut wanted) = (0.0, 0.0);
        for r in rows {
            let from = &data[r * from_bytes..(r + 1) * from_bytes];
            dequantize_row(self.from.dtype, from, &mut base)?;
            change.fill(0.0);
            self.change(adapters, r, &mut change);
            for ((value, x), d) in values.iter_mut().zip(&base).zip(&change) {
                *value = x + d;
            }
            quantize_row(self.to, &values, None, &mut written)?;
            dequantize_row(self.to, &written, &mut values)?;
            for ((value, x), d) in values.iter().zip(&base).zip(&change) {
                kept += f64::from(value - x) * f64::from(*d);
                wanted += f64::from(*d) * f64::from(*d);
            }
        }
        Ok((kept, wanted))
    }

    /// Adds the adapters' change of row `r` of the tensor.
    fn change(&self, adapters: &[Attached], r: usize, values: &mut [f32]) {
        let sites = &self.all_sites[self.sites.clone()];
        // The rows of the embedding table are its inputs.
        let n_rows = if sites[0].is_embedding() {
            sites[0].n_in
        } else {
            sites[0].n_out
        };
        let (e, r) = (r / n_rows, r % n_rows);
        for (term, factor) in adapters.iter().filter_map(|a| a.term(self.sites.start + e)) {
            for (column, row) in rank_ones(&sites[e], term) {
                self.arch.add_scaled(values, row, factor * column[r]);
            }
        }
    }
}

/// Pairs of column and row whose outer products add up to the change of a tensor.
fn rank_ones<'t>(
    site: &TargetModule,
    term: &'t Term,
) -> impl Iterator<Item = (&'t [f32], &'t [f32])> {
    let is_embedding = site.is_embedding();
    let pairs = term
        .a()
        .chunks_exact(site.n_in)
        .zip(term.b().chunks_exact(site.n_out));
    pairs.map(move |(a, b)| if is_embedding { (a, b) } else { (b, a) })
}
