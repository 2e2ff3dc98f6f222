//! The hook of a session, and what a hook sees.

use crate::compute::hook::{OutputHook, OutputRows, TokenKind};
use crate::compute::probe::NoCallback;
use crate::engine::SessionError;
use crate::session::session::Session;
use std::any::Any;

impl Session {
    /// Sets the hook of this session, replacing the one it has.
    pub fn set_hook(&mut self, hook: Box<dyn OutputHook>) {
        self.seq.hook = Some(hook);
    }

    /// The session's hook, if it is a `T`.
    pub fn hook<T: OutputHook>(&self) -> Option<&T> {
        let hook: &dyn Any = self.seq.hook.as_deref()?;
        hook.downcast_ref()
    }

    /// The session's hook, if it is a `T`.
    pub fn hook_mut<T: OutputHook>(&mut self) -> Option<&mut T> {
        let hook: &mut dyn Any = self.seq.hook.as_deref_mut()?;
        hook.downcast_mut()
    }

    /// Removes and returns the hook, if it is a `T`.
    pub fn take_hook<T: OutputHook>(&mut self) -> Option<Box<T>> {
        self.hook::<T>()?;
        let hook: Box<dyn Any> = self.seq.hook.take()?;
        hook.downcast().ok()
    }

    /// Appends `tokens` of a prompt, to a session without a hook, and calls `each` with what a hook
    /// would see of each batch from `tokens[first..]` on: hidden states and the head's products,
    /// which nobody turns into logits. Neither reads the prefix cache nor keeps checkpoints for a
    /// rewind.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn prefill_rows(
        &mut self,
        tokens: &[u32],
        first: usize,
        each: &mut dyn FnMut(OutputRows<'_>),
    ) -> Result<(), SessionError> {
        self.catch_up()?;
        self.passes(
            TokenKind::Prompt,
            tokens,
            first,
            true,
            &mut NoCallback,
            each,
        )
    }
}
