//! `ruvllm bench`: speed of prompts and of generation, and what it means for the machine.

use crate::flags::{
    CacheTypeArgs, LoraArgs, MAX_THREADS, OverwriteArg, ResidenceArgs, SpeculationArgs,
    demo_metadata, engine, forced_level, level, open,
};
use crate::io::table::{Format, Printer};
use crate::io::{Failure, count, measured, note, percentiles, size, slashes};
use clap::Arg;
use ruvllm::arch::{Arch, PanelElement};
use ruvllm::bench::{
    FirstToken, KernelRow, Outcome, Scenario, ScenarioOutcome, Shape, Test, arithmetic_peak,
    first_tokens, kernels, read_bandwidth, run as measure, scenario, synthetic, synthetic_file,
    synthetic_with_tokens,
};
use ruvllm::exec::{Engine, EngineOptions, KvType, SessionOptions, default_threads};
use ruvllm::gguf::Gguf;
use ruvllm::lora::Adapter;
use ruvllm::model::Model;
use ruvllm::quant::FileType;
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
  ruvllm bench -m model.gguf -p 128-1024*2 -n 0 -o csv    prompts of 128, 256, 512, 1024 tokens
  ruvllm bench -m model.gguf -p 0 -n 0 --rows 1,4,16      passes over tokens of so many sequences
  ruvllm bench --synthetic llama-1b --replay tests/data/replay.jsonl
                                                          what drafts gain on recorded answers
  ruvllm bench --synthetic llama-1b --spec-synthetic 0.5,0.8 -n 256
                                                          … and by how many of them come true
  ruvllm bench -m model.gguf --scenario chat,rag,batch    what the prefix cache saves
  ruvllm bench --kernels                                  every kernel against the machine's limits
  ruvllm bench -m model.gguf --vs 'llama-bench -m model.gguf'
                                                          in turns with a peer, and the ratios
  ruvllm bench --synthetic gpt-oss-20b:Q8_0 --write model.gguf
                                                          a shape as a file, for a peer to open, too

Lists are separated by commas; ranges are FIRST-LAST, FIRST-LAST+STEP or FIRST-LAST*FACTOR. \
`% read` is the bytes a token reads times tokens per second, over the read bandwidth measured in the \
same run; `% peak` is the operations per second over what the level's fastest instructions for the \
model's main type did in the same run; `first` and `next` are the times of the prompt and between two \
tokens of a sequence, median, 95th and 99th percentile; `noise` is the share of the machine that others used meanwhile.

--replay reads JSON lines with name, prompt and answer, and samples the answer whatever the logits are; \
--spec-synthetic drafts for -n made-up tokens behind -d others. Both run in turns with plain decoding, of \
which `speed-up` is the ratio, and count one pass for the last token of the prompt.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES, mut_args = beside_write)]
pub(crate) struct Args {
    /// GGUF files
    #[arg(
        short,
        long,
        value_name = "FILE",
        value_delimiter = ',',
        env = "LLAMA_ARG_MODEL"
    )]
    model: Vec<PathBuf>,
    /// Made-up weights of a shape instead of a file, and a file type: llama-1b, llama-8b,
    /// llama2-7b, mistral-7b, qwen2-0.5b, qwen3.5-4b, gemma3-4b, gemma4-e4b, or some layers of
    /// qwen3-30b-a3b, qwen3-next-80b-a3b or gpt-oss-20b
    #[arg(long, value_name = "SHAPE:TYPE", value_delimiter = ',')]
    synthetic: Vec<String>,
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
    /// Threads, at most 1024; 0 is as many as this process may use, as is the default
    #[arg(
        short,
        long,
        value_name = "LIST",
        default_value = "0",
        hide_default_value = true,
        env = "LLAMA_ARG_THREADS",
        allow_negative_numbers = true
    )]
    threads: Vec<String>,
    /// Most tokens computed at a time
    #[arg(long = "ubatch-size", value_name = "N", default_value_t = 512, env = "LLAMA_ARG_UBATCH",
          allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    ubatch_size: u32,
    /// The same, by its other name: the smaller counts
    #[arg(short, long, value_name = "N", default_value_t = 2048, env = "LLAMA_ARG_BATCH",
          allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    /// Compute prompts as generated tokens are
    #[arg(long)]
    exact: bool,
    #[command(flatten)]
    cache_type: CacheTypeArgs,
    /// Repetitions of each test
    #[arg(short, long, value_name = "N", default_value_t = 5, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repetitions: u32,
    /// How to print
    #[arg(short, long, value_enum, default_value_t = Format::Md)]
    output: Format,
    #[command(flatten)]
    residence: ResidenceArgs,
    /// Instead of speeds, measure the prefix cache: times to the first token, and the share of
    /// tokens found again in such traffic: chat, rag, batch
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = scenario_of,
          conflicts_with_all = ["n_prompt", "n_gen", "rows", "prompt_and_gen", "n_depth", "vs", "lora", "lora_scaled",
                                "lora_rank"])]
    scenario: Vec<Scenario>,
    /// Instead of models, measure every kernel of every level (or of that in RUVLLM_ARCH) against
    /// its bound
    #[arg(long, conflicts_with_all = ["model", "synthetic", "vs", "scenario"])]
    kernels: bool,
    /// Run each test in turns with this llama-bench command and print the ratios
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["lora", "lora_scaled", "lora_rank"])]
    vs: Option<String>,
    #[command(flatten)]
    lora: LoraArgs,
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
    /// Recorded prompts and answers, generated again with drafts and without; shapes have the
    /// tokens of the built-in model
    #[arg(long, value_name = "FILE", conflicts_with_all = ONE_MEASUREMENT)]
    pub(crate) replay: Option<PathBuf>,
    /// Drafts that come true with these probabilities
    #[arg(long, value_name = "RATES", value_delimiter = ',', value_parser = rate, conflicts_with_all = ONE_MEASUREMENT)]
    spec_synthetic: Vec<f64>,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
}

