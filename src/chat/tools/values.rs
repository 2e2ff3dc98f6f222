//! Grammars of values in a format's own syntax, from schemas in normal form.

use crate::chat::ChatError;
use crate::chat::tools::{Marks, Tool, lark_text};
use serde_json::{Map, Value, json};

/// Maximum number of references that are followed from one to the next.
const MAX_REFERENCES: usize = 32;

/// Arguments of a tool, from its parameters in normal form, for formats that write them one by one.
pub(super) struct Arguments<'a> {
    pub(super) parameters: Vec<Parameter<'a>>,
    /// Whether there may be further arguments, of any name.
    pub(super) is_open: bool,
}

/// A parameter of a tool.
pub(super) struct Parameter<'a> {
    pub(super) name: &'a str,
    pub(super) schema: &'a Value,
    pub(super) required: bool,
}

impl<'a> Parameter<'a> {
    /// The parameters that the schema of an object lists, in its order.
    pub(super) fn listed(schema: &'a Value) -> impl Iterator<Item = Parameter<'a>> {
        let required = schema.get("required").and_then(Value::as_array);
        let listed = schema.get("properties").and_then(Value::as_object);
        let listed = listed.into_iter().flatten();
        listed.map(move |(name, schema)| Parameter {
            name,
            schema,
            required: required.is_some_and(|names| names.iter().any(|other| other == name)),
        })
    }

    /// Whether it may have a value.
    pub(super) fn is_possible(&self) -> bool {
        *self.schema != false
    }
}

/// A tool during the writing of its grammar: its number, and the names of its schemas.
#[derive(Clone, Copy)]
pub(super) struct Schemas<'a> {
    pub(super) index: usize,
    pub(super) tool: &'a Tool,
    pub(super) marks: &'a Marks<'a>,
}

