//! What truncation leaves out of the head adapter's gradient.

use crate::learn::teacher::Teacher;
use crate::learn::{HeadLearner, LearnError, Ranks, Slices, TrainingSignal, UPDATE_TOKENS};
use ruvllm::arch::Arch;

/// Sums of a chunk's exact gradient with respect to `s·B`, as factors of the head's rows, for
/// comparison with the truncated one.
pub(super) struct Exact {
    rows: Vec<(u32, Ranks)>,
}

impl Exact {
    pub(super) fn new(n_vocab: usize) -> Exact {
        Exact {
            rows: (0..n_vocab as u32).map(|v| (v, Ranks::default())).collect(),
        }
    }

    /// Adds a token that `h` and the head's product `raw` predicted; `p` and `logits` are buffers.
    pub(super) fn add(
        &mut self,
        arch: Arch,
        adapter: &HeadLearner,
        (h, raw, token): (&[f32], &[f32], u32),
        p: &mut Vec<f32>,
        logits: &mut Vec<f32>,
    ) {
        adapter.exact_loss(arch, h, raw, token, p, logits);
        let z = &adapter.head.project(arch, h);
        for (v, (row, &p)) in self.rows.iter_mut().zip(&**p).enumerate() {
            let came = if v == token as usize { 1.0 } else { 0.0 };
            let error = (p - came) * adapter.transform.slope(logits[v]) / UPDATE_TOKENS as f32;
            row.1.iter_mut().zip(z).for_each(|(u, z)| *u += error * z);
        }
    }
}

/// Running mean.
#[derive(Default)]
pub(super) struct Mean {
    sum: f64,
    n: f64,
}

impl Mean {
    pub(super) fn add(&mut self, x: f64) {
        (self.sum, self.n) = (self.sum + x, self.n + 1.0);
    }

    /// The mean; NaN without numbers.
    pub(super) fn value(&self) -> f64 {
        self.sum / self.n
    }
}

/// Fractions of gradients that truncation leaves out.
#[derive(Default)]
pub(super) struct Truncation {
    /// Upper bounds, which are known without the exact gradient.
    pub(super) bound: Mean,
    pub(super) left_out: Mean,
}

impl Truncation {
    /// Makes the updates of `adapter` that are due, and compares their gradient with the `exact`
    /// one, if there is one.
    pub(super) fn learn(
        &mut self,
        arch: Arch,
        teacher: &Teacher<'_>,
        adapter: &mut HeadLearner,
        exact: Option<Exact>,
    ) -> Result<(), LearnError> {
        let moved = adapter.is_due() || adapter.is_undecided();
        teacher.prepare(adapter, TrainingSignal::Text, &mut Slices::whole())?;
        let mut truncated: Vec<f32> = Vec::new();
        while let Some(g) = teacher.head_gradient(adapter, TrainingSignal::Text)? {
            adapter.step(TrainingSignal::Text, &g);
            self.bound.add(adapter.truncation);
            truncated.resize(g.len(), 0.0);
            arch.add(&mut truncated, &g);
        }
        teacher.settle(adapter, TrainingSignal::Text, &mut Slices::whole())?;
        if let Some(exact) = exact.filter(|_| !moved) {
            let (rank, none) = (adapter.head.rank, Default::default());
            let exact = teacher.combine(&exact.rows, &none, rank, &mut Slices::whole())?;
            let norm =
                |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x * x)).sum::<f64>().sqrt();
            let error = norm(&mut exact.iter().zip(&truncated).map(|(x, y)| x - y));
            let length = norm(&mut exact.iter().copied());
            self.left_out.add(error / length.max(f64::MIN_POSITIVE));
        }
        Ok(())
    }
}
