//! Gradients of a session's adapters, and training with them.

use crate::arch::Arch;
use crate::backward::driver::{BackwardAt, BackwardPass, backward};
use crate::backward::objective::{Objective, softmax_of};
use crate::backward::saved::Saved;
use crate::backward::supports::supports;
use crate::compute::hook::TokenKind;
use crate::engine::SessionError;
use crate::engine::adapters::AdapterId;
use crate::engine::batch::Slot;
use crate::engine::sequence::Sequence;
use crate::layers::outputs::Outputs;
use crate::layers::tape::BackwardText;
use crate::layers::unsupported::Unsupported;
use crate::lora::TargetModule;
use crate::lora::{Adapter, Gradients, Optimiser};
use crate::model::Model;
use crate::session::GradientError;
use crate::session::session::Session;

/// `−weight·ln p(target)` in nats, given the logits after a token; replaces them by the gradient,
/// `weight·(p − [target])`.
///
/// # Panics
/// If `target` is no index of `logits`.
pub fn cross_entropy(arch: Arch, logits: &mut [f32], target: u32, weight: f32) -> f64 {
    let target = target as usize;
    let logit = f64::from(logits[target]);
    let loss = softmax_of(arch, logits) - logit;
    logits[target] -= 1.0;
    if weight != 1.0 {
        logits.iter_mut().for_each(|x| *x *= weight);
    }
    f64::from(weight) * loss
}

/// `ln Σ exp` of a row of logits.
pub fn log_sum(logits: &[f32]) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    max + logits.iter().map(|l| (l - max).exp()).sum::<f32>().ln()
}

/// What a text's tokens are before the last norm, in the arithmetic of gradients: the prediction that
/// [`SessionTraining::divergence_gradient`] compares with, in a row per token instead of a number per
/// token of the vocabulary.
#[derive(Clone, Debug, Default)]
pub struct Reference {
    /// `(n, n_embd)`.
    rows: Vec<f32>,
}

/// A text whose likelihood [`SessionTraining::nll_gradients`] differentiates, as [`SessionTraining::nll_gradient`]
/// does.
#[derive(Clone, Copy, Debug)]
pub struct Task<'a> {
    /// The tokens that are computed.
    pub tokens: &'a [u32],
    /// The target after each of them.
    pub targets: &'a [u32],
    /// The weight of each target.
    pub weights: &'a [f32],
}

impl Task<'_> {
    /// Checks it, and returns the first target that counts.
    fn check(&self, model: &Model) -> Result<usize, SessionError> {
        let n = self.tokens.len();
        assert!(
            self.targets.len() == n && self.weights.len() == n,
            "a target and a weight per token"
        );
        let n_vocab = model.hparams().n_vocab;
        if let Some(&token) = self.targets.iter().find(|&&t| t as usize >= n_vocab) {
            return Err(SessionError::TokenOutOfRange { token, n_vocab });
        }
        Ok(self.weights.iter().take_while(|&&w| w == 0.0).count())
    }
}

/// Where the gradients are.
fn of_terms(gradients: &Gradients) -> impl Iterator<Item = &TargetModule> {
    gradients.terms().map(|(i, _)| &gradients.sites()[i])
}

/// Gradients of a session's adapters, and steps of an optimiser.
#[derive(Debug)]
pub struct SessionTraining<'s>(&'s mut Session);

impl Session {
    /// Gradients of its adapters, and steps of an optimiser.
    pub fn training(&mut self) -> SessionTraining<'_> {
        SessionTraining(self)
    }
}

