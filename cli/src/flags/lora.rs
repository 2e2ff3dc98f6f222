//! Flags of LoRA adapters.

use crate::io::Failure;
use clap::Args;
use ruvllm::Model;
use ruvllm::lora::Adapter;
use ruvllm::lora::AdapterError;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Adapters.
#[derive(Args)]
#[command(next_help_heading = "Adapters (LoRA)")]
pub(crate) struct LoraArgs {
    /// LoRA adapter to add to the model's weights; repeatable, or several separated by commas
    #[arg(long, value_name = "FILE", value_delimiter = ',')]
    lora: Vec<PathBuf>,
    /// The same, with a factor on what it adds
    #[arg(long, value_name = "FILE:SCALE", value_delimiter = ',')]
    lora_scaled: Vec<String>,
}

impl LoraArgs {
    /// Their files with their scales.
    pub(crate) fn files(&self) -> Result<Vec<(&Path, f32)>, Failure> {
        let scaled = self.lora_scaled.iter().map(|text| {
            let parts = text
                .rsplit_once(':')
                .and_then(|(path, scale)| Some((Path::new(path), scale.parse().ok()?)));
            parts
                .filter(|(_, scale): &(_, f32)| scale.is_finite())
                .ok_or_else(|| {
                    Failure::Usage(format!(
                        "--lora-scaled {text}: expected FILE:SCALE, a finite number"
                    ))
                })
        });
        self.lora
            .iter()
            .map(|path| Ok((path.as_path(), 1.0)))
            .chain(scaled)
            .collect()
    }

    /// The adapters with their scales.
    pub(crate) fn open(&self, model: &Model) -> Result<Vec<(Arc<Adapter>, f32)>, Failure> {
        let files = self.files()?.into_iter();
        files
            .map(|(path, scale)| Ok((Arc::new(open_adapter(path, model)?), scale)))
            .collect()
    }
}

/// The adapter in a file.
pub(crate) fn open_adapter(path: &Path, model: &Model) -> Result<Adapter, Failure> {
    Adapter::open(path, model).map_err(adapter_failure(path))
}

/// What to say of an adapter in a file.
pub(crate) fn adapter_failure(path: &Path) -> impl Fn(AdapterError) -> Failure + '_ {
    move |error| match error {
        AdapterError::Gguf(error) => Failure::Work(error.to_string()), // names the file
        error => Failure::Work(format!("{}: {error}", path.display())),
    }
}
