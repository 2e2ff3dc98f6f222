//! JSON Schema: what is enforced, what is not, and one form for all drafts.
//!
//! A schema is brought into normal form (`normal`), in which references are into `$defs`
//! (`document`), `oneOf` is `anyOf` (`disjoint`) and every keyword can be enforced; then into the
//! engine's dialect (`engine`). Parts that cannot be enforced are named: in strict mode they are an
//! error; in lenient mode the grammar accepts more than the schema does.

mod disjoint;
mod document;
mod engine;
mod normal;

use crate::grammar::error::Loosened;
use crate::grammar::{GrammarError, Layout, Strictness, Syntax};
use document::{Document, enter, token};
use engine::for_engine;
use normal::normalise;
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};

/// Numbers up to this magnitude are exact as 64-bit floats.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;
/// Maximum number of parts of a refused schema that are compiled to find the faulty one.
const MAX_SEARCH: usize = 40;
/// Maximum number of parts of a schema that are left out because the engine refuses them.
const MAX_FREED: usize = 8;
/// Greatest size of a schema in normal form, in bytes of JSON.
const MAX_LEN: usize = 256 << 10;

/// Formats that the engine enforces; those of [`own_format`] are enforced, too.
const FORMATS: &[&str] = &[
    "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
];

/// The JSON of a schema.
pub(super) fn parse(source: &str) -> Result<Value, GrammarError> {
    serde_json::from_str(source).map_err(|e| invalid(format!("not JSON: {e}")))
}

/// A schema that can be enforced.
pub(super) struct Enforced<T> {
    /// Its normal form.
    #[cfg_attr(not(feature = "chat"), expect(dead_code))]
    pub(super) normal: Value,
    /// Parts that the normal form lacks.
    pub(super) loosened: Vec<Loosened>,
    /// Result of `build`.
    pub(super) built: T,
}

/// Brings a schema into a normal form with which `build` succeeds. Leniently, parts of a schema, or
/// all but its type, are left out if there is no other way.
///
/// # Errors
/// Those of `build` if they are not of the schema; strictly, the first part that cannot be
/// enforced.
pub(super) fn enforce<T>(
    value: &Value,
    strictness: Strictness,
    build: impl Fn(&Value) -> Result<T, GrammarError>,
) -> Result<Enforced<T>, GrammarError> {
    if !value.is_object() && !value.is_boolean() {
        return Err(invalid("a schema is an object, true or false".into()));
    }
    let is_lenient = strictness == Strictness::Lenient;
    let mut freed = HashMap::new();
    let error = Document::new(value).and_then(|document| {
        loop {
            let try_part = |path: &str| {
                let (normal, loosened) = normalise(&document, path, strictness, &freed)?;
                if let Some(first) = loosened.first().filter(|_| !is_lenient) {
                    return Err(first.clone().into());
                }
                if normal.to_string().len() > MAX_LEN {
                    return Err(GrammarError::TooLarge { limit: MAX_LEN });
                }
                let built = build(&normal)?;
                Ok(Enforced {
                    normal,
                    loosened,
                    built,
                })
            };
            let error = match try_part("") {
                Err(error @ GrammarError::Invalid { .. }) => error,
                other => return other,
            };
            let (path, error) = locate(&document, error, |path| try_part(path).err());
            if !is_lenient || path.is_empty() || freed.len() == MAX_FREED {
                return Err(error);
            }
            freed.insert(path.clone(), loosened(path, error));
        }
    });
    match error {
        Err(error) if is_lenient => {
            let kind = value.get("type").and_then(Value::as_str);
            let known = ["array", "boolean", "integer", "null", "number", "string"];
            let kind = kind.filter(|kind| known.contains(kind)).unwrap_or("object");
            let normal = json!({"type": kind});
            Ok(Enforced {
                built: build(&normal)?,
                normal,
                loosened: vec![loosened(String::new(), error)],
            })
        }
        other => other,
    }
}

/// [`enforce`], with a `build` that receives the engine's dialect.
pub(super) fn compile<T>(
    value: &Value,
    strictness: Strictness,
    layout: Layout,
    build: impl Fn(Value) -> Result<T, GrammarError>,
) -> Result<Enforced<T>, GrammarError> {
    enforce(value, strictness, |normal| {
        match for_engine(normal.clone(), layout) {
            Some(schema) => build(schema),
            None => Err(invalid("no value satisfies the schema".into())),
        }
    })
}

/// Entry for the schema at `path` that was refused with this error.
fn loosened(path: String, error: GrammarError) -> Loosened {
    match error {
        GrammarError::Keyword {
            keyword, message, ..
        } => Loosened {
            keyword,
            path,
            message,
        },
        other => Loosened {
            keyword: "schema".to_owned(),
            path,
            message: format!("is not enforced: {other}"),
        },
    }
}

