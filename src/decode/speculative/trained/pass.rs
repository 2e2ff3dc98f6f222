//! What drafters of all kinds compute with: their rows, embeddings and heads that may be the target's.

use crate::compute::linear::{Ctx, Product, RowCtx};
use crate::decode::speculative::Draft;
use crate::decode::speculative::model::best;
use crate::engine::SessionError;
use crate::engine::engine::Engine;
use crate::engine::options::CancelToken;
use crate::engine::sequence::Sequence;
use crate::layers::draft::memory::DraftMemory;
use crate::layers::draft::weights::DraftInput;
use crate::layers::draft::{DraftBuffers, DraftRows, FEW, room, vec_bytes};
use crate::layers::rope::RopeTables;
use crate::model::Model;
use crate::model::drafter::DraftModel;

/// A drafter, the engine of its target, and its ropes.
pub(super) type Of<'a> = (&'a DraftModel, &'a Engine, &'a RopeTables);

/// What a draft is made of.
pub(super) struct Asked<'a> {
    /// The text; the sequence holds all of it but the last token.
    pub(super) text: &'a [u32],
    /// Number of guesses.
    pub(super) n: usize,
    pub(super) seq: &'a Sequence,
}

impl Asked<'_> {
    /// Tokens of the sequence: its positions are not the text's where tokens were dropped from it.
    pub(super) fn position(&self) -> usize {
        self.seq.kv.len()
    }
}

/// What a drafter keeps from one draft to the next, and its buffers.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// Keys and values of each layer.
    pub(super) memories: Vec<DraftMemory>,
    /// How many tokens of the text the memories hold.
    pub(super) n_read: usize,
    pub(super) buffers: DraftBuffers,
    /// Features, embeddings, what a layer reads, the residual stream.
    pub(super) g: Vec<f32>,
    pub(super) e: Vec<f32>,
    pub(super) y: Vec<f32>,
    pub(super) x: Vec<f32>,
    /// The state from which the next token is guessed.
    pub(super) state: Vec<f32>,
    /// Those of the last head, `(rows, n_out)`.
    pub(super) logits: Vec<f32>,
}

impl Work {
    pub(super) fn new(n_layer: usize) -> Work {
        Work {
            memories: vec![DraftMemory::default(); n_layer],
            ..Work::default()
        }
    }

    /// Keeps keys and values of at most `n` positions.
    pub(super) fn set_most(&mut self, n: usize) {
        self.memories
            .iter_mut()
            .for_each(|memory| memory.set_most(n));
    }

    /// Bytes that it takes.
    pub(super) fn bytes(&self) -> u64 {
        let Work {
            memories,
            n_read: _,
            buffers,
            g,
            e,
            y,
            x,
            state,
            logits,
        } = self;
        let memories = memories.iter().map(DraftMemory::bytes);
        let vectors = [g, e, y, x, state, logits].into_iter().map(vec_bytes);
        memories.chain(vectors).sum::<u64>() + buffers.bytes()
    }

    /// Goes on with the text's first `last` tokens, of the last of which there are `n` rows: where
    /// they do not follow what was read, reading begins anew. At least `n_again` of them are read
    /// again. Returns the first token to read, and its row.
    pub(super) fn begin(
        &mut self,
        last: usize,
        n: usize,
        n_again: usize,
    ) -> Option<(usize, usize)> {
        let first = last - n.min(last);
        let next = self.n_read.min(last.saturating_sub(n_again));
        let next = match n {
            0 => return None,
            _ if next < first => {
                self.memories
                    .iter_mut()
                    .for_each(|memory| memory.restart(first));
                first
            }
            _ => next,
        };
        self.memories
            .iter_mut()
            .for_each(|memory| memory.truncate(next));
        self.n_read = next;
        Some((next, next - first))
    }
}

/// A pass of a drafter.
pub(super) struct Pass<'a, 'b> {
    pub(super) rows: DraftRows<'a, 'b>,
    pub(super) model: &'a DraftModel,
    pub(super) target: &'a Model,
}

