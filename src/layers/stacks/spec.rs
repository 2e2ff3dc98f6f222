//! Two stacks of blocks that run in turn.

/// Two stacks of blocks that run in turn (HRM, arXiv 2506.21734), each with a state: a cycle is some
/// runs of the first, then one of the second. A run reads the sum of both states, and its output,
/// normed, is the stack's new state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StacksSpec {
    /// Layers of a stack.
    pub n_layer: usize,
    /// Cycles.
    pub n_cycle: usize,
    /// Runs of the first stack in a cycle.
    pub n_first: usize,
}

impl StacksSpec {
    /// Layers of all runs.
    pub(crate) fn n_all(self) -> Option<usize> {
        let per_cycle = self.n_first.checked_add(1)?.checked_mul(self.n_layer)?;
        per_cycle.checked_mul(self.n_cycle)
    }

    /// Whether layer `i` of all runs is one of the second stack.
    pub(crate) fn is_second(self, i: usize) -> bool {
        i / self.n_layer % (self.n_first + 1) == self.n_first
    }

    /// Index of its weights among those of both stacks.
    pub(crate) fn own(self, i: usize) -> usize {
        i % self.n_layer + if self.is_second(i) { self.n_layer } else { 0 }
    }

    /// Times that a layer of both stacks runs.
    pub(crate) fn n_runs(self, own: usize) -> usize {
        self.n_cycle * if own < self.n_layer { self.n_first } else { 1 }
    }

    /// Whether a run begins with layer `i`.
    pub(crate) fn begins(self, i: usize) -> bool {
        i.is_multiple_of(self.n_layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_take_turns() {
        let spec = StacksSpec {
            n_layer: 2,
            n_cycle: 2,
            n_first: 3,
        };
        let own: Vec<usize> = (0..16).map(|i| spec.own(i)).collect();
        assert_eq!(own, [0, 1, 0, 1, 0, 1, 2, 3, 0, 1, 0, 1, 0, 1, 2, 3]);
        assert_eq!(spec.n_all(), Some(16));
        for layer in 0..4 {
            let n = own.iter().filter(|&&own| own == layer).count();
            assert_eq!(spec.n_runs(layer), n);
        }
    }
}
