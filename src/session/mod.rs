//! A session: one text under way, and what is done with it.

pub(crate) mod adapters;
pub(crate) mod context_shift;
mod encode;
pub(crate) mod error;
pub(crate) mod file;
pub(crate) mod gradients;
pub(crate) mod hooks;
mod memory;
#[cfg(feature = "vision")]
pub(crate) mod parts;
mod prefix_reuse;
pub(crate) mod profile;
mod saved_images;
#[allow(clippy::module_inception)]
pub(crate) mod session;
mod state;
pub(crate) mod store;

pub use adapters::SessionAdapters;
pub use error::{GradientError, KeptError, StateError};
pub use gradients::{Reference, SessionTraining, Task, cross_entropy, log_sum};
pub use hooks::SessionHooks;
pub use memory::SessionMemory;
#[cfg(feature = "vision")]
pub use parts::{EncodedPrompt, Part, PartsError, SessionImages};
pub use profile::Profile;
pub use state::{SessionCache, SessionState};
pub use store::{KeptSession, KeptSessions, SessionName};
