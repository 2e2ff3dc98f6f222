//! The types that the tensors of a file get, as users say it.

use crate::io::Failure;
use regex::Regex;
use ruvllm::gguf::Gguf;
use ruvllm::model::quantize::{
    Importance, ImportanceError, ImportanceFormat, NamedType, Planned, Recipe, RecipeError,
};
use ruvllm::quant::{DType, FORMATS, FileType};
use std::path::Path;

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

/// The type of tensors whose names the expression is found in.
pub(crate) fn by_regex(pattern: &str, dtype: DType) -> Result<NamedType, regex::Error> {
    let names = Regex::new(pattern)?;
    Ok(NamedType::new(
        pattern,
        move |name| names.is_match(name),
        dtype,
    ))
}

/// `REGEX=TYPE`.
pub(crate) fn named_type(text: &str) -> Result<NamedType, String> {
    let (names, dtype) = text
        .rsplit_once('=')
        .filter(|(names, _)| !names.is_empty())
        .ok_or("REGEX=TYPE, as in ffn_down=Q6_K")?;
    let dtype = tensor_type(dtype)?;
    by_regex(names, dtype).map_err(|error| error.to_string())
}

/// A format of importance matrices.
pub(crate) fn importance_format(name: &str) -> Result<ImportanceFormat, String> {
    match name {
        "gguf" => Ok(ImportanceFormat::Gguf),
        "dat" => Ok(ImportanceFormat::Dat),
        _ => Err("there are gguf and dat".into()),
    }
}

/// An importance matrix from a file.
pub(crate) fn read_importance(path: &Path) -> Result<Importance, Failure> {
    Importance::read(path).map_err(importance_failure(path))
}

/// What is told of such a file.
pub(crate) fn importance_failure(path: &Path) -> impl Fn(ImportanceError) -> Failure {
    move |error| Failure::Work(format!("{}: {error}", path.display()))
}

/// The tensors and the types that they get.
pub(crate) fn plan<'a>(gguf: &'a Gguf, recipe: &Recipe) -> Result<Vec<Planned<'a>>, Failure> {
    recipe.plan(gguf).map_err(|error| match error {
        RecipeError::QuantizedAlready { tensor, dtype } => Failure::Work(format!(
            "tensor {tensor} is quantised already ({dtype}); start from an F16 or F32 file, or accept the loss with --allow-requantize",
        )),
        error => recipe_failure(error),
    })
}

/// What is told of a recipe that does not go with a model.
pub(crate) fn recipe_failure(error: RecipeError) -> Failure {
    match error {
        RecipeError::NoSuchName { .. } => Failure::Usage(format!("--tensor-type {error}")),
        error => Failure::Work(error.to_string()),
    }
}
