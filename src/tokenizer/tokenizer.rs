//! The tokenizer of a model.

use crate::gguf::{Array, Metadata, Value};
use crate::tokenizer::bpe::Bpe;
use crate::tokenizer::plamo2::Plamo2;
use crate::tokenizer::rwkv::Rwkv;
use crate::tokenizer::special::{Parse, Part, Specials};
use crate::tokenizer::special_ids::{BOS, EOS, FillInTheMiddleIds, Kind, SpecialIds};
use crate::tokenizer::spm::Spm;
use crate::tokenizer::unigram::Unigram;
use crate::tokenizer::vocab::{
    BYTE, CONTROL, LSTRIP, NORMAL, RSTRIP, SINGLE_WORD, UNKNOWN, USER_DEFINED, Vocab,
};
use crate::tokenizer::wpm::Wpm;
use crate::tokenizer::{
    FillInTheMiddle, TokenizerError, append_unescaped, bpe, clean_spaces, escape_spaces, rwkv,
    vocab,
};
use std::collections::BTreeSet;
use std::ops::Range;

/// The tokenizer of a model. Immutable; share it between threads.
pub struct Tokenizer {
    vocab: Vocab,
    model: Model,
    model_name: String,
    pre_name: Option<String>,
    specials: Specials,
    bos: Option<u32>,
    eos: Option<u32>,
    eot: Option<u32>,
    eom: Option<u32>,
    unknown: Option<u32>,
    eog: BTreeSet<u32>,
    fill_in_the_middle: FillInTheMiddleIds,
    add_bos: bool,
    add_eos: bool,
    /// Separator between two texts, in addition to the tokens at their ends.
    separator: Option<u32>,
    add_space_prefix: bool,
    clean_spaces: bool,
}

enum Model {
    Spm(Spm),
    Bpe(Bpe),
    Wpm(Wpm),
    Unigram(Unigram),
    Rwkv(Rwkv),
    Plamo2(Plamo2),
}

impl Model {
    /// Bytes of its tables.
    fn bytes(&self) -> usize {
        match self {
            Model::Spm(spm) => spm.bytes(),
            Model::Bpe(bpe) => bpe.bytes(),
            Model::Unigram(unigram) => unigram.bytes(),
            Model::Plamo2(plamo2) => plamo2.bytes(),
            Model::Wpm(_) | Model::Rwkv(_) => 0,
        }
    }

    fn new(
        m: &Metadata,
        kind: &Kind<'_>,
        vocab: &Vocab,
        unknown: Option<u32>,
        add_space_prefix: bool,
    ) -> Result<Model, TokenizerError> {
        Ok(match kind.pre {
            Some(pre) => {
                let key = "tokenizer.ggml.merges";
                let merges = match m.get(key) {
                    None if pre.may_lack_merges => None,
                    _ => Some(m.strings(key)?.clone()),
                };
                Model::Bpe(Bpe::new(pre, merges, vocab.hasher)?)
            }
            None if kind.is_rwkv() => Model::Rwkv(Rwkv::new(vocab, unknown)),
            None if kind.is_plamo2() => {
                Model::Plamo2(Plamo2::new(vocab, &scores(m, vocab.len())?)?)
            }
            None if kind.is_bert() => {
                let lowercase = m
                    .opt_bool("tokenizer.ggml.normalizer.lowercase")?
                    .unwrap_or(true);
                let strip_accents = m
                    .opt_bool("tokenizer.ggml.normalizer.strip_accents")?
                    .unwrap_or(lowercase);
                Model::Wpm(Wpm::new(vocab, lowercase, strip_accents, unknown))
            }
            None if kind.is_unigram() => {
                let scores = scores(m, vocab.len())?;
                Model::Unigram(Unigram::new(vocab, scores, unknown, add_space_prefix, m)?)
            }
            None => Model::Spm(Spm::new(vocab, &scores(m, vocab.len())?, unknown)?),
        })
    }
}

