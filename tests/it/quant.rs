//! Quantisers and format edge cases; needs no files.

use crate::common::cases;
use proptest::prelude::*;
use ruvllm::quant::QuantError;
use ruvllm::quant::{DType, FORMATS, Format, dequantize_row, quantize_row};

/// Knuth's MMIX generator; `next` is uniform in 0..1 with 24 bits.
struct Lcg(u64);

impl Lcg {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 40) as f64 / (1u64 << 24) as f64
    }

    /// Nearly Gaussian, variance 1: the sum of twelve uniform numbers, which every machine adds up
    /// to the same bits.
    fn gaussian(&mut self) -> f64 {
        (0..12).map(|_| self.next()).sum::<f64>() - 6.0
    }

    /// Laplace, variance 2: the determinant of a Gaussian 2×2 matrix has that distribution.
    fn laplace(&mut self) -> f64 {
        let [a, b, c, d] = std::array::from_fn(|_| self.gaussian());
        a * b + c * d
    }
}

fn gaussian() -> Vec<f32> {
    let mut lcg = Lcg(1);
    (0..1 << 16).map(|_| lcg.gaussian() as f32).collect()
}

fn laplace() -> Vec<f32> {
    let mut lcg = Lcg(2);
    (0..1 << 16).map(|_| lcg.laplace() as f32).collect()
}

/// Importances between 0 and about 100.
fn importance() -> Vec<f32> {
    let mut lcg = Lcg(3);
    (0..1 << 16).map(|_| lcg.laplace().powi(2) as f32).collect()
}

fn quantize(format: &Format, x: &[f32], importance: Option<&[f32]>) -> Vec<u8> {
    let mut blocks = vec![0; x.len() / format.block_elems * format.block_bytes];
    format.quantize.unwrap()(x, importance, &mut blocks);
    blocks
}

fn dequantize(format: &Format, blocks: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; blocks.len() / format.block_bytes * format.block_elems];
    (format.dequantize)(blocks, &mut out);
    out
}

fn writable() -> impl Iterator<Item = &'static Format> {
    FORMATS.iter().filter(|f| f.quantize.is_some())
}

/// Root of the weighted mean square of the error.
fn rms(x: &[f32], y: &[f32], weight: impl Fn(usize) -> f32) -> f64 {
    let (mut sum, mut sum_w) = (0.0, 0.0);
    for i in 0..x.len() {
        let (w, e) = (weight(i) as f64, x[i] as f64 - y[i] as f64);
        sum += w * e * e;
        sum_w += w;
    }
    (sum / sum_w).sqrt()
}

/// Errors of ggml's quantisers (llama.cpp 0c1e57098) on the data above: of `quantize_row_*_ref` on
/// Gaussian and Laplace values, then of `quantize_*` with `importance()` as the importance matrix
/// of one long row, weighted by it. (From `IQ4_XS` on: all by `ggml_quantize_chunk` of ggml 0.25.3,
/// with importances of 1 for the formats that it refuses without any.)
const REFERENCE: &[(&str, [f64; 4])] = &[
    ("Q4_0", [0.08441674, 0.14854704, 0.07003481, 0.12798172]),
    ("Q4_1", [0.07739818, 0.12788789, 0.05509189, 0.09241112]),
    ("Q5_0", [0.04197114, 0.07398655, 0.03479058, 0.06433793]),
    ("Q5_1", [0.03735731, 0.06193741, 0.02657202, 0.04485748]),
    ("Q2_K", [0.29356557, 0.47931105, 0.19593797, 0.30822651]),
    ("Q3_K", [0.14928769, 0.24515337, 0.11853544, 0.20107668]),
    ("Q4_K", [0.07038319, 0.11811666, 0.05618057, 0.09489919]),
    ("Q5_K", [0.03567862, 0.05995693, 0.02903164, 0.05009489]),
    ("Q6_K", [0.01745450, 0.02999790, 0.01431670, 0.02556816]),
    ("IQ4_NL", [0.07532455, 0.12243683, 0.06331782, 0.10374294]),
    ("IQ4_XS", [0.07589685, 0.12333569, 0.06426681, 0.10516221]),
    ("MXFP4", [0.11509262, 0.17663934, 0.11528678, 0.17828581]),
    ("NVFP4", [0.09645659, 0.13094624, 0.09575168, 0.13112123]),
    ("Q1_0", [0.59741794, 0.98358348, 0.58799832, 0.98607530]),
    ("Q2_0", [0.71387360, 1.02481946, 0.71582027, 1.02849764]),
    ("TQ1_0", [0.79878001, 1.16886889, 0.80015590, 1.17125320]),
    ("TQ2_0", [0.79878001, 1.16886889, 0.80015590, 1.17125320]),
    ("IQ1_S", [0.48201372, 0.76022801, 0.39052729, 0.61134255]),
    ("IQ1_M", [0.58253608, 0.82196377, 0.32421114, 0.48827750]),
    ("IQ2_XXS", [0.34299784, 0.53560873, 0.34071527, 0.49260677]),
    ("IQ2_XS", [0.29934283, 0.46002179, 0.21079836, 0.34998915]),
    ("IQ2_S", [0.26236288, 0.45113994, 0.19721458, 0.33242557]),
    ("IQ3_XXS", [0.21316501, 0.34698117, 0.11974598, 0.19076379]),
    ("IQ3_S", [0.16443270, 0.27450343, 0.10060995, 0.16885009]),
];

