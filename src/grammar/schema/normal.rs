//! The normal form of a schema: draft 2020-12, references into `$defs`, and only keywords that can
//! be enforced.
//!
//! One pass over the schema visits every keyword. It is kept, describes and is dropped, or cannot
//! be enforced: then it is dropped, so that the result accepts all values that the schema accepts,
//! and named.

use crate::grammar::GrammarError;
use crate::grammar::error::Loosened;
use crate::grammar::pattern::from_ecma;
use crate::grammar::schema::disjoint::are_disjoint;
use crate::grammar::schema::document::{Document, Draft, Location, enter};
use crate::grammar::schema::{FORMATS, MAX_EXACT, Strictness, own_format};
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};

/// Deepest nesting of schemas.
const MAX_DEPTH: usize = 64;
/// Maximum number of schemas in the normal form.
const MAX_SCHEMAS: usize = 20_000;
/// Maximum number of schemas that references lead to: the engine goes from one to the next on its
/// stack.
const MAX_DEFINITIONS: usize = 2_000;
/// Maximum number of values of an `enum`.
const MAX_ENUM: usize = 5_000;
/// Longest text or array, and most properties, that are counted.
const MAX_COUNT: u64 = 1_000_000;
/// Maximum decimals and digits of a divisor: the engine computes with them in 32 bits.
const MAX_DIVISOR: (i32, f64) = (8, 4e8);
/// Maximum number of alternatives that are compared with each other.
const MAX_ALTERNATIVES: usize = 300;

/// Keywords that describe and do not restrict.
#[rustfmt::skip]
const ANNOTATIONS: &[&str] = &[
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary",
    "contentEncoding", "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description",
    "examples", "format", "id", "readOnly", "title", "writeOnly",
];

/// Keywords whose schemas are for the value itself.
const APPLICATORS: &[&str] = &["$ref", "allOf", "anyOf", "oneOf"];

/// Keywords that say which properties an object may have besides those that are listed.
const OTHER_PROPERTIES: &[&str] = &[
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "unevaluatedProperties",
];

/// Normal form of the schema at `path` of `document`, and the parts that it lacks. The schemas at
/// the paths in `freed` are replaced by their type.
///
/// # Errors
/// [`GrammarError::TooLarge`] and [`GrammarError::TooDeep`].
pub(super) fn normalise(
    document: &Document<'_>,
    path: &str,
    strictness: Strictness,
    freed: &HashMap<String, Loosened>,
) -> Result<(Value, Vec<Loosened>), GrammarError> {
    let mut pass = Pass {
        document,
        is_lenient: strictness == Strictness::Lenient,
        freed,
        loosened: Vec::new(),
        numbers: HashMap::new(),
        targets: Vec::new(),
        n_schemas: 0,
    };
    let root = pass.schema(document.at(path), &document.place(path), true)?;
    let mut definitions = Map::new();
    while let Some((target, closes)) = pass.targets.get(definitions.len()).cloned() {
        if definitions.len() == MAX_DEFINITIONS {
            let limit = MAX_DEFINITIONS;
            return Err(GrammarError::TooLarge { limit });
        }
        let schema = pass.schema(document.at(&target), &document.place(&target), closes)?;
        definitions.insert(definitions.len().to_string(), schema);
    }
    let schema = match root {
        Value::Object(mut map) if !definitions.is_empty() => {
            map.insert("$defs".into(), definitions.into());
            map.into()
        }
        other => other,
    };
    let mut seen = HashSet::new();
    // A definition that is used open and closed is visited twice.
    pass.loosened.retain(|of| seen.insert(of.clone()));
    Ok((schema, pass.loosened))
}

struct Pass<'a> {
    document: &'a Document<'a>,
    /// Whether objects that say nothing of other properties have only those that are listed.
    is_lenient: bool,
    freed: &'a HashMap<String, Loosened>,
    loosened: Vec<Loosened>,
    /// Numbers in `$defs` of the schemas that references lead to, by pointer and whether their
    /// objects close.
    numbers: HashMap<(String, bool), usize>,
    targets: Vec<(String, bool)>,
    n_schemas: usize,
}

/// A schema that is being visited.
struct Visit<'a> {
    map: &'a Map<String, Value>,
    place: Location,
    /// Whether the schemas of applicators close their objects.
    closes_inside: bool,
    out: Map<String, Value>,
    all_of: Vec<Value>,
    /// Whether properties of unknown names must be allowed.
    is_opened: bool,
}

