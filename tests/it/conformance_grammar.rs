//! Grammars against public collections of schemas, which are not part of the repository. Each test
//! names the variable with its folder, and prints what it counted:
//!
//! `RUVLLM_SCHEMA_SUITE`: `tests/draft2020-12` (or another draft) of
//! json-schema-org/JSON-Schema-Test-Suite. `RUVLLM_MASKBENCH`: `maskbench/data` of
//! guidance-ai/jsonschemabench; `RUVLLM_VOCAB` is a GGUF file with the vocabulary, `RUVLLM_EVERY`
//! takes one in so many files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ruvllm::Tokenizer;
use ruvllm::gguf::Gguf;
use ruvllm::grammar::GrammarError;
use ruvllm::grammar::{Grammar, TokenTrie};
use ruvllm::sample::TokenMask;
use serde_json::Value;

use super::common::read_json;

fn folder(variable: &str) -> Option<PathBuf> {
    let folder = std::env::var_os(variable).map(PathBuf::from);
    if folder.is_none() {
        eprintln!("SKIPPED: {variable} is not set");
    }
    folder
}

fn json_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path());
    let mut files: Vec<PathBuf> = entries
        .filter(|p| p.extension().is_some_and(|e| e == "json"))
        .collect();
    files.sort();
    files
}

fn tokenizer() -> Tokenizer {
    let path = std::env::var("RUVLLM_VOCAB").unwrap_or("models/ruvllm-rust-6m-q8_0.gguf".into());
    Tokenizer::from_metadata(Gguf::open(path).unwrap().metadata()).unwrap()
}

/// What a schema is refused for, in a word.
fn reason(error: &GrammarError) -> String {
    match error {
        GrammarError::Keyword {
            keyword, message, ..
        } if keyword == "schema" => message.clone(),
        GrammarError::Keyword { keyword, .. } => keyword.clone(),
        GrammarError::Invalid { message, .. } => message
            .rsplit([':', '('])
            .next()
            .unwrap_or_default()
            .trim()
            .to_owned(),
        other => other.to_string(),
    }
}

/// Whether the grammar matches `text` cut into tokens of single bytes' texts as the tokenizer has
/// it.
fn matches(grammar: &Grammar, tokenizer: &Tokenizer, text: &str) -> bool {
    let mut matcher = grammar.matcher();
    for token in tokenizer.encode(text, false, false) {
        if matcher.accept(token).is_err() {
            return false;
        }
    }
    matcher.is_accepting().unwrap()
}

/// The names of properties in a schema, in order.
fn names<'a>(schema: &'a Value, out: &mut Vec<&'a str>) {
    match schema {
        Value::Object(map) => {
            for (key, value) in map {
                match (&key[..], value) {
                    ("properties", Value::Object(members)) => {
                        out.extend(members.keys().map(String::as_str))
                    }
                    ("required", Value::Array(items)) => {
                        out.extend(items.iter().filter_map(Value::as_str))
                    }
                    ("const", Value::Object(members)) => {
                        out.extend(members.keys().map(String::as_str))
                    }
                    _ => {}
                }
                names(value, out);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| names(item, out)),
        _ => {}
    }
}

/// `value` with properties in the order of `names`, and whole numbers written as such: the same
/// value to JSON Schema.
fn canonical(value: &Value, names: &[&str]) -> Value {
    match value {
        Value::Object(map) => {
            let mut members: Vec<(&String, &Value)> = map.iter().collect();
            members.sort_by_key(|(name, _)| {
                names.iter().position(|n| n == name).unwrap_or(usize::MAX)
            });
            Value::Object(
                members
                    .into_iter()
                    .map(|(k, v)| (k.clone(), canonical(v, names)))
                    .collect(),
            )
        }
        Value::Array(items) => items.iter().map(|item| canonical(item, names)).collect(),
        Value::Number(n) => match n.as_f64() {
            Some(v) if n.is_f64() && v.fract() == 0.0 && v.abs() <= 9_007_199_254_740_992.0 => {
                (v as i64).into()
            }
            _ => value.clone(),
        },
        _ => value.clone(),
    }
}

