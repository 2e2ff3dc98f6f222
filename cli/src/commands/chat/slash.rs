//! Lines of a conversation that begin with a slash: commands.

use super::{Chat, KEPT_AS_TEXT};
use crate::flags::template::Pictures;
use crate::io::conversations::{Kept, SessionName};
use crate::io::{Failure, note, paint, picture, printable};
use ruvllm::chat::Message;
use std::path::Path;

const COMMANDS: &str = "\
/regen        answer the last message again
/system TEXT  how the model is to behave from now on; without TEXT, what it was told
/set FLAG X   a flag of sampling, as in /set temp 0.6; without FLAG, those that matter most
/image FILE   the next message is about this picture; repeatable
/save NAME    keep the conversation under this name, as --session does
/load NAME    go on with a conversation that was kept
/good, /bad   rate the answer: with --learn, the model learns from it
/stats        speed of the last answer, room in the context
/clear        forget the conversation
/help         this list
/exit         leave; so does Ctrl-D
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one.";

/// What became of a line.
pub(super) enum Line {
    /// It is a message, to be answered.
    Message,
    Done,
    Leave,
}

impl Chat<'_> {
    /// Does what a line says if it is a command. What is wrong with it is told to who types, and
    /// ends a conversation that comes from a pipe.
    pub(super) fn command(&mut self, line: &str) -> Result<Line, Failure> {
        match self.execute(line) {
            Err(Failure::Work(why) | Failure::Usage(why)) if self.interactive => {
                note(format!("error: {}", printable(why.trim_end())));
                Ok(Line::Done)
            }
            outcome => outcome,
        }
    }

    fn execute(&mut self, line: &str) -> Result<Line, Failure> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match (word, rest.trim()) {
            ("/exit" | "/quit", "") => return Ok(Line::Leave),
            ("/help" | "/?", "") => note(COMMANDS),
            ("/clear", "") => {
                self.messages.retain(|message| message.role == "system");
                self.keep()?;
                note("The conversation is forgotten.");
            }
            ("/regen", "") => self.regenerate()?,
            ("/good", "") => self.rate(true)?,
            ("/bad", "") => self.rate(false)?,
            ("/stats", "") => self.tell_stats(),
            ("/system", text) => self.system(text)?,
            ("/set", text) => self.set(text)?,
            ("/save", name) => self.save(name)?,
            ("/load", name) => self.load(name)?,
            ("/image", path) => {
                needed(path, "/image FILE")?;
                picture::open(Path::new(path)).and_then(|image| self.add_image(image))?;
                self.tell("the next message is about this picture");
            }
            _ if is_command(line) => note(format!(
                "error: {line} is no command; there are\n{COMMANDS}"
            )),
            _ => return Ok(Line::Message),
        }
        Ok(Line::Done)
    }

    fn tell(&self, text: &str) {
        note(paint("2", &format!("[{text}]")));
    }

    fn regenerate(&mut self) -> Result<(), Failure> {
        self.messages.pop_if(|last| last.role == "assistant");
        if self.messages.last().is_none_or(|last| last.role != "user") {
            note("There is no message to answer.");
            return Ok(());
        }
        self.answer()
    }

    /// Rates the last answer.
    fn rate(&mut self, is_good: bool) -> Result<(), Failure> {
        let learning = self.learning.as_ref().ok_or_else(|| {
            Failure::Usage("nothing is learnt here; start chat with --learn DIR".into())
        })?;
        note(if learning.rate(&mut self.session, is_good)? {
            "Learnt."
        } else {
            "Noted."
        });
        Ok(())
    }

    fn tell_stats(&self) {
        match &self.timings {
            Some(timings) => self.tell(timings),
            None => self.tell(&format!(
                "no answer yet; {} of {} tokens in context",
                self.session.position(),
                self.session.sequence().n_ctx()
            )),
        }
    }

    /// Tells the model how to behave, or shows what it was told.
    fn system(&mut self, text: &str) -> Result<(), Failure> {
        let told = self
            .messages
            .iter()
            .find(|message| message.role == "system");
        if text.is_empty() {
            match told {
                Some(message) => note(printable(&message.content)),
                None => self.tell("it was told nothing"),
            }
            return Ok(());
        }
        self.instruct(Pictures::without_marks(text));
        self.keep()
    }

    /// Makes `text` the one system message, the first.
    pub(super) fn instruct(&mut self, text: String) {
        self.messages.retain(|message| message.role != "system");
        self.messages.insert(0, Message::system(text));
    }

    /// Changes a flag of sampling, or shows what they are.
    fn set(&mut self, text: &str) -> Result<(), Failure> {
        let model = self.session.model().clone();
        if text.is_empty() {
            let options = self
                .sampling
                .options(model.gguf().metadata(), self.tokenizer)?;
            note(format!(
                "temp {}, top-k {}, top-p {}, min-p {}, repeat-penalty {}; `ruvllm chat --help` has all",
                options.temperature,
                options.top_k,
                options.top_p,
                options.min_p,
                options.repeat_penalty
            ));
            return Ok(());
        }
        let (name, value) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let flag = match name.trim_start_matches('-') {
            letter if letter.chars().count() == 1 => format!("-{letter}"),
            name => format!("--{name}"),
        };
        let words = [&flag[..], value.trim()];
        let given = if value.is_empty() {
            &words[..1]
        } else {
            &words
        };
        let sampling = (self.sampling.with(given)).map_err(|error| {
            let why = error.to_string();
            let why = why.lines().next().unwrap_or_default();
            Failure::Usage(why.trim_start_matches("error: ").to_string())
        })?;
        self.sampler = sampling.sampler(&model, self.tokenizer)?;
        self.sampling = sampling;
        Ok(())
    }

    /// Keeps the conversation under that name from now on.
    fn save(&mut self, name: &str) -> Result<(), Failure> {
        let name = parsed(name, "/save NAME")?;
        if !self.pictures.is_empty() {
            return Err(Failure::Usage(KEPT_AS_TEXT.into()));
        }
        if Kept::exists(&name)? {
            return Err(Failure::Usage(format!(
                "there is a conversation {name} already: /load {name} goes on with it"
            )));
        }
        let (kept, _) = Kept::open(&name)?;
        self.change(kept)?;
        self.keep()?;
        self.tell(&format!("kept as {name}, with what follows"));
        Ok(())
    }

    /// Goes on with the conversation of that name.
    fn load(&mut self, name: &str) -> Result<(), Failure> {
        let name = parsed(name, "/load NAME")?;
        if !self.pictures.is_empty() {
            return Err(Failure::Usage(KEPT_AS_TEXT.into()));
        }
        if !Kept::exists(&name)? {
            return Err(Failure::Usage(format!(
                "there is no conversation {name}; `ruvllm sessions` lists all"
            )));
        }
        let (kept, messages) = Kept::open(&name)?;
        self.change(kept)?;
        self.kept
            .iter()
            .for_each(|kept| kept.load(&mut self.session));
        self.messages = messages;
        self.tell(&format!(
            "a conversation of {} messages goes on",
            self.messages.len()
        ));
        Ok(())
    }

    /// Saves the state of the conversation that was kept until now, as another takes its place.
    fn change(&mut self, kept: Kept) -> Result<(), Failure> {
        match self.kept.replace(kept) {
            Some(left) => left.save(&self.session),
            None => Ok(()),
        }
    }
}

/// The name that a command needs.
fn parsed(name: &str, usage: &str) -> Result<SessionName, Failure> {
    needed(name, usage)?;
    name.parse()
        .map_err(|expected| Failure::Usage(format!("{name:?} is no name: {expected}")))
}

fn needed(text: &str, usage: &str) -> Result<(), Failure> {
    if text.is_empty() {
        return Err(Failure::Usage(format!("{usage}: something is missing")));
    }
    Ok(())
}

/// Whether a message is a slash and one word: a slip of the finger, not something to answer.
fn is_command(text: &str) -> bool {
    text.strip_prefix('/')
        .is_some_and(|word| !word.is_empty() && word.chars().all(|c| c.is_ascii_alphabetic()))
}
