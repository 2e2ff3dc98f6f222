//! What of a JSON Schema is enforced, what is left out and named, and what is refused.

use std::time::{Duration, Instant};

use ruvllm::Tokenizer;
use ruvllm::gguf::Gguf;
use ruvllm::grammar::GrammarError;
use ruvllm::grammar::{Grammar, TokenTrie};
use ruvllm::sample::TokenMask;
use serde_json::{Value, json};

fn setup() -> (Tokenizer, TokenTrie) {
    let file = Gguf::open("models/ruvllm-rust-6m-q8_0.gguf").unwrap();
    let tokenizer = Tokenizer::from_metadata(file.metadata()).unwrap();
    let trie = TokenTrie::new(&tokenizer).unwrap();
    (tokenizer, trie)
}

fn matches(grammar: &Grammar, tokenizer: &Tokenizer, text: &str) -> bool {
    let mut matcher = grammar.matcher();
    let tokens = tokenizer.encode(text, false, false);
    let taken = tokens.iter().all(|&token| matcher.accept(token).is_ok());
    taken && matcher.is_accepting().unwrap()
}

/// Each schema, what of it is left out (path and keyword), values that it describes and others that
/// are refused even so.
#[test]
fn what_cannot_be_enforced_is_left_out_or_refused() {
    let (tokenizer, trie) = setup();
    for (schema, loosened, yes, no) in [
        (
            json!({"type": "array", "items": {"type": "integer"}, "uniqueItems": true}),
            &[("", "uniqueItems")][..],
            &["[1,1]", "[1,2]"][..],
            &["[\"a\"]"][..],
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}}),
            &[("/properties/a", "not")],
            &["{\"a\":4}", "{}"],
            &["{\"a\":\"x\"}"],
        ),
        (
            json!({"if": {"type": "string"}, "then": {"minLength": 3}, "type": ["string", "null"]}),
            &[("", "if")],
            &["\"abc\"", "null"],
            &["1"],
        ),
        (
            json!({"type": "array", "contains": {"const": 1}, "minContains": 2, "maxItems": 2}),
            &[("", "contains")],
            &["[1,1]"],
            &["[1,1,1]"],
        ),
        (
            json!({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}),
            &[("", "minProperties")],
            &["{\"a\":1,\"b\":2}"],
            &["[]"],
        ),
        (
            json!({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}),
            &[("", "dependentRequired")],
            &["{\"b\":1}"],
            &["{\"c\":1}"],
        ),
        (
            json!({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}),
            &[("", "oneOf")],
            &["3", "7.5"],
            &["\"a\""],
        ),
        (
            json!({"type": "string", "pattern": "^(?!x)[a-z]+$"}),
            &[("", "pattern")],
            &["\"abc\""],
            &["1"],
        ),
        (
            json!({"type": "string", "pattern": "\\bword\\b", "maxLength": 8}),
            &[("", "pattern")],
            &["\"a word\""],
            &["\"a longer word\""],
        ),
        (
            json!({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}, "additionalProperties": {"type": "integer"}}),
            &[("", "propertyNames")],
            &["{\"a\":1}"],
            &["{\"a\":\"x\"}"],
        ),
        (
            json!({"type": "object", "patternProperties": {"^(?=a)": {"type": "integer"}}, "additionalProperties": false}),
            &[("", "patternProperties")],
            &["{\"a\":1}"],
            &["[]"],
        ),
        (
            json!({"enum": [123_456_789_012_345_678_901_f64, "a"]}),
            &[("", "enum")],
            &["\"a\"", "12"],
            &["null"],
        ),
        (
            json!({"type": "array", "items": {"$ref": "https://example.com/other.json"}}),
            &[("/items", "$ref")],
            &["[{\"a\":1}]"],
            &["1"],
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "text"}, "b": 5, "c": {"maxLength": -1}}}),
            &[
                ("/properties/a", "type"),
                ("/properties/b", "schema"),
                ("/properties/c", "maxLength"),
            ],
            &["{\"a\":1,\"b\":2,\"c\":\"x\"}"],
            &["{\"d\":1}"],
        ),
        // What only the engine refuses.
        (
            json!({"type": "object", "properties": {"a": {"type": "object", "patternProperties": {"^a": {}, "a$": {}}}, "b": {"type": "null"}}}),
            &[("/properties/a", "patternProperties")],
            &["{\"a\":{\"a\":1},\"b\":null}"],
            &["{\"b\":1}", "{\"a\":1}"],
        ),
    ] {
        let text = schema.to_string();
        let grammar = Grammar::lenient_json_schema(&trie, &text).unwrap();
        let found: Vec<_> = (grammar.loosened().iter())
            .map(|of| (&of.path[..], &of.keyword[..]))
            .collect();
        assert_eq!(found, loosened, "{schema}");
        for value in yes {
            assert!(matches(&grammar, &tokenizer, value), "{schema}: {value}");
        }
        for value in no {
            assert!(!matches(&grammar, &tokenizer, value), "{schema}: {value}");
        }
        match Grammar::json_schema(&trie, &text) {
            Err(GrammarError::Keyword { keyword, path, .. }) => {
                assert_eq!((&path[..], &keyword[..]), loosened[0], "{schema}");
            }
            other => panic!("{schema}: {other:?}"),
        }
    }
}

