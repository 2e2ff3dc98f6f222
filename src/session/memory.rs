//! Memory of a session.

use crate::kv::KvBytes;
use crate::session::state::SessionState;

/// Bytes used by a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionMemory {
    /// Keys and values of its pages, including shared ones, and of its checkpoints.
    pub kv: KvBytes,
    /// Tokens, logits and hidden states.
    pub rest: u64,
    /// Rows that were kept for gradients, see [`SessionTraining`](crate::session::SessionTraining).
    pub gradients: u64,
}

impl SessionMemory {
    /// Sum of all.
    pub fn total(&self) -> u64 {
        self.kv.total() + self.rest + self.gradients
    }
}

impl SessionState<'_> {
    /// Current memory use.
    pub fn memory(&self) -> SessionMemory {
        SessionMemory {
            kv: self.0.seq.kv.memory(),
            rest: self.0.seq.token_bytes() + self.0.outputs.bytes(),
            gradients: self.0.saved.bytes(),
        }
    }
}
