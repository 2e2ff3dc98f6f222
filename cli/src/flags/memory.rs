//! What a folder remembers, as people and programs see it.

use crate::io::{Failure, note, printable};
use ruvllm_learn::memory::{Entry, Memory, NewEntry, Verdict};
use serde_json::{Value, json};

/// Remembers a text, and tells its number.
pub(crate) fn remember(memory: &mut Memory, new: NewEntry) -> Result<(), Failure> {
    let is_correction = new.is_correction;
    let number = memory.remember(new, None)?;
    let corrected = memory.entry(number).map_or(0, |entry| entry.corrects);
    note(match (is_correction, corrected) {
        (false, _) => format!("entry {number}"),
        (true, 0) => format!("entry {number}; nothing is like it, so it corrects nothing"),
        (true, old) => format!("entry {number} corrects entry {old}"),
    });
    Ok(())
}

/// An entry on a line.
pub(crate) fn entry_line(memory: &Memory, entry: &Entry) -> String {
    let corrected = memory.corrected_by(entry.number);
    let corrected = corrected.map_or(String::new(), |by| format!(" (corrected by {by})"));
    format!(
        "{:>5} {:<7} {}{corrected}",
        entry.number,
        entry.verdict.name(),
        printable(&entry.text)
    )
}

/// An entry as a JSON object.
pub(crate) fn entry_json(memory: &Memory, entry: &Entry) -> Value {
    json!({
        "number": entry.number,
        "text": entry.text,
        "verdict": entry.verdict.name(),
        "session": entry.session,
        "timestamp": entry.timestamp,
        "revision": entry.revision,
        "corrects": (entry.corrects != 0).then_some(entry.corrects),
        "corrected_by": memory.corrected_by(entry.number),
    })
}

/// A verdict by its name.
pub(crate) fn verdict(name: &str) -> Result<Verdict, String> {
    let mut all = Verdict::ALL.iter();
    all.find(|(known, _)| *known == name)
        .map(|(_, verdict)| *verdict)
        .ok_or_else(|| format!("there is no verdict {name:?}; there are success, partial, failure"))
}
