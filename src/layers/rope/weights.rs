//! Divisors of rope frequencies that a file has.

/// Divisors of the frequencies, `(n_dims/2)` each.
#[derive(Clone, Debug, Default)]
pub(crate) struct RopeFactors {
    /// For every context length (`rope_freqs.weight`).
    pub(crate) all: Option<Vec<f32>>,
    /// For contexts up to the original length, and for longer ones.
    pub(crate) short_long: Option<(Vec<f32>, Vec<f32>)>,
}
