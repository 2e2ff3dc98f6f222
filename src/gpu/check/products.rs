//! Products with weights, embedding rows, adapters.

use crate::gpu::check::{Checker, Data, EPS, Lcg, close, same};
use crate::gpu::kernels::*;
use crate::quant::DType;

/// Rows of random blocks, and their values.
pub(super) struct TestWeights {
    pub(super) bytes: Vec<u8>,
    pub(super) values: Vec<f32>,
    pub(super) n_in: usize,
    pub(super) row_bytes: u32,
}

impl TestWeights {
    /// Random blocks whose largest value is within 0.001..1000; the bytes of scales are random,
    /// too.
    pub(super) fn random(lcg: &mut Lcg, dtype: DType, rows: usize, n_in: usize) -> TestWeights {
        let f = dtype.format().unwrap();
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        let (mut block, mut x) = (vec![0u8; f.block_bytes], vec![0.0; f.block_elems]);
        while values.len() < rows * n_in {
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
        let row_bytes = (n_in / f.block_elems * f.block_bytes) as u32;
        TestWeights {
            bytes,
            values,
            n_in,
            row_bytes,
        }
    }

    /// The product of row `r` with `x`, and its tolerance: one more term, for the rounding of each
    /// weight; and if they are multiplied as `halves`, what that adds.
    fn dot(&self, r: usize, x: &[f32], halves: bool) -> (f32, f32) {
        let terms = || {
            self.values[r * self.n_in..][..self.n_in]
                .iter()
                .zip(x)
                .map(|(&w, &x)| f64::from(w) * f64::from(x))
        };
        let (sum, magnitude) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
        let rounding = if halves { self.rounding(r, x) } else { 0.0 };
        let tolerance = (self.n_in + 4) as f32 * EPS * magnitude as f32 + rounding;
        (sum as f32, tolerance)
    }

    /// What is added to the tolerance where both factors are rounded to `f16`, in a direction that WGSL
    /// leaves open: each errs by a relative 2⁻¹⁰, or where they are small, weights by 2⁻²⁴ and
    /// activations, of which a 64th is rounded, by 2⁻¹⁸.
    fn rounding(&self, r: usize, x: &[f32]) -> f32 {
        let weights = &self.values[r * self.n_in..][..self.n_in];
        let errors = weights.iter().zip(x).map(|(w, x)| {
            let (w, x) = (w.abs(), x.abs());
            let of_w = (w * f32::exp2(-10.0)).max(f32::exp2(-24.0));
            let of_x = (x * f32::exp2(-10.0)).max(f32::exp2(-18.0));
            of_w * x + of_x * w + of_w * of_x
        });
        errors.sum()
    }
}

/// Row lengths: some blocks; for plain floats arbitrary lengths, and one that allows vectors. Each
/// thread of a product has several parts of the last one.
fn lengths(dtype: DType) -> &'static [usize] {
    match dtype.block().0 {
        1 => &[1, 7, 100, 547, 288, 2304],
        32 => &[32, 96, 544, 2304],
        _ => &[256, 768, 2304],
    }
}

pub(super) fn matvec(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(1);
    for &format in gpu.formats {
        for (&n_in, n_out) in lengths(format).iter().zip([1, 15, 33, 8, 21, 5]) {
            let w = TestWeights::random(&mut lcg, format, n_out, n_in);
            let all = lcg.values(9 * n_in);
            let mut single: Vec<f32> = Vec::new();
            for (variant, n_rows) in [(1, 9), (2, 1), (2, 3), (4, 3), (8, 9)] {
                let x = &all[..n_rows * n_in];
                let args = MatvecArgs {
                    n_in: n_in as u32,
                    n_out: n_out as u32,
                    n_rows: n_rows as u32,
                    row_bytes: w.row_bytes,
                };
                let data = [Data::Bytes(&w.bytes), Data::F32(x), Data::Out];
                let y = gpu.call(&MATVEC, format, variant, &args, &data, &[])?;
                let what = format!("matvec {format} {n_in} x {n_out}, {n_rows} rows");
                if variant == 1 {
                    let (e, t): (Vec<f32>, Vec<f32>) = (0..n_rows * n_out)
                        .map(|i| w.dot(i % n_out, &x[i / n_out * n_in..][..n_in], false))
                        .unzip();
                    close(&what, y.f32(0), &e, |i| t[i])?;
                    single = y.f32(0).to_vec();
                } else {
                    // A row's sum must not depend on the number of rows.
                    same(&what, y.f32(0), &single[..n_rows * n_out])?;
                }
            }
        }
    }
    Ok(())
}