/// With --write nothing is measured, so that no option of a measurement has an effect.
fn beside_write(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "synthetic" | "write" => arg,
        "overwrite" => arg.requires("write"),
        _ => arg.conflicts_with("write"),
    }
}

/// What is not measured with drafts.
const ONE_MEASUREMENT: [&str; 9] = [
    "kernels",
    "vs",
    "scenario",
    "n_prompt",
    "prompt_and_gen",
    "rows",
    "lora",
    "lora_scaled",
    "lora_rank",
];

/// A probability.
fn rate(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|rate| (0.0..=1.0).contains(rate))
        .ok_or_else(|| "expected a number from 0 to 1".into())
}

impl Args {
    /// Whether drafts are measured.
    fn with_drafts(&self) -> bool {
        self.replay.is_some() || !self.spec_synthetic.is_empty()
    }

    /// What --spec-synthetic measures.
    pub(crate) fn synthetic_drafts(&self) -> Result<Vec<SyntheticDrafts>, Failure> {
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
pub(crate) struct SyntheticDrafts {
    pub(crate) rate: f64,
    pub(crate) n_gen: usize,
    /// Tokens in the context before.
    pub(crate) depth: usize,
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
    if args.kernels {
        return run_kernels(args.output);
    }
    if args.speculation.is_given() && args.replay.is_none() {
        return Err(Failure::Usage(
            "--spec, -md and --no-spec say who drafts in --replay".into(),
        ));
    }
    let tests = if args.with_drafts() {
        Vec::new()
    } else {
        tests(args)?
    };
    let mut threads = list(&args.threads.join(","), "-t")?;
    if let Some(n) = threads.iter().find(|&&n| n > MAX_THREADS as usize) {
        return Err(Failure::Usage(format!(
            "-t {n}: at most {MAX_THREADS} threads"
        )));
    }
    threads
        .iter_mut()
        .filter(|n| **n == 0)
        .for_each(|n| *n = default_threads());
    if args.model.is_empty() == args.synthetic.is_empty() {
        return Err(Failure::Usage(
            "give either -m FILE or --synthetic SHAPE:TYPE".into(),
        ));
    }
    let shapes = args
        .synthetic
        .iter()
        .map(|name| shape(name))
        .collect::<Result<Vec<_>, _>>()?;
    if let Some(path) = &args.write {
        let [(shape, file_type)] = shapes[..] else {
            return Err(Failure::Usage("--write writes one shape".into()));
        };
        args.overwrite.check(path)?;
        let mut file = synthetic_file(shape, file_type);
        args.overwrite.apply(&mut file);
        return Ok(file.write(path)?);
    }
    let mut printer = Printer::new(args.output);
    for path in &args.model {
        let name = path.file_name().map_or_else(
            || path.display().to_string(),
            |n| n.to_string_lossy().into_owned(),
        );
        bench(
            args,
            &open(Gguf::open(path)?, &args.residence, &name)?,
            &name,
            &tests,
            &threads,
            &mut printer,
        )?;
    }
    for (name, (shape, file_type)) in args.synthetic.iter().zip(shapes) {
        let gguf = match args.with_drafts() {
            true => synthetic_with_tokens(shape, file_type, &demo_metadata()?)?,
            false => synthetic(shape, file_type)?,
        };
        let model = open(gguf, &args.residence, name)?;
        bench(args, &model, name, &tests, &threads, &mut printer)?;
    }
    printer.end()
}

fn scenario_of(name: &str) -> Result<Scenario, &'static str> {
    Scenario::ALL
        .into_iter()
        .find(|scenario| scenario.name() == name)
        .ok_or("expected chat, rag or batch")
}

/// Lengths of cached prefixes whose times to the first token are measured, and of the suffixes
/// behind them.
const PREFIXES: &[usize] = &[200, 1000, 4000];
const SUFFIXES: &[usize] = &[1, 32, 200];

/// Measures the prefix cache.
fn run_scenarios(
    args: &Args,
    engine: &Engine,
    name: &str,
    options: &SessionOptions,
    printer: &mut Printer,
) -> Result<(), Failure> {
    let h = engine.model().hparams();
    let fits = |prefix: &&usize| !h.learned_positions || **prefix + 200 <= h.n_ctx_train;
    let prefixes: Vec<usize> = PREFIXES.iter().filter(fits).copied().collect();
    printer.next_table();
    for row in first_tokens(
        engine,
        (&prefixes, SUFFIXES),
        options,
        args.repetitions as usize,
    )? {
        printer.row(&first_token_cells(name, &row), || {
            first_token_json(name, &row)
        })?;
    }
    printer.next_table();
    for &kind in &args.scenario {
        let outcome = scenario(engine, kind, options)?;
        printer.row(&scenario_cells(name, &outcome), || {
            scenario_json(name, &outcome)
        })?;
    }
    Ok(())
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.2}", 1e3 * seconds)
}

