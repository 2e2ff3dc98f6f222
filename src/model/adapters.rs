//! Adapters of a model: files that fit it, new ones, and weights with adapters merged into them.

use crate::gguf::{Gguf, Writer};
use crate::lora::{Adapter, AdapterError, AdapterRegistry, Base, TargetModule, kept, merge};
use crate::model::Model;
use crate::quant::DType;
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

impl Model {
    /// The model as adapters see it.
    pub(crate) fn base(&self) -> Base<'_> {
        Base {
            arch: &self.hparams().arch,
            sites: self.sites(),
        }
    }

    /// Prepares a copy of the model's file, with weights `W + scale·ΔW` of all `adapters`. Changed
    /// tensors keep their type (quantised ones are quantised again), or take `dtype`; everything else
    /// is copied. A head that shares the embedding table becomes a tensor of its own if one of the two
    /// changes.
    ///
    /// While the file is written, `progress` is called with the number of values done, out of
    /// [`Model::n_params`] or slightly more, and returns whether to continue.
    ///
    /// # Errors
    /// If an adapter is for another model, or there is no quantiser for a type. Writing also fails if a
    /// weight is not finite.
    pub fn merged<'a>(
        &'a self,
        adapters: &[(Arc<Adapter>, f32)],
        dtype: Option<DType>,
        progress: &'a dyn Fn(u64) -> bool,
    ) -> Result<Writer<'a>, AdapterError> {
        let model = (self.gguf(), self.arch(), self.base());
        merge(model, adapters, dtype, progress)
    }

    /// The part of the adapters' change that [`Model::merged`] with the same arguments leaves: the
    /// sum of `Δ·(W' − W)` over that of `Δ·Δ`, where `W` are weights of this model, `Δ` their change
    /// and `W'` what is written, on up to 128 rows of each matrix. 1 is all of it. Weights of few bits
    /// lie on a grid: changes of less than half a step round away, and little may be left.
    ///
    /// # Errors
    /// As [`Model::merged`], or if a weight is not finite.
    pub fn kept_by_merging(
        &self,
        adapters: &[(Arc<Adapter>, f32)],
        dtype: Option<DType>,
    ) -> Result<f64, AdapterError> {
        kept((self.gguf(), self.arch(), self.base()), adapters, dtype)
    }
}

impl Adapter {
    /// Loads an adapter file for a model. Values in `F16` stay as they are, but those of the
    /// embedding table; others are expanded to `f32`.
    ///
    /// # Errors
    /// If the file is invalid, no adapter, or for another model; names the first mismatch. Unknown
    /// contents are errors, too.
    pub fn open(path: impl AsRef<Path>, model: &Model) -> Result<Adapter, AdapterError> {
        Adapter::from_gguf(&Gguf::open(path)?, model)
    }

    /// Loads the adapter in a file that is in memory.
    ///
    /// # Errors
    /// As [`Adapter::open`].
    pub fn from_bytes(
        bytes: impl Into<Cow<'static, [u8]>>,
        model: &Model,
    ) -> Result<Adapter, AdapterError> {
        Adapter::from_gguf(&Gguf::from_bytes(bytes)?, model)
    }

    /// Loads the adapter in a GGUF file.
    ///
    /// # Errors
    /// As [`Adapter::open`].
    pub fn from_gguf(gguf: &Gguf, model: &Model) -> Result<Adapter, AdapterError> {
        Adapter::read(gguf, model.base())
    }

    /// Makes an adapter for all sites that `targets` selects, each of rank `rank`. `A` is drawn
    /// uniformly from `±1/√n_in` (He et al., arXiv 1502.01852, the usual initialisation of
    /// LoRA), `B` is zero: the model is unchanged until the adapter is trained. The strength
    /// `alpha` is `rank`, so that `s = 1`. Sites include routers, the head and the embedding
    /// table; [`TargetModule::part`] tells them apart.
    ///
    /// # Errors
    /// If the rank is 0 or larger than a selected matrix, or no site is selected.
    pub fn zeros(
        model: &Model,
        rank: usize,
        seed: u64,
        targets: impl Fn(&TargetModule) -> bool,
    ) -> Result<Adapter, AdapterError> {
        Adapter::zeros_for(model.base(), rank, seed, targets)
    }

    /// An adapter without terms and without strength.
    pub fn empty(model: &Model) -> Adapter {
        Adapter::empty_for(model.base())
    }

    /// Checks that the adapter was made for a model with the same matrices.
    ///
    /// # Errors
    /// If it was not; names the first difference.
    pub fn check(&self, model: &Model) -> Result<(), AdapterError> {
        self.check_base(model.base())
    }
}

impl AdapterRegistry {
    /// A registry that holds at most `budget` bytes of adapters of `model`.
    pub fn new(model: &Model, budget: u64) -> AdapterRegistry {
        AdapterRegistry::of(model.base(), budget)
    }
}
