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
    /// attached before. Other sessions are not affected.
    ///
    /// The session keeps its tokens, as it does in [`Self::set_scale`] and [`Self::detach`];
    /// the next pass computes their keys and values again, with the weights that it has then, so
    /// that what follows is what it would be had the adapters been there from the start. If the
    /// adapter changes the output head alone, keys and values stay, too. [`Session::logits`] are
    /// empty until that pass.
    ///
    /// ```
    /// # use ruvllm::{Model, lora::Adapter};
    /// # use std::sync::Arc;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
    /// let adapter = Arc::new(Adapter::zeros(&model, 2, 1, |_| true)?);
    /// let mut session = model.session()?;
    /// session.prefill(&[1, 2, 3])?;
    /// session.adapters().attach(adapter, 1.0)?;
    /// assert_eq!(session.tokens(), [1, 2, 3]);
    /// session.prefill(&[4])?; // computes all four
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the adapter is for another model, or the scale is not finite. Nothing has changed then.
    pub fn attach(&mut self, adapter: Arc<Adapter>, scale: f32) -> Result<AdapterId, AdapterError> {
        let id = self.0.seq.attach(adapter, scale)?;
        self.0.forget_outputs();
        Ok(id)
    }

    /// Changes the scale of an adapter; 0 leaves it attached without effect or cost. Tokens stay, see
    /// [`Self::attach`].
    ///
    /// # Errors
    /// If the adapter is not attached, or the scale is not finite.
    pub fn set_scale(&mut self, id: AdapterId, scale: f32) -> Result<(), AdapterError> {
        self.0.seq.set_scale(id, scale)?;
        self.0.forget_outputs();
        Ok(())
    }

    /// Detaches an adapter, and returns it. Tokens stay, see [`Self::attach`].
    ///
    /// # Errors
    /// If it is not attached.
    pub fn detach(&mut self, id: AdapterId) -> Result<Arc<Adapter>, AdapterError> {
        let adapter = self.0.seq.detach(id)?;
        self.0.forget_outputs();
        Ok(adapter)
    }

    /// Changes the values of an attached adapter; other holders of the adapter keep it unchanged.
    /// Empties the session.
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
        self.0.clear();
        self.0.seq.replace_adapter(i, attached);
        Ok(())
    }
}