pub(super) fn matvec_experts(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(2);
    for &format in gpu.formats {
        let (n_in, n_out, n_expert) = (lengths(format)[1], 11, 3);
        let w = TestWeights::random(&mut lcg, format, n_expert * n_out, n_in);
        // Two choices per row sharing an input, then one input per choice; and the index of an
        // expert that does not exist.
        for (chosen, choices_per_row) in [(&[2, 0, 1, 2][..], 2), (&[1, 7, 0][..], 1)] {
            let x = lcg.values(chosen.len() / choices_per_row * n_in);
            let args = MatvecExpertsArgs {
                n_in: n_in as u32,
                n_out: n_out as u32,
                n_chosen: chosen.len() as u32,
                n_expert: n_expert as u32,
                choices_per_row: choices_per_row as u32,
                row_bytes: w.row_bytes,
            };
            let data = [
                Data::Bytes(&w.bytes),
                Data::F32(&x),
                Data::U32(chosen),
                Data::Out,
            ];
            let y = gpu.call(&MATVEC_EXPERTS, format, 0, &args, &data, &[])?;
            let (e, t) =
                expected_of_experts(&w, &x, chosen, n_out, n_expert, choices_per_row, false);
            close(&format!("matvec_experts {format}"), y.f32(0), &e, |i| t[i])?;
        }
    }
    Ok(())
}

fn expected_of_experts(
    w: &TestWeights,
    x: &[f32],
    chosen: &[u32],
    n_out: usize,
    n_expert: usize,
    choices_per_row: usize,
    halves: bool,
) -> (Vec<f32>, Vec<f32>) {
    (0..chosen.len() * n_out)
        .map(|i| {
            let (c, o) = (i / n_out, i % n_out);
            let x = &x[c / choices_per_row * w.n_in..][..w.n_in];
            let expert = chosen[c] as usize;
            if expert < n_expert {
                w.dot(expert * n_out + o, x, halves)
            } else {
                (0.0, 0.0)
            }
        })
        .unzip()
}

pub(super) fn matmul(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(3);
    for &format in gpu.formats {
        let lengths = lengths(format);
        let [.., before, last, _] = *lengths else {
            continue;
        };
        for (n_in, n_out, n_rows) in [(lengths[0], 131, 1), (before, 70, 37), (last, 67, 65)] {
            let w = TestWeights::random(&mut lcg, format, n_out, n_in);
            let x = lcg.values(n_rows * n_in);
            let args = MatmulArgs {
                n_in: n_in as u32,
                n_out: n_out as u32,
                n_rows: n_rows as u32,
                row_bytes: w.row_bytes,
            };
            let y = gpu.call(
                &MATMUL,
                format,
                0,
                &args,
                &[Data::Bytes(&w.bytes), Data::F32(&x), Data::Out],
                &[],
            )?;
            let halves = gpu.stage.multiplies_halves() && format != DType::F32;
            let (e, t): (Vec<f32>, Vec<f32>) = (0..n_rows * n_out)
                .map(|i| w.dot(i % n_out, &x[i / n_out * n_in..][..n_in], halves))
                .unzip();
            close(
                &format!("matmul {format} {n_in} x {n_out}, {n_rows} rows"),
                y.f32(0),
                &e,
                |i| t[i],
            )?;
        }
    }
    Ok(())
}

