//! Finding the special tokens in a text.
//!
//! A longer special token takes precedence over a shorter one anywhere in the text, and of equally
//! long ones the lower id does; only then does the leftmost. So `<|im_end|>` is not broken by a
//! `|im` before it. Each position of the text is looked up in a tree of the special texts, and the
//! candidates are tried in that order of precedence.

use crate::tokenizer::TokenizerError;
use crate::tokenizer::unicode::{Char, L, M, N};
use crate::tokenizer::vocab::{CONTROL, LSTRIP, RSTRIP, SINGLE_WORD, UNKNOWN, USER_DEFINED, Vocab};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Longest text a token in a tree may have; bounds the work per position of a text.
const MAX_LEN: usize = 1024;

/// A part of the text: between special tokens, or one of them.
#[derive(Debug, PartialEq)]
pub(super) enum Part<'a> {
    Text(&'a [u8]),
    Token(u32),
}

/// Which special tokens are parsed.
#[derive(Clone, Copy)]
pub(super) enum Parse<'a> {
    /// User-defined ones.
    UserDefined,
    /// All, but that in these ranges of the text, in order, only user-defined ones are.
    AllBut(&'a [Range<usize>]),
}

impl Parse<'_> {
    /// All special tokens, or user-defined ones.
    pub(super) fn all(all: bool) -> Parse<'static> {
        if all {
            Parse::AllBut(&[])
        } else {
            Parse::UserDefined
        }
    }
}

/// The special tokens.
pub(super) struct Specials {
    /// Tokens parsed on request: control, unknown and user-defined ones.
    all: Trie,
    /// Tokens always parsed: user-defined ones that are neither control nor unknown.
    user_defined: Trie,
}

/// A radix tree: at most two nodes per text, of any length. The nodes are in breadth-first order,
/// so that children are adjacent.
pub(super) struct Trie {
    nodes: Vec<Node>,
}

struct Node {
    /// First byte of the edge from the parent.
    byte: u8,
    /// Number of bytes from the root to here, and a token whose text begins with them.
    depth: u32,
    example: u32,
    /// The token whose text ends here.
    token: Option<u32>,
    children: Range<u32>,
}

impl Specials {
    pub(super) fn bytes(&self) -> usize {
        self.all.bytes() + self.user_defined.bytes()
    }

    pub(super) fn new(vocab: &Vocab) -> Result<Self, TokenizerError> {
        let ids = 0..vocab.len() as u32;
        let all: Vec<u32> = ids
            .filter(|&id| vocab.is(id, CONTROL | UNKNOWN | USER_DEFINED))
            .collect();
        let user_defined = all
            .iter()
            .copied()
            .filter(|&id| !vocab.is(id, CONTROL | UNKNOWN))
            .collect();
        Ok(Specials {
            user_defined: Trie::of(vocab, user_defined)?,
            all: Trie::of(vocab, all)?,
        })
    }

    /// Calls `part` with the parts of `text`, in order. White space that a token strips is in no
    /// part.
    pub(super) fn partition<'a>(
        &self,
        vocab: &Vocab,
        text: &'a [u8],
        parse: Parse<'_>,
        mut part: impl FnMut(Part<'a>),
    ) {
        let longest = |at: usize, end: usize| {
            let (tree, end) = match parse {
                Parse::UserDefined => (&self.user_defined, end),
                Parse::AllBut(plain) => {
                    let next = plain.get(plain.partition_point(|range| range.end <= at));
                    match next {
                        Some(range) if range.start <= at => (&self.user_defined, end),
                        Some(range) => (&self.all, end.min(range.start)),
                        None => (&self.all, end),
                    }
                }
            };
            tree.longest_at(vocab, &text[at..end])
        };
        let mut at = 0;
        for found in matches(vocab, text, &longest) {
            if at < found.start {
                part(Part::Text(&text[at..found.start]));
            }
            part(Part::Token(found.id));
            at = found.end;
        }
        if at < text.len() {
            part(Part::Text(&text[at..]));
        }
    }
}

impl Specials {
    /// Where texts of control and unknown tokens are in `text`.
    pub(super) fn control_texts(&self, vocab: &Vocab, text: &[u8]) -> Vec<Range<usize>> {
        let longest = |at: usize, end: usize| self.all.longest_at(vocab, &text[at..end]);
        matches(vocab, text, &longest)
            .into_iter()
            .filter(|found| vocab.is(found.id, CONTROL | UNKNOWN))
            .map(|found| found.start..found.end)
            .collect()
    }
}

/// A special token in the text, with the white space it strips.
struct Match {
    id: u32,
    start: usize,
    end: usize,
}