impl Tokenizer {
    /// Bytes of the tables that find tokens; their texts are in the file.
    pub(crate) fn bytes(&self) -> u64 {
        (self.vocab.bytes() + self.model.bytes() + self.specials.bytes()) as u64
    }

    /// The tokenizer of a file, if it has one: files made for benchmarks lack it or say `none`.
    ///
    /// # Errors
    /// As [`Tokenizer::from_metadata`].
    pub fn opt_from_metadata(m: &Metadata) -> Result<Option<Tokenizer>, TokenizerError> {
        match m.opt_str("tokenizer.ggml.model")? {
            None | Some("no_vocab" | "none") => Ok(None),
            Some(_) => Tokenizer::from_metadata(m).map(Some),
        }
    }

    /// The tokenizer that a file describes.
    ///
    /// A byte-level BPE without `tokenizer.ggml.pre` (a file older than that key) gets the
    /// pre-tokeniser `default`, as in llama.cpp.
    ///
    /// # Errors
    /// [`TokenizerError::Metadata`] for missing keys and wrong types, [`TokenizerError::Model`] and
    /// [`TokenizerError::PreTokenizer`] for what is not supported, and the other variants for an
    /// inconsistent vocabulary.
    pub fn from_metadata(m: &Metadata) -> Result<Tokenizer, TokenizerError> {
        let kind = Kind::of(m)?;
        let types = m.opt_i32s("tokenizer.ggml.token_type")?;
        let tokens = m.strings("tokenizer.ggml.tokens")?;
        let tokens = match kind.is_rwkv() {
            true => (0..tokens.len())
                .map(|i| rwkv::unescape(tokens.get(i).unwrap_or_default()))
                .collect(),
            false => tokens.clone(),
        };
        let mut vocab = Vocab::new(tokens, types.as_deref())?;
        let (special, fill_in_the_middle, mut eog) = SpecialIds::read(m, &kind, &mut vocab)?;
        settle_exceptions(&mut vocab, &mut eog);
        let specials = Specials::new(&vocab)?;
        set_surroundings(&mut vocab, m)?;

        let add_space_prefix = m
            .opt_bool("tokenizer.ggml.add_space_prefix")?
            .unwrap_or(kind.is("llama"));
        let model = Model::new(m, &kind, &vocab, special.unknown, add_space_prefix)?;
        let (is_bert, is_unigram, pre) = (kind.is_bert(), kind.is_unigram(), kind.pre);
        let add_bos = match pre {
            Some(pre) if pre.raw_utf8 && pre.add_bos => true,
            _ => m
                .opt_bool("tokenizer.ggml.add_bos_token")?
                .unwrap_or(pre.map_or(kind.begins_texts(), |pre| pre.add_bos)),
        };
        let add_eos = m
            .opt_bool("tokenizer.ggml.add_eos_token")?
            .unwrap_or(is_bert || is_unigram);
        let add_separator = m.opt_bool("tokenizer.ggml.add_sep_token")?.unwrap_or(false);
        let SpecialIds {
            bos,
            eos,
            eot,
            eom,
            unknown,
            separator,
        } = special;
        for (flag, key, add, id) in [
            ("add_bos_token", BOS, add_bos, bos),
            ("add_eos_token", EOS, add_eos, eos),
        ] {
            if add && id.is_none() {
                return Err(TokenizerError::NoSpecialToken { flag, key });
            }
        }
        Ok(Tokenizer {
            model,
            model_name: kind.name.to_owned(),
            pre_name: kind.pre_name.map(str::to_owned),
            specials,
            bos,
            eos,
            eot,
            eom,
            unknown,
            eog,
            fill_in_the_middle,
            add_bos,
            add_eos,
            // BERT's separator is the end of its texts already.
            separator: separator.filter(|_| add_separator && !is_bert),
            add_space_prefix,
            clean_spaces: pre.map_or(is_bert, |pre| pre.clean_spaces),
            vocab,
        })
    }

