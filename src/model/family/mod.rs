//! Model families: each maps the metadata of its architecture to [`Hparams`], and says what tensors its files hold.

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
    /// What its files hold.
    pub(crate) layout: Layout,
}

/// The tensors of a family's files, where families differ. What is missing is an error, and so is what is there
/// besides. Biases that are not in `biased`, and one matrix for queries, keys and values, are up to the file, but
/// are in all layers then, or in none.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    /// Where norms are.
    pub(crate) norms: Norms,
    /// Where the gate of the feed-forward layer is.
    pub(crate) gate: Gate,
    /// The parts that always have a bias.
    pub(crate) biased: &'static [&'static str],
    /// Whether the head is a matrix of its own always. Otherwise the embedding table serves where there is none.
    pub(crate) own_head: bool,
}

/// Norms of attention and feed-forward layers.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Norms {
    /// Of their inputs.
    Before,
    /// Of their outputs.
    After,
    /// Of both.
    Both,
    /// Of the one input that they share.
    Shared,
}

/// Gate of a feed-forward layer.
#[derive(Clone, Copy)]
pub(crate) enum Gate {
    /// `ffn_gate`.
    Own,
    /// The first half of `ffn_up`.
    InUp,
    /// There is none.
    None,
}

/// A llama's, which most vary.
const LAYOUT: Layout = Layout { norms: Norms::Before, gate: Gate::Own, biased: &[], own_head: false };

impl Family {
    /// The family called `arch`.
    pub(crate) fn of(arch: &str) -> Result<&'static Family, ModelError> {
        FAMILIES.iter().find(|f| f.arch == arch).ok_or_else(|| ModelError::UnsupportedArchitecture {
            arch: arch.to_owned(),
            supported: FAMILIES.iter().map(|f| f.arch).collect(),
        })
    }
}

/// All architectures this build runs.
pub(crate) static FAMILIES: &[Family] = &[
    Family { arch: "llama", hparams: llama::hparams, layout: LAYOUT },
    Family { arch: "mistral", hparams: llama::hparams, layout: LAYOUT },
    Family { arch: "qwen2", hparams: qwen::qwen2, layout: qwen::QWEN2 },
    Family { arch: "qwen2moe", hparams: qwen::qwen2moe, layout: qwen::QWEN2MOE },
    Family { arch: "qwen3", hparams: qwen::qwen3, layout: LAYOUT },
    Family { arch: "qwen3moe", hparams: qwen::qwen3moe, layout: LAYOUT },
    Family { arch: "phi2", hparams: phi::phi2, layout: phi::PHI2 },
    Family { arch: "phi3", hparams: phi::phi3, layout: phi::PHI3 },
    Family { arch: "gemma2", hparams: gemma::gemma2, layout: gemma::LAYOUT },
    Family { arch: "gemma3", hparams: gemma::gemma3, layout: gemma::LAYOUT },
    Family { arch: "granite", hparams: granite::hparams, layout: LAYOUT },
    Family { arch: "olmo2", hparams: olmo2::hparams, layout: olmo2::LAYOUT },
    Family { arch: "smollm3", hparams: smollm3::hparams, layout: LAYOUT },
];
