//! `ruvllm memory`: what a folder remembers, seen and changed by its owner.

use crate::flags::{
    ModelArgs, PlacementArgs, ThreadsArg, entry_json, entry_line, memory_extent, memory_known,
    no_tokenizer, remember, verdict, widest_memory,
};
use crate::io::{
    Failure, Progress, check_overwrite, note, on_interrupt, print, print_json, read_text,
};
use clap::Subcommand;
use ruvllm::engine::EngineOptions;
use ruvllm::{Engine, Model};
use ruvllm_learn::memory::{
    ConsolidationOptions, ConsolidationProgress, ConsolidationReport, Memory, NewEntry,
    QuestionAnswer, QuestionOptions, Stage, Verdict,
};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const EXAMPLES: &str = "\
Examples:
  ruvllm memory add mine 'The gauge at Ossen Weir is read by Talvo Renning.'
  ruvllm memory add mine --correction 'It is read by Mirela Ostrand now, not by Talvo Renning.'
  ruvllm memory search mine 'Who reads the gauge?'
  ruvllm memory list mine
  ruvllm memory edit mine 1 'The gauge at Ossen Weir is read daily.' --verdict partial
  ruvllm memory export mine -o memory.jsonl
  ruvllm memory forget mine 1
  ruvllm memory consolidate mine -m model.gguf --control manual.txt      so that it is known without notes
  ruvllm memory roll-back mine
  ruvllm memory questions mine -m model.gguf -o questions.jsonl      to read, or to train on
  ruvllm chat -m model.gguf --memory mine      tells the model what is like a message

Entries are found by their words here. What was forgotten or changed is no longer in the file afterwards.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// List all entries
    List {
        /// The folder
        folder: PathBuf,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// List the entries that are most like a text
    Search {
        /// The folder
        folder: PathBuf,
        /// The text
        text: String,
        /// Most entries
        #[arg(short, long, value_name = "N", default_value_t = 4)]
        n: usize,
    },
    /// Remember a text
    Add {
        /// The folder; it is made if it does not exist
        folder: PathBuf,
        /// The text, at most 2,048 bytes
        text: String,
        /// The entry that is most like it takes no effect any more, until this one is forgotten
        #[arg(long)]
        correction: bool,
        /// The conversation or user that it comes from
        #[arg(long, value_name = "NAME", default_value = "")]
        session: String,
        /// success, partial, or failure: how it turned out
        #[arg(long, value_name = "VERDICT", default_value = "success", value_parser = verdict)]
        verdict: Verdict,
    },
    /// Change the text of an entry
    Edit {
        /// The folder
        folder: PathBuf,
        /// Its number
        number: u64,
        /// The new text
        text: String,
        /// success, partial, or failure [default: as it is]
        #[arg(long, value_name = "VERDICT", value_parser = verdict)]
        verdict: Option<Verdict>,
    },
    /// Write all entries as JSON lines
    Export {
        /// The folder
        folder: PathBuf,
        /// The file [default: standard output]
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
        /// Replace the file if it exists
        #[arg(long)]
        overwrite: bool,
    },
    /// Train an adapter on what is remembered, by questions that the model writes; it takes effect for
    /// `chat` and `serve` with this folder if it answers questions that were kept from it
    Consolidate(Box<ConsolidateArgs>),
    /// Go back to the adapter before the one in effect, or to none
    RollBack {
        /// The folder
        folder: PathBuf,
    },
    /// Have a model write questions about what is remembered, to train on (`ruvllm train`)
    Questions(Box<QuestionsArgs>),
    /// Forget entries
    Forget {
        /// The folder
        folder: PathBuf,
        /// Their numbers
        #[arg(required_unless_present = "session")]
        numbers: Vec<u64>,
        /// All entries of a conversation or user
        #[arg(long, value_name = "NAME", conflicts_with = "numbers")]
        session: Option<String>,
    },
}

#[derive(clap::Args)]
struct QuestionsArgs {
    /// The folder
    folder: PathBuf,
    /// Most questions about an entry
    #[arg(short, long, value_name = "N", default_value_t = QuestionOptions::default().each)]
    n: usize,
    /// Seed of the questions
    #[arg(short, long, value_name = "SEED", default_value_t = QuestionOptions::default().seed)]
    seed: u64,
    /// The file [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace the file if it exists
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    placement: PlacementArgs,
}

