//! Observation of what happens inside a pass.

/// Sees tensors as a pass computes them, most under the names that llama.cpp gives them.
///
/// Names: `inp_embd`; per layer `attn_norm`, `Qcur` (before norm and rotation, unlike llama.cpp's), `q_by_head`
/// (`(n_head_kv, tokens, group, head_dim)`), `k` and `v` (as the cache takes them), `kqv_out`, `attn_out`, `ffn_inp`,
/// `ffn_norm`, `ffn_gate` and `ffn_up` (outside mixtures of experts), `ffn_out`, `l_out`; `result_norm`,
/// `result_output`. All others are `(tokens, width)`.
pub trait Probe {
    /// One tensor of layer `layer` (0 outside layers).
    fn tensor(&mut self, name: &str, layer: usize, values: &[f32]);

    /// Whether it looks at tokens of the last layer that no logits are wanted of. If not, only their keys and
    /// values are computed there, and the other tensors of that layer have rows of the other tokens alone. That
    /// can make the products of a few rows of those of many, which round differently: logits then are the same
    /// but for rounding.
    fn sees_all_rows(&self) -> bool {
        true
    }
}

/// Looks at nothing and costs nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProbe;

impl Probe for NoProbe {
    #[inline(always)]
    fn tensor(&mut self, _: &str, _: usize, _: &[f32]) {}

    #[inline(always)]
    fn sees_all_rows(&self) -> bool {
        false
    }
}
