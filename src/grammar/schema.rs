//! JSON Schema: what is enforced, what is refused, and one form for all drafts.
//!
//! A schema is rewritten before the engine sees it: keywords of older drafts become those of draft
//! 2020-12, references (`$ref` to pointers, anchors and `$id`s inside the schema) point into
//! `$defs`, patterns are translated, keywords without effect are dropped. The remaining keywords
//! are those that the engine enforces.

use crate::grammar::pattern::from_ecma;
use crate::grammar::{GrammarError, Layout, MAX_DEPTH, Syntax};
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};

/// White space between two JSON tokens, if there is any.
const WHITE_SPACE: &str = r"\x20";
/// Numbers up to this magnitude are exact as 64-bit floats.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;
/// Most values of an `enum`.
const MAX_VALUES: usize = 5_000;
/// Most parts of a refused schema that are compiled to find the faulty one.
const MAX_SEARCH: usize = 40;

/// Formats that the engine enforces; those of [`own_format`] are enforced, too.
const FORMATS: &[&str] = &[
    "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
];

/// Keywords that describe and do not restrict.
#[rustfmt::skip]
const ANNOTATIONS: &[&str] = &[
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary",
    "contentEncoding", "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description",
    "examples", "id", "readOnly", "title", "writeOnly",
];

/// A draft, by the year or number in its name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Draft {
    D4,
    D6,
    D7,
    D2019,
    D2020,
}

impl Draft {
    /// The draft that `$schema` names; `otherwise` if it is missing, the newest if it is unknown.
    fn of(schema: &Value, otherwise: Draft) -> Draft {
        match schema.get("$schema").and_then(Value::as_str) {
            None => otherwise,
            Some(uri) if uri.contains("draft-03") || uri.contains("draft-04") => Draft::D4,
            Some(uri) if uri.contains("draft-06") => Draft::D6,
            Some(uri) if uri.contains("draft-07") => Draft::D7,
            Some(uri) if uri.contains("2019-09") => Draft::D2019,
            Some(_) => Draft::D2020,
        }
    }
}

