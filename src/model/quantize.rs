//! Models in smaller types: what each tensor becomes, the file of such a plan, and models that are
//! quantised while they are opened.

use crate::gguf::{Gguf, GgufError, TensorInfo, Value, Writer};
use crate::model::ModelError;
use crate::quant::{Conversion, Converter, DType, FileType, ModelShape, RowError};
use std::borrow::Cow;
use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};

/// A tensor, the type that it gets, and the importance of its weights.
#[derive(Clone, Debug)]
pub struct Planned<'a> {
    /// The tensor.
    pub tensor: &'a TensorInfo,
    /// Its type in the new file.
    pub to: DType,
    /// Importance of each weight of a row, for each matrix of a stack.
    pub importance: Option<Vec<f32>>,
}

/// What the types of tensors in a mix depend on, as far as the file tells.
pub fn model_shape(gguf: &Gguf) -> ModelShape {
    let metadata = gguf.metadata();
    let arch = metadata.opt_str("general.architecture").ok().flatten();
    let number = |key: &str| {
        let key = format!("{}.{key}", arch.unwrap_or_default());
        // Some families have one value per layer.
        let of_layers = || {
            metadata
                .opt_u32s(&key)
                .ok()
                .flatten()?
                .iter()
                .copied()
                .max()
        };
        let single = metadata.opt_u32(&key).ok().flatten();
        single.or_else(of_layers).map(|n| n as usize)
    };
    let n_head = number("attention.head_count").unwrap_or(1);
    ModelShape {
        n_layer: number("block_count").unwrap_or(1),
        n_head,
        n_head_kv: number("attention.head_count_kv").unwrap_or(n_head),
        n_expert: number("expert_count").unwrap_or(0),
        tied_embeddings: gguf.tensor("output.weight").is_none(),
        importance: false,
    }
}

/// The file of that plan, whose rows `converter` converts while it is written.
pub fn writer<'a>(
    gguf: &'a Gguf,
    plan: &'a [Planned<'a>],
    file_type: FileType,
    converter: &'a Converter<'a>,
) -> Writer<'a> {
    let mut writer = Writer::new();
    let of_whole = |(key, _): &(&str, &Value)| !key.starts_with("split.");
    for (key, value) in gguf.metadata().iter().filter(of_whole) {
        writer.metadata(key, value.clone());
    }
    writer.metadata("general.quantization_version", 2u32);
    writer.metadata("general.file_type", Value::U32(file_type as u32));
    for planned in plan {
        let (t, data) = (planned.tensor, gguf.data(planned.tensor));
        let n_rows = (t.n_elems() / t.dims[0]) as usize;
        let row_bytes = data.len() / n_rows;
        let rows_per_matrix = t.dims.get(1).map_or(1, |&n| n.max(1) as usize);
        let conversion = Conversion {
            n: t.dims[0] as usize,
            from: t.dtype,
            to: planned.to,
            change: None,
            importance: planned
                .importance
                .as_deref()
                .map(|all| (all, rows_per_matrix)),
        };
        writer.tensor_with(&t.name, &t.dims, planned.to, move |out| {
            let row = |i: usize| Cow::Borrowed(&data[i * row_bytes..][..row_bytes]);
            converter.write(&t.name, n_rows, row, conversion, out)
        });
    }
    writer
}

/// How a model is quantised while it is opened.
#[derive(Clone, Debug)]
pub(super) struct OnOpen {
    file_type: FileType,
    /// Folder in which the result is kept.
    cache: Option<PathBuf>,
}

impl OnOpen {
    pub(super) fn new(file_type: FileType, cache: Option<PathBuf>) -> OnOpen {
        OnOpen { file_type, cache }
    }

    /// The model in this type: in memory, or mapped from the cache. `progress` is called with the
    /// share done, and cancels by `false`; `limit` is the most bytes that the weights may have.
    pub(super) fn apply(
        &self,
        gguf: Gguf,
        limit: Option<u64>,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Gguf, ModelError> {
        let plan = self.plan(&gguf)?;
        if plan
            .iter()
            .all(|planned| planned.to == planned.tensor.dtype)
        {
            return Ok(gguf);
        }
        let need = plan.iter().map(n_bytes).sum();
        if let Some(limit) = limit.filter(|&limit| need > limit) {
            return Err(ModelError::MemoryLimit { need, limit });
        }
        let total: u64 = gguf.tensors().iter().map(TensorInfo::n_elems).sum();
        let tell = Cell::new(Some(progress));
        let converter = Converter::new(None, |done| {
            let Some(progress) = tell.take() else {
                return true;
            };
            let goes_on = progress(done as f32 / total.max(1) as f32);
            tell.set(Some(progress));
            goes_on
        });
        let converter = converter.map_err(ModelError::QuantizeThreads)?;
        let writer = || writer(&gguf, &plan, self.file_type, &converter);
        match &self.cache {
            None => Gguf::from_writer(writer()),
            Some(folder) => {
                let name = format!(
                    "{:016x}-{}-{}.gguf",
                    gguf.content_hash(),
                    self.file_type,
                    env!("CARGO_PKG_VERSION")
                );
                cached(&folder.join(name), writer)
            }
        }
        .map_err(failure)
    }

    /// The types of the mix; tensors that are quantised already keep theirs, or are refused.
    fn plan<'a>(&self, gguf: &'a Gguf) -> Result<Vec<Planned<'a>>, ModelError> {
        let shape = model_shape(gguf);
        let planned = |tensor: &'a TensorInfo| {
            let (dtype, dims) = (tensor.dtype, &tensor.dims);
            let to = match dtype.format() {
                Some(_) => self.file_type.tensor_type(&tensor.name, dims, &shape),
                None => None,
            };
            let to = to.unwrap_or(dtype);
            if to != dtype && dtype.block().0 > 1 && to.block().0 > 1 {
                return Err(ModelError::QuantizedAlready {
                    tensor: tensor.name.clone(),
                    dtype: dtype.to_string(),
                });
            }
            Ok(Planned {
                tensor,
                to,
                importance: None,
            })
        };
        gguf.tensors().iter().map(planned).collect()
    }
}

/// Bytes of a tensor in its new type.
fn n_bytes(planned: &Planned<'_>) -> u64 {
    let (elems, bytes) = planned.to.block();
    planned.tensor.n_elems() / elems * bytes
}

/// The file of the cache, written unless it is there. One that is damaged is written anew.
fn cached<'a>(path: &Path, writer: impl Fn() -> Writer<'a>) -> Result<Gguf, GgufError> {
    if let Ok(gguf) = Gguf::open(path) {
        return Ok(gguf);
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|error| GgufError::Io {
            path: folder.to_owned(),
            error,
        })?;
    }
    let mut writer = writer();
    writer.overwrite();
    writer.write(path)?;
    Gguf::open(path)
}

/// What stopped the writing.
fn failure(error: GgufError) -> ModelError {
    match error {
        GgufError::Io { error, .. } if error.kind() == io::ErrorKind::Interrupted => {
            ModelError::Cancelled
        }
        GgufError::Io { path, error } => match error.downcast::<RowError>() {
            Ok(error) => ModelError::Row(error),
            Err(error) => GgufError::Io { path, error }.into(),
        },
        error => error.into(),
    }
}
