//! `ruvllm bench learning`: what learning while running is worth on a text, measured so that
//! nothing is learnt before it was predicted.

use super::behaviour::{self, BehaviourArgs};
use crate::flags::{ModelArgs, PlacementArgs, ThreadsArg, no_tokenizer};
use crate::io::plot::{Mark, Plot, Series};
use crate::io::{Failure, file_or_pipe, note, print, print_json, read_text};
use ruvllm_learn::LearnerOptions;
use ruvllm_learn::bench::behaviour::BehaviourOptions;
use ruvllm_learn::bench::{Contender, Estimate, LearningOptions, LearningReport, learning};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  ruvllm bench learning -f letters.txt --control manual.txt        the built-in demo model
  ruvllm bench learning -m model.gguf -f log.txt --control manual.txt --svg gain.svg
  ruvllm bench learning -m model.gguf -f log.txt --control manual.txt --json > report.json
  ruvllm bench learning -m model.gguf --behaviour --control manual.txt --quick

Every chunk of the stream is predicted first and learnt then. The first half of the control text tells \
the learner what not to forget, the second half is what forgetting is measured on. Intervals are those \
of a bootstrap over chunks, 95 %. Rows named `control` learn from something that cannot help. Beyond \
temperature: against the base, both at the temperatures that are best in hindsight. Beyond words: against \
the same that learnt the stream's words in another order.

With --behaviour invented facts are taught in conversations, and asked for in new sessions: as a cloze, \
paraphrased, in reverse, and in a task. Each question is judged by its most likely continuation and by the \
probabilities of the answer and of three wrong ones.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text to predict and to learn from; - is stdin
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Text of the kind that must not be forgotten
    #[arg(long, value_name = "FILE")]
    control: PathBuf,
    /// Tokens of context, at least 8 [default: a quarter of what the model was trained for, at
    /// most 1024]
    #[arg(
        short,
        long,
        value_name = "N",
        default_value_t = 0,
        hide_default_value = true
    )]
    ctx_size: usize,
    #[command(flatten)]
    threads: ThreadsArg,
    /// Most mean KL divergence over control text, in nats [default: 0.0015, of consolidation 0.2]
    #[arg(long, value_name = "NATS")]
    max_divergence: Option<f64>,
    /// Step of backpropagation into the last quarter of the layers, relative to the norm of a
    /// matrix
    #[arg(long, value_name = "RATE", default_value_t = LearningOptions::default().deep_rate)]
    deep_rate: f32,
    /// Leave out the negative controls of backpropagation, which take as long as all the rest; with
    /// --behaviour teach fewer facts
    #[arg(long)]
    quick: bool,
    /// Print a JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// File for a plot of the running gain
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    behaviour: BehaviourArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if args.behaviour.behaviour {
        let control = read_text(&args.control)?;
        let model = args.model.open(&args.placement)?;
        model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
        let usual = BehaviourOptions::default();
        let options = BehaviourOptions {
            n_ctx: args.ctx_size,
            n_threads: args.threads.number(),
            max_divergence: args.max_divergence.unwrap_or(usual.max_divergence),
            ..usual
        };
        let (own, quick, json) = (&args.behaviour, args.quick, args.json);
        return behaviour::run(own, &model, &control, options, quick, json);
    }
    let path = file_or_pipe(args.file.as_ref(), "-f FILE")?;
    let (stream, control) = (read_text(&path)?, read_text(&args.control)?);
    let model = args.model.open(&args.placement)?;
    let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
    let tokens = |text: &str| tokenizer.encode(text, true, false);
    let usual = LearnerOptions::default();
    let options = LearningOptions {
        n_ctx: args.ctx_size,
        n_threads: args.threads.number(),
        learner: LearnerOptions {
            max_divergence: args.max_divergence.unwrap_or(usual.max_divergence),
            ..usual
        },
        deep_rate: args.deep_rate,
        deep_controls: !args.quick,
        ..Default::default()
    };
    let report = learning(&model, &tokens(&stream), &tokens(&control), &options)?;
    if let Some(path) = &args.svg {
        plot(&report).write(path)?;
        note(format!("wrote {}", path.display()));
    }
    if args.json {
        print_json(&to_json(&report))
    } else {
        print(table(&report))
    }
}

/// A gain in nats as a change of perplexity in per cent.
fn percent(nats: f64) -> f64 {
    // Zero has no sign.
    100.0 * nats.exp_m1() + 0.0
}

