//! `ruvllm bench replay`: what drafts gain, measured in turns with plain decoding.

use super::lists::list;
use super::models::{Common, ModelsArgs};
use crate::flags::{SpeculationArgs, demo_metadata, engine};
use crate::io::bars::{Bar, Bars};
use crate::io::table::Printer;
use crate::io::{Failure, name as name_of, read_text};
use ruvllm::Model;
use ruvllm::decode::{DraftStats, Speculation};
use ruvllm::engine::EngineOptions;
use ruvllm::{Engine, SessionOptions};
use ruvllm_benches::{Replay, Replayed, synthetic_with_tokens};
use serde_json::{Map, Value, json};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  ruvllm bench replay --synthetic llama-1b -f tests/data/replay.jsonl
                                       what drafts gain on recorded answers
  ruvllm bench replay --synthetic llama-1b --spec-synthetic 0.5,0.8 -n 256
                                       … and by how many of them come true
  ruvllm bench replay -m model.gguf -f tests/data/replay.jsonl --svg drafts.svg
                                       the gain of each workload, drawn

-f reads JSON lines with name, prompt and answer, and samples the answer whatever the logits are; \
--spec-synthetic drafts for -n made-up tokens behind -d others. Both run in turns with plain decoding, of \
which `speed-up` is the ratio, and count one pass for the last token of the prompt.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Recorded prompts and answers, generated again with drafts and without; shapes have the
    /// tokens of the built-in model
    #[arg(short, long, alias = "replay", value_name = "FILE")]
    file: Option<PathBuf>,
    /// Drafts that come true with these probabilities
    #[arg(long, value_name = "RATES", value_delimiter = ',', value_parser = rate)]
    spec_synthetic: Vec<f64>,
    /// Numbers of tokens to generate with --spec-synthetic
    #[arg(
        short = 'n',
        long,
        value_name = "LIST",
        default_value = "128",
        allow_negative_numbers = true
    )]
    n_gen: Vec<String>,
    /// Tokens in the context before them
    #[arg(
        short = 'd',
        long,
        value_name = "LIST",
        default_value = "0",
        allow_negative_numbers = true
    )]
    n_depth: Vec<String>,
    /// Draw how many times as fast each workload is with drafts
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    models: ModelsArgs,
    #[command(flatten)]
    speculation: SpeculationArgs,
}

/// A probability.
fn rate(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|rate| (0.0..=1.0).contains(rate))
        .ok_or_else(|| "expected a number from 0 to 1".into())
}

impl Args {
    /// What --spec-synthetic measures.
    fn synthetic_drafts(&self) -> Result<Vec<SyntheticDrafts>, Failure> {
        let (n_gen, n_depth) = (
            list(&self.n_gen.join(","), "-n")?,
            list(&self.n_depth.join(","), "-d")?,
        );
        let mut all = Vec::new();
        for &rate in &self.spec_synthetic {
            for &n_gen in n_gen.iter().filter(|&&n| n > 0) {
                all.extend(
                    n_depth
                        .iter()
                        .map(|&depth| SyntheticDrafts { rate, n_gen, depth }),
                );
            }
        }
        Ok(all)
    }
}

/// Drafts of which so many come true.
struct SyntheticDrafts {
    rate: f64,
    n_gen: usize,
    /// Tokens in the context before.
    depth: usize,
}

/// A prompt and its answer, in tokens.
struct Recording {
    name: String,
    prompt: Vec<u32>,
    answer: Vec<u32>,
}

/// One line of the report.
struct Row {
    model: String,
    n_threads: usize,
    workload: String,
    n_prompt: usize,
    n_gen: usize,
    /// Tokens per second without drafts and with them, in turns.
    rates: Vec<[f64; 2]>,
    /// Of the last repetition with drafts.
    drafts: DraftStats,
    drafters: Vec<(&'static str, DraftStats)>,
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    ruvllm_benches::median(&values.collect::<Vec<_>>()).unwrap_or(f64::NAN)
}

impl Row {
    /// Name of the model, and number of threads.
    fn origin(&self) -> (&str, usize) {
        (&self.model, self.n_threads)
    }

    fn rate(&self, i: usize) -> f64 {
        median(self.rates.iter().map(|pair| pair[i]))
    }

    /// Median over the pairs.
    fn speedup(&self) -> f64 {
        median(self.rates.iter().map(|[plain, drafted]| drafted / plain))
    }

