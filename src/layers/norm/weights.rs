//! Weights of norms.

/// Weights of a norm; `b` is empty for RMS norms.
#[derive(Clone, Debug)]
pub(crate) struct Norm {
    pub(crate) w: Vec<f32>,
    pub(crate) b: Vec<f32>,
}

impl Norm {
    /// Weights of 1 and biases of 0.
    pub(crate) fn plain(n: usize) -> Norm {
        Norm {
            w: vec![1.0; n],
            b: vec![0.0; n],
        }
    }
}
