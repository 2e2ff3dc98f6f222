//! Grammars: masks against brute force, languages against independent recognisers, hostile input,
//! the sampler.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use proptest::{prelude::*, strategy::ValueTree};
use ruvllm::Tokenizer;
use ruvllm::gguf::Gguf;
use ruvllm::grammar::GrammarError;
use ruvllm::grammar::{Grammar, Matcher, Syntax, TokenTrie};
use ruvllm::sample::TokenMask;
use ruvllm::sample::{MaskError, SampleError};
use ruvllm::{Sampler, SamplerOptions};

use super::schemas::{Random, schema};

const MODEL: &str = "models/ruvllm-rust-6m-q8_0.gguf";

fn tokenizer() -> Tokenizer {
    Tokenizer::from_metadata(Gguf::open(MODEL).unwrap().metadata()).unwrap()
}

fn setup() -> (Tokenizer, TokenTrie) {
    let tokenizer = tokenizer();
    let trie = TokenTrie::new(&tokenizer).unwrap();
    (tokenizer, trie)
}

/// The tokens that are one byte each.
fn byte_tokens(tokenizer: &Tokenizer) -> HashMap<u8, u32> {
    let bytes = |id| {
        tokenizer
            .token_bytes(id)
            .filter(|b| b.len() == 1 && !tokenizer.is_control(id))
            .map(|b| b[0])
    };
    (0..tokenizer.n_vocab() as u32)
        .filter_map(|id| Some((bytes(id)?, id)))
        .collect()
}

/// Takes `text` byte by byte; whether the grammar allows it.
fn feed(matcher: &mut Matcher, bytes: &HashMap<u8, u32>, text: &[u8]) -> bool {
    text.iter().all(|b| {
        bytes
            .get(b)
            .is_some_and(|&token| matcher.accept(token).is_ok())
    })
}

fn matches(grammar: &Grammar, bytes: &HashMap<u8, u32>, text: &str) -> bool {
    let mut matcher = grammar.matcher();
    feed(&mut matcher, bytes, text.as_bytes()) && matcher.is_accepting().unwrap()
}

fn is_set(words: &[u32], token: u32) -> bool {
    words
        .get(token as usize / 32)
        .is_some_and(|word| word >> (token % 32) & 1 == 1)
}

fn runner(cases: u32) -> TestRunner {
    TestRunner::new_with_rng(
        Config::with_cases(cases),
        TestRng::deterministic_rng(RngAlgorithm::ChaCha),
    )
}

fn draw<T>(runner: &mut TestRunner, strategy: impl Strategy<Value = T>) -> T {
    strategy.new_tree(runner).unwrap().current()
}

