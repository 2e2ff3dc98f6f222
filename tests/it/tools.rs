//! Function calling: every format reads its own calls however the text is cut, loses nothing, and
//! its grammar allows what it reads.

use crate::calls::CALLS;
use proptest::prelude::*;
use ruvllm::chat::tools::{Tool, ToolCall, ToolFormat, Turn, TurnParser, TurnPart};
use serde_json::{Value, json};

fn tools() -> Vec<Tool> {
    vec![
        Tool::new(
            "get_weather",
            json!({
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city"],
            }),
        ),
        Tool::new("now", json!({"type": "object", "properties": {}})),
    ]
}

fn arguments() -> Value {
    json!({"city": "Oslo", "days": 3, "unit": "celsius"})
}

fn format(name: &str) -> ToolFormat {
    ToolFormat::by_name(name).unwrap_or_else(|| panic!("{name}"))
}

/// The turn of a text in pieces; the parts that came are the turn's.
fn parse(name: &str, prompt: &str, pieces: &[&str]) -> Turn {
    turn_of(TurnParser::new(format(name), &tools(), prompt), pieces)
}

/// [`parse`] with this parser.
fn turn_of(mut parser: TurnParser, pieces: &[&str]) -> Turn {
    let mut parts: Vec<TurnPart> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    parts.extend(parser.finish_parts());
    let turn = parser.turn().clone();
    let (mut reasoning, mut text, mut calls) = (String::new(), String::new(), Vec::new());
    for part in parts {
        match part {
            TurnPart::Reasoning(more) => reasoning += &more,
            TurnPart::Text(more) => text += &more,
            TurnPart::Call(call) => calls.push(call),
            _ => unreachable!(),
        }
    }
    assert_eq!(
        (&reasoning, &text, &calls),
        (&turn.reasoning, &turn.text, &turn.calls),
        "{pieces:?}"
    );
    turn
}

fn check(call: &ToolCall, name: &str) {
    assert_eq!(call.name, "get_weather", "{name}");
    assert_eq!(Value::Object(call.arguments.clone()), arguments(), "{name}");
}

#[test]
fn every_format_reads_its_calls() {
    assert_eq!(
        CALLS.len(),
        ToolFormat::names().count(),
        "a call of each format"
    );
    for (name, open, rest) in CALLS {
        let turn = parse(name, "", &[open, rest]);
        assert_eq!(turn.calls.len(), 1, "{name}: {turn:?}");
        check(&turn.calls[0], name);
        assert_eq!(
            (&turn.text[..], &turn.reasoning[..], &turn.unfinished),
            ("", "", &None),
            "{name}"
        );
    }
}

/// Without tools, and where a grammar made the text, nothing is a call: all of it is text, at once,
/// and only reasoning before it is told apart.
#[test]
fn no_calls_without_tools() {
    for (name, open, rest) in CALLS {
        let call = format!("{open}{rest}");
        let each: Vec<&str> = call.split_inclusive(|_| true).collect();
        let mut free = TurnParser::new(format(name), &[], "");
        let made = TurnParser::new(format(name), &tools(), "").verbatim();
        for parser in [free.clone(), free.clone().verbatim(), made] {
            for pieces in [&[&call[..]][..], &each] {
                let turn = turn_of(parser.clone(), pieces);
                assert_eq!(
                    (&turn.text, turn.calls.len(), &turn.unfinished),
                    (&call, 0, &None),
                    "{name}"
                );
            }
            for at in [call.len() / 3, call.len() - 1] {
                let cut = &call[..border(&call, at)];
                let turn = turn_of(parser.clone(), &[cut]);
                assert_eq!(
                    (&turn.text[..], turn.calls.len(), &turn.unfinished),
                    (cut, 0, &None),
                    "{name}"
                );
            }
        }
        if open.is_empty() {
            assert_eq!(
                free.push("{"),
                [TurnPart::Text("{".into())],
                "{name}: nothing is waited for"
            );
        }
    }
    for parser in [
        TurnParser::new(format("hermes"), &[], ""),
        TurnParser::new(format("hermes"), &[], "").verbatim(),
    ] {
        let turn = turn_of(parser, &["<think>Hm, {</think>\n\n{\"name\": \"f\"}"]);
        assert_eq!(
            (&turn.reasoning[..], &turn.text[..]),
            ("Hm, {", "{\"name\": \"f\"}")
        );
    }
    // Markers inside a text that a grammar made are a part of it.
    let text = "{\"a\": \"<think>b</think><response><tool_call>\"}";
    let turn = turn_of(
        TurnParser::new(format("granite"), &[], "").verbatim(),
        &[text],
    );
    assert_eq!((&turn.text[..], &turn.reasoning[..]), (text, ""));
    // Where the prompt opens the first message, text for the user has a marker, with tools or
    // without, but not what a grammar made.
    for tools in [&tools()[..], &[]] {
        let parser = TurnParser::new(format("functionary-v3.2"), tools, "...>>>");
        assert_eq!(turn_of(parser, &["al", "l\nHello."]).text, "Hello.");
        let parser = TurnParser::new(format("functionary-v3.2"), tools, "...>>>").verbatim();
        assert_eq!(turn_of(parser, &["all\n{}"]).text, "all\n{}");
    }
}