#[derive(clap::Args)]
struct ConsolidateArgs {
    /// The folder
    folder: PathBuf,
    /// Text that the model must stay good at; half of it is replayed, the other half judged by
    #[arg(long, value_name = "FILE")]
    control: PathBuf,
    /// Most questions about an entry
    #[arg(short, long, value_name = "N", default_value_t = QuestionOptions::default().each)]
    n: usize,
    /// Seed of questions and training
    #[arg(short, long, value_name = "SEED", default_value_t = QuestionOptions::default().seed)]
    seed: u64,
    /// How often questions are read
    #[arg(long, value_name = "N", default_value_t = ConsolidationOptions::default().train.epochs)]
    epochs: f32,
    /// Most mean KL divergence on control text, in nats
    #[arg(long, value_name = "NATS", default_value_t = ConsolidationOptions::default().train.max_divergence)]
    max_divergence: f64,
    /// What came of it, as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    placement: PlacementArgs,
}

/// The memory of a folder that exists.
fn existing(folder: &Path) -> Result<Memory, Failure> {
    if !folder.is_dir() {
        let message = format!(
            "there is no folder {}; `ruvllm memory add` makes one",
            folder.display()
        );
        return Err(Failure::Work(message));
    }
    Ok(Memory::open(folder, &widest_memory())?)
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    match &args.action {
        Action::List { folder, json } => list(&existing(folder)?, *json),
        Action::Search { folder, text, n } => {
            let mut memory = existing(folder)?;
            for hit in memory.search(text, None, *n)? {
                if let Some(entry) = memory.entry(hit.number) {
                    print(format!("{:.2} {}\n", hit.score, entry_line(&memory, entry)))?;
                }
            }
            Ok(())
        }
        Action::Add {
            folder,
            text,
            correction,
            session,
            verdict,
        } => {
            let mut memory = Memory::open(folder, &widest_memory())?;
            let new = NewEntry {
                text: text.clone(),
                verdict: *verdict,
                session: session.clone(),
                is_correction: *correction,
            };
            remember(&mut memory, new)
        }
        Action::Edit {
            folder,
            number,
            text,
            verdict,
        } => {
            let mut memory = existing(folder)?;
            let old = memory.entry(*number).map(|entry| entry.verdict);
            let verdict = verdict.or(old).unwrap_or_default();
            Ok(memory.edit(*number, text, verdict, None)?)
        }
        Action::Export {
            folder,
            output,
            overwrite,
        } => {
            let memory = existing(folder)?;
            let entries = memory.entries().iter();
            let lines = entries.map(|entry| entry_json(&memory, entry));
            write_lines(lines, output.as_ref(), *overwrite)
        }
        Action::Consolidate(args) => consolidate(args),
        Action::RollBack { folder } => {
            let version = existing(folder)?.roll_back()?;
            note(
                version.map_or("no adapter is in effect now".to_owned(), |number| {
                    format!("version {number} is in effect")
                }),
            );
            Ok(())
        }
        Action::Questions(args) => questions(args),
        Action::Forget {
            folder,
            numbers,
            session,
        } => {
            let mut memory = existing(folder)?;
            if let Some(session) = session {
                let n = memory.forget_session(session)?;
                note(format!("forgot {n} entries"));
            }
            numbers
                .iter()
                .try_for_each(|&number| memory.forget(number))?;
            Ok(())
        }
    }
}

fn list(memory: &Memory, as_json: bool) -> Result<(), Failure> {
    let entries = memory.entries();
    if as_json {
        let all = entries.iter().map(|entry| entry_json(memory, entry));
        return print_json(&Value::Array(all.collect()));
    }
    for entry in entries {
        print(format!("{}\n", entry_line(memory, entry)))?;
    }
    note(memory_extent(memory));
    if let Some(known) = memory_known(memory) {
        note(known);
    }
    Ok(())
}

/// Writes a JSON object on each line.
fn write_lines(
    lines: impl Iterator<Item = Value>,
    output: Option<&PathBuf>,
    overwrite: bool,
) -> Result<(), Failure> {
    let lines: String = lines.map(|line| format!("{line}\n")).collect();
    match output {
        None => print(lines),
        Some(path) => {
            check_overwrite(path, overwrite)?;
            std::fs::write(path, lines).map_err(Failure::file(path))
        }
    }
}

fn engine(model: &Model, threads: &ThreadsArg) -> Result<Engine, Failure> {
    let n_threads = threads.number();
    Ok(Engine::new(
        model,
        &EngineOptions {
            n_threads,
            ..Default::default()
        },
    )?)
}