/// The path of the deepest part that is refused on its own, and its error; `refused` returns the
/// error of a part.
fn locate(
    document: &Document<'_>,
    error: GrammarError,
    refused: impl Fn(&str) -> Option<GrammarError>,
) -> (String, GrammarError) {
    let (mut path, mut error) = (String::new(), error);
    let mut searched = HashSet::new();
    while let Some((child, e)) = children(document, &path).into_iter().find_map(|child| {
        // A part that is `false` has no value on purpose.
        let fresh = document.at(&child) != &Value::Bool(false);
        let fresh = fresh && searched.len() < MAX_SEARCH && searched.insert(child.clone());
        let refused = fresh.then(|| refused(&child)).flatten()?;
        Some((child, refused))
    }) {
        (path, error) = (child, e);
    }
    match error {
        GrammarError::Invalid { message, .. } => {
            let error = explain(&path, &message);
            (path, error)
        }
        other => (path, other),
    }
}

/// Checks and rewrites the schemas in a Lark grammar.
pub(super) fn check_in_lark(source: &str, layout: Layout) -> Result<String, GrammarError> {
    const KEYWORD: &str = "%json";
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut in_text: Option<char> = None;
    while let Some(c) = rest.chars().next() {
        let mut len = c.len_utf8();
        match (in_text, c) {
            (Some(_), '\\') => len += rest[1..].chars().next().map_or(0, char::len_utf8),
            (Some(end), _) if c == end => in_text = None,
            (Some(_), _) => {}
            (None, _) if rest.starts_with("//") => len = rest.find('\n').unwrap_or(rest.len()),
            (None, '"' | '/') => in_text = Some(c),
            (None, _) if rest.starts_with(KEYWORD) => {
                let after = &rest[KEYWORD.len()..];
                let mut values = serde_json::Deserializer::from_str(after).into_iter::<Value>();
                let value = match values.next() {
                    Some(Ok(value)) => value,
                    Some(Err(e)) => return Err(invalid(format!("after {KEYWORD}: {e}"))),
                    None => return Err(invalid(format!("{KEYWORD} without a schema"))),
                };
                let rewritten = in_engine_form(&value, layout)?;
                out.push_str(&format!("{KEYWORD} {rewritten}"));
                rest = &after[values.byte_offset()..];
                continue;
            }
            (None, _) => {}
        }
        out.push_str(&rest[..len]);
        rest = &rest[len..];
    }
    Ok(out)
}

/// A schema in the engine's dialect, enforced strictly.
fn in_engine_form(value: &Value, layout: Layout) -> Result<Value, GrammarError> {
    Ok(compile(value, Strictness::Strict, layout, Ok)?.built)
}

fn invalid(message: String) -> GrammarError {
    GrammarError::Invalid {
        syntax: Syntax::JsonSchema.name(),
        message,
    }
}

/// Converts the engine's refusal of the schema at `path` to an error in words of schemas.
fn explain(path: &str, message: &str) -> GrammarError {
    let about = [
        (
            "min/maxProperties",
            "minProperties",
            "and maxProperties are enforced only where all properties are required",
        ),
        (
            "patternProperty",
            "patternProperties",
            "has patterns that overlap, or may: only distinct ones are enforced",
        ),
        (
            "circular ref",
            "$ref",
            "refers to itself beside other keywords, which cannot be enforced",
        ),
        (
            "if regex is empty",
            "pattern",
            "is too complex to be enforced with the lengths beside it",
        ),
        ("nsatisfiable", "schema", "is satisfied by no value"),
        ("no value satisfies", "schema", "is satisfied by no value"),
        (
            "regex",
            "pattern",
            "is too large, or no regular expression that can be matched",
        ),
    ];
    let found = about.iter().find(|(words, ..)| message.contains(words));
    let (_, keyword, message) = found.unwrap_or(&(
        "",
        "schema",
        "takes more work or memory to compile than any legitimate one",
    ));
    GrammarError::Keyword {
        keyword: (*keyword).to_owned(),
        path: path.to_owned(),
        message: (*message).to_owned(),
    }
}

/// The pointers of the subschemas of the schema at `path`.
fn children(document: &Document<'_>, path: &str) -> Vec<String> {
    let Value::Object(map) = document.at(path) else {
        return Vec::new();
    };
    let mut out = Vec::new();
    for (key, value) in map {
        let here = format!("{path}/{}", token(key));
        match (&key[..], value) {
            ("$ref", Value::String(reference)) => {
                let place = enter(&document.place(path), &Value::Object(map.clone()));
                out.extend(document.resolve(reference, &place));
            }
            ("allOf" | "anyOf" | "oneOf" | "prefixItems" | "items", Value::Array(items)) => {
                out.extend((0..items.len()).map(|i| format!("{here}/{i}")));
            }
            ("properties" | "patternProperties", Value::Object(members)) => {
                out.extend(members.keys().map(|name| format!("{here}/{}", token(name))));
            }
            ("items" | "additionalItems" | "additionalProperties", Value::Object(_)) => {
                out.push(here)
            }
            _ => {}
        }
    }
    out
}

/// Pattern of a format for which the engine's own is too permissive: dates that do not exist,
/// minutes with 61 seconds, fractions of a second of unlimited length.
pub(super) fn own_format(name: &str) -> Option<String> {
    let leap = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29";
    let days = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])";
    let date = format!("(?:[0-9]{{4}}-(?:{days})|{leap})");
    let zone = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
    let time = format!("(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{{1,9}})?{zone}");
    let pattern = match name {
        "date" => date,
        "time" => time,
        "date-time" => format!("{date}[tT]{time}"),
        _ => return None,
    };
    Some(format!("^{pattern}$"))
}
