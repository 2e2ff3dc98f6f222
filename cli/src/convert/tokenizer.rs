//! The vocabulary: `tokenizer.model`, `tokenizer.json` or RWKV's file, and what
//! `tokenizer_config.json` adds.

use super::config::{Config, read_file, read_json};
use super::family::{Family, Spaces};
use super::{sentencepiece, world};
use crate::io::Failure;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ruvllm::gguf::{Array, Value};
use serde_json::Value as Json;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Largest `tokenizer.model`.
const MAX_MODEL: u64 = 64 << 20;
/// Most tokens.
const MAX_VOCAB: usize = 1 << 22;

/// Types of tokens in GGUF files.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Special tokens by their names at Hugging Face and in GGUF files.
const SPECIAL: [(&str, &str); 7] = [
    ("bos", "bos"),
    ("eos", "eos"),
    ("unk", "unknown"),
    ("sep", "seperator"),
    ("pad", "padding"),
    ("cls", "cls"),
    ("mask", "mask"),
];

/// Tokens that Gemma 4 writes around thoughts and calls.
const GEMMA4_SHOWN: [&str; 7] = [
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    r#"<|"|>"#,
];

/// Special tokens that all files of an architecture name by number.
const BY_NUMBER: [(&str, &str, u32); 9] = [
    ("gemma", "eot", 107),
    ("nemotron", "padding", 0),
    ("nemotron", "unknown", 1),
    // Token 0 is the only one that is none of a text; 261 is an empty line, which ends an answer.
    ("rwkv6", "bos", 0),
    ("rwkv6", "eos", 0),
    ("rwkv6", "eot", 261),
    ("rwkv7", "bos", 0),
    ("rwkv7", "eos", 0),
    ("rwkv7", "eot", 261),
];

const DIGITS: &str = "individual digits";
const GPT2: &str = "byte level";

