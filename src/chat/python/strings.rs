//! The methods of `str`.

use super::limits::{MAX_STRING, charge_items, check, error};
use super::print::to_str;
use super::values::{elements, is_sequence, list, tuple};
use minijinja::value::{Kwargs, Value, from_args};
use minijinja::{Error, ErrorKind};

pub(super) fn capitalize(s: &str) -> String {
    let mut chars = s.chars();
    let first = chars.next().into_iter().flat_map(char::to_uppercase);
    first.chain(chars.as_str().to_lowercase().chars()).collect()
}

/// Python's `str.isspace`: Unicode white space and the four information separators.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

pub(super) fn strip<'a>(s: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let drop = |c: char| chars.map_or(is_space(c), |chars| chars.contains(c));
    let s = if left { s.trim_start_matches(drop) } else { s };
    if right { s.trim_end_matches(drop) } else { s }
}

pub(super) fn replace(s: &str, old: &str, new: &str, count: Option<i64>) -> Result<String, Error> {
    let count = count
        .and_then(|n| usize::try_from(n).ok())
        .unwrap_or(usize::MAX);
    let matches = s.matches(old).count().min(count);
    if matches.saturating_mul(new.len()) > MAX_STRING {
        return Err(error(format!("a string is longer than {MAX_STRING} bytes")));
    }
    Ok(s.replacen(old, new, matches))
}

/// `str.split` and `str.rsplit`.
fn split(s: &str, sep: Option<&str>, max: Option<i64>, right: bool) -> Result<Value, Error> {
    let max = max
        .and_then(|n| usize::try_from(n).ok())
        .unwrap_or(usize::MAX);
    let n_most = match sep {
        Some(sep) if !sep.is_empty() => s.matches(sep).count() + 1,
        _ => s.split(is_space).count(),
    };
    charge_items(n_most)?;
    let mut parts: Vec<&str> = Vec::new();
    match sep {
        Some("") => return Err(error("empty separator")),
        Some(sep) if right => {
            parts.extend(s.rsplitn(max.saturating_add(1), sep));
            parts.reverse();
        }
        Some(sep) => parts.extend(s.splitn(max.saturating_add(1), sep)),
        None => {
            let mut rest = strip(s, None, !right, right);
            while !rest.is_empty() {
                let at = if right {
                    rest.rfind(is_space)
                } else {
                    rest.find(is_space)
                };
                match at {
                    Some(at) if parts.len() < max => {
                        let width = rest[at..].chars().next().map_or(1, char::len_utf8);
                        let (before, after) = (&rest[..at], &rest[at + width..]);
                        parts.push(if right { after } else { before });
                        let remaining = if right { before } else { after };
                        rest = strip(remaining, None, !right, right);
                    }
                    _ => {
                        parts.push(rest);
                        break;
                    }
                }
            }
            if right {
                parts.reverse();
            }
        }
    }
    Ok(list(parts.into_iter().map(Value::from).collect()))
}

/// `str.splitlines`, with Python's set of line ends.
pub(super) fn split_lines(s: &str, keep_ends: bool) -> Result<Value, Error> {
    let mut lines = Vec::new();
    let mut rest = s;
    while !rest.is_empty() {
        let is_end = |c: char| {
            matches!(
                c,
                '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                    ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
            )
        };
        let end = rest.find(is_end).unwrap_or(rest.len());
        let width = match &rest[end..] {
            tail if tail.starts_with("\r\n") => 2,
            tail => tail.chars().next().map_or(0, char::len_utf8),
        };
        charge_items(1)?;
        lines.push(Value::from(
            &rest[..if keep_ends { end + width } else { end }],
        ));
        rest = &rest[end + width..];
    }
    Ok(list(lines))
}

/// `startswith` and `endswith`, with one string or several.
fn affix(value: &Value, test: impl Fn(&str) -> bool) -> Result<Value, Error> {
    if let Some(s) = value.as_str() {
        return Ok(test(s).into());
    }
    let texts = elements(value)?;
    if !is_sequence(value) || texts.iter().any(|t| t.as_str().is_none()) {
        return Err(error("startswith and endswith take a string or several"));
    }
    Ok(texts.iter().filter_map(Value::as_str).any(test).into())
}

