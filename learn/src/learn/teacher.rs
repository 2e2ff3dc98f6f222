//! Steps of a head adapter: products with the rows of the model's output head, in slices.

use crate::learn::moments::SLOTS;
use crate::learn::optimiser::ErrorFactors;
use crate::learn::slices::Slices;
use crate::learn::{HeadLearner, HeadRows, Ranks, TrainingSignal};
use ruvllm::Engine;
use ruvllm::SessionError;

/// Number of partial sums into which products with rows of the head are split: fixed, so that
/// results do not depend on the number of threads.
const PARTS: usize = 8;
/// Values of the head's rows that are added up before another pass gets its turn: half a
/// millisecond.
const SLICE_VALUES: usize = 1 << 20;
/// Values of the head that are multiplied by an adapter before another pass gets its turn: also
/// about half a millisecond.
const PRODUCT_VALUES: usize = 4 << 20;

/// The engine that computes steps, and what is known of its model's head.
#[derive(Clone, Copy)]
pub(crate) struct Teacher<'a> {
    engine: &'a Engine,
    rows: &'a HeadRows,
}

impl<'a> Teacher<'a> {
    pub(crate) fn new(engine: &'a Engine, rows: &'a HeadRows) -> Teacher<'a> {
        Teacher { engine, rows }
    }

    fn n_embd(self) -> usize {
        self.engine.model().hparams().n_embd
    }

    /// Chooses directions if that is due, and makes them effective; `None` if `slices` gave up.
    pub(crate) fn prepare(
        self,
        adapter: &mut HeadLearner,
        lesson: TrainingSignal,
        slices: &mut Slices<'_>,
    ) -> Result<Option<()>, SessionError> {
        if adapter.is_due() {
            self.choose(adapter, lesson, slices)
        } else {
            Ok(Some(()))
        }
    }

    pub(crate) fn choose(
        self,
        adapter: &mut HeadLearner,
        lesson: TrainingSignal,
        slices: &mut Slices<'_>,
    ) -> Result<Option<()>, SessionError> {
        let arch = self.engine.model().arch();
        let errors = adapter.errors(arch, lesson, slices);
        let chosen = errors
            .map(|errors| self.error_vectors(&errors, slices))
            .transpose()?
            .flatten();
        if chosen
            .and_then(|g| adapter.choose(arch, &g, lesson, slices))
            .is_none()
        {
            return Ok(None);
        }
        self.measure_confidence(adapter, slices)?;
        adapter.steady();
        self.settle(adapter, lesson, slices)?;
        Ok(Some(()))
    }

    /// Computes the gradient of the model's confidence for the current `A`.
    pub(crate) fn measure_confidence(
        self,
        adapter: &mut HeadLearner,
        slices: &mut Slices<'_>,
    ) -> Result<(), SessionError> {
        let surer = adapter.surer(self.engine.model().arch(), slices);
        adapter.confidence = self.combine(&surer.rows, &surer.rest, adapter.head.rank, slices)?;
        Ok(())
    }

    /// Takes one update step of the direction; returns whether there was anything to learn from.
    /// [`Teacher::settle`] makes it effective.
    pub(crate) fn teach(
        self,
        adapter: &mut HeadLearner,
        lesson: TrainingSignal,
    ) -> Result<bool, SessionError> {
        let Some(g) = self.head_gradient(adapter, lesson)? else {
            return Ok(false);
        };
        adapter.step(lesson, &g);
        Ok(true)
    }

    /// Gradient `(rank, n_embd)` that [`Teacher::teach`] follows; `None` if there is nothing to
    /// learn from.
    pub(crate) fn head_gradient(
        self,
        adapter: &mut HeadLearner,
        lesson: TrainingSignal,
    ) -> Result<Option<Vec<f32>>, SessionError> {
        let Some(gradient) = adapter.gradient(self.engine.model().arch(), self.rows, lesson) else {
            return Ok(None);
        };
        let slices = &mut Slices::whole();
        self.combine(&gradient.rows, &gradient.rest, adapter.head.rank, slices)
            .map(Some)
    }

    /// Makes updates effective: computes `W·B`, then the step length within the bound.
    pub(crate) fn settle(
        self,
        adapter: &mut HeadLearner,
        lesson: TrainingSignal,
        slices: &mut Slices<'_>,
    ) -> Result<(), SessionError> {
        self.refresh(adapter, slices)?;
        adapter.settle(self.engine.model().arch(), lesson, slices);
        Ok(())
    }

    /// Recomputes the adapter's `W·B` and its statistics.
    pub(crate) fn refresh(
        self,
        adapter: &mut HeadLearner,
        slices: &mut Slices<'_>,
    ) -> Result<(), SessionError> {
        let (n, head) = (self.n_embd(), &mut adapter.head);
        let n_vocab = head.n_vocab();
        // So many rows of the head at a time: other passes need not wait for all.
        let each = (PRODUCT_VALUES / n).clamp(1, n_vocab);
        let mut part = vec![0.0; head.rank * each];
        for first in (0..n_vocab).step_by(each) {
            let tokens = first..(first + each).min(n_vocab);
            let part = &mut part[..head.rank * tokens.len()];
            self.engine
                .output_head()
                .product(tokens.clone(), &head.b, part)?;
            for (wb, part) in head
                .wb
                .chunks_exact_mut(n_vocab)
                .zip(part.chunks_exact(tokens.len()))
            {
                wb[tokens.clone()].copy_from_slice(part);
            }
            slices.tick();
        }
        head.measure();
        Ok(())
    }

    /// `Σ_v W_v·parts[v]ᵀ + mean·restᵀ`, `(rank, n_embd)`.
    pub(crate) fn combine(
        self,
        parts: &[(u32, Ranks)],
        rest: &Ranks,
        rank: usize,
        slices: &mut Slices<'_>,
    ) -> Result<Vec<f32>, SessionError> {
        let (arch, n) = (self.engine.model().arch(), self.n_embd());
        let head = self.engine.output_head();
        let share = parts.len().div_ceil(PARTS).max(1);
        let mut sums = vec![0.0; PARTS * rank * n];
        // So many rows of each part at a time: other passes need not wait for all.
        let slice = (SLICE_VALUES / (PARTS * n)).max(1);
        for first in (0..share).step_by(slice) {
            self.engine.for_chunks(&mut sums, rank * n, |i, sum| {
                let mut values = vec![0.0; n];
                let end = ((i + 1) * share).min(parts.len());
                for (j, (token, u)) in parts[..end]
                    .iter()
                    .enumerate()
                    .skip(i * share + first)
                    .take(slice)
                {
                    if let Some((next, _)) = parts.get(j + 1) {
                        head.prefetch(*next);
                    }
                    head.row(*token, &mut values);
                    sum.chunks_exact_mut(n)
                        .zip(u)
                        .for_each(|(sum, &u)| arch.add_scaled(sum, &values, u));
                }
            })?;
            slices.tick();
        }
        let (total, others) = sums.split_at_mut(rank * n);
        others
            .chunks_exact(rank * n)
            .for_each(|sum| arch.add(total, sum));
        total
            .chunks_exact_mut(n)
            .zip(rest)
            .for_each(|(sum, &u)| arch.add_scaled(sum, &self.rows.mean, u));
        sums.truncate(rank * n);
        Ok(sums)
    }

    /// `∂loss/∂h` at moments, `(moments, n_embd)`; `None` if `slices` gave up.
    pub(crate) fn error_vectors(
        self,
        errors: &[ErrorFactors],
        slices: &mut Slices<'_>,
    ) -> Result<Option<Vec<f32>>, SessionError> {
        let (arch, n) = (self.engine.model().arch(), self.n_embd());
        let head = self.engine.output_head();
        let mut g = vec![0.0; errors.len() * n];
        let each = (SLICE_VALUES / (SLOTS * n)).max(1);
        for (g, errors) in g.chunks_mut(each * n).zip(errors.chunks(each)) {
            self.engine.for_chunks(g, n, |i, g| {
                let (parts, rest) = &errors[i];
                let mut values = vec![0.0; n];
                for &(token, error) in parts {
                    head.row(token, &mut values);
                    arch.add_scaled(g, &values, error);
                }
                arch.add_scaled(g, &self.rows.mean, *rest);
            })?;
            if slices.tick().is_none() {
                return Ok(None);
            }
        }
        Ok(Some(g))
    }
}

