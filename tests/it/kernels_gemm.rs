//! Products with many activation rows, every level and format, against the definition.

use crate::common::emulated;
use half::bf16;
use ruvllm::arch::{Acts, Arch, BlockP16, CacheLine, ColumnsMut, PanelElement};
use ruvllm::quant::{DType, FORMATS, Format};

/// Knuth's MMIX generator.
struct Lcg(u64);

impl Lcg {
    fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// Uniform in −1..1.
    fn signed(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 31) as f32 - 1.0
    }
}

/// Rows of random blocks at an odd address, and their values.
struct Weights {
    bytes: Vec<u8>,
    values: Vec<f32>,
    n: usize,
    k: usize,
}

impl Weights {
    /// Blocks whose largest value is in 0.001..1000: their scales are random bytes.
    fn random(lcg: &mut Lcg, f: &Format, n: usize, k: usize) -> Weights {
        let (mut bytes, mut values) = (vec![0], Vec::new());
        let mut block = vec![0u8; f.block_bytes];
        let mut x = vec![0.0; f.block_elems];
        while values.len() < n * k {
            block.fill_with(|| lcg.next() as u8);
            (f.dequantize)(&block, &mut x);
            let largest = x.iter().fold(
                0.0f32,
                |m, x| if x.is_nan() { f32::NAN } else { m.max(x.abs()) },
            );
            if (1e-3..1e3).contains(&largest) {
                bytes.extend(&block);
                values.extend(&x);
            }
        }
        Weights {
            bytes,
            values,
            n,
            k,
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[1..]
    }

    fn row(&self, r: usize) -> &[f32] {
        &self.values[r * self.k..][..self.k]
    }
}

fn pack(arch: Arch, dtype: DType, x: &[f32], m: usize, k: usize) -> Vec<u32> {
    let group = arch.pack_group(dtype);
    let mut packed = vec![0u32; arch.packed_len(dtype, m, k) / 4];
    let groups =
        bytemuck::cast_slice_mut::<_, u8>(&mut packed).chunks_mut(arch.packed_len(dtype, group, k));
    for (x, packed) in x.chunks(group * k).zip(groups) {
        arch.pack(dtype, x, m, k, packed);
    }
    packed
}

/// Room for a product that holds what no result may depend on.
fn workspace(lines: usize) -> Vec<CacheLine> {
    let mut workspace: Vec<CacheLine> = vec![bytemuck::Zeroable::zeroed(); lines];
    bytemuck::cast_slice_mut(&mut workspace).fill(f32::NAN);
    workspace
}

fn gemm(arch: Arch, dtype: DType, w: &[u8], n: usize, x: &[f32], m: usize) -> Vec<f32> {
    let k = x.len() / m;
    let packed = pack(arch, dtype, x, m, k);
    let mut y = vec![f32::NAN; m * n];
    let mut workspace = workspace(arch.gemm_workspace(dtype));
    arch.gemm(
        dtype,
        &mut ColumnsMut::new(&mut y, m, n),
        w,
        bytemuck::cast_slice(&packed),
        k,
        &mut workspace,
    );
    y
}

/// How a level multiplies a format. That shows in the room that its packed activations take.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Panels {
    F32,
    /// Weights as the sums of up to two bf16 numbers and activations of three, whose products are
    /// added but for the smallest.
    Split,
    /// Weights and activations rounded to bf16.
    Bf16,
    /// Integers, and activations rounded to `d·q` with `|q| ≤ 2¹⁴` and `d` a power of two.
    I16,
    /// Integers, and activations rounded to `d·q` with `|q| ≤ 127`.
    I8,
}

