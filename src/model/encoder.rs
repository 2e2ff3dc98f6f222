//! The encoder of a file that has a decoder, too (T5): a model of its own, of the same file.

use crate::arch::Arch;
use crate::gguf::Gguf;
use crate::layers::hparams::Hparams;
use crate::model::keys::UnknownNames;
use crate::model::weights::Weights;
use crate::model::{Inner, Model, ModelError};
use crate::tokenizer::Tokenizer;
use std::sync::Arc;

/// What stands before the names of its tensors.
const PREFIX: &str = "enc.";

impl Hparams {
    /// The encoder before the model, if there is one: layers like the model's, whose tokens see
    /// the whole text.
    fn of_encoder(&self) -> Option<Hparams> {
        let spec = self.encoder?;
        let mut layer = self.layers.first()?.clone();
        layer.cross = false;
        if let Some(attn) = layer.attention_mut() {
            attn.causal = false;
        }
        Some(Hparams {
            n_layer: spec.n_layer,
            layers: vec![layer; spec.n_layer],
            kv_layers: (0..spec.n_layer).collect(),
            prefix: PREFIX,
            encoder: None,
            ..self.clone()
        })
    }
}

/// Binds the encoder of a model with these hyper-parameters; `unknown` decides what happens to
/// tensors of its own that it does not use.
pub(super) fn bind(
    gguf: &Gguf,
    h: &Hparams,
    tokenizer: Option<&Arc<Tokenizer>>,
    arch: Arch,
    unknown: &mut UnknownNames,
) -> Result<Option<Model>, ModelError> {
    let Some(hparams) = h.of_encoder() else {
        return Ok(None);
    };
    let mut all = UnknownNames::reporting();
    let weights = Weights::bind(gguf, &hparams, &mut all, &mut |_| true)?;
    for name in all.names.iter().filter(|name| name.starts_with(PREFIX)) {
        let (name, arch) = (name.clone(), h.arch.clone());
        unknown.found(&name.clone(), ModelError::UnknownTensor { name, arch })?;
    }
    let parts = Inner::part(gguf, hparams, weights, tokenizer.cloned(), arch);
    Ok(Some(Model(Arc::new(parts))))
}
