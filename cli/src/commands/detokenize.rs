//! `ruvllm detokenize`: token ids to text, the inverse of `tokenize`.

use crate::flags::ModelArgs;
use crate::io::{Failure, TokenIds, file_or_pipe, name, print, read_text, token_ids};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  ruvllm detokenize -m model.gguf --tokens 9906,1917
  ruvllm tokenize -m model.gguf --json -f a.txt | ruvllm detokenize -m model.gguf | cmp - a.txt

Prints the bytes of the text and nothing else. Control tokens are written out, except for the \
beginning- and end-of-text tokens that `tokenize` adds for this model. So UTF-8 text comes back byte by \
byte; --clean-up leaves out what llama.cpp leaves out.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS", conflicts_with = "file")]
    tokens: Option<TokenIds>,
    /// File with token ids, as a JSON array or separated by commas or spaces; - is stdin
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// The ids came from `tokenize --no-bos`: nothing was added to them
    #[arg(long)]
    no_bos: bool,
    /// For symmetry with `tokenize`; control tokens are always written out
    #[arg(long)]
    parse_special: bool,
    /// Leave out spaces before punctuation where llama.cpp does for this family
    #[arg(long)]
    clean_up: bool,
    /// Print a JSON string, with U+FFFD for what is not UTF-8
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let ids = match &args.tokens {
        Some(TokenIds(ids)) => ids.clone(),
        None => {
            let path = file_or_pipe(args.file.as_ref(), "--tokens IDS or -f FILE")?;
            token_ids(&read_text(&path)?)
                .map_err(|error| Failure::Work(format!("{}: {error}", name(&path))))?
        }
    };
    let tokenizer = args.model.tokenizer()?;
    let mut ids = &ids[..];
    if !args.no_bos {
        if tokenizer.add_bos() && ids.first().copied() == tokenizer.bos() {
            ids = ids.get(1..).unwrap_or_default();
        }
        if tokenizer.add_eos() && ids.last().copied() == tokenizer.eos() {
            ids = ids.split_last().map_or(ids, |(_, rest)| rest);
        }
    }
    let text = if args.clean_up {
        tokenizer.decode(ids, true)?
    } else {
        tokenizer.decode_exact(ids, true)?
    };
    if args.json {
        return print(format!(
            "{}\n",
            serde_json::Value::from(String::from_utf8_lossy(&text))
        ));
    }
    print(text)
}
