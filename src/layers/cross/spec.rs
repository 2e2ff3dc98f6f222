//! The encoder of models that have one besides a decoder (T5).

/// An encoder whose text the layers of the model read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EncoderSpec {
    /// Number of its layers, which are like the model's.
    pub n_layer: usize,
    /// The token with which the model's own text begins.
    pub start: u32,
}
