//! The hook of a session, what a hook sees, and callbacks of prompts.

use crate::compute::hook::{OutputHook, OutputRows, TokenKind};
use crate::compute::pooling::PooledStates;
use crate::compute::probe::{EvalCallback, NoCallback};
use crate::engine::SessionError;
use crate::engine::sequence::Sequence;
use crate::session::session::Session;
use std::any::Any;

/// Hook of a session, and prompts that call back with hidden states or logits.
/// [`Sequence::hook`](crate::engine::Sequence::hook) reads the hook.
#[derive(Debug)]
pub struct SessionHooks<'s>(&'s mut Session);

impl Session {
    /// Its hook, and prompts that call back with hidden states or logits.
    pub fn hooks(&mut self) -> SessionHooks<'_> {
        SessionHooks(self)
    }
}

impl Sequence {
    /// The hook that follows it, if it is a `T`.
    pub fn hook<T: OutputHook>(&self) -> Option<&T> {
        let hook: &dyn Any = self.hook.as_deref()?;
        hook.downcast_ref()
    }
}

impl<'s> SessionHooks<'s> {
    /// Sets the hook of this session, replacing the one it has.
    pub fn set(&mut self, hook: Box<dyn OutputHook>) {
        self.0.seq.hook = Some(hook);
    }

    /// The session's hook, if it is a `T`.
    pub fn get_mut<T: OutputHook>(self) -> Option<&'s mut T> {
        let hook: &mut dyn Any = self.0.seq.hook.as_deref_mut()?;
        hook.downcast_mut()
    }

    /// Removes and returns the hook, if it is a `T`.
    pub fn take<T: OutputHook>(&mut self) -> Option<Box<T>> {
        self.0.seq.hook::<T>()?;
        let hook: Box<dyn Any> = self.0.seq.hook.take()?;
        hook.downcast().ok()
    }

    /// Computes the last token of a generation, which nobody needed to compute yet, if it waits: the
    /// logits are then those of what follows it. Whatever appends tokens begins with it.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn catch_up(&mut self) -> Result<(), SessionError> {
        self.0.catch_up()
    }

    /// Appends `tokens`, as [`Session::prefill`] does, and calls `each` with the logits after each
    /// of `tokens[first..]`, in order, as `(index, logits)`.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn prefill_each(
        &mut self,
        tokens: &[u32],
        first: usize,
        each: impl FnMut(usize, &[f32]),
    ) -> Result<(), SessionError> {
        self.0.prefill_each(tokens, first, each)
    }

    /// [`prefill_each`](Self::prefill_each) with an [`EvalCallback`], without the prefix cache.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn prefill_probed(
        &mut self,
        tokens: &[u32],
        first: usize,
        probe: &mut dyn EvalCallback,
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<(), SessionError> {
        self.0
            .run(TokenKind::Prompt, tokens, first, probe, &mut each)
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
        self.0.catch_up()?;
        self.0.passes(
            TokenKind::Prompt,
            tokens,
            first,
            true,
            &mut NoCallback,
            each,
        )
    }

    /// Mean hidden states of the tokens computed since the last call; see
    /// [`SessionOptions::pooled_layer`](crate::SessionOptions::pooled_layer).
    pub fn take_pooled(&mut self) -> PooledStates {
        self.0.seq.take_pooled()
    }
}
