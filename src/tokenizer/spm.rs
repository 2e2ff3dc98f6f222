//! SentencePiece-style BPE: scores instead of merges, and bytes where no token fits.
//!
//! Unlike byte-level BPE there are no words: the whole stretch between two special tokens is
//! merged at once, spaces written as `▁`. Two neighbours join if their text is a token, the one
//! with the highest score first.

use super::bpe::{MAX_TEXT, NO_RANK, Scratch, Symbol, utf8_len};
use super::vocab::{Vocab, byte_text};
use crate::TokenizerError;

/// The scores, as ranks: a higher score is a lower rank.
pub(super) struct Spm {
    ranks: Vec<u32>,
    /// What a byte becomes that has no token; without it, such a byte is left out.
    unknown: Option<u32>,
}

impl Spm {
    pub(super) fn new(scores: &[f32], unknown: Option<u32>) -> Result<Self, TokenizerError> {
        let mut ranks = Vec::with_capacity(scores.len());
        for (id, &score) in (0u32..).zip(scores) {
            if score.is_nan() {
                return Err(TokenizerError::Score { id });
            }
            ranks.push(rank_of(score));
        }
        Ok(Spm { ranks, unknown })
    }

    /// Appends the tokens of `text`, whose spaces are escaped already.
    pub(super) fn encode(&self, vocab: &Vocab, text: &[u8], out: &mut Vec<u32>) {
        let mut scratch = Scratch::default();
        for text in text.chunks(MAX_TEXT) {
            scratch.clear();
            let mut at = 0;
            while at < text.len() {
                let len = utf8_len(text[at]).min(text.len() - at);
                scratch.push(len, 0);
                at += len;
            }
            let rank = |left: &Symbol, right: &Symbol| {
                vocab.find(left.with(right, text)).map_or(NO_RANK, |id| self.ranks[id as usize])
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
        vocab.find(&byte_text(byte)).or_else(|| vocab.find(&[byte])).or(self.unknown)
    }
}

/// Numbers in the opposite order of the scores; `NO_RANK` is none of them.
fn rank_of(score: f32) -> u32 {
    // Adding zero makes -0 and 0 the same score. The bits of floats are in order once negative
    // ones are inverted and positive ones put above them.
    let bits = (score + 0.0).to_bits();
    !(if bits >> 31 == 1 { !bits } else { bits | 1 << 31 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_in_the_opposite_order_of_scores() {
        let scores = [f32::INFINITY, 3e38, 1.0, 1e-45, 0.0, -1e-45, -1.0, -2.5, -3e38, f32::NEG_INFINITY];
        assert!(scores.is_sorted_by(|a, b| rank_of(*a) < rank_of(*b)));
        assert_eq!(rank_of(0.0), rank_of(-0.0));
        assert_ne!(rank_of(f32::NEG_INFINITY), NO_RANK);
    }
}
