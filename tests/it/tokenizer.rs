//! The tokenizer on vocabularies small enough to follow by hand, and on files that mean no good.

use crate::common::{cases, long, numbers};
use proptest::prelude::*;
use ruvllm::Tokenizer;
use ruvllm::gguf::{Array, Gguf, StringArray, Value, Writer};
use ruvllm::tokenizer::TextStream;
use ruvllm::tokenizer::TokenizerError;
use serde_json::Value as Json;
use std::sync::Arc;

/// Values of `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// A tokenizer file in the making.
#[derive(Clone, Default)]
struct File(Vec<(String, Value)>);

impl File {
    /// Sets a key below `tokenizer.ggml.`.
    fn set(self, key: &str, value: impl Into<Value>) -> File {
        self.set_full(&format!("tokenizer.ggml.{key}"), value)
    }

    fn set_full(mut self, key: &str, value: impl Into<Value>) -> File {
        self = self.without_full(key);
        self.0.push((key.to_owned(), value.into()));
        self
    }

    fn without(self, key: &str) -> File {
        self.without_full(&format!("tokenizer.ggml.{key}"))
    }

    fn without_full(mut self, key: &str) -> File {
        self.0.retain(|(k, _)| k != key);
        self
    }

    fn tokens(self, tokens: &[(Vec<u8>, i32)]) -> File {
        self.set(
            "tokens",
            tokens.iter().map(|(text, _)| text).collect::<StringArray>(),
        )
        .set(
            "token_type",
            tokens.iter().map(|&(_, kind)| kind).collect::<Vec<i32>>(),
        )
    }

    fn open(&self) -> Result<Tokenizer, TokenizerError> {
        let mut writer = Writer::new();
        for (key, value) in &self.0 {
            writer.metadata(key.clone(), value.clone());
        }
        Tokenizer::from_metadata(
            Gguf::from_bytes(writer.to_bytes().unwrap())
                .unwrap()
                .metadata(),
        )
    }
}

/// GPT-2's alphabet.
fn alphabet(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..);
    if printable(byte) {
        byte as char
    } else {
        char::from_u32(0x100 + (0..byte).filter(|&b| !printable(b)).count() as u32).unwrap()
    }
}

/// Tokens 0 to 255 are the bytes, then come `tokens`.
fn bpe_tokens(tokens: &[(&str, i32)]) -> Vec<(Vec<u8>, i32)> {
    let bytes = (0..=255).map(|b| (alphabet(b).to_string().into_bytes(), NORMAL));
    bytes
        .chain(
            tokens
                .iter()
                .map(|&(text, kind)| (text.as_bytes().to_vec(), kind)),
        )
        .collect()
}

fn bpe(pre: &str, tokens: &[(&str, i32)], merges: &[&str]) -> File {
    File::default()
        .set("model", "gpt2")
        .set("pre", pre)
        .tokens(&bpe_tokens(tokens))
        .set("merges", merges.iter().collect::<StringArray>())
        .set("add_bos_token", false)
}

/// Tokens 0 to 2 are `<unk>`, `<s>` and `</s>`, 3 to 258 the bytes, then come `tokens`.
fn spm(tokens: &[(&str, i32, f32)]) -> File {
    let mut all: Vec<(Vec<u8>, i32)> = vec![
        (b"<unk>".to_vec(), UNKNOWN),
        (b"<s>".to_vec(), CONTROL),
        (b"</s>".to_vec(), CONTROL),
    ];
    all.extend((0..=255u8).map(|b| (format!("<0x{b:02X}>").into_bytes(), BYTE)));
    all.extend(
        tokens
            .iter()
            .map(|(text, kind, _)| (text.as_bytes().to_vec(), *kind)),
    );
    let scores = std::iter::repeat_n(0.0, 259)
        .chain(tokens.iter().map(|t| t.2))
        .collect::<Vec<f32>>();
    File::default()
        .set("model", "llama")
        .tokens(&all)
        .set("scores", scores)
}

fn small_spm() -> File {
    spm(&[
        ("▁", NORMAL, -9.0),
        ("a", NORMAL, -10.0),
        ("b", NORMAL, -11.0),
        ("ab", NORMAL, -1.0),
        ("▁a", NORMAL, -2.0),
        ("▁ab", NORMAL, -3.0),
        ("<x>", USER_DEFINED, 0.0),
        ("é", NORMAL, -12.0),
    ])
}

fn byte_id(b: u8) -> u32 {
    3 + u32::from(b)
}

