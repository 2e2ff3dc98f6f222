//! A model's weights, bound by name with shapes checked; the bytes stay in the file.

mod binder;
mod recurrent;

use crate::gguf::{Gguf, TensorInfo};
use crate::model::ModelError;
use crate::model::hparams::{Hparams, StreamsSpec};
use crate::model::keys::UnknownNames;
use crate::model::rope::RopeScaling;
use crate::model::spec::{
    Activation, AttnSpec, Biases, ClassifierSpec, DenseSpec, FfnSpec, LatentSpec, LayerSpec, Mixer,
    MoeSpec, Norms, OutputScale, QkNorm,
};
use crate::model::weights::binder::Binder;
use crate::quant::DType;
use std::cell::RefCell;
use std::ops::{Deref, Range};
use std::sync::Arc;

pub(crate) use recurrent::{
    ChannelMix, Conv, Delta, DeltaInput, Mamba, Mamba2, Recurrent, ShortConv, TimeMix, TimeMix6,
    TimeMix7, TimeMixWeights,
};

/// A matrix that an adapter can change: `W: (n_out, n_in)`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Site {
    /// Name of its tensor in the file; a head that shares the embedding table is called
    /// `output.weight`, too.
    pub tensor: Arc<str>,
    /// Index of the matrix in the tensor, if that holds one per expert.
    pub expert: Option<usize>,
    /// Input width; for the embedding table, whose inputs are tokens, the number of tokens.
    pub n_in: usize,
    /// Output width.
    pub n_out: usize,
}

impl Site {
    /// Index of its layer, if it is in one.
    pub fn layer(&self) -> Option<usize> {
        in_layer(&self.tensor).map(|(layer, _)| layer)
    }

    /// Name without layer and suffix: `attn_q`, `ffn_down_exps`, `output`, `token_embd`, …
    pub fn part(&self) -> &str {
        self.tensor
            .trim_end_matches(".weight")
            .rsplit('.')
            .next()
            .unwrap_or_default()
    }

    /// Whether it is the embedding table, which is looked up instead of multiplied.
    pub fn is_embedding(&self) -> bool {
        &*self.tensor == TOKEN_EMBD
    }
}

/// Divisor that marks the frequencies of pairs that are not rotated.
const UNROTATED: f32 = 1e30;

pub(super) const TOKEN_EMBD: &str = "token_embd.weight";

/// Splits a tensor's name into layer and rest, if it is in a layer.
pub(super) fn in_layer(name: &str) -> Option<(usize, &str)> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, part))
}

/// Matrix `W: (n_out, n_in)` of a file, stored row by row.
#[derive(Clone, Debug)]
pub(crate) struct Weight {
    pub(crate) dtype: DType,
    pub(crate) n_in: usize,
    pub(crate) n_out: usize,
    /// Its index in [`Weights::sites`].
    pub(crate) site: usize,
    /// Its first row among those of the site.
    pub(crate) first_row: usize,
    /// Factor on its products.
    pub(crate) scale: f32,
    /// That of each matrix of a stack.
    scales: Option<Arc<[f32]>>,
    /// The index of its tensor in the file.
    tensor: usize,
    bytes: Range<usize>,
}

impl Weight {
    /// Bytes of its rows, as stored in the file.
    pub(crate) fn data<'g>(&self, gguf: &'g Gguf) -> &'g [u8] {
        &gguf.data(&gguf.tensors()[self.tensor])[self.bytes.clone()]
    }

    /// The index of its tensor in the file, and its first byte there.
    #[cfg(feature = "metal")]
    pub(crate) fn place(&self) -> (usize, usize) {
        (self.tensor, self.bytes.start)
    }

    /// The index of its tensor in the file, and of its matrix there.
    pub(crate) fn place_in_stack(&self, gguf: &Gguf) -> (usize, usize) {
        let n_rows = gguf.tensors()[self.tensor].dims.get(1).copied();
        let matrix_bytes = self.row_bytes() * n_rows.map_or(1, |n| n.max(1) as usize);
        (self.tensor, self.bytes.start / matrix_bytes)
    }

    /// Bytes of one row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.bytes.len() / self.n_out
    }

    /// Some rows as a matrix of their own.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Weight {
        let row = self.row_bytes();
        let bytes = self.bytes.start + rows.start * row..self.bytes.start + rows.end * row;
        Weight {
            n_out: rows.len(),
            bytes,
            first_row: self.first_row + rows.start,
            ..self.clone()
        }
    }

    /// Matrix `e` of a stack of `n`, which is a site of its own.
    pub(crate) fn matrix(&self, e: usize, n: usize) -> Weight {
        let n_out = self.n_out / n;
        let scale = self.scales.as_ref().map_or(self.scale, |scales| scales[e]);
        Weight {
            site: self.site + e,
            first_row: 0,
            scale,
            scales: None,
            ..self.rows(e * n_out..(e + 1) * n_out)
        }
    }
}

