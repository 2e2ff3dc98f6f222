//! Imports of the program's files: the order of its rooms, commands that stand by themselves, no
//! circles. Reads paths as they are written, whatever the features.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Rooms of `cli/src` from the top: what stands above may use what stands below, and rooms on one
/// line do not use each other. `lib.rs` and `main.rs` stand above all.
const ORDER: &[&[&str]] = &[
    &["commands"],
    &["serve", "bench", "convert"],
    &["quantize"],
    &["flags"],
    &["pull"],
    &["io"],
];

/// Files by their path in `src`.
type Sources = BTreeMap<String, String>;

#[test]
fn rooms_keep_their_order() {
    let mut sources = Sources::new();
    read(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
        "",
        &mut sources,
    );
    assert!(sources.len() > 50, "{} files", sources.len());
    let faults = faults(&sources);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

fn read(folder: &Path, prefix: &str, into: &mut Sources) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
        if entry.file_type().unwrap().is_dir() {
            read(&entry.path(), &format!("{name}/"), into);
        } else if name.ends_with(".rs") {
            into.insert(name, std::fs::read_to_string(entry.path()).unwrap());
        }
    }
}

/// What is wrong with the imports of these files.
fn faults(sources: &Sources) -> Vec<String> {
    let crate_ = Crate::of(sources);
    let mut edges = BTreeSet::new();
    let mut faults = Vec::new();
    for (file, module) in &crate_.modules {
        for import in &module.imports {
            let Some(target) = crate_.definer(&import.path, 0) else {
                continue;
            };
            if target == *file {
                continue;
            }
            if let Some(fault) = fault(file, &target) {
                faults.push(format!("{fault} ({})", import.path.join("::")));
            }
            // A parent may re-export its children.
            let is_parent = file.ends_with("/mod.rs") && target.starts_with(folder(file));
            if !(import.is_reexport && is_parent) {
                edges.insert((file.clone(), target));
            }
        }
    }
    faults.extend(circles(&edges));
    faults.sort();
    faults.dedup();
    faults
}

