//! Byte-pair merging, and byte-level BPE on top of it.
//!
//! `merge` is the algorithm of both BPE models: it joins the neighbours of the best rank, leftmost
//! first, until no two neighbours have a rank. Symbols are a linked list over the text and the
//! ranks are in a heap, so a word of a million letters takes n log n steps.

use crate::gguf::StringArray;
use crate::tokenizer::TokenizerError;
use crate::tokenizer::split::PreTokenizer;
use crate::tokenizer::unicode::{self, Char};
use crate::tokenizer::vocab::{Hasher, Index, MAX_ENTRIES, Vocab, byte_text, text};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A range of the text that is to become a token.
#[derive(Clone, Copy)]
pub(super) struct Symbol {
    start: u32,
    /// Zero once it has been merged into its left neighbour.
    len: u32,
    prev: u32,
    next: u32,
    /// Rank of joining this symbol with the next one, or [`NO_RANK`].
    rank: u32,
    /// Hash of the symbol's text, if the ranks need it.
    pub(super) hash: u64,
}

/// No neighbour.
const NONE: u32 = u32::MAX;
/// Rank of neighbours that do not join.
pub(super) const NO_RANK: u32 = u32::MAX;
/// Longest text merged at once, since positions are 32-bit. Longer ones are cut.
pub(super) const MAX_TEXT: usize = 1 << 30;

impl Symbol {
    pub(super) fn of<'a>(&self, text: &'a [u8]) -> &'a [u8] {
        &text[self.start as usize..(self.start + self.len) as usize]
    }

    /// The text of this symbol and `next`, which follows it.
    pub(super) fn with<'a>(&self, next: &Symbol, text: &'a [u8]) -> &'a [u8] {
        &text[self.start as usize..(next.start + next.len) as usize]
    }
}

/// Buffers of `merge`, kept between words.
#[derive(Default)]
pub(super) struct MergeBuffers {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<u64>>,
}

impl MergeBuffers {
    /// Removes all symbols.
    pub(super) fn clear(&mut self) {
        self.symbols.clear();
    }

    /// Appends the next `len` bytes of the text as a symbol.
    pub(super) fn push(&mut self, len: usize, hash: u64) {
        let i = self.symbols.len() as u32;
        let start = self.symbols.last().map_or(0, |s| s.start + s.len);
        let prev = i.checked_sub(1).unwrap_or(NONE);
        self.symbols.push(Symbol {
            start,
            len: len as u32,
            prev,
            next: i + 1,
            rank: NO_RANK,
            hash,
        });
    }

    /// Merges the symbols. `rank` is the rank of joining two neighbours (lower first), `hash` the
    /// hash of a joined symbol. Returns the remaining symbols, in order.
    pub(super) fn merge(
        &mut self,
        rank: impl Fn(&Symbol, &Symbol) -> u32,
        hash: impl Fn(&Symbol) -> u64,
    ) -> impl Iterator<Item = &Symbol> {
        let MergeBuffers { symbols, heap } = self;
        heap.clear();
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
        for i in 1..symbols.len() {
            set_rank(symbols, heap, i as u32 - 1, &rank);
        }
        while let Some(Reverse(entry)) = heap.pop() {
            let (left, entry_rank) = (entry as u32, (entry >> 32) as u32);
            let l = symbols[left as usize];
            // The symbol or its neighbour has changed since the entry was made. If the new pair has
            // the same rank, this entry is valid for it, too.
            if l.len == 0 || l.rank != entry_rank {
                continue;
            }
            let r = symbols[l.next as usize];
            symbols[l.next as usize].len = 0;
            let joined = &mut symbols[left as usize];
            joined.len += r.len;
            joined.next = r.next;
            joined.hash = hash(joined);
            if r.next != NONE {
                symbols[r.next as usize].prev = left;
            }
            set_rank(symbols, heap, left, &rank);
            if l.prev != NONE {
                set_rank(symbols, heap, l.prev, &rank);
            }
        }
        symbols.iter().filter(|s| s.len > 0)
    }
}

/// Ranks symbol `i` with its next neighbour.
fn set_rank(
    symbols: &mut [Symbol],
    heap: &mut BinaryHeap<Reverse<u64>>,
    i: u32,
    rank: &impl Fn(&Symbol, &Symbol) -> u32,
) {
    let s = &symbols[i as usize];
    let rank = if s.next == NONE {
        NO_RANK
    } else {
        rank(s, &symbols[s.next as usize])
    };
    symbols[i as usize].rank = rank;
    if rank != NO_RANK {
        heap.push(Reverse(u64::from(rank) << 32 | u64::from(i)));
    }
}