/// Matrix with a bias: `W·x + b`.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    pub(crate) w: Weight,
    pub(crate) b: Option<Bias>,
}

impl Linear {
    fn rows(&self, rows: Range<usize>) -> Linear {
        Linear {
            w: self.w.rows(rows.clone()),
            b: self.b.as_ref().map(|b| b.rows(rows)),
        }
    }

    /// Matrix `e` of a stack of `n`, with its bias.
    fn matrix(&self, e: usize, n: usize) -> Linear {
        let n_out = self.w.n_out / n;
        Linear {
            w: self.w.matrix(e, n),
            b: self.b.as_ref().map(|b| b.rows(e * n_out..(e + 1) * n_out)),
        }
    }
}

/// Bias of a product. Parts of a matrix share the values.
#[derive(Clone, Debug)]
pub(crate) struct Bias {
    values: Arc<[f32]>,
    rows: Range<usize>,
}

impl Bias {
    fn new(values: Vec<f32>) -> Bias {
        Bias {
            rows: 0..values.len(),
            values: values.into(),
        }
    }

    fn rows(&self, rows: Range<usize>) -> Bias {
        let rows = self.rows.start + rows.start..self.rows.start + rows.end;
        Bias {
            values: Arc::clone(&self.values),
            rows,
        }
    }
}

impl Deref for Bias {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values[self.rows.clone()]
    }
}

/// Weights of a norm; `b` is empty for RMS norms.
#[derive(Clone, Debug)]
pub(crate) struct Norm {
    pub(crate) w: Vec<f32>,
    pub(crate) b: Vec<f32>,
}

/// Weights of a dense feed-forward layer or of one expert.
#[derive(Clone, Debug)]
pub(crate) struct Ffn {
    pub(crate) activation: Activation,
    /// See [`DenseSpec::sparsity`].
    pub(crate) sparsity: Option<f32>,
    pub(crate) gate: Option<Linear>,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

/// Mixture of experts: a router, the experts, and a shared one that every token uses.
#[derive(Clone, Debug)]
pub(crate) struct Moe {
    pub(crate) spec: MoeSpec,
    pub(crate) router: Linear,
    /// Norm of the router's input, if it has one of its own.
    pub(crate) router_norm: Option<Norm>,
    /// Makes the vectors that experts read, and those of the residual stream of what they write.
    pub(crate) latent: Option<(Linear, Linear)>,
    /// Factors on the outputs of experts.
    pub(crate) output_scales: Option<Vec<f32>>,
    /// Bias added to the experts' scores for the selection only.
    pub(crate) bias: Option<Vec<f32>>,
    /// Matrices of all experts, one after the other; `up` contains the gates, too, if they are
    /// fused.
    pub(crate) stacked: Ffn,
    pub(crate) shared: Option<Ffn>,
    /// Gate of the shared expert, whose output is multiplied by the sigmoid of this matrix's
    /// product.
    pub(crate) shared_gate: Option<Weight>,
}

impl Moe {
    /// Expert `e`.
    pub(crate) fn expert(&self, e: usize) -> Ffn {
        let one = |all: &Linear| all.matrix(e, self.spec.n_expert);
        let Ffn {
            activation,
            sparsity,
            gate,
            up,
            down,
        } = &self.stacked;
        let (gate, up) = if self.spec.fused {
            let (both, n_ff) = (one(up), self.spec.n_ff);
            (Some(both.rows(0..n_ff)), both.rows(n_ff..2 * n_ff))
        } else {
            (gate.as_ref().map(one), one(up))
        };
        Ffn {
            activation: *activation,
            sparsity: *sparsity,
            gate,
            up,
            down: one(down),
        }
    }
}

/// Feed-forward part of a layer.
#[derive(Clone, Debug)]
pub(crate) enum FeedForward {
    Dense(Box<Ffn>),
    Moe(Box<Moe>),
    Both(Box<Both>),
    None,
}

/// A dense layer beside a mixture.
#[derive(Clone, Debug)]
pub(crate) struct Both {
    pub(crate) dense: Ffn,
    /// Norm of the dense layer's output.
    pub(crate) post_dense_norm: Norm,
    /// Norms of the mixture's input and output.
    pub(crate) moe_norm: Norm,
    pub(crate) moe: Moe,
    pub(crate) post_moe_norm: Norm,
}

/// Weights of attention.
#[derive(Clone, Debug)]
pub(crate) struct Attn {
    pub(crate) wq: Linear,
    /// In a layer that reads another's keys and values, these are the other's.
    pub(crate) wk: Linear,
    pub(crate) wv: Linear,
    pub(crate) q_norm: Option<Vec<f32>>,
    pub(crate) k_norm: Option<Vec<f32>>,
    pub(crate) wo: Linear,
    /// Attention sinks: a score per head.
    pub(crate) sinks: Option<Vec<f32>>,
    /// Gate of the output of all heads, which is multiplied by the sigmoid of this matrix's
    /// product.
    pub(crate) gate: Option<Linear>,
    /// With latent attention, `wk` computes the latent and the rotated part of keys. `wv` holds
    /// the matrices of all heads from the latent to keys and values or, in the absorbed form,
    /// to values only.
    pub(crate) latent: Option<Box<Latent>>,
}

/// Weights of latent attention besides those in [`Attn`].
#[derive(Clone, Debug)]
pub(crate) struct Latent {
    /// Low-rank matrix before `wq`, and its norm; if absent, `wq` reads the layer's input.
    pub(crate) q_a: Option<(Linear, Vec<f32>)>,
    /// Norm of the latent.
    pub(crate) kv_norm: Vec<f32>,
    /// From a head's queries to the latent, one matrix per head, in the absorbed form.
    pub(crate) k_b: Option<Weight>,
}

/// Weights of one layer; an absent norm is skipped.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub(crate) attn_norm: Option<Norm>,
    pub(crate) attn: Option<Attn>,
    pub(crate) recurrent: Option<Recurrent>,
    pub(crate) post_attn_norm: Option<Norm>,
    pub(crate) ffn_norm: Option<Norm>,
    pub(crate) ffn: FeedForward,
    pub(crate) post_ffn_norm: Option<Norm>,
    pub(crate) per_layer: Option<PerLayer>,
    pub(crate) alt_up: Option<Box<AltUp>>,
    /// Factor on the residual stream after the layer.
    pub(crate) output_scale: Option<f32>,
}

