//! Models in smaller types: what each tensor becomes, the file of such a plan, and models that are
//! quantised while they are opened.

mod importance;
mod recipe;

pub use importance::{Importance, ImportanceError, ImportanceFormat, Sums};
pub use recipe::{
    Assigned, Described, NamedType, Planned, Recipe, RecipeError, file_name, model_shape,
};

use crate::gguf::{Gguf, GgufError, TensorInfo, Value, Writer};
use crate::model::ModelError;
use crate::quant::{Conversion, Converter, FileType, Moments, RowError};
use std::borrow::Cow;
use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};

/// Second moments of the inputs of each matrix of a tensor, or nothing; asked for when the tensor is
/// written.
pub type MomentsSource<'a> = dyn Fn(&TensorInfo) -> io::Result<Vec<Moments>> + 'a;

/// The file of that plan, whose rows `converter` converts while it is written. Columns of tensors of
/// which `moments` knows something make up for what earlier ones err; there, importances do not count.
pub fn writer<'a>(
    gguf: &'a Gguf,
    plan: &'a [Planned<'a>],
    file_type: FileType,
    converter: &'a Converter<'a>,
    moments: Option<&'a MomentsSource<'a>>,
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
            rows_per_matrix,
            importance: planned.importance.as_deref(),
            feedback: &[],
        };
        let moments = moments.filter(|_| planned.is_quantized());
        writer.tensor_with(&t.name, &t.dims, planned.to, move |out| {
            let row = |i: usize| Cow::Borrowed(&data[i * row_bytes..][..row_bytes]);
            let moments = moments.map_or(Ok(Vec::new()), |moments| moments(t))?;
            if let Some(other) = moments.iter().find(|m| m.n() != conversion.n) {
                let (name, other, n) = (&t.name, other.n(), conversion.n);
                return Err(io::Error::other(format!(
                    "tensor {name}: moments of {other} columns for rows of {n}"
                )));
            }
            let conversion = Conversion {
                feedback: &converter.feedback(moments),
                ..conversion
            };
            converter.write(&t.name, n_rows, row, conversion, out)
        });
    }
    writer
}

/// How a model is quantised while it is opened.
#[derive(Clone, Debug)]
pub(super) struct OnOpen {
    recipe: Recipe,
    /// Folder in which the result is kept.
    cache: Option<PathBuf>,
}

impl OnOpen {
    pub(super) fn new(recipe: Recipe, cache: Option<PathBuf>) -> OnOpen {
        OnOpen { recipe, cache }
    }

    /// The model by this recipe: in memory, or mapped from the cache. `progress` is called with the
    /// share done, and cancels by `false`; `limit` is the most bytes that the weights may have.
    pub(super) fn apply(
        &self,
        gguf: Gguf,
        limit: Option<u64>,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Gguf, ModelError> {
        let plan = self.recipe.plan(&gguf)?;
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
        let writer = || writer(&gguf, &plan, self.recipe.file_type, &converter, None);
        match &self.cache {
            None => Gguf::from_writer(writer()),
            Some(folder) => {
                let assigned = plan.iter().map(|planned| {
                    let importance = planned.importance.as_deref();
                    (&planned.tensor.name[..], planned.to, importance)
                });
                let name = file_name(self.recipe.file_type, gguf.content_hash(), assigned);
                cached(&folder.join(name), writer)
            }
        }
        .map_err(failure)
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