/// A vocabulary of `tests/reference_unigram.py`.
fn unigram(variant: &Json) -> File {
    let floats = |key: &str| {
        variant[key]
            .as_array()
            .unwrap()
            .iter()
            .map(|x| x.as_f64().unwrap() as f32)
    };
    let texts = variant["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|text| text.as_str().unwrap().as_bytes().to_vec());
    let types = variant["types"]
        .as_array()
        .unwrap()
        .iter()
        .map(|kind| kind.as_i64().unwrap() as i32);
    let hex = variant["charsmap"].as_str().unwrap().as_bytes().chunks(2);
    let charsmap = hex.map(|byte| u8::from_str_radix(str::from_utf8(byte).unwrap(), 16).unwrap());
    File::default()
        .set("model", "t5")
        .tokens(&texts.zip(types).collect::<Vec<_>>())
        .set("scores", floats("scores").collect::<Vec<f32>>())
        .set(
            "precompiled_charsmap",
            Value::Array(Array::U8(charsmap.collect())),
        )
        .set(
            "add_space_prefix",
            variant["add_space_prefix"].as_bool().unwrap(),
        )
        .set(
            "remove_extra_whitespaces",
            variant["remove_extra_whitespaces"].as_bool().unwrap(),
        )
}

fn unigrams() -> Vec<Json> {
    serde_json::from_str(include_str!("../data/unigram.json")).unwrap()
}

// Encoding.

#[test]
fn unigram_ids_are_those_of_sentencepiece() {
    for variant in unigrams() {
        let t = unigram(&variant).open().unwrap();
        let cases = variant["cases"].as_array().unwrap();
        assert!(cases.len() > 40);
        for case in cases {
            let (text, ids) = (case[0].as_str().unwrap(), numbers::<u32>(&case[1]));
            assert_eq!(
                t.encode(text, false, false),
                ids,
                "{} {text:?}",
                variant["name"]
            );
        }
        // T5's defaults.
        assert_eq!((t.bos(), t.eos(), t.unknown()), (None, Some(1), Some(2)));
        assert_eq!(t.encode("a", true, false).last(), Some(&1));
    }
}

#[test]
fn unigram_texts_come_back() {
    let t = unigram(&unigrams()[0]).open().unwrap();
    let text = "The river rose by two hands in the night.";
    assert_eq!(
        t.decode_lossy(&t.encode(text, true, false), false).unwrap(),
        text
    );
    // What goes on after a text has no space put in front of it.
    let (begun, more) = (
        t.encode("The river", false, false),
        t.encode_inside(b" rose"),
    );
    assert_eq!(
        [begun, more].concat(),
        t.encode("The river rose", false, false)
    );
}

/// A vocabulary of PLaMo 2: `more` behind control tokens and a token for each byte.
fn plamo2(more: &[(&str, i32, f32)]) -> File {
    let control = ["<unk>", "<|plamo:bos|>", "<|plamo:eos|>"].into_iter();
    let control = control.zip([UNKNOWN, CONTROL, CONTROL]);
    let control = control.map(|(text, kind)| (text.as_bytes().to_vec(), kind));
    let bytes = (0..=255).map(|byte: u8| (format!("<0x{byte:02X}>").into_bytes(), BYTE));
    let others = more
        .iter()
        .map(|&(text, kind, _)| (text.as_bytes().to_vec(), kind));
    let tokens: Vec<_> = control.chain(bytes).chain(others).collect();
    let mut scores = vec![0.0f32; 3 + 256];
    scores.extend(more.iter().map(|token| token.2));
    File::default()
        .set("model", "plamo2")
        .tokens(&tokens)
        .set("scores", scores)
}

/// Ids by the published algorithm, followed by hand in `tests/reference_plamo2.py`.
#[test]
fn plamo2_ids_are_those_of_its_own_code() {
    let reference: Json = serde_json::from_str(include_str!("../data/plamo2.json")).unwrap();
    let tokens = reference["tokens"].as_array().unwrap().iter();
    let tokens: Vec<_> = tokens
        .map(|token| {
            let score = token[1].as_f64().unwrap() as f32;
            (token[0].as_str().unwrap(), NORMAL, score)
        })
        .collect();
    let t = plamo2(&tokens).open().unwrap();
    let cases = reference["cases"].as_array().unwrap();
    assert!(cases.len() > 100);
    for case in cases {
        let (text, ids) = (case[0].as_str().unwrap(), numbers::<u32>(&case[1]));
        let ours = t.encode(text, false, false);
        assert_eq!(ours, ids, "{text:?}");
        let text = text.strip_prefix('\u{FEFF}').unwrap_or(text);
        assert_eq!(t.decode_lossy(&ours, false).unwrap(), text);
    }
}

#[test]
fn plamo2_control_tokens_are_parsed_and_never_found() {
    let t = plamo2(&[
        ("a", NORMAL, -1.0),
        ("ab", NORMAL, f32::NAN),
        ("b", NORMAL, -3000.0),
    ]);
    let t = t.open().unwrap();
    assert_eq!(t.encode("<|plamo:eos|>", true, true), [2]);
    let plain = t.encode("<|plamo:eos|>", false, false);
    assert!(plain.len() > 10 && !plain.contains(&2));
    // Tokens without a score that counts are not used.
    assert_eq!(t.encode("ab", false, false), [259, 3 + u32::from(b'b')]);
    let error = File::default()
        .set("model", "plamo2")
        .tokens(&[(b"a".to_vec(), NORMAL)])
        .open();
    assert!(matches!(
        error,
        Err(TokenizerError::NoByteToken { byte: 0 })
    ));
}

/// Of all ways the one with the largest sum, by hand.
#[test]
fn unigram_sums_decide() {
    let tokens = [
        ("<pad>", CONTROL, 0.0),
        ("</s>", CONTROL, 0.0),
        ("<unk>", UNKNOWN, 0.0),
        ("a", NORMAL, -1.0),
    ];
    let more = [
        ("b", NORMAL, -1.0),
        ("ab", NORMAL, -1.5),
        ("aab", NORMAL, -2.6),
        ("U", USER_DEFINED, -9.0),
    ];
    let all: Vec<_> = tokens.into_iter().chain(more).collect();
    let file = |score: f32| {
        let mut scores: Vec<f32> = all.iter().map(|token| token.2).collect();
        scores[5] = score;
        let texts: Vec<_> = all
            .iter()
            .map(|token| (token.0.as_bytes().to_vec(), token.1))
            .collect();
        File::default()
            .set("model", "t5")
            .tokens(&texts)
            .set("scores", scores)
    };
    let t = file(-1.5).open().unwrap();
    assert_eq!(t.encode("aab", false, false), [3, 5], "−2.5 before −2.6");
    assert_eq!(t.encode("aUb", false, false), [3, 7, 4]);
    assert_eq!(
        t.encode("xyaxb", false, false),
        [2, 3, 2, 4],
        "unknown characters side by side are one token"
    );
    assert_eq!(file(-1.7).open().unwrap().encode("aab", false, false), [6]);
    // Of equal sums the first found: `a`, `b` reaches the end of `ab` after `ab` has.
    assert_eq!(file(-2.0).open().unwrap().encode("ab", false, false), [5]);
    for score in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert!(matches!(
            file(score).open(),
            Err(TokenizerError::Score { id: 5 })
        ));
    }
    let charsmap = |value: Value| file(-1.5).set("precompiled_charsmap", value).open();
    assert!(matches!(
        charsmap(Value::Array(Array::U8(vec![1, 2, 3]))),
        Err(TokenizerError::Charsmap { .. })
    ));
    assert!(matches!(
        charsmap("text".into()),
        Err(TokenizerError::Charsmap { .. })
    ));
    assert!(charsmap(Value::Array(Array::I8(Vec::new()))).is_ok());
}