/// Weights that compute each layer's vector per token: `(norm(proj·x) + table)/√2` from the
/// embeddings `x`.
#[derive(Clone, Debug)]
pub(crate) struct PerLayerInputs {
    /// Embeddings per token, `n_layer·n` values.
    pub(crate) table: Weight,
    pub(crate) proj: Weight,
    /// Norm of the `n` values of a layer.
    pub(crate) norm: Vec<f32>,
}

/// Weights that add such a vector in a layer: `norm(proj·(gelu(gate·x)·vector))`.
#[derive(Clone, Debug)]
pub(crate) struct PerLayer {
    pub(crate) gate: Linear,
    pub(crate) proj: Linear,
    pub(crate) norm: Norm,
}

/// Weights of a reranker's head, as far as its specification has them.
#[derive(Clone, Debug)]
pub(crate) struct Classifier {
    pub(crate) hidden: Option<Linear>,
    pub(crate) norm: Option<Norm>,
    pub(crate) output: Option<Linear>,
}

/// Weights between the residual streams of a layer, see `layers/altup.rs`, and of its side path.
#[derive(Clone, Debug)]
pub(crate) struct AltUp {
    pub(crate) norm: Norm,
    pub(crate) router: Linear,
    /// `(n_stream², n_stream)` and `(n_stream, n_stream)`.
    pub(crate) predict: Vec<f32>,
    pub(crate) correct: Vec<f32>,
    /// Factors on the corrected first stream, `(n_embd)`.
    pub(crate) scale: Vec<f32>,
    pub(crate) laurel: Laurel,
}

/// A learned residual of low rank, `x + norm(R·L·x)` (arXiv 2411.07501).
#[derive(Clone, Debug)]
pub(crate) struct Laurel {
    pub(crate) left: Linear,
    pub(crate) right: Linear,
    pub(crate) norm: Norm,
}

/// Matrices that make residual streams from embeddings, and that bring them together, for all but
/// the first.
#[derive(Clone, Debug)]
pub(crate) struct AltUpEnds {
    pub(crate) project: Vec<Weight>,
    pub(crate) unproject: Vec<Weight>,
}

/// Weights that make the inputs of a block for multi-token prediction: `proj·[norm(embedding);
/// norm(state)]`.
#[derive(Clone, Debug)]
pub(crate) struct MtpInput {
    pub(crate) embd_norm: Norm,
    pub(crate) state_norm: Norm,
    pub(crate) proj: Linear,
}

/// All weights of a model.
#[derive(Clone, Debug)]
pub(crate) struct Weights {
    pub(crate) token_embd: Weight,
    /// Of a block for multi-token prediction.
    pub(crate) mtp: Option<MtpInput>,
    pub(crate) alt_up: Option<AltUpEnds>,
    /// Weights for the vectors of all layers per token.
    pub(crate) per_layer: Option<PerLayerInputs>,
    /// Embedding of each position, added to those of tokens.
    pub(crate) position_embd: Option<Weight>,
    /// Embedding of the first token type, added to all embeddings.
    pub(crate) token_types: Option<Vec<f32>>,
    pub(crate) embd_norm: Option<Norm>,
    pub(crate) layers: Vec<Layer>,
    pub(crate) output_norm: Option<Norm>,
    pub(crate) output: Linear,
    /// Matrices applied to pooled vectors, in this order.
    pub(crate) dense: Vec<Weight>,
    /// Head of a reranker.
    pub(crate) classifier: Option<Classifier>,
    /// Divisors of the rope frequencies, for every context length.
    pub(crate) rope_factors: Option<Vec<f32>>,
    /// Divisors of the rope frequencies for contexts up to the original length, and for longer
    /// ones.
    pub(crate) rope_factors_short_long: Option<(Vec<f32>, Vec<f32>)>,
    /// Every combination of format and row length among the matrices.
    pub(crate) shapes: Vec<(DType, usize)>,
    /// Matrices that adapters can change.
    pub(crate) sites: Arc<[Site]>,
}

