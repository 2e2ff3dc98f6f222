//! Scores of pairs of texts: how well a document answers a query.

use crate::compute::weight::Linear;
use crate::embed::embedder::Embedder;
use crate::engine::SessionError;
use crate::engine::engine::Engine;
use crate::engine::options::CancelToken;
use crate::layers::classifier::ClassifierActivation;
use crate::layers::norm::spec::NormKind;
use crate::model::Model;

/// Scores documents by how well they answer a query. Scores order the documents of one query; those
/// of Qwen3-Reranker are probabilities, those of other models any number.
///
/// ```no_run
/// use ruvllm::Model;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let reranker = Model::open("bge-reranker-v2-m3.gguf")?.reranker()?;
/// let scores = reranker.rank("What is a panda?", &["hi", "The giant panda is a bear of China."])?;
/// assert!(scores[1] > scores[0]);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Reranker {
    embedder: Embedder,
    /// Text around a query and a document, which stand as `{query}` and `{document}` in it.
    template: Option<String>,
}

impl Model {
    /// Makes a reranker.
    ///
    /// # Errors
    /// [`SessionError::NoClassifier`] if the model is none, or if the system cannot start threads.
    pub fn reranker(&self) -> Result<Reranker, SessionError> {
        Reranker::new(&self.engine()?)
    }
}

impl Reranker {
    /// As [`Model::reranker`], on a given engine.
    ///
    /// # Errors
    /// [`SessionError::NotOnDevice`] if a device computes the engine's passes, otherwise as
    /// [`Model::reranker`].
    pub fn new(engine: &Engine) -> Result<Reranker, SessionError> {
        let model = engine.model();
        let classifier = model
            .hparams()
            .classifier
            .ok_or(SessionError::NoClassifier)?;
        let template = model
            .gguf()
            .metadata()
            .opt_str("tokenizer.chat_template.rerank")
            .ok()
            .flatten();
        let embedder = Embedder::new(engine)?
            .pooling(classifier.pooling)
            .normalise(false);
        Ok(Reranker {
            embedder,
            template: template.map(str::to_owned),
        })
    }

    /// Sets the largest number of tokens in a pass; a longer pair gets a pass of its own. Default
    /// 512.
    #[must_use]
    pub fn n_batch(mut self, n_batch: usize) -> Self {
        self.embedder = self.embedder.n_batch(n_batch);
        self
    }

    /// A token that cancels calls from another thread.
    pub fn cancel_token(&self) -> CancelToken {
        self.embedder.cancel_token()
    }

    /// The score of each document.
    ///
    /// # Errors
    /// [`SessionError::NoTokenizer`], otherwise as [`Reranker::rank_tokens`].
    pub fn rank<T: AsRef<str>>(
        &self,
        query: &str,
        documents: &[T],
    ) -> Result<Vec<f32>, SessionError> {
        let pairs = documents
            .iter()
            .map(|document| self.pair(query, document.as_ref()));
        self.rank_tokens(&pairs.collect::<Result<Vec<_>, _>>()?)
    }

    /// The tokens of a query and a document as the model reads them: in the file's template if it
    /// has one; otherwise each after the other, with the special tokens of the vocabulary
    /// around them. Special tokens written in a template are parsed, those written in a query
    /// or document are plain text.
    ///
    /// # Errors
    /// [`SessionError::NoTokenizer`].
    pub fn pair(&self, query: &str, document: &str) -> Result<Vec<u32>, SessionError> {
        let tokenizer = self
            .embedder
            .engine()
            .model()
            .tokenizer()
            .ok_or(SessionError::NoTokenizer)?;
        let Some(template) = &self.template else {
            return Ok(tokenizer.encode_pair(query, document));
        };
        // The template's parts, and what is inserted, in one go, so that a document is not searched
        // for `{query}`.
        let mut parts = Vec::new();
        let mut rest = &template[..];
        loop {
            let places = [("{query}", query), ("{document}", document)];
            let next = places
                .iter()
                .filter_map(|&(name, value)| Some((rest.find(name)?, name, value)));
            let Some((at, name, value)) = next.min() else {
                break;
            };
            parts.extend([(&rest[..at], true), (value, false)]);
            rest = &rest[at + name.len()..];
        }
        parts.push((rest, true));
        let plain = |text: &str| tokenizer.encode(text, false, false);
        let is_plain = |&&(text, of_template): &&(&str, bool)| {
            of_template || tokenizer.encode(text, false, true) == plain(text)
        };
        // Together, as tokens may cross the borders of parts; apart if a part must not be parsed as
        // the others are.
        if parts.iter().filter(is_plain).count() == parts.len() {
            let text: String = parts.iter().map(|&(text, _)| text).collect();
            return Ok(tokenizer.encode(&text, false, true));
        }
        Ok(parts
            .iter()
            .flat_map(|&(text, of_template)| tokenizer.encode(text, false, of_template))
            .collect())
    }

    /// The score of each pair, as [`Reranker::pair`] encodes it.
    ///
    /// # Errors
    /// If a pair has no tokens, more tokens than the model has positions, or a token outside the
    /// vocabulary; if the call is cancelled, or there is not enough memory.
    pub fn rank_tokens<T: AsRef<[u32]>>(&self, pairs: &[T]) -> Result<Vec<f32>, SessionError> {
        let model = self.embedder.engine().model();
        let (arch, h) = (model.arch(), model.hparams());
        let (Some(spec), Some(w)) = (&h.classifier, &model.weights().classifier) else {
            return Err(SessionError::NoClassifier);
        };
        let mut vectors = self.embedder.pooled(pairs)?;
        self.embedder.map(&mut vectors, |product, x| {
            let mut linear = |layer: &Linear, x: &mut Vec<f32>| {
                *x = product(&layer.w, x);
                if let Some(bias) = &layer.b {
                    arch.add(x, bias);
                }
            };
            if let Some(hidden) = &w.hidden {
                linear(hidden, x);
                match spec.activation {
                    ClassifierActivation::Tanh => x.iter_mut().for_each(|x| *x = x.tanh()),
                    ClassifierActivation::GeluErf => arch.gelu_erf(x),
                }
            }
            if let Some(norm) = &w.norm {
                let from = x.clone();
                match h.norm {
                    NormKind::Rms => arch.rms_norm(x, &from, &norm.w, h.norm_eps),
                    _ => arch.layer_norm(x, &from, &norm.w, &norm.b, h.norm_eps),
                }
            }
            if let Some(output) = &w.output {
                linear(output, x);
            }
            if spec.softmax {
                arch.softmax(x);
            }
        })?;
        Ok(vectors.iter().map(|scores| scores[0]).collect())
    }
}
