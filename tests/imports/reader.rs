//! Reads who uses whom in a crate: the paths of its files as they are written, whatever the
//! features. The library's and the program's tests of their order share it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Files by their path in `src`.
pub(crate) type Sources = BTreeMap<String, String>;

/// The files below a folder.
pub(crate) fn read(folder: &Path) -> Sources {
    let mut sources = Sources::new();
    read_folder(folder, "", &mut sources);
    sources
}

fn read_folder(folder: &Path, prefix: &str, into: &mut Sources) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
        if entry.file_type().unwrap().is_dir() {
            read_folder(&entry.path(), &format!("{name}/"), into);
        } else if name.ends_with(".rs") {
            into.insert(name, std::fs::read_to_string(entry.path()).unwrap());
        }
    }
}

/// `a/b/` of `a/b/c.rs`.
pub(crate) fn folder(file: &str) -> &str {
    &file[..file.rfind('/').map_or(0, |at| at + 1)]
}

/// A file's use of another one.
pub(crate) struct Use {
    pub(crate) from: String,
    /// The file that defines what is used: through re-exports.
    pub(crate) to: String,
    /// As it was written, from the root of the crate.
    pub(crate) path: String,
    /// Whether it is passed on (`pub use`).
    #[allow(dead_code)] // what the program's test asks
    pub(crate) is_reexport: bool,
}

impl Use {
    /// Whether a `mod.rs` uses what lies in its folder.
    pub(crate) fn is_of_child(&self) -> bool {
        self.from.ends_with("/mod.rs") && self.to.starts_with(folder(&self.from))
    }
}

/// The modules of the crate, by file.
pub(crate) struct Crate {
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
    /// Reads who uses whom in these files.
    pub(crate) fn of(sources: &Sources) -> Crate {
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

    /// The uses of other files: one for each path that is named.
    pub(crate) fn uses(&self) -> Vec<Use> {
        let mut uses = Vec::new();
        for (from, module) in &self.modules {
            for import in &module.imports {
                let to = self.definer(&import.path, 0).filter(|to| to != from);
                uses.extend(to.map(|to| Use {
                    from: from.clone(),
                    to,
                    path: import.path.join("::"),
                    is_reexport: import.is_reexport,
                }));
            }
        }
        uses
    }

    /// The file of a module.
    #[allow(dead_code)] // what the library's test asks
    pub(crate) fn file(&self, module: &[String]) -> String {
        self.files[module].clone()
    }

    /// The file that defines what a path names: through re-exports, which a parent has.
    pub(crate) fn definer(&self, path: &[String], depth: usize) -> Option<String> {
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
pub(crate) fn module_path(file: &str) -> Vec<String> {
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
pub(crate) fn tree(
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
pub(crate) fn tokens(source: &str) -> Vec<String> {
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
