//! Products of weights with a few activation rows, written once over a register of integers.
//!
//! A strip is as many weight rows as a register has lanes: each lane holds a word of one row, and
//! unpacking reads like the scalar code, for all of them at a time. Registers with 64 values of each
//! weight row are multiplied by some activation rows, whose values are broadcast from where they lie;
//! nothing is summed across lanes, and a scale serves a whole register.
//!
//! Against the row dots of `matmul.rs`, a product costs half as many instructions for each activation
//! row, and the transposition of the weights once for all.

use super::Lanes;
use crate::arch::{BlockQ8, BlockQ16, ColumnsMut};
use crate::quant::*;

/// Most lanes of a register.
const MAX_LANES: usize = 16;
/// Most bytes of 256 values in a format.
const MAX_BYTES: usize = 272;

/// A register of 32-bit words, one for each row of a strip. Possession proves that the CPU has the
/// level's features, and everything here must be inlined, as with [`Lanes`].
pub(in crate::arch) trait Words: Copy {
    /// As many `f32`.
    type F: Lanes;

    /// Asks for the cache line of `p`, which need not be valid, to be brought to the second level:
    /// the first has too few lines on their way at a time (from memory, two activation rows cost 1.2
    /// times one instead of 1.6).
    fn prefetch(self, p: *const u8);
    /// `x` in every lane.
    fn splat(self, x: u32) -> Self;
    /// 0 in every lane.
    fn floats(self) -> Self::F;
    /// Bits set in both.
    fn and(self, other: Self) -> Self;
    /// Bits set in one of them.
    fn or(self, other: Self) -> Self;
    /// Bytes less those of `other`.
    fn sub_bytes(self, other: Self) -> Self;
    /// Towards higher bits.
    fn shl(self, bits: u32) -> Self;
    /// Towards lower bits.
    fn shr(self, bits: u32) -> Self;
    /// Towards lower bits, with copies of the sign.
    fn sar(self, bits: u32) -> Self;
    /// Byte `i` of each lane, in all four of them.
    fn spread(self, i: u32) -> Self;
    /// `table[x]` for each byte `x < 16`.
    fn look_up(self, table: &[i8; 16]) -> Self;
    /// Signed integers.
    fn to_f32(self) -> Self::F;
    /// The low half of each lane is an f16.
    fn f16(self) -> Self::F;
    /// Bytes 0 and 2, and bytes 1 and 3, as words of 16 bits.
    fn halves(self, signed: bool) -> [Self; 2];

    /// Word `i` of lane `r` is the one at `p + r·stride + 4i`.
    ///
    /// # Safety
    /// The 16 bytes must be readable for every lane.
    unsafe fn transposed(self, p: *const u8, stride: usize) -> [Self; 4];

    /// `self + Σ w·x` over the 16 bytes of each lane of `w`, of at most six `bits` and no sign, and the
    /// 16 signed ones at `x`.
    ///
    /// # Safety
    /// Those must be readable.
    unsafe fn dot_bytes(self, bits: u32, w: [Self; 4], x: *const i8) -> Self;

    /// `self + Σ w·x` over the 8 words of each lane of `w` and those at `x`.
    ///
    /// # Safety
    /// Those must be readable.
    unsafe fn dot_halves(self, w: [Self; 4], x: *const i16) -> Self;
}

/// What 64 weights at a time are unpacked with: scales, offsets, and high bits that serve all of 256.
pub(in crate::arch) struct Head<W: Words> {
    /// Of each 32 values, or of each 16.
    scale: [W::F; 16],
    /// As `scale`.
    offset: [W::F; 16],
    high: [[W; 4]; 2],
}

/// Bytes of each row of a strip.
#[derive(Clone, Copy)]
pub(in crate::arch) struct Source<W: Words> {
    z: W,
    /// Those of the first row.
    p: *const u8,
    /// How far from them those of the next row are.
    stride: usize,
    /// How many may be read of each row.
    bytes: usize,
}

impl<W: Words> Source<W> {
    /// Without the first `n`.
    #[inline(always)]
    fn after(self, n: usize) -> Self {
        assert!(n <= self.bytes);
        Source { p: self.p.wrapping_add(n), bytes: self.bytes - n, ..self }
    }