    /// The tokens of `text`.
    ///
    /// With `add_special`, the beginning- and end-of-sequence tokens that the model expects are
    /// added ([`add_bos`](Self::add_bos), [`add_eos`](Self::add_eos)). With `parse_special`,
    /// texts of control tokens in `text` become these tokens: right for a rendered chat
    /// template, wrong for user input, which could end its turn that way. User-defined tokens
    /// are always parsed.
    ///
    /// Bytes without a token are left out by byte-level BPE and become the unknown token in
    /// SentencePiece vocabularies; vocabularies in use have a token for every byte.
    pub fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Vec<u32> {
        self.encode_bytes(text.as_bytes(), add_special, parse_special)
    }

    /// The tokens of a prompt, a text that is to be continued: [`encode`](Self::encode) with
    /// special tokens, but without the one at the end. The one at the beginning is not added to
    /// a text that already begins with it, as some chat templates' texts do.
    pub fn encode_prompt(&self, text: &str) -> Vec<u32> {
        self.encode_prompt_but(text, &[])
    }

    /// As [`encode_prompt`](Self::encode_prompt), but that texts of control tokens in the ranges
    /// `plain` of the prompt's bytes, in order, are plain text: those that a user wrote.
    pub fn encode_prompt_but(&self, text: &str, plain: &[Range<usize>]) -> Vec<u32> {
        let mut ids: Vec<u32> = self.bos.filter(|_| self.add_bos).into_iter().collect();
        self.append(text.as_bytes(), Parse::AllBut(plain), true, &mut ids);
        ids.extend(self.eos.filter(|_| self.add_eos));
        if self.add_bos && self.bos.is_some() && ids.get(1).copied() == self.bos {
            ids.remove(0);
        }
        if self.add_eos {
            ids.pop_if(|id| Some(*id) == self.eos);
        }
        ids
    }

    /// Where texts of control tokens are in `text`, which parsing would take for these tokens.
    pub fn control_texts(&self, text: &str) -> Vec<Range<usize>> {
        self.specials.control_texts(&self.vocab, text.as_bytes())
    }

    /// The tokens of two texts as rerankers read them, each with the special tokens at its end that
    /// the model expects, and a separator between them if the file says so. Special tokens
    /// written in the texts are plain text.
    pub(crate) fn encode_pair(&self, first: &str, second: &str) -> Vec<u32> {
        let mut out: Vec<u32> = self.bos.filter(|_| self.add_bos).into_iter().collect();
        for (text, separator) in [(first, self.separator), (second, None)] {
            out.extend(self.encode(text, false, false));
            out.extend(self.eos.filter(|_| self.add_eos));
            out.extend(separator);
        }
        out
    }

    /// [`encode`](Self::encode) for bytes that need not be UTF-8. In SentencePiece vocabularies a
    /// byte outside any valid character becomes its byte token, so that nothing is lost. In
    /// byte-level BPE it becomes U+FFFD, as in llama.cpp (which however accepts overlong forms
    /// and surrogates as characters).
    pub fn encode_bytes(&self, text: &[u8], add_special: bool, parse_special: bool) -> Vec<u32> {
        let mut out = Vec::new();
        if add_special && self.add_bos {
            out.extend(self.bos);
        }
        self.append(text, Parse::all(parse_special), true, &mut out);
        if add_special && self.add_eos {
            out.extend(self.eos);
        }
        out
    }

    /// The tokens of a text that continues one whose last token is `last`: [`encode`](Self::encode)
    /// without the space that SentencePiece vocabularies put before a text, unless `last` is a
    /// special token. Special tokens written in the text are parsed.
    pub fn encode_continuation(&self, text: &str, last: u32) -> Vec<u32> {
        self.encode_continuation_but(text, &[], last)
    }