pub(super) fn matmul_experts(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(4);
    for &format in gpu.formats {
        let (n_in, n_out, n_expert, choices_per_row) = (lengths(format)[1], 67, 3, 2);
        let w = TestWeights::random(&mut lcg, format, n_expert * n_out, n_in);
        // Expert 0 in every row, so that it has more than one tile; expert 2 in none.
        let chosen: Vec<u32> = (0..80).map(|c| if c % 2 == 0 { 0 } else { 1 }).collect();
        let mut counts = vec![0; n_expert];
        let mut lists = vec![u32::MAX; n_expert * chosen.len()];
        for (c, &e) in chosen.iter().enumerate() {
            lists[e as usize * chosen.len() + counts[e as usize] as usize] = c as u32;
            counts[e as usize] += 1;
        }
        let x = lcg.values(chosen.len() / choices_per_row * n_in);
        let args = MatmulExpertsArgs {
            n_in: n_in as u32,
            n_out: n_out as u32,
            n_rows: (chosen.len() / choices_per_row) as u32,
            n_chosen: chosen.len() as u32,
            n_expert: n_expert as u32,
            choices_per_row: choices_per_row as u32,
            row_bytes: w.row_bytes,
        };
        let data = [
            Data::Bytes(&w.bytes),
            Data::F32(&x),
            Data::U32(&counts),
            Data::U32(&lists),
            Data::Out,
        ];
        let y = gpu.call(&MATMUL_EXPERTS, format, 0, &args, &data, &[])?;
        let halves = gpu.stage.multiplies_halves() && format != DType::F32;
        let (e, t) = expected_of_experts(&w, &x, &chosen, n_out, n_expert, choices_per_row, halves);
        close(&format!("matmul_experts {format}"), y.f32(0), &e, |i| t[i])?;
    }
    Ok(())
}

pub(super) fn embed(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(5);
    for &format in gpu.formats {
        for &n_embd in lengths(format) {
            let (n_vocab, scale) = (5, 2.5);
            let w = TestWeights::random(&mut lcg, format, n_vocab, n_embd);
            let tokens = [4, 0, 5, 2];
            let args = EmbedArgs {
                n_embd: n_embd as u32,
                n_vocab: n_vocab as u32,
                n_rows: tokens.len() as u32,
                row_bytes: w.row_bytes,
                scale,
            };
            let data = [Data::Bytes(&w.bytes), Data::U32(&tokens), Data::Out];
            let x = gpu.call(&EMBED, format, 0, &args, &data, &[])?;
            let value = |token: u32, i: usize| {
                if token < 5 {
                    w.values[token as usize * n_embd + i]
                } else {
                    0.0
                }
            };
            let e: Vec<f32> = tokens
                .iter()
                .flat_map(|&t| (0..n_embd).map(move |i| scale * value(t, i)))
                .collect();
            // A weight is `d · q + m`: three roundings of numbers up to the row's largest, with
            // sums of q up to twice that.
            let largest = w.values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            close(&format!("embed {format} {n_embd}"), x.f32(0), &e, |_| {
                8.0 * EPS * scale * largest
            })?;
        }
    }
    Ok(())
}

