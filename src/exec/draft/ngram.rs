//! Drafts out of the text itself: what came after the longest end of the text that was there before.
//!
//! A suffix automaton finds that end, too (SAM decoding, <https://arxiv.org/abs/2411.10666>), and takes 30 to 60 bytes per
//! token. Here the beginnings of the text are the nodes of a search tree: ordered by their last token, then by the one
//! before it, and so on. A beginning has the longest common end with one of its neighbours in that order, and whoever
//! inserts it passes both. The tree is a treap (Seidel and Aragon 1996, doi:10.1007/BF01940876), so that it is some
//! twenty nodes deep at a hundred thousand tokens, whatever the text.

use super::{Drafter, Guess};
use std::cmp::Ordering;

/// Most tokens of two ends that are compared; what agrees so far is ordered by position.
const MAX_MATCH: usize = 32;
/// No node; its place in the tree holds the root.
const NONE: u32 = 0;
/// Least lengths of a common end for each [`Guess::grade`].
const GRADES: [usize; 8] = [1, 2, 3, 4, 6, 9, 16, 32];

/// Drafts what came after the longest end of the text that was there before: repeated code, quotations, names.
///
/// Takes 12 bytes per token, and some microseconds.
#[derive(Clone, Debug)]
pub struct NgramDrafter {
    tokens: Vec<u32>,
    /// Node `i` is the beginning of `i` tokens; its children are nodes that come before it in the order, and after it.
    nodes: Vec<[u32; 2]>,
    /// The beginning whose end agrees best with that of the text, and in how many tokens.
    found: (usize, usize),
}

impl Default for NgramDrafter {
    fn default() -> Self {
        NgramDrafter { tokens: Vec::new(), nodes: vec![[NONE; 2]], found: (0, 0) }
    }
}

/// A random number for each node: parents have higher ones than their children. (The finalizer of MurmurHash3.)
fn priority(node: u32) -> u32 {
    let mut x = node;
    x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
    x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}

impl NgramDrafter {
    /// Whether the newest beginning comes after another one in the order; notes how long their common end is.
    fn is_after(&mut self, node: u32) -> bool {
        let (new, node) = (self.tokens.len(), node as usize);
        let ends = self.tokens.iter().rev().zip(self.tokens[..node].iter().rev()).take(MAX_MATCH);
        let (mut len, mut order) = (0, Ordering::Equal);
        for (a, b) in ends {
            order = a.cmp(b);
            if order != Ordering::Equal {
                break;
            }
            len += 1;
        }
        // The latest of those that agree best.
        if len > 0 && (len, node) > (self.found.1, self.found.0) {
            self.found = (node, len);
        }
        order.then(new.cmp(&node)) == Ordering::Greater
    }

    fn insert(&mut self, token: u32) {
        self.tokens.push(token);
        let new = self.nodes.len() as u32;
        self.found = (0, 0);
        // Down to the first node that it is to be the parent of.
        let (mut parent, mut side) = (NONE, 0);
        let mut node = self.nodes[parent as usize][side];
        while node != NONE && priority(node) > priority(new) {
            (parent, side) = (node, usize::from(self.is_after(node)));
            node = self.nodes[parent as usize][side];
        }
        self.nodes.push([NONE; 2]);
        self.nodes[parent as usize][side] = new;
        // What was there is cut in two: nodes before the new one, and those after it. The next of each goes here.
        let mut ends = [(new, 0), (new, 1)];
        while node != NONE {
            let part = usize::from(!self.is_after(node));
            let (parent, side) = ends[part];
            self.nodes[parent as usize][side] = node;
            ends[part] = (node, 1 - part);
            node = self.nodes[node as usize][1 - part];
        }
        for (parent, side) in ends {
            self.nodes[parent as usize][side] = NONE;
        }
    }
}

