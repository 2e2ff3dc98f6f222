//! Kinds and places of norms.

/// Kind of normalisation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormKind {
    /// Root mean square, no bias.
    #[default]
    Rms,
    /// Root mean square, no weights at all.
    RmsPlain,
    /// Mean and variance, with bias.
    Layer,
    /// Mean and variance, no bias.
    LayerNoBias,
    /// Mean and variance, no weights at all.
    LayerPlain,
}

/// Placement of the norms of mixer and feed-forward layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Norms {
    /// On the inputs of both.
    #[default]
    Before,
    /// None: several residual streams have norms of their own.
    None,
    /// On the feed-forward layer's input only.
    BeforeFfn,
    /// On the residual stream, after each output was added to it (BERT style).
    Residual,
    /// On the inputs of both; the residual stream behind the layer goes through the model's last
    /// norm (between two loops over the layers).
    BeforeAndLast,
    /// On the residual stream, before both: it goes on from there, times the residual scale
    /// (MiniMax 01).
    OfStream,
    /// On the outputs of both.
    After,
    /// On inputs and outputs of both.
    Both,
    /// One norm on the input that both share: their outputs are added to the same residual stream
    /// (GPT-J style).
    Shared,
    /// A norm each on the input that both share, the same residual stream (GPT-NeoX style).
    Parallel,
}
