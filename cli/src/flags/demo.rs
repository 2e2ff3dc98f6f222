//! The model in `models/`, so that the first command needs no download.

use crate::io::Failure;
use ruvllm::gguf::{Header, Metadata};

#[cfg(feature = "demo-model")]
pub(super) const NAME: &str = "ruvllm-rust-6m-q8_0.gguf";
#[cfg(not(feature = "demo-model"))]
pub(super) const NAME: &str = "demo model";

/// What `generate` draws with unless a flag says otherwise, so that the first command shows the same
/// text everywhere: with this seed the levels agree on it.
pub(super) const SEED: u64 = 52;

#[cfg(feature = "demo-model")]
pub(super) fn bytes() -> Result<&'static [u8], Failure> {
    #[repr(align(64))]
    struct Aligned<T: ?Sized>(T);

    /// Aligned, so that tensors are used in place.
    static FILE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    )));
    Ok(&FILE.0)
}

#[cfg(not(feature = "demo-model"))]
pub(super) fn bytes() -> Result<&'static [u8], Failure> {
    Err(Failure::Usage(
        "this build has no built-in model: name one with -m FILE".into(),
    ))
}

/// Metadata of the built-in model.
pub(crate) fn demo_metadata() -> Result<Metadata, Failure> {
    let bytes = bytes()?;
    Ok(Header::parse(bytes, bytes.len() as u64)?.metadata)
}
