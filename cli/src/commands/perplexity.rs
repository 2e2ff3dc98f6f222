//! `ruvllm perplexity`: how well a model predicts a text.

use crate::bench::divergence::{Base, Divergence, write_base};
use crate::bench::perplexity::{DEFAULT_CTX, LEAST_CTX, n_chunks, score};
use crate::bench::tasks::{TaskKind, accuracy, by_chance, choice, tasks};
use crate::flags::{ModelArgs, PlacementArgs, SessionArgs, kv_bytes, no_tokenizer, session};
use crate::io::{
    Failure, Progress, file_or_pipe, milliseconds, note, print, print_json, read, read_text,
    without_last_newline,
};
use ruvllm::KvType;
use serde_json::json;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ruvllm perplexity -m model.gguf -f wiki.test.raw
  ruvllm perplexity -m model.gguf -f wiki.test.raw -c 2048 --chunks 20
  ruvllm perplexity -m model.gguf -f wiki.test.raw --json
  ruvllm perplexity -m model-f16.gguf -f wiki.test.raw --kl-divergence-base base.bin
  ruvllm perplexity -m small.gguf --kl-divergence-base base.bin --kl-divergence
  ruvllm perplexity -m model.gguf -f hellaswag_val_full.txt --hellaswag --hellaswag-tasks 400
  ruvllm perplexity -m model.gguf -f winogrande-debiased-eval.csv --winogrande
  ruvllm perplexity -m model.gguf -f mmlu-validation.bin --multiple-choice

Lower is better. Numbers are comparable for the same text, -c and vocabulary only; -c is 512 unless \
given, as in llama.cpp.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text to predict, without its last line end; - is stdin
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Most chunks to compute [default: all]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    chunks: Option<i64>,
    /// File of log-probabilities, as llama-perplexity has them: written, or with --kl-divergence
    /// compared with
    #[arg(long, value_name = "FILE", alias = "save-all-logits")]
    kl_divergence_base: Option<PathBuf>,
    /// Measure how far the model is from that of the file, on the file's text
    #[arg(long, requires = "kl_divergence_base", conflicts_with = "file")]
    kl_divergence: bool,
    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    tasks: TaskArgs,
    #[command(flatten)]
    session: SessionArgs,
}

/// Tasks instead of a text, in files of llama.cpp's formats.
#[derive(clap::Args)]
#[command(next_help_heading = "Tasks")]
struct TaskArgs {
    /// The file has HellaSwag's tasks: which ending follows?
    #[arg(long, group = "task_kind", conflicts_with_all = ["kl_divergence_base", "chunks"])]
    hellaswag: bool,
    /// Most of them, of which is drawn at random; 0 is all
    #[arg(long, value_name = "N", default_value_t = 400, requires = "hellaswag")]
    hellaswag_tasks: usize,
    /// The file has Winogrande's tasks: which name is meant?
    #[arg(long, group = "task_kind", conflicts_with_all = ["kl_divergence_base", "chunks"])]
    winogrande: bool,
    /// Most of them; 0 is all
    #[arg(long, value_name = "N", default_value_t = 0, requires = "winogrande")]
    winogrande_tasks: usize,
    /// The file has questions with several answers: which is right?
    #[arg(long, group = "task_kind", conflicts_with_all = ["kl_divergence_base", "chunks"])]
    multiple_choice: bool,
    /// Most of them; 0 is all
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        requires = "multiple_choice"
    )]
    multiple_choice_tasks: usize,
}

