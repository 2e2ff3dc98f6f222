//! `ruvllm learn`: what was recorded and learnt while running, seen, undone, forgotten and taken
//! elsewhere.

use crate::flags::{
    ModelArgs, OverwriteArg, PlacementArgs, earlier_file, judged_of, memory_beside, memory_extent,
    memory_known, no_tokenizer, open_folder,
};
use crate::io::{Failure, file_or_pipe, note, print, print_json, printable, read_text, size};
use clap::Subcommand;
use ruvllm::Tokenizer;
use ruvllm::gguf::{Gguf, NewFile};
use ruvllm_learn::memory::Memory;
use ruvllm_learn::sona::{Event, EventKind, FolderOptions, Sona, SonaFolder};
use ruvllm_learn::{Learner, Learning, TopicStatus};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  ruvllm learn calibrate mine -f manual.txt    what must not be forgotten, before anything else
  ruvllm chat --learn mine                     learns from what you write, /good and /bad rate
  ruvllm learn status mine
  ruvllm learn log mine --json                 every change: when, from how much text, what it gained
  ruvllm learn rollback mine 2                 back to version 2; 0 is the model alone
  ruvllm learn forget mine trip                all of the session `trip`, and what was learnt from it
  ruvllm learn export mine --as-lora -o a.gguf a LoRA adapter for any program
  ruvllm train --learn mine -o adapter.gguf    train an adapter on what was recorded

What was learnt takes effect as a new version only if text that was kept from it became likelier, and within the bound \
on control text. A server with --learn-per-user has a folder like this for every key.";

/// Tokens kept from what is learnt below which no candidate takes effect: five slices of 16.
const LEAST_JUDGED: u64 = 80;

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Args)]
struct FolderArg {
    /// Folder, as --learn takes it
    folder: PathBuf,
}

#[derive(Subcommand)]
enum Action {
    /// Tell what is recorded and in effect
    Status {
        #[command(flatten)]
        folder: FolderArg,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// List every change of what is learnt
    Log {
        #[command(flatten)]
        folder: FolderArg,
        /// Print a JSON array
        #[arg(long)]
        json: bool,
    },
    /// Tell what is in a version, topic by topic
    Show {
        #[command(flatten)]
        folder: FolderArg,
        /// Its number [default: the version in effect]
        version: Option<u64>,
        /// The model, to tell the words of topics by
        #[arg(short, long, value_name = "FILE")]
        model: Option<PathBuf>,
        /// Print a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Go back to a version
    Rollback {
        #[command(flatten)]
        folder: FolderArg,
        /// Its number; 0 is the model alone
        version: u64,
    },
    /// Forget a session, and what was learnt from it
    Forget {
        #[command(flatten)]
        folder: FolderArg,
        /// Its name
        session: String,
    },
    /// Copy a version into a file
    Export {
        #[command(flatten)]
        folder: FolderArg,
        /// File to write
        #[arg(short, long, value_name = "FILE")]
        output: PathBuf,
        /// Its number [default: the version in effect]
        #[arg(long)]
        version: Option<u64>,
        /// Write a LoRA adapter of the output head, for any program that applies such; -m says of
        /// which model
        #[arg(long)]
        as_lora: bool,
        #[command(flatten)]
        overwrite: OverwriteArg,
        #[command(flatten)]
        with: WithModel,
    },
    /// Take an exported version into effect
    Import {
        #[command(flatten)]
        folder: FolderArg,
        /// File that `export` wrote
        file: PathBuf,
        #[command(flatten)]
        with: WithModel,
    },
    /// Give the learner reference text it must stay good at
    Calibrate {
        #[command(flatten)]
        folder: FolderArg,
        /// Control text; - is stdin
        #[arg(short, long, value_name = "FILE")]
        file: Option<PathBuf>,
        #[command(flatten)]
        with: WithModel,
    },
}

#[derive(clap::Args)]
struct WithModel {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    placement: PlacementArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    match &args.action {
        Action::Status { folder, json } => status(
            &folder.existing()?,
            memory_beside(&folder.folder)?.as_ref(),
            *json,
        ),
        Action::Log { folder, json } => log(&folder.existing()?, *json),
        Action::Show {
            folder,
            version,
            model,
            json,
        } => show(&folder.existing()?, *version, model.as_deref(), *json),
        Action::Rollback { folder, version } => {
            folder.existing()?.rollback(*version)?;
            note(format!("version {version} is in effect"));
            Ok(())
        }
        Action::Forget { folder, session } => {
            let mut folder = folder.existing()?;
            let n = folder.forget(session)?;
            note(format!(
                "{n} requests are forgotten; version {} is in effect",
                folder.version()
            ));
            Ok(())
        }
        Action::Export {
            folder,
            output,
            version,
            as_lora,
            overwrite,
            with,
        } => {
            let folder = folder.existing()?;
            let path = version_path(&folder, version.unwrap_or(folder.version()))?;
            overwrite.check(output)?;
            match as_lora {
                true => export_adapter(&path, output, with)?,
                false => export(&path, output)?,
            }
            note(format!("wrote {}", output.display()));
            Ok(())
        }
        Action::Import { folder, file, with } => {
            let engine = with.model.open(&with.placement)?.engine()?;
            let sona = open_folder(Sona::builder(), &folder.folder, &engine)?;
            sona.import(file)?;
            note(format!("version {} is in effect", sona.generation()));
            Ok(())
        }
        Action::Calibrate { folder, file, with } => {
            let text = read_text(&file_or_pipe(file.as_ref(), "-f FILE")?)?;
            let model = with.model.open(&with.placement)?;
            let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&with.model))?;
            let sona = open_folder(Sona::builder(), &folder.folder, &model.engine()?)?;
            let tokens = tokenizer.encode(&text, true, false);
            sona.calibrate(&tokens)?;
            let n = sona.learner().n_control();
            note(format!(
                "version {}: {n} moments of {} tokens of control text",
                sona.generation(),
                tokens.len()
            ));
            Ok(())
        }
    }
}