/// Keywords that restrict nothing, or say what they say, in every case.
#[test]
fn what_says_nothing_is_taken() {
    let (tokenizer, trie) = setup();
    for format in [
        "int32", "int64", "uint8", "uint64", "float", "double", "byte", "binary", "password",
        "regex", "json", "iri", "anything",
    ] {
        let schema = json!({"type": ["integer", "string"], "format": format}).to_string();
        Grammar::json_schema(&trie, &schema).unwrap_or_else(|e| panic!("{format}: {e}"));
    }
    for (schema, yes, no) in [
        (
            json!({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}),
            "{\"a\":1}",
            "1",
        ),
        (
            json!({"anyOf": [{"not": {}}, {"type": "null"}]}),
            "null",
            "1",
        ),
        (
            json!({"type": "object", "properties": {"a": {}}, "additionalProperties": {"not": {}}}),
            "{\"a\":1}",
            "{\"b\":1}",
        ),
        (
            json!({"type": "integer", "not": false, "if": {}, "x-order": 1}),
            "1",
            "null",
        ),
        (
            json!({"$schema": "https://example.com/mine", "type": "null"}),
            "null",
            "1",
        ),
        (
            json!({"$schema": "http://json-schema.org/draft-03/schema#", "type": "null"}),
            "null",
            "1",
        ),
        (
            json!({"type": "object", "properties": null, "required": null, "x-guidance": {"lenient": true}}),
            "{\"a\":1}",
            "1",
        ),
        (
            json!({"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 1}),
            "{\"a\":1}",
            "{}",
        ),
    ] {
        for grammar in [
            Grammar::json_schema(&trie, &schema.to_string()),
            Grammar::lenient_json_schema(&trie, &schema.to_string()),
        ] {
            let grammar = grammar.unwrap_or_else(|e| panic!("{schema}: {e}"));
            assert_eq!(grammar.loosened(), [], "{schema}");
            assert!(matches(&grammar, &tokenizer, yes), "{schema}: {yes}");
            assert!(!matches(&grammar, &tokenizer, no), "{schema}: {no}");
        }
    }
}

/// Leniently, objects close after their listed properties; strictly, they are as open as the
/// standard says.
#[test]
fn objects_close() {
    let (tokenizer, trie) = setup();
    let (a, b) = (
        json!({"a": {"type": "integer"}}),
        json!({"b": {"type": "integer"}}),
    );
    for (schema, whole, more) in [
        (
            json!({"type": "object", "properties": a}),
            "{\"a\":1}",
            "{\"a\":1,\"z\":1}",
        ),
        // Listed by `required` alone.
        (
            json!({"type": "object", "properties": a, "required": ["b"]}),
            "{\"a\":1,\"b\":2}",
            "{\"a\":1,\"b\":2,\"z\":1}",
        ),
        (
            json!({"allOf": [{"properties": a}, {"properties": b}], "type": "object"}),
            "{\"a\":1,\"b\":2}",
            "{\"a\":1,\"b\":2,\"z\":1}",
        ),
        (
            json!({"type": "object", "properties": a, "anyOf": [{"required": ["a"]}, {"properties": b, "required": ["b"]}]}),
            "{\"a\":1,\"b\":2}",
            "{\"a\":1,\"b\":2,\"z\":1}",
        ),
        (
            json!({"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": a}}}),
            "{\"a\":1}",
            "{\"a\":1,\"z\":1}",
        ),
        (
            json!({"type": "object", "properties": {"x": {"type": "object", "properties": a}, "y": true}}),
            "{\"x\":{\"a\":1},\"y\":{\"z\":1}}",
            "{\"x\":{\"a\":1,\"z\":1}}",
        ),
        // One definition, closed where it stands for itself and open where it is a part.
        (
            json!({
                "type": "object", "additionalProperties": false,
                "properties": {"x": {"$ref": "#/$defs/x"}, "y": {"allOf": [{"$ref": "#/$defs/x"}, {"properties": b}]}},
                "$defs": {"x": {"type": "object", "properties": a}},
            }),
            "{\"x\":{\"a\":1},\"y\":{\"a\":1,\"b\":2}}",
            "{\"x\":{\"a\":1,\"b\":2}}",
        ),
    ] {
        let text = schema.to_string();
        let lenient = Grammar::lenient_json_schema(&trie, &text).unwrap();
        let strict = Grammar::json_schema(&trie, &text).unwrap();
        assert_eq!(lenient.loosened(), [], "{schema}");
        for grammar in [&lenient, &strict] {
            assert!(matches(grammar, &tokenizer, whole), "{schema}: {whole}");
        }
        assert!(!matches(&lenient, &tokenizer, more), "{schema}: {more}");
        assert!(matches(&strict, &tokenizer, more), "{schema}: {more}");
    }
    for schema in [
        json!({"type": "object"}),
        json!({"type": "object", "properties": {}}),
        json!({"type": "object", "properties": a, "additionalProperties": true}),
        json!({"type": "object", "properties": a, "minProperties": 2}),
    ] {
        let grammar = Grammar::lenient_json_schema(&trie, &schema.to_string()).unwrap();
        assert!(
            matches(&grammar, &tokenizer, "{\"a\":1,\"z\":1}"),
            "{schema}"
        );
    }
}

