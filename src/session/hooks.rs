//! The hook of a session.

use crate::compute::hook::OutputHook;
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
}
