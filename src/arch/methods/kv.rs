//! Storing and reading keys and values.

use crate::arch::attention::{KV_BLOCK, MAX_HEAD_DIM};
use crate::arch::kv::KvType;
use crate::arch::level::Arch;
use half::{bf16, f16};

impl Arch {
    /// Multiplies each run of `n` values by the orthonormal Hadamard matrix of size `n`, the
    /// largest power of two that divides the row's length: spreads outliers in one dimension
    /// over all. It is its own inverse and keeps dot products of two rows, up to rounding. The
    /// same bits on all levels.
    pub fn hadamard(self, row: &mut [f32]) {
        // SAFETY: `self` proves the CPU features.
        unsafe { (self.0.hadamard)(row) }
    }

    /// Stores `row` as row `i` of a block. Returns whether every finite value is still finite.
    ///
    /// If any value of a quantised group is not finite, the whole group becomes NaN. The same bits
    /// on all levels.
    ///
    /// # Panics
    /// If the block has another size than `kind` says, is not aligned to a value of it, or has no
    /// row `i`.
    pub fn store_kv(self, kind: KvType, block: &mut [u8], i: usize, row: &[f32]) -> bool {
        assert!(
            block.len() == kind.block_bytes(row.len()) && i < KV_BLOCK,
            "store_kv: {kind} block"
        );
        let from = i * row.len();
        match kind {
            KvType::F32 => {
                bytemuck::cast_slice_mut(block)[from..][..row.len()].copy_from_slice(row);
                true
            }
            KvType::F16 => {
                let to = &mut bytemuck::cast_slice_mut::<u8, f16>(block)[from..][..row.len()];
                self.f32_to_f16(row, to);
                let mut infinite = false;
                for y in &*to {
                    infinite |= y.to_bits() & 0x7fff == f16::INFINITY.to_bits();
                }
                !infinite
                    || !row
                        .iter()
                        .zip(to)
                        .any(|(x, y)| x.is_finite() && y.is_infinite())
            }
            KvType::Bf16 => {
                let to = &mut bytemuck::cast_slice_mut::<u8, bf16>(block)[from..][..row.len()];
                to.iter_mut()
                    .zip(row)
                    .for_each(|(y, x)| *y = bf16::from_f32(*x));
                !row.iter()
                    .zip(to)
                    .any(|(x, y)| x.is_finite() && y.is_infinite())
            }
            _ => {
                // SAFETY: `self` proves the CPU features; the row is inside the block.
                unsafe { (self.0.quantize_kv)(kind, block, i, row) }
                true
            }
        }
    }

    /// Reads the first `rows.len() / dim` rows of a block.
    ///
    /// # Panics
    /// If the block has another size than `kind` says, is not aligned to a value of it, or has
    /// fewer rows.
    pub fn load_kv(self, kind: KvType, block: &[u8], dim: usize, rows: &mut [f32]) {
        assert!(
            dim <= MAX_HEAD_DIM && block.len() == kind.block_bytes(dim),
            "load_kv: {kind} block"
        );
        assert!(rows.len() <= KV_BLOCK * dim, "load_kv: rows");
        // SAFETY: `self` proves the CPU features; the block is whole.
        unsafe { (self.0.load_kv)(kind, block, dim, rows) }
    }
}
