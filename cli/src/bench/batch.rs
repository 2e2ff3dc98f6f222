//! `ruvllm bench batch`: speed with many sequences side by side, as llama-batched-bench measures
//! it.

use super::models::shape;
use crate::flags::{
    CacheTypeArgs, ModelArgs, PlacementArgs, ThreadsArg, demo_metadata, engine, open,
};
use crate::io::{Failure, percentiles, print, slashes};
use clap::{ValueEnum, value_parser};
use ruvllm::KvType;
use ruvllm::compute::TokenKind;
use ruvllm::engine::{EngineOptions, Outputs, Sequence, Slot};
use ruvllm::scheduler::{Request, Schedule, ScheduleOptions, Stream};
use ruvllm::{CancelToken, Engine, SessionOptions};
use ruvllm::{Sampler, SamplerOptions};
use ruvllm_benches::synthetic_with_tokens;
use serde_json::json;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  ruvllm bench batch -m model.gguf -npp 128,512 -ntg 64 -npl 1,2,4,8,16
  ruvllm bench batch -m model.gguf -npp 2048 -ntg 128 -npl 8 -pps   one prompt, shared by all
  ruvllm bench batch -m model.gguf -npp 128 -npl 1,4 --arriving 4096
                              what a prompt of 4096 tokens costs those that generate

PP: tokens of each prompt, TG: tokens generated for each, B: sequences, N_KV: positions in the cache, T: seconds, S: \
tokens per second of all sequences together. All prompts are computed first, in passes of -ub rows; then each pass \
generates one token of every sequence. first: time from the beginning to the end of a sequence's prompt; next: time \
between two tokens of a sequence; in milliseconds, median, 95th and 99th percentile.

With --arriving, the scheduler computes B sequences, and after -ntg tokens of each another prompt comes. before, during: \
times between two tokens of a sequence; p99: that of during over the median of before; prompt: its speed as a share of \
that alone.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Made-up weights of a shape instead of a file, as `bench` has them, such as llama-1b:Q4_K_M
    #[arg(long, value_name = "SHAPE:TYPE", conflicts_with = "model")]
    synthetic: Option<String>,
    /// Lengths of prompts [short: -npp]
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "128", value_parser = value_parser!(u32).range(1..1 << 20))]
    n_prompt: Vec<u32>,
    /// Numbers of tokens to generate [short: -ntg]
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "32", value_parser = value_parser!(u32).range(1..1 << 20))]
    n_gen: Vec<u32>,
    /// Numbers of sequences side by side [short: -npl]
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,4,8", value_parser = value_parser!(u32).range(1..=4096))]
    n_sequences: Vec<u32>,
    /// All sequences have one prompt, computed once [short: -pps]
    #[arg(long)]
    prompt_shared: bool,
    /// Instead, let the scheduler compute -npl sequences, to which a prompt of so many tokens
    /// comes
    #[arg(long, value_name = "N", conflicts_with = "prompt_shared", value_parser = value_parser!(u32).range(1..1 << 20))]
    arriving: Option<u32>,
    /// Most rows of a pass over prompts [short: -ub]
    #[arg(long, value_name = "N", default_value_t = 512, env = "LLAMA_ARG_UBATCH",
          value_parser = value_parser!(u32).range(1..))]
    ubatch_size: u32,
    #[command(flatten)]
    threads: ThreadsArg,
    /// A table, or a JSON object per row
    #[arg(long, value_name = "FORMAT", default_value = "md")]
    output_format: Format,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    cache_type: CacheTypeArgs,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Format {
    Md,
    Jsonl,
}

/// What a row of the table measures.
#[derive(Clone, Copy)]
struct Test {
    pp: usize,
    tg: usize,
    pl: usize,
}

/// Times of a test: when the prompt of each sequence was computed, and what each pass of generation
/// took.
struct Times {
    first: Vec<Duration>,
    next: Vec<Duration>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let model = match &args.synthetic {
        Some(name) => {
            let (shape, file_type) = shape(name)?;
            open(
                synthetic_with_tokens(&shape, file_type, &demo_metadata()?)?,
                &args.placement,
                name,
            )?
        }
        None => args.model.open(&args.placement)?,
    };
    let mut options = SessionOptions::default();
    args.cache_type.apply(KvType::default(), &mut options);
    let engine = engine(
        &model,
        args.threads.number(),
        false,
        &options,
        EngineOptions::default(),
    )?;
    if let Some(n) = args.arriving {
        return run_arriving(args, &engine, &options, n as usize);
    }
    // So that the first row pays for no page fault.
    measure(
        args,
        &engine,
        &options,
        Test {
            pp: 16,
            tg: 4,
            pl: 1,
        },
    )?;
    if args.output_format == Format::Md {
        print(
            "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |     first ms p50/p95/p99 |      next ms p50/p95/p99 |\n\
             |-------|--------|------|--------|----------|----------|----------|----------|----------|----------|--------------------------|--------------------------|\n",
        )?;
    }
    for &pp in &args.n_prompt {
        for &tg in &args.n_gen {
            for &pl in &args.n_sequences {
                let test = Test {
                    pp: pp as usize,
                    tg: tg as usize,
                    pl: pl as usize,
                };
                let times = measure(args, &engine, &options, test)?;
                print(row(args, test, times))?;
            }
        }
    }
    Ok(())
}

