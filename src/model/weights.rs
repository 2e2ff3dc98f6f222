//! A model's weights, bound by name with their shapes checked; the bytes stay in the file.

use super::hparams::{Hparams, NormKind, QkNorm, RopeScaling};
use crate::error::ModelError;
use crate::gguf::{Gguf, TensorInfo};
use crate::quant::DType;
use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// A matrix that an adapter can change: `W: (n_out, n_in)`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Site {
    /// Its tensor in the file. A head that shares the embedding table is called `output.weight` all the
    /// same.
    pub tensor: String,
    /// Which matrix of the tensor, if that holds one per expert.
    pub expert: Option<usize>,
    /// Width of its input; for the embedding table, whose inputs are tokens, their number.
    pub n_in: usize,
    /// Width of its output.
    pub n_out: usize,
}

impl Site {
    /// Its layer, if it is in one.
    pub fn layer(&self) -> Option<usize> {
        self.tensor.strip_prefix("blk.")?.split('.').next()?.parse().ok()
    }

    /// What it is in its layer or in the model: `attn_q`, `ffn_down_exps`, `output`, `token_embd`, …
    pub fn part(&self) -> &str {
        self.tensor.trim_end_matches(".weight").rsplit('.').next().unwrap_or_default()
    }

    /// Whether it is the embedding table, which is looked up instead of multiplied.
    pub fn is_embedding(&self) -> bool {
        self.tensor == TOKEN_EMBD
    }
}

const TOKEN_EMBD: &str = "token_embd.weight";

/// A matrix `W: (n_out, n_in)` of a file, stored row by row.
#[derive(Clone, Debug)]
pub(crate) struct Weight {
    pub(crate) dtype: DType,
    pub(crate) n_in: usize,
    pub(crate) n_out: usize,
    /// Its index in [`Weights::sites`].
    pub(crate) site: usize,
    /// Its first row among those of the site.
    pub(crate) first_row: usize,
    tensor: TensorInfo,
    bytes: Range<usize>,
}

impl Weight {
    /// Its rows, as they lie in the file.
    pub(crate) fn data<'g>(&self, gguf: &'g Gguf) -> &'g [u8] {
        &gguf.data(&self.tensor)[self.bytes.clone()]
    }

    /// Bytes of one row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.bytes.len() / self.n_out
    }

    /// The rows `rows` as a matrix of their own.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Weight {
        let row = self.row_bytes();
        let bytes = self.bytes.start + rows.start * row..self.bytes.start + rows.end * row;
        Weight { n_out: rows.len(), bytes, first_row: self.first_row + rows.start, ..self.clone() }
    }

    /// Matrix `e` of a stack of matrices of `n_out` rows, which is a site of its own.
    fn expert(&self, e: usize, n_out: usize) -> Weight {
        Weight { site: self.site + e, first_row: 0, ..self.rows(e * n_out..(e + 1) * n_out) }
    }
}

/// `W·x + b`.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    pub(crate) w: Weight,
    pub(crate) b: Option<Vec<f32>>,
}

impl Linear {
    fn rows(&self, rows: Range<usize>) -> Linear {
        Linear { w: self.w.rows(rows.clone()), b: self.b.as_ref().map(|b| b[rows].to_vec()) }
    }
}

/// Weights of a norm; `b` is empty for RMS norms.
#[derive(Clone, Debug)]
pub(crate) struct Norm {
    pub(crate) w: Vec<f32>,
    pub(crate) b: Vec<f32>,
}

/// Feed-forward weights; without `gate`, `down(act(up(x)))`.
#[derive(Clone, Debug)]
pub(crate) struct Ffn {
    pub(crate) gate: Option<Linear>,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

/// Mixture of experts: a router, the experts, and one that every token uses.
#[derive(Clone, Debug)]
pub(crate) struct Moe {
    pub(crate) router: Weight,
    pub(crate) experts: Vec<Ffn>,
    pub(crate) shared: Option<(Ffn, Weight)>,
}

/// What follows attention in a layer.
#[derive(Clone, Debug)]
pub(crate) enum FeedForward {
    Dense(Box<Ffn>),
    Moe(Box<Moe>),
}

/// One layer; an absent norm does nothing.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub(crate) attn_norm: Option<Norm>,
    pub(crate) wq: Linear,
    pub(crate) wk: Linear,
    pub(crate) wv: Linear,
    pub(crate) q_norm: Option<Vec<f32>>,
    pub(crate) k_norm: Option<Vec<f32>>,
    pub(crate) wo: Linear,
    pub(crate) post_attn_norm: Option<Norm>,
    pub(crate) ffn_norm: Option<Norm>,
    pub(crate) ffn: FeedForward,
    pub(crate) post_ffn_norm: Option<Norm>,
}