impl FolderArg {
    /// The folder, which has to be there.
    fn existing(&self) -> Result<SonaFolder, Failure> {
        if !self.folder.is_dir() {
            let path = self.folder.display();
            return Err(Failure::Work(format!(
                "there is no folder {path}; `ruvllm chat --learn {path}` makes it"
            )));
        }
        let folder = SonaFolder::open(&self.folder, &FolderOptions::default())?;
        if let Some(file) = earlier_file(&self.folder)
            && folder.versions().is_empty()
        {
            let (path, file) = (self.folder.display(), file.display());
            note(format!(
                "{file} was written by an earlier release: `--learn {path}`, or `ruvllm learn import {path} {file}` \
                 with its model, makes a version of it"
            ));
        }
        Ok(folder)
    }
}

/// What is known of a memory, as JSON.
fn memory_json(memory: &Memory) -> Value {
    let version = memory.versions().last();
    json!({
        "entries": memory.entries().len(), "new": memory.n_unconsolidated(), "bytes": memory.bytes(),
        "version": version.map(|version| version.number),
        "asked": version.map(|version| version.n_asked), "said": version.map(|version| version.n_said),
    })
}

fn status(folder: &SonaFolder, memory: Option<&Memory>, as_json: bool) -> Result<(), Failure> {
    let s = folder.status()?;
    let judged = judged_of(folder.history(), s.version);
    if as_json {
        return print_json(&json!({
            "trajectories": s.n_trajectories, "with_tokens": s.n_with_tokens, "rated": s.n_rated, "sessions": s.n_sessions,
            "quality": s.quality, "log_bytes": s.log_bytes, "version_bytes": s.version_bytes, "version": s.version,
            "versions": s.versions, "events": folder.history().len(), "judged": judged.map(judged_json),
            "memory": memory.map(memory_json),
        }));
    }
    let versions: Vec<String> = s.versions.iter().map(u64::to_string).collect();
    let in_effect = match s.version {
        0 => "the model alone".to_owned(),
        version => format!("version {version}"),
    };
    let gain = judged.map_or("not judged".to_owned(), |event| {
        let (n, before, after) = event.judged;
        format!("{:+.4} nats a token of {n} kept tokens", after - before)
    });
    let memory = memory.map_or("none".to_owned(), |memory| match memory_known(memory) {
        Some(known) => format!("{}; {known}", memory_extent(memory)),
        None => memory_extent(memory),
    });
    print(format!(
        "requests   {} of {} sessions, {} with their tokens, {} rated (sum since the last training {:.1})\n\
         in effect  {in_effect}\nloss       {gain}\nversions   {}\nsize       {} of requests and events, {} of versions\n\
         memory     {memory}\n",
        s.n_trajectories,
        s.n_sessions,
        s.n_with_tokens,
        s.n_rated,
        s.quality,
        if versions.is_empty() {
            "none".to_owned()
        } else {
            versions.join(" ")
        },
        size(s.log_bytes),
        size(s.version_bytes),
    ))
}

fn judged_json(event: &Event) -> Value {
    let (n, before, after) = event.judged;
    json!({"tokens": n, "nats_before": before, "nats_after": after})
}

fn event(event: &Event) -> Value {
    json!({
        "kind": event.kind.name(), "timestamp_ms": event.timestamp, "version": event.version, "through": event.through,
        "learnt": {"requests": event.n_learnt[0], "tokens": event.n_learnt[1]},
        "judged": judged_json(event),
        "divergence": event.divergence,
    })
}

fn log(folder: &SonaFolder, as_json: bool) -> Result<(), Failure> {
    if as_json {
        return print_json(&folder.history().iter().map(event).collect());
    }
    for event in folder.history() {
        let (n, before, after) = event.judged;
        let learnt = match event.n_learnt {
            [0, _] => String::new(),
            [requests, tokens] => format!("  {requests} requests, {tokens} tokens"),
        };
        let judged = match n {
            0 => String::new(),
            n => format!(
                "; {n} kept tokens {before:.4} -> {after:.4} nats; divergence {:.5}",
                event.divergence
            ),
        };
        let is_undecided = matches!(event.kind, EventKind::Unchanged | EventKind::Refused);
        let why = if is_undecided && n < LEAST_JUDGED {
            format!("; fewer than the {LEAST_JUDGED} tokens that it takes to judge")
        } else {
            String::new()
        };
        let time = utc(event.timestamp);
        print(format!(
            "{time}  {:<11} version {:>3}{learnt}{judged}{why}\n",
            event.kind.name(),
            event.version
        ))?;
    }
    Ok(())
}

