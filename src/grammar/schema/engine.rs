//! Translation of a schema in normal form to the engine's dialect.

use crate::grammar::Layout;
use crate::grammar::pattern::from_ecma;
use crate::grammar::schema::own_format;
use serde_json::{Map, Value, json};

/// White space between two JSON tokens, if there is any.
const WHITE_SPACE: &str = r"\x20";

/// The whole schema, with the options of the layout; `None` if no value satisfies it.
pub(super) fn for_engine(normal: Value, layout: Layout) -> Option<Value> {
    let mut out = match schema(normal) {
        Value::Object(map) => map,
        Value::Bool(true) => Map::new(),
        _ => return None,
    };
    let options = match layout {
        Layout::Free => json!({"whitespace_pattern": WHITE_SPACE}),
        Layout::Template => {
            json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "})
        }
    };
    out.insert("x-guidance".into(), options);
    Some(out.into())
}

/// A schema with its patterns and formats in the engine's syntax.
fn schema(normal: Value) -> Value {
    let Value::Object(map) = normal else {
        return normal;
    };
    let is_string = map.get("type").is_some_and(|kind| kind == "string");
    let mut out = Map::new();
    let mut format = None;
    for (key, value) in map {
        let value = match (&key[..], value) {
            ("properties" | "$defs", Value::Object(members)) => {
                let members = members
                    .into_iter()
                    .map(|(name, value)| (name, schema(value)));
                Value::Object(members.collect())
            }
            ("patternProperties", Value::Object(members)) => {
                let members = members.into_iter();
                let members = members.map(|(name, value)| (pattern(name), schema(value)));
                Value::Object(members.collect())
            }
            ("allOf" | "anyOf" | "prefixItems", Value::Array(items)) => {
                items.into_iter().map(schema).collect()
            }
            ("items" | "additionalProperties", value) => schema(value),
            ("pattern", Value::String(text)) => pattern(text).into(),
            ("format", Value::String(name)) if own_format(&name).is_some() => {
                format = own_format(&name);
                continue;
            }
            (_, value) => value,
        };
        out.insert(key, value);
    }
    if let Some(pattern) = format {
        let text = json!({"type": "string", "pattern": pattern});
        // Formats restrict only strings.
        let others = ["null", "boolean", "number", "array", "object"];
        let restricted = match is_string {
            true => text,
            false => json!({"anyOf": [text, {"type": others}]}),
        };
        match out.entry("allOf").or_insert_with(|| json!([])) {
            Value::Array(all) => all.push(restricted),
            other => *other = json!([restricted]),
        }
    }
    out.into()
}

/// A pattern that was found to be translatable.
fn pattern(text: String) -> String {
    from_ecma(&text).unwrap_or(text)
}