pub(super) fn string_method(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let all = |test: fn(char) -> bool| Value::from(!s.is_empty() && s.chars().all(test));
    let cased = |wanted, other| Value::from(is_cased(s, wanted, other));
    Ok(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            strip(s, chars, method != "rstrip", method != "lstrip").into()
        }
        "split" | "rsplit" => {
            let (sep, max, kwargs): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
            let sep = match sep {
                None => kwargs.get("sep")?,
                sep => sep,
            };
            let max = max.or(kwargs.get("maxsplit")?);
            kwargs.assert_all_used()?;
            split(s, sep, max, method == "rsplit")?
        }
        "splitlines" => {
            let (keep, kwargs): (Option<bool>, Kwargs) = from_args(args)?;
            let keep = keep.or(kwargs.get("keepends")?);
            split_lines(s, keep.unwrap_or(false))?
        }
        "partition" | "rpartition" => {
            let (sep,): (&str,) = from_args(args)?;
            let right = method == "rpartition";
            let found = if right {
                s.rsplit_once(sep)
            } else {
                s.split_once(sep)
            };
            let parts = match found {
                Some((before, after)) => [before, sep, after],
                None if right => ["", "", s],
                None => [s, "", ""],
            };
            tuple(parts.into_iter().map(Value::from).collect())
        }
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
            replace(s, old, new, count)?.into()
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            s.strip_prefix(prefix).unwrap_or(s).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            s.strip_suffix(suffix).unwrap_or(s).into()
        }
        "startswith" | "endswith" | "find" | "index" | "rfind" | "rindex" | "count" => {
            search(s, method, args)?
        }
        "join" => {
            let (values,): (&Value,) = from_args(args)?;
            let values = elements(values)?;
            let mut out = String::new();
            for (i, value) in values.iter().enumerate() {
                check(out.len(), 0)?;
                out.push_str(if i > 0 { s } else { "" });
                out.push_str(value.as_str().ok_or_else(|| error("join takes strings"))?);
            }
            out.into()
        }
        "upper" => s.to_uppercase().into(),
        "lower" | "casefold" => s.to_lowercase().into(),
        "capitalize" => capitalize(s).into(),
        "swapcase" => swap_case(s).into(),
        "title" => title(s).into(),
        "expandtabs" => {
            let (size,): (Option<usize>,) = from_args(args)?;
            let size = size.unwrap_or(8);
            check(s.len().saturating_mul(size.max(1)), 0)?;
            expand_tabs(s, size).into()
        }
        "ljust" | "rjust" | "center" | "zfill" => pad(s, method, args)?.into(),
        "isspace" => all(is_space),
        "isdigit" | "isdecimal" | "isnumeric" => all(char::is_numeric),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isascii" => s.is_ascii().into(),
        "isupper" => cased(char::is_uppercase, char::is_lowercase),
        "islower" => cased(char::is_lowercase, char::is_uppercase),
        "format" => {
            check_format(s, args)?;
            minijinja::format_filter(minijinja::FormatStyle::StrFormat, s, args)?.into()
        }
        _ => return Err(ErrorKind::UnknownMethod.into()),
    })
}

/// Whether letters of the wanted case are in a text, and none of the other.
pub(super) fn is_cased(s: &str, wanted: fn(char) -> bool, other: fn(char) -> bool) -> bool {
    s.chars().any(wanted) && !s.chars().any(other)
}

/// The part of a text from character `start` to `end` (negative: counted from the end), and the
/// number of characters before it; nothing if `start` is after the end of the text.
fn part(s: &str, start: Option<i64>, end: Option<i64>) -> Option<(&str, usize)> {
    let n = s.chars().count() as i64;
    let clamp = |at: i64| if at < 0 { (at + n).max(0) } else { at };
    let (start, end) = (clamp(start.unwrap_or(0)), clamp(end.unwrap_or(n)).min(n));
    if start > n {
        return None;
    }
    let offset = |at: i64| {
        s.char_indices()
            .nth(at as usize)
            .map_or(s.len(), |(at, _)| at)
    };
    Some((&s[offset(start)..offset(end.max(start))], start as usize))
}