/// Text before, reasoning before, text after, two calls.
#[test]
fn text_and_reasoning_around_calls() {
    for (name, open, rest) in CALLS {
        let (think, thought) = match *name {
            "harmony" => ("<|channel|>analysis<|message|>", "<|end|>"),
            "mistral" | "mistral-v11" => ("[THINK]", "[/THINK]"),
            "command-r" => ("<|START_THINKING|>", "<|END_THINKING|>"),
            "gemma4" => ("<|channel>thought\n", "<channel|>"),
            "function-gemma" => ("", ""),
            "seed-oss" => ("<seed:think>", "</seed:think>"),
            "kimi-k3" => ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
            "apertus" => ("<|inner_prefix|>", "<|inner_suffix|>"),
            "hy3" => ("<think:opensource>", "</think:opensource>"),
            "minimax-m3" => ("<mm:think>", "</mm:think>"),
            "solar-open" => ("<|think|>", "<|end|>"),
            "apriel" => ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
            _ => ("<think>", "</think>"),
        };
        let call = format!("{open}{rest}");
        if !think.is_empty() {
            let turn = parse(name, "", &[&format!("{think}Which city?{thought}\n{call}")]);
            assert_eq!(
                (&turn.reasoning[..], turn.calls.len()),
                ("Which city?", 1),
                "{name}: {turn:?}"
            );
            assert_eq!(turn.text, "", "{name}");
            // The prompt has begun the reasoning.
            let turn = parse(
                name,
                &format!("...{think}"),
                &[&format!("Which{thought}{call}")],
            );
            assert_eq!(
                (&turn.reasoning[..], turn.calls.len()),
                ("Which", 1),
                "{name}: {turn:?}"
            );
            // It never ends (llama.cpp #27733).
            let turn = parse(name, "", &[&format!("{call}{think}")]);
            assert_eq!(
                (turn.calls.len(), &turn.text[..]),
                (1, ""),
                "{name}: {turn:?}"
            );
        }
        let two = parse(name, "", &[&format!("{call}\n{call}")]);
        assert_eq!(two.calls.len(), 2, "{name}: {two:?}");
        if open.is_empty() {
            continue;
        }
        // llama.cpp #20260.
        let turn = parse(name, "", &[&format!("Let me see.\n{call}")]);
        assert_eq!(
            (&turn.text[..], turn.calls.len()),
            ("Let me see.\n", 1),
            "{name}: {turn:?}"
        );
        let turn = parse(name, "", &[&format!("{call}Done <b>.")]);
        assert_eq!(
            (&turn.text[..], turn.calls.len()),
            ("Done <b>.", 1),
            "{name}: {turn:?}"
        );
    }
}