/// Every test of a draft: no invalid value is matched, no valid one refused in all its spellings.
#[test]
#[ignore = "needs the JSON-Schema-Test-Suite"]
fn json_schema_test_suite() {
    let Some(folder) = folder("RUVLLM_SCHEMA_SUITE") else {
        return;
    };
    let tokenizer = tokenizer();
    let trie = TokenTrie::new(&tokenizer).unwrap();
    let draft = folder.file_name().unwrap().to_str().unwrap().to_owned();
    let (mut n_passed, mut n_refused, mut wrong) = (0, 0, Vec::new());
    let mut refusals: BTreeMap<String, BTreeMap<String, usize>> = BTreeMap::new();
    for path in json_files(&folder) {
        let keyword = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let (mut passed, mut refused) = (0, 0);
        for group in read_json(&path).as_array().unwrap() {
            let mut schema = group["schema"].clone();
            // What the folder says is said in the schema for us.
            if let Some(map) = schema
                .as_object_mut()
                .filter(|map| !map.contains_key("$schema"))
            {
                let uri = match &draft[..] {
                    "draft2020-12" | "draft2019-09" => {
                        format!(
                            "https://json-schema.org/{}/schema",
                            draft.replacen("draft", "draft/", 1)
                        )
                    }
                    old => format!(
                        "http://json-schema.org/{}/schema#",
                        old.replacen("draft", "draft-0", 1)
                    ),
                };
                map.insert("$schema".into(), uri.into());
            }
            let tests = group["tests"].as_array().unwrap();
            let grammar = match Grammar::json_schema(&trie, &schema.to_string()) {
                Ok(grammar) => grammar,
                // A schema that nothing satisfies has no grammar.
                Err(GrammarError::Keyword { message, .. })
                    if message.contains("satisfied by no value")
                        && tests.iter().all(|t| t["valid"] == false) =>
                {
                    passed += tests.len();
                    continue;
                }
                Err(e) => {
                    refused += tests.len();
                    *refusals
                        .entry(keyword.clone())
                        .or_default()
                        .entry(reason(&e))
                        .or_default() += tests.len();
                    continue;
                }
            };
            let mut order = Vec::new();
            names(&schema, &mut order);
            for test in tests {
                let valid = test["valid"] == true;
                let texts = [
                    test["data"].to_string(),
                    canonical(&test["data"], &order).to_string(),
                ];
                let matched = texts.map(|text| matches(&grammar, &tokenizer, &text));
                if matched.contains(&true) == valid {
                    passed += 1;
                } else {
                    wrong.push(format!(
                        "{keyword}: {} / {}: {schema} and {}",
                        group["description"], test["description"], test["data"]
                    ));
                }
            }
        }
        eprintln!(
            "{keyword:24} {passed:4} passed, {refused:4} refused {:?}",
            refusals.get(&keyword).unwrap_or(&BTreeMap::new())
        );
        (n_passed, n_refused) = (n_passed + passed, n_refused + refused);
    }
    eprintln!(
        "{draft}: {n_passed} passed, {n_refused} refused, {} wrong",
        wrong.len()
    );
    for line in &wrong {
        eprintln!("WRONG {line}");
    }
    // `format` is an annotation to the suite and a restriction to us.
    assert!(
        wrong.iter().all(|line| line.starts_with("format:")),
        "{} wrong",
        wrong.len()
    );
}

fn percentile(sorted: &[Duration], p: f64) -> f64 {
    let at = ((sorted.len() as f64 * p) as usize).min(sorted.len().saturating_sub(1));
    sorted.get(at).map_or(0.0, |d| d.as_secs_f64() * 1e6)
}