    /// The four words at `at`.
    #[inline(always)]
    fn words(self, at: usize) -> [W; 4] {
        assert!(at + 16 <= self.bytes);
        // SAFETY: whoever made this promised so many bytes.
        unsafe { self.z.transposed(self.p.wrapping_add(at), self.stride) }
    }

    /// The low and the high nibbles of the 16 bytes at `at`.
    #[inline(always)]
    fn nibbles(self, at: usize) -> [[W; 4]; 2] {
        let (q, mask) = (self.words(at), self.z.splat(0x0F0F_0F0F));
        let mut w = [q; 2];
        for t in 0..4 {
            (w[0][t], w[1][t]) = (q[t].and(mask), q[t].shr(4).and(mask));
        }
        w
    }

    /// The low nibbles of the 32 bytes at `at`, then the high ones.
    #[inline(always)]
    fn nibble_pairs(self, at: usize) -> [[W; 4]; 4] {
        let [w0, w2] = self.nibbles(at);
        let [w1, w3] = self.nibbles(at + 16);
        [w0, w1, w2, w3]
    }
}

/// A format whose blocks, or eight of them, hold 256 weights, `scale·w + offset`.
pub(in crate::arch) trait Strip {
    /// Bytes of a block.
    const BLOCK: usize;
    /// Values of a block.
    const VALUES: usize;
    /// Bytes of 256 values.
    const BYTES: usize = Self::BLOCK * (256 / Self::VALUES);
    /// Whether each 16 weights have a scale of their own; else 32 share one.
    const PER_16: bool = false;
    /// Whether there is an offset.
    const OFFSET: bool = true;
    /// Bits of a weight that is multiplied by 8-bit activations; 0 says that bytes are signed, or have
    /// an offset, and that activations have 16 bits.
    const BITS: u32 = 0;

    /// Reads what all of the 256 share from their [`Strip::BYTES`].
    fn head<W: Words>(rows: Source<W>, head: &mut Head<W>);

    /// The weights of four times 16 values: byte `i` of word `j` is value `4j + i`. They are the
    /// sixteenths `4u..4u + 4` of the 256; with [`Strip::PER_16`], `u` and every second one after it
    /// in their half: `u/2·8 + u%2 + 2j`.
    fn unit<W: Words>(rows: Source<W>, head: &Head<W>, u: usize) -> [[W; 4]; 4];
}

/// A strip of weight rows.
pub(in crate::arch) struct Rows<'a> {
    w: &'a [u8],
    row_bytes: usize,
    /// Bytes of 256 values, and rows of a whole strip.
    block: usize,
    lanes: usize,
    /// Room for a block of each row, zero behind the rows that there are.
    padded: &'a mut [u8],
    /// Whether to ask for the next strip.
    prefetch: bool,
}

impl Rows<'_> {
    /// Block `g` of each row.
    #[inline(always)]
    fn group<W: Words>(&mut self, z: W, g: usize) -> Source<W> {
        let start = g * self.block;
        let bytes = (self.row_bytes - start).min(self.block);
        if bytes == self.block && self.w.len() == self.lanes * self.row_bytes {
            return Source { z, p: self.w[start..].as_ptr(), stride: self.row_bytes, bytes };
        }
        for (padded, row) in self.padded.chunks_exact_mut(self.block).zip(self.w.chunks_exact(self.row_bytes)) {
            padded.fill(0);
            padded[..bytes].copy_from_slice(&row[start..][..bytes]);
        }
        Source { z, p: self.padded.as_ptr(), stride: self.block, bytes: self.block }
    }

    /// Asks for a quarter of the next strip's block `g`: more at a time would wait for each other.
    #[inline(always)]
    fn prefetch<W: Words>(&self, z: W, g: usize, u: usize) {
        if self.prefetch {
            let bytes = self.lanes * self.block / 4;
            let p = self.w.as_ptr().wrapping_add(self.w.len().max(AHEAD) + (4 * g + u) * bytes);
            for line in 0..bytes.div_ceil(64) {
                z.prefetch(p.wrapping_add(64 * line));
            }
        }
    }
}

/// How far ahead of its use the next strip is prefetched, in bytes, at least.
const AHEAD: usize = 8192;

