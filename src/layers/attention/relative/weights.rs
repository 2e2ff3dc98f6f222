//! Biases of a layer by the distance of positions.

use crate::layers::attention::relative::spec::RelativeSpec;

/// Biases of a layer.
#[derive(Clone, Copy)]
pub(crate) struct Biases<'a> {
    pub(crate) spec: RelativeSpec,
    /// `(n_bucket, n_head)`.
    pub(crate) values: &'a [f32],
}