fn measure(
    args: &Args,
    engine: &Engine,
    options: &SessionOptions,
    test: Test,
) -> Result<Times, Failure> {
    let Test { pp, tg, pl } = test;
    let options = SessionOptions {
        n_ctx: Some(pp + tg),
        ..options.clone()
    };
    let n_vocab = engine.model().hparams().n_vocab;
    // The same in every run, different for every sequence.
    let tokens = |seq: usize, n: usize| -> Vec<u32> {
        (0..n)
            .map(|i| ((i * 7919 + seq * 104_729 + i * i % 31) % n_vocab) as u32)
            .collect()
    };
    let (mut outputs, cancel, n_batch) = (
        Outputs::default(),
        CancelToken::default(),
        args.ubatch_size as usize,
    );
    let n_prompts = if args.prompt_shared { 1 } else { pl };
    let mut sequences: Vec<Sequence> = (0..n_prompts)
        .map(|_| engine.sequence(&options))
        .collect::<Result<_, _>>()?;
    let prompts: Vec<Vec<u32>> = (0..n_prompts).map(|seq| tokens(seq, pp)).collect();
    let (start, mut first) = (Instant::now(), Vec::new());
    while first.len() < n_prompts {
        let mut room = n_batch;
        let mut slots = Vec::new();
        for (seq, prompt) in sequences.iter_mut().zip(&prompts).skip(first.len()) {
            let rest = &prompt[seq.position()..];
            let n = rest.len().min(room);
            room -= n;
            if n > 0 {
                slots.push(
                    Slot::new(seq, &rest[..n], TokenKind::Prompt)
                        .outputs_from(n - usize::from(n == rest.len())),
                );
            }
        }
        engine.step(&mut slots, &mut outputs, &cancel)?;
        drop(slots);
        let n_done = sequences
            .iter()
            .take_while(|seq| seq.position() == pp)
            .count();
        first.resize(n_done, start.elapsed());
    }
    while sequences.len() < pl {
        let fork = sequences[0].fork()?;
        sequences.push(fork);
        first.push(first[0]);
    }
    let mut next = Vec::with_capacity(tg);
    let generated: Vec<Vec<u32>> = (0..pl).map(|seq| tokens(seq + 1, tg)).collect();
    for i in 0..tg {
        let start = Instant::now();
        let slots = sequences.iter_mut().zip(&generated);
        let mut slots: Vec<_> = slots
            .map(|(seq, tokens)| Slot::new(seq, &tokens[i..=i], TokenKind::Generated))
            .collect();
        engine.step(&mut slots, &mut outputs, &cancel)?;
        next.push(start.elapsed());
    }
    Ok(Times { first, next })
}

/// What a prompt of `n` tokens costs those that generate, for each number of these.
fn run_arriving(
    args: &Args,
    engine: &Engine,
    options: &SessionOptions,
    n: usize,
) -> Result<(), Failure> {
    if args.output_format == Format::Md {
        print(
            "|    PP |    B | arriving |     before ms p50/p95/p99 |     during ms p50/p95/p99 |   p99 | prompt |\n\
             |-------|------|----------|---------------------------|---------------------------|-------|--------|\n",
        )?;
    }
    for &pp in &args.n_prompt {
        for &n_gen in &args.n_gen {
            for &pl in &args.n_sequences {
                let test = Test {
                    pp: pp as usize,
                    tg: n_gen as usize,
                    pl: pl as usize,
                };
                let Arrived {
                    alone,
                    beside,
                    before,
                    during,
                } = arrive(args, engine, options, test, n)?;
                let (before, during) = (percentiles(&before), percentiles(&during));
                let share = alone.as_secs_f64() / beside.as_secs_f64();
                let ratio = during[2] / before[0];
                print(match args.output_format {
                    Format::Md => {
                        let (before, during) = (slashes(&before), slashes(&during));
                        format!(
                            "|{pp:6} | {pl:4} | {n:8} | {before:>25} | {during:>25} | {ratio:5.2} | {share:6.2} |\n"
                        )
                    }
                    Format::Jsonl => {
                        let row = json!({
                            "pp": pp, "pl": pl, "arriving": n, "before_ms_p50_p95_p99": before,
                            "during_ms_p50_p95_p99": during, "p99_ratio": ratio, "prompt_share": share,
                        });
                        format!("{row}\n")
                    }
                })?;
            }
        }
    }
    Ok(())
}