impl Weights {
    /// Binds every tensor that `h` requires; `unknown` decides what happens to others, `progress`
    /// is told the share done and may cancel.
    pub(crate) fn bind(
        gguf: &Gguf,
        h: &Hparams,
        unknown: &mut UnknownNames,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Weights, ModelError> {
        let b = Binder {
            gguf,
            used: RefCell::default(),
            shapes: RefCell::default(),
            sites: RefCell::default(),
        };
        let token_embd = b.weight(TOKEN_EMBD, h.n_embd, h.n_vocab, 1)?;
        let position_embd = h
            .learned_positions
            .then(|| b.table("position_embd.weight", h.n_embd, h.n_ctx_train));
        let position_embd = position_embd.transpose()?;
        let embd_norm = h
            .embd_norm
            .then(|| b.norm("token_embd_norm", h))
            .transpose()?;
        let per_layer = match h.per_layer_embd {
            Some(n) => Some(PerLayerInputs {
                table: b.table("per_layer_token_embd.weight", h.n_layer * n, h.n_vocab)?,
                proj: b.weight("per_layer_model_proj.weight", h.n_embd, h.n_layer * n, 1)?,
                norm: b.vector("per_layer_proj_norm.weight", n)?,
            }),
            None => None,
        };
        let streams = |name: &str, n: usize| {
            let all = b.weight(name, h.n_embd, h.n_embd, n)?;
            Ok::<_, ModelError>((0..n).map(|i| all.matrix(i, n)).collect())
        };
        let alt_up = match h.streams {
            Some(spec) => Some(AltUpEnds {
                project: streams("altup_proj.weight", spec.n_stream - 1)?,
                unproject: streams("altup_unembd_proj.weight", spec.n_stream - 1)?,
            }),
            None => None,
        };
        let token_types = h
            .token_types
            .then(|| b.first_row("token_types.weight", h.n_embd))
            .transpose()?;
        // LFM2's files call it by the name of another, NeoBERT's by that of an encoder's.
        let mut names = ["output_norm", "enc.output_norm", "token_embd_norm"].into_iter();
        let is_there = |name: &&str| b.has(&format!("{name}.weight"));
        let output_norm = names
            .find(is_there)
            .filter(|_| !h.embd_norm)
            .unwrap_or("output_norm");
        let output_norm = h.final_norm.then(|| b.norm(output_norm, h)).transpose()?;
        let output = if b.has("output.weight") {
            b.linear("output", h.n_embd, h.n_vocab, h.head_bias)?
        } else {
            let site = b.site("output.weight", h.n_embd, h.n_vocab, 1);
            Linear {
                w: Weight {
                    site,
                    ..token_embd.clone()
                },
                b: b.opt_vector("output.bias", h.n_vocab)?.map(Bias::new),
            }
        };
        let mut layers = Vec::with_capacity(h.n_layer);
        for (i, spec) in h.layers.iter().enumerate() {
            let source = layers
                .get(h.kv_layers[i])
                .and_then(|layer: &Layer| layer.attn.as_ref());
            layers.push(layer(&b, h, spec, i, source)?);
            if !progress((i + 1) as f32 / h.n_layer as f32) {
                return Err(ModelError::Cancelled);
            }
        }
        let mut dense = Vec::new();
        for (i, &(n_in, n_out)) in h.dense.iter().enumerate() {
            dense.push(b.table(&format!("dense_{}.weight", i + 2), n_in, n_out)?);
        }
        let classifier = |spec: &ClassifierSpec| {
            let n_in = spec.n_hidden.unwrap_or(h.n_embd);
            Ok(Classifier {
                hidden: spec
                    .n_hidden
                    .map(|n| b.linear("cls", h.n_embd, n, false))
                    .transpose()?,
                norm: spec.norm.then(|| b.norm("cls.norm", h)).transpose()?,
                output: spec
                    .n_label
                    .map(|n| b.linear("cls.output", n_in, n, false))
                    .transpose()?,
            })
        };
        let classifier = h
            .classifier
            .as_ref()
            .map(|spec| b.fixed(|_| classifier(spec)))
            .transpose()?;
        let rope_factors = |name: &str| match h.ropes.first() {
            Some(rope) => b.rope_factors(name, rope.n_dims / 2),
            None => Ok(None),
        };
        let factors = rope_factors("rope_freqs.weight")?;
        let short = rope_factors("rope_factors_short.weight")?;
        let long = rope_factors("rope_factors_long.weight")?;
        let rope_factors_short_long = match (short, long) {
            (Some(short), Some(long)) => Some((short, long)),
            (None, None)
                if h.ropes
                    .first()
                    .is_some_and(|rope| rope.scaling == RopeScaling::Long) =>
            {
                return Err(ModelError::MissingTensor {
                    name: "rope_factors_short.weight".into(),
                });
            }
            (None, None) => None,
            (Some(_), None) => {
                return Err(ModelError::MissingTensor {
                    name: "rope_factors_long.weight".into(),
                });
            }
            (None, Some(_)) => {
                return Err(ModelError::MissingTensor {
                    name: "rope_factors_short.weight".into(),
                });
            }
        };
        b.none_ignored(h, unknown)?;
        b.uniform(h)?;
        Ok(Weights {
            token_embd,
            mtp: None,
            alt_up,
            per_layer,
            position_embd,
            token_types,
            embd_norm,
            layers,
            output_norm,
            output,
            dense,
            classifier,
            rope_factors: factors,
            rope_factors_short_long,
            shapes: b.shapes.into_inner().into_iter().collect(),
            sites: b.sites.into_inner().into(),
        })
    }
}

impl Weights {
    /// Binds block `i` of the file, whose specification is `h`: what it lacks it shares with the
    /// model. Nobody adapts it, so that it has no sites.
    pub(super) fn bind_mtp(
        gguf: &Gguf,
        h: &Hparams,
        i: usize,
        model: &Weights,
    ) -> Result<Weights, ModelError> {
        let b = Binder {
            gguf,
            used: RefCell::default(),
            shapes: RefCell::default(),
            sites: RefCell::default(),
        };
        let name = |part: &str| format!("blk.{i}.nextn.{part}");
        let matrix =
            |part: &str| b.opt_weight(&name(&format!("{part}.weight")), h.n_embd, h.n_vocab, 1);
        let has_norm = b.has(&name("shared_head_norm.weight"));
        let output_norm = has_norm
            .then(|| b.norm(&name("shared_head_norm"), h))
            .transpose()?;
        let mtp = MtpInput {
            embd_norm: b.norm(&name("enorm"), h)?,
            state_norm: b.norm(&name("hnorm"), h)?,
            proj: b.linear(&name("eh_proj"), 2 * h.n_embd, h.n_embd, false)?,
        };
        let layers = h
            .layers
            .iter()
            .map(|spec| layer(&b, h, spec, i, None))
            .collect::<Result<_, _>>()?;
        let (token_embd, output) = (matrix("embed_tokens")?, matrix("shared_head_head")?);
        let is_left = |t: &&TensorInfo| {
            in_layer(&t.name).is_some_and(|(block, _)| block == i)
                && !b.used.borrow().contains(t.name.as_str())
        };
        if let Some(t) = gguf.tensors().iter().find(is_left) {
            return Err(ModelError::UnknownTensor {
                name: t.name.clone(),
                arch: h.arch.clone(),
            });
        }
        let output = output.map_or_else(|| model.output.clone(), |w| Linear { w, b: None });
        b.shapes
            .borrow_mut()
            .insert((output.w.dtype, output.w.n_in));
        Ok(Weights {
            token_embd: token_embd.unwrap_or_else(|| model.token_embd.clone()),
            mtp: Some(mtp),
            layers,
            output_norm: output_norm.or_else(|| model.output_norm.clone()),
            output,
            shapes: b.shapes.into_inner().into_iter().collect(),
            sites: [].into(),
            rope_factors: model.rope_factors.clone(),
            rope_factors_short_long: model.rope_factors_short_long.clone(),
            // The families with such blocks have nothing of this.
            alt_up: None,
            per_layer: None,
            position_embd: None,
            token_types: None,
            embd_norm: None,
            dense: Vec::new(),
            classifier: None,
        })
    }