/// Compiles a schema with `build`, which receives the rewritten one.
pub(super) fn compile<T>(
    source: &str,
    layout: Layout,
    build: impl Fn(Value) -> Result<T, GrammarError>,
) -> Result<T, GrammarError> {
    let value: Value =
        serde_json::from_str(source).map_err(|e| invalid(format!("not JSON: {e}")))?;
    let document = Document::new(&value, layout);
    build(document.rewrite("")?).map_err(|error| {
        let (mut path, mut error) = (String::new(), error);
        let mut searched = HashSet::new();
        // The deepest part that is refused on its own is the faulty one.
        while let Some((child, e)) = children(&document, &path).into_iter().find_map(|child| {
            // A part that is `false` has no value on purpose.
            let fresh = document.root.pointer(&child) != Some(&Value::Bool(false));
            let fresh = fresh && searched.len() < MAX_SEARCH && searched.insert(child.clone());
            let refused = fresh
                .then(|| document.rewrite(&child).and_then(&build).err())
                .flatten()?;
            Some((child, refused))
        }) {
            (path, error) = (child, e);
        }
        match error {
            GrammarError::Invalid { message, .. } => explain(path, message),
            other => other,
        }
    })
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
                let rewritten = Document::new(&value, layout).rewrite("")?;
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

fn invalid(message: String) -> GrammarError {
    GrammarError::Invalid {
        syntax: Syntax::JsonSchema.name(),
        message,
    }
}

fn refusal(keyword: &str, path: &str, message: impl Into<String>) -> GrammarError {
    GrammarError::Keyword {
        keyword: keyword.to_owned(),
        path: path.to_owned(),
        message: message.into(),
    }
}

/// Converts the engine's refusal of the schema at `path` to an error that names the keyword.
fn explain(path: String, message: String) -> GrammarError {
    let about = [
        (
            "oneOf constraints",
            "oneOf",
            "is enforced only where no value can satisfy two of its schemas",
        ),
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
    ];
    match about.iter().find(|(words, ..)| message.contains(words)) {
        Some((_, keyword, message)) => refusal(keyword, &path, *message),
        None if path.is_empty() => invalid(message),
        None => invalid(format!("at {path:?}: {message}")),
    }
}

/// Escapes `name` for a JSON pointer.
fn token(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// A schema and the addresses of its parts.
struct Document<'a> {
    root: &'a Value,
    /// Pointers by absolute address, with the anchor after `#` if there is one.
    ids: HashMap<String, String>,
    base: String,
    layout: Layout,
}

/// Position of a schema.
#[derive(Clone)]
struct Place {
    /// JSON pointer.
    path: String,
    /// Address that references are relative to.
    base: String,
    draft: Draft,
    /// Number of enclosing schemas.
    depth: usize,
}

/// Pointers that references lead to, with their numbers in `$defs`, in order.
#[derive(Default)]
struct Definitions {
    numbers: HashMap<String, usize>,
    order: Vec<String>,
}

impl<'a> Document<'a> {
    fn new(root: &'a Value, layout: Layout) -> Self {
        let mut document = Self {
            root,
            ids: HashMap::new(),
            base: String::new(),
            layout,
        };
        let place = Place {
            path: String::new(),
            base: String::new(),
            draft: Draft::D2020,
            depth: 0,
        };
        document.base = enter(&place, root).base;
        document.register(root, &place);
        document
    }

    /// Registers the addresses of `value` and of everything below it.
    fn register(&mut self, value: &Value, around: &Place) {
        let place = enter(around, value);
        match value {
            Value::Object(map) => {
                if place.base != around.base || place.path.is_empty() {
                    self.ids
                        .entry(place.base.clone())
                        .or_insert_with(|| place.path.clone());
                }
                for key in ["$anchor", "$dynamicAnchor"] {
                    if let Some(name) = map.get(key).and_then(Value::as_str) {
                        self.ids
                            .insert(format!("{}#{name}", place.base), place.path.clone());
                    }
                }
                for (key, value) in map
                    .iter()
                    .filter(|(key, _)| !matches!(&key[..], "enum" | "const" | "default"))
                {
                    self.register(
                        value,
                        &Place {
                            path: format!("{}/{}", place.path, token(key)),
                            ..place.clone()
                        },
                    );
                }
            }
            Value::Array(items) => {
                for (i, value) in items.iter().enumerate() {
                    self.register(
                        value,
                        &Place {
                            path: format!("{}/{i}", place.path),
                            ..place.clone()
                        },
                    );
                }
            }
            _ => {}
        }
    }

    /// The place of the value at a pointer, which must exist.
    fn place(&self, path: &str) -> Place {
        let mut place = Place {
            path: String::new(),
            base: String::new(),
            draft: Draft::D2020,
            depth: 0,
        };
        for (at, _) in path.char_indices().filter(|&(_, c)| c == '/') {
            place = enter(
                &place,
                self.root.pointer(&path[..at]).unwrap_or(&Value::Null),
            );
        }
        Place {
            path: path.to_owned(),
            ..place
        }
    }

    /// The pointer to which a reference at `place` resolves.
    fn resolve(&self, reference: &str, place: &Place) -> Option<String> {
        let absolute = join(&place.base, reference);
        let (address, fragment) = absolute.split_once('#').unwrap_or((&absolute, ""));
        if !fragment.is_empty() && !fragment.starts_with('/') {
            return self.ids.get(&format!("{address}#{fragment}")).cloned();
        }
        let pointer = format!("{}{}", self.ids.get(address)?, percent_decode(fragment)?);
        self.root.pointer(&pointer).is_some().then_some(pointer)
    }

    /// Rewrites the schema at a pointer to the form that the engine takes.
    fn rewrite(&self, path: &str) -> Result<Value, GrammarError> {
        let mut definitions = Definitions::default();
        let at = |path: &str| self.root.pointer(path).unwrap_or(&Value::Null);
        let schema = self.schema(at(path), &self.place(path), &mut definitions)?;
        let mut out = match schema {
            Value::Object(map) => map,
            Value::Bool(true) => Map::new(),
            _ => {
                return Err(invalid(format!(
                    "no value satisfies the schema at {path:?}, which is false"
                )));
            }
        };
        let mut defs = Map::new();
        let mut done = 0;
        while let Some(path) = definitions.order.get(done).cloned() {
            let schema = self.schema(at(&path), &self.place(&path), &mut definitions)?;
            defs.insert(done.to_string(), schema);
            done += 1;
        }
        if !defs.is_empty() {
            out.insert("$defs".into(), defs.into());
        }
        let options = match self.layout {
            Layout::Free => json!({"whitespace_pattern": WHITE_SPACE}),
            Layout::Template => {
                json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "})
            }
        };
        out.insert("x-guidance".into(), options);
        Ok(out.into())
    }

    fn schema(
        &self,
        schema: &Value,
        around: &Place,
        definitions: &mut Definitions,
    ) -> Result<Value, GrammarError> {
        if around.depth > MAX_DEPTH {
            return Err(GrammarError::TooDeep { limit: MAX_DEPTH });
        }
        let map = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(map) => map,
            _ => {
                return Err(invalid(format!(
                    "at {:?}: a schema is an object, true or false",
                    around.path
                )));
            }
        };
        let place = enter(around, schema);
        let below = |key: &str| Place {
            path: format!("{}/{}", place.path, token(key)),
            depth: place.depth + 1,
            ..place.clone()
        };
        let below_in = |key: &str, name: &str| {
            let place = below(key);
            Place {
                path: format!("{}/{}", place.path, token(name)),
                ..place
            }
        };
        let wrong = |keyword: &str, message: String| refusal(keyword, &place.path, message);
        let refuse = |keyword: &str, message: &str| Err(refusal(keyword, &place.path, message));
        let has = |key: &str| map.contains_key(key);
        let reference = map.get("$ref");
        let mut out = Map::new();
        let mut all_of: Vec<Value> = Vec::new();
        for (key, value) in map {
            // Up to draft 7, keywords beside a reference are ignored.
            if place.draft <= Draft::D7 && reference.is_some() && key != "$ref" {
                continue;
            }
            let nothing =
                matches!(value, Value::Bool(true)) || value.as_object().is_some_and(Map::is_empty);
            match &key[..] {
                "$ref" => {
                    let target = value
                        .as_str()
                        .and_then(|reference| self.resolve(reference, &place));
                    let Some(target) = target else {
                        return refuse(key, &format!("is {value}, which is not inside the schema"));
                    };
                    let next = definitions.order.len();
                    let number = *definitions.numbers.entry(target.clone()).or_insert(next);
                    if number == next {
                        definitions.order.push(target);
                    }
                    out.insert(key.clone(), format!("#/$defs/{number}").into());
                }
                "allOf" | "anyOf" | "oneOf" | "prefixItems" => {
                    let Some(items) = value.as_array() else {
                        return refuse(key, "is not an array");
                    };
                    if key == "prefixItems" && place.draft < Draft::D2020 {
                        return refuse(key, "is of draft 2020-12, and the schema of an older one");
                    }
                    let items: Result<Vec<_>, _> = (items.iter().enumerate())
                        .map(|(i, item)| {
                            self.schema(item, &below_in(key, &i.to_string()), definitions)
                        })
                        .collect();
                    match &key[..] {
                        "allOf" => {
                            all_of.extend(items?);
                            // A placeholder: properties come in the order of the schemas.
                            out.insert(key.clone(), Value::Null);
                        }
                        _ => drop(out.insert(key.clone(), items?.into())),
                    }
                }
                "properties" | "patternProperties" => {
                    let Some(members) = value.as_object() else {
                        return refuse(key, "is not an object");
                    };
                    let mut rewritten = Map::new();
                    for (name, member) in members {
                        let name_out = match &key[..] {
                            "properties" => name.clone(),
                            _ => from_ecma(name).map_err(|e| {
                                wrong(key, format!("has the pattern {name:?}, which {e}"))
                            })?,
                        };
                        rewritten.insert(
                            name_out,
                            self.schema(member, &below_in(key, name), definitions)?,
                        );
                    }
                    out.insert(key.clone(), rewritten.into());
                }
                "items" => match value.as_array() {
                    Some(items) => {
                        let items: Result<Vec<_>, _> = (items.iter().enumerate())
                            .map(|(i, item)| {
                                self.schema(item, &below_in(key, &i.to_string()), definitions)
                            })
                            .collect();
                        out.insert("prefixItems".into(), items?.into());
                    }
                    None => {
                        drop(out.insert(key.clone(), self.schema(value, &below(key), definitions)?))
                    }
                },
                "additionalItems" if map.get("items").is_some_and(Value::is_array) => {
                    out.insert(
                        "items".into(),
                        self.schema(value, &below(key), definitions)?,
                    );
                }
                "additionalItems" => {}
                "additionalProperties" => {
                    out.insert(key.clone(), self.schema(value, &below(key), definitions)?);
                }
                "unevaluatedProperties" | "unevaluatedItems" => {
                    let tuple = map.get("items").is_some_and(Value::is_array);
                    let (other, written) = match (key == "unevaluatedItems", tuple) {
                        (true, true) => ("additionalItems", "items"),
                        (true, false) => ("items", "items"),
                        (false, _) => ("additionalProperties", "additionalProperties"),
                    };
                    let applicators = [
                        "$ref",
                        "allOf",
                        "anyOf",
                        "oneOf",
                        "if",
                        "dependentSchemas",
                        "contains",
                        "not",
                    ];
                    match nothing || has(other) {
                        true if nothing || !applicators.iter().any(|key| has(key)) => {}
                        false if !applicators.iter().any(|key| has(key)) => {
                            out.insert(
                                written.into(),
                                self.schema(value, &below(key), definitions)?,
                            );
                        }
                        _ => {
                            return refuse(
                                key,
                                "is enforced only without schemas beside it that evaluate too",
                            );
                        }
                    }
                }
                "pattern" => {
                    let Some(pattern) = value.as_str() else {
                        return refuse(key, "is not a string");
                    };
                    let pattern = from_ecma(pattern)
                        .map_err(|e| wrong(key, format!("is {value}, which {e}")))?;
                    out.insert(key.clone(), pattern.into());
                }
                "format" => match value.as_str() {
                    Some(name) if own_format(name).is_some() => {
                        all_of.push(json!({"type": "string", "pattern": own_format(name)}));
                        // Formats restrict only strings.
                        if !map.get("type").is_some_and(|t| t == "string") {
                            let others = ["null", "boolean", "number", "array", "object"];
                            let string = all_of.pop();
                            all_of.push(json!({"anyOf": [string, {"type": others}]}));
                        }
                    }
                    Some(name) if FORMATS.contains(&name) => {
                        drop(out.insert(key.clone(), value.clone()))
                    }
                    _ => return refuse(key, &format!("is {value}, which is not enforced")),
                },
                "type" | "required" => drop(out.insert(key.clone(), value.clone())),
                "enum"
                    if value
                        .as_array()
                        .is_some_and(|values| values.len() > MAX_VALUES) =>
                {
                    return refuse(key, &format!("has more than {MAX_VALUES} values"));
                }
                "enum" | "const" => {
                    if !is_exact(value) {
                        return refuse(key, "has a number that is too large to be exact");
                    }
                    out.insert(key.clone(), value.clone());
                }
                "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
                    match value {
                        Value::Bool(false) => {}
                        Value::Number(_) | Value::Bool(true) if is_exact(value) => {
                            out.insert(key.clone(), value.clone());
                        }
                        _ => return refuse(key, "is no number, or too large to be exact"),
                    }
                }
                "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties"
                | "maxProperties" => {
                    let float = value
                        .as_f64()
                        .filter(|v| v.fract() == 0.0 && (0.0..=MAX_EXACT).contains(v));
                    let Some(number) = value.as_u64().or(float.map(|v| v as u64)) else {
                        return refuse(key, "is no number of things");
                    };
                    out.insert(key.clone(), number.into());
                }
                // Without effect in these cases.
                "uniqueItems" if value == &Value::Bool(false) => {}
                "uniqueItems"
                    if map
                        .get("maxItems")
                        .and_then(Value::as_u64)
                        .is_some_and(|max| max <= 1) => {}
                "not" if value == &Value::Bool(false) => {}
                "if" if !has("then") && !has("else") => {}
                "then" | "else" if !has("if") => {}
                "minContains" | "maxContains" if !has("contains") => {}
                "propertyNames" if nothing => {}
                "dependencies" | "dependentRequired" | "dependentSchemas" if nothing => {}
                "uniqueItems" | "not" | "if" | "then" | "else" | "contains" | "minContains"
                | "maxContains" | "propertyNames" | "dependencies" | "dependentRequired"
                | "dependentSchemas" | "$dynamicRef" | "$recursiveRef" | "extends" | "disallow"
                | "divisibleBy" => {
                    return refuse(key, "is not enforced");
                }
                // Another meta-schema may have other keywords, or none.
                "$schema"
                    if !value
                        .as_str()
                        .is_some_and(|uri| uri.contains("json-schema.org")) =>
                {
                    return refuse(key, &format!("is {value}, which is no draft"));
                }
                "x-guidance" => {
                    return refuse(key, "sets options of the engine, which a schema may not");
                }
                key if ANNOTATIONS.contains(&key) => {}
                // Not a keyword in any draft: according to the standard, an annotation.
                _ => {}
            }
        }
        if !all_of.is_empty() {
            out.insert("allOf".into(), all_of.into());
        }
        Ok(out.into())
    }
}

