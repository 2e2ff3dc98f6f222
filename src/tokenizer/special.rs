//! Finding the special tokens that stand in a text.
//!
//! A longer special token wins over a shorter one wherever they are in the text, and of equally
//! long ones the lower id does; only then does the leftmost win. So `<|im_end|>` is not torn by a
//! `|im` before it. Each position of the text is looked up once in the sorted texts, and a heap
//! hands out the candidates in that order of precedence.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::vocab::{CONTROL, LSTRIP, RSTRIP, UNKNOWN, USER_DEFINED, Vocab};
use crate::TokenizerError;

/// Longest text a special token may have; bounds the work per position of a text.
const MAX_LEN: usize = 1024;

/// A stretch of the text: between special tokens, or one of them.
#[derive(Debug, PartialEq)]
pub(super) enum Part<'a> {
    Text(&'a [u8]),
    Token(u32),
}

/// The special tokens, sorted by text.
pub(super) struct Specials {
    /// Those parsed on request: control, unknown and user-defined tokens.
    all: Sorted,
    /// Those parsed always: user-defined tokens that are neither control nor unknown.
    user_defined: Sorted,
}

struct Sorted {
    ids: Vec<u32>,
    /// `ids[first[b]..first[b + 1]]` have a text that begins with byte `b`.
    first: [u32; 257],
}

impl Specials {
    pub(super) fn new(vocab: &Vocab) -> Result<Self, TokenizerError> {
        let mut all: Vec<u32> = Vec::new();
        for (id, attr) in (0u32..).zip(&vocab.attrs) {
            if attr & (CONTROL | UNKNOWN | USER_DEFINED) != 0 && !vocab.text(id).is_empty() {
                if vocab.text(id).len() > MAX_LEN {
                    return Err(TokenizerError::SpecialTokenTooLong { id, max: MAX_LEN });
                }
                all.push(id);
            }
        }
        all.sort_unstable_by_key(|&id| vocab.text(id));
        let user_defined = all.iter().copied().filter(|&id| !vocab.is(id, CONTROL | UNKNOWN)).collect();
        Ok(Specials { all: Sorted::new(vocab, all), user_defined: Sorted::new(vocab, user_defined) })
    }

    /// Calls `part` with the parts of `text`, in order. White space that a token strips is in
    /// none of them.
    pub(super) fn partition<'a>(
        &self,
        vocab: &Vocab,
        text: &'a [u8],
        parse_special: bool,
        mut part: impl FnMut(Part<'a>),
    ) {
        let specials = if parse_special { &self.all } else { &self.user_defined };
        let mut at = 0;
        for found in specials.matches(vocab, text) {
            if at < found.strip_start {
                part(Part::Text(&text[at..found.strip_start]));
            }
            part(Part::Token(found.id));
            at = found.strip_end;
        }
        if at < text.len() {
            part(Part::Text(&text[at..]));
        }
    }
}

/// A special token in the text, with the white space it strips.
struct Match {
    id: u32,
    strip_start: usize,
    strip_end: usize,
}

impl Sorted {
    fn new(vocab: &Vocab, ids: Vec<u32>) -> Self {
        let mut first = [0; 257];
        for &id in &ids {
            first[usize::from(vocab.text(id)[0]) + 1] += 1;
        }
        for b in 0..256 {
            first[b + 1] += first[b];
        }
        Sorted { ids, first }
    }

    /// The longest of the texts, at most `room` long, that `text` begins with.
    fn longest_at(&self, vocab: &Vocab, text: &[u8], room: usize) -> Option<u32> {
        let b = usize::from(*text.first()?);
        let mut range = &self.ids[self.first[b] as usize..self.first[b + 1] as usize];
        let mut best = None;
        // Narrow the texts to those that share one more byte with `text`, until none is left.
        for depth in 1..=room.min(text.len()) {
            let &shortest = range.first()?;
            if vocab.text(shortest).len() == depth {
                best = Some(shortest);
                range = &range[1..];
            }
            let Some(next) = text.get(depth) else { break };
            let byte = |id: &u32| vocab.text(*id)[depth];
            let start = range.partition_point(|id| byte(id) < *next);
            range = &range[start..];
            range = &range[..range.partition_point(|id| byte(id) == *next)];
            if range.is_empty() {
                break;
            }
        }
        best
    }

    /// The matches in `text`, by position.
    fn matches(&self, vocab: &Vocab, text: &[u8]) -> Vec<Match> {
        // By length, then the lower id, then the leftmost.
        let mut heap: BinaryHeap<(usize, Reverse<u32>, Reverse<usize>)> = BinaryHeap::new();
        let candidate = |at: usize, room: usize| {
            let id = self.longest_at(vocab, &text[at..], room)?;
            Some((vocab.text(id).len(), Reverse(id), Reverse(at)))
        };
        if !self.ids.is_empty() {
            heap.extend((0..text.len()).filter_map(|at| candidate(at, MAX_LEN)));
        }
        if heap.is_empty() {
            return Vec::new();
        }

        // Bytes that belong to a match already. The next taken byte at or after a candidate is
        // at most the candidate's length away, so looking for it costs no more than the match.
        let mut taken = vec![false; text.len()];
        let mut found = Vec::new();
        while let Some((len, Reverse(id), Reverse(at))) = heap.pop() {
            let room = taken[at..at + len].iter().position(|&t| t);
            if let Some(room) = room {
                heap.extend((room > 0).then(|| candidate(at, room)).flatten());
                continue;
            }
            let (mut strip_start, mut strip_end) = (at, at + len);
            if vocab.is(id, LSTRIP) {
                while strip_start > 0 && !taken[strip_start - 1] && is_space(text[strip_start - 1]) {
                    strip_start -= 1;
                }
            }
            if vocab.is(id, RSTRIP) {
                while strip_end < text.len() && !taken[strip_end] && is_space(text[strip_end]) {
                    strip_end += 1;
                }
            }
            taken[strip_start..strip_end].fill(true);
            found.push(Match { id, strip_start, strip_end });
        }
        found.sort_unstable_by_key(|m| m.strip_start);
        found
    }
}

/// `isspace` of the C locale.
fn is_space(b: u8) -> bool {
    matches!(b, b'\t'..=b'\r' | b' ')
}
