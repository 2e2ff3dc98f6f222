//! `ruvllm bench formats`: what each weight format costs and brings, in one table.

use crate::bench::divergence::{Base, Divergence, Scratch, write_base};
use crate::bench::perplexity;
use crate::flags::{ModelArgs, PlacementArgs, ThreadsArg, engine, no_tokenizer, open};
use crate::io::plot::{Mark, Plot, Series};
use crate::io::table::{Format, Printer};
use crate::io::{Failure, Progress, file_or_pipe, note, read_text, size, without_last_newline};
use crate::quantize::{self, Rows, file_type};
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::SessionOptions;
use ruvllm::engine::EngineOptions;
use ruvllm::gguf::Gguf;
use ruvllm::model::quantize::{Recipe, writer};
use ruvllm::quant::FileType;
use ruvllm_benches::{Shape, Test, run as measure, synthetic};
use serde_json::{Value, json};
use std::io::{self, IsTerminal};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  ruvllm bench formats -f text.txt                               all types, the built-in model and a shape of 1B
  ruvllm bench formats -m model-f16.gguf -f text.txt --types Q4_K_M,Q5_K_M,Q8_0
  ruvllm bench formats -f text.txt --shape llama-8b -o csv

The model is quantised in memory and predicts the text: `ppl` is its perplexity as `ruvllm perplexity` tells it, `loss` \
the difference from the file as it is, `kl` the mean Kullback-Leibler divergence from it, whose log-probabilities lie in \
the folder for temporary files meanwhile (2 bytes for each scored token and token of the vocabulary). `shape` and the speeds are those of made-up weights of a shape, as small models fit into a \
cache. Start from F16, BF16 or F32 where you can.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text to predict, without its last line end; - is stdin
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Most chunks of the text to predict [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    chunks: Option<u32>,
    /// Draw size against divergence into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Types to compare [default: all that `quantize` makes]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = file_type)]
    types: Vec<FileType>,
    /// Whose speed is measured: llama-1b, llama-8b, llama2-7b, llama2-13b, mistral-7b, qwen2-0.5b or qwen3-8b
    #[arg(long, value_name = "SHAPE", default_value = "llama-1b", value_parser = shape)]
    shape: Shape,
    /// Tokens of the prompt
    #[arg(short = 'p', long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    n_prompt: u32,
    /// Tokens to generate
    #[arg(short = 'n', long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    n_gen: u32,
    /// Context in which the text is predicted
    #[arg(short, long, value_name = "N", default_value_t = perplexity::DEFAULT_CTX as u32, env = "LLAMA_ARG_CTX_SIZE",
          value_parser = clap::value_parser!(u32).range(perplexity::LEAST_CTX as i64..))]
    ctx_size: u32,
    /// Repetitions of each speed; the median counts
    #[arg(short, long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    #[command(flatten)]
    threads: ThreadsArg,
    /// How to print
    #[arg(short, long, value_enum, default_value_t = Format::Md)]
    output: Format,
    #[command(flatten)]
    placement: PlacementArgs,
}

fn shape(name: &str) -> Result<Shape, String> {
    Shape::from_name(name)
        .ok_or_else(|| format!("there is no such shape; there are {}", Shape::names()))
}

/// Steps of a type that progress counts: perplexity, prompt, tokens.
const STEPS: u64 = 3;

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let text = without_last_newline(read_text(&file_or_pipe(args.file.as_ref(), "-f FILE")?)?);
    let types = if args.types.is_empty() {
        FileType::ALL
    } else {
        &args.types
    };
    let gguf = args.model.gguf()?;
    let scratch = format!("ruvllm-formats-{}.logits", std::process::id());
    let scratch = Scratch(std::env::temp_dir().join(scratch));
    let plain = loss(args, args.model.open(&args.placement)?, &text, &scratch)?;
    let mut points = Vec::new();
    note(format_args!(
        "perplexity {:.4} as the file is; speeds of {} with -p {} and -n {}",
        plain.exp(),
        args.shape.name,
        args.n_prompt,
        args.n_gen
    ));
    let progress = match io::stdout().is_terminal() {
        true => Progress::hidden(),
        false => Progress::new("formats", STEPS * types.len() as u64),
    };
    let mut printer = Printer::new(args.output);
    for (i, &file_type) in types.iter().enumerate() {
        let step = |n: u64| progress.set(STEPS * i as u64 + n);
        let mut recipe = Recipe::from(file_type);
        recipe.allow_requantize = true;
        let plan = quantize::plan(&gguf, &recipe)?;
        let rows = Rows::in_memory(Progress::hidden(), args.threads.number())?;
        let converted = Gguf::from_writer(writer(&gguf, &plan, file_type, &rows.converter, None));
        let converted = rows.finish(converted)?;
        let model_bytes = converted.file_size();
        let model = open(converted, &args.placement, &file_type.to_string())?;
        let divergence = compare(args, &model, &scratch)?;
        points.push((model_bytes, divergence.mean().0, file_type.to_string()));
        drop(model);
        step(1);
        let model = open(
            synthetic(&args.shape, file_type)?,
            &args.placement,
            &args.shape.name,
        )?;
        let options = SessionOptions::default();
        let engine = engine(
            &model,
            args.threads.number(),
            false,
            &options,
            EngineOptions::default(),
        )?;
        let speed = |n_prompt, n_gen| -> Result<f64, Failure> {
            let test = Test {
                n_prompt,
                n_gen,
                depth: 0,
                rows: 0,
            };
            Ok(measure(&engine, &[], test, &options, args.repetitions as usize)?.median())
        };
        let prompt = speed(args.n_prompt as usize, 0)?;
        step(2);
        let tokens = speed(0, args.n_gen as usize)?;
        step(3);
        let bytes = model.gguf().tensors().iter().map(|t| t.n_bytes).sum();
        let bits = 8.0 * bytes as f64 / model.n_params() as f64;
        let row = Row {
            file_type,
            file: model_bytes,
            bytes,
            bits,
            loss: divergence.score.mean(),
            kl: divergence.mean().0,
            plain,
            prompt,
            tokens,
        };
        printer.row(&row.cells(), || row.json())?;
    }
    printer.end()?;
    match &args.svg {
        Some(path) => plot(points).write(path),
        None => Ok(()),
    }
}

