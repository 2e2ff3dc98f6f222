//! `ruvllm bench learning --behaviour`: what is known of facts that were taught, by questions.

use crate::io::{Failure, Progress, note, print, print_json};
use ruvllm::Model;
use ruvllm_learn::bench::behaviour::{
    ArmReport, BehaviourArm, BehaviourOptions, BehaviourReport, Rate, behaviour,
};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::time::{Duration, Instant};

/// Facts with `--quick`.
const QUICK: usize = 24;
/// Questions after which the rest is estimated.
const SAMPLE: usize = 8;

#[derive(clap::Args)]
pub(crate) struct BehaviourArgs {
    /// Teach invented facts instead of a text, and ask for them in new sessions
    #[arg(long, conflicts_with_all = ["file", "svg"])]
    pub(crate) behaviour: bool,
    /// Facts to teach, and as many further ones afterwards [default: 100, with --quick 24]
    #[arg(long, value_name = "N", requires = "behaviour")]
    facts: Option<usize>,
    /// Ways of being taught, separated by commas: nothing, context, retrieval, words, adapter,
    /// both, training, consolidation [default: the first six]
    #[arg(long, value_name = "LIST", value_delimiter = ',', requires = "behaviour", value_parser = arm)]
    arms: Vec<BehaviourArm>,
    /// Seed of facts and questions
    #[arg(long, value_name = "N", default_value_t = BehaviourOptions::default().seed, requires = "behaviour")]
    facts_seed: u64,
    /// How often consolidation reads its questions
    #[arg(long, value_name = "N", default_value_t = BehaviourOptions::default().epochs, requires = "behaviour")]
    epochs: f32,
}

fn arm(name: &str) -> Result<BehaviourArm, String> {
    let mut all = BehaviourArm::ALL.iter();
    all.find(|(known, _)| *known == name)
        .map(|(_, arm)| *arm)
        .ok_or_else(|| {
            let names: Vec<&str> = BehaviourArm::ALL.iter().map(|(name, _)| *name).collect();
            format!("there is no way {name:?}; there are {}", names.join(", "))
        })
}

/// Measures `model` with the options that are not its own; `quick` teaches fewer facts.
pub(crate) fn run(
    args: &BehaviourArgs,
    model: &Model,
    control: &str,
    options: BehaviourOptions,
    quick: bool,
    json: bool,
) -> Result<(), Failure> {
    let options = BehaviourOptions {
        n_facts: match (args.facts, quick) {
            (Some(n), _) => n,
            (None, true) => QUICK,
            (None, false) => options.n_facts,
        },
        seed: args.facts_seed,
        arms: match args.arms.is_empty() {
            true => options.arms,
            false => args.arms.clone(),
        },
        epochs: args.epochs,
        ..options
    };
    let total = options.n_questions();
    let bar = Progress::new("asking", total as u64);
    let (mut latest, mut arm_started) = (None, (Instant::now(), 0));
    let report = behaviour(model, control, &options, &mut |arm, asked| {
        bar.set(asked as u64);
        if latest != Some(arm) {
            note(format!(
                "{}: teaching {} facts",
                arm.name(),
                options.n_facts
            ));
            latest = Some(arm);
            arm_started = (Instant::now(), asked);
        }
        let (since, first) = arm_started;
        // The first question of a way waits until it was taught.
        if asked == first {
            arm_started.0 = Instant::now();
        } else if asked == first + SAMPLE {
            let each = since.elapsed() / SAMPLE as u32;
            note(estimate(arm, each, total - asked));
        }
    })?;
    drop(bar);
    match json {
        true => print_json(&to_json(&report)),
        false => print(table(&report)),
    }
}

/// What the remaining questions will take.
fn estimate(arm: BehaviourArm, each: Duration, n: usize) -> String {
    let rest = each * n as u32;
    format!(
        "{}: {} ms a question, {n} questions left: about {} s, and teaching",
        arm.name(),
        each.as_millis(),
        rest.as_secs()
    )
}

/// A rate with its interval, in per cent.
fn percent(rate: Rate) -> String {
    let (low, high) = rate.interval();
    format!(
        "{:.0} ({:.0} to {:.0})",
        100.0 * rate.value(),
        100.0 * low,
        100.0 * high
    )
}

fn table(report: &BehaviourReport) -> String {
    let mut out = String::new();
    let kinds = report.arms.first().map_or(&[][..], |arm| &arm.scores);
    let tables = [
        ("said: the most likely continuation has the answer, %", 0),
        (
            "chosen: the answer is the most likely of four, % (25 by chance)",
            1,
        ),
        ("ln p of the answer, nats", 2),
    ];
    for (title, which) in tables {
        let _ = write!(out, "{title}\n\n| |");
        kinds.iter().for_each(|score| {
            let _ = write!(out, " {} |", score.kind);
        });
        let _ = writeln!(out, "\n|---|{}", "---|".repeat(kinds.len()));
        for arm in &report.arms {
            let _ = write!(out, "| {} |", arm.arm.name());
            for score in &arm.scores {
                let cell = match which {
                    0 => percent(score.said),
                    1 => percent(score.chosen),
                    _ => format!("{:.1}", score.log_probability),
                };
                let _ = write!(out, " {cell} |");
            }
            out.push('\n');
        }
        out.push('\n');
    }
    out.push_str(
        "| | locality, % | control loss, % | found, % | tokens of notes | ms of notes | s to teach | bytes kept |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    for arm in &report.arms {
        let notes = arm.found.map_or(" | |".to_owned(), |found| {
            format!(
                "{} | {:.0} | {:.2}",
                percent(found),
                arm.note_tokens,
                arm.note_ms
            )
        });
        let _ = writeln!(
            out,
            "| {} | {} | {:+.2} | {notes} | {:.1} | {} |",
            arm.arm.name(),
            percent(arm.locality),
            // Zero has no sign.
            arm.control_percent + 0.0,
            arm.teach_seconds,
            arm.bytes
        );
    }
    let _ = writeln!(
        out,
        "\n{} facts, then as many further ones; context {}; control text {:.4} nats/token with the model alone; \
         {:.0} ms to the first token after 512.\nIntervals: Wilson, 95 %. Recall, conflict and retention are cloze \
         questions; conflict: of what was corrected; retention: after the further facts.",
        report.n_facts, report.n_ctx, report.control_loss, report.first_token_ms
    );
    out
}

fn to_json(report: &BehaviourReport) -> Value {
    let rate = |rate: Rate| {
        let (low, high) = rate.interval();
        json!({ "right": rate.right, "n": rate.n, "value": rate.value(), "low": low, "high": high })
    };
    let arm = |arm: &ArmReport| {
        let scores: Map<String, Value> = arm
            .scores
            .iter()
            .map(|score| {
                let value = json!({
                    "said": rate(score.said),
                    "chosen": rate(score.chosen),
                    "log_probability": score.log_probability,
                });
                (score.kind.to_owned(), value)
            })
            .collect();
        json!({
            "arm": arm.arm.name(),
            "scores": scores,
            "locality": rate(arm.locality),
            "control_loss_percent": arm.control_percent,
            "notes_found": arm.found.map(rate),
            "note_tokens": arm.note_tokens,
            "note_ms": arm.note_ms,
            "teach_seconds": arm.teach_seconds,
            "bytes": arm.bytes,
        })
    };
    json!({
        "n_facts": report.n_facts,
        "n_ctx": report.n_ctx,
        "control_nats_per_token": report.control_loss,
        "first_token_ms": report.first_token_ms,
        "arms": report.arms.iter().map(arm).collect::<Vec<_>>(),
    })
}