/// A text that goes on after another has no space put in front of it; behind a special token a text
/// begins.
#[test]
fn a_continuation_begins_with_no_space() {
    let t = small_spm().open().unwrap();
    let whole = t.encode("a b", false, false);
    let begun = t.encode("a", false, false);
    let more = t.encode_continuation(" b", *begun.last().unwrap());
    assert_eq!([begun, more].concat(), whole);
    let bos = t.bos().unwrap();
    assert_eq!(t.encode_continuation("a", bos), t.encode("a", false, false));
}

#[test]
fn merges_apply_in_order_of_rank_and_leftmost_first() {
    let t = bpe(
        "gpt-2",
        &[("aa", NORMAL), ("ab", NORMAL), ("aab", NORMAL)],
        &["a b", "a a", "a ab"],
    )
    .open()
    .unwrap();
    assert_eq!(t.encode("aab", false, false), [258]);
    assert_eq!(t.encode("aaa", false, false), [256, 97]);
    assert_eq!(t.encode("aaaab", false, false), [256, 258]);
}

#[test]
fn scores_decide_over_length() {
    let t = small_spm().open().unwrap();
    let id = |text: &str| t.token_id(text.as_bytes()).unwrap();
    // `ab` scores best, so `▁a` is never formed.
    assert_eq!(t.encode("ab", false, false), [id("▁ab")]);
    assert_eq!(t.encode("a b", false, false), [id("▁a"), id("▁"), id("b")]);
    assert_eq!(t.encode("", true, false), [1]);
    assert_eq!(t.encode("ac", true, false), [1, id("▁a"), byte_id(b'c')]);
    assert_eq!(
        t.encode("ñ", false, false),
        [id("▁"), byte_id(0xc3), byte_id(0xb1)]
    );
}

#[test]
fn spaces_in_front_follow_the_flag_and_special_tokens() {
    let file = small_spm();
    let t = file.open().unwrap();
    let id = |text: &str| t.token_id(text.as_bytes()).unwrap();
    assert_eq!(
        t.encode("a<x>a", false, false),
        [id("▁a"), id("<x>"), id("▁a")]
    );
    let bare = file.set("add_space_prefix", false).open().unwrap();
    assert_eq!(
        bare.encode("a<x>a", false, false),
        [id("a"), id("<x>"), id("a")]
    );
    assert_eq!(t.decode(&[id("▁a")], false).unwrap(), b"a");
    assert_eq!(bare.decode(&[id("▁a")], false).unwrap(), b" a");
}

#[test]
fn a_token_across_words_is_found() {
    let t = spm(&[
        ("▁", NORMAL, -9.0),
        ("a", NORMAL, -9.0),
        ("a▁", NORMAL, -1.0),
        ("a▁a", NORMAL, -2.0),
    ])
    .open()
    .unwrap();
    assert_eq!(t.encode("a a", false, false), [259, 262]);
}

#[test]
fn control_tokens_are_parsed_on_request_and_user_defined_ones_always() {
    let t = bpe("gpt-2", &[("<c>", CONTROL), ("<u>", USER_DEFINED)], &[])
        .open()
        .unwrap();
    assert_eq!(t.encode("<c>", false, true), [256]);
    assert_eq!(t.encode("<c>", false, false), [60, 99, 62]);
    assert_eq!(t.encode("<u>", false, false), [257]);
    assert_eq!(t.decode(&[256, 257], false).unwrap(), b"<u>");
    assert_eq!(t.decode(&[256, 257], true).unwrap(), b"<c><u>");
}

