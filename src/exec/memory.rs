//! How much memory engines and sessions take.

use super::{Engine, Session};
use crate::cache::KvBytes;

/// Bytes that an engine takes, with all its sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineMemory {
    /// Weights, as they lie in the file.
    pub weights: u64,
    /// A second copy of them, in memory of the process's own.
    pub weights_copy: u64,
    /// Keys and values that sequences hold; shared ones count once.
    pub kv: KvBytes,
    /// Pages of keys and values that are kept for who needs some next.
    pub kv_free: u64,
    /// Buffers of a pass.
    pub buffers: u64,
}

impl EngineMemory {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.weights_copy + self.kv.total() + self.kv_free + self.buffers
    }
}

/// Bytes that a session takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionMemory {
    /// Keys and values of its pages, also of those that it shares with others, and of its checkpoints.
    pub kv: KvBytes,
    /// Tokens, logits and hidden states.
    pub rest: u64,
}

impl SessionMemory {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.kv.total() + self.rest
    }
}

impl Engine {
    /// Bytes that it takes; waits for a pass under way.
    pub fn memory(&self) -> EngineMemory {
        let (gguf, pool) = (self.model().gguf(), self.pool().stats());
        EngineMemory {
            weights: gguf.tensors().iter().map(|t| t.n_bytes).sum(),
            weights_copy: gguf.resident_bytes(),
            kv: pool.by_type,
            kv_free: pool.free,
            buffers: self.buffer_bytes(),
        }
    }
}

impl Session {
    /// Bytes that it takes.
    pub fn memory(&self) -> SessionMemory {
        SessionMemory { kv: self.seq.kv.memory(), rest: self.seq.token_bytes() + self.outputs.bytes() }
    }
}