impl Visit<'_> {
    /// Whether a keyword is there and says something.
    fn has(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(|value| !value.is_null())
    }
}

/// Whether all values satisfy a schema.
fn allows_all(schema: &Value) -> bool {
    match schema {
        Value::Bool(is_all) => *is_all,
        Value::Object(map) => map.keys().all(|key| describes(key)),
        _ => false,
    }
}

/// Whether a keyword restricts nothing by itself.
fn describes(key: &str) -> bool {
    ANNOTATIONS.contains(&key) || key.starts_with("x-")
}

/// Whether all names satisfy a schema.
fn allows_all_names(schema: &Value) -> bool {
    let is_string = |kind: &Value| match kind {
        Value::Array(kinds) => kinds.iter().any(|kind| kind == "string"),
        kind => kind == "string",
    };
    let says_nothing = |(key, value): (&String, &Value)| match &key[..] {
        "type" => is_string(value),
        "format" => !is_known_format(value),
        key => describes(key),
    };
    match schema {
        Value::Object(map) => map.iter().all(says_nothing),
        schema => allows_all(schema),
    }
}

fn is_known_format(name: &Value) -> bool {
    let name = name.as_str().unwrap_or_default();
    FORMATS.contains(&name) || own_format(name).is_some()
}

/// Whether all numbers in `value` are exact for the engine, which uses 64-bit floats and writes
/// them without an exponent.
fn is_exact(value: &Value) -> bool {
    match value {
        Value::Number(n) => n
            .as_f64()
            .is_some_and(|v| v == 0.0 || (1e-15..=MAX_EXACT).contains(&v.abs())),
        Value::Array(items) => items.iter().all(is_exact),
        Value::Object(members) => members.values().all(is_exact),
        _ => true,
    }
}

/// Whether the engine can compute remainders of a division by `value`.
fn is_divisor(value: f64) -> bool {
    let (most_decimals, greatest) = MAX_DIVISOR;
    let (mut scaled, mut decimals) = (value, 0);
    while scaled.fract() != 0.0 && decimals <= most_decimals {
        (scaled, decimals) = (scaled * 10.0, decimals + 1);
    }
    value > 0.0 && decimals <= most_decimals && scaled <= greatest
}

