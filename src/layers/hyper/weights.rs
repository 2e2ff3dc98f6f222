//! Weights of hyper-connections.

use crate::compute::weight::Linear;

/// Connection of a part of a layer, or of the head.
#[derive(Clone, Debug)]
pub(crate) enum Connection {
    Weighed(Weighed),
    LowRank(LowRank),
}

/// What makes gates of normed streams, `σ(up·silu(down·x/n_stream))`, and weights of outputs,
/// `2·σ(inject·x/n_stream)`.
#[derive(Clone, Debug)]
pub(crate) struct LowRank {
    /// Of all streams, one after the other.
    pub(crate) norm: Vec<f32>,
    pub(crate) down: Linear,
    pub(crate) up: Linear,
    /// The head has none.
    pub(crate) inject: Option<Linear>,
}

/// What makes the weights of streams: `scale·(W·norm(streams)) + base`.
#[derive(Clone, Debug)]
pub(crate) struct Weighed {
    pub(crate) w: Linear,
    /// A factor for each kind of weights.
    pub(crate) scale: Vec<f32>,
    pub(crate) base: Vec<f32>,
}

/// Connections of the two parts of a layer.
#[derive(Clone, Debug)]
pub(crate) struct HyperLayer {
    pub(crate) mixer: Connection,
    pub(crate) ffn: Connection,
}