/// `a/b/` of `a/b/c.rs`.
fn folder(file: &str) -> &str {
    &file[..file.rfind('/').map_or(0, |at| at + 1)]
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

/// The modules of the crate, by file.
struct Crate {
    modules: BTreeMap<String, Module>,
    /// Files by the path of their module.
    files: BTreeMap<Vec<String>, String>,
}

#[derive(Default)]
struct Module {
    imports: Vec<Import>,
    /// Names that it defines.
    items: BTreeSet<String>,
}

struct Import {
    /// From the root of the crate; the last name may be `*`.
    path: Vec<String>,
    /// What it is called here.
    name: String,
    /// Whether `use` says it, not a path where it is used.
    is_use: bool,
    is_reexport: bool,
}

impl Crate {
    fn of(sources: &Sources) -> Crate {
        let files: BTreeMap<Vec<String>, String> = sources
            .keys()
            .map(|file| (module_path(file), file.clone()))
            .collect();
        let module = |(file, source): (&String, &String)| {
            (
                file.clone(),
                Module::parse(&module_path(file), source, &files),
            )
        };
        Crate {
            modules: sources.iter().map(module).collect(),
            files,
        }
    }

    /// The file that defines what a path names: through re-exports, which a parent has.
    fn definer(&self, path: &[String], depth: usize) -> Option<String> {
        let n = (0..=path.len())
            .rev()
            .find(|&n| self.files.contains_key(&path[..n]))?;
        let file = &self.files[&path[..n]];
        let module = &self.modules[file];
        let Some(name) = path.get(n) else {
            return Some(file.clone());
        };
        // Re-exports do not go in circles; if they did, rustc would say so.
        if module.items.contains(name) || depth > 8 {
            return Some(file.clone());
        }
        // A parent's imports are there for its children, too.
        for import in module.imports.iter().filter(|import| import.is_use) {
            if import.name == *name {
                let path = [&import.path, &path[n + 1..]].concat();
                return self.definer(&path, depth + 1);
            }
            if import.name == "*" {
                let inner = &import.path[..import.path.len() - 1];
                let target = self.definer(inner, depth + 1)?;
                if self.modules[&target].items.contains(name) {
                    return Some(target);
                }
            }
        }
        Some(file.clone())
    }
}

/// `a/b.rs` and `a/b/mod.rs` are `a::b`.
fn module_path(file: &str) -> Vec<String> {
    let file = file.strip_suffix(".rs").unwrap();
    let file = file.strip_suffix("/mod").unwrap_or(file);
    match file {
        "lib" => Vec::new(),
        file => file.split('/').map(str::to_owned).collect(),
    }
}

impl Module {
    fn parse(own: &[String], source: &str, files: &BTreeMap<Vec<String>, String>) -> Module {
        let tokens = tokens(source);
        let mut module = Module::default();
        // Modules within the file, and the depths of braces at which they end.
        let mut inner: Vec<usize> = Vec::new();
        let (mut depth, mut i) = (0, 0);
        while i < tokens.len() {
            let token = tokens[i].as_str();
            let before = if i > 0 { tokens[i - 1].as_str() } else { "" };
            let next = |n: usize| tokens.get(i + n).map_or("", String::as_str);
            match token {
                "{" => depth += 1,
                "}" => {
                    depth -= 1;
                    if inner.last() == Some(&depth) {
                        inner.pop();
                    }
                }
                "mod" if next(2) == "{" => inner.push(depth),
                "fn" | "struct" | "enum" | "const" | "static" | "type" | "trait" | "mod"
                    if depth == 0 =>
                {
                    module.items.insert(next(1).to_owned());
                }
                _ => {}
            }
            // `pub(in crate::a)` uses nothing.
            let is_path = next(1) == "::" && !matches!(before, "::" | ".");
            let is_path = is_path && !(before == "in" && i > 1 && tokens[i - 2] == "(");
            let child = [own, &[token.to_owned()]].concat();
            let begins = match token {
                "crate" | "super" | "self" => true,
                // Paths begin with a child's name, too.
                _ => files.contains_key(&child) && !own.is_empty() && inner.is_empty(),
            };
            if is_path && begins {
                let mut here = own.to_vec();
                here.extend(inner.iter().map(|_| "(inner)".to_owned()));
                let first = if matches!(token, "crate" | "super" | "self") {
                    here
                } else {
                    own.to_vec()
                };
                let is_use = before == "use";
                let is_reexport = is_use && is_public(&tokens[..i - 1]);
                let (mut end, mut paths) = (i, Vec::new());
                tree(&tokens, &mut end, first, &mut paths);
                module
                    .imports
                    .extend(paths.into_iter().map(|(path, name)| Import {
                        path,
                        name,
                        is_use,
                        is_reexport,
                    }));
                i = end.max(i + 1);
                continue;
            }
            i += 1;
        }
        module
    }
}

/// Whether the last words before `use` are a visibility.
fn is_public(before: &[String]) -> bool {
    match before.last().map(String::as_str) {
        Some("pub") => true,
        Some(")") => {
            let open = before.iter().rposition(|token| token == "(");
            open.is_some_and(|at| at > 0 && before[at - 1] == "pub")
        }
        _ => false,
    }
}

/// Reads a path or a tree of `use` from `at` on, and goes behind it: paths from the root, and what
/// each is called here.
fn tree(
    tokens: &[String],
    at: &mut usize,
    mut path: Vec<String>,
    into: &mut Vec<(Vec<String>, String)>,
) {
    let get = |at: usize| tokens.get(at).map_or("", String::as_str);
    loop {
        match get(*at) {
            "crate" => path.clear(),
            "super" => drop(path.pop()),
            "self" => {}
            "{" => {
                *at += 1;
                while !matches!(get(*at), "}" | "") {
                    if get(*at) == "," {
                        *at += 1;
                    } else {
                        tree(tokens, at, path.clone(), into);
                    }
                }
                *at += 1;
                return;
            }
            word => path.push(word.to_owned()),
        }
        *at += 1;
        let more = get(*at + 1);
        let goes_on = more == "{"
            || more == "*"
            || more.starts_with(char::is_alphabetic)
            || more.starts_with('_');
        if get(*at) != "::" || !goes_on {
            break;
        }
        *at += 1;
    }
    let name = if get(*at) == "as" {
        *at += 2;
        get(*at - 1).to_owned()
    } else {
        path.last().cloned().unwrap_or_default()
    };
    path.retain(|name| name != "(inner)");
    into.push((path, name));
}

/// Words, `::` and other signs, without comments, texts and characters.
fn tokens(source: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = source;
    while let Some(c) = rest.chars().next() {
        let skip = |rest: &str, end: &str| rest.find(end).map_or(rest.len(), |at| at + end.len());
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let n = if rest.starts_with("//") {
            skip(rest, "\n")
        } else if rest.starts_with("/*") {
            skip(rest, "*/")
        } else if let Some(n) = raw_text(rest) {
            n
        } else if c == '"' {
            text(rest)
        } else if c == '\'' {
            character(rest)
        } else if is_word(c) {
            let n = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            tokens.push(rest[..n].to_owned());
            n
        } else if rest.starts_with("::") {
            tokens.push("::".into());
            2
        } else {
            if !c.is_whitespace() {
                tokens.push(c.into());
            }
            c.len_utf8()
        };
        rest = &rest[n..];
    }
    tokens
}

/// Length of the raw text that `rest` begins with.
fn raw_text(rest: &str) -> Option<usize> {
    let inner = rest.strip_prefix("br").or_else(|| rest.strip_prefix('r'))?;
    let hashes = inner.len() - inner.trim_start_matches('#').len();
    let begin = rest.len() - inner.len() + hashes;
    if !rest[begin..].starts_with('"') {
        return None;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    let n = rest[begin + 1..].find(&end)?;
    Some(begin + 1 + n + end.len())
}

/// Length of the text that `rest` begins with.
fn text(rest: &str) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// Length of the character, or of the lifetime, that `rest` begins with.
fn character(rest: &str) -> usize {
    let mut chars = rest.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), Some((at, c))) => {
            let from = at + c.len_utf8();
            from + rest[from..].find('\'').map_or(0, |at| at + 1)
        }
        (Some(_), Some((at, '\''))) => at + 1,
        _ => rest[1..]
            .find(|c: char| !c.is_alphanumeric() && c != '_')
            .map_or(rest.len(), |at| at + 1),
    }
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
