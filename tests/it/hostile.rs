//! Grammars that have brought others down: llama.cpp #26600, #18988, #18990, #12597, #4218.

use ruvllm::grammar::Syntax;

pub(crate) fn grammars() -> Vec<(Syntax, String)> {
    let nested = |open: &str, inner: &str, close: &str, n: usize| {
        format!("{}{inner}{}", open.repeat(n), close.repeat(n))
    };
    let doubling = |n: usize| {
        let rules: String = (0..n)
            .map(|i| format!("r{i} ::= r{} r{}\n", i + 1, i + 1))
            .collect();
        format!("root ::= r0\n{rules}r{n} ::= \"a\"*")
    };
    vec![
        (
            Syntax::Gbnf,
            format!("root ::= {}", nested("(", "\"a\"", ")", 60_000)),
        ),
        (Syntax::Gbnf, "root ::= (\"a\"*)*".into()),
        (Syntax::Gbnf, "root ::= ((\"a\"*)*)*\n".into()),
        (Syntax::Gbnf, "root ::= root".into()),
        (Syntax::Gbnf, "root ::= root root | \"a\" | \"\"".into()),
        (Syntax::Gbnf, "root ::= a\na ::= b\nb ::= a | \"x\"".into()),
        (Syntax::Gbnf, "root ::= \"ab\" root".into()),
        (
            Syntax::Gbnf,
            format!("root ::= \"{}\"", "ab ".repeat(60_000)),
        ),
        (Syntax::Gbnf, "root ::= \"x\"{0,100000}".into()),
        (
            Syntax::Gbnf,
            "root ::= ((\"x\"{0,9999}){0,9999}){0,9999}".into(),
        ),
        (Syntax::Gbnf, "root ::= (\"x\" root){0,9999}".into()),
        (Syntax::Gbnf, "root ::= | | |".into()),
        (Syntax::Gbnf, "root ::= []".into()),
        (Syntax::Gbnf, "root ::= [".into()),
        (Syntax::Gbnf, "root ::= \"".into()),
        (Syntax::Gbnf, "root ::= \"a\"{99999999999999999999}".into()),
        (Syntax::Gbnf, "root ::= \"\\x".into()),
        (Syntax::Gbnf, "\0\0\0".into()),
        (Syntax::Gbnf, doubling(60)),
        (
            Syntax::Gbnf,
            format!("root ::= {}", "\"a\" | ".repeat(30_000)),
        ),
        (Syntax::Regex, nested("(", "a", ")", 60_000)),
        (Syntax::Regex, nested("(?:", "a", ")*", 200)),
        (Syntax::Regex, "(a*)*b".into()),
        (Syntax::Regex, "x{0,100000}".into()),
        (Syntax::Regex, "((x{0,1000}){0,1000}){0,1000}".into()),
        (Syntax::Regex, "(a|a)*(b|b)*(a?){500}a{500}".into()),
        (Syntax::Regex, "[a-".into()),
        (Syntax::Regex, "(?P<".into()),
        (Syntax::Regex, "\\".into()),
        (Syntax::Regex, "a/b".into()),
        (Syntax::Regex, "(?:.*a.{60}){3}".into()),
        (
            Syntax::Lark,
            format!("start: {}", nested("(", "\"a\"", ")", 60_000)),
        ),
        (Syntax::Lark, "start: start start | \"a\" |".into()),
        (Syntax::Lark, "start: (\"a\"*)*".into()),
        (Syntax::Lark, "start: \"x\"{0,100000}".into()),
        (Syntax::Lark, "start: /(/".into()),
        (Syntax::Lark, "start: %json {".into()),
        (Syntax::Lark, "%json".into()),
        (Syntax::JsonSchema, nested("{\"items\":", "{}", "}", 60_000)),
        (Syntax::JsonSchema, nested("{\"items\":", "{}", "}", 100)),
        (Syntax::JsonSchema, nested("[", "", "]", 60_000)),
        (Syntax::JsonSchema, r##"{"$ref": "#"}"##.into()),
        (Syntax::JsonSchema, r##"{"allOf": [{"$ref": "#"}]}"##.into()),
        (
            Syntax::JsonSchema,
            r#"{"type": "string", "minLength": 100000, "maxLength": 200000}"#.into(),
        ),
        (
            Syntax::JsonSchema,
            r#"{"type": "array", "minItems": 1000000}"#.into(),
        ),
        (
            Syntax::JsonSchema,
            r#"{"type": "array", "items": {"type": "string"}, "maxItems": 4294967295}"#.into(),
        ),
        (
            Syntax::JsonSchema,
            r#"{"type": "string", "pattern": "(((a{0,1000}){0,1000}){0,1000})"}"#.into(),
        ),
        (
            Syntax::JsonSchema,
            r#"{"type": "string", "pattern": "^(a+)+$"}"#.into(),
        ),
        (
            Syntax::JsonSchema,
            r#"{"type": "string", "pattern": "["}"#.into(),
        ),
        (
            Syntax::JsonSchema,
            r#"{"type": "integer", "multipleOf": 0}"#.into(),
        ),
        (
            Syntax::JsonSchema,
            r#"{"type": "number", "minimum": 1e308, "maximum": -1e308}"#.into(),
        ),
        (
            Syntax::JsonSchema,
            format!("{{\"enum\": [{}0]}}", "0,".repeat(50_000)),
        ),
        (Syntax::JsonSchema, "x".repeat(1 << 20)),
    ]
}
