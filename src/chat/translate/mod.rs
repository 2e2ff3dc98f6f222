//! Translation of Jinja2's expressions to the engine's dialect.
//!
//! The engine has no hook for its operators, and some of them differ from Python's: `%` does not
//! format, `[:0:-1]` goes too far, lists cannot grow, tuples are lists. Nor is the memory of their
//! results limited. So a template's source is parsed here as by Jinja2, and `+`, `~`, `*`, `%`,
//! slices, lists and tuples become calls of the functions in `python/operators.rs`. Line numbers
//! stay, white space control is the engine's.

mod expressions;
mod macros;
mod statements;
mod tags;
mod tokens;

use expressions::Parser;
use macros::variadic_macros;
use std::fmt::Write;
use tags::{Kind, next_tag};
use tokens::tokens;

/// Beginning of the names of the functions, which templates cannot name.
pub(super) const PREFIX: &str = "__op_";
/// Longest text of the template that is printed without counting.
const MAX_UNCOUNTED: usize = 128;
/// Longest white space between two tags.
const MAX_WHITE: usize = 1024;

/// Syntax error in a source, and its line.
#[derive(Debug, PartialEq)]
pub(super) struct SyntaxError {
    pub(super) line: usize,
    pub(super) message: String,
}

/// The source in the engine's dialect.
pub(super) fn translate(source: &str) -> Result<String, SyntaxError> {
    let variadic = variadic_macros(source);
    let mut out = String::with_capacity(source.len() * 2);
    let mut at = 0;
    let located = |at: usize| {
        move |message: String| SyntaxError {
            line: source[..at].matches('\n').count() + 1,
            message,
        }
    };
    while let Some(tag) = next_tag(source, at) {
        write_text(&mut out, &source[at..tag.start]).map_err(located(at))?;
        at = tag.end;
        let whole = &source[tag.start..tag.end];
        match tag.kind {
            Kind::Comment => out.push_str(whole),
            Kind::Broken => {
                // The engine says what is wrong.
                out.push_str(&source[tag.start..]);
                return Ok(out);
            }
            Kind::Raw => write_raw(&mut out, whole).map_err(located(tag.start))?,
            Kind::Expression | Kind::Statement => {
                let (open, inner, close) = tag.parts(source);
                let tokens = tokens(inner).map_err(located(tag.start))?;
                let mut parser = Parser {
                    tokens: &tokens,
                    at: 0,
                    depth: 0,
                    variadic: &variadic,
                };
                let translated = if tag.kind == Kind::Expression {
                    parser.whole(|parser| parser.tuple(true))
                } else {
                    parser.statement(inner)
                };
                let translated = translated.map_err(|message| SyntaxError {
                    line: parser.line() + source[..tag.start].matches('\n').count() + 1,
                    message,
                })?;
                _ = write!(out, "{open} {translated}");
                // Line ends after the last token.
                let kept = translated.matches('\n').count();
                let lost = inner.matches('\n').count().saturating_sub(kept);
                (0..lost).for_each(|_| out.push('\n'));
                _ = write!(out, " {close}");
            }
        }
    }
    write_text(&mut out, &source[at..]).map_err(located(at))?;
    Ok(out)
}

/// Text between tags. The memory of printing long text is counted.
fn write_text(out: &mut String, text: &str) -> Result<(), String> {
    if text.len() <= MAX_UNCOUNTED {
        out.push_str(text);
        return Ok(());
    }
    let (before, behind) = text.split_at(middle(text)?);
    _ = write!(
        out,
        "{before}{{{{ {PREFIX}text({}) }}}}{behind}",
        text.len()
    );
    Ok(())
}

/// A raw block.
fn write_raw(out: &mut String, block: &str) -> Result<(), String> {
    if block.len() <= MAX_UNCOUNTED {
        out.push_str(block);
        return Ok(());
    }
    let begin = block.find("%}").map_or(0, |at| at + 2);
    let end = block.rfind("{%").unwrap_or(block.len());
    let at = begin + middle(&block[begin..end])?;
    let n = block.len();
    let (before, behind) = block.split_at(at);
    _ = write!(
        out,
        "{before}{{% endraw %}}{{{{ {PREFIX}text({n}) }}}}{{% raw %}}{behind}"
    );
    Ok(())
}

/// A position in a text between two characters at which an expression changes nothing of the white
/// space that tags take away.
fn middle(text: &str) -> Result<usize, String> {
    let is_plain = |c: char| !c.is_whitespace() && !"{}%#-+".contains(c);
    let mut before = ' ';
    for (at, c) in text.char_indices() {
        if is_plain(before) && is_plain(c) {
            return Ok(at);
        }
        before = c;
    }
    if text.len() > MAX_WHITE {
        return Err(format!(
            "more than {MAX_WHITE} bytes of white space or marks"
        ));
    }
    Ok(text.len())
}
