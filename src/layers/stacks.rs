//! Two stacks of blocks that run in turn (HRM, arXiv 2506.21734), and their states.

pub(crate) mod spec;

use crate::compute::arena::Frame;
use crate::layers::context::Context;
use crate::layers::hparams::Hparams;
use crate::layers::norm::weights::Norm;

/// Weights of both stacks together.
#[derive(Clone, Debug)]
pub(crate) struct Stacks {
    /// The first stack's state at the start, the same at every position.
    pub(crate) first: Vec<f32>,
    /// Norm of what a run puts out.
    pub(crate) norm: Norm,
}

/// States of both stacks, `(m, n_embd)` each.
pub(crate) struct StackStates<'a> {
    first: &'a mut [f32],
    second: &'a mut [f32],
}

impl<'a> StackStates<'a> {
    pub(crate) fn take(frame: &mut Frame<'a>, h: &Hparams, m: usize) -> StackStates<'a> {
        let n = if h.stacks.is_some() { m * h.n_embd } else { 0 };
        StackStates {
            first: frame.take(n),
            second: frame.take(n),
        }
    }

    /// Begins with the embeddings `x` as the second stack's state.
    pub(crate) fn begin(&mut self, w: &Stacks, x: &[f32]) {
        self.second.copy_from_slice(x);
        for row in self.first.chunks_exact_mut(w.first.len()) {
            row.copy_from_slice(&w.first);
        }
    }

    /// Before a layer: where a run begins, the sum of both states becomes the residual stream.
    pub(crate) fn enter(&self, cx: &Context<'_, '_>, x: &mut [f32]) {
        if cx.h.stacks.is_some_and(|stacks| stacks.begins(cx.layer)) {
            x.copy_from_slice(self.first);
            cx.arch.add(x, self.second);
        }
    }

    /// Behind a layer: where a run ends, the residual stream becomes the stack's state. The head
    /// reads that of the last run, through a norm of the same kind.
    pub(crate) fn leave(&mut self, cx: &Context<'_, '_>, w: &Stacks, x: &[f32]) {
        let Some(stacks) = cx.h.stacks else { return };
        if cx.is_last() || !stacks.begins(cx.layer + 1) {
            return;
        }
        let state = if stacks.is_second(cx.layer) {
            &mut self.second
        } else {
            &mut self.first
        };
        cx.norm(Some(&w.norm), x, state);
    }
}
