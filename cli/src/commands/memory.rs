//! `ruvllm memory`: what a folder remembers, seen and changed by its owner.

use crate::flags::{
    ModelArgs, PlacementArgs, ThreadsArg, entry_json, entry_line, remember, verdict,
};
use crate::io::{Failure, Progress, check_overwrite, note, print, print_json, size};
use clap::Subcommand;
use ruvllm::Engine;
use ruvllm::engine::EngineOptions;
use ruvllm_learn::memory::{
    Memory, MemoryOptions, NewEntry, QuestionAnswer, QuestionOptions, Verdict,
};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  ruvllm memory add mine 'The gauge at Ossen Weir is read by Talvo Renning.'
  ruvllm memory add mine --correction 'It is read by Mirela Ostrand now, not by Talvo Renning.'
  ruvllm memory search mine 'Who reads the gauge?'
  ruvllm memory list mine
  ruvllm memory edit mine 1 'The gauge at Ossen Weir is read daily.' --verdict partial
  ruvllm memory export mine -o memory.jsonl
  ruvllm memory forget mine 1
  ruvllm memory questions mine -m model.gguf -o questions.jsonl
  ruvllm train -m model.gguf -f questions.jsonl --control manual.txt --max-divergence 0.2 --rank 16 \
    --lr 1e-3 --epochs 20 --batch 16 -o adapter.gguf      so that it is known without notes
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

/// The memory of a folder that exists.
fn existing(folder: &Path) -> Result<Memory, Failure> {
    if !folder.is_dir() {
        let message = format!(
            "there is no folder {}; `ruvllm memory add` makes one",
            folder.display()
        );
        return Err(Failure::Work(message));
    }
    Ok(Memory::open(folder, &widest())?)
}

/// Looking at a folder makes none of its entries go, nor does a line that is added.
fn widest() -> MemoryOptions {
    MemoryOptions {
        max_entries: 100_000,
        max_bytes: u64::MAX,
    }
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
            let mut memory = Memory::open(folder, &widest())?;
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
    let (n, bytes) = (entries.len(), size(memory.bytes()));
    let noun = if n == 1 { "entry" } else { "entries" };
    note(format!("{n} {noun}, {bytes}"));
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

fn questions(args: &QuestionsArgs) -> Result<(), Failure> {
    let memory = existing(&args.folder)?;
    let model = args.model.open(&args.placement)?;
    let engine = Engine::new(
        &model,
        &EngineOptions {
            n_threads: args.threads.number(),
            ..Default::default()
        },
    )?;
    let options = QuestionOptions {
        each: args.n,
        seed: args.seed,
    };
    let bar = Progress::new("writing questions", memory.entries().len() as u64);
    let pairs = memory.question_answers(&engine, &options, &mut |done| bar.set(done as u64))?;
    drop(bar);
    let has_template = model.chat_template().is_some();
    let lines = pairs.iter();
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
