//! Activations of feed-forward layers.

/// Activation of a feed-forward layer, from the products `gate` and `up` with its input.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Activation {
    /// `silu(gate)·up`.
    #[default]
    SwiGlu,
    /// `gelu(gate)·up`, by the tanh formula.
    GeGlu,
    /// `gelu(up)`, by the tanh formula; there is no gate.
    Gelu,
    /// `max(up, 0)²`; there is no gate.
    SquaredRelu,
    /// `max(up, 0)`; there is no gate.
    Relu,
    /// `gelu(gate)·up`, by the error function.
    GeGluErf,
    /// `max(gate, 0)·up`.
    ReGlu,
    /// `g·σ(1.702·g)·(u + 1)` with `g = min(gate, 7)` and `u` = `up` clamped to ±7 (gpt-oss).
    SwiGluOai,
    /// `silu(min(gate, limit))·u`, where `u` is `up` clamped to `±limit` (Maple).
    SwiGluClamped {
        /// Above 0.
        limit: f32,
    },
    /// `min(silu(gate), limit)·u`, where `u` is `up` clamped to `±limit` (Step 3.5).
    SwiGluClampedAfter {
        /// Above 0.
        limit: f32,
    },
    /// `beta·tanh(gate/beta)·σ(gate)·u`, where `u` is `linear·tanh(up/linear)`, or `up` (Kimi K3).
    Situ {
        /// Above 0.
        beta: f32,
        /// Above 0.
        linear: Option<f32>,
    },
    /// `gelu(up)`, by the error function; there is no gate.
    GeluErf,
    /// `up²·alpha_p + up·beta` for positive values, `(e^min(up, eps) − 1 − up)·alpha_n + up·beta`
    /// for others; there is no gate (arXiv 2411.13010).
    Xielu {
        /// Curvature above 0.
        alpha_p: f32,
        /// Curvature below 0.
        alpha_n: f32,
        /// Slope at 0.
        beta: f32,
        /// Upper bound of the exponent, below 0.
        eps: f32,
    },
}

impl Activation {
    /// Whether there is a gate.
    pub fn is_gated(self) -> bool {
        matches!(
            self,
            Activation::SwiGlu
                | Activation::GeGlu
                | Activation::ReGlu
                | Activation::GeGluErf
                | Activation::SwiGluOai
                | Activation::SwiGluClamped { .. }
                | Activation::SwiGluClampedAfter { .. }
                | Activation::Situ { .. }
        )
    }
}
