//! `ruvllm bench speed`: speed of prompts and of generation, and what it means for the machine.

use super::lists::list;
use super::models::{Common, ModelsArgs};
use super::scenarios::{self, scenario_of};
use crate::flags::{LoraArgs, OverwriteArg, engine};
use crate::io::plot::{Mark, Plot, Series};
use crate::io::table::{Format, Printer};
use crate::io::{Failure, count, measured, note, percentiles, size, slashes};
use clap::Arg;
use ruvllm::Model;
use ruvllm::arch::PanelElement;
use ruvllm::engine::EngineOptions;
use ruvllm::lora::Adapter;
use ruvllm::{Engine, SessionOptions};
use ruvllm_benches::{
    Outcome, Scenario, Test, arithmetic_peak, read_bandwidth, run as measure, synthetic,
    synthetic_file,
};
use serde_json::{Value, json};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

const EXAMPLES: &str = "\
Examples:
  ruvllm bench -m model.gguf                              pp512 and tg128, as llama-bench
  ruvllm bench --synthetic llama-1b:Q4_K_M -t 1,2         a shape without a file, for 1 and 2 threads
  ruvllm bench -m model.gguf -p 0 -n 64 -d 0,4096         generation at two depths
  ruvllm bench -m model.gguf -d 0-8192+2048 --svg speed.svg
                                                          the same drawn, by depth
  ruvllm bench -m model.gguf -p 128-1024*2 -n 0 -o csv    prompts of 128, 256, 512, 1024 tokens
  ruvllm bench -m model.gguf -p 0 -n 0 --rows 1,4,16      passes over tokens of so many sequences
  ruvllm bench -m model.gguf --scenario chat,rag,batch    what the prefix cache saves
  ruvllm bench -m model.gguf --vs 'llama-bench -m model.gguf'
                                                          in turns with a peer, and the ratios
  ruvllm bench --synthetic gpt-oss-20b:Q8_0 --write model.gguf
                                                          a shape as a file, for a peer to open, too

`speed` may be left out. Lists are separated by commas; ranges are FIRST-LAST, FIRST-LAST+STEP or \
FIRST-LAST*FACTOR. `% read` is the bytes a token reads times tokens per second, over the read bandwidth \
measured in the same run; `% peak` is the operations per second over what the level's fastest \
instructions for the model's main type did in the same run; `first` and `next` are the times of the \
prompt and between two tokens of a sequence, median, 95th and 99th percentile; `noise` is the share of \
the machine that others used meanwhile.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES, mut_args = beside_write)]
pub(crate) struct Args {
    /// Write the one made-up model to a file, which other engines open, too, instead of measuring
    /// it
    #[arg(long, value_name = "FILE", requires = "synthetic")]
    write: Option<PathBuf>,
    #[command(flatten)]
    overwrite: OverwriteArg,
    /// Prompt lengths; 0: no such test
    #[arg(
        short = 'p',
        long,
        value_name = "LIST",
        default_value = "512",
        allow_negative_numbers = true
    )]
    n_prompt: Vec<String>,
    /// Numbers of tokens to generate; 0: no such test
    #[arg(
        short = 'n',
        long,
        value_name = "LIST",
        default_value = "128",
        allow_negative_numbers = true
    )]
    n_gen: Vec<String>,
    /// Numbers of sequences that generate side by side, one token each per pass, 16 passes
    #[arg(
        long,
        value_name = "LIST",
        default_value = "0",
        hide_default_value = true,
        allow_negative_numbers = true
    )]
    rows: Vec<String>,
    /// Tests of a prompt and generation together
    #[arg(long = "pg", value_name = "PROMPT,GEN")]
    prompt_and_gen: Vec<String>,
    /// Tokens in the context before each test
    #[arg(
        short = 'd',
        long,
        value_name = "LIST",
        default_value = "0",
        allow_negative_numbers = true
    )]
    n_depth: Vec<String>,
    /// Instead of speeds, measure the prefix cache: times to the first token, and the share of
    /// tokens found again in such traffic: chat, rag, batch
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = scenario_of,
          conflicts_with_all = ["n_prompt", "n_gen", "rows", "prompt_and_gen", "n_depth", "vs", "lora", "lora_scaled",
                                "lora_rank", "svg"])]
    scenario: Vec<Scenario>,
    /// Run each test in turns with this llama-bench command and print the ratios
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["lora", "lora_scaled", "lora_rank"])]
    vs: Option<String>,
    /// Draw tokens per second by depth into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// An adapter of this rank on every matrix, with made-up values, with --rows one for each
    /// sequence. With adapters each test runs in turns with the plain model, and the ratios
    /// are printed
    #[arg(long, value_name = "N")]
    lora_rank: Option<usize>,
    /// The made-up adapters change only attn_q, attn_k, attn_v and attn_output
    #[arg(long, requires = "lora_rank")]
    lora_attention: bool,
    /// The made-up adapters are held in 16 bits, as those of F16 files are
    #[arg(long, requires = "lora_rank")]
    lora_f16: bool,
    #[command(flatten)]
    models: ModelsArgs,
    #[command(flatten)]
    lora: LoraArgs,
}