fn first_token_cells(name: &str, row: &FirstToken) -> Vec<(&'static str, String)> {
    vec![
        ("model", name.to_owned()),
        ("threads", row.n_threads.to_string()),
        ("prefix", row.n_prefix.to_string()),
        ("suffix", row.n_suffix.to_string()),
        ("ms without cache", milliseconds(row.without)),
        ("ms with", milliseconds(row.with)),
        ("ms suffix alone", milliseconds(row.suffix)),
    ]
}

fn first_token_json(name: &str, row: &FirstToken) -> Value {
    json!({
        "model": name,
        "n_threads": row.n_threads,
        "n_prefix": row.n_prefix,
        "n_suffix": row.n_suffix,
        "seconds_without": row.without,
        "seconds_with": row.with,
        "seconds_suffix": row.suffix,
    })
}

fn scenario_cells(name: &str, o: &ScenarioOutcome) -> Vec<(&'static str, String)> {
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    vec![
        ("model", name.to_owned()),
        ("threads", o.n_threads.to_string()),
        ("scenario", o.scenario.name().to_owned()),
        ("requests", o.n_requests.to_string()),
        ("tokens", o.n_prompt.to_string()),
        ("reusable", o.n_reusable.to_string()),
        ("reused", percent(o.reused())),
        ("evicted", percent(o.evicted())),
        ("ms without cache", milliseconds(o.without)),
        ("ms with", milliseconds(o.with)),
    ]
}

fn scenario_json(name: &str, o: &ScenarioOutcome) -> Value {
    json!({
        "model": name,
        "n_threads": o.n_threads,
        "scenario": o.scenario.name(),
        "n_requests": o.n_requests,
        "n_prompt": o.n_prompt,
        "n_reusable": o.n_reusable,
        "n_reused": o.n_reused,
        "n_pages": o.n_pages,
        "n_evicted": o.n_evicted,
        "seconds_without": o.without,
        "seconds_with": o.with,
    })
}