#[test]
fn the_longest_special_token_wins_wherever_it_is() {
    let specials = [("ab", CONTROL), ("bcd", CONTROL), ("abcde", CONTROL)];
    let t = bpe("gpt-2", &specials, &[]).open().unwrap();
    assert_eq!(t.encode("abcd", false, true), [97, 257]);
    assert_eq!(t.encode("abcde", false, true), [258]);
    assert_eq!(t.encode("abc", false, true), [256, 99]);
    // The longest is blocked by another one, a shorter one fits.
    let t = bpe(
        "gpt-2",
        &[("cdef", CONTROL), ("abc", CONTROL), ("ab", CONTROL)],
        &[],
    )
    .open()
    .unwrap();
    assert_eq!(t.encode("abcdef", false, true), [258, 256]);
}

#[test]
fn phi_3_strips_white_space_after_special_tokens() {
    let file = small_spm().set_full("general.name", "Phi-3 Mini");
    let plain = small_spm().open().unwrap().encode("<x> \n a", false, true);
    assert!(plain.len() > 2);
    let t = file.open().unwrap();
    let id = |text: &str| t.token_id(text.as_bytes()).unwrap();
    assert_eq!(t.encode("<x> \n a", false, true), [id("<x>"), id("▁a")]);
    assert_eq!(t.encode("</s> a", false, true), [2, id("▁a")]);
    assert_eq!(t.encode("<s> a", false, true), [1, id("▁"), id("▁a")]);
}

/// As `tokenizers` of Hugging Face, whose flags these are.
#[test]
fn added_tokens_keep_off_words_and_strip_white_space() {
    let tokens = [("<l>", CONTROL), ("<r>", CONTROL), ("cat", USER_DEFINED)];
    let file = bpe("gpt-2", &tokens, &[])
        .set("added_tokens.lstrip", vec![256])
        .set("added_tokens.rstrip", vec![257])
        .set("added_tokens.single_word", vec![258]);
    let t = file.open().unwrap();
    let encode = |text: &str| t.encode(text, false, true);
    assert_eq!(encode("a  <l> <r> \n a"), [97, 256, 32, 257, 97]);
    for (text, is_token) in [
        ("cat", true),
        ("a cat.", true),
        ("-cat'", true),
        ("cats", false),
        ("écat", false),
        ("cat_", false),
        ("2cat", false),
        ("cat\u{301}", false),
        ("cat。", true),
    ] {
        assert_eq!(encode(text).contains(&258), is_token, "{text:?}");
    }
    let error = file.set("added_tokens.rstrip", vec![-1]).open();
    assert!(
        matches!(error, Err(TokenizerError::SpecialId { key, n_vocab: 259, .. }) if key.ends_with("rstrip"))
    );
}

#[test]
fn ignore_merges_takes_whole_words_first() {
    let tokens = [("abc", NORMAL), ("ab", NORMAL)];
    let llama3 = bpe("llama-bpe", &tokens, &["a b"]).open().unwrap();
    assert_eq!(llama3.encode("abc", false, false), [256]);
    let gpt2 = bpe("gpt-2", &tokens, &["a b"]).open().unwrap();
    assert_eq!(gpt2.encode("abc", false, false), [257, 99]);
}

#[test]
fn bos_and_eos_follow_the_flags() {
    let file = bpe("llama-bpe", &[("<bos>", CONTROL), ("<e>", CONTROL)], &[])
        .without("add_bos_token")
        .set("bos_token_id", 256u32)
        .set("eos_token_id", 257u32);
    let t = file.open().unwrap();
    assert!(t.add_bos() && !t.add_eos());
    assert_eq!(t.encode("a", true, false), [256, 97]);
    assert_eq!(t.encode("a", false, false), [97]);
    let t = file
        .set("add_bos_token", false)
        .set("add_eos_token", true)
        .open()
        .unwrap();
    assert_eq!(t.encode("a", true, false), [97, 257]);
    assert_eq!(t.encode_prompt("a"), [97]);
    assert_eq!(t.encode_prompt("a<e>"), [97, 257]);
    let t = small_spm().set("add_bos_token", false).open().unwrap();
    assert_eq!(t.encode("", true, false), [0u32; 0]);
}

#[test]
fn a_missing_pre_tokenizer_is_the_default_one() {
    let t = bpe("default", &[], &[]).without("pre").open().unwrap();
    assert_eq!(t.pre(), Some("default"));
    assert_eq!(small_spm().open().unwrap().pre(), None);
}

#[test]
fn raw_utf8_bpe_escapes_spaces_and_falls_back_to_bytes() {
    let t = File::default()
        .set("model", "gemma4")
        .tokens(&[
            (b"<bos>".to_vec(), CONTROL),
            ("▁".into(), NORMAL),
            (b"a".to_vec(), NORMAL),
            ("▁a".into(), NORMAL),
            (b"\n\n".to_vec(), NORMAL),
            (b"<0xC3>".to_vec(), BYTE),
            (b"<0xA9>".to_vec(), BYTE),
        ])
        .set("merges", ["▁ a"].iter().collect::<StringArray>())
        .set("bos_token_id", 0u32)
        .open()
        .unwrap();
    let ids = t.encode(" a\n\né", true, false);
    assert_eq!(ids, [0, 3, 4, 5, 6]);
    assert_eq!(t.decode(&ids, false).unwrap(), " a\n\né".as_bytes());
}