/// Alternatives that exclude each other are enforced, however they are written.
#[test]
fn disjoint_alternatives() {
    let (tokenizer, trie) = setup();
    let kind = |name: &str| json!({"type": "object", "properties": {"t": {"const": name}}, "required": ["t"], "additionalProperties": false});
    let definitions = json!({"C": kind("cat"), "D": kind("dog")});
    let (cat, dog) = (json!({"$ref": "#/$defs/C"}), json!({"$ref": "#/$defs/D"}));
    for schema in [
        json!({"oneOf": [kind("cat"), kind("dog")]}),
        json!({"oneOf": [cat, dog], "$defs": definitions}),
        json!({"oneOf": [{"allOf": [cat]}, {"anyOf": [dog]}], "$defs": definitions}),
        json!({"type": "object", "$defs": {"K": {"enum": ["dog"]}}, "oneOf": [
            {"properties": {"t": {"enum": ["cat", "lion"]}}, "required": ["t"]},
            {"properties": {"t": {"$ref": "#/$defs/K"}}},
        ]}),
    ] {
        let grammar = Grammar::json_schema(&trie, &schema.to_string());
        let grammar = grammar.unwrap_or_else(|e| panic!("{schema}: {e}"));
        for (text, is_right) in [
            ("{\"t\":\"cat\"}", true),
            ("{\"t\":\"dog\"}", true),
            ("{\"t\":\"cow\"}", false),
        ] {
            assert_eq!(
                matches(&grammar, &tokenizer, text),
                is_right,
                "{schema}: {text}"
            );
        }
    }
    // A tree of expressions.
    let tree = json!({"$ref": "#/$defs/E", "$defs": {
        "E": {"oneOf": [{"$ref": "#/$defs/N"}, {"$ref": "#/$defs/A"}]},
        "N": {"type": "object", "properties": {"op": {"const": "n"}, "v": {"type": "integer"}}, "required": ["op", "v"], "additionalProperties": false},
        "A": {"type": "object", "properties": {"op": {"const": "+"}, "l": {"$ref": "#/$defs/E"}}, "required": ["op", "l"], "additionalProperties": false},
    }});
    let grammar = Grammar::json_schema(&trie, &tree.to_string()).unwrap();
    assert!(matches(
        &grammar,
        &tokenizer,
        "{\"op\":\"+\",\"l\":{\"op\":\"n\",\"v\":1}}"
    ));
    for overlapping in [
        json!({"oneOf": [{"const": 1}, {"const": 1.0}]}),
        json!({"oneOf": [{"properties": {"t": {"const": "a"}}, "required": ["t"]}, {"properties": {"t": {"const": "b"}}}]}),
        json!({"oneOf": [{"$ref": "#"}, {"$ref": "#"}]}),
    ] {
        assert!(
            Grammar::json_schema(&trie, &overlapping.to_string()).is_err(),
            "{overlapping}"
        );
    }
}

