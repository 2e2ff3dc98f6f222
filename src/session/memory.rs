//! Memory of a session.

use crate::kv::KvBytes;
use crate::session::session::Session;

/// Bytes used by a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionMemory {
    /// Keys and values of its pages, including shared ones, and of its checkpoints.
    pub kv: KvBytes,
    /// Tokens, logits and hidden states.
    pub rest: u64,
    /// Rows that were kept for gradients, see [`Session::gradient`].
    pub gradients: u64,
}

impl SessionMemory {
    /// Sum of all.
    pub fn total(&self) -> u64 {
        self.kv.total() + self.rest + self.gradients
    }
}

impl Session {
    /// Current memory use.
    pub fn memory(&self) -> SessionMemory {
        SessionMemory {
            kv: self.seq.kv.memory(),
            rest: self.seq.token_bytes() + self.outputs.bytes(),
            gradients: self.saved.bytes(),
        }
    }
}
