//! Drafts out of the text itself: what came after the longest end of the text that was there
//! before.
//!
//! A suffix automaton finds that end, too (SAM decoding, <https://arxiv.org/abs/2411.10666>), and takes 30 to 60 bytes per
//! token. Here the beginnings of the text are the nodes of a search tree: ordered by their last
//! token, then by the one before it, and so on. A beginning has the longest common end with one of
//! its neighbours in that order, and whoever inserts it passes both. The tree is a treap (Seidel
//! and Aragon 1996, doi:10.1007/BF01940876), so that it is some twenty nodes deep at a hundred
//! thousand tokens, whatever the text.

use crate::decode::speculative::{Draft, Drafter};
use std::cmp::Ordering;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Most tokens of two ends that are compared; what agrees so far is ordered by position.
const MAX_MATCH: usize = 32;
/// No node; its place in the tree holds the root.
const NONE: u32 = 0;
/// Least lengths of a common end for each [`Draft::confidence`].
const GRADES: [usize; 8] = [1, 2, 3, 4, 6, 9, 16, 32];
/// Most texts that are remembered, and most tokens of all of them.
const MAX_RECENT: usize = 4;
const MAX_RECENT_TOKENS: usize = 1 << 15;

/// Drafts what came after the longest end of the text that was there before: repeated code,
/// quotations, names. What a [`Scheduler`](crate::scheduler::Scheduler) computes for one tenant is
/// looked up in its last texts, too.
///
/// Takes 12 bytes per token, and some microseconds.
#[derive(Debug, Default)]
pub struct NgramDrafter {
    text: Text,
    /// The beginning whose end agrees best with that of the text, and in how many tokens.
    found: (usize, usize),
    /// Other texts in which to look, and where to leave this one.
    others: Vec<Arc<Text>>,
    recent: Option<RecentTexts>,
}

/// The last texts of a tenant that ended.
#[derive(Clone, Debug, Default)]
pub struct RecentTexts(Arc<Mutex<VecDeque<Arc<Text>>>>);

impl RecentTexts {
    fn all(&self) -> Vec<Arc<Text>> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .cloned()
            .collect()
    }

    fn add(&self, text: Text) {
        let mut texts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        texts.push_back(Arc::new(text));
        while texts.len() > MAX_RECENT
            || texts.iter().map(|text| text.tokens.len()).sum::<usize>() > MAX_RECENT_TOKENS
        {
            texts.pop_front();
        }
    }
}

/// Tokens, and a tree of their beginnings.
#[derive(Clone, Debug)]
struct Text {
    tokens: Vec<u32>,
    /// Node `i` is the beginning of `i` tokens; its children are nodes that come before it in the
    /// order, and after it.
    nodes: Vec<[u32; 2]>,
}

impl Default for Text {
    fn default() -> Self {
        Text {
            tokens: Vec::new(),
            nodes: vec![[NONE; 2]],
        }
    }
}

/// A random number for each node: parents have higher ones than their children. (The finalizer of
/// MurmurHash3.)
fn priority(node: u32) -> u32 {
    let mut x = node;
    x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
    x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}

/// How many tokens at the ends of two texts agree, up to [`MAX_MATCH`], and the order by the one
/// before them.
fn compare(a: &[u32], b: &[u32]) -> (usize, Ordering) {
    let mut len = 0;
    for (a, b) in a.iter().rev().zip(b.iter().rev()).take(MAX_MATCH) {
        match a.cmp(b) {
            Ordering::Equal => len += 1,
            order => return (len, order),
        }
    }
    (len, Ordering::Equal)
}

impl Text {
    /// Whether the newest beginning comes after another one in the order; notes in `found` how long
    /// their common end is.
    fn is_after(&self, node: u32, found: &mut (usize, usize)) -> bool {
        let (new, node) = (self.tokens.len(), node as usize);
        let (len, order) = compare(&self.tokens, &self.tokens[..node]);
        // The latest of those that agree best.
        if len > 0 && (len, node) > (found.1, found.0) {
            *found = (node, len);
        }
        order.then(new.cmp(&node)) == Ordering::Greater
    }