/// The merges and the pre-tokeniser of a byte-level BPE.
pub(super) struct Bpe {
    pub(super) pre: &'static PreTokenizer,
    /// Merges as `left right`, in order of rank, if the file has some.
    merges: Option<StringArray>,
    /// Finds a merge by the hashes of its two sides.
    index: Index,
    /// Length of the longest merge.
    longest: usize,
}

impl Bpe {
    /// Bytes of its tables.
    pub(super) fn bytes(&self) -> usize {
        self.index.bytes()
    }

    pub(super) fn new(
        pre: &'static PreTokenizer,
        merges: Option<StringArray>,
        hasher: Hasher,
    ) -> Result<Self, TokenizerError> {
        let n = merges.as_ref().map_or(0, StringArray::len);
        if n >= MAX_ENTRIES {
            return Err(TokenizerError::TooLarge {
                key: "tokenizer.ggml.merges",
                len: n,
            });
        }
        let mut index = Index::with_capacity(n);
        let mut longest = 0;
        let all = merges
            .iter()
            .flat_map(|all| all.iter().map(move |merge| (all, merge)));
        for (rank, (all, merge)) in (0u32..).zip(all) {
            let Some((left, right)) = sides(merge) else {
                let text = String::from_utf8_lossy(merge).into_owned();
                return Err(TokenizerError::Merge { rank, text });
            };
            let hash = hasher.pair(hasher.text(left), hasher.text(right));
            // Of two equal merges the first one counts.
            index.insert(hash, rank, |i| text(all, i) == merge);
            longest = longest.max(merge.len());
        }
        Ok(Bpe {
            pre,
            merges,
            index,
            longest,
        })
    }

    /// Appends the tokens of `text`. A symbol that is no token is replaced by the tokens of its
    /// bytes; a byte without a token is left out.
    pub(super) fn encode(&self, vocab: &Vocab, text: &[u8], out: &mut Vec<u32>) {
        let escaped;
        let chars = if self.pre.raw_utf8 && !self.pre.keeps_spaces {
            escaped = super::escape_spaces(text, false);
            unicode::chars(&escaped)
        } else {
            unicode::chars(text)
        };
        let mut scratch = MergeBuffers::default();
        let mut word = Vec::new();
        self.pre.split(&chars, &mut |piece| {
            for piece in piece.chunks(MAX_TEXT / 8) {
                self.encode_word(vocab, piece, &mut word, &mut scratch, out);
            }
        });
    }

    fn encode_word(
        &self,
        vocab: &Vocab,
        piece: &[Char],
        word: &mut Vec<u8>,
        scratch: &mut MergeBuffers,
        out: &mut Vec<u32>,
    ) {
        let hasher = vocab.hasher;
        word.clear();
        for c in piece {
            if self.pre.raw_utf8 {
                word.extend(c.utf8());
            } else {
                c.utf8().for_each(|b| push_in_alphabet(b, word));
            }
        }
        let newlines = || self.pre.raw_utf8 && word.iter().all(|&b| b == b'\n');
        if (self.pre.ignore_merges || newlines())
            && let Some(id) = vocab.find(word)
        {
            out.push(id);
            return;
        }
        scratch.clear();
        let mut at = 0;
        while at < word.len() {
            let len = char_len(&word[at..]);
            scratch.push(len, hasher.text(&word[at..at + len]));
            at += len;
        }
        let rank = |left: &Symbol, right: &Symbol| self.rank(hasher, word, left, right);
        for symbol in scratch.merge(rank, |s| hasher.text(s.of(word))) {
            let text = symbol.of(word);
            if let Some(id) = vocab.find_hashed(symbol.hash, text) {
                out.push(id);
            } else if self.pre.raw_utf8 {
                out.extend(text.iter().filter_map(|&b| vocab.find(&byte_text(b))));
            } else {
                out.extend(text.iter().filter_map(|&b| vocab.find(&[b])));
            }
        }
    }

