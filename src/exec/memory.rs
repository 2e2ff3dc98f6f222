//! How much memory engines and sessions take.

use super::{Engine, Session};
use crate::cache::KvBytes;

/// Bytes that an engine takes, with all its sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineMemory {
    /// Weights in the file.
    pub weights: u64,
    /// Copy of the weights in memory of this process.
    pub weights_copy: u64,
    /// Keys and values of sequences; shared pages count once.
    pub kv: KvBytes,
    /// Free pages of keys and values, kept for later use.
    pub kv_free: u64,
    /// Buffers of a pass.
    pub buffers: u64,
}

impl EngineMemory {
    /// Sum of all.
    pub fn total(&self) -> u64 {
        self.weights + self.weights_copy + self.kv.total() + self.kv_free + self.buffers
    }
}

/// Bytes used by a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionMemory {
    /// Keys and values of its pages, including shared ones, and of its checkpoints.
    pub kv: KvBytes,
    /// Tokens, logits and hidden states.
    pub rest: u64,
}

impl SessionMemory {
    /// Sum of both.
    pub fn total(&self) -> u64 {
        self.kv.total() + self.rest
    }
}

impl Engine {
    /// Current memory use; waits for a running pass.
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
    /// Current memory use.
    pub fn memory(&self) -> SessionMemory {
        SessionMemory { kv: self.seq.kv.memory(), rest: self.seq.token_bytes() + self.outputs.bytes() }
    }
}
