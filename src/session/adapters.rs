//! The adapters of a session.

use crate::engine::adapters::AdapterId;
use crate::lora::{Adapter, AdapterError, Attached};
use crate::session::session::Session;
use std::sync::Arc;

/// Attaches, scales, changes and detaches adapters of a session;
/// [`Sequence::adapters`](crate::engine::Sequence::adapters) lists them.
#[derive(Debug)]
pub struct SessionAdapters<'s>(&'s mut Session);

impl Session {
    /// What attaches, scales, changes and detaches its adapters.
    pub fn adapters(&mut self) -> SessionAdapters<'_> {
        SessionAdapters(self)
    }
}

impl SessionAdapters<'_> {
    /// Attaches an adapter: adds `scale·ΔW` to the weights of this session, besides adapters
    /// attached before. Other sessions are not affected. Empties the session, as
    /// [`set_scale`](Self::set_scale) and [`detach`](Self::detach) do: its keys and values were computed
    /// with other weights.
    ///
    /// # Errors
    /// If the adapter is for another model, or the scale is not finite. Nothing has changed then.
    pub fn attach(&mut self, adapter: Arc<Adapter>, scale: f32) -> Result<AdapterId, AdapterError> {
        let id = self.0.seq.attach(adapter, scale)?;
        self.0.forget_outputs();
        Ok(id)
    }

    /// Changes the scale of an adapter; 0 leaves it attached without effect or cost. Empties the
    /// session.
    ///
    /// # Errors
    /// If the adapter is not attached, or the scale is not finite.
    pub fn set_scale(&mut self, id: AdapterId, scale: f32) -> Result<(), AdapterError> {
        self.0.seq.set_scale(id, scale)?;
        self.0.forget_outputs();
        Ok(())
    }

    /// Detaches an adapter, and returns it. Empties the session.
    ///
    /// # Errors
    /// If it is not attached.
    pub fn detach(&mut self, id: AdapterId) -> Result<Arc<Adapter>, AdapterError> {
        let adapter = self.0.seq.detach(id)?;
        self.0.forget_outputs();
        Ok(adapter)
    }

    /// Changes the values of an attached adapter; other holders of the adapter keep it unchanged.
    /// Empties the session, as [`attach`](Self::attach) does.
    ///
    /// # Errors
    /// If it is not attached, or is no longer one of this model. Nothing has changed then.
    pub fn update(
        &mut self,
        id: AdapterId,
        change: impl FnOnce(&mut Adapter),
    ) -> Result<(), AdapterError> {
        let Session { engine, seq, .. } = &mut *self.0;
        let i = seq.adapters.index(id)?;
        let attached = &seq.adapters.attached[i];
        let mut adapter = Adapter::clone(&attached.adapter);
        change(&mut adapter);
        let attached = Attached::new(engine.model().base(), Arc::new(adapter), attached.scale)?;
        seq.replace_adapter(i, attached);
        self.0.forget_outputs();
        Ok(())
    }
}
