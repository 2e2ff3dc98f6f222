//! Vectors of texts: hidden states after the last norm, pooled.

use crate::compute::hook::TokenKind;
use crate::compute::linear::{Ctx, Product, RowAdapters, linear};
use crate::compute::probe::{EvalCallback, NoCallback};
use crate::compute::weight::Weight;
use crate::engine::SessionError;
use crate::engine::batch::Slot;
use crate::engine::engine::Engine;
use crate::engine::options::{CancelToken, SessionOptions};
use crate::forward::sizes::with_scratch;
use crate::kv::KvType;
use crate::layers::classifier::Pooling;
use crate::layers::outputs::Outputs;
use crate::model::Model;

/// Makes vectors of texts; texts of similar meaning have vectors of similar direction.
///
/// ```
/// use ruvllm::Model;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let embedder = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?.embedder()?;
/// let vectors = embedder.embed(&["A borrow ends.", "Traits are shared behaviour."])?;
/// let cosine: f32 = vectors[0].iter().zip(&vectors[1]).map(|(a, b)| a * b).sum();
/// assert!(cosine < 1.0);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Embedder {
    engine: Engine,
    pooling: Pooling,
    normalise: bool,
    n_batch: usize,
    cancel: CancelToken,
}

impl Model {
    /// Makes an embedder with the file's pooling, or mean pooling if the file has none.
    ///
    /// # Errors
    /// If the system cannot start threads.
    pub fn embedder(&self) -> Result<Embedder, SessionError> {
        Embedder::new(&self.engine()?)
    }
}

impl Embedder {
    /// As [`Model::embedder`], on a given engine.
    ///
    /// # Errors
    /// [`SessionError::NotOnDevice`] if a device computes the engine's passes, otherwise as
    /// [`Model::embedder`].
    pub fn new(engine: &Engine) -> Result<Embedder, SessionError> {
        engine.cpu_only("embeddings")?;
        // Of an encoder and a decoder, the encoder makes vectors.
        let engine = match engine.model().encoder() {
            Some(encoder) => engine.for_block(encoder, u64::MAX),
            None => engine.clone(),
        };
        let pooling = engine.model().hparams().pooling.unwrap_or(Pooling::Mean);
        let cancel = CancelToken::default();
        Ok(Embedder {
            engine,
            pooling,
            normalise: true,
            n_batch: 512,
            cancel,
        })
    }

    /// Sets the pooling, instead of the file's.
    #[must_use]
    pub fn pooling(mut self, pooling: Pooling) -> Self {
        self.pooling = pooling;
        self
    }

    /// Sets whether vectors are divided by their Euclidean length. Default: yes.
    #[must_use]
    pub fn normalise(mut self, normalise: bool) -> Self {
        self.normalise = normalise;
        self
    }

    /// Sets the largest number of tokens in a pass; a longer text gets a pass of its own. Default
    /// 512.
    #[must_use]
    pub fn n_batch(mut self, n_batch: usize) -> Self {
        self.n_batch = n_batch;
        self
    }

    /// A token that cancels calls from another thread.
    pub fn cancel_token(&self) -> CancelToken {
        self.cancel.clone()
    }

    /// Width of a vector.
    pub fn n_embd(&self) -> usize {
        let model = self.engine.model();
        model
            .weights()
            .dense
            .last()
            .map_or(model.hparams().n_embd, |w| w.n_out)
    }

    /// A vector for each text, of its [`tokens`](Embedder::tokens).
    ///
    /// # Errors
    /// [`SessionError::NoTokenizer`], otherwise as [`Embedder::embed_tokens`].
    pub fn embed<T: AsRef<str>>(&self, texts: &[T]) -> Result<Vec<Vec<f32>>, SessionError> {
        let texts = texts.iter().map(|text| self.tokens(text.as_ref()));
        self.embed_tokens(&texts.collect::<Result<Vec<_>, _>>()?)
    }

    /// The tokens of a text whose vector is wanted: with the special tokens at both ends that the
    /// model's file asks for (`[CLS]` and `[SEP]`, or the end-of-sequence token), unlike a
    /// prompt, which is to be continued. Special tokens written in the text are parsed.
    ///
    /// # Errors
    /// [`SessionError::NoTokenizer`].
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>, SessionError> {
        let tokenizer = self
            .engine
            .model()
            .tokenizer()
            .ok_or(SessionError::NoTokenizer)?;
        Ok(tokenizer.encode(text, true, true))
    }

    /// A vector for each text, as [`Embedder::tokens`] encodes it.
    ///
    /// # Errors
    /// If a text has no tokens, more tokens than the model has positions, or a token outside the
    /// vocabulary; if the call is cancelled, or there is not enough memory.
    pub fn embed_tokens<T: AsRef<[u32]>>(
        &self,
        texts: &[T],
    ) -> Result<Vec<Vec<f32>>, SessionError> {
        let mut vectors = self.pooled(texts)?;
        let dense = &self.engine.model().weights().dense;
        if !dense.is_empty() {
            self.map(&mut vectors, |product, vector| {
                dense.iter().for_each(|w| *vector = product(w, vector));
            })?;
        }
        if self.normalise {
            for vector in &mut vectors {
                let length = vector
                    .iter()
                    .map(|x| x * x)
                    .sum::<f32>()
                    .sqrt()
                    .max(f32::MIN_POSITIVE);
                vector.iter_mut().for_each(|x| *x /= length);
            }
        }
        Ok(vectors)
    }

