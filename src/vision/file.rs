//! Hyper-parameters and tensors of a projector's file.

use crate::compute::weight::{Bias, Linear, Weight};
use crate::gguf::{Gguf, TensorInfo};
use crate::layers::norm::spec::NormKind;
use crate::quant::DType;
use crate::vision::VisionError;
use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};

/// A projector's file while it is bound.
pub(super) struct File<'a> {
    pub(super) gguf: &'a Gguf,
    used: RefCell<HashSet<&'a str>>,
    shapes: RefCell<BTreeSet<(DType, usize)>>,
    /// Epsilon of norms in the encoder.
    pub(super) eps: f32,
}

/// A norm over rows.
#[derive(Clone, Debug)]
pub(super) struct Norm {
    pub(super) kind: NormKind,
    pub(super) w: Vec<f32>,
    pub(super) b: Vec<f32>,
    pub(super) eps: f32,
}

impl<'a> File<'a> {
    pub(super) fn new(gguf: &'a Gguf) -> Result<File<'a>, VisionError> {
        let mut file = File {
            gguf,
            used: RefCell::default(),
            shapes: RefCell::default(),
            eps: 0.0,
        };
        file.eps = file.number("attention.layer_norm_epsilon")?;
        if !(0.0..1.0).contains(&file.eps) {
            return Err(out_of_range(
                "attention.layer_norm_epsilon",
                file.eps,
                "0 to 1",
            ));
        }
        Ok(file)
    }

    /// An integer `clip.vision.{key}` from 1 to `max`.
    pub(super) fn count(&self, key: &str, max: usize) -> Result<usize, VisionError> {
        self.opt_count(key, max)?
            .ok_or_else(|| VisionError::MissingKey {
                key: format!("clip.vision.{key}"),
            })
    }

    pub(super) fn opt_count(&self, key: &str, max: usize) -> Result<Option<usize>, VisionError> {
        let Some(n) = self
            .gguf
            .metadata()
            .opt_u64(&format!("clip.vision.{key}"))?
        else {
            return Ok(None);
        };
        match usize::try_from(n) {
            Ok(n) if (1..=max).contains(&n) => Ok(Some(n)),
            _ => Err(out_of_range(key, n, &format!("1 to {max}"))),
        }
    }

    fn number(&self, key: &str) -> Result<f32, VisionError> {
        let key = format!("clip.vision.{key}");
        let found = self.gguf.metadata().opt_f32(&key)?;
        found.ok_or(VisionError::MissingKey { key })
    }

    pub(super) fn flag(&self, key: &str) -> Result<bool, VisionError> {
        Ok(self.gguf.metadata().opt_bool(key)?.unwrap_or(false))
    }

    /// Mean or deviation of the three channels.
    pub(super) fn channels(&self, key: &str) -> Result<[f32; 3], VisionError> {
        let name = format!("clip.vision.{key}");
        let found = self.gguf.metadata().opt_f32s(&name)?;
        let found = found.ok_or(VisionError::MissingKey { key: name })?;
        let is_std = key == "image_std";
        match <[f32; 3]>::try_from(found) {
            Ok(x) if x.iter().all(|x| x.is_finite() && (!is_std || *x > 0.0)) => Ok(x),
            _ => Err(out_of_range(key, format!("{found:?}"), "three numbers")),
        }
    }

    /// Integers from 0 to `max`.
    pub(super) fn list(&self, key: &str, max: u32) -> Result<Option<Vec<usize>>, VisionError> {
        let Some(list) = self
            .gguf
            .metadata()
            .opt_u32s(&format!("clip.vision.{key}"))?
        else {
            return Ok(None);
        };
        if let Some(x) = list.iter().find(|x| **x > max) {
            return Err(out_of_range(key, x, &format!("at most {max}")));
        }
        Ok(Some(list.iter().map(|&x| x as usize).collect()))
    }

    pub(super) fn flags(&self, key: &str) -> Result<Option<&'a [bool]>, VisionError> {
        Ok(self
            .gguf
            .metadata()
            .opt_bools(&format!("clip.vision.{key}"))?)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.gguf.tensor(name).is_some()
    }

    fn shaped(&self, name: &str, dims: &[usize]) -> Result<(usize, &'a TensorInfo), VisionError> {
        let index = self.gguf.header().position(name);
        let index = index.ok_or_else(|| VisionError::MissingTensor {
            name: name.to_owned(),
        })?;
        let tensor = &self.gguf.tensors()[index];
        self.used.borrow_mut().insert(&tensor.name);
        let expected: Vec<u64> = dims.iter().map(|&n| n as u64).collect();
        let significant =
            |dims: &[u64]| dims.len() - dims.iter().rev().take_while(|&&n| n == 1).count();
        if tensor.dims[..significant(&tensor.dims)] != expected[..significant(&expected)] {
            return Err(VisionError::TensorShape {
                name: name.to_owned(),
                found: tensor.dims.clone(),
                expected,
            });
        }
        Ok((index, tensor))
    }

