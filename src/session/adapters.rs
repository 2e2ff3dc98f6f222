//! The adapters of a session.

use crate::engine::adapters::AdapterId;
use crate::lora::{Adapter, AdapterError};
use crate::session::session::Session;
use std::sync::Arc;

impl Session {
    /// Attaches an adapter: adds `scale·ΔW` to the weights of this session, besides adapters
    /// attached before. Other sessions are not affected.
    ///
    /// The session keeps its tokens, as it does in [`Session::set_scale`] and [`Session::detach`];
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
    /// session.attach(adapter, 1.0)?;
    /// assert_eq!(session.tokens(), [1, 2, 3]);
    /// session.prefill(&[4])?; // computes all four
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the adapter is for another model, or the scale is not finite. Nothing has changed then.
    pub fn attach(&mut self, adapter: Arc<Adapter>, scale: f32) -> Result<AdapterId, AdapterError> {
        let id = self.seq.attach(adapter, scale)?;
        self.forget_outputs();
        Ok(id)
    }

    /// Changes the scale of an adapter; 0 leaves it attached without effect or cost. Tokens stay, see
    /// [`Session::attach`].
    ///
    /// # Errors
    /// If the adapter is not attached, or the scale is not finite.
    pub fn set_scale(&mut self, id: AdapterId, scale: f32) -> Result<(), AdapterError> {
        self.seq.set_scale(id, scale)?;
        self.forget_outputs();
        Ok(())
    }

    /// Detaches an adapter, and returns it. Tokens stay, see [`Session::attach`].
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
