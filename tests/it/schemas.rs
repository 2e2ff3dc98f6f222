//! Random JSON Schemas whose values end soon, for tests of the library and of the program.

use serde_json::{Map, Value, json};

/// A small generator of random numbers (SplitMix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % n as u64) as usize
    }

    fn one<'a>(&mut self, items: &[&'a str]) -> &'a str {
        items[self.below(items.len())]
    }
}

const NAMES: &[&str] = &[
    "name",
    "id",
    "créé",
    "two words",
    "a/b~c",
    "日本",
    "\"quoted\"",
    "x",
    "items",
    "type",
    "é",
    "ownership",
    "😀",
];
const WORDS: &[&str] = &[
    "shared",
    "mutable",
    "let mut",
    "",
    "été",
    "日本語",
    "a\nb",
    "tab\t",
    "back\\slash",
    "\"",
    "😀",
    "null",
];

/// A schema. Strings and arrays have a greatest length, integers a range.
pub(crate) fn schema(random: &mut Random) -> Value {
    let mut schema = any(random, 3);
    if random.below(4) == 0 {
        schema = json!({
            "type": "object",
            "properties": {"first": {"$ref": "#/$defs/one"}, "second": {"$ref": "#/$defs/two"}},
            "required": ["first", "second"],
            "additionalProperties": false,
            "$defs": {
                "one": schema,
                "two": {
                    "type": "object",
                    "properties": {"value": {"type": "boolean"}, "again": {"$ref": "#/$defs/one"}},
                    "required": ["value"],
                    "additionalProperties": false,
                },
            },
        });
    }
    schema
}

fn any(random: &mut Random, depth: usize) -> Value {
    match random.below(if depth == 0 { 7 } else { 12 }) {
        0 => json!({"type": "boolean"}),
        1 => integer(random),
        2 => number(random),
        3 => string(random),
        4 => match random.below(5) {
            0 => json!({"const": {"a": [1, 2.5, WORDS[random.below(WORDS.len())]], "b": null}}),
            1 => json!({"const": random.one(WORDS)}),
            2 => json!({"type": "null"}),
            _ => {
                json!({"enum": [random.one(WORDS), random.below(100), null, true, [1, "x"], random.one(WORDS)]})
            }
        },
        5 => string(random),
        6 => integer(random),
        7 | 8 => object(random, depth),
        9 => array(random, depth),
        10 => match random.below(3) {
            0 => json!({"anyOf": [any(random, depth - 1), any(random, depth - 1)]}),
            // No value satisfies both.
            1 => json!({"oneOf": [object(random, depth - 1), string(random)]}),
            _ => {
                let (low, high) = (random.below(5), 5 + random.below(50));
                json!({"allOf": [{"type": "integer", "minimum": low}, {"maximum": high}]})
            }
        },
        _ => json!({"type": ["string", "null", "boolean"], "maxLength": 1 + random.below(8)}),
    }
}

fn integer(random: &mut Random) -> Value {
    let low = random.below(2000) as i64 - 1000;
    let high = low + random.below(3000) as i64;
    match random.below(5) {
        0 => json!({"type": "integer", "minimum": low, "maximum": high}),
        1 => json!({"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2}),
        2 => {
            json!({"type": "integer", "minimum": 0, "maximum": 999, "multipleOf": 1 + random.below(9)})
        }
        3 => json!({"type": "integer", "minimum": low, "maximum": low}),
        _ => json!({"type": "integer", "minimum": -9, "maximum": 99_999}),
    }
}

/// One of a few: nothing bounds the digits of a fraction in a schema, and a weak model repeats
/// them.
fn number(random: &mut Random) -> Value {
    let value = random.below(200) as f64 / 8.0 - 12.5;
    json!({"type": "number", "minimum": -5, "enum": [value, -2.5, 0.125, 1e-3, 31]})
}

fn string(random: &mut Random) -> Value {
    match random.below(8) {
        0 => {
            json!({"type": "string", "format": random.one(&["date", "time", "date-time", "uuid", "ipv4"])})
        }
        1 => json!({"type": "string", "pattern": "^[a-z]{2,5}(-[0-9]{1,3})?$"}),
        2 => json!({"type": "string", "pattern": "^\\p{Lu}\\w{0,6}$"}),
        3 => json!({"type": "string", "pattern": "^(?:ab|é|\\d\\d){1,4}$"}),
        4 => json!({"type": "string", "enum": [random.one(WORDS), random.one(NAMES), "other"]}),
        _ => {
            let least = random.below(4);
            json!({"type": "string", "minLength": least, "maxLength": least + random.below(20)})
        }
    }
}

fn array(random: &mut Random, depth: usize) -> Value {
    let least = random.below(3);
    match random.below(3) {
        0 => {
            let items: Vec<Value> = (0..1 + random.below(3))
                .map(|_| any(random, depth - 1))
                .collect();
            json!({"type": "array", "minItems": items.len(), "prefixItems": items, "items": false})
        }
        _ => {
            let most = least + random.below(3);
            json!({"type": "array", "items": any(random, depth - 1), "minItems": least, "maxItems": most})
        }
    }
}

fn object(random: &mut Random, depth: usize) -> Value {
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for _ in 0..random.below(5) {
        let name = random.one(NAMES);
        if properties.contains_key(name) {
            continue;
        }
        properties.insert(name.to_owned(), any(random, depth.saturating_sub(1)));
        if random.below(3) > 0 {
            required.push(name);
        }
    }
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}
