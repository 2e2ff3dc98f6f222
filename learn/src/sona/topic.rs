//! Choice of the topic whose adapter a prompt is read with.

use crate::learn::Learner;
use crate::learn::windows::bos_of;
use crate::sona::SonaError;
use ruvllm::compute::TokenKind;
use ruvllm::engine::{Outputs, Slot};
use ruvllm::session::log_sum;
use ruvllm::{CancelToken, Engine, SessionOptions};

/// A sample of one in so many tokens of a prompt chooses its topic, and how many tokens it has at
/// least and at most.
const SAMPLED: usize = 128;
const LEAST_SAMPLE: usize = 8;
const LONGEST_SAMPLE: usize = 64;

/// The topic of a learner whose adapter helps a prompt; see `Sona::topic`.
pub(super) fn choose(
    engine: &Engine,
    learner: &Learner,
    prompt: &[u32],
) -> Result<Option<u32>, SonaError> {
    let Some(topic) = learner.nearest_topic(prompt) else {
        return Ok(None);
    };
    let Some(adapter) = learner.layers.topics.trained(topic).adapter else {
        return Ok(None);
    };
    let sample = &prompt[prompt.len() - (prompt.len() / SAMPLED).min(LONGEST_SAMPLE)..];
    if sample.len() < LEAST_SAMPLE {
        return Ok(Some(topic));
    }
    let options = SessionOptions {
        n_ctx: Some(sample.len() + 1),
        ..Default::default()
    };
    let [mut with, mut without] = [engine.sequence(&options)?, engine.sequence(&options)?];
    with.attach(adapter, 1.0)?;
    // What it is read with begins as the prompt does, if that is the model's token for it.
    let bos = bos_of(engine.model(), prompt);
    let known: Vec<u32> = bos.into_iter().chain(sample.iter().copied()).collect();
    let n_before = known.len() - sample.len();
    let (known, predicted) = (&known[..known.len() - 1], &sample[1..]);
    let mut outputs = Outputs::default();
    let mut slots = [&mut with, &mut without]
        .map(|seq| Slot::new(seq, known, TokenKind::Prompt).outputs_from(n_before));
    engine.step(&mut slots, &mut outputs, &CancelToken::default())?;
    let n_vocab = engine.model().hparams().n_vocab;
    let gains = predicted.iter().enumerate().map(|(i, &token)| {
        let [with, without] = [0, 1].map(|slot| {
            let logits = &outputs.logits(slot)[i * n_vocab..][..n_vocab];
            f64::from(logits[token as usize] - log_sum(logits))
        });
        with - without
    });
    let (sum, squares) = gains.fold((0.0, 0.0), |(sum, squares), gain| {
        (sum + gain, squares + gain * gain)
    });
    Ok((sum >= -2.0 * squares.sqrt()).then_some(topic))
}
