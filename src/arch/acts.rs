//! Activation rows in the formats that product kernels read.

/// 256 activations rounded to 16-bit integers, for products with block-quantised weights.
///
/// Within 32 values `x ≈ d·q` with `|q| ≤ MAX`: a rounding error 256 times below that of 8-bit
/// activations, so that a product is exact to `f32` noise. The last block of a row is padded with
/// zeros. The layout of the integers suits the architecture's multiply instructions.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub struct BlockQ16 {
    /// The integers, in the order in which kernels unpack weights, so that the sums of four blocks
    /// of 32 end up in the four 128-bit lanes of one 512-bit register: value `j` of block `b`
    /// is `q[b % 2 · 4 + j / 16 · 2 + j % 2][b / 2 · 8 + j % 16 / 2]`. A row of `q` thus
    /// holds, for four blocks, every second value of 16, as one mask extracts them from 16-bit
    /// words of packed weights.
    #[cfg(not(target_arch = "aarch64"))]
    pub q: [[i16; 32]; 8],
    /// The integers as two signed bytes, `q = 256·high + low`: Arm multiplies bytes by bytes, and
    /// weights have at most 8 bits.
    #[cfg(target_arch = "aarch64")]
    pub high: [i8; 256],
    /// See [`BlockQ16::high`].
    #[cfg(target_arch = "aarch64")]
    pub low: [i8; 256],
    /// Scale per 16 values; the two halves of 32 values share one.
    pub d: [f32; 16],
    /// `d·Σq` per 16 values: times a constant offset of their weights, it is that offset's share
    /// of the product.
    pub s: [f32; 16],
}

impl BlockQ16 {
    /// Values per block.
    pub const VALUES: usize = 256;

    /// The largest integer.
    pub const MAX: i16 = if cfg!(target_arch = "aarch64") {
        127 * 256 + 127
    } else {
        i16::MAX
    };

    /// Blocks per row of `n` values.
    #[inline]
    pub const fn per_row(n: usize) -> usize {
        n.div_ceil(Self::VALUES)
    }

    /// Integer `i` of 256.
    #[inline]
    pub fn integer(&self, i: usize) -> i16 {
        #[cfg(not(target_arch = "aarch64"))]
        let q = {
            let (row, column) = Self::position(i);
            self.q[row][column]
        };
        #[cfg(target_arch = "aarch64")]
        let q = i16::from(self.high[i]) * 256 + i16::from(self.low[i]);
        q
    }

    /// Sets integer `i` of 256; `|q| ≤ MAX`.
    #[inline]
    pub(super) fn set_integer(&mut self, i: usize, q: i16) {
        #[cfg(not(target_arch = "aarch64"))]
        {
            let (row, column) = Self::position(i);
            self.q[row][column] = q;
        }
        #[cfg(target_arch = "aarch64")]
        {
            self.low[i] = q as i8;
            self.high[i] = ((q + 128) >> 8) as i8;
        }
    }

    /// Place of value `i` of 256 in [`BlockQ16::q`].
    #[inline]
    #[cfg(not(target_arch = "aarch64"))]
    pub const fn position(i: usize) -> (usize, usize) {
        let (b, j) = (i / 32, i % 32);
        (b % 2 * 4 + j / 16 * 2 + j % 2, b / 2 * 8 + j % 16 / 2)
    }

    /// `(d, 1/d)` for 32 values, from the largest bits of their magnitudes: compared as integers,
    /// because NaN is the largest then, and has to reach `d` and the result.
    #[inline]
    pub(super) fn scale(max_bits: u32) -> (f32, f32) {
        scale(max_bits, Self::MAX)
    }
}

/// See [`BlockQ16::scale`]; `largest` is the largest integer.
#[inline]
fn scale(max_bits: u32, largest: i16) -> (f32, f32) {
    let max = f32::from_bits(max_bits);
    let d = max / f32::from(largest);
    // Scales below the normal numbers count as 0: their inverse would overflow.
    if d < f32::MIN_POSITIVE {
        (0.0, 0.0)
    } else {
        (d, f32::from(largest) / max)
    }
}

/// 256 activations rounded to 16-bit integers as in [`BlockQ16`], for x86 instructions that
/// multiply bytes by bytes: `q = 256·high + low`.
///
/// Each 16 values share a 32-bit lane in four 512-bit registers, so that their products end up in
/// one sum. Value `i` is byte `i % 4` of lane `i / 16` of register `i / 4 % 4`; for every second 32
/// values registers 0 and 1, and 2 and 3, are swapped, as they are where nibbles are unpacked.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub struct BlockP16 {
    /// The high bytes, in four registers.
    pub high: [[[i8; 4]; 16]; 4],
    /// The low bytes, signed too.
    pub low: [[[i8; 4]; 16]; 4],
    /// As [`BlockQ16::d`].
    pub d: [f32; 16],
    /// As [`BlockQ16::s`].
    pub s: [f32; 16],
    /// `Σq` per 16 values: times the zero point of the weights' bytes, it is too much in the
    /// integer product.
    pub sums: [i32; 16],
}