    fn rank(&self, hasher: Hasher, word: &[u8], left: &Symbol, right: &Symbol) -> u32 {
        let Some(merges) = &self.merges else {
            return NO_RANK;
        };
        let (l, r) = (left.of(word), right.of(word));
        if l.len() + r.len() + 1 > self.longest {
            return NO_RANK;
        }
        let same = |i: u32| {
            let merge = text(merges, i);
            merge.len() == l.len() + 1 + r.len()
                && &merge[..l.len()] == l
                && merge[l.len()] == b' '
                && &merge[l.len() + 1..] == r
        };
        self.index
            .find(hasher.pair(left.hash, right.hash), same)
            .unwrap_or(NO_RANK)
    }
}

/// The two sides of a merge: before and after the first space that is not at the start.
fn sides(merge: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = 1 + merge.get(1..)?.iter().position(|&b| b == b' ')?;
    Some((&merge[..space], &merge[space + 1..]))
}

/// Length of the character at the start of `text`; 1 for a byte that starts no character.
pub(super) fn char_len(text: &[u8]) -> usize {
    let len = match text[0] {
        0xf0.. => 4,
        0xe0.. => 3,
        0xc0.. => 2,
        _ => return 1,
    };
    if text.get(..len).is_some_and(|c| str::from_utf8(c).is_ok()) {
        len
    } else {
        1
    }
}

/// GPT-2's alphabet: maps each byte to a printable character, so that vocabularies are text.
/// Printable Latin-1 maps to itself, the others to U+0100 to U+0143 in order.
static ALPHABET: [u16; 256] = {
    let mut alphabet = [0; 256];
    let (mut byte, mut next) = (0, 0x100);
    while byte < 256 {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        alphabet[byte] = if printable { byte as u16 } else { next };
        next += !printable as u16;
        byte += 1;
    }
    alphabet
};

/// The bytes that U+0100 to U+0143 stand for in [`ALPHABET`].
static ABOVE_LATIN: [u8; 68] = {
    let mut bytes = [0; 68];
    let mut byte = 0;
    while byte < 256 {
        if ALPHABET[byte] >= 0x100 {
            bytes[ALPHABET[byte] as usize - 0x100] = byte as u8;
        }
        byte += 1;
    }
    bytes
};

/// Appends a byte in GPT-2's alphabet.
fn push_in_alphabet(byte: u8, out: &mut Vec<u8>) {
    let c = ALPHABET[usize::from(byte)];
    if c < 0x80 {
        out.push(c as u8);
    } else {
        out.extend([0xc0 | (c >> 6) as u8, 0x80 | (c & 0x3f) as u8]);
    }
}

/// The byte that a character of GPT-2's alphabet stands for.
fn byte_in_alphabet(c: char) -> Option<u8> {
    match c as u32 {
        c @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(c as u8),
        c @ 0x100..=0x143 => Some(ABOVE_LATIN[c as usize - 0x100]),
        _ => None,
    }
}

/// Appends the bytes that a text in GPT-2's alphabet stands for. Characters outside the alphabet
/// are kept.
pub(super) fn append_from_alphabet(text: &[u8], out: &mut Vec<u8>) {
    for chunk in text.utf8_chunks() {
        for c in chunk.valid().chars() {
            match byte_in_alphabet(c) {
                Some(b) => out.push(b),
                None => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        out.extend_from_slice(chunk.invalid());
    }
}

#[cfg(test)]
mod tests {
    use crate::tokenizer::bpe::*;

    #[test]
    fn the_alphabet_is_a_bijection() {
        let mut text = Vec::new();
        (0..=255).for_each(|b| push_in_alphabet(b, &mut text));
        let text = String::from_utf8(text).unwrap();
        assert!(text.starts_with("ĀāĂ"));
        let bytes: Vec<u8> = text.chars().map(|c| byte_in_alphabet(c).unwrap()).collect();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_in_alphabet('Ġ'), Some(b' '));
        assert_eq!(byte_in_alphabet(' '), None);
        assert_eq!(byte_in_alphabet('\u{ad}'), None);
        assert_eq!(byte_in_alphabet('\u{144}'), None);
    }

    #[test]
    fn a_merge_has_two_sides() {
        assert_eq!(sides(b"a b"), Some((&b"a"[..], &b"b"[..])));
        assert_eq!(sides(b"  b"), Some((&b" "[..], &b"b"[..])));
        assert_eq!(sides(b"ab"), None);
        assert_eq!(sides(b" ab"), None);
        assert_eq!(sides(b""), None);
    }
}
