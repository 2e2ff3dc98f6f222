//! Products of weights with few activation rows: every level and format against sums in `f64`.

use crate::common::emulated;
use half::f16;
use ruvllm::arch::{ActForm, Acts, Arch, BlockP16, BlockQ16, ColumnsMut};
use ruvllm::quant::{DType, FORMATS, Format};

/// The largest integer of an activation rounded to 16 bits.
fn largest(form: ActForm) -> f32 {
    f32::from(if form == ActForm::P16 {
        BlockP16::MAX
    } else {
        BlockQ16::MAX
    })
}

/// xorshift64*: the tests need variety, not quality.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// In −1..1.
    fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Where a block has f16 scales and minima, which bytes are packed integers (for formats that
/// subtract something from those), and which bytes are scales of sub-blocks.
fn layout(
    dtype: DType,
) -> (
    &'static [usize],
    std::ops::Range<usize>,
    std::ops::Range<usize>,
) {
    match dtype {
        DType::Q4_0 => (&[0], 2..18, 0..0),
        DType::Q4_1 => (&[0, 2], 4..20, 0..0),
        DType::Q5_0 => (&[0], 2..22, 0..0),
        DType::Q5_1 => (&[0, 2], 4..24, 0..0),
        DType::Q2_K => (&[80, 82], 16..80, 0..16),
        DType::Q3_K => (&[108], 0..96, 96..108),
        DType::Q4_K => (&[0, 2], 16..144, 4..16),
        DType::Q5_K => (&[0, 2], 16..176, 4..16),
        DType::Q6_K => (&[208], 0..192, 192..208),
        DType::IQ4_XS => (&[0], 0..0, 2..8),
        DType::TQ1_0 => (&[52], 0..0, 0..0),
        DType::TQ2_0 => (&[64], 0..64, 0..0),
        DType::Q1_0 | DType::Q2_0 => (&[0], 2..18, 0..0),
        DType::IQ2_XS => (&[0], 0..0, 66..74),
        DType::IQ2_S => (&[0], 0..0, 74..82),
        DType::IQ3_S => (&[0], 0..0, 106..110),
        DType::Q8_0 | DType::IQ4_NL | DType::IQ1_S | DType::IQ2_XXS | DType::IQ3_XXS => {
            (&[0], 0..0, 0..0)
        }
        _ => (&[], 0..0, 0..0),
    }
}

/// `rows × n` random weights, with scales near 1/100.
fn weights(random: &mut Random, format: &Format, rows: usize, n: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..rows * n / format.block_elems {
        let mut block: Vec<u8> = (0..format.block_bytes)
            .map(|_| random.bits() as u8)
            .collect();
        match format.dtype {
            DType::F32 => block.copy_from_slice(&random.value().to_le_bytes()),
            DType::F16 => block.copy_from_slice(&f16::from_f32(random.value()).to_le_bytes()),
            DType::BF16 => {
                block.copy_from_slice(&half::bf16::from_f32(random.value()).to_le_bytes())
            }
            DType::MXFP4 => block[0] = 115 + (random.bits() % 8) as u8,
            // Half of 2⁻⁶ to 1, with any mantissa.
            DType::NVFP4 => block[..4].iter_mut().for_each(|d| *d = 8 + *d % 48),
            DType::IQ1_M => {
                // The nibbles of the scale are the top nibbles of the last four words.
                let d = f16::from_f32(0.01 * random.value()).to_bits();
                for (i, nibble) in [d, d >> 4, d >> 8, d >> 12].into_iter().enumerate() {
                    block[48 + 2 * i + 1] = block[48 + 2 * i + 1] & 15 | ((nibble & 15) << 4) as u8;
                }
            }
            _ => {}
        }
        for &at in layout(format.dtype).0 {
            block[at..at + 2].copy_from_slice(&f16::from_f32(0.01 * random.value()).to_le_bytes());
        }
        bytes.extend(block);
    }
    bytes
}

/// Calls the kernel with `x` (`m × n`) in the form it wants; weights lie at an odd address.
fn product(arch: Arch, dtype: DType, rows: usize, w: &[u8], n: usize, x: &[f32]) -> Vec<f32> {
    let m = x.len() / n;
    let mut odd = vec![0; w.len() + 1];
    odd[1..].copy_from_slice(w);
    let mut y = vec![f32::NAN; m * rows];
    let mut blocks = vec![bytemuck::Zeroable::zeroed(); m * BlockQ16::per_row(n)];
    let mut planes = vec![bytemuck::Zeroable::zeroed(); m * BlockP16::per_row(n)];
    let acts = match arch.act_form(dtype) {
        ActForm::F32 => Acts::F32 { x, n },
        ActForm::Q16 => {
            for (x, blocks) in x
                .chunks_exact(n)
                .zip(blocks.chunks_exact_mut(BlockQ16::per_row(n)))
            {
                arch.quantize_q16(x, blocks);
            }
            Acts::Q16 { x: &blocks, n }
        }
        ActForm::P16 => {
            for (x, planes) in x
                .chunks_exact(n)
                .zip(planes.chunks_exact_mut(BlockP16::per_row(n)))
            {
                arch.quantize_p16(x, planes);
            }
            Acts::P16 { x: &planes, n }
        }
    };
    arch.matvec(
        dtype,
        &mut ColumnsMut::new(&mut y, m, rows),
        &odd[1..],
        &acts,
    );
    y
}

/// The values of one row, and for each the sum of the magnitudes that are added up to it: formats
/// with a minimum, or with integers from 0, are computed as `scale·q + offset`.
fn expand(format: &Format, row: &[u8], n: usize) -> (Vec<f32>, Vec<f32>) {
    let (mut w, mut offset) = (vec![0.0; n], vec![0.0; n]);
    (format.dequantize)(row, &mut w);
    let integers = layout(format.dtype).1;
    if !integers.is_empty() {
        let mut row = row.to_vec();
        for block in row.chunks_exact_mut(format.block_bytes) {
            block[integers.clone()].fill(0);
        }
        (format.dequantize)(&row, &mut offset);
    }
    // Values that are looked up may become integers from 0 by adding the largest to all, which
    // share a scale in 16s, or in 256s where a value may be 0. Here it is over the smallest:
    let (together, excess) = match format.dtype {
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => (16, 43.0 / 8.0),
        DType::IQ3_XXS => (16, 62.0 / 4.0),
        DType::IQ3_S => (16, 15.0),
        DType::IQ1_S | DType::IQ1_M => (16, 9.0),
        DType::TQ1_0 => (256, 1.0),
        _ => (256, 0.0),
    };
    for (w, offset) in w
        .chunks(together)
        .zip(offset.chunks_mut(together))
        .filter(|_| excess > 0.0)
    {
        offset.fill(excess * w.iter().fold(0.0, |max, w| w.abs().max(max)));
    }
    let size = w
        .iter()
        .zip(&offset)
        .map(|(w, o)| (w - o).abs() + o.abs())
        .collect();
    (w, size)
}

/// Compares all products with sums in f64. They may differ by
/// - the rounding of activations: half a step `d = max|x|/MAX` (or 127) of each 32, and 1/50 of it,
///   because `x/d` is computed in f32: MAX·2⁻²³ < 0.01; or all of `x` where the 16-bit `d` is no
///   normal number, or the largest 8-bit `x` below 2⁻¹⁰⁰;
/// - the rounding of f32 operations: ε for each addition on the way of a term into the sum (with a
///   weight row per lane, an offset and a product for each 16 values), and for each of at most 16
///   other steps (conversion, scales, offsets, the sum over lanes).
fn check(arch: Arch, format: &Format, rows: usize, n: usize, w: &[u8], x: &[f32]) {
    let form = arch.act_form(format.dtype);
    let additions = match (form, arch.name()) {
        (ActForm::F32, "scalar") => n,
        // A register of sums per block.
        (ActForm::Q16 | ActForm::P16, _) => n.div_ceil(256),
        _ => n.div_ceil(8),
    };
    let y = product(arch, format.dtype, rows, w, n, x);
    for (r, row) in w.chunks_exact(w.len() / rows).enumerate() {
        let (w, size) = expand(format, row, n);
        for (i, x) in x.chunks_exact(n).enumerate() {
            let expected: f64 = w.iter().zip(x).map(|(w, x)| *w as f64 * *x as f64).sum();
            let mut bound = 0.0;
            for (x, size) in x.chunks(32).zip(size.chunks(32)) {
                let max = x.iter().fold(0.0f64, |max, x| max.max(x.abs() as f64));
                let rounding = match form {
                    ActForm::F32 => 0.0,
                    ActForm::Q16 | ActForm::P16
                        if max / f64::from(largest(form)) < 1.01 * f32::MIN_POSITIVE as f64 =>
                    {
                        max
                    }
                    ActForm::Q16 | ActForm::P16 => 0.51 * max / f64::from(largest(form)),
                };
                for (x, size) in x.iter().zip(size) {
                    let x = x.abs() as f64 + rounding;
                    bound += *size as f64
                        * (rounding + (additions + 16) as f64 * f32::EPSILON as f64 * x);
                }
            }
            // Products of the tiniest activations may end below f32's range.
            bound += n as f64 * f32::MIN_POSITIVE as f64;
            let y = y[i * rows + r];
            let error = (y as f64 - expected).abs();
            assert!(
                error <= bound,
                "{arch:?} {} {rows}×{n}, row {r}, activations {i}: {y} instead of {expected}, error {error:e} > {bound:e}",
                format.name
            );
        }
    }
}

fn widths(format: &Format) -> &'static [usize] {
    match format.block_elems {
        1 => &[1, 15, 16, 31, 33, 64, 100, 257],
        32 => &[32, 64, 96, 256, 288, 544, 800],
        _ => &[256, 512, 768, 2304],
    }
}

