//! Drafts by a model's own block for multi-token prediction.

use crate::compute::hook::TokenKind;
use crate::decode::speculative::model::best;
use crate::decode::speculative::{Draft, Drafter};
use crate::engine::SessionError;
use crate::engine::batch::Slot;
use crate::engine::engine::Engine;
use crate::engine::memory_plan::{block_options, plan_options};
use crate::engine::options::SessionOptions;
use crate::engine::sequence::Sequence;
use crate::layers::draft::{FEW, MAX_DRAFT};

/// Drafts what the block for multi-token prediction of the model itself thinks most probable
/// (`--spec mtp`): GLM 4.5, DeepSeek 3, Qwen 3 Next and 3.5 have one, if their files do.
///
/// The block is a layer with keys and values of its own. It reads a token and the model's hidden
/// state of the token before ([`SessionOptions::keep_states`]), and guesses the next one; for
/// further guesses its own state takes the place of the model's. Of a prompt it reads the end, up
/// to 512 tokens, and what comes behind. Where states are missing, behind tokens from the prefix
/// cache or forced ones, it drafts nothing, or begins anew. It knows no adapters.
#[derive(Debug)]
pub struct MtpDrafter {
    engine: Engine,
    options: SessionOptions,
    text: Vec<u32>,
    /// The block's keys and values for tokens of the text from `begin` on, each with the state of
    /// the token before.
    seq: Option<Sequence>,
    begin: usize,
    /// How many tokens the sequence held when it had read the text, and what it guesses behind it.
    n_read: usize,
    guesses: Vec<Draft>,
    /// The last of them, which the next pass computes, and the block's own state of the token
    /// before it.
    last: [u32; 1],
    state: Vec<f32>,
    has_failed: bool,
}

impl MtpDrafter {
    /// Drafts for sessions of `engine` with these options. The block's keys and values do not count
    /// for the engine's budget, but for the model's memory limit, which has to leave room for
    /// them ([`EngineOptions::kv_budget`](crate::engine::EngineOptions)).
    ///
    /// # Errors
    /// [`SessionError::NoMtp`] if the model has no such block, or none that can be used; or if
    /// there is no room.
    pub fn new(engine: &Engine, options: &SessionOptions) -> Result<MtpDrafter, SessionError> {
        let model = engine.model();
        let block = match model.mtp() {
            Ok(Some(block)) => block,
            Ok(None) => return Err(SessionError::NoMtp { why: None }),
            Err(error) => {
                return Err(SessionError::NoMtp {
                    why: Some(error.to_string()),
                });
            }
        };
        let of_block = block_options(block, options);
        let mut kv_budget = u64::MAX;
        if let Some(limit) = model.memory_limit() {
            let session = SessionOptions {
                keep_states: true,
                ..options.clone()
            };
            let plan = model.memory_plan(&plan_options(session, engine.n_threads()))?;
            let without = (plan.total() - plan.kv).saturating_add(engine.pool().stats().budget);
            let need = without.saturating_add(block.memory_plan(&of_block.clone().into())?.kv);
            if need > limit {
                return Err(SessionError::MemoryLimit {
                    n_ctx: plan.n_ctx,
                    need,
                    limit,
                    fits: None,
                });
            }
            kv_budget = limit - without;
        }
        Ok(MtpDrafter::on(engine.for_block(block, kv_budget), of_block))
    }

    fn on(engine: Engine, options: SessionOptions) -> MtpDrafter {
        MtpDrafter {
            engine,
            options,
            text: Vec::new(),
            seq: None,
            begin: 0,
            n_read: 0,
            guesses: Vec::new(),
            last: [0],
            state: Vec::new(),
            has_failed: false,
        }
    }

    fn fail(&mut self) {
        (self.has_failed, self.seq) = (true, None);
        self.guesses.clear();
    }
}

impl Drafter for MtpDrafter {
    fn name(&self) -> &'static str {
        "mtp"
    }

    fn push(&mut self, tokens: &[u32]) {
        self.text.extend_from_slice(tokens);
        self.guesses.clear();
    }

    fn reads_states(&self) -> bool {
        true
    }

    fn engine(&self) -> Option<&Engine> {
        Some(&self.engine)
    }

    fn next_pass<'a>(&'a mut self, n: usize, states: &'a [f32]) -> Option<Slot<'a>> {
        let last = self.text.len().saturating_sub(1);
        if self.has_failed || last == 0 || states.is_empty() || self.guesses.len() >= n {
            return None;
        }
        if self.seq.is_none() {
            match self.engine.sequence(&self.options) {
                Ok(seq) => self.seq = Some(seq),
                Err(_) => self.fail(),
            }
        }
        let n_embd = self.engine.model().hparams().n_embd;
        let seq = self.seq.as_mut()?;
        if let Some(guess) = self.guesses.last() {
            self.last = [guess.token];
            return Some(
                Slot::new(seq, &self.last, TokenKind::Generated)
                    .with_states(&self.state)
                    .states_from(0),
            );
        }
        seq.truncate(self.n_read);
        // The first token whose state is there; it comes with the token behind it.
        let first = last - (states.len() / n_embd).min(last);
        let most = seq.n_ctx() - MAX_DRAFT;
        let mut next = self.begin + seq.position();
        if seq.position() == 0 || next < first || last - self.begin > most {
            seq.truncate(0);
            self.begin = first.max(last.saturating_sub(most));
            next = self.begin;
        }
        // The last one is computed again where it was computed before, for its outputs.
        let next = next.min(last - 1);
        self.n_read = next - self.begin;
        seq.truncate(self.n_read);
        let (tokens, states) = (&self.text[next + 1..], &states[(next - first) * n_embd..]);
        let kind = if tokens.len() > FEW {
            TokenKind::Prompt
        } else {
            TokenKind::Generated
        };
        Some(
            Slot::new(seq, tokens, kind)
                .with_states(states)
                .states_from(tokens.len() - 1),
        )
    }

    fn end_pass(&mut self, rows: Option<(&[f32], &[f32])>) {
        let (Some((logits, states)), Some(seq)) = (rows, &self.seq) else {
            return self.fail();
        };
        if self.guesses.is_empty() {
            self.n_read = seq.position();
        }
        self.guesses.push(best(logits));
        let n_embd = self.engine.model().hparams().n_embd;
        self.state.clear();
        self.state
            .extend_from_slice(&states[states.len() - n_embd..]);
    }

    fn release(&mut self) {
        self.seq = None;
        (self.n_read, self.begin) = (0, 0);
        self.guesses.clear();
    }

    fn draft(&mut self, n: usize, draft: &mut Vec<Draft>) {
        draft.extend(self.guesses.drain(..).take(n));
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        let mut clone = MtpDrafter::on(self.engine.clone(), self.options.clone());
        (clone.text, clone.has_failed) = (self.text.clone(), self.has_failed);
        Box::new(clone)
    }
}
