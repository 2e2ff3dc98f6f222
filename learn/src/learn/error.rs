//! Failures of learning and training.

use ruvllm::SessionError;
use ruvllm::gguf::GgufError;
use ruvllm::lora::AdapterError;
use ruvllm::session::GradientError;

/// Why learning, or a file of what was learnt, was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LearnError {
    /// The file itself is invalid, or could not be written.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A pass that learning required failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// What was learnt in inner layers was refused.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// An option is invalid.
    #[error("{option} is {value}, expected {expected}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        value: f64,
        /// The valid values.
        expected: String,
    },
    /// The file is not a saved learner.
    #[error("general.type is {found:?}, expected \"learned\": this file holds nothing learnt")]
    NotLearned {
        /// `general.type`; empty if it is missing.
        found: String,
    },
    /// The file is of another version.
    #[error(
        "what was learnt was saved in version {found}, this build reads {supported}: learn again, or use the build \
         that wrote it"
    )]
    Version {
        /// The file's.
        found: u32,
        /// This build's.
        supported: u32,
    },
    /// What was learnt belongs to another model.
    #[error(
        "this was learnt with another model (fingerprint {found:016x}, this one has {expected:016x})"
    )]
    OtherModel {
        /// Fingerprint of the model it was learnt with.
        found: u64,
        /// Fingerprint of this model.
        expected: u64,
    },
    /// A tensor is missing, or has a wrong shape or type.
    #[error("tensor {name:?} is {found}, expected {expected}: the file is damaged")]
    Tensor {
        /// The tensor.
        name: &'static str,
        /// Actual shape and type.
        found: String,
        /// Required shape and type.
        expected: String,
    },
    /// A tensor has values that cannot result from learning.
    #[error("tensor {name:?} holds {what}: the file is damaged")]
    Value {
        /// The tensor.
        name: &'static str,
        /// What is wrong.
        what: String,
    },
    /// The file is not a checkpoint of a training.
    #[error(
        "general.type is {found:?}, expected \"training\": this file is no checkpoint of a training"
    )]
    NotTraining {
        /// `general.type`; empty if it is missing.
        found: String,
    },
    /// A checkpoint was made with other examples, control text or options.
    #[error(
        "the checkpoint was made with other examples, control text or options: give the same to continue, or delete it \
         to begin anew"
    )]
    OtherTraining,
    /// An example cannot be trained on.
    #[error("example {index} {what}")]
    Example {
        /// Its index.
        index: usize,
        /// What is wrong.
        what: String,
    },
    /// Too few examples to train on.
    #[error("{n} examples are too few: at least {least} must be left to train on")]
    TooFewExamples {
        /// Examples given.
        n: usize,
        /// Least number.
        least: usize,
    },
    /// A loss or gradient is infinite or NaN.
    #[error("training diverged in step {step}: use a smaller rate")]
    Diverged {
        /// The step.
        step: usize,
    },
    /// The session has no learner.
    #[error("this session does not learn: give it a learner first")]
    NotLearning,
    /// There was no answer to rate.
    #[error("there is no answer to rate: nothing was generated since the last prompt or rating")]
    NoAnswer,
    /// A rating came before any text with which answers could be compared.
    #[error(
        "nothing to compare the answer with: calibrate with control text, or let some pages be observed first"
    )]
    NothingToCompare,
    /// A rating is infinite or NaN.
    #[error("the rating is {value}, expected a finite number")]
    Reward {
        /// Its value.
        value: f32,
    },
    /// There is nothing to export.
    #[error("nothing has been learnt yet")]
    NothingLearnt,
    /// What was learnt has no effect yet, so there is nothing to export.
    #[error(
        "what was learnt has no effect yet: text that came later did not speak for it, or the bound on forgetting \
         leaves it no room; let it read more, or calibrate"
    )]
    NoEffect,
    /// Too little text to calibrate or to measure with.
    #[error("a text of {n} tokens is too short: at least {least} are needed")]
    TooLittleText {
        /// Tokens given.
        n: usize,
        /// Least number of tokens.
        least: usize,
    },
}

impl From<GradientError> for LearnError {
    fn from(error: GradientError) -> LearnError {
        match error {
            GradientError::Session(error) => error.into(),
            GradientError::Adapter(error) => error.into(),
        }
    }
}