#[test]
fn products_are_right() {
    for arch in Arch::available() {
        for format in FORMATS {
            let mut random = Random(7 + format.dtype as u64);
            for &n in widths(format).iter().filter(|&&n| !emulated() || n <= 512) {
                let all = [
                    (7, 1),
                    (9, 5),
                    (2, 3),
                    (1, 1),
                    (8, 2),
                    (9, 16),
                    (16, 5),
                    (33, 1),
                    (17, 17),
                ];
                for (rows, m) in all.into_iter().take(if emulated() { 2 } else { all.len() }) {
                    let w = weights(&mut random, format, rows, n);
                    let x: Vec<f32> = (0..m * n).map(|_| random.value()).collect();
                    check(arch, format, rows, n, &w, &x);
                }
            }
        }
    }
}

#[test]
fn extreme_activations() {
    for arch in Arch::available() {
        for format in FORMATS {
            let mut random = Random(11 + format.dtype as u64);
            let n = 768;
            let w = weights(&mut random, format, 5, n);
            let mut x: Vec<f32> = (0..7 * n).map(|_| random.value()).collect();
            let mut rows = x.chunks_exact_mut(n);
            let mut row = || rows.next().unwrap();
            row().fill(0.0);
            row()[n - 1] = 1e4;
            row().iter_mut().for_each(|x| *x *= 1e30);
            row().iter_mut().for_each(|x| *x *= 1e-30);
            row().iter_mut().for_each(|x| *x *= 1e-34); // around the smallest normal scale
            row().iter_mut().for_each(|x| *x *= 1e-40); // denormal
            row().fill(-1.0);
            check(arch, format, 5, n, &w, &x);
        }
    }
}

