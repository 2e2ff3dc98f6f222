//! Adapters in memory.

use crate::lora::AdapterError;
use crate::lora::site::{Base, TargetModule};
use crate::quant::DType;
use half::f16;
use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

/// Values of `A` or `B`, as precise as those of the file.
#[derive(Clone, Debug)]
pub(crate) enum Factor {
    F32(Vec<f32>),
    /// Half of the memory; expanded, too, once somebody asks for that.
    F16(Vec<f16>, OnceLock<Vec<f32>>),
}

impl Factor {
    /// Rounds values to 16 bits.
    pub(super) fn half(values: &[f32]) -> Factor {
        Factor::F16(
            values.iter().map(|&x| f16::from_f32(x)).collect(),
            OnceLock::new(),
        )
    }

    /// Expanded to `f32`.
    pub(crate) fn expand(&self) -> Cow<'_, [f32]> {
        match self {
            Factor::F32(values) => values.into(),
            Factor::F16(values, _) => values
                .iter()
                .map(|x| x.to_f32())
                .collect::<Vec<f32>>()
                .into(),
        }
    }

    /// The values as they are.
    pub(crate) fn data(&self) -> (DType, &[u8]) {
        match self {
            Factor::F32(values) => (DType::F32, bytemuck::cast_slice(values)),
            Factor::F16(values, _) => (DType::F16, bytemuck::cast_slice(values)),
        }
    }

    fn values(&self) -> &[f32] {
        match self {
            Factor::F32(values) => values,
            Factor::F16(_, expanded) => expanded.get_or_init(|| self.expand().into_owned()),
        }
    }

    fn values_mut(&mut self) -> &mut [f32] {
        if let Factor::F16(..) = self {
            *self = Factor::F32(self.expand().into_owned());
        }
        match self {
            Factor::F32(values) => values,
            Factor::F16(..) => unreachable!("it was expanded"),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Factor::F32(values) => values.len(),
            Factor::F16(values, _) => values.len(),
        }
    }

    fn is_zero(&self) -> bool {
        match self {
            Factor::F32(values) => values.iter().all(|&x| x == 0.0),
            Factor::F16(values, _) => values.iter().all(|&x| x == f16::ZERO),
        }
    }
}

/// Change of one matrix: `ΔW = B·A`, not yet scaled.
#[derive(Clone, Debug)]
pub struct Term {
    rank: usize,
    a: Factor,
    b: Factor,
}

/// Equality of values, whatever their storage type.
impl PartialEq for Term {
    fn eq(&self, other: &Term) -> bool {
        self.rank == other.rank
            && self.a.expand() == other.a.expand()
            && self.b.expand() == other.b.expand()
    }
}

impl Term {
    /// A term of `A`, `(rank, n_in)`, and `Bᵀ`, `(rank, n_out)`.
    pub fn new(rank: usize, a: Vec<f32>, b: Vec<f32>) -> Term {
        Term {
            rank,
            a: Factor::F32(a),
            b: Factor::F32(b),
        }
    }

    pub(super) fn of(rank: usize, a: Factor, b: Factor) -> Term {
        Term { rank, a, b }
    }

    /// `A` and `Bᵀ` in their storage type.
    pub(crate) fn factors(&self) -> (&Factor, &Factor) {
        (&self.a, &self.b)
    }

    /// The rank: rows of `A` and columns of `B`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// `A: (rank, n_in)`.
    pub fn a(&self) -> &[f32] {
        self.a.values()
    }

    /// `Bᵀ: (rank, n_out)`: column `j` of `B` is contiguous, so that applying it is
    /// `y += (A·x)[j]·b[j]`.
    pub fn b(&self) -> &[f32] {
        self.b.values()
    }

    /// `A` and `Bᵀ`, mutable; stored in `f32` from then on.
    pub fn parts_mut(&mut self) -> (&mut [f32], &mut [f32]) {
        (self.a.values_mut(), self.b.values_mut())
    }

    /// Whether the term changes nothing.
    pub fn is_zero(&self) -> bool {
        self.a.is_zero() || self.b.is_zero()
    }
}

/// Low-rank changes of some matrices of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    arch: String,
    sites: Arc<[TargetModule]>,
    /// One entry per site.
    terms: Vec<Option<Term>>,
    alpha: f32,
}

/// Largest rank that a matrix may have: a file with a rank above both of its sides is damaged.
pub(super) fn max_rank(site: &TargetModule) -> usize {
    site.n_in.max(site.n_out)
}