/// Every beginning of a call is a call, nothing yet, or unfinished; and what is unfinished is all
/// of it.
#[test]
fn calls_that_are_cut_off() {
    for (name, open, rest) in CALLS {
        let call = format!("{open}{rest}");
        for (at, _) in call.char_indices().skip(1) {
            let turn = parse(name, "", &[&call[..at]]);
            let shown = turn.unfinished.clone().unwrap_or_default() + &turn.text;
            if turn.calls.is_empty() {
                assert_eq!(shown, call[..at], "{name}");
            } else {
                check(&turn.calls[0], name);
                assert!(at + 80 > call.len(), "{name}: {}", &call[..at]);
            }
        }
    }
}

/// What looks like a call and is none is text, whole.
#[test]
fn what_is_no_call_is_text() {
    for (name, text) in [
        (
            "hermes",
            "Use <tool_call> like this: <tool_call>{\"name\": ...}</tool_call>.",
        ),
        ("hermes", "<tool_call>not JSON</tool_call> and more"),
        (
            "hermes",
            "<tool_call>{\"arguments\": {}}</tool_call> and more",
        ),
        ("hermes", "a < b, <tool, </think> and <tool_cal"),
        ("glm", "<tool_call>{\"name\": 1}</tool_call> and more"),
        ("qwen3-coder", "<tool_call>nothing</tool_call> and more"),
        ("gemma4", "<|tool_call>call nobody<tool_call|> and more"),
        ("lfm2", "<|tool_call_start|>[f(x]<|tool_call_end|> and more"),
        ("llama3", "{\"answer\": 42}"),
        ("generic", "{\"answer\": 42} is the answer"),
        ("mistral", "[TOOL_CALLS] is a marker"),
        (
            "kimi",
            "<|tool_calls_section_begin|>none<|tool_calls_section_end|> and more",
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜> and more",
        ),
        ("functionary-v3.1", "<function=f>none</function> and more"),
    ] {
        let turn = parse(name, "", &[text]);
        let all = turn.text.clone() + turn.unfinished.as_deref().unwrap_or_default();
        assert_eq!((&all[..], turn.calls.len()), (text, 0), "{name}: {turn:?}");
    }
    // Arguments may quote the markers.
    let quoting = "<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"</tool_call><tool_call>\"}}</tool_call>";
    let turn = parse("hermes", "", &[quoting]);
    assert_eq!(turn.calls[0].arguments["s"], "</tool_call><tool_call>");
    assert_eq!(turn.text, "");
}

#[test]
fn several_calls_in_one_block() {
    let json = "{\"name\": \"a\", \"arguments\": {}}, {\"name\": \"b\", \"arguments\": \"{\\\"x\\\": 1}\", \"id\": \"abcdefghi\"}";
    let turn = parse("mistral", "", &[&format!("[TOOL_CALLS] [{json}]")]);
    assert_eq!(turn.calls.len(), 2);
    assert_eq!(
        (
            turn.calls[1].arguments["x"].clone(),
            turn.calls[1].id.as_deref()
        ),
        (json!(1), Some("abcdefghi"))
    );
    let turn = parse(
        "llama3",
        "",
        &["{\"name\": \"a\", \"parameters\": {}}; {\"name\": \"b\", \"parameters\": {}}"],
    );
    assert_eq!(turn.calls.len(), 2, "{turn:?}");
    let turn = parse(
        "lfm2",
        "",
        &[
            "<|tool_call_start|>[a(), b(x=[1, {'k': \"v\\u00e9\"}], y=None, z=-1.5e3)]<|tool_call_end|>",
        ],
    );
    assert_eq!(
        Value::Object(turn.calls[1].arguments.clone()),
        json!({"x": [1, {"k": "vé"}], "y": null, "z": -1500.0})
    );
    let turn = parse(
        "gemma4",
        "",
        &["<|tool_call>call:f{a:[1,<|\"|>x,}<|\"|>],b:{c:true}}<tool_call|>"],
    );
    assert_eq!(
        Value::Object(turn.calls[0].arguments.clone()),
        json!({"a": [1, "x,}"], "b": {"c": true}})
    );
    let harmony = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>\
                   <|start|>assistant to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}";
    let turn = parse("harmony", "", &[harmony]);
    assert_eq!(
        (&turn.reasoning[..], &turn.text[..], &turn.calls[0].name[..]),
        ("Hm.", "Looking.", "now")
    );
    let turn = parse("functionary-v3.2", ">>>", &["all\nHello.>>>now\n{}"]);
    assert_eq!((&turn.text[..], &turn.calls[0].name[..]), ("Hello.", "now"));
    let turn = parse(
        "command-r",
        "",
        &["<|START_RESPONSE|>Hello.<|END_RESPONSE|>"],
    );
    assert_eq!(turn.text, "Hello.");
}

