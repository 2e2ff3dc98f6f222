//! Addresses in a schema: drafts, `$id`s, anchors, and the targets of references.

use crate::grammar::GrammarError;
use serde_json::Value;
use std::collections::HashMap;

/// Most JSON values in a schema.
const MAX_VALUES: usize = 100_000;

/// A draft, by the year or number in its name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Draft {
    D4,
    D6,
    D7,
    D2019,
    D2020,
}

impl Draft {
    /// Whether keywords next to a reference have no effect.
    pub(super) fn has_lone_references(self) -> bool {
        self <= Draft::D7
    }

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

/// Escapes `name` for a JSON pointer.
pub(super) fn token(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// A schema and the addresses of its parts.
pub(super) struct Document<'a> {
    pub(super) root: &'a Value,
    /// Pointers by absolute address, with the anchor after `#` if there is one.
    ids: HashMap<String, String>,
}

/// Position of a schema.
#[derive(Clone)]
pub(super) struct Location {
    /// JSON pointer.
    pub(super) path: String,
    /// Address that references are relative to.
    base: String,
    pub(super) draft: Draft,
    /// Number of enclosing schemas.
    pub(super) depth: usize,
}

impl Location {
    fn root() -> Self {
        Self {
            path: String::new(),
            base: String::new(),
            draft: Draft::D2020,
            depth: 0,
        }
    }

    /// The place of the schema in the keyword `key`.
    pub(super) fn below(&self, key: &str) -> Self {
        Self {
            path: format!("{}/{}", self.path, token(key)),
            depth: self.depth + 1,
            ..self.clone()
        }
    }

    /// The place of the schema `name` among those in the keyword `key`.
    pub(super) fn below_in(&self, key: &str, name: &str) -> Self {
        Self {
            path: format!("{}/{}/{}", self.path, token(key), token(name)),
            depth: self.depth + 1,
            ..self.clone()
        }
    }
}

impl<'a> Document<'a> {
    /// # Errors
    /// [`GrammarError::TooLarge`] for a schema of more values than any legitimate one.
    pub(super) fn new(root: &'a Value) -> Result<Self, GrammarError> {
        let mut document = Self {
            root,
            ids: HashMap::new(),
        };
        if has_more_values(root, &mut { MAX_VALUES }) {
            return Err(GrammarError::TooLarge { limit: MAX_VALUES });
        }
        document.register(root, &Location::root());
        Ok(document)
    }

    /// The value at a pointer, which must exist.
    pub(super) fn at(&self, path: &str) -> &'a Value {
        self.root.pointer(path).unwrap_or(&Value::Null)
    }

    /// Registers the addresses of `value` and of everything below it.
    fn register(&mut self, value: &Value, around: &Location) {
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
                        &Location {
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
                        &Location {
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
    pub(super) fn place(&self, path: &str) -> Location {
        let mut place = Location::root();
        for (at, _) in path.char_indices().filter(|&(_, c)| c == '/') {
            place = enter(&place, self.at(&path[..at]));
        }
        Location {
            path: path.to_owned(),
            ..place
        }
    }

    /// The pointer to which a reference at `place` resolves.
    pub(super) fn resolve(&self, reference: &str, place: &Location) -> Option<String> {
        let absolute = join(&place.base, reference);
        let (address, fragment) = absolute.split_once('#').unwrap_or((&absolute, ""));
        if !fragment.is_empty() && !fragment.starts_with('/') {
            return self.ids.get(&format!("{address}#{fragment}")).cloned();
        }
        let pointer = format!("{}{}", self.ids.get(address)?, percent_decode(fragment)?);
        self.root.pointer(&pointer).is_some().then_some(pointer)
    }
}

/// The place inside `schema`, which is at `around`: applies its own draft and address.
pub(super) fn enter(around: &Location, schema: &Value) -> Location {
    let draft = Draft::of(schema, around.draft);
    let ignored = draft.has_lone_references() && schema.get("$ref").is_some();
    let id = schema
        .get(if draft == Draft::D4 { "id" } else { "$id" })
        .and_then(Value::as_str)
        .filter(|_| !ignored);
    let base = match id {
        // In old drafts, `#name` is an anchor.
        Some(id) if !id.starts_with('#') => join(&around.base, id).trim_end_matches('#').to_owned(),
        _ => around.base.clone(),
    };
    Location {
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

/// Whether `value` contains more JSON values than `left`, which counts down.
fn has_more_values(value: &Value, left: &mut usize) -> bool {
    let Some(fewer) = left.checked_sub(1) else {
        return true;
    };
    *left = fewer;
    match value {
        Value::Array(items) => items.iter().any(|item| has_more_values(item, left)),
        Value::Object(members) => members.values().any(|member| has_more_values(member, left)),
        _ => false,
    }
}
