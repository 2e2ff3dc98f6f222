//! `ruvllm generate`: continues a text. What the program does without a subcommand.

use crate::flags::{
    DiffusionArgs, Drafted, ModelArgs, PlacementArgs, TextArgs, both, keep_for, kv_bytes,
    no_tokenizer, read, session, speculate, tell_failure,
};
use crate::io::{
    Failure, file_or_pipe, measured, milliseconds, note, on_interrupt, paint, per_second, print,
    print_json, read_text, reason_name, unescape, unix_time, without_last_newline,
};
use ruvllm::Model;
use ruvllm::Sampler;
use ruvllm::Session;
use ruvllm::StopReason;
use ruvllm::Tokenizer;
use ruvllm::decode::Speculation;
use ruvllm::model::EncoderSpec;
use serde_json::json;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  ruvllm -p \"Ownership is\"                            the built-in demo model
  ruvllm -m model.gguf -p \"The capital of France is\" -n 16 --temp 0
  ruvllm -m model.gguf -f prompt.txt > text.txt       the prompt goes to stderr, the text to stdout
  ruvllm -m model.gguf -p \"Q: 1+1?\\nA:\" -r \"Q:\"        -r ends the text before \"Q:\"
  ruvllm -m model.gguf -p \"Once\" -s 1 --json          ids, text, timings
  git diff | ruvllm -m model.gguf                     the prompt from a pipe
  ruvllm -m model.gguf --mmproj mmproj.gguf --image cat.png -p \"What is it?\"
  ruvllm -m dream.gguf -p \"Once\" --diffusion-steps 64  a model that denoises whole texts
  ruvllm -m model.gguf -f notes.txt --learn mine      learn from it; see `ruvllm learn`

Special tokens written in the prompt count as such. Sampling defaults give way to what the model \
file recommends (general.sampling.*), and flags win over both.";

/// What is said of the built-in model before its text, and after it.
const DEMO: &str = "This is the built-in demo: 6 million parameters that have the sound of Rust's documentation, and know nothing.";
const NEXT: &str = "\
Next:
  ruvllm chat -hf OWNER/NAME:Q4_K_M    a model of Hugging Face's hub; -m FILE for a file
  ruvllm serve                         a page to chat on and an API, http://127.0.0.1:8080
  ruvllm -p 'A date: ' --regex '20[0-9]{2}-(0[1-9]|1[0-2])-[0-2][1-8]'
                                       what any model writes fits a pattern, or a JSON Schema (-j)";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Do not show the prompt on stderr
    #[arg(long)]
    no_display_prompt: bool,
    /// Print one JSON object: ids, text, why it ended, timings
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    text: TextArgs,
    #[command(flatten)]
    diffusion: DiffusionArgs,
    #[cfg(feature = "vision")]
    #[command(flatten)]
    images: crate::flags::ImageArgs,
}

/// Where a prompt comes from.
#[derive(clap::Args)]
pub(crate) struct PromptArgs {
    /// Text to continue
    #[arg(
        short,
        long,
        value_name = "TEXT",
        conflicts_with = "file",
        allow_hyphen_values = true
    )]
    prompt: Option<String>,
    /// File with the text to continue, without its last line end; - is stdin [default: stdin, if
    /// it is a pipe]
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Read \n, \t, \", \\ and \xHH in -p and -r as what they stand for (the default)
    #[arg(short, long, overrides_with = "no_escape")]
    escape: bool,
    /// Take -p and -r as they are
    #[arg(long)]
    no_escape: bool,
}

impl PromptArgs {
    pub(crate) fn unescaped(&self, text: &str) -> String {
        if self.no_escape {
            text.to_owned()
        } else {
            unescape(text)
        }
    }

