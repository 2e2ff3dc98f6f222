//! The vocabulary: `tokenizer.model`, `tokenizer.json` or RWKV's file, and what
//! `tokenizer_config.json` adds.

mod json;
mod keys;

use super::config::{Config, read_file, read_json};
use super::{sentencepiece, world};
use crate::io::Failure;
use serde_json::Value as Json;
use std::collections::BTreeSet;
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

/// Flags of added tokens, by their names at Hugging Face and in GGUF files: they strip white space,
/// or are words of their own.
const FLAGS: [&str; 3] = ["lstrip", "rstrip", "single_word"];

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
    /// Added tokens that have the flags of [`FLAGS`].
    flagged: [BTreeSet<i32>; FLAGS.len()],
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
            flagged: Default::default(),
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
            note_flags(&mut self.flagged, id, token);
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

    /// The text of a special token in `tokenizer_config.json`: a text, or an object with one.
    fn special_text(&self, name: &str) -> Option<&str> {
        let token = self.settings.as_ref()?.get(name)?;
        token.as_str().or_else(|| token.get("content")?.as_str())
    }
}

/// Notes the flags of an added token.
fn note_flags(flagged: &mut [BTreeSet<i32>; FLAGS.len()], id: usize, token: &Json) {
    for (ids, flag) in flagged.iter_mut().zip(FLAGS) {
        if token.get(flag).and_then(Json::as_bool) == Some(true) {
            ids.extend(i32::try_from(id));
        }
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

/// Added tokens that some models do not mark as special, though they are.
fn looks_special(text: &str) -> bool {
    let inside = |start: &str, end: &str| text.starts_with(start) && text.ends_with(end);
    matches!(text, "<pad>" | "<mask>" | "<2mass>" | "[@BOS@]")
        || inside("<|", "|>")
        || inside("<｜", "｜>")
        || inside("<unused", ">")
}
