//! The end of long numbers: nothing in a schema bounds the digits of a number, and small models
//! repeat them.
//!
//! Where a number has enough digits and may end, masks allow no more.

use llguidance::toktrie::{SimpleVob, TokTrie};

/// Maximum number of digits in a row; 64-bit integers have up to 20, and floats 17 that count.
const MAX_DIGITS: usize = 32;
/// Maximum number of digits of an exponent: with more, numbers are beyond those of 64-bit floats.
const MAX_EXPONENT: usize = 2;

/// Tokens that distinguish numbers from texts, and tokens that begin with digits.
pub(super) struct DigitTokens {
    /// Tokens that may follow inside a text, but neither in a number nor after one.
    quote: u32,
    letter: u32,
    /// Tokens that begin with digits, each with the number of its digits.
    digits: Vec<(u32, usize)>,
}

impl DigitTokens {
    /// `None` if the vocabulary has no such tokens.
    pub(super) fn of(tree: &TokTrie) -> Option<Self> {
        let n_leading = |token: u32| {
            let text = tree.token(token);
            text.iter().take_while(|b| b.is_ascii_digit()).count()
        };
        let digits = (0..tree.vocab_size() as u32).map(|token| (token, n_leading(token)));
        Some(Self {
            quote: tree.token_id_at_bytes(b"\"")?,
            letter: tree.token_id_at_bytes(b"x")?,
            digits: digits.filter(|&(_, n)| n > 0).collect(),
        })
    }

    /// Removes from a mask the tokens that would make the number at the end of `tokens` too long,
    /// unless nothing else is allowed.
    pub(super) fn end_number(&self, tree: &TokTrie, tokens: &[u32], mask: &mut SimpleVob) {
        let room = room(tree, tokens);
        if room > MAX_DIGITS / 2 || mask.is_allowed(self.quote) || mask.is_allowed(self.letter) {
            return;
        }
        let mut shorter = mask.clone();
        for &(token, _) in self.digits.iter().filter(|&&(_, n)| n > room) {
            shorter.disallow_token(token);
        }
        if !shorter.is_zero() {
            *mask = shorter;
        }
    }

    /// Whether a token may be one that [`Self::end_number`] takes.
    pub(super) fn may_end(&self, tree: &TokTrie, tokens: &[u32], token: u32) -> bool {
        let text = tree.token(token);
        let n = text.iter().take_while(|b| b.is_ascii_digit()).count();
        n > 0 && n > room(tree, tokens)
    }
}

/// Number of digits that may follow these tokens.
fn room(tree: &TokTrie, tokens: &[u32]) -> usize {
    let mut bytes =
        (tokens.iter().rev()).flat_map(|&token| tree.token(token).iter().rev().copied());
    let mut n = 0;
    let mut before = bytes.next();
    while before.is_some_and(|b| b.is_ascii_digit()) && n < MAX_DIGITS {
        (n, before) = (n + 1, bytes.next());
    }
    if matches!(before, Some(b'+' | b'-')) {
        before = bytes.next();
    }
    let most = match before {
        Some(b'e' | b'E') => MAX_EXPONENT,
        _ => MAX_DIGITS,
    };
    most.saturating_sub(n)
}
