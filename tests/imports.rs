//! The order of the modules, read from the source.
//!
//! A folder of `src` may use what stands below it in [`ORDER`] and nothing above; the files of a
//! folder may not use each other in a circle. Two things do not count: a `mod.rs` is made of its
//! children, so what it uses of them is no arrow, and an import through a re-export is one of the
//! file that defines the thing. Comments and texts may name whom they like.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Modules from the top to the bottom, as `docs/` and ARCHITECTURE.md have them. Where it differs
/// from a reader's guess: kernels (`arch`) know block formats (`quant`), not the other way round.
const ORDER: &[&str] = &[
    "bench",
    "error",
    "sona",
    "train",
    "learn",
    "scheduler",
    "decode",
    "embed",
    "session",
    "engine",
    "gpu",
    "backward",
    "forward",
    "layers",
    "compute",
    "lora",
    "model",
    "kv",
    "threads",
    "chat",
    "grammar",
    "sample",
    "tokenizer",
    "gguf",
    "arch",
    "quant",
    "system",
    "clock",
];

/// A module's path without `crate`: `["kv", "pool"]`.
type Module = Vec<String>;

struct Source {
    /// Files by module.
    files: BTreeMap<Module, String>,
    /// What a `mod.rs` passes on: names and the paths that they stand for.
    passed_on: BTreeMap<Module, BTreeMap<String, Module>>,
}

fn words(path: &str) -> Module {
    path.split("::")
        .map(|word| word.trim().to_owned())
        .filter(|word| !word.is_empty())
        .collect()
}

/// Rust without comments and the contents of texts.
fn code_of(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = String::with_capacity(text.len());
    let mut i = 0;
    while i < bytes.len() {
        let rest = &text[i..];
        let end_of =
            |mark: &str, skip: usize| rest[skip..].find(mark).map(|n| skip + n + mark.len());
        let raw = rest
            .strip_prefix('r')
            .map(|hashes| hashes.len() - hashes.trim_start_matches('#').len())
            .filter(|&n| rest[1 + n..].starts_with('"'));
        let before = code.chars().last().unwrap_or(' ');
        let len = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            end_of("*/", 2).unwrap_or(rest.len())
        } else if let Some(n) = raw.filter(|_| !before.is_alphanumeric() && before != '_') {
            let end = format!("\"{}", "#".repeat(n));
            end_of(&end, 2 + n).unwrap_or(rest.len())
        } else if rest.starts_with('"') {
            let mut end = 1;
            while end < rest.len() && !rest[end..].starts_with('"') {
                end += if rest[end..].starts_with('\\') { 2 } else { 1 };
                while !rest.is_char_boundary(end.min(rest.len())) {
                    end += 1;
                }
            }
            (end + 1).min(rest.len())
        } else if rest.starts_with("'\\") {
            // A character: `'{'` is no bracket.
            end_of("'", 3).unwrap_or(rest.len())
        } else if rest.starts_with('\'') && rest.chars().nth(2) == Some('\'') {
            rest.char_indices().nth(3).map_or(rest.len(), |(n, _)| n)
        } else {
            let c = rest.chars().next().expect("a character");
            code.push(c);
            i += c.len_utf8();
            continue;
        };
        code.push(' ');
        i += len;
    }
    code
}

/// The paths of a `use`: its braces written out.
fn written_out(tree: &str, before: &[String], out: &mut Vec<Module>) {
    let tree = tree.trim();
    let Some(brace) = tree.find('{') else {
        let path = tree.split(" as ").next().unwrap_or(tree);
        let mut path: Module = before.iter().cloned().chain(words(path)).collect();
        path.retain(|word| word != "self" || path_begins_with_self(before, tree));
        out.push(path);
        return;
    };
    let prefix: Module = before
        .iter()
        .cloned()
        .chain(words(&tree[..brace]))
        .collect();
    let inner = &tree[brace + 1..tree.rfind('}').expect("a closing brace")];
    let (mut depth, mut start) = (0, 0);
    for (i, c) in inner.char_indices().chain([(inner.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !inner[start..i].trim().is_empty() {
                    written_out(&inner[start..i], &prefix, out);
                }
                start = (i + 1).min(inner.len());
            }
            _ => {}
        }
    }
}

