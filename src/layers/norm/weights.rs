//! Weights of norms.

/// Weights of a norm; `b` is empty for RMS norms.
#[derive(Clone, Debug)]
pub(crate) struct Norm {
    pub(crate) w: Vec<f32>,
    pub(crate) b: Vec<f32>,
}