fn show(
    folder: &SonaFolder,
    version: Option<u64>,
    model: Option<&Path>,
    as_json: bool,
) -> Result<(), Failure> {
    let version = version.unwrap_or(folder.version());
    let path = version_path(folder, version)?;
    let gguf = Gguf::open(&path)?;
    let metadata = gguf.metadata();
    let (updates, strength) = (
        metadata.u64("learned.updates")?,
        metadata.f32("learned.scale")?,
    );
    let made = folder
        .history()
        .iter()
        .find(|event| event.version == version);
    let topics = folder.topics(version)?;
    let model = model.map(Gguf::open).transpose()?;
    let tokenizer = model
        .map(|gguf| Tokenizer::from_metadata(gguf.metadata()))
        .transpose()
        .map_err(ruvllm::Error::from)?;
    let words = |topic: &TopicStatus| -> Vec<String> {
        let word = |token: &u32| tokenizer.as_ref()?.decode_lossy(&[*token], false).ok();
        topic.words.iter().filter_map(word).collect()
    };
    if as_json {
        let topic = |topic: &TopicStatus| {
            json!({
                "id": topic.id, "requests": topic.n_requests, "tokens": topic.n_tokens, "adapter": topic.has_adapter,
                "divergence": topic.divergence, "word_ids": topic.words, "words": words(topic),
            })
        };
        return print_json(&json!({
            "version": version, "path": path, "updates": updates, "strength": strength, "made": made.map(event),
            "topics": topics.iter().map(topic).collect::<Vec<_>>(),
        }));
    }
    let made = made.map_or(String::new(), |made| {
        format!("{} {}", made.kind.name(), utc(made.timestamp))
    });
    let path = printable(&path.display().to_string());
    print(format!(
        "version {version}  {made}\n{updates} updates, strength {strength}\n"
    ))?;
    for topic in &topics {
        let adapter = match topic.has_adapter {
            true => format!(
                "an adapter of inner layers, divergence {:.5}",
                topic.divergence
            ),
            false => "the head alone".to_owned(),
        };
        let (requests, tokens, words) = (topic.n_requests, topic.n_tokens, words(topic).join(" "));
        let words = if words.is_empty() {
            words
        } else {
            format!(": {}", printable(&words))
        };
        print(format!(
            "topic {}  {requests} requests, {tokens} tokens, {adapter}{words}\n",
            topic.id
        ))?;
    }
    print(format!("{path}\n"))
}

fn version_path(folder: &SonaFolder, version: u64) -> Result<PathBuf, Failure> {
    if version == 0 {
        return Err(Failure::Work(
            "the model alone is in effect: there is nothing in it that was learnt".into(),
        ));
    }
    if !folder.versions().contains(&version) {
        return Err(ruvllm_learn::sona::SonaError::NoSuchVersion { version }.into());
    }
    Ok(folder.version_path(version))
}

/// Copies a version into a file.
fn export(version: &Path, output: &Path) -> Result<(), Failure> {
    let data = std::fs::read(version).map_err(Failure::file(version))?;
    let mut file = NewFile::create(output, true).map_err(Failure::file(output))?;
    file.write_all(&data)
        .and_then(|()| file.finish())
        .map_err(Failure::file(output))
}

/// Writes what a version changes in the output head as an adapter of the model.
fn export_adapter(version: &Path, output: &Path, with: &WithModel) -> Result<(), Failure> {
    let model = with.model.open(&with.placement)?;
    // The adapter's products with the head are computed for a session.
    let mut session = model.session()?;
    session.set_learner(Learner::open(version, &model)?)?;
    if let Some(learner) = session.learner() {
        learner.to_adapter(&model)?.save(output)?;
    }
    Ok(())
}

/// A time as `2025-01-15 09:05:07`, UTC, by Hinnant's days-to-civil algorithm.
fn utc(ms: u64) -> String {
    let (days, seconds) = (ms / 86_400_000, ms / 1000 % 86_400);
    let z = days + 719_468;
    let (era, of_era) = (z / 146_097, z % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let m = (5 * of_year + 2) / 153;
    let (day, month) = (
        of_year - (153 * m + 2) / 5 + 1,
        if m < 10 { m + 3 } else { m - 9 },
    );
    let year = year + era * 400 + u64::from(month <= 2);
    let (h, min, s) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02} {h:02}:{min:02}:{s:02}")
}

#[cfg(test)]
mod tests {
    #[test]
    fn times_are_civil() {
        assert_eq!(super::utc(0), "1970-01-01 00:00:00");
        assert_eq!(super::utc(951_826_153_999), "2000-02-29 12:09:13");
        assert_eq!(super::utc(1_735_689_599_000), "2024-12-31 23:59:59");
    }
}
