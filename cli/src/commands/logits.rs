//! `ruvllm logits`: what a model thinks follows given tokens, for comparison with other engines.

use crate::flags::{ModelArgs, PlacementArgs, SessionArgs, no_tokenizer, session};
use crate::io::{Failure, Progress, TokenIds};
use ruvllm::KvType;
#[cfg(feature = "vision")]
use ruvllm::Model;
use ruvllm::compute::TokenKind;
use ruvllm::engine::{Outputs, Slot};
use ruvllm::gguf::NewFile;
use ruvllm::lora::Adapter;
use ruvllm::{CancelToken, Engine, SessionOptions};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const EXAMPLES: &str = "\
Examples:
  ruvllm logits -m model.gguf --tokens 1,2,3 -o logits.f32
  ruvllm logits -m model.gguf --tokens 1,2,3 --last 1 -o logits.f32
  ruvllm logits -m model.gguf --mmproj mmproj.gguf --image a.png -p \"<__media__> What is it?\" -o logits.f32
  numpy.fromfile('logits.f32', '<f4').reshape(-1, n_vocab)

Writes little-endian f32 of shape (positions, n_vocab): row i follows token i. No token is added. \
The key/value cache is f32 unless -ctk says otherwise: this is for verification. Neither \
--ubatch-size nor --parallel nor --threads change a bit; --exact gives prompts the bits of generated tokens.";

/// More sequences than that only take memory.
const MAX_PARALLEL: i64 = 1024;

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Token ids, separated by commas
    #[arg(
        long,
        value_name = "IDS",
        required_unless_present = "prompt",
        conflicts_with = "prompt"
    )]
    tokens: Option<TokenIds>,
    /// Text instead, whose special tokens count as such; with --image it has a marker for each
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Only the last N positions [default: all]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    last: Option<u32>,
    /// Compute N sequences side by side: N - 1 others in every pass, of the same tokens rotated
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=MAX_PARALLEL))]
    parallel: u32,
    /// File to write; - is stdout
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    session: SessionArgs,
    #[cfg(feature = "vision")]
    #[command(flatten)]
    images: crate::flags::ImageArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let options = args.session.options(None, KvType::F32);
    let model = args.model.open(&args.placement)?;
    #[cfg(feature = "vision")]
    if args.images.has_images() {
        return with_images(args, &model, &options);
    }
    let tokens = match (&args.tokens, &args.prompt) {
        (Some(TokenIds(tokens)), _) => tokens.clone(),
        (None, prompt) => {
            let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
            tokenizer.encode_prompt(prompt.as_deref().unwrap_or_default())
        }
    };
    let tokens = &tokens[..];
    let mut session = session(
        &model,
        &args.session,
        &options,
        args.last.map_or(tokens.len(), |last| last as usize),
    )?;
    if tokens.len() > session.sequence().n_ctx() {
        return Err(Failure::Work(format!(
            "{} tokens do not fit a context of {}; use -c {}",
            tokens.len(),
            session.sequence().n_ctx(),
            tokens.len()
        )));
    }
    let first = args
        .last
        .map_or(0, |last| tokens.len().saturating_sub(last as usize));
    let progress = Progress::new("computing", tokens.len() as u64);
    // Opened with the first row, so that a call that fails leaves an older file alone.
    let mut out: Option<Sink> = None;
    let mut written: io::Result<()> = Ok(());
    let mut each = |i: usize, logits: &[f32]| {
        if written.is_ok() {
            written = append(&mut out, &args.output, logits);
        }
        progress.set(i as u64);
    };
    if args.parallel > 1 {
        let options = SessionOptions {
            n_ctx: Some(session.sequence().n_ctx()),
            ..options
        };
        let adapters = args.session.lora.open(&model)?;
        side_by_side(
            session.engine(),
            &adapters,
            &options,
            args.parallel as usize,
            tokens,
            first,
            each,
        )?;
    } else {
        session.hooks().prefill_each(tokens, first, &mut each)?;
    }
    let finished = written.and_then(|()| out.map_or(Ok(()), Sink::finish));
    finished.map_err(Failure::file(&args.output))
}

