//! Conversations that last: `ruvllm chat --session NAME` keeps one in a folder of its own, `ruvllm sessions` lists, renames
//! and deletes them.
//!
//! A folder holds the messages, which are the conversation, and the session's state, which saves computing them again: where
//! it cannot be used, it is.

use super::input::read_json;
use super::output::{Failure, note, paint, print, print_json, printable, size};
use clap::Subcommand;
use ruvllm::chat::Message;
use ruvllm::exec::Session;
use ruvllm::gguf::NewFile;
use serde_json::{Value, json};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  ruvllm chat -m model.gguf --session trip    begin or resume a conversation
  ruvllm sessions                             list all
  ruvllm sessions rename trip paris
  ruvllm sessions delete paris";

const MESSAGES: &str = "messages.json";
const STATE: &str = "state.gguf";
/// Locked while a process talks in it.
const LOCK: &str = "lock";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub(super) struct Args {
    #[command(subcommand)]
    action: Option<Action>,
    /// List them as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand)]
enum Action {
    /// Give a conversation another name
    Rename {
        /// Its name
        name: SessionName,
        /// The new one
        to: SessionName,
    },
    /// Delete a conversation
    Delete {
        /// Its name
        name: SessionName,
    },
}

/// A name that is one of a folder on every system.
#[derive(Clone, Debug)]
pub(super) struct SessionName(String);

impl std::fmt::Display for SessionName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::str::FromStr for SessionName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<SessionName, &'static str> {
        let is_sound = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        if (1..=64).contains(&text.len()) && text.chars().all(is_sound) {
            Ok(SessionName(text.into()))
        } else {
            Err("expected 1 to 64 letters, digits, - and _")
        }
    }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let sessions = sessions()?;
    match &args.action {
        None => list(&sessions, args.json),
        Some(Action::Rename { name, to }) => {
            let kept = Kept::existing(&sessions, name)?;
            let target = sessions.join(&to.0);
            if target.exists() {
                return Err(Failure::Work(format!("there is a session {} already: delete it first", to.0)));
            }
            let folder = kept.folder.clone();
            drop(kept); // Windows does not rename folders with open files
            fs::rename(&folder, &target).map_err(Failure::file(&folder))
        }
        Some(Action::Delete { name }) => {
            let kept = Kept::existing(&sessions, name)?;
            let folder = kept.folder.clone();
            drop(kept);
            fs::remove_dir_all(&folder).map_err(Failure::file(&folder))
        }
    }
}