impl Trie {
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&self.nodes[..])
    }

    /// The tree of the texts of `ids`; tokens without a text are left out.
    pub(super) fn of(vocab: &Vocab, mut ids: Vec<u32>) -> Result<Trie, TokenizerError> {
        if let Some(&id) = ids.iter().find(|&&id| vocab.text(id).len() > MAX_LEN) {
            return Err(TokenizerError::TokenTooLong { id, max: MAX_LEN });
        }
        ids.retain(|&id| !vocab.text(id).is_empty());
        ids.sort_unstable_by_key(|&id| vocab.text(id));
        Ok(Trie::new(vocab, &ids))
    }

    /// Builds the tree of the texts of `ids`, which are sorted by text.
    fn new(vocab: &Vocab, ids: &[u32]) -> Self {
        let mut nodes = vec![Node {
            byte: 0,
            depth: 0,
            example: 0,
            token: None,
            children: 0..0,
        }];
        // For each node, the texts below it.
        let mut texts = vec![ids];
        for i in 0.. {
            let Some(&(mut ids)) = texts.get(i) else {
                break;
            };
            let depth = nodes[i].depth as usize;
            if let Some((&id, rest)) = ids.split_first()
                && vocab.text(id).len() == depth
            {
                nodes[i].token = Some(id);
                ids = rest;
            }
            let start = nodes.len() as u32;
            for alike in ids.chunk_by(|&a, &b| vocab.text(a)[depth] == vocab.text(b)[depth]) {
                // A prefix shared by the first and the last text is shared by all between them.
                let (example, first, last) = (
                    alike[0],
                    vocab.text(alike[0]),
                    vocab.text(alike[alike.len() - 1]),
                );
                let shared = first.iter().zip(last).take_while(|(a, b)| a == b).count() as u32;
                nodes.push(Node {
                    byte: first[depth],
                    depth: shared,
                    example,
                    token: None,
                    children: 0..0,
                });
                texts.push(alike);
            }
            nodes[i].children = start..nodes.len() as u32;
        }
        Trie { nodes }
    }

    /// Calls `found` with length and id of each token text that `text` begins with, the shortest
    /// first.
    pub(super) fn prefixes(&self, vocab: &Vocab, text: &[u8], mut found: impl FnMut(usize, u32)) {
        let (mut node, mut depth) = (&self.nodes[0], 0);
        while let Some(&byte) = text.get(depth) {
            let children = &self.nodes[node.children.start as usize..node.children.end as usize];
            let child = children.get(children.partition_point(|child| child.byte < byte));
            let Some(child) = child.filter(|child| child.byte == byte) else {
                break;
            };
            let end = child.depth as usize;
            if text.get(depth..end) != Some(&vocab.text(child.example)[depth..end]) {
                break;
            }
            (node, depth) = (child, end);
            if let Some(id) = node.token {
                found(depth, id);
            }
        }
    }

    /// Length and id of the longest token text that `text` begins with.
    fn longest_at(&self, vocab: &Vocab, text: &[u8]) -> Option<(usize, u32)> {
        let mut longest = None;
        self.prefixes(vocab, text, |len, id| longest = Some((len, id)));
        longest
    }
}

/// The matches in `text`, by position; `longest` is the longest token text between two positions, from
/// the first on, and its id.
fn matches(
    vocab: &Vocab,
    text: &[u8],
    longest: &dyn Fn(usize, usize) -> Option<(usize, u32)>,
) -> Vec<Match> {
    // In ascending order of precedence: the longer, then the lower id, then the leftmost.
    type Candidate = (usize, Reverse<u32>, Reverse<usize>);
    let candidate = |at: usize, end: usize| -> Option<Candidate> {
        let (len, id) = longest(at, end)?;
        Some((len, Reverse(id), Reverse(at)))
    };
    let mut candidates: Vec<_> = (0..text.len())
        .rev()
        .filter_map(|at| candidate(at, text.len()))
        .collect();
    candidates.sort();
    // Shorter candidates, for positions where the longest overlaps another match.
    let mut shorter: BinaryHeap<Candidate> = BinaryHeap::new();

    // Bytes that already belong to a match.
    let mut taken = vec![false; if candidates.is_empty() { 0 } else { text.len() }];
    let mut found = Vec::new();
    loop {
        let best = if shorter.peek() > candidates.last() {
            shorter.pop()
        } else {
            candidates.pop()
        };
        let Some((len, Reverse(id), Reverse(at))) = best else {
            break;
        };
        if let Some(room) = taken[at..at + len].iter().position(|&t| t) {
            shorter.extend(candidate(at, at + room));
            continue;
        }
        let (mut start, mut end) = (at, at + len);
        if vocab.is(id, SINGLE_WORD) && adjoins_word(&text[..start], &text[end..]) {
            continue;
        }
        if vocab.is(id, LSTRIP) {
            while start > 0 && !taken[start - 1] && is_space(text[start - 1]) {
                start -= 1;
            }
        }
        if vocab.is(id, RSTRIP) {
            while end < text.len() && !taken[end] && is_space(text[end]) {
                end += 1;
            }
        }
        taken[start..end].fill(true);
        found.push(Match { id, start, end });
    }
    found.sort_unstable_by_key(|m| m.start);
    found
}

/// Whether a letter, mark, digit or underscore is next to the place between two texts.
fn adjoins_word(before: &[u8], after: &[u8]) -> bool {
    let is_word = |c: char| c == '_' || Char::new(c).is(L | M | N);
    let last = (1..=before.len().min(4)).find_map(|n| {
        let text = str::from_utf8(&before[before.len() - n..]).ok()?;
        text.chars().next()
    });
    let first = after[..after.len().min(4)].utf8_chunks().next();
    last.is_some_and(is_word)
        || first
            .and_then(|c| c.valid().chars().next())
            .is_some_and(is_word)
}

/// `isspace` of the C locale.
fn is_space(b: u8) -> bool {
    matches!(b, b'\t'..=b'\r' | b' ')
}
