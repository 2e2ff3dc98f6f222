//! Latent attention of one layer.

/// Multi-head latent attention (arXiv 2405.04434): keys and values of a token are computed from one
/// short vector, its latent, except for the rotated part of keys, which all heads share. That part
/// comes last in queries and keys.
///
/// In the absorbed form, queries and outputs are multiplied by those matrices instead: there is one
/// key/value head, whose key is the latent and the rotated part, and whose value is the latent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LatentSpec {
    /// Width of the low-rank vector from which queries are computed; `None`: they are computed
    /// from the layer's input.
    pub q_rank: Option<usize>,
    /// Width of the latent.
    pub kv_rank: usize,
    /// Width of a head's part without rotation.
    pub n_plain: usize,
    /// Width of a head's rotated part.
    pub n_rot: usize,
    /// Width of a head's values.
    pub head_dim_v: usize,
    /// Whether the file has the matrices of the absorbed form.
    pub absorbed: bool,
    /// Whether the rotated part of keys has a norm, before its rotation.
    pub rot_norm: bool,
}

impl LatentSpec {
    /// Width of a query head as computed by its matrix.
    pub(crate) fn head_dim(&self) -> usize {
        self.n_plain + self.n_rot
    }
}