pub(super) fn lora(gpu: &mut Checker<'_>) -> Result<(), String> {
    let (mut lcg, arch) = (Lcg(6), crate::arch::Arch::scalar());
    // `b_stride` is wider than `n_out` where a product has some rows of a matrix.
    for (n_in, n_out, b_stride, rank, n_rows) in
        [(1, 1, 1, 1, 1), (77, 300, 311, 3, 5), (64, 256, 256, 8, 2)]
    {
        let (a, b) = (
            lcg.values(rank * n_in),
            lcg.values((rank - 1) * b_stride + n_out),
        );
        let (x, y) = (lcg.values(n_rows * n_in), lcg.values(n_rows * n_out));
        let scale = 0.5;
        let args = LoraArgs {
            n_in: n_in as u32,
            n_out: n_out as u32,
            rank: rank as u32,
            n_rows: n_rows as u32,
            b_stride: b_stride as u32,
            scale,
        };
        let data = [Data::F32(&a), Data::F32(&x), Data::Out];
        let t = gpu.call(&LORA_A, DType::F32, 0, &args, &data, &[])?;
        let expected: Vec<f32> = (0..n_rows * rank)
            .map(|i| arch.dot(&a[i % rank * n_in..][..n_in], &x[i / rank * n_in..][..n_in]))
            .collect();
        // Values are below 1, so that n terms sum to less than n; both sides round.
        let n = n_in as f32;
        close("lora_a", t.f32(0), &expected, |_| 2.0 * n * n * EPS)?;
        let with_terms = |low: &dyn Fn(usize, usize) -> f32| {
            let mut e = y.clone();
            for (row, y) in e.chunks_exact_mut(n_out).enumerate() {
                for r in 0..rank {
                    arch.add_scaled(y, &b[r * b_stride..][..n_out], scale * low(row, r));
                }
            }
            e
        };
        let data = [Data::F32(&b), Data::F32(&expected), Data::F32(&y)];
        let result = gpu.call(&LORA_B, DType::F32, 0, &args, &data, &[])?;
        let e = with_terms(&|row, r| expected[row * rank + r]);
        let r = rank as f32;
        close("lora_b", result.f32(0), &e, |_| {
            4.0 * (r + 1.0) * (r + 1.0) * n * EPS
        })?;

        // The last token does not exist.
        let tokens: Vec<u32> = (0..n_rows)
            .map(|i| if i == 4 { n_in } else { i * 31 % n_in } as u32)
            .collect();
        let data = [
            Data::F32(&a),
            Data::F32(&b),
            Data::U32(&tokens),
            Data::F32(&y),
        ];
        let result = gpu.call(&LORA_EMBED, DType::F32, 0, &args, &data, &[])?;
        let column = |token: u32, r: usize| {
            if token < n_in as u32 {
                a[r * n_in + token as usize]
            } else {
                0.0
            }
        };
        let e = with_terms(&|row, r| column(tokens[row], r));
        close("lora_embed", result.f32(0), &e, |_| {
            4.0 * (r + 1.0) * (r + 1.0) * EPS
        })?;
    }
    Ok(())
}

pub(super) fn lora_experts(gpu: &mut Checker<'_>) -> Result<(), String> {
    let (mut lcg, arch) = (Lcg(7), crate::arch::Arch::scalar());
    // Terms of rank 3, none, and 1; the last choice is of an expert that does not exist.
    let (ranks, chosen) = ([3, 0, 1], [2, 0, 1, 0, 0, 7]);
    for (n_in, n_out, choices_per_row) in [(1, 1, 1), (300, 77, 2), (77, 300, 1)] {
        let scale = 0.5f32;
        let (mut terms, mut n_values) = (Vec::new(), 0);
        for rank in ranks {
            terms.extend([n_values, n_values + rank * n_in, rank].map(|n| n as u32));
            terms.push(scale.to_bits());
            n_values += rank * (n_in + n_out);
        }
        let values = lcg.values(n_values);
        let (x, y) = (
            lcg.values(chosen.len() / choices_per_row * n_in),
            lcg.values(chosen.len() * n_out),
        );
        let args = LoraExpertsArgs {
            n_in: n_in as u32,
            n_out: n_out as u32,
            n_chosen: chosen.len() as u32,
            n_expert: ranks.len() as u32,
            choices_per_row: choices_per_row as u32,
            n_values: n_values as u32,
        };
        let data = [
            Data::F32(&values),
            Data::F32(&x),
            Data::U32(&chosen),
            Data::U32(&terms),
            Data::F32(&y),
        ];
        let result = gpu.call(&LORA_EXPERTS, DType::F32, 0, &args, &data, &[])?;
        let mut e = y.clone();
        for (c, y) in e.chunks_exact_mut(n_out).enumerate() {
            let Some(term) = terms.chunks_exact(4).nth(chosen[c] as usize) else {
                continue;
            };
            let (a, b) = (&values[term[0] as usize..], &values[term[1] as usize..]);
            for r in 0..term[2] as usize {
                let low = arch.dot(
                    &a[r * n_in..][..n_in],
                    &x[c / choices_per_row * n_in..][..n_in],
                );
                arch.add_scaled(y, &b[r * n_out..][..n_out], scale * low);
            }
        }
        // The sum over the inputs, below `n_in`, in two orders, and at most 4 terms of it.
        let n = n_in as f32;
        close("lora_experts", result.f32(0), &e, |_| {
            (3.0 * 2.0 * n * n + 4.0 * 4.0 * 4.0 * n) * EPS
        })?;
    }
    Ok(())
}
