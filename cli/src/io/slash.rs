//! Lines of a conversation that begin with a slash: commands.

use super::conversations::SessionName;
use super::failure::Failure;
use std::path::Path;

pub(crate) const COMMANDS: &str = "\
/regen        answer the last message again
/system TEXT  how the model is to behave from now on; without TEXT, what it was told
/set FLAG X   a flag of sampling, as in /set temp 0.6; without FLAG, those that matter most
/image FILE   the next message is about this picture; repeatable
/save NAME    keep the conversation under this name, as --session does
/load NAME    go on with a conversation that was kept
/remember X   with --memory, remember X, or the last message, in all conversations
/correct X    the same, in place of what is remembered and most like it
/memory       what is remembered; /forget N forgets an entry
/good, /bad   rate the answer: with --learn, the model learns from it
/stats        speed of the last answer, room in the context
/clear        forget the conversation
/help         this list
/exit         leave; so does Ctrl-D
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one.";

/// What a line asks for.
#[derive(Debug, PartialEq)]
pub(crate) enum Command<'a> {
    /// It is no command but a message.
    Message,
    /// A slip of the finger, not something to answer.
    Unknown(&'a str),
    Regenerate,
    /// A new system message; none: the one that there is.
    System(Option<&'a str>),
    /// A flag and its value; none: what the flags are.
    Set(Option<(&'a str, Option<&'a str>)>),
    Image(&'a Path),
    Save(SessionName),
    Load(SessionName),
    /// A text; none: the last message.
    Remember(Option<&'a str>),
    Correct(&'a str),
    Memory,
    /// The number of an entry.
    Forget(u64),
    /// Whether the answer was good.
    Rate(bool),
    Stats,
    Clear,
    Help,
    Leave,
}

impl Command<'_> {
    /// Reads a line.
    pub(crate) fn of(line: &str) -> Result<Command<'_>, Failure> {
        let (word, rest) = in_two(line);
        Ok(match (word, rest) {
            ("/regen", None) => Command::Regenerate,
            ("/system", text) => Command::System(text),
            ("/set", text) => Command::Set(text.map(in_two)),
            ("/image", path) => Command::Image(Path::new(needed(path, "/image FILE")?)),
            ("/save", name) => Command::Save(session(name, "/save NAME")?),
            ("/load", name) => Command::Load(session(name, "/load NAME")?),
            ("/remember", text) => Command::Remember(text),
            ("/correct", text) => Command::Correct(needed(text, "/correct TEXT")?),
            ("/memory", None) => Command::Memory,
            ("/forget", number) => Command::Forget(entry(needed(number, "/forget N")?)?),
            ("/good", None) => Command::Rate(true),
            ("/bad", None) => Command::Rate(false),
            ("/stats", None) => Command::Stats,
            ("/clear", None) => Command::Clear,
            ("/help" | "/?", None) => Command::Help,
            ("/exit" | "/quit", None) => Command::Leave,
            (word, None) if is_slash_and_letters(word) => Command::Unknown(word),
            _ => Command::Message,
        })
    }
}

/// The first word, and what follows.
fn in_two(text: &str) -> (&str, Option<&str>) {
    let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    (word, Some(rest.trim()).filter(|rest| !rest.is_empty()))
}

fn needed<'a>(text: Option<&'a str>, usage: &str) -> Result<&'a str, Failure> {
    text.ok_or_else(|| Failure::Usage(format!("{usage}: something is missing")))
}

fn session(name: Option<&str>, usage: &str) -> Result<SessionName, Failure> {
    let name = needed(name, usage)?;
    name.parse()
        .map_err(|expected| Failure::Usage(format!("{name:?} is no name: {expected}")))
}

fn entry(number: &str) -> Result<u64, Failure> {
    let wrong = |_| Failure::Usage(format!("{number:?} is no number of an entry: see /memory"));
    number.parse().map_err(wrong)
}

fn is_slash_and_letters(word: &str) -> bool {
    word.strip_prefix('/').is_some_and(|word| {
        !word.is_empty() && word.chars().all(|letter| letter.is_ascii_alphabetic())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        for (line, command) in [
            ("/regen", Command::Regenerate),
            ("/system", Command::System(None)),
            ("/system  Be  brief. ", Command::System(Some("Be  brief."))),
            ("/set", Command::Set(None)),
            ("/set temp 0.6", Command::Set(Some(("temp", Some("0.6"))))),
            ("/set ignore-eos", Command::Set(Some(("ignore-eos", None)))),
            ("/image a b.png", Command::Image(Path::new("a b.png"))),
            ("/remember", Command::Remember(None)),
            ("/remember a b", Command::Remember(Some("a b"))),
            ("/correct a b", Command::Correct("a b")),
            ("/memory", Command::Memory),
            ("/forget 3", Command::Forget(3)),
            ("/foo", Command::Unknown("/foo")),
            ("/usr/bin/env", Command::Message),
            ("/regen it", Command::Message),
            ("/", Command::Message),
            ("what is /set?", Command::Message),
        ] {
            assert_eq!(Command::of(line).unwrap(), command, "{line}");
        }
        let saved = Command::of("/save trip").unwrap();
        assert_eq!(saved, Command::Save("trip".parse().unwrap()));
        for wrong in [
            "/save",
            "/save a b",
            "/load ../x",
            "/image",
            "/correct",
            "/forget",
            "/forget x",
        ] {
            assert!(Command::of(wrong).is_err(), "{wrong}");
        }
    }
}
