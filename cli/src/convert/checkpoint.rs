//! The tensors of a folder: one or more safetensors files, mapped.

use super::config::read_json;
use super::float8::{self, Float8};
use super::packed::{self, Packed};
use super::quantised::{Method, QUANTISED};
use super::raw::Raw;
use crate::io::Failure;
use ruvllm::gguf::MappedFile;
use ruvllm::quant::DType;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// Most tensors of a checkpoint.
const MAX_TENSORS: usize = 1 << 20;

/// The files, mapped.
pub(super) struct Checkpoint {
    /// What is put before the names of a file's tensors, its path, and the file.
    files: Vec<(String, PathBuf, MappedFile)>,
}

/// A tensor of a checkpoint.
#[derive(Debug)]
pub(super) struct Source<'a> {
    pub(super) name: String,
    /// Outermost dimension first, as in PyTorch.
    pub(super) shape: Vec<usize>,
    /// Type of the rows that [`Source::row`] gives.
    pub(super) dtype: DType,
    pub(super) data: Data<'a>,
}

/// Where the rows of a tensor come from.
#[derive(Debug)]
pub(super) enum Data<'a> {
    /// Row by row.
    Plain(&'a [u8]),
    Mxfp4 {
        codes: &'a [u8],
        exponents: &'a [u8],
    },
    Packed(Packed<'a>),
    Float8(Float8<'a>),
}

impl<'a> Source<'a> {
    /// Length of a row, which is the innermost dimension.
    pub(super) fn n(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The bytes of all rows, unless they have to be made.
    pub(super) fn plain(&self) -> Option<&'a [u8]> {
        match self.data {
            Data::Plain(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// Row `i`, of `n` values.
    pub(super) fn row(&self, i: usize, n: usize) -> Cow<'a, [u8]> {
        match &self.data {
            Data::Plain(bytes) => {
                let n_bytes = n * self.dtype.block().1 as usize;
                Cow::Borrowed(&bytes[i * n_bytes..][..n_bytes])
            }
            Data::Mxfp4 { codes, exponents } => {
                let (codes, n_blocks) = (&codes[i * n / 2..][..n / 2], n / 32);
                Cow::Owned(mxfp4_row(codes, &exponents[i * n_blocks..][..n_blocks]))
            }
            Data::Packed(packed) => Cow::Owned(packed.row(i, self.dtype)),
            Data::Float8(float8) => Cow::Owned(float8.row(i)),
        }
    }
}

/// Blocks of a GGUF file, whose byte `j` has the codes of values `j` and `j + 16`, from those of
/// gpt-oss, whose byte `j` has `2j` and `2j + 1`; the first of the two is in the lower half.
fn mxfp4_row(codes: &[u8], scales: &[u8]) -> Vec<u8> {
    let mut row = Vec::with_capacity(17 * scales.len());
    for (codes, scale) in codes.chunks_exact(16).zip(scales) {
        let code = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 15;
        row.push(*scale);
        row.extend((0..16).map(|j| code(j) | code(j + 16) << 4));
    }
    row
}

impl Checkpoint {
    /// Maps `model.safetensors`, or the files that `model.safetensors.index.json` lists.
    pub(super) fn open(folder: &Path) -> Result<Checkpoint, Failure> {
        let index = folder.join("model.safetensors.index.json");
        let mut names = BTreeSet::new();
        if let Some(content) = read_json(&index)? {
            let wrong = |what: &str| Failure::Work(format!("{}: {what}", index.display()));
            let map = content
                .get("weight_map")
                .and_then(Value::as_object)
                .ok_or_else(|| wrong("there is no weight_map"))?;
            for file in map.values() {
                let file = file.as_str().filter(|name| is_plain(name));
                names.insert(
                    file.ok_or_else(|| wrong("a value of weight_map is not the name of a file"))?
                        .to_owned(),
                );
            }
        } else {
            let entries = std::fs::read_dir(folder).map_err(Failure::file(folder))?;
            for entry in entries {
                let name = entry
                    .map_err(Failure::file(folder))?
                    .file_name()
                    .to_string_lossy()
                    .into_owned();
                let starts = ["model", "gptq_model"];
                if starts.iter().any(|start| name.starts_with(start))
                    && name.ends_with(".safetensors")
                {
                    names.insert(name);
                }
            }
        }
        if names.is_empty() {
            let text =
                "there is no model*.safetensors in it; other kinds of checkpoints are not read";
            return Err(Failure::Work(format!("{}: {text}", folder.display())));
        }
        let mut checkpoint = Checkpoint { files: Vec::new() };
        names
            .into_iter()
            .try_for_each(|name| checkpoint.add(String::new(), folder.join(name)))?;
        Ok(checkpoint)
    }

    /// Maps one more file, before the names of whose tensors `prefix` is put.
    pub(super) fn add(&mut self, prefix: String, path: PathBuf) -> Result<(), Failure> {
        let map = MappedFile::open(&path)?;
        self.files.push((prefix, path, map));
        Ok(())
    }

    /// The tensors, in the order of the files, but those that are left out, whatever their types;
    /// and how many those are.
    pub(super) fn tensors(
        &self,
        method: Method,
        is_left_out: impl Fn(&str) -> bool,
    ) -> Result<(Vec<Source<'_>>, usize), Failure> {
        let (mut all, mut parts, mut n_left_out) = (Vec::new(), Vec::new(), 0);
        let mut names = BTreeSet::new();
        for (prefix, path, map) in &self.files {
            let wrong = |what: String| Failure::Work(format!("{}: {what}", path.display()));
            let broken = |error| {
                wrong(format!(
                    "{error}: the file is incomplete or no safetensors; download it again"
                ))
            };
            let file = SafeTensors::deserialize(map).map_err(broken)?;
            let mut tensors = file.tensors();
            // Where the data lies, so that a disk reads it in one go.
            tensors.sort_by_key(|(_, tensor)| tensor.data().as_ptr());
            for (name, tensor) in tensors {
                let name = format!("{prefix}{name}");
                if !names.insert(name.clone()) || names.len() > MAX_TENSORS {
                    return Err(wrong(format!(
                        "tensor {name} is there twice, or there are more than {MAX_TENSORS}"
                    )));
                }
                if is_left_out(&name) {
                    n_left_out += 1;
                    continue;
                }
                let raw = Raw {
                    name,
                    shape: tensor.shape().to_vec(),
                    dtype: tensor.dtype(),
                    data: tensor.data(),
                };
                if raw.shape.contains(&0) {
                    return Err(wrong(format!(
                        "tensor {} is empty: {:?}",
                        raw.name, raw.shape
                    )));
                }
                if is_part(&raw, method) {
                    parts.push(raw);
                    continue;
                }
                let Some(dtype) = raw.float() else {
                    let Raw { name, dtype, .. } = raw;
                    return Err(wrong(format!(
                        "tensor {name} has the type {dtype:?}: {QUANTISED}"
                    )));
                };
                let Raw {
                    name, shape, data, ..
                } = raw;
                let data = Data::Plain(data);
                all.push(Source {
                    name,
                    shape,
                    dtype,
                    data,
                });
            }
        }
        all.extend(match method {
            Method::None | Method::Mxfp4 => join_blocks(parts)?,
            Method::Awq | Method::Gptq { .. } => packed_sources(parts, method)?,
            Method::Float8 { block } => float8_sources(parts, block)?,
        });
        Ok((all, n_left_out))
    }

    /// All bytes, for a hash.
    pub(super) fn bytes(&self) -> impl Iterator<Item = &[u8]> {
        self.files.iter().map(|(_, _, map)| &map[..])
    }
}

/// Whether a tensor is a part of a quantised one.
fn is_part(raw: &Raw<'_>, method: Method) -> bool {
    match method {
        Method::None | Method::Mxfp4 => {
            raw.dtype == Dtype::U8 && (raw.name.ends_with(BLOCKS) || raw.name.ends_with(SCALES))
        }
        Method::Awq | Method::Gptq { .. } => packed::is_part(&raw.name),
        Method::Float8 { .. } => float8::is_part(raw),
    }
}

/// Ends of the names of MXFP4's tensors.
const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";

/// The matrices of GPTQ's or AWQ's parts.
fn packed_sources(parts: Vec<Raw<'_>>, method: Method) -> Result<Vec<Source<'_>>, Failure> {
    let matrices = packed::join(parts, method)?.into_iter();
    let sources = matrices.map(|(name, dtype, packed)| Source {
        name,
        shape: packed.shape().to_vec(),
        dtype,
        data: Data::Packed(packed),
    });
    Ok(sources.collect())
}

/// The matrices of FP8's parts.
fn float8_sources(
    parts: Vec<Raw<'_>>,
    block: Option<[usize; 2]>,
) -> Result<Vec<Source<'_>>, Failure> {
    let matrices = float8::join(parts, block)?.into_iter();
    let sources = matrices.map(|(name, float8)| Source {
        name,
        shape: float8.shape().to_vec(),
        dtype: DType::F32,
        data: Data::Float8(float8),
    });
    Ok(sources.collect())
}

/// Makes one tensor of the codes `(…, n / 32, 16)` and the exponents `(…, n / 32)` of an MXFP4
/// tensor `(…, n)`.
fn join_blocks(parts: Vec<Raw<'_>>) -> Result<Vec<Source<'_>>, Failure> {
    let (scales, blocks): (Vec<_>, Vec<_>) = parts
        .into_iter()
        .partition(|part| part.name.ends_with(SCALES));
    let mut scales: HashMap<String, Raw<'_>> = scales
        .into_iter()
        .map(|part| (part.name.trim_end_matches(SCALES).to_owned(), part))
        .collect();
    let mut sources = Vec::new();
    for part in blocks {
        let name = part.name.trim_end_matches(BLOCKS).to_owned();
        let wrong = |what: String| Failure::Work(format!("tensor {}: {what}", part.name));
        let of_blocks = scales
            .remove(&name)
            .ok_or_else(|| wrong(format!("there is no {name}{SCALES}")))?;
        let [outer @ .., n_blocks, 16] = &part.shape[..] else {
            return Err(wrong("blocks have 16 bytes".into()));
        };
        if [outer, &[*n_blocks]].concat() != of_blocks.shape || outer.is_empty() {
            let (blocks, scales) = (&part.shape, &of_blocks.shape);
            return Err(wrong(format!(
                "blocks of shape {blocks:?} do not have scales of shape {scales:?}"
            )));
        }
        sources.push(Source {
            name,
            shape: [outer, &[32 * n_blocks]].concat(),
            dtype: DType::MXFP4,
            data: Data::Mxfp4 {
                codes: part.data,
                exponents: of_blocks.data,
            },
        });
    }
    match scales.into_keys().next() {
        Some(name) => Err(Failure::Work(format!(
            "tensor {name}{SCALES} has no blocks"
        ))),
        None => Ok(sources),
    }
}

/// Whether `name` is that of a file or folder in the same folder.
pub(super) fn is_plain(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|file| file == name)
}