    /// Appends a token; returns the earlier beginning whose end agrees best with that of the text,
    /// and in how many tokens.
    fn insert(&mut self, token: u32) -> (usize, usize) {
        self.tokens.push(token);
        let new = self.nodes.len() as u32;
        let mut found = (0, 0);
        // Down to the first node that it is to be the parent of.
        let (mut parent, mut side) = (NONE, 0);
        let mut node = self.nodes[parent as usize][side];
        while node != NONE && priority(node) > priority(new) {
            (parent, side) = (node, usize::from(self.is_after(node, &mut found)));
            node = self.nodes[parent as usize][side];
        }
        self.nodes.push([NONE; 2]);
        self.nodes[parent as usize][side] = new;
        // What was there is cut in two: nodes before the new one, and those after it. The next of
        // each goes here.
        let mut ends = [(new, 0), (new, 1)];
        while node != NONE {
            let part = usize::from(!self.is_after(node, &mut found));
            let (parent, side) = ends[part];
            self.nodes[parent as usize][side] = node;
            ends[part] = (node, 1 - part);
            node = self.nodes[node as usize][1 - part];
        }
        for (parent, side) in ends {
            self.nodes[parent as usize][side] = NONE;
        }
        found
    }

    /// The beginning whose end agrees best with that of another text, and in how many tokens.
    fn find(&self, other: &[u32]) -> (usize, usize) {
        let (mut node, mut found) = (self.nodes[NONE as usize][0], (0, 0));
        while node != NONE {
            let (len, order) = compare(other, &self.tokens[..node as usize]);
            if len > found.1 {
                found = (node as usize, len);
            }
            // Where all agrees, it comes after those that are here.
            node = self.nodes[node as usize][usize::from(order != Ordering::Less)];
        }
        found
    }
}