/// With --write nothing is measured, so that no option of a measurement has an effect.
fn beside_write(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "synthetic" | "write" => arg,
        "overwrite" => arg.requires("write"),
        _ => arg.conflicts_with("write"),
    }
}

/// One line of the report.
struct Row {
    model: String,
    bytes: u64,
    n_params: u64,
    level: &'static str,
    outcome: Outcome,
    /// Share of the read bandwidth, where reading is what limits.
    read_share: Option<f64>,
    /// Operations per second, and their share of the arithmetic peak, where that is what limits.
    flops: Option<(f64, f64)>,
    /// Tokens per second of the peer, or without adapters, one for each of ours.
    peer: Vec<f64>,
}

impl Row {
    /// Name of the model, and number of threads.
    fn origin(&self) -> (&str, usize) {
        (&self.model, self.outcome.n_threads)
    }

    fn of(model: &Model, name: &str, limits: &Limits, outcome: Outcome, peer: Vec<f64>) -> Row {
        let test = outcome.test;
        // A prompt reads each weight once per batch: there the arithmetic is the limit.
        let reads = test.n_prompt == 0;
        let read_share =
            reads.then(|| outcome.median() * outcome.bytes_per_token as f64 / limits.bandwidth);
        let flops = (!reads || test.n_gen == 0 || test.rows > 0).then(|| {
            let rate = outcome.median() * outcome.flops_per_token as f64;
            // Activations of 16 bits are two of 8.
            let peak = if test.rows > 0 {
                limits.peak_of_bytes / 2.0
            } else {
                limits.peak
            };
            (rate, rate / peak)
        });
        Row {
            model: name.to_owned(),
            bytes: model.gguf().tensors().iter().map(|t| t.n_bytes).sum(),
            n_params: model.n_params(),
            level: model.arch().name(),
            outcome,
            read_share,
            flops,
            peer,
        }
    }

    /// Median of ours over the peer's, pair by pair.
    fn ratio(&self) -> Option<f64> {
        let mut ratios: Vec<f64> = self
            .outcome
            .rates
            .iter()
            .zip(&self.peer)
            .map(|(a, b)| a / b)
            .collect();
        ratios.sort_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied()
    }

    fn cells(&self) -> Vec<(&'static str, String)> {
        let o = &self.outcome;
        let percent = |x: Option<f64>| x.map_or(String::new(), |x| format!("{:.0} %", 100.0 * x));
        let mut cells = vec![
            ("model", self.model.clone()),
            ("size", size(self.bytes)),
            ("params", count(self.n_params)),
            ("level", self.level.to_owned()),
            ("threads", o.n_threads.to_string()),
            ("test", o.test.to_string()),
            ("t/s", format!("{:.2} ± {:.2}", o.mean(), o.deviation())),
            ("median", format!("{:.2}", o.median())),
            ("% read", percent(self.read_share)),
            (
                "GFLOP/s",
                self.flops
                    .map_or(String::new(), |(rate, _)| format!("{:.0}", rate / 1e9)),
            ),
            ("% peak", percent(self.flops.map(|(_, share)| share))),
            ("first ms", slashes(&percentiles(&o.first))),
            ("next ms", slashes(&percentiles(&o.next))),
            ("noise", percent(o.noise)),
        ];
        if let Some(ratio) = self.ratio() {
            cells.push(("ratio", format!("{ratio:.3}")));
        }
        cells
    }

