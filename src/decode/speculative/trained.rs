//! Drafts by a model that was trained to draft for another, and reads what that computes.
//!
//! A file for each kind: [`eagle3`], [`dflash`], [`assistant`].

mod assistant;
mod dflash;
mod eagle3;
mod pass;

use crate::decode::speculative::model::check_vocabulary;
use crate::decode::speculative::trained::pass::{Asked, Work};
use crate::decode::speculative::{Draft, Drafter};
use crate::engine::SessionError;
use crate::engine::drafter_memory::{DrafterMemory, own_of_text};
use crate::engine::engine::Engine;
use crate::engine::sequence::Sequence;
use crate::gguf::Gguf;
use crate::kv::Lent;
use crate::layers::draft::spec::DraftKind;
use crate::layers::draft::vec_bytes;
use crate::layers::rope::RopeTables;
use crate::model::drafter::DraftModel;
use std::sync::Arc;

/// Drafts what a model thinks most probable that was trained for the target (`-md FILE`): EAGLE 3 and
/// DFlash, which read inputs of some of its layers, and Gemma 4's assistant, which reads its hidden
/// states, keys and values. Such a file does not run alone: it lacks what the target has.
///
/// It computes with the engine's threads, and sees the end of the text, up to some thousand tokens
/// behind the last gap: where what it reads is missing, behind tokens from the prefix cache or
/// forced ones, it begins anew. It knows no adapters.
#[derive(Debug)]
pub struct TrainedDrafter {
    model: Arc<DraftModel>,
    engine: Engine,
    rope: Arc<RopeTables>,
    text: Vec<u32>,
    work: Work,
    /// For its weights, and for what it holds of the text, where the engine's memory is limited.
    lent_for_all: Option<Arc<Lent>>,
    lent: Option<Lent>,
    /// What it guesses behind the text, once it has read that.
    guesses: Vec<Draft>,
    /// What it last guessed from, of which tests have other engines' numbers: logits of each row of
    /// its output, and the state behind them.
    #[doc(hidden)]
    pub computed: [Vec<f32>; 2],
    has_failed: bool,
}

impl TrainedDrafter {
    /// Opens a drafter for the engine's model; none if the file holds a model of another kind, as
    /// [`ModelDrafter`](crate::decode::ModelDrafter) takes it.
    ///
    /// # Errors
    /// If the file is invalid or was not made for this model, or a device computes the engine's
    /// passes; if its weights do not fit into the memory that the model was opened with.
    pub fn open(gguf: Gguf, engine: &Engine) -> Result<Option<TrainedDrafter>, SessionError> {
        let target = engine.model();
        let model = DraftModel::open(gguf, target).map_err(SessionError::Drafter)?;
        let Some(model) = model else {
            return Ok(None);
        };
        engine.cpu_only("drafters that read what the model computes")?;
        if let (Some(own), Some(other)) = (&model.tokenizer, target.tokenizer()) {
            check_vocabulary(own, other)?;
        }
        let mut drafter = TrainedDrafter::on(Arc::new(model), engine.clone());
        if let Some(limit) = target.memory_limit() {
            let (pool, bytes) = (engine.pool(), drafter.model.weight_bytes());
            let refused = |_| SessionError::DrafterMemory {
                need: bytes,
                left: pool.stats().left(),
                limit,
            };
            drafter.lent_for_all = Some(Arc::new(pool.lend(bytes).map_err(refused)?));
        }
        Ok(Some(drafter))
    }

    /// Its memory, for a [`MemoryPlan`](crate::engine::MemoryPlan).
    pub fn memory(&self) -> DrafterMemory {
        DrafterMemory::of_trained(Arc::clone(&self.model))
    }

    /// Bytes that it holds for its text now.
    pub fn bytes(&self) -> u64 {
        let [logits, state] = &self.computed;
        self.work.bytes() + vec_bytes(logits) + vec_bytes(state)
    }

