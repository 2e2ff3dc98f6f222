//! The vocabulary of `tokenizer.json`: byte-level BPE, SentencePiece's with `▁` and bytes,
//! WordPiece, or unigram.

use super::{
    BYTE, CONTROL, MAX_VOCAB, NORMAL, SPECIAL, Tokenizer, UNKNOWN, UNUSED, USER_DEFINED,
    looks_special, note_flags, steps,
};
use crate::io::Failure;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value as Json;
use std::collections::HashMap;

const FILE: &str = "tokenizer.json";

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

/// Texts and types of tokens by number.
type Texts<'j> = HashMap<usize, (&'j str, i32)>;

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Bpe,
    WordPiece,
    Unigram,
}

/// The part `model`.
#[derive(Clone, Copy)]
struct Model<'j> {
    json: Option<&'j Json>,
    kind: Kind,
    /// Whether it is one of SentencePiece, with `▁` and bytes.
    sentencepiece: bool,
}

impl<'j> Model<'j> {
    fn of(json: Option<&'j Json>) -> Result<Model<'j>, String> {
        let name = json.and_then(|model| model.get("type")?.as_str());
        let kind = match name.unwrap_or("") {
            "BPE" => Kind::Bpe,
            "WordPiece" => Kind::WordPiece,
            "Unigram" => Kind::Unigram,
            other => {
                return Err(format!(
                    "a model of type {other:?}, and only BPE, WordPiece and Unigram are converted"
                ));
            }
        };
        let mut model = Model {
            json,
            kind,
            sentencepiece: false,
        };
        model.sentencepiece = model.is("byte_fallback") && !model.is("ignore_merges");
        Ok(model)
    }

    /// Whether a flag is set.
    fn is(&self, key: &str) -> bool {
        self.get(key).and_then(Json::as_bool) == Some(true)
    }

    fn get(&self, key: &str) -> Option<&'j Json> {
        self.json.and_then(|json| json.get(key))
    }

    /// The text and type of token `id` in a GGUF file.
    fn token(&self, id: usize, found: Option<&(&str, i32)>) -> (String, i32) {
        let (text, token_type) = match found {
            None => (format!("[PAD{id}]"), UNUSED),
            Some((text, USER_DEFINED)) if !self.sentencepiece && self.kind != Kind::Unigram => {
                (text.replace('▁', " "), USER_DEFINED)
            }
            Some((text, NORMAL)) if self.sentencepiece && is_byte(text) => {
                ((*text).to_owned(), BYTE)
            }
            Some((text, token_type)) => ((*text).to_owned(), *token_type),
        };
        if self.kind != Kind::WordPiece || token_type == CONTROL {
            return (text, token_type);
        }
        // Files mark the beginnings of words, not what goes on.
        let text = match text.strip_prefix("##") {
            Some(rest) => rest.to_owned(),
            None => format!("▁{text}"),
        };
        (text, token_type)
    }
}

impl Tokenizer {
    /// Reads the vocabulary of `tokenizer.json`.
    pub(super) fn read_json_model(&mut self, n_vocab: Option<usize>) -> Result<(), Failure> {
        let Some(json) = self.json.take() else {
            return Err(self.refuse(FILE, "no such file, and there is no tokenizer.model either"));
        };
        let model = Model::of(json.get("model")).map_err(|what| self.refuse(FILE, what))?;
        let (kind, sentencepiece) = (model.kind, model.sentencepiece);
        let mut texts = self.numbered(&model)?;
        let mut scores = Vec::new();
        if kind == Kind::Unigram {
            scores = self.read_unigram(&model, &mut texts)?;
        }
        self.read_added(&json, sentencepiece, &mut texts)?;
        let n_tokens = texts.keys().max().map_or(0, |last| last + 1);
        let n_vocab = if sentencepiece {
            n_tokens
        } else {
            n_vocab.unwrap_or(n_tokens)
        };
        if n_tokens > n_vocab {
            return Err(self.refuse(
                FILE,
                format_args!("token {} is beyond a vocab_size of {n_vocab}", n_tokens - 1),
            ));
        }
        for id in 0..n_vocab {
            let (text, token_type) = model.token(id, texts.get(&id));
            self.tokens.push(text.into_bytes());
            self.types.push(token_type);
        }
        match kind {
            Kind::WordPiece => (self.model, self.pre) = ("bert", "bert-bge"),
            Kind::Unigram => {
                scores.resize(n_vocab, -10000.0);
                (self.model, self.scores) = ("t5", Some(scores));
                self.charsmap = self.read_charsmap(&json)?;
            }
            Kind::Bpe if sentencepiece => self.scores = Some(vec![-1000.0; n_vocab]),
            Kind::Bpe => {
                let pre = self.pre_tokenizer(&json, model.is("ignore_merges"))?;
                (self.model, self.pre) = ("gpt2", pre);
                self.merges = self.read_merges(&json)?;
            }
        }
        self.json = Some(json);
        Ok(())
    }