/// Numbers end; texts of digits and grammars of other kinds do not have to.
#[test]
fn numbers_end() {
    let (tokenizer, trie) = setup();
    let long = "7".repeat(40);
    let accepted = |grammar: &Grammar, text: &str| {
        let mut matcher = grammar.matcher();
        let mut len = 0;
        for token in tokenizer.encode(text, false, false) {
            let words = matcher.clone().mask().unwrap().to_vec();
            let is_set = words[token as usize / 32] >> (token % 32) & 1 == 1;
            assert_eq!(is_set, matcher.allows(token).unwrap());
            if matcher.accept(token).is_err() {
                break;
            }
            len += tokenizer.token_bytes(token).unwrap().len();
        }
        len
    };
    let schema = |schema: Value| Grammar::json_schema(&trie, &schema.to_string()).unwrap();
    let number = schema(json!({"type": "array", "items": {"type": "number"}}));
    for text in [
        format!("[{long}"),
        format!("[0.{long}"),
        format!("[-{long}"),
        "[1e123".to_owned(),
    ] {
        assert!(accepted(&number, &text) < text.len(), "{text}");
    }
    for text in [
        "[6.02214076e23,1e-10,18446744073709551615,0.12345678901234567]",
        "[1e+99]",
    ] {
        assert!(matches(&number, &tokenizer, text), "{text}");
    }
    let digits = schema(
        json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "^[0-9]{1,60}$"}}}),
    );
    assert!(matches(
        &digits,
        &tokenizer,
        &format!("{{\"a\":\"{long}\"}}")
    ));
    let regex = Grammar::regex(&trie, "[0-9]{1,60}").unwrap();
    assert!(matches(&regex, &tokenizer, &long));
}

/// Schemas beyond all limits are answered in time.
#[test]
fn huge_schemas() {
    let (_, trie) = setup();
    let wide = |n: usize| {
        let members: Vec<String> = (0..n)
            .map(|i| format!("\"p{i}\":{{\"type\":\"string\"}}"))
            .collect();
        format!(
            "{{\"type\":\"object\",\"properties\":{{{}}}}}",
            members.join(",")
        )
    };
    let nested = |n: usize| format!("{}{{}}{}", "{\"items\":".repeat(n), "}".repeat(n));
    let anchors = (0..2000).map(|i| {
        format!(
            "\"d{i}\":{{\"allOf\":[{{\"$ref\":\"#/$defs/d{}\"}}]}}",
            i + 1
        )
    });
    let chain = format!(
        "{{\"$ref\":\"#/$defs/d0\",\"$defs\":{{{},\"d2000\":{{}}}}}}",
        anchors.collect::<Vec<_>>().join(",")
    );
    let kinds: Vec<String> = (0..3000)
        .map(|i| format!("{{\"const\":{{\"a\":{i}}}}}"))
        .collect();
    let many = format!("{{\"oneOf\":[{}]}}", kinds.join(","));
    let limit = match cfg!(debug_assertions) || super::common::emulated() {
        true => Duration::from_secs(15),
        false => Duration::from_secs(6),
    };
    for (name, schema) in [
        ("a million schemas", wide(1_000_000)),
        ("50,000 schemas", wide(30_000)),
        ("100 levels", nested(100)),
        ("a chain", chain),
        ("3,000 alternatives", many),
    ] {
        let start = Instant::now();
        let strict = Grammar::json_schema(&trie, &schema);
        let lenient = Grammar::lenient_json_schema(&trie, &schema);
        eprintln!("{name}: {:?}, {:?}", start.elapsed(), strict.as_ref().err());
        if let Ok(lenient) = &lenient {
            assert!(strict.is_ok() || !lenient.loosened().is_empty(), "{name}");
        }
        assert!(start.elapsed() < limit, "{name}: {:?}", start.elapsed());
    }
}
