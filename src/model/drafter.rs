//! Models that draft for another: their files have no embeddings or no head, or no keys and values.

use crate::gguf::{Gguf, Metadata};
use crate::layers::attention::spec::AttnSpec;
use crate::layers::draft::spec::{DraftKind, DraftSpec};
use crate::layers::draft::weights::{DraftInput, DraftWeights};
use crate::layers::hparams::Hparams;
use crate::model::family::{DRAFTERS, DrafterFamily};
use crate::model::keys::{Keys, UnknownNames};
use crate::model::{Model, ModelError};
use crate::quant::DType;
use crate::tokenizer::Tokenizer;

/// A drafter that was trained for one model.
#[derive(Debug)]
pub(crate) struct DraftModel {
    pub(crate) gguf: Gguf,
    pub(crate) h: Hparams,
    pub(crate) spec: DraftSpec,
    pub(crate) weights: DraftWeights,
    pub(crate) tokenizer: Option<Tokenizer>,
    /// For each layer without keys and values, the target's layer that has them.
    pub(crate) sources: Vec<usize>,
    /// Values of the target's states, and number of its layers.
    pub(crate) n_target: usize,
    pub(crate) n_target_layer: usize,
}

impl DraftModel {
    /// The family of a file, if it is one of drafters.
    pub(crate) fn family(
        metadata: &Metadata,
    ) -> Result<Option<&'static DrafterFamily>, ModelError> {
        let arch = metadata.opt_str("general.architecture")?;
        Ok(DRAFTERS.iter().find(|family| arch == Some(family.arch)))
    }

    /// Opens a drafter for `target`; none if the file holds another kind of model.
    pub(crate) fn open(gguf: Gguf, target: &Model) -> Result<Option<DraftModel>, ModelError> {
        let Some(family) = DraftModel::family(gguf.metadata())? else {
            return Ok(None);
        };
        let of_target = target.hparams();
        let (metadata, tensors) = (gguf.metadata(), gguf.tensors());
        let keys = Keys::of_blocks(family.arch, metadata, tensors, of_target.n_vocab)?;
        let (h, spec) = (family.hparams)(&keys, of_target.n_embd)?;
        keys.none_ignored(&mut UnknownNames::default())?;
        check_inputs(&spec, of_target)?;
        let weights = DraftWeights::bind(&gguf, (&h, &spec), of_target.n_embd)?;
        let mut model = DraftModel {
            tokenizer: Tokenizer::opt_from_metadata(gguf.metadata())?,
            sources: sources(&h, &weights, of_target)?,
            n_target: of_target.n_embd,
            n_target_layer: of_target.n_layer,
            gguf,
            h,
            spec,
            weights,
        };
        model.balance_queries(target)?;
        model.check_ends(target)?;
        Ok(Some(model))
    }

    /// Divides queries for the target's keys by what these are multiplied by.
    fn balance_queries(&mut self, target: &Model) -> Result<(), ModelError> {
        let of_target = target.hparams();
        for (layer, &source) in self.weights.layers.iter_mut().zip(&self.sources) {
            if layer.kv.is_some() {
                continue;
            }
            let has_keys = |&i: &usize| {
                let attn = of_target.layers[i].attention();
                of_target.kv_layers[i] == source && attn.is_some_and(|attn| !attn.shares_kv)
            };
            let with_keys = (0..of_target.n_layer).find(has_keys);
            let attn = with_keys.and_then(|i| target.weights().layers[i].attn.as_ref());
            let Some(factors) = attn.and_then(|attn| attn.key_factors.as_ref()) else {
                continue;
            };
            let Some(norm) = layer.q_norm.as_mut().filter(|w| w.len() == factors.len()) else {
                return Err(ModelError::MissingTensor {
                    name: "attn_q_norm.weight".into(),
                });
            };
            norm.iter_mut()
                .zip(factors)
                .for_each(|(w, factor)| *w /= factor);
        }
        Ok(())
    }

    /// Whether embeddings of tokens, and the head, are its own or the target's, which have to fit.
    fn check_ends(&mut self, target: &Model) -> Result<(), ModelError> {
        let (n, n_target) = (self.h.n_embd, target.hparams().n_embd);
        let embeds = !matches!(self.weights.input, DraftInput::States { .. });
        let lacks = |what: &str| ModelError::Inconsistent {
            what: format!(
                "the drafter is {n} values wide and has no {what} of its own, the target is {n_target} wide"
            ),
        };
        if n != n_target {
            if embeds && self.weights.token_embd.is_none() {
                return Err(lacks("embeddings"));
            }
            let has_head = self.weights.output.is_some() || self.weights.token_embd.is_some();
            if !has_head {
                return Err(lacks("head"));
            }
        }
        if self.weights.tokens.is_some() && self.weights.output.is_none() {
            return Err(ModelError::MissingTensor {
                name: "output.weight".into(),
            });
        }
        // Products with the target's head take their room, too.
        let of_target = &target.weights().output.w;
        let shape: (DType, usize) = (of_target.dtype, of_target.n_in);
        if !self.weights.shapes.contains(&shape) {
            self.weights.shapes.push(shape);
        }
        Ok(())
    }
}

/// Refuses layers that the target does not have, or whose inputs are no residual stream.
fn check_inputs(spec: &DraftSpec, target: &Hparams) -> Result<(), ModelError> {
    let refuse = |what: String| Err(ModelError::Inconsistent { what });
    if let Some(layer) = spec.inputs.iter().find(|&&layer| layer > target.n_layer) {
        return refuse(format!(
            "the drafter reads layer {layer}, the target has {}",
            target.n_layer
        ));
    }
    let has_streams = target.hyper.is_some() || target.streams.is_some() || target.stacks.is_some();
    if !spec.inputs.is_empty() && has_streams {
        return refuse(format!(
            "the drafter reads the residual stream, {} has several",
            target.arch
        ));
    }
    if spec.kind == DraftKind::Assistant && target.attention().next().is_none() {
        return refuse("the drafter reads keys and values, the target has none".into());
    }
    Ok(())
}

/// The target's layers whose keys and values those of the drafter read: the last with a window, or
/// the last without.
fn sources(h: &Hparams, w: &DraftWeights, target: &Hparams) -> Result<Vec<usize>, ModelError> {
    let mut sources = Vec::new();
    for (i, layer) in w.layers.iter().enumerate() {
        if layer.kv.is_some() {
            sources.push(i);
            continue;
        }
        let fits = |other: usize| {
            let attn = target.layers[other].attention()?;
            let alike = attn.window.is_some() == layer.attn.window.is_some();
            (alike && !attn.shares_kv && attn.latent.is_none()).then_some((other, attn))
        };
        let found = (0..target.n_layer).rev().find_map(fits);
        let sizes = |of: &AttnSpec| (of.n_head_kv, of.head_dim, of.head_dim_v, of.window);
        match found {
            Some((source, attn)) if sizes(attn) == sizes(&layer.attn) => {
                sources.push(target.kv_layers[source]);
            }
            _ => {
                return Err(ModelError::Inconsistent {
                    what: format!(
                        "layer {i} of the drafter ({}) reads {} heads of {}, which no layer of the target has",
                        h.arch, layer.attn.n_head_kv, layer.attn.head_dim
                    ),
                });
            }
        }
    }
    Ok(sources)
}