    /// A matrix whose rows of inputs have these dimensions, innermost first.
    fn matrix(&self, name: &str, inputs: &[usize], n_out: usize) -> Result<Weight, VisionError> {
        let mut dims = inputs.to_vec();
        dims.push(n_out);
        let (tensor, info) = self.shaped(name, &dims)?;
        let n_in: usize = inputs.iter().product();
        // Rows of several dimensions are one row only if no block ends inside of it.
        let fits = info.dtype.format().is_some()
            && info.dtype.float_format().bytes_of(n_out, n_in) == Some(self.gguf.data(info).len());
        if !fits {
            return Err(VisionError::TensorType {
                name: name.to_owned(),
                found: info.dtype.to_string(),
                expected: "a weight format whose blocks divide its rows",
            });
        }
        self.shapes.borrow_mut().insert((info.dtype, n_in));
        Ok(Weight {
            dtype: info.dtype,
            n_in,
            n_out,
            site: 0,
            first_row: 0,
            scale: 1.0,
            scales: None,
            tensor,
            bytes: 0..self.gguf.data(info).len(),
        })
    }

    /// A matrix alone.
    pub(super) fn weight(
        &self,
        name: &str,
        n_in: usize,
        n_out: usize,
    ) -> Result<Weight, VisionError> {
        self.matrix(name, &[n_in], n_out)
    }

    /// A matrix with its bias, if it has one.
    pub(super) fn linear(
        &self,
        name: &str,
        n_in: usize,
        n_out: usize,
    ) -> Result<Linear, VisionError> {
        self.shaped_linear(name, &[n_in], n_out)
    }

    /// A convolution whose stride is its size, as a matrix.
    pub(super) fn shaped_linear(
        &self,
        name: &str,
        inputs: &[usize],
        n_out: usize,
    ) -> Result<Linear, VisionError> {
        let bias = format!("{name}.bias");
        let b = match self.has(&bias) {
            true => Some(Bias::new(self.values(&bias, &[n_out])?)),
            false => None,
        };
        let w = self.matrix(&format!("{name}.weight"), inputs, n_out)?;
        Ok(Linear { w, b })
    }

    /// The second time slice of a convolution, whose name has its own ending.
    pub(super) fn slice(
        &self,
        name: &str,
        inputs: &[usize],
        n_out: usize,
    ) -> Result<Linear, VisionError> {
        let w = self.matrix(name, inputs, n_out)?;
        Ok(Linear { w, b: None })
    }

    /// Values that are no matrix.
    pub(super) fn values(&self, name: &str, dims: &[usize]) -> Result<Vec<f32>, VisionError> {
        let (_, tensor) = self.shaped(name, dims)?;
        if !matches!(tensor.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(VisionError::TensorType {
                name: name.to_owned(),
                found: tensor.dtype.to_string(),
                expected: "F32, F16 or BF16",
            });
        }
        let mut values = vec![0.0; dims.iter().product()];
        (tensor.dtype.float_format().dequantize)(self.gguf.data(tensor), &mut values);
        Ok(values)
    }

    /// Number of rows of a table.
    pub(super) fn n_rows(&self, name: &str, max: u64) -> Result<usize, VisionError> {
        let tensor = self.gguf.tensor(name);
        let tensor = tensor.ok_or_else(|| VisionError::MissingTensor {
            name: name.to_owned(),
        })?;
        match tensor.dims.get(1) {
            Some(&n) if (1..=max).contains(&n) => Ok(n as usize),
            _ => Err(VisionError::TensorShape {
                name: name.to_owned(),
                found: tensor.dims.clone(),
                expected: vec![tensor.dims.first().copied().unwrap_or(0), max],
            }),
        }
    }

    /// Width of the rows that a matrix or bias makes: the last dimension of `{name}.weight`.
    pub(super) fn n_out(&self, name: &str) -> Result<usize, VisionError> {
        self.n_rows(&format!("{name}.weight"), 1 << 20)
    }

    /// A norm; of mean and variance if it has a bias.
    pub(super) fn norm(&self, name: &str, n: usize, eps: f32) -> Result<Norm, VisionError> {
        let w = self.values(&format!("{name}.weight"), &[n])?;
        let bias = format!("{name}.bias");
        let (kind, b) = match self.has(&bias) {
            true => (NormKind::Layer, self.values(&bias, &[n])?),
            false => (NormKind::Rms, Vec::new()),
        };
        Ok(Norm { kind, w, b, eps })
    }

    pub(super) fn opt_norm(&self, name: &str, n: usize) -> Result<Option<Norm>, VisionError> {
        match self.has(&format!("{name}.weight")) {
            true => self.norm(name, n, self.eps).map(Some),
            false => Ok(None),
        }
    }

    /// Counts a tensor as used that is read elsewhere.
    pub(super) fn skip(&self, name: &str) {
        self.used
            .borrow_mut()
            .extend(self.gguf.tensor(name).map(|t| &*t.name));
    }

    /// Formats and row lengths of all matrices; refuses tensors that were not used.
    pub(super) fn shapes(&self) -> Result<Vec<(DType, usize)>, VisionError> {
        let used = self.used.borrow();
        match self
            .gguf
            .tensors()
            .iter()
            .find(|t| !used.contains(&*t.name))
        {
            Some(tensor) => Err(VisionError::UnknownTensor {
                name: tensor.name.clone(),
            }),
            None => Ok(self.shapes.borrow().iter().copied().collect()),
        }
    }
}

impl Norm {
    /// Root mean square without weights.
    pub(super) fn plain(n: usize, eps: f32) -> Norm {
        Norm {
            kind: NormKind::Rms,
            w: vec![1.0; n],
            b: Vec::new(),
            eps,
        }
    }
}

pub(super) fn out_of_range(key: &str, value: impl ToString, expected: &str) -> VisionError {
    VisionError::OutOfRange {
        key: format!("clip.vision.{key}"),
        value: value.to_string(),
        expected: expected.to_owned(),
    }
}