    /// Takes what it needs for the text of `seq` out of the budget of the engine's pool, if that is
    /// limited. Returns whether it is there.
    fn has_memory(&mut self, seq: &Sequence) -> bool {
        let n_ctx = seq.n_ctx();
        self.work.set_most(self.model.n_positions(n_ctx));
        if let (None, Some(pool)) = (&self.lent, seq.limited_pool()) {
            self.lent = pool.lend(own_of_text(&self.model, n_ctx)).ok();
            return self.lent.is_some();
        }
        true
    }

    fn on(model: Arc<DraftModel>, engine: Engine) -> TrainedDrafter {
        let h = &model.h;
        let rope = RopeTables::new(&h.ropes, &model.weights.rope_factors, h.n_ctx_train);
        TrainedDrafter {
            engine,
            rope: Arc::new(rope),
            text: Vec::new(),
            work: Work::new(h.n_layer),
            lent_for_all: None,
            lent: None,
            guesses: Vec::new(),
            computed: Default::default(),
            has_failed: false,
            model,
        }
    }

    /// Leaves `n` guesses behind the text, or fewer.
    fn guess(&mut self, asked: &Asked<'_>) -> Result<(), SessionError> {
        let model = &*self.model;
        let of = (model, &self.engine, &*self.rope);
        let (work, guesses) = (&mut self.work, &mut self.guesses);
        [work.logits, work.state] = std::mem::take(&mut self.computed);
        let outcome = match model.spec.kind {
            DraftKind::Eagle3 { .. } => eagle3::guess(of, work, asked, guesses),
            DraftKind::Dflash { n_block, mask } => {
                dflash::guess(of, work, (n_block, mask), asked, guesses)
            }
            DraftKind::Assistant => assistant::guess(of, work, asked, guesses),
        };
        self.computed = [&mut work.logits, &mut work.state].map(std::mem::take);
        outcome
    }
}

impl Drafter for TrainedDrafter {
    fn name(&self) -> &'static str {
        match self.model.spec.kind {
            DraftKind::Eagle3 { .. } => "eagle3",
            DraftKind::Dflash { .. } => "dflash",
            DraftKind::Assistant => "assistant",
        }
    }

    fn push(&mut self, tokens: &[u32]) {
        self.text.extend_from_slice(tokens);
        self.guesses.clear();
    }

    fn reads_states(&self) -> bool {
        self.model.spec.kind == DraftKind::Assistant
    }

    fn reads_inputs(&self) -> &[usize] {
        &self.model.spec.inputs
    }

    fn read(&mut self, n: usize, seq: &Sequence, n_text: usize) {
        self.guesses.clear();
        // What is forced, or was taken back, is computed first.
        let is_ready = seq.kv.len() + 1 == n_text && n_text > 1 && self.text.len() >= n_text;
        // A drafter of another model has nothing to read here.
        let is_of_target = seq.model().same(self.engine.model());
        if self.has_failed || n == 0 || !is_ready || !is_of_target {
            return;
        }
        if !self.has_memory(seq) {
            self.release();
            return;
        }
        let text = std::mem::take(&mut self.text);
        let text_of = Asked {
            text: &text,
            n,
            seq,
        };
        if self.guess(&text_of).is_err() {
            self.has_failed = true;
            self.guesses.clear();
        }
        self.text = text;
    }

    fn release(&mut self) {
        self.work = Work::new(self.model.h.n_layer);
        (self.computed, self.guesses) = Default::default();
        self.lent = None;
    }

    fn draft(&mut self, n: usize, draft: &mut Vec<Draft>) {
        draft.extend(self.guesses.drain(..).take(n));
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

/// With a memory of its own, which is empty.
impl Clone for TrainedDrafter {
    fn clone(&self) -> TrainedDrafter {
        let mut clone = TrainedDrafter::on(Arc::clone(&self.model), self.engine.clone());
        clone.rope = Arc::clone(&self.rope);
        clone.lent_for_all.clone_from(&self.lent_for_all);
        (clone.text, clone.has_failed) = (self.text.clone(), self.has_failed);
        clone
    }
}