impl Drafter for NgramDrafter {
    fn name(&self) -> &'static str {
        "ngram"
    }

    fn push(&mut self, tokens: &[u32]) {
        tokens.iter().for_each(|&token| self.insert(token));
    }

    fn draft(&mut self, n: usize, draft: &mut Vec<Guess>) {
        let (at, len) = self.found;
        for i in 0..if len > 0 { n } else { 0 } {
            // Behind the end of the text it goes on with itself.
            let own = (at + i).checked_sub(self.tokens.len()).map(|j| draft[j].token);
            let token = own.unwrap_or_else(|| self.tokens[at + i]);
            let grade = GRADES.iter().rposition(|&least| len + i >= least).unwrap_or(0) as u8;
            draft.push(Guess { token, grade });
        }
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The latest of the earlier beginnings with the longest common end, found by looking at all of them.
    fn slow(tokens: &[u32]) -> (usize, usize) {
        let common = |n: usize| {
            let ends = tokens.iter().rev().zip(tokens[..n].iter().rev()).take(MAX_MATCH);
            ends.take_while(|(a, b)| a == b).count()
        };
        (1..tokens.len()).map(|n| (common(n), n)).filter(|&(len, _)| len > 0).max().map_or((0, 0), |(len, n)| (n, len))
    }

    /// Texts of all kinds: random over few and many tokens, one token, a period, a Fibonacci word.
    fn texts(n: usize) -> Vec<Vec<u32>> {
        let mut state = 1u64;
        let mut below = |n: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % n) as u32
        };
        let mut all: Vec<Vec<u32>> = [2, 5, 300, 1 << 30].map(|k| (0..n).map(|_| below(k)).collect()).into();
        all.push(vec![7; n]);
        all.push((0..n as u32).map(|i| i % 17).collect());
        let (mut a, mut b) = (vec![0], vec![0, 1]);
        while b.len() < n {
            (a, b) = (b.clone(), [b, a].concat());
        }
        b.truncate(n);
        all.push(b);
        all
    }

    #[test]
    fn finds_the_longest_end_that_was_there_before() {
        for text in texts(400) {
            let mut drafter = NgramDrafter::default();
            for n in 1..=text.len() {
                drafter.push(&text[n - 1..n]);
                let (at, len) = slow(&text[..n]);
                assert_eq!(drafter.found.1, len, "{:?}", &text[..n]);
                // Of several, a neighbour in the order; where so many agree, the latest.
                if len == MAX_MATCH || len == 0 {
                    assert_eq!(drafter.found.0, at);
                } else {
                    let found = drafter.found.0;
                    assert_eq!(text[found - len..found], text[n - len..n]);
                }
            }
        }
    }

    #[test]
    fn drafts_go_on_behind_the_end_of_the_text() {
        let mut drafter = NgramDrafter::default();
        let mut draft = Vec::new();
        drafter.draft(4, &mut draft);
        assert!(draft.is_empty());
        drafter.push(&[9, 1, 2, 3, 1, 2, 3]);
        drafter.draft(7, &mut draft);
        assert_eq!(draft.iter().map(|guess| guess.token).collect::<Vec<_>>(), [1, 2, 3, 1, 2, 3, 1]);
        assert_eq!(draft.iter().map(|guess| guess.grade).collect::<Vec<_>>(), [2, 3, 3, 4, 4, 4, 5]);
        drafter.push(&[77]);
        draft.clear();
        drafter.draft(7, &mut draft);
        assert!(draft.is_empty(), "a token that was never there");
    }

    /// At most 32 bytes per token, growth of vectors included, and a depth that no text makes large: at 100,000 tokens a
    /// node is compared with at most some fifty others, each in [`MAX_MATCH`] tokens at most.
    #[test]
    fn a_hundred_thousand_tokens() {
        for (i, text) in texts(100_000).iter().enumerate() {
            let mut drafter = NgramDrafter::default();
            let start = std::time::Instant::now();
            drafter.push(text);
            let time = start.elapsed().as_secs_f64() * 1e6 / text.len() as f64;
            let bytes = 4 * drafter.tokens.capacity() + 8 * drafter.nodes.capacity();
            assert!(bytes <= 32 * text.len(), "{bytes}");
            let mut depths = vec![0u32; drafter.nodes.len()];
            let mut to_do = vec![drafter.nodes[0][0]];
            while let Some(node) = to_do.pop() {
                for child in drafter.nodes[node as usize].into_iter().filter(|&child| child != NONE) {
                    depths[child as usize] = depths[node as usize] + 1;
                    to_do.push(child);
                }
            }
            let depth = depths.iter().max().unwrap();
            eprintln!(
                "text {i}: {time:.2} µs and {:.1} bytes per token, depth {depth}",
                bytes as f64 / text.len() as f64
            );
            assert!(*depth < 64, "{depth}");
            // Without optimisation it is some ten times slower.
            assert!(time <= if cfg!(debug_assertions) { 200.0 } else { 20.0 }, "{time} µs per token");
        }
    }
}
