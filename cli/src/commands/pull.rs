//! `ruvllm pull`: downloads a model from Hugging Face's hub.

use crate::io::{Failure, note, print};
use crate::pull::fetch;
use ruvllm::hub::{HubOptions, ModelName, Revision};

const EXAMPLES: &str = "\
Examples:
  ruvllm pull bartowski/Llama-3.2-1B-Instruct-GGUF             the largest file that fits into this machine's memory
  ruvllm pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M      … or the one of a type
  ruvllm chat -hf bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M  the same, and talk to it
  ruvllm pull Qwen/Qwen3-0.6B                                  a checkpoint in safetensors, where there is no GGUF file
  ruvllm inspect hf://bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M   its header alone
  ruvllm list                                                  models that are here
  ruvllm rm bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M

Models lie where Hugging Face's tools keep them: HF_HUB_CACHE, or $HF_HOME/hub, or ~/.cache/huggingface/hub. HF_TOKEN (or
the file that `hf auth login` wrote) opens what needs a token; HF_ENDPOINT names another hub. A download that broke off
goes on where it was, and counts only once its SHA-256 is that of the hub.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Model on the hub; what follows the colon is in the name of its file, as Q4_K_M is
    #[arg(value_name = "OWNER/NAME[:QUANT]")]
    model: ModelName,
    /// Branch, tag or commit
    #[arg(long, value_name = "REVISION", default_value = "main")]
    revision: Revision,
    /// Let downloads be redirected to this host, too, besides the hub's own; repeatable
    #[arg(long, value_name = "HOST")]
    allow_host: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let mut options = HubOptions::default();
    options.revision = args.revision.clone();
    options.hosts = args.allow_host.clone();
    let path = fetch(&args.model, &options)?;
    if path.is_dir() {
        note(format!(
            "it is a checkpoint: -m runs it as it is; `ruvllm convert {} -o model.gguf` makes a GGUF file",
            path.display()
        ));
    }
    print(format!("{}\n", path.display()))
}
