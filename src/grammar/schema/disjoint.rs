//! Whether no value can satisfy two schemas, so that `oneOf` says no more than `anyOf`.

use crate::grammar::schema::document::{Document, Location, enter};
use serde_json::Value;

/// Maximum number of pairs of schemas that are compared for one `oneOf`.
const MAX_STEPS: usize = 100_000;
/// Deepest nesting of compared schemas, references included.
const MAX_DEPTH: usize = 12;

/// Types of JSON values, as bits; integers are numbers of their own here.
const TYPES: &[(&str, u8)] = &[
    ("null", 1),
    ("boolean", 2),
    ("integer", 4),
    ("number", 4 | 8),
    ("string", 16),
    ("array", 32),
    ("object", OBJECT),
];
const OBJECT: u8 = 64;
const ANY: u8 = 127;

/// A schema in a document.
type Part<'a> = (&'a Value, Location);

/// Whether no value that satisfies `around` satisfies two of `schemas`.
pub(super) fn are_disjoint(document: &Document<'_>, around: &Value, schemas: &[Part<'_>]) -> bool {
    let mut search = Search { document, steps: 0 };
    let within = types(around);
    (schemas.iter().enumerate()).all(|(i, a)| {
        let mut others = schemas[..i].iter();
        others.all(|b| search.is_disjoint(a, b, within, 0))
    })
}

struct Search<'a> {
    document: &'a Document<'a>,
    steps: usize,
}

impl<'a> Search<'a> {
    /// Whether no value of the types `within` satisfies both schemas.
    fn is_disjoint(&mut self, a: &Part<'a>, b: &Part<'a>, within: u8, depth: usize) -> bool {
        self.steps += 1;
        let (a, b) = (&self.alone(a), &self.alone(b));
        if self.steps > MAX_STEPS || depth > MAX_DEPTH {
            return false;
        }
        if a.0 == &Value::Bool(false) || b.0 == &Value::Bool(false) {
            return true;
        }
        let common = types(a.0) & types(b.0) & within;
        if common == 0 || self.have_other_values(a.0, b.0) {
            return true;
        }
        // One part that all must satisfy, or alternatives of which one must hold.
        let mut with_parts_of = |a: &Part<'a>, b: &Part<'a>| {
            let all = self.conjuncts(a);
            all.iter()
                .any(|part| self.is_disjoint(part, b, common, depth + 1))
                || ["anyOf", "oneOf"].iter().any(|key| {
                    let any = items(a, key);
                    !any.is_empty()
                        && any
                            .iter()
                            .all(|part| self.is_disjoint(part, b, common, depth + 1))
                })
        };
        if with_parts_of(a, b) || with_parts_of(b, a) {
            return true;
        }
        let names = required(a.0).chain(required(b.0));
        common == OBJECT
            && names.into_iter().any(|name| {
                property(a, name)
                    .zip(property(b, name))
                    .is_some_and(|(a, b)| self.is_disjoint(&a, &b, ANY, depth + 1))
            })
    }

    /// Whether both schemas list their values and share none.
    fn have_other_values(&mut self, a: &Value, b: &Value) -> bool {
        let may_equal = |a: &Value, b: &Value| match (a, b) {
            (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
            (Value::Array(_), Value::Array(_)) | (Value::Object(_), Value::Object(_)) => true,
            (a, b) => a == b,
        };
        let Some((a, b)) = values(a).zip(values(b)) else {
            return false;
        };
        self.steps = self.steps.saturating_add(a.len().saturating_mul(b.len()));
        self.steps <= MAX_STEPS && !a.iter().any(|a| b.iter().any(|b| may_equal(a, b)))
    }

    /// Target of `part`'s reference, if keywords next to a reference have no effect.
    fn alone(&self, part: &Part<'a>) -> Part<'a> {
        let target = self.target(part);
        let target = target.filter(|_| enter(&part.1, part.0).draft.has_lone_references());
        target.unwrap_or_else(|| part.clone())
    }

    /// Target of `part`'s reference.
    fn target(&self, part: &Part<'a>) -> Option<Part<'a>> {
        let reference = part.0.get("$ref")?.as_str()?;
        let path = (self.document).resolve(reference, &enter(&part.1, part.0))?;
        Some((self.document.at(&path), self.document.place(&path)))
    }

    /// The schemas that all have to be satisfied besides the keywords of `part`.
    fn conjuncts(&self, part: &Part<'a>) -> Vec<Part<'a>> {
        let target = self.target(part).into_iter();
        target.chain(items(part, "allOf")).collect()
    }
}

/// The schemas in the list `key` of a schema.
fn items<'a>(part: &Part<'a>, key: &str) -> Vec<Part<'a>> {
    let place = enter(&part.1, part.0);
    let items = part.0.get(key).and_then(Value::as_array);
    (items.into_iter().flatten())
        .map(|item| (item, place.clone()))
        .collect()
}

fn required(schema: &Value) -> impl Iterator<Item = &str> {
    let names = schema.get("required").and_then(Value::as_array);
    names.into_iter().flatten().filter_map(Value::as_str)
}

/// The schema of a property, if there is one for it.
fn property<'a>(part: &Part<'a>, name: &str) -> Option<Part<'a>> {
    let listed = part.0.get("properties").and_then(|all| all.get(name));
    let other = || match part.0.get("patternProperties") {
        None => part.0.get("additionalProperties"),
        Some(_) => None,
    };
    Some((listed.or_else(other)?, enter(&part.1, part.0)))
}

/// Types of the values that the keywords of a schema itself allow.
fn types(schema: &Value) -> u8 {
    let named = |name: &Value| {
        let found = TYPES.iter().find(|(known, _)| name == known);
        found.map_or(ANY, |(_, bits)| *bits)
    };
    let declared = match schema.get("type") {
        Some(Value::Array(names)) => names.iter().map(named).fold(0, |all, bits| all | bits),
        Some(name) if !name.is_null() => named(name),
        _ => ANY,
    };
    let of_value = |value: &Value| match value {
        Value::Null => 1,
        Value::Bool(_) => 2,
        Value::Number(_) => 4 | 8,
        Value::String(_) => 16,
        Value::Array(_) => 32,
        Value::Object(_) => OBJECT,
    };
    let of_values = values(schema).map(|all| all.iter().fold(0, |all, v| all | of_value(v)));
    declared & of_values.unwrap_or(ANY)
}

/// The only values that `const` or `enum` allow.
fn values(schema: &Value) -> Option<&[Value]> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(std::slice::from_ref(value)),
        (None, values) => values?.as_array().map(Vec::as_slice),
    }
}
