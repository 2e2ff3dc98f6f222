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

pub(crate) fn format(name: &str) -> ToolFormat {
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

/// What a parser that tells calls as they are written says of pieces: text, names, arguments, and
/// how many parts the arguments came in. The text is cut off behind them if `is_cut`.
fn written(name: &str, pieces: &[&str], is_cut: bool) -> (String, Vec<String>, Vec<String>, usize) {
    let mut parser = TurnParser::new(format(name), &tools(), "").eager();
    let mut parts: Vec<TurnPart> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    parts.extend(if is_cut {
        parser.cut_parts()
    } else {
        parser.finish_parts()
    });
    let (mut text, mut names, mut arguments, mut n_parts) =
        (String::new(), Vec::new(), Vec::<String>::new(), 0);
    for part in parts {
        match part {
            TurnPart::Text(more) => text += &more,
            TurnPart::CallBegins { name, .. } => {
                names.push(name);
                arguments.push(String::new());
            }
            TurnPart::Arguments(more) => {
                assert!(!more.is_empty(), "{name}");
                *arguments.last_mut().expect("a call has begun") += &more;
                n_parts += 1;
            }
            _ => {}
        }
    }
    (text, names, arguments, n_parts)
}

/// Calls are told as they are written: a name first, then arguments that together are JSON, however
/// the text is cut into pieces; and wherever it ends, what was told is the beginning of that.
#[test]
fn calls_as_they_are_written() {
    for (name, open, rest) in CALLS {
        let call = format!("{open}{rest}");
        let two = format!("{call}\n{call}");
        let each: Vec<&str> = two.split_inclusive(|_| true).collect();
        let (text, names, whole, n_parts) = written(name, &each, false);
        assert_eq!(
            (&text[..], &names[..]),
            ("", &["get_weather"; 2].map(String::from)[..]),
            "{name}"
        );
        for arguments in &whole {
            assert_eq!(
                serde_json::from_str::<Value>(arguments).ok(),
                Some(self::arguments()),
                "{name}: {arguments}"
            );
        }
        // Values in a notation of their own may be told at the end of a call.
        let in_json = rest.contains("{\"city\": \"Oslo\"");
        let in_tags = ["glm", "qwen3-coder", "minimax"].contains(name);
        assert!(
            n_parts > 2 || !(in_json || in_tags),
            "{name}: {n_parts} parts"
        );
        let at_once = written(name, &[&two], false);
        assert_eq!(
            (&at_once.0, &at_once.1, &at_once.2),
            (&text, &names, &whole),
            "{name}"
        );
        for (at, _) in two.char_indices() {
            let (text, names, parts, _) = written(name, &[&two[..at]], true);
            assert_eq!(text, "", "{name}: {}", &two[..at]);
            assert_eq!(names, &["get_weather"; 2][..names.len()], "{name}");
            for (part, whole) in parts.iter().zip(&whole) {
                assert!(whole.starts_with(part), "{name}: {part} of {whole}");
            }
        }
    }
    // Without tools, and before it is certain, the same letters are text.
    let mut parser = TurnParser::new(format("hermes"), &[], "");
    parser.push("a <tool");
    parser.cut_parts();
    assert_eq!(
        (&parser.turn().text[..], &parser.turn().unfinished),
        ("a <tool", &None)
    );
    assert_eq!(written("hermes", &["a <tool"], false).0, "a <tool");
    assert_eq!(written("hermes", &["a <tool"], true).0, "a ");
}

/// Texts with quotes, line ends and marks in them come through tags unchanged.
#[test]
fn written_texts_in_tags() {
    let city = "a \"quoted\" <b> \\ line\nand </ more\n";
    for (name, before, after) in [
        (
            "glm",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>",
            "</arg_value>\n</tool_call>",
        ),
        (
            "qwen3-coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n",
            "\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "minimax",
            "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">",
            "</parameter>\n</invoke>\n</minimax:tool_call>",
        ),
    ] {
        let text = format!("{before}{city}{after}");
        let each: Vec<&str> = text.split_inclusive(|_| true).collect();
        let (_, _, arguments, n_parts) = written(name, &each, false);
        assert_eq!(
            serde_json::from_str::<Value>(&arguments[0]).unwrap(),
            json!({"city": city}),
            "{name}"
        );
        assert!(n_parts > city.len() / 2, "{name}: {n_parts}");
        let turn = parse(name, "", &[&text]);
        assert_eq!(turn.calls[0].arguments["city"], city, "{name}");
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
        let (text, each, pieces) = (
            written(name, &[&text], false),
            written(name, &each, false),
            written(name, &pieces, false),
        );
        // What is no call may have begun as one.
        if whole.unfinished.is_none() && whole.calls.len() == each.1.len() {
            prop_assert_eq!((&text.0, &text.1, &text.2), (&each.0, &each.1, &each.2), "{}", name);
            prop_assert_eq!((&text.0, &text.1, &text.2), (&pieces.0, &pieces.1, &pieces.2), "{}", name);
        }
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
pub(crate) mod grammar {
    use super::*;
    use ruvllm::Tokenizer;
    use ruvllm::chat::tools::{AfterReasoning, ToolChoice, ToolMask};
    use ruvllm::gguf::Gguf;
    use ruvllm::grammar::{Grammar, Syntax, TokenTrie};
    use ruvllm::sample::TokenMask;
    use ruvllm::{Sampler, SamplerOptions};

    pub(crate) fn setup() -> (Tokenizer, TokenTrie) {
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
    pub(crate) fn allowed(mask: &mut dyn TokenMask, tokenizer: &Tokenizer, text: &str) -> usize {
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
        let text = format!("Hm, <tool_call> is what I need.</think>\n\n{call}\n{call}");
        let end = tokenizer.eog().next().unwrap();
        assert!(!required.allows(end).unwrap());
        assert_eq!(allowed(&mut required, &tokenizer, &text), text.len());
        // Nothing but another call follows.
        assert!(required.allows(end).unwrap());
        assert_eq!(allowed(&mut required, &tokenizer, "Done."), 0);
        let mut required = mask(&trie, "hermes", &ToolChoice::Required, "<think>\n");
        assert!(allowed(&mut required, &tokenizer, "Hm.</think>No.") < 12);
        // In free text, a call in reasoning is none.
        let mut auto = mask(&trie, "hermes", &ToolChoice::Auto, "");
        let text = format!("<think>A <tool_call> then?</think>{call}");
        assert_eq!(allowed(&mut auto, &tokenizer, &text), text.len());
    }

    /// Calls that are all of an answer: in every format, with and without limits on who is called.
    #[test]
    fn nothing_follows_required_calls() {
        let (tokenizer, trie) = setup();
        let end = tokenizer.eog().next().unwrap();
        let allowed_tools = ToolChoice::from_json(
            &json!({"type": "allowed_tools", "allowed_tools": {
            "mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}}),
        ).unwrap();
        for (name, open, rest) in CALLS {
            for choice in [ToolChoice::Required, allowed_tools.clone()] {
                let mut mask = mask(&trie, name, &choice, "");
                let call = format!("{open}{rest}");
                let two = match *name {
                    "llama3" => format!("{call}; {call}"),
                    _ => format!("{call}\n{call}"),
                };
                assert_eq!(allowed(&mut mask, &tokenizer, &two), two.len(), "{name}");
                assert!(mask.allows(end).unwrap(), "{name}");
                assert!(
                    allowed(&mut mask.clone(), &tokenizer, " Done.") < 2,
                    "{name}"
                );
                // A call of another tool, where one is named.
                let other = two.replace("get_weather", "now");
                mask.reset();
                let n = allowed(&mut mask, &tokenizer, &other);
                assert!(n < other.len() || choice == ToolChoice::Required, "{name}");
            }
        }
        for (choice, expected) in [
            (
                json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}),
                Some(1),
            ),
            (
                json!({"type": "allowed_tools", "mode": "auto", "tools": []}),
                Some(0),
            ),
            (
                json!({"type": "allowed_tools", "mode": "any", "tools": []}),
                None,
            ),
            (
                json!({"type": "allowed_tools", "mode": "required", "tools": []}),
                None,
            ),
            (
                json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "no"}]}),
                None,
            ),
            (json!({"type": "function", "name": "now"}), Some(1)),
            (json!("none"), Some(0)),
            (json!("some"), None),
        ] {
            let choice = ToolChoice::from_json(&choice);
            let n = choice.and_then(|choice| Ok(choice.allowed(&tools())?.len()));
            assert_eq!(n.ok(), expected);
        }
    }

    /// A call, or a text that obeys a schema: the mask knows which it is, not the look of the text.
    #[test]
    fn calls_or_a_text_of_some_form() {
        use ruvllm::grammar::Grammar;
        let (tokenizer, trie) = setup();
        let end = tokenizer.eog().next().unwrap();
        let schema = r#"{"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "additionalProperties": false}"#;
        let text = Grammar::json_schema(&trie, schema).unwrap();
        for (name, open, rest) in CALLS {
            let mask = |choice: &ToolChoice, prompt: &str| {
                let text = Box::new(text.matcher());
                ToolMask::with_text(&trie, format(name), &tools(), choice, prompt, text).unwrap()
            };
            let call = format!("{open}{rest}");
            let mut either = mask(&ToolChoice::Auto, "");
            assert!(
                either.is_calls().is_none() && !either.allows(end).unwrap(),
                "{name}"
            );
            assert_eq!(
                allowed(&mut either, &tokenizer, &call),
                call.len(),
                "{name}"
            );
            assert_eq!(
                (either.is_calls(), either.allows(end).unwrap()),
                (Some(true), true),
                "{name}"
            );
            assert_eq!(allowed(&mut either, &tokenizer, "Done."), 0, "{name}");
            // The name of a tool, but no call.
            let object = r#"{"name": "get_weather", "n": 5}"#;
            let mut either = mask(&ToolChoice::Auto, "");
            assert_eq!(
                allowed(&mut either, &tokenizer, object),
                object.len(),
                "{name}"
            );
            assert_eq!(
                (either.is_calls(), either.allows(end).unwrap()),
                (Some(false), true),
                "{name}"
            );
            // Back to where both were possible, and on to the other.
            let n = tokenizer.encode(object, false, false).len();
            either.rollback(n).unwrap();
            assert_eq!(either.is_calls(), None, "{name}");
            assert_eq!(
                allowed(&mut either, &tokenizer, &call),
                call.len(),
                "{name}"
            );
            // Free text is neither; where a call is required, the object is none.
            let mut either = mask(&ToolChoice::Auto, "");
            assert!(
                allowed(&mut either, &tokenizer, "No, never.") == 0,
                "{name}"
            );
            let mut required = mask(&ToolChoice::Required, "");
            assert!(
                allowed(&mut required, &tokenizer, object) < object.len(),
                "{name}"
            );
            // No tools: text alone.
            let mut none = mask(&ToolChoice::None, "");
            assert_eq!(
                allowed(&mut none, &tokenizer, object),
                object.len(),
                "{name}"
            );
            assert_eq!(none.is_calls(), Some(false), "{name}");
        }
        // What the prompt has begun to think comes before either.
        let thought = "<think>\n";
        let text = || Box::new(text.matcher());
        let mut either = ToolMask::with_text(
            &trie,
            format("hermes"),
            &tools(),
            &ToolChoice::Auto,
            thought,
            text(),
        )
        .unwrap();
        let answer = "Hm, {.</think>\n\n{\"n\": 5}";
        assert_eq!(allowed(&mut either, &tokenizer, answer), answer.len());
        assert_eq!(
            (either.is_calls(), either.allows(end).unwrap()),
            (Some(false), true)
        );
    }

    /// Functionary v3.2 begins every message with `>>>`, one for the user with `>>>all`; the prompt
    /// may end with the first of them.
    #[test]
    fn messages_for_the_user_that_begin_as_calls_do() {
        let (tokenizer, trie) = setup();
        let end = tokenizer.eog().next().unwrap();
        let (name, open, rest) = CALLS
            .iter()
            .find(|(name, ..)| *name == "functionary-v3.2")
            .unwrap();
        for (prompt, first) in [("", *open), ("assistant\n\n>>>", "")] {
            let auto = || mask(&trie, name, &ToolChoice::Auto, prompt);
            for text in [
                format!("{first}all\nHello, {{\"."),
                format!("{first}all\nI see.{open}{rest}"),
                format!("{first}{rest}"),
                format!("{first}{rest}{open}all\nIt rains."),
            ] {
                let mut auto = auto();
                assert_eq!(allowed(&mut auto, &tokenizer, &text), text.len(), "{text}");
                assert!(auto.allows(end).unwrap(), "{text}");
            }
            for text in [
                format!("{first}all of it"),
                format!("{first}{}", rest.replace("get_weather", "get_money")),
                format!("{first}all\nI see.{open}{}", rest.replace('3', "x")),
            ] {
                assert!(
                    allowed(&mut auto(), &tokenizer, &text) < text.len(),
                    "{text}"
                );
            }
            // A tool of this name wins.
            let tool = Tool::new(
                "all",
                serde_json::json!({"type": "object", "properties": {}}),
            );
            let mut auto =
                ToolMask::new(&trie, format(name), &[tool], &ToolChoice::Auto, prompt).unwrap();
            let text = format!("{first}all\n{{}}");
            assert_eq!(allowed(&mut auto, &tokenizer, &text), text.len());
            // Where no call may come, all is text.
            let mut none = mask(&trie, name, &ToolChoice::None, prompt);
            assert_eq!(allowed(&mut none, &tokenizer, "all\nHello."), 10);
        }
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
            let mut sampler = Sampler::new(SamplerOptions {
                seed: Some(7),
                ..Default::default()
            })
            .unwrap();
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
