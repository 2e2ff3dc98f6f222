//! Mean hidden states of a prompt and its answer, summed by the passes that compute them anyway.

use crate::arch::Arch;
use crate::compute::hook::TokenKind;

/// Means of the residual stream after a layer, see
/// [`SessionOptions::pooled_layer`](crate::SessionOptions::pooled_layer).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PooledStates {
    /// Of a prompt's tokens, `(n_embd)`; empty if none was computed.
    pub prompt: Vec<f32>,
    /// Of generated tokens, `(n_embd)`: of those that a pass computes together, as with drafts,
    /// only of the first; empty if none was computed.
    pub answer: Vec<f32>,
}

/// Sums of hidden states of a sequence's tokens, by their kind.
#[derive(Clone, Debug)]
pub(crate) struct Pooling {
    pub(crate) layer: usize,
    /// Tokens before this position were added, or are not to be.
    next: usize,
    /// Sum and number, of prompt tokens and of generated ones.
    sums: [(Vec<f32>, usize); 2],
}

impl Pooling {
    pub(crate) fn new(layer: usize) -> Pooling {
        // The first token's state is the same whatever follows, and far longer than others.
        Pooling {
            layer,
            next: 1,
            sums: Default::default(),
        }
    }

    /// Adds rows `(n, n_embd)` of tokens from `position` on. Of generated tokens only the first:
    /// others may be drafts.
    pub(crate) fn add(
        &mut self,
        arch: Arch,
        kind: TokenKind,
        position: usize,
        rows: &[f32],
        n_embd: usize,
    ) {
        let most = if kind == TokenKind::Generated {
            1
        } else {
            usize::MAX
        };
        let (sum, n) = &mut self.sums[usize::from(kind == TokenKind::Generated)];
        for (at, row) in (position..).zip(rows.chunks_exact(n_embd)).take(most) {
            if at >= self.next {
                sum.resize(n_embd, 0.0);
                arch.add(sum, row);
                (*n, self.next) = (*n + 1, at + 1);
            }
        }
    }

    /// Tokens from `position` on are gone, others will follow.
    pub(crate) fn truncate(&mut self, position: usize) {
        self.next = self.next.min(position.max(1));
    }

    /// `n` tokens before the last are gone.
    pub(crate) fn shift(&mut self, n: usize) {
        self.next = self.next.saturating_sub(n).max(1);
    }

    /// `n` tokens that were gone will be computed again before the others.
    pub(crate) fn unshift(&mut self, n: usize) {
        self.next += n;
    }

    /// The means; begins new ones.
    pub(crate) fn take(&mut self) -> PooledStates {
        let [prompt, answer] = std::mem::take(&mut self.sums).map(|(mut sum, n)| {
            sum.iter_mut().for_each(|x| *x /= n as f32);
            sum
        });
        PooledStates { prompt, answer }
    }
}
