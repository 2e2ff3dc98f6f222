//! The parts of Python that chat templates rely on: how values print (`str`, `repr`, `json.dumps`),
//! the methods of strings, dictionaries and lists, and the filters and tests of Jinja2 that
//! `minijinja` lacks or implements differently.
//!
//! Known differences that remain, as `minijinja` has no hook for them: tuples are lists and print
//! as such, a list or dictionary *written in the template* prints strings in double quotes after
//! `~`, `%` does not format strings (`format` does), and results of operators are not limited
//! before they are printed.

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Rest, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;

/// Deepest nesting of a value that is printed.
const MAX_DEPTH: usize = 200;
/// Longest string that one operation in this file makes, in bytes.
const MAX_STRING: usize = 64 << 20;
/// Most lists that `batch` and `slice` make, or items in one of them.
const MAX_ITEMS: usize = 1 << 16;

/// The message of `raise_exception`, carried through the engine.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

fn error(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Makes an environment behave like Jinja2's.
pub(super) fn add_to(env: &mut Environment<'_>) {
    env.set_formatter(|out, _, value| {
        match value.as_str() {
            Some(s) => out.write_str(s)?,
            None => out.write_str(&to_str(value)?)?,
        }
        Ok(())
    });
    env.set_unknown_method_callback(call_method);
    env.remove_global("debug");
    env.add_function(
        "raise_exception",
        |message: &Value| -> Result<Value, Error> {
            Err(error("raise_exception").with_source(Raised(to_str(message)?)))
        },
    );

    env.add_filter("tojson", tojson);
    env.add_filter("string", |v: &Value| to_str(v));
    env.add_filter("safe", |v: &Value| to_str(v));
    env.add_filter("join", join);
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter("list", |v: &Value| elements(v).map(Value::from));
    env.add_filter("trim", |v: &Value, chars: Option<&str>| {
        to_str(v).map(|s| strip(&s, chars, true, true).to_owned())
    });
    env.add_filter("upper", |v: &Value| to_str(v).map(|s| s.to_uppercase()));
    env.add_filter("lower", |v: &Value| to_str(v).map(|s| s.to_lowercase()));
    env.add_filter("capitalize", |v: &Value| to_str(v).map(|s| capitalize(&s)));
    env.add_filter("title", |v: &Value| to_str(v).map(|s| filter_title(&s)));
    env.add_filter(
        "replace",
        |v: &Value, old: &Value, new: &Value, count: Option<i64>| {
            replace(&to_str(v)?, &to_str(old)?, &to_str(new)?, count)
        },
    );
    env.add_filter("items", |v: &Value| match v.kind() {
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Map => items(v),
        _ => Err(error("Can only get item pairs from a mapping.")),
    });
    for name in ["default", "d"] {
        env.add_filter(name, default);
    }
    env.add_filter("int", int);
    env.add_filter("float", |v: &Value, default: Option<f64>| {
        let default = default.unwrap_or(0.0);
        match v.as_str() {
            Some(s) => s.trim().parse().unwrap_or(default),
            None if v.kind() == ValueKind::Bool => f64::from(u8::from(v.is_true())),
            None => f64::try_from(v.clone()).unwrap_or(default),
        }
    });
    env.add_filter("round", round);
    env.add_filter("indent", indent);
    env.add_filter(
        "batch",
        |state: &State<'_, '_>, v: Value, n: usize, fill: Option<Value>| {
            minijinja::filters::batch(state, v, check_items(n)?, fill)
        },
    );
    env.add_filter(
        "slice",
        |state: &State<'_, '_>, v: Value, n: usize, fill: Option<Value>| {
            minijinja::filters::slice(state, v, check_items(n)?, fill)
        },
    );
    env.add_filter(
        "format",
        |state: &State<'_, '_>, v: &Value, args: Rest<Value>| {
            check_format(&to_str(v)?, '%', &args)?;
            minijinja::filters::format(state, v, args)
        },
    );
    env.add_filter("first", |v: &Value| {
        elements(v).map(|l| l.first().cloned().unwrap_or_default())
    });
    env.add_filter("last", |v: &Value| {
        elements(v).map(|l| l.last().cloned().unwrap_or_default())
    });
    env.add_filter("wordcount", |v: &Value| {
        to_str(v).map(|s| s.split_whitespace().count())
    });

    env.add_test("iterable", |v: &Value| {
        v.is_undefined() || v.try_iter().is_ok() && !v.is_none()
    });
    env.add_test("sequence", |v: &Value| {
        let kind = v.kind();
        matches!(
            kind,
            ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable
        )
    });
    env.add_test("number", |v: &Value| {
        matches!(v.kind(), ValueKind::Number | ValueKind::Bool)
    });
    env.add_test("integer", |v: &Value| {
        v.is_integer() && v.kind() == ValueKind::Number
    });
    env.add_test("callable", |v: &Value| v.kind() == ValueKind::Plain);
}

// --- inputs -------------------------------------------------------------------------------

/// A dictionary or list from outside the template. The engine's own ones print their strings with
/// Rust's quotes when `~` turns them into text; these print them as Python does.
#[derive(Debug)]
enum Container {
    Dict(Vec<Value>, HashMap<String, Value>),
    List(Vec<Value>),
}

/// Converts JSON to a template value.
pub(super) fn from_json(json: serde_json::Value) -> Value {
    match json {
        serde_json::Value::Object(map) => {
            let keys = map.keys().map(|k| Value::from(k.as_str())).collect();
            let values = map.into_iter().map(|(k, v)| (k, from_json(v))).collect();
            Value::from_object(Container::Dict(keys, values))
        }
        serde_json::Value::Array(items) => {
            Value::from_object(Container::List(items.into_iter().map(from_json).collect()))
        }
        scalar => Value::from_serialize(scalar),
    }
}

impl Object for Container {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        match **self {
            Self::Dict(..) => ObjectRepr::Map,
            Self::List(_) => ObjectRepr::Seq,
        }
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match &**self {
            Self::Dict(_, values) => values.get(key.as_str()?).cloned(),
            Self::List(items) => items.get(key.as_usize()?).cloned(),
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        match &**self {
            Self::Dict(keys, _) => Enumerator::Values(keys.clone()),
            Self::List(items) => Enumerator::Seq(items.len()),
        }
    }

    fn render(self: &Arc<Self>, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = to_str(&Value::from_dyn_object(self.clone())).map_err(|_| std::fmt::Error)?;
        f.write_str(&text)
    }
}

// --- printing -----------------------------------------------------------------------------

/// Python's `str(value)`; an undefined value is the empty string.
fn to_str(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(String::new()),
        ValueKind::String => Ok(value.as_str().unwrap_or_default().to_owned()),
        _ => {
            let mut out = String::new();
            write_repr(&mut out, value, 0)?;
            Ok(out)
        }
    }
}

