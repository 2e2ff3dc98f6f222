//! Weights of causal convolutions.

/// Weights of a convolution.
#[derive(Clone, Debug)]
pub(crate) struct Conv {
    /// `(n_tap, n_channel)`, the last of this token.
    pub(crate) taps: Vec<f32>,
    /// Of each channel; empty if there is none.
    pub(crate) bias: Vec<f32>,
}

impl Conv {
    /// `taps` are `(n_channel, n_tap)`, as in files.
    pub(crate) fn new(taps: &[f32], n_tap: usize, bias: Vec<f32>) -> Conv {
        Conv {
            taps: by_column(taps, n_tap),
            bias,
        }
    }
}

/// A table with rows of `n` values, column by column.
pub(crate) fn by_column(table: &[f32], n: usize) -> Vec<f32> {
    (0..n)
        .flat_map(|column| table.iter().skip(column).step_by(n).copied())
        .collect()
}
