//! What a folder remembers, as people and programs see it.

use crate::io::{Failure, note, printable, size};
use ruvllm_learn::memory::{Entry, Memory, MemoryOptions, NewEntry, Verdict};
use serde_json::{Value, json};
use std::path::Path;

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

/// Looking at a folder makes none of its entries go, nor does a line that is added.
pub(crate) fn widest_memory() -> MemoryOptions {
    MemoryOptions {
        max_entries: 100_000,
        max_bytes: u64::MAX,
    }
}

/// How much is remembered.
pub(crate) fn memory_extent(memory: &Memory) -> String {
    let (n, bytes) = (memory.entries().len(), size(memory.bytes()));
    let noun = if n == 1 { "entry" } else { "entries" };
    format!("{n} {noun}, {bytes}")
}

/// What is known of it without notes, if an adapter is in effect.
pub(crate) fn memory_known(memory: &Memory) -> Option<String> {
    let version = memory.versions().last()?;
    Some(format!(
        "adapter {} is in effect: trained on {} entries, it answers {} of {} questions that were kept from it; \
         {} entries are new or changed",
        version.number,
        version.n_entries(),
        version.n_said,
        version.n_asked,
        memory.n_unconsolidated()
    ))
}

/// The memory that a folder has beside what was learnt while running, if it has one.
pub(crate) fn memory_beside(folder: &Path) -> Result<Option<Memory>, Failure> {
    let files = std::fs::read_dir(folder).map_err(Failure::file(folder))?;
    let mut names = files.filter_map(|file| file.ok()?.file_name().into_string().ok());
    let is_log = |name: &String| name.starts_with("memory-") && name.ends_with(".log");
    let has_log = names.any(|name| is_log(&name));
    let memory = has_log.then(|| Memory::open(folder, &widest_memory()));
    Ok(memory.transpose()?)
}
