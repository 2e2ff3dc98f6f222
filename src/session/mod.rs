//! A session: one text under way, and what is done with it.

mod adapters;
pub(crate) mod context_shift;
mod encode;
pub(crate) mod error;
pub(crate) mod file;
pub(crate) mod gradients;
mod hooks;
mod memory;
#[cfg(feature = "vision")]
pub(crate) mod parts;
mod prefix_reuse;
pub(crate) mod profile;
#[allow(clippy::module_inception)]
pub(crate) mod session;
pub(crate) mod store;

pub use error::{GradientError, KeptError, StateError};
pub use gradients::{Task, cross_entropy, divergence, log_sum};
pub use memory::SessionMemory;
#[cfg(feature = "vision")]
pub use parts::{EncodedPrompt, Part, PartsError};
pub use profile::Profile;
pub use session::Session;
pub use store::{KeptSession, KeptSessions, SessionName};
