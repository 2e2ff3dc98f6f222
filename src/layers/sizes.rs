//! Sizes on which the buffers of components depend.

use crate::arch::Arch;
use crate::compute::linear::{MAX_EXPERTS, ProductSizes};
use crate::layers::hparams::Hparams;
use crate::quant::DType;

/// Sizes of a model and of the machine on which the buffers of a forward pass depend.
#[derive(Clone, Copy)]
pub(crate) struct Sizes<'a> {
    pub(crate) h: &'a Hparams,
    pub(crate) arch: Arch,
    /// Every combination of format and row length among the matrices.
    pub(crate) shapes: &'a [(DType, usize)],
    pub(crate) n_threads: usize,
}

impl<'a> Sizes<'a> {
    /// Those of its products.
    pub(crate) fn products(self) -> ProductSizes<'a> {
        ProductSizes {
            arch: self.arch,
            shapes: self.shapes,
            n_threads: self.n_threads,
            n_single: single_rows(self.h),
        }
    }
}

/// Most experts of a token whose products are computed together.
pub(crate) fn single_rows(h: &Hparams) -> usize {
    h.mixtures()
        .map(|x| x.n_used.min(MAX_EXPERTS))
        .max()
        .unwrap_or(0)
}