    fn json(&self) -> Value {
        let o = &self.outcome;
        json!({
            "model": self.model,
            "model_size": self.bytes,
            "model_n_params": self.n_params,
            "level": self.level,
            "n_threads": o.n_threads,
            "n_prompt": o.test.n_prompt,
            "n_gen": o.test.n_gen,
            "n_depth": o.test.depth,
            "n_rows": o.test.rows,
            "test": o.test.to_string(),
            "avg_ts": o.mean(),
            "stddev_ts": o.deviation(),
            "median_ts": o.median(),
            "samples_ts": o.rates,
            "first_ms_p50_p95_p99": percentiles(&o.first),
            "next_ms_p50_p95_p99": percentiles(&o.next),
            "bytes_per_token": o.bytes_per_token,
            "read_share": self.read_share,
            "flops_per_token": o.flops_per_token,
            "flops": self.flops.map(|(rate, _)| rate),
            "peak_share": self.flops.map(|(_, share)| share),
            "noise": o.noise,
            "peer_ts": self.peer,
            "ratio": self.ratio(),
        })
    }
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let tests = tests(args)?;
    let threads = args.models.threads()?;
    let shapes = args.models.shapes()?;
    if let Some(path) = &args.write {
        let [(shape, file_type)] = &shapes[..] else {
            return Err(Failure::Usage("--write writes one shape".into()));
        };
        args.overwrite.check(path)?;
        let mut file = synthetic_file(shape, *file_type);
        args.overwrite.apply(&mut file);
        return Ok(file.write(path)?);
    }
    let mut printer = Printer::new(args.models.output);
    let mut rows = Vec::new();
    args.models.each(
        |shape, file_type| Ok(synthetic(shape, file_type)?),
        |model, name| {
            rows.extend(bench(args, model, name, &tests, &threads, &mut printer)?);
            Ok(())
        },
    )?;
    printer.end()?;
    match &args.svg {
        Some(path) => plot(&rows).write(path),
        None => Ok(()),
    }
}

/// Tokens per second by depth: a line for each model, number of threads and test, and a broken one
/// for the peer.
fn plot(rows: &[Row]) -> Plot {
    let common = Common::of(rows.iter().map(Row::origin));
    let mut series: Vec<Series> = Vec::new();
    for row in rows {
        let o = &row.outcome;
        let kind = Test { depth: 0, ..o.test };
        let name = common.name(row.origin(), &kind.to_string());
        let mut add = |name: &str, mark, rate: f64| {
            let point = (o.test.depth as f64, rate);
            match series.iter_mut().find(|s| s.name == name && s.mark == mark) {
                Some(series) => series.points.push(point),
                None => series.push(Series {
                    name: name.into(),
                    mark,
                    points: vec![point],
                    labels: Vec::new(),
                }),
            }
        };
        add(&name, Mark::Line, o.median());
        if let Some(ratio) = row.ratio() {
            add(
                &format!("{name}, the other"),
                Mark::Dashes,
                o.median() / ratio,
            );
        }
    }
    // A point is no line.
    let alone = series.iter_mut().filter(|s| s.points.len() == 1);
    alone.for_each(|series| series.mark = Mark::Dots);
    Plot {
        title: common.title().unwrap_or_else(|| "Speed".into()),
        x_label: "tokens in the context before".into(),
        y_label: "tokens per second".into(),
        is_log: true,
        series,
    }
}