/// All schemas of MaskBench: the time of every mask, and what is matched.
#[test]
#[ignore = "needs the schemas of MaskBench and a large vocabulary; some minutes"]
fn maskbench() {
    let Some(folder) = folder("RUVLLM_MASKBENCH") else {
        return;
    };
    let tokenizer = tokenizer();
    let start = Instant::now();
    let trie = TokenTrie::new(&tokenizer).unwrap();
    eprintln!("{} tokens, tree in {:?}", trie.n_vocab(), start.elapsed());
    let (mut first, mut compile, mut masks) = (Vec::new(), Vec::new(), Vec::new());
    let (mut n_schemas, mut n_passed) = (0, 0);
    let (mut rejected, mut accepted, mut failed) = (Vec::new(), Vec::new(), Vec::new());
    let mut refusals: BTreeMap<String, usize> = BTreeMap::new();
    for path in json_files(&folder).iter().step_by(every()) {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let case = read_json(path);
        n_schemas += 1;
        let start = Instant::now();
        let grammar = match Grammar::json_schema(&trie, &case["schema"].to_string()) {
            Ok(grammar) => grammar,
            Err(e) => {
                *refusals.entry(reason(&e)).or_default() += 1;
                continue;
            }
        };
        compile.push(start.elapsed());
        if let Err(e) = grammar.matcher().mask() {
            failed.push(format!("{name}: {e}"));
            continue;
        }
        first.push(start.elapsed());
        let before = rejected.len() + accepted.len() + failed.len();
        for (i, test) in case["tests"]
            .as_array()
            .unwrap_or(&Vec::new())
            .iter()
            .enumerate()
        {
            let text = spaced(&test["data"]);
            let mut matcher = grammar.matcher();
            let mut ok = true;
            for token in tokenizer.encode(&text, false, false) {
                let start = Instant::now();
                if let Err(e) = matcher.mask() {
                    failed.push(format!("{name} test {i}: {e}"));
                    ok = false;
                    break;
                }
                masks.push(start.elapsed());
                if matcher.accept(token).is_err() {
                    ok = false;
                    break;
                }
            }
            ok = ok && matcher.is_accepting().unwrap_or(false);
            match (ok, test["valid"] == true) {
                (false, true) => rejected.push(format!("{name} test {i}")),
                (true, false) => accepted.push(format!("{name} test {i}")),
                _ => {}
            }
        }
        n_passed += usize::from(rejected.len() + accepted.len() + failed.len() == before);
    }
    for times in [&mut first, &mut compile, &mut masks] {
        times.sort_unstable();
    }
    let mean = |times: &[Duration]| {
        times.iter().sum::<Duration>().as_secs_f64() * 1e6 / times.len().max(1) as f64
    };
    eprintln!(
        "{n_schemas} schemas: {n_passed} passed, {} refused",
        refusals.values().sum::<usize>()
    );
    eprintln!("valid rejected: {} {rejected:#?}", rejected.len());
    eprintln!("invalid accepted: {} {accepted:#?}", accepted.len());
    eprintln!("failed: {} {failed:#?}", failed.len());
    let mut refusals: Vec<_> = refusals.into_iter().collect();
    refusals.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
    for (why, n) in refusals {
        eprintln!("refused {n:5}: {why}");
    }
    for (name, times) in [
        ("compile", &compile),
        ("first mask", &first),
        ("mask", &masks),
    ] {
        eprintln!(
            "{name:10} {:8} times, us: mean {:.1}, p50 {:.1}, p99 {:.1}, p99.9 {:.1}, max {:.1}",
            times.len(),
            mean(times),
            percentile(times, 0.5),
            percentile(times, 0.99),
            percentile(times, 0.999),
            percentile(times, 1.0),
        );
    }
    assert!(
        accepted.is_empty(),
        "{} invalid values accepted",
        accepted.len()
    );
}

/// `RUVLLM_EVERY`.
fn every() -> usize {
    std::env::var("RUVLLM_EVERY").map_or(1, |n| n.parse().unwrap())
}

/// The passes of a text that `mask` follows: what is chosen, each with what is `forced` behind it,
/// if that is asked for. Nothing where its properties come in another order.
#[cfg(feature = "chat")]
fn passes(
    mask: &mut dyn TokenMask,
    tokenizer: &Tokenizer,
    text: &str,
    forced: bool,
) -> Option<Vec<Vec<u32>>> {
    let mut rest = text.as_bytes();
    let mut passes: Vec<Vec<u32>> = Vec::new();
    loop {
        let run = if forced {
            mask.forced(&|text| tokenizer.encode_inside(text))
        } else {
            Vec::new()
        };
        let run: Vec<u32> = run
            .into_iter()
            .filter(|&token| !tokenizer.is_eog(token))
            .collect();
        let chosen = passes.is_empty() && !run.is_empty();
        for &token in &run {
            let bytes = tokenizer.token_bytes(token).unwrap();
            rest = rest.strip_prefix(&bytes[..])?;
            mask.accept(token).unwrap();
        }
        match passes.last_mut().filter(|_| !chosen) {
            Some(pass) => pass.extend(run),
            None if !run.is_empty() => passes.push(run),
            None => {}
        }
        let Some(&token) = tokenizer.encode_bytes(rest, false, true).first() else {
            return Some(passes);
        };
        mask.mask().unwrap();
        mask.accept(token).ok()?;
        rest = &rest[tokenizer.token_bytes(token).unwrap().len()..];
        passes.push(vec![token]);
    }
}

