//! Failures of storing keys and values.

/// A part of the key/value cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvPart {
    /// Keys, with which queries are compared.
    Key,
    /// Values, of which weighted sums are computed.
    Value,
}

impl std::fmt::Display for KvPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            KvPart::Key => "key",
            KvPart::Value => "value",
        })
    }
}

/// Why keys and values could not be stored.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// Not enough memory.
    #[error("no memory for {what} of {bytes} bytes; use a smaller context")]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// Bytes requested.
        bytes: u64,
    },
    /// The pool of pages for keys and values is full.
    #[error(
        "the key/value pool of {budget} bytes is full: {used} are in use, {need} more are needed; end a session, or give it more"
    )]
    PoolFull {
        /// Bytes of the requested page.
        need: u64,
        /// Bytes in use.
        used: u64,
        /// Size of the pool in bytes.
        budget: u64,
    },
    /// A device that has keys and values in memory of its own failed.
    #[error("the GPU's keys and values cannot be read or written: {message}")]
    Device {
        /// The device's message.
        message: String,
    },
    /// A key or value is beyond 65,504, the largest number of half precision.
    #[error(
        "a {part} of layer {layer} is too large for a half-precision cache; use KvType::F32 (-ctk f32 -ctv f32)"
    )]
    Overflow {
        /// The layer.
        layer: usize,
        /// Keys or values.
        part: KvPart,
    },
}