/// Where activations, scales and sums are small integers, nothing may be rounded at all.
#[test]
fn integers_are_exact() {
    for arch in Arch::available() {
        for format in FORMATS {
            let form = arch.act_form(format.dtype);
            if !matches!(form, ActForm::Q16 | ActForm::P16) {
                continue;
            }
            let mut random = Random(13 + format.dtype as u64);
            let (scales, _, sub_scales) = layout(format.dtype);
            let n = 256;
            let mut w = weights(&mut random, format, 9, n);
            for block in w.chunks_exact_mut(format.block_bytes) {
                block[sub_scales.clone()].fill(match format.dtype {
                    DType::Q2_K | DType::Q4_K | DType::Q5_K => 0x11, /* 1, and a minimum of 1
                    * (of 17 once) */
                    DType::Q6_K => 1,
                    _ => 0, // −32, or ½, 1
                });
                for &at in scales {
                    block[at..at + 2].copy_from_slice(&f16::ONE.to_le_bytes());
                }
                match format.dtype {
                    DType::MXFP4 => block[0] = 128,
                    DType::NVFP4 => block[..4].fill(0x40),
                    // Scales share bytes with signs and indices.
                    DType::IQ2_XXS => (9..66).step_by(8).for_each(|i| block[i] &= 0x0F),
                    DType::IQ3_XXS => (69..98).step_by(4).for_each(|i| block[i] &= 0x0F),
                    DType::IQ1_S => (35..50).step_by(2).for_each(|i| block[i] &= 0x8F),
                    // The top nibbles are those of an f16, 1.
                    DType::IQ1_M => block[48..].copy_from_slice(&[0, 0, 0, 0, 0, 0xC0, 0, 0x30]),
                    _ => {}
                }
            }
            for block in 0..8 {
                // The largest is that of the integers, so that the scale is 1.
                let mut x = vec![0.0; n];
                for x in &mut x[32 * block..][..32] {
                    *x = (random.bits() % 99) as f32 - 49.0;
                }
                x[32 * block + random.bits() as usize % 32] = if block % 2 == 0 {
                    largest(form)
                } else {
                    -largest(form)
                };
                let y = product(arch, format.dtype, 9, &w, n, &x);
                for (r, row) in w.chunks_exact(w.len() / 9).enumerate() {
                    let (w, _) = expand(format, row, n);
                    let expected: f64 = w.iter().zip(&x).map(|(w, x)| *w as f64 * *x as f64).sum();
                    assert_eq!(
                        y[r] as f64, expected,
                        "{arch:?} {} row {r}, block {block}",
                        format.name
                    );
                }
            }
        }
    }
}