fn run_kernels(format: Format) -> Result<(), Failure> {
    let levels = if forced_level().is_some() {
        vec![level()?]
    } else {
        Arch::available().collect()
    };
    let mut printer = Printer::new(format);
    let mut outcome = Ok(());
    for arch in levels {
        kernels(arch, &mut |row| {
            if outcome.is_ok() {
                outcome = printer.row(&kernel_cells(&row), || kernel_json(&row));
            }
        })?;
    }
    outcome?;
    printer.end()
}

fn kernel_cells(row: &KernelRow) -> Vec<(&'static str, String)> {
    let rate = |amount: u64| match amount {
        0 => String::new(),
        n => format!("{:.1}", n as f64 / row.seconds / 1e9),
    };
    vec![
        ("level", row.level.to_owned()),
        ("kernel", row.kernel.clone()),
        ("µs", format!("{:.2}", row.seconds * 1e6)),
        ("GB/s", rate(row.bytes)),
        ("GFLOP/s", rate(row.flops)),
        ("% of bound", format!("{:.0} %", 100.0 * row.share())),
    ]
}

fn kernel_json(row: &KernelRow) -> Value {
    json!({
        "level": row.level,
        "kernel": row.kernel,
        "seconds": row.seconds,
        "bytes": row.bytes,
        "flops": row.flops,
        "bound_seconds": row.bound,
        "share": row.share(),
    })
}

fn bench(
    args: &Args,
    model: &Model,
    name: &str,
    tests: &[Test],
    threads: &[usize],
    printer: &mut Printer,
) -> Result<(), Failure> {
    let mut options = SessionOptions {
        n_batch: args.ubatch_size.min(args.batch_size) as usize,
        exact: args.exact,
        ..Default::default()
    };
    args.cache_type.apply(KvType::F16, &mut options);
    if args.with_drafts() {
        return crate::bench::replay::bench(args, model, name, threads, &options, printer);
    }
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
        let n_threads_asked = NonZeroUsize::new(n_threads);
        let engine = engine(
            model,
            n_threads_asked,
            !adapters.is_empty(),
            &options,
            EngineOptions::default(),
        )?;
        if !args.scenario.is_empty() {
            run_scenarios(args, &engine, name, &options, printer)?;
            continue;
        }
        let no_threads = |error: std::io::Error| {
            Failure::Work(format!("cannot start {n_threads} threads: {error}"))
        };
        let bandwidth = read_bandwidth(n_threads).map_err(no_threads)?;
        let (arch, main_type) = (model.arch(), model.main_type());
        let (element, products) = arch.gemm_element(main_type);
        let peak = arithmetic_peak(arch, element, n_threads).map_err(no_threads)? / products as f64;
        let peak_of_bytes =
            arithmetic_peak(arch, PanelElement::I8, n_threads).map_err(no_threads)?;
        for &test in tests {
            // Of those that are made up a single session has one.
            let n_used = if test.rows > 0 {
                adapters.len()
            } else {
                adapters.len().min(n_given + 1)
            };
            let adapters = &adapters[..n_used];
            let (mut outcome, mut peer) = (None::<Outcome>, Vec::new());
            match &args.vs {
                None if adapters.is_empty() => {
                    outcome = Some(measure(
                        &engine,
                        &[],
                        test,
                        &options,
                        args.repetitions as usize,
                    )?);
                }
                vs => {
                    for _ in 0..args.repetitions {
                        let one = measure(&engine, adapters, test, &options, 1)?;
                        match &mut outcome {
                            Some(all) => {
                                all.rates.extend(one.rates);
                                all.first.extend(one.first);
                                all.next.extend(one.next);
                            }
                            None => outcome = Some(one),
                        }
                        peer.push(match vs {
                            Some(command) => peer_rate(command, test, n_threads)?,
                            None => measure(&engine, &[], test, &options, 1)?.rates[0],
                        });
                    }
                }
            }
            let Some(outcome) = outcome else { continue };
            // A prompt reads each weight once per batch: there the arithmetic is the limit.
            let reads = test.n_prompt == 0;
            let read_share =
                reads.then(|| outcome.median() * outcome.bytes_per_token as f64 / bandwidth);
            let flops = (!reads || test.n_gen == 0 || test.rows > 0).then(|| {
                let rate = outcome.median() * outcome.flops_per_token as f64;
                // Activations of 16 bits are two of 8.
                (
                    rate,
                    rate / if test.rows > 0 {
                        peak_of_bytes / 2.0
                    } else {
                        peak
                    },
                )
            });
            let bytes = model.gguf().tensors().iter().map(|t| t.n_bytes).sum();
            let (n_params, level) = (model.n_params(), arch.name());
            let row = Row {
                model: name.to_owned(),
                bytes,
                n_params,
                level,
                outcome,
                read_share,
                flops,
                peer,
            };
            printer.row(&row.cells(), || row.json())?;
        }
        if !args.model.is_empty() {
            measured::keep(&engine, name, Some(bandwidth));
        }
        if printer.format == Format::Md {
            note(format_args!(
                "{n_threads} threads: read bandwidth {:.1} GB/s, peak of {element:?} products {:.0} GFLOP/s; weights \
                 read from {}",
                bandwidth / 1e9,
                peak / 1e9,
                match model.gguf().resident_bytes() {
                    0 => "the mapped file or plain memory".to_owned(),
                    n => format!("a copy in huge pages, {}", size(n)),
                }
            ));
        }
    }
    Ok(())
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