impl Adapter {
    /// [`Adapter::zeros`] for `base`.
    pub(crate) fn zeros_for(
        base: Base<'_>,
        rank: usize,
        seed: u64,
        targets: impl Fn(&TargetModule) -> bool,
    ) -> Result<Adapter, AdapterError> {
        let mut adapter = Adapter::empty_for(base);
        adapter.alpha = rank as f32;
        let mut rng = seed;
        for (site, term) in adapter
            .sites
            .iter()
            .zip(&mut adapter.terms)
            .filter(|(site, _)| targets(site))
        {
            if rank == 0 || rank > max_rank(site) {
                return Err(AdapterError::Rank {
                    tensor: site.tensor.to_string(),
                    rank,
                    max: max_rank(site),
                });
            }
            let bound = 1.0 / (site.n_in as f32).sqrt();
            let a = (0..rank * site.n_in)
                .map(|_| bound * uniform(&mut rng))
                .collect();
            *term = Some(Term::new(rank, a, vec![0.0; rank * site.n_out]));
        }
        if adapter.n_params() == 0 {
            Err(AdapterError::Empty)
        } else {
            Ok(adapter)
        }
    }

    /// An adapter without terms and without strength.
    pub(crate) fn empty_for(base: Base<'_>) -> Adapter {
        let sites = Arc::clone(base.sites);
        let terms = vec![None; sites.len()];
        Adapter {
            arch: base.arch.to_owned(),
            sites,
            terms,
            alpha: 0.0,
        }
    }

    /// An adapter for the same matrices, without terms and without strength.
    pub(super) fn without_terms(&self) -> Adapter {
        let terms = vec![None; self.sites.len()];
        Adapter {
            arch: self.arch.clone(),
            sites: Arc::clone(&self.sites),
            terms,
            alpha: 0.0,
        }
    }

    /// Sets the term of a site.
    ///
    /// # Panics
    /// If its shape is not that of the site's matrix.
    pub fn set_term(&mut self, site: usize, term: Term) {
        let TargetModule { n_in, n_out, .. } = self.sites[site];
        assert_eq!(
            (term.a.len(), term.b.len()),
            (term.rank * n_in, term.rank * n_out),
            "a term of rank {} for {n_in} inputs and {n_out} outputs",
            term.rank
        );
        self.terms[site] = Some(term);
    }

    /// `general.architecture` of the model it is for.
    pub fn arch(&self) -> &str {
        &self.arch
    }

    /// All sites of the model; [`Adapter::term`] uses their indices.
    pub fn sites(&self) -> &Arc<[TargetModule]> {
        &self.sites
    }

    /// The term of a site, if it has one.
    pub fn term(&self, site: usize) -> Option<&Term> {
        self.terms.get(site)?.as_ref()
    }

    /// The term of a site, mutable.
    pub fn term_mut(&mut self, site: usize) -> Option<&mut Term> {
        self.terms.get_mut(site)?.as_mut()
    }

    /// All terms, with the index of their site.
    pub fn terms(&self) -> impl Iterator<Item = (usize, &Term)> {
        self.terms
            .iter()
            .enumerate()
            .filter_map(|(i, term)| Some((i, term.as_ref()?)))
    }

    /// All terms, mutable, with the index of their site.
    pub fn terms_mut(&mut self) -> impl Iterator<Item = (usize, &mut Term)> {
        self.terms
            .iter_mut()
            .enumerate()
            .filter_map(|(i, term)| Some((i, term.as_mut()?)))
    }

    /// `adapter.lora.alpha`: `ΔW = alpha/rank·B·A`, or `B·A` if it is 0.
    pub fn alpha(&self) -> f32 {
        self.alpha
    }

    /// Sets [`Adapter::alpha`].
    ///
    /// # Errors
    /// If it is not finite.
    pub fn set_alpha(&mut self, alpha: f32) -> Result<(), AdapterError> {
        if !alpha.is_finite() {
            return Err(AdapterError::Alpha { value: alpha });
        }
        self.alpha = alpha;
        Ok(())
    }

    /// Multiplies all `ΔW` by `scale`.
    pub fn rescale(&mut self, scale: f32) {
        // An alpha of 0 stands for no factor at all, so the factor goes into the values.
        if self.alpha * scale != 0.0 {
            self.alpha *= scale;
        } else {
            self.terms_mut()
                .for_each(|(_, term)| term.parts_mut().1.iter_mut().for_each(|b| *b *= scale));
        }
    }

    /// The factor `s` of a term: `alpha/rank`, or 1 if alpha is 0.
    pub fn scale(&self, term: &Term) -> f32 {
        if self.alpha == 0.0 {
            1.0
        } else {
            self.alpha / term.rank as f32
        }
    }