impl<'a> Schemas<'a> {
    /// The arguments, in the order of the schema.
    ///
    /// # Errors
    /// [`ChatError::Tool`], if the tool is strict, for a schema that restricts the object by more
    /// than its properties and the required ones.
    pub(super) fn arguments(&self) -> Result<Arguments<'a>, ChatError> {
        let root = self.resolve(&self.tool.parameters);
        let known = [
            "$defs",
            "$id",
            "additionalProperties",
            "properties",
            "required",
            "type",
        ];
        let members = root.as_object().into_iter().flatten();
        for (key, _) in members.filter(|(key, _)| !known.contains(&&key[..])) {
            self.loosen("", key, "cannot be enforced in the model's format")?;
        }
        let parameters: Vec<_> = Parameter::listed(root)
            .filter(Parameter::is_possible)
            .collect();
        let is_closed = root.get("additionalProperties") == Some(&false.into());
        Ok(Arguments {
            is_open: parameters.is_empty() && !is_closed,
            parameters,
        })
    }

    /// Names what cannot be enforced in the parameter at `path`.
    ///
    /// # Errors
    /// [`ChatError::Tool`] if the tool is strict.
    pub(super) fn loosen(&self, path: &str, key: &str, message: &str) -> Result<(), ChatError> {
        (self.marks).loosen((self.index, self.tool), (path, key), message)
    }

    /// The schema that a schema without other keywords refers to.
    pub(super) fn resolve(&self, schema: &'a Value) -> &'a Value {
        let mut schema = schema;
        for _ in 0..MAX_REFERENCES {
            let reference = schema.get("$ref").and_then(Value::as_str);
            let target = reference.and_then(|name| {
                let pointer = name.strip_prefix('#')?;
                self.tool.parameters.pointer(pointer)
            });
            match target {
                Some(target) => schema = target,
                None => break,
            }
        }
        schema
    }

    /// A schema with the definitions that it refers to, to stand alone.
    pub(super) fn alone(&self, schema: &Value) -> Value {
        let mut schema = match schema {
            Value::Object(map) => map.clone(),
            Value::Bool(true) => Map::new(),
            other => return other.clone(),
        };
        let definitions = self.tool.parameters.get("$defs");
        if let Some(definitions) = definitions.filter(|_| refers(&Value::Object(schema.clone()))) {
            schema.insert("$defs".into(), definitions.clone());
        }
        schema.into()
    }

    /// Alternatives of a schema: a value has to satisfy one. Each is of one type or of any.
    pub(super) fn alternatives(&self, schema: &'a Value) -> Vec<Value> {
        let mut out = Vec::new();
        self.add_alternatives(schema, &mut out, 0);
        out
    }

    fn add_alternatives(&self, schema: &'a Value, out: &mut Vec<Value>, depth: usize) {
        let schema = self.resolve(schema);
        let Some(map) = schema.as_object().filter(|_| depth < MAX_REFERENCES) else {
            if *schema != false {
                out.push(true.into());
            }
            return;
        };
        let any_of = map.get("anyOf").and_then(Value::as_array);
        let types = map.get("type").and_then(Value::as_array);
        match (any_of, types) {
            (Some(any), _) if map.len() == 1 => {
                any.iter()
                    .for_each(|one| self.add_alternatives(one, out, depth + 1));
            }
            (_, Some(types)) => out.extend(types.iter().map(|kind| {
                let mut one = map.clone();
                one.insert("type".into(), kind.clone());
                one.into()
            })),
            _ => out.push(schema.clone()),
        }
    }

    /// Constraint on a text, from a schema of the type `string` or of any type.
    ///
    /// # Errors
    /// As [`Self::loosen`].
    pub(super) fn text(&self, schema: &Value, path: &str) -> Result<Text, ChatError> {
        let mut text = Text::default();
        self.add_restrictions(schema, path, &mut text, 0)?;
        Ok(text)
    }

    fn add_restrictions(
        &self,
        schema: &Value,
        path: &str,
        text: &mut Text,
        depth: usize,
    ) -> Result<(), ChatError> {
        let length = |key: &str| schema.get(key).and_then(Value::as_u64);
        let (least, most) = (length("minLength").unwrap_or(0), length("maxLength"));
        if least > 0 || most.is_some() {
            let most = most.map_or(String::new(), |n| n.to_string());
            text.regexes.push(format!("(?s:.{{{least},{most}}})"));
        }
        for (key, pattern_of) in [
            ("pattern", self.marks.pattern),
            ("format", self.marks.format),
        ] {
            let Some(value) = schema.get(key).and_then(Value::as_str) else {
                continue;
            };
            match pattern_of(value) {
                Some(regex) => text.regexes.push(regex),
                None => self.loosen(path, key, "cannot be enforced in the model's format")?,
            }
        }
        let values = schema
            .get("enum")
            .and_then(Value::as_array)
            .map(Vec::as_slice);
        let values = values.or(schema.get("const").map(std::slice::from_ref));
        if let Some(values) = values {
            let texts = values.iter().filter_map(Value::as_str);
            text.values = Some(texts.map(str::to_owned).collect());
        }
        for part in schema
            .get("allOf")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            // Parts for other types of values restrict no text.
            let is_text = may_be_text(part);
            match depth < MAX_REFERENCES && is_text && part.get("anyOf").is_none() {
                true => self.add_restrictions(part, path, text, depth + 1)?,
                false if is_text && *part != true => {
                    self.loosen(path, "allOf", "cannot be enforced in the model's format")?;
                }
                false => {}
            }
        }
        Ok(())
    }
}

/// Constraint on the unquoted text of a string.
#[derive(Default)]
pub(super) struct Text {
    /// Regular expressions that match it as a whole.
    regexes: Vec<String>,
    /// The only values.
    values: Option<Vec<String>>,
}

impl Text {
    /// Whether it may be any text.
    pub(super) fn is_free(&self) -> bool {
        self.regexes.is_empty() && self.values.is_none()
    }

