//! Decoding: from logits to tokens to text, several tokens per pass where that is faster; denoising.

pub(crate) mod answer;
pub(crate) mod denoise;
pub(crate) mod error;
pub(crate) mod generate;
pub(crate) mod output;
pub(crate) mod speculative;

pub use denoise::{DenoiseOptions, Denoiser, Order};
pub use error::DecodeError;
pub use generate::Prompt;
pub use output::Timings;
pub use speculative::{
    Draft, DraftStats, Drafter, ModelDrafter, MtpDrafter, NgramDrafter, RecentTexts, Speculation,
    TrainedDrafter,
};