/// Mean and spread of the head's rows.
pub(crate) fn head_rows(engine: &Engine) -> Result<HeadRows, SessionError> {
    let (model, head) = (engine.model(), engine.output_head());
    let (arch, n, n_vocab) = (
        model.arch(),
        model.hparams().n_embd,
        model.hparams().n_vocab,
    );
    let share = n_vocab.div_ceil(PARTS);
    let each = |part: usize, visit: &mut dyn FnMut(&[f32])| {
        let mut values = vec![0.0; n];
        for v in part * share..((part + 1) * share).min(n_vocab) {
            head.row(v as u32, &mut values);
            visit(&values);
        }
    };
    let mut sums = vec![0.0; PARTS * n];
    engine.for_chunks(&mut sums, n, |i, sum| {
        each(i, &mut |w| arch.add(sum, w));
    })?;
    let (mean, others) = sums.split_at_mut(n);
    others.chunks_exact(n).for_each(|sum| arch.add(mean, sum));
    mean.iter_mut().for_each(|x| *x /= n_vocab as f32);
    let mean = mean.to_vec();
    let mut largest = vec![0.0f32; PARTS];
    engine.for_chunks(&mut largest, 1, |i, largest| {
        each(i, &mut |w| {
            let distance: f32 = w.iter().zip(&mean).map(|(w, m)| (w - m) * (w - m)).sum();
            largest[0] = largest[0].max(distance);
        });
    })?;
    Ok(HeadRows {
        mean,
        spread: largest.into_iter().fold(0.0, f32::max).sqrt(),
    })
}