/// The calls of BFCL, replayed in Hermes' format on a model with the shape of a 1B one, token by
/// token and with forced tokens in the pass before them.
#[cfg(feature = "chat")]
#[test]
#[ignore = "needs the schemas of MaskBench and a large vocabulary; a minute"]
fn forced_tokens_of_tool_calls() {
    use ruvllm::SessionOptions;
    use ruvllm::chat::tools::{Tool, ToolChoice, ToolFormat, ToolMask};
    use ruvllm::compute::TokenKind;
    use ruvllm::engine::{Outputs, Slot};
    use ruvllm::quant::FileType;
    use ruvllm::{CancelToken, Model};
    use ruvllm_benches::{Shape, synthetic};

    let Some(folder) = folder("RUVLLM_MASKBENCH") else {
        return;
    };
    let tokenizer = tokenizer();
    let trie = TokenTrie::new(&tokenizer).unwrap();
    let format = ToolFormat::by_name("hermes").unwrap();
    let mut calls = Vec::new();
    let (mut n_refused, mut mask_time) = (0, Duration::ZERO);
    for path in json_files(&folder) {
        let name = path.file_stem().unwrap().to_str().unwrap();
        if !name.starts_with("BFCL_simple") && !name.starts_with("BFCL_multiple") {
            continue;
        }
        let case = read_json(&path);
        let (schema, data) = (&case["schema"], &case["tests"][0]["data"]);
        let (Some(members), Some(call)) = (schema["properties"].as_object(), data.as_object())
        else {
            continue;
        };
        let tools: Vec<Tool> = members
            .iter()
            .map(|(name, schema)| Tool::new(name, schema.clone()))
            .collect();
        let [(name, arguments)] = &call.iter().collect::<Vec<_>>()[..] else {
            continue;
        };
        let mut order = Vec::new();
        names(&schema["properties"][name], &mut order);
        let (name, arguments) = (
            Value::from(&name[..]),
            spaced(&canonical(arguments, &order)),
        );
        let text =
            format!("<tool_call>\n{{\"name\": {name}, \"arguments\": {arguments}}}\n</tool_call>");
        let Ok(mut mask) = ToolMask::new(&trie, format, &tools, &ToolChoice::Required, "") else {
            n_refused += 1;
            continue;
        };
        let Some(single) = passes(&mut mask, &tokenizer, &text, false) else {
            n_refused += 1;
            continue;
        };
        mask.reset();
        let start = Instant::now();
        let several = passes(&mut mask, &tokenizer, &text, true).unwrap();
        mask_time += start.elapsed();
        calls.push((single, several));
    }
    let count = |passes: &[Vec<u32>]| passes.iter().map(Vec::len).sum::<usize>();
    let n_tokens: usize = calls.iter().map(|(_, several)| count(several)).sum();
    let n_passes: usize = calls.iter().map(|(_, several)| several.len()).sum();
    let n_single: usize = calls.iter().map(|(single, _)| single.len()).sum();
    eprintln!(
        "{} calls, {n_refused} refused: {n_single} tokens one by one; {n_tokens} tokens, {:.1} % of them forced, in {n_passes} passes; {:.1} us for each pass's mask and text",
        calls.len(),
        100.0 * (n_tokens - n_passes) as f64 / n_tokens as f64,
        mask_time.as_secs_f64() * 1e6 / n_passes as f64
    );

    let gguf = synthetic(
        &Shape::from_name("llama-1b").unwrap(),
        FileType::from_name("Q4_K_M").unwrap(),
    )
    .unwrap();
    let model = Model::from_gguf(gguf).unwrap();
    let engine = model.engine().unwrap();
    let n_vocab = model.hparams().n_vocab as u32;
    let mut prompt = engine.sequence(&SessionOptions::default()).unwrap();
    let (mut outputs, cancel) = (Outputs::default(), CancelToken::default());
    let mut step = |seq: &mut _, tokens: &[u32], kind| {
        let tokens: Vec<u32> = tokens.iter().map(|token| token % n_vocab).collect();
        engine
            .step(&mut [Slot::new(seq, &tokens, kind)], &mut outputs, &cancel)
            .unwrap();
    };
    step(
        &mut prompt,
        &(0..256).collect::<Vec<u32>>(),
        TokenKind::Prompt,
    );
    let (mut alone, mut together) = (Duration::ZERO, Duration::ZERO);
    for (single, several) in calls.iter().step_by(every().max(calls.len() / 16)) {
        for (passes, time) in [(single, &mut alone), (several, &mut together)] {
            let mut seq = prompt.fork().unwrap();
            let start = Instant::now();
            passes
                .iter()
                .for_each(|pass| step(&mut seq, pass, TokenKind::Generated));
            *time += start.elapsed();
        }
    }
    eprintln!(
        "{alone:?} one by one, {together:?} with forced tokens: {:.2} x",
        alone.as_secs_f64() / together.as_secs_f64()
    );
}

/// JSON as Python writes it: a space behind commas and colons.
fn spaced(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let members = map
                .iter()
                .map(|(k, v)| format!("{}: {}", Value::from(k.clone()), spaced(v)));
            format!("{{{}}}", members.collect::<Vec<_>>().join(", "))
        }
        Value::Array(items) => format!(
            "[{}]",
            items.iter().map(spaced).collect::<Vec<_>>().join(", ")
        ),
        other => other.to_string(),
    }
}
