//! The types that the tensors of a file get.

use super::importance::Importance;
use crate::io::Failure;
use regex::Regex;
use ruvllm::gguf::{Gguf, TensorInfo};
use ruvllm::model::quantize::{Planned, model_shape};
use ruvllm::quant::{DType, FORMATS, FileType, ModelShape};
use std::cell::Cell;

pub(crate) fn file_type(name: &str) -> Result<FileType, String> {
    FileType::from_name(name).ok_or_else(|| {
        let names: Vec<String> = FileType::ALL.iter().map(FileType::to_string).collect();
        format!("there is no type {name:?}; there are {}", names.join(", "))
    })
}

/// The type of a tensor that a user names, in any case.
pub(crate) fn tensor_type(name: &str) -> Result<DType, String> {
    let written = || FORMATS.iter().filter(|format| format.quantize.is_some());
    let named = written().find(|format| format.name.eq_ignore_ascii_case(name));
    named.map(|format| format.dtype).ok_or_else(|| {
        let names: Vec<&str> = written().map(|format| format.name).collect();
        format!(
            "there is no type {name:?} of tensors; there are {}",
            names.join(", ")
        )
    })
}

/// `REGEX=TYPE`: the type of tensors whose names the expression is found in.
#[derive(Clone, Debug)]
pub(crate) struct NamedType {
    pub(crate) names: Regex,
    pub(crate) dtype: DType,
}

impl std::str::FromStr for NamedType {
    type Err = String;

    fn from_str(text: &str) -> Result<NamedType, String> {
        let (names, dtype) = text
            .rsplit_once('=')
            .filter(|(names, _)| !names.is_empty())
            .ok_or("REGEX=TYPE, as in ffn_down=Q6_K")?;
        Ok(NamedType {
            names: Regex::new(names).map_err(|error| error.to_string())?,
            dtype: tensor_type(dtype)?,
        })
    }
}

/// How the types of tensors are chosen.
#[derive(Debug)]
pub(crate) struct Choice {
    pub(crate) file_type: FileType,
    pub(crate) allow_requantize: bool,
    /// The type of the file for all tensors, not a mix.
    pub(crate) pure: bool,
    /// Of `output.weight`, or of the embedding that stands for it.
    pub(crate) output: Option<DType>,
    pub(crate) embedding: Option<DType>,
    pub(crate) leave_output: bool,
    /// The first that matches counts.
    pub(crate) named: Vec<NamedType>,
    pub(crate) importance: Option<Importance>,
}

impl Choice {
    /// A mix, of which nothing else is said.
    pub(crate) fn of(file_type: FileType) -> Choice {
        Choice {
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

/// The tensors and the types that they get.
pub(crate) fn plan<'a>(gguf: &'a Gguf, choice: &Choice) -> Result<Vec<Planned<'a>>, Failure> {
    let mut shape = model_shape(gguf);
    shape.importance = choice.importance.is_some();
    let matched: Vec<Cell<bool>> = choice.named.iter().map(|_| Cell::new(false)).collect();
    let mut plan = Vec::with_capacity(gguf.tensors().len());
    let mut wants_importance = false;
    for tensor in gguf.tensors() {
        let to = target(tensor, choice, &shape, &matched)?;
        let uses_importance = to != tensor.dtype && to.block().0 > 1;
        wants_importance |= uses_importance;
        let importance = choice.importance.as_ref().filter(|_| uses_importance);
        plan.push(Planned {
            tensor,
            to,
            importance: importance.map_or(Ok(None), |all| all.means(tensor))?,
        });
    }
    if let Some(i) = matched.iter().position(|matched| !matched.get()) {
        return Err(unmatched(&choice.named[i], gguf));
    }
    let known = plan.iter().filter(|planned| planned.importance.is_some());
    if choice.importance.is_some() && wants_importance && known.count() == 0 {
        return Err(Failure::Work(
            "the importance matrix has none of the tensors that are converted; it is of another model".into(),
        ));
    }
    Ok(plan)
}

/// An expression that no name matches; names that have most of its letters in a row are told.
fn unmatched(named: &NamedType, gguf: &Gguf) -> Failure {
    let pattern = named.names.as_str();
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
    let mut names: Vec<&str> = gguf.tensors().iter().map(|t| t.name.as_str()).collect();
    names.sort_by_key(|name| std::cmp::Reverse(shared(name)));
    names.truncate(5);
    Failure::Usage(format!(
        "--tensor-type {pattern}: no tensor has such a name; near are {}",
        names.join(", ")
    ))
}

/// The type that a tensor gets.
fn target(
    t: &TensorInfo,
    choice: &Choice,
    shape: &ModelShape,
    matched: &[Cell<bool>],
) -> Result<DType, Failure> {
    let named = choice.named.iter().zip(matched);
    let mut named = named.filter(|(named, _)| named.names.is_match(&t.name));
    let by_name = named.next().map(|(named, matched)| {
        matched.set(true);
        named.dtype
    });
    named.for_each(|(_, matched)| matched.set(true));
    let Some(in_mix) = choice.file_type.tensor_type(&t.name, &t.dims, shape) else {
        return Ok(t.dtype);
    };
    let Some(from) = t.dtype.format() else {
        return Ok(t.dtype);
    };
    let is_embedding = matches!(
        t.name.as_str(),
        "token_embd.weight" | "per_layer_token_embd.weight"
    );
    let is_output = t.name == "output.weight";
    if is_output && choice.leave_output {
        return Ok(t.dtype);
    }
    let chosen = match (choice.embedding, choice.output) {
        (Some(dtype), _) if is_embedding => Some(dtype),
        (_, Some(dtype)) if is_output || is_embedding && shape.tied_embeddings => Some(dtype),
        _ => by_name,
    };
    let to = match chosen {
        Some(dtype) => dtype.for_rows_of(t.dims[0]),
        None if choice.pure => choice.file_type.base().for_rows_of(t.dims[0]),
        None => in_mix,
    };
    // The other floats hold nearly all that a quantised file says.
    let loses = to.block().0 > 1;
    if to != t.dtype && from.block_elems > 1 && loses && !choice.allow_requantize {
        return Err(Failure::Work(format!(
            "tensor {} is quantised already ({}); start from an F16 or F32 file, or accept the loss with --allow-requantize",
            t.name, t.dtype
        )));
    }
    Ok(to)
}