#[test]
fn formats_are_found_by_their_templates() {
    for (template, name) in [
        ("<tool_call>\n{\"name\"", "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=p>", "qwen3-coder"),
        ("<tool_call>{function-name}\n<arg_key>", "glm"),
        ("'<|channel|>analysis<|message|>'", "harmony"),
        ("<|tool_call>call:", "gemma4"),
        ("[TOOL_CALLS] [ARGS]", "mistral-v11"),
        ("[TOOL_CALLS][", "mistral"),
        ("<｜tool▁call▁begin｜><｜tool▁sep｜>```json", "deepseek"),
        ("<｜tool▁call▁begin｜><｜tool▁sep｜>", "deepseek-v3.1"),
        ("<|start_header_id|> \"parameters\": dictionary", "llama3"),
        ("<|tool_call|> <|/tool_call|>", "phi4"),
        ("respond only with <|tool_call|>", "granite"),
        ("<|im_start|>{{ role }}", "generic"),
    ] {
        assert_eq!(ToolFormat::of(template).name(), name, "{template}");
    }
    let Some(folder) = super::common::conformance() else {
        return;
    };
    for (file, name) in [
        ("Qwen-Qwen2.5-7B-Instruct", "hermes"),
        ("Qwen-Qwen3-0.6B", "hermes"),
        ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "hermes"),
        ("meta-llama-Llama-3.1-8B-Instruct", "llama3"),
        ("meta-llama-Llama-3.2-3B-Instruct", "llama3"),
        ("mistralai-Mistral-Nemo-Instruct-2407", "mistral"),
        ("ibm-granite-granite-3.3-2B-Instruct", "granite"),
        ("llama-cpp-deepseek-r1", "deepseek"),
        ("microsoft-Phi-3.5-mini-instruct", "generic"),
    ] {
        let template =
            std::fs::read_to_string(folder.join("chat_templates").join(format!("{file}.jinja")))
                .unwrap();
        assert_eq!(ToolFormat::of(&template).name(), name, "{file}");
    }
}

/// What a name may not hold is looked for before all of a call is there.
#[test]
fn brackets_before_a_call() {
    let text =
        "[TOOL_CALLS]>{]get_weather[ARGS]{\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}";
    let each: Vec<&str> = text.split_inclusive(|_| true).collect();
    assert_eq!(
        parse("mistral-v11", "", &[text]),
        parse("mistral-v11", "", &each)
    );
    assert_eq!(parse("mistral-v11", "", &[text]).text, text);
}

const MARKERS: &[&str] = &[
    "<think>",
    "</think>",
    "<|end|>",
    "</tool_call>",
    ">>>",
    "{\"name\"",
    "\"",
    "}",
    "é",
    "\n",
    " ",
    "all\n",
];

/// The last border between characters up to `at`.
fn border(text: &str, at: usize) -> usize {
    (0..=at.min(text.len()))
        .rev()
        .find(|&i| text.is_char_boundary(i))
        .unwrap_or(0)
}

/// Texts made of what formats are made of, and of anything.
fn texts() -> impl Strategy<Value = (usize, String)> {
    (0..CALLS.len()).prop_flat_map(|i| {
        let (_, open, rest) = CALLS[i];
        let piece = prop_oneof![
            3 => Just(open.to_owned()),
            3 => Just(rest.to_owned()),
            3 => (0..=rest.len()).prop_map(move |at| rest[..border(rest, at)].to_owned()),
            4 => proptest::sample::select(MARKERS).prop_map(str::to_owned),
            2 => "[a-z<>|{}\\[\\] ]{0,6}",
        ];
        (
            Just(i),
            proptest::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat()),
        )
    })
}