    fn text(&self) -> Result<String, Failure> {
        match &self.prompt {
            Some(text) => Ok(self.unescaped(text)),
            None => {
                let text = read_text(&file_or_pipe(self.file.as_ref(), "-p TEXT or -f FILE")?)?;
                if text.is_empty() && self.file.is_none() {
                    return Err(Failure::Usage(
                        "no prompt: stdin is empty; give -p TEXT or -f FILE".into(),
                    ));
                }
                Ok(without_last_newline(text))
            }
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let prompt = args.prompt.text()?;

    let start = Instant::now();
    let model = args.model.open(&args.placement)?;
    if model.hparams().diffusion.is_some() {
        #[cfg(feature = "vision")]
        if args.images.has_images() {
            let arch = model.hparams().arch.clone();
            let why = ruvllm::vision::VisionError::Denoises { arch };
            return Err(Failure::Usage(format!("--image: {why}")));
        }
        return denoise(args, &model, &prompt, start.elapsed());
    }
    args.diffusion.none()?;
    let options = args.text.options(&model);
    let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
    let sampling = &args.text.sampling;
    sampling.begin_mask(&model);
    let mut sampler = sampling.chain(model.gguf().metadata(), tokenizer, args.model.demo_seed())?;
    let mut session = session(&model, &args.text.session, &options, 1)?;
    let speculation = args.text.speculation.begin(
        session.engine(),
        session.sequence().n_ctx(),
        &args.text.session,
    )?;
    keep_for(&mut session, speculation.as_ref());
    let session_id = format!("generate-{}", unix_time());
    let mut learning = args.text.begin_learning(&session, session_id)?;
    let load = start.elapsed();

    let cancel = session.cancel_token();
    on_interrupt(move || cancel.cancel())?;
    #[cfg(feature = "vision")]
    let prompt_ids = if let Some(encoder) = model.hparams().encoder {
        if args.images.has_images() {
            return Err(Failure::Usage(NO_IMAGES.into()));
        }
        read_beside(encoder, tokenizer, &mut session, &prompt)?
    } else if args.images.has_images() {
        if learning.is_some() {
            return Err(Failure::Usage("--image does not go with --learn".into()));
        }
        read_images(args, &mut session, &prompt)?
    } else {
        prompt_ids(tokenizer, &prompt, session.sequence().n_ctx())?
    };
    #[cfg(not(feature = "vision"))]
    let prompt_ids = match model.hparams().encoder {
        Some(encoder) => read_beside(encoder, tokenizer, &mut session, &prompt)?,
        None => prompt_ids(tokenizer, &prompt, session.sequence().n_ctx())?,
    };
    if let Some(learning) = &mut learning {
        learning.refresh(&mut session, &prompt_ids)?;
    }
    let mut written = Written::default();
    let outcome = written.generate(
        args,
        (&mut session, speculation.as_ref()),
        &mut sampler,
        &prompt,
        &prompt_ids,
        options.n_batch,
    );
    let outcome = match learning {
        Some(mut learning) => {
            let latency = written.prefill + written.decode;
            let recorded = learning.record(&mut session, &prompt_ids, &written.ids, latency);
            learning.end(&session, both(outcome, recorded))
        }
        None => outcome,
    };
    tell_failure(session.engine());
    if speculation.is_some() {
        measured::keep(session.engine(), &args.model.label(), None);
    }
    let interrupted = matches!(outcome, Err(Failure::Interrupted));
    if outcome.is_err() && !interrupted {
        return outcome;
    }
    let report = Report {
        args,
        session: &session,
        seed: sampler.seed(),
        load,
        written,
        n_prompt: prompt_ids.len(),
    };
    if args.json {
        report.print_json(&prompt, &prompt_ids, interrupted)?;
    } else if args.text.verbose || io::stderr().is_terminal() {
        report.note();
    }
    outcome
}

/// Writes a text with a model that denoises.
fn denoise(args: &Args, model: &Model, prompt: &str, load: Duration) -> Result<(), Failure> {
    let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
    let written = args
        .diffusion
        .write(&args.text, (model, tokenizer), prompt)?;
    let n = written.ids.len();
    if args.json {
        return print_json(&json!({
            "model": args.model.label(),
            "prompt": prompt,
            "prompt_ids": written.prompt_ids,
            "ids": written.ids,
            "text": written.text,
            "seed": written.seed,
            "timings": {
                "load_ms": milliseconds(load),
                "diffusion_steps": written.n_steps,
                "predicted_n": n,
                "predicted_ms": milliseconds(written.took),
                "predicted_per_second": per_second(n, written.took),
            },
        }));
    }
    if !args.no_display_prompt {
        eprint_text(prompt);
    }
    print(&written.text)?;
    if !written.text.ends_with('\n') {
        print("\n")?;
    }
    if args.text.verbose || io::stderr().is_terminal() {
        let line = format!(
            "load {:.0} ms; {} steps, {n} tokens, {:.1}/s; seed {}",
            milliseconds(load),
            written.n_steps,
            per_second(n, written.took),
            written.seed
        );
        note(paint("2", &line));
    }
    Ok(())
}

/// Why a model with an encoder takes no pictures.
#[cfg(feature = "vision")]
const NO_IMAGES: &str = "--image: this model's encoder reads text alone";

/// Has the model's encoder read the prompt; returns what the decoder's text begins with.
fn read_beside(
    encoder: EncoderSpec,
    tokenizer: &Tokenizer,
    session: &mut Session,
    prompt: &str,
) -> Result<Vec<u32>, Failure> {
    let ids = tokenizer.encode(prompt, true, true);
    session.cache().encode(&ids)?;
    Ok(vec![encoder.start])
}

/// What is said of a text that was generated.
struct Report<'r> {
    args: &'r Args,
    session: &'r Session,
    seed: u64,
    load: Duration,
    written: Written,
    n_prompt: usize,
}

impl Report<'_> {
    fn print_json(
        &self,
        prompt: &str,
        prompt_ids: &[u32],
        interrupted: bool,
    ) -> Result<(), Failure> {
        let w = &self.written;
        let (n_predicted, n_prompt) = (w.ids.len(), self.n_prompt - w.n_cached);
        let stop_reason = if interrupted {
            Some("interrupted")
        } else {
            w.reason.map(reason_name)
        };
        print_json(&json!({
            "model": self.args.model.label(),
            "prompt": prompt,
            "prompt_ids": prompt_ids,
            "ids": w.ids,
            "text": w.text,
            "stop_reason": stop_reason,
            "seed": self.seed,
            "kv_bytes": kv_bytes(self.session),
            "timings": {
                "load_ms": milliseconds(self.load),
                "cache_n": w.n_cached,
                "prompt_n": n_prompt,
                "prompt_ms": milliseconds(w.prefill),
                "prompt_per_second": per_second(n_prompt, w.prefill),
                "predicted_n": n_predicted,
                "predicted_ms": milliseconds(w.decode),
                "predicted_per_second": per_second(n_predicted, w.decode),
            },
            "drafts": w.drafted.json(),
        }))
    }