#[test]
fn tokens_that_end_a_generation_are_known_by_id_and_by_text() {
    let t = bpe(
        "qwen2",
        &[
            ("<|im_end|>", NORMAL),
            ("<|endoftext|>", CONTROL),
            ("</s>", NORMAL),
            ("<end>", CONTROL),
        ],
        &[],
    )
    .set("eos_token_id", 259u32)
    .open()
    .unwrap();
    assert_eq!(t.eog().collect::<Vec<_>>(), [256, 257, 258, 259]);
    assert_eq!(t.eot(), Some(256));
    assert!(t.is_control(256), "whatever the file says");
    assert!(!t.is_eog(u32::MAX));
}

#[test]
fn gpt_oss_messages_end_without_ending_the_generation() {
    let tokens = [
        ("<|end|>", CONTROL),
        ("<|return|>", CONTROL),
        ("<|call|>", CONTROL),
        ("<|channel|>", CONTROL),
    ];
    let t = bpe("gpt-4o", &tokens, &[])
        .set("eos_token_id", 257u32)
        .open()
        .unwrap();
    assert_eq!(t.eog().collect::<Vec<_>>(), [257, 258]);
    assert!(!t.is_control(256) && !t.is_control(259));
}

// Files that mean no good.

#[test]
fn unsupported_models_are_refused_by_name() {
    for name in ["no_vocab", "none", "hybriddna", ""] {
        let error = small_spm().set("model", name).open().unwrap_err();
        assert!(
            matches!(&error, TokenizerError::Model { name: n } if n == name),
            "{error}"
        );
    }
    assert!(matches!(
        small_spm().without("model").open(),
        Err(TokenizerError::Metadata(_))
    ));
}

#[test]
fn an_unknown_pre_tokenizer_is_refused_with_the_known_ones() {
    let error = bpe("qwen9", &[], &[]).open().unwrap_err().to_string();
    assert!(
        error.contains("qwen9") && error.contains("qwen2, ") && error.contains("llama-bpe"),
        "{error}"
    );
}

#[test]
fn arrays_have_one_entry_per_token() {
    for n in [0, 266, 268] {
        let error = small_spm().set("scores", vec![0f32; n]).open().unwrap_err();
        assert!(
            matches!(error, TokenizerError::ArrayLength { key: "tokenizer.ggml.scores", len, n_vocab: 267 } if len == n)
        );
        let error = small_spm()
            .set("token_type", vec![1i32; n])
            .open()
            .unwrap_err();
        assert!(
            matches!(
                error,
                TokenizerError::ArrayLength {
                    key: "tokenizer.ggml.token_type",
                    ..
                }
            ),
            "{error}"
        );
    }
    let integers = small_spm().set("scores", Value::Array(Array::I32(vec![0; 267])));
    integers.open().unwrap();
}

#[test]
fn missing_or_mistyped_keys_are_named() {
    for key in ["tokens", "merges"] {
        let error = bpe("gpt-2", &[], &[])
            .without(key)
            .open()
            .unwrap_err()
            .to_string();
        assert!(error.contains(key), "{error}");
        let error = bpe("gpt-2", &[], &[])
            .set(key, 7u32)
            .open()
            .unwrap_err()
            .to_string();
        assert!(error.contains(key), "{error}");
    }
    let empty: StringArray = std::iter::empty::<&str>().collect();
    assert!(matches!(
        bpe("gpt-2", &[], &[])
            .set("tokens", empty)
            .without("token_type")
            .open(),
        Err(TokenizerError::NoTokens)
    ));
}

#[test]
fn two_tokens_with_one_text_are_refused() {
    let error = bpe(
        "gpt-2",
        &[("ab", NORMAL), ("x y", NORMAL), ("ab", CONTROL)],
        &[],
    )
    .open()
    .unwrap_err();
    assert!(
        matches!(error, TokenizerError::DuplicateToken { ref text, first: 256, second: 258 } if text == "ab"),
        "{error}"
    );
}

#[test]
fn tokens_without_text_are_kept_but_never_found() {
    let t = bpe("gpt-2", &[("", CONTROL), ("", NORMAL)], &[])
        .open()
        .unwrap();
    assert_eq!(t.token_id(b""), None);
    assert_eq!(t.encode("a", false, true), [97]);
    assert_eq!(t.decode(&[256, 257], true).unwrap(), b"");
}

#[test]
fn merges_have_two_sides() {
    for merge in ["ab", "", " ", " ab"] {
        let error = bpe("gpt-2", &[("ab", NORMAL)], &["a b", merge])
            .open()
            .unwrap_err();
        assert!(
            matches!(error, TokenizerError::Merge { rank: 1, ref text } if text == merge),
            "{error}"
        );
    }
}

#[test]
fn a_merge_need_not_give_a_token() {
    // `ab` is no token: it falls apart again unless a later merge makes use of it.
    let t = bpe("gpt-2", &[("abc", NORMAL)], &["a b", "ab c", "no where"])
        .open()
        .unwrap();
    assert_eq!(t.encode("abab", false, false), [97, 98, 97, 98]);
    assert_eq!(t.encode("abc", false, false), [256]);
}

