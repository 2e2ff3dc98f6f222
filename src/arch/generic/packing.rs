//! Packing of activations and storing of sums, shared by all panels with `f32` sums.

use super::lanes::Lanes;

/// Maximum number of lanes of a vector.
pub(in crate::arch) const MAX_LANES: usize = 16;

/// Vector type that can be transposed.
pub(in crate::arch) trait Transpose: Lanes {
    /// Transposes the first `N` vectors: value `i` of vector `j` becomes value `j` of vector `i`.
    fn transpose(x: [Self; MAX_LANES]) -> [Self; MAX_LANES];

    /// Reads `N` vectors that lie `stride` values apart, and transposes them.
    ///
    /// # Safety
    /// They must be readable.
    #[inline(always)]
    unsafe fn read_transposed(self, p: *const f32, stride: usize) -> [Self; MAX_LANES] {
        let mut rows = [self; MAX_LANES];
        for r in 0..Self::N {
            // SAFETY: the caller's promise.
            rows[r] = unsafe { self.read(p.wrapping_add(r * stride)) };
        }
        Self::transpose(rows)
    }
}

/// See [`crate::arch::gemm::Panels::PACK`]: a word is one value.
#[inline(always)]
pub(in crate::arch) fn pack<V: Transpose>(z: V, x: &[f32], k: usize, packed: &mut [u32]) {
    let packed: &mut [f32] = bytemuck::cast_slice_mut(packed);
    let n_vecs = (x.len() / k).div_ceil(V::N);
    for (v, x) in x.chunks(V::N * k).enumerate() {
        for (c, packed) in packed.chunks_mut(V::N * n_vecs * V::N).enumerate() {
            let words = if x.len() == V::N * k && (c + 1) * V::N <= k {
                // SAFETY: `N` rows of `k` values, and a vector of each.
                unsafe { z.read_transposed(x.as_ptr().wrapping_add(c * V::N), k) }
            } else {
                let mut rows = [z; MAX_LANES];
                for (row, x) in rows.iter_mut().zip(x.chunks_exact(k)) {
                    *row = z.load(&x[c * V::N..((c + 1) * V::N).min(k)]);
                }
                V::transpose(rows)
            };
            for (i, packed) in packed.chunks_exact_mut(n_vecs * V::N).enumerate() {
                words[i].store(&mut packed[v * V::N..][..V::N]);
            }
        }
    }
}

/// See [`crate::arch::gemm::Panels::STORE`].
///
/// # Safety
/// The pointers must be valid for that.
#[inline(always)]
pub(in crate::arch) unsafe fn store_transposed<V: Transpose>(
    z: V,
    sums: *const f32,
    y: *mut f32,
    stride: usize,
    rows: usize,
    cols: usize,
) {
    if rows == V::N && cols == V::N {
        // SAFETY: `N` rows of the sums.
        let tile = unsafe { z.read_transposed(sums, V::N) };
        for i in 0..V::N {
            // SAFETY: a vector of row `i`.
            unsafe { tile[i].write(y.wrapping_add(i * stride)) };
        }
        return;
    }
    let mut tile = [z; MAX_LANES];
    for r in 0..cols.min(V::N) {
        // SAFETY: a row of the sums.
        tile[r] = unsafe { z.read(sums.wrapping_add(r * V::N)) };
    }
    let tile = V::transpose(tile);
    for i in 0..rows.min(V::N) {
        // SAFETY: `cols` values of row `i`.
        let y = unsafe { std::slice::from_raw_parts_mut(y.wrapping_add(i * stride), cols) };
        tile[i].store(y);
    }
}

/// Packing shared by a level's panels with `f32` sums.
macro_rules! packing {
    ($features:literal, $zero:expr) => {
        #[target_feature(enable = $features)]
        fn pack(x: &[f32], k: usize, packed: &mut [u32]) {
            $crate::arch::generic::packing::pack($zero, x, k, packed);
        }

        /// # Safety
        /// As [`Panels::STORE`].
        #[target_feature(enable = $features)]
        pub(in crate::arch) unsafe fn store_transposed(
            sums: *const f32,
            y: *mut f32,
            stride: usize,
            rows: usize,
            cols: usize,
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                $crate::arch::generic::packing::store_transposed($zero, sums, y, stride, rows, cols)
            }
        }
    };
}
pub(in crate::arch) use packing;
