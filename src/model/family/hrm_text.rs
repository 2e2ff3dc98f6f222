//! HRM-Text: two stacks of blocks that run in turn, gated attention, norms without weights.

use crate::layers::activation::spec::Activation;
use crate::layers::hparams::Hparams;
use crate::layers::norm::spec::NormKind;
use crate::layers::stacks::spec::StacksSpec;
use crate::model::ModelError;
use crate::model::keys::Keys;

/// HRM. `block_count` of its files counts the layers of all runs. Models made for prompts whose
/// tokens see each other both ways run causally, as in llama.cpp.
pub(super) fn hparams(keys: &Keys<'_>) -> Result<Hparams, ModelError> {
    let mut h = Hparams::llama(keys, NormKind::RmsPlain, keys.dense(Activation::SwiGlu)?)?;
    h.attention_mut().for_each(|attn| attn.gated = true);
    h.embd_scale = keys.positive("embedding_scale")?.unwrap_or(1.0);
    keys.ignore("hrm.prefix_lm");
    let stacks = StacksSpec {
        n_layer: keys.count("hrm.layers_per_stack", 1024)?,
        n_cycle: keys.count("hrm.h_cycles", 1024)?,
        n_first: keys.count("hrm.l_cycles", 1024)?,
    };
    if stacks.n_all() != Some(h.n_layer) {
        return Err(ModelError::Inconsistent {
            what: format!(
                "block_count {} is not hrm.layers_per_stack {} · hrm.h_cycles {} · (hrm.l_cycles {} + 1)",
                h.n_layer, stacks.n_layer, stacks.n_cycle, stacks.n_first
            ),
        });
    }
    h.stacks = Some(stacks);
    Ok(h)
}
