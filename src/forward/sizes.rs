//! Sizes on which the buffers of a forward pass depend.

use crate::arch::Arch;
use crate::compute::ComputeError;
use crate::compute::arena::Arena;
use crate::compute::linear::{ProductSizes, Scratch};
use crate::layers::hparams::Hparams;
use crate::layers::moe::single_rows;
use crate::model::Model;
use crate::quant::DType;
use crate::threads::Crew;

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
    pub(crate) fn of(model: &'a Model, n_threads: usize) -> Sizes<'a> {
        Sizes {
            h: model.hparams(),
            arch: model.arch(),
            shapes: &model.weights().shapes,
            n_threads,
        }
    }

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

/// Runs `f` with memory for products of `m` rows with any matrix of the model, outside of a pass;
/// rows count as generated.
pub(crate) fn with_scratch(
    model: &Model,
    crew: &Crew<'_>,
    arena: &mut Arena,
    m: usize,
    f: impl FnOnce(&mut Scratch<'_>),
) -> Result<(), ComputeError> {
    let sizes = Sizes::of(model, crew.n_threads()).products();
    f(&mut arena.plan(|frame| Scratch::take(frame, sizes, (m, 0), 0))?);
    Ok(())
}
