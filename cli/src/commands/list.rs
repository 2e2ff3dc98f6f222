//! `ruvllm list`: models that were downloaded.

use crate::io::{Failure, note, print, print_json, size};
use ruvllm::hub::{Cache, CachedFile};
use serde_json::json;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let models = Cache::open()?.models()?;
    if args.json {
        let row = |m: &CachedFile| json!({"repo": m.repo, "file": m.file, "bytes": m.bytes, "path": m.path});
        return print_json(&models.iter().map(row).collect());
    }
    if models.is_empty() {
        note(
            "no models are here: `ruvllm pull OWNER/NAME:Q4_K_M` downloads one of Hugging Face's hub",
        );
    }
    models
        .iter()
        .try_for_each(|m| print(format!("{:>10}  {}:{}\n", size(m.bytes), m.repo, m.file)))
}
