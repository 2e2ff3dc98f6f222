//! Adapters as GGUF files, in llama.cpp's layout.
//!
//! `general.type` is `adapter`, `adapter.type` is `lora`, `adapter.lora.alpha` the strength. A
//! matrix `T: (n_out, n_in)` is changed by two tensors: `T.lora_a`, rank rows of `n_in` values, and
//! `T.lora_b`, `n_out` rows of rank values; matrices of experts are stacked in both. The embedding
//! table is a product with one-hot vectors: its `lora_a` has one row of rank values per token, its
//! `lora_b` one per value of an embedding.

use crate::gguf::{Gguf, TensorInfo, Writer};
use crate::lora::AdapterError;
use crate::lora::adapter::{Adapter, Factor, Term, max_rank};
use crate::lora::site::{Base, TargetModule};
use crate::quant::{DType, dequantize_row};
use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

const ALPHA: &str = "adapter.lora.alpha";
const A: &str = ".lora_a";
const B: &str = ".lora_b";

/// Ranges of sites by the name of their tensor.
pub(super) fn sites_by_tensor(sites: &[TargetModule]) -> HashMap<&str, Range<usize>> {
    let mut all = HashMap::new();
    for (i, site) in sites.iter().enumerate() {
        // The matrices of a tensor follow each other.
        all.entry(&*site.tensor).or_insert(i..i).end = i + 1;
    }
    all
}

impl Adapter {
    /// Loads the adapter in a GGUF file, see [`Adapter::open`].
    pub(crate) fn read(gguf: &Gguf, base: Base<'_>) -> Result<Adapter, AdapterError> {
        let metadata = gguf.metadata();
        for (key, expected) in [("general.type", "adapter"), ("adapter.type", "lora")] {
            let found = metadata.opt_str(key)?.unwrap_or_default();
            if found != expected {
                return Err(AdapterError::NotAnAdapter {
                    key,
                    found: found.to_owned(),
                    expected,
                });
            }
        }
        let (found, expected) = (metadata.str("general.architecture")?, base.arch);
        if found != expected {
            return Err(AdapterError::Architecture {
                found: found.to_owned(),
                expected: expected.to_owned(),
            });
        }
        // Present in adapters that are active only after certain tokens.
        let key = "adapter.alora.invocation_tokens";
        if metadata.get(key).is_some() {
            return Err(AdapterError::Unsupported { key });
        }
        let mut adapter = Adapter::empty_for(base);
        adapter.set_alpha(metadata.opt_f32(ALPHA)?.unwrap_or(0.0))?;

        let by_tensor = sites_by_tensor(base.sites);
        for t in gguf.tensors() {
            let (tensor, partner) = match (t.name.strip_suffix(A), t.name.strip_suffix(B)) {
                (Some(tensor), _) => (tensor, format!("{tensor}{B}")),
                (_, Some(tensor)) => (tensor, format!("{tensor}{A}")),
                _ => {
                    return Err(AdapterError::UnknownTensor {
                        name: t.name.clone(),
                    });
                }
            };
            let Some(sites) = by_tensor.get(tensor) else {
                return Err(AdapterError::NoSuchMatrix {
                    tensor: tensor.to_owned(),
                });
            };
            let Some(partner) = gguf.tensor(&partner) else {
                return Err(AdapterError::Unpaired { missing: partner });
            };
            if t.name.ends_with(A) {
                let terms = terms(gguf, &base.sites[sites.clone()], t, partner)?;
                sites
                    .clone()
                    .zip(terms)
                    .for_each(|(site, term)| adapter.set_term(site, term));
            }
        }
        if adapter.n_params() == 0 {
            Err(AdapterError::Empty)
        } else {
            Ok(adapter)
        }
    }

