//! Jinja2's filters of texts.

use super::arguments::argument;
use super::limits::{check, error};
use super::print::to_str;
use super::strings::{is_space, split_lines};
use super::values::{elements, is_sequence};
use minijinja::Error;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};

/// Jinja2's filter `title`: a word starts after white space and after `-([{<`.
pub(super) fn title(s: &str) -> String {
    let mut start = true;
    let mut out = String::new();
    for c in s.chars() {
        if start {
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
        start = is_space(c) || "-([{<".contains(c);
    }
    out
}

/// `indent(width=4, first=False, blank=False)`; the width may be a string.
pub(super) fn indent(v: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let argument = |i: usize, name: &str| argument(&args, &kwargs, i, name);
    let (width, first, blank) = (
        argument(0, "width")?,
        argument(1, "first")?,
        argument(2, "blank")?,
    );
    kwargs.assert_all_used()?;
    let by = match (width.as_str(), width.as_usize()) {
        (Some(text), _) => text.to_owned(),
        (_, Some(n)) => {
            check(n, 0)?;
            " ".repeat(n)
        }
        _ if width.is_undefined() => " ".repeat(4),
        _ => return Err(error("indent takes a number or a text")),
    };
    let text = to_str(v)?;
    let mut out = String::new();
    // A line end at the end starts an empty line.
    for (i, line) in elements(&split_lines(&(text + "\n"), false)?)?
        .iter()
        .filter_map(Value::as_str)
        .enumerate()
    {
        check(out.len() + by.len(), 0)?;
        out.push_str(if i > 0 { "\n" } else { "" });
        let indented = if i == 0 {
            first.is_true()
        } else {
            blank.is_true() || !line.is_empty()
        };
        out.push_str(if indented { &by } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

/// `truncate(length=255, killwords=False, end='...', leeway=5)`, in characters.
pub(super) fn truncate(v: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let argument = |i: usize, name: &str| argument(&args, &kwargs, i, name);
    let (length, kill, end, leeway) = (
        argument(0, "length")?,
        argument(1, "killwords")?,
        argument(2, "end")?,
        argument(3, "leeway")?,
    );
    kwargs.assert_all_used()?;
    let number = |value: &Value, default: usize| match value.as_usize() {
        _ if value.is_undefined() || value.is_none() => Ok(default),
        Some(n) => Ok(n),
        None => Err(error("truncate takes numbers")),
    };
    let (length, leeway) = (number(&length, 255)?, number(&leeway, 5)?);
    let end = if end.is_undefined() {
        "...".to_owned()
    } else {
        to_str(&end)?
    };
    let text = to_str(v)?;
    let n_end = end.chars().count();
    let kept = length
        .checked_sub(n_end)
        .ok_or_else(|| error("the length of truncate is below that of its end"))?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let kept: String = text.chars().take(kept).collect();
    let kept = match kept.rsplit_once(' ') {
        Some((words, _)) if !kill.is_true() => words,
        _ => &kept,
    };
    Ok([kept, &end].concat())
}

/// `center(width=80)`.
pub(super) fn center(v: &Value, width: Option<usize>) -> Result<String, Error> {
    let width = width.unwrap_or(80);
    check(width, 0)?;
    let text = to_str(v)?;
    let missing = width.saturating_sub(text.chars().count());
    // As in CPython: an odd space goes to the left if the width is odd.
    let left = missing / 2 + (missing & width & 1);
    Ok([&" ".repeat(left), &text, &" ".repeat(missing - left)[..]].concat())
}

/// `striptags`: without comments and tags, with single spaces, and entities as characters.
pub(super) fn strip_tags(v: &Value) -> Result<String, Error> {
    let without = |text: String, open: &str, close: &str| {
        let (mut out, mut rest) = (String::new(), &text[..]);
        while let Some(at) = rest.find(open) {
            let Some(n) = rest[at + open.len()..].find(close) else {
                break;
            };
            out.push_str(&rest[..at]);
            rest = &rest[at + open.len() + n + close.len()..];
        }
        out + rest
    };
    let text = without(without(to_str(v)?, "<!--", "-->"), "<", ">");
    let words: Vec<&str> = text
        .split(is_space)
        .filter(|word| !word.is_empty())
        .collect();
    Ok(unescape(&words.join(" ")))
}

/// `escape`: a text in HTML.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}

/// Common entities of HTML as characters.
fn unescape(text: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = rest.find(';').unwrap_or(0);
        let name = rest.get(1..end).unwrap_or("");
        let number = |digits: &str, radix| {
            u32::from_str_radix(digits, radix)
                .ok()
                .and_then(char::from_u32)
        };
        let c = match name {
            "amp" => Some('&'),
            "lt" => Some('<'),
            "gt" => Some('>'),
            "quot" => Some('"'),
            "apos" => Some('\''),
            "nbsp" => Some('\u{a0}'),
            "copy" => Some('©'),
            "hellip" => Some('…'),
            "mdash" => Some('—'),
            "ndash" => Some('–'),
            _ => match name.strip_prefix('#') {
                Some(hex) if hex.starts_with(['x', 'X']) => number(&hex[1..], 16),
                Some(digits) => number(digits, 10),
                None => None,
            },
        };
        let len = if c.is_some() { end + 1 } else { 1 };
        match c {
            Some(c) => out.push(c),
            None => out.push('&'),
        }
        rest = &rest[len..];
    }
    out + rest
}

/// `urlencode`: a text, or the pairs of a dictionary or list as a query.
pub(super) fn url_encode(v: &Value) -> Result<String, Error> {
    fn quote(text: &str, is_query: bool) -> String {
        let mut out = String::new();
        for byte in text.bytes() {
            match byte {
                b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'_' | b'.' | b'-' | b'~' => {
                    out.push(byte.into())
                }
                b'/' if !is_query => out.push('/'),
                b' ' if is_query => out.push('+'),
                other => out.push_str(&format!("%{other:02X}")),
            }
        }
        out
    }
    let pairs: Vec<(Value, Value)> = match v.kind() {
        ValueKind::Map => elements(v)?
            .into_iter()
            .map(|key| v.get_item(&key).map(|value| (key, value)))
            .collect::<Result<_, _>>()?,
        _ if is_sequence(v) => elements(v)?
            .iter()
            .map(|pair| match &elements(pair)?[..] {
                [key, value] => Ok((key.clone(), value.clone())),
                _ => Err(error("urlencode takes pairs")),
            })
            .collect::<Result<_, _>>()?,
        _ => return to_str(v).map(|text| quote(&text, false)),
    };
    let query = pairs.iter().map(|(key, value)| {
        Ok(format!(
            "{}={}",
            quote(&to_str(key)?, true),
            quote(&to_str(value)?, true)
        ))
    });
    Ok(query.collect::<Result<Vec<_>, Error>>()?.join("&"))
}
