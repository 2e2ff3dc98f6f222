//! Products with weights.

use crate::arch::acts::{ActForm, Acts, BlockP16, BlockQ16};
use crate::arch::level::Arch;
use crate::arch::table::{MixedBatch, PanelElement, Transposed};
use crate::arch::view::{CacheLine, ColumnsMut};
use crate::quant::DType;

impl Arch {
    /// Form in which [`Arch::matvec`] reads activations for weights of `dtype`.
    pub fn act_form(self, dtype: DType) -> ActForm {
        (self.0.matvec)(dtype).form
    }

    /// `y[i][r] = Σ_k W[r][k]·x[i][k]`: `w` has `y.cols()` rows of `x.n()` values. A row's bits do
    /// not depend on how many rows there are, here or in [`Arch::gemm`]; the two round differently.
    ///
    /// # Panics
    /// If the lengths disagree or `x` is not in the format of [`Arch::act_form`].
    pub fn matvec(self, dtype: DType, y: &mut ColumnsMut<'_>, w: &[u8], x: &Acts<'_>) {
        let f = dtype.float_format();
        assert_eq!(
            Some(w.len()),
            f.bytes_of(y.cols(), x.n()),
            "matvec: {dtype:?} weight bytes"
        );
        assert_eq!(y.rows(), x.m(), "matvec: rows of activations");
        let matvec = (self.0.matvec)(dtype);
        assert_eq!(matvec.form, x.form(), "matvec: activation form");
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (matvec.kernel)(y, dtype, w, x) }
    }

    /// Element type that [`Arch::gemm`] multiplies for weights of `dtype`, and products of it per
    /// product of a weight.
    pub fn gemm_element(self, dtype: DType) -> (PanelElement, u64) {
        (self.0.gemm)(dtype).element
    }

    /// Multiplies and adds as fast as the level can, for measurements: `rounds` of some hundred
    /// operations that touch no memory. Returns the number of operations.
    pub fn peak(self, element: PanelElement, rounds: u64) -> u64 {
        // SAFETY: `self` proves the CPU features.
        unsafe { (self.0.peak)(element, rounds) }
    }

    /// Weight rows one [`Arch::gemm`] call should cover at most, a multiple of 32; smaller
    /// multiples of 32 work, too.
    pub fn gemm_tile(self, dtype: DType) -> usize {
        (self.0.gemm)(dtype).tile
    }

    /// Maximum number of activation rows for which an [`Arch::gemm`] call should cover as many
    /// weight rows as one of [`Arch::matvec`], instead of [`Arch::gemm_tile`].
    pub fn gemm_few(self, dtype: DType) -> usize {
        (self.0.gemm)(dtype).small_batch
    }

    /// Size of the workspace that [`Arch::gemm`] needs for weights of `dtype`, in cache lines.
    pub fn gemm_workspace(self, dtype: DType) -> usize {
        (self.0.gemm)(dtype).workspace
    }

    /// Bytes of packed activations for [`Arch::gemm`].
    ///
    /// # Panics
    /// If the number overflows `usize`.
    pub fn packed_len(self, dtype: DType, m: usize, k: usize) -> usize {
        ((self.0.gemm)(dtype).packed_len)(m, k)
    }

    /// Rows of activations that [`Arch::pack`] takes at a time.
    pub fn pack_group(self, dtype: DType) -> usize {
        (self.0.gemm)(dtype).group
    }

    /// Packs one group of the `m` rows of a product for [`Arch::gemm`] with weights of `dtype`: `x`
    /// has at most [`Arch::pack_group`] rows of `k` values. Group `g` begins at
    /// `g·packed_len(group)`. Few rows are packed otherwise than many: `m` has to be that of
    /// [`Arch::gemm`].
    ///
    /// # Panics
    /// If the lengths disagree.
    pub fn pack(self, dtype: DType, x: &[f32], m: usize, k: usize, packed: &mut [u8]) {
        let gemm = (self.0.gemm)(dtype);
        let rows = x.len().checked_div(k).unwrap_or(0);
        assert!(
            x.len() == rows * k && (rows == m || m > gemm.group && rows <= gemm.group),
            "pack: {} activations, {m} rows of {k}",
            x.len()
        );
        assert_eq!(packed.len(), (gemm.packed_len)(rows, k), "pack: buffer");
        if x.is_empty() {
            return;
        }
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (gemm.pack)(x, m, k, packed) }
    }

    /// Whether activations packed for `a` serve weights of `b` too.
    pub fn same_packing(self, a: DType, b: DType) -> bool {
        std::ptr::fn_addr_eq((self.0.gemm)(a).pack, (self.0.gemm)(b).pack)
    }

    /// `y[i][r] = Σ_k W[r][k]·x[i][k]` with `packed` made by [`Arch::pack`] from `y.rows()` rows.
    /// The contents of `workspace` do not matter.
    ///
    /// # Panics
    /// If the lengths disagree or `workspace` is smaller than [`Arch::gemm_workspace`] says.
    pub fn gemm(
        self,
        dtype: DType,
        y: &mut ColumnsMut<'_>,
        w: &[u8],
        packed: &[u8],
        k: usize,
        workspace: &mut [CacheLine],
    ) {
        let f = dtype.float_format();
        let gemm = (self.0.gemm)(dtype);
        assert_eq!(
            Some(w.len()),
            f.bytes_of(y.cols(), k),
            "gemm: {dtype:?} weight bytes"
        );
        assert_eq!(
            packed.len(),
            (gemm.packed_len)(y.rows(), k),
            "gemm: packed activations"
        );
        assert!(workspace.len() >= gemm.workspace, "gemm: workspace");
        if k == 0 || y.rows() == 0 {
            return y.fill(0.0);
        }
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (gemm.kernel)(y, dtype, w, packed, k, workspace) }
    }

    /// Whether [`Arch::both`] unpacks weights of `dtype` once for a mixed batch of these sizes.
    pub fn has_both(self, dtype: DType, n_generated: usize, n_prompt: usize) -> bool {
        let fits =
            |mixed: MixedBatch| n_generated <= mixed.max_rows.0 && n_prompt <= mixed.max_rows.1;
        n_generated > 0 && n_prompt > 0 && (self.0.gemm)(dtype).mixed.is_some_and(fits)
    }

    /// [`Arch::matvec`] of the first rows of `y`, and [`Arch::gemm`] of the others, with the same
    /// bits.
    ///
    /// # Panics
    /// If the lengths disagree, `generated` is not in the format of [`Arch::act_form`], or
    /// [`Arch::has_both`] is not true.
    pub fn both(
        self,
        dtype: DType,
        y: &mut ColumnsMut<'_>,
        w: &[u8],
        generated: &Acts<'_>,
        packed: &[u8],
        k: usize,
    ) {
        let gemm = (self.0.gemm)(dtype);
        let n_prompt = y.rows().checked_sub(generated.m()).expect("both: rows");
        assert!(self.has_both(dtype, generated.m(), n_prompt), "both: rows");
        assert_eq!(
            Some(w.len()),
            dtype.float_format().bytes_of(y.cols(), k),
            "both: {dtype:?} weight bytes"
        );
        assert_eq!(
            (generated.form(), generated.n()),
            (self.act_form(dtype), k),
            "both: generated rows"
        );
        assert_eq!(
            packed.len(),
            (gemm.packed_len)(n_prompt, k),
            "both: packed activations"
        );
        let mixed = gemm.mixed.expect("has_both");
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (mixed.kernel)(y, dtype, w, generated, packed, k) }
    }

    /// The product with the transpose of a matrix `(n_out, n_in)` of `dtype`: turns gradients with
    /// respect to its outputs into gradients with respect to its inputs.
    pub fn transposed(self, dtype: DType, n_out: usize, n_in: usize) -> TransposedProduct {
        TransposedProduct {
            table: (self.0.transposed)(dtype),
            dtype,
            n_in,
            n_out,
        }
    }

    /// Expands whole blocks, finite ones to exactly the values of
    /// [`Format::dequantize`](crate::quant::Format::dequantize).
    ///
    /// # Panics
    /// If the lengths disagree.
    pub fn dequantize(self, dtype: DType, blocks: &[u8], x: &mut [f32]) {
        assert_eq!(
            dtype.float_format().bytes_of(1, x.len()),
            Some(blocks.len()),
            "dequantize: {dtype:?} bytes"
        );
        // SAFETY: `self` proves the CPU features; lengths were checked above.
        unsafe { (self.0.dequantize)(dtype, blocks, x) }
    }

    /// Prefetches `bytes` into the L2 cache, on CPUs that have an instruction for it.
    #[cfg_attr(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        expect(unused_variables)
    )]
    pub fn prefetch(self, bytes: &[u8]) {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        crate::arch::gemm::prefetch(bytes);
    }

    /// Rounds a row of activations to 16-bit integers.
    ///
    /// # Panics
    /// If `blocks` has another length than [`BlockQ16::per_row`] says.
    pub fn quantize_q16(self, x: &[f32], blocks: &mut [BlockQ16]) {
        assert_eq!(
            blocks.len(),
            BlockQ16::per_row(x.len()),
            "quantize_q16: {} values",
            x.len()
        );
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (self.0.quantize_q16)(x, blocks) }
    }

    /// Rounds a row of activations to 16-bit integers in two planes of bytes.
    ///
    /// # Panics
    /// If `blocks` has another length than [`BlockP16::per_row`] says.
    pub fn quantize_p16(self, x: &[f32], blocks: &mut [BlockP16]) {
        assert_eq!(
            blocks.len(),
            BlockP16::per_row(x.len()),
            "quantize_p16: {} values",
            x.len()
        );
        // SAFETY: `self` proves the CPU features; shapes were checked above.
        unsafe { (self.0.quantize_p16)(x, blocks) }
    }
}

