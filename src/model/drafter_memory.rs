//! How much memory a drafter takes that was trained for a model.

use crate::arch::Arch;
use crate::compute::arena::{Frame, counted};
use crate::compute::linear::Scratch;
use crate::layers::dense_ffn;
use crate::layers::draft::memory::most_positions;
use crate::layers::draft::spec::DraftKind;
use crate::layers::draft::weights::{DraftInput, DraftLayer};
use crate::layers::draft::{FEW, MAX_DRAFT};
use crate::layers::rope::RopeTables;
use crate::layers::sizes::Sizes;
use crate::model::drafter::DraftModel;

impl DraftModel {
    /// Bytes of its weights in the file.
    pub(crate) fn weight_bytes(&self) -> u64 {
        self.gguf.tensors().iter().map(|t| t.n_bytes).sum()
    }

    /// Rows of a pass that guesses.
    fn n_block(&self) -> usize {
        match self.spec.kind {
            DraftKind::Dflash { n_block, .. } => n_block,
            DraftKind::Eagle3 { .. } | DraftKind::Assistant => 1,
        }
    }

    /// Most positions of which it holds keys and values at a time, of a text of at most `n_ctx`
    /// tokens.
    pub(crate) fn n_positions(&self, n_ctx: usize) -> usize {
        match self.spec.kind {
            DraftKind::Assistant => 0,
            _ => most_positions(n_ctx + self.n_block()),
        }
    }

    /// Most bytes that it holds for one text of at most `n_ctx` tokens, of whose last `n_rows` it
    /// reads something: keys and values, and buffers.
    pub(crate) fn text_bytes(&self, n_ctx: usize, n_rows: usize) -> u64 {
        let (n, w) = (self.h.n_embd, &self.weights);
        let b = self.n_block();
        let (m, g, y, state) = match (&w.input, self.spec.kind) {
            (DraftInput::States { pre, post }, _) => (1, 0, pre.w.n_in, post.w.n_out),
            (DraftInput::Features { .. }, DraftKind::Dflash { .. }) => (n_rows.max(b), n, b * n, 0),
            (DraftInput::Features { fc, norm }, _) => {
                let of_norm = norm.as_ref().map_or(0, |_| fc.w.n_in);
                (n_rows, n, n_rows * of_norm.max(2 * n), n)
            }
        };
        let most = |of: &dyn Fn(&DraftLayer) -> usize| w.layers.iter().map(of).max().unwrap_or(0);
        let keys = |layer: &DraftLayer| match layer.kv {
            Some(_) => layer.attn.n_k() + layer.attn.n_v(),
            None => 0,
        };
        let n_out = match (&w.output, &w.token_embd) {
            (Some(output), _) => output.w.n_out,
            _ => self.h.n_vocab,
        };
        let n_guess = MAX_DRAFT.min(b.saturating_sub(1)).max(1);
        let work = n_rows * g + m.max(b) * n + y + b * n + state + n_guess * n_out;
        let angles = 2 * RopeTables::n_angles(&self.h, m.max(b));
        let layer = b * most(&|layer| layer.attn.n_q() + layer.attn.n_out()) + 2 * b * n;
        let memory: usize = w.layers.iter().map(keys).sum();
        let values = work + angles + layer + m * most(&keys);
        (values as u64 + self.n_positions(n_ctx) as u64 * memory as u64) * 4
    }

    /// Takes the buffers of its passes of up to `m` rows.
    pub(crate) fn take<'a>(
        &self,
        frame: &mut Frame<'a>,
        (arch, n_threads): (Arch, usize),
        m: usize,
    ) -> (Scratch<'a>, &'a mut [u8]) {
        let sizes = Sizes {
            h: &self.h,
            arch,
            shapes: &self.weights.shapes,
            n_threads,
        };
        let n_ff = self.weights.layers.iter().map(|w| w.ffn.up.w.n_out);
        let n_inner = dense_ffn::bytes(self.n_block(), n_ff.max().unwrap_or(0));
        let n_prompt = if m > FEW { m } else { 0 };
        let rows = (m.min(FEW), n_prompt);
        let scratch = Scratch::take(frame, sizes.products(), rows, 0);
        (scratch, frame.take(n_inner))
    }

    /// Bytes of these buffers, if it reads something of up to `n_rows` tokens at a time.
    pub(crate) fn pass_bytes(&self, arch: Arch, n_threads: usize, n_rows: usize) -> u64 {
        let m = match self.spec.kind {
            DraftKind::Assistant => 1,
            _ => n_rows.max(self.n_block()),
        };
        counted(|frame| self.take(frame, (arch, n_threads), m)) as u64
    }
}