/// Python's `repr(value)`.
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
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_repr(out, &item, depth + 1)?;
            }
            out.push(']');
        }
        _ => _ = write!(out, "{value}"),
    }
    Ok(())
}

fn check(len: usize, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(error(format!(
            "a value is nested more than {MAX_DEPTH} deep"
        )));
    }
    if len > MAX_STRING {
        return Err(error(format!("a string is longer than {MAX_STRING} bytes")));
    }
    Ok(())
}

fn check_items(n: usize) -> Result<usize, Error> {
    if n > MAX_ITEMS {
        Err(error(format!("more than {MAX_ITEMS} items")))
    } else {
        Ok(n)
    }
}

/// Limits the size of formatted text: each directive, which starts with `begin`, is at most as wide
/// as its largest number and as long as the longest argument.
fn check_format(text: &str, begin: char, args: &[Value]) -> Result<(), Error> {
    let mut longest = 0;
    for arg in args {
        longest = longest.max(to_str(arg)?.len());
    }
    let mut total = text.len();
    for directive in text.split(begin).skip(1) {
        let end = directive.find(|c: char| c == '}' || begin == '%' && c.is_ascii_alphabetic());
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

/// Argument `i` of a filter, by position or by name; undefined if it is missing.
fn argument(args: &[Value], kwargs: &Kwargs, i: usize, name: &str) -> Result<Value, Error> {
    let named: Option<Value> = kwargs.get(name)?;
    Ok(named.or_else(|| args.get(i).cloned()).unwrap_or_default())
}

/// `indent(width=4, first=False, blank=False)`; the width may be a string.
fn indent(v: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
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
    for (i, line) in elements(&split_lines(&(text + "\n"), false))?
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
fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
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

// --- filters ------------------------------------------------------------------------------

/// The items of an iteration over a value; none for an undefined one.
fn elements(value: &Value) -> Result<Vec<Value>, Error> {
    if value.is_undefined() {
        return Ok(Vec::new());
    }
    Ok(value.try_iter()?.collect())
}

fn length(value: &Value) -> Result<usize, Error> {
    match value.len() {
        Some(n) => Ok(n),
        None => elements(value).map(|l| l.len()),
    }
}

fn items(value: &Value) -> Result<Value, Error> {
    let pair = |key: Value| value.get_item(&key).map(|v| Value::from(vec![key, v]));
    value
        .try_iter()?
        .map(pair)
        .collect::<Result<Vec<_>, _>>()
        .map(Value::from)
}

fn join(value: &Value, d: Option<&Value>, kwargs: Kwargs) -> Result<String, Error> {
    let d = match (d, kwargs.get::<Option<Value>>("d")?) {
        (Some(d), _) => to_str(d)?,
        (None, d) => d.map_or(Ok(String::new()), |d| to_str(&d))?,
    };
    let attribute: Option<String> = kwargs.get("attribute")?;
    kwargs.assert_all_used()?;
    let mut out = String::new();
    for (i, item) in elements(value)?.iter().enumerate() {
        check(out.len(), 0)?;
        if i > 0 {
            out.push_str(&d);
        }
        match &attribute {
            Some(name) => out.push_str(&to_str(&item.get_attr(name)?)?),
            None => out.push_str(&to_str(item)?),
        }
    }
    Ok(out)
}

fn default(
    value: &Value,
    other: Option<Value>,
    boolean: Option<bool>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let other = match other {
        Some(v) => v,
        None => kwargs
            .get::<Option<Value>>("default_value")?
            .unwrap_or_else(|| "".into()),
    };
    let boolean = boolean.or(kwargs.get("boolean")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    let replace = value.is_undefined() || boolean && !value.is_true();
    Ok(if replace { other } else { value.clone() })
}

fn int(value: &Value, default: Option<Value>) -> Value {
    let default = default.unwrap_or_else(|| 0.into());
    match value.kind() {
        ValueKind::Bool => Value::from(i64::from(value.is_true())),
        ValueKind::Number if value.is_integer() => value.clone(),
        ValueKind::Number => match f64::try_from(value.clone()) {
            Ok(f) if f.is_finite() => Value::from(f as i128),
            _ => default,
        },
        ValueKind::String => {
            let s = value.as_str().unwrap_or_default().trim();
            match (s.parse::<i64>(), s.parse::<f64>()) {
                (Ok(i), _) => Value::from(i),
                (_, Ok(f)) if f.is_finite() => Value::from(f as i64),
                _ => default,
            }
        }
        _ => default,
    }
}

/// Rounds half to even at the given digit, like Python, and always returns a float, like Jinja2's
/// filter.
fn round(value: f64, precision: Option<i32>) -> f64 {
    let precision = precision.unwrap_or(0).clamp(-300, 300);
    match usize::try_from(precision) {
        // Formatting is exact where multiplying by a power of ten is not.
        Ok(digits) => format!("{value:.digits$}").parse().unwrap_or(value),
        Err(_) => {
            let scale = 10f64.powi(-precision);
            (value / scale).round_ties_even() * scale
        }
    }
}

fn capitalize(s: &str) -> String {
    let mut chars = s.chars();
    let first = chars.next().into_iter().flat_map(char::to_uppercase);
    first.chain(chars.as_str().to_lowercase().chars()).collect()
}

/// Jinja2's filter `title`: a word starts after white space and after `-([{<`.
fn filter_title(s: &str) -> String {
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

// --- methods ------------------------------------------------------------------------------

/// Python's `str.isspace`: Unicode white space and the four information separators.
fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

fn strip<'a>(s: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let drop = |c: char| chars.map_or(is_space(c), |chars| chars.contains(c));
    let s = if left { s.trim_start_matches(drop) } else { s };
    if right { s.trim_end_matches(drop) } else { s }
}

fn replace(s: &str, old: &str, new: &str, count: Option<i64>) -> Result<String, Error> {
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
    Ok(parts.into_iter().map(Value::from).collect())
}

/// `str.splitlines`, with Python's set of line ends.
fn split_lines(s: &str, keep_ends: bool) -> Value {
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
        lines.push(Value::from(
            &rest[..if keep_ends { end + width } else { end }],
        ));
        rest = &rest[end + width..];
    }
    Value::from(lines)
}

/// `startswith` and `endswith`, with one string or several.
fn affix(value: &Value, test: impl Fn(&str) -> bool) -> Result<Value, Error> {
    if let Some(s) = value.as_str() {
        return Ok(test(s).into());
    }
    let texts = elements(value)?;
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
        || texts.iter().any(|t| t.as_str().is_none())
    {
        return Err(error("startswith and endswith take a string or several"));
    }
    Ok(texts.iter().filter_map(Value::as_str).any(test).into())
}

/// Index in characters of a byte offset; −1 for `None`.
fn char_index(s: &str, at: Option<usize>) -> i64 {
    at.map_or(-1, |at| s[..at].chars().count() as i64)
}

/// The methods of `str`, `dict` and `list` that templates call; those that would modify their
/// object are refused, as by the sandbox of transformers.
fn call_method(
    _: &State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (value.kind(), value.as_str()) {
        (_, Some(s)) => string_method(s, method, args),
        (ValueKind::Map, _) => dict_method(value, method, args),
        (ValueKind::Seq | ValueKind::Iterable, _) => list_method(value, method, args),
        _ => Err(ErrorKind::UnknownMethod.into()),
    }
}

fn string_method(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let all = |test: fn(char) -> bool| Value::from(!s.is_empty() && s.chars().all(test));
    let cased = |wanted: fn(char) -> bool, other: fn(char) -> bool| {
        Value::from(s.chars().any(wanted) && !s.chars().any(other))
    };
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
            split_lines(s, keep.unwrap_or(false))
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
            parts.into_iter().map(Value::from).collect()
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
        "startswith" => {
            let (prefix,): (&Value,) = from_args(args)?;
            affix(prefix, |p| s.starts_with(p))?
        }
        "endswith" => {
            let (suffix,): (&Value,) = from_args(args)?;
            affix(suffix, |p| s.ends_with(p))?
        }
        "find" | "index" | "rfind" | "rindex" => {
            let (what,): (&str,) = from_args(args)?;
            let at = if method.starts_with('r') {
                s.rfind(what)
            } else {
                s.find(what)
            };
            if at.is_none() && method.ends_with("index") {
                return Err(error("substring not found"));
            }
            char_index(s, at).into()
        }
        "count" => {
            let (what,): (&str,) = from_args(args)?;
            s.matches(what).count().into()
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
        "swapcase" => {
            let swap = |c: char| -> String {
                if c.is_uppercase() {
                    c.to_lowercase().collect()
                } else {
                    c.to_uppercase().collect()
                }
            };
            s.chars().map(swap).collect::<String>().into()
        }
        "title" => {
            let mut out = String::new();
            let mut start = true;
            for c in s.chars() {
                if start {
                    out.extend(c.to_uppercase())
                } else {
                    out.extend(c.to_lowercase())
                }
                start = !c.is_alphabetic();
            }
            out.into()
        }
        "ljust" | "rjust" | "center" | "zfill" => {
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
            [sign, &fill.repeat(left), body, &fill.repeat(missing - left)]
                .concat()
                .into()
        }
        "isspace" => all(is_space),
        "isdigit" | "isdecimal" | "isnumeric" => all(char::is_numeric),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isascii" => s.is_ascii().into(),
        "isupper" => cased(char::is_uppercase, char::is_lowercase),
        "islower" => cased(char::is_lowercase, char::is_uppercase),
        "format" => {
            check_format(s, '{', args)?;
            minijinja::format_filter(minijinja::FormatStyle::StrFormat, s, args)?.into()
        }
        _ => return Err(ErrorKind::UnknownMethod.into()),
    })
}

fn dict_method(dict: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    Ok(match method {
        "get" => {
            let (key, default): (&Value, Option<Value>) = from_args(args)?;
            match dict.get_item(key)? {
                v if v.is_undefined() => default.unwrap_or_else(|| Value::from(())),
                v => v,
            }
        }
        "items" => items(dict)?,
        "keys" => elements(dict)?.into(),
        "values" => {
            let keys = elements(dict)?;
            keys.iter()
                .map(|k| dict.get_item(k))
                .collect::<Result<Vec<_>, _>>()?
                .into()
        }
        "copy" => dict.clone(),
        _ => return Err(ErrorKind::UnknownMethod.into()),
    })
}

fn list_method(list: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let list = elements(list)?;
    Ok(match method {
        "count" => {
            let (what,): (&Value,) = from_args(args)?;
            list.iter().filter(|v| *v == what).count().into()
        }
        "index" => {
            let (what,): (&Value,) = from_args(args)?;
            let at = list.iter().position(|v| v == what);
            at.ok_or_else(|| error("the value is not in the list"))?
                .into()
        }
        "copy" => list.into(),
        _ => return Err(ErrorKind::UnknownMethod.into()),
    })
}