/// `sums[i] = Σ w·x[i]` over whole rows: [`strip_q8`] or [`strip_q16`], compiled for a level. Rows of
/// `x` lie one after the other; the last one stands in for those that are not there.
pub(in crate::arch) type Kernel<W, X, const M: usize> = unsafe fn(Rows<'_>, &[X], &mut [<W as Words>::F; M]);

/// The products of all weight rows in `w` with the activation rows `x`, of `n` values, which are made
/// of blocks of 256; see [`crate::arch::MatvecFn`].
///
/// # Safety
/// The shapes must agree, and the kernels be those of the format and the level.
#[inline(always)]
pub(in crate::arch) unsafe fn product<W: Words, B: Strip, X>(
    z: W,
    y: &mut ColumnsMut<'_>,
    w: &[u8],
    x: &[X],
    n: usize,
    (kernel_2, kernel_4, kernel_8): (Kernel<W, X, 2>, Kernel<W, X, 4>, Kernel<W, X, 8>),
) {
    let (lanes, row_bytes) = (W::F::N, n / B::VALUES * B::BLOCK);
    let groups = row_bytes.div_ceil(B::BYTES);
    let mut padded = [0; MAX_LANES * MAX_BYTES];
    for (t, w) in w.chunks(lanes * row_bytes).enumerate() {
        let n_rows = w.len() / row_bytes;
        let mut i = 0;
        while let rest @ 1.. = y.rows() - i {
            let rows = Rows { w, row_bytes, block: B::BYTES, lanes, padded: &mut padded, prefetch: i == 0 };
            let (x, mut sums) = (&x[i * groups..], [z.floats(); 8]);
            let m = rest.min(8);
            let x = &x[..m * groups];
            match m {
                // SAFETY: the caller's promise.
                5.. => unsafe { kernel_8(rows, x, &mut sums) },
                // SAFETY: the caller's promise.
                3.. => unsafe { kernel_4(rows, x, first(&mut sums)) },
                // SAFETY: the caller's promise.
                _ => unsafe { kernel_2(rows, x, first(&mut sums)) },
            }
            for sum in &sums[..m] {
                sum.store(&mut y.row(i)[t * lanes..][..n_rows]);
                i += 1;
            }
        }
    }
}

/// The first of eight.
#[inline(always)]
fn first<T, const M: usize>(sums: &mut [T; 8]) -> &mut [T; M] {
    sums.first_chunk_mut().expect("at most eight")
}

/// `M` activation rows of so many blocks.
#[inline(always)]
fn rows_of<X, const M: usize>(x: &[X], blocks: usize) -> [&[X]; M] {
    let last = x.len() / blocks - 1;
    std::array::from_fn(|i| &x[i.min(last) * blocks..][..blocks])
}

/// For formats that take 8-bit activations.
///
/// # Safety
/// The CPU must have the level's features; `x` has at least a row, of as many values as those of `w`.
#[inline(always)]
pub(in crate::arch) unsafe fn strip_q8<W: Words, B: Strip, const M: usize>(
    z: W,
    mut rows: Rows<'_>,
    x: &[BlockQ8],
    sums: &mut [W::F; M],
) {
    let groups = rows.row_bytes.div_ceil(B::BYTES);
    let x: [&[BlockQ8]; M] = rows_of(x, groups);
    let (zero, f) = (z.splat(0), z.floats());
    let mut head = Head { scale: [f; 16], offset: [f; 16], high: [[z; 4]; 2] };
    let mut total = [f; M];
    for g in 0..groups {
        let source = rows.group(z, g);
        B::head(source, &mut head);
        for u in 0..4 {
            rows.prefetch(z, g, u);
            let w = B::unit(source, &head, u);
            for i in 0..M {
                let x = &x[i][g];
                let q = x.q.as_flattened().as_ptr();
                if B::PER_16 {
                    for j in 0..4 {
                        let s = u / 2 * 8 + u % 2 + 2 * j;
                        // SAFETY: 16 of 256 values.
                        let int = unsafe { zero.dot_bytes(B::BITS, w[j], q.wrapping_add(16 * s)) };
                        total[i] = (int.to_f32() * f.splat(x.d[s / 2])).mul_add(head.scale[s], total[i]);
                        total[i] = head.offset[s].mul_add(f.splat(x.s16[s]), total[i]);
                    }
                } else {
                    for j in 0..2 {
                        let b = 2 * u + j;
                        // SAFETY: 16 of 256 values.
                        let int = unsafe { zero.dot_bytes(B::BITS, w[2 * j], q.wrapping_add(32 * b)) };
                        // SAFETY: 16 of 256 values.
                        let int = unsafe { int.dot_bytes(B::BITS, w[2 * j + 1], q.wrapping_add(32 * b + 16)) };
                        total[i] = (int.to_f32() * f.splat(x.d[b])).mul_add(head.scale[b], total[i]);
                        total[i] = head.offset[b].mul_add(f.splat(x.s[b]), total[i]);
                    }
                }
            }
        }
    }
    *sums = total;
}

/// For formats that take 16-bit activations, whose order is that of [`Words::halves`].
///
/// # Safety
/// As [`strip_q8`].
#[inline(always)]
pub(in crate::arch) unsafe fn strip_q16<W: Words, B: Strip, const M: usize>(
    z: W,
    mut rows: Rows<'_>,
    x: &[BlockQ16],
    sums: &mut [W::F; M],
) {
    let groups = rows.row_bytes.div_ceil(B::BYTES);
    let x: [&[BlockQ16]; M] = rows_of(x, groups);
    let f = z.floats();
    let mut head = Head { scale: [f; 16], offset: [f; 16], high: [[z; 4]; 2] };
    let mut total = [f; M];
    for g in 0..groups {
        let source = rows.group(z, g);
        B::head(source, &mut head);
        for u in 0..4 {
            rows.prefetch(z, g, u);
            let w = B::unit(source, &head, u);
            for j in 0..2 {
                let b = 2 * u + j;
                let mut int = [z.splat(0); M];
                for h in 2 * j..2 * j + 2 {
                    let [e0, o0] = w[h][0].halves(!B::OFFSET);
                    let [e1, o1] = w[h][1].halves(!B::OFFSET);
                    let [e2, o2] = w[h][2].halves(!B::OFFSET);
                    let [e3, o3] = w[h][3].halves(!B::OFFSET);
                    for i in 0..M {
                        let q = &x[i][g].q;
                        // SAFETY: eight of 32.
                        int[i] = unsafe { int[i].dot_halves([e0, e1, e2, e3], q[2 * h][8 * u..].as_ptr()) };
                        // SAFETY: eight of 32.
                        int[i] = unsafe { int[i].dot_halves([o0, o1, o2, o3], q[2 * h + 1][8 * u..].as_ptr()) };
                    }
                }
                for i in 0..M {
                    let x = &x[i][g];
                    total[i] = (int[i].to_f32() * f.splat(x.d[2 * b])).mul_add(head.scale[b], total[i]);
                    if B::OFFSET {
                        total[i] = head.offset[b].mul_add(f.splat(x.s[2 * b] + x.s[2 * b + 1]), total[i]);
                    }
                }
            }
        }
    }
    *sums = total;
}

/// Blocks of 32 values: the scale and the offset of a block, and the words of its halves.
macro_rules! small {
    ($block:ident, offset: $has_offset:literal, |$rows:ident| $factors:expr, $words:expr) => {
        impl Strip for $block {
            const BLOCK: usize = size_of::<$block>();
            const VALUES: usize = 32;
            const OFFSET: bool = $has_offset;

            #[inline(always)]
            fn head<W: Words>(rows: Source<W>, head: &mut Head<W>) {
                for b in 0..8 {
                    let $rows = rows.after(b * Self::BLOCK);
                    (head.scale[b], head.offset[b]) = $factors;
                }
            }

            #[inline(always)]
            fn unit<W: Words>(rows: Source<W>, _: &Head<W>, u: usize) -> [[W; 4]; 4] {
                let mut w = [[rows.z; 4]; 4];
                for b in 0..2 {
                    let $rows = rows.after((2 * u + b) * Self::BLOCK);
                    [w[2 * b], w[2 * b + 1]] = $words;
                }
                w
            }
        }
    };
}
small!(
    BlockQ4_0, offset: false,
    |rows| (rows.words(0)[0].f16(), rows.z.floats()),
    less(rows.z, rows.nibbles(2), 8)
);
small!(
    BlockQ4_1, offset: true,
    |rows| halves_f16(rows.words(0)[0]),
    rows.nibbles(4)
);
small!(
    BlockQ5_0, offset: false,
    |rows| (rows.words(0)[0].f16(), rows.z.floats()),
    {
        let [a, b, ..] = rows.words(0);
        let w = rows.nibbles(6);
        less(rows.z, with_fifth_bits(rows.z, w, a.shr(16).or(b.shl(16))), 16)
    }
);
small!(
    BlockQ5_1, offset: true,
    |rows| halves_f16(rows.words(0)[0]),
    with_fifth_bits(rows.z, rows.nibbles(8), rows.words(0)[1])
);
small!(
    BlockQ8_0, offset: false,
    |rows| (rows.words(0)[0].f16(), rows.z.floats()),
    [rows.words(2), rows.words(18)]
);
small!(
    BlockIq4Nl, offset: false,
    |rows| (rows.words(0)[0].f16(), rows.z.floats()),
    look_up(rows.nibbles(2), &IQ4_VALUES)
);

/// Super-blocks of 256 values.
macro_rules! large {
    (
        $block:ident, bits: $bits:literal, per_16: $per_16:literal,
        |$rows:ident, $head:ident| $factors:expr, |$u:ident| $words:expr
    ) => {
        impl Strip for $block {
            const BLOCK: usize = size_of::<$block>();
            const VALUES: usize = 256;
            const PER_16: bool = $per_16;
            const BITS: u32 = $bits;
            const OFFSET: bool = $bits > 0;

            #[inline(always)]
            fn head<W: Words>($rows: Source<W>, $head: &mut Head<W>) {
                $factors
            }

            #[inline(always)]
            #[allow(unused_variables)] // most formats have no high bits
            fn unit<W: Words>($rows: Source<W>, $head: &Head<W>, $u: usize) -> [[W; 4]; 4] {
                $words
            }
        }
    };
}
large!(
    BlockQ2K, bits: 2, per_16: true,
    |rows, head| {
        let scales = rows.words(0);
        let [.., dd] = rows.words(68);
        let (d, dmin) = halves_f16(dd);
        for s in 0..16 {
            let byte = scales[s / 4].shr(8 * (s as u32 % 4));
            head.scale[s] = byte.and(rows.z.splat(15)).to_f32() * d;
            head.offset[s] = rows.z.floats() - byte.shr(4).and(rows.z.splat(15)).to_f32() * dmin;
        }
    },
    |u| bit_pairs(rows.z, rows.words(16 + 16 * u))
);
large!(
    BlockQ3K, bits: 3, per_16: true,
    |rows, head| {
        let [_, s0, s1, s2] = rows.words(92);
        let [.., d] = rows.words(94);
        let (low, high) = (rows.z.splat(0x0F0F_0F0F), rows.z.splat(0x3030_3030));
        // `unpack_scales_q3_k`, four at a time.
        let scales = [
            s0.and(low).or(s2.shl(4).and(high)),
            s1.and(low).or(s2.shl(2).and(high)),
            s0.shr(4).and(low).or(s2.and(high)),
            s1.shr(4).and(low).or(s2.shr(2).and(high)),
        ];
        let f = rows.z.floats();
        let d = d.shr(16).f16();
        for s in 0..16 {
            let sc = scales[s / 4].shr(8 * (s as u32 % 4)).and(rows.z.splat(0xFF)).to_f32();
            head.scale[s] = (sc - f.splat(32.0)) * d;
            head.offset[s] = head.scale[s] * f.splat(-4.0);
        }
        head.high = [rows.words(0), rows.words(16)];
    },
    |u| {
        let mut w = bit_pairs(rows.z, rows.words(32 + 16 * u));
        for t in 0..4 {
            // Bit `4·(u/2) + j`.
            let high = head.high[u % 2][t].shr(u as u32 / 2 * 4);
            for (w, high) in w.iter_mut().zip([high.shl(2), high.shl(1), high, high.shr(1)]) {
                w[t] = w[t].or(high.and(rows.z.splat(0x0404_0404)));
            }
        }
        w
    }
);
large!(
    BlockQ4K, bits: 4, per_16: false,
    |rows, head| scales_mins(rows, head),
    |u| rows.nibble_pairs(16 + 32 * u)
);
large!(
    BlockQ5K, bits: 5, per_16: false,
    |rows, head| {
        scales_mins(rows, head);
        head.high = [rows.words(16), rows.words(32)];
    },
    |u| {
        let mut w = rows.nibble_pairs(48 + 32 * u);
        for h in 0..2 {
            for t in 0..4 {
                // Bits `2u` and `2u + 1`.
                let (high, bit) = (head.high[h][t].shr(2 * u as u32), rows.z.splat(0x1010_1010));
                w[h][t] = w[h][t].or(high.shl(4).and(bit));
                w[2 + h][t] = w[2 + h][t].or(high.shl(3).and(bit));
            }
        }
        w
    }
);
large!(
    BlockQ6K, bits: 6, per_16: true,
    |rows, head| {
        let scales = rows.words(192);
        let [.., d] = rows.words(194);
        let d = d.shr(16).f16();
        for s in 0..16 {
            head.scale[s] = scales[s / 4].shl(24 - 8 * (s as u32 % 4)).sar(24).to_f32() * d;
            head.offset[s] = head.scale[s] * rows.z.floats().splat(-32.0);
        }
    },
    |u| {
        let low = u / 2 * 64 + u % 2 * 16;
        let [w0, w2] = rows.nibbles(low);
        let [w1, w3] = rows.nibbles(low + 32);
        let mut w = [w0, w1, w2, w3];
        let high = rows.words(128 + 16 * u);
        for t in 0..4 {
            let pairs = [high[t].shl(4), high[t].shl(2), high[t], high[t].shr(2)];
            for (w, pairs) in w.iter_mut().zip(pairs) {
                w[t] = w[t].or(pairs.and(rows.z.splat(0x3030_3030)));
            }
        }
        w
    }
);
large!(
    BlockIq4Xs, bits: 0, per_16: false,
    |rows, head| {
        let [first, low, ..] = rows.words(0);
        for b in 0..8 {
            let high = first.shr(16 + 2 * b as u32).and(rows.z.splat(3)).shl(4);
            let sc = low.shr(4 * b as u32).and(rows.z.splat(15)).or(high);
            head.scale[b] = (sc.to_f32() - rows.z.floats().splat(32.0)) * first.f16();
        }
    },
    |u| {
        let [w0, w1] = look_up(rows.nibbles(8 + 32 * u), &IQ4_VALUES);
        let [w2, w3] = look_up(rows.nibbles(24 + 32 * u), &IQ4_VALUES);
        [w0, w1, w2, w3]
    }
);

/// Scales and offsets of Q4_K and Q5_K, as [`unpack_scales_mins`] describes them.
#[inline(always)]
fn scales_mins<W: Words>(rows: Source<W>, head: &mut Head<W>) {
    let z = rows.z;
    let [dd, a, b, c] = rows.words(0);
    let (d, dmin) = halves_f16(dd);
    let (six, low, high) = (z.splat(0x3F3F_3F3F), z.splat(0x0F0F_0F0F), z.splat(0x3030_3030));
    let scales = [a.and(six), c.and(low).or(a.shr(2).and(high))];
    let mins = [b.and(six), c.shr(4).and(low).or(b.shr(2).and(high))];
    let dmin = z.floats() - dmin;
    for b in 0..8 {
        let at = 8 * (b as u32 % 4);
        head.scale[b] = scales[b / 4].shr(at).and(z.splat(0xFF)).to_f32() * d;
        head.offset[b] = mins[b / 4].shr(at).and(z.splat(0xFF)).to_f32() * dmin;
    }
}

/// Both f16 of each word.
#[inline(always)]
fn halves_f16<W: Words>(x: W) -> (W::F, W::F) {
    (x.f16(), x.shr(16).f16())
}

/// Bits `2j` and `2j + 1` of each byte.
#[inline(always)]
fn bit_pairs<W: Words>(z: W, q: [W; 4]) -> [[W; 4]; 4] {
    let (mut w, mask) = ([q; 4], z.splat(0x0303_0303));
    for t in 0..4 {
        (w[0][t], w[1][t]) = (q[t].and(mask), q[t].shr(2).and(mask));
        (w[2][t], w[3][t]) = (q[t].shr(4).and(mask), q[t].shr(6).and(mask));
    }
    w
}

/// Bytes less `n`.
#[inline(always)]
fn less<W: Words>(z: W, w: [[W; 4]; 2], n: u8) -> [[W; 4]; 2] {
    let n = z.splat(u32::from_ne_bytes([n; 4]));
    let mut w = w;
    for w in w.as_flattened_mut() {
        *w = w.sub_bytes(n);
    }
    w
}

#[inline(always)]
fn look_up<W: Words>(codes: [[W; 4]; 2], table: &[i8; 16]) -> [[W; 4]; 2] {
    let mut w = codes;
    for w in w.as_flattened_mut() {
        *w = w.look_up(table);
    }
    w
}

/// Adds bit `i` of `qh` as bit 4 of value `i`.
#[inline(always)]
fn with_fifth_bits<W: Words>(z: W, low: [[W; 4]; 2], qh: W) -> [[W; 4]; 2] {
    // Bits 1, 2, 4 and 8 become 16.
    let sixteen = &[0, 16, 16, 0, 16, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0];
    let mut w = low;
    for (i, w) in w.as_flattened_mut().iter_mut().enumerate() {
        let bits = qh.spread(i as u32 / 2).shr(4 * (i as u32 % 2)).and(z.splat(0x0804_0201));
        *w = w.or(bits.look_up(sixteen));
    }
    w
}

/// The products of one level and the table of them: `$zero` must be safe under `$features`.
macro_rules! strip_kernels {
    ($features:literal, $words:ty, $zero:expr) => {
        $crate::arch::lanes::strip::strip_kernels! { $features, $words, $zero; strips_q8, kernel_q8, Q8, BlockQ8, strip_q8 }
        $crate::arch::lanes::strip::strip_kernels! { $features, $words, $zero; strips_q16, kernel_q16, Q16, BlockQ16, strip_q16 }

        /// The kernel for a few activation rows, where there is one: `None` leaves them to `matmul.rs`.
        pub(super) fn strip_for(dtype: DType) -> Option<Matvec> {
            let q8 = |kernel: MatvecFn| Some(Matvec { form: ActForm::Q8, kernel });
            let q16 = |kernel: MatvecFn| Some(Matvec { form: ActForm::Q16, kernel });
            match dtype {
                DType::Q4_0 => q16(strips_q16::<BlockQ4_0>),
                DType::Q4_1 => q16(strips_q16::<BlockQ4_1>),
                DType::Q5_0 => q16(strips_q16::<BlockQ5_0>),
                DType::Q5_1 => q16(strips_q16::<BlockQ5_1>),
                DType::Q8_0 => q16(strips_q16::<BlockQ8_0>),
                DType::Q2_K => q8(strips_q8::<BlockQ2K>),
                DType::Q3_K => q8(strips_q8::<BlockQ3K>),
                DType::Q4_K => q8(strips_q8::<BlockQ4K>),
                DType::Q5_K => q8(strips_q8::<BlockQ5K>),
                DType::Q6_K => q8(strips_q8::<BlockQ6K>),
                DType::IQ4_NL => q16(strips_q16::<BlockIq4Nl>),
                DType::IQ4_XS => q16(strips_q16::<BlockIq4Xs>),
                _ => None,
            }
        }
    };
    ($features:literal, $words:ty, $zero:expr; $strips:ident, $strip:ident, $form:ident, $block:ident, $body:ident) => {
        #[target_feature(enable = $features)]
        fn $strips<B: Strip>(y: &mut ColumnsMut<'_>, _: DType, w: &[u8], x: &Acts<'_>) {
            let Acts::$form { x, n } = *x else { unreachable!("the form this level asks for") };
            let kernels: (Kernel<$words, _, 2>, Kernel<$words, _, 4>, Kernel<$words, _, 8>) =
                ($strip::<B, 2>, $strip::<B, 4>, $strip::<B, 8>);
            // SAFETY: this function has the features, and the caller checked the shapes.
            unsafe { product::<_, B, _>($zero, y, w, x, n, kernels) }
        }

        #[target_feature(enable = $features)]
        unsafe fn $strip<B: Strip, const M: usize>(
            rows: Rows<'_>,
            x: &[$block],
            sums: &mut [<$words as Words>::F; M],
        ) {
            // SAFETY: the caller's promise.
            unsafe { $body::<$words, B, M>($zero, rows, x, sums) }
        }
    };
}
pub(in crate::arch) use strip_kernels;
