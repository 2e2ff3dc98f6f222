//! Names and sizes of the source: what a reader meets in every file.

use crate::reader::{self, Sources};
use std::path::Path;

/// Names of types that were replaced by the field's: thread pool and its handle, target module,
/// callback, hook point, weight placement, mixer kind, configuration and permit, draft, token
/// text, pinned pages, profile, sample, training signal.
const RETIRED: &[&str] = &[
    "Team",
    "Crew",
    "Site",
    "Probe",
    "Tap",
    "Residence",
    "Has",
    "Terms",
    "Place",
    "Guess",
    "Piece",
    "Held",
    "Preset",
    "Moment",
    "Lesson",
];

/// Folders with Rust of the workspace.
const FOLDERS: &[&str] = &["src", "cli/src", "learn/src", "benches/src"];

/// Most lines of a file.
const FILE_LINES: usize = 900;
/// Lines above which a function counts as long, and how many may be.
const FUNCTION_LINES: usize = 100;
const LONG_FUNCTIONS: usize = 8;

/// Sources of the workspace without tests, by path.
fn workspace() -> Sources {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = FOLDERS.iter().flat_map(|folder| {
        let of_folder = reader::read(&root.join(folder));
        assert!(!of_folder.is_empty(), "{folder} has no sources");
        of_folder
            .into_iter()
            .map(move |(file, text)| (format!("{folder}/{file}"), text))
    });
    files
        // `gpu/check` is what `tests/metal`, `tests/webgpu` and `doctor` run.
        .filter(|(file, _)| !file.ends_with("tests.rs") && !file.contains("/gpu/check/"))
        .collect()
}

/// Names of the types that a file defines.
fn types(text: &str) -> Vec<String> {
    let tokens = reader::tokens(text);
    let kinds = ["struct", "enum", "trait", "type", "union"];
    let named = tokens.windows(2).filter(|pair| kinds.contains(&&*pair[0]));
    named.map(|pair| pair[1].to_string()).collect()
}

#[test]
fn types_have_the_field_s_names() {
    for (file, text) in workspace() {
        for name in types(&text) {
            assert!(
                !RETIRED.contains(&&*name),
                "{file}: `{name}` is a name that no reader searches for"
            );
        }
    }
    assert_eq!(types("pub(crate) enum Team { A } // struct Crew"), ["Team"]);
}

#[test]
fn files_are_short() {
    for (file, text) in workspace() {
        let lines = text.lines().count();
        assert!(lines <= FILE_LINES, "{file} has {lines} lines");
    }
}

/// Functions of a formatted file with their lines: a body ends where its line's indentation
/// comes again.
fn functions(text: &str) -> Vec<(&str, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (first, line) in lines.iter().enumerate() {
        let indent = &line[..line.len() - line.trim_start().len()];
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some(at) = words.iter().position(|&word| word == "fn") else {
            continue;
        };
        let before = ["const", "async", "unsafe", "default", "extern", "\"C\""];
        let is_item = words[..at]
            .iter()
            .all(|word| word.starts_with("pub") || word.starts_with("in") || before.contains(word));
        // Of a declaration, or with its body in the line.
        if !is_item || line.ends_with(';') || line.ends_with('}') {
            continue;
        }
        let end = lines[first..].iter().position(|&end| {
            end.strip_prefix(indent)
                .is_some_and(|rest| rest == "}" || rest.starts_with(')') && rest.ends_with(';'))
        });
        if let (Some(end), Some(name)) = (end, words.get(at + 1)) {
            found.push((*name, end + 1));
        }
    }
    found
}

#[test]
fn functions_are_short() {
    let mut long = Vec::new();
    for (file, text) in workspace() {
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        for (name, lines) in functions(code) {
            if lines > FUNCTION_LINES {
                long.push(format!("{file}: {name} has {lines} lines"));
            }
        }
    }
    assert!(long.len() <= LONG_FUNCTIONS, "{}", long.join("\n"));
    let text = "impl A {\n    pub fn long(\n        a: u8,\n    ) {\n        b();\n    }\n    fn short() {}\n}\n";
    assert_eq!(functions(text), [("long(", 5)]);
}