fn path_begins_with_self(before: &[String], tree: &str) -> bool {
    before.is_empty() && tree.starts_with("self")
}

/// A path that a file names, and the modules inside the file around it.
struct Named {
    path: Module,
    inside: Module,
    /// Passed on to others (`pub use`).
    is_passed_on: bool,
    is_use: bool,
}

/// All paths in `code` that may lead to another file.
fn named_in(code: &str) -> Vec<Named> {
    let mut named = Vec::new();
    // Inner modules, with the depth of braces at which each begins.
    let (mut inside, mut depth) = (Vec::<(String, usize)>::new(), 0);
    let bytes = code.as_bytes();
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let (mut i, mut public) = (0, false);
    while i < bytes.len() {
        let c = bytes[i];
        if c == b'{' {
            depth += 1;
        } else if c == b'}' {
            depth -= 1;
            if inside.last().is_some_and(|(_, at)| *at == depth) {
                inside.pop();
            }
        }
        if !is_word(c) || i > 0 && is_word(bytes[i - 1]) {
            if !c.is_ascii_whitespace() && !matches!(c, b'(' | b')' | b':') {
                public = false;
            }
            i += 1;
            continue;
        }
        let end = |from: usize, is: &dyn Fn(u8) -> bool| {
            from + bytes[from..].iter().take_while(|&&b| is(b)).count()
        };
        let word_end = end(i, &is_word);
        let modules: Module = inside.iter().map(|(name, _)| name.clone()).collect();
        match &code[i..word_end] {
            "pub" => public = true,
            "use" => {
                let stop = i + code[i..].find(';').expect("the end of a use");
                let mut paths = Vec::new();
                written_out(&code[word_end..stop], &[], &mut paths);
                named.extend(paths.into_iter().map(|path| Named {
                    path,
                    inside: modules.clone(),
                    is_passed_on: public,
                    is_use: true,
                }));
                public = false;
                i = stop;
                continue;
            }
            "mod" => {
                let name = end(word_end, &|b| b.is_ascii_whitespace());
                let name_end = end(name, &is_word);
                let next = end(name_end, &|b| b.is_ascii_whitespace());
                if bytes.get(next) == Some(&b'{') {
                    inside.push((code[name..name_end].to_owned(), depth));
                }
                public = false;
            }
            _ => {
                let path_end = end(i, &|b| is_word(b) || b == b':');
                let path = code[i..path_end].trim_end_matches(':');
                // A path's later words begin with `::` before them.
                if path.contains("::") && !(i > 1 && bytes[i - 1] == b':' && bytes[i - 2] == b':') {
                    named.push(Named {
                        path: words(path),
                        inside: modules,
                        is_passed_on: false,
                        is_use: false,
                    });
                }
                if !matches!(&code[i..word_end], "crate" | "super" | "in") {
                    public = false;
                }
                i = path_end.max(word_end);
                continue;
            }
        }
        i = word_end;
    }
    named
}