impl Drafter for NgramDrafter {
    fn name(&self) -> &'static str {
        "ngram"
    }

    fn push(&mut self, tokens: &[u32]) {
        tokens
            .iter()
            .for_each(|&token| self.found = self.text.insert(token));
    }

    fn remember(&mut self, recent: &RecentTexts) {
        (self.others, self.recent) = (recent.all(), Some(recent.clone()));
    }

    fn draft(&mut self, n: usize, draft: &mut Vec<Draft>) {
        let own = &self.text.tokens;
        let ((mut at, mut len), mut known) = (self.found, own);
        for other in self
            .others
            .iter()
            .rev()
            .filter(|_| self.found.1 < MAX_MATCH)
        {
            let found = other.find(own);
            // Behind its own end it does not go on.
            if found.1 > len && found.0 < other.tokens.len() {
                ((at, len), known) = (found, &other.tokens);
            }
        }
        for i in 0..if len > 0 { n } else { 0 } {
            let token = match (
                known.get(at + i),
                draft.get((at + i).wrapping_sub(known.len())),
            ) {
                (Some(&token), _) => token,
                // Behind the end of the text it goes on with itself.
                (None, Some(guess)) if std::ptr::eq(known, own) => guess.token,
                _ => break,
            };
            let confidence = GRADES
                .iter()
                .rposition(|&least| len + i >= least)
                .unwrap_or(0) as u8;
            draft.push(Draft { token, confidence });
        }
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

/// Leaves its own text to nobody.
impl Clone for NgramDrafter {
    fn clone(&self) -> Self {
        NgramDrafter {
            text: self.text.clone(),
            found: self.found,
            others: self.others.clone(),
            recent: None,
        }
    }
}

impl Drop for NgramDrafter {
    fn drop(&mut self) {
        if let Some(recent) = self.recent.take().filter(|_| !self.text.tokens.is_empty()) {
            recent.add(std::mem::take(&mut self.text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The latest of the earlier beginnings with the longest common end, found by looking at all of
    /// them.
    fn slow(tokens: &[u32]) -> (usize, usize) {
        let common = |n: usize| {
            let ends = tokens
                .iter()
                .rev()
                .zip(tokens[..n].iter().rev())
                .take(MAX_MATCH);
            ends.take_while(|(a, b)| a == b).count()
        };
        (1..tokens.len())
            .map(|n| (common(n), n))
            .filter(|&(len, _)| len > 0)
            .max()
            .map_or((0, 0), |(len, n)| (n, len))
    }

    /// Texts of all kinds: random over few and many tokens, one token, a period, a Fibonacci word.
    fn texts(n: usize) -> Vec<Vec<u32>> {
        let mut state = 1u64;
        let mut below = |n: u64| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            ((state >> 33) % n) as u32
        };
        let mut all: Vec<Vec<u32>> = [2, 5, 300, 1 << 30]
            .map(|k| (0..n).map(|_| below(k)).collect())
            .into();
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
        assert_eq!(
            draft.iter().map(|guess| guess.token).collect::<Vec<_>>(),
            [1, 2, 3, 1, 2, 3, 1]
        );
        assert_eq!(
            draft
                .iter()
                .map(|guess| guess.confidence)
                .collect::<Vec<_>>(),
            [2, 3, 3, 4, 4, 4, 5]
        );
        drafter.push(&[77]);
        draft.clear();
        drafter.draft(7, &mut draft);
        assert!(draft.is_empty(), "a token that was never there");
    }

    /// What others wrote goes on only where it agrees in more tokens than the text itself, and not
    /// behind its end.
    #[test]
    fn texts_that_ended_are_remembered() {
        let recent = RecentTexts::default();
        let drafter = |tokens: &[u32]| {
            let mut drafter = NgramDrafter::default();
            drafter.remember(&recent);
            drafter.push(tokens);
            drafter
        };
        let drafts = |drafter: &mut NgramDrafter| {
            let mut draft = Vec::new();
            drafter.draft(4, &mut draft);
            draft
                .into_iter()
                .map(|guess| (guess.token, guess.confidence))
                .collect::<Vec<_>>()
        };
        let mut first = drafter(&[5, 1, 2, 3, 4]);
        let mut beside = drafter(&[1, 2]);
        assert!(drafts(&mut first).is_empty());
        drop(first.boxed_clone());
        assert!(recent.all().is_empty(), "a copy leaves nothing");
        drop(first);
        assert!(
            drafts(&mut beside).is_empty(),
            "what ended later is for later ones"
        );
        drop(beside);
        assert_eq!(drafts(&mut drafter(&[9, 1, 2])), [(3, 1), (4, 2)]);
        // Of its own, it agrees in more.
        assert_eq!(
            drafts(&mut drafter(&[9, 1, 2, 8, 9, 1, 2])),
            [(8, 2), (9, 3), (1, 3), (2, 4)]
        );
        assert_eq!(drafts(&mut drafter(&[1, 2, 8, 5, 1, 2])), [(3, 2), (4, 3)]);
        // The last few are kept, and no long ones.
        drop(drafter(&[7; MAX_RECENT_TOKENS + 1]));
        assert!(recent.all().is_empty());
        (0..9).for_each(|i| drop(drafter(&[i, i + 1, i + 2])));
        assert_eq!(
            recent
                .all()
                .iter()
                .map(|text| text.tokens[0])
                .collect::<Vec<_>>(),
            [5, 6, 7, 8]
        );
    }

    #[test]
    fn finds_the_longest_end_in_another_text() {
        for (i, text) in texts(300).into_iter().enumerate() {
            let mut tree = Text::default();
            for &token in &text {
                tree.insert(token);
            }
            for other in texts(40) {
                for n in 0..other.len() {
                    let best = (1..=text.len())
                        .map(|node| compare(&other[..n], &text[..node]).0)
                        .max()
                        .unwrap();
                    let (at, len) = tree.find(&other[..n]);
                    assert_eq!(
                        (len, compare(&other[..n], &text[..at]).0),
                        (best, best),
                        "text {i}, {:?}",
                        &other[..n]
                    );
                }
            }
        }
    }

    /// At most 32 bytes per token, growth of vectors included, and a depth that no text makes
    /// large: at 100,000 tokens a node is compared with at most some fifty others, each in
    /// [`MAX_MATCH`] tokens at most.
    #[test]
    fn a_hundred_thousand_tokens() {
        for (i, text) in texts(100_000).iter().enumerate() {
            let mut drafter = NgramDrafter::default();
            let start = std::time::Instant::now();
            drafter.push(text);
            let time = start.elapsed().as_secs_f64() * 1e6 / text.len() as f64;
            let Text { tokens, nodes } = &drafter.text;
            let bytes = 4 * tokens.capacity() + 8 * nodes.capacity();
            assert!(bytes <= 32 * text.len(), "{bytes}");
            let mut depths = vec![0u32; nodes.len()];
            let mut to_do = vec![nodes[0][0]];
            while let Some(node) = to_do.pop() {
                for child in nodes[node as usize]
                    .into_iter()
                    .filter(|&child| child != NONE)
                {
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
            assert!(
                time <= if cfg!(debug_assertions) { 200.0 } else { 20.0 },
                "{time} µs per token"
            );
        }
    }
}