impl SessionTraining<'_> {
    /// Appends `tokens`, as [`Session::prefill`] does, and adds to `gradients` the gradient of a
    /// loss with respect to the values of an attached adapter. Returns the loss.
    ///
    /// The loss is the sum of `objective` over the logits that follow each of `tokens[first..]`: it
    /// is called with the token's index and its logits `(n_vocab)`, which it replaces by the
    /// gradient with respect to them. It is called from several threads, in any order;
    /// [`cross_entropy`] is the usual one. `between` is called between the parts of the work, where
    /// other passes can be computed: the forward pass, the head, and each layer.
    ///
    /// Exact reverse mode through the frozen model as it is computed, with `f32` sums and the
    /// weights' own values (activations are rounded to 8 bits, as in prompts, where products of
    /// block formats do so): keys and values of `tokens` are differentiated, those of earlier
    /// tokens are constants. The choice of experts is a constant, too. Results do not depend on
    /// the number of threads. The memory is that of one layer for all of `tokens` or of 64 MiB
    /// of logits, whichever is more, a few rows per token of each layer from the lowest with a
    /// gradient on, and at most 144 MiB that save time; the session keeps it.
    ///
    /// # Errors
    /// [`SessionError::NoGradient`] if the model has a part without an implemented gradient; as
    /// [`Session::prefill`]; if the adapter is not attached, or if `gradients` do not belong to
    /// its terms. If the backward pass fails, the tokens are in the session and `gradients` are
    /// incomplete.
    pub fn gradient(
        &mut self,
        id: AdapterId,
        tokens: &[u32],
        first: usize,
        objective: &(dyn Fn(usize, &mut [f32]) -> f64 + Sync),
        gradients: &mut Gradients,
        between: Option<&mut dyn FnMut()>,
    ) -> Result<f64, GradientError> {
        let objective = |_: usize, i: usize, logits: &mut [f32]| objective(i, logits);
        self.differentiate(
            id,
            tokens,
            first,
            &Objective::Logits(&objective),
            gradients,
            between,
        )
    }

    /// What the session predicts after each of `tokens`, which it appends, with its adapters as they
    /// are.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn reference(&mut self, tokens: &[u32]) -> Result<Reference, SessionError> {
        let mut saved = Saved::default();
        saved.prepare(self.0.model(), std::iter::empty(), tokens.len());
        self.0.run(
            TokenKind::Prompt,
            tokens,
            tokens.len(),
            &mut saved,
            &mut |_, _| (),
        )?;
        Ok(Reference {
            rows: saved.x.pop().unwrap_or_default(),
        })
    }

    /// [`gradient`](Self::gradient) of `weight·KL(p ‖ q)`, summed over what follows each of `tokens`:
    /// `p` is `reference`, which the model without adapters of its head predicted of the same tokens,
    /// and `q` what the session predicts. Both are computed side by side, some rows at a time, so
    /// that the divergence is exact, and 0 where nothing differs. Nothing else is computed if no
    /// term has a gradient.
    ///
    /// # Errors
    /// As [`gradient`](Self::gradient).
    ///
    /// # Panics
    /// If the reference is of another number of tokens.
    pub fn divergence_gradient(
        &mut self,
        id: AdapterId,
        tokens: &[u32],
        reference: &Reference,
        weight: f32,
        gradients: &mut Gradients,
        between: Option<&mut dyn FnMut()>,
    ) -> Result<f64, GradientError> {
        let n = tokens.len() * self.0.model().hparams().n_embd;
        assert_eq!(reference.rows.len(), n, "a reference of the same tokens");
        let objective = Objective::Divergence {
            reference: &reference.rows,
            weight,
        };
        self.differentiate(id, tokens, 0, &objective, gradients, between)
    }

    fn differentiate(
        &mut self,
        id: AdapterId,
        tokens: &[u32],
        first: usize,
        objective: &Objective<'_>,
        gradients: &mut Gradients,
        mut between: Option<&mut dyn FnMut()>,
    ) -> Result<f64, GradientError> {
        let target = self.check_gradients(id, gradients)?;
        let mut saved = std::mem::take(&mut self.0.saved);
        saved.prepare(self.0.model(), of_terms(gradients), tokens.len());
        self.0.drop_drafts();
        let pos = self.0.position();
        self.0.seq.kv.hold(pos);
        let result = self.0.run(
            TokenKind::Prompt,
            tokens,
            tokens.len(),
            &mut saved,
            &mut |_, _| (),
        );
        if let Err(error) = result {
            self.0.saved = saved;
            self.0.seq.kv.release();
            return Err(error.into());
        }
        let text = BackwardText {
            tokens,
            first_output: first.min(tokens.len()),
            weights: None,
            kv: &self.0.seq.kv,
        };
        if let Some(between) = &mut between {
            between();
        }
        let losses = self.backward(
            target,
            pos,
            &[text],
            &mut saved,
            objective,
            gradients,
            between,
        );
        self.0.saved = saved;
        self.0.seq.kv.release();
        Ok(losses?.iter().sum())
    }

    /// The backward pass of `texts`, which begin at `pos`, after a forward pass that filled
    /// `saved`; the loss of each.
    fn backward(
        &self,
        target: usize,
        pos: usize,
        texts: &[BackwardText<'_>],
        saved: &mut Saved,
        objective: &Objective<'_>,
        gradients: &mut Gradients,
        mut between: Option<&mut dyn FnMut()>,
    ) -> Result<Vec<f64>, SessionError> {
        let Session {
            engine,
            seq:
                Sequence {
                    rope,
                    adapters,
                    spans,
                    ..
                },
            cancel,
            ..
        } = &*self.0;
        let (model, cancelled) = (engine.model(), || cancel.is_cancelled());
        let adapters = &adapters.attached;
        let (mut at, pauses) = (BackwardAt::default(), between.is_some());
        loop {
            let (saved, at, cancelled) = (&mut *saved, &mut at, &cancelled);
            let pass = BackwardPass {
                model,
                adapters,
                target,
                rope,
                texts,
                pos,
                turn: spans.turns(pos)[0],
                saved,
                objective,
                cancelled,
                at,
                pauses,
            };
            if engine.enter(cancel, |threads, arena| {
                backward(pass, threads, arena, gradients)
            })?? {
                break;
            }
            if let Some(between) = &mut between {
                between();
            }
        }
        Ok(at.losses.unwrap_or_default())
    }

    /// The index of an attached adapter, if its gradients can be added to `gradients`.
    fn check_gradients(
        &self,
        id: AdapterId,
        gradients: &Gradients,
    ) -> Result<usize, GradientError> {
        supports(self.0.model().hparams())
            .map_err(|Unsupported(what)| SessionError::NoGradient { what })?;
        let target = self.0.seq.adapters.index(id)?;
        gradients.check(&self.0.seq.adapters.attached[target].adapter)?;
        Ok(target)
    }

    /// The gradient of `Σ weights[i]·(−ln p(targets[i]))`, where `targets[i]` is the target after
    /// `tokens[i]`; a negative weight makes a token less likely. Otherwise as
    /// [`gradient`](Self::gradient).
    ///
    /// # Errors
    /// As [`gradient`](Self::gradient), and if a target is not in the vocabulary.
    ///
    /// # Panics
    /// If there are not as many targets and weights as tokens.
    pub fn nll_gradient(
        &mut self,
        id: AdapterId,
        tokens: &[u32],
        targets: &[u32],
        weights: &[f32],
        gradients: &mut Gradients,
    ) -> Result<f64, GradientError> {
        let first = Task {
            tokens,
            targets,
            weights,
        }
        .check(self.0.model())?;
        let arch = self.0.model().arch();
        let objective =
            |i: usize, logits: &mut [f32]| cross_entropy(arch, logits, targets[i], weights[i]);
        self.gradient(id, tokens, first, &objective, gradients, None)
    }

    /// [`nll_gradient`](Self::nll_gradient) of several texts in one forward and one backward pass, which takes
    /// less time if they are short. Each of them follows the tokens that the session holds; the
    /// session itself does not change. Returns the loss of each, and adds the gradients of all:
    /// what one call after the other would add, to the bit but for the `A` of matrices whose
    /// parts are products of their own, to which it adds part by part.
    ///
    /// The memory is that of a text as long as all of them together.
    ///
    /// # Errors
    /// As [`nll_gradient`](Self::nll_gradient).
    ///
    /// # Panics
    /// As [`nll_gradient`](Self::nll_gradient).
    pub fn nll_gradients(
        &mut self,
        id: AdapterId,
        tasks: &[Task<'_>],
        gradients: &mut Gradients,
    ) -> Result<Vec<f64>, GradientError> {
        let target = self.check_gradients(id, gradients)?;
        let firsts = tasks
            .iter()
            .map(|task| task.check(self.0.model()))
            .collect::<Result<Vec<_>, _>>()?;
        if tasks.is_empty() {
            return Ok(Vec::new());
        }
        self.0.catch_up()?;
        let (pos, arch) = (self.0.position(), self.0.model().arch());
        let mut saved = std::mem::take(&mut self.0.saved);
        saved.prepare(
            self.0.model(),
            of_terms(gradients),
            tasks.iter().map(|task| task.tokens.len()).sum(),
        );
        let mut texts = tasks
            .iter()
            .map(|_| self.0.seq.fork())
            .collect::<Result<Vec<_>, _>>()?;
        texts.iter_mut().for_each(|seq| {
            seq.hook = None;
            seq.kv.hold(pos);
        });
        let slots = texts.iter_mut().zip(tasks);
        let mut slots: Vec<Slot<'_>> = slots
            .map(|(seq, task)| {
                Slot::new(seq, task.tokens, TokenKind::Prompt).outputs_from(task.tokens.len())
            })
            .collect();
        let mut outputs = Outputs::default();
        let result = self
            .0
            .engine
            .pass(&mut slots, &mut outputs, false, &self.0.cancel, &mut saved)
            .and_then(|()| {
                let texts = texts.iter().zip(tasks).zip(firsts);
                let texts = texts.map(|((seq, task), first_output)| BackwardText {
                    tokens: task.tokens,
                    first_output,
                    weights: Some(task.weights),
                    kv: &seq.kv,
                });
                let texts: Vec<_> = texts.collect();
                let objective = |text: usize, i: usize, logits: &mut [f32]| {
                    cross_entropy(arch, logits, tasks[text].targets[i], tasks[text].weights[i])
                };
                let objective = Objective::Logits(&objective);
                self.backward(target, pos, &texts, &mut saved, &objective, gradients, None)
            });
        self.0.saved = saved;
        Ok(result?)
    }

    /// Learns to predict each of `text` from the tokens before it: one step of `optimiser` on the
    /// mean negative log-likelihood. Tokens that the session already holds are context. Returns
    /// that mean, in nats per token, before the step: measured on a stream, chunk by chunk, it
    /// is an honest score. `gradients` determines which terms learn; it is overwritten.
    ///
    /// The first of `text` is not predicted: chunks of a stream overlap by one token, and the
    /// session holds the tokens before. The adapter is unchanged if loss or gradient are not
    /// finite. The session is empty afterwards, as its keys and values belong to the old
    /// adapter.
    ///
    /// ```
    /// use ruvllm::lora::{Adapter, Gradients, Sgd};
    /// use ruvllm::Model;
    /// use std::sync::Arc;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
    /// let text = model.tokenizer().unwrap().encode("Ferris the crab borrows nothing and owns it all.", true, false);
    /// let last = model.hparams().n_layer - 1;
    /// let adapter = Adapter::zeros(&model, 4, 1, |site| site.layer() == Some(last))?;
    /// let (mut gradients, mut sgd) = (Gradients::zeros(&adapter), Sgd::new(model.site_norms()));
    /// let mut session = model.session()?;
    /// let id = session.adapters().attach(Arc::new(adapter), 1.0)?;
    /// let before = session.training().learn(id, &text, &mut sgd, &mut gradients)?;
    /// let after = session.training().learn(id, &text, &mut sgd, &mut gradients)?;
    /// assert!(after < before); // nats per token
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`nll_gradient`](Self::nll_gradient).
    pub fn learn(
        &mut self,
        id: AdapterId,
        text: &[u32],
        optimiser: &mut dyn Optimiser,
        gradients: &mut Gradients,
    ) -> Result<f64, GradientError> {
        let (Some((_, targets)), Some((_, tokens))) = (text.split_first(), text.split_last())
        else {
            return Err(SessionError::NoTokens.into());
        };
        gradients.clear();
        let n = targets.len();
        let loss = self.nll_gradient(id, tokens, targets, &vec![1.0; n], gradients)? / n as f64;
        gradients.scale(1.0 / n as f32);
        if loss.is_finite() && gradients.norm().is_finite() {
            let step = |adapter: &mut Adapter| optimiser.step(adapter, gradients);
            self.0.adapters().update(id, step)?;
        } else {
            self.0.clear();
        }
        Ok(loss)
    }
}
