//! PLaMo 2's vocabulary: of all ways to split a text into tokens the one with the largest sum of
//! scores, found from the text's end (huggingface.co/pfnet/plamo-2-8b `tokenization_plamo.py`;
//! llama.cpp has the same).
//!
//! Scores are whole ten-thousandths. Of equal sums the one whose first token is longer wins. A
//! character without a token becomes its bytes, at a penalty. Spaces are spaces. The texts of control
//! tokens are found where they are parsed, and nowhere else: the published code finds them in any
//! text, so that whoever writes one could end a turn.

use crate::tokenizer::TokenizerError;
use crate::tokenizer::bpe::char_len;
use crate::tokenizer::special::Trie;
use crate::tokenizer::vocab::{BYTE, CONTROL, UNKNOWN, Vocab, byte_text};

/// Scores are multiplied by it and rounded, to 32 bits.
const PER_SCORE: f64 = 1e4;
/// Score of a character as its bytes.
const OF_BYTES: i64 = -10_000_000;
/// Tokens whose score is not above are not used.
const INVALID: i64 = -20_000_000;
/// What a text begins with that says its byte order.
const BYTE_ORDER_MARK: &[u8] = "\u{FEFF}".as_bytes();

/// A vocabulary of PLaMo 2.
pub(super) struct Plamo2 {
    tokens: Trie,
    /// Scores, by token.
    scores: Vec<i64>,
    /// Tokens of single bytes.
    bytes: Vec<u32>,
}

/// Best segmentation of a text from a byte on.
#[derive(Clone, Copy)]
struct Best {
    /// Sum of the scores, negated.
    cost: i64,
    /// Bytes of the first token.
    len: usize,
    /// That token, or none for a character as its bytes.
    token: Option<u32>,
}

impl Plamo2 {
    /// Bytes of its tables.
    pub(super) fn bytes(&self) -> usize {
        self.tokens.bytes() + size_of_val(&self.scores[..])
    }

    pub(super) fn new(vocab: &Vocab, scores: &[f32]) -> Result<Plamo2, TokenizerError> {
        let byte = |byte: u8| {
            let text = byte_text(byte);
            let id = vocab.find(&text).filter(|&id| vocab.is(id, BYTE));
            id.ok_or(TokenizerError::NoByteToken { byte })
        };
        let whole = |&score: &f32| i64::from((f64::from(score) * PER_SCORE).round() as i32);
        let is_used = |id: &u32| {
            let score = &scores[*id as usize];
            !vocab.is(*id, BYTE | CONTROL | UNKNOWN) && score.is_finite() && whole(score) > INVALID
        };
        let ids = (0..vocab.len() as u32).filter(is_used);
        Ok(Plamo2 {
            tokens: Trie::of(vocab, ids.collect())?,
            scores: scores.iter().map(whole).collect(),
            bytes: (0..=255).map(byte).collect::<Result<_, _>>()?,
        })
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(&self, vocab: &Vocab, text: &[u8], out: &mut Vec<u32>) {
        let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
        let mut starts = Vec::with_capacity(text.len());
        let mut next = 0;
        while next < text.len() {
            starts.push(next);
            next += char_len(&text[next..]);
        }
        // No text ends inside of a character.
        let nothing = Best {
            cost: i64::MAX / 2,
            len: 0,
            token: None,
        };
        let mut best = vec![nothing; text.len() + 1];
        best[text.len()].cost = 0;
        for &start in starts.iter().rev() {
            let len = char_len(&text[start..]);
            let mut found = Best {
                cost: best[start + len].cost - OF_BYTES,
                len,
                token: None,
            };
            // From the shortest on: of equal costs the last one, a token, wins.
            self.tokens.prefixes(vocab, &text[start..], |len, id| {
                let cost = best[start + len].cost - self.scores[id as usize];
                if cost <= found.cost {
                    found = Best {
                        cost,
                        len,
                        token: Some(id),
                    };
                }
            });
            best[start] = found;
        }
        let mut start = 0;
        while start < text.len() {
            let Best { len, token, .. } = best[start];
            let bytes = &text[start..start + len];
            match token {
                Some(id) => out.push(id),
                None => out.extend(bytes.iter().map(|&byte| self.bytes[usize::from(byte)])),
            }
            start += len;
        }
    }
}
