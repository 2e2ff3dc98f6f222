//! SentencePiece-style BPE: scores instead of merges, and byte tokens where no other fits.
//!
//! Unlike byte-level BPE there is no pre-tokeniser: the whole text between two special tokens is
//! merged, with spaces written as `▁`. Two neighbours join if their text is a token, the pair with
//! the highest score first. In the usual vocabularies no token extends past the end of a word; the
//! text is then merged word by word, which gives the same tokens from small heaps.

use crate::tokenizer::bpe::{MAX_TEXT, MergeBuffers, NO_RANK, Symbol, char_len};
use crate::tokenizer::vocab::{Vocab, byte_text};
use crate::tokenizer::{SPACE, TokenizerError};

/// Token scores as ranks: a higher score is a lower rank.
pub(super) struct Spm {
    ranks: Vec<u32>,
    /// Whether no token contains a `▁` after another character.
    words: bool,
    /// Token for bytes that have none; if it is `None`, such bytes are left out.
    unknown: Option<u32>,
}

impl Spm {
    /// Bytes of its tables.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&self.ranks[..])
    }

    pub(super) fn new(
        vocab: &Vocab,
        scores: &[f32],
        unknown: Option<u32>,
    ) -> Result<Self, TokenizerError> {
        let mut ranks = Vec::with_capacity(scores.len());
        for (id, &score) in (0u32..).zip(scores) {
            if score.is_nan() {
                return Err(TokenizerError::Score { id });
            }
            ranks.push(rank_of(score));
        }
        Ok(Spm {
            ranks,
            words: all_words(vocab),
            unknown,
        })
    }

    /// Appends the tokens of `text`, whose spaces are already escaped.
    pub(super) fn encode(&self, vocab: &Vocab, text: &[u8], out: &mut Vec<u32>) {
        let mut scratch = MergeBuffers::default();
        let mut rest = text;
        while !rest.is_empty() {
            let len = if self.words {
                first_word(rest)
            } else {
                rest.len()
            };
            let (text, after) = rest.split_at(len.min(MAX_TEXT));
            rest = after;
            scratch.clear();
            let mut at = 0;
            while at < text.len() {
                let len = char_len(&text[at..]);
                scratch.push(len, 0);
                at += len;
            }
            let rank = |left: &Symbol, right: &Symbol| {
                vocab
                    .find(left.with(right, text))
                    .map_or(NO_RANK, |id| self.ranks[id as usize])
            };
            for symbol in scratch.merge(rank, |_| 0) {
                let text = symbol.of(text);
                match vocab.find(text) {
                    Some(id) => out.push(id),
                    None => out.extend(text.iter().filter_map(|&b| self.byte(vocab, b))),
                }
            }
        }
    }

    fn byte(&self, vocab: &Vocab, byte: u8) -> Option<u32> {
        vocab
            .find(&byte_text(byte))
            .or_else(|| vocab.find(&[byte]))
            .or(self.unknown)
    }
}

/// Whether no token contains a `▁` after another character.
pub(super) fn all_words(vocab: &Vocab) -> bool {
    (0..vocab.len() as u32).all(|id| first_word(vocab.text(id)) == vocab.text(id).len())
}

/// Length of the first word of `text`, including the `▁` before it.
pub(super) fn first_word(text: &[u8]) -> usize {
    let (mut at, mut in_word) = (0, false);
    while at < text.len() {
        let space = text[at..].starts_with(SPACE);
        if space && in_word {
            return at;
        }
        in_word |= !space;
        at += char_len(&text[at..]);
    }
    text.len()
}

/// Maps scores to numbers in the opposite order, none of them `NO_RANK`.
fn rank_of(score: f32) -> u32 {
    // Adding zero makes -0 and 0 the same score. The bits of floats sort as the floats do once
    // negative ones are inverted and positive ones have their sign bit set.
    let bits = (score + 0.0).to_bits();
    !(if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    })
}

#[cfg(test)]
mod tests {
    use crate::tokenizer::spm::*;

    #[test]
    fn ranks_are_in_the_opposite_order_of_scores() {
        let scores = [
            f32::INFINITY,
            3e38,
            1.0,
            1e-45,
            0.0,
            -1e-45,
            -1.0,
            -2.5,
            -3e38,
            f32::NEG_INFINITY,
        ];
        assert!(scores.is_sorted_by(|a, b| rank_of(*a) < rank_of(*b)));
        assert_eq!(rank_of(0.0), rank_of(-0.0));
        assert_ne!(rank_of(f32::NEG_INFINITY), NO_RANK);
    }
}