    /// Frobenius norm, estimated from some rows, evenly spaced.
    pub(crate) fn site_norm(&self, gguf: &Gguf, site: &Site) -> f32 {
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

fn layer(
    b: &Binder<'_>,
    h: &Hparams,
    spec: &LayerSpec,
    i: usize,
    source: Option<&Attn>,
) -> Result<Layer, ModelError> {
    let name = |part: &str| format!("blk.{}.{part}", i / h.n_part);
    let (has_mixer, has_ffn) = (spec.mixer != Mixer::None, spec.ffn != FfnSpec::None);
    let norm = |part: &str, is_there: bool, places: &[Norms]| {
        (is_there && places.contains(&spec.norms))
            .then(|| b.norm(&name(part), h))
            .transpose()
    };
    // Some files name the norm before the feed-forward layer after the attention that precedes it.
    // In Falcon files the norm that both branches share is the feed-forward layer's, if
    // attention has one of its own.
    let (mut attn_norm, mut ffn_norm) = ("attn_norm", "ffn_norm");
    let (mut post_attn_norm, mut post_ffn_norm) = ("post_attention_norm", "post_ffw_norm");
    match spec.norms {
        Norms::Residual => {
            (post_attn_norm, post_ffn_norm) = ("attn_output_norm", "layer_output_norm")
        }
        Norms::Before if !has_mixer => ffn_norm = attn_norm,
        Norms::Before if !i.is_multiple_of(h.n_part) => attn_norm = "attn_norm_2",
        Norms::Before => {
            let names = ["ffn_norm", "post_attention_norm", "attn_output_norm"];
            ffn_norm = names
                .into_iter()
                .find(|part| b.has(&name(&format!("{part}.weight"))))
                .unwrap_or(ffn_norm);
        }
        Norms::Parallel if b.has(&name("attn_norm_2.weight")) => {
            (attn_norm, ffn_norm) = ("attn_norm_2", "attn_norm")
        }
        _ => {}
    }
    let attn = spec
        .attention()
        .map(|attn| attention(b, h.n_embd, (attn, source), spec.biases, &name));
    let recurrent = spec
        .recurrent()
        .map(|recurrent| recurrent::bind(b, h.n_embd, recurrent, &name));
    Ok(Layer {
        attn_norm: norm(
            attn_norm,
            has_mixer,
            &[Norms::Before, Norms::Both, Norms::Shared, Norms::Parallel],
        )?,
        attn: attn.transpose()?,
        recurrent: recurrent.transpose()?,
        post_attn_norm: norm(
            post_attn_norm,
            has_mixer,
            &[Norms::After, Norms::Both, Norms::Residual],
        )?,
        ffn_norm: norm(
            ffn_norm,
            has_ffn,
            &[
                Norms::Before,
                Norms::BeforeFfn,
                Norms::Both,
                Norms::Parallel,
            ],
        )?,
        ffn: feed_forward(b, h, spec, &name)?,
        post_ffn_norm: norm(
            post_ffn_norm,
            has_ffn,
            &[Norms::After, Norms::Both, Norms::Residual],
        )?,
        per_layer: h
            .per_layer_embd
            .map(|n| per_layer(b, h, n, &name))
            .transpose()?,
        alt_up: h
            .streams
            .map(|spec| alt_up(b, h, spec, &name))
            .transpose()?
            .map(Box::new),
        output_scale: match spec.output_scale {
            OutputScale::None => None,
            OutputScale::OfFile => Some(b.vector(&name("layer_output_scale.weight"), 1)?[0]),
            OutputScale::Half => Some(0.5),
        },
    })
}

fn alt_up(
    b: &Binder<'_>,
    h: &Hparams,
    StreamsSpec {
        n_stream: n,
        laurel_rank: rank,
    }: StreamsSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<AltUp, ModelError> {
    let table = |part: &str, n_out: usize| {
        let name = name(part);
        b.values(&name, &[n, n_out])?
            .ok_or(ModelError::MissingTensor { name })
    };
    Ok(AltUp {
        norm: b.norm(&name("altup_router_norm"), h)?,
        router: b.linear(&name("altup_router"), h.n_embd, n, false)?,
        predict: table("altup_predict_coef.weight", n * n)?,
        correct: table("altup_correct_coef.weight", n)?,
        scale: b.vector(&name("altup_correct_scale.weight"), h.n_embd)?,
        laurel: Laurel {
            left: b.linear(&name("laurel_l"), h.n_embd, rank, false)?,
            right: b.linear(&name("laurel_r"), rank, h.n_embd, false)?,
            norm: b.norm(&name("laurel_post_norm"), h)?,
        },
    })
}

fn per_layer(
    b: &Binder<'_>,
    h: &Hparams,
    n: usize,
    name: &dyn Fn(&str) -> String,
) -> Result<PerLayer, ModelError> {
    Ok(PerLayer {
        gate: b.linear(&name("inp_gate"), h.n_embd, n, false)?,
        proj: b.linear(&name("proj"), n, h.n_embd, false)?,
        norm: b.norm(&name("post_norm"), h)?,
    })
}

fn attention(
    b: &Binder<'_>,
    n_embd: usize,
    (spec, source): (&AttnSpec, Option<&Attn>),
    biases: Biases,
    name: &dyn Fn(&str) -> String,
) -> Result<Attn, ModelError> {
    let biased = biases != Biases::Optional;
    if let Some(latent) = &spec.latent {
        return latent_attention(b, n_embd, spec, latent, name);
    }
    let (n_q, n_k, n_v) = (
        spec.n_q() * if spec.gate_in_q { 2 } else { 1 },
        spec.n_k(),
        spec.n_v(),
    );
    let (wq, wk, wv) = if b.has(&name("attn_qkv.weight")) {
        let qkv = b.linear(&name("attn_qkv"), n_embd, n_q + n_k + n_v, biased)?;
        (
            qkv.rows(0..n_q),
            qkv.rows(n_q..n_q + n_k),
            qkv.rows(n_q + n_k..n_q + n_k + n_v),
        )
    } else {
        let wq = b.linear(&name("attn_q"), n_embd, n_q, biased)?;
        match source {
            Some(source) if spec.shares_kv => {
                // Gemma 3n's files have some of their own all the same.
                ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"]
                    .iter()
                    .for_each(|part| b.skip(&name(part)));
                (wq, source.wk.clone(), source.wv.clone())
            }
            _ => {
                let wk = b.linear(&name("attn_k"), n_embd, n_k, biased)?;
                let wv = match spec.keys_as_values {
                    true => wk.clone(),
                    false => b.linear(&name("attn_v"), n_embd, n_v, biased)?,
                };
                (wq, wk, wv)
            }
        }
    };
    let norm = |part: &str, n: usize| {
        let width = match spec.qk_norm {
            None => return Ok(None),
            Some(QkNorm::PlainRotated) => return Ok(Some(vec![1.0; spec.head_dim])),
            Some(QkNorm::PerHead | QkNorm::PerHeadRotated) => spec.head_dim,
            Some(QkNorm::Full) => n,
            Some(QkNorm::LayerByHead) => {
                let values = b.values(&name(part), &[spec.head_dim, n / spec.head_dim])?;
                return values
                    .map(Some)
                    .ok_or_else(|| ModelError::MissingTensor { name: name(part) });
            }
        };
        b.vector(&name(part), width).map(Some)
    };
    Ok(Attn {
        wq,
        wk,
        wv,
        q_norm: norm("attn_q_norm.weight", spec.n_q())?,
        k_norm: if spec.shares_kv {
            None
        } else {
            norm("attn_k_norm.weight", n_k)?
        },
        wo: b.linear(
            &name("attn_output"),
            spec.n_out(),
            n_embd,
            matches!(biases, Biases::All | Biases::Everywhere),
        )?,
        sinks: spec
            .sinks
            .then(|| b.vector(&name("attn_sinks.weight"), spec.n_head))
            .transpose()?,
        gate: (spec.gated && !spec.gate_in_q)
            .then(|| b.linear(&name("attn_gate"), n_embd, spec.n_out(), false))
            .transpose()?,
        latent: None,
    })
}

fn latent_attention(
    b: &Binder<'_>,
    n_embd: usize,
    spec: &AttnSpec,
    latent: &LatentSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<Attn, ModelError> {
    let &LatentSpec {
        q_rank,
        kv_rank,
        n_plain,
        n_rot,
        head_dim_v,
        absorbed,
    } = latent;
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, false);
    let n_q = spec.n_head * latent.head_dim();
    let (q_a, wq) = match q_rank {
        Some(rank) => {
            let norm = b.vector(&name("attn_q_a_norm.weight"), rank)?;
            (
                Some((linear("attn_q_a", n_embd, rank)?, norm)),
                linear("attn_q_b", rank, n_q)?,
            )
        }
        None => (None, linear("attn_q", n_embd, n_q)?),
    };
    let wv = if absorbed {
        b.stack(&name("attn_v_b"), kv_rank, head_dim_v, spec.n_head, false)?
    } else {
        linear("attn_kv_b", kv_rank, spec.n_head * (n_plain + head_dim_v))?
    };
    let k_b = absorbed.then(|| b.weight(&name("attn_k_b.weight"), n_plain, kv_rank, spec.n_head));
    Ok(Attn {
        wq,
        wk: linear("attn_kv_a_mqa", n_embd, kv_rank + n_rot)?,
        wv,
        q_norm: None,
        k_norm: None,
        wo: linear("attn_output", spec.n_mixed(), n_embd)?,
        sinks: None,
        gate: None,
        latent: Some(Box::new(Latent {
            q_a,
            kv_norm: b.vector(&name("attn_kv_a_norm.weight"), kv_rank)?,
            k_b: k_b.transpose()?,
        })),
    })
}

fn feed_forward(
    b: &Binder<'_>,
    h: &Hparams,
    spec: &LayerSpec,
    name: &dyn Fn(&str) -> String,
) -> Result<FeedForward, ModelError> {
    Ok(match &spec.ffn {
        FfnSpec::None => FeedForward::None,
        FfnSpec::Dense(ffn) => FeedForward::Dense(Box::new(dense(b, h.n_embd, (spec, ffn), name)?)),
        FfnSpec::Moe(moe) => FeedForward::Moe(Box::new(mixture(b, h, (spec, moe), name)?)),
        FfnSpec::Both(ffn, moe) => FeedForward::Both(Box::new(Both {
            dense: dense(b, h.n_embd, (spec, ffn), name)?,
            post_dense_norm: b.norm(&name("post_ffw_norm_1"), h)?,
            moe_norm: b.norm(&name("pre_ffw_norm_2"), h)?,
            moe: mixture(b, h, (spec, moe), name)?,
            post_moe_norm: b.norm(&name("post_ffw_norm_2"), h)?,
        })),
    })
}

fn dense(
    b: &Binder<'_>,
    n_embd: usize,
    (spec, ffn): (&LayerSpec, &DenseSpec),
    name: &dyn Fn(&str) -> String,
) -> Result<Ffn, ModelError> {
    let biased = matches!(spec.biases, Biases::All | Biases::Everywhere);
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, biased);
    let down = linear("ffn_down", ffn.n_ff, n_embd)?;
    let (gate, up) = if ffn.fused {
        let both = linear("ffn_up", n_embd, 2 * ffn.n_ff)?;
        (
            Some(both.rows(0..ffn.n_ff)),
            both.rows(ffn.n_ff..2 * ffn.n_ff),
        )
    } else {
        let gate = ffn
            .activation
            .is_gated()
            .then(|| linear("ffn_gate", n_embd, ffn.n_ff));
        (gate.transpose()?, linear("ffn_up", n_embd, ffn.n_ff)?)
    };
    Ok(Ffn {
        activation: ffn.activation,
        sparsity: ffn.sparsity,
        gate,
        up,
        down,
    })
}

fn mixture(
    b: &Binder<'_>,
    h: &Hparams,
    (spec, x): (&LayerSpec, &MoeSpec),
    name: &dyn Fn(&str) -> String,
) -> Result<Moe, ModelError> {
    let n_embd = h.n_embd;
    let activation = x.activation;
    let biased = spec.biases == Biases::Everywhere;
    let stack = |part: &str, n_in: usize, n_out: usize| {
        b.stack(&name(part), n_in, n_out, x.n_expert, biased)
    };
    // For other mixtures it is not known whether biases are added.
    let router = if biased {
        b.linear(&name("ffn_gate_inp"), n_embd, x.n_expert, true)?
    } else {
        Linear {
            w: b.weight(&name("ffn_gate_inp.weight"), n_embd, x.n_expert, 1)?,
            b: None,
        }
    };
    let bias = name("exp_probs_b.bias");
    let bias = if b.has(&bias) {
        bias
    } else {
        name("exp_probs_b")
    };
    let bias = x.bias.then(|| b.vector(&bias, x.n_expert)).transpose()?;
    let width = x.latent.unwrap_or(n_embd);
    let (gate, up) = if x.fused {
        (None, stack("ffn_gate_up_exps", width, 2 * x.n_ff)?)
    } else {
        let gate = activation
            .is_gated()
            .then(|| stack("ffn_gate_exps", width, x.n_ff));
        (gate.transpose()?, stack("ffn_up_exps", width, x.n_ff)?)
    };
    let stacked = Ffn {
        activation,
        sparsity: None,
        gate,
        up,
        down: stack("ffn_down_exps", x.n_ff, width)?,
    };
    let linear = |part: &str, n_in: usize, n_out: usize| b.linear(&name(part), n_in, n_out, false);
    let latent = match x.latent {
        None => None,
        Some(n) => Some((
            linear("ffn_latent_down", n_embd, n)?,
            linear("ffn_latent_up", n, n_embd)?,
        )),
    };
    let (shared, shared_gate) = match x.shared {
        None => (None, None),
        Some(shared) => {
            let ffn = Ffn {
                activation,
                sparsity: None,
                gate: activation
                    .is_gated()
                    .then(|| linear("ffn_gate_shexp", n_embd, shared.n_ff))
                    .transpose()?,
                up: linear("ffn_up_shexp", n_embd, shared.n_ff)?,
                down: linear("ffn_down_shexp", shared.n_ff, n_embd)?,
            };
            let gate = shared
                .gated
                .then(|| b.weight(&name("ffn_gate_inp_shexp.weight"), n_embd, 1, 1));
            (Some(ffn), gate.transpose()?)
        }
    };
    // Gemma 4 divides by the root of the width in addition.
    let scales = x
        .router_norm
        .then(|| b.vector(&name("ffn_gate_inp.scale"), n_embd))
        .transpose()?;
    let router_norm = scales.map(|w| {
        let width = (n_embd as f32).sqrt();
        Norm {
            w: w.iter().map(|w| w / width).collect(),
            b: Vec::new(),
        }
    });
    // Those of NVFP4 experts are factors of the matrices already.
    let output_scales = x.output_scales && stacked.down.w.scales.is_none();
    let output_scales = output_scales
        .then(|| b.vector(&name("ffn_down_exps.scale"), x.n_expert))
        .transpose()?;
    Ok(Moe {
        spec: x.clone(),
        router,
        router_norm,
        latent,
        output_scales,
        bias,
        stacked,
        shared,
        shared_gate,
    })
}
