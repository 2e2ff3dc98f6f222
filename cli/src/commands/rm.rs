//! `ruvllm rm`: removes a model that was downloaded.

use crate::io::{Failure, note, size};
use ruvllm::hub::{Cache, ModelName, find};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Model that `ruvllm list` lists; without QUANT, all its files
    #[arg(value_name = "OWNER/NAME[:QUANT]")]
    model: ModelName,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (cache, models) = (Cache::open()?, find(&args.model)?);
    for model in &models {
        cache.remove(model)?;
        note(format!(
            "removed {}:{} ({})",
            model.repo,
            model.file,
            size(model.bytes)
        ));
    }
    Ok(())
}