#[test]
fn of_two_equal_merges_the_first_counts() {
    let tokens = [("ab", NORMAL), ("bc", NORMAL)];
    let t = bpe("gpt-2", &tokens, &["a b", "b c", "a b"])
        .open()
        .unwrap();
    assert_eq!(t.encode("abc", false, false), [256, 99]);
}

#[test]
fn bytes_without_a_token_are_left_out_or_unknown() {
    let tokens = vec![(b"a".to_vec(), NORMAL), (b"b".to_vec(), NORMAL)];
    let t = bpe("gpt-2", &[], &[]).tokens(&tokens).open().unwrap();
    assert_eq!(t.encode("axb", false, false), [0, 1]);
    let file = File::default()
        .set("model", "llama")
        .tokens(&tokens)
        .set("add_bos_token", false);
    assert_eq!(
        file.open().unwrap().encode("axb", false, false),
        [0, 0, 0, 0, 0, 1],
        "▁ and x are unknown"
    );
}

#[test]
fn llama_cpp_25969_byte_tokens_are_two_hexadecimal_digits() {
    for text in [
        "<0x-1>", "<0x+1>", "<0x 1>", "<0x1>", "<0x001>", "<0xG0>", "<0x41", "0x41", "<0X41>", "",
        "\u{20ac}",
    ] {
        let mut tokens = bpe_tokens(&[]);
        tokens.push((text.as_bytes().to_vec(), BYTE));
        for model in ["llama", "gpt2"] {
            let error = bpe("gpt-2", &[], &[])
                .set("model", model)
                .tokens(&tokens)
                .open()
                .unwrap_err();
            assert!(
                matches!(error, TokenizerError::ByteToken { id: 256, text: ref t } if t == text),
                "{error}"
            );
        }
    }
}

#[test]
fn ghsa_7rxv_5jhh_j6xx_ids_and_lengths_are_not_signed() {
    // Ids that are negative as 32-bit signed numbers, where the file or the caller gives ids.
    for id in [0x8000_0000, 0xffff_fffe, 267] {
        for key in [
            "bos_token_id",
            "eos_token_id",
            "eot_token_id",
            "unknown_token_id",
            "fim_pad_token_id",
        ] {
            let error = small_spm().set(key, id).open().unwrap_err();
            assert!(
                matches!(error, TokenizerError::SpecialId { id: i, n_vocab: 267, .. } if i == id),
                "{error}"
            );
        }
        let t = small_spm().open().unwrap();
        assert!(
            matches!(t.decode(&[1, id], true), Err(TokenizerError::UnknownToken { id: i, n_vocab: 267 }) if i == id)
        );
        assert!(
            t.token_bytes(id).is_none()
                && t.token_text(id).is_none()
                && !t.is_control(id)
                && !t.is_eog(id)
        );
    }
    // Writers put -1 for "none".
    assert_eq!(
        small_spm()
            .set("bos_token_id", u32::MAX)
            .open()
            .unwrap()
            .bos(),
        Some(1)
    );
    // More tokens than the text has bytes.
    let t = small_spm().open().unwrap();
    let ids = t.encode("\u{1}", true, false);
    assert_eq!(ids, [1, 259, byte_id(1)]);
}

