//! Ctrl-C, and the system's requests to end.

use super::failure::Failure;

/// Calls `then` when the user presses Ctrl-C, or the system asks the program to end (SIGTERM,
/// SIGHUP), which it does not otherwise do from then on.
pub(crate) fn on_interrupt(then: impl FnMut() + Send + 'static) -> Result<(), Failure> {
    Ok(ctrlc::set_handler(then)?)
}
