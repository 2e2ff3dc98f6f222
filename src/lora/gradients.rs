//! Gradients of an adapter.

use crate::lora::site::TargetModule;
use crate::lora::{Adapter, AdapterError, Term};
use std::sync::Arc;

/// Gradient of a loss with respect to the values of an [`Adapter`]: `dL/dA` and `dL/dB` of each of
/// its terms, stored like the term.
#[derive(Clone, Debug)]
pub struct Gradients {
    sites: Arc<[TargetModule]>,
    terms: Vec<Option<Term>>,
}

impl Gradients {
    /// Zeros for all terms of `adapter`.
    pub fn zeros(adapter: &Adapter) -> Gradients {
        Gradients::for_terms(adapter, |_| true)
    }

    /// Zeros for the terms of the sites that `targets` selects; the others are constants. Layers
    /// below the lowest selected site are not differentiated, and cost nothing.
    pub fn for_terms(adapter: &Adapter, targets: impl Fn(&TargetModule) -> bool) -> Gradients {
        let sites = Arc::clone(adapter.sites());
        let zeros = |term: &Term| {
            Term::new(
                term.rank(),
                vec![0.0; term.a().len()],
                vec![0.0; term.b().len()],
            )
        };
        let terms = sites
            .iter()
            .enumerate()
            .map(|(i, site)| adapter.term(i).filter(|_| targets(site)).map(zeros));
        let terms = terms.collect();
        Gradients { sites, terms }
    }

    /// Sets all gradients to zero.
    pub fn clear(&mut self) {
        self.scale(0.0);
    }

    /// Multiplies all gradients by `factor`.
    pub fn scale(&mut self, factor: f32) {
        self.values_mut()
            .for_each(|x| *x = if factor == 0.0 { 0.0 } else { *x * factor });
    }

    /// All values, site by site, those of `A` before those of `B`.
    pub fn values(&self) -> impl Iterator<Item = f32> {
        self.terms
            .iter()
            .flatten()
            .flat_map(|term| term.a().iter().chain(term.b()).copied())
    }

    /// All values, mutable.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut f32> {
        self.terms.iter_mut().flatten().flat_map(|term| {
            let (a, b) = term.parts_mut();
            a.iter_mut().chain(b)
        })
    }

    /// Adds `factor` times other gradients of the same terms.
    ///
    /// # Panics
    /// If they are of other terms.
    pub fn add_scaled(&mut self, other: &Gradients, factor: f32) {
        let same = self
            .terms()
            .map(|(site, _)| site)
            .eq(other.terms().map(|(site, _)| site));
        assert!(
            same && self.values().count() == other.values().count(),
            "gradients of the same terms"
        );
        self.values_mut()
            .zip(other.values())
            .for_each(|(to, from)| *to += factor * from);
    }

    /// Euclidean norm of all gradients together.
    pub fn norm(&self) -> f64 {
        self.values()
            .map(|x| f64::from(x) * f64::from(x))
            .sum::<f64>()
            .sqrt()
    }

    /// Sites of the model; [`Gradients::term`] uses their indices.
    pub fn sites(&self) -> &Arc<[TargetModule]> {
        &self.sites
    }

    /// The gradient of a site's term, if it has one.
    pub fn term(&self, site: usize) -> Option<&Term> {
        self.terms.get(site)?.as_ref()
    }

    /// The gradient of a site's term, mutable.
    pub fn term_mut(&mut self, site: usize) -> Option<&mut Term> {
        self.terms.get_mut(site)?.as_mut()
    }

    /// All gradients, with the index of their site.
    pub fn terms(&self) -> impl Iterator<Item = (usize, &Term)> {
        self.terms
            .iter()
            .enumerate()
            .filter_map(|(i, term)| Some((i, term.as_ref()?)))
    }

    /// Checks that every gradient is that of a term of `adapter`, with its shape.
    ///
    /// # Errors
    /// If one is not; names the first.
    pub fn check(&self, adapter: &Adapter) -> Result<(), AdapterError> {
        let same = Arc::ptr_eq(&self.sites, adapter.sites()) || self.sites == *adapter.sites();
        let fits = |i: usize, term: &Term| {
            same && adapter.term(i).is_some_and(|t| t.rank() == term.rank())
        };
        match self.terms().find(|&(i, term)| !fits(i, term)) {
            Some((i, _)) => Err(AdapterError::OtherModel {
                tensor: self.sites[i].tensor.to_string(),
            }),
            None => Ok(()),
        }
    }
}
