//! Passes of drafters that compute with a model, those of all texts together.

use crate::clock::Timer;
use crate::compute::arena::reuse;
use crate::decode::speculative::{Speculator, best_length};
use crate::engine::batch::Slot;
use crate::engine::engine::Engine;
use crate::engine::options::CancelToken;
use crate::engine::sequence::Sequence;
use crate::layers::outputs::Outputs;

/// Most rows of a pass, unless one text alone has more.
const MAX_ROWS: usize = 512;

/// A text for which drafts are wanted.
#[derive(Debug)]
pub(crate) struct Asked<'a> {
    speculator: &'a mut Speculator,
    /// Its tokens, those that are computed next included.
    text: &'a [u32],
    states: &'a [f32],
    seq: &'a Sequence,
    /// Most guesses, and where those go that a pass is to compute.
    n: usize,
    drafts: &'a mut Vec<u32>,
}

impl<'a> Asked<'a> {
    /// At most `n` guesses that follow `text`, the tokens of `seq` and those that it computes next;
    /// it begins with what the drafters were given before. They are appended to `drafts`.
    pub(crate) fn new(
        speculator: &'a mut Speculator,
        seq: &'a Sequence,
        (text, drafts): (&'a [u32], &'a mut Vec<u32>),
        n: usize,
    ) -> Asked<'a> {
        Asked {
            speculator,
            text,
            seq,
            states: seq.states_before(text.len().saturating_sub(1)),
            n,
            drafts,
        }
    }

    fn next_pass(&mut self, drafter: usize) -> Option<Slot<'_>> {
        self.speculator.drafters[drafter].next_pass(self.states)
    }
}

/// Memory for passes of drafters.
#[derive(Debug, Default)]
pub(crate) struct DraftPasses {
    outputs: Outputs,
    slots: Vec<Slot<'static>>,
    /// Whose each slot is, as indices of text and drafter, and its number of rows.
    of: Vec<(usize, usize, usize)>,
    cancel: CancelToken,
    /// How probable each guess is, and its text; drafts for each text.
    chances: Vec<(f64, usize)>,
    lengths: Vec<usize>,
}

impl DraftPasses {
    /// Drafts for each text, so many in all that most tokens per second are expected; passes of
    /// `engine` over their rows have `n_rows` without drafts.
    pub(crate) fn draft(&mut self, engine: &Engine, mut n_rows: usize, asked: &mut [Asked<'_>]) {
        self.guess(engine, n_rows, asked);
        let DraftPasses {
            chances, lengths, ..
        } = self;
        chances.clear();
        lengths.clear();
        lengths.resize(asked.len(), 0);
        for (i, one) in asked.iter().enumerate() {
            let probabilities = one.speculator.probabilities();
            if one.speculator.length.is_some() {
                lengths[i] = probabilities.len();
                n_rows += lengths[i];
            } else {
                chances.extend(probabilities.iter().map(|&p| (p, i)));
            }
        }
        // Those of a sequence descend: how many are among the first, not which, is what counts.
        chances.sort_unstable_by(|(a, _), (b, _)| b.total_cmp(a));
        let p = chances.iter().map(|(p, _)| *p);
        let n = best_length(&engine.times(), n_rows, (1, 0.0), p);
        chances[..n].iter().for_each(|&(_, i)| lengths[i] += 1);
        for (one, &n) in asked.iter_mut().zip(&*lengths).filter(|(_, n)| **n > 0) {
            one.drafts.extend(one.speculator.take(n));
        }
    }

    /// Guesses how each text goes on.
    fn guess(&mut self, engine: &Engine, n_rows: usize, asked: &mut [Asked<'_>]) {
        let (times, n_vocab, n_texts) = (
            engine.times().clone(),
            engine.model().hparams().n_vocab,
            asked.len(),
        );
        asked.iter_mut().for_each(|one| {
            one.speculator
                .ask(one.text, one.n, &times, (n_rows, n_texts))
        });
        for i in 0..asked.len() {
            for j in 0..asked[i].speculator.drafters.len() {
                let Some(engine) = asked[i].speculator.drafters[j].drafter.engine().cloned() else {
                    continue;
                };
                while asked[i].next_pass(j).is_some() {
                    self.pass(&engine, asked);
                }
            }
        }
        asked
            .iter_mut()
            .for_each(|one| one.speculator.choose(n_vocab, (one.seq, one.text.len())));
    }

    /// Computes the next pass of all drafters on `engine`.
    fn pass(&mut self, engine: &Engine, asked: &mut [Asked<'_>]) {
        let DraftPasses {
            outputs,
            slots,
            of,
            cancel,
            ..
        } = self;
        let mut pass = reuse(std::mem::take(slots));
        of.clear();
        let mut n_rows = 0;
        for (
            i,
            Asked {
                speculator, states, ..
            },
        ) in asked.iter_mut().enumerate()
        {
            for (j, tracked) in speculator.drafters.iter_mut().enumerate() {
                if !tracked.drafter.engine().is_some_and(|own| own.same(engine)) {
                    continue;
                }
                let Some(slot) = tracked.next_pass(states) else {
                    continue;
                };
                let n = slot.rows.tokens.len();
                if n_rows > 0 && n_rows + n > MAX_ROWS {
                    continue;
                }
                n_rows += n;
                of.push((i, j, n));
                pass.push(slot);
            }
        }
        let timer = Timer::start();
        let outcome = engine.step(&mut pass, outputs, cancel);
        *slots = reuse(pass);
        let time = timer.elapsed();
        for (slot, &(i, j, n)) in of.iter().enumerate() {
            let computed = match &outcome {
                Ok(()) => Some(slot),
                // Whose rows cannot be computed fails alone.
                Err(_) if of.len() > 1 => asked[i].next_pass(j).and_then(|slot| {
                    engine
                        .step(&mut [slot], outputs, cancel)
                        .is_ok()
                        .then_some(0)
                }),
                Err(_) => None,
            };
            let tracked = &mut asked[i].speculator.drafters[j];
            tracked.in_passes += time.mul_f64(n as f64 / n_rows as f64);
            tracked
                .drafter
                .end_pass(computed.map(|slot| (outputs.logits(slot), outputs.states(slot))));
        }
    }
}