    /// A line on stderr.
    fn note(&self) {
        let w = &self.written;
        let ended = match w.reason {
            Some(StopReason::ContextFull) => {
                format!(
                    "; the context of {} tokens is full",
                    self.session.sequence().n_ctx()
                )
            }
            Some(StopReason::MaskLimit) => {
                "; the grammar has reached its limits: the text is not complete".to_owned()
            }
            _ => String::new(),
        };
        let cached = if w.n_cached > 0 {
            format!("cached {} tokens, ", w.n_cached)
        } else {
            String::new()
        };
        let (n_predicted, n_prompt) = (w.ids.len(), self.n_prompt - w.n_cached);
        let line = format!(
            "load {:.0} ms; {cached}prompt {n_prompt} tokens, {:.1}/s; text {n_predicted} tokens, {:.1}/s{}; seed {}{ended}",
            milliseconds(self.load),
            per_second(n_prompt, w.prefill),
            per_second(n_predicted, w.decode),
            w.drafted.note(),
            self.seed,
        );
        note(paint("2", &line));
        if self.args.model.is_demo() && io::stderr().is_terminal() {
            note(paint("2", NEXT));
        }
    }
}

/// What was generated, as far as it went.
#[derive(Default)]
struct Written {
    ids: Vec<u32>,
    text: String,
    reason: Option<StopReason>,
    /// Tokens of the prompt that came from the folder of --prompt-cache.
    n_cached: usize,
    drafted: Drafted,
    prefill: Duration,
    decode: Duration,
}