/// A gain as a change of perplexity, with its interval.
fn change(gain: Estimate) -> String {
    let Estimate { value, low, high } = gain;
    format!(
        "{:+.1} % ({:+.1} to {:+.1})",
        percent(-value),
        percent(-high),
        percent(-low)
    )
}

fn table(report: &LearningReport) -> String {
    let mut out = String::from(
        "| | nats/token | perplexity | against base | beyond temperature | beyond words | ms/update | ms to take effect | \
         longest | control perplexity | KL | top-1 |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for c in &report.contenders {
        let update = match (c.update_ms, c.settle_ms) {
            (0.0, _) => " | | ".to_owned(),
            (ms, 0.0) => format!("{ms:.0} | | {:.0}", c.longest_ms),
            (ms, settle) => format!("{ms:.2} | {settle:.2} | {:.1}", c.longest_ms),
        };
        let beyond =
            [c.beyond_temperature, c.beyond_words].map(|e| e.map_or(String::new(), change));
        let forgetting = c.forgetting.map_or(" | | ".to_owned(), |f| {
            let more = f.loss;
            format!(
                "{:+.2} % ({:+.2} to {:+.2}) | {:.4} | {:.1} %",
                percent(more.value),
                percent(more.low),
                percent(more.high),
                f.divergence,
                100.0 * f.agreement
            )
        });
        let _ = writeln!(
            out,
            "| {} | {:.4} | {:.1} | {} | {} | {} | {update} | {forgetting} |",
            c.name,
            c.loss,
            c.loss.exp(),
            change(c.gain),
            beyond[0],
            beyond[1],
        );
    }
    let LearningReport {
        n_ctx,
        n_tokens,
        n_chunk,
        control_loss,
        truncation,
        truncation_bound,
        deep_cost,
        ..
    } = report;
    let _ = writeln!(
        out,
        "\n{n_tokens} tokens, learnt from {n_chunk} at a time, context {n_ctx}; control text {control_loss:.4} \
         nats/token with the base;\nreading a chunk and learning it by backpropagation costs {deep_cost:.1} prefills; \
         truncation leaves out {:.0} % of the head adapter's gradient,\nby length, where the exact one was computed \
         (the bound that is known without says {:.0} %)",
        100.0 * truncation,
        100.0 * truncation_bound,
    );
    out
}

fn to_json(report: &LearningReport) -> Value {
    let estimate = |e: Estimate| json!({ "value": e.value, "low": e.low, "high": e.high });
    let contender = |c: &Contender| {
        json!({
            "name": c.name,
            "negative_control": c.negative,
            "nats_per_token": c.loss,
            "gain_nats_per_token": estimate(c.gain),
            "gain_beyond_temperature": c.beyond_temperature.map(estimate),
            "gain_beyond_words": c.beyond_words.map(estimate),
            "ms_per_update": c.update_ms,
            "ms_to_take_effect": c.settle_ms,
            "ms_of_the_longest_update": c.longest_ms,
            "forgetting": c.forgetting.map(|f| json!({
                "nats_per_token": estimate(f.loss),
                "divergence": f.divergence,
                "top_1_agreement": f.agreement,
            })),
            "running_gain_nats": c.running_gain,
        })
    };
    json!({
        "n_ctx": report.n_ctx,
        "n_tokens": report.n_tokens,
        "n_chunk": report.n_chunk,
        "base_nats_per_token": report.base_loss,
        "control_nats_per_token": report.control_loss,
        "truncation": report.truncation,
        "truncation_bound": report.truncation_bound,
        "backpropagation_cost_in_prefills": report.deep_cost,
        "contenders": report.contenders.iter().map(contender).collect::<Vec<_>>(),
    })
}

/// The running gain of every contender over the base; what fails spectacularly does not hide the rest.
fn plot(report: &LearningReport) -> Plot {
    let gains = report.contenders.iter().flat_map(|c| &c.running_gain);
    let most = gains.copied().fold(1.0, f64::max);
    let per_point = |c: &Contender| report.n_tokens as f64 / c.running_gain.len().max(2) as f64;
    let series = report.contenders.iter().map(|c| Series {
        name: c.name.to_string(),
        mark: if c.negative { Mark::Dashes } else { Mark::Line },
        points: c
            .running_gain
            .iter()
            .enumerate()
            .map(|(i, &gain)| ((i + 1) as f64 * per_point(c), gain.max(-most)))
            .collect(),
        labels: Vec::new(),
    });
    Plot {
        title: "what learning gains over the base model".into(),
        x_label: "tokens of the stream".into(),
        y_label: "nats gained in total".into(),
        is_log: false,
        series: series.collect(),
    }
}