    /// The hidden states of a text after the last norm, `(tokens, n_embd)`, neither pooled nor
    /// normalised. `probe` sees the pass, see [`NoCallback`].
    ///
    /// # Errors
    /// As [`Embedder::embed_tokens`].
    pub fn states_of(
        &self,
        text: &[u32],
        probe: &mut dyn EvalCallback,
    ) -> Result<Vec<f32>, SessionError> {
        let mut all = Vec::new();
        self.states(&[text], probe, &mut |states| all.extend_from_slice(states))?;
        Ok(all)
    }

    /// Calls `each` with the hidden states of each text.
    fn states<T: AsRef<[u32]>>(
        &self,
        texts: &[T],
        probe: &mut dyn EvalCallback,
        each: &mut dyn FnMut(&[f32]),
    ) -> Result<(), SessionError> {
        let (h, mut outputs) = (self.engine.model().hparams(), Outputs::default());
        let mut rest = texts;
        while !rest.is_empty() {
            let mut n_rows = 0;
            let fits = |text: &&T| {
                n_rows += text.as_ref().len();
                n_rows <= self.n_batch
            };
            let (texts, tail) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            rest = tail;
            // Keys and values are temporary, so they can have full precision.
            let options = |text: &T| SessionOptions {
                n_ctx: Some(text.as_ref().len().max(1)),
                kv_type: KvType::F32,
                ..SessionOptions::default()
            };
            if let Some(text) = texts
                .iter()
                .find(|text| text.as_ref().len() > h.n_ctx_train)
            {
                return Err(SessionError::ContextFull {
                    n_ctx: h.n_ctx_train,
                    n_past: 0,
                    n_new: text.as_ref().len(),
                });
            }
            let sequences = texts
                .iter()
                .map(|text| self.engine.sequence(&options(text)));
            let mut sequences = sequences.collect::<Result<Vec<_>, _>>()?;
            let slots = sequences.iter_mut().zip(texts);
            let mut slots: Vec<_> = slots
                .map(|(seq, text)| {
                    Slot::new(seq, text.as_ref(), TokenKind::Prompt)
                        .outputs_from(0)
                        .keeping_kind()
                })
                .collect();
            self.engine
                .states(&mut slots, &mut outputs, &self.cancel, probe)?;
            let mut states = &outputs.states[..];
            for text in texts {
                let (here, tail) = states.split_at(text.as_ref().len() * h.n_embd);
                each(here);
                states = tail;
            }
        }
        Ok(())
    }

    fn pool(&self, states: &[f32]) -> Vec<f32> {
        let n = self.engine.model().hparams().n_embd;
        match self.pooling {
            Pooling::Cls => states[..n].to_vec(),
            Pooling::Last => states[states.len() - n..].to_vec(),
            Pooling::Mean => {
                let mut sum = vec![0.0f32; n];
                let add = |row: &[f32]| sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                states.chunks_exact(n).for_each(add);
                let n_rows = (states.len() / n) as f32;
                sum.iter_mut().for_each(|x| *x /= n_rows);
                sum
            }
        }
    }

    /// The pooled hidden states of each text.
    pub(crate) fn pooled<T: AsRef<[u32]>>(
        &self,
        texts: &[T],
    ) -> Result<Vec<Vec<f32>>, SessionError> {
        let mut vectors = Vec::with_capacity(texts.len());
        let each = &mut |states: &[f32]| vectors.push(self.pool(states));
        self.states(texts, &mut NoCallback, each)?;
        Ok(vectors)
    }

    /// Calls `change` with each vector and a function that multiplies a vector by a matrix.
    pub(crate) fn map(
        &self,
        vectors: &mut [Vec<f32>],
        change: impl Fn(&mut dyn FnMut(&Weight, &[f32]) -> Vec<f32>, &mut Vec<f32>) + Sync,
    ) -> Result<(), SessionError> {
        let model = self.engine.model();
        self.engine.enter(&self.cancel, |threads, arena| {
            with_scratch(model, threads, arena, 1, |scratch| {
                let (arch, gguf, adapters) = (model.arch(), model.gguf(), RowAdapters::All(&[]));
                let ctx = Ctx {
                    arch,
                    threads,
                    gguf,
                    adapters,
                    n_generated: 1,
                    adapter_nanos: None,
                    products: None,
                };
                let mut product = |w: &Weight, x: &[f32]| {
                    let mut y = vec![0.0; w.n_out];
                    linear(ctx, scratch, x, 1, &mut [Product::of_weight(w, &mut y, 1)]);
                    y
                };
                vectors
                    .iter_mut()
                    .for_each(|vector| change(&mut product, vector));
            })
        })??;
        Ok(())
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }
}