/// The pointers of the subschemas of the schema at `path`.
fn children(document: &Document<'_>, path: &str) -> Vec<String> {
    let Some(Value::Object(map)) = document.root.pointer(path) else {
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

/// The place inside `schema`, which is at `around`: applies its own draft and address.
fn enter(around: &Place, schema: &Value) -> Place {
    let draft = Draft::of(schema, around.draft);
    let ignored = draft <= Draft::D7 && schema.get("$ref").is_some();
    let id = schema
        .get(if draft == Draft::D4 { "id" } else { "$id" })
        .and_then(Value::as_str)
        .filter(|_| !ignored);
    let base = match id {
        // In old drafts, `#name` is an anchor.
        Some(id) if !id.starts_with('#') => join(&around.base, id).trim_end_matches('#').to_owned(),
        _ => around.base.clone(),
    };
    Place {
        draft,
        base,
        ..around.clone()
    }
}

/// Resolves the address `reference` relative to the address `base`.
fn join(base: &str, reference: &str) -> String {
    let scheme = |uri: &str| {
        let len = uri.find(|c: char| !c.is_ascii_alphanumeric() && !"+-.".contains(c))?;
        (len > 0 && uri[len..].starts_with(':')).then_some(len)
    };
    let document = base.split('#').next().unwrap_or_default();
    if reference.is_empty() || reference.starts_with('#') {
        format!("{document}{reference}")
    } else if scheme(reference).is_some() {
        reference.to_owned()
    } else {
        let path = scheme(document).map_or(0, |len| {
            let host = len + 1;
            if document[host..].starts_with("//") {
                document[host + 2..]
                    .find('/')
                    .map_or(document.len(), |at| host + 2 + at)
            } else {
                host
            }
        });
        if reference.starts_with('/') {
            return format!("{}{reference}", &document[..path]);
        }
        let folder = document[path..]
            .rfind('/')
            .map_or(document[..path].len(), |at| path + at + 1);
        let slash = if folder == document.len() && !document.is_empty() && !document.ends_with('/')
        {
            "/"
        } else {
            ""
        };
        format!("{}{slash}{reference}", &document[..folder])
    }
}

/// Decodes `%XX` in `text`; `None` if that is malformed or not UTF-8.
fn percent_decode(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(b) = bytes.next() {
        let mut digit = || char::from(bytes.next()?).to_digit(16);
        out.push(if b == b'%' {
            (digit()? * 16 + digit()?) as u8
        } else {
            b
        });
    }
    String::from_utf8(out).ok()
}

/// Whether all numbers in `value` are exact for the engine, which uses 64-bit floats.
fn is_exact(value: &Value) -> bool {
    match value {
        Value::Number(n) => n.as_f64().is_some_and(|v| v.abs() <= MAX_EXACT),
        Value::Array(items) => items.iter().all(is_exact),
        Value::Object(members) => members.values().all(is_exact),
        _ => true,
    }
}

/// Pattern of a format for which the engine's own is too permissive: dates that do not exist,
/// minutes with 61 seconds, fractions of a second of unlimited length.
fn own_format(name: &str) -> Option<String> {
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