/// Times of a prompt that comes to sequences that generate.
struct Arrived {
    /// Until its first token, alone and beside them.
    alone: Duration,
    beside: Duration,
    /// Between two tokens of a sequence, before it came and until its first token.
    before: Vec<Duration>,
    during: Vec<Duration>,
}

fn arrive(
    args: &Args,
    engine: &Engine,
    options: &SessionOptions,
    Test { pp, tg, pl }: Test,
    n: usize,
) -> Result<Arrived, Failure> {
    let tokenizer = engine
        .model()
        .tokenizer()
        .ok_or_else(|| Failure::Work("the model has no tokenizer".into()))?;
    let n_vocab = tokenizer.n_vocab();
    // Those that generate take part in every step, at worst one for each of some pieces of a layer
    // of 64 rows of a prompt.
    let n_steps = (n.div_ceil(64) * 8 * engine.model().hparams().n_layer).max(n);
    let n_ctx = pp * (pl + 1) + tg + n_steps + 8;
    let session = SessionOptions {
        n_ctx: Some(n_ctx),
        n_batch: args.ubatch_size as usize,
        ..options.clone()
    };
    let options = ScheduleOptions {
        session,
        n_parallel: pl + 1,
        n_pieces: usize::MAX,
        ..Default::default()
    };
    let mut schedule = Schedule::new(engine, &options)?;
    let ends = (0..n_vocab as u32)
        .filter(|&token| tokenizer.is_eog(token))
        .map(|token| (token, f32::NEG_INFINITY));
    let sampler = Sampler::new(SamplerOptions {
        temperature: 0.0,
        logit_bias: ends.into_iter().collect(),
        ..Default::default()
    })?;
    let request = |seq: usize, n: usize| {
        Request::new(
            (0..n)
                .map(|i| ((i * 7919 + seq * 104_729) % n_vocab) as u32)
                .collect(),
            sampler.clone(),
        )
    };
    let has_begun = |stream: &mut Stream| {
        stream
            .poll_next(&mut Context::from_waker(Waker::noop()))
            .is_ready()
    };
    let until_done =
        |schedule: &mut Schedule, request: Request| -> Result<(Duration, Vec<Duration>), Failure> {
            let (start, mut times) = (Instant::now(), Vec::new());
            let mut stream = schedule.submit(request.max_tokens(1))?;
            while !has_begun(&mut stream) {
                let pass = Instant::now();
                schedule.step();
                times.push(pass.elapsed());
            }
            Ok((start.elapsed(), times))
        };
    let (alone, _) = until_done(&mut schedule, request(pl, n))?;
    let mut streams = (0..pl)
        .map(|seq| schedule.submit(request(seq, pp)))
        .collect::<Result<Vec<_>, _>>()?;
    while !streams.iter_mut().all(has_begun) {
        schedule.step();
    }
    let before = (0..tg).map(|_| {
        let pass = Instant::now();
        schedule.step();
        pass.elapsed()
    });
    let before = before.collect();
    let (beside, during) = until_done(&mut schedule, request(pl + 1, n))?;
    drop(streams);
    Ok(Arrived {
        alone,
        beside,
        before,
        during,
    })
}

fn row(args: &Args, test: Test, times: Times) -> String {
    let Test { pp, tg, pl } = test;
    let n_prompts = if args.prompt_shared { 1 } else { pl };
    let t_pp = times.first.iter().max().map_or(0.0, Duration::as_secs_f64);
    let t_tg = times.next.iter().sum::<Duration>().as_secs_f64();
    let (n_pp, n_tg) = (n_prompts * pp, pl * tg);
    let n_kv = n_pp + n_tg;
    let t = t_pp + t_tg;
    let [s_pp, s_tg, s] = [n_pp as f64 / t_pp, n_tg as f64 / t_tg, n_kv as f64 / t];
    let (first, next) = (percentiles(&times.first), percentiles(&times.next));
    match args.output_format {
        Format::Md => {
            let [first, next] = [first, next].map(|times| slashes(&times));
            format!(
                "|{pp:6} | {tg:6} | {pl:4} | {n_kv:6} | {t_pp:8.3} | {s_pp:8.2} | {t_tg:8.3} | {s_tg:8.2} | {t:8.3} | {s:8.2} | {first:>24} | {next:>24} |\n"
            )
        }
        Format::Jsonl => {
            let row = json!({
                "pp": pp, "tg": tg, "pl": pl, "n_kv": n_kv, "t_pp": t_pp, "speed_pp": s_pp, "t_tg": t_tg,
                "speed_tg": s_tg, "t": t, "speed": s, "first_ms_p50_p95_p99": first, "next_ms_p50_p95_p99": next,
            });
            format!("{row}\n")
        }
    }
}
