//! Exact search.
//!
//! An entry is like a text by two cosines. *Words*: each word weighs its inverse document frequency
//! (Spärck Jones, 1972), less if it is short, since frequent words are (Zipf's law of
//! abbreviation): with few entries nothing else tells them apart. *Vectors*: hidden states of a
//! language model have a large part in common, which is subtracted first (arXiv 1702.01417). They
//! can find what words do not, but take nothing from what words find: those of small models tell
//! little.

use crate::memory::entry::Entry;
use ruvllm::arch::Arch;
use ruvllm::kv::hash::{SEED, mix};
use std::collections::HashMap;

/// Length from which on a word weighs all it can.
const LONG: f32 = 5.0;
/// The mean vector counts as if so many vectors more had been zero.
const FEW: f32 = 4.0;
/// What a word weighs that no entry has, relative to one that a single entry has: most words of a
/// question are how it is asked.
const UNKNOWN: f32 = 0.5;

/// An entry that is like a question.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Hit {
    /// Its number.
    pub number: u64,
    /// Likeness: `max(words, (words + vector)/2)`.
    pub score: f32,
    /// Likeness of the words, 0 to 1.
    pub words: f32,
    /// Cosine of the vectors, −1 to 1; 0 without vectors.
    pub vector: f32,
}

/// Words and vectors of entries.
#[derive(Debug, Default)]
pub(super) struct Index {
    numbers: Vec<u64>,
    /// The entries that have a word, and how much its length weighs.
    places: HashMap<u64, (f32, Vec<u32>)>,
    words: Vec<Vec<u64>>,
    /// Fingerprint of the model whose vectors these are, and their width.
    space: u64,
    width: usize,
    /// `(entries, width)`; zeros where an entry has none of this space.
    vectors: Vec<f32>,
    sum: Vec<f32>,
    n_vectors: usize,
}

impl Index {
    /// An index of entries; their vectors of model `space` are used.
    pub(super) fn new<'a>(entries: impl IntoIterator<Item = &'a Entry>, space: u64) -> Index {
        let mut index = Index {
            space,
            ..Index::default()
        };
        entries.into_iter().for_each(|entry| index.push(entry));
        index
    }

    pub(super) fn space(&self) -> u64 {
        self.space
    }

    /// Entries with a vector of this space.
    pub(super) fn n_vectors(&self) -> usize {
        self.n_vectors
    }

    pub(super) fn push(&mut self, entry: &Entry) {
        let place = self.numbers.len() as u32;
        self.numbers.push(entry.number);
        let words = words(&entry.text);
        for (word, weight) in &words {
            let (_, places) = self.places.entry(*word).or_insert((*weight, Vec::new()));
            places.push(place);
        }
        self.words
            .push(words.into_iter().map(|(word, _)| word).collect());
        let is_ours = self.space != 0 && entry.space == self.space && !entry.vector.is_empty();
        if is_ours && self.width == 0 {
            self.width = entry.vector.len();
            self.sum = vec![0.0; self.width];
            self.vectors = vec![0.0; self.width * place as usize];
        }
        let vector = entry.vector.iter().map(|x| x.to_f32());
        if is_ours && entry.vector.len() == self.width {
            self.vectors.extend(vector);
            let row = &self.vectors[self.vectors.len() - self.width..];
            self.sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            self.n_vectors += 1;
        } else {
            self.vectors.resize(self.vectors.len() + self.width, 0.0);
        }
    }

    /// How much a word weighs.
    fn weight(&self, length: f32, n_places: usize) -> f32 {
        let known = if n_places == 0 { UNKNOWN } else { 1.0 };
        known * length * (1.0 + self.numbers.len() as f32 / n_places.max(1) as f32).ln()
    }

    /// The entries that are most like a text, the likest first, at most `n`; those that `is_active`
    /// refuses are passed over.
    pub(super) fn search(
        &self,
        arch: Arch,
        text: &str,
        vector: Option<&[f32]>,
        n: usize,
        is_active: impl Fn(u64) -> bool,
    ) -> Vec<Hit> {
        let by_words = self.by_words(text);
        let vector = vector.filter(|v| v.len() == self.width && self.n_vectors > 0);
        let by_vector = vector.map(|vector| self.by_vector(arch, vector));
        let hits = self.numbers.iter().enumerate().map(|(i, &number)| {
            let (words, vector) = (by_words[i], by_vector.as_ref().map(|all| all[i]));
            Hit {
                number,
                score: vector.map_or(words, |vector| words.max(0.5 * (words + vector))),
                words,
                vector: vector.unwrap_or(0.0),
            }
        });
        let mut hits: Vec<Hit> = hits
            .filter(|hit| hit.score > 0.0 && is_active(hit.number))
            .collect();
        let order = |a: &Hit, b: &Hit| b.score.total_cmp(&a.score).then(b.number.cmp(&a.number));
        if hits.len() > n {
            hits.select_nth_unstable_by(n, order);
            hits.truncate(n);
        }
        hits.sort_by(order);
        hits
    }

    /// The cosine of the weighted words of each entry with those of a text.
    fn by_words(&self, text: &str) -> Vec<f32> {
        let mut scores = vec![0.0f32; self.numbers.len()];
        let mut length = 0.0;
        for (word, short) in words(text) {
            let places = self.places.get(&word).map_or(&[][..], |(_, places)| places);
            let weight = self.weight(short, places.len());
            length += weight * weight;
            for &place in places {
                scores[place as usize] += weight * weight;
            }
        }
        for (score, words) in scores.iter_mut().zip(&self.words) {
            if *score > 0.0 {
                let squares = words.iter().filter_map(|word| self.places.get(word));
                let own: f32 = squares
                    .map(|(short, places)| self.weight(*short, places.len()).powi(2))
                    .sum();
                *score /= (own * length).sqrt().max(f32::MIN_POSITIVE);
            }
        }
        scores
    }

    /// The cosine of each entry's vector with another, both without what all entries have in
    /// common; 0 where an entry has none.
    fn by_vector(&self, arch: Arch, vector: &[f32]) -> Vec<f32> {
        let n = self.n_vectors as f32 + FEW;
        let mean: Vec<f32> = self.sum.iter().map(|sum| sum / n).collect();
        let question: Vec<f32> = vector.iter().zip(&mean).map(|(x, m)| x - m).collect();
        let (common, square) = (arch.dot(&question, &mean), arch.dot(&mean, &mean));
        let length = arch.dot(&question, &question);
        let rows = self.vectors.chunks_exact(self.width);
        rows.map(|row| {
            let own = arch.dot(row, row);
            if own == 0.0 {
                return 0.0;
            }
            let own = own - 2.0 * arch.dot(row, &mean) + square;
            let product = arch.dot(&question, row) - common;
            product / (own * length).sqrt().max(f32::MIN_POSITIVE)
        })
        .collect()
    }
}

/// Hashes of the words of a text, each once, with what their length weighs.
fn words(text: &str) -> Vec<(u64, f32)> {
    let lower = text.to_lowercase();
    let mut words: Vec<(u64, f32)> = lower
        .split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(|word| {
            let is_number = word.chars().all(char::is_numeric);
            let length = word.chars().count() as f32;
            let weight = if is_number {
                1.0
            } else {
                (length / LONG).min(1.0)
            };
            (mix(SEED, word.as_bytes()), weight)
        })
        .collect();
    words.sort_by_key(|(word, _)| *word);
    words.dedup_by_key(|(word, _)| *word);
    words
}