    fn cells(&self) -> Vec<(&'static str, String)> {
        let accepted = self
            .drafters
            .iter()
            .filter(|(_, stats)| stats.n_drafted > 0);
        let accepted = accepted
            .map(|(name, stats)| format!("{name} {} of {}", stats.n_accepted, stats.n_drafted));
        vec![
            ("model", self.model.clone()),
            ("threads", self.n_threads.to_string()),
            ("workload", self.workload.clone()),
            ("prompt", self.n_prompt.to_string()),
            ("tokens", self.n_gen.to_string()),
            ("passes", self.drafts.n_passes.to_string()),
            ("accepted", accepted.collect::<Vec<_>>().join(", ")),
            ("plain t/s", format!("{:.2}", self.rate(0))),
            ("t/s", format!("{:.2}", self.rate(1))),
            ("speed-up", format!("{:.2}", self.speedup())),
        ]
    }

    fn json(&self) -> Value {
        let of = |stats: &DraftStats| {
            json!({
                "passes": stats.n_passes,
                "drafted": stats.n_drafted,
                "accepted": stats.n_accepted,
                "seconds": stats.time.as_secs_f64(),
            })
        };
        json!({
            "model": self.model,
            "n_threads": self.n_threads,
            "workload": self.workload,
            "n_prompt": self.n_prompt,
            "n_gen": self.n_gen,
            "passes": self.drafts.n_passes,
            "drafters": self.drafters.iter().map(|(name, stats)| ((*name).to_owned(), of(stats))).collect::<Map<_, _>>(),
            "plain_ts": self.rates.iter().map(|pair| pair[0]).collect::<Vec<_>>(),
            "drafted_ts": self.rates.iter().map(|pair| pair[1]).collect::<Vec<_>>(),
            "speedup": self.speedup(),
        })
    }
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if args.file.is_none() && args.spec_synthetic.is_empty() {
        return Err(Failure::Usage(
            "there is nothing to measure: give -f FILE or --spec-synthetic RATES".into(),
        ));
    }
    if args.speculation.is_given() && args.file.is_none() {
        return Err(Failure::Usage(
            "--spec, -md and --no-spec say who drafts for the recordings of -f FILE".into(),
        ));
    }
    let threads = args.models.threads()?;
    let mut printer = Printer::new(args.models.output);
    let mut rows = Vec::new();
    args.models.each(
        |shape, file_type| Ok(synthetic_with_tokens(shape, file_type, &demo_metadata()?)?),
        |model, name| measure(args, model, name, &threads, &mut printer, &mut rows),
    )?;
    printer.end()?;
    match &args.svg {
        Some(path) => bars(&rows).write(path),
        None => Ok(()),
    }
}

/// The speed-up of each row, with how many drafts came true.
fn bars(rows: &[Row]) -> Bars {
    let common = Common::of(rows.iter().map(Row::origin));
    let bar = |row: &Row| {
        let drafters = || row.drafters.iter().map(|(_, stats)| stats);
        let accepted: usize = drafters().map(|stats| stats.n_accepted).sum();
        let drafted: usize = drafters().map(|stats| stats.n_drafted).sum();
        let came_true = match drafted {
            0 => "no drafts".into(),
            _ => format!("{accepted} of {drafted} drafts came true"),
        };
        Bar {
            name: common.name(row.origin(), &row.workload),
            value: row.speedup(),
            label: format!("{:.2}: {came_true}", row.speedup()),
        }
    };
    Bars {
        title: common.title().map_or("With drafts".into(), |title| {
            format!("{title}, with drafts")
        }),
        x_label: "times as fast as without".into(),
        base: 1.0,
        bars: rows.iter().map(bar).collect(),
    }
}

/// Measures every workload on `model`; adds their rows.
fn measure(
    args: &Args,
    model: &Model,
    name: &str,
    threads: &[usize],
    printer: &mut Printer,
    rows: &mut Vec<Row>,
) -> Result<(), Failure> {
    let options = &SessionOptions {
        keep_states: args.speculation.reads_states(),
        ..args.models.options()
    };
    for &n_threads in threads {
        let n_threads_asked = NonZeroUsize::new(n_threads);
        let open = |model: &Model, options: &SessionOptions| {
            engine(
                model,
                n_threads_asked,
                false,
                options,
                EngineOptions::default(),
            )
        };
        let engine = open(model, options)?;
        let mut row_of =
            |workload: &str, prompt: &[u32], replay: &Replay, speculation: Option<&Speculation>| {
                let (rates, replayed) = turns(replay, speculation, args.models.repetitions())?;
                let Replayed {
                    drafts, drafters, ..
                } = replayed;
                let (workload, model) = (workload.to_owned(), name.to_owned());
                let (n_prompt, n_gen) = (prompt.len(), replay.n_tokens());
                let row = Row {
                    model,
                    n_threads,
                    workload,
                    n_prompt,
                    n_gen,
                    rates,
                    drafts,
                    drafters,
                };
                printer.row(&row.cells(), || row.json())?;
                rows.push(row);
                Ok::<(), Failure>(())
            };
        if let Some(path) = &args.file {
            for Recording {
                name,
                prompt,
                answer,
            } in recordings(path, model)?
            {
                let n_ctx = prompt.len() + answer.len();
                let speculation = args.speculation.open(&engine, n_ctx, open)?;
                row_of(
                    &name,
                    &prompt,
                    &replay(&engine, options, &prompt, &answer)?,
                    speculation.as_ref(),
                )?;
            }
        }
        for SyntheticDrafts { rate, n_gen, depth } in args.synthetic_drafts()? {
            let n_vocab = model
                .tokenizer()
                .map_or(0, |tokenizer| tokenizer.n_vocab())
                .max(1);
            let is_eog = |token: u32| {
                model
                    .tokenizer()
                    .is_some_and(|tokenizer| tokenizer.is_eog(token))
            };
            // Spread over the vocabulary.
            let tokens = (0..)
                .map(|i| (i * 7919 % n_vocab) as u32)
                .filter(|&token| !is_eog(token));
            let tokens: Vec<u32> = tokens.take(depth.max(1) + n_gen).collect();
            let (prompt, answer) = tokens.split_at(depth.max(1));
            let replay = replay(&engine, options, prompt, answer)?;
            let speculation = Speculation::by(replay.synthetic_drafter(rate));
            row_of(
                &format!("acceptance {rate}"),
                prompt,
                &replay,
                Some(&speculation),
            )?;
        }
    }
    Ok(())
}

fn replay(
    engine: &Engine,
    options: &SessionOptions,
    prompt: &[u32],
    answer: &[u32],
) -> Result<Replay, Failure> {
    Ok(Replay::new(engine, options, prompt, answer)?)
}

/// Tokens per second without drafts and with them, in turns, after one of each that is not
/// measured.
fn turns(
    replay: &Replay,
    speculation: Option<&Speculation>,
    n: usize,
) -> Result<(Vec<[f64; 2]>, Replayed), Failure> {
    replay.run(None)?;
    let mut last = replay.run(speculation)?;
    let mut rates = Vec::with_capacity(n);
    for _ in 0..n {
        let plain = replay.run(None)?;
        last = replay.run(speculation)?;
        rates.push(
            [plain.time, last.time].map(|time| replay.n_tokens() as f64 / time.as_secs_f64()),
        );
    }
    Ok((rates, last))
}

/// The recordings of a file, in tokens of `model`.
fn recordings(path: &Path, model: &Model) -> Result<Vec<Recording>, Failure> {
    let tokenizer = model
        .tokenizer()
        .ok_or_else(|| Failure::Work("the model has no tokenizer".into()))?;
    let text = read_text(path)?;
    let lines = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty());
    let recordings = lines.map(|(i, line)| {
        let wrong =
            |what: String| Failure::Work(format!("{}: line {}: {what}", name_of(path), i + 1));
        let line: Map<String, Value> =
            serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
        let keys = ["name", "prompt", "answer"];
        if let Some(key) = line.keys().find(|key| !keys.contains(&key.as_str())) {
            return Err(wrong(format!(
                "unknown key {key:?}, known are name, prompt and answer"
            )));
        }
        let [name, prompt, answer] = keys.map(|key| match line.get(key) {
            Some(Value::String(text)) if !text.is_empty() => Ok(text),
            _ => Err(wrong(format!("{key} must be a text, and not empty"))),
        });
        let (prompt, answer) = (
            tokenizer.encode_prompt(prompt?),
            tokenizer.encode_inside(answer?.as_bytes()),
        );
        Ok(Recording {
            name: name?.clone(),
            prompt,
            answer,
        })
    });
    recordings.collect()
}