#[test]
fn a_flag_without_its_token_is_refused() {
    let tokens = [(b"a".to_vec(), NORMAL)];
    let file = File::default().set("model", "llama").tokens(&tokens);
    let error = file.open().unwrap_err();
    assert!(
        matches!(
            error,
            TokenizerError::NoSpecialToken {
                key: "tokenizer.ggml.bos_token_id",
                ..
            }
        ),
        "{error}"
    );
    let error = file
        .set("add_bos_token", false)
        .set("add_eos_token", true)
        .open()
        .unwrap_err();
    assert!(
        matches!(
            error,
            TokenizerError::NoSpecialToken {
                key: "tokenizer.ggml.eos_token_id",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn scores_are_numbers() {
    let mut scores = vec![0f32; 267];
    scores[260] = f32::NAN;
    assert!(matches!(
        small_spm().set("scores", scores).open(),
        Err(TokenizerError::Score { id: 260 })
    ));
}

#[test]
fn special_tokens_have_a_reasonable_length() {
    let long = "x".repeat(1025);
    assert!(matches!(
        bpe("gpt-2", &[(&long, CONTROL)], &[]).open(),
        Err(TokenizerError::TokenTooLong { id: 256, .. })
    ));
    bpe("gpt-2", &[(&long, NORMAL), (&long[..1024], CONTROL)], &[])
        .open()
        .unwrap();
}

#[test]
fn a_special_token_may_cut_a_character() {
    let mut tokens = bpe_tokens(&[]);
    tokens.push((vec![0xc3], CONTROL));
    let t = bpe("gpt-2", &[], &[]).tokens(&tokens).open().unwrap();
    assert_eq!(t.encode("é", false, true), [256, 0xef, 0xbf, 0xbd]);
}

/// A megabyte of the same is as little trouble as a megabyte of prose. That these end at all within
/// a test's patience is the point: with anything quadratic they would take hours.
#[test]
fn a_megabyte_of_anything_is_encoded() {
    const N: usize = 1 << 20;
    let all = [
        "llama-bpe",
        "deepseek-llm",
        "gpt-4o",
        "tiny_aya",
        "exaone-moe",
        "jais-2",
    ];
    let runs: Vec<String> = (1..=24).map(|n| " ".repeat(n)).collect();
    let mut tokens: Vec<(&str, i32)> = runs.iter().map(|s| (s.as_str(), USER_DEFINED)).collect();
    tokens.extend([
        ("<|im_start|>", CONTROL),
        ("<|<|<", CONTROL),
        ("aa", NORMAL),
        ("aaaa", NORMAL),
    ]);
    let merges = ["a a", "aa aa"];
    let sentencepiece = small_spm().open().unwrap();
    for &pre in &all[..if long() { 6 } else { 2 }] {
        let t = bpe(pre, &tokens, &merges).open().unwrap();
        assert_eq!(t.encode(&"a".repeat(N), false, true).len(), N / 4);
        assert_eq!(t.encode(&" ".repeat(N), false, true).len(), N.div_ceil(24));
        assert_eq!(t.encode(&"7".repeat(N), false, true).len(), N);
        assert_eq!(
            t.encode(&"<|im_star".repeat(N / 9), false, true).len(),
            N / 9 * 9
        );
        assert_eq!(t.encode(&"<|".repeat(N / 2), false, true).len(), {
            let (matches, rest) = (N / 2 / 3, N / 2 % 3);
            matches + matches + rest * 2 // `<|<|<` and the `|` after it
        });
        for unit in [
            "😀", "\n", "\t ", "É", "aB", "\u{301}", "\u{3000}", "'", "٣1", "!a", "中", "\r", "a ",
            "\0",
        ] {
            let text = unit.repeat(N / unit.len());
            let ids = t.encode(&text, false, false);
            assert!(ids.len() <= text.len() && !ids.is_empty(), "{pre} {unit:?}");
        }
    }
    assert_eq!(
        sentencepiece.encode(&"ab".repeat(N / 2), false, true).len(),
        N / 2
    );
    assert_eq!(
        sentencepiece.encode(&" ".repeat(N), false, true).len(),
        N + 1
    );
    assert_eq!(
        sentencepiece.encode(&"😀".repeat(N / 4), false, true).len(),
        N + 1
    );
}

// Properties.

const PRE_TOKENIZERS: &[&str] = &[
    "qwen2",
    "qwen35",
    "laguna",
    "ufakzeka",
    "bailingmoe",
    "seed-coder",
    "trillion",
    "command-r",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "spark2_5",
    "gpt-4o",
    "granite-embed-multi-97m",
    "tekken",
    "tiny_aya",
    "youtu",
    "superbpe",
    "poro-chat",
    "viking",
];

/// Text from the characters that pre-tokenisers care about, and any other.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => "[ \t\r\na-cA-C0-3'.,!/<|>]{1,6}",
        2 => prop::sample::select(vec!["'ll", "'RE", "É", "ß", "中", "가", "\u{301}", "\u{3000}", "٣", "Ⅷ", "😀", "“", "▁", "<u>", "<c>"])
            .prop_map(str::to_owned),
        1 => any::<char>().prop_map(|c| c.to_string()),
    ];
    prop::collection::vec(piece, 0..20).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(cases(512))]

    #[test]
    fn decoding_undoes_encoding(text in text(), pre in prop::sample::select(PRE_TOKENIZERS), parse in any::<bool>()) {
        let t = bpe(pre, &[("<u>", USER_DEFINED), ("<c>", CONTROL), ("ab", NORMAL), ("Ġa", NORMAL)], &["a b", "Ġ a"])
            .open()
            .unwrap();
        let ids = t.encode(&text, true, parse);
        prop_assert_eq!(t.decode(&ids, true).unwrap(), text.as_bytes());
    }

    #[test]
    fn sentencepiece_keeps_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        let t = small_spm().open().unwrap();
        prop_assume!(!bytes.windows(3).any(|w| w == "▁".as_bytes()));
        let ids = t.encode_bytes(&bytes, false, true);
        prop_assert_eq!(t.decode(&ids, true).unwrap(), bytes);
    }

    #[test]
    fn streams_give_the_lossy_text_of_all_bytes(ids in prop::collection::vec(0u32..300, 0..40), special in any::<bool>()) {
        let t = Arc::new(small_spm().open().unwrap());
        let mut stream = TextStream::new(&t, special);
        let (mut streamed, mut bytes) = (String::new(), Vec::new());
        for &id in &ids {
            match stream.push(id) {
                Ok(text) => streamed.push_str(text),
                Err(e) => {
                    let is_unknown = matches!(e, TokenizerError::UnknownToken { id: i, .. } if i == id && id >= 267);
                    prop_assert!(is_unknown);
                    continue;
                }
            }
            if special || !t.is_control(id) && id != 0 {
                bytes.extend_from_slice(&t.token_bytes(id).unwrap());
            }
        }
        streamed.push_str(stream.finish());
        prop_assert_eq!(streamed, String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn arbitrary_vocabularies_do_not_panic(
        tokens in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..4), 0i32..9), 1..40),
        merges in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..5), 0..10),
        text in prop::collection::vec(any::<u8>(), 0..40),
        model in prop::sample::select(&["llama", "gpt2", "gemma4", "t5"][..]),
        charsmap in prop::collection::vec(any::<u8>(), 0..40),
        phi in any::<bool>(),
    ) {
        let file = File::default()
            .set("model", model)
            .tokens(&tokens)
            .set("merges", merges.iter().collect::<StringArray>())
            .set("precompiled_charsmap", Value::Array(Array::U8(charsmap)))
            .set_full("general.name", if phi { "phi-3" } else { "" });
        let Ok(t) = file.set("add_bos_token", false).open() else { return Ok(()) };
        let ids = t.encode_bytes(&text, true, true);
        prop_assert!(ids.iter().all(|&id| (id as usize) < tokens.len()));
        t.decode_lossy(&ids, true).unwrap();
    }
}