proptest! {
    #![proptest_config(super::common::cases(4000))]

    /// However a text is cut, the turn is the same.
    #[test]
    fn any_cut_gives_the_same_turn(
        (i, text) in texts(),
        cuts in proptest::collection::vec(0usize..400, 0..6),
        (with_tools, verbatim) in any::<(bool, bool)>(),
    ) {
        let (name, tools) = (CALLS[i].0, if with_tools { tools() } else { Vec::new() });
        let parse = |pieces: &[&str]| {
            let parser = TurnParser::new(format(name), &tools, "");
            turn_of(if verbatim { parser.verbatim() } else { parser }, pieces)
        };
        let whole = parse(&[&text]);
        prop_assert!(whole.calls.is_empty() || with_tools && !verbatim);
        let each: Vec<&str> = text.split_inclusive(|_| true).collect();
        prop_assert_eq!(&whole, &parse(&each), "{}: {:?}", name, &text);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|at| border(&text, at)).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
        prop_assert_eq!(&whole, &parse(&pieces), "{}: {:?}", name, &text);
    }

    /// No letter is lost: what is not in a call is in the text, the reasoning or what is unfinished.
    #[test]
    fn no_text_is_lost((i, text) in texts(), word in "[A-Z]{5}", at in 0usize..400) {
        let name = CALLS[i].0;
        let at = border(&text, at);
        let text = format!("{}{word}{}", &text[..at], &text[at..]);
        let turn = parse(name, "", &[&text]);
        let calls = format!("{:?}", turn.calls);
        let found = [&turn.text, &turn.reasoning, &calls, turn.unfinished.as_ref().unwrap_or(&String::new())]
            .iter().any(|part| part.contains(&word));
        // Inside a marker or between the parts of a call, the word is part of a call's syntax.
        prop_assert!(found || !turn.calls.is_empty(), "{}: {:?} gave {:?}", name, text, turn);
    }
}

#[cfg(feature = "grammar")]
mod grammar {
    use super::*;
    use ruvllm::chat::tools::{AfterReasoning, ToolChoice, ToolMask};
    use ruvllm::gguf::Gguf;
    use ruvllm::grammar::{Grammar, Syntax, TokenTrie};
    use ruvllm::sample::{Sampler, TokenMask};
    use ruvllm::tokenizer::Tokenizer;

    fn setup() -> (Tokenizer, TokenTrie) {
        let file = Gguf::open("models/ruvllm-rust-6m-q8_0.gguf").unwrap();
        let tokenizer = Tokenizer::from_metadata(file.metadata()).unwrap();
        let trie = TokenTrie::new(&tokenizer).unwrap();
        (tokenizer, trie)
    }