fn panels(arch: Arch, f: &Format) -> Panels {
    let group = arch.pack_group(f.dtype);
    let panels = match arch.packed_len(f.dtype, group, 32) / group {
        // Rows of plain weights' activations are not packed side by side.
        128 | 192 if arch.gemm_element(f.dtype).0 == PanelElement::F32 => Panels::F32,
        192 => Panels::Split,
        64 => Panels::Bf16,
        80 => Panels::I16,
        48 => Panels::I8,
        bytes => panic!(
            "{} {}: 32 activations in {bytes} bytes",
            arch.name(),
            f.name
        ),
    };
    assert!(
        matches!(panels, Panels::F32 | Panels::Split) || f.block_elems > 1,
        "{}: plain weights are multiplied as they are",
        f.name
    );
    panels
}

/// Bound on the integer part of a block's weights and on their offset, which may both be larger
/// than their sum: these random blocks have values that are not a fourth of it.
fn reach(weights: &[f32]) -> f32 {
    4.0 * weights.iter().fold(0.0, |m, w| w.abs().max(m))
}

/// Shortest row that makes sense for a format: blocks of one value need not come in pairs.
fn step(f: &Format) -> usize {
    if f.block_elems == 1 {
        37
    } else {
        f.block_elems
    }
}

/// Blocks in and out of whole chunks; plain values also beyond the last group of 32.
#[test]
fn rows_expand_to_the_values_of_the_definition() {
    let mut lcg = Lcg(9);
    for f in FORMATS {
        for blocks in [1, 2, 3, 7, 8, 9, 19] {
            let w = Weights::random(&mut lcg, f, 1, blocks * step(f));
            for arch in Arch::available() {
                let mut x = vec![f32::NAN; w.k + 1];
                arch.dequantize(f.dtype, w.bytes(), &mut x[..w.k]);
                assert_eq!(
                    x[..w.k],
                    w.values,
                    "{} {}: {blocks} blocks",
                    arch.name(),
                    f.name
                );
                assert!(
                    x[w.k].is_nan(),
                    "{} {}: behind the row",
                    arch.name(),
                    f.name
                );
            }
        }
    }
}

