//! Conversations that last: `ruvllm chat --session NAME` keeps one in a folder of its own, `ruvllm
//! sessions` lists, renames and deletes them.
//!
//! A folder holds the messages, which are the conversation, and the session's state, which saves
//! computing them again: where it cannot be used, it is.

use crate::io::{Failure, note, paint, print, print_json, printable, read_json, size};
use clap::Subcommand;
use ruvllm::KeptError;
use ruvllm::chat::Message;
pub(crate) use ruvllm::exec::SessionName;
use ruvllm::exec::{KeptSession, KeptSessions, Session};
use ruvllm::gguf::NewFile;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  ruvllm chat -m model.gguf --session trip    begin or resume a conversation
  ruvllm sessions                             list all
  ruvllm sessions rename trip paris
  ruvllm sessions delete paris";

const MESSAGES: &str = "messages.json";
const STATE: &str = "state.gguf";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
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

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let sessions = sessions()?;
    match &args.action {
        None => list(&sessions, args.json),
        Some(Action::Rename { name, to }) => sessions.rename(name, to).map_err(failure),
        Some(Action::Delete { name }) => sessions.delete(name).map_err(failure),
    }
}

fn failure(error: KeptError) -> Failure {
    match error {
        KeptError::Missing { .. } => Failure::Work(format!("{error}; `ruvllm sessions` lists all")),
        error => Failure::Work(error.to_string()),
    }
}

fn list(sessions: &KeptSessions, as_json: bool) -> Result<(), Failure> {
    let mut rows = Vec::new();
    for name in sessions.names().map_err(failure)? {
        let (folder, name) = (sessions.folder_of(&name), name.to_string());
        let messages = read_messages(&folder)?;
        let bytes: u64 = [MESSAGES, STATE]
            .iter()
            .filter_map(|file| Some(fs::metadata(folder.join(file)).ok()?.len()))
            .sum();
        let first = messages
            .iter()
            .find(|message| message.role == "user")
            .map_or("", |message| &message.content);
        if as_json {
            rows.push(
                json!({ "name": name, "messages": messages.len(), "bytes": bytes, "first": first }),
            );
        } else {
            let begin: String = printable(first.lines().next().unwrap_or_default())
                .chars()
                .take(50)
                .collect();
            print(format!(
                "{name:<20} {:>4} messages {:>10}  {begin}\n",
                messages.len(),
                size(bytes)
            ))?;
        }
    }
    if as_json {
        print_json(&Value::Array(rows))
    } else {
        Ok(())
    }
}

/// A conversation that is kept; no other process talks in it meanwhile.
pub(crate) struct Kept(KeptSession);

impl Kept {
    /// The conversation of that name, and its messages; a new one has none.
    pub(crate) fn open(name: &SessionName) -> Result<(Kept, Vec<Message>), Failure> {
        let kept = sessions()?.open(name).map_err(failure)?;
        let messages = read_messages(kept.folder())?;
        Ok((Kept(kept), messages))
    }

    /// Takes the saved state into `session`, where it can be used.
    pub(crate) fn load(&self, session: &mut Session) {
        if let Err(error) = self.0.load(session) {
            note(paint(
                "33",
                &format!(
                    "The conversation is computed again: {}",
                    printable(&error.to_string())
                ),
            ));
        }
    }

    pub(crate) fn save_messages(&self, messages: &[Message]) -> Result<(), Failure> {
        let path = self.0.folder().join(MESSAGES);
        let messages: Vec<_> = messages
            .iter()
            .map(|m| json!({ "role": m.role, "content": m.content }))
            .collect();
        let mut file = NewFile::create(&path, true).map_err(Failure::file(&path))?;
        let text = json!({ "version": 1, "messages": messages }).to_string();
        file.write_all(text.as_bytes())
            .and_then(|()| file.finish())
            .map_err(Failure::file(&path))
    }

    pub(crate) fn save(&self, session: &Session) -> Result<(), Failure> {
        if session.n_dropped() > 0 {
            // After a shift of the context no state goes with the messages: they are computed
            // again.
            return self.0.forget().map_err(failure);
        }
        let path = self.0.folder().join(STATE);
        self.0
            .save(session)
            .map_err(|error| Failure::Work(format!("{}: {error}", path.display())))
    }
}

fn read_messages(folder: &Path) -> Result<Vec<Message>, Failure> {
    let path = folder.join(MESSAGES);
    if !path.exists() {
        return Ok(Vec::new());
    }
    let wrong = || {
        Failure::Work(format!(
            "{}: not the messages of a conversation",
            path.display()
        ))
    };
    let value = read_json(&path)?;
    if value["version"] != 1 {
        return Err(Failure::Work(format!(
            "{}: version {}, this build reads 1",
            path.display(),
            value["version"]
        )));
    }
    let message = |value: &Value| {
        Some(Message::new(
            value["role"].as_str()?,
            value["content"].as_str()?,
        ))
    };
    value["messages"]
        .as_array()
        .ok_or_else(wrong)?
        .iter()
        .map(|value| message(value).ok_or_else(wrong))
        .collect()
}

fn sessions() -> Result<KeptSessions, Failure> {
    let sessions = state_folder().map(|folder| KeptSessions::new(folder.join("sessions")));
    sessions.ok_or_else(|| {
        Failure::Work("there is no folder for sessions: set XDG_STATE_HOME or HOME".into())
    })
}

/// Where what lasts between runs is kept, after the XDG base directory specification.
pub(crate) fn state_folder() -> Option<PathBuf> {
    let variable = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let state = variable("XDG_STATE_HOME")
        .or_else(|| variable("LOCALAPPDATA"))
        .or_else(|| Some(variable("HOME")?.join(".local/state")))?;
    Some(state.join("ruvllm"))
}
