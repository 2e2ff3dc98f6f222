//! The design notes' rows for one adapter site: `y += s·B·(A·x)` for one token, one thread, all
//! operands in cache, on the level that `RUVLLM_ARCH` names or the best there is.

use criterion::{Criterion, criterion_group, criterion_main};
use ruvllm::arch::{Acts, Arch, ColumnsMut};
use ruvllm::quant::DType;
use std::hint::black_box;

fn noise(n: usize) -> Vec<f32> {
    let mut state = 1u64;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        })
        .collect()
}

fn forward(c: &mut Criterion) {
    let arch = std::env::var("RUVLLM_ARCH").map_or_else(
        |_| Arch::detect(),
        |name| Arch::named(&name).expect("a level of this CPU"),
    );
    for n in [4096, 2048, 768] {
        for rank in [1, 2, 4, 8] {
            let (a, b, x) = (noise(rank * n), noise(rank * n), noise(n));
            let (mut t, mut y) = (vec![0.0; rank], vec![0.0; n]);
            c.bench_function(&format!("MicroLoRA forward {n}, rank {rank}"), |bench| {
                bench.iter(|| {
                    let a = bytemuck::cast_slice(black_box(&a));
                    arch.matvec(
                        DType::F32,
                        &mut ColumnsMut::new(&mut t, 1, rank),
                        a,
                        &Acts::F32 { x: &x, n },
                    );
                    t.iter_mut().for_each(|t| *t *= 0.5);
                    arch.add_product(&mut ColumnsMut::new(black_box(&mut y), 1, n), &t, &b, n);
                });
            });
        }
    }
}

criterion_group!(benches, forward);
criterion_main!(benches);
