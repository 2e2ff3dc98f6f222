//! Kernels that prepare logits for sampling.

use crate::arch::Arch;
use crate::gpu::check::{Checker, Data, EPS, FAST, Lcg, close, same};
use crate::gpu::kernels::*;
use crate::quant::DType;

/// Logits, some of them equal.
fn logits(lcg: &mut Lcg, n: usize) -> Vec<f32> {
    (0..n)
        .map(|_| lcg.below(1000) as f32 / 32.0 - 16.0)
        .collect()
}

pub(super) fn argmax(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(16);
    let mut rows: Vec<(usize, Vec<f32>)> = [(1, 1), (3, 700), (2, 256)]
        .into_iter()
        .map(|(n_rows, n)| (n_rows, logits(&mut lcg, n_rows * n)))
        .collect();
    let odd = [f32::NAN, f32::NEG_INFINITY, -3.0, f32::NAN, -3.0];
    rows.push((1, odd.to_vec()));
    rows.push((1, vec![-7.0; 300]));
    rows.push((1, vec![f32::NAN; 2]));
    for (n_rows, x) in rows {
        let n = x.len() / n_rows;
        let args = SampleArgs {
            n: n as u32,
            n_rows: n_rows as u32,
        };
        let index = gpu.call(
            &ARGMAX,
            DType::F32,
            0,
            &args,
            &[Data::F32(&x), Data::Out],
            &[],
        )?;
        let expected: Vec<u32> = x
            .chunks_exact(n)
            .map(|x| {
                let max = x.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
                x.iter().position(|x| *x == max).unwrap_or(0) as u32
            })
            .collect();
        same("argmax", index.u32(0), &expected)?;
    }
    Ok(())
}

pub(super) fn softmax(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(17);
    for (n_rows, n) in [(1, 1), (2, 700), (3, 31)] {
        let x = logits(&mut lcg, n_rows * n);
        let args = SampleArgs {
            n: n as u32,
            n_rows: n_rows as u32,
        };
        let y = gpu.call(&SOFTMAX, DType::F32, 0, &args, &[Data::F32(&x)], &[])?;
        let mut e = x.clone();
        e.chunks_exact_mut(n)
            .for_each(|x| Arch::scalar().softmax(x));
        // Exponents are differences of numbers up to 16: exact here; exponentials and a sum of n.
        let tolerance = 2.0 * FAST + 2.0 * n as f32 * EPS;
        close("softmax", y.f32(0), &e, |i| tolerance * e[i])?;
    }
    Ok(())
}

pub(super) fn top_k(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(18);
    for (n_rows, n, k) in [(1, 3, 2), (2, 1500, 40)] {
        let x = logits(&mut lcg, n_rows * n);
        let args = TopKArgs {
            n: n as u32,
            n_rows: n_rows as u32,
            k,
        };
        let first = gpu.call(
            &TOP_K,
            DType::F32,
            0,
            &args,
            &[Data::F32(&x), Data::Out, Data::Out],
            &[],
        )?;
        let left = args.n.div_ceil(SORTED) * k;
        let args = TopKArgs { n: left, ..args };
        let data = [
            Data::F32(first.f32(0)),
            Data::U32(first.u32(1)),
            Data::Out,
            Data::Out,
        ];
        let out = gpu.call(&TOP_K_PAIRS, DType::F32, 0, &args, &data, &[])?;
        for (row, x) in x.chunks_exact(n).enumerate() {
            let mut order: Vec<u32> = (0..n as u32).collect();
            order.sort_by(|&a, &b| x[b as usize].total_cmp(&x[a as usize]).then(a.cmp(&b)));
            order.truncate(k as usize);
            let values: Vec<f32> = order.iter().map(|&i| x[i as usize]).collect();
            let at = row * k as usize;
            same("top_k: values", &out.f32(0)[at..][..k as usize], &values)?;
            same("top_k: indices", &out.u32(1)[at..][..k as usize], &order)?;
        }
    }
    Ok(())
}
