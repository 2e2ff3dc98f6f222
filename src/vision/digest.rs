//! SHA-256 (FIPS 180-4): names of images that nobody can forge, as those of other users may be in
//! the same cache.

use crate::kv::ImageKey;

/// Fractional parts of the square roots of the first 8 primes.
const INITIAL: [u32; 8] = [
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
];
/// Fractional parts of the cube roots of the first 64 primes.
const ROUNDS: [u32; 64] = [
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
];

/// A hash, finished or under way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Digest {
    state: [u32; 8],
    block: [u8; 64],
    n_block: usize,
    n: u64,
    bytes: [u8; 32],
}

impl Digest {
    pub(super) fn new() -> Digest {
        Digest {
            state: INITIAL,
            block: [0; 64],
            n_block: 0,
            n: 0,
            bytes: [0; 32],
        }
    }

    /// Continues with `bytes`.
    pub(super) fn add(&mut self, mut bytes: &[u8]) {
        self.n += bytes.len() as u64;
        while !bytes.is_empty() {
            let n = bytes.len().min(64 - self.n_block);
            self.block[self.n_block..][..n].copy_from_slice(&bytes[..n]);
            self.n_block += n;
            bytes = &bytes[n..];
            if self.n_block == 64 {
                self.n_block = 0;
                compress(&mut self.state, &self.block);
            }
        }
    }

    /// The hash of all that was added.
    pub(super) fn finish(mut self) -> Digest {
        let n_bits = self.n.wrapping_mul(8);
        self.add(&[0x80]);
        while self.n_block != 56 {
            self.add(&[0]);
        }
        self.add(&n_bits.to_be_bytes());
        let mut to = Digest::new();
        for (bytes, word) in to.bytes.chunks_exact_mut(4).zip(self.state) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
        to
    }

    /// The finished hash.
    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.bytes
    }

    /// The finished hash in hexadecimal digits.
    pub(super) fn hex(&self) -> String {
        self.bytes.map(|byte| format!("{byte:02x}")).concat()
    }

    /// Its first 128 bits, for the prefix cache.
    pub(super) fn key(&self) -> ImageKey {
        let word = |i: usize| {
            self.bytes[8 * i..][..8]
                .iter()
                .fold(0, |word, &byte| word << 8 | u64::from(byte))
        };
        ImageKey([word(0), word(1)])
    }
}

fn compress(state: &mut [u32; 8], block: &[u8; 64]) {
    let mut w = [0_u32; 64];
    for (w, bytes) in w.iter_mut().zip(block.as_chunks::<4>().0) {
        *w = u32::from_be_bytes(*bytes);
    }
    for i in 16..64 {
        let (a, b) = (w[i - 15], w[i - 2]);
        let low = a.rotate_right(7) ^ a.rotate_right(18) ^ (a >> 3);
        let high = b.rotate_right(17) ^ b.rotate_right(19) ^ (b >> 10);
        w[i] = w[i - 16]
            .wrapping_add(low)
            .wrapping_add(w[i - 7])
            .wrapping_add(high);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (round, w) in ROUNDS.iter().zip(w) {
        let s1 = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let choice = (e & f) ^ (!e & g);
        let t = h
            .wrapping_add(s1)
            .wrapping_add(choice)
            .wrapping_add(*round)
            .wrapping_add(w);
        let s0 = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let majority = (a & b) ^ (a & c) ^ (b & c);
        (h, g, f, e) = (g, f, e, d.wrapping_add(t));
        (d, c, b, a) = (c, b, a, t.wrapping_add(s0.wrapping_add(majority)));
    }
    for (to, x) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *to = to.wrapping_add(x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_values() {
        let of = |text: &str| {
            let mut digest = Digest::new();
            digest.add(text.as_bytes());
            digest.finish().hex()
        };
        assert!(of("").starts_with("e3b0c44298fc1c149afbf4c8996fb924"));
        assert!(of("abc").starts_with("ba7816bf8f01cfea414140de5dae2223"));
        let two = of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq");
        assert!(two.starts_with("248d6a61d20638b8e5c026930c3e6039"));
    }
}