/// Divergence by size: bytes, mean divergence and name of each type, and a line along those that no
/// smaller one is better than. Divergences of 0 have no place on it.
fn plot(mut types: Vec<(u64, f64, String)>) -> Plot {
    types.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let largest = types.last().map_or(0, |t| t.0);
    let (unit, shift) = match largest {
        0..1_048_576 => ("KiB", 10),
        1_048_576..1_073_741_824 => ("MiB", 20),
        _ => ("GiB", 30),
    };
    let place = |t: &(u64, f64, String)| (t.0 as f64 / f64::from(1u32 << shift), t.1);
    let mut best = f64::INFINITY;
    let mut line = Vec::new();
    for found in types.iter().filter(|t| t.1 > 0.0) {
        if found.1 < best {
            best = found.1;
            line.push(place(found));
        }
    }
    let series = |name: &str, mark, points, labels| Series {
        name: name.into(),
        mark,
        points,
        labels,
    };
    Plot {
        title: "mean Kullback-Leibler divergence by size".into(),
        x_label: format!("size of the file in {unit}"),
        y_label: "divergence in nats/token".into(),
        is_log: true,
        series: vec![
            series("best of its size", Mark::Line, line, Vec::new()),
            series(
                "type",
                Mark::Dots,
                types.iter().map(place).collect(),
                types.iter().map(|t| t.2.clone()).collect(),
            ),
        ],
    }
}

/// A session of the model in the context in which the text is predicted.
fn session(args: &Args, model: &Model) -> Result<Session, Failure> {
    let options = SessionOptions {
        n_ctx: Some(args.ctx_size as usize),
        ..Default::default()
    };
    let engine = engine(
        model,
        args.threads.number(),
        false,
        &options,
        EngineOptions::default(),
    )?;
    Ok(engine.session_with(&options)?)
}

/// Mean of `−ln p` over the text; writes the log-probabilities.
fn loss(args: &Args, model: Model, text: &str, scratch: &Scratch) -> Result<f64, Failure> {
    let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
    let tokens = tokenizer.encode(text, true, false);
    let mut session = session(args, &model)?;
    let limit = args.chunks.map_or(usize::MAX, |n| n as usize);
    let n_chunks = perplexity::n_chunks(&tokens, session.sequence().n_ctx())?.min(limit);
    let progress = Progress::hidden();
    Ok(write_base(&mut session, &tokens, n_chunks, &scratch.0, &progress)?.mean())
}

/// How far a model is from the one whose log-probabilities are in the file.
fn compare(args: &Args, model: &Model, scratch: &Scratch) -> Result<Divergence, Failure> {
    let mut session = session(args, model)?;
    let mut base = Base::open(&scratch.0)?;
    base.compare(&mut session, usize::MAX, &scratch.0, &Progress::hidden())
}

/// One line of the table.
struct Row {
    file_type: FileType,
    /// Bytes of the model's file.
    file: u64,
    /// Of the shape.
    bytes: u64,
    /// Per weight of the shape.
    bits: f64,
    loss: f64,
    /// Mean divergence from the file as it is.
    kl: f64,
    /// Loss of the file as it is.
    plain: f64,
    /// Tokens per second.
    prompt: f64,
    tokens: f64,
}

impl Row {
    /// How much higher the perplexity is, as a share.
    fn change(&self) -> f64 {
        (self.loss - self.plain).exp_m1()
    }

    fn cells(&self) -> Vec<(&'static str, String)> {
        vec![
            ("type", self.file_type.to_string()),
            ("bits", format!("{:.2}", self.bits)),
            ("size", size(self.file)),
            ("shape", size(self.bytes)),
            ("ppl", format!("{:.4}", self.loss.exp())),
            ("loss", format!("{:+.2} %", 100.0 * self.change())),
            ("kl", format!("{:.6}", self.kl)),
            ("prompt t/s", format!("{:.1}", self.prompt)),
            ("tokens t/s", format!("{:.1}", self.tokens)),
        ]
    }

    fn json(&self) -> Value {
        json!({
            "type": self.file_type.to_string(),
            "bits_per_weight": self.bits,
            "size": self.file,
            "shape_size": self.bytes,
            "ppl": self.loss.exp(),
            "ppl_change": self.change(),
            "kl": self.kl,
            "prompt_ts": self.prompt,
            "gen_ts": self.tokens,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_has_the_best_types() {
        let types = [
            ("Q8_0", 1000, 0.001),
            ("Q4_0", 500, 0.1),
            ("worse", 750, 0.2),
            ("F32", 4000, 0.0),
        ];
        let plot = plot(
            types
                .map(|(name, bytes, kl)| (bytes << 10, kl, name.to_string()))
                .into(),
        );
        assert_eq!(
            plot.series[0].points,
            [(500.0 / 1024.0, 0.1), (1000.0 / 1024.0, 0.001)]
        );
        assert_eq!(plot.series[1].points.len(), 4);
        let svg = plot.svg();
        assert!(svg.contains(">worse<") && !svg.contains(">F32<"), "{svg}");
        assert!(svg.contains("in MiB"));
    }
}