fn consolidate(args: &ConsolidateArgs) -> Result<(), Failure> {
    let mut memory = existing(&args.folder)?;
    let control = read_text(&args.control)?;
    let model = args.model.open(&args.placement)?;
    let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
    let control = tokenizer.encode(&control, true, false);
    let engine = engine(&model, &args.threads)?;
    let mut options = ConsolidationOptions {
        questions: QuestionOptions {
            each: args.n,
            seed: args.seed,
        },
        ..Default::default()
    };
    options.train.seed = args.seed;
    options.train.epochs = args.epochs;
    options.train.max_divergence = args.max_divergence;
    let mut of = memory.consolidation(&engine, &control, &options)?;
    let is_interrupted = Arc::new(AtomicBool::new(false));
    let interrupted = Arc::clone(&is_interrupted);
    on_interrupt(move || interrupted.store(true, Ordering::Relaxed))?;
    let mut bar: Option<(Stage, Progress)> = None;
    while let Some(progress) = of.step()? {
        let ConsolidationProgress {
            stage,
            done,
            of: all,
        } = progress;
        if bar.as_ref().is_none_or(|(shown, _)| *shown != stage) {
            let what = match stage {
                Stage::Questions => "writing questions",
                Stage::Training => "training",
                Stage::Judging => "asking",
            };
            bar = Some((stage, Progress::new(what, all as u64)));
        }
        if let Some((_, bar)) = &bar {
            bar.set(done as u64);
        }
        memory.save_consolidation(&of)?;
        if is_interrupted.load(Ordering::Relaxed) {
            drop(bar);
            note("the same command goes on from here");
            return Err(Failure::Interrupted);
        }
    }
    drop(bar);
    let report = memory.conclude(&of)?;
    if args.json {
        print_json(&report_json(&report))?;
    } else {
        print(table(&report))?;
    }
    match report.outcome {
        Ok(number) => {
            note(format!(
                "adapter {number} is in effect; `ruvllm memory roll-back` undoes it"
            ));
            Ok(())
        }
        Err(why) => Err(Failure::Work(format!("no adapter takes effect: {why}"))),
    }
}

fn report_json(report: &ConsolidationReport) -> Value {
    json!({
        "n_entries": report.n_entries,
        "n_trained": report.n_trained,
        "n_asked": report.n_asked,
        "n_said_alone": report.n_said_alone,
        "n_said_before": report.n_said_before,
        "n_said": report.n_said,
        "control_rise": report.control_rise,
        "divergence": report.divergence,
        "version": report.outcome.as_ref().ok(),
        "refused": report.outcome.as_ref().err(),
    })
}

fn table(report: &ConsolidationReport) -> String {
    let before = report
        .n_said_before
        .map_or(String::new(), |n| format!(", {n} with the adapter before"));
    format!(
        "trained on {} texts about {} entries\nquestions that were kept from it: {} of {} answered, {} by the model alone{before}\n\
         control text: perplexity {:+.2} %, divergence {:.5} nats/token\n",
        report.n_trained,
        report.n_entries,
        report.n_said,
        report.n_asked,
        report.n_said_alone,
        100.0 * report.control_rise.exp_m1(),
        report.divergence
    )
}

fn questions(args: &QuestionsArgs) -> Result<(), Failure> {
    let memory = existing(&args.folder)?;
    let model = args.model.open(&args.placement)?;
    let engine = engine(&model, &args.threads)?;
    let options = QuestionOptions {
        each: args.n,
        seed: args.seed,
    };
    let bar = Progress::new("writing questions", memory.entries().len() as u64);
    let pairs = memory.question_answers(&engine, &options, &mut |done| bar.set(done as u64))?;
    drop(bar);
    let has_template = model.chat_template().is_some();
    // Of a conversation a half-given answer would be learnt, too.
    let lines = pairs
        .iter()
        .filter(|pair| !has_template || pair.lead.is_empty());
    let lines = lines.map(|pair| pair_json(pair, has_template));
    write_lines(lines, args.output.as_ref(), args.overwrite)
}

/// A line of what `ruvllm train` reads: a conversation where the model knows any.
fn pair_json(pair: &QuestionAnswer, has_template: bool) -> Value {
    let (prompt, completion) = pair.text();
    match &pair.question {
        Some(question) if has_template => json!({"messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": pair.answer},
        ]}),
        Some(_) => json!({"prompt": prompt, "completion": completion}),
        None => json!({"text": completion}),
    }
}