impl Source {
    fn read(root: &Path) -> Source {
        let mut files = BTreeMap::new();
        let mut folders = vec![root.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|e| e == "rs") {
                    let text = std::fs::read_to_string(&path).expect("UTF-8");
                    files.insert(
                        module_of(path.strip_prefix(root).expect("below")),
                        code_of(&text),
                    );
                }
            }
        }
        let mut source = Source {
            files,
            passed_on: BTreeMap::new(),
        };
        for (module, code) in &source.files {
            let mut names = BTreeMap::new();
            for named in named_in(code).iter().filter(|named| named.is_passed_on) {
                if let (Some(to), Some(name)) = (source.absolute(module, named), named.path.last())
                {
                    names.insert(name.clone(), to);
                }
            }
            source.passed_on.insert(module.clone(), names);
        }
        source
    }

    /// The path from the root of the crate; none for other crates and things of this file.
    fn absolute(&self, module: &Module, named: &Named) -> Option<Module> {
        let first = named.path.first()?;
        let mut here: Module = module.iter().chain(&named.inside).cloned().collect();
        let rest = match first.as_str() {
            "crate" => {
                here.clear();
                &named.path[1..]
            }
            "self" => &named.path[1..],
            "super" => {
                let n = named
                    .path
                    .iter()
                    .take_while(|word| *word == "super")
                    .count();
                here.truncate(here.len().checked_sub(n)?);
                &named.path[n..]
            }
            child => {
                let child: Module = here.iter().cloned().chain([child.to_owned()]).collect();
                if !self.files.contains_key(&child) {
                    return None;
                }
                &named.path[..]
            }
        };
        here.extend(rest.iter().cloned());
        Some(here)
    }

    /// The file that defines what a path leads to.
    fn file_of(&self, path: &[String], depth: usize) -> Module {
        let n = (0..=path.len())
            .rev()
            .find(|&n| self.files.contains_key(&path[..n]))
            .unwrap_or(0);
        let (module, rest) = path.split_at(n);
        let passed_on = self.passed_on.get(module);
        match rest.first().and_then(|name| passed_on?.get(name)) {
            Some(to) if depth < 8 => {
                let to: Module = to.iter().chain(&rest[1..]).cloned().collect();
                self.file_of(&to, depth + 1)
            }
            _ => module.to_vec(),
        }
    }

    /// The files that each file uses; those that it only passes on, or that a folder is made of,
    /// apart.
    fn arrows(&self) -> BTreeMap<&Module, BTreeSet<Module>> {
        let mut arrows = BTreeMap::new();
        for (module, code) in &self.files {
            let mut to = BTreeSet::new();
            for named in named_in(code) {
                let Some(path) = self.absolute(module, &named) else {
                    continue;
                };
                let is_own_child = path.starts_with(module) && named.is_use && named.is_passed_on;
                let file = self.file_of(&path, 0);
                if !is_own_child && file != *module && !file.is_empty() {
                    to.insert(file);
                }
            }
            arrows.insert(module, to);
        }
        arrows
    }
}

fn module_of(path: &Path) -> Module {
    let mut module: Module = path
        .with_extension("")
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    if module
        .last()
        .is_some_and(|last| last == "mod" || last == "lib")
    {
        module.pop();
    }
    module
}

