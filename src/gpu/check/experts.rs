//! Routing, lists of rows per expert, weighted sums.

use crate::arch::Arch;
use crate::gpu::check::{Checker, Data, EPS, FAST, Lcg, close, same};
use crate::gpu::kernels::*;
use crate::quant::DType;

/// Makes the ranks of experts whose groups are not among the best lower than those of all others.
fn close_groups(ranks: &mut [f32], [n_group, n_used]: [usize; 2], best_alone: bool) {
    let size = ranks.len() / n_group;
    let scores = ranks.chunks_exact(size).map(|group| {
        let best = largest(group, if best_alone { 1 } else { 2 });
        best.iter().map(|&e| group[e]).sum::<f32>()
    });
    let open = largest(&scores.collect::<Vec<_>>(), n_used);
    for (i, group) in ranks.chunks_exact_mut(size).enumerate() {
        if !open.contains(&i) {
            group.fill(-1e9);
        }
    }
}

/// Indices of the `n` largest, the lower first among equals.
fn largest(x: &[f32], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&a, &b| x[b].total_cmp(&x[a]).then(a.cmp(&b)));
    order.truncate(n);
    order
}

pub(super) fn route(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(13);
    let sizes = [
        (1, 1, 1, [1, 1]),
        (3, 8, 2, [1, 1]),
        (3, 8, 2, [8, 3]),
        (2, 100, 40, [5, 3]),
        (2, 512, 8, [1, 1]),
        (3, 512, 8, [32, 4]),
    ];
    for (n_rows, n_expert, n_used, [n_group, n_group_used]) in sizes {
        // Multiples of 1/64, so that equal logits occur and others stay apart.
        let router: Vec<f32> = (0..n_rows * n_expert)
            .map(|_| lcg.below(512) as f32 / 64.0 - 4.0)
            .collect();
        for gating in 0..4 {
            for (normalise, biased) in [(0, false), (1, true)] {
                let bias: Vec<f32> = (0..n_expert)
                    .map(|_| {
                        if biased {
                            lcg.below(8) as f32 / 4.0
                        } else {
                            0.0
                        }
                    })
                    .collect();
                let factor = |e| {
                    if biased {
                        (1 + e % 5) as f32 / 4.0
                    } else {
                        1.0
                    }
                };
                let scales: Vec<f32> = (0..n_expert).map(factor).collect();
                let scale = 1.5;
                let args = RouteArgs {
                    n_rows: n_rows as u32,
                    n_expert: n_expert as u32,
                    n_used: n_used as u32,
                    n_group: n_group as u32,
                    n_group_used: n_group_used as u32,
                    gating,
                    normalise,
                    scale,
                };
                let nothing = vec![0; n_rows * n_used];
                let data = [
                    Data::F32(&router),
                    Data::F32(&bias),
                    Data::F32(&scales),
                    Data::U32(&nothing),
                    Data::Out,
                ];
                let out = gpu.call(&ROUTE, DType::F32, 0, &args, &data, &[])?;
                for (row, x) in router.chunks_exact(n_expert).enumerate() {
                    let mut p = x.to_vec();
                    match gating {
                        0 => Arch::scalar().softmax(&mut p),
                        1 => {
                            let max = x.iter().fold(f32::MIN, |m, x| m.max(*x));
                            p.iter_mut().for_each(|x| *x = (*x - max).exp());
                        }
                        2 => p.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
                        _ => p.iter_mut().for_each(|x| *x = x.exp().ln_1p().sqrt()),
                    }
                    let mut ranks: Vec<f32> = p.iter().zip(&bias).map(|(p, b)| p + b).collect();
                    close_groups(&mut ranks, [n_group, n_group_used], gating == 0);
                    let chosen = largest(&ranks, n_used);
                    let what = format!("route, gating {gating}, {n_expert} experts");
                    let found = &out.u32(0)[row * n_used..][..n_used];
                    // If the bias makes ranks equal within their error, either choice is right.
                    let rank_of = |e: u32| ranks[e as usize];
                    let right: Vec<f32> = chosen.iter().map(|&e| ranks[e]).collect();
                    let ranks: Vec<f32> = found.iter().map(|&e| rank_of(e)).collect();
                    close(&format!("{what}: ranks"), &ranks, &right, |i| {
                        FAST * right[i].abs()
                    })?;
                    let mut distinct = found.to_vec();
                    distinct.sort();
                    distinct.dedup();
                    if distinct.len() != n_used {
                        return Err(format!("result: {what}: an expert is chosen twice"));
                    }
                    if !biased {
                        let chosen: Vec<u32> = chosen.iter().map(|&e| e as u32).collect();
                        same(&what, found, &chosen)?;
                    }
                    let sum: f32 = found.iter().map(|&e| p[e as usize]).sum();
                    let factor = if normalise == 1 || gating == 1 {
                        scale / sum
                    } else {
                        scale
                    };
                    let e: Vec<f32> = found
                        .iter()
                        .map(|&e| factor * p[e as usize] * scales[e as usize])
                        .collect();
                    let tolerance = 2.0 * FAST + n_expert as f32 * 2.0 * EPS;
                    close(&what, &out.f32(1)[row * n_used..][..n_used], &e, |i| {
                        tolerance * e[i]
                    })?;
                }
            }
        }
    }
    Ok(())
}

