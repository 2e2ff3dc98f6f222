//! Effect of adapters on text that they did not learn from.

use crate::bench::base_softmax;
use crate::bench::estimate::{Estimate, bootstrap};
use crate::learn::HeadLearner;
use crate::learn::LearnError;
use crate::learn::windows::{window, windows};
use ruvllm::Session;

/// Effect of an adapter on the half of the control text that was not used for calibration.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Forgetting {
    /// Rise of the loss over the base model, in nats per token.
    pub loss: Estimate,
    /// Mean `KL(base ‖ adapted)` in nats.
    pub divergence: f64,
    /// Fraction of tokens whose most likely successor stays the same.
    pub agreement: f64,
}

/// Loss of the base model on a text, and the effect of adapters on it.
pub(super) fn forgetting(
    session: &mut Session,
    text: &[u32],
    heads: &[&HeadLearner],
    n_bootstrap: usize,
) -> Result<(f64, Vec<Forgetting>), LearnError> {
    let arch = session.model().arch();
    let transform = session.model().hparams().logit_transform();
    let n_chunk = session.sequence().n_ctx() / 2;
    let n_chunks = text.len().div_ceil(n_chunk);
    let mut sizes = vec![0.0; n_chunks];
    let mut more = vec![vec![0.0; n_chunks]; heads.len()];
    let mut found = vec![Forgetting::default(); heads.len()];
    let (mut p, mut q, mut logits) = (Vec::new(), Vec::new(), Vec::new());
    let (mut total, mut n) = (0.0, 0usize);
    windows(session, text, |i, h, raw| {
        let lse = base_softmax(arch, transform, raw, &mut p, &mut logits);
        let loss = lse - f64::from(logits[text[i] as usize]);
        let best = largest(&p);
        total += loss;
        n += 1;
        sizes[i / n_chunk] += 1.0;
        for ((head, more), found) in heads.iter().zip(&mut more).zip(&mut found) {
            more[i / n_chunk] += head.exact_loss(arch, h, raw, text[i], &mut q, &mut logits) - loss;
            let divergence = p.iter().zip(&q).filter(|(p, _)| **p > 0.0);
            found.divergence += divergence
                .map(|(&p, &q)| f64::from(p) * f64::from(p / q.max(1e-38)).ln())
                .sum::<f64>();
            found.agreement += f64::from(u8::from(largest(&q) == best));
        }
    })?;
    for (found, more) in found.iter_mut().zip(more) {
        found.loss = bootstrap(more.into_iter(), &sizes, n_bootstrap);
        found.divergence /= n as f64;
        found.agreement /= n as f64;
    }
    Ok((total / n as f64, found))
}

/// Effect of the adapters of session `adapted` on a text that session `base` reads.
pub(super) fn forgetting_of(
    base: &mut Session,
    adapted: &mut Session,
    text: &[u32],
    n_bootstrap: usize,
) -> Result<Forgetting, LearnError> {
    let arch = base.model().arch();
    let transform = base.model().hparams().logit_transform();
    let n_chunk = base.sequence().n_ctx() / 2;
    let (mut sizes, mut more, mut found) = (Vec::new(), Vec::new(), Forgetting::default());
    let (mut q, mut logits) = (Vec::new(), Vec::new());
    for start in (0..text.len()).step_by(n_chunk) {
        let chunk = start..(start + n_chunk).min(text.len());
        let mut rows: Vec<(Vec<f32>, f64)> = Vec::new();
        window(base, text, chunk.clone(), n_chunk, &mut |i, _, raw| {
            let mut p = Vec::new();
            let lse = base_softmax(arch, transform, raw, &mut p, &mut logits);
            rows.push((p, lse - f64::from(logits[text[i] as usize])));
        })?;
        let (mut sum, mut rows_left) = (0.0, rows.iter());
        window(adapted, text, chunk, n_chunk, &mut |i, _, raw| {
            let Some((p, loss)) = rows_left.next() else {
                return;
            };
            let lse = base_softmax(arch, transform, raw, &mut q, &mut logits);
            sum += lse - f64::from(logits[text[i] as usize]) - loss;
            let divergence = p.iter().zip(&q).filter(|(p, _)| **p > 0.0);
            found.divergence += divergence
                .map(|(&p, &q)| f64::from(p) * f64::from(p / q.max(1e-38)).ln())
                .sum::<f64>();
            found.agreement += f64::from(u8::from(largest(&q) == largest(p)));
        })?;
        sizes.push(rows.len() as f64);
        more.push(sum);
    }
    let n = sizes.iter().sum::<f64>();
    let loss = bootstrap(more.into_iter(), &sizes, n_bootstrap);
    Ok(Forgetting {
        loss,
        divergence: found.divergence / n,
        agreement: found.agreement / n,
    })
}

fn largest(p: &[f32]) -> usize {
    (0..p.len())
        .max_by(|&i, &j| p[i].total_cmp(&p[j]))
        .unwrap_or(0)
}
