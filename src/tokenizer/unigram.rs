//! Unigram vocabularies (T5, XLM-RoBERTa): of all ways to split a text into tokens the one with the
//! largest sum of scores, which are logarithms of probabilities (Kudo, "Subword Regularization",
//! 2018, arXiv 1804.10959).
//!
//! As in llama.cpp, sums are 64-bit, of equal ones the first found wins, a character without a
//! token of its own may be the unknown token, at a penalty, and unknown characters side by side are
//! one token. Where a vocabulary has byte tokens, which llama.cpp ignores here, an unknown
//! character becomes its bytes, as in SentencePiece.

use crate::gguf::Metadata;
use crate::tokenizer::bpe::char_len;
use crate::tokenizer::charsmap::Charsmap;
use crate::tokenizer::special::Trie;
use crate::tokenizer::spm::{all_words, first_word};
use crate::tokenizer::vocab::{BYTE, NORMAL, USER_DEFINED, Vocab, byte_text};
use crate::tokenizer::{SPACE, TokenizerError};

/// Score of an unknown character, as a distance below the lowest score of a token.
const UNKNOWN_PENALTY: f32 = 10.0;

/// A unigram vocabulary.
pub(super) struct Unigram {
    /// Replaces characters before anything else.
    charsmap: Option<Charsmap>,
    /// Whether spaces only separate words, so that several are one, and those at the ends none.
    merge_spaces: bool,
    add_space_prefix: bool,
    tokens: Trie,
    /// Scores, by token.
    scores: Vec<f32>,
    unknown: Option<u32>,
    unknown_score: f32,
    /// Tokens of single bytes, if there is one for each.
    bytes: Option<Vec<u32>>,
    /// Whether no token contains a `▁` after another character, so that words are split one by
    /// one.
    words: bool,
}

/// Best segmentation of a text up to a byte.
#[derive(Clone, Copy)]
struct Best {
    /// Sum of the scores.
    score: f64,
    /// Start of the last token.
    start: usize,
    /// The last token, or none for an unknown character.
    token: Option<u32>,
}

impl Unigram {
    /// Bytes of its tables.
    pub(super) fn bytes(&self) -> usize {
        self.tokens.bytes() + size_of_val(&self.scores[..])
    }

    pub(super) fn new(
        vocab: &Vocab,
        mut scores: Vec<f32>,
        unknown: Option<u32>,
        add_space_prefix: bool,
        m: &Metadata,
    ) -> Result<Unigram, TokenizerError> {
        if let Some(id) = (0u32..)
            .zip(&scores)
            .find_map(|(id, score)| (!score.is_finite()).then_some(id))
        {
            return Err(TokenizerError::Score { id });
        }
        let normal = (0u32..)
            .zip(&scores)
            .filter(|&(id, _)| vocab.is(id, NORMAL));
        let lowest = normal.map(|(_, &score)| score).fold(f32::MAX, f32::min);
        let ids = 0..vocab.len() as u32;
        // Unused tokens, which have no attribute, take part as in llama.cpp; their scores are so
        // low that they never win.
        let in_texts =
            |id: &u32| vocab.attrs[*id as usize] == 0 || vocab.is(*id, NORMAL | USER_DEFINED);
        let tokens = Trie::of(vocab, ids.filter(in_texts).collect())?;
        for (id, score) in (0u32..).zip(&mut scores) {
            if vocab.is(id, USER_DEFINED) {
                *score = 0.0;
            }
        }
        let byte = |byte: u8| {
            vocab
                .find(&byte_text(byte))
                .filter(|&id| vocab.is(id, BYTE))
        };
        Ok(Unigram {
            charsmap: Charsmap::from_metadata(m)?,
            merge_spaces: m
                .opt_bool("tokenizer.ggml.remove_extra_whitespaces")?
                .unwrap_or(false),
            add_space_prefix,
            tokens,
            scores,
            unknown,
            unknown_score: lowest - UNKNOWN_PENALTY,
            bytes: (0..=255).map(byte).collect(),
            words: all_words(vocab),
        })
    }

    /// Appends the tokens of `text`; if it `begins` a text, with a space before it where the
    /// vocabulary asks for one.
    pub(super) fn encode(&self, vocab: &Vocab, text: &[u8], begins: bool, out: &mut Vec<u32>) {
        let text = self.normalise(text, begins);
        let (mut best, mut parts) = (Vec::new(), Vec::new());
        let (mut rest, mut after_unknown) = (&text[..], false);
        while !rest.is_empty() {
            let (word, after) = rest.split_at(if self.words {
                first_word(rest)
            } else {
                rest.len()
            });
            rest = after;
            self.split(vocab, word, &mut best);
            parts.clear();
            let mut end = word.len();
            while end > 0 {
                let Best { start, token, .. } = best[end];
                parts.push((&word[start..end], token));
                end = start;
            }
            for &(part, token) in parts.iter().rev() {
                match (token, &self.bytes) {
                    (Some(id), _) => out.push(id),
                    (None, Some(bytes)) => {
                        out.extend(part.iter().map(|&byte| bytes[usize::from(byte)]))
                    }
                    (None, None) if after_unknown => {}
                    (None, None) => out.extend(self.unknown),
                }
                after_unknown = token.is_none();
            }
        }
    }

    /// Best segmentation of `text` up to each of its bytes, into `best` (Viterbi's algorithm).
    fn split(&self, vocab: &Vocab, text: &[u8], best: &mut Vec<Best>) {
        best.clear();
        best.resize(
            text.len() + 1,
            Best {
                score: f64::MIN,
                start: 0,
                token: None,
            },
        );
        best[0].score = 0.0;
        let mut start = 0;
        while start < text.len() {
            let (score, len) = (best[start].score, char_len(&text[start..]));
            let mut challenge = |len: usize, token: Option<u32>, of_token: f32| {
                let score = score + f64::from(of_token);
                let champion = &mut best[start + len];
                if score > champion.score {
                    *champion = Best {
                        score,
                        start,
                        token,
                    };
                }
            };
            let mut has_token = false;
            self.tokens.prefixes(vocab, &text[start..], |of_token, id| {
                has_token |= of_token == len;
                challenge(of_token, Some(id), self.scores[id as usize]);
            });
            if !has_token {
                challenge(len, None, self.unknown_score);
            }
            start += len;
        }
    }

    /// The text that is split: characters replaced, spaces as `▁`.
    fn normalise(&self, text: &[u8], begins: bool) -> Vec<u8> {
        let mut out = Vec::with_capacity(2 * text.len() + SPACE.len());
        // A text that continues another is inside a word until there is a space.
        let (mut in_word, mut prefixed) = (!begins, !begins);
        let mut rest = text;
        while !rest.is_empty() {
            let replaced = self
                .charsmap
                .as_ref()
                .and_then(|charsmap| charsmap.longest(rest));
            let (len, replacement) = replaced.unwrap_or_else(|| {
                let len = char_len(rest);
                let is_valid = len > 1 || rest[0].is_ascii();
                (
                    len,
                    if is_valid {
                        &rest[..len]
                    } else {
                        "\u{FFFD}".as_bytes()
                    },
                )
            });
            rest = &rest[len..];
            for &byte in replacement {
                if byte == b' ' {
                    in_word = false;
                    if !self.merge_spaces {
                        out.extend_from_slice(SPACE);
                    }
                    continue;
                }
                if !in_word && (self.merge_spaces || self.add_space_prefix && !prefixed) {
                    out.extend_from_slice(SPACE);
                    prefixed = true;
                }
                in_word = true;
                out.push(byte);
            }
        }
        out
    }
}
