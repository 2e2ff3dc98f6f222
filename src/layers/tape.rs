//! What components compute gradients with.

use crate::compute::linear::{
    Ctx, Product, Scratch, ScratchBackward, Wanted, linear, linear_backward,
};
use crate::compute::weight::Weight;
use crate::kv::SeqKv;
use crate::layers::hparams::Hparams;

/// Shared state of the parts of a backward pass.
pub(crate) struct Tape<'a> {
    pub(crate) ctx: Ctx<'a>,
    pub(crate) h: &'a Hparams,
    pub(crate) pos: usize,
    pub(crate) m: usize,
    pub(crate) longest: usize,
    pub(crate) texts: &'a [BackwardText<'a>],
    pub(crate) wanted: Wanted<'a>,
    pub(crate) scratch: Scratch<'a>,
    pub(crate) scratch_backward: ScratchBackward<'a>,
}

impl<'a> Tape<'a> {
    pub(crate) fn linear(&mut self, x: &[f32], m: usize, products: &mut [Product<'_>]) {
        linear(self.ctx, &mut self.scratch, x, m, products);
    }

    pub(crate) fn linear_backward(
        &mut self,
        x: &[f32],
        m: usize,
        products: &[(&Weight, &[f32])],
        dx: Option<&mut [f32]>,
    ) {
        linear_backward(
            self.ctx,
            &mut self.scratch_backward,
            &mut self.wanted,
            x,
            m,
            products,
            dx,
        );
    }
}

/// A text of a backward pass.
pub(crate) struct BackwardText<'a> {
    pub(crate) tokens: &'a [u32],
    /// The loss depends on the logits from this token on.
    pub(crate) first_output: usize,
    /// Its weight of each token's logits, if it is known: none are computed where it is 0.
    pub(crate) weights: Option<&'a [f32]>,
    pub(crate) kv: &'a SeqKv,
}

/// Rows of a part of a layer, `(m, n_embd)`: its input, the gradient of its output, and that of its
/// input.
pub(crate) struct BranchRows<'b> {
    pub(crate) x: &'b [f32],
    pub(crate) dy: &'b [f32],
    pub(crate) dx: &'b mut [f32],
}