/// All weights of a model.
#[derive(Clone, Debug)]
pub(crate) struct Weights {
    pub(crate) token_embd: Weight,
    pub(crate) layers: Vec<Layer>,
    pub(crate) output_norm: Norm,
    pub(crate) output: Linear,
    /// Divisors of the rope frequencies for every context length.
    pub(crate) rope_factors: Option<Vec<f32>>,
    /// Divisors for contexts up to the original one, and beyond it.
    pub(crate) rope_factors_short_long: Option<(Vec<f32>, Vec<f32>)>,
    /// Every combination of format and row length among the matrices.
    pub(crate) shapes: Vec<(DType, usize)>,
    /// What adapters can change.
    pub(crate) sites: Arc<[Site]>,
}

/// Binds tensors by name and remembers which were used.
struct Binder<'a> {
    gguf: &'a Gguf,
    used: RefCell<HashSet<&'a str>>,
    shapes: RefCell<BTreeSet<(DType, usize)>>,
    sites: RefCell<Vec<Site>>,
}

impl<'a> Binder<'a> {
    fn find(&self, name: &str) -> Option<&'a TensorInfo> {
        let tensor = self.gguf.tensor(name)?;
        self.used.borrow_mut().insert(&tensor.name);
        Some(tensor)
    }

    fn shaped(&self, name: &str, expected: &[usize]) -> Result<Option<&'a TensorInfo>, ModelError> {
        let Some(tensor) = self.find(name) else { return Ok(None) };
        let expected: Vec<u64> = expected.iter().map(|&n| n as u64).collect();
        let significant = |dims: &[u64]| dims.len() - dims.iter().rev().take_while(|&&n| n == 1).count();
        if tensor.dims[..significant(&tensor.dims)] != expected[..significant(&expected)] {
            return Err(ModelError::TensorShape { name: name.to_owned(), found: tensor.dims.clone(), expected });
        }
        Ok(Some(tensor))
    }

    /// A matrix, `n_matrices` of them one after the other.
    fn opt_weight(
        &self,
        name: &str,
        n_in: usize,
        n_out: usize,
        n_matrices: usize,
    ) -> Result<Option<Weight>, ModelError> {
        let dims = [n_in, n_out, n_matrices];
        let Some(tensor) = self.shaped(name, &dims[..if n_matrices == 1 { 2 } else { 3 }])? else { return Ok(None) };
        if tensor.dtype.format().is_none() {
            return Err(ModelError::TensorType {
                name: name.to_owned(),
                found: tensor.dtype.to_string(),
                expected: "a weight format",
            });
        }
        self.shapes.borrow_mut().insert((tensor.dtype, n_in));
        let site = match name {
            TOKEN_EMBD => self.site(name, n_out, n_in, 1),
            _ => self.site(name, n_in, n_out, n_matrices),
        };
        Ok(Some(Weight {
            dtype: tensor.dtype,
            n_in,
            n_out: n_out * n_matrices,
            site,
            first_row: 0,
            tensor: tensor.clone(),
            bytes: 0..self.gguf.data(tensor).len(),
        }))
    }

    /// The index of the first of `n_matrices` new sites.
    fn site(&self, tensor: &str, n_in: usize, n_out: usize, n_matrices: usize) -> usize {
        let mut sites = self.sites.borrow_mut();
        let first = sites.len();
        sites.extend((0..n_matrices).map(|e| Site {
            tensor: tensor.to_owned(),
            expert: (n_matrices > 1).then_some(e),
            n_in,
            n_out,
        }));
        first
    }

    fn weight(&self, name: &str, n_in: usize, n_out: usize, n_matrices: usize) -> Result<Weight, ModelError> {
        self.opt_weight(name, n_in, n_out, n_matrices)?
            .ok_or_else(|| ModelError::MissingTensor { name: name.to_owned() })
    }

    fn opt_vector(&self, name: &str, n: usize) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(tensor) = self.shaped(name, &[n])? else { return Ok(None) };
        if !matches!(tensor.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(ModelError::TensorType {
                name: name.to_owned(),
                found: tensor.dtype.to_string(),
                expected: "F32, F16 or BF16",
            });
        }
        let mut values = vec![0.0; n];
        (tensor.dtype.float_format().dequantize)(self.gguf.data(tensor), &mut values);
        Ok(Some(values))
    }

    fn vector(&self, name: &str, n: usize) -> Result<Vec<f32>, ModelError> {
        self.opt_vector(name, n)?.ok_or_else(|| ModelError::MissingTensor { name: name.to_owned() })
    }

    fn opt_linear(&self, name: &str, n_in: usize, n_out: usize) -> Result<Option<Linear>, ModelError> {
        let Some(w) = self.opt_weight(&format!("{name}.weight"), n_in, n_out, 1)? else { return Ok(None) };
        Ok(Some(Linear { w, b: self.opt_vector(&format!("{name}.bias"), n_out)? }))
    }

    fn linear(&self, name: &str, n_in: usize, n_out: usize) -> Result<Linear, ModelError> {
        self.opt_linear(name, n_in, n_out)?.ok_or_else(|| ModelError::MissingTensor { name: format!("{name}.weight") })
    }

    fn opt_norm(&self, name: &str, h: &Hparams) -> Result<Option<Norm>, ModelError> {
        let Some(w) = self.opt_vector(&format!("{name}.weight"), h.n_embd)? else { return Ok(None) };
        let b = match h.norm {
            NormKind::Rms => Vec::new(),
            NormKind::Layer => self.vector(&format!("{name}.bias"), h.n_embd)?,
        };
        Ok(Some(Norm { w, b }))
    }
}

