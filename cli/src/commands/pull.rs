//! `ruvllm pull`: downloads a model from Hugging Face's hub.

use crate::io::{Failure, print};
use crate::pull::{Name, Revision, fetch};

const EXAMPLES: &str = "\
Examples:
  ruvllm pull bartowski/Llama-3.2-1B-Instruct-GGUF             the largest file that fits into this machine's memory
  ruvllm pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M      … or the one of a type
  ruvllm chat -hf bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M  the same, and talk to it
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
    model: Name,
    /// Branch, tag or commit
    #[arg(long, value_name = "REVISION", default_value = "main")]
    revision: Revision,
    /// Let downloads be redirected to this host, too, besides the hub's own; repeatable
    #[arg(long, value_name = "HOST")]
    allow_host: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let path = fetch(&args.model, &args.revision, &args.allow_host)?;
    print(format!("{}\n", path.display()))
}