fn list(sessions: &Path, as_json: bool) -> Result<(), Failure> {
    let mut names = Vec::new();
    match fs::read_dir(sessions) {
        Ok(entries) => {
            for entry in entries {
                let name = entry.map_err(Failure::file(sessions))?.file_name();
                names.extend(name.to_str().and_then(|name| name.parse::<SessionName>().ok()));
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(Failure::file(sessions)(error)),
    }
    names.sort_by(|a, b| a.0.cmp(&b.0));
    let mut rows = Vec::new();
    for SessionName(name) in names {
        let folder = sessions.join(&name);
        let messages = read_messages(&folder)?;
        let bytes: u64 =
            [MESSAGES, STATE].iter().filter_map(|file| Some(fs::metadata(folder.join(file)).ok()?.len())).sum();
        let first = messages.iter().find(|message| message.role == "user").map_or("", |message| &message.content);
        if as_json {
            rows.push(json!({ "name": name, "messages": messages.len(), "bytes": bytes, "first": first }));
        } else {
            let begin: String = printable(first.lines().next().unwrap_or_default()).chars().take(50).collect();
            print(format!("{name:<20} {:>4} messages {:>10}  {begin}\n", messages.len(), size(bytes)))?;
        }
    }
    if as_json { print_json(&Value::Array(rows)) } else { Ok(()) }
}

/// The folder of a conversation; no other process talks in it meanwhile.
pub(super) struct Kept {
    folder: PathBuf,
    _lock: File,
}

impl Kept {
    /// The conversation of that name, and its messages; a new one has none.
    pub(super) fn open(SessionName(name): &SessionName) -> Result<(Kept, Vec<Message>), Failure> {
        let folder = sessions()?.join(name);
        fs::create_dir_all(&folder).map_err(Failure::file(&folder))?;
        let kept = Kept::lock(folder)?;
        let messages = read_messages(&kept.folder)?;
        Ok((kept, messages))
    }

    fn existing(sessions: &Path, SessionName(name): &SessionName) -> Result<Kept, Failure> {
        let folder = sessions.join(name);
        if !folder.is_dir() {
            return Err(Failure::Work(format!("there is no session {name}; `ruvllm sessions` lists all")));
        }
        Kept::lock(folder)
    }

    fn lock(folder: PathBuf) -> Result<Kept, Failure> {
        let path = folder.join(LOCK);
        let lock = File::options().create(true).append(true).open(&path).map_err(Failure::file(&path))?;
        match lock.try_lock() {
            Ok(()) => Ok(Kept { folder, _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(Failure::Work(format!(
                "another process talks in {}: wait until it has ended, or name another session",
                folder.display()
            ))),
            Err(TryLockError::Error(error)) => Err(Failure::file(&path)(error)),
        }
    }

    /// Takes the saved state into `session`, where it can be used.
    pub(super) fn load(&self, session: &mut Session) {
        let path = self.folder.join(STATE);
        if path.exists()
            && let Err(error) = session.load(&path)
        {
            note(paint("33", &format!("The conversation is computed again: {}", printable(&error.to_string()))));
        }
    }

    pub(super) fn save_messages(&self, messages: &[Message]) -> Result<(), Failure> {
        let path = self.folder.join(MESSAGES);
        let messages: Vec<_> = messages.iter().map(|m| json!({ "role": m.role, "content": m.content })).collect();
        let mut file = NewFile::create(&path, true).map_err(Failure::file(&path))?;
        let text = json!({ "version": 1, "messages": messages }).to_string();
        file.write_all(text.as_bytes()).and_then(|()| file.finish()).map_err(Failure::file(&path))
    }

    pub(super) fn save(&self, session: &Session) -> Result<(), Failure> {
        let path = self.folder.join(STATE);
        if session.n_dropped() > 0 {
            // After a shift of the context no state goes with the messages: they are computed again.
            return match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Failure::file(&path)(error)),
                _ => Ok(()),
            };
        }
        session.save(&path).map_err(|error| Failure::Work(format!("{}: {error}", path.display())))
    }
}

fn read_messages(folder: &Path) -> Result<Vec<Message>, Failure> {
    let path = folder.join(MESSAGES);
    if !path.exists() {
        return Ok(Vec::new());
    }
    let wrong = || Failure::Work(format!("{}: not the messages of a conversation", path.display()));
    let value = read_json(&path)?;
    if value["version"] != 1 {
        return Err(Failure::Work(format!("{}: version {}, this build reads 1", path.display(), value["version"])));
    }
    let message = |value: &Value| Some(Message::new(value["role"].as_str()?, value["content"].as_str()?));
    value["messages"].as_array().ok_or_else(wrong)?.iter().map(|value| message(value).ok_or_else(wrong)).collect()
}

fn sessions() -> Result<PathBuf, Failure> {
    let folder = state_folder().map(|folder| folder.join("sessions"));
    folder.ok_or_else(|| Failure::Work("there is no folder for sessions: set XDG_STATE_HOME or HOME".into()))
}

/// Where what lasts between runs is kept, after the XDG base directory specification.
pub(super) fn state_folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = variable("XDG_STATE_HOME")
        .or_else(|| variable("LOCALAPPDATA"))
        .or_else(|| Some(variable("HOME")?.join(".local/state")))?;
    Some(state.join("ruvllm"))
}