pub(super) fn expert_rows(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(14);
    for (n_chosen, n_expert) in [(1, 1), (32, 3), (77, 5)] {
        let chosen: Vec<u32> = (0..n_chosen).map(|_| lcg.below(n_expert)).collect();
        let args = ExpertRowsArgs {
            n_chosen: n_chosen as u32,
            n_expert,
        };
        // Lists are written up to their length only.
        let lists = vec![u32::MAX; n_chosen * n_expert as usize];
        let id = gpu.stage.filled(bytemuck::cast_slice(&lists), 4);
        let data = [Data::U32(&chosen), Data::Out, Data::Made(id)];
        let out = gpu.call(&EXPERT_ROWS, DType::F32, 0, &args, &data, &[])?;
        let lists_after = gpu.stage.read(id)?;
        let mut expected = lists;
        for e in 0..n_expert {
            let mine: Vec<u32> = (0..n_chosen as u32)
                .filter(|&c| chosen[c as usize] == e)
                .collect();
            expected[e as usize * n_chosen..][..mine.len()].copy_from_slice(&mine);
            same(
                "expert_rows: counts",
                &out.u32(0)[e as usize..][..1],
                &[mine.len() as u32],
            )?;
        }
        same(
            "expert_rows: lists",
            bytemuck::cast_slice(&lists_after),
            &expected,
        )?;
    }
    Ok(())
}

pub(super) fn add_expert_bias(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(16);
    // The last choice is of an expert that does not exist.
    for (n, n_expert, chosen) in [(1, 1, &[0][..]), (300, 3, &[2, 0, 2, 7][..])] {
        let (y, bias) = (lcg.values(chosen.len() * n), lcg.values(n_expert * n));
        let args = AddExpertBiasArgs {
            n: n as u32,
            n_chosen: chosen.len() as u32,
            n_expert: n_expert as u32,
        };
        let data = [Data::F32(&y), Data::F32(&bias), Data::U32(chosen)];
        let found = gpu.call(&ADD_EXPERT_BIAS, DType::F32, 0, &args, &data, &[])?;
        let of = |i: usize| {
            bias.chunks_exact(n)
                .nth(chosen[i / n] as usize)
                .map_or(0.0, |bias| bias[i % n])
        };
        let e: Vec<f32> = y.iter().enumerate().map(|(i, y)| y + of(i)).collect();
        same("add_expert_bias", found.f32(0), &e)?;
    }
    Ok(())
}

pub(super) fn combine_experts(gpu: &mut Checker<'_>) -> Result<(), String> {
    let mut lcg = Lcg(15);
    for (n, n_rows, n_used) in [(1, 1, 1), (300, 2, 3)] {
        let (x, weights) = (lcg.values(n_rows * n_used * n), lcg.values(n_rows * n_used));
        let args = CombineExpertsArgs {
            n: n as u32,
            n_rows: n_rows as u32,
            n_used: n_used as u32,
        };
        let data = [Data::F32(&x), Data::F32(&weights), Data::Out];
        let y = gpu.call(&COMBINE_EXPERTS, DType::F32, 0, &args, &data, &[])?;
        let mut e = vec![0.0; n_rows * n];
        for c in 0..n_rows * n_used {
            let row = &mut e[c / n_used * n..][..n];
            Arch::scalar().add_scaled(row, &x[c * n..][..n], weights[c]);
        }
        let tolerance = 2.0 * (n_used * n_used) as f32 * EPS;
        close("combine_experts", y.f32(0), &e, |_| tolerance)?;
    }
    Ok(())
}