/// The product with a transposed matrix, see [`Arch::transposed`].
#[derive(Clone, Copy)]
pub struct TransposedProduct {
    table: Transposed,
    dtype: DType,
    n_in: usize,
    n_out: usize,
}

impl std::fmt::Debug for TransposedProduct {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "TransposedProduct({}, {} × {})",
            self.dtype, self.n_out, self.n_in
        )
    }
}

impl TransposedProduct {
    /// Columns one [`TransposedProduct::multiply`] call takes; the last one may take fewer.
    pub fn tile(&self) -> usize {
        self.table.tile
    }

    /// Rows that [`TransposedProduct::pack`] takes at a time.
    pub fn group(&self) -> usize {
        self.table.group
    }

    /// Size of the workspace that [`TransposedProduct::multiply`] needs, in cache lines; the same
    /// for all formats.
    pub fn workspace(&self) -> usize {
        self.table.workspace
    }

    /// Bytes that `m` packed rows take.
    pub fn packed_len(&self, m: usize) -> usize {
        (self.table.packed_len)(m, self.n_out)
    }

    /// Packs one group of rows, `y` (`m × n_out`). Group `g` of many rows begins at
    /// `g·packed_len(group)`.
    ///
    /// # Panics
    /// If the lengths disagree.
    pub fn pack(&self, y: &[f32], m: usize, packed: &mut [u8]) {
        assert!(
            Some(y.len()) == m.checked_mul(self.n_out) && m <= self.table.group,
            "transposed: {m} rows to pack"
        );
        assert_eq!(packed.len(), self.packed_len(m), "transposed: buffer");
        if y.is_empty() {
            return;
        }
        // SAFETY: `Arch` proved the CPU features; shapes were checked above.
        unsafe { (self.table.pack)(y, m, self.n_out, packed) }
    }

