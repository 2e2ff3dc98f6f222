//! Finds tensors by name, and checks their shapes.

use crate::compute::weight::{Bias, Linear, Weight};
use crate::gguf::{Gguf, TensorInfo};
use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::LayerSpec;
use crate::layers::norm::spec::NormKind;
use crate::layers::norm::weights::Norm;
use crate::lora::{TOKEN_EMBD, TargetModule, in_layer};
use crate::model::ModelError;
use crate::model::keys::UnknownNames;
use crate::quant::DType;
use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

/// Biases of scores by distance.
pub(super) const RELATIVE: &str = "attn_rel_b.weight";
/// Divisor that marks the frequencies of pairs that are not rotated.
const UNROTATED: f32 = 1e30;

/// Binds tensors by name and remembers which were used.
pub(super) struct Binder<'a> {
    pub(super) gguf: &'a Gguf,
    pub(super) used: RefCell<HashSet<&'a str>>,
    pub(super) shapes: RefCell<BTreeSet<(DType, usize)>>,
    pub(super) sites: RefCell<Vec<TargetModule>>,
}

impl<'a> Binder<'a> {
    pub(super) fn new(gguf: &'a Gguf) -> Binder<'a> {
        Binder {
            gguf,
            used: RefCell::default(),
            shapes: RefCell::default(),
            sites: RefCell::default(),
        }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.gguf.tensor(name).is_some()
    }

    /// Finds a tensor and checks its shape; returns its index, too.
    pub(super) fn shaped(
        &self,
        name: &str,
        expected: &[usize],
    ) -> Result<Option<(usize, &'a TensorInfo)>, ModelError> {
        let Some(index) = self.gguf.header().position(name) else {
            return Ok(None);
        };
        let tensor = &self.gguf.tensors()[index];
        self.used.borrow_mut().insert(&tensor.name);
        let expected: Vec<u64> = expected.iter().map(|&n| n as u64).collect();
        let significant =
            |dims: &[u64]| dims.len() - dims.iter().rev().take_while(|&&n| n == 1).count();
        if tensor.dims[..significant(&tensor.dims)] != expected[..significant(&expected)] {
            return Err(ModelError::TensorShape {
                name: name.to_owned(),
                found: tensor.dims.clone(),
                expected,
            });
        }
        Ok(Some((index, tensor)))
    }

    /// Binds a matrix, or `n_matrices` of them one after the other.
    pub(super) fn opt_weight(
        &self,
        name: &str,
        n_in: usize,
        n_out: usize,
        n_matrices: usize,
    ) -> Result<Option<Weight>, ModelError> {
        let dims = [n_in, n_out, n_matrices];
        let shape = &dims[..if n_matrices == 1 { 2 } else { 3 }];
        let Some((index, tensor)) = self.shaped(name, shape)? else {
            return Ok(None);
        };
        if tensor.dtype.format().is_none() {
            return Err(ModelError::TensorType {
                name: name.to_owned(),
                found: tensor.dtype.to_string(),
                expected: "a weight format",
            });
        }
        self.shapes.borrow_mut().insert((tensor.dtype, n_in));
        let scales = self.scales(name, tensor, n_matrices)?;
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
            scale: scales
                .as_ref()
                .filter(|_| n_matrices == 1)
                .map_or(1.0, |scales| scales[0]),
            scales: scales.filter(|_| n_matrices > 1).map(Arc::from),
            tensor: index,
            bytes: 0..self.gguf.data(tensor).len(),
        }))
    }

    /// The factors of NVFP4 matrices in a layer, in a tensor of their own, or the one factor of
    /// another matrix (BitNet's ternary ones); those of their inputs, beside them, are for engines
    /// that round activations to NVFP4, too.
    pub(super) fn scales(
        &self,
        name: &str,
        tensor: &TensorInfo,
        n_matrices: usize,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        // Tables, which are looked up and not multiplied, are outside of layers.
        let Some(name) = name
            .strip_suffix(".weight")
            .filter(|name| in_layer(name).is_some())
        else {
            return Ok(None);
        };
        if tensor.dtype != DType::NVFP4 {
            let scale = format!("{name}.scale");
            let is_one = |t: &TensorInfo| n_matrices == 1 && t.n_elems() == 1;
            return match self.gguf.tensor(&scale).is_some_and(is_one) {
                true => self.values(&scale, &[1]),
                false => Ok(None),
            };
        }
        self.skip(&format!("{name}.input_scale"));
        self.values(&format!("{name}.scale"), &[n_matrices])
    }

    /// Registers `n_matrices` new sites; returns the index of the first.
    pub(super) fn site(&self, tensor: &str, n_in: usize, n_out: usize, n_matrices: usize) -> usize {
        let mut sites = self.sites.borrow_mut();
        let first = sites.len();
        let tensor: Arc<str> = tensor.into();
        sites.extend((0..n_matrices).map(|e| TargetModule {
            tensor: Arc::clone(&tensor),
            expert: (n_matrices > 1).then_some(e),
            n_in,
            n_out,
        }));
        first
    }

    /// Binds a matrix that no adapter changes: rows that are looked up, or layers after the model.
    pub(super) fn table(&self, name: &str, n: usize, n_rows: usize) -> Result<Weight, ModelError> {
        self.fixed(|b| b.weight(name, n, n_rows, 1))
    }

    /// What `bind` binds, without sites.
    pub(super) fn fixed<T>(
        &self,
        bind: impl FnOnce(&Self) -> Result<T, ModelError>,
    ) -> Result<T, ModelError> {
        let n_sites = self.sites.borrow().len();
        let bound = bind(self)?;
        self.sites.borrow_mut().truncate(n_sites);
        Ok(bound)
    }

    pub(super) fn weight(
        &self,
        name: &str,
        n_in: usize,
        n_out: usize,
        n_matrices: usize,
    ) -> Result<Weight, ModelError> {
        self.opt_weight(name, n_in, n_out, n_matrices)?
            .ok_or_else(|| ModelError::MissingTensor {
                name: name.to_owned(),
            })
    }

    pub(super) fn opt_vector(&self, name: &str, n: usize) -> Result<Option<Vec<f32>>, ModelError> {
        self.values(name, &[n])
    }

    /// The first row of a table of vectors.
    pub(super) fn first_row(&self, name: &str, n: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self
            .gguf
            .tensor(name)
            .ok_or_else(|| ModelError::MissingTensor {
                name: name.to_owned(),
            })?;
        let n_rows = tensor.dims.get(1).map_or(1, |&n| n.min(1 << 16) as usize);
        let mut table = self.values(name, &[n, n_rows])?.unwrap_or_default();
        table.truncate(n);
        Ok(table)
    }

    /// Values of a tensor that is not a matrix of the model.
    pub(super) fn values(
        &self,
        name: &str,
        dims: &[usize],
    ) -> Result<Option<Vec<f32>>, ModelError> {
        let Some((_, tensor)) = self.shaped(name, dims)? else {
            return Ok(None);
        };
        if !matches!(tensor.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(ModelError::TensorType {
                name: name.to_owned(),
                found: tensor.dtype.to_string(),
                expected: "F32, F16 or BF16",
            });
        }
        let mut values = vec![0.0; dims.iter().product()];
        (tensor.dtype.float_format().dequantize)(self.gguf.data(tensor), &mut values);
        Ok(Some(values))
    }

    /// A table of numbers below `end`, `(n_rows, n)`.
    pub(super) fn indices(
        &self,
        name: &str,
        (n, n_rows): (usize, usize),
        end: usize,
    ) -> Result<Vec<u32>, ModelError> {
        let found = self.shaped(name, &[n, n_rows])?;
        let (_, tensor) = found.ok_or_else(|| ModelError::MissingTensor {
            name: name.to_owned(),
        })?;
        if tensor.dtype != DType::I32 {
            return Err(ModelError::TensorType {
                name: name.to_owned(),
                found: tensor.dtype.to_string(),
                expected: "I32",
            });
        }
        let numbers = self.gguf.data(tensor).chunks_exact(4);
        let numbers = numbers.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let numbers: Vec<u32> = numbers.collect();
        match numbers.iter().position(|&i| i as usize >= end) {
            Some(index) => Err(ModelError::TensorValue {
                name: name.to_owned(),
                index,
                value: numbers[index] as f32,
                expected: "numbers of experts",
            }),
            None => Ok(numbers),
        }
    }

    pub(super) fn vector(&self, name: &str, n: usize) -> Result<Vec<f32>, ModelError> {
        self.opt_vector(name, n)?
            .ok_or_else(|| ModelError::MissingTensor {
                name: name.to_owned(),
            })
    }

    /// Counts a tensor as used that the model has no use for.
    pub(super) fn skip(&self, name: &str) {
        self.used
            .borrow_mut()
            .extend(self.gguf.tensor(name).map(|t| &*t.name));
    }

    /// Binds a matrix and its bias, which must be there if `biased`.
    pub(super) fn linear(
        &self,
        name: &str,
        n_in: usize,
        n_out: usize,
        biased: bool,
    ) -> Result<Linear, ModelError> {
        let w = self.weight(&format!("{name}.weight"), n_in, n_out, 1)?;
        let b = self.opt_vector(&format!("{name}.bias"), n_out)?;
        if biased && b.is_none() {
            return Err(ModelError::MissingTensor {
                name: format!("{name}.bias"),
            });
        }
        Ok(Linear {
            w,
            b: b.map(Bias::new),
        })
    }

    /// Binds `n` stacked matrices and their biases, which must be there if `biased`.
    pub(super) fn stack(
        &self,
        name: &str,
        n_in: usize,
        n_out: usize,
        n: usize,
        biased: bool,
    ) -> Result<Linear, ModelError> {
        let w = self.weight(&format!("{name}.weight"), n_in, n_out, n)?;
        let bias = format!("{name}.bias");
        let b = match biased {
            true => Some(
                self.values(&bias, &[n_out, n])?
                    .ok_or(ModelError::MissingTensor { name: bias })?,
            ),
            false => None,
        };
        Ok(Linear {
            w,
            b: b.map(Bias::new),
        })
    }

    pub(super) fn norm(&self, name: &str, h: &Hparams) -> Result<Norm, ModelError> {
        // Falcon-H1's files leave the suffix out.
        if self.has(name) {
            return Ok(Norm {
                w: self.vector(name, h.n_embd)?,
                b: Vec::new(),
            });
        }
        if matches!(h.norm, NormKind::LayerPlain | NormKind::RmsPlain) {
            return Ok(Norm::plain(h.n_embd));
        }
        let w = self.vector(&format!("{name}.weight"), h.n_embd)?;
        let b = match h.norm {
            NormKind::Rms | NormKind::RmsPlain => Vec::new(),
            NormKind::LayerPlain | NormKind::LayerNoBias => vec![0.0; h.n_embd],
            NormKind::Layer => self.vector(&format!("{name}.bias"), h.n_embd)?,
        };
        Ok(Norm { w, b })
    }

    /// Divisors of rope frequencies, refused where their size would make angles NaN or infinite.
    pub(super) fn rope_factors(
        &self,
        name: &str,
        n: usize,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        let factors = self.opt_vector(name, n)?;
        match factors
            .iter()
            .flatten()
            .enumerate()
            .find(|(_, x)| !(1e-6..=1e6).contains(*x) && **x != UNROTATED)
        {
            Some((index, &value)) => Err(ModelError::TensorValue {
                name: name.to_owned(),
                index,
                value,
                expected: "1e-6 to 1e6",
            }),
            None => Ok(factors),
        }
    }

    /// Refuses or reports tensors that were not used.
    pub(super) fn none_ignored(
        &self,
        h: &Hparams,
        unknown: &mut UnknownNames,
    ) -> Result<(), ModelError> {
        let used = self.used.borrow();
        // Tables that other engines once stored; they follow from the hyper-parameters.
        let derived =
            |name: &str| name.ends_with("attn_rot_embd") || name.ends_with("rotary_emb.inv_freq");
        for t in self
            .gguf
            .tensors()
            .iter()
            .filter(|t| !used.contains(t.name.as_str()) && !derived(&t.name))
        {
            // Blocks for multi-token prediction follow the others; what is wrong with one is no
            // obstacle.
            if in_layer(&t.name).is_some_and(|(i, _)| (h.n_layer..h.n_layer + h.n_mtp).contains(&i))
            {
                unknown.names.push(t.name.clone());
                continue;
            }
            // Those of an encoder are bound with it.
            if h.encoder.is_some() && t.name.starts_with("enc.") {
                continue;
            }
            let error = ModelError::UnknownTensor {
                name: t.name.clone(),
                arch: h.arch.clone(),
            };
            unknown.found(&t.name, error)?;
        }
        Ok(())
    }

    /// Refuses differences between layers of equal specifications: a tensor that only some of them
    /// have suggests that others lost it.
    pub(super) fn uniform(&self, h: &Hparams) -> Result<(), ModelError> {
        let layers: Vec<&[LayerSpec]> = h.layers[..h.n_own()].chunks(h.n_part).collect();
        let mut parts = vec![BTreeSet::new(); layers.len()];
        let used = self.used.borrow();
        let in_block = |name: &&'a str| in_layer(name.strip_prefix(h.prefix)?);
        for (i, part) in used.iter().filter_map(in_block) {
            // The first layer's are those of all, where others have none.
            if part != RELATIVE {
                parts[i].insert(part);
            }
        }
        for (i, spec) in layers.iter().enumerate() {
            let first = layers.iter().position(|other| other == spec).unwrap_or(i);
            for (missing, present) in [(i, first), (first, i)] {
                if let Some(part) = parts[present].difference(&parts[missing]).next() {
                    let name = |i: usize| format!("{}blk.{i}.{part}", h.prefix);
                    return Err(ModelError::MissingInLayer {
                        name: name(missing),
                        present: name(present),
                    });
                }
            }
        }
        Ok(())
    }
}
