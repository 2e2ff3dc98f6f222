//! Products with many activation rows, one thread, packing included; and of square `f32` matrices
//! with one row.

use bytemuck::Zeroable;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ruvllm::arch::{Acts, Arch, CacheLine, ColumnsMut};
use ruvllm::quant::DType;
use std::time::Duration;

/// Memory that begins at a cache line, as a session's does.
fn lines(bytes: usize) -> Vec<CacheLine> {
    vec![CacheLine::zeroed(); bytes.div_ceil(64)]
}

/// `m` activation rows times an `n × k` matrix; throughput counts floating-point operations.
fn product(c: &mut Criterion, name: &str, arch: Arch, dtype: DType, m: usize, n: usize, k: usize) {
    let f = dtype.float_format();
    let row_bytes = k / f.block_elems * f.block_bytes;
    // No byte of a scale above 0x37: finite f16 numbers below 1.
    let w: Vec<u8> = (0..n * row_bytes)
        .map(|i| (i.wrapping_mul(2654435761) >> 13) as u8 & 0x37)
        .collect();
    let x: Vec<f32> = (0..m * k)
        .map(|i| (i * 7919 % 255) as f32 / 255.0 - 0.5)
        .collect();
    let (group, tile) = (arch.pack_group(dtype), arch.gemm_tile(dtype));
    let mut packed = lines(arch.packed_len(dtype, m, k));
    let packed =
        &mut bytemuck::cast_slice_mut::<_, u8>(&mut packed)[..arch.packed_len(dtype, m, k)];
    let mut workspace = vec![CacheLine::zeroed(); arch.gemm_workspace(dtype)];
    let mut y = lines(m * n * 4);
    let y = &mut bytemuck::cast_slice_mut::<_, f32>(&mut y)[..m * n];

    let mut benches = c.benchmark_group(name);
    benches.throughput(Throughput::Elements(2 * (m * n * k) as u64));
    benches
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1));
    benches.bench_function(arch.name(), |b| {
        b.iter(|| {
            for (x, packed) in x
                .chunks(group * k)
                .zip(packed.chunks_mut(arch.packed_len(dtype, group, k)))
            {
                arch.pack(dtype, x, m, k, packed);
            }
            let view = ColumnsMut::new(y, m, n);
            for start in (0..n).step_by(tile) {
                let cols = tile.min(n - start);
                // SAFETY: one tile after the other.
                let mut y = unsafe { view.tile(start, cols) };
                arch.gemm(
                    dtype,
                    &mut y,
                    &w[start * row_bytes..][..cols * row_bytes],
                    packed,
                    k,
                    &mut workspace,
                );
            }
        });
    });
}

/// One activation row times an `n × n` matrix.
fn gemv(c: &mut Criterion, arch: Arch, n: usize) {
    let w: Vec<f32> = (0..n * n)
        .map(|i| (i * 7919 % 255) as f32 / 255.0 - 0.5)
        .collect();
    let (x, mut y) = (w[..n].to_vec(), vec![0.0; n]);
    let mut benches = c.benchmark_group(format!("gemv f32 {n}"));
    benches.throughput(Throughput::Bytes(size_of_val(&*w) as u64));
    benches
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1));
    benches.bench_function(arch.name(), |b| {
        b.iter(|| {
            let w = bytemuck::cast_slice(&w);
            arch.matvec(
                DType::F32,
                &mut ColumnsMut::new(&mut y, 1, n),
                w,
                &Acts::F32 { x: &x, n },
            );
        });
    });
}

/// Gradients of `m` rows by the `n` outputs of an `n × k` matrix, to gradients by its inputs.
fn transposed(
    c: &mut Criterion,
    name: &str,
    arch: Arch,
    dtype: DType,
    m: usize,
    n: usize,
    k: usize,
) {
    let f = dtype.float_format();
    let w: Vec<u8> = (0..n * k / f.block_elems * f.block_bytes)
        .map(|i| (i.wrapping_mul(2654435761) >> 13) as u8 & 0x37)
        .collect();
    let y: Vec<f32> = (0..m * n)
        .map(|i| (i * 7919 % 255) as f32 / 255.0 - 0.5)
        .collect();
    let product = arch.transposed(dtype, n, k);
    let mut packed = lines(product.packed_len(m));
    let packed = &mut bytemuck::cast_slice_mut::<_, u8>(&mut packed)[..product.packed_len(m)];
    let mut workspace = vec![CacheLine::zeroed(); product.workspace()];
    let mut x = lines(m * k * 4);
    let x = &mut bytemuck::cast_slice_mut::<_, f32>(&mut x)[..m * k];

    let mut benches = c.benchmark_group(name);
    benches.throughput(Throughput::Elements(2 * (m * n * k) as u64));
    benches
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1));
    benches.bench_function(arch.name(), |b| {
        b.iter(|| {
            let groups = packed.chunks_mut(product.packed_len(product.group()));
            for (y, packed) in y.chunks(product.group() * n).zip(groups) {
                product.pack(y, y.len() / n, packed);
            }
            let view = ColumnsMut::new(x, m, k);
            for first in (0..k).step_by(product.tile()) {
                // SAFETY: one tile after the other.
                let mut x = unsafe { view.tile(first, product.tile().min(k - first)) };
                product.multiply(&mut x, first, &w, packed, &mut workspace);
            }
        });
    });
}

fn benches(c: &mut Criterion) {
    for arch in Arch::available().filter(|a| a.name() != "scalar") {
        for n in [128, 256, 512] {
            product(c, &format!("gemm f32 {n}"), arch, DType::F32, n, n, n);
        }
        for n in [256, 512, 1024, 2048, 4096] {
            gemv(c, arch, n);
        }
        for dtype in [
            DType::Q4_K,
            DType::Q6_K,
            DType::Q8_0,
            DType::Q4_0,
            DType::F16,
        ] {
            for m in [16, 32, 64, 512] {
                product(
                    c,
                    &format!("gemm {dtype} {m} x 2048 x 2048"),
                    arch,
                    dtype,
                    m,
                    2048,
                    2048,
                );
            }
            transposed(
                c,
                &format!("transposed {dtype} 512 x 2048 x 2048"),
                arch,
                dtype,
                512,
                2048,
                2048,
            );
        }
        // Rows that an expert of a mixture may have.
        for dtype in [DType::MXFP4, DType::Q4_K] {
            for m in [10, 32, 40, 64, 72] {
                product(
                    c,
                    &format!("expert {dtype} {m} x 768 x 2048"),
                    arch,
                    dtype,
                    m,
                    768,
                    2048,
                );
            }
        }
    }
}

criterion_group!(all, benches);
criterion_main!(all);