pub(crate) fn shape(name: &str) -> Result<(Shape, FileType), Failure> {
    let unknown = |what: &str, known: String| {
        Failure::Usage(format!("--synthetic {name}: {what}, known are {known}"))
    };
    let (shape, file_type) = name.split_once(':').unwrap_or((name, "Q4_K_M"));
    let shapes = Shape::ALL
        .iter()
        .map(|s| s.name)
        .collect::<Vec<_>>()
        .join(", ");
    let types = FileType::ALL
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    Ok((
        Shape::from_name(shape).ok_or_else(|| unknown("no such shape", shapes))?,
        FileType::from_name(file_type).ok_or_else(|| unknown("no such type", types))?,
    ))
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

/// Numbers and ranges: `1,2`, `1-4`, `128-512+128`, `128-1024*2`.
fn list(text: &str, flag: &str) -> Result<Vec<usize>, Failure> {
    /// Longer lists, and larger numbers, are slips of the finger.
    const MAX: usize = 1 << 20;
    let wrong = || {
        Failure::Usage(format!(
            "{flag} {text}: expected numbers or ranges such as 1,2 or 128-1024*2"
        ))
    };
    let number = |s: &str| {
        s.trim()
            .parse::<usize>()
            .ok()
            .filter(|&n| n <= MAX)
            .ok_or_else(wrong)
    };
    let mut all = Vec::new();
    for part in text.split(',') {
        let Some((first, rest)) = part.split_once('-') else {
            all.push(number(part)?);
            continue;
        };
        let (last, step, factor) = match (rest.split_once('+'), rest.split_once('*')) {
            (Some((last, step)), _) => (last, number(step)?, 1),
            (None, Some((last, factor))) => (last, 0, number(factor)?),
            (None, None) => (rest, 1, 1),
        };
        let (mut n, last) = (number(first)?, number(last)?);
        if n > last {
            return Err(Failure::Usage(format!(
                "{flag} {text}: {n}-{last} is a range backwards, and empty"
            )));
        }
        while n <= last && all.len() < 1000 {
            all.push(n);
            let next = n * factor + step;
            if next <= n {
                return Err(wrong());
            }
            n = next;
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::list;

    #[test]
    fn lists_and_ranges() {
        let list = |text| list(text, "-p").ok();
        assert_eq!(list("512"), Some(vec![512]));
        assert_eq!(list("1,2,8"), Some(vec![1, 2, 8]));
        assert_eq!(list("1-4"), Some(vec![1, 2, 3, 4]));
        assert_eq!(list("128-512+128"), Some(vec![128, 256, 384, 512]));
        assert_eq!(list("128-1024*2,7"), Some(vec![128, 256, 512, 1024, 7]));
        for wrong in [
            "", "a", "1-", "-1", "1-9*1", "1-9*0", "1-9+0", "0-9*2", "99999999", "64-16",
        ] {
            assert_eq!(list(wrong), None, "{wrong}");
        }
    }
}
