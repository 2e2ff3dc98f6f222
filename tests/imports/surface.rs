//! What a user of the library sees, counted in the source: names of the root, public paths, public
//! functions, methods of `Session`. `docs/design/api.md` says which of it is stable.

use crate::reader::{self, Crate, Sources};
use std::collections::BTreeMap;

/// Names of the root: rooms, and what most programs need. A name more is a decision.
const ROOT: &[&str] = &[
    "CancelToken",
    "Embedder",
    "Engine",
    "Error",
    "Finish",
    "Generation",
    "KvType",
    "Model",
    "Reranker",
    "Result",
    "Sampler",
    "SamplerOptions",
    "Session",
    "SessionError",
    "SessionOptions",
    "StopReason",
    "SystemMemory",
    "TokenText",
    "Tokenizer",
    "arch",
    "chat",
    "compute",
    "decode",
    "engine",
    "gguf",
    "gpu",
    "grammar",
    "hub",
    "kv",
    "lora",
    "model",
    "quant",
    "sample",
    "scheduler",
    "session",
    "tokenizer",
    "vision",
];
/// Most names of the root.
const ROOT_NAMES: usize = 45;
/// Rooms for experts: kernels, block formats, the file, kernels of GPUs.
const EXPERT: &[&str] = &["arch", "quant", "gguf", "gpu"];
/// Most public functions outside these rooms, and in all: fewer may be, more is a decision. One that
/// a macro declares counts as often as it is written.
const FUNCTIONS: usize = 493;
const ALL_FUNCTIONS: usize = 690;
/// Most public methods of a session; others are behind the handles that it lends.
const SESSION_METHODS: usize = 20;

/// Sources of the library without unit tests.
fn library() -> Sources {
    let mut sources = crate::sources();
    sources.retain(|file, _| !file.ends_with("tests.rs"));
    for text in sources.values_mut() {
        let end = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
        text.truncate(end);
    }
    sources
}

/// Public functions among the tokens of a file, also those of private modules and hidden ones: who
/// writes `pub` means everybody.
fn public_functions(tokens: &[String]) -> usize {
    let is_public = |at: usize| {
        let qualifiers = ["const", "unsafe", "async", "extern"];
        let before = tokens[..at].iter().rev();
        let mut before = before.skip_while(|token| qualifiers.contains(&&***token));
        before.next().is_some_and(|token| token == "pub")
    };
    let is_function = |&at: &usize| tokens[at] == "fn" && is_public(at);
    (0..tokens.len()).filter(is_function).count()
}

/// Public methods in the blocks `impl name { … }` of a file.
fn public_methods(tokens: &[String], name: &str) -> usize {
    let mut n = 0;
    for at in 0..tokens.len().saturating_sub(2) {
        if tokens[at..at + 3] == ["impl", name, "{"] {
            n += public_functions(&tokens[at + 3..block_end(tokens, at + 2)]);
        }
    }
    n
}

/// Index of the bracket that closes the one at `open`.
fn block_end(tokens: &[String], open: usize) -> usize {
    let mut depth = 0;
    let end = tokens[open..].iter().position(|token| {
        depth += i32::from(token == "{") - i32::from(token == "}");
        depth == 0
    });
    open + end.expect("brackets are balanced")
}

/// What everybody can name: path from the root, and the file and name of its definition.
struct Public {
    path: String,
    definition: (String, String),
}

