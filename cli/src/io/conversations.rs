//! Conversations that last: a folder each, with its messages, which are the conversation, and the
//! session's state, which saves computing them again: where it cannot be used, it is.

use super::failure::Failure;
use super::json::read_json;
use super::terminal::{note, paint, printable};
use ruvllm::Session;
use ruvllm::chat::Message;
use ruvllm::gguf::NewFile;
use ruvllm::session::KeptError;
pub(crate) use ruvllm::session::SessionName;
use ruvllm::session::{KeptSession, KeptSessions};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};

pub(crate) const MESSAGES: &str = "messages.json";

pub(crate) const STATE: &str = "state.gguf";

pub(crate) fn failure(error: KeptError) -> Failure {
    match error {
        KeptError::Missing { .. } => Failure::Work(format!("{error}; `ruvllm sessions` lists all")),
        error => Failure::Work(error.to_string()),
    }
}

/// A conversation that is kept; no other process talks in it meanwhile.
pub(crate) struct Kept(KeptSession);

impl Kept {
    /// Whether there is a conversation of that name.
    pub(crate) fn exists(name: &SessionName) -> Result<bool, Failure> {
        Ok(sessions()?.folder_of(name).is_dir())
    }

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
        if session.sequence().n_dropped() > 0 {
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

pub(crate) fn read_messages(folder: &Path) -> Result<Vec<Message>, Failure> {
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

pub(crate) fn sessions() -> Result<KeptSessions, Failure> {
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
