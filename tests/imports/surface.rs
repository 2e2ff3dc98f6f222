//! What a user of the library sees, counted in the source: public functions, methods of `Session`. `docs/design/api.md` says which of it is stable.

use crate::reader::{self, Sources};
use std::collections::BTreeMap;

/// Rooms for experts: kernels, block formats, the file, kernels of GPUs.
const EXPERT: &[&str] = &["arch", "quant", "gguf", "gpu"];
/// Most public functions outside these rooms, and in all: fewer may be, more is a decision. One that
/// a macro declares counts as often as it is written.
const FUNCTIONS: usize = 520;
const ALL_FUNCTIONS: usize = 717;
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
