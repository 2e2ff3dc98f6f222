//! The order of the modules of the library and of its guests, read from the source.
//!
//! A folder of `src` may use what stands below it in [`ORDER`] and nothing above; the files of a
//! folder may not use each other in a circle. Two things do not count: a `mod.rs` is made of its
//! children, so what it uses of them is no arrow, and an import through a re-export is one of the
//! file that defines the thing. Comments and texts may name whom they like. `house.rs` checks names
//! and sizes, `surface.rs` what is public.

mod house;
mod reader;
mod surface;

use reader::{Crate, Sources};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Modules from the top to the bottom, as `docs/` and ARCHITECTURE.md have them. Where it differs
/// from a reader's guess: kernels (`arch`) know block formats (`quant`), not the other way round.
const ORDER: &[&str] = &[
    "error",
    "hub",
    "scheduler",
    "decode",
    "embed",
    "session",
    "engine",
    "gpu",
    "backward",
    "forward",
    "vision",
    "model",
    "layers",
    "compute",
    "lora",
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

/// Modules of the package `ruvllm-learn`.
const LEARN: &[&str] = &["bench", "memory", "sona", "train", "learn", "clock"];
/// Modules of the package `ruvllm-benches`.
const BENCHES: &[&str] = &["scenario", "replay", "kernels", "machine", "synthetic"];

/// Sources of a package in this folder of the workspace.
fn sources_of(package: &str) -> Sources {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sources = reader::read(&root.join(package).join("src"));
    assert!(sources.contains_key("lib.rs"), "{package}: no library");
    sources
}

/// Those of the library.
fn sources() -> Sources {
    sources_of("")
}

/// The module of a file: its first folder, or itself.
fn room(file: &str) -> &str {
    file.split_once('/')
        .map_or_else(|| file.trim_end_matches(".rs"), |(room, _)| room)
}

/// What is wrong with the order of `sources`.
fn upward(sources: &Sources, order: &[&str]) -> BTreeSet<String> {
    let place = |file: &str| order.iter().position(|name| *name == room(file));
    let mut wrong = BTreeSet::new();
    for file in sources.keys().filter(|file| *file != "lib.rs") {
        if place(file).is_none() {
            wrong.insert(format!(
                "src/{} is not in the order of this test",
                room(file)
            ));
        }
    }
    for used in Crate::of(sources).uses() {
        let (from, to) = (&used.from, &used.to);
        let is_upward = match (place(from), place(to)) {
            (Some(from), Some(to)) => to < from,
            // The root stands above all.
            (from, None) => from.is_some(),
            (None, _) => false,
        };
        if is_upward {
            wrong.insert(format!(
                "{from} uses {to}, which stands above ({})",
                used.path
            ));
        }
    }
    wrong
}

/// Circles among the files of a folder: each file of one, with one of the circle that uses it.
fn circles(sources: &Sources) -> Vec<String> {
    let mut uses = BTreeMap::<String, BTreeSet<String>>::new();
    for used in Crate::of(sources).uses() {
        // A folder is made of its children.
        if room(&used.from) == room(&used.to) && !used.is_of_child() {
            uses.entry(used.from).or_default().insert(used.to);
        }
    }
    let mut wrong = Vec::new();
    for from in uses.keys() {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(file) = next.pop() {
            for other in uses.get(file).into_iter().flatten() {
                if other == from {
                    wrong.push(format!("{from} is used by {file}, which it uses"));
                } else if seen.insert(other) {
                    next.push(other);
                }
            }
        }
    }
    wrong
}

#[test]
fn imports_point_downwards() {
    for (package, order) in [("", ORDER), ("learn", LEARN), ("benches", BENCHES)] {
        let wrong = Vec::from_iter(upward(&sources_of(package), order));
        assert!(wrong.is_empty(), "{package}: {}", wrong.join("\n"));
    }
}

#[test]
fn files_of_a_folder_form_no_circle() {
    for package in ["", "learn", "benches"] {
        let wrong = circles(&sources_of(package));
        assert!(wrong.is_empty(), "{package}: {}", wrong.join("\n"));
    }
}

/// A type that is erased could hide a dependency on what stands above.
#[test]
fn nothing_of_another_layer_is_erased() {
    // A hook is the user's own type, which it gets back; a panic of a thread has any message. And
    // `Model::engine` keeps an engine, until the `Model` of users stands above engines.
    let allowed = ["session/hooks.rs", "threads/mod.rs", "model/model.rs"];
    for (file, text) in &sources() {
        let erased = code(text).contains("dynAny") && !allowed.contains(&&**file);
        assert!(!erased, "src/{file} erases a type with `dyn Any`");
    }
}

/// Rust without comments, texts and spaces.
fn code(text: &str) -> String {
    reader::tokens(text).concat()
}

/// Kernels are compiled once more for unit tests that reach them, a minute of a build: what opens
/// models lies in `tests/it`.
#[test]
fn unit_tests_open_no_models() {
    for (file, text) in &sources() {
        let code = code(text);
        let begin = if file.ends_with("/tests.rs") {
            Some(0)
        } else {
            code.find("#[cfg(test)]")
        };
        // The format that no level knows is only there in unit tests, and every level has to run it.
        let Some(begin) = begin.filter(|_| file != "arch/tests.rs") else {
            continue;
        };
        for name in [
            "Model::open",
            "Model::from_gguf",
            "Arch::detect",
            "Arch::available",
            "Arch::named",
        ] {
            let found = code[begin..].contains(name);
            assert!(
                !found,
                "{file}: unit tests take Arch::scalar(), and no models"
            );
        }
    }
}

/// The checks above see what they are to see.
#[test]
fn a_wrong_arrow_is_found() {
    let of = |files: &[(&str, &str)]| {
        let files = files.iter().map(|&(file, text)| (file.into(), text.into()));
        files.collect::<Sources>()
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
