//! `wordwrap`, which breaks lines as Python's `textwrap` does.

use super::arguments::argument;
use super::limits::{check, error};
use super::print::to_str;
use super::strings::split_lines;
use super::values::elements;
use minijinja::Error;
use minijinja::value::{Kwargs, Rest, Value};

/// `wordwrap(width=79, break_long_words=True, wrapstring=None, break_on_hyphens=True)`.
pub(super) fn word_wrap(v: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let argument = |i: usize, name: &str| argument(&args, &kwargs, i, name);
    let width = argument(0, "width")?;
    let flag = |value: Value| value.is_undefined() || value.is_true();
    let breaks_words = flag(argument(1, "break_long_words")?);
    let between = argument(2, "wrapstring")?;
    let at_hyphens = flag(argument(3, "break_on_hyphens")?);
    kwargs.assert_all_used()?;
    let width = if width.is_undefined() {
        Some(79)
    } else {
        width.as_usize()
    };
    let width = width.filter(|&n| n > 0);
    let width = width.ok_or_else(|| error("the width of wordwrap is a number above 0"))?;
    let between = if between.is_undefined() || between.is_none() {
        "\n".to_owned()
    } else {
        to_str(&between)?
    };
    let text = to_str(v)?;
    let mut out = String::new();
    for (i, line) in elements(&split_lines(&text, false)?)?.iter().enumerate() {
        out.push_str(if i > 0 { &between } else { "" });
        let line = line.as_str().unwrap_or_default();
        let lines = wrapped(line, width, breaks_words, at_hyphens);
        for (i, line) in lines.iter().enumerate() {
            out.push_str(if i > 0 { &between } else { "" });
            out.push_str(line);
            check(out.len(), 0)?;
        }
    }
    Ok(out)
}

/// The lines of one line of text.
fn wrapped(text: &str, width: usize, breaks_words: bool, at_hyphens: bool) -> Vec<String> {
    let is_blank = |chunk: &[char]| chunk.iter().all(|c| c.is_whitespace());
    // The next one last.
    let mut chunks = chunks(text, at_hyphens);
    chunks.reverse();
    let mut lines: Vec<String> = Vec::new();
    while !chunks.is_empty() {
        let mut line: Vec<Vec<char>> = Vec::new();
        let mut len = 0;
        if !lines.is_empty() {
            chunks.pop_if(|chunk| is_blank(chunk));
        }
        while let Some(chunk) = chunks.pop_if(|chunk| len + chunk.len() <= width) {
            len += chunk.len();
            line.push(chunk);
        }
        if let Some(long) = chunks.pop_if(|chunk| chunk.len() > width) {
            let left = width - len;
            if breaks_words {
                let hyphen = long[..left.min(long.len())].iter().rposition(|&c| c == '-');
                let hyphen = hyphen
                    .filter(|&at| at_hyphens && at > 0 && long[..at].iter().any(|&c| c != '-'));
                let (now, later) = long.split_at(hyphen.map_or(left, |at| at + 1));
                line.push(now.to_vec());
                chunks.push(later.to_vec());
            } else if line.is_empty() {
                line.push(long);
            } else {
                chunks.push(long);
            }
        }
        line.pop_if(|chunk| is_blank(chunk));
        if !line.is_empty() {
            lines.push(line.concat().into_iter().collect());
        }
    }
    lines
}

/// Words and the white space between them; with `at_hyphens` words end after their hyphens.
fn chunks(text: &str, at_hyphens: bool) -> Vec<Vec<char>> {
    let chars: Vec<char> = text.chars().collect();
    let letter = |at: Option<usize>| {
        at.and_then(|at| chars.get(at))
            .is_some_and(|c| c.is_alphabetic())
    };
    let hyphen = |at: usize| chars.get(at) == Some(&'-');
    let mut chunks: Vec<Vec<char>> = Vec::new();
    let mut begin = 0;
    for at in 1..=chars.len() {
        let ends = at == chars.len()
            || chars[at].is_whitespace() != chars[at - 1].is_whitespace()
            || at_hyphens && hyphen(at - 1) && {
                let two = letter(at.checked_sub(2)) && letter(at.checked_sub(3));
                let apart = letter(at.checked_sub(2))
                    && at.checked_sub(3).is_some_and(hyphen)
                    && letter(at.checked_sub(4));
                let follows = letter(Some(at + 1)) || hyphen(at + 1) && letter(Some(at + 2));
                (two || apart) && letter(Some(at)) && follows
            };
        if ends && at > begin {
            chunks.push(chars[begin..at].to_vec());
            begin = at;
        }
    }
    chunks
}
