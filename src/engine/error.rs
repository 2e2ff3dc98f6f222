//! Failures of running models.

use crate::arch::KvType;
use crate::compute::ComputeError;
use crate::gpu::GpuError;
use crate::kv::KvError;
use crate::model::ModelError;
use std::path::PathBuf;

/// Why a session call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The context is full.
    #[error("the context holds {n_ctx} tokens, {n_past} are used, {n_new} more do not fit")]
    ContextFull {
        /// Size of the context.
        n_ctx: usize,
        /// Tokens in it.
        n_past: usize,
        /// Tokens that were to be added.
        n_new: usize,
    },
    /// A text with images cannot be treated so.
    #[error("{what} is not possible with a text that has images{instead}")]
    HasImages {
        /// What was asked for.
        what: &'static str,
        /// What to do.
        instead: &'static str,
    },
    /// No token was given, but at least one is required.
    #[error("no tokens were given")]
    NoTokens,
    /// A token is not in the vocabulary.
    #[error("token {token} is outside the vocabulary of {n_vocab}")]
    TokenOutOfRange {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// A position is after the end of the session.
    #[error("cannot rewind to position {position}: the session is at {n_past}")]
    RewindAhead {
        /// Requested position.
        position: usize,
        /// Position of the session.
        n_past: usize,
    },
    /// The cancel token was set.
    #[error("cancelled")]
    Cancelled,
    /// Not enough memory.
    #[error(
        "no memory for {what} of {bytes} bytes; use a smaller context, or compute fewer tokens at a time"
    )]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// Bytes requested.
        bytes: u64,
    },
    /// Keys and values could not be stored.
    #[error(transparent)]
    Kv(KvError),
    /// A context does not fit into the memory limit that the model was opened with.
    #[error("a context of {n_ctx} tokens takes {need} bytes with the weights, the memory limit is {limit}; {}", fitting(.fits))]
    MemoryLimit {
        /// Tokens of the context asked for.
        n_ctx: usize,
        /// Bytes it takes, with weights, buffers and all.
        need: u64,
        /// The limit.
        limit: u64,
        /// A context that fits, if there is one, and its precision of keys and of values.
        fits: Option<(usize, KvType, KvType)>,
    },
    /// A drafter's weights are beyond the memory that the model was opened with.
    #[error(
        "the drafter's weights take {need} bytes, and {left} are left of the memory limit of {limit}; leave the drafter out (-md), or raise the limit"
    )]
    DrafterMemory {
        /// Bytes of its weights.
        need: u64,
        /// Bytes that are left.
        left: u64,
        /// The limit.
        limit: u64,
    },
    /// A full context cannot be shifted.
    #[error(
        "there is no context shift with {what}; leave it out (--context-shift), and use a larger context"
    )]
    NoShift {
        /// What it does not go with.
        what: &'static str,
    },
    /// Precision by age requires half precision for new keys and values.
    #[error(
        "kv_tiers begin with f16 keys and values, not with {k} and {v}; leave those types out (-ctk, -ctv)"
    )]
    TiersNeedF16 {
        /// Requested type of keys.
        k: KvType,
        /// Requested type of values.
        v: KvType,
    },
    /// A session option is invalid.
    #[error("{option} is {value}, expected {expected}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        value: usize,
        /// The valid values.
        expected: String,
    },
    /// The system could not start threads.
    #[error("cannot start {n_threads} threads: {error}")]
    Threads {
        /// Number of threads requested.
        n_threads: usize,
        /// The system's error.
        error: String,
    },
    /// The folder of the prefix cache cannot be used.
    #[error("{}: {error}; the prefix cache needs a folder it can read and write", path.display())]
    PrefixFolder {
        /// The folder.
        path: PathBuf,
        /// The system's error.
        error: String,
    },
    /// A sequence was given to the engine of another model.
    #[error("the sequence belongs to another model than the engine")]
    OtherModel,
    /// The model has no tokenizer, so text cannot be used with it.
    #[error("this file has no tokenizer; use token ids")]
    NoTokenizer,
    /// A model that is to draft has another vocabulary.
    #[error(
        "the draft model has another vocabulary: token {token} is {found:?}, and {expected:?} in the model that it is to \
         draft for; use one of the same family"
    )]
    DraftVocabulary {
        /// The first token that differs.
        token: u32,
        /// Its text in the draft model, if there is such a token.
        found: Option<String>,
        /// Its text in the other model.
        expected: Option<String>,
    },
    /// A file that is to draft is invalid, or was made for another model.
    #[error("cannot draft with this file: {0}; give one that was trained for this model (-md)")]
    Drafter(ModelError),
    /// The model cannot draft by itself.
    #[error("the model has no block for multi-token prediction that can draft{}", why.as_ref().map_or_else(String::new, |why| format!(": {why}")))]
    NoMtp {
        /// What is wrong with the block that its file has, if it has one.
        why: Option<String>,
    },
    /// The model is bidirectional, so it cannot continue a text.
    #[error(
        "the model is an encoder: it makes vectors of whole texts (Model::embedder, ruvllm embed) and generates none"
    )]
    Encoder,
    /// The model has no encoder that could read a text.
    #[error("the model has no encoder beside a decoder: a text is read by Session::prefill")]
    NoEncoder,
    /// The model goes on with what its encoder has read, and it has read nothing.
    #[error("the model's encoder has read nothing; give it a text with session.cache().encode(…)")]
    NotEncoded,
    /// The model denoises whole texts, so it cannot continue one.
    #[error(
        "the model denoises whole texts (decode::Denoiser) and continues none: a session, which keeps what came before, \
         is of no use to it"
    )]
    Denoises,
    /// The model does not denoise.
    #[error("the model does not denoise: it continues texts (Model::session)")]
    DoesNotDenoise,
    /// The model denoises, but its file does not name the mask token.
    #[error(
        "the file does not say which token masks open places: set tokenizer.ggml.mask_token_id"
    )]
    NoMask,
    /// The model has no head that scores pairs of texts.
    #[error(
        "the model scores no pairs: its file has no pooling_type 4 (rank); take a reranker, or compare vectors"
    )]
    NoClassifier,
    /// The model has a part through which gradients are not implemented.
    #[error("there are no gradients of {what}; adapt another model, or let the head alone learn")]
    NoGradient {
        /// The part.
        what: &'static str,
    },
    /// The device that computes the engine's passes does not support this.
    #[error("{device} does without {what}; open the model with Device::Cpu")]
    NotOnDevice {
        /// Name of the device.
        device: String,
        /// The requested feature.
        what: &'static str,
    },
    /// The GPU failed, or cannot compute this model.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

fn fitting(fits: &Option<(usize, KvType, KvType)>) -> String {
    match fits {
        Some((n_ctx, k, v)) => {
            format!(
                "one of {n_ctx} fits with {k} keys and {v} values (-c {n_ctx} -ctk {k} -ctv {v})"
            )
        }
        None => "none fits: use a smaller model".into(),
    }
}

impl From<ComputeError> for SessionError {
    fn from(error: ComputeError) -> SessionError {
        match error {
            ComputeError::Cancelled => SessionError::Cancelled,
            ComputeError::OutOfMemory { what, bytes } => SessionError::OutOfMemory { what, bytes },
            ComputeError::Kv(error) => error.into(),
        }
    }
}

impl From<KvError> for SessionError {
    fn from(error: KvError) -> SessionError {
        match error {
            KvError::OutOfMemory { what, bytes } => SessionError::OutOfMemory { what, bytes },
            KvError::Device { message } => GpuError::Lost { message }.into(),
            error => SessionError::Kv(error),
        }
    }
}
