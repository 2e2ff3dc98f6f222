//! `ruvllm imatrix`: how large the inputs of each weight are on a text, for `ruvllm quantize`.

use crate::bench::perplexity::{DEFAULT_CTX, LEAST_CTX, n_chunks};
use crate::bench::probed::{ProbedText, n_matrices};
use crate::flags::{ModelArgs, OverwriteArg, PlacementArgs, SessionArgs, no_tokenizer, session};
use crate::io::{Failure, Progress, note, read_text, without_last_newline};
use crate::quantize::{importance_failure, importance_format, read_importance};
use ruvllm::KvType;

use ruvllm::compute::ProductCallback;
use ruvllm::gguf::Gguf;
use ruvllm::model::quantize::{Importance, ImportanceFormat, Sums};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ruvllm imatrix -m model-f16.gguf -f text.txt -o imatrix.gguf
  ruvllm imatrix -m model-f16.gguf -f text.txt -o imatrix.gguf --resume
  ruvllm imatrix --in-file a.gguf --in-file b.dat -o both.gguf
  ruvllm quantize model-f16.gguf small.gguf IQ2_M --imatrix imatrix.gguf

Files are those of llama.cpp's llama-imatrix and can be exchanged with it. Some hundred chunks of varied \
text are enough. A run that was ended goes on with --resume.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text to compute; - is stdin
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// File to write
    #[arg(short, long, value_name = "FILE", default_value = "imatrix.gguf")]
    output: PathBuf,
    /// Format of the file: gguf, or dat, the older one of llama.cpp
    #[arg(long, value_name = "FORMAT", default_value = "gguf", value_parser = importance_format)]
    output_format: ImportanceFormat,
    /// Most chunks to compute [default: all]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    chunks: Option<i64>,
    /// Measure the inputs of output.weight, too
    #[arg(long)]
    process_output: bool,
    /// Matrix to add; repeatable. Without -f they are only added up
    #[arg(long, value_name = "FILE", action = clap::ArgAction::Append)]
    in_file: Vec<PathBuf>,
    /// Chunks after which the file is written again
    #[arg(long, value_name = "N", default_value_t = 10, alias = "output-frequency",
          value_parser = clap::value_parser!(u32).range(1..))]
    save_every: u32,
    /// Go on with the output of a run that was ended; same model, text and -c
    #[arg(long, conflicts_with = "in_file")]
    resume: bool,
    #[command(flatten)]
    overwrite: OverwriteArg,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    session: SessionArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if args.chunks == Some(0) {
        return Err(Failure::Usage(
            "--chunks 0 leaves nothing to compute; -1 is all".into(),
        ));
    }
    if args.resume && args.output_format == ImportanceFormat::Dat {
        return Err(Failure::Usage(
            "--resume: the older format does not keep counts; use --output-format gguf".into(),
        ));
    }
    let mut before = Importance::default();
    if args.resume && args.output.exists() {
        before = read_importance(&args.output)?;
    } else {
        args.overwrite.check(&args.output)?;
    }
    for path in &args.in_file {
        before
            .add(&read_importance(path)?)
            .map_err(importance_failure(path))?;
    }
    let Some(file) = &args.file else {
        if args.in_file.is_empty() {
            return Err(Failure::Usage("-f FILE: a text to compute".into()));
        }
        before
            .write(&args.output, args.output_format)
            .map_err(importance_failure(&args.output))?;
        note(format!(
            "{}: {} tensors",
            args.output.display(),
            before.of.len()
        ));
        return Ok(());
    };
    let text = without_last_newline(read_text(file)?);
    compute(args, &text, &file.display().to_string(), before)
}