/// Random grammars of all kinds.
fn grammars() -> impl Strategy<Value = (Syntax, String)> {
    let schema = prop_oneof![
        Just(
            r#"{"type":"object","properties":{"name":{"type":"string"},"n":{"type":"integer","minimum":-5,"maximum":300}},"required":["name"],"additionalProperties":false}"#
        ),
        Just(
            r#"{"type":"array","items":{"enum":["let mut","fn","é","日本",1.5,null,true]},"minItems":1,"maxItems":4}"#
        ),
        Just(
            r#"{"anyOf":[{"type":"string","pattern":"^[a-f]{2,4}(-[0-9]+)?$"},{"type":"number"}]}"#
        ),
        Just(r##"{"type":"object","additionalProperties":{"type":"array","items":{"$ref":"#"}}}"##),
        Just(r#"{"type":"string","minLength":2,"maxLength":6}"#),
        Just(r#"{"type":"string","format":"date-time"}"#),
    ];
    let atom = prop_oneof![
        Just("a"),
        Just("fn "),
        Just("[a-z]"),
        Just("[^x]"),
        Just("é"),
        Just("."),
        Just("[0-9]+"),
        Just("let"),
        Just("\\s"),
    ];
    let regex = proptest::collection::vec(
        (
            atom,
            prop_oneof![Just(""), Just("*"), Just("?"), Just("{1,3}")],
        ),
        1..6,
    )
    .prop_map(|parts| {
        parts
            .iter()
            .map(|(a, r)| format!("(?:{a}){r}"))
            .collect::<String>()
    });
    let gbnf = prop_oneof![
        Just("root ::= expr\nexpr ::= term ([-+*/] term)*\nterm ::= [0-9]+ | \"(\" expr \")\""),
        Just("root ::= \"<\" root \">\" | [a-z]+ | \"\""),
        Just("root ::= line+\nline ::= \"- \" [^\\n]{1,20} \"\\n\""),
        Just(
            "root ::= list\nlist ::= list \",\" item | item\nitem ::= \"yes\" | \"no\" | \"ja\" [0-9]?"
        ),
    ];
    let lark = Just(
        "start: \"fn \" NAME \"(\" [arg (\", \" arg)*] \")\"\narg: NAME \": \" NAME\nNAME: /[a-z_]{1,8}/",
    );
    prop_oneof![
        schema.prop_map(|s| (Syntax::JsonSchema, s.to_owned())),
        regex.prop_map(|s| (Syntax::Regex, s)),
        gbnf.prop_map(|s| (Syntax::Gbnf, s.to_owned())),
        lark.prop_map(|s| (Syntax::Lark, s.to_owned())),
    ]
}

/// Masks after random prefixes, each against all tokens of the vocabulary, taken byte by byte. All
/// pairs of grammar and prefix with `RUVLLM_LONG`, which takes minutes.
#[test]
fn masks_equal_brute_force() {
    const SEED: u64 = 18;
    let pairs = super::common::few_or_many(3, 100, 10_000);
    println!("{pairs} pairs, seed {SEED}");
    let (tokenizer, trie) = setup();
    let bytes = byte_tokens(&tokenizer);
    let texts: Vec<Vec<u8>> = (0..trie.n_vocab() as u32)
        .map(
            |token| match tokenizer.is_control(token) || tokenizer.unknown() == Some(token) {
                true => Vec::new(),
                false => tokenizer.token_bytes(token).unwrap(),
            },
        )
        .collect();
    let mut random = Random(SEED);
    let mut runner = runner(pairs);
    let mut compiled: HashMap<String, Grammar> = HashMap::new();
    let (mut done, mut n_allowed) = (0, 0);
    while done < pairs {
        let (syntax, source) = match random.below(2) {
            0 => (Syntax::JsonSchema, schema(&mut random).to_string()),
            _ => draw(&mut runner, grammars()),
        };
        let grammar = compiled.entry(source.clone()).or_insert_with(|| {
            Grammar::new(&trie, syntax, &source).unwrap_or_else(|e| panic!("{source}: {e}"))
        });
        let mut matcher = grammar.matcher();
        for _ in 0..1 + random.below(if done % 8 == 0 { 40 } else { 8 }) {
            let before = matcher.clone();
            // What is forced is asked for now and then; it changes no mask.
            if random.below(2) == 0 {
                matcher.forced(&|text| tokenizer.encode_inside(text));
            }
            let words = matcher.mask().unwrap().to_vec();
            let mut allowed = Vec::new();
            for (token, text) in (0..).zip(&texts) {
                let mut copy = before.clone();
                let expected = match tokenizer.is_eog(token) {
                    true => copy.is_accepting().unwrap(),
                    false => !text.is_empty() && feed(&mut copy, &bytes, text),
                };
                assert_eq!(
                    is_set(&words, token),
                    expected,
                    "{source}: token {token} {text:?} after {matcher:?}"
                );
                if expected && !tokenizer.is_eog(token) {
                    allowed.push(token);
                }
            }
            (done, n_allowed) = (done + 1, n_allowed + allowed.len());
            if allowed.is_empty() {
                break;
            }
            // Mostly text, so that white space and strings do not take all.
            let token = (0..4).map(|_| allowed[random.below(allowed.len())]);
            let token = token
                .max_by_key(|&t| !texts[t as usize].iter().all(u8::is_ascii_whitespace))
                .unwrap();
            matcher.accept(token).unwrap();
        }
    }
    println!(
        "{} grammars, {} tokens allowed per mask",
        compiled.len(),
        n_allowed / done as usize
    );
}

/// A grammar of the GBNF test, as its own recogniser understands it.
#[derive(Clone, Debug)]
enum Part {
    Text(&'static str),
    Class(&'static str),
    Rule(usize),
    Seq(Vec<Part>),
    Alt(Vec<Part>),
    Repeat(Box<Part>, usize, usize),
}

impl Part {
    fn write(&self) -> String {
        let all =
            |parts: &[Part], by: &str| parts.iter().map(Part::write).collect::<Vec<_>>().join(by);
        match self {
            Part::Text(text) => format!("\"{text}\""),
            Part::Class(chars) => format!("[{chars}]"),
            Part::Rule(i) => {
                if *i == 0 {
                    "root".into()
                } else {
                    format!("r{i}")
                }
            }
            Part::Seq(parts) => format!("({})", all(parts, " ")),
            Part::Alt(parts) => format!("({})", all(parts, " | ")),
            Part::Repeat(part, 0, 9) => format!("{}*", part.write()),
            Part::Repeat(part, 1, 9) => format!("{}+", part.write()),
            Part::Repeat(part, min, max) => format!("{}{{{min},{max}}}", part.write()),
        }
    }

    /// The ends of the matches that begin at `at`, given those of the rules so far.
    fn ends(&self, text: &str, at: usize, rules: &[Vec<Vec<usize>>]) -> Vec<usize> {
        let mut out = match self {
            Part::Text(t) => {
                if text[at..].starts_with(t) {
                    vec![at + t.len()]
                } else {
                    vec![]
                }
            }
            Part::Class(chars) => match text[at..].chars().next() {
                Some(c) if chars.contains(c) => vec![at + 1],
                _ => vec![],
            },
            Part::Rule(i) => rules[*i][at].clone(),
            Part::Seq(parts) => parts.iter().fold(vec![at], |starts, part| {
                starts
                    .into_iter()
                    .flat_map(|s| part.ends(text, s, rules))
                    .collect()
            }),
            Part::Alt(parts) => parts
                .iter()
                .flat_map(|part| part.ends(text, at, rules))
                .collect(),
            Part::Repeat(part, min, max) => {
                let (mut now, mut out) = (vec![at], vec![]);
                for n in 0..=*max {
                    if n >= *min {
                        out.extend(&now);
                    }
                    now = now
                        .into_iter()
                        .flat_map(|s| part.ends(text, s, rules))
                        .collect();
                    now.sort_unstable();
                    now.dedup();
                }
                out
            }
        };
        out.sort_unstable();
        out.dedup();
        out
    }
}

/// Whether the first rule matches all of `text`: to the fixed point, so that left recursion is no
/// problem.
fn recognises(rules: &[Part], text: &str) -> bool {
    let mut known = vec![vec![Vec::new(); text.len() + 1]; rules.len()];
    loop {
        let next: Vec<Vec<Vec<usize>>> = rules
            .iter()
            .map(|rule| {
                (0..=text.len())
                    .map(|at| rule.ends(text, at, &known))
                    .collect()
            })
            .collect();
        if next == known {
            return known[0][0].contains(&text.len());
        }
        known = next;
    }
}

fn parts() -> impl Strategy<Value = Part> {
    let leaf = prop_oneof![
        prop_oneof![Just("a"), Just("b"), Just("ab"), Just("aab"), Just("")].prop_map(Part::Text),
        prop_oneof![Just("ab"), Just("b"), Just("bc")].prop_map(Part::Class),
        (0..3usize).prop_map(Part::Rule),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        let several = || proptest::collection::vec(inner.clone(), 1..4);
        prop_oneof![
            several().prop_map(Part::Seq),
            several().prop_map(Part::Alt),
            (
                inner.clone(),
                prop_oneof![Just((0, 9)), Just((1, 9)), Just((0, 1)), Just((1, 2))]
            )
                .prop_map(|(part, (min, max))| Part::Repeat(Box::new(part), min, max)),
        ]
    })
}

/// Random GBNF grammars, recursive on all sides, against a recogniser that has no lexer: all texts
/// of five characters.
#[test]
fn gbnf_means_what_it_says() {
    let cases = super::common::few_or_many(3, 40, 3_000);
    let (tokenizer, trie) = setup();
    let bytes = byte_tokens(&tokenizer);
    let mut runner = runner(cases);
    let mut texts = vec![String::new()];
    let mut last = texts.clone();
    for _ in 0..5 {
        last = last
            .iter()
            .flat_map(|t| ["a", "b", "c"].map(|c| format!("{t}{c}")))
            .collect();
        texts.extend(last.clone());
    }
    let mut compiled = 0;
    for _ in 0..cases {
        let rules: Vec<Part> = (0..3).map(|_| draw(&mut runner, parts())).collect();
        let source: String = rules
            .iter()
            .enumerate()
            .map(|(i, r)| format!("{} ::= {}\n", Part::Rule(i).write(), r.write()))
            .collect();
        let grammar = match Grammar::gbnf(&trie, &source) {
            Ok(grammar) => grammar,
            // Rules that only call themselves match nothing.
            Err(e) => {
                assert!(
                    !texts.iter().any(|text| recognises(&rules, text)),
                    "{source}: {e}"
                );
                continue;
            }
        };
        compiled += 1;
        for text in &texts {
            assert_eq!(
                matches(&grammar, &bytes, text),
                recognises(&rules, text),
                "{text:?} of\n{source}"
            );
        }
    }
    assert!(compiled > cases / 2, "{compiled} of {cases}");
}

#[test]
fn gbnf_dialect() {
    let (tokenizer, trie) = setup();
    let bytes = byte_tokens(&tokenizer);
    let json = r##"
        # llama.cpp's grammar of JSON
        root   ::= object
        value  ::= object | array | string | number | ("true" | "false" | "null") ws
        object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
        array  ::= "[" ws ( value ("," ws value)* )? "]" ws
        string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
        number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
        ws ::= | " " | "\n" [ \t]{0,20}
    "##;
    for (grammar, yes, no) in [
        (
            json,
            "{\"a\": [1, -2.5e+3, \"x\\u00e9\\n\", null],\n\t\"b\": {}} ",
            "{\"a\": }",
        ),
        ("root ::= [^a-z]", "\u{e000}", "b"),
        (
            "root ::= [\\u00e9\\U0001F600] \"\\t\\\"\\\\\"",
            "😀\t\"\\",
            "e",
        ),
        (
            "root ::= \"\" | (\"a\" |\n  \"b\") # nested lines\n",
            "b",
            "ab",
        ),
        ("root ::= a-b\na-b ::= \"x\"{2} \"y\"{1,}", "xxyyy", "xyy"),
        ("root ::= . .", "é\n", "é"),
        ("root ::= root \"a\" | \"b\"", "baaa", "aab"),
        ("root ::= \"a\" root \"b\" | \"ab\"", "aaabbb", "aabbb"),
        ("root ::= [a-z]+ \"end\"", "abendend", "abc"),
        ("root ::= (\"a\"*)*", "aaa", "b"),
    ] {
        let compiled = Grammar::gbnf(&trie, grammar).unwrap_or_else(|e| panic!("{grammar}: {e}"));
        assert!(matches(&compiled, &bytes, yes), "{grammar} and {yes:?}");
        assert!(!matches(&compiled, &bytes, no), "{grammar} and {no:?}");
    }
    for (grammar, line, word) in [
        ("root ::= missing", 1, "missing"),
        ("root := \"a\"", 1, "::="),
        ("root ::= \"a\nb", 2, "no end"),
        ("root ::= \"a\"\nb ::= [z-a]", 2, "wrong order"),
        ("root ::= \"a\"{3,2}", 1, "before it begins"),
        ("root ::= \"a\"{0,100000}", 1, "100000"),
        ("root ::= (\"a\"", 1, ")"),
        ("root ::= \"\\q\"", 1, "escape"),
        ("root ::= <no-such-token>", 1, "no-such-token"),
    ] {
        match Grammar::gbnf(&trie, grammar).unwrap_err() {
            GrammarError::Line {
                line: found,
                message,
            } => {
                assert_eq!(found, line, "{grammar}: {message}");
                assert!(message.contains(word), "{grammar}: {message}");
            }
            other => panic!("{grammar}: {other:?}"),
        }
    }
    assert!(
        Grammar::gbnf(&trie, "a ::= \"b\"")
            .unwrap_err()
            .to_string()
            .contains("root")
    );
}

/// Each is answered, by a grammar or an error, in time; and a grammar by a mask.
#[test]
fn hostile_grammars_are_answered() {
    let (tokenizer, trie) = setup();
    for (syntax, source) in super::hostile::grammars() {
        let shown: String = source.chars().take(60).collect();
        // Others may have the processor now and then: the best of a few.
        let mut best = Duration::MAX;
        for _ in 0..4 {
            let start = Instant::now();
            if let Ok(grammar) = Grammar::new(&trie, syntax, &source) {
                let mut matcher = grammar.matcher();
                let _ = matcher.forced(&|text| tokenizer.encode_inside(text));
                let _ = matcher.mask();
            }
            best = best.min(start.elapsed());
            if best < Duration::from_millis(50) {
                break;
            }
        }
        eprintln!("{best:?}: {syntax} {shown}");
        let limit = if cfg!(debug_assertions) || super::common::emulated() {
            3000
        } else {
            100
        };
        assert!(
            best < Duration::from_millis(limit),
            "{syntax} {shown}: {best:?}"
        );
    }
}

#[test]
fn the_end_and_the_way_back() {
    let (tokenizer, trie) = setup();
    let bytes = byte_tokens(&tokenizer);
    let eog: Vec<u32> = tokenizer.eog().collect();
    let grammar = Grammar::regex(&trie, "(yes|no)").unwrap();
    let mut matcher = grammar.matcher();
    assert!(feed(&mut matcher, &bytes, b"no"));
    assert!(matcher.is_finished() && matcher.is_accepting().unwrap());
    let words = matcher.mask().unwrap().to_vec();
    for token in 0..trie.n_vocab() as u32 {
        assert_eq!(is_set(&words, token), eog.contains(&token), "token {token}");
    }
    let refused = matcher.accept(bytes[&b'x']).unwrap_err();
    assert_eq!(
        refused,
        MaskError::Refused {
            token: bytes[&b'x'],
            n_tokens: 2
        }
    );
    // The end comes once or more, and can be taken back like any token.
    matcher.accept(eog[0]).unwrap();
    matcher.accept(*eog.last().unwrap()).unwrap();
    assert!(matcher.accept(bytes[&b'x']).is_err());
    matcher.rollback(3).unwrap();
    assert!(!matcher.is_finished());
    assert!(feed(&mut matcher, &bytes, b"o"));
    assert_eq!(
        matcher.rollback(3),
        Err(MaskError::Rollback { n: 3, n_tokens: 2 })
    );
    let mut fork = matcher.clone();
    matcher.reset();
    assert!(feed(&mut matcher, &bytes, b"yes") && matcher.is_finished());
    assert!(fork.is_finished());
    fork.rollback(2).unwrap();
    assert!(feed(&mut fork, &bytes, b"yes"));
}

/// What is forced is what a tokenizer makes of the forced text, and does not change the mask's
/// texts.
#[test]
fn forced_tokens() {
    let (tokenizer, trie) = setup();
    let schema = r#"{"type":"object","properties":{"ownership_of_value":{"const":"borrowed and returned"}},"required":["ownership_of_value"],"additionalProperties":false}"#;
    let grammar = Grammar::json_schema(&trie, schema).unwrap();
    let mut matcher = grammar.matcher();
    let (mut text, mut n_forced, mut steps) = (Vec::new(), 0, 0);
    while !matcher.is_finished() {
        let forced = matcher.forced(&|text| tokenizer.encode_inside(text));
        n_forced += forced.len();
        for &token in &forced {
            assert!(matcher.allows(token).unwrap());
            matcher.accept(token).unwrap();
            text.extend_from_slice(&tokenizer.token_bytes(token).unwrap());
        }
        if matcher.is_finished() {
            break;
        }
        // Otherwise the shortest token without white space.
        let words = matcher.mask().unwrap().to_vec();
        let allowed =
            (0..trie.n_vocab() as u32).filter(|&t| is_set(&words, t) && !tokenizer.is_eog(t));
        let texts = allowed.map(|t| (t, tokenizer.token_bytes(t).unwrap()));
        let (token, bytes) = texts
            .filter(|(_, b)| !b.iter().any(u8::is_ascii_whitespace) || steps > 200)
            .min_by_key(|(_, b)| b.len())
            .unwrap();
        matcher.accept(token).unwrap();
        text.extend_from_slice(&bytes);
        steps += 1;
    }
    assert_eq!(
        String::from_utf8(text).unwrap(),
        r#"{"ownership_of_value":"borrowed and returned"}"#
    );
    assert!(n_forced >= 3, "{n_forced} tokens were forced");
    // Asking changes nothing.
    let (mut asked, mut plain) = (grammar.matcher(), grammar.matcher());
    asked.forced(&|text| tokenizer.encode_inside(text));
    assert_eq!(asked.mask().unwrap(), plain.mask().unwrap());
    // At the end, the end.
    let mut matcher = Grammar::regex(&trie, "a").unwrap().matcher();
    assert!(feed(&mut matcher, &byte_tokens(&tokenizer), b"a"));
    let forced = matcher.forced(&|text| tokenizer.encode_inside(text));
    assert!(forced.len() == 1 && tokenizer.is_eog(forced[0]));
}

/// A text that is too long to be forced, or has no end, is left to masks.
#[test]
fn long_texts_are_not_forced() {
    let (tokenizer, trie) = setup();
    let bytes = byte_tokens(&tokenizer);
    let array = format!("{{\"const\": [{}0]}}", "12, ".repeat(3000));
    for (syntax, source) in [
        (Syntax::Gbnf, "root ::= \"ab\" root"),
        (
            Syntax::Gbnf,
            &format!("root ::= \"{}\"", "ab ".repeat(3000)),
        ),
        (Syntax::Lark, &format!("start: %json {array}")),
    ] {
        let mut matcher = Grammar::new(&trie, syntax, source).unwrap().matcher();
        let begin: &[u8] = if source.contains("json") {
            b"[12,"
        } else {
            b"ab"
        };
        assert!(feed(&mut matcher, &bytes, begin));
        assert!(
            matcher
                .forced(&|text| tokenizer.encode_inside(text))
                .is_empty(),
            "{syntax}"
        );
        matcher.mask().unwrap();
        matcher.rollback(1).unwrap();
        assert!(feed(&mut matcher, &bytes, &begin[begin.len() - 1..]));
        assert!(!matcher.is_finished());
    }
}

#[test]
fn characters_are_split_over_tokens() {
    let (tokenizer, trie) = setup();
    let bytes = byte_tokens(&tokenizer);
    if (0x80..0xf5).any(|b| !bytes.contains_key(&b) && !matches!(b, 0xc0 | 0xc1)) {
        return eprintln!("skipped: the vocabulary has not all bytes");
    }
    let grammar = Grammar::json_schema(&trie, r#"{"enum": ["日本", "é😀"]}"#).unwrap();
    for text in ["\"日本\"", "\"é😀\""] {
        assert!(matches(&grammar, &bytes, text), "{text}");
    }
    let mut matcher = grammar.matcher();
    assert!(feed(&mut matcher, &bytes, b"\"\xc3"));
    assert!(!matcher.allows(bytes[&0xa8]).unwrap(), "è is not allowed");
    assert!(feed(&mut matcher, &bytes, b"\xa9"));
    // Nothing that is not UTF-8 in a text.
    let grammar = Grammar::json_schema(&trie, r#"{"type": "string"}"#).unwrap();
    let mut matcher = grammar.matcher();
    assert!(feed(&mut matcher, &bytes, b"\"\xe6"));
    assert!(!matcher.clone().allows(bytes[&b'a']).unwrap());
    assert!(feed(&mut matcher, &bytes, b"\x97\xa5\""));
}

/// Every keyword of any draft is enforced, describes, or is refused by name and place.
#[test]
fn keywords_are_never_ignored() {
    let (_, trie) = setup();
    for (keyword, value) in [
        ("not", r#"{"type": "null"}"#),
        ("if", r#"{"type": "string"}, "then": {"minLength": 3}"#),
        ("contains", r#"{"type": "null"}"#),
        ("uniqueItems", "true"),
        ("propertyNames", r#"{"minLength": 3}"#),
        ("dependencies", r#"{"a": ["b"]}"#),
        ("dependentRequired", r#"{"a": ["b"]}"#),
        ("dependentSchemas", r#"{"a": {"required": ["b"]}}"#),
        (
            "unevaluatedProperties",
            r#"false, "allOf": [{"properties": {"a": true}}]"#,
        ),
        (
            "unevaluatedItems",
            r#"false, "anyOf": [{"prefixItems": [true]}]"#,
        ),
        ("$dynamicRef", "\"#meta\""),
        ("$recursiveRef", "\"#\""),
        ("extends", "{}"),
        ("disallow", "\"string\""),
        ("divisibleBy", "3"),
        ("pattern", "\"(?=a)b\""),
        ("pattern", "\"[\""),
        ("$ref", "\"https://example.com/other.json\""),
        ("$ref", "\"#/$defs/missing\""),
        ("maxLength", "-1"),
        ("minimum", "\"1\""),
        ("enum", "[123456789012345678901]"),
    ] {
        let schema = format!(
            r#"{{"type": "object", "properties": {{"a/b": {{"items": {{"{keyword}": {value}}}}}}}}}"#
        );
        match Grammar::json_schema(&trie, &schema) {
            Err(GrammarError::Keyword {
                keyword: found,
                path,
                ..
            }) => {
                assert_eq!(
                    (&found[..], &path[..]),
                    (keyword, "/properties/a~1b/items"),
                    "{schema}"
                );
            }
            other => panic!("{schema}: {other:?}"),
        }
    }
    // What the engine refuses is placed too.
    let overlapping = r#"{"properties": {"x": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 1}]}}}"#;
    let error = Grammar::json_schema(&trie, overlapping).unwrap_err();
    assert!(
        matches!(&error, GrammarError::Keyword { keyword, path, .. } if keyword == "oneOf" && path == "/properties/x"),
        "{error}"
    );
    // In Lark as well.
    let lark = "start: \"a\" j // %json no\nj: %json {\"type\": \"array\", \"uniqueItems\": true}";
    assert!(
        matches!(Grammar::lark(&trie, lark), Err(GrammarError::Keyword { keyword, .. }) if keyword == "uniqueItems")
    );
    // And these mean nothing.
    let described = r##"{"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.com/s", "title": "t",
        "description": "d", "default": 1, "examples": [1], "deprecated": true, "readOnly": true, "$comment": "c",
        "x-anything": {"a": 1}, "type": "integer", "uniqueItems": false, "then": {"minimum": 5}}"##;
    Grammar::json_schema(&trie, described).unwrap();
}

#[test]
fn references() {
    let (tokenizer, trie) = setup();
    let bytes = byte_tokens(&tokenizer);
    let schema = r##"{
        "$id": "https://example.com/root.json",
        "properties": {
            "a": {"$ref": "#/$defs/percent%25~1slash"}, "b": {"$ref": "#anchor"}, "c": {"$ref": "nested.json#/$defs/x"},
            "d": {"$ref": "https://example.com/root.json#/$defs/plain"}, "e": {"$ref": "#"}
        },
        "additionalProperties": false,
        "$defs": {
            "percent%/slash": {"const": 1}, "plain": {"const": 4}, "named": {"$anchor": "anchor", "const": 2},
            "nested": {"$id": "nested.json", "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"const": 3}}}
        }
    }"##;
    let grammar = Grammar::json_schema(&trie, schema).unwrap();
    assert!(matches(
        &grammar,
        &bytes,
        r#"{"a":1,"b":2,"c":3,"d":4,"e":{"a":1}}"#
    ));
    for text in [
        r#"{"a":2}"#,
        r#"{"b":1}"#,
        r#"{"c":1}"#,
        r#"{"d":1}"#,
        r#"{"e":{"a":2}}"#,
    ] {
        assert!(!matches(&grammar, &bytes, text), "{text}");
    }
}

#[test]
fn samplers_obey() {
    let (tokenizer, trie) = setup();
    let grammar = Grammar::regex(&trie, "[0-9]{3}").unwrap();
    let n = trie.n_vocab();
    let logits: Vec<f32> = (0..n as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 16) as f32 / 65536.0)
        .collect();
    for options in [
        SamplerOptions {
            temperature: 0.0,
            ..Default::default()
        },
        SamplerOptions {
            temperature: 0.0,
            repeat_penalty: 1.3,
            ..Default::default()
        },
        SamplerOptions {
            temperature: 1.5,
            top_k: 1,
            seed: Some(3),
            ..Default::default()
        },
        SamplerOptions {
            temperature: 1.0,
            min_p: 0.99,
            seed: Some(4),
            ..Default::default()
        },
        SamplerOptions {
            mirostat: ruvllm::sample::Mirostat::V2,
            seed: Some(5),
            ..Default::default()
        },
    ] {
        let mut sampler = Sampler::new(options).unwrap();
        for _ in 0..2 {
            sampler.set_mask(Some(Box::new(grammar.matcher())));
            let mut tokens = Vec::new();
            loop {
                let expected = {
                    let words = sampler.mask_mut().unwrap().mask().unwrap();
                    (0..n as u32)
                        .filter(|&t| is_set(words, t))
                        .max_by(|&a, &b| {
                            logits[a as usize]
                                .total_cmp(&logits[b as usize])
                                .then(b.cmp(&a))
                        })
                };
                let mut greedy = Sampler::new(SamplerOptions {
                    temperature: 0.0,
                    ..Default::default()
                })
                .unwrap();
                greedy.set_mask(sampler.mask_mut().map(|mask| mask.boxed_clone()));
                assert_eq!(greedy.sample(&logits, &[]).unwrap(), expected.unwrap());
                let token = sampler.sample(&logits, &tokens).unwrap();
                tokens.push(token);
                if tokenizer.is_eog(token) {
                    break;
                }
            }
            let text = tokenizer.decode_exact(&tokens, false).unwrap();
            assert!(
                text.len() == 3 && text.iter().all(u8::is_ascii_digit),
                "{text:?}"
            );
            sampler.rollback(tokens.len()).unwrap();
            assert!(sampler.rollback(1).is_err());
        }
    }
    // Nothing to choose from is an error, and the mask is as before.
    let mut sampler = Sampler::new(SamplerOptions::default()).unwrap();
    sampler.set_mask(Some(Box::new(grammar.matcher())));
    let error = sampler
        .sample(&vec![f32::NEG_INFINITY; n], &[])
        .unwrap_err();
    assert!(matches!(error, SampleError::NoCandidates { .. }));
    assert!(sampler.sample(&logits, &[]).is_ok());
}

/// A mask costs the same after ten thousand tokens: texts up to a tag (xgrammar #873), strings,
/// arrays.
#[test]
fn masks_stay_fast() {
    let (tokenizer, trie) = setup();
    let bytes = byte_tokens(&tokenizer);
    for (syntax, source, text) in [
        (
            Syntax::Lark,
            "start: text\ntext[suffix=\"</think>\"]: /(?s:.*)/",
            "so </th",
        ),
        (Syntax::JsonSchema, r#"{"type": "string"}"#, "ab"),
        (
            Syntax::JsonSchema,
            r#"{"type": "array", "items": {"type": "integer"}}"#,
            "12,",
        ),
    ] {
        let grammar = Grammar::new(&trie, syntax, source).unwrap();
        let mut matcher = grammar.matcher();
        if syntax == Syntax::JsonSchema {
            let begin: &[u8] = if source.contains("array") {
                b"["
            } else {
                b"\""
            };
            assert!(feed(&mut matcher, &bytes, begin));
        }
        let n = if super::common::emulated() { 200 } else { 3000 };
        let mut times = Vec::new();
        for _ in 0..n {
            let start = Instant::now();
            matcher.mask().unwrap();
            times.push(start.elapsed());
            assert!(feed(&mut matcher, &bytes, text.as_bytes()), "{source}");
        }
        let middle = |times: &mut [Duration]| {
            times.sort_unstable();
            times[times.len() / 2]
        };
        let (first, last) = (middle(&mut times[20..120]), middle(&mut times[n - 100..]));
        assert!(
            last < first * 4 + Duration::from_micros(50),
            "{source}: {first:?}, at the end {last:?}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if super::common::emulated() { 10 } else { 300 }))]

    /// No text is a reason to panic, whatever it is taken for.
    #[test]
    fn any_text_is_answered(text in "[a-z:=\"'|()\\[\\]{}*+?.,0-9\\\\/ \n<>%$^-]{0,60}") {
        thread_local! {
            static TRIE: TokenTrie = setup().1;
        }
        TRIE.with(|trie| {
            for syntax in [Syntax::Gbnf, Syntax::Lark, Syntax::Regex, Syntax::JsonSchema] {
                let source = if syntax == Syntax::Gbnf { format!("root ::= {text}") } else { text.clone() };
                if let Err(GrammarError::Invalid { message, .. }) = Grammar::new(trie, syntax, &source) {
                    assert!(!message.contains("panic"), "{syntax} {source:?}: {message}");
                }
            }
        });
    }
}
