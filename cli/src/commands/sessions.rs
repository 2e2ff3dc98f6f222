//! `ruvllm sessions`: lists, renames and deletes the conversations that `ruvllm chat --session NAME`
//! keeps.

use crate::io::conversations::{MESSAGES, STATE, failure, read_messages, sessions};
use crate::io::{Failure, print, print_json, printable, size};
use clap::Subcommand;
use ruvllm::session::KeptSessions;
use ruvllm::session::SessionName;
use serde_json::{Value, json};
use std::fs;

const EXAMPLES: &str = "\
Examples:
  ruvllm chat -m model.gguf --session trip    begin or resume a conversation
  ruvllm sessions                             list all
  ruvllm sessions rename trip paris
  ruvllm sessions delete paris";

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
