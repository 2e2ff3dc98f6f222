//! What each tensor becomes: the types of a mix, those that are said otherwise, and how important
//! weights are.

use super::importance::{Importance, ImportanceError};
use crate::gguf::{Gguf, TensorInfo, content_hash};
use crate::quant::{DType, FileType, ModelShape};
use std::fmt;
use std::sync::Arc;

/// Tensors near a condition that none fulfils.
const NEAR: usize = 5;

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

impl Planned<'_> {
    /// Whether the tensor gets another type, one with blocks.
    pub fn is_quantized(&self) -> bool {
        self.to != self.tensor.dtype && self.to.block().0 > 1
    }
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

/// Condition on names.
type Condition = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// A type of the tensors whose names fulfil a condition.
#[derive(Clone)]
pub struct NamedType {
    pattern: String,
    is_match: Condition,
    dtype: DType,
}

impl NamedType {
    /// A type of the tensors for whose names `is_match` holds; `pattern` is how errors call it.
    pub fn new(
        pattern: impl Into<String>,
        is_match: impl Fn(&str) -> bool + Send + Sync + 'static,
        dtype: DType,
    ) -> NamedType {
        NamedType {
            pattern: pattern.into(),
            is_match: Arc::new(is_match),
            dtype,
        }
    }

    /// Text of the condition.
    pub fn pattern(&self) -> &str {
        &self.pattern
    }

    /// Whether a name fulfils the condition.
    pub fn is_match(&self, name: &str) -> bool {
        (self.is_match)(name)
    }

    /// The type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

impl fmt::Debug for NamedType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.pattern, self.dtype)
    }
}

/// Failures of choosing types.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// A tensor is quantised already.
    #[error(
        "tensor {tensor:?} is quantised already ({dtype}), and would lose twice: open the file as it is, or quantise the F16, BF16 or F32 model"
    )]
    QuantizedAlready {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: DType,
    },
    /// A condition that no name fulfils.
    #[error("{pattern}: no tensor has such a name; near are {}", .near.join(", "))]
    NoSuchName {
        /// The condition.
        pattern: String,
        /// Names that share most letters with it.
        near: Vec<String>,
    },
    /// The importance matrix has a tensor of another shape.
    #[error(transparent)]
    Importance(#[from] ImportanceError),
    /// The importance matrix has none of the tensors that are quantised.
    #[error(
        "the importance matrix has none of the tensors that are converted; it is of another model"
    )]
    OtherModel,
}

/// A recipe for a smaller model: the types of a mix, and what is said otherwise. The
/// [`FileType`] of a mix is one without exceptions.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The mix.
    pub file_type: FileType,
    /// Whether tensors may be quantised that are so already.
    pub allow_requantize: bool,
    /// The mix's [base](FileType::base) for all tensors, not a mix.
    pub pure: bool,
    /// Type of `output.weight`, or of the embedding that stands for it.
    pub output: Option<DType>,
    /// Type of the token embeddings.
    pub embedding: Option<DType>,
    /// Whether `output.weight` stays as it is.
    pub leave_output: bool,
    /// Types by name, before those of the mix; the first that matches counts.
    pub named: Vec<NamedType>,
    /// Importance of weights.
    pub importance: Option<Importance>,
}

impl From<FileType> for Recipe {
    fn from(file_type: FileType) -> Recipe {
        Recipe {
            file_type,
            allow_requantize: false,
            pure: false,
            output: None,
            embedding: None,
            leave_output: false,
            named: Vec::new(),
            importance: None,
        }
    }
}

/// A tensor as far as its type depends on it.
#[derive(Clone, Copy, Debug)]
pub struct Described<'t> {
    /// Its name.
    pub name: &'t str,
    /// Its dimensions, the length of a row first.
    pub dims: &'t [u64],
    /// Its type now.
    pub dtype: DType,
}

impl<'t> From<&'t TensorInfo> for Described<'t> {
    fn from(tensor: &'t TensorInfo) -> Described<'t> {
        Described {
            name: &tensor.name,
            dims: &tensor.dims,
            dtype: tensor.dtype,
        }
    }
}

/// The type that a tensor gets, and the importance of its weights.
pub type Assigned = (DType, Option<Vec<f32>>);