fn bench(
    args: &Args,
    model: &Model,
    name: &str,
    tests: &[Test],
    threads: &[usize],
    printer: &mut Printer,
) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    let options = args.models.options();
    let mut adapters = args.lora.open(model)?;
    let n_given = adapters.len();
    if let Some(rank) = args.lora_rank {
        let n_rows = tests.iter().map(|test| test.rows).max().unwrap_or(0);
        for _ in 0..n_rows.max(1) {
            adapters.push((
                Arc::new(made_up_adapter(
                    model,
                    rank,
                    args.lora_attention,
                    args.lora_f16,
                )?),
                1.0,
            ));
        }
    }
    for &n_threads in threads {
        let engine = engine(
            model,
            NonZeroUsize::new(n_threads),
            !adapters.is_empty(),
            &options,
            EngineOptions::default(),
        )?;
        if !args.scenario.is_empty() {
            scenarios::measure(
                &args.scenario,
                &engine,
                name,
                args.models.repetitions(),
                &options,
                printer,
            )?;
            continue;
        }
        let limits = Limits::of(model, n_threads)?;
        for &test in tests {
            // Of those that are made up a single session has one.
            let n_used = if test.rows > 0 {
                adapters.len()
            } else {
                adapters.len().min(n_given + 1)
            };
            let (outcome, peer) = in_turns(
                args,
                &engine,
                &adapters[..n_used],
                test,
                &options,
                n_threads,
            )?;
            let Some(outcome) = outcome else { continue };
            let row = Row::of(model, name, &limits, outcome, peer);
            printer.row(&row.cells(), || row.json())?;
            rows.push(row);
        }
        if !args.models.model.is_empty() {
            measured::keep(&engine, name, Some(limits.bandwidth));
        }
        if printer.format == Format::Md {
            note(format_args!(
                "{n_threads} threads: read bandwidth {:.1} GB/s, peak of {:?} products {:.0} GFLOP/s; weights \
                 read from {}",
                limits.bandwidth / 1e9,
                limits.element,
                limits.peak / 1e9,
                match model.gguf().resident_bytes() {
                    0 => "the mapped file or plain memory".to_owned(),
                    n => format!("a copy in huge pages, {}", size(n)),
                }
            ));
        }
    }
    Ok(rows)
}

/// A test's outcome, in turns with the peer, or the model without adapters, if there is such, and
/// its tokens per second.
fn in_turns(
    args: &Args,
    engine: &Engine,
    adapters: &[(Arc<Adapter>, f32)],
    test: Test,
    options: &SessionOptions,
    n_threads: usize,
) -> Result<(Option<Outcome>, Vec<f64>), Failure> {
    let n = args.models.repetitions();
    if args.vs.is_none() && adapters.is_empty() {
        let outcome = measure(engine, &[], test, options, n)?;
        return Ok((Some(outcome), Vec::new()));
    }
    let (mut outcome, mut peer) = (None::<Outcome>, Vec::new());
    for _ in 0..n {
        let one = measure(engine, adapters, test, options, 1)?;
        match &mut outcome {
            Some(all) => {
                all.rates.extend(one.rates);
                all.first.extend(one.first);
                all.next.extend(one.next);
            }
            None => outcome = Some(one),
        }
        peer.push(match &args.vs {
            Some(command) => peer_rate(command, test, n_threads)?,
            None => measure(engine, &[], test, options, 1)?.rates[0],
        });
    }
    Ok((outcome, peer))
}

/// What the machine could do, measured in the same run.
struct Limits {
    /// Bytes read from memory per second.
    bandwidth: f64,
    /// Elements of the fastest products for the model's main type, and operations per second with
    /// them.
    element: PanelElement,
    peak: f64,
    /// The same of 8-bit products.
    peak_of_bytes: f64,
}

impl Limits {
    fn of(model: &Model, n_threads: usize) -> Result<Limits, Failure> {
        let no_threads = |error: std::io::Error| {
            Failure::Work(format!("cannot start {n_threads} threads: {error}"))
        };
        let bandwidth = read_bandwidth(n_threads).map_err(no_threads)?;
        let arch = model.arch();
        let (element, products) = arch.gemm_element(model.main_type());
        let peak = |element| arithmetic_peak(arch, element, n_threads).map_err(no_threads);
        Ok(Limits {
            bandwidth,
            element,
            peak: peak(element)? / products as f64,
            peak_of_bytes: peak(PanelElement::I8)?,
        })
    }
}

