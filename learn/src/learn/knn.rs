//! Cache of the tokens that followed similar hidden states (Khandelwal et al., arXiv 1911.00172):
//! no training; an entry is kept until it is overwritten.

use crate::learn::ngram::{Sparse, add};
use half::f16;
use ruvllm::arch::{Acts, Arch, ColumnsMut};
use ruvllm::quant::DType;

/// Number of nearest neighbours used.
const NEIGHBOURS: usize = 48;
/// Weight of a neighbour: `exp(SHARPNESS·cosine)`; tuned on the shipped model.
const SHARPNESS: f32 = 24.0;

/// Entries for which there is room at first.
const FIRST: usize = 64;

/// Hidden states, scaled to length one, with the token that followed each; the oldest is
/// overwritten.
#[derive(Clone, Debug)]
pub(crate) struct KnnCache {
    n_embd: usize,
    capacity: usize,
    pushed: usize,
    keys: Vec<f16>,
    tokens: Vec<u32>,
    cosines: Vec<f32>,
    near: Vec<(f32, u32)>,
}

impl KnnCache {
    pub(crate) fn new(n_embd: usize, capacity: usize) -> KnnCache {
        KnnCache {
            n_embd,
            capacity,
            pushed: 0,
            keys: Vec::new(),
            tokens: Vec::new(),
            cosines: Vec::new(),
            near: Vec::new(),
        }
    }

    /// Keys `(n, n_embd)` and tokens, oldest first.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&[f16], u32)> {
        let start = if self.tokens.len() < self.capacity {
            0
        } else {
            self.pushed % self.capacity
        };
        let n = self.tokens.len();
        (start..n)
            .chain(0..start)
            .map(|i| (&self.keys[i * self.n_embd..][..self.n_embd], self.tokens[i]))
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(crate) fn push(&mut self, key: &[f16], token: u32) {
        let i = self.pushed % self.capacity;
        self.pushed += 1;
        if i < self.tokens.len() {
            self.keys[i * self.n_embd..][..self.n_embd].copy_from_slice(key);
            self.tokens[i] = token;
        } else {
            if i == self.tokens.capacity() {
                // Twice as much as there is, but no more than is ever used.
                let more = i.max(FIRST).min(self.capacity - i);
                self.keys.reserve_exact(more * self.n_embd);
                self.tokens.reserve_exact(more);
            }
            self.keys.extend_from_slice(key);
            self.tokens.push(token);
        }
    }

    /// Adds a hidden state and the token that came after it.
    pub(crate) fn observe(&mut self, arch: Arch, h: &[f32], token: u32) {
        let mut key = vec![f16::ZERO; self.n_embd];
        arch.f32_to_f16(&unit(arch, h), &mut key);
        if key.iter().all(|x| x.is_finite()) {
            self.push(&key, token);
        }
    }

    /// The tokens that followed the most similar states, and the largest cosine.
    pub(crate) fn continuations(&mut self, arch: Arch, h: &[f32]) -> (Sparse, f32) {
        let (h, n_keys) = (unit(arch, h), self.tokens.len());
        self.cosines
            .reserve_exact(self.tokens.capacity() - self.cosines.len());
        self.cosines.resize(n_keys, 0.0);
        let cosines = &mut ColumnsMut::new(&mut self.cosines, 1, n_keys);
        arch.matvec(
            DType::F16,
            cosines,
            bytemuck::cast_slice(&self.keys),
            &Acts::F32 {
                x: &h,
                n: self.n_embd,
            },
        );
        self.near.clear();
        self.near.reserve_exact(self.tokens.capacity());
        self.near.extend(
            self.cosines
                .iter()
                .copied()
                .zip(self.tokens.iter().copied()),
        );
        let n = NEIGHBOURS.min(self.near.len());
        if n == 0 {
            return (Sparse::new(), 0.0);
        }
        self.near
            .select_nth_unstable_by(n - 1, |x, y| y.0.total_cmp(&x.0).then(x.1.cmp(&y.1)));
        self.near[..n].sort_unstable_by(|x, y| y.0.total_cmp(&x.0).then(x.1.cmp(&y.1)));
        let nearest = self.near[0].0;
        let mut found = Sparse::new();
        let mut sum = 0.0;
        for &(cosine, token) in &self.near[..n] {
            let weight = f64::from(SHARPNESS * (cosine - nearest)).exp();
            add(&mut found, token, weight);
            sum += weight;
        }
        found.iter_mut().for_each(|(_, p)| *p /= sum);
        (found, nearest)
    }
}

/// `h` scaled to length one.
fn unit(arch: Arch, h: &[f32]) -> Vec<f32> {
    let norm = arch.dot(h, h).sqrt().max(f32::MIN_POSITIVE);
    h.iter().map(|x| x / norm).collect()
}