    /// `x[i][c] = Σ_r W[r][first + c]·y[i][r]` with `packed` made from `x.rows()` rows; `w` is the
    /// whole matrix. The contents of `workspace` do not matter.
    ///
    /// # Panics
    /// If the lengths disagree, or the columns are not a tile.
    pub fn multiply(
        &self,
        x: &mut ColumnsMut<'_>,
        first: usize,
        w: &[u8],
        packed: &[u8],
        workspace: &mut [CacheLine],
    ) {
        let f = self.dtype.float_format();
        let (cols, tile) = (x.cols(), self.table.tile);
        assert_eq!(
            Some(w.len()),
            f.bytes_of(self.n_out, self.n_in),
            "transposed: weight bytes"
        );
        assert_eq!(
            packed.len(),
            self.packed_len(x.rows()),
            "transposed: packed rows"
        );
        let rest = self.n_in.checked_sub(first);
        assert!(
            first.is_multiple_of(tile) && rest.map(|rest| rest.min(tile)) == Some(cols),
            "transposed: columns {first}+{cols} of {}",
            self.n_in
        );
        assert!(
            workspace.len() >= self.table.workspace,
            "transposed: workspace"
        );
        if self.n_out == 0 {
            return x.fill(0.0);
        }
        // SAFETY: `Arch` proved the CPU features; shapes were checked above.
        unsafe {
            (self.table.kernel)(
                x, first, self.n_in, self.dtype, w, packed, self.n_out, workspace,
            )
        }
    }
}