impl TaskArgs {
    /// What kind, and how many.
    fn kind(&self) -> Option<(TaskKind, usize)> {
        [
            (self.hellaswag, TaskKind::HellaSwag, self.hellaswag_tasks),
            (self.winogrande, TaskKind::Winogrande, self.winogrande_tasks),
            (
                self.multiple_choice,
                TaskKind::MultipleChoice,
                self.multiple_choice_tasks,
            ),
        ]
        .into_iter()
        .find_map(|(is_asked, kind, n)| is_asked.then_some((kind, n)))
    }
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if args.kl_divergence
        && let Some(path) = &args.kl_divergence_base
    {
        return compare(args, path);
    }
    if let Some((kind, n)) = args.tasks.kind() {
        return score_tasks(args, kind, n);
    }
    let text = without_last_newline(read_text(&file_or_pipe(args.file.as_ref(), "-f FILE")?)?);
    let options = args.session.options(Some(DEFAULT_CTX), KvType::default());
    if args.chunks == Some(0) {
        return Err(Failure::Usage(
            "--chunks 0 leaves nothing to compute; -1 is all".into(),
        ));
    }
    if options.n_ctx.is_some_and(|n| (1..LEAST_CTX).contains(&n)) {
        return Err(Failure::Usage(format!(
            "-c: at least {LEAST_CTX} tokens, of which the second half is scored"
        )));
    }
    let model = args.model.open(&args.placement)?;
    let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
    let mut session = session(&model, &args.session, &options, options.n_batch)?;

    let mut tokens = tokenizer.encode(&text, true, false);
    let n_ctx = session.sequence().n_ctx();
    let limit = args
        .chunks
        .and_then(|n| usize::try_from(n).ok())
        .unwrap_or(usize::MAX);
    let n_chunks = n_chunks(&tokens, n_ctx)?.min(limit);
    if !args.json {
        note(format!("perplexity of {n_chunks} chunks of {n_ctx} tokens"));
    }

    if let Some(path) = &args.kl_divergence_base {
        let progress = Progress::new("perplexity", (n_chunks * n_ctx) as u64);
        let score = write_base(&mut session, &tokens, n_chunks, path, &progress)?;
        drop(progress);
        note(format!("{}: {} tokens", path.display(), score.n));
        return print(format!("Final estimate: PPL = {:.4}\n", score.perplexity()));
    }
    let start = Instant::now();
    let progress = match !args.json && io::stdout().is_terminal() {
        true => Progress::hidden(),
        false => Progress::new("perplexity", (n_chunks * n_ctx) as u64),
    };
    let mut running = Vec::with_capacity(n_chunks);
    let score = score(&mut session, &mut tokens, n_chunks, &progress, |score| {
        running.push(score.perplexity());
        if args.json {
            Ok(())
        } else {
            print(format!("[{}]{:.4},", running.len(), score.perplexity()))
        }
    })?;
    drop(progress);

    let error = score.error();
    if args.json {
        return print_json(&json!({
            "model": args.model.label(),
            "ppl": score.perplexity(),
            "ppl_error": error,
            "nll": score.mean(),
            "n_ctx": n_ctx,
            "n_chunks": n_chunks,
            "n_tokens": tokens.len(),
            "n_scored": score.n,
            "chunks": running,
            "kv_bytes": kv_bytes(&session),
            "ms": milliseconds(start.elapsed()),
        }));
    }
    match error {
        Some(error) => print(format!(
            "\nFinal estimate: PPL = {:.4} +/- {error:.5}\n",
            score.perplexity()
        )),
        None => print(format!(
            "\nFinal estimate: PPL = {:.4}\n",
            score.perplexity()
        )),
    }
}

/// Lets the model choose in each of a file's tasks.
fn score_tasks(args: &Args, kind: TaskKind, n: usize) -> Result<(), Failure> {
    let start = Instant::now();
    let path = file_or_pipe(args.file.as_ref(), "-f FILE")?;
    let file = read(&path)?;
    let options = args.session.options(Some(DEFAULT_CTX), KvType::default());
    let model = args.model.open(&args.placement)?;
    let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
    let of_kind = |what| Failure::Work(format!("{}: {}: {what}", path.display(), kind.name()));
    let tasks = tasks(kind, &file, n, tokenizer).map_err(of_kind)?;
    let mut session = session(&model, &args.session, &options, options.n_batch)?;
    let progress = match !args.json && io::stdout().is_terminal() {
        true => Progress::hidden(),
        false => Progress::new("tasks", tasks.len() as u64),
    };
    let mut n_right = 0;
    for (i, task) in tasks.iter().enumerate() {
        let (_, is_right) = choice(&mut session, task)?;
        n_right += usize::from(is_right);
        progress.set(i as u64 + 1);
        if !args.json {
            let (share, [low, high]) = accuracy(n_right, i + 1);
            let [share, low, high] = [share, low, high].map(|x| 100.0 * x);
            print(format!("{}\t{share:.8}%\t[{low:.4}%, {high:.4}%]\n", i + 1))?;
        }
    }
    drop(progress);
    let (share, [low, high]) = accuracy(n_right, tasks.len());
    if args.json {
        return print_json(&json!({
            "model": args.model.label(),
            "task": kind.name(),
            "accuracy": share,
            "accuracy_95": [low, high],
            "by_chance": by_chance(&tasks),
            "n_tasks": tasks.len(),
            "n_right": n_right,
            "ms": milliseconds(start.elapsed()),
        }));
    }
    print(format!(
        "Final {} score ({} tasks): {:.4} % [{:.4}, {:.4}], by chance {:.4} %\n",
        kind.name(),
        tasks.len(),
        100.0 * share,
        100.0 * low,
        100.0 * high,
        100.0 * by_chance(&tasks),
    ))
}