/// Computes the text, and writes the sums of `before` and of it.
fn compute(args: &Args, text: &str, dataset: &str, before: Importance) -> Result<(), Failure> {
    let start = Instant::now();
    let options = args.session.options(Some(DEFAULT_CTX), KvType::default());
    if options.n_ctx.is_some_and(|n| (1..LEAST_CTX).contains(&n)) {
        return Err(Failure::Usage(format!("-c: at least {LEAST_CTX} tokens")));
    }
    let model = args.model.open(&args.placement)?;
    let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
    let session = session(&model, &args.session, &options, options.n_batch)?;
    let mut tokens = tokenizer.encode(text, true, false);
    let n_ctx = session.sequence().n_ctx();
    let mut probed = ProbedText::new(session)?;
    let limit = args.chunks.and_then(|n| usize::try_from(n).ok());
    let n_chunks = n_chunks(&tokens, n_ctx)?.min(limit.unwrap_or(usize::MAX));
    let done = if args.resume {
        chunks_done(&before, dataset, n_ctx, args)?
    } else {
        0
    };

    let collector = Arc::new(Collector::new(model.gguf(), args.process_output));

    let progress = Progress::new("imatrix", (n_chunks * n_ctx) as u64);
    let chunks = tokens.chunks_exact_mut(n_ctx).take(n_chunks).enumerate();
    for (i, chunk) in chunks.skip(done) {
        probed.give_ends(chunk)?;
        // The head is needed for its inputs alone.
        probed.compute(chunk, collector.process_output, collector.clone())?;
        progress.set(((i + 1) * n_ctx) as u64);
        let last = i + 1 == n_chunks;
        if last || (i + 1 - done).is_multiple_of(args.save_every as usize) {
            let mut sums = before.clone();
            let new = collector.sums(dataset, i + 1 - done, n_ctx, done > 0)?;
            sums.add(&new)
                .and_then(|()| sums.write(&args.output, args.output_format))
                .map_err(importance_failure(&args.output))?;
        }
    }
    drop(progress);
    note(format!(
        "{}: {} tensors, {} chunks of {n_ctx} tokens in {:.1} s",
        args.output.display(),
        collector.n_tensors(),
        n_chunks.saturating_sub(done),
        start.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// Chunks that an earlier run has computed.
fn chunks_done(
    before: &Importance,
    dataset: &str,
    n_ctx: usize,
    args: &Args,
) -> Result<usize, Failure> {
    let same = before.of.is_empty()
        || before.chunk as usize == n_ctx && before.datasets.last().is_some_and(|d| d == dataset);
    if !same {
        return Err(Failure::Work(format!(
            "{}: made of {} with -c {}; go on with the same, or write to another file",
            args.output.display(),
            before.datasets.join(", "),
            before.chunk
        )));
    }
    Ok(before.n_chunks as usize)
}

/// Sums of the squares of all inputs.
struct Collector {
    process_output: bool,
    /// Matrices in the stack of each tensor.
    n_matrices: BTreeMap<String, usize>,
    sums: Mutex<BTreeMap<String, Squares>>,
}

/// Sums of a tensor.
struct Squares {
    /// For each column of each matrix.
    of: Vec<f64>,
    /// Rows, for each matrix.
    counts: Vec<u64>,
}

impl Collector {
    fn new(gguf: &Gguf, process_output: bool) -> Collector {
        let tensors = gguf.tensors().iter();
        Collector {
            process_output,
            n_matrices: tensors.map(|t| (t.name.clone(), n_matrices(t))).collect(),
            sums: Mutex::default(),
        }
    }

    fn n_tensors(&self) -> usize {
        let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        sums.len()
    }

    /// What was collected of `n_chunks` chunks; the text is named unless it was `named` before.
    fn sums(
        &self,
        dataset: &str,
        n_chunks: usize,
        n_ctx: usize,
        named: bool,
    ) -> Result<Importance, Failure> {
        let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let mut of = BTreeMap::new();
        for (name, squares) in &*sums {
            if let Some(i) = squares.of.iter().position(|x| !(*x as f32).is_finite()) {
                let text = format!("the inputs of {name} are not finite (column {i})");
                return Err(Failure::Work(format!("{text}; the model is damaged")));
            }
            let sums = Sums {
                squares: squares.of.iter().map(|&x| x as f32).collect(),
                counts: squares.counts.iter().map(|&n| n as f32).collect(),
            };
            of.insert(name.clone(), sums);
        }
        let datasets = if named {
            Vec::new()
        } else {
            vec![dataset.to_owned()]
        };
        Ok(Importance {
            of,
            datasets,
            n_chunks: n_chunks as u32,
            chunk: n_ctx as u32,
        })
    }
}

impl ProductCallback for Collector {
    fn inputs(&self, name: &str, matrix: usize, n: usize, x: &[f32]) {
        let wanted = name.starts_with("blk.") || self.process_output && name == "output.weight";
        let n_matrices = self.n_matrices.get(name).copied().unwrap_or(0);
        if !wanted || matrix >= n_matrices {
            return;
        }
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let squares = sums.entry(name.to_owned()).or_insert_with(|| Squares {
            of: vec![0.0; n * n_matrices],
            counts: vec![0; n_matrices],
        });
        squares.counts[matrix] += (x.len() / n) as u64;
        let sums = &mut squares.of[matrix * n..][..n];
        for row in x.chunks_exact(n) {
            for (sum, x) in sums.iter_mut().zip(row) {
                *sum += f64::from(x * x);
            }
        }
    }
}
