//! Models that denoise: what they say of themselves.

/// A model that denoises: all tokens of a text see each other, and at places that are still open is
/// the mask token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiffusionSpec {
    /// Whether the logits of the place before decide a place, as in the models of which these were
    /// made.
    pub shifted: bool,
}
