//! The tensors of a folder: one or more safetensors files, mapped.

use super::Failure;
use super::config::read_json;
use ruvllm::gguf::MappedFile;
use ruvllm::quant::DType;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Most tensors of a checkpoint.
const MAX_TENSORS: usize = 1 << 20;

/// The files, mapped.
pub(super) struct Checkpoint {
    files: Vec<(PathBuf, MappedFile)>,
}

/// A tensor of a checkpoint.
#[derive(Debug)]
pub(super) struct Source<'a> {
    pub(super) name: String,
    /// Outermost dimension first, as in PyTorch.
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) data: &'a [u8],
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
            let map =
                content.get("weight_map").and_then(Value::as_object).ok_or_else(|| wrong("there is no weight_map"))?;
            for file in map.values() {
                let file = file.as_str().filter(|name| is_plain(name));
                names.insert(file.ok_or_else(|| wrong("a value of weight_map is not the name of a file"))?.to_owned());
            }
        } else {
            let entries = std::fs::read_dir(folder).map_err(Failure::file(folder))?;
            for entry in entries {
                let name = entry.map_err(Failure::file(folder))?.file_name().to_string_lossy().into_owned();
                if name.starts_with("model") && name.ends_with(".safetensors") {
                    names.insert(name);
                }
            }
        }
        if names.is_empty() {
            let text = "there is no model*.safetensors in it; other kinds of checkpoints are not read";
            return Err(Failure::Work(format!("{}: {text}", folder.display())));
        }
        let files = names.into_iter().map(|name| {
            let path = folder.join(name);
            let map = MappedFile::open(&path)?;
            Ok((path, map))
        });
        Ok(Checkpoint { files: files.collect::<Result<_, Failure>>()? })
    }

    /// The tensors, in the order of the files.
    pub(super) fn tensors(&self) -> Result<Vec<Source<'_>>, Failure> {
        let mut all = Vec::new();
        let mut names = BTreeSet::new();
        for (path, map) in &self.files {
            let wrong = |what: String| Failure::Work(format!("{}: {what}", path.display()));
            let file = SafeTensors::deserialize(map).map_err(|error| wrong(error.to_string()))?;
            let mut tensors = file.tensors();
            // Where the data lies, so that a disk reads it in one go.
            tensors.sort_by_key(|(_, tensor)| tensor.data().as_ptr());
            for (name, tensor) in tensors {
                if !names.insert(name.clone()) || names.len() > MAX_TENSORS {
                    return Err(wrong(format!("tensor {name} is there twice, or there are more than {MAX_TENSORS}")));
                }
                let dtype = match tensor.dtype() {
                    Dtype::F32 => DType::F32,
                    Dtype::F16 => DType::F16,
                    Dtype::BF16 => DType::BF16,
                    other => return Err(wrong(format!("tensor {name} has the type {other:?}: {QUANTISED}"))),
                };
                if tensor.shape().contains(&0) {
                    return Err(wrong(format!("tensor {name} is empty: {:?}", tensor.shape())));
                }
                all.push(Source { name, shape: tensor.shape().to_vec(), dtype, data: tensor.data() });
            }
        }
        Ok(all)
    }
}

pub(super) const QUANTISED: &str =
    "only F32, F16 and BF16 weights are converted; take the checkpoint that was quantised";

/// Whether `name` is that of a file in the same folder.
fn is_plain(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|file| file == name)
}