/// Threads split a product into tiles of any size, and batches come in any size.
#[test]
fn tiles_do_not_change_results() {
    for arch in Arch::available() {
        for format in FORMATS {
            let mut random = Random(17 + format.dtype as u64);
            let n = if format.block_elems == 1 {
                333
            } else {
                256 + 32 * (256 / format.block_elems).min(2)
            };
            let n = n.next_multiple_of(format.block_elems);
            let w = weights(&mut random, format, 17, n);
            let x: Vec<f32> = (0..17 * n).map(|_| random.value()).collect();
            let row = w.len() / 17;
            let all = product(arch, format.dtype, 17, &w, n, &x);
            for m in 1..=17 {
                for rows in 1..=17 {
                    let (r, i) = (17 - rows, (17 - m) / 2);
                    let some = product(
                        arch,
                        format.dtype,
                        rows,
                        &w[r * row..],
                        n,
                        &x[i * n..][..m * n],
                    );
                    for (j, some) in some.chunks_exact(rows).enumerate() {
                        let all = &all[(i + j) * 17 + r..][..rows];
                        let same = all
                            .iter()
                            .zip(some)
                            .all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(
                            same,
                            "{arch:?} {} {rows} rows, {m} activations: {some:?}, {all:?}",
                            format.name
                        );
                    }
                }
            }
        }
    }
}

/// A file may hold any bytes: the result may then be anything, but of that row alone.
#[test]
fn hostile_scales_stay_in_their_row() {
    for arch in Arch::available() {
        for format in FORMATS {
            let mut random = Random(19 + format.dtype as u64);
            let w = weights(&mut random, format, 3, 256);
            let x: Vec<f32> = (0..256).map(|_| random.value()).collect();
            let sound = product(arch, format.dtype, 3, &w, 256, &x);
            for byte in [0x7F, 0x7C, 0xFF, 0x00] {
                let mut w = w.clone();
                let row = w.len() / 3;
                w[row..2 * row].fill(byte);
                let y = product(arch, format.dtype, 3, &w, 256, &x);
                assert_eq!(
                    [y[0].to_bits(), y[2].to_bits()],
                    [sound[0].to_bits(), sound[2].to_bits()],
                    "{}",
                    format.name
                );
            }
            for &at in layout(format.dtype).0.iter().take(1) {
                let mut w = w.clone();
                let row = w.len() / 3;
                w[row + at..][..2].copy_from_slice(&f16::NAN.to_le_bytes());
                assert!(
                    product(arch, format.dtype, 3, &w, 256, &x)[1].is_nan(),
                    "{arch:?} {}",
                    format.name
                );
            }
        }
    }
}

