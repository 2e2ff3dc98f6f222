//! Memory of products outside of forward passes, and the sizes of a model's buffers.

use crate::compute::ComputeError;
use crate::compute::arena::Arena;
use crate::compute::linear::Scratch;
use crate::layers::sizes::Sizes;
use crate::model::Model;
use crate::threads::PoolHandle;

/// Sizes on which the buffers of a forward pass depend.
pub(crate) fn sizes(model: &Model, n_threads: usize) -> Sizes<'_> {
    Sizes {
        h: model.hparams(),
        arch: model.arch(),
        shapes: &model.weights().shapes,
        n_threads,
    }
}

/// Runs `f` with memory for products of `m` rows with any matrix of the model, outside of a pass;
/// rows count as generated.
pub(crate) fn with_scratch(
    model: &Model,
    threads: &PoolHandle<'_>,
    arena: &mut Arena,
    m: usize,
    f: impl FnOnce(&mut Scratch<'_>),
) -> Result<(), ComputeError> {
    let sizes = sizes(model, threads.n_threads()).products();
    f(&mut arena.plan(|frame| Scratch::take(frame, sizes, (m, 0), 0))?);
    Ok(())
}
