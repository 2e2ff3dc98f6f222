//! Vectors of texts, of the model that answers or of another one.

use crate::memory::MemoryError;
use half::f16;
use ruvllm::Embedder;
use ruvllm::Engine;

/// Most tokens of an entry, and of a question, that a vector is of: as many from its beginning as from
/// its end. Somebody waits for that of a question.
const ENTRY: usize = 64;
const QUESTION: usize = 16;

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

    /// The vector of a question, of unit length; empty if the model has none for it.
    ///
    /// # Errors
    /// If the pass fails.
    pub fn of(&self, question: &str) -> Result<Vec<f32>, MemoryError> {
        self.vector(question, QUESTION)
    }

    fn vector(&self, text: &str, most: usize) -> Result<Vec<f32>, MemoryError> {
        let mut tokens = self.embedder.tokens(text)?;
        if tokens.len() > most {
            tokens.drain(most / 2..tokens.len() - most / 2);
        }
        let vector = self.embedder.embed_tokens(&[tokens])?.pop();
        // What is not a number is like nothing.
        Ok(vector
            .filter(|vector| vector.iter().all(|x| x.is_finite()))
            .unwrap_or_default())
    }

    pub(super) fn stored(&self, text: &str) -> Result<(u64, Vec<f16>), MemoryError> {
        let vector: Vec<f16> = self
            .vector(text, ENTRY)?
            .into_iter()
            .map(f16::from_f32)
            .collect();
        let space = if vector.is_empty() { 0 } else { self.space };
        Ok((space, vector))
    }
}