impl Weights {
    /// Binds every tensor that `h` asks for; `progress` hears the share done and may stop it.
    pub(crate) fn bind(gguf: &Gguf, h: &Hparams, progress: &mut dyn FnMut(f32) -> bool) -> Result<Weights, ModelError> {
        let b = Binder { gguf, used: RefCell::default(), shapes: RefCell::default(), sites: RefCell::default() };
        let token_embd = b.weight(TOKEN_EMBD, h.n_embd, h.n_vocab, 1)?;
        let output_norm = b
            .opt_norm("output_norm", h)?
            .ok_or_else(|| ModelError::MissingTensor { name: "output_norm.weight".into() })?;
        let output = match b.opt_linear("output", h.n_embd, h.n_vocab)? {
            Some(output) => output,
            None => {
                let site = b.site("output.weight", h.n_embd, h.n_vocab, 1);
                Linear { w: Weight { site, ..token_embd.clone() }, b: b.opt_vector("output.bias", h.n_vocab)? }
            }
        };
        let mut layers = Vec::with_capacity(h.n_layer);
        for i in 0..h.n_layer {
            layers.push(layer(&b, h, i)?);
            if !progress((i + 1) as f32 / h.n_layer as f32) {
                return Err(ModelError::Cancelled);
            }
        }
        let n_pairs = h.rope.n_dims / 2;
        let rope_factors = b.opt_vector("rope_freqs.weight", n_pairs)?;
        let short = b.opt_vector("rope_factors_short.weight", n_pairs)?;
        let long = b.opt_vector("rope_factors_long.weight", n_pairs)?;
        let rope_factors_short_long = match (short, long) {
            (Some(short), Some(long)) => Some((short, long)),
            (None, None) if h.rope.scaling == RopeScaling::Long => {
                return Err(ModelError::MissingTensor { name: "rope_factors_short.weight".into() });
            }
            (None, None) => None,
            (Some(_), None) => return Err(ModelError::MissingTensor { name: "rope_factors_long.weight".into() }),
            (None, Some(_)) => return Err(ModelError::MissingTensor { name: "rope_factors_short.weight".into() }),
        };
        let (used, shapes) = (b.used.into_inner(), b.shapes.into_inner().into_iter().collect());
        let sites = b.sites.into_inner().into();
        // Tables that other engines once stored and that follow from the hyper-parameters.
        let derived = |name: &str| name.ends_with("attn_rot_embd") || name.ends_with("rotary_emb.inv_freq");
        match gguf.tensors().iter().find(|t| !used.contains(t.name.as_str()) && !derived(&t.name)) {
            Some(t) => Err(ModelError::UnknownTensor { name: t.name.clone(), arch: h.arch.clone() }),
            None => Ok(Weights {
                token_embd,
                layers,
                output_norm,
                output,
                rope_factors,
                rope_factors_short_long,
                shapes,
                sites,
            }),
        }
    }
}

impl Weights {
    /// Estimated from some rows, evenly spaced.
    pub(crate) fn site_norm(&self, gguf: &Gguf, site: &Site) -> f32 {
        const ROWS: usize = 64;
        let tensor = gguf.tensor(&site.tensor).unwrap_or(&self.token_embd.tensor);
        let (data, format) = (gguf.data(tensor), tensor.dtype.float_format());
        let (n, n_rows) = if site.is_embedding() { (site.n_out, site.n_in) } else { (site.n_in, site.n_out) };
        let row = n / format.block_elems * format.block_bytes;
        let first = site.expert.unwrap_or(0) * n_rows;
        let mut values = vec![0.0; n];
        let sampled = n_rows.min(ROWS);
        let squares = (0..sampled).map(|i| {
            let r = first + i * n_rows / sampled;
            (format.dequantize)(&data[r * row..][..row], &mut values);
            values.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>()
        });
        (squares.sum::<f64>() * n_rows as f64 / sampled as f64).sqrt() as f32
    }
}