    /// Rules for the text and the text `close` after it, which does not occur in it; `rule` is a
    /// name for them.
    pub(super) fn rules(&self, rule: &str, close: &str) -> String {
        let (terminal, end) = (self.terminal(), lark_text(close));
        if self.values.is_some() {
            return format!("{rule}: {terminal} {end}\n");
        }
        if self.is_free() {
            return format!("{rule}[suffix={end}]: {terminal}\n");
        }
        // A text that is too short where `close` comes would continue.
        let escaped = close.chars().map(|c| format!("\\x{{{:x}}}", c as u32));
        let escaped: String = escaped.collect();
        format!("{rule}[suffix={end}]: {terminal} & ~/(?s:.*{escaped}.*)/\n")
    }

    /// A terminal of the text.
    pub(super) fn terminal(&self) -> String {
        if let Some(values) = &self.values {
            let values: Vec<String> = values.iter().map(|text| lark_text(text)).collect();
            return format!("({})", values.join(" | "));
        }
        if self.is_free() {
            return "/(?s:.*)/".to_owned();
        }
        let regexes: Vec<String> = self.regexes.iter().map(|one| format!("/{one}/")).collect();
        regexes.join(" & ")
    }
}

/// Whether a schema in normal form describes texts and no other values.
pub(super) fn is_text(schema: &Value) -> bool {
    let has_texts = |values: &Value| match values {
        Value::Array(values) => values.iter().all(Value::is_string),
        value => value.is_string(),
    };
    match schema.get("type") {
        Some(kind) => kind == "string",
        None => (schema.get("enum").or(schema.get("const"))).is_some_and(has_texts),
    }
}

/// Whether a schema in normal form describes texts, and perhaps other values.
pub(super) fn may_be_text(schema: &Value) -> bool {
    let has_text = |values: &Value| match values {
        Value::Array(values) => values.iter().any(Value::is_string),
        value => value.is_string(),
    };
    let is_kind = match schema.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        Some(kind) => kind == "string",
        None => *schema != false,
    };
    let enumerated = schema.get("enum").or(schema.get("const"));
    is_kind && enumerated.is_none_or(has_text)
}

/// What a schema describes besides texts.
pub(super) fn without_texts(mut schema: Value) -> Option<Value> {
    if is_text(&schema) {
        return None;
    }
    if let Some(map) = schema
        .as_object_mut()
        .filter(|map| !map.contains_key("type"))
    {
        let others = ["null", "boolean", "number", "array", "object"];
        map.insert("type".into(), json!(others));
    }
    Some(schema)
}

/// A schema that describes no texts, for values of the type `kind` only, or of any if that is empty
/// or `json`; `None` if it describes none of that type.
pub(super) fn of_type(schema: &Value, kind: &str) -> Option<Value> {
    let is_kind = |name: &str| name == kind || kind == "number" && name == "integer";
    if matches!(kind, "" | "json") {
        return Some(schema.clone());
    }
    let mut map = schema.as_object().cloned().unwrap_or_default();
    match map.get("type") {
        Some(Value::String(name)) if is_kind(name) => {}
        Some(Value::Array(names)) => {
            let name = names
                .iter()
                .find(|name| name.as_str().is_some_and(is_kind))?;
            let name = name.clone();
            map.insert("type".into(), name);
        }
        Some(_) => return None,
        None => drop(map.insert("type".into(), kind.into())),
    }
    let of_value = |value: &Value| match value {
        Value::Null => is_kind("null"),
        Value::Bool(_) => is_kind("boolean"),
        Value::Number(_) => is_kind("number"),
        Value::String(_) => is_kind("string"),
        Value::Array(_) => is_kind("array"),
        Value::Object(_) => is_kind("object"),
    };
    if let Some(Value::Array(values)) = map.get_mut("enum") {
        values.retain(of_value);
        if values.is_empty() {
            return None;
        }
    }
    (map.get("const").is_none_or(of_value)).then(|| map.into())
}

/// Whether there is a reference in a schema.
fn refers(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => map.contains_key("$ref") || map.values().any(refers),
        Value::Array(items) => items.iter().any(refers),
        _ => false,
    }
}

/// The schema of values that satisfy one of these.
pub(super) fn any_of(schemas: Vec<Value>) -> Value {
    match <[Value; 1]>::try_from(schemas) {
        Ok([schema]) => schema,
        Err(schemas) => json!({"anyOf": schemas}),
    }
}
