//! Model families: each maps the metadata of its architecture to [`Hparams`].

mod gemma;
mod granite;
mod llama;
mod olmo2;
mod phi;
mod qwen;
mod smollm3;

use super::hparams::{Hparams, Keys};
use crate::error::ModelError;

/// One architecture.
pub(crate) struct Family {
    /// `general.architecture`.
    pub(crate) arch: &'static str,
    /// Reads its hyper-parameters.
    pub(crate) hparams: fn(&Keys<'_>) -> Result<Hparams, ModelError>,
}

/// All architectures this build runs.
pub(crate) static FAMILIES: &[Family] = &[
    Family { arch: "llama", hparams: llama::hparams },
    Family { arch: "mistral", hparams: llama::hparams },
    Family { arch: "qwen2", hparams: qwen::qwen2 },
    Family { arch: "qwen2moe", hparams: qwen::qwen2moe },
    Family { arch: "qwen3", hparams: qwen::qwen3 },
    Family { arch: "qwen3moe", hparams: qwen::qwen3moe },
    Family { arch: "phi2", hparams: phi::phi2 },
    Family { arch: "phi3", hparams: phi::phi3 },
    Family { arch: "gemma2", hparams: gemma::gemma2 },
    Family { arch: "gemma3", hparams: gemma::gemma3 },
    Family { arch: "granite", hparams: granite::hparams },
    Family { arch: "olmo2", hparams: olmo2::hparams },
    Family { arch: "smollm3", hparams: smollm3::hparams },
];
