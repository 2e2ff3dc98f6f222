//! A hash of contents, to tell whether files are the same. Not secure against forgery.

use rayon::prelude::*;

/// Bytes that are hashed by themselves, so that several threads can share the work.
const CHUNK: usize = 1 << 20;

const PRIME: u64 = 0x9e37_79b9_7f4a_7c15;

/// A hash of the bytes of `parts` in their order; where one ends counts, too.
pub fn content_hash<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut hash = PRIME;
    for part in parts {
        let chunks: Vec<u64> = part.par_chunks(CHUNK).map(of_chunk).collect();
        hash = chunks.into_iter().fold(mix(hash, part.len() as u64), mix);
    }
    hash
}

fn of_chunk(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let words = words.iter().map(|&word| u64::from_le_bytes(word));
    let rest = rest.iter().map(|&byte| u64::from(byte));
    words.chain(rest).fold(PRIME, mix)
}

/// One to one in `word`, and in `hash`.
fn mix(hash: u64, word: u64) -> u64 {
    (hash.rotate_left(23) ^ word).wrapping_mul(PRIME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_and_every_limit_counts() {
        let bytes: Vec<u8> = (0..CHUNK + 21).map(|i| ((i * i) >> 3) as u8).collect();
        let whole = content_hash([&bytes[..]]);
        assert_eq!(whole, content_hash([&bytes[..]]));
        for i in [0, 7, 8, CHUNK - 1, CHUNK, CHUNK + 20] {
            let mut other = bytes.clone();
            other[i] ^= 1;
            assert_ne!(whole, content_hash([&other[..]]), "byte {i}");
        }
        let (a, b) = bytes.split_at(CHUNK);
        assert_ne!(whole, content_hash([a, b]));
        assert_ne!(content_hash([a, b]), content_hash([b, a]));
        assert_ne!(content_hash([a, &[]]), content_hash([a]));
    }
}