/// The names of the types of these values.
fn types_of<'a>(values: impl IntoIterator<Item = &'a Value>) -> Value {
    let mut names: Vec<&str> = Vec::new();
    for value in values {
        let name = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.into()
}

impl<'a> Pass<'a> {
    fn loosen(&mut self, place: &Location, keyword: &str, message: impl Into<String>) {
        self.loosened.push(Loosened {
            keyword: keyword.to_owned(),
            path: place.path.clone(),
            message: message.into(),
        });
    }

    /// The normal form of a schema. If it `closes`, its objects have no properties but those that
    /// are listed, unless something is said about others.
    fn schema(
        &mut self,
        schema: &'a Value,
        around: &Location,
        closes: bool,
    ) -> Result<Value, GrammarError> {
        self.n_schemas += 1;
        if self.n_schemas > MAX_SCHEMAS {
            return Err(GrammarError::TooLarge { limit: MAX_SCHEMAS });
        }
        if around.depth > MAX_DEPTH {
            if !self.is_lenient {
                return Err(GrammarError::TooDeep { limit: MAX_DEPTH });
            }
            self.loosen(
                around,
                "schema",
                format!("is deeper than {MAX_DEPTH} levels"),
            );
            return Ok(true.into());
        }
        let map = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(map) => map,
            other => {
                let found = other.to_string().chars().take(40).collect::<String>();
                let message = format!("is {found}, neither an object nor true or false");
                self.loosen(around, "schema", message);
                return Ok(true.into());
            }
        };
        let place = enter(around, schema);
        if let Some(loosened) = self.freed.get(&place.path) {
            self.loosened.push(loosened.clone());
            let kind = map.get("type").filter(|kind| kind.is_string());
            return Ok(kind.map_or(Value::Bool(true), |kind| json!({"type": kind})));
        }
        // `not` of all values.
        if map.get("not").is_some_and(allows_all) {
            return Ok(false.into());
        }
        let has_lone_reference = place.draft.has_lone_references()
            && map.get("$ref").is_some_and(|name| !name.is_null());
        let closes_inside = has_lone_reference || closes_inside(map);
        let mut visit = Visit {
            map,
            closes_inside: self.is_lenient && closes && closes_inside,
            place,
            out: Map::new(),
            all_of: Vec::new(),
            is_opened: false,
        };
        for (key, value) in map {
            let is_absent =
                value.is_null() && key != "const" || has_lone_reference && key != "$ref";
            if !is_absent {
                self.keyword(&mut visit, key, value)?;
            }
        }
        if self.is_lenient && closes && !has_lone_reference {
            self.close(&mut visit);
        }
        if visit.is_opened {
            visit.out.shift_remove("additionalProperties");
        }
        self.property_counts(&mut visit);
        if !visit.all_of.is_empty() {
            visit.out.insert("allOf".into(), visit.all_of.into());
        }
        Ok(visit.out.into())
    }

    fn keyword(
        &mut self,
        visit: &mut Visit<'a>,
        key: &'a str,
        value: &'a Value,
    ) -> Result<(), GrammarError> {
        match key {
            "$ref" => self.reference(visit, value),
            "allOf" | "anyOf" | "oneOf" => self.combination(visit, key, value)?,
            "prefixItems" | "items" | "additionalItems" | "unevaluatedItems" => {
                self.items(visit, key, value)?;
            }
            "properties" | "patternProperties" => self.properties(visit, key, value)?,
            "additionalProperties" | "unevaluatedProperties" => {
                self.other_properties(visit, key, value)?;
            }
            "type" | "enum" | "const" | "required" => self.values(visit, key, value),
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
                self.number(visit, key, value);
            }
            "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties"
            | "maxProperties" => self.count(visit, key, value),
            "pattern" => match value.as_str().map(from_ecma) {
                Some(Ok(_)) => drop(visit.out.insert(key.into(), value.clone())),
                Some(Err(e)) => self.loosen(&visit.place, key, format!("is {value}, which {e}")),
                None => self.loosen(&visit.place, key, "is not a string"),
            },
            "format" if is_known_format(value) => {
                visit.out.insert(key.into(), value.clone());
            }
            key if describes(key) => {}
            key => self.unenforced(visit, key, value),
        }
        Ok(())
    }

    /// Keywords that are not enforced, except where they say nothing.
    fn unenforced(&mut self, visit: &Visit<'a>, key: &str, value: &Value) {
        let is_empty = match value {
            Value::Bool(is_all) => *is_all,
            Value::Object(map) => map.is_empty(),
            _ => false,
        };
        let at_most_one = || visit.map.get("maxItems").and_then(Value::as_u64) <= Some(1);
        let says_nothing = match key {
            "uniqueItems" => value == false || visit.has("maxItems") && at_most_one(),
            "not" => value == false,
            "if" => !["then", "else"].iter().any(|key| {
                let branch = visit.map.get(*key);
                branch.is_some_and(|branch| !branch.is_null() && !allows_all(branch))
            }),
            // Named with the keywords that they belong to.
            "then" | "else" | "minContains" | "maxContains" => true,
            "contains" => visit.map.get("minContains").and_then(Value::as_u64) == Some(0),
            "propertyNames" => allows_all_names(value),
            "dependencies" | "dependentRequired" | "dependentSchemas" => is_empty,
            "$dynamicRef" | "$recursiveRef" | "extends" | "disallow" | "divisibleBy" => false,
            // Not a keyword in any draft: according to the standard, an annotation.
            _ => true,
        };
        if !says_nothing {
            self.loosen(&visit.place, key, "is not enforced");
        }
    }

    fn reference(&mut self, visit: &mut Visit<'a>, value: &Value) {
        let reference = value.as_str();
        let target = reference.and_then(|name| self.document.resolve(name, &visit.place));
        let Some(target) = target else {
            let message = format!("is {value}, which is not inside the schema");
            return self.loosen(&visit.place, "$ref", message);
        };
        let next = self.targets.len();
        let target = (target, visit.closes_inside);
        let number = *self.numbers.entry(target.clone()).or_insert(next);
        if number == next {
            self.targets.push(target);
        }
        let reference = format!("#/$defs/{number}");
        visit.out.insert("$ref".into(), reference.into());
    }

    fn combination(
        &mut self,
        visit: &mut Visit<'a>,
        key: &str,
        value: &'a Value,
    ) -> Result<(), GrammarError> {
        let Some(items) = value.as_array().filter(|items| !items.is_empty()) else {
            self.loosen(&visit.place, key, "is not a list of schemas");
            return Ok(());
        };
        let mut schemas = Vec::with_capacity(items.len());
        for (i, item) in items.iter().enumerate() {
            let place = visit.place.below_in(key, &i.to_string());
            schemas.push(self.schema(item, &place, visit.closes_inside)?);
        }
        if key == "oneOf" {
            let parts = items.iter().map(|item| (item, visit.place.clone()));
            let parts: Vec<_> = parts.take(MAX_ALTERNATIVES + 1).collect();
            let around = self.document.at(&visit.place.path);
            if parts.len() > MAX_ALTERNATIVES || !are_disjoint(self.document, around, &parts) {
                let message = "is enforced only where no value can satisfy two of its schemas";
                self.loosen(&visit.place, key, message);
            }
        }
        match key {
            "allOf" => {
                visit.all_of.extend(schemas);
                // A placeholder: properties come in the order of the schemas.
                visit.out.insert(key.into(), Value::Null);
            }
            _ if visit.out.contains_key("anyOf") => visit.all_of.push(json!({"anyOf": schemas})),
            _ => drop(visit.out.insert("anyOf".into(), schemas.into())),
        }
        Ok(())
    }

    fn items(
        &mut self,
        visit: &mut Visit<'a>,
        key: &str,
        value: &'a Value,
    ) -> Result<(), GrammarError> {
        let is_tuple = visit.map.get("items").is_some_and(Value::is_array);
        let as_key = match key {
            "prefixItems" if visit.place.draft < Draft::D2020 => {
                let message = "is of draft 2020-12, and the schema of an older one";
                self.loosen(&visit.place, key, message);
                return Ok(());
            }
            "prefixItems" => key,
            "items" if is_tuple => "prefixItems",
            "items" => key,
            "additionalItems" if !is_tuple => return Ok(()),
            "additionalItems" => "items",
            _ => {
                let other = if is_tuple { "additionalItems" } else { "items" };
                if self.is_evaluated(visit, key, value, other) {
                    return Ok(());
                }
                "items"
            }
        };
        if as_key == "items" {
            let schema = self.schema(value, &visit.place.below(key), true)?;
            visit.out.insert(as_key.into(), schema);
            return Ok(());
        }
        let Some(items) = value.as_array() else {
            self.loosen(&visit.place, key, "is not a list of schemas");
            return Ok(());
        };
        let mut schemas = Vec::with_capacity(items.len());
        for (i, item) in items.iter().enumerate() {
            let place = visit.place.below_in(key, &i.to_string());
            schemas.push(self.schema(item, &place, true)?);
        }
        if !schemas.is_empty() {
            visit.out.insert(as_key.into(), schemas.into());
        }
        Ok(())
    }

    fn properties(
        &mut self,
        visit: &mut Visit<'a>,
        key: &str,
        value: &'a Value,
    ) -> Result<(), GrammarError> {
        let Some(members) = value.as_object() else {
            self.loosen(&visit.place, key, "is not an object");
            visit.is_opened = true;
            return Ok(());
        };
        let mut schemas = Map::new();
        for (name, member) in members {
            if key == "patternProperties"
                && let Err(e) = from_ecma(name)
            {
                self.loosen(
                    &visit.place,
                    key,
                    format!("has the pattern {name:?}, which {e}"),
                );
                visit.is_opened = true;
                continue;
            }
            let place = visit.place.below_in(key, name);
            schemas.insert(name.clone(), self.schema(member, &place, true)?);
        }
        visit.out.insert(key.into(), schemas.into());
        Ok(())
    }

    fn other_properties(
        &mut self,
        visit: &mut Visit<'a>,
        key: &str,
        value: &'a Value,
    ) -> Result<(), GrammarError> {
        const AS_KEY: &str = "additionalProperties";
        if key != AS_KEY && self.is_evaluated(visit, key, value, AS_KEY) {
            return Ok(());
        }
        let schema = self.schema(value, &visit.place.below(key), true)?;
        visit.out.insert(AS_KEY.into(), schema);
        Ok(())
    }

    /// Whether `unevaluated…` has no effect because of `other`, or cannot be enforced.
    fn is_evaluated(&mut self, visit: &Visit<'a>, key: &str, value: &Value, other: &str) -> bool {
        let also = ["if", "dependentSchemas", "contains", "not"];
        let mut evaluators = APPLICATORS.iter().chain(&also);
        if allows_all(value) {
            return true;
        }
        if evaluators.any(|key| visit.has(key)) {
            let message = "is enforced only without schemas beside it that evaluate too";
            self.loosen(&visit.place, key, message);
            return true;
        }
        visit.has(other)
    }

    fn values(&mut self, visit: &mut Visit<'a>, key: &str, value: &Value) {
        const TYPES: &[&str] = &[
            "array", "boolean", "integer", "null", "number", "object", "string",
        ];
        let is_type = |name: &Value| TYPES.iter().any(|known| name == known);
        let list = value.as_array();
        let problem = match (key, list) {
            ("type", None) if is_type(value) => None,
            ("type", Some(names)) if !names.is_empty() && names.iter().all(is_type) => None,
            ("type", _) => Some(format!("is {value}, which is no type")),
            ("required", Some(names)) if names.iter().all(Value::is_string) => None,
            ("required", _) => Some("is not a list of names".to_owned()),
            ("enum", None) => Some("is not a list of values".to_owned()),
            ("enum", Some(values)) if values.len() > MAX_ENUM => {
                Some(format!("has more than {MAX_ENUM} values"))
            }
            ("enum" | "const", _) if !is_exact(value) => {
                Some("has a number that is too large or too small to be exact".to_owned())
            }
            _ => None,
        };
        match problem {
            None => drop(visit.out.insert(key.into(), value.clone())),
            Some(message) => {
                self.loosen(&visit.place, key, message);
                if key == "const" {
                    visit.all_of.push(json!({"type": types_of([value])}));
                } else if let Some(values) = list.filter(|_| key == "enum") {
                    visit.all_of.push(json!({"type": types_of(values)}));
                }
            }
        }
    }

    fn number(&mut self, visit: &mut Visit<'a>, key: &str, value: &Value) {
        let is_flag = key.starts_with("exclusive") && value.is_boolean();
        let problem = match value {
            Value::Bool(false) if is_flag => return,
            Value::Bool(true) if is_flag => None,
            Value::Number(n) if key == "multipleOf" && !n.as_f64().is_some_and(is_divisor) => {
                Some("is no number above 0 with at most 8 decimals and 9 digits")
            }
            Value::Number(_) if is_exact(value) => None,
            Value::Number(_) => Some("is too large or too small to be exact"),
            _ => Some("is no number"),
        };
        match problem {
            None => drop(visit.out.insert(key.into(), value.clone())),
            Some(message) => self.loosen(&visit.place, key, message),
        }
    }

    fn count(&mut self, visit: &mut Visit<'a>, key: &str, value: &Value) {
        let float = value
            .as_f64()
            .filter(|v| v.fract() == 0.0 && (0.0..=MAX_EXACT).contains(v));
        match value.as_u64().or(float.map(|v| v as u64)) {
            None => self.loosen(&visit.place, key, "is no number of things"),
            Some(n) if n > MAX_COUNT => {
                self.loosen(&visit.place, key, format!("is above {MAX_COUNT}"));
            }
            Some(n) => drop(visit.out.insert(key.into(), n.into())),
        }
    }

    /// Drops limits of the number of properties that are met anyway or cannot be enforced.
    fn property_counts(&mut self, visit: &mut Visit<'a>) {
        let listed = visit.out.get("properties").and_then(Value::as_object);
        let n_listed = listed.map_or(0, Map::len) as u64;
        let required = visit.out.get("required").and_then(Value::as_array);
        let names: HashSet<&str> = (required.into_iter().flatten())
            .filter_map(Value::as_str)
            .collect();
        let n_required = names.len() as u64;
        let is_optional = |name: &String| !names.contains(&name[..]);
        let has_optional = listed.is_some_and(|listed| listed.keys().any(is_optional));
        let is_closed = visit.out.get("additionalProperties") == Some(&false.into())
            && !visit.has("patternProperties");
        let is_combined = !visit.all_of.is_empty() || APPLICATORS.iter().any(|key| visit.has(key));
        let count = |key| visit.out.get(key).and_then(Value::as_u64);
        let least = count("minProperties").filter(|&least| least > n_required);
        let most = count("maxProperties").filter(|&most| !is_closed || most < n_listed);
        // The engine can count the properties that are not listed, and to one.
        let is_enforced = !is_combined
            && (!has_optional
                || is_closed
                    && least.is_none_or(|least| least == n_required + 1)
                    && most.is_none_or(|most| most == n_required + 1));
        for (key, kept) in [("minProperties", least), ("maxProperties", most)] {
            if kept.is_none() || !is_enforced {
                visit.out.shift_remove(key);
            }
            if kept.is_some() && !is_enforced {
                let message = "is enforced only where all listed properties are required";
                self.loosen(&visit.place, key, message);
            }
        }
    }

    /// Closes the objects of a schema after its listed properties, those that its applicators list
    /// included, unless one of these says something of other properties.
    fn close(&self, visit: &mut Visit<'a>) {
        if visit.closes_inside || visit.is_opened {
            return;
        }
        let mut listed = Map::new();
        let schema = self.document.at(&visit.place.path);
        let place = visit.place.clone();
        if !self.list(schema, &place, &mut listed, &mut HashSet::new()) || listed.is_empty() {
            return;
        }
        let least = visit.out.get("minProperties").and_then(Value::as_u64);
        if least.is_some_and(|least| least > listed.len() as u64) {
            return;
        }
        if APPLICATORS.iter().any(|key| visit.has(key)) {
            let mut closed = json!({"properties": listed, "additionalProperties": false});
            if let Some(kind) = visit.out.get("type") {
                closed["type"] = kind.clone();
            }
            visit.all_of.push(closed);
            return;
        }
        let properties = visit.out.entry("properties").or_insert_with(|| json!({}));
        if let Some(properties) = properties.as_object_mut() {
            for (name, any) in listed {
                properties.entry(name).or_insert(any);
            }
        }
        visit
            .out
            .insert("additionalProperties".into(), false.into());
    }

    /// Collects the names of properties that a schema and its applicators list; `false` if one says
    /// something of other properties.
    fn list(
        &self,
        schema: &Value,
        around: &Location,
        listed: &mut Map<String, Value>,
        seen: &mut HashSet<String>,
    ) -> bool {
        let Value::Object(map) = schema else {
            return true;
        };
        let place = enter(around, schema);
        let says = |key: &&str| match map.get(*key) {
            None | Some(Value::Null) => false,
            Some(value) => *key != "unevaluatedProperties" || *value != false,
        };
        let is_freed = self.freed.contains_key(&place.path) || seen.len() > MAX_DEPTH;
        if is_freed || OTHER_PROPERTIES.iter().any(says) {
            return false;
        }
        let properties = map.get("properties").and_then(Value::as_object);
        let properties = properties
            .into_iter()
            .flat_map(Map::keys)
            .map(String::as_str);
        let required = map.get("required").and_then(Value::as_array);
        let required = required.into_iter().flatten().filter_map(Value::as_str);
        for name in properties.chain(required) {
            listed.entry(name).or_insert(Value::Bool(true));
        }
        let target = map.get("$ref").and_then(Value::as_str);
        let target = target.and_then(|name| self.document.resolve(name, &place));
        if let Some(target) = target
            && seen.insert(target.clone())
        {
            let (schema, place) = (self.document.at(&target), self.document.place(&target));
            if !self.list(schema, &place, listed, seen) {
                return false;
            }
        }
        let lists = ["allOf", "anyOf", "oneOf"]
            .iter()
            .filter_map(|key| map.get(*key));
        let items = lists.filter_map(Value::as_array).flatten();
        let branches = ["if", "then", "else"]
            .iter()
            .filter_map(|key| map.get(*key));
        items
            .chain(branches)
            .all(|schema| self.list(schema, &place, listed, seen))
    }
}

/// Whether the schemas of an applicator can close their objects by themselves: no keyword next to
/// it concerns properties.
fn closes_inside(map: &Map<String, Value>) -> bool {
    let says = |key: &&&str| map.get(**key).is_some_and(|value| !value.is_null());
    let others = ["properties", "required", "if", "minProperties"];
    if others.iter().chain(OTHER_PROPERTIES).any(|key| says(&key)) {
        return false;
    }
    let mut applicators = APPLICATORS.iter().filter(says);
    match (applicators.next(), applicators.next()) {
        (Some(&"allOf"), None) => map["allOf"]
            .as_array()
            .is_some_and(|items| items.len() == 1),
        (Some(_), None) => true,
        _ => false,
    }
}
