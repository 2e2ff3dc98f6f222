//! Drafts by a model's own block for multi-token prediction.

use super::model::{FEW, best};
use super::{Drafter, Guess, MAX_DRAFT};
use crate::error::SessionError;
use crate::exec::engine::plan_options;
use crate::exec::hook::TokenKind;
use crate::exec::states::most_rows;
use crate::exec::{CancelToken, Engine, Outputs, PlanOptions, Sequence, SessionOptions, Slot, n_ctx};
use crate::model::Model;

/// Drafts what the block for multi-token prediction of the model itself thinks most probable (`--spec mtp`): GLM 4.5,
/// DeepSeek 3, Qwen 3 Next and 3.5 have one, if their files do.
///
/// The block is a layer with keys and values of its own. It reads a token and the model's hidden state of the token before
/// ([`SessionOptions::keep_states`]), and guesses the next one; for further guesses its own state takes the place of the
/// model's. Of a prompt it reads the end, up to 512 tokens, and what comes behind. Where states are missing, behind tokens
/// from the prefix cache or forced ones, it drafts nothing, or begins anew. It knows no adapters.
#[derive(Debug)]
pub struct MtpDrafter {
    engine: Engine,
    options: SessionOptions,
    text: Vec<u32>,
    /// The block's keys and values for tokens of the text from `begin` on, each with the state of the token before.
    seq: Option<Sequence>,
    begin: usize,
    outputs: Outputs,
    /// Whether the outputs are those behind the text.
    is_ready: bool,
    /// Memory for the block's own state.
    state: Vec<f32>,
    has_failed: bool,
}

impl MtpDrafter {
    /// Drafts for sessions of `engine` with these options. The block's keys and values do not count for the engine's budget,
    /// but for the model's memory limit, which has to leave room for them
    /// ([`EngineOptions::kv_budget`](crate::exec::EngineOptions)).
    ///
    /// # Errors
    /// [`SessionError::NoMtp`] if the model has no such block, or none that can be used; or if there is no room.
    pub fn new(engine: &Engine, options: &SessionOptions) -> Result<MtpDrafter, SessionError> {
        let model = engine.model();
        let block = match model.mtp() {
            Ok(Some(block)) => block,
            Ok(None) => return Err(SessionError::NoMtp { why: None }),
            Err(error) => return Err(SessionError::NoMtp { why: Some(error.to_string()) }),
        };
        let of_block = of_block(block, options);
        let mut kv_budget = u64::MAX;
        if let Some(limit) = model.memory_limit() {
            let session = SessionOptions { keep_states: true, ..options.clone() };
            let plan = model.memory_plan(&plan_options(session, engine.n_threads()))?;
            let without = (plan.total() - plan.kv).saturating_add(engine.pool().stats().budget);
            let need = without.saturating_add(block.memory_plan(&of_block.clone().into())?.kv);
            if need > limit {
                return Err(SessionError::MemoryLimit { n_ctx: plan.n_ctx, need, limit, fits: None });
            }
            kv_budget = limit - without;
        }
        Ok(MtpDrafter::on(engine.for_block(block, kv_budget), of_block))
    }

    /// Logits of the block's newest pass, `(n_vocab)`: behind the text after [`Drafter::read_states`], behind the guesses but
    /// the last after [`Drafter::draft`]. Empty before the first.
    pub fn logits(&self) -> &[f32] {
        self.outputs.before_last(0)
    }

    /// What `block` takes beside the model, whose plan is that of `options`.
    pub(in crate::exec) fn plan_options(block: &Model, options: &PlanOptions) -> PlanOptions {
        let &PlanOptions { n_sequences, n_threads, ref session, .. } = options;
        PlanOptions { n_sequences, n_threads, ..of_block(block, session).into() }
    }

    fn on(engine: Engine, options: SessionOptions) -> MtpDrafter {
        MtpDrafter {
            engine,
            options,
            text: Vec::new(),
            seq: None,
            begin: 0,
            outputs: Outputs::default(),
            is_ready: false,
            state: Vec::new(),
            has_failed: false,
        }
    }

    /// Computes what the block has not seen, as far as `states` are there.
    fn read(&mut self, states: &[f32]) -> Result<(), SessionError> {
        let n_embd = self.engine.model().hparams().n_embd;
        let last = self.text.len().saturating_sub(1);
        if last == 0 || states.is_empty() {
            return Ok(());
        }
        let seq = match &mut self.seq {
            Some(seq) => seq,
            none => none.insert(self.engine.sequence(&self.options)?),
        };
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
        seq.truncate(next - self.begin);
        let (tokens, states) = (&self.text[next + 1..], &states[(next - first) * n_embd..]);
        let kind = if tokens.len() > FEW { TokenKind::Prompt } else { TokenKind::Generated };
        let slot = Slot::new(seq, tokens, kind).with_states(states).states_from(tokens.len() - 1);
        self.engine.step(&mut [slot], &mut self.outputs, &CancelToken::default())?;
        self.is_ready = true;
        Ok(())
    }

    /// Guesses behind the text, token by token.
    fn guess(&mut self, n: usize, draft: &mut Vec<Guess>) -> Result<(), SessionError> {
        let Some(seq) = self.seq.as_mut().filter(|_| std::mem::take(&mut self.is_ready)) else { return Ok(()) };
        let (n_embd, read) = (self.engine.model().hparams().n_embd, seq.position());
        for i in 0..n {
            let guess = best(self.outputs.logits(0));
            draft.push(guess);
            if i + 1 < n {
                self.state.clear();
                self.state.extend_from_slice(&self.outputs.states[self.outputs.states.len() - n_embd..]);
                let tokens = [guess.token];
                let slot = Slot::new(seq, &tokens, TokenKind::Generated).with_states(&self.state).states_from(0);
                self.engine.step(&mut [slot], &mut self.outputs, &CancelToken::default())?;
            }
        }
        seq.truncate(read);
        Ok(())
    }

    fn keep(&mut self, outcome: Result<(), SessionError>) {
        if outcome.is_err() {
            (self.has_failed, self.is_ready, self.seq) = (true, false, None);
        }
    }
}

/// Options of the block's sequence, for a text in a session with `options`.
fn of_block(block: &Model, options: &SessionOptions) -> SessionOptions {
    let n_ctx = n_ctx(block.hparams(), options).max(1);
    let (kv_type, kv_type_v) = (options.kv_type, options.kv_type_v);
    let (n_batch, n_ctx) = (most_rows(n_ctx), Some(n_ctx.saturating_add(MAX_DRAFT)));
    SessionOptions { n_ctx, n_batch, kv_type, kv_type_v, ..SessionOptions::default() }
}

impl Drafter for MtpDrafter {
    fn name(&self) -> &'static str {
        "mtp"
    }

    fn push(&mut self, tokens: &[u32]) {
        self.text.extend_from_slice(tokens);
        self.is_ready = false;
    }

    fn reads_states(&self) -> bool {
        true
    }

    fn read_states(&mut self, states: &[f32]) {
        if !self.has_failed {
            let outcome = self.read(states);
            self.keep(outcome);
        }
    }

    fn draft(&mut self, n: usize, draft: &mut Vec<Guess>) {
        let outcome = self.guess(n, draft);
        self.keep(outcome);
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        let mut clone = MtpDrafter::on(self.engine.clone(), self.options.clone());
        (clone.text, clone.has_failed) = (self.text.clone(), self.has_failed);
        Box::new(clone)
    }
}
