//! The tensors of a folder: one or more safetensors files, mapped.

use super::config::read_json;
use crate::io::Failure;
use ruvllm::gguf::MappedFile;
use ruvllm::quant::DType;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
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
    pub(super) dtype: DType,
    pub(super) data: &'a [u8],
    /// Exponents of MXFP4's blocks, whose `data` has their codes alone; empty for other types.
    pub(super) scales: &'a [u8],
}

impl Source<'_> {
    /// Length of a row, which is the innermost dimension.
    pub(super) fn n(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
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
                if name.starts_with("model") && name.ends_with(".safetensors") {
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
        is_left_out: impl Fn(&str) -> bool,
    ) -> Result<(Vec<Source<'_>>, usize), Failure> {
        let (mut all, mut n_left_out) = (Vec::new(), 0);
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
                let dtype = match tensor.dtype() {
                    Dtype::U8 if name.ends_with(BLOCKS) || name.ends_with(SCALES) => DType::MXFP4,
                    Dtype::F32 => DType::F32,
                    Dtype::F16 => DType::F16,
                    Dtype::BF16 => DType::BF16,
                    other => {
                        return Err(wrong(format!(
                            "tensor {name} has the type {other:?}: {QUANTISED}"
                        )));
                    }
                };
                if tensor.shape().contains(&0) {
                    return Err(wrong(format!(
                        "tensor {name} is empty: {:?}",
                        tensor.shape()
                    )));
                }
                all.push(Source {
                    name,
                    shape: tensor.shape().to_vec(),
                    dtype,
                    data: tensor.data(),
                    scales: &[],
                });
            }
        }
        Ok((join_blocks(all)?, n_left_out))
    }
}

/// Ends of the names of MXFP4's tensors.
const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";

/// Makes one tensor of the codes `(…, n / 32, 16)` and the exponents `(…, n / 32)` of an MXFP4
/// tensor `(…, n)`.
fn join_blocks(all: Vec<Source<'_>>) -> Result<Vec<Source<'_>>, Failure> {
    let (scales, mut all): (Vec<_>, Vec<_>) = all
        .into_iter()
        .partition(|source| source.dtype == DType::MXFP4 && source.name.ends_with(SCALES));
    let mut scales: HashMap<String, Source<'_>> = scales
        .into_iter()
        .map(|source| (source.name.trim_end_matches(SCALES).to_owned(), source))
        .collect();
    for source in all.iter_mut().filter(|source| source.dtype == DType::MXFP4) {
        let name = source.name.trim_end_matches(BLOCKS).to_owned();
        let wrong = |what: String| Failure::Work(format!("tensor {}: {what}", source.name));
        let of_blocks = scales
            .remove(&name)
            .ok_or_else(|| wrong(format!("there is no {name}{SCALES}")))?;
        let [outer @ .., _, 16] = &source.shape[..] else {
            return Err(wrong("blocks have 16 bytes".into()));
        };
        if source.shape.split_last().map(|(_, blocks)| blocks) != Some(&of_blocks.shape[..])
            || outer.is_empty()
        {
            let (blocks, scales) = (&source.shape, &of_blocks.shape);
            return Err(wrong(format!(
                "blocks of shape {blocks:?} do not have scales of shape {scales:?}"
            )));
        }
        source.shape = [outer, &[32 * of_blocks.n()]].concat();
        (source.scales, source.name) = (of_blocks.data, name);
    }
    match scales.into_keys().next() {
        Some(name) => Err(Failure::Work(format!(
            "tensor {name}{SCALES} has no blocks"
        ))),
        None => Ok(all),
    }
}

pub(super) const QUANTISED: &str = "only F32, F16, BF16 and gpt-oss's MXFP4 weights are converted; take the checkpoint from which it was quantised";

/// Whether `name` is that of a file or folder in the same folder.
pub(super) fn is_plain(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|file| file == name)
}