fn source() -> Source {
    Source::read(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src"))
}

/// What is wrong with the order of `source`.
fn upward(source: &Source, order: &[&str]) -> Vec<String> {
    let place = |module: &str| order.iter().position(|name| *name == module);
    let mut wrong = Vec::new();
    for (from, to) in source.arrows() {
        let Some(room) = from.first() else { continue };
        let Some(at) = place(room) else {
            wrong.push(format!(
                "src/{room} is not in the order of tests/imports.rs"
            ));
            continue;
        };
        for file in to.iter().filter(|file| file[0] != *room) {
            if place(&file[0]).is_some_and(|below| below < at) {
                wrong.push(format!(
                    "{} uses {}, which stands above",
                    from.join("/"),
                    file.join("/")
                ));
            }
        }
    }
    wrong
}

/// Circles among the files of a folder: each file of one, with those of the circle that it uses.
fn circles(source: &Source) -> Vec<String> {
    let arrows = source.arrows();
    let within = |from: &Module| {
        let (from, to) = (from.clone(), &arrows[from]);
        // A folder is made of its children.
        to.iter()
            .filter(move |file| file[0] == from[0] && !file.starts_with(&from))
    };
    let mut wrong = Vec::new();
    for from in arrows.keys().filter(|module| !module.is_empty()) {
        let (mut seen, mut next) = (BTreeSet::new(), vec![*from]);
        while let Some(file) = next.pop() {
            for other in within(file) {
                if other == *from {
                    wrong.push(format!(
                        "{} is used by {}, which it uses",
                        from.join("/"),
                        file.join("/")
                    ));
                } else if seen.insert(other) {
                    next.extend(arrows.get_key_value(other).map(|(key, _)| *key));
                }
            }
        }
    }
    wrong
}

#[test]
fn imports_point_downwards() {
    let wrong = upward(&source(), ORDER);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn files_of_a_folder_form_no_circle() {
    let wrong = circles(&source());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A type that is erased could hide a dependency on what stands above.
#[test]
fn nothing_of_another_layer_is_erased() {
    // A hook is the user's own type, which it gets back; a panic of a thread has any message. And
    // `Model::engine` keeps an engine, until the `Model` of users stands above engines.
    let allowed = ["session/hooks", "threads", "model"];
    for (module, code) in &source().files {
        let name = module.join("/");
        let erased = code.contains("dyn Any") && !allowed.contains(&&*name);
        assert!(!erased, "src/{name} erases a type with `dyn Any`");
    }
}

/// Kernels are compiled once more for unit tests that reach them, a minute of a build: what opens
/// models lies in `tests/it`.
#[test]
fn unit_tests_open_no_models() {
    for (module, code) in &source().files {
        let Some(tests) = code.find("#[cfg(test)]") else {
            continue;
        };
        for name in [
            "Model::open",
            "Model::from_gguf",
            "Arch::detect",
            "Arch::available",
            "Arch::named",
        ] {
            let found = code[tests..].contains(name);
            assert!(
                !found,
                "{}: unit tests take Arch::scalar(), and no models",
                module.join("/")
            );
        }
    }
}

/// The checks above see what they are to see.
#[test]
fn a_wrong_arrow_is_found() {
    let of = |files: &[(&str, &str)]| {
        let files = files
            .iter()
            .map(|(path, text)| (module_of(Path::new(path)), code_of(text)));
        let mut source = Source {
            files: files.collect(),
            passed_on: BTreeMap::new(),
        };
        for (module, code) in &source.files {
            let names = named_in(code)
                .into_iter()
                .filter(|named| named.is_passed_on);
            let names = names.filter_map(|named| {
                Some((named.path.last()?.clone(), source.absolute(module, &named)?))
            });
            source.passed_on.insert(module.clone(), names.collect());
        }
        source
    };
    let order = ["top", "low"];
    let fine = of(&[
        ("lib.rs", "pub mod top; pub mod low;"),
        (
            "top/mod.rs",
            "mod a; mod b; pub use a::A; // use crate::top::b::B;",
        ),
        (
            "top/a.rs",
            "use crate::low::L; pub struct A; const TEXT: &str = \"crate::top::b::B\";",
        ),
        (
            "top/b.rs",
            "use crate::top::A; pub struct B; mod tests { use super::*; }",
        ),
        (
            "low.rs",
            "pub struct L; const BRACE: char = '{'; use std::fmt;",
        ),
    ]);
    assert!(upward(&fine, &order).is_empty() && circles(&fine).is_empty());
    for text in [
        "use crate::top::A;",
        "use crate::{top::{a::A}, low};",
        "fn f() { let _ = crate::top::A; }",
        "use super::top::b::B;",
        "mod inner { use super::super::top::A; }",
    ] {
        let wrong = of(&[
            ("lib.rs", "pub mod top; pub mod low;"),
            ("top/mod.rs", "mod a; mod b; pub use a::A;"),
            ("top/a.rs", "pub struct A;"),
            ("top/b.rs", "pub struct B;"),
            ("low.rs", text),
        ]);
        assert_eq!(upward(&wrong, &order).len(), 1, "{text}");
    }
    // Through the re-export of a parent, and a path instead of an import.
    let wrong = of(&[
        ("lib.rs", "mod top;"),
        (
            "top/mod.rs",
            "mod a; mod b; pub(crate) use a::A; pub(in crate::top) use b::B;",
        ),
        ("top/a.rs", "use super::B; pub struct A;"),
        ("top/b.rs", "pub struct B; fn f(_: crate::top::A) {}"),
    ]);
    assert_eq!(circles(&wrong).len(), 2, "{:?}", circles(&wrong));
}
