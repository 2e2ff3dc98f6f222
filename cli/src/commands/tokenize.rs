//! `ruvllm tokenize`: text to token ids.

use crate::flags::ModelArgs;
use crate::io::{Failure, file_or_pipe, note, print, read};
use std::fmt::Write;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  ruvllm tokenize -m model.gguf -p \"Hello world\"
  ruvllm tokenize -m model.gguf --json -f prompt.txt
  ruvllm tokenize -m model.gguf --parse-special -p \"<|im_start|>user\"
  wc -c < book.txt; ruvllm tokenize -m model.gguf -f book.txt | wc -l

A file is taken with its last line end. Bytes that are not UTF-8 are kept by SentencePiece vocabularies; \
in byte-level BPE they become U+FFFD, with a warning. A GGUF file with nothing but a vocabulary is enough.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text to turn into tokens
    #[arg(
        short,
        long,
        value_name = "TEXT",
        conflicts_with = "file",
        allow_hyphen_values = true
    )]
    prompt: Option<String>,
    /// File to turn into tokens; - is stdin
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Texts of control tokens become these tokens
    #[arg(long)]
    parse_special: bool,
    /// Add no beginning- or end-of-text token, even if the model wants one
    #[arg(long)]
    no_bos: bool,
    /// Print a JSON array of ids, instead of a line for each token
    #[arg(long, alias = "ids")]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let text = match &args.prompt {
        Some(text) => text.clone().into_bytes(),
        None => read(&file_or_pipe(args.file.as_ref(), "-p TEXT or -f FILE")?)?,
    };
    let tokenizer = args.model.tokenizer()?;
    let ids = tokenizer.encode_bytes(&text, !args.no_bos, args.parse_special);
    if let Err(error) = std::str::from_utf8(&text)
        && String::from_utf8(tokenizer.decode_exact(&ids, true)?).is_ok()
    {
        let at = error.valid_up_to();
        note(format!(
            "warning: not UTF-8 text (byte {at}); this vocabulary has no tokens for such bytes: they became U+FFFD"
        ));
    }
    if args.json {
        return print(format!("{}\n", serde_json::Value::from(ids)));
    }
    let mut out = String::new();
    for id in ids {
        let piece = tokenizer.token_bytes(id).unwrap_or_default();
        let _ = writeln!(out, "{id:6} -> {:?}", String::from_utf8_lossy(&piece));
    }
    print(out)
}