/// Runs `f` with the engine's threads and room for passes of up to `m` rows.
pub(super) fn with_pass(
    of: Of<'_>,
    work: &mut Work,
    m: usize,
    f: impl FnOnce(&mut Pass<'_, '_>, &mut Work),
) -> Result<(), SessionError> {
    let mut buffers = std::mem::take(&mut work.buffers);
    let outcome = with_buffers(of, &mut buffers, m, |pass| f(pass, work));
    work.buffers = buffers;
    outcome
}

fn with_buffers(
    (model, engine, rope): Of<'_>,
    buffers: &mut DraftBuffers,
    m: usize,
    f: impl FnOnce(&mut Pass<'_, '_>),
) -> Result<(), SessionError> {
    let target = engine.model();
    engine.enter(&CancelToken::default(), |threads, arena| {
        let on = (target.arch(), threads.n_threads());
        let (mut scratch, inner) = arena.plan(|frame| model.take(frame, on, m))?;
        let on = RowCtx {
            ctx: Ctx::without_adapters(target.arch(), threads, &model.gguf, 1),
            scratch: &mut scratch,
        };
        f(&mut Pass {
            rows: DraftRows {
                on,
                h: &model.h,
                rope,
                m: 1,
                inner,
                buffers,
            },
            model,
            target,
        });
        Ok(())
    })?
}

impl Pass<'_, '_> {
    /// What follows has `m` rows; many are multiplied as a prompt's.
    pub(super) fn begin(&mut self, m: usize) {
        self.rows.m = m;
        self.rows.on.ctx.n_generated = if m > FEW { 0 } else { m };
    }

    /// Embeddings of tokens, the drafter's or the target's; one for each row of `x`.
    pub(super) fn embed(&self, tokens: impl Iterator<Item = u32>, x: &mut [f32]) {
        // Gemma's assistant has a table, which is its head.
        let is_head = matches!(self.model.weights.input, DraftInput::States { .. });
        let (table, gguf) = match &self.model.weights.token_embd {
            Some(table) if !is_head => (table, &self.model.gguf),
            _ => (&self.target.weights().token_embd, self.target.gguf()),
        };
        for (token, x) in tokens.zip(x.chunks_exact_mut(table.n_in)) {
            let data = table.data_of_rows(gguf, token as usize..token as usize + 1);
            self.target.arch().dequantize(table.dtype, data, x);
        }
        let scale = self.model.spec.embd_scale;
        if scale != 1.0 {
            x.iter_mut().for_each(|x| *x *= scale);
        }
    }

    /// Appends the best token of each of `m` rows of the residual stream `x`; leaves their logits.
    pub(super) fn best(
        &mut self,
        (x, m): (&[f32], usize),
        (normed, logits): (&mut Vec<f32>, &mut Vec<f32>),
        guesses: &mut Vec<Draft>,
    ) {
        self.begin(m);
        let w = &self.model.weights;
        let normed = room(normed, x.len());
        self.rows.norm(&w.output_norm, x, normed);
        let head = match (&w.output, &w.token_embd) {
            (Some(output), _) => (&output.w, &self.model.gguf),
            (None, Some(table)) => (table, &self.model.gguf),
            (None, None) => (&self.target.weights().output.w, self.target.gguf()),
        };
        let (head, gguf) = head;
        let logits = room(logits, m * head.n_out);
        let own = std::mem::replace(&mut self.rows.on.ctx.gguf, gguf);
        let products = &mut [Product::of_weight(head, logits, m)];
        self.rows.on.linear(normed, m, products);
        self.rows.on.ctx.gguf = own;
        let token = |guess: Draft| match &w.tokens {
            Some(tokens) => Draft {
                token: tokens[guess.token as usize],
                ..guess
            },
            None => guess,
        };
        guesses.extend(logits.chunks_exact(head.n_out).map(best).map(token));
    }
}
