//! What the bits of a sequence depend on.

use crate::arch::ARITHMETIC_VERSION;
use crate::engine::sequence::Sequence;
use crate::kv::{SEED, mix};

pub(crate) const PRECISION: &str = "session.precision";

/// What follows a precision where [centres](crate::kv::KeyCentres) of keys are not stored.
pub(crate) const CENTRED: &str = " (centred)";

/// Properties on which bits depend: key, name, value.
pub(crate) fn identity(seq: &Sequence) -> Vec<(&'static str, &'static str, String)> {
    let hash = |x: u64| format!("{x:016x}");
    vec![
        ("session.model", "model", hash(seq.model().fingerprint())),
        (
            "session.device",
            "instruction-set level or device",
            seq.device.clone(),
        ),
        (
            "session.arithmetic",
            "version of the arithmetic",
            ARITHMETIC_VERSION.to_string(),
        ),
        ("session.adapters", "set of adapters", hash(adapters(seq))),
        (
            PRECISION,
            "precision of keys and values",
            match seq.kv.has_centres() {
                true => format!("{}{CENTRED}", seq.kv.policy()),
                false => seq.kv.policy().to_string(),
            },
        ),
        (
            "session.ropes",
            "rope scaling, which may depend on the context's size",
            hash(seq.rope.fingerprint()),
        ),
        (
            "session.exact",
            "arithmetic of prompts (exact)",
            seq.exact.to_string(),
        ),
    ]
}

/// Hash of the adapters' terms; [`SEED`] without any.
fn adapters(seq: &Sequence) -> u64 {
    let mut hash = SEED;
    for (_, adapter, scale) in seq.adapters() {
        hash = mix(hash, bytemuck::bytes_of(&[scale, adapter.alpha()]));
        for (i, site) in adapter.sites().iter().enumerate() {
            if let Some(term) = adapter.term(i) {
                let (a, b) = term.factors();
                hash = checksum(hash, &site.tensor, bytemuck::cast_slice(&a.expand()));
                hash = checksum(hash, "b", bytemuck::cast_slice(&b.expand()));
            }
        }
    }
    hash
}

/// Continues the hash with a named tensor.
pub(crate) fn checksum(hash: u64, name: &str, bytes: &[u8]) -> u64 {
    mix(mix(hash, name.as_bytes()), bytes)
}
