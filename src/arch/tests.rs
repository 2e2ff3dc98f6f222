//! Every level on a format without kernels of its own.

use super::level::LEVELS;
use super::{Acts, Arch, CacheLine, ColumnsMut, scalar};
use crate::quant::{DType, FORMATS};
use bytemuck::Zeroable;
use std::ptr::fn_addr_eq;

const UNKNOWN: DType = DType::UNACCELERATED;
/// Shape of the weights: rows that fill no panel, of three blocks.
const N_OUT: usize = 70;
const N_IN: usize = 192;

fn levels() -> impl Iterator<Item = Arch> {
    LEVELS.iter().copied().filter(|k| (k.supported)()).map(Arch)
}

/// Numbers between −1 and 1.
fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.7).sin()).collect()
}

fn weights() -> Vec<u8> {
    let block = |b: usize| {
        let scale = half::f16::from_f32(0.01 + 0.001 * b as f32).to_le_bytes();
        let bytes = (0..64).map(move |i| (i * 37 + b * 11) as u8);
        scale.into_iter().chain(bytes)
    };
    (0..N_OUT * N_IN / 64).flat_map(block).collect()
}

fn dequantized(arch: Arch) -> Vec<f32> {
    let mut x = vec![0.0; N_OUT * N_IN];
    arch.dequantize(UNKNOWN, &weights(), &mut x);
    x
}

fn matvec(arch: Arch, m: usize) -> Vec<f32> {
    let (x, mut y) = (numbers(m * N_IN), vec![0.0; m * N_OUT]);
    let x = Acts::F32 { x: &x, n: N_IN };
    arch.matvec(
        UNKNOWN,
        &mut ColumnsMut::new(&mut y, m, N_OUT),
        &weights(),
        &x,
    );
    y
}

fn gemm(arch: Arch, m: usize) -> Vec<f32> {
    let (x, mut y) = (numbers(m * N_IN), vec![0.0; m * N_OUT]);
    let group = arch.pack_group(UNKNOWN);
    let mut packed = vec![CacheLine::zeroed(); arch.packed_len(UNKNOWN, m, N_IN).div_ceil(64)];
    let packed = &mut bytemuck::cast_slice_mut(&mut packed)[..arch.packed_len(UNKNOWN, m, N_IN)];
    let groups = packed.chunks_mut(arch.packed_len(UNKNOWN, group, N_IN));
    for (x, packed) in x.chunks(group * N_IN).zip(groups) {
        arch.pack(UNKNOWN, x, m, N_IN, packed);
    }
    let mut workspace = vec![CacheLine::zeroed(); arch.gemm_workspace(UNKNOWN)];
    let mut columns = ColumnsMut::new(&mut y, m, N_OUT);
    arch.gemm(
        UNKNOWN,
        &mut columns,
        &weights(),
        packed,
        N_IN,
        &mut workspace,
    );
    y
}

fn transposed(arch: Arch, m: usize) -> Vec<f32> {
    let product = arch.transposed(UNKNOWN, N_OUT, N_IN);
    let (y, mut x) = (numbers(m * N_OUT), vec![0.0; m * N_IN]);
    let mut packed = vec![CacheLine::zeroed(); product.packed_len(m).div_ceil(64)];
    let packed = &mut bytemuck::cast_slice_mut(&mut packed)[..product.packed_len(m)];
    product.pack(&y, m, packed);
    let mut workspace = vec![CacheLine::zeroed(); product.workspace()];
    let whole = ColumnsMut::new(&mut x, m, N_IN);
    for first in (0..N_IN).step_by(product.tile()) {
        // SAFETY: one tile lives at a time.
        let mut tile = unsafe { whole.tile(first, product.tile().min(N_IN - first)) };
        product.multiply(&mut tile, first, &weights(), packed, &mut workspace);
    }
    x
}

/// A format that is only in the list of formats has the bits of the scalar level everywhere: one
/// row, a small batch, panels, expanded, and multiplied backward.
#[test]
fn a_format_that_no_level_knows_runs_the_scalar_kernels() {
    let scalar = Arch::scalar();
    let sum: f32 = dequantized(scalar)[..N_IN]
        .iter()
        .zip(numbers(N_IN))
        .map(|(w, x)| w * x)
        .sum();
    assert!((matvec(scalar, 1)[0] - sum).abs() < 1e-3 && sum != 0.0);
    for arch in levels() {
        let level = arch.name();
        assert_eq!(dequantized(arch), dequantized(scalar), "{level}");
        for m in [1, 3, 40] {
            assert_eq!(matvec(arch, m), matvec(scalar, m), "{level}: {m} rows");
            assert_eq!(gemm(arch, m), gemm(scalar, m), "{level}: {m} rows");
        }
        assert_eq!(transposed(arch, 5), transposed(scalar, 5), "{level}");
    }
}

/// No other format is missing in a level's list.
#[test]
fn every_level_knows_the_other_formats() {
    let plain = &scalar::KERNELS;
    for arch in levels().filter(|arch| arch.name() != "scalar") {
        for dtype in FORMATS.iter().map(|f| f.dtype).filter(|&d| d != UNKNOWN) {
            let level = arch.name();
            assert!(
                !fn_addr_eq((arch.0.matvec)(dtype).kernel, (plain.matvec)(dtype).kernel),
                "{level}: matvec of {dtype}"
            );
            assert!(
                !fn_addr_eq((arch.0.gemm)(dtype).kernel, (plain.gemm)(dtype).kernel),
                "{level}: gemm of {dtype}"
            );
            assert!(
                !fn_addr_eq(
                    (arch.0.transposed)(dtype).kernel,
                    (plain.transposed)(dtype).kernel
                ),
                "{level}: transposed product of {dtype}"
            );
        }
    }
}
