//! Hash as fast as memory, for checksums and names in files; its values never change. Not secure
//! against forgery.

/// FNV's offset basis: the initial value of a hash.
pub const SEED: u64 = 0xcbf2_9ce4_8422_2325;

fn step(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(23)
}

/// Continues a hash: FNV-1a over words instead of bytes. Each step is one-to-one, so that a change
/// of any single word is detected.
pub fn mix(hash: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let hash = words
        .iter()
        .fold(hash, |hash, word| step(hash, u64::from_le_bytes(*word)));
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    step(step(hash, u64::from_le_bytes(last)), bytes.len() as u64)
}