impl BlockP16 {
    /// Values per block.
    pub const VALUES: usize = 256;

    /// The largest integer: the next one would need a high byte of 128.
    pub const MAX: i16 = 127 * 256 + 127;

    /// Blocks per row of `n` values.
    #[inline]
    pub const fn per_row(n: usize) -> usize {
        n.div_ceil(Self::VALUES)
    }

    /// Index of the register that holds value `i` of 256.
    #[inline]
    pub const fn register(i: usize) -> usize {
        (i / 4 % 4) ^ (i / 32 % 2)
    }

    /// Integer `i` of 256.
    #[inline]
    pub fn integer(&self, i: usize) -> i16 {
        let (r, lane, t) = (Self::register(i), i / 16, i % 4);
        i16::from(self.high[r][lane][t]) * 256 + i16::from(self.low[r][lane][t])
    }

    /// Sets integer `i` of 256; `|q| ≤ MAX`.
    #[inline]
    pub(super) fn set_integer(&mut self, i: usize, q: i16) {
        let (r, lane, t) = (Self::register(i), i / 16, i % 4);
        self.low[r][lane][t] = q as i8;
        self.high[r][lane][t] = ((q + 128) >> 8) as i8;
    }

    /// As [`BlockQ16::scale`].
    #[inline]
    pub(super) fn scale(max_bits: u32) -> (f32, f32) {
        scale(max_bits, Self::MAX)
    }
}

/// `(d, 1/d)` for values that are rounded to 8-bit integers, `x ≈ d·q` with `|q| ≤ 127`, from the
/// largest bits of their magnitudes. A value that is not finite makes `d` NaN, and with it the
/// result; magnitudes below 2⁻¹⁰⁰ count as 0.
#[inline]
#[cfg(target_arch = "x86_64")]
pub(super) fn byte_scale(max_bits: u32) -> (f32, f32) {
    let max = f32::from_bits(max_bits);
    match max_bits >> 23 {
        0..27 => (0.0, 0.0),
        255.. => (f32::NAN, 0.0),
        _ => (max / 127.0, 127.0 / max),
    }
}

/// Form in which a product kernel reads activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActForm {
    /// The `f32` rows themselves.
    F32,
    /// Rows rounded to 16-bit integers with a scale per 32 values ([`BlockQ16`]).
    Q16,
    /// The same as two planes of bytes ([`BlockP16`]).
    P16,
}

/// Activation rows for [`super::Arch::matvec`].
#[derive(Clone, Copy, Debug)]
pub enum Acts<'a> {
    /// `(m, n)` row-major.
    F32 {
        /// The rows.
        x: &'a [f32],
        /// Values per row.
        n: usize,
    },
    /// Rounded rows, made by [`super::Arch::quantize_q16`].
    Q16 {
        /// `m` rows of [`BlockQ16::per_row`] blocks.
        x: &'a [BlockQ16],
        /// Values per row.
        n: usize,
    },
    /// Rounded rows, made by [`super::Arch::quantize_p16`].
    P16 {
        /// `m` rows of [`BlockP16::per_row`] blocks.
        x: &'a [BlockP16],
        /// Values per row.
        n: usize,
    },
}

impl Acts<'_> {
    /// Values per row.
    pub fn n(&self) -> usize {
        match *self {
            Acts::F32 { n, .. } | Acts::Q16 { n, .. } | Acts::P16 { n, .. } => n,
        }
    }

    /// Number of rows.
    pub fn m(&self) -> usize {
        match *self {
            Acts::F32 { x, n } => x.len() / n,
            Acts::Q16 { x, n } => x.len() / BlockQ16::per_row(n),
            Acts::P16 { x, n } => x.len() / BlockP16::per_row(n),
        }
    }

    /// `m` rows from row `first` on.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn rows(&self, first: usize, m: usize) -> Self {
        match *self {
            Acts::F32 { x, n } => Acts::F32 {
                x: &x[first * n..][..m * n],
                n,
            },
            Acts::Q16 { x, n } => {
                let len = BlockQ16::per_row(n);
                Acts::Q16 {
                    x: &x[first * len..][..m * len],
                    n,
                }
            }
            Acts::P16 { x, n } => {
                let len = BlockP16::per_row(n);
                Acts::P16 {
                    x: &x[first * len..][..m * len],
                    n,
                }
            }
        }
    }

    /// Format of the rows.
    pub fn form(&self) -> ActForm {
        match self {
            Acts::F32 { .. } => ActForm::F32,
            Acts::Q16 { .. } => ActForm::Q16,
            Acts::P16 { .. } => ActForm::P16,
        }
    }
}