    /// As [`encode_continuation`](Self::encode_continuation), with `plain` as in
    /// [`encode_prompt_but`](Self::encode_prompt_but).
    pub(crate) fn encode_continuation_but(
        &self,
        text: &str,
        plain: &[Range<usize>],
        last: u32,
    ) -> Vec<u32> {
        let (parse, begins) = (Parse::AllBut(plain), self.vocab.is(last, CONTROL));
        let mut out = Vec::new();
        self.append(text.as_bytes(), parse, begins, &mut out);
        out
    }

    /// The tokens of bytes inside a text: no space is put before them, and special tokens written
    /// in them are plain text.
    pub fn encode_inside(&self, text: &[u8]) -> Vec<u32> {
        let mut out = Vec::new();
        self.append(text, Parse::UserDefined, false, &mut out);
        out
    }

    /// Appends the tokens of `text`; if `begins`, a text begins here, with a space if the
    /// vocabulary requires one.
    fn append(&self, text: &[u8], parse: Parse<'_>, begins: bool, out: &mut Vec<u32>) {
        let mut after_special = begins;
        self.specials
            .partition(&self.vocab, text, parse, |part| match part {
                Part::Token(id) => {
                    out.push(id);
                    after_special = true;
                }
                Part::Text(text) => {
                    match &self.model {
                        Model::Bpe(bpe) => bpe.encode(&self.vocab, text, out),
                        Model::Rwkv(rwkv) => rwkv.encode(&self.vocab, text, out),
                        Model::Plamo2(plamo2) => plamo2.encode(&self.vocab, text, out),
                        Model::Wpm(wpm) => wpm.encode(&self.vocab, text, out),
                        Model::Unigram(unigram) => {
                            unigram.encode(&self.vocab, text, after_special, out)
                        }
                        Model::Spm(spm) => {
                            let prefix = self.add_space_prefix && after_special;
                            spm.encode(&self.vocab, &escape_spaces(text, prefix), out);
                        }
                    }
                    after_special = false;
                }
            });
    }

    /// The text of a sequence of tokens, as returned by llama.cpp's `llama_detokenize`: without the
    /// space that SentencePiece vocabularies put before a text, and for some families without
    /// spaces before punctuation. Control and unknown tokens are left out unless
    /// `render_special`.
    ///
    /// The result need not be UTF-8. For tokens that arrive one by one use [`TextStream`](crate::tokenizer::TextStream).
    ///
    /// # Errors
    /// [`TokenizerError::UnknownToken`].
    pub fn decode(&self, ids: &[u32], render_special: bool) -> Result<Vec<u8>, TokenizerError> {
        let out = self.decode_exact(ids, render_special)?;
        Ok(if self.clean_spaces {
            clean_spaces(&out)
        } else {
            out
        })
    }

    /// [`decode`](Self::decode) without removing spaces before punctuation: the inverse of
    /// [`encode`](Self::encode).
    ///
    /// # Errors
    /// [`TokenizerError::UnknownToken`].
    pub fn decode_exact(
        &self,
        ids: &[u32],
        render_special: bool,
    ) -> Result<Vec<u8>, TokenizerError> {
        let mut out = Vec::new();
        for (i, &id) in ids.iter().enumerate() {
            self.append_bytes(id, render_special, &mut out)?;
            if i == 0 && self.add_space_prefix && out.first() == Some(&b' ') {
                out.remove(0);
            }
        }
        Ok(out)
    }

    /// [`decode`](Self::decode) with U+FFFD for bytes that are not UTF-8.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownToken`].
    pub fn decode_lossy(
        &self,
        ids: &[u32],
        render_special: bool,
    ) -> Result<String, TokenizerError> {
        let bytes = self.decode(ids, render_special)?;
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
    }

