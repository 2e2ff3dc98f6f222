//! Words of texts, and which of them are names.

use std::collections::BTreeSet;

/// Least letters of a word that tells what a text is about.
const TELLING: usize = 4;

/// Words of a text that `is_told` takes, in lower case.
pub(super) fn words(text: &str, is_told: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let words = text.split(|letter: char| !letter.is_alphanumeric());
    let words = words.filter(|word| !word.is_empty() && is_told(word));
    words.map(str::to_lowercase).collect()
}

pub(super) fn is_long(word: &str) -> bool {
    word.chars().count() >= TELLING
}

/// Whether a word is a name or a number, or begins a sentence.
pub(super) fn is_name(word: &str) -> bool {
    word.starts_with(char::is_uppercase) || word.contains(char::is_numeric)
}

/// A text without its first word, which is written like a name whether it is one or not.
pub(super) fn behind_first(text: &str) -> &str {
    text.split_once(' ').map_or("", |(_, rest)| rest)
}

/// Names and numbers of a text.
pub(super) fn names(text: &str) -> BTreeSet<String> {
    words(behind_first(text), is_name)
}