    fn bad_entry(&self) -> Failure {
        self.refuse(
            FILE,
            format_args!("a token without a text or an id below {MAX_VOCAB}"),
        )
    }

    fn id_of(&self, id: &Json) -> Result<usize, Failure> {
        id.as_u64()
            .map(|id| id as usize)
            .filter(|id| *id < MAX_VOCAB)
            .ok_or_else(|| self.bad_entry())
    }

    /// A vocabulary of texts with their numbers.
    fn numbered<'j>(&self, model: &Model<'j>) -> Result<Texts<'j>, Failure> {
        let texts = model.get("vocab").and_then(Json::as_object);
        let texts = texts.into_iter().flatten();
        texts
            .map(|(text, id)| Ok((self.id_of(id)?, (&**text, NORMAL))))
            .collect()
    }

    /// Adds a vocabulary of pairs of texts and scores; returns these.
    fn read_unigram<'j>(
        &self,
        model: &Model<'j>,
        texts: &mut Texts<'j>,
    ) -> Result<Vec<f32>, Failure> {
        let mut scores = Vec::new();
        let unknown = model.get("unk_id").and_then(Json::as_u64);
        let vocab = model.get("vocab").and_then(Json::as_array);
        for piece in vocab.into_iter().flatten() {
            let text = piece
                .get(0)
                .and_then(Json::as_str)
                .filter(|_| scores.len() < MAX_VOCAB);
            let score = piece.get(1).and_then(Json::as_f64);
            let (Some(text), Some(score)) = (text, score) else {
                return Err(self.bad_entry());
            };
            let is_unknown = unknown == Some(scores.len() as u64);
            let kind = if is_unknown { UNKNOWN } else { NORMAL };
            texts.insert(scores.len(), (text, kind));
            scores.push(score as f32);
        }
        Ok(scores)
    }

    /// Adds the tokens that `json` lists as added.
    fn read_added<'j>(
        &mut self,
        json: &'j Json,
        sentencepiece: bool,
        texts: &mut Texts<'j>,
    ) -> Result<(), Failure> {
        let n_base = texts.len();
        let named: Vec<String> = SPECIAL
            .iter()
            .filter_map(|(name, _)| self.special_text(&format!("{name}_token")))
            .map(str::to_owned)
            .collect();
        let added = json.get("added_tokens").and_then(Json::as_array);
        for token in added.into_iter().flatten() {
            let text = token.get("content").and_then(Json::as_str);
            let text = text.ok_or_else(|| self.bad_entry())?;
            let special = match sentencepiece {
                true => named.iter().any(|name| name == text),
                false => {
                    token.get("special").and_then(Json::as_bool) == Some(true)
                        || looks_special(text)
                }
            };
            let id = self.id_of(token.get("id").unwrap_or(&Json::Null))?;
            note_flags(&mut self.flagged, id, token);
            let kind = match special {
                _ if texts.get(&id).is_some_and(|(_, kind)| *kind == UNKNOWN) => UNKNOWN,
                true => CONTROL,
                false if sentencepiece && id < n_base => NORMAL,
                false => USER_DEFINED,
            };
            texts.insert(id, (text, kind));
        }
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
        let types = steps(json, "normalizer", "normalizers")
            .filter_map(|step| step.get("type").and_then(Json::as_str));
        // Composed characters are all that NFC leaves; llama.cpp takes a text as it comes, too.
        let mut others = types.filter(|step| *step != "NFC");
        if let Some(step) = others.next() {
            return Err(self.refuse(
                FILE,
                format_args!(
                    "normalizer {step}, which no byte-level vocabulary in a GGUF file has"
                ),
            ));
        }
        let text = |step: &Json, key: &str| {
            step.get(key)
                .and_then(Json::as_str)
                .unwrap_or("")
                .to_owned()
        };
        let mut found = Vec::new();
        for step in steps(json, "pre_tokenizer", "pretokenizers") {
            match text(step, "type").as_str() {
                "Split" => {
                    let pattern = text(step.get("pattern").unwrap_or(&Json::Null), "Regex");
                    // DeepSeek writes the characters themselves.
                    found.push(pattern.replace('\r', r"\r").replace('\n', r"\n"));
                }
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
    pub(super) fn read_merges(&self, json: &Json) -> Result<Vec<String>, Failure> {
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
}

/// Whether a text is `<0xNN>`.
fn is_byte(text: &str) -> bool {
    let digits = text
        .strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
}
