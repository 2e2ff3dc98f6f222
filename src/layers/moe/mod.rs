//! Mixtures of experts: a router chooses feed-forward layers for each token.

pub(crate) mod spec;
pub(crate) mod weights;

use crate::compute::linear::MAX_EXPERTS;
use crate::layers::hparams::Hparams;

/// Most experts of a token whose products are computed together.
pub(crate) fn single_rows(h: &Hparams) -> usize {
    h.mixtures()
        .map(|x| x.n_used.min(MAX_EXPERTS))
        .max()
        .unwrap_or(0)
}