    /// Number of values in all terms.
    pub fn n_params(&self) -> usize {
        self.terms().map(|(_, t)| t.a.len() + t.b.len()).sum()
    }

    /// Bytes of the values of all terms, in their storage type.
    pub fn bytes(&self) -> u64 {
        self.terms()
            .map(|(_, t)| (t.a.data().1.len() + t.b.data().1.len()) as u64)
            .sum()
    }

    /// The same with values rounded to 16 bits, which take half of the memory, but of the embedding
    /// table.
    ///
    /// # Errors
    /// If a value is too large for 16 bits.
    pub fn to_f16(&self) -> Result<Adapter, AdapterError> {
        let mut adapter = self.clone();
        for (i, term) in adapter
            .terms_mut()
            .filter(|(i, _)| !self.sites[*i].is_embedding())
        {
            for factor in [&mut term.a, &mut term.b] {
                let values = factor.expand();
                if let Some(index) = values.iter().position(|&x| !f16::from_f32(x).is_finite()) {
                    let name = self.sites[i].tensor.to_string();
                    return Err(AdapterError::NotFinite {
                        name,
                        index,
                        value: values[index],
                    });
                }
                *factor = Factor::half(&values);
            }
        }
        Ok(adapter)
    }

    /// The largest rank of a term.
    pub fn max_rank(&self) -> usize {
        self.terms().map(|(_, t)| t.rank).max().unwrap_or(0)
    }

    /// Checks that the adapter was made for a model with the same matrices.
    ///
    /// # Errors
    /// If it was not; names the first difference.
    pub(crate) fn check_base(&self, base: Base<'_>) -> Result<(), AdapterError> {
        let theirs = base.sites;
        if self.arch != base.arch {
            return Err(AdapterError::Architecture {
                found: self.arch.clone(),
                expected: base.arch.to_owned(),
            });
        }
        let ours = &self.sites;
        if Arc::ptr_eq(ours, theirs) {
            return Ok(());
        }
        let differs = (0..ours.len().max(theirs.len())).find(|&i| ours.get(i) != theirs.get(i));
        match differs.and_then(|i| ours.get(i).or(theirs.get(i))) {
            Some(site) => Err(AdapterError::OtherModel {
                tensor: site.tensor.to_string(),
            }),
            None => Ok(()),
        }
    }

    /// Checks that another adapter was made for a model with the same matrices.
    pub(super) fn check_same(&self, other: &Adapter) -> Result<(), AdapterError> {
        self.check_base(Base {
            arch: &other.arch,
            sites: &other.sites,
        })
    }
}

/// The next pseudo-random number in `−1..1` (SplitMix64).
pub(super) fn uniform(state: &mut u64) -> f32 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((x ^ (x >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// An adapter attached to a session.
#[derive(Clone, Debug)]
pub(crate) struct Attached {
    pub(crate) adapter: Arc<Adapter>,
    pub(crate) scale: f32,
    /// The largest rank of a term.
    pub(crate) max_rank: usize,
    /// Factor on `B·A` of every site; 0 where nothing changes.
    factors: Vec<f32>,
}

impl Attached {
    /// # Errors
    /// If the adapter is for another model, or its factors are not finite.
    pub(crate) fn new(
        base: Base<'_>,
        adapter: Arc<Adapter>,
        scale: f32,
    ) -> Result<Attached, AdapterError> {
        adapter.check_base(base)?;
        if !scale.is_finite() {
            return Err(AdapterError::Scale { value: scale });
        }
        let mut factors = vec![0.0; adapter.sites.len()];
        // A term that is zero is not multiplied: the result has the same bits as without it.
        for (site, term) in adapter.terms().filter(|(_, term)| !term.is_zero()) {
            let factor = scale * adapter.scale(term);
            if !factor.is_finite() {
                return Err(AdapterError::Scale { value: factor });
            }
            factors[site] = factor;
        }
        let max_rank = adapter.max_rank();
        Ok(Attached {
            adapter,
            scale,
            factors,
            max_rank,
        })
    }

    /// Whether it changes nothing but the output head, so that keys and values stay what they are.
    pub(crate) fn is_behind_layers(&self) -> bool {
        let changed = self.adapter.sites.iter().zip(&self.factors);
        changed
            .filter(|(_, factor)| **factor != 0.0)
            .all(|(site, _)| site.is_head())
    }

    /// The term of a site and the factor on `B·A`, unless the site is unchanged.
    pub(crate) fn term(&self, site: usize) -> Option<(&Term, f32)> {
        let factor = self.factors[site];
        if factor == 0.0 {
            None
        } else {
            Some((self.adapter.term(site)?, factor))
        }
    }
}
