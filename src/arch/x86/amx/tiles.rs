//! The tile instructions, until `core::arch` has them on stable Rust (feature `x86_amx_intrinsics`;
//! named here as there). A tile is 16 rows of 64 bytes.
//!
//! The compiler knows nothing of tile registers and never touches them. It must not reorder these
//! instructions, and does not as long as none of them is marked `pure`.

use std::arch::asm;

/// Configuration that `ldtilecfg` reads: eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static FULL_TILES: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Configuration of eight full tiles, released on drop: otherwise the state that the kernel saves
/// at every thread switch would stay large.
pub(super) struct Tiles(());

impl Tiles {
    /// # Safety
    /// The CPU must have AMX, and the process the permission to use it.
    #[inline]
    pub(super) unsafe fn load_config() -> Tiles {
        // SAFETY: the configuration is one that palette 1 allows; the rest is the caller's promise.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &FULL_TILES, options(readonly, nostack, preserves_flags))
        };
        Tiles(())
    }
}

impl Drop for Tiles {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the maker of `self` promised that the CPU has AMX.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

/// `T = 0`.
///
/// # Safety
/// [`Tiles`] must be alive.
#[inline(always)]
pub(super) unsafe fn tile_zero<const T: u8>() {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilezero tmm{t}", t = const T, options(nomem, nostack, preserves_flags)) };
}

/// Loads row `i` of `T` from `from + i·stride` bytes.
///
/// # Safety
/// [`Tiles`] must be alive, and all 16 rows readable.
#[inline(always)]
pub(super) unsafe fn tile_loadd<const T: u8>(from: *const u32, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tileloadd tmm{t}, [{from} + {stride}]", t = const T, from = in(reg) from, stride = in(reg) stride,
            options(readonly, nostack, preserves_flags));
    }
}

/// [`tile_loadd`] for data that is not needed again soon: it leaves more of L1 to other data.
///
/// # Safety
/// That of [`tile_loadd`].
#[inline(always)]
pub(super) unsafe fn tile_stream_loadd<const T: u8>(from: *const u32, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tileloaddt1 tmm{t}, [{from} + {stride}]", t = const T, from = in(reg) from, stride = in(reg) stride,
            options(readonly, nostack, preserves_flags));
    }
}

/// Stores row `i` of `T` to `to + i·stride` bytes.
///
/// # Safety
/// [`Tiles`] must be alive, and all 16 rows writable.
#[inline(always)]
pub(super) unsafe fn tile_stored<const T: u8>(to: *mut f32, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tilestored [{to} + {stride}], tmm{t}", t = const T, to = in(reg) to, stride = in(reg) stride,
            options(nostack, preserves_flags));
    }
}

/// `C[m][n] += Σ_k A[m][k]·B[k/2][n][k%2]` over 32 values of `k` in bf16, sums in `f32`.
///
/// # Safety
/// [`Tiles`] must be alive.
#[inline(always)]
pub(super) unsafe fn tile_dpbf16ps<const C: u8, const A: u8, const B: u8>() {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tdpbf16ps tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
            options(nomem, nostack, preserves_flags));
    }
}
