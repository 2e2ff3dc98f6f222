//! `ruvllm logits`: what a model thinks follows given tokens, for comparison with other engines.

use super::input::TokenIds;
use super::model::{ModelArgs, ResidenceArgs, SessionArgs, session};
use super::output::{Failure, Progress};
use ruvllm::exec::KvType;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  ruvllm logits -m model.gguf --tokens 1,2,3 -o logits.f32
  ruvllm logits -m model.gguf --tokens 1,2,3 --last 1 -o logits.f32
  numpy.fromfile('logits.f32', '<f4').reshape(-1, n_vocab)

Writes little-endian f32 of shape (positions, n_vocab): row i follows token i. No token is added.
The key/value cache is f32 unless -ctk says otherwise: this is for verification.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    residence: ResidenceArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS")]
    tokens: TokenIds,
    /// Only the last N positions [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    last: Option<u32>,
    /// File to write; - is stdout
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let TokenIds(tokens) = &args.tokens;
    let options = args.session.options(None, KvType::F32)?;
    let model = args.model.open(args.residence)?;
    let mut session = session(&model, &options, &args.session.lora)?;
    if tokens.len() > session.n_ctx() {
        return Err(Failure::Work(format!(
            "{} tokens do not fit a context of {}; use -c {}",
            tokens.len(),
            session.n_ctx(),
            tokens.len()
        )));
    }
    let first = args.last.map_or(0, |last| tokens.len().saturating_sub(last as usize));
    let progress = Progress::new("computing", tokens.len() as u64);
    // Opened with the first row, so that a call that fails leaves an older file alone.
    let mut file: Option<Box<dyn Write>> = None;
    let mut written: io::Result<()> = Ok(());
    session.prefill_each(tokens, first, |i, logits| {
        if written.is_ok() {
            written = append(&mut file, &args.output, logits);
        }
        progress.set(i as u64);
    })?;
    let flushed = written.and_then(|()| file.as_mut().map_or(Ok(()), |file| file.flush()));
    flushed.map_err(Failure::file(&args.output))
}

fn append(file: &mut Option<Box<dyn Write>>, path: &Path, logits: &[f32]) -> io::Result<()> {
    let out = match file {
        Some(out) => out,
        None if path == Path::new("-") => file.insert(Box::new(BufWriter::new(io::stdout()))),
        None => file.insert(Box::new(BufWriter::with_capacity(1 << 20, File::create(path)?))),
    };
    let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
    out.write_all(&bytes)
}
