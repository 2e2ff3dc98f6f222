//! Losses of preferences, which compare the adapted model with a reference: the model without the
//! adapter.

use crate::learn::LearnError;
use crate::train::example::Judgement;
use crate::train::{Example, Loss, TrainOptions};
use ruvllm::Session;
use ruvllm::engine::AdapterId;
use ruvllm::lora::{Adapter, Gradients};

/// Examples with what the reference says of them.
pub(super) struct Examples {
    pub(super) all: Vec<Example>,
    /// For [`Loss::Kto`]: the prompt of each with the completion of the one before it in the whole
    /// list.
    mismatched: Vec<Example>,
    /// [`own`] of each and the negative log-likelihood of its mismatched text, by the reference;
    /// measured when needed.
    references: Vec<Option<(f64, f64)>>,
}

impl Examples {
    /// Those of `list` with the indices `picked`; texts have at most `n_ctx` tokens.
    pub(super) fn pick(list: &[Example], picked: &[usize], n_ctx: usize) -> Examples {
        let n = list.len();
        let labelled = picked.iter().filter(|&&i| list[i].loss() == Loss::Kto);
        Examples {
            all: picked.iter().map(|&i| list[i].clone()).collect(),
            mismatched: labelled
                .map(|&i| list[i].with_completion_of(&list[(i + n - 1) % n], n_ctx))
                .collect(),
            references: vec![None; picked.len()],
        }
    }
}

/// Computes the losses of preferences, and their gradients.
pub(super) struct Preferences {
    beta: f64,
    /// Of undesirable and desirable completions.
    weights: [f64; 2],
    /// Gradient of [`own`] for one example.
    part: Gradients,
    /// Of no term: for losses alone, with the arithmetic that they have where gradients are
    /// computed.
    none: Gradients,
}

impl Preferences {
    pub(super) fn new(options: &TrainOptions, adapter: &Adapter) -> Preferences {
        Preferences {
            beta: f64::from(options.beta),
            weights: [options.undesirable_weight, options.desirable_weight].map(f64::from),
            part: Gradients::zeros(adapter),
            none: Gradients::for_terms(adapter, |_| false),
        }
    }

    /// Measures what the reference says of the examples `picked`, where that is not known. The
    /// adapter has its full strength afterwards.
    pub(super) fn refer(
        &mut self,
        session: &mut Session,
        id: AdapterId,
        examples: &mut Examples,
        picked: &[usize],
    ) -> Result<(), LearnError> {
        let Examples {
            all,
            mismatched,
            references,
        } = examples;
        if picked.iter().all(|&i| references[i].is_some()) {
            return Ok(());
        }
        session.clear();
        session.adapters().set_scale(id, 0.0)?;
        let mut measure = |i: usize| {
            let text = own(session, id, &all[i], &mut self.none)?;
            let other: Vec<_> = mismatched
                .get(i)
                .map(|text| (text, 1.0))
                .into_iter()
                .collect();
            let other = Example::nll_gradients(session, id, &other, &mut self.none)?;
            Ok::<_, LearnError>((text, other.iter().sum()))
        };
        let outcome = picked.iter().try_for_each(|&i| {
            if references[i].is_none() {
                references[i] = Some(measure(i)?);
            }
            Ok(())
        });
        session.clear();
        session.adapters().set_scale(id, 1.0)?;
        outcome
    }

    /// The losses of the examples `picked`, of which [`Preferences::refer`] knows all; adds the
    /// gradient of their mean.
    pub(super) fn losses(
        &mut self,
        session: &mut Session,
        id: AdapterId,
        examples: &Examples,
        picked: &[usize],
        mut gradients: Option<&mut Gradients>,
    ) -> Result<Vec<f64>, LearnError> {
        let Examples {
            all,
            mismatched,
            references,
        } = examples;
        let reference = |i: usize| references[i].unwrap_or((f64::NAN, f64::NAN));
        let n = picked.len() as f64;
        let others: Vec<_> = picked
            .iter()
            .filter_map(|&i| Some((mismatched.get(i)?, 1.0)))
            .collect();
        let others = Example::nll_gradients(session, id, &others, &mut self.none)?;
        let shift = picked
            .iter()
            .zip(others)
            .map(|(&i, other)| (reference(i).1 - other) / n)
            .sum::<f64>()
            .max(0.0);
        let mut losses = Vec::with_capacity(picked.len());
        for &i in picked {
            let wanted = if gradients.is_some() {
                &mut self.part
            } else {
                &mut self.none
            };
            wanted.clear();
            let change = own(session, id, &all[i], wanted)? - reference(i).0;
            let (loss, slope) = self.loss(all[i].judgement(), change, shift);
            losses.push(loss);
            if let Some(gradients) = &mut gradients {
                gradients.add_scaled(&self.part, (slope / n) as f32);
            }
        }
        Ok(losses)
    }

    /// The loss of an example whose [`own`] differs by `change` from the reference's, and its
    /// derivative by that.
    fn loss(&self, judgement: &Judgement, change: f64, shift: f64) -> (f64, f64) {
        let Preferences { beta, weights, .. } = self;
        let (label, x) = match judgement {
            // `change` is `r(rejected) − r(chosen)`.
            Judgement::Imitated | Judgement::Chosen(_) => {
                let x = beta * change;
                return (x.max(0.0) + (-x.abs()).exp().ln_1p(), beta * sigmoid(x));
            }
            // `change` is `−r`.
            Judgement::Labelled(label) => (*label, beta * (change + shift)),
        };
        let (weight, sign) = (weights[usize::from(label)], if label { 1.0 } else { -1.0 });
        (
            weight * sigmoid(sign * x),
            sign * weight * beta * sigmoid(x) * sigmoid(-x),
        )
    }
}

/// The negative log-likelihood of an example's text, less that of the rejected one if it is a pair;
/// adds its gradient.
fn own(
    session: &mut Session,
    id: AdapterId,
    example: &Example,
    gradients: &mut Gradients,
) -> Result<f64, LearnError> {
    let mut texts = vec![(example, 1.0)];
    if let Judgement::Chosen(rejected) = example.judgement() {
        texts.push((rejected, -1.0));
    }
    Ok(Example::nll_gradients(session, id, &texts, gradients)?
        .iter()
        .sum())
}

/// `1/(1 + e⁻ˣ)`.
fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
