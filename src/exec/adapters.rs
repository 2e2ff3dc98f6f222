//! Adapters of a session.

use super::hook::Cut;
use super::{Sequence, Session};
use crate::cache::Counted;
use crate::lora::AdapterError;
use crate::lora::{Adapter, Attached};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Identifies an adapter that is attached to a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdapterId(u64);

/// A process-unique id, never 0.
fn next_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// The adapters of a session.
#[derive(Clone, Debug, Default)]
pub(super) struct Adapters {
    pub(super) attached: Vec<Attached>,
    ids: Vec<AdapterId>,
    /// Their bytes in the pool's budget.
    counted: Vec<Arc<Counted>>,
    generation: u64,
}

impl Adapters {
    pub(super) fn index(&self, id: AdapterId) -> Result<usize, AdapterError> {
        self.ids
            .iter()
            .position(|&i| i == id)
            .ok_or(AdapterError::NotAttached)
    }
}

impl Sequence {
    /// Attaches an adapter: adds `scale·ΔW` to the weights with which this sequence is computed,
    /// besides adapters attached before. Other sequences are not affected.
    ///
    /// Empties the sequence, as [`Sequence::set_scale`] and [`Sequence::detach`] do: its keys and
    /// values were computed with other weights.
    ///
    /// # Errors
    /// If the adapter is for another model, or the scale is not finite. Nothing has changed then.
    pub fn attach(&mut self, adapter: Arc<Adapter>, scale: f32) -> Result<AdapterId, AdapterError> {
        let attached = Attached::new(self.model(), adapter, scale)?;
        self.adapters.counted.push(self.counted(&attached));
        let id = AdapterId(next_number());
        self.adapters.attached.push(attached);
        self.adapters.ids.push(id);
        self.adapters_changed();
        Ok(id)
    }

    /// Changes the scale of an adapter; 0 leaves it attached without effect or cost. Empties the
    /// sequence.
    ///
    /// # Errors
    /// If the adapter is not attached, or the scale is not finite.
    pub fn set_scale(&mut self, id: AdapterId, scale: f32) -> Result<(), AdapterError> {
        let i = self.adapters.index(id)?;
        let adapter = Arc::clone(&self.adapters.attached[i].adapter);
        let attached = Attached::new(self.model(), adapter, scale)?;
        self.replace_adapter(i, attached);
        Ok(())
    }

    /// Detaches an adapter, and returns it. Empties the sequence.
    ///
    /// # Errors
    /// If it is not attached.
    pub fn detach(&mut self, id: AdapterId) -> Result<Arc<Adapter>, AdapterError> {
        let i = self.adapters.index(id)?;
        self.adapters.ids.remove(i);
        self.adapters.counted.remove(i);
        let attached = self.adapters.attached.remove(i);
        self.adapters_changed();
        Ok(attached.adapter)
    }

    /// The attached adapters with their scales, in order of attachment.
    pub fn adapters(&self) -> impl Iterator<Item = (AdapterId, &Arc<Adapter>, f32)> {
        let Adapters { attached, ids, .. } = &self.adapters;
        ids.iter()
            .zip(attached)
            .map(|(&id, a)| (id, &a.adapter, a.scale))
    }

    /// Identifies the weights with which the sequence is computed: 0 without adapters, and a number
    /// never used before after every change of them. Keys and values can be exchanged between
    /// sequences with the same model and generation; a [fork](Sequence::fork) has its parent's.
    pub fn adapter_generation(&self) -> u64 {
        self.adapters.generation
    }

    /// Puts another adapter in the place of one.
    pub(super) fn replace_adapter(&mut self, i: usize, attached: Attached) {
        self.adapters.counted[i] = self.counted(&attached);
        self.adapters.attached[i] = attached;
        self.adapters_changed();
    }

    /// Counts its adapters in the pool's budget, or no more. Those of an empty sequence that others
    /// are forked from do not count; no adapter is replaced in it.
    pub(super) fn count_adapters(&mut self, count: bool) {
        let all = self.adapters.attached.iter().filter(|_| count);
        self.adapters.counted = all.map(|attached| self.counted(attached)).collect();
    }

    fn counted(&self, attached: &Attached) -> Arc<Counted> {
        self.kv.pool().count(
            Arc::as_ptr(&attached.adapter).addr(),
            attached.adapter.bytes(),
        )
    }

    pub(super) fn adapters_changed(&mut self) {
        self.adapters.generation = if self.adapters.attached.is_empty() {
            0
        } else {
            next_number()
        };
        self.cut(0, Cut::Rewound);
    }
}

impl Session {
    /// Attaches an adapter: adds `scale·ΔW` to the weights of this session, besides adapters
    /// attached before. Other sessions are not affected. Empties the session, as
    /// [`Session::set_scale`] and [`Session::detach`] do: its keys and values were computed
    /// with other weights.
    ///
    /// # Errors
    /// If the adapter is for another model, or the scale is not finite. Nothing has changed then.
    pub fn attach(&mut self, adapter: Arc<Adapter>, scale: f32) -> Result<AdapterId, AdapterError> {
        let id = self.seq.attach(adapter, scale)?;
        self.forget_outputs();
        Ok(id)
    }

    /// Changes the scale of an adapter; 0 leaves it attached without effect or cost. Empties the
    /// session.
    ///
    /// # Errors
    /// If the adapter is not attached, or the scale is not finite.
    pub fn set_scale(&mut self, id: AdapterId, scale: f32) -> Result<(), AdapterError> {
        self.seq.set_scale(id, scale)?;
        self.forget_outputs();
        Ok(())
    }

    /// Detaches an adapter, and returns it. Empties the session.
    ///
    /// # Errors
    /// If it is not attached.
    pub fn detach(&mut self, id: AdapterId) -> Result<Arc<Adapter>, AdapterError> {
        let adapter = self.seq.detach(id)?;
        self.forget_outputs();
        Ok(adapter)
    }

    /// The attached adapters with their scales, in order of attachment.
    pub fn adapters(&self) -> impl Iterator<Item = (AdapterId, &Arc<Adapter>, f32)> {
        self.seq.adapters()
    }

    /// See [`Sequence::adapter_generation`].
    pub fn adapter_generation(&self) -> u64 {
        self.seq.adapter_generation()
    }
}
