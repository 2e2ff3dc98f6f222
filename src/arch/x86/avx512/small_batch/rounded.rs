//! Activations of a small batch, rounded to bytes.

use crate::arch::acts::BlockP16;
use crate::arch::x86::avx2::gemm::round;
use bytemuck::Pod;

/// For weights with a scale and an offset per `SPAN`, 16 or 32: a scale per 32 activations.
#[derive(Clone, Copy, bytemuck::Zeroable)]
#[repr(C)]
pub(in crate::arch) struct Spans<const SPAN: usize> {
    pub(in crate::arch) q: [[[u8; 4]; 16]; 4],
    /// Scale per 32 values.
    pub(in crate::arch) d: [f32; 8],
    /// `d·Σq` per 32 values.
    pub(in crate::arch) sums: [f32; 8],
    /// `d·Σq` per 16 values.
    pub(in crate::arch) half_sums: [f32; 16],
}

impl<const SPAN: usize> Spans<SPAN> {
    /// The bytes of values `4·i..4·i + 4`.
    #[inline(always)]
    pub(in crate::arch) fn word(&self, i: usize) -> i32 {
        i32::from_le_bytes(self.q[BlockP16::register(4 * i)][i / 4])
    }
}

/// For weights with a scale per 16 and no offset: a scale per 16 activations.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(in crate::arch) struct Halves {
    pub(in crate::arch) q: [[[u8; 4]; 16]; 4],
    pub(in crate::arch) d: [f32; 16],
    /// `Σq` per 16 values.
    pub(in crate::arch) sums: [i32; 16],
}

// SAFETY: numbers without padding between them.
unsafe impl<const SPAN: usize> Pod for Spans<SPAN> {}

/// Values per block.
pub(in crate::arch) const VALUES: usize = 256;

#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::arch) fn round_spans<const SPAN: usize>(x: &[f32; VALUES]) -> Spans<SPAN> {
    let mut block: Spans<SPAN> = bytemuck::Zeroable::zeroed();
    for (b, x) in x.as_chunks::<32>().0.iter().enumerate() {
        let [words, [d, first, second, both, ..], _] = round::<true>(x);
        put_words(&mut block.q, b, words);
        block.d[b] = d;
        block.sums[b] = both;
        block.half_sums[2 * b] = first;
        block.half_sums[2 * b + 1] = second;
    }
    block
}

/// The bytes of 32 values, those from `32·b` on.
#[inline]
pub(in crate::arch) fn put_words(q: &mut [[[u8; 4]; 16]; 4], b: usize, words: [f32; 8]) {
    for (i, word) in words.into_iter().enumerate() {
        q[BlockP16::register(32 * b + 4 * i)][2 * b + i / 4] = word.to_bits().to_le_bytes();
    }
}

/// A record of 32 activations: see [`round_halves`](crate::arch::x86::avx2::gemm::round_halves).
pub(in crate::arch) type Record = [u32; 12];
