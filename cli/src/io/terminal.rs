//! The terminal: whether there is one, its colours, what may be shown on it.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;

/// `text` as it can be shown: what comes from a file could otherwise command the terminal, or fill
/// it. Keeps line ends.
pub(crate) fn printable(text: &str) -> String {
    /// Characters shown of the beginning and of the end of a line.
    const SHOWN: usize = 1000;
    let lines = text.split('\n').map(|line| {
        let line = line.replace(char::is_control, "\u{fffd}");
        let n = line.chars().count();
        if n <= 2 * SHOWN {
            return line;
        }
        let (head, tail) = (line.chars().take(SHOWN), line.chars().skip(n - SHOWN));
        head.chain(" … ".chars()).chain(tail).collect()
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Whether to use colours on a stream.
pub(crate) fn color(stream: &impl IsTerminal) -> bool {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    stream.is_terminal()
        && !set("NO_COLOR")
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// `text` in the colours of an ANSI code on stderr, if it has colours.
pub(crate) fn paint(code: &str, text: &str) -> String {
    if color(&io::stderr()) {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}

/// Where notes go, if not to stderr as they are.
static NOTES: OnceLock<fn(&str)> = OnceLock::new();

/// A line for the user on stderr.
pub(crate) fn note(text: impl fmt::Display) {
    match NOTES.get() {
        Some(say) => say(&text.to_string()),
        None => drop(writeln!(io::stderr(), "{text}")),
    }
}

/// Has `say` tell notes from now on, as where each line on stderr has to be JSON.
#[cfg(feature = "serve")]
pub(crate) fn notes_to(say: fn(&str)) {
    let _ = NOTES.set(say);
}

/// Whether notes go elsewhere.
pub(crate) fn notes_are_told() -> bool {
    NOTES.get().is_some()
}

/// Whether someone sits before stdin.
pub(crate) fn stdin_is_terminal() -> bool {
    io::stdin().is_terminal()
}
