//! Weights of adapters in the model's file.

use crate::compute::weight::Weight;

/// What the adapters add to a matrix's products: `B·A·x`, with stacks of `A: (rank, n_in)` and
/// `B: (n_out, rank)`, of which the first is unused.
#[derive(Clone, Debug)]
pub(crate) struct SwitchTerm {
    pub(crate) a: Weight,
    pub(crate) b: Weight,
}

/// The terms of a layer.
#[derive(Clone, Debug)]
pub(crate) struct SwitchLayer {
    pub(crate) q: SwitchTerm,
    pub(crate) k: SwitchTerm,
    pub(crate) v: SwitchTerm,
    pub(crate) output: SwitchTerm,
    pub(crate) gate: SwitchTerm,
    pub(crate) up: SwitchTerm,
    pub(crate) down: SwitchTerm,
}
