//! Printing of values: Python's `str`, `repr` and `json.dumps`.

use super::arguments::argument;
use super::limits::{check, error};
use super::values::is_tuple;
use minijinja::Error;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use std::fmt::Write;

/// Python's `str(value)`; an undefined value is the empty string.
pub(super) fn to_str(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(String::new()),
        ValueKind::String => Ok(value.as_str().unwrap_or_default().to_owned()),
        _ => to_repr(value),
    }
}

/// Python's `repr(value)`.
pub(super) fn to_repr(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_repr(&mut out, value, 0)?;
    Ok(out)
}

fn write_repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    check(out.len(), depth)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => write_str_repr(out, value.as_str().unwrap_or_default()),
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_repr(out, &key, depth + 1)?;
                out.push_str(": ");
                write_repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = if is_tuple(value) {
                ("(", ")")
            } else {
                ("[", "]")
            };
            out.push_str(open);
            let mut n = 0;
            for item in value.try_iter()? {
                out.push_str(if n > 0 { ", " } else { "" });
                write_repr(out, &item, depth + 1)?;
                n += 1;
            }
            // A comma is what makes one value in brackets a tuple.
            out.push_str(if n == 1 && is_tuple(value) { "," } else { "" });
            out.push_str(close);
        }
        _ => _ = write!(out, "{value}"),
    }
    Ok(())
}

/// An integer in decimal, a float like Python's `repr(float)`.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
}

/// The shortest digits that parse to the same number, with an exponent below 1e-4 and from 1e16 on.
fn float(x: f64) -> String {
    if !x.is_finite() {
        let sign = if x < 0.0 { "-" } else { "" };
        return if x.is_nan() {
            "nan".into()
        } else {
            format!("{sign}inf")
        };
    }
    let scientific = format!("{x:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        format!("{x:?}")
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{mantissa}e{sign}{:02}", exponent.abs())
    }
}

fn write_str_repr(out: &mut String, s: &str) {
    let quote = if s.contains('\'') && !s.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for c in s.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_control() || c == '\u{ad}' => match c as u32 {
                n @ 0..=0xff => _ = write!(out, "\\x{n:02x}"),
                n => _ = write!(out, "\\u{n:04x}"),
            },
            // White space other than the space: Python does not count it as printable.
            c if c != ' ' && c.is_whitespace() => match c as u32 {
                n @ 0..=0xff => _ = write!(out, "\\x{n:02x}"),
                n => _ = write!(out, "\\u{n:04x}"),
            },
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// Layout options of `json.dumps`.
struct Json {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// `json.dumps(value, ensure_ascii, indent, separators, sort_keys)` with the defaults of
/// transformers: not restricted to ASCII, `", "` and `": "`, keys in their own order.
pub(super) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let argument = |i: usize, name: &str| argument(&args, &kwargs, i, name);
    let indent = match argument(1, "indent")? {
        v if v.is_none() || v.is_undefined() => None,
        v => Some(match v.as_str() {
            Some(s) => s.to_owned(),
            None => " ".repeat(v.as_usize().unwrap_or(0).min(64)),
        }),
    };
    let separators = argument(2, "separators")?;
    let separator = |i: usize, default: &str| match separators.get_item_by_index(i) {
        Ok(v) if v.as_str().is_some() => v.to_string(),
        _ => default.to_owned(),
    };
    let json = Json {
        ensure_ascii: argument(0, "ensure_ascii")?.is_true(),
        item_separator: separator(0, if indent.is_some() { "," } else { ", " }),
        key_separator: separator(1, ": "),
        sort_keys: argument(3, "sort_keys")?.is_true(),
        indent,
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    json.write(&mut out, value, 0)?;
    Ok(out)
}

impl Json {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        check(out.len(), depth)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&match number(value).as_str() {
                "nan" => "NaN".into(),
                "inf" => "Infinity".into(),
                "-inf" => "-Infinity".into(),
                number => number.to_owned(),
            }),
            ValueKind::String => self.write_str(out, value.as_str().unwrap_or_default()),
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_items(out, ['{', '}'], &keys, depth, |out, key| {
                    match key.kind() {
                        ValueKind::String => self.write_str(out, key.as_str().unwrap_or_default()),
                        ValueKind::Number | ValueKind::Bool | ValueKind::None => {
                            out.push('"');
                            self.write(out, key, depth + 1)?;
                            out.push('"');
                        }
                        kind => return Err(error(format!("{kind} cannot be a key in JSON"))),
                    }
                    out.push_str(&self.key_separator);
                    self.write(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_items(out, ['[', ']'], &items, depth, |out, item| {
                    self.write(out, item, depth + 1)
                })?;
            }
            kind => return Err(error(format!("{kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn write_items(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        items: &[Value],
        depth: usize,
        write: impl Fn(&mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let new_line = |out: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                (0..depth).for_each(|_| out.push_str(indent));
            }
        };
        out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(&self.item_separator);
            }
            new_line(out, depth + 1);
            write(out, item)?;
        }
        if !items.is_empty() {
            new_line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn write_str(&self, out: &mut String, s: &str) {
        out.push('"');
        for c in s.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 => _ = write!(out, "\\u{:04x}", c as u32),
                c if self.ensure_ascii && (c as u32) >= 0x7f => {
                    // U+007F itself is ASCII.
                    if c == '\u{7f}' {
                        out.push(c);
                        continue;
                    }
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}
