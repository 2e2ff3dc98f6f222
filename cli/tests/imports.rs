//! Imports of the program's files: the order of its rooms, commands that stand by themselves, no
//! circles. Reads paths as they are written, whatever the features.

#[path = "../../tests/imports/reader.rs"]
mod reader;

use reader::{Crate, Sources};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Rooms of `cli/src` from the top: what stands above may use what stands below, and rooms on one
/// line do not use each other. `lib.rs` and `main.rs` stand above all.
const ORDER: &[&[&str]] = &[
    &["commands"],
    &["serve", "bench"],
    &["flags"],
    &["convert", "pull"],
    &["quantize"],
    &["io"],
];

#[test]
fn rooms_keep_their_order() {
    let sources = reader::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    assert!(sources.len() > 50, "{} files", sources.len());
    let faults = faults(&sources);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// What is wrong with the imports of these files.
fn faults(sources: &Sources) -> Vec<String> {
    let mut edges = BTreeSet::new();
    let mut faults = Vec::new();
    for used in Crate::of(sources).uses() {
        if let Some(fault) = fault(&used.from, &used.to) {
            faults.push(format!("{fault} ({})", used.path));
        }
        // A parent may re-export its children.
        if !(used.is_reexport && used.is_of_child()) {
            edges.insert((used.from, used.to));
        }
    }
    faults.extend(circles(&edges));
    faults.sort();
    faults.dedup();
    faults
}

/// What is wrong with a file's use of another one.
fn fault(from: &str, to: &str) -> Option<String> {
    let room = |file: &str| file.split_once('/').map_or("", |(room, _)| room).to_owned();
    let rank = |room: &str| match ORDER.iter().position(|rooms| rooms.contains(&room)) {
        None if !room.is_empty() => panic!("{room} has no place in ORDER"),
        place => place.map_or(0, |place| place + 1),
    };
    let (from_room, to_room) = (room(from), room(to));
    if from_room == to_room {
        let is_other_command = from_room == "commands" && from != "commands/mod.rs" && from != to;
        return is_other_command.then(|| format!("{from}: a command uses another one, {to}"));
    }
    (rank(&from_room) >= rank(&to_room))
        .then(|| format!("{from}: uses {to}, which does not stand below it"))
}

/// The circles among the entries of each folder.
fn circles(edges: &BTreeSet<(String, String)>) -> Vec<String> {
    // By folder: which entry uses which, and a file that shows it.
    let mut folders: BTreeMap<String, BTreeMap<String, BTreeMap<String, String>>> = BTreeMap::new();
    for (from, to) in edges {
        let mut common = 0;
        for (at, _) in from.match_indices('/') {
            if to.get(..=at) == Some(&from[..=at]) {
                common = at + 1;
            }
        }
        let entry = |file: &str| file[common..].split('/').next().unwrap().to_owned();
        folders
            .entry(from[..common].to_owned())
            .or_default()
            .entry(entry(from))
            .or_default()
            .entry(entry(to))
            .or_insert_with(|| format!("{from} uses {to}"));
    }
    let mut circles = Vec::new();
    for (folder, uses) in &folders {
        let mut done = BTreeSet::new();
        for start in uses.keys() {
            let mut path = Vec::new();
            if let Some(circle) = walk(uses, start, &mut path, &mut done) {
                let shown: Vec<_> = circle
                    .iter()
                    .zip(circle.iter().cycle().skip(1))
                    .map(|(from, to)| uses[from][to].as_str())
                    .collect();
                circles.push(format!("circle in {folder}: {}", shown.join(", ")));
            }
        }
    }
    circles
}

/// A circle that is reached from `at`; entries that are `done` lead to none.
fn walk(
    uses: &BTreeMap<String, BTreeMap<String, String>>,
    at: &str,
    path: &mut Vec<String>,
    done: &mut BTreeSet<String>,
) -> Option<Vec<String>> {
    if let Some(from) = path.iter().position(|entry| entry == at) {
        return Some(path[from..].to_vec());
    }
    if !done.insert(at.to_owned()) {
        return None;
    }
    path.push(at.to_owned());
    for to in uses.get(at).into_iter().flat_map(BTreeMap::keys) {
        if let Some(circle) = walk(uses, to, path, done) {
            return Some(circle);
        }
    }
    path.pop();
    None
}

/// What the test finds in small trees.
#[test]
fn faults_are_found() {
    let check = |files: &[(&str, &str)]| {
        let sources = files
            .iter()
            .map(|(file, text)| ((*file).to_owned(), (*text).to_owned()));
        faults(&sources.collect())
    };
    let sound = [
        ("lib.rs", "mod commands; mod io; use commands::run;"),
        ("commands/mod.rs", "mod a; pub(crate) fn run() { a::run() }"),
        (
            "commands/a.rs",
            "use crate::io::{self, Failure, text::{read as get}}; mod tests { use super::*; }",
        ),
        (
            "io/mod.rs",
            "mod failure; pub(crate) mod text; pub(crate) use failure::*;",
        ),
        (
            "io/failure.rs",
            "pub(crate) struct Failure; pub(in crate::commands) struct B; // use crate::commands::a;",
        ),
        (
            "io/text.rs",
            "use super::{B, Failure}; const A: &str = \"crate::commands::a\"; fn read(a: &'static B, c: char) { c == '\"'; }",
        ),
    ];
    assert_eq!(check(&sound), [""; 0]);
    for (file, text, part) in [
        (
            "commands/b.rs",
            "use crate::commands::a::x;",
            "a command uses another",
        ),
        (
            "commands/b.rs",
            "fn f() { super::a::x() }",
            "a command uses another",
        ),
        (
            "flags/b.rs",
            "use crate::{commands, io};",
            "does not stand below",
        ),
        (
            "io/b.rs",
            "mod tests { fn f() { crate::flags::x(); } }",
            "does not stand below",
        ),
        ("io/b.rs", "use crate::Cli;", "does not stand below"),
        ("serve/b.rs", "use crate::bench::x;", "does not stand below"),
        // Through what the parent re-exports.
        (
            "io/failure.rs",
            "pub(crate) struct Failure; use super::text::read;",
            "circle in io/",
        ),
        (
            "io/failure.rs",
            "pub(crate) struct Failure; fn f() { crate::io::text::read() }",
            "circle in io/",
        ),
    ] {
        let mut files = sound.to_vec();
        files.extend([("flags/mod.rs", "fn x() {}"), ("bench/mod.rs", "fn x() {}")]);
        files.retain(|(name, _)| *name != file);
        files.push((file, text));
        let found = check(&files);
        assert!(
            found.len() == 1 && found[0].contains(part),
            "{file} with {text:?}: {found:?}"
        );
    }
}
