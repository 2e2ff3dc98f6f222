//! Observation of what happens inside a pass.

/// A tensor that a pass computes, `(tokens, width)` unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Tap {
    /// Embeddings of the tokens, scaled.
    InpEmbd,
    /// What attention reads.
    AttnNorm,
    /// Queries before their norm and rotation (unlike llama.cpp's).
    Qcur,
    /// Queries as attention takes them, by sequence `(n_head_kv, tokens, group, head_dim)`.
    QByHead,
    /// Keys as the cache takes them.
    K,
    /// Values as the cache takes them.
    V,
    /// Output of attention, before `wo`.
    KqvOut,
    /// Output of `wo`.
    AttnOut,
    /// The residual stream between attention and feed-forward.
    FfnInp,
    /// What feed-forward reads.
    FfnNorm,
    /// Output of the gate, outside mixtures of experts.
    FfnGate,
    /// Output of `w_up`, outside mixtures of experts.
    FfnUp,
    /// Output of feed-forward.
    FfnOut,
    /// The residual stream behind the layer.
    LOut,
    /// What the head reads.
    ResultNorm,
    /// Logits, or the head's products where a hook makes the logits.
    ResultOutput,
}

impl Tap {
    /// Its name, most as llama.cpp calls it.
    pub fn name(self) -> &'static str {
        match self {
            Tap::InpEmbd => "inp_embd",
            Tap::AttnNorm => "attn_norm",
            Tap::Qcur => "Qcur",
            Tap::QByHead => "q_by_head",
            Tap::K => "k",
            Tap::V => "v",
            Tap::KqvOut => "kqv_out",
            Tap::AttnOut => "attn_out",
            Tap::FfnInp => "ffn_inp",
            Tap::FfnNorm => "ffn_norm",
            Tap::FfnGate => "ffn_gate",
            Tap::FfnUp => "ffn_up",
            Tap::FfnOut => "ffn_out",
            Tap::LOut => "l_out",
            Tap::ResultNorm => "result_norm",
            Tap::ResultOutput => "result_output",
        }
    }
}

/// Sees tensors as a pass computes them.
pub trait Probe {
    /// One tensor of layer `layer` (0 outside layers).
    fn tensor(&mut self, tap: Tap, layer: usize, values: &[f32]);

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
    fn tensor(&mut self, _: Tap, _: usize, _: &[f32]) {}

    fn sees_all_rows(&self) -> bool {
        false
    }
}