/// Times one-hot activations, a product is the weights themselves, in every place. Only 8-bit
/// activations have a scale that is no power of two, so that three operations round.
#[test]
fn every_weight_in_its_place() {
    let mut lcg = Lcg(1);
    for f in FORMATS {
        for blocks in [1, 2, 3] {
            let k = blocks * step(f);
            if emulated() && k > 256 {
                continue;
            }
            let w = Weights::random(&mut lcg, f, 37, k);
            let mut identity = vec![0.0; k * k];
            for i in 0..k {
                identity[i * k + i] = 1.0;
            }
            for arch in Arch::available() {
                let y = gemm(arch, f.dtype, w.bytes(), w.n, &identity, k);
                let panels = panels(arch, f);
                for r in 0..w.n {
                    for (b, block) in w.row(r).chunks(f.block_elems.max(32)).enumerate() {
                        for (i, &w) in block.iter().enumerate() {
                            let i = b * f.block_elems.max(32) + i;
                            let (expected, off) = match panels {
                                Panels::F32 | Panels::Split | Panels::I16 => (w, 0.0),
                                Panels::Bf16 => (bf16::from_f32(w).to_f32(), 0.0),
                                Panels::I8 => (w, 3.0 * 2f32.powi(-24) * reach(block)),
                            };
                            let y = y[i * 37 + r];
                            let at = format!("{} {} k {k} row {r} value {i}", arch.name(), f.name);
                            assert!(
                                (y - expected).abs() <= off,
                                "{at}: {y} instead of {expected}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Each of `k` additions rounds to 2⁻²⁴ of a partial sum, which is at most `Σ|w·x|`, or what the
/// parts of block weights reach.
///
/// bf16 has eight significant bits, so that it rounds each factor by at most 2⁻⁸ of itself; errors
/// of `δ_w + δ_x` per product, each uniform within that bound, have a root mean square below
/// `2⁻⁸·√⅔·√Σ(w·x)²`. Integers round activations by half a step, for 32 of them at a time.
#[test]
fn products_are_within_rounding() {
    let mut lcg = Lcg(2);
    for f in FORMATS {
        let (mut squares, mut allowed) = ([0.0; 8], [0.0; 8]);
        for m in [
            1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 33, 40, 47, 48, 49, 97,
        ] {
            if emulated() && ![1, 3, 7, 9, 16, 25].contains(&m) {
                continue;
            }
            let k = step(f) * (1 + lcg.below(1024 / step(f))).min(1 + 2 * lcg.below(5));
            let n = 1 + lcg.below(70);
            let w = Weights::random(&mut lcg, f, n, k);
            let x: Vec<f32> = (0..m * k).map(|_| lcg.signed()).collect();
            for (a, arch) in Arch::available().enumerate() {
                let y = gemm(arch, f.dtype, w.bytes(), n, &x, m);
                let panels = panels(arch, f);
                for (i, x) in x.chunks(k).enumerate() {
                    for r in 0..n {
                        let (mut sum, mut sum_abs, mut sum_squares, mut rounding) =
                            (0.0, 0.0, 0.0, 0.0);
                        for (w, x) in w.row(r).chunks(32).zip(x.chunks(32)) {
                            let (reach, largest) = (reach(w) as f64, reach(x) as f64 / 4.0);
                            for (&w, &x) in w.iter().zip(x) {
                                let (w, x) = (w as f64, x as f64);
                                sum += w * x;
                                sum_squares += w * x * w * x;
                                let (abs, error) = match panels {
                                    Panels::F32 => ((w * x).abs(), 0.0),
                                    // Each part is at most 2⁻⁹ of the one before: what an
                                    // activation loses and the
                                    // product of the smallest parts are 2⁻²⁷ of the product. Five
                                    // sums for one.
                                    Panels::Split => {
                                        ((w * x).abs() * 5.0, (w * x).abs() * 2f64.powi(-26))
                                    }
                                    Panels::Bf16 => (
                                        (w * x).abs(),
                                        (w * x).abs() * (2f64.powi(-7) + 2f64.powi(-16)),
                                    ),
                                    Panels::I16 => {
                                        (reach * x.abs(), w.abs() * largest * 2f64.powi(-14))
                                    }
                                    Panels::I8 => (reach * x.abs(), w.abs() * largest / 254.0),
                                };
                                sum_abs += abs;
                                rounding += error;
                            }
                        }
                        let error = (y[i * n + r] as f64 - sum).abs();
                        let bound = rounding + 1.01 * k as f64 * 2f64.powi(-24) * sum_abs;
                        let at =
                            format!("{} {} m {m} n {n} k {k}, y[{i}][{r}]", arch.name(), f.name);
                        assert!(error <= bound, "{at}: off by {error}, {bound} is allowed");
                        if panels == Panels::Bf16 {
                            squares[a] += error * error;
                            allowed[a] += sum_squares * 2f64.powi(-16) * 2.0 / 3.0;
                        }
                    }
                }
            }
        }
        for (square, allowed) in squares.iter().zip(allowed) {
            assert!(
                *square <= allowed,
                "{}: mean square of errors {square}, {allowed} is allowed",
                f.name
            );
        }
    }
}

/// The bits of a result do not depend on what else is computed with it.
#[test]
fn neighbours_do_not_matter() {
    let mut lcg = Lcg(3);
    for f in FORMATS {
        let (m, n, k) = (101, 70, 3 * step(f));
        let w = Weights::random(&mut lcg, f, n, k);
        let x: Vec<f32> = (0..m * k).map(|_| lcg.signed()).collect();
        let row_bytes = w.bytes().len() / n;
        for arch in Arch::available() {
            let all = gemm(arch, f.dtype, w.bytes(), n, &x, m);
            for _ in 0..8 {
                let (i, r) = (lcg.below(m), lcg.below(n));
                let (rows, cols) = (1 + lcg.below(m - i), 1 + lcg.below(n - r));
                let some = gemm(
                    arch,
                    f.dtype,
                    &w.bytes()[r * row_bytes..][..cols * row_bytes],
                    cols,
                    &x[i * k..][..rows * k],
                    rows,
                );
                for (j, some) in some.chunks(cols).enumerate() {
                    assert_eq!(
                        some,
                        &all[(i + j) * n + r..][..cols],
                        "{} {}: {i}+{rows}, {r}+{cols}",
                        arch.name(),
                        f.name
                    );
                }
            }
        }
    }
}

/// Few rows have kernels of their own: the same bits, also beyond the values that are expanded at a
/// time and with fewer weight rows than lanes.
#[test]
fn few_rows_are_the_first_of_many() {
    let mut lcg = Lcg(10);
    for f in FORMATS {
        let (n, k) = (37, (600 / step(f)).max(2) * step(f));
        if emulated() && k > 600 {
            continue;
        }
        let w = Weights::random(&mut lcg, f, n, k);
        let x: Vec<f32> = (0..40 * k).map(|_| lcg.signed()).collect();
        for arch in Arch::available() {
            let all = gemm(arch, f.dtype, w.bytes(), n, &x, 40);
            for m in 1..=17 {
                let few = gemm(arch, f.dtype, w.bytes(), n, &x[..m * k], m);
                assert_eq!(few, &all[..m * n], "{} {}: {m} rows", arch.name(), f.name);
            }
            let mut workspace = workspace(arch.gemm_workspace(f.dtype));
            arch.gemm(
                f.dtype,
                &mut ColumnsMut::new(&mut [], 0, n),
                w.bytes(),
                &[],
                k,
                &mut workspace,
            );
        }
    }
}

/// Where weights are not rounded in parts, prompts and generated tokens have one arithmetic for
/// plain formats: so `exact` costs nothing.
#[test]
fn plain_formats_have_one_arithmetic() {
    let mut lcg = Lcg(13);
    for f in FORMATS.iter().filter(|f| f.block_elems == 1) {
        for k in [1, 15, 16, 33, 64, 200, 2100] {
            let (n, m) = (11, 14);
            let w = Weights::random(&mut lcg, f, n, k);
            let x: Vec<f32> = (0..m * k).map(|_| lcg.signed()).collect();
            for arch in Arch::available().filter(|arch| panels(*arch, f) == Panels::F32) {
                let prompt = gemm(arch, f.dtype, w.bytes(), n, &x, m);
                for rows in [1, 2, 3, 5, 6, 14] {
                    let mut generated = vec![f32::NAN; rows * n];
                    let acts = Acts::F32 {
                        x: &x[..rows * k],
                        n: k,
                    };
                    arch.matvec(
                        f.dtype,
                        &mut ColumnsMut::new(&mut generated, rows, n),
                        w.bytes(),
                        &acts,
                    );
                    assert_eq!(
                        generated,
                        prompt[..rows * n],
                        "{} {}: {rows} rows of {k}",
                        arch.name(),
                        f.name
                    );
                }
            }
        }
    }
}

/// Generated rows and few prompt rows at once have the bits that each kind has alone.
#[test]
fn both_kinds_at_once() {
    let mut lcg = Lcg(11);
    let mut n_shared = 0;
    for f in FORMATS {
        let (n, k) = (37, 2 * step(f));
        let w = Weights::random(&mut lcg, f, n, k);
        let x: Vec<f32> = (0..40 * k).map(|_| lcg.signed()).collect();
        for arch in Arch::available() {
            for (n_generated, n_prompt) in
                [(1, 1), (1, 12), (2, 3), (5, 2), (16, 7), (17, 1), (3, 13)]
            {
                if !arch.has_both(f.dtype, n_generated, n_prompt) {
                    continue;
                }
                n_shared += 1;
                let (generated, prompt) =
                    x[..(n_generated + n_prompt) * k].split_at(n_generated * k);
                let mut rounded = vec![
                    <BlockP16 as bytemuck::Zeroable>::zeroed();
                    n_generated * BlockP16::per_row(k)
                ];
                for (x, blocks) in generated
                    .chunks(k)
                    .zip(rounded.chunks_mut(BlockP16::per_row(k)))
                {
                    arch.quantize_p16(x, blocks);
                }
                let generated = Acts::P16 { x: &rounded, n: k };
                let mut alone = vec![0.0; n_generated * n];
                arch.matvec(
                    f.dtype,
                    &mut ColumnsMut::new(&mut alone, n_generated, n),
                    w.bytes(),
                    &generated,
                );
                alone.extend(gemm(arch, f.dtype, w.bytes(), n, prompt, n_prompt));
                let packed = pack(arch, f.dtype, prompt, n_prompt, k);
                let (mut y, m) = (vec![7.0; alone.len()], n_generated + n_prompt);
                let packed = bytemuck::cast_slice(&packed);
                arch.both(
                    f.dtype,
                    &mut ColumnsMut::new(&mut y, m, n),
                    w.bytes(),
                    &generated,
                    packed,
                    k,
                );
                assert_eq!(
                    y,
                    alone,
                    "{} {}: {n_generated} and {n_prompt} rows",
                    arch.name(),
                    f.name
                );
            }
        }
    }
    let has_kernel = |arch: Arch| arch.name().starts_with("avx512");
    assert_eq!(n_shared > 0, Arch::available().any(has_kernel));
}

/// A tile of the output leaves the other columns alone; more activations than are summed at a time.
#[test]
fn tiles_of_a_large_output() {
    let f = DType::Q8_0.float_format();
    let mut lcg = Lcg(4);
    // More weight rows and bytes of activations, too, than levels go over at a time.
    let (m, n, k) = (1100, 300, if emulated() { 64 } else { 544 });
    let w = Weights::random(&mut lcg, f, n, k);
    let x: Vec<f32> = (0..m * k).map(|_| lcg.signed()).collect();
    let row_bytes = w.bytes().len() / n;
    for arch in Arch::available() {
        let all = gemm(arch, f.dtype, w.bytes(), n, &x, m);
        for (i, x) in x.chunks(77 * k).enumerate() {
            let some = gemm(arch, f.dtype, w.bytes(), n, x, x.len() / k);
            assert_eq!(
                some,
                &all[i * 77 * n..][..some.len()],
                "{}: rows from {}",
                arch.name(),
                i * 77
            );
        }
        let packed = pack(arch, f.dtype, &x, m, k);
        let mut y = vec![7.0; m * n];
        let view = ColumnsMut::new(&mut y, m, n);
        // SAFETY: the only tile.
        let mut tile = unsafe { view.tile(9, 40) };
        let w = &w.bytes()[9 * row_bytes..][..40 * row_bytes];
        let mut workspace = workspace(arch.gemm_workspace(f.dtype));
        arch.gemm(
            f.dtype,
            &mut tile,
            w,
            bytemuck::cast_slice(&packed),
            k,
            &mut workspace,
        );
        for (y, all) in y.chunks(n).zip(all.chunks(n)) {
            assert_eq!(&y[9..49], &all[9..49], "{}", arch.name());
            assert!(
                y[..9].iter().chain(&y[49..]).all(|&y| y == 7.0),
                "{}",
                arch.name()
            );
        }
    }
}

/// Whatever bytes a file holds, and whatever activations come of that: a NaN or an infinity among a
/// row's activations reaches all its outputs, and no other row's.
#[test]
fn any_bytes() {
    let mut lcg = Lcg(5);
    for f in FORMATS {
        let (n, k) = (33, 2 * step(f));
        for m in [19, 3].repeat(10) {
            let mut w = vec![0; n * k / f.block_elems * f.block_bytes];
            w.fill_with(|| lcg.next() as u8);
            let odd = [
                f32::NAN,
                f32::INFINITY,
                f32::NEG_INFINITY,
                f32::MAX,
                f32::MIN_POSITIVE / 2.0,
                0.0,
                1.0,
            ];
            let mut x: Vec<f32> = (0..m * k).map(|_| odd[lcg.below(odd.len())]).collect();
            x[..k].fill_with(|| lcg.signed());
            x[k..2 * k].fill_with(|| lcg.signed());
            x[k + lcg.below(k)] = odd[lcg.below(3)];
            let mut values = vec![0.0; n * k];
            (f.dequantize)(&w, &mut values);
            for arch in Arch::available() {
                let y = gemm(arch, f.dtype, &w, n, &x, m);
                for (i, (y, x)) in y.chunks(n).zip(x.chunks(k)).enumerate() {
                    if x.iter().any(|x| !x.is_finite()) {
                        assert!(
                            y.iter().all(|y| !y.is_finite()),
                            "{} {}: row {i}",
                            arch.name(),
                            f.name
                        );
                    }
                }
                for (y, w) in y[..n].iter().zip(values.chunks(k)) {
                    if w.iter().all(|w| w.abs() < 1e6) {
                        assert!(y.is_finite(), "{} {}: {y}", arch.name(), f.name);
                    }
                }
            }
        }
    }
}

/// `Wᵀ·y` for `m` rows of `y`, `(m, n)`.
fn transposed(arch: Arch, dtype: DType, w: &Weights, y: &[f32], m: usize) -> Vec<f32> {
    let product = arch.transposed(dtype, w.n, w.k);
    let mut packed = vec![0u32; product.packed_len(m) / 4];
    let group = product.group();
    let groups =
        bytemuck::cast_slice_mut::<_, u8>(&mut packed).chunks_mut(product.packed_len(group));
    for (y, packed) in y.chunks(group * w.n).zip(groups) {
        product.pack(y, y.len() / w.n, packed);
    }
    let mut x = vec![f32::NAN; m * w.k];
    let mut workspace = workspace(product.workspace());
    let view = ColumnsMut::new(&mut x, m, w.k);
    for first in (0..w.k).step_by(product.tile()) {
        // SAFETY: one tile after the other.
        let mut tile = unsafe { view.tile(first, product.tile().min(w.k - first)) };
        product.multiply(
            &mut tile,
            first,
            w.bytes(),
            bytemuck::cast_slice(&packed),
            &mut workspace,
        );
    }
    x
}

/// Whether the transposed product of a level rounds both factors to bytes: to `d·q` with `|q| ≤
/// 127`, 64 rows of the weights at a time.
fn is_bytes(arch: Arch, f: &Format) -> bool {
    let product = arch.transposed(f.dtype, 64, step(f));
    let bytes = product.packed_len(product.group()) / product.group();
    assert!(
        bytes == 64 * 4 || bytes == 64 + 2 * 4 && f.block_elems > 1,
        "{} {}: {bytes}",
        arch.name(),
        f.name
    );
    bytes != 64 * 4
}

/// The largest magnitude among the weights of `w` that are rounded with that of row `r` and column
/// `c`.
fn largest_weight(w: &Weights, r: usize, c: usize) -> f64 {
    let rows = r / 64 * 64..w.n.min(r / 64 * 64 + 64);
    rows.map(|r| f64::from(w.row(r)[c]).abs())
        .fold(0.0, f64::max)
}

/// One-hot gradients pick rows of weights out, each value in its place. With bytes, some operations
/// round to `f32` besides.
#[test]
fn transposed_every_weight_in_its_place() {
    let mut lcg = Lcg(6);
    for f in FORMATS {
        for (n, blocks) in [(37, 1), (64, 1), (288, 3)] {
            if emulated() && n > 64 {
                continue;
            }
            let w = Weights::random(&mut lcg, f, n, blocks * step(f));
            let mut identity = vec![0.0; n * n];
            for i in 0..n {
                identity[i * n + i] = 1.0;
            }
            for arch in Arch::available() {
                let x = transposed(arch, f.dtype, &w, &identity, n);
                let bytes = is_bytes(arch, f);
                for r in 0..n {
                    for c in 0..w.k {
                        let allowed = if bytes {
                            largest_weight(&w, r, c) * (1.001 / 254.0 + 8.0 * 2f64.powi(-24))
                        } else {
                            0.0
                        };
                        let (ours, expected) = (x[r * w.k + c], w.row(r)[c]);
                        let error = f64::from(ours - expected).abs();
                        assert!(
                            error <= allowed,
                            "{} {} n {n}: {ours}, not {expected}",
                            arch.name(),
                            f.name
                        );
                    }
                }
            }
        }
    }
}

/// The bounds are those of [`products_are_within_rounding`], with sums over the rows of the
/// weights; bytes round both factors by half a step.
#[test]
fn transposed_products_are_within_rounding() {
    let mut lcg = Lcg(7);
    for f in FORMATS {
        for m in [1, 2, 15, 16, 17, 33, 47, 48, 49, 97] {
            if emulated() && ![1, 2, 15, 17].contains(&m) {
                continue;
            }
            let k = step(f) * (1 + lcg.below(3));
            let n = [1 + lcg.below(70), 32 * (1 + lcg.below(20))][lcg.below(2)];
            let w = Weights::random(&mut lcg, f, n, k);
            let y: Vec<f32> = (0..m * n).map(|_| lcg.signed()).collect();
            for arch in Arch::available() {
                let x = transposed(arch, f.dtype, &w, &y, m);
                let bytes = is_bytes(arch, f);
                let n_spans = if bytes { n.div_ceil(64) } else { 0 };
                let largest_w: Vec<_> = (0..n_spans * k)
                    .map(|i| largest_weight(&w, i / k * 64, i % k))
                    .collect();
                for i in 0..m {
                    let y = &y[i * n..][..n];
                    let largest_y: Vec<f64> =
                        y.chunks(64).map(|y| f64::from(reach(y)) / 4.0).collect();
                    for c in 0..k {
                        let (mut sum, mut sum_abs, mut rounding) = (0.0, 0.0, 0.0);
                        for r in 0..n {
                            let (w_rc, y_r) = (f64::from(w.row(r)[c]), f64::from(y[r]));
                            sum += w_rc * y_r;
                            if bytes {
                                let (w_max, y_max) = (largest_w[r / 64 * k + c], largest_y[r / 64]);
                                rounding += w_max / 254.0 * y_r.abs()
                                    + (w_rc.abs() + w_max / 254.0) * y_max / 254.0;
                                sum_abs += w_max * y_max;
                            } else {
                                sum_abs += (w_rc * y_r).abs();
                            }
                        }
                        let bound =
                            1.001 * rounding + 1.01 * (n + 8) as f64 * 2f64.powi(-24) * sum_abs;
                        let error = (f64::from(x[i * k + c]) - sum).abs();
                        let at =
                            format!("{} {} m {m} n {n} k {k}, x[{i}][{c}]", arch.name(), f.name);
                        assert!(error <= bound, "{at}: off by {error}, {bound} is allowed");
                    }
                }
            }
        }
    }
}

/// A weight or gradient that is not a number is not lost.
#[test]
fn transposed_not_a_number() {
    let f = DType::Q8_0.float_format();
    let mut lcg = Lcg(9);
    let w = Weights::random(&mut lcg, f, 64, 256);
    for odd in [f32::NAN, f32::INFINITY] {
        let mut y = vec![0.5; 3 * 64];
        y[64 + 40] = odd;
        let mut odd_w = Weights::random(&mut lcg, f, 64, 256);
        // The scale of the first block of row 7.
        let at = 1 + 7 * odd_w.bytes().len() / 64;
        odd_w.bytes[at..at + 2].copy_from_slice(&half::f16::from_f32(odd).to_le_bytes());
        for arch in Arch::available() {
            let x = transposed(arch, DType::Q8_0, &w, &y, 3);
            assert!(
                x[..256].iter().chain(&x[512..]).all(|x| x.is_finite()),
                "{}",
                arch.name()
            );
            assert!(
                x[256..512].iter().all(|x| !x.is_finite()),
                "{}",
                arch.name()
            );
            let x = transposed(arch, DType::Q8_0, &odd_w, &[0.5; 64], 1);
            assert!(
                x[..32].iter().all(|x| !x.is_finite()) && x[32..].iter().all(|x| x.is_finite()),
                "{}",
                arch.name()
            );
        }
    }
}

/// More rows than are summed at a time, and the bits of a row do not depend on the others.
#[test]
fn transposed_neighbours_do_not_matter() {
    let mut lcg = Lcg(8);
    for dtype in [DType::F32, DType::Q8_0, DType::Q4_K] {
        let f = dtype.float_format();
        let (m, n) = (1100, 64);
        let w = Weights::random(&mut lcg, f, n, 256);
        let y: Vec<f32> = (0..m * n).map(|_| lcg.signed()).collect();
        for arch in Arch::available() {
            let all = transposed(arch, dtype, &w, &y, m);
            for _ in 0..8 {
                let i = lcg.below(m);
                let rows = 1 + lcg.below((m - i).min(40));
                let some = transposed(arch, dtype, &w, &y[i * n..][..rows * n], rows);
                assert_eq!(
                    some,
                    &all[i * w.k..][..rows * w.k],
                    "{} {dtype}: {i}+{rows}",
                    arch.name()
                );
            }
        }
    }
}

/// The message of the panic that `f` ends with.
fn panic_of(f: impl FnOnce()) -> String {
    let payload = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).expect_err("a panic");
    payload
        .downcast_ref::<String>()
        .cloned()
        .unwrap_or_default()
}

/// Columns that begin behind the matrix are refused, not taken for those of later rows.
#[test]
fn a_tile_behind_the_columns() {
    let (n, k) = (64, 32);
    for arch in Arch::available() {
        let product = arch.transposed(DType::F32, n, k);
        let packed = vec![0u32; product.packed_len(1) / 4];
        let (w, first) = (vec![0; n * k * 4], product.tile());
        let mut workspace = workspace(product.workspace());
        for cols in [1, k, first] {
            let mut x = vec![0.0; cols];
            let mut x = ColumnsMut::new(&mut x, 1, cols);
            let multiply = || {
                product.multiply(
                    &mut x,
                    first,
                    &w,
                    bytemuck::cast_slice(&packed),
                    &mut workspace,
                )
            };
            assert!(
                panic_of(multiply).starts_with("transposed: columns"),
                "{}",
                arch.name()
            );
        }
    }
}

/// Sums of nothing are 0, not what the workspace holds.
#[test]
fn products_of_no_values() {
    for arch in Arch::available() {
        for f in FORMATS {
            let mut y = [f32::NAN; 6];
            let mut lines = workspace(arch.gemm_workspace(f.dtype));
            arch.gemm(
                f.dtype,
                &mut ColumnsMut::new(&mut y, 2, 3),
                &[],
                &[],
                0,
                &mut lines,
            );
            assert_eq!(y, [0.0; 6], "{} {}", arch.name(), f.name);
            let product = arch.transposed(f.dtype, 0, f.block_elems);
            let cols = product.tile().min(f.block_elems);
            let mut x = vec![f32::NAN; 2 * cols];
            let mut lines = workspace(product.workspace());
            product.multiply(
                &mut ColumnsMut::new(&mut x, 2, cols),
                0,
                &[],
                &[],
                &mut lines,
            );
            assert!(x.iter().all(|&x| x == 0.0), "{} {}", arch.name(), f.name);
        }
    }
}

/// Panels and sums lie in the workspace: a stack of 128 KiB is enough.
#[test]
fn a_small_stack() {
    let run = || {
        let mut lcg = Lcg(9);
        for f in FORMATS {
            let (m, n, k) = (40, 70, 2 * step(f));
            let w = Weights::random(&mut lcg, f, n, k);
            let x = vec![0.5; m * k.max(n)];
            for arch in Arch::available() {
                gemm(arch, f.dtype, w.bytes(), n, &x[..m * k], m);
                transposed(arch, f.dtype, &w, &x[..m * n], m);
            }
        }
    };
    std::thread::Builder::new()
        .stack_size(128 << 10)
        .spawn(run)
        .unwrap()
        .join()
        .unwrap();
}