fn layer(b: &Binder<'_>, h: &Hparams, i: usize) -> Result<Layer, ModelError> {
    let name = |part: &str| format!("blk.{i}.{part}");
    let (n_q, n_k, n_v) = (h.n_head * h.head_dim, h.n_head_kv * h.head_dim, h.n_head_kv * h.head_dim_v);
    let (wq, wk, wv) = match b.opt_linear(&name("attn_qkv"), h.n_embd, n_q + n_k + n_v)? {
        Some(qkv) => (qkv.rows(0..n_q), qkv.rows(n_q..n_q + n_k), qkv.rows(n_q + n_k..n_q + n_k + n_v)),
        None => (
            b.linear(&name("attn_q"), h.n_embd, n_q)?,
            b.linear(&name("attn_k"), h.n_embd, n_k)?,
            b.linear(&name("attn_v"), h.n_embd, n_v)?,
        ),
    };
    let (q_norm, k_norm) = match h.qk_norm {
        QkNorm::None => (None, None),
        QkNorm::PerHead => (
            Some(b.vector(&name("attn_q_norm.weight"), h.head_dim)?),
            Some(b.vector(&name("attn_k_norm.weight"), h.head_dim)?),
        ),
        QkNorm::Full => {
            (Some(b.vector(&name("attn_q_norm.weight"), n_q)?), Some(b.vector(&name("attn_k_norm.weight"), n_k)?))
        }
    };
    let attn_norm = b.opt_norm(&name("attn_norm"), h)?;
    let post_attn_norm = b.opt_norm(&name("post_attention_norm"), h)?;
    let ffn_norm = b.opt_norm(&name("ffn_norm"), h)?;
    let post_ffn_norm = b.opt_norm(&name("post_ffw_norm"), h)?;
    if attn_norm.is_none() && post_attn_norm.is_none() {
        return Err(ModelError::MissingTensor { name: name("attn_norm.weight") });
    }
    if ffn_norm.is_none() && post_ffn_norm.is_none() && !h.parallel_residual {
        return Err(ModelError::MissingTensor { name: name("ffn_norm.weight") });
    }
    Ok(Layer {
        attn_norm,
        wq,
        wk,
        wv,
        q_norm,
        k_norm,
        wo: b.linear(&name("attn_output"), h.n_head * h.head_dim_v, h.n_embd)?,
        post_attn_norm,
        ffn_norm,
        ffn: feed_forward(b, h, &name)?,
        post_ffn_norm,
    })
}

fn feed_forward(b: &Binder<'_>, h: &Hparams, name: &dyn Fn(&str) -> String) -> Result<FeedForward, ModelError> {
    let Some(x) = h.experts else {
        let down = b.linear(&name("ffn_down"), h.n_ff, h.n_embd)?;
        let gate = b.opt_linear(&name("ffn_gate"), h.n_embd, h.n_ff)?;
        // Phi 3 stores gate and up as one matrix, under the name of the second.
        let fused = gate.is_none()
            && b.gguf.tensor(&name("ffn_up.weight")).is_some_and(|t| t.dims.get(1) == Some(&(2 * h.n_ff as u64)));
        let ffn = if fused {
            let both = b.linear(&name("ffn_up"), h.n_embd, 2 * h.n_ff)?;
            Ffn { gate: Some(both.rows(0..h.n_ff)), up: both.rows(h.n_ff..2 * h.n_ff), down }
        } else {
            Ffn { gate, up: b.linear(&name("ffn_up"), h.n_embd, h.n_ff)?, down }
        };
        return Ok(FeedForward::Dense(Box::new(ffn)));
    };
    let plain = |w: Weight| Linear { w, b: None };
    let router = b.weight(&name("ffn_gate_inp.weight"), h.n_embd, x.n_expert, 1)?;
    let gate = b.weight(&name("ffn_gate_exps.weight"), h.n_embd, h.n_ff, x.n_expert)?;
    let up = b.weight(&name("ffn_up_exps.weight"), h.n_embd, h.n_ff, x.n_expert)?;
    let down = b.weight(&name("ffn_down_exps.weight"), h.n_ff, h.n_embd, x.n_expert)?;
    let experts = (0..x.n_expert).map(|e| Ffn {
        gate: Some(plain(gate.expert(e, h.n_ff))),
        up: plain(up.expert(e, h.n_ff)),
        down: plain(down.expert(e, h.n_embd)),
    });
    let shared = match x.n_ff_shared {
        0 => None,
        n => Some((
            Ffn {
                gate: Some(b.linear(&name("ffn_gate_shexp"), h.n_embd, n)?),
                up: b.linear(&name("ffn_up_shexp"), h.n_embd, n)?,
                down: b.linear(&name("ffn_down_shexp"), n, h.n_embd)?,
            },
            b.weight(&name("ffn_gate_inp_shexp.weight"), h.n_embd, 1, 1)?,
        )),
    };
    Ok(FeedForward::Moe(Box::new(Moe { router, experts: experts.collect(), shared })))
}
