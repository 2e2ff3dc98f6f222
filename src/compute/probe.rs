//! Observation of intermediate results of a pass.

use std::sync::Arc;

/// A tensor that a pass computes, `(tokens, width)` unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HookPoint {
    /// Embeddings of the tokens, scaled.
    InpEmbd,
    /// Input of attention.
    AttnNorm,
    /// Queries before their norm and rotation (unlike llama.cpp's).
    Qcur,
    /// Queries in the form that attention reads, by sequence `(n_head_kv, tokens, group,
    /// head_dim)`.
    QByHead,
    /// Keys in the form that the cache stores: those with a norm by head have the powers of two that
    /// balance them with queries.
    K,
    /// Values in the form that the cache stores.
    V,
    /// Output of attention, before `wo`.
    KqvOut,
    /// Output of `wo`.
    AttnOut,
    /// The residual stream between attention and feed-forward.
    FfnInp,
    /// Input of the feed-forward layer.
    FfnNorm,
    /// Output of the gate, outside mixtures of experts.
    FfnGate,
    /// Output of `w_up`, outside mixtures of experts.
    FfnUp,
    /// Output of feed-forward.
    FfnOut,
    /// The residual stream after the layer.
    LOut,
    /// Input of the head.
    ResultNorm,
    /// Logits, or the head's products if a hook computes the logits.
    ResultOutput,
}

impl HookPoint {
    /// Its name, mostly llama.cpp's.
    pub fn name(self) -> &'static str {
        match self {
            HookPoint::InpEmbd => "inp_embd",
            HookPoint::AttnNorm => "attn_norm",
            HookPoint::Qcur => "Qcur",
            HookPoint::QByHead => "q_by_head",
            HookPoint::K => "k",
            HookPoint::V => "v",
            HookPoint::KqvOut => "kqv_out",
            HookPoint::AttnOut => "attn_out",
            HookPoint::FfnInp => "ffn_inp",
            HookPoint::FfnNorm => "ffn_norm",
            HookPoint::FfnGate => "ffn_gate",
            HookPoint::FfnUp => "ffn_up",
            HookPoint::FfnOut => "ffn_out",
            HookPoint::LOut => "l_out",
            HookPoint::ResultNorm => "result_norm",
            HookPoint::ResultOutput => "result_output",
        }
    }
}

/// Receives tensors as a pass computes them.
pub trait EvalCallback {
    /// Called with a tensor of layer `layer` (0 outside layers).
    fn tensor(&mut self, tap: HookPoint, layer: usize, values: &[f32]);

    /// Whether the probe needs tokens of the last layer whose logits are not requested. If not,
    /// only their keys and values are computed there, and the other tensors of that layer have
    /// only the rows of the remaining tokens. This can turn products of many rows into products
    /// of few, which round differently: logits are then equal only up to rounding.
    fn sees_all_rows(&self) -> bool {
        true
    }

    /// Who receives the inputs of products with weights, if anybody.
    fn products(&self) -> Option<Arc<dyn ProductCallback>> {
        None
    }
}

/// Receives the inputs of products with weights, as a pass computes them.
pub trait ProductCallback: Send + Sync {
    /// Rows `x`, of `n` values each, before they are multiplied with matrix `matrix` of the tensor
    /// `name` of the file: 0, or the number of the expert in a stack.
    fn inputs(&self, name: &str, matrix: usize, n: usize, x: &[f32]);
}

/// A probe that ignores everything, at no cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoCallback;

impl EvalCallback for NoCallback {
    fn tensor(&mut self, _: HookPoint, _: usize, _: &[f32]) {}

    fn sees_all_rows(&self) -> bool {
        false
    }
}