    /// The bytes that a token adds to a text, including those of special tokens; `None` if there is
    /// no such token. Unused tokens add nothing.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        self.append_bytes(id, true, &mut bytes).ok()?;
        Some(bytes)
    }

    pub(super) fn append_bytes(
        &self,
        id: u32,
        render_special: bool,
        out: &mut Vec<u8>,
    ) -> Result<(), TokenizerError> {
        let text = self.token_text(id).ok_or(TokenizerError::UnknownToken {
            id,
            n_vocab: self.n_vocab(),
        })?;
        if self.vocab.is(id, CONTROL | UNKNOWN) {
            out.extend_from_slice(if render_special { text } else { b"" });
        } else if self.vocab.is(id, USER_DEFINED) {
            out.extend_from_slice(text);
        } else if self.vocab.is(id, NORMAL) {
            match &self.model {
                Model::Bpe(bpe) if !bpe.pre.raw_utf8 => bpe::append_from_alphabet(text, out),
                Model::Rwkv(_) | Model::Plamo2(_) => out.extend_from_slice(text),
                _ => append_unescaped(text, out),
            }
        } else if self.vocab.is(id, BYTE) {
            out.extend(vocab::byte_of(text));
        }
        Ok(())
    }

    /// The text of a token as stored in the file's vocabulary (spaces as `▁` or `Ġ`).
    pub fn token_text(&self, id: u32) -> Option<&[u8]> {
        ((id as usize) < self.n_vocab()).then(|| self.vocab.text(id))
    }

    /// The token whose text in the vocabulary is `text`.
    pub fn token_id(&self, text: &[u8]) -> Option<u32> {
        self.vocab.find(text)
    }

    /// Number of tokens.
    pub fn n_vocab(&self) -> usize {
        self.vocab.len()
    }

    /// The beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The end-of-turn token: the one the file names, or the first well-known one.
    pub fn eot(&self) -> Option<u32> {
        self.eot
    }

    /// The end-of-message token, after which a tool is expected to answer.
    pub fn eom(&self) -> Option<u32> {
        self.eom
    }

    /// The token for text that the vocabulary cannot express.
    pub fn unknown(&self) -> Option<u32> {
        self.unknown
    }

    /// The tokens that end a generation, in ascending order.
    pub fn eog(&self) -> impl ExactSizeIterator<Item = u32> {
        self.eog.iter().copied()
    }

    /// Fill-in-the-middle tokens, if the model has them.
    pub fn fill_in_the_middle(&self) -> Option<FillInTheMiddle> {
        let [prefix, suffix, middle, _, repository, file] = self.fill_in_the_middle;
        Some(FillInTheMiddle {
            prefix: prefix?,
            suffix: suffix?,
            middle: middle?,
            repository,
            file,
        })
    }

    /// Whether a token ends the generation: end of sequence, turn or message, by id or by a
    /// well-known text.
    pub fn is_eog(&self, id: u32) -> bool {
        self.eog.contains(&id)
    }

    /// Whether a token is a control token: not part of any text, and parsed only on request.
    pub fn is_control(&self, id: u32) -> bool {
        self.vocab.is(id, CONTROL)
    }

    /// Whether texts begin with [`bos`](Self::bos).
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// Whether texts end with [`eos`](Self::eos).
    pub fn add_eos(&self) -> bool {
        self.add_eos
    }

    /// `tokenizer.ggml.model`: `llama`, `gpt2`, `gemma4`, `whitespace`, `bert`, `t5` or `rwkv`.
    pub fn model(&self) -> &str {
        &self.model_name
    }

    /// The pre-tokeniser of a byte-level BPE, by the name the file gives it.
    pub fn pre(&self) -> Option<&str> {
        self.pre_name.as_deref()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("model", &self.model_name)
            .field("pre", &self.pre_name)
            .field("n_vocab", &self.n_vocab())
            .finish_non_exhaustive()
    }
}