/// The methods that look for something in a text, or in a part of it.
fn search(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    Ok(match method {
        "startswith" | "endswith" => {
            let (what, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
            let part = part(s, start, end).map(|(part, _)| part);
            let test = |text: &str| {
                part.is_some_and(|part| match method {
                    "startswith" => part.starts_with(text),
                    _ => part.ends_with(text),
                })
            };
            affix(what, test)?
        }
        "find" | "index" | "rfind" | "rindex" => {
            let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
            let at = part(s, start, end).and_then(|(part, before)| {
                let at = if method.starts_with('r') {
                    part.rfind(what)
                } else {
                    part.find(what)
                };
                Some(before + part[..at?].chars().count())
            });
            if at.is_none() && method.ends_with("index") {
                return Err(error("substring not found"));
            }
            at.map_or(-1, |at| at as i64).into()
        }
        _ => {
            let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
            part(s, start, end)
                .map_or(0, |(part, _)| part.matches(what).count())
                .into()
        }
    })
}

/// `ljust`, `rjust`, `center` and `zfill`.
fn pad(s: &str, method: &str, args: &[Value]) -> Result<String, Error> {
    let (width, fill): (usize, Option<&str>) = from_args(args)?;
    check(width, 0)?;
    let fill = if method == "zfill" {
        "0"
    } else {
        fill.unwrap_or(" ")
    };
    if fill.chars().count() != 1 {
        return Err(error(
            "The fill character must be exactly one character long",
        ));
    }
    let missing = width.saturating_sub(s.chars().count());
    let left = match method {
        "ljust" => 0,
        // As in CPython: an odd space goes to the left if the width is odd.
        "center" => missing / 2 + (missing & width & 1),
        _ => missing,
    };
    let sign = s.len() - s.trim_start_matches(['+', '-']).len();
    let (sign, body) = s.split_at(if method == "zfill" { sign.min(1) } else { 0 });
    Ok([sign, &fill.repeat(left), body, &fill.repeat(missing - left)].concat())
}

fn swap_case(s: &str) -> String {
    let swap = |c: char| -> String {
        if c.is_uppercase() {
            c.to_lowercase().collect()
        } else {
            c.to_uppercase().collect()
        }
    };
    s.chars().map(swap).collect()
}

fn title(s: &str) -> String {
    let mut out = String::new();
    let mut start = true;
    for c in s.chars() {
        if start {
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
        start = !c.is_alphabetic();
    }
    out
}

fn expand_tabs(s: &str, size: usize) -> String {
    let (mut out, mut column) = (String::new(), 0);
    for c in s.chars() {
        match c {
            '\t' => {
                let n = if size == 0 { 0 } else { size - column % size };
                (0..n).for_each(|_| out.push(' '));
                column += n;
            }
            c => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') {
                    0
                } else {
                    column + 1
                };
            }
        }
    }
    out
}

/// Limits the size of formatted text: each directive is at most as wide as its largest number
/// and as long as the longest argument.
fn check_format(text: &str, args: &[Value]) -> Result<(), Error> {
    let mut longest = 0;
    for arg in args {
        longest = longest.max(to_str(arg)?.len());
    }
    let mut total = text.len();
    for directive in text.split('{').skip(1) {
        let end = directive.find('}');
        let numbers =
            directive[..end.unwrap_or(directive.len())].split(|c: char| !c.is_ascii_digit());
        let width = numbers
            .filter(|n| !n.is_empty())
            .map(|n| n.parse().unwrap_or(usize::MAX))
            .max()
            .unwrap_or(0);
        total = total.saturating_add(width).saturating_add(longest);
        check(total, 0)?;
    }
    Ok(())
}