/// Logits after a prompt of text and images.
#[cfg(feature = "vision")]
fn with_images(args: &Args, model: &Model, options: &SessionOptions) -> Result<(), Failure> {
    let Some(text) = &args.prompt else {
        return Err(Failure::Usage("--image needs -p TEXT".into()));
    };
    if args.parallel > 1 {
        return Err(Failure::Usage("--image does not go with --parallel".into()));
    }
    let images = args.images.images()?;
    let n_rows = args.last.map_or(1, |last| last as usize);
    let mut session = session(model, &args.session, options, n_rows)?;
    let projector = args
        .images
        .prepare(&args.model, &args.session, &mut session)?;
    let parts = crate::flags::parts(&projector, text, &images)?;
    let prompt = session
        .images()
        .encode(&parts)
        .map_err(ruvllm::Error::from)?;
    let n = prompt.tokens().len();
    let first = args.last.map_or(0, |last| n.saturating_sub(last as usize));
    let mut out: Option<Sink> = None;
    let mut written: io::Result<()> = Ok(());
    let each = |_: usize, logits: &[f32]| {
        if written.is_ok() {
            written = append(&mut out, &args.output, logits);
        }
    };
    let computed = session.images().prefill_encoded(&prompt, first, each);
    computed.map_err(ruvllm::Error::from)?;
    let finished = written.and_then(|()| out.map_or(Ok(()), Sink::finish));
    finished.map_err(Failure::file(&args.output))
}

/// As [`ruvllm::session::SessionHooks::prefill_each`], beside `n - 1` other sequences.
fn side_by_side(
    engine: &Engine,
    adapters: &[(Arc<Adapter>, f32)],
    options: &SessionOptions,
    n: usize,
    tokens: &[u32],
    first: usize,
    mut each: impl FnMut(usize, &[f32]),
) -> Result<(), Failure> {
    let (mut outputs, cancel) = (Outputs::default(), CancelToken::default());
    let (mut sequences, mut texts) = (Vec::new(), Vec::new());
    for i in 0..n {
        let mut seq = engine.sequence(options)?;
        for (adapter, scale) in adapters {
            seq.attach(Arc::clone(adapter), *scale)?;
        }
        sequences.push(seq);
        let mut text = tokens.to_vec();
        text.rotate_left(i % tokens.len().max(1));
        texts.push(text);
    }
    for begin in (0..tokens.len()).step_by(options.n_batch) {
        let end = tokens.len().min(begin + options.n_batch);
        let wanted = |i: usize| {
            if i == 0 {
                first.saturating_sub(begin).min(end - begin)
            } else {
                end - begin
            }
        };
        let slots = sequences.iter_mut().zip(&texts).enumerate();
        let mut slots: Vec<Slot<'_>> = slots
            .map(|(i, (seq, text))| {
                Slot::new(seq, &text[begin..end], TokenKind::Prompt).outputs_from(wanted(i))
            })
            .collect();
        engine.step(&mut slots, &mut outputs, &cancel)?;
        let n_vocab = engine.model().hparams().n_vocab;
        for (j, logits) in outputs.logits(0).chunks_exact(n_vocab).enumerate() {
            each(begin + wanted(0) + j, logits);
        }
    }
    Ok(())
}

enum Sink {
    /// A file that appears when it is complete.
    New(NewFile),
    /// A pipe, a device: nothing that could be replaced.
    Stream(Box<dyn Write>),
}

impl Sink {
    fn open(path: &Path) -> io::Result<Sink> {
        let is_stream =
            std::fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir());
        Ok(match path {
            path if path == Path::new("-") => Sink::Stream(Box::new(BufWriter::new(io::stdout()))),
            path if is_stream => Sink::Stream(Box::new(BufWriter::new(
                File::options().write(true).open(path)?,
            ))),
            path => Sink::New(NewFile::create(path, false)?),
        })
    }

    fn finish(self) -> io::Result<()> {
        match self {
            Sink::New(file) => file.finish(),
            Sink::Stream(mut stream) => stream.flush(),
        }
    }
}

fn append(out: &mut Option<Sink>, path: &Path, logits: &[f32]) -> io::Result<()> {
    let out = match out {
        Some(out) => out,
        None => out.insert(Sink::open(path)?),
    };
    let bytes: Vec<u8> = logits
        .iter()
        .flat_map(|logit| logit.to_le_bytes())
        .collect();
    match out {
        Sink::New(file) => file.write_all(&bytes),
        Sink::Stream(stream) => stream.write_all(&bytes),
    }
}