/// Pre-tokenisers by the regular expressions of `tokenizer.json`, whether merges are ignored for words that are tokens, and
/// their names in GGUF files. The first fitting line counts.
#[rustfmt::skip]
const PRE_TOKENIZERS: &[(&[&str], Option<bool>, &str)] = &[
    (&[r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
     Some(true), "llama-bpe"),
    (&[r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
     None, "dbrx"),
    (&[r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
     None, "qwen2"),
    (&[r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
     None, "qwen35"),
    (&[r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
     None, "gpt-4o"),
    (&[r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
     None, "tekken"),
    (&[r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
       r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##],
     None, "deepseek-v3"),
    (&[DIGITS, GPT2], None, "smollm"),
    (&[GPT2], None, "gpt-2"),
];

/// The tokenizer's files.
pub(super) struct Tokenizer {
    folder: PathBuf,
    json: Option<Json>,
    settings: Option<Json>,
    tokens: Vec<Vec<u8>>,
    scores: Option<Vec<f32>>,
    types: Vec<i32>,
    /// `tokenizer.ggml.model` and `tokenizer.ggml.pre`.
    model: &'static str,
    pre: &'static str,
    merges: Vec<String>,
    /// Of a unigram vocabulary.
    charsmap: Vec<u8>,
    /// Whether SentencePiece puts a space before a text.
    adds_space: Option<bool>,
}

impl Tokenizer {
    /// Reads the vocabulary of `folder`.
    pub(super) fn open(folder: &Path, config: &Config) -> Result<Tokenizer, Failure> {
        let json = read_json(&folder.join("tokenizer.json"))?;
        let settings = read_json(&folder.join("tokenizer_config.json"))?;
        let mut tokenizer = Tokenizer {
            folder: folder.to_owned(),
            json,
            settings,
            tokens: Vec::new(),
            scores: None,
            types: Vec::new(),
            model: "llama",
            pre: "default",
            merges: Vec::new(),
            charsmap: Vec::new(),
            adds_space: None,
        };
        let n_vocab = config.opt_u32(&["vocab_size"])?.map(|n| n as usize);
        if n_vocab.is_some_and(|n| n > MAX_VOCAB) {
            return Err(config.refuse(format_args!("vocab_size is more than {MAX_VOCAB}")));
        }
        let (world, pieces) = (folder.join(world::FILE), folder.join("tokenizer.model"));
        if let Some(file) = read_file(&world, MAX_MODEL)? {
            tokenizer.read_world(&file, n_vocab)?;
        } else if let Some(file) = read_file(&pieces, MAX_MODEL)? {
            tokenizer.read_pieces(&file, n_vocab)?;
        } else {
            tokenizer.read_json_model(n_vocab)?;
        }
        Ok(tokenizer)
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    fn refuse(&self, file: &str, what: impl std::fmt::Display) -> Failure {
        Failure::Work(format!("{}: {what}", self.folder.join(file).display()))
    }

    /// RWKV's vocabulary.
    fn read_world(&mut self, file: &[u8], n_vocab: Option<usize>) -> Result<(), Failure> {
        let tokens = world::tokens(file).filter(|tokens| tokens.len() < MAX_VOCAB);
        let tokens = tokens.ok_or_else(|| self.refuse(world::FILE, "not a vocabulary of RWKV"))?;
        let (n_tokens, n_vocab) = (tokens.len() + 1, n_vocab.unwrap_or(1 << 16));
        if n_tokens > n_vocab {
            return Err(self.refuse(
                world::FILE,
                format_args!("{n_tokens} tokens, and vocab_size is {n_vocab}"),
            ));
        }
        self.model = "rwkv";
        self.tokens = vec![b"<s>".to_vec()];
        self.tokens.extend(tokens);
        self.types = vec![NORMAL; n_tokens];
        self.types[0] = CONTROL;
        self.tokens
            .extend((n_tokens..n_vocab).map(|i| format!("[PAD{i}]").into_bytes()));
        self.types.resize(n_vocab, UNUSED);
        Ok(())
    }

    /// The vocabulary of SentencePiece, with the tokens that other files add.
    fn read_pieces(&mut self, file: &[u8], n_vocab: Option<usize>) -> Result<(), Failure> {
        let pieces = sentencepiece::pieces(file)
            .filter(|pieces| !pieces.is_empty() && pieces.len() <= MAX_VOCAB);
        let pieces = pieces
            .ok_or_else(|| self.refuse("tokenizer.model", "not a vocabulary of SentencePiece"))?;
        self.adds_space = sentencepiece::adds_space(file);
        let n_vocab = n_vocab.unwrap_or(pieces.len());
        let mut scores = vec![-10000.0; n_vocab];
        self.tokens = (0..n_vocab)
            .map(|i| format!("[PAD{i}]").into_bytes())
            .collect();
        self.types = vec![UNUSED; n_vocab];
        for (i, piece) in pieces.into_iter().take(n_vocab).enumerate() {
            scores[i] = piece.score;
            self.tokens[i] = piece.text;
            // Tokens that users define are normal to llama.cpp, unless another file lists them.
            self.types[i] = match piece.kind {
                kind @ (2 | 3 | 5 | 6) => kind as i32,
                // InternLM 2 has such.
                _ if self.tokens[i].starts_with(b"[UNUSED") => UNUSED,
                _ => NORMAL,
            };
        }
        let mut add =
            |id: usize, text: &str, kind: i32, tokens: &mut Vec<Vec<u8>>, types: &mut Vec<i32>| {
                if id < n_vocab {
                    scores[id] = -1000.0;
                    tokens[id] = text.as_bytes().to_vec();
                    types[id] = kind;
                }
            };
        let id_of = |value: &Json| value.as_u64().and_then(|id| usize::try_from(id).ok());
        if let Some(Json::Object(added)) = read_json(&self.folder.join("added_tokens.json"))? {
            for (text, id) in added
                .iter()
                .filter_map(|(text, id)| Some((text, id_of(id)?)))
            {
                add(id, text, USER_DEFINED, &mut self.tokens, &mut self.types);
            }
        }
        let decoder = self
            .settings
            .as_ref()
            .and_then(|settings| settings.get("added_tokens_decoder")?.as_object());
        for (id, token) in decoder.into_iter().flatten() {
            let text = token.get("content").and_then(Json::as_str);
            let (Ok(id), Some(text)) = (id.parse(), text) else {
                return Err(self.refuse(
                    "tokenizer_config.json",
                    "added_tokens_decoder has an entry that is no token",
                ));
            };
            let special =
                token.get("special").and_then(Json::as_bool) == Some(true) || looks_special(text);
            match special {
                true => add(id, text, CONTROL, &mut self.tokens, &mut self.types),
                false => add(
                    id,
                    &text.replace('▁', " "),
                    USER_DEFINED,
                    &mut self.tokens,
                    &mut self.types,
                ),
            }
        }
        self.scores = Some(scores);
        Ok(())
    }

    /// The vocabulary of `tokenizer.json`: byte-level BPE, SentencePiece's with `▁` and bytes,
    /// WordPiece, or unigram. Long, as it has a case for each kind of model.
    fn read_json_model(&mut self, n_vocab: Option<usize>) -> Result<(), Failure> {
        let file = "tokenizer.json";
        let Some(json) = self.json.take() else {
            return Err(self.refuse(file, "no such file, and there is no tokenizer.model either"));
        };
        let model = json.get("model");
        let kind = model
            .and_then(|model| model.get("type")?.as_str())
            .unwrap_or("");
        let (wordpiece, unigram) = (kind == "WordPiece", kind == "Unigram");
        if !wordpiece && !unigram && kind != "BPE" {
            let known = "BPE, WordPiece and Unigram are converted";
            return Err(self.refuse(
                file,
                format_args!("a model of type {kind:?}, and only {known}"),
            ));
        }
        let is = |key: &str| model.and_then(|model| model.get(key)?.as_bool()) == Some(true);
        let mut texts: HashMap<usize, (&str, i32)> = HashMap::new();
        let bad_entry = || {
            self.refuse(
                file,
                format_args!("a token without a text or an id below {MAX_VOCAB}"),
            )
        };
        let id_of = |id: &Json| {
            id.as_u64()
                .map(|id| id as usize)
                .filter(|id| *id < MAX_VOCAB)
                .ok_or_else(bad_entry)
        };
        for (text, id) in model
            .and_then(|model| model.get("vocab")?.as_object())
            .into_iter()
            .flatten()
        {
            texts.insert(id_of(id)?, (text, NORMAL));
        }
        let mut scores = Vec::new();
        if unigram {
            let unknown = model.and_then(|model| model.get("unk_id")?.as_u64());
            for piece in model
                .and_then(|model| model.get("vocab")?.as_array())
                .into_iter()
                .flatten()
            {
                let text = piece
                    .get(0)
                    .and_then(Json::as_str)
                    .filter(|_| scores.len() < MAX_VOCAB);
                let score = piece.get(1).and_then(Json::as_f64);
                let (Some(text), Some(score)) = (text, score) else {
                    return Err(bad_entry());
                };
                let is_unknown = unknown == Some(scores.len() as u64);
                texts.insert(
                    scores.len(),
                    (text, if is_unknown { UNKNOWN } else { NORMAL }),
                );
                scores.push(score as f32);
            }
        }
        let n_base = texts.len();
        let sentencepiece = is("byte_fallback") && !is("ignore_merges");
        let named: Vec<&str> = SPECIAL
            .iter()
            .filter_map(|(name, _)| self.special_text(&format!("{name}_token")))
            .collect();
        let added = json.get("added_tokens").and_then(Json::as_array);
        for token in added.into_iter().flatten() {
            let text = token
                .get("content")
                .and_then(Json::as_str)
                .ok_or_else(bad_entry)?;
            let special = match sentencepiece {
                true => named.contains(&text),
                false => {
                    token.get("special").and_then(Json::as_bool) == Some(true)
                        || looks_special(text)
                }
            };
            let id = id_of(token.get("id").unwrap_or(&Json::Null))?;
            let kind = match special {
                true => CONTROL,
                false if sentencepiece && id < n_base => NORMAL,
                false => USER_DEFINED,
            };
            let kind = if texts.get(&id).is_some_and(|(_, kind)| *kind == UNKNOWN) {
                UNKNOWN
            } else {
                kind
            };
            texts.insert(id, (text, kind));
        }
        let n_tokens = texts.keys().max().map_or(0, |last| last + 1);
        let n_vocab = if sentencepiece {
            n_tokens
        } else {
            n_vocab.unwrap_or(n_tokens)
        };
        if n_tokens > n_vocab {
            return Err(self.refuse(
                file,
                format_args!("token {} is beyond a vocab_size of {n_vocab}", n_tokens - 1),
            ));
        }
        for id in 0..n_vocab {
            let (text, kind) = match texts.get(&id) {
                None => (format!("[PAD{id}]"), UNUSED),
                Some((text, USER_DEFINED)) if !sentencepiece && !unigram => {
                    (text.replace('▁', " "), USER_DEFINED)
                }
                Some((text, NORMAL)) if sentencepiece && is_byte(text) => {
                    ((*text).to_owned(), BYTE)
                }
                Some((text, kind)) => ((*text).to_owned(), *kind),
            };
            // Files mark the beginnings of words, not what goes on.
            let text = match text.strip_prefix("##") {
                Some(rest) if wordpiece && kind != CONTROL => rest.to_owned(),
                None if wordpiece && kind != CONTROL => format!("▁{text}"),
                _ => text,
            };
            self.tokens.push(text.into_bytes());
            self.types.push(kind);
        }
        if wordpiece {
            (self.model, self.pre) = ("bert", "bert-bge");
        } else if unigram {
            scores.resize(n_vocab, -10000.0);
            (self.model, self.scores) = ("t5", Some(scores));
            self.charsmap = self.read_charsmap(&json)?;
        } else if sentencepiece {
            self.scores = Some(vec![-1000.0; n_vocab]);
        } else {
            (self.model, self.pre) = ("gpt2", self.pre_tokenizer(&json, is("ignore_merges"))?);
            self.merges = self.read_merges(&json)?;
        }
        self.json = Some(json);
        Ok(())
    }

    /// The replacements of characters of a unigram vocabulary.
    fn read_charsmap(&self, json: &Json) -> Result<Vec<u8>, Failure> {
        let charsmap = steps(json, "normalizer", "normalizers")
            .find_map(|step| step.get("precompiled_charsmap"));
        let Some(text) = charsmap.and_then(Json::as_str) else {
            return Ok(Vec::new());
        };
        BASE64_STANDARD
            .decode(text)
            .map_err(|error| self.refuse("tokenizer.json", error))
    }

    /// The name of the pre-tokeniser.
    fn pre_tokenizer(&self, json: &Json, ignore_merges: bool) -> Result<&'static str, Failure> {
        let steps = match json.get("pre_tokenizer") {
            Some(pre) => pre
                .get("pretokenizers")
                .and_then(Json::as_array)
                .cloned()
                .unwrap_or(vec![pre.clone()]),
            None => Vec::new(),
        };
        let text = |step: &Json, key: &str| {
            step.get(key)
                .and_then(Json::as_str)
                .unwrap_or("")
                .to_owned()
        };
        let mut found = Vec::new();
        for step in &steps {
            match text(step, "type").as_str() {
                "Split" => found.push(text(step.get("pattern").unwrap_or(&Json::Null), "Regex")),
                "Digits" if step.get("individual_digits") == Some(&Json::Bool(true)) => {
                    found.push(DIGITS.into())
                }
                // After a regular expression it only replaces bytes by letters.
                "ByteLevel" if step.get("use_regex") == Some(&Json::Bool(false)) => {}
                "ByteLevel" => found.push(GPT2.into()),
                other => found.push(other.into()),
            }
        }
        let line = PRE_TOKENIZERS.iter().find(|(known, ignores, _)| {
            known.iter().eq(found.iter()) && ignores.is_none_or(|ignores| ignores == ignore_merges)
        });
        line.map(|(_, _, name)| *name).ok_or_else(|| {
            self.refuse(
                "tokenizer.json",
                format_args!("no pre-tokeniser of GGUF files has the steps {found:?}"),
            )
        })
    }

    /// The merges, which are pairs or texts with a space between two sides.
    fn read_merges(&self, json: &Json) -> Result<Vec<String>, Failure> {
        let wrong = || {
            self.refuse(
                "tokenizer.json",
                "model.merges is no list of pairs of texts",
            )
        };
        let merges = json
            .get("model")
            .and_then(|model| model.get("merges")?.as_array())
            .ok_or_else(wrong)?;
        let merge = |merge: &Json| match merge {
            Json::String(text) => Some(text.clone()),
            // A space inside a side is written as the letter that byte-level BPE has for it.
            Json::Array(pair) => match pair.as_slice() {
                [Json::String(a), Json::String(b)] => {
                    Some(format!("{} {}", a.replace(' ', "Ġ"), b.replace(' ', "Ġ")))
                }
                _ => None,
            },
            _ => None,
        };
        merges
            .iter()
            .map(merge)
            .collect::<Option<_>>()
            .ok_or_else(wrong)
    }

    /// The text of a special token in `tokenizer_config.json`: a text, or an object with one.
    fn special_text(&self, name: &str) -> Option<&str> {
        let token = self.settings.as_ref()?.get(name)?;
        token.as_str().or_else(|| token.get("content")?.as_str())
    }

    /// Writes the keys. Long, as it is one list of them, in the order that llama.cpp writes.
    pub(super) fn write(
        &self,
        config: &Config,
        family: &Family,
        key: &mut dyn FnMut(String, Value),
    ) -> Result<(), Failure> {
        let mut put = |name: &str, value: Value| key(format!("tokenizer.{name}"), value);
        let is_gemma4 = family.arch == "gemma4";
        put(
            "ggml.model",
            if is_gemma4 { family.arch } else { self.model }.into(),
        );
        if !is_gemma4 && self.model != "rwkv" {
            put("ggml.pre", self.pre.into());
        }
        put(
            "ggml.tokens",
            Value::Array(Array::Strings(self.tokens.iter().collect())),
        );
        if let Some(scores) = &self.scores {
            put("ggml.scores", Value::Array(Array::F32(scores.clone())));
        }
        let mut types = self.types.clone();
        let mut merges = self.merges.clone();
        if let Some(json) = self.json.as_ref().filter(|_| is_gemma4) {
            // What marks calls is always shown.
            let shown = |token: &[u8]| GEMMA4_SHOWN.iter().any(|text| text.as_bytes() == token);
            let marks = types
                .iter_mut()
                .zip(&self.tokens)
                .filter(|(_, token)| shown(token));
            marks.for_each(|(kind, _)| *kind = USER_DEFINED);
            merges = self.read_merges(json)?;
        }
        put("ggml.token_type", Value::Array(Array::I32(types)));
        if !merges.is_empty() {
            put(
                "ggml.merges",
                Value::Array(Array::Strings(merges.iter().collect())),
            );
        }
        let ends = self.ends();
        // BERT's token for a whole text is the one that texts begin with.
        for (name, ggml) in SPECIAL.into_iter().filter(|(name, _)| *name != "cls") {
            let text = ends
                .texts
                .iter()
                .find(|(special, _)| *special == name)
                .map(|(_, text)| text.as_str());
            let by_text = text
                .or_else(|| self.special_text(&format!("{name}_token")))
                .and_then(|text| self.added_id(text));
            let by_number = || {
                config
                    .opt_u32(&[&format!("{name}_token_id")])
                    .ok()
                    .flatten()
            };
            let special = family.special.iter().find(|(special, _)| *special == ggml);
            let by_family = || self.added_id(special?.1);
            if let Some(id) = by_text
                .or_else(by_number)
                .or_else(by_family)
                .filter(|id| (*id as usize) < self.len())
            {
                put(&format!("ggml.{ggml}_token_id"), id.into());
            }
        }
        let further = family
            .special
            .iter()
            .filter(|(name, _)| SPECIAL.iter().all(|(_, ggml)| ggml != name));
        for (name, text) in further {
            let id = self.added_id(text).filter(|id| (*id as usize) < self.len());
            let id = id.ok_or_else(|| {
                self.refuse("tokenizer.json", format_args!("there is no token {text}"))
            })?;
            put(&format!("ggml.{name}_token_id"), id.into());
        }
        for (_, name, id) in BY_NUMBER
            .into_iter()
            .filter(|(arch, ..)| *arch == family.arch)
        {
            put(&format!("ggml.{name}_token_id"), id.into());
        }
        if family.arch == "hunyuan-dense" {
            // Of Hunyuan's files only these are right.
            if let Some(id) = config.opt_u32(&["eod_token_id"])? {
                put("ggml.eos_token_id", id.into());
            }
            let generation =
                read_json(&self.folder.join("generation_config.json"))?.unwrap_or_default();
            let ends = generation
                .get("eos_token_id")
                .and_then(Json::as_array)
                .filter(|ends| ends.len() > 1);
            if let Some(id) = ends.and_then(|ends| u32::try_from(ends[0].as_u64()?).ok()) {
                put("ggml.eot_token_id", id.into());
            }
        }
        if family.arch == "modern-bert" {
            put("ggml.add_sep_token", true.into());
        }
        for (name, _) in SPECIAL {
            let add = ends
                .adds
                .iter()
                .find(|(special, _)| *special == name)
                .map(|(_, add)| *add);
            let setting = || {
                self.settings
                    .as_ref()?
                    .get(format!("add_{name}_token"))?
                    .as_bool()
            };
            if let Some(add) = add
                .or_else(setting)
                .filter(|_| matches!(name, "bos" | "eos" | "sep"))
            {
                put(&format!("ggml.add_{name}_token"), add.into());
            }
        }
        if is_gemma4 {
            put("ggml.add_bos_token", true.into());
        }
        let flag = |value: Option<&Json>| value.and_then(Json::as_bool);
        if matches!(self.model, "bert" | "t5") {
            put(
                "ggml.token_type_count",
                config.u32("type_vocab_size")?.into(),
            );
        }
        if let Some(json) = &self.json {
            for step in steps(json, "normalizer", "normalizers") {
                let (lowercase, strip_accents) = match step.get("type").and_then(Json::as_str) {
                    Some("Lowercase") => (Some(true), None),
                    Some("StripAccents") => (None, Some(true)),
                    Some("BertNormalizer") => {
                        (flag(step.get("lowercase")), flag(step.get("strip_accents")))
                    }
                    _ => (None, None),
                };
                for (name, value) in [("lowercase", lowercase), ("strip_accents", strip_accents)] {
                    if let Some(value) = value {
                        put(&format!("ggml.normalizer.{name}"), value.into());
                    }
                }
            }
            if self.model == "t5" {
                let is =
                    |step: &Json, name: &str| step.get("type").and_then(Json::as_str) == Some(name);
                let prefix = steps(json, "pre_tokenizer", "pretokenizers").any(|step| {
                    let never = step.get("prepend_scheme").and_then(Json::as_str) == Some("never");
                    is(step, "Metaspace")
                        && !never
                        && flag(step.get("add_prefix_space")) != Some(false)
                });
                let splits = steps(json, "pre_tokenizer", "pretokenizers")
                    .any(|step| is(step, "WhitespaceSplit"));
                let merges =
                    steps(json, "normalizer", "normalizers").any(|step| is(step, "Replace"));
                put("ggml.add_space_prefix", prefix.into());
                put("ggml.remove_extra_whitespaces", (splits || merges).into());
                if !self.charsmap.is_empty() {
                    put(
                        "ggml.precompiled_charsmap",
                        Value::Array(Array::U8(self.charsmap.clone())),
                    );
                }
            }
        }
        let setting = flag(
            self.settings
                .as_ref()
                .and_then(|settings| settings.get("add_prefix_space")),
        );
        match (family.spaces, setting) {
            (Spaces::Trained, _) => {
                if let Some(add) = self.adds_space {
                    put("ggml.add_space_prefix", add.into());
                }
            }
            (Spaces::Never, _) if self.scores.is_some() => {
                put("ggml.add_space_prefix", false.into())
            }
            (Spaces::Setting, Some(add)) => put("ggml.add_space_prefix", add.into()),
            _ => {}
        }
        self.write_templates(&mut put)
    }

    /// The number of a token that `tokenizer.json` lists as added.
    fn added_id(&self, text: &str) -> Option<u32> {
        let added = self.json.as_ref()?.get("added_tokens")?.as_array()?;
        let token = added
            .iter()
            .find(|token| token.get("content").and_then(Json::as_str) == Some(text))?;
        token.get("id")?.as_u64()?.try_into().ok()
    }

    /// What the post-processor of `tokenizer.json` puts around a text.
    fn ends(&self) -> Ends {
        let mut ends = Ends::default();
        let Some(post) = self
            .json
            .as_ref()
            .and_then(|json| json.get("post_processor"))
            .filter(|post| !post.is_null())
        else {
            return ends;
        };
        let one = [post.clone()];
        let processors = post
            .get("processors")
            .and_then(Json::as_array)
            .map_or(&one[..], Vec::as_slice);
        for processor in processors {
            match processor.get("type").and_then(Json::as_str) {
                Some("ByteLevel") => ["bos", "eos"]
                    .into_iter()
                    .for_each(|name| ends.or_add(name, false)),
                Some("TemplateProcessing") => {
                    let single = processor
                        .get("single")
                        .and_then(Json::as_array)
                        .map_or(&[][..], Vec::as_slice);
                    let special = |item: Option<&Json>| {
                        item?
                            .get("SpecialToken")?
                            .get("id")?
                            .as_str()
                            .map(str::to_owned)
                    };
                    if single.len() > 1 {
                        for (name, item) in [("bos", single.first()), ("eos", single.last())] {
                            if let Some(text) = special(item) {
                                ends.add(name, true);
                                ends.texts.push((name, text));
                            }
                        }
                    }
                    let pair = processor
                        .get("pair")
                        .and_then(Json::as_array)
                        .map_or(&[][..], Vec::as_slice);
                    if let Some(add) = self.separates(pair, &ends) {
                        ends.add("sep", add);
                    }
                }
                _ => {}
            }
        }
        ends
    }

    /// Whether a pair of texts has a separator between them, if it has anything there: the end of a
    /// text only counts where no text has one.
    fn separates(&self, pair: &[Json], ends: &Ends) -> Option<bool> {
        let special = |item: &Json| {
            item.get("SpecialToken")
                .and_then(|token| token.get("id")?.as_str().map(str::to_owned))
        };
        let is_text = |item: &Json, name: &str| {
            item.get("Sequence")
                .and_then(|text| text.get("id")?.as_str())
                == Some(name)
        };
        let first = pair.iter().position(|item| is_text(item, "A"))?;
        let between = &pair[first + 1
            ..first
                + 1
                + pair[first + 1..]
                    .iter()
                    .position(|item| is_text(item, "B"))?];
        let ends_texts = ends.texts.iter().any(|(name, _)| *name == "eos");
        let separators = [
            self.special_text("sep_token"),
            self.special_text("eos_token"),
        ];
        let separates = |item: &Json| {
            special(item).is_some_and(|text| separators.contains(&Some(text.as_str())))
        };
        match between {
            [] => None,
            [one] => Some(separates(one) && !ends_texts),
            [_, second, ..] => Some(separates(second)),
        }
    }

    /// The chat templates: a file of their own, or a text or list in `tokenizer_config.json`.
    fn write_templates(&self, put: &mut dyn FnMut(&str, Value)) -> Result<(), Failure> {
        let jinja = read_file(&self.folder.join("chat_template.jinja"), MAX_MODEL)?;
        let json = read_json(&self.folder.join("chat_template.json"))?;
        let setting = self
            .settings
            .as_ref()
            .and_then(|settings| settings.get("chat_template"));
        let setting = setting.filter(|template| !template.is_null()).cloned();
        let template = match (setting, jinja) {
            (Some(setting), _) => Some(setting),
            (None, Some(text)) => {
                let text = String::from_utf8(text)
                    .map_err(|error| self.refuse("chat_template.jinja", error))?;
                Some(Json::String(text))
            }
            (None, None) => json.and_then(|json| json.get("chat_template").cloned()),
        };
        let mut names = Vec::new();
        match template {
            None | Some(Json::Null) if self.model == "rwkv" => {
                put("chat_template", world::TEMPLATE.into())
            }
            None | Some(Json::Null) => {}
            Some(Json::String(text)) => put("chat_template", text.into()),
            Some(Json::Array(list)) => {
                for item in &list {
                    let text = |key: &str| item.get(key).and_then(Json::as_str);
                    let (Some(name), Some(template)) = (text("name"), text("template")) else {
                        return Err(self.refuse(
                            "tokenizer_config.json",
                            "a chat template without a name or a text",
                        ));
                    };
                    let name = name.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
                    match name.as_str() {
                        "default" => put("chat_template", template.into()),
                        _ => {
                            put(&format!("chat_template.{name}"), template.into());
                            names.push(name);
                        }
                    }
                }
            }
            Some(_) => {
                return Err(self.refuse(
                    "tokenizer_config.json",
                    "chat_template is neither a text nor a list",
                ));
            }
        }
        if !names.is_empty() {
            put(
                "chat_templates",
                Value::Array(Array::Strings(names.iter().collect())),
            );
        }
        Ok(())
    }
}

/// The steps of a part of `tokenizer.json`, of which there can be one or a list.
fn steps<'j>(json: &'j Json, part: &str, list: &str) -> impl Iterator<Item = &'j Json> {
    let part = json.get(part);
    let steps = part.and_then(|part| part.get(list)?.as_array());
    steps
        .map_or(part.map_or(&[][..], std::slice::from_ref), Vec::as_slice)
        .iter()
}

/// Tokens around a text.
#[derive(Default)]
struct Ends {
    adds: Vec<(&'static str, bool)>,
    texts: Vec<(&'static str, String)>,
}

impl Ends {
    fn add(&mut self, name: &'static str, add: bool) {
        self.adds.retain(|(known, _)| *known != name);
        self.adds.push((name, add));
    }

    fn or_add(&mut self, name: &'static str, add: bool) {
        if self.adds.iter().all(|(known, _)| *known != name) {
            self.adds.push((name, add));
        }
    }
}

/// Added tokens that some models do not mark as special, though they are.
fn looks_special(text: &str) -> bool {
    let inside = |start: &str, end: &str| text.starts_with(start) && text.ends_with(end);
    matches!(text, "<pad>" | "<mask>" | "<2mass>" | "[@BOS@]")
        || inside("<|", "|>")
        || inside("<｜", "｜>")
        || inside("<unused", ">")
}

/// Whether a text is `<0xNN>`.
fn is_byte(text: &str) -> bool {
    let digits = text
        .strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
}
