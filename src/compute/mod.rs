//! What every component of a forward pass uses: products, memory, and what looks on.

pub(crate) mod arena;
mod error;
pub(crate) mod hook;
pub(crate) mod linear;
pub(crate) mod pooling;
pub(crate) mod probe;
pub(crate) mod tiles;
pub(crate) mod weight;

pub use error::ComputeError;
pub use hook::{Cut, OutputHook, OutputRows, TokenKind};
pub use pooling::PooledStates;
pub use probe::{EvalCallback, HookPoint, NoCallback, ProductCallback};