impl Written {
    /// Continues `prompt`, and prints the text unless it is to be JSON.
    fn generate(
        &mut self,
        args: &Args,
        (session, speculation): (&mut Session, Option<&Speculation>),
        sampler: &mut Sampler,
        prompt: &str,
        prompt_ids: &[u32],
        n_batch: usize,
    ) -> Result<(), Failure> {
        let start = Instant::now();
        let stop = args
            .text
            .reverse_prompt
            .iter()
            .map(|text| args.prompt.unescaped(text));
        self.n_cached = session.cache().reuse(prompt_ids)?.total();
        let ids = &prompt_ids[self.n_cached..];
        let sampling = &args.text.sampling;
        // What a grammar needs is made meanwhile.
        let n_read = read(session, ids, n_batch, sampling.has_mask())?;
        let waiting = Instant::now();
        sampler.set_mask(sampling.mask(session.model())?);
        let waited = waiting.elapsed();
        let generation = session
            .generate(&ids[n_read..], sampler)?
            .stop(stop)
            .max_tokens(args.text.max_tokens());
        let mut generation = speculate(generation, speculation);
        self.prefill = start.elapsed() - waited;

        // Only now, so that a progress bar does not paint over it.
        if !args.json {
            if args.model.is_demo() && io::stderr().is_terminal() {
                note(paint("2", DEMO));
            }
            if !args.no_display_prompt {
                eprint_text(prompt);
            }
        }

        let start = Instant::now();
        let one_paragraph = args.model.is_demo() && args.text.has_no_end();
        let mut outcome = Ok(false);
        while let Ok(false) = outcome {
            let Some(piece) = generation.next() else {
                break;
            };
            outcome = piece
                .map_err(Failure::from)
                .and_then(|piece| self.write(&piece.text, one_paragraph, args.json));
        }
        self.decode = start.elapsed();
        self.ids = generation.tokens().to_vec();
        self.drafted = Drafted::of(&generation);
        self.reason = match generation.finish() {
            None if matches!(outcome, Ok(true)) => Some(StopReason::StopString),
            finish => finish.map(|finish| finish.reason),
        };
        if !args.json {
            if !self.text.ends_with('\n') {
                print("\n")?;
            }
            // Whatever comes next on stderr begins a line.
            if !args.no_display_prompt && !io::stdout().is_terminal() {
                eprint_text("\n");
            }
        }
        outcome.map(drop)
    }

    /// Takes what comes next of the text, and prints it unless it is to be JSON. Whether that is
    /// the end of the first paragraph, where no more than that is wanted.
    fn write(&mut self, piece: &str, one_paragraph: bool, json: bool) -> Result<bool, Failure> {
        let before = self.text.len();
        self.text.push_str(piece);
        let end = paragraph_end(&self.text).filter(|_| one_paragraph);
        if let Some(end) = end {
            self.text.truncate(end.max(before));
        }
        if !json {
            print(&self.text[before..])?;
        }
        Ok(end.is_some())
    }
}

/// Where the first paragraph of a text ends, if it does.
fn paragraph_end(text: &str) -> Option<usize> {
    let begin = text.len() - text.trim_start().len();
    Some(begin + text[begin..].find("\n\n")?)
}

/// Reads a prompt up to its last image; returns the tokens behind it.
#[cfg(feature = "vision")]
fn read_images(args: &Args, session: &mut Session, prompt: &str) -> Result<Vec<u32>, Failure> {
    let images = args.images.images()?;
    let projector = args
        .images
        .prepare(&args.model, &args.text.session, session)?;
    let parts = crate::flags::parts(&projector, prompt, &images)?;
    let prompt = session
        .images()
        .encode(&parts)
        .map_err(ruvllm::Error::from)?;
    let (with_images, after) = prompt.split();
    if after.is_empty() {
        return Err(Failure::Usage(
            "the prompt ends with an image; ask something about it".into(),
        ));
    }
    let n = with_images.tokens().len() + after.len();
    if n >= session.sequence().n_ctx() {
        let n_ctx = session.sequence().n_ctx();
        return Err(Failure::Work(format!(
            "the prompt has {n} tokens, the context {n_ctx}: use a larger -c, or --image-max-tokens"
        )));
    }
    let last = with_images.tokens().len().saturating_sub(1);
    let read = session
        .images()
        .prefill_encoded(&with_images, last, |_, _| ());
    read.map_err(ruvllm::Error::from)?;
    Ok(after)
}

/// The tokens of a prompt, with room behind them; an empty one is the beginning of a text.
fn prompt_ids(tokenizer: &Tokenizer, prompt: &str, n_ctx: usize) -> Result<Vec<u32>, Failure> {
    let mut ids = tokenizer.encode_prompt(prompt);
    if ids.is_empty() {
        ids.extend(tokenizer.bos().or(tokenizer.eos()));
    }
    match ids.len() {
        0 => Err(Failure::Usage(
            "the prompt is empty; this model needs something to continue".into(),
        )),
        n if n >= n_ctx => Err(Failure::Work(format!(
            "the prompt has {n} tokens, the context {n_ctx}: use a larger -c or a shorter prompt"
        ))),
        _ => Ok(ids),
    }
}

/// The prompt on stderr, where the text on stdout will continue it.
fn eprint_text(text: &str) {
    let mut err = io::stderr().lock();
    let _ = err
        .write_all(paint("2", text).as_bytes())
        .and_then(|()| err.flush());
}