#[test]
fn errors_are_no_larger_than_those_of_ggml() {
    let data = [gaussian(), laplace()];
    let importance = importance();
    let mut failures = Vec::new();
    for &(name, reference) in REFERENCE {
        let format = FORMATS.iter().find(|f| f.name == name).unwrap();
        for (case, reference) in reference.into_iter().enumerate() {
            let (x, weighted) = (&data[case % 2], case >= 2);
            let blocks = quantize(format, x, weighted.then_some(&importance));
            let y = dequantize(format, &blocks);
            let error = rms(x, &y, |i| if weighted { importance[i] } else { 1.0 });
            println!(
                "{name} case {case}: {:.4} of the reference",
                error / reference
            );
            if error > reference {
                failures.push(format!("{name}, case {case}: {error} against {reference}"));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Upper bound of the root-mean-square error in a block of `x`, without importances.
///
/// On a plain grid of step `s` every value is off by `s/2` at most, or by `s` at the positive end
/// of a symmetric grid. The search only lowers `Σ w·error²`, where the weights `w ≥ 1` have a mean
/// of at most √2, so the root mean square is at most `2^¼ < 1.2` times that. Rounding sub-block
/// scales and minima to `sc` steps adds half a step of the largest each, which after the search is
/// at most twice that of the plain grid. f16 scales add a relative 2⁻¹¹ each, or where they are
/// subnormal 2⁻²⁵ times the largest code.
fn bound(format: &Format, x: &[f32]) -> f64 {
    let low = x.iter().fold(0.0f32, |m, &x| m.min(x)) as f64;
    let high = x.iter().fold(0.0f32, |m, &x| m.max(x)) as f64;
    let max = high.max(-low);
    let symmetric = |n: f64| 1.2 * max / n;
    let affine = |n: f64| 0.6 * (high - low) / n;
    let rounded = |sc: f64| 1.5 * (high - low) / sc;
    let (error, largest_code) = match format.dtype {
        DType::F32 => return 0.0,
        DType::BF16 => return max / 256.0 + 1e-38,
        DType::F16 => (0.0, 1.0),
        DType::Q4_0 => (symmetric(8.0), 8.0),
        DType::Q5_0 => (symmetric(16.0), 16.0),
        DType::Q8_0 => (0.5 * max / 127.0, 127.0),
        DType::Q4_1 => (affine(15.0), 15.0),
        DType::Q5_1 => (affine(31.0), 31.0),
        DType::Q2_K => (affine(3.0) + rounded(15.0), 3.0 * 15.0),
        DType::Q3_K => (symmetric(4.0) + rounded(64.0), 4.0 * 32.0),
        DType::Q4_K => (affine(15.0) + rounded(63.0), 15.0 * 63.0),
        DType::Q5_K => (affine(31.0) + rounded(63.0), 31.0 * 63.0),
        DType::Q6_K => (symmetric(32.0) + rounded(256.0), 32.0 * 128.0),
        // The table's widest half gap is 12, and −127 has 113 as its counterpart.
        DType::IQ4_NL => (1.2 * 14.0 / 127.0 * max, 127.0),
        DType::IQ4_XS => (1.2 * 14.0 / 127.0 * max + rounded(64.0), 127.0 * 32.0),
        // Of a code's 12 steps the widest half gap is 2, and the largest value has more than 6.
        DType::MXFP4 => (1.2 * max / 3.0, 1.0),
        // As MXFP4, with more than 10 of 12 steps; below scales of 2⁻⁹, and above their largest,
        // what is left of the value.
        DType::NVFP4 => {
            let outside = (max - 6.0 * 448.0).max(0.0);
            (1.2 * (2.0 * max / 10.0 + 2.0 / 1024.0 + outside), 1.0)
        }
        // No worse than zeros, of which the root mean square is at most the largest value.
        DType::Q1_0 => (max, 1.0),
        DType::Q2_0 => (symmetric(2.0), 2.0),
        DType::TQ1_0 | DType::TQ2_0 => (1.2 * 0.5 * max, 1.0),
        DType::IQ1_S
        | DType::IQ1_M
        | DType::IQ2_XXS
        | DType::IQ2_XS
        | DType::IQ2_S
        | DType::IQ3_XXS
        | DType::IQ3_S => (1.2 * max, 62.0 * 31.0),
        other => panic!("no bound for {other}"),
    };
    let f16 = 2.0 * (max + (high - low)) / 2048.0 + (largest_code + 1.0) / (1u64 << 25) as f64;
    error + f16
}

fn check_bound(format: &Format, x: &[f32]) {
    let y = dequantize(format, &quantize(format, x, None));
    let block = format.block_elems;
    for (x, y) in x.chunks(block).zip(y.chunks(block)) {
        let (error, bound) = (rms(x, y, |_| 1.0), bound(format, x));
        assert!(
            error <= bound,
            "{}: error {error:e}, bound {bound:e} for {x:?}",
            format.name
        );
    }
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn errors_stay_within_their_bounds(
        seed: u64,
        exponent in -7..4i32,
        offset in -3.0..3.0f64,
        outlier in 1.0..50.0f64,
    ) {
        let mut lcg = Lcg(seed);
        let scale = 10f64.powi(exponent);
        let x: Vec<f32> = (0..512)
            .map(|i| {
                let stretch = if i % 61 == 0 { outlier } else { 1.0 };
                let x = (scale * (offset + stretch * lcg.gaussian())) as f32;
                x.clamp(-65504.0, 65504.0)
            })
            .collect();
        for format in writable() {
            check_bound(format, &x);
        }
    }

    #[test]
    fn any_bytes_dequantize(seed: u64, shift in 0..8usize) {
        let mut lcg = Lcg(seed);
        for format in FORMATS {
            // Blocks at any address.
            let bytes: Vec<u8> = (0..shift + 3 * format.block_bytes)
                .map(|_| (lcg.next() * 256.0) as u8)
                .collect();
            prop_assert_eq!(dequantize(format, &bytes[shift..]).len(), 3 * format.block_elems);
        }
    }

    #[test]
    fn any_values_quantize_to_finite_ones(bits in prop::collection::vec(any::<u32>(), 512)) {
        // Half values, half importances, of every kind: NaN, infinities, subnormals.
        let floats: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        let (x, importance) = floats.split_at(256);
        for format in writable().filter(|f| !matches!(f.dtype, DType::F32 | DType::BF16)) {
            for importance in [None, Some(importance)] {
                let y = dequantize(format, &quantize(format, x, importance));
                prop_assert!(y.iter().all(|y| y.is_finite()), "{}: {:?}", format.name, y);
            }
        }
    }
}

#[test]
fn zeros_stay_zeros() {
    for format in writable() {
        for x in [[0.0; 256], [-0.0; 256], [f32::MIN_POSITIVE / 4.0; 256]] {
            let y = dequantize(format, &quantize(format, &x, None));
            let exact = matches!(format.dtype, DType::F32);
            assert!(
                y.iter().all(|&y| y.abs() < 1e-37 && (!exact || y == x[0])),
                "{}",
                format.name
            );
        }
    }
}

#[test]
fn constant_blocks() {
    for format in writable() {
        for c in [1.0, -1.0, 0.02, -0.02, 65504.0, -65504.0, 3e-5, -3e-5] {
            check_bound(format, &[c; 256]);
        }
    }
}

#[test]
fn non_finite_and_huge_values() {
    let mut x = [1.0; 256];
    (x[0], x[40], x[80], x[120]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30);
    let mut expected = x;
    (expected[0], expected[40], expected[80], expected[120]) = (0.0, 65504.0, -65504.0, 65504.0);
    for format in writable().filter(|f| !matches!(f.dtype, DType::F32 | DType::BF16)) {
        let blocks = quantize(format, &x, None);
        assert_eq!(blocks, quantize(format, &expected, None), "{}", format.name);
        assert!(
            dequantize(format, &blocks).iter().all(|y| y.is_finite()),
            "{}",
            format.name
        );
    }
}

#[test]
fn useless_importances_count_as_none() {
    let x = &gaussian()[..256];
    for format in writable() {
        let plain = quantize(format, x, None);
        for i in [0.0, 1.0, -1.0, f32::NAN, f32::INFINITY] {
            let blocks = quantize(format, x, Some(&[i; 256]));
            assert_eq!(blocks, plain, "{} with importance {i}", format.name);
        }
    }
}

#[test]
fn rows_are_checked() {
    let (x, mut blocks) = ([1.0; 256], [0; 144]);
    quantize_row(DType::Q4_K, &x, None, &mut blocks).unwrap();
    let mut y = [0.0; 256];
    dequantize_row(DType::Q4_K, &blocks, &mut y).unwrap();

    let row_length = |result| matches!(result, Err(QuantError::RowLength { .. }));
    assert!(row_length(quantize_row(
        DType::Q4_K,
        &x,
        None,
        &mut blocks[..143]
    )));
    assert!(row_length(quantize_row(
        DType::Q4_K,
        &x[..255],
        None,
        &mut blocks
    )));
    assert!(row_length(dequantize_row(
        DType::Q4_K,
        &blocks,
        &mut y[..255]
    )));
    assert!(row_length(dequantize_row(DType::Q4_K, &[], &mut y)));
    assert_eq!(
        dequantize_row(DType::I32, &blocks, &mut y),
        Err(QuantError::NotAWeight {
            dtype: "I32".into()
        })
    );
    let mut bad = x;
    bad[7] = f32::INFINITY;
    assert_eq!(
        quantize_row(DType::F16, &bad, None, &mut [0; 512]),
        Err(QuantError::NotFinite {
            index: 7,
            value: f32::INFINITY
        })
    );
}

/// FNV-1a of what 64 blocks of generated bytes expand to, as computed when every format agreed
/// with ggml bit for bit.
const EXPANDED: &[(&str, u64)] = &[
    ("F32", 0x8799bc9c7acd958a),
    ("F16", 0xe663b325dbaee825),
    ("BF16", 0x6a770f4eb5d60825),
    ("Q4_0", 0xd1aafae76bd35f25),
    ("Q4_1", 0x76a631ff0605d31a),
    ("Q5_0", 0x4ad115addc81ff25),
    ("Q5_1", 0xa256c8624d2165e8),
    ("Q8_0", 0x027a3848b652baa5),
    ("Q2_K", 0x916e9b58468b1c0d),
    ("Q3_K", 0x4425fce703ecb665),
    ("Q4_K", 0xf4b47fefc281ed83),
    ("Q5_K", 0xf851df863076c269),
    ("Q6_K", 0x673ecd74ea86e06f),
    ("IQ4_NL", 0xaf7ad7885bc17565),
    ("IQ4_XS", 0x74beae71df2668e5),
    ("MXFP4", 0xb52e5980adeec325),
    ("NVFP4", 0x4bbf957cbd876325),
    ("Q1_0", 0xbae186dbc40de325),
    ("Q2_0", 0xaaf4bacff84cc325),
    ("TQ1_0", 0x96512150771ee325),
    ("TQ2_0", 0x12548bb3e4f3e325),
    ("IQ1_S", 0xd6d98ce8e1dcec25),
    ("IQ1_M", 0x9b143d9321d3f105),
    ("IQ2_XXS", 0x043c1b8ce9bba501),
    ("IQ2_XS", 0x4318071d4b41d829),
    ("IQ2_S", 0xff75e0ba96a19c55),
    ("IQ3_XXS", 0xa7663aa0681c58fd),
    ("IQ3_S", 0x84b2db34fc9bd475),
];

#[test]
fn layouts_have_not_changed() {
    let mut changed = Vec::new();
    for format in FORMATS {
        let mut lcg = Lcg(4);
        let bytes: Vec<u8> = (0..64 * format.block_bytes)
            .map(|_| (lcg.next() * 256.0) as u8)
            .collect();
        let hash = dequantize(format, &bytes)
            .iter()
            .fold(0xcbf2_9ce4_8422_2325u64, |hash, y| {
                // A random scale may be NaN, whose bits the hardware chooses.
                let bits = if y.is_nan() { 0 } else { y.to_bits() };
                (hash ^ bits as u64).wrapping_mul(0x0000_0100_0000_01b3)
            });
        if !EXPANDED.contains(&(format.name, hash)) {
            changed.push(format!("(\"{}\", 0x{hash:016x})", format.name));
        }
    }
    assert!(changed.is_empty(), "{changed:#?}");
}

#[test]
fn the_table_of_formats_is_complete() {
    for &dtype in DType::ALL {
        let integer = matches!(
            dtype,
            DType::I8 | DType::I16 | DType::I32 | DType::I64 | DType::F64
        );
        let Some(format) = dtype.format() else {
            assert!(integer, "{dtype} has no format");
            continue;
        };
        assert!(!integer);
        assert_eq!(format.name, dtype.to_string());
        assert_eq!(
            (format.block_elems as u64, format.block_bytes as u64),
            dtype.block()
        );
    }
}