/// Compares the model's distributions with those of the file at `path`.
fn compare(args: &Args, path: &Path) -> Result<(), Failure> {
    let mut base = Base::open(path)?;
    let n_ctx = base.head.n_ctx;
    let model = args.model.open(&args.placement)?;
    let n_vocab = model.hparams().n_vocab;
    if n_vocab != base.head.n_vocab {
        return Err(Failure::Work(format!(
            "{}: of a vocabulary of {} tokens, the model has {n_vocab}; it is of another model",
            path.display(),
            base.head.n_vocab
        )));
    }
    let mut options = args.session.options(Some(n_ctx), KvType::default());
    options.n_ctx = Some(n_ctx);
    let mut session = session(&model, &args.session, &options, options.n_batch)?;
    if session.sequence().n_ctx() < n_ctx {
        return Err(Failure::Work(format!(
            "{}: chunks of {n_ctx} tokens, more than the model's context",
            path.display()
        )));
    }
    let n_all = base.head.tokens.len() / n_ctx;
    let limit = args.chunks.and_then(|n| usize::try_from(n).ok());
    let n_chunks = n_all.min(limit.unwrap_or(usize::MAX));
    let progress = Progress::new("divergence", (n_chunks * n_ctx) as u64);
    let divergence = base.compare(&mut session, n_chunks, path, &progress)?;
    drop(progress);
    report(args, &divergence, (n_ctx, n_chunks))
}

fn report(
    args: &Args,
    divergence: &Divergence,
    (n_ctx, n_chunks): (usize, usize),
) -> Result<(), Failure> {
    let (mean, error) = divergence.mean();
    let (ppl, ppl_base) = divergence.perplexities();
    let quantile = |percent: f64| divergence.quantile(percent / 100.0);
    if args.json {
        return print_json(&json!({
            "model": args.model.label(),
            "kl": mean,
            "kl_error": error,
            "kl_median": quantile(50.0),
            "kl_90": quantile(90.0),
            "kl_99": quantile(99.0),
            "kl_99_9": quantile(99.9),
            "kl_max": quantile(100.0),
            "same_top": divergence.same_top(),
            "p_diff_rms": divergence.p_diff(),
            "ppl": ppl,
            "ppl_base": ppl_base,
            "n_ctx": n_ctx,
            "n_chunks": n_chunks,
            "n_scored": divergence.n(),
        }));
    }
    print(format!(
        "PPL(Q)            {ppl:>10.4}   PPL(base) {ppl_base:.4}, ratio {:.5}\n\
         Mean KLD          {mean:>10.6} +/- {error:.6}\n\
         Maximum KLD       {:>10.6}\n\
         99.9% KLD         {:>10.6}\n\
         99.0% KLD         {:>10.6}\n\
         90.0% KLD         {:>10.6}\n\
         Median KLD        {:>10.6}\n\
         RMS of change in p {:>8.3} %\n\
         Same top p        {:>10.3} %\n",
        ppl / ppl_base,
        quantile(100.0),
        quantile(99.9),
        quantile(99.0),
        quantile(90.0),
        quantile(50.0),
        100.0 * divergence.p_diff(),
        100.0 * divergence.same_top(),
    ))
}