    fn mask(trie: &TokenTrie, name: &str, choice: &ToolChoice, prompt: &str) -> ToolMask {
        ToolMask::new(trie, format(name), &tools(), choice, prompt)
            .unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// The number of bytes of `text`, token by token, that the mask allows.
    fn allowed(mask: &mut dyn TokenMask, tokenizer: &Tokenizer, text: &str) -> usize {
        let mut len = 0;
        for token in tokenizer.encode(text, false, false) {
            let words = mask.mask().unwrap().to_vec();
            let in_mask = words[token as usize / 32] >> (token % 32) & 1 == 1;
            assert_eq!(
                in_mask,
                mask.allows(token).unwrap(),
                "{text}: token {token} behind {}",
                &text[..len]
            );
            if mask.accept(token).is_err() {
                return len;
            }
            len += tokenizer.token_bytes(token).unwrap().len();
        }
        len
    }

    #[test]
    fn grammars_allow_what_formats_read() {
        let (tokenizer, trie) = setup();
        let end = tokenizer.eog().next().unwrap();
        for (name, open, rest) in CALLS {
            let call = format!("{open}{rest}");
            let before = if open.is_empty() { "" } else { "I see. " };
            let text = format!("{before}{call}");
            let mut auto = mask(&trie, name, &ToolChoice::Auto, "");
            assert_eq!(
                allowed(&mut auto, &tokenizer, &text),
                text.len(),
                "{name}: {text}"
            );
            assert!(auto.allows(end).unwrap(), "{name}: the end behind a call");
            // A wrong name, and a wrong argument.
            for wrong in [
                text.replace("get_weather", "get_money"),
                text.replace('3', "x"),
            ] {
                let mut auto = mask(&trie, name, &ToolChoice::Auto, "");
                let n = allowed(&mut auto, &tokenizer, &wrong);
                assert!(n < wrong.len() && n >= before.len(), "{name}: {wrong}");
            }
            // Required: nothing before the call, no end before its end.
            let mut required = mask(&trie, name, &ToolChoice::Required, "");
            assert!(!required.allows(end).unwrap(), "{name}");
            assert_eq!(
                allowed(&mut required, &tokenizer, &call),
                call.len(),
                "{name}: {call}"
            );
            assert!(required.allows(end).unwrap(), "{name}");
            let mut required = mask(&trie, name, &ToolChoice::Required, "");
            assert!(
                allowed(&mut required, &tokenizer, "No, never.") < 5,
                "{name}"
            );
            // Another tool is named.
            let mut named = mask(&trie, name, &ToolChoice::Named("now".into()), "");
            assert!(
                allowed(&mut named, &tokenizer, &call) < call.len(),
                "{name}"
            );
            // None at all.
            let mut none = mask(&trie, name, &ToolChoice::None, "");
            assert!(allowed(&mut none, &tokenizer, &text) < text.len(), "{name}");
            // Back and forth.
            let mut auto = mask(&trie, name, &ToolChoice::Auto, "");
            let tokens = tokenizer.encode(&text, false, false);
            for i in 0..tokens.len() {
                auto.accept(tokens[i]).unwrap();
                let n = (i * 7 % 5).min(i + 1);
                auto.rollback(n).unwrap();
                tokens[i + 1 - n..=i]
                    .iter()
                    .for_each(|&token| auto.accept(token).unwrap());
            }
            assert!(auto.rollback(tokens.len() + 1).is_err());
        }
    }

    #[test]
    fn reasoning_comes_first() {
        let (tokenizer, trie) = setup();
        let mut required = mask(&trie, "hermes", &ToolChoice::Required, "<think>\n");
        let call = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
        let text = format!("Hm, <tool_call> is what I need.</think>\n\n{call} Done.");
        assert!(!required.allows(tokenizer.eog().next().unwrap()).unwrap());
        assert_eq!(allowed(&mut required, &tokenizer, &text), text.len());
        let mut required = mask(&trie, "hermes", &ToolChoice::Required, "<think>\n");
        assert!(allowed(&mut required, &tokenizer, "Hm.</think>No.") < 12);
        // In free text, a call in reasoning is none.
        let mut auto = mask(&trie, "hermes", &ToolChoice::Auto, "");
        let text = format!("<think>A <tool_call> then?</think>{call}");
        assert_eq!(allowed(&mut auto, &tokenizer, &text), text.len());
    }

    #[test]
    fn a_grammar_holds_after_reasoning() {
        let (tokenizer, trie) = setup();
        let end = tokenizer.eog().next().unwrap();
        let grammar = Grammar::new(&trie, Syntax::Lark, "start: \"yes\" | \"no\"").unwrap();
        let mask = |prompt: &str, most: usize| {
            let inner = Box::new(grammar.matcher());
            AfterReasoning::wrap(inner, &trie, format("hermes"), prompt, most)
        };
        // The prompt has begun none.
        let mut at_once = mask("Hi", 100);
        assert_eq!(allowed(&mut *at_once, &tokenizer, "Hm."), 0);
        assert_eq!(allowed(&mut *at_once, &tokenizer, "yes"), 3);
        for answer in [
            "Hm. yes? no?</think>yes",
            "</think>\n\nno",
            "a < b</think>\nyes",
        ] {
            let mut after = mask("Hi<think>\n", 100);
            assert!(!after.allows(end).unwrap());
            assert_eq!(
                allowed(&mut *after, &tokenizer, answer),
                answer.len(),
                "{answer}"
            );
            assert!(after.allows(end).unwrap(), "{answer}");
            assert_eq!(allowed(&mut *after, &tokenizer, "no"), 0, "{answer}");
            // Back and forth.
            after.reset();
            let tokens = tokenizer.encode(answer, false, false);
            for i in 0..tokens.len() {
                after.accept(tokens[i]).unwrap();
                let n = (i * 7 % 5).min(i + 1);
                after.rollback(n).unwrap();
                let again = &tokens[i + 1 - n..=i];
                again.iter().for_each(|&token| after.accept(token).unwrap());
            }
            assert!(after.rollback(tokens.len() + 1).is_err());
        }
        let wrong = "Hm.</think>maybe";
        let n = allowed(&mut *mask("Hi<think>", 100), &tokenizer, wrong);
        assert!((3..=wrong.len() - 4).contains(&n), "{n}");
        // It ends in time, by force.
        let mut short = mask("Hi<think>", 4);
        for token in tokenizer
            .encode("on and on and on and on", false, false)
            .into_iter()
            .take(4)
        {
            short.accept(token).unwrap();
        }
        let encode = |bytes: &[u8]| tokenizer.encode(&String::from_utf8_lossy(bytes), false, false);
        let forced = short.forced(&encode);
        let text: Vec<u8> = forced
            .iter()
            .flat_map(|&id| tokenizer.token_bytes(id).unwrap())
            .collect();
        assert_eq!(text, b"</think>");
        for token in forced {
            let words = short.mask().unwrap();
            assert_eq!(words.iter().map(|word| word.count_ones()).sum::<u32>(), 1);
            short.accept(token).unwrap();
        }
        assert_eq!(allowed(&mut *short, &tokenizer, "no"), 2);
    }

    /// Random logits: whatever a sampler chooses, a call that has begun and ended is valid.
    #[test]
    fn sampled_calls_are_valid() {
        let (tokenizer, trie) = setup();
        for (name, ..) in CALLS {
            let mut sampler = Sampler::builder().seed(7).build().unwrap();
            sampler.set_mask(Some(Box::new(mask(&trie, name, &ToolChoice::Required, ""))));
            let mut parser = TurnParser::new(format(name), &tools(), "");
            let mut text = Vec::new();
            for step in 0..400u32 {
                let logits: Vec<f32> = (0..trie.n_vocab() as u32)
                    .map(|i| {
                        let noise = ((i ^ step.rotate_left(9)).wrapping_mul(0x9e37_79b1) >> 8)
                            as f32
                            / (1 << 24) as f32;
                        // Ends are likely, so that texts are short.
                        let bytes = tokenizer.token_bytes(i).unwrap();
                        let ends =
                            bytes.iter().any(|b| b"\"}<>".contains(b)) || tokenizer.is_eog(i);
                        noise * 4.0 + if ends { 6.0 } else { 0.0 }
                    })
                    .collect();
                let token = sampler.sample(&logits, &[]).unwrap();
                if tokenizer.is_eog(token) {
                    break;
                }
                text.extend_from_slice(&tokenizer.token_bytes(token).unwrap());
            }
            let text = String::from_utf8_lossy(&text);
            parser.push(&text);
            let turn = parser.finish();
            for call in &turn.calls {
                let valid = match &call.name[..] {
                    "now" => true,
                    "get_weather" => {
                        let unit = call.arguments.get("unit");
                        call.arguments.get("city").is_some_and(Value::is_string)
                            && call
                                .arguments
                                .get("days")
                                .is_none_or(|d| (1..=14).contains(&d.as_i64().unwrap_or(0)))
                            && unit.is_none_or(|u| u == "celsius" || u == "fahrenheit")
                    }
                    _ => false,
                };
                assert!(valid, "{name}: {call:?} of {text:?}");
            }
            assert!(
                !turn.calls.is_empty() || turn.unfinished.is_some(),
                "{name}: {text:?} gave {turn:?}"
            );
        }
    }
}