    /// Saves the adapter, in full precision. The file gets its name only when it is complete on
    /// disk, and then replaces an older one.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), AdapterError> {
        let mut writer = self.writer();
        writer.overwrite();
        Ok(writer.write(path)?)
    }

    /// The file that [`Adapter::save`] writes.
    ///
    /// # Errors
    /// If the adapter exceeds the limits of a GGUF file.
    pub fn to_bytes(&self) -> Result<Vec<u8>, AdapterError> {
        Ok(self.writer().to_bytes()?)
    }

    fn writer(&self) -> Writer<'_> {
        let mut writer = Writer::new();
        writer.metadata("general.type", "adapter");
        writer.metadata("general.architecture", self.arch());
        writer.metadata("adapter.type", "lora");
        writer.metadata(ALPHA, self.alpha());
        let mut end = 0;
        for sites in self.sites().chunk_by(|a, b| a.tensor == b.tensor) {
            let (site, terms) = (&sites[0], end..end + sites.len());
            end = terms.end;
            let Some(rank) = terms.clone().find_map(|i| self.term(i)).map(Term::rank) else {
                continue;
            };
            let [dims_a, dims_b] = dims(site, rank, sites.len());
            for (suffix, dims, turned) in [(A, dims_a, site.is_embedding()), (B, dims_b, true)] {
                let terms = terms.clone();
                writer.tensor_with(
                    format!("{}{suffix}", site.tensor),
                    &dims,
                    DType::F32,
                    move |out| {
                        let zeros =
                            vec![0.0; rank * if suffix == A { site.n_in } else { site.n_out }];
                        for i in terms {
                            let rows = self
                                .term(i)
                                .map_or(&*zeros, |t| if suffix == A { t.a() } else { t.b() });
                            let rows = if turned {
                                transpose(rows, rank).into()
                            } else {
                                Cow::Borrowed(rows)
                            };
                            out.write_all(
                                &rows
                                    .iter()
                                    .flat_map(|x| x.to_le_bytes())
                                    .collect::<Vec<u8>>(),
                            )?;
                        }
                        Ok(())
                    },
                );
            }
        }
        writer
    }
}

/// Dimensions of `lora_a` and `lora_b`, in ggml's order (row length first).
fn dims(site: &TargetModule, rank: usize, n_expert: usize) -> [Vec<u64>; 2] {
    let a = if site.is_embedding() {
        [rank, site.n_in, n_expert]
    } else {
        [site.n_in, rank, n_expert]
    };
    let b = [rank, site.n_out, n_expert];
    let n_dims = if site.expert.is_some() { 3 } else { 2 };
    [a, b].map(|dims| dims[..n_dims].iter().map(|&n| n as u64).collect())
}

/// Reads the terms of one tensor's sites.
fn terms(
    gguf: &Gguf,
    sites: &[TargetModule],
    a: &TensorInfo,
    b: &TensorInfo,
) -> Result<Vec<Term>, AdapterError> {
    let site = &sites[0];
    let max = max_rank(site);
    // Narrow enough for both checks: the rank is bounded first, then all dimensions must agree with
    // it.
    let rank = usize::try_from(b.dims[0]).unwrap_or(usize::MAX);
    if rank > max {
        return Err(AdapterError::Rank {
            tensor: site.tensor.to_string(),
            rank,
            max,
        });
    }
    let significant =
        |dims: &[u64]| dims.len() - dims.iter().rev().take_while(|&&n| n == 1).count();
    for (t, expected) in [a, b].into_iter().zip(dims(site, rank, sites.len())) {
        if t.dims[..significant(&t.dims)] != expected[..significant(&expected)] {
            return Err(AdapterError::Shape {
                name: t.name.clone(),
                found: t.dims.clone(),
                expected,
            });
        }
    }
    let (values_a, values_b) = (values(gguf, a)?, values(gguf, b)?);
    let of_a = values_a.chunks_exact(rank * site.n_in);
    let of_b = values_b.chunks_exact(rank * site.n_out);
    let held = |values: Vec<f32>, t: &TensorInfo| match t.dtype {
        DType::F16 if !site.is_embedding() => Factor::half(&values),
        _ => Factor::F32(values),
    };
    let term = |(of_a, of_b): (&[f32], &[f32])| {
        let of_a = if site.is_embedding() {
            transpose(of_a, site.n_in)
        } else {
            of_a.to_vec()
        };
        Term::of(rank, held(of_a, a), held(transpose(of_b, site.n_out), b))
    };
    Ok(of_a.zip(of_b).map(term).collect())
}

/// Reads all values of a tensor.
fn values(gguf: &Gguf, t: &TensorInfo) -> Result<Vec<f32>, AdapterError> {
    let mut values = vec![0.0; t.n_elems() as usize];
    dequantize_row(t.dtype, gguf.data(t), &mut values).map_err(|_| AdapterError::TensorType {
        name: t.name.clone(),
        found: t.dtype.to_string(),
    })?;
    match values.iter().position(|x| !x.is_finite()) {
        Some(index) => Err(AdapterError::NotFinite {
            name: t.name.clone(),
            index,
            value: values[index],
        }),
        None => Ok(values),
    }
}

/// Transposes a matrix of `n_rows` rows.
fn transpose(x: &[f32], n_rows: usize) -> Vec<f32> {
    let n_cols = x.len() / n_rows;
    (0..x.len())
        .map(|i| x[i % n_rows * n_cols + i / n_rows])
        .collect()
}