/// Public names of a module and of its public modules.
fn public_names(sources: &Sources, of: &Crate, file: &str, path: &str, names: &mut Vec<Public>) {
    let tokens = reader::tokens(&sources[file]);
    let own = reader::module_path(file);
    let (mut depth, mut at) = (0, 0);
    while at + 2 < tokens.len() {
        let kind = tokens[at + 1].as_str();
        match tokens[at].as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            "pub" if depth == 0 && kind == "use" => {
                at += 2;
                let mut paths = Vec::new();
                // Paths of the root begin with a room, those of a room with a file of it.
                let first = match tokens[at].as_str() {
                    "crate" => Vec::new(),
                    _ => own.clone(),
                };
                reader::tree(&tokens, &mut at, first, &mut paths);
                for (used, name) in paths {
                    if name == "*" {
                        let module = of.file(&used[..used.len() - 1]);
                        public_names(sources, of, &module, path, names);
                        continue;
                    }
                    let definer = of.definer(&used, 0).unwrap_or_default();
                    names.push(Public {
                        path: format!("{path}::{name}"),
                        definition: (definer, used.last().cloned().unwrap_or_default()),
                    });
                }
                continue;
            }
            "pub" if depth == 0 => {
                let kinds = [
                    "struct", "enum", "trait", "type", "union", "const", "static",
                ];
                let name = match kind {
                    "unsafe" | "const" if tokens[at + 2] == "fn" => &tokens[at + 3],
                    "fn" | "mod" => &tokens[at + 2],
                    kind if kinds.contains(&kind) => &tokens[at + 2],
                    _ => "",
                };
                if !name.is_empty() {
                    let path = format!("{path}::{name}");
                    if kind == "mod" {
                        let inner = of.file(&[&own[..], &[name.to_owned()]].concat());
                        public_names(sources, of, &inner, &path, names);
                    }
                    let definition = (file.to_owned(), name.to_owned());
                    names.push(Public { path, definition });
                }
            }
            _ => {}
        }
        at += 1;
    }
}

/// All of the library's.
fn all_public_names() -> Vec<Public> {
    let sources = library();
    let mut names = Vec::new();
    public_names(
        &sources,
        &Crate::of(&sources),
        "lib.rs",
        "ruvllm",
        &mut names,
    );
    names
}

#[test]
fn the_root_is_small() {
    let names = all_public_names();
    let of_root = |public: &Public| {
        let name = public.path.strip_prefix("ruvllm::")?;
        (!name.contains("::")).then(|| name.to_owned())
    };
    let mut found: Vec<String> = names.iter().filter_map(of_root).collect();
    found.sort();
    assert_eq!(found, ROOT, "names of the root");
    assert!(found.len() <= ROOT_NAMES, "{} names", found.len());
}

#[test]
fn everything_has_one_path_and_a_name_of_its_own() {
    let (mut paths, mut types) = (BTreeMap::new(), BTreeMap::new());
    let mut wrong = Vec::new();
    for Public { path, definition } in all_public_names() {
        // Each GPU language has a device, a buffer and a stage of its own.
        if path.starts_with("ruvllm::gpu::") {
            continue;
        }
        let name = path.rsplit("::").next().unwrap_or_default().to_owned();
        if let Some(other) = paths.insert(definition, path.clone()) {
            wrong.push(format!("{path} is {other}, too"));
            continue;
        }
        let is_type = name.starts_with(char::is_uppercase) && name.contains(char::is_lowercase);
        if let Some(other) = types.insert(name, path.clone()).filter(|_| is_type) {
            wrong.push(format!("{path} has the name of {other}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn public_functions_are_few() {
    let mut of_rooms = BTreeMap::<String, usize>::new();
    for (file, text) in library() {
        let room = crate::room(&file).to_owned();
        *of_rooms.entry(room).or_default() += public_functions(&reader::tokens(&text));
    }
    let all: usize = of_rooms.values().sum();
    let is_expert = |(room, _): &(&String, &usize)| EXPERT.contains(&&***room);
    let expert: usize = of_rooms.iter().filter(is_expert).map(|(_, n)| n).sum();
    assert!(
        all - expert <= FUNCTIONS && all <= ALL_FUNCTIONS,
        "{} outside the rooms for experts, {all} in all: {of_rooms:?}",
        all - expert
    );
    let tokens =
        reader::tokens("pub fn a() {} pub(crate) fn b() {} pub const unsafe fn c() {} fn d() {}");
    assert_eq!(public_functions(&tokens), 2);
}

#[test]
fn a_session_has_few_methods() {
    let sources = library();
    let n = |text: &String| public_methods(&reader::tokens(text), "Session");
    let n: usize = sources.values().map(n).sum();
    assert!((1..=SESSION_METHODS).contains(&n), "{n} methods");
    let text = "impl Session { pub fn a() { b(); } fn c() {} } impl Other { pub fn d() {} }";
    assert_eq!(public_methods(&reader::tokens(text), "Session"), 1);
}