impl Recipe {
    /// The tensors of a file with the types that they get.
    ///
    /// # Errors
    /// As [`Recipe::assign`].
    pub fn plan<'a>(&self, gguf: &'a Gguf) -> Result<Vec<Planned<'a>>, RecipeError> {
        let tensors: Vec<Described<'a>> = gguf.tensors().iter().map(Described::from).collect();
        let assigned = self.assign(&tensors, model_shape(gguf))?;
        let planned = gguf.tensors().iter().zip(assigned);
        let planned = planned.map(|(tensor, (to, importance))| Planned {
            tensor,
            to,
            importance,
        });
        Ok(planned.collect())
    }

    /// The types that the tensors of a model get.
    ///
    /// # Errors
    /// If a tensor is quantised already, a condition matches no name, or the importance matrix is
    /// of another model.
    pub fn assign(
        &self,
        tensors: &[Described<'_>],
        mut shape: ModelShape,
    ) -> Result<Vec<Assigned>, RecipeError> {
        shape.importance = self.importance.is_some();
        if let Some(named) = self
            .named
            .iter()
            .find(|named| !tensors.iter().any(|t| named.is_match(t.name)))
        {
            return Err(no_such_name(named.pattern(), tensors));
        }
        let (mut assigned, mut wants_importance) = (Vec::with_capacity(tensors.len()), false);
        for t in tensors {
            let to = self.target(t, &shape)?;
            let uses_importance = to != t.dtype && to.block().0 > 1;
            wants_importance |= uses_importance;
            let importance = self.importance.as_ref().filter(|_| uses_importance);
            let importance = importance.map_or(Ok(None), |all| all.means(t.name, t.dims))?;
            assigned.push((to, importance));
        }
        let is_known = |(_, importance): &Assigned| importance.is_some();
        if self.importance.is_some() && wants_importance && !assigned.iter().any(is_known) {
            return Err(RecipeError::OtherModel);
        }
        Ok(assigned)
    }

    /// The type that a tensor gets.
    fn target(&self, t: &Described<'_>, shape: &ModelShape) -> Result<DType, RecipeError> {
        let Some(in_mix) = self.file_type.tensor_type(t.name, t.dims, shape) else {
            return Ok(t.dtype);
        };
        let Some(from) = t.dtype.format() else {
            return Ok(t.dtype);
        };
        let is_embedding = matches!(t.name, "token_embd.weight" | "per_layer_token_embd.weight");
        let is_output = t.name == "output.weight";
        if is_output && self.leave_output {
            return Ok(t.dtype);
        }
        let by_name = || self.named.iter().find(|named| named.is_match(t.name));
        let chosen = match (self.embedding, self.output) {
            (Some(dtype), _) if is_embedding => Some(dtype),
            (_, Some(dtype)) if is_output || is_embedding && shape.tied_embeddings => Some(dtype),
            _ => by_name().map(NamedType::dtype),
        };
        let to = match chosen {
            Some(dtype) => dtype.for_rows_of(t.dims[0]),
            None if self.pure => self.file_type.base().for_rows_of(t.dims[0]),
            None => in_mix,
        };
        // The other floats hold nearly all that a quantised file says.
        let loses = to.block().0 > 1;
        if to != t.dtype && from.block_elems > 1 && loses && !self.allow_requantize {
            return Err(RecipeError::QuantizedAlready {
                tensor: t.name.to_owned(),
                dtype: t.dtype,
            });
        }
        Ok(to)
    }
}

/// The name of a file in a cache of what becomes of a model: by a hash of the model's contents, and of
/// the types and importances that its tensors, by their names, get.
pub fn file_name<'a>(
    file_type: FileType,
    content_hash_of_model: u64,
    assigned: impl Iterator<Item = (&'a str, DType, Option<&'a [f32]>)>,
) -> String {
    let mut types = content_hash_of_model.to_le_bytes().to_vec();
    let mut importances = Vec::new();
    for (name, to, importance) in assigned {
        types.extend(format!("{name}={to}={};", importance.is_some()).bytes());
        importances.extend(importance);
    }
    let parts = importances.into_iter().map(bytemuck::cast_slice::<f32, u8>);
    let hash = content_hash(std::iter::once(&types[..]).chain(parts));
    let version = env!("CARGO_PKG_VERSION");
    format!("{hash:016x}-{file_type}-{version}.gguf")
}

/// A condition that no name fulfils; names that have most of its letters in a row are told.
fn no_such_name(pattern: &str, tensors: &[Described<'_>]) -> RecipeError {
    let words: Vec<&str> = pattern
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
        .collect();
    let shared = |name: &str| -> usize {
        let longest = |word: &str| {
            let beginnings = (1..=word.len()).rev();
            let mut found = beginnings.filter(|&n| word.get(..n).is_some_and(|w| name.contains(w)));
            found.next().unwrap_or(0)
        };
        words.iter().map(|word| longest(word)).sum()
    };
    let mut names: Vec<&str> = tensors.iter().map(|t| t.name).collect();
    names.sort_by_key(|name| std::cmp::Reverse(shared(name)));
    names.truncate(NEAR);
    RecipeError::NoSuchName {
        pattern: pattern.to_owned(),
        near: names.into_iter().map(str::to_owned).collect(),
    }
}
