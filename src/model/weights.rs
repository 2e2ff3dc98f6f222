//! All weights of a model.

use crate::compute::weight::{Linear, Weight};
use crate::gguf::Gguf;
use crate::layers::altup::weights::AltUpEnds;
use crate::layers::classifier::Classifier;
use crate::layers::hyper::weights::Connection;
use crate::layers::layer::weights::Layer;
use crate::layers::mtp::MtpInput;
use crate::layers::norm::weights::Norm;
use crate::layers::per_layer_embedding::PerLayerInputs;
use crate::layers::rope::weights::RopeFactors;
use crate::layers::stacks::Stacks;
use crate::lora::TargetModule;
use crate::quant::DType;
use std::sync::Arc;

/// All weights of a model.
#[derive(Clone, Debug)]
pub(crate) struct Weights {
    pub(crate) token_embd: Weight,
    /// Of a block for multi-token prediction.
    pub(crate) mtp: Option<MtpInput>,
    /// What the head reads of several residual streams, if not their mean.
    pub(crate) hyper: Option<Connection>,
    /// What scores checkpoints of the residual stream for the head.
    pub(crate) residual_scores: Option<Vec<f32>>,
    pub(crate) alt_up: Option<AltUpEnds>,
    /// Weights for the vectors of all layers per token.
    pub(crate) per_layer: Option<PerLayerInputs>,
    /// Embedding of each position, added to those of tokens.
    pub(crate) position_embd: Option<Weight>,
    /// Embedding of the first token type, added to all embeddings.
    pub(crate) token_types: Option<Vec<f32>>,
    pub(crate) embd_norm: Option<Norm>,
    /// Of two stacks that run in turn.
    pub(crate) stacks: Option<Stacks>,
    pub(crate) layers: Vec<Layer>,
    pub(crate) output_norm: Option<Norm>,
    pub(crate) output: Linear,
    /// Matrices applied to pooled vectors, in this order.
    pub(crate) dense: Vec<Weight>,
    /// Head of a reranker.
    pub(crate) classifier: Option<Classifier>,
    pub(crate) rope_factors: RopeFactors,
    /// Every combination of format and row length among the matrices.
    pub(crate) shapes: Vec<(DType, usize)>,
    /// Matrices that adapters can change.
    pub(crate) sites: Arc<[TargetModule]>,
}

impl Weights {
    /// Frobenius norm, estimated from some rows, evenly spaced.
    pub(crate) fn site_norm(&self, gguf: &Gguf, site: &TargetModule) -> f32 {
        const ROWS: usize = 64;
        let tensor = gguf
            .tensor(&site.tensor)
            .unwrap_or(&gguf.tensors()[self.token_embd.tensor]);
        let (data, format) = (gguf.data(tensor), tensor.dtype.float_format());
        let (n, n_rows) = if site.is_embedding() {
            (site.n_out, site.n_in)
        } else {
            (site.n_in, site.n_out)
        };
        let row = n / format.block_elems * format.block_bytes;
        let first = site.expert.unwrap_or(0) * n_rows;
        let mut values = vec![0.0; n];
        let sampled = n_rows.min(ROWS);
        let squares = (0..sampled).map(|i| {
            let r = first + i * n_rows / sampled;
            (format.dequantize)(&data[r * row..][..row], &mut values);
            values
                .iter()
                .map(|&x| f64::from(x) * f64::from(x))
                .sum::<f64>()
        });
        (squares.sum::<f64>() * n_rows as f64 / sampled as f64).sqrt() as f32
    }
}
