//! Texts that are computed for the inputs of a model's products.

use crate::io::Failure;
use ruvllm::compute::{EvalCallback, HookPoint, ProductCallback};
use ruvllm::gguf::TensorInfo;
use ruvllm::{Embedder, Session, SessionError};
use std::sync::Arc;

/// Computes chunks of a text: in a session, or each as a whole if the model is an encoder.
pub(crate) struct ProbedText {
    session: Session,
    encoder: Option<Embedder>,
}

impl ProbedText {
    /// # Errors
    /// If the device of the session cannot compute an encoder.
    pub(crate) fn new(session: Session) -> Result<ProbedText, Failure> {
        let is_encoder = session
            .model()
            .hparams()
            .attention()
            .any(|attn| !attn.causal);
        let encoder = is_encoder
            .then(|| Embedder::new(session.engine()))
            .transpose()?;
        Ok(ProbedText { session, encoder })
    }

    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    /// Puts the special tokens into a chunk that texts have at their ends: the first one, and for an
    /// encoder the last one.
    ///
    /// # Errors
    /// If the model has no tokenizer.
    pub(crate) fn give_ends(&self, chunk: &mut [u32]) -> Result<(), Failure> {
        let tokenizer = self.session.model().tokenizer();
        let bos = tokenizer.and_then(|t| t.bos().filter(|_| t.add_bos()));
        let ends = match &self.encoder {
            Some(encoder) => encoder.tokens("")?,
            None => bos.into_iter().collect(),
        };
        if let (Some(first), Some(&token)) = (chunk.first_mut(), ends.first()) {
            *first = token;
        }
        if let (Some(last), [_, .., token]) = (chunk.last_mut(), &ends[..]) {
            *last = *token;
        }
        Ok(())
    }

    /// Computes a chunk; `products` gets the inputs. Those of the head are there for all tokens, or
    /// for the last one alone.
    ///
    /// # Errors
    /// As of a session.
    pub(crate) fn compute(
        &mut self,
        chunk: &[u32],
        with_output: bool,
        products: Arc<dyn ProductCallback>,
    ) -> Result<(), SessionError> {
        let mut probe = Inputs(products);
        if let Some(encoder) = &self.encoder {
            return encoder.states_of(chunk, &mut probe).map(drop);
        }
        self.session.clear();
        let first = if with_output { 0 } else { chunk.len() - 1 };
        self.session
            .hooks()
            .prefill_probed(chunk, first, &mut probe, |_, _| ())
    }
}

/// Matrices in the stack of a tensor, each with inputs of its own.
pub(crate) fn n_matrices(tensor: &TensorInfo) -> usize {
    tensor.dims.iter().skip(2).product::<u64>() as usize
}

/// The probe of a pass.
struct Inputs(Arc<dyn ProductCallback>);

impl EvalCallback for Inputs {
    fn tensor(&mut self, _: HookPoint, _: usize, _: &[f32]) {}

    fn products(&self) -> Option<Arc<dyn ProductCallback>> {
        Some(Arc::clone(&self.0))
    }
}
