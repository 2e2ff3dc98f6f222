//! The adapters of a session.

use crate::engine::adapters::AdapterId;
use crate::lora::{Adapter, AdapterError};
use crate::session::session::Session;
use std::sync::Arc;

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

    /// See [`Sequence::adapter_generation`](crate::engine::Sequence::adapter_generation).
    pub fn adapter_generation(&self) -> u64 {
        self.seq.adapter_generation()
    }
}
