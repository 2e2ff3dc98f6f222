//! Lines that somebody types, or that come from a pipe.

use super::conversations::state_folder;
use super::{Failure, note};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

/// What a conversation waits for.
enum Event {
    Line(Result<String, ReadlineError>),
    /// Ctrl-C where it is no key, or the system asks the program to end.
    Interrupt,
}

/// The lines of the conversation, read by a thread of its own, so that an interrupt is heard while
/// one is awaited.
pub(crate) struct Lines {
    /// A prompt to read a line after, and what goes to the history before that.
    ask: Sender<(&'static str, Option<String>)>,
    events: Receiver<Event>,
    interrupt: Sender<Event>,
    reader: JoinHandle<()>,
    /// Lines read.
    n: usize,
}

impl Lines {
    pub(crate) fn new(interactive: bool) -> Result<Lines, Failure> {
        let mut editor = DefaultEditor::new()?;
        let history = history_file().filter(|_| interactive);
        let (ask, asked) = channel::<(&str, Option<String>)>();
        let (interrupt, events) = channel();
        let read = interrupt.clone();
        let reader = Builder::new().spawn(move || {
            if let Some(path) = &history {
                // The first time there is none.
                let _ = editor.load_history(path);
            }
            for (prompt, entry) in asked {
                let _ = entry.map(|entry| editor.add_history_entry(entry));
                if read.send(Event::Line(editor.readline(prompt))).is_err() {
                    break;
                }
            }
            if let Some(path) = &history {
                let saved = path
                    .parent()
                    .map_or(Ok(()), std::fs::create_dir_all)
                    .is_ok()
                    && editor.save_history(path).is_ok();
                if !saved {
                    note(format!(
                        "The history could not be saved to {}.",
                        path.display()
                    ));
                }
            }
        })?;
        Ok(Lines {
            ask,
            events,
            interrupt,
            reader,
            n: 0,
        })
    }

    /// The next line; an interrupt ends the conversation.
    pub(crate) fn next(
        &mut self,
        prompt: &'static str,
        history: Option<String>,
    ) -> Result<Result<String, ReadlineError>, Failure> {
        let event = self
            .ask
            .send((prompt, history))
            .ok()
            .and_then(|()| self.events.recv().ok());
        self.n += 1;
        match event {
            Some(Event::Line(line)) => Ok(line),
            Some(Event::Interrupt) => Err(Failure::Interrupted),
            None => Ok(Err(ReadlineError::Eof)),
        }
    }

    /// What ends the wait for a line.
    pub(crate) fn interrupter(&self) -> impl Fn() + Send + 'static {
        let interrupt = self.interrupt.clone();
        // Nobody waits any more once the conversation has ended.
        move || drop(interrupt.send(Event::Interrupt))
    }

    /// Interrupts that came while nothing was awaited do not end the next wait.
    pub(crate) fn forget_interrupts(&self) {
        self.events.try_iter().for_each(drop);
    }

    /// Lines read.
    pub(crate) fn n(&self) -> usize {
        self.n
    }

    /// Lets the reader save the history.
    pub(crate) fn end(self) {
        drop(self.ask);
        // A reader that panicked has said so.
        let _ = self.reader.join();
    }
}

/// Where the lines typed are kept.
fn history_file() -> Option<PathBuf> {
    Some(state_folder()?.join("history"))
}
