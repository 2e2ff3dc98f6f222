//! Vectors of texts, of the model that answers or of another one.

use crate::memory::MemoryError;
use half::f16;
use ruvllm::Engine;
use ruvllm::Embedder;

/// Most tokens of a text that its vector is of: as many from its beginning as from its end.
const MOST: usize = 32;

/// Makes vectors of texts: the mean hidden states of a model, an encoder's or those of the model
/// that answers.
#[derive(Clone, Debug)]
pub struct Vectors {
    embedder: Embedder,
    /// The model's fingerprint: vectors of different models cannot be compared.
    pub(super) space: u64,
}

impl Vectors {
    /// Vectors of the model of `engine`.
    ///
    /// # Errors
    /// As [`Embedder::new`].
    pub fn new(engine: &Engine) -> Result<Vectors, MemoryError> {
        Ok(Vectors {
            embedder: Embedder::new(engine)?,
            space: engine.model().fingerprint(),
        })
    }

    /// The vector of a text, of unit length; empty if the model has none for it.
    ///
    /// # Errors
    /// If the pass fails.
    pub fn of(&self, text: &str) -> Result<Vec<f32>, MemoryError> {
        let mut tokens = self.embedder.tokens(text)?;
        if tokens.len() > MOST {
            tokens.drain(MOST / 2..tokens.len() - MOST / 2);
        }
        let vector = self.embedder.embed_tokens(&[tokens])?.pop();
        // What is not a number is like nothing.
        Ok(vector
            .filter(|vector| vector.iter().all(|x| x.is_finite()))
            .unwrap_or_default())
    }

    pub(super) fn stored(&self, text: &str) -> Result<(u64, Vec<f16>), MemoryError> {
        let vector: Vec<f16> = self.of(text)?.into_iter().map(f16::from_f32).collect();
        let space = if vector.is_empty() { 0 } else { self.space };
        Ok((space, vector))
    }
}