#[test]
fn streams_hold_back_incomplete_characters() {
    let t = Arc::new(small_spm().open().unwrap());
    let mut stream = TextStream::new(&t, false);
    for b in &"😀".as_bytes()[..3] {
        assert_eq!(stream.push(byte_id(*b)).unwrap(), "");
    }
    assert_eq!(stream.push(byte_id(0x80)).unwrap(), "😀");
    assert_eq!(stream.push(byte_id(0xe2)).unwrap(), "");
    assert_eq!(stream.push(259).unwrap(), "\u{fffd} ");
    assert_eq!(stream.push(byte_id(0xff)).unwrap(), "\u{fffd}");
    assert_eq!(stream.push(byte_id(0xc3)).unwrap(), "");
    assert!(stream.push(9999).is_err());
    assert_eq!(stream.push(byte_id(0xa9)).unwrap(), "é");
    assert_eq!(stream.push(byte_id(0xc3)).unwrap(), "");
    assert_eq!(stream.finish(), "\u{fffd}");
    assert_eq!(stream.finish(), "");
}

#[test]
fn unused_tokens_have_no_text() {
    let t = bpe("gpt-2", &[("left", UNUSED)], &[]).open().unwrap();
    assert_eq!(t.token_bytes(256).unwrap(), b"");
    assert_eq!(t.token_text(256).unwrap(), b"left");
}

#[test]
fn a_file_may_have_no_tokenizer() {
    for (kind, expected) in [
        (None, true),
        (Some("none"), true),
        (Some("no_vocab"), true),
        (Some("other"), false),
    ] {
        let mut writer = Writer::new();
        if let Some(kind) = kind {
            writer.metadata("tokenizer.ggml.model", kind);
        }
        let gguf = Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap();
        assert_eq!(
            matches!(Tokenizer::opt_from_metadata(gguf.metadata()), Ok(None)),
            expected,
            "{kind:?}"
        );
    }
}

/// A vocabulary of WordPiece; token 0 is the unknown one.
fn wordpiece(tokens: &[&str]) -> File {
    let all: Vec<_> = ["[UNK]"]
        .iter()
        .chain(tokens)
        .map(|text| (text.as_bytes().to_vec(), NORMAL))
        .collect();
    let file = File::default()
        .set("model", "bert")
        .tokens(&all)
        .set("unknown_token_id", 0u32);
    file.set("add_bos_token", false).set("add_eos_token", false)
}

/// As Hugging Face's BERT: Hangul becomes all of its jamo, only nonspacing marks are accents, words
/// of more than 100 characters are unknown, a lower-case form may have two characters; all white
/// space ends words.
#[test]
fn wordpiece_normalises_as_hugging_face() {
    let file = wordpiece(&[
        "▁\u{1112}",
        "\u{1161}",
        "\u{11ab}",
        "▁\u{915}",
        "\u{93e}",
        "▁e",
        "▁a",
        "a",
        "▁i",
        "\u{307}",
        "▁é",
        "▁한",
        "\u{20dd}",
    ]);
    let encode = |file: &File, text: &str| file.open().unwrap().encode(text, false, false);
    for (text, ids) in [
        ("한", &[1, 2, 3][..]),
        ("\u{915}\u{93e}", &[4, 5]),
        ("\u{915}\u{941}\u{93e}", &[4, 5]),
        ("é É e\u{301}", &[6, 6, 6]),
        ("a\u{20dd}", &[7, 13]),
        ("İ", &[9]),
        ("a\u{85}a\u{2028}a\u{3000}a", &[7, 7, 7, 7]),
        ("a\u{ad}a\u{200b}a", &[7, 8, 8]),
        ("안", &[0]),
    ] {
        assert_eq!(encode(&file, text), ids, "{text:?}");
    }
    // Characters count, not bytes, and those that are left out do not.
    let word = |n: usize| "á\u{ad}".repeat(n);
    assert_eq!(encode(&file, &word(100)), [&[7][..], &[8; 99]].concat());
    assert_eq!(encode(&file, &format!("a {} a", word(101))), [7, 0, 7]);
    // What the file says counts.
    let cased = file.clone().set("normalizer.lowercase", false);
    assert_eq!(encode(&cased, "한 é E"), [12, 11, 0]);
    let accented = file.set("normalizer.strip_accents", false);
    assert_eq!(encode(&accented, "한 É İ"), [12, 11, 9, 10]);
}
