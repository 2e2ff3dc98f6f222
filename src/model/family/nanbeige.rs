//! Nanbeige 4.1: a llama whose layers run several times, with the last norm between two loops.

use crate::layers::hparams::Hparams;
use crate::model::ModelError;
use crate::model::family::llama;
use crate::model::keys::Keys;

/// Most layers of all loops together.
const MAX_LAYERS: usize = 1024;

pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = llama::hparams(keys)?;
    let n_loop = keys.opt_count("num_loops", MAX_LAYERS / h.n_layer)?;
    let unnormed = keys.opt_bool("skip_loop_final_norm")?;
    h.set_loops(n_loop.unwrap_or(1), !unnormed.unwrap_or(false));
    Ok(h)
}