/// Corrects attributes that cannot be derived from the texts, as llama.cpp does.
fn settle_exceptions(vocab: &mut Vocab, eog: &mut BTreeSet<u32>) {
    // The channel markers of gpt-oss are always shown.
    for text in ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"] {
        if let Some(id) = vocab.find(text.as_bytes()) {
            vocab.attrs[id as usize] = USER_DEFINED;
        }
    }
    let ends = |text: &str| vocab.find(text.as_bytes()).filter(|id| eog.contains(id));
    // Where `<|return|>` or `<|flush|>` end the generation, `<|end|>` only ends a message.
    let calls = ends("<|call|>").or(ends("<|calls|>")).is_some();
    let message_end =
        ends("<|end|>").filter(|_| calls && ends("<|return|>").or(ends("<|flush|>")).is_some());
    // Gemma 4 and PLaMo have `</s>` as an ordinary token.
    let ordinary =
        ends("</s>").filter(|_| ends("<|tool_response>").or(ends("<|plamo:eos|>")).is_some());
    for (id, attr) in [(message_end, USER_DEFINED), (ordinary, NORMAL)] {
        if let Some(id) = id {
            eog.remove(&id);
            vocab.attrs[id as usize] = attr;
        }
    }
}

/// Keys that list ids of added tokens: those that strip white space, and words of their own.
/// llama.cpp has no such keys.
const ADDED_TOKENS: [(&str, u8); 3] = [
    ("tokenizer.ggml.added_tokens.lstrip", LSTRIP),
    ("tokenizer.ggml.added_tokens.rstrip", RSTRIP),
    ("tokenizer.ggml.added_tokens.single_word", SINGLE_WORD),
];

/// Sets what may be around tokens that are parsed: what the file lists, or else what llama.cpp
/// recognises by names.
fn set_surroundings(vocab: &mut Vocab, m: &Metadata) -> Result<(), TokenizerError> {
    for (key, attr) in ADDED_TOKENS {
        for &id in m.opt_i32s(key)?.unwrap_or_default().iter() {
            let n_vocab = vocab.len();
            let attrs = vocab.attrs.get_mut(id as usize);
            let id = id as u32;
            *attrs.ok_or(TokenizerError::SpecialId { key, id, n_vocab })? |= attr;
        }
    }
    if ADDED_TOKENS.iter().any(|(key, _)| m.get(key).is_some()) {
        return Ok(());
    }
    let name = m
        .opt_str("general.name")?
        .unwrap_or_default()
        .to_lowercase();
    let pre = m.opt_str("tokenizer.ggml.pre")?.unwrap_or_default();
    let contains = |s: &str, parts: &[&str]| parts.iter().any(|part| s.contains(part));
    if contains(pre, &["jina-v2-de", "jina-v2-es", "jina-v2-code"]) {
        vocab.set(b"<mask>", LSTRIP, true);
    } else if contains(&name, &["phi-3", "phi3"]) {
        for attr in vocab
            .attrs
            .iter_mut()
            .filter(|a| **a & (CONTROL | UNKNOWN | USER_DEFINED) != 0)
        {
            *attr |= RSTRIP;
        }
        for text in ["<unk>", "<s>", "<|endoftext|>"] {
            vocab.set(text.as_bytes(), RSTRIP, false);
        }
    } else if contains(&name, &["modern-bert"]) {
        vocab.set(b"[MASK]", LSTRIP, true);
    }
    Ok(())
}

/// One score per token; zeros when the file has none.
fn scores(m: &Metadata, n_vocab: usize) -> Result<Vec<f32>, TokenizerError> {
    let key = "tokenizer.ggml.scores";
    let scores = match m.get(key) {
        None => vec![0.0; n_vocab],
        Some(Value::Array(Array::I32(scores))) => scores.iter().map(|&s| s as f32).collect(),
        Some(_) => m.f32s(key)?.to_vec(),
    };
    if scores.len() != n_vocab {
        return Err(TokenizerError::ArrayLength {
            key,
            len: scores.len(),
            n_vocab,
        });
    }
    Ok(scores)
}