/// An adapter of all matrices, or those around attention, whose changes are small, but not zero.
fn made_up_adapter(
    model: &Model,
    rank: usize,
    attention: bool,
    f16: bool,
) -> Result<Adapter, Failure> {
    let chosen =
        |part: &str| !attention || ["attn_q", "attn_k", "attn_v", "attn_output"].contains(&part);
    let mut adapter = Adapter::zeros(model, rank, 1, |site| {
        !site.is_embedding() && chosen(site.part())
    })?;
    for (_, term) in adapter.terms_mut() {
        let (_, b) = term.parts_mut();
        b.iter_mut()
            .enumerate()
            .for_each(|(i, b)| *b = (i % 15) as f32 * 1e-3 - 7e-3);
    }
    Ok(if f16 { adapter.to_f16()? } else { adapter })
}

/// One repetition of a peer's llama-bench.
fn peer_rate(command: &str, test: Test, n_threads: usize) -> Result<f64, Failure> {
    let Test {
        n_prompt,
        n_gen,
        depth,
        rows,
    } = test;
    if n_prompt > 0 && n_gen > 0 || rows > 0 {
        return Err(Failure::Usage(
            "--vs compares prompts or generation, not both at once (-pg), nor sequences side by side (--rows)".into(),
        ));
    }
    let mut words = command.split_whitespace();
    let program = words
        .next()
        .ok_or_else(|| Failure::Usage("--vs names no command".into()))?;
    let mut call = Command::new(program);
    call.args(words)
        .args(["-o", "json", "-r", "1", "-t", &n_threads.to_string()]);
    call.args(["-p", &n_prompt.to_string(), "-n", &n_gen.to_string()]);
    if depth > 0 {
        call.args(["-d", &depth.to_string()]);
    }
    let output = call
        .output()
        .map_err(|e| Failure::Work(format!("{program}: {e}")))?;
    let broken = |what: String| Failure::Work(format!("{program}: {what}"));
    if !output.status.success() {
        return Err(broken(format!(
            "{}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        )));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let from = text
        .find('[')
        .ok_or_else(|| broken("printed no JSON".into()))?;
    let rows: Value =
        serde_json::from_str(text[from..].trim()).map_err(|e| broken(e.to_string()))?;
    rows[0]["avg_ts"]
        .as_f64()
        .ok_or_else(|| broken("printed no avg_ts".into()))
}

/// Passes of a test of `--rows`.
const PASSES: usize = 16;

fn tests(args: &Args) -> Result<Vec<Test>, Failure> {
    let mut tests = Vec::new();
    let depths = list(&args.n_depth.join(","), "-d")?;
    let pairs = args
        .prompt_and_gen
        .iter()
        .map(|text| match list(text, "-pg")?[..] {
            [n_prompt, n_gen] => Ok((n_prompt, n_gen)),
            _ => Err(Failure::Usage(format!("-pg {text}: expected two numbers"))),
        });
    let mut kinds = Vec::new();
    kinds.extend(
        list(&args.n_prompt.join(","), "-p")?
            .into_iter()
            .map(|p| (p, 0, 0)),
    );
    kinds.extend(
        list(&args.n_gen.join(","), "-n")?
            .into_iter()
            .map(|g| (0, g, 0)),
    );
    for (n_prompt, n_gen) in pairs.collect::<Result<Vec<_>, _>>()? {
        kinds.push((n_prompt, n_gen, 0));
    }
    let rows = list(&args.rows.join(","), "--rows")?;
    kinds.extend(
        rows.into_iter()
            .filter(|&rows| rows > 0)
            .map(|rows| (0, PASSES, rows)),
    );
    for depth in depths {
        let of_depth = kinds
            .iter()
            .filter(|&&(n_prompt, n_gen, _)| n_prompt + n_gen > 0);
        tests.extend(of_depth.map(|&(n_prompt, n_gen, rows)| Test {
            n_prompt,
            n_gen,
            depth,
            rows,
        }));
    }
    if tests.is_empty() {
        Err(Failure::Usage("there is nothing to measure".into()))
    } else {
        Ok(tests)
    }
}