/// What goes wrong before a product must not be hidden by it.
#[test]
fn nan_and_infinite_activations_reach_the_result() {
    for arch in Arch::available() {
        for format in FORMATS {
            let mut random = Random(23 + format.dtype as u64);
            let w = weights(&mut random, format, 2, 256);
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x: Vec<f32> = (0..512).map(|_| random.value()).collect();
                x[77] = bad;
                let y = product(arch, format.dtype, 2, &w, 256, &x);
                // A zero weight times infinity is NaN; any other keeps it infinite.
                assert!(
                    !y[0].is_finite() && !y[1].is_finite(),
                    "{arch:?} {} {bad}: {y:?}",
                    format.name
                );
                assert!(
                    y[2].is_finite() && y[3].is_finite(),
                    "{arch:?} {} {bad}: {y:?}",
                    format.name
                );
            }
        }
    }
}

#[test]
fn activations_round_to_the_nearest_step() {
    let mut random = Random(29);
    for arch in Arch::available() {
        for n in [1, 31, 32, 100, 256, 257, 800] {
            for scale in [1.0, 1e30, 1e-30, 1e-34, 1e-40, 0.0] {
                let mut x: Vec<f32> = (0..n).map(|_| random.value() * scale).collect();
                let mut blocks = vec![bytemuck::Zeroable::zeroed(); BlockQ16::per_row(n)];
                bytemuck::cast_slice_mut::<BlockQ16, u8>(&mut blocks).fill(99);
                arch.quantize_q16(&x, &mut blocks);
                x.resize(256 * blocks.len(), 0.0);
                for (b, x) in x.chunks_exact(16).enumerate() {
                    let block = &blocks[b / 16];
                    let (d, s) = (block.d[b % 16], block.s[b % 16]);
                    let mut sum = 0;
                    for (i, &x) in x.iter().enumerate() {
                        let q = block.integer(b % 16 * 16 + i);
                        sum += i32::from(q);
                        let step = if d == 0.0 {
                            BlockQ16::MAX as f64 * f32::MIN_POSITIVE as f64 / 0.5
                        } else {
                            d as f64
                        };
                        let error = (x as f64 - d as f64 * f64::from(q)).abs();
                        assert!(error <= 0.51 * step, "{arch:?}: {x} became {d}·{q}");
                    }
                    assert_eq!(s, d * sum as f32, "{arch:?}");
                }
                // One rounding for all levels: their results differ by the sums alone.
                let mut reference = blocks.clone();
                Arch::scalar().quantize_q16(&x[..n], &mut reference);
                assert_eq!(
                    bytemuck::cast_slice::<_, u8>(&blocks),
                    bytemuck::cast_slice::<_, u8>(&reference),
                    "{arch:?}"
                );
            }
        }
    }
}

#[test]
fn activations_round_to_the_nearest_step_in_planes() {
    let mut random = Random(37);
    for arch in Arch::available() {
        for n in [1, 31, 32, 100, 256, 257, 800] {
            for scale in [1.0, 1e30, 1e-30, 1e-34, 1e-40, 0.0] {
                let mut x: Vec<f32> = (0..n).map(|_| random.value() * scale).collect();
                let mut blocks = vec![bytemuck::Zeroable::zeroed(); BlockP16::per_row(n)];
                bytemuck::cast_slice_mut::<BlockP16, u8>(&mut blocks).fill(99);
                arch.quantize_p16(&x, &mut blocks);
                x.resize(256 * blocks.len(), 0.0);
                for (b, x) in x.chunks_exact(16).enumerate() {
                    let (block, b): (&BlockP16, _) = (&blocks[b / 16], b % 16);
                    let (d, s) = (block.d[b], block.s[b]);
                    let mut sum = 0;
                    for (i, &x) in x.iter().enumerate() {
                        let q = block.integer(16 * b + i);
                        sum += i32::from(q);
                        let step = if d == 0.0 {
                            BlockP16::MAX as f64 * f32::MIN_POSITIVE as f64 / 0.5
                        } else {
                            d as f64
                        };
                        let error = (x as f64 - d as f64 * f64::from(q)).abs();
                        assert!(error <= 0.51 * step, "{arch:?}: {x} became {d}·{q}");
                    }
                    assert_eq!((s, block.sums[b]), (d * sum as f32, sum), "{arch:?}");
                }
                // One rounding for all levels: their results differ by the sums alone.
                let mut reference = blocks.clone();
                Arch::scalar().quantize_p16(&x[..n], &mut reference);
                assert_eq!(
                    bytemuck::cast_slice::<_, u8>(&blocks),
                    bytemuck::cast_slice::<_, u8>(&reference),
                    "{arch:?}"
                );
            }
        }
    }
}
