//! Flags that say what a quantised model's tensors become, beside the type of the whole.

use crate::io::Failure;
use crate::quantize::{named_type, read_importance, tensor_type};
use ruvllm::model::quantize::{Importance, NamedType, Recipe};
use ruvllm::quant::{DType, FileType};
use std::path::{Path, PathBuf};

/// What is said of tensors. The type of the whole is the flag or operand `quantize`.
#[derive(clap::Args, Default)]
pub(crate) struct RecipeArgs {
    /// Importance matrix of the model, as `ruvllm imatrix` and llama-imatrix write them
    #[arg(long, value_name = "FILE", requires = "quantize")]
    imatrix: Option<PathBuf>,
    /// Use the matrix for tensors alone whose names contain this; repeatable
    #[arg(long, value_name = "PART", requires = "imatrix", action = clap::ArgAction::Append)]
    include_weights: Vec<String>,
    /// Do not use the matrix for tensors whose names contain this; repeatable
    #[arg(long, value_name = "PART", requires = "imatrix", action = clap::ArgAction::Append)]
    exclude_weights: Vec<String>,
    /// One type for all tensors, not a mix
    #[arg(long, requires = "quantize")]
    pure: bool,
    /// Type of the output matrix
    #[arg(long, value_name = "TYPE", value_parser = tensor_type, requires = "quantize")]
    output_tensor_type: Option<DType>,
    /// Type of the token embeddings
    #[arg(long, value_name = "TYPE", value_parser = tensor_type, requires = "quantize")]
    token_embedding_type: Option<DType>,
    /// Type of the tensors whose names the regular expression is found in; repeatable, the first
    /// that matches counts
    #[arg(long, value_name = "REGEX=TYPE", value_parser = named_type, requires = "quantize",
          action = clap::ArgAction::Append)]
    tensor_type: Vec<NamedType>,
    /// Leave output.weight as it is
    #[arg(long, requires = "quantize")]
    leave_output_tensor: bool,
}

impl RecipeArgs {
    /// The recipe for a model of this type.
    pub(crate) fn recipe(&self, file_type: FileType) -> Result<Recipe, Failure> {
        let read = |path: &Path| -> Result<Importance, Failure> {
            let mut importance = read_importance(path)?;
            importance.keep(&self.include_weights, &self.exclude_weights);
            Ok(importance)
        };
        let mut recipe = Recipe::from(file_type);
        recipe.pure = self.pure;
        recipe.output = self.output_tensor_type;
        recipe.embedding = self.token_embedding_type;
        recipe.leave_output = self.leave_output_tensor;
        recipe.named = self.tensor_type.clone();
        recipe.importance = self.imatrix.as_deref().map(read).transpose()?;
        Ok(recipe)
    }
}
