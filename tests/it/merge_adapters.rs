//! Merging adapters, against dense 64-bit matrices.

use crate::tiny::Tiny;
use ruvllm::Model;
use ruvllm::gguf::Gguf;
use ruvllm::lora::AdapterError;
use ruvllm::lora::TargetModule;
use ruvllm::lora::{Adapter, MergeMethod, MergeOptions, Term, merge_adapters};
use ruvllm::quant::DType;

/// An adapter with noise in both factors; `alpha` is not its rank.
fn adapter(
    model: &Model,
    rank: usize,
    seed: u64,
    targets: impl Fn(&TargetModule) -> bool,
) -> Adapter {
    let mut adapter = Adapter::zeros(model, rank, seed, targets).unwrap();
    let mut state = seed;
    for (_, term) in adapter.terms_mut() {
        for b in term.parts_mut().1 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            *b = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
        }
    }
    adapter.set_alpha(1.5 * rank as f32).unwrap();
    adapter
}

/// `s·B·A`, row-major `(n_out, n_in)`.
fn dense(adapter: &Adapter, i: usize) -> Vec<f64> {
    let TargetModule { n_in, n_out, .. } = adapter.sites()[i];
    let Some(term) = adapter.term(i) else {
        return vec![0.0; n_in * n_out];
    };
    let (scale, at) = (f64::from(adapter.scale(term)), |x: &[f32], i: usize| {
        f64::from(x[i])
    });
    let value = |r: usize, c: usize| -> f64 {
        (0..term.rank())
            .map(|j| scale * at(term.b(), j * n_out + r) * at(term.a(), j * n_in + c))
            .sum()
    };
    (0..n_in * n_out)
        .map(|at| value(at / n_in, at % n_in))
        .collect()
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Values are rounded to `f32` a few times: factors, their product of up to a dozen terms.
#[track_caller]
fn assert_same(found: &[f64], expected: &[f64]) {
    let apart: Vec<f64> = found.iter().zip(expected).map(|(x, y)| x - y).collect();
    assert!(
        norm(&apart) <= 1e-6 * norm(expected),
        "{} of {}",
        norm(&apart),
        norm(expected)
    );
}

/// Squared singular values, largest first: eigenvalues of `M·Mᵀ` or `Mᵀ·M` by two-sided Jacobi
/// rotations.
fn spectrum(m: &[f64], n_in: usize) -> Vec<f64> {
    let n_out = m.len() / n_in;
    let n = n_in.min(n_out);
    let at = |i: usize, k: usize| {
        if n == n_out {
            m[i * n_in + k]
        } else {
            m[k * n_in + i]
        }
    };
    let mut g = vec![0.0; n * n];
    for ij in 0..n * n {
        g[ij] = (0..n_in.max(n_out))
            .map(|k| at(ij / n, k) * at(ij % n, k))
            .sum();
    }
    for _ in 0..30 {
        for p in 0..n {
            for q in p + 1..n {
                if g[p * n + q].abs() < 1e-300 {
                    continue;
                }
                let angle = 0.5 * (2.0 * g[p * n + q]).atan2(g[q * n + q] - g[p * n + p]);
                let (s, c) = angle.sin_cos();
                for k in 0..n {
                    let (x, y) = (g[k * n + p], g[k * n + q]);
                    (g[k * n + p], g[k * n + q]) = (c * x - s * y, s * x + c * y);
                }
                for k in 0..n {
                    let (x, y) = (g[p * n + k], g[q * n + k]);
                    (g[p * n + k], g[q * n + k]) = (c * x - s * y, s * x + c * y);
                }
            }
        }
    }
    let mut values: Vec<f64> = (0..n).map(|i| g[i * n + i].max(0.0)).collect();
    values.sort_by(|x, y| y.total_cmp(x));
    values
}

fn options(method: MergeMethod, rank: Option<usize>) -> MergeOptions {
    MergeOptions {
        method,
        rank,
        ..Default::default()
    }
}

/// Two adapters with different ranks and sites, on all matrices of a model but few that one of them
/// leaves out.
fn pair(model: &Model) -> (Adapter, Adapter) {
    (
        adapter(model, 3, 5, |_| true),
        adapter(model, 2, 9, |site| !site.part().starts_with("attn_q")),
    )
}

#[test]
fn sums_and_means_are_those_of_dense_matrices() {
    for tiny in Tiny::SHAPES {
        let model = tiny.model(DType::F32);
        let (x, y) = pair(&model);
        for (method, [p, q]) in [
            (MergeMethod::Linear, [0.75, 0.25]),
            (MergeMethod::TaskArithmetic, [1.5, 0.5]),
        ] {
            let merged = merge_adapters(&[(&x, 1.5), (&y, 0.5)], &options(method, None)).unwrap();
            for (i, site) in model.sites().iter().enumerate() {
                let expected: Vec<f64> = dense(&x, i)
                    .iter()
                    .zip(dense(&y, i))
                    .map(|(x, y)| p * x + q * y)
                    .collect();
                let term = merged.term(i).unwrap();
                assert_eq!(
                    term.rank(),
                    (3 + if y.term(i).is_some() { 2 } else { 0 })
                        .min(site.n_in)
                        .min(site.n_out)
                );
                assert_same(&dense(&merged, i), &expected);
            }
        }
    }
}

#[test]
fn no_adapter_of_the_rank_is_nearer() {
    let model = Tiny::SHAPES[0].model(DType::F32);
    let (x, y) = pair(&model);
    let both = [(&x, 1.0), (&y, -0.7)];
    for (method, rank) in [
        (MergeMethod::Svd, 3),
        (MergeMethod::TaskArithmetic, 1),
        (MergeMethod::Linear, 4),
        (MergeMethod::Ties, 3),
        (MergeMethod::Dare, 3),
    ] {
        let given = if method == MergeMethod::Svd {
            None
        } else {
            Some(rank)
        };
        let merged = merge_adapters(&both, &options(method, given)).unwrap();
        let whole = merge_adapters(&both, &options(method, Some(1 << 20))).unwrap();
        for (i, site) in model
            .sites()
            .iter()
            .enumerate()
            .filter(|(_, site)| site.layer() == Some(0))
        {
            assert_eq!(
                merged.term(i).unwrap().rank(),
                rank.min(site.n_in).min(site.n_out)
            );
            let whole = dense(&whole, i);
            let apart: Vec<f64> = whole
                .iter()
                .zip(dense(&merged, i))
                .map(|(x, y)| x - y)
                .collect();
            let least = spectrum(&whole, site.n_in)[rank..]
                .iter()
                .sum::<f64>()
                .sqrt();
            // Subspace iteration finds the directions of a dense matrix almost; the rest is
            // rounding to `f32`.
            assert!(
                norm(&apart) <= 1.0001 * least + 1e-6 * norm(&whole),
                "{method:?} {}: {least}",
                site.tensor
            );
        }
    }
}

#[test]
fn slerp_goes_along_the_arc() {
    let model = Tiny::SHAPES[0].model(DType::F32);
    let (x, y) = (
        adapter(&model, 2, 5, |_| true),
        adapter(&model, 2, 9, |_| true),
    );
    let merged =
        merge_adapters(&[(&x, 3.0), (&y, 1.0)], &options(MergeMethod::Slerp, None)).unwrap();
    for i in 0..model.sites().len() {
        let (x, y) = (dense(&x, i), dense(&y, i));
        let angle =
            (x.iter().zip(&y).map(|(x, y)| x * y).sum::<f64>() / (norm(&x) * norm(&y))).acos();
        let [p, q] = [0.75, 0.25].map(|t| (t * angle).sin() / angle.sin());
        let expected: Vec<f64> = x.iter().zip(&y).map(|(x, y)| p * x + q * y).collect();
        assert_same(&dense(&merged, i), &expected);
    }
    // Between an adapter and itself there is no angle.
    let same = merge_adapters(&[(&x, 1.0), (&x, 1.0)], &options(MergeMethod::Slerp, None)).unwrap();
    assert_same(&dense(&same, 0), &dense(&x, 0));
}

#[test]
fn ties_trims_elects_and_averages() {
    let model = Tiny::SHAPES[0].model(DType::F32);
    let all: Vec<Adapter> = (0..3)
        .map(|seed| adapter(&model, 2, seed + 3, |site| site.layer() == Some(0)))
        .collect();
    let weights = [1.0, 0.5, 2.0];
    let weighted: Vec<(&Adapter, f32)> = all.iter().zip(weights).collect();
    let options = MergeOptions {
        density: 0.4,
        ..options(MergeMethod::Ties, Some(1 << 20))
    };
    let merged = merge_adapters(&weighted, &options).unwrap();
    for (i, _) in merged.terms() {
        let trimmed: Vec<Vec<f64>> = all
            .iter()
            .map(|adapter| {
                let change = dense(adapter, i);
                let mut sizes: Vec<f64> = change.iter().map(|x| x.abs()).collect();
                sizes.sort_by(|x, y| y.total_cmp(x));
                let least = sizes[(0.4 * change.len() as f64) as usize - 1];
                change
                    .into_iter()
                    .map(|x| if x.abs() < least { 0.0 } else { x })
                    .collect()
            })
            .collect();
        let expected: Vec<f64> = (0..trimmed[0].len())
            .map(|at| {
                let sign = trimmed.iter().map(|x| x[at]).sum::<f64>().signum();
                let agree: Vec<f64> = (0..3)
                    .filter(|&k| trimmed[k][at] * sign > 0.0)
                    .map(|k| f64::from(weights[k]) * trimmed[k][at])
                    .collect();
                if agree.is_empty() {
                    0.0
                } else {
                    agree.iter().sum::<f64>() / agree.len() as f64
                }
            })
            .collect();
        assert_same(&dense(&merged, i), &expected);
    }
}

#[test]
fn dare_drops_at_random_and_keeps_the_mean() {
    let model = Tiny::SHAPES[0].model(DType::F32);
    let x = adapter(&model, 2, 5, |_| true);
    let options = MergeOptions {
        density: 0.25,
        seed: 7,
        ..options(MergeMethod::Dare, Some(1 << 20))
    };
    let merged = merge_adapters(&[(&x, 1.0)], &options).unwrap();
    let (mut n, mut n_kept) = (0.0, 0.0);
    for i in 0..model.sites().len() {
        let (found, change) = (dense(&merged, i), dense(&x, i));
        let rounding = 1e-6 * norm(&found);
        for (found, x) in found
            .iter()
            .zip(&change)
            .filter(|(_, x)| 4.0 * x.abs() > 100.0 * rounding)
        {
            let is_kept = (found - 4.0 * x).abs() < rounding;
            assert!(is_kept || found.abs() < rounding, "{found} {x}");
            (n, n_kept) = (n + 1.0, n_kept + f64::from(u8::from(is_kept)));
        }
    }
    // Five standard deviations of a binomial.
    assert!(
        (n_kept / n - 0.25f64).abs() < 5.0 * (0.25f64 * 0.75 / n).sqrt(),
        "{n_kept} of {n}"
    );
    let all = MergeOptions {
        density: 1.0,
        ..options
    };
    assert_same(
        &dense(&merge_adapters(&[(&x, 1.0)], &all).unwrap(), 0),
        &dense(&x, 0),
    );
}

#[test]
fn any_number_of_threads_merges_to_the_same_bits() {
    let model = Tiny::SHAPES[0].model(DType::F32);
    let (x, y) = pair(&model);
    for (_, method) in MergeMethod::ALL {
        let merged = |n_threads| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(n_threads)
                .build()
                .unwrap();
            pool.install(|| {
                merge_adapters(&[(&x, 1.0), (&y, 0.5)], &options(method, None)).unwrap()
            })
        };
        assert_eq!(merged(1), merged(3), "{method:?}");
    }
}

/// Experts of one tensor are stacked in files, also where not all are changed.
#[test]
fn merged_adapters_are_files_like_others() {
    for tiny in Tiny::SHAPES {
        let model = tiny.model(DType::F32);
        let x = adapter(&model, 3, 5, |site| site.expert.is_none_or(|e| e == 1));
        let y = adapter(&model, 2, 9, |site| site.expert.is_none_or(|e| e == 0));
        let merged = merge_adapters(&[(&x, 1.0), (&y, 1.0)], &MergeOptions::default()).unwrap();
        let loaded = Adapter::from_bytes(merged.to_bytes().unwrap(), &model).unwrap();
        for i in 0..model.sites().len() {
            let stored = loaded.term(i).is_none_or(Term::is_zero);
            assert_eq!(stored, merged.term(i).is_none_or(Term::is_zero));
            assert_eq!(dense(&loaded, i), dense(&merged, i));
        }
    }
}

#[test]
fn what_cannot_be_merged_is_refused() {
    let model = Tiny::SHAPES[0].model(DType::F32);
    let (x, y) = pair(&model);
    let refused = |adapters: &[(&Adapter, f32)], options: MergeOptions| {
        merge_adapters(adapters, &options)
            .err()
            .unwrap()
            .to_string()
    };
    assert!(matches!(
        merge_adapters(&[], &MergeOptions::default()),
        Err(AdapterError::Empty)
    ));
    let other = adapter(&Tiny::SHAPES[1].model(DType::F32), 2, 1, |_| true);
    assert!(merge_adapters(&[(&x, 1.0), (&other, 1.0)], &MergeOptions::default()).is_err());
    let both = [(&x, 1.0), (&y, 1.0)];
    let default = MergeOptions::default;
    assert!(refused(&[(&x, f32::NAN)], default()).contains("finite"));
    assert!(
        refused(&[(&x, 1.0), (&y, -1.0)], options(MergeMethod::Linear, None))
            .contains("sum of the weights")
    );
    assert!(refused(&[(&x, 1.0)], options(MergeMethod::Slerp, None)).contains("2 for slerp"));
    assert!(refused(&both, options(MergeMethod::Svd, Some(0))).contains("at least 1"));
    for density in [0.0, 1.5, f64::NAN] {
        assert!(
            refused(
                &both,
                MergeOptions {
                    density,
                    ..default()
                }
            )
            .contains("density")
        );
    }
    let mut huge = x.clone();
    huge.terms_mut()
        .for_each(|(_, term)| term.parts_mut().1.iter_mut().for_each(|b| *b *= 1e6));
    huge.set_alpha(f32::MAX).unwrap();
    assert!(refused(&[(&huge, f32::MAX)], default()).contains("value"));
}

/// `tests/reference_peft.py` makes the files; peft decomposes in `f32`.
#[test]
fn peft_merges_to_the_same() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/peft");
    let reference = Gguf::open(format!("{folder}/merging.gguf")).unwrap();
    let model = Model::open(format!("{folder}/llama.gguf")).unwrap();
    let open = |name: &str| Adapter::open(format!("{folder}/{name}.gguf"), &model).unwrap();
    let (x, y) = (open("llama-adapter"), open("llama-second"));
    for (name, method) in [("svd", MergeMethod::Svd), ("ties_svd", MergeMethod::Ties)] {
        let merged = merge_adapters(&[(&x, 1.0), (&y, 0.5)], &options(method, Some(4))).unwrap();
        for layer in 0..2 {
            let tensor = reference
                .tensor(&format!("{name}.blk.{layer}.ffn_down"))
                .unwrap();
            let expected = bytemuck::pod_collect_to_vec::<u8, f32>(reference.data(tensor));
            let expected: Vec<f64> = expected.iter().map(|&x| f64::from(x)).collect();
            let site = model
                .sites()
                .iter()
                .position(|s| *s.tensor == *format!("blk.{layer}.ffn_down.weight"))
                .unwrap();
            let apart: Vec<f64> = dense(&merged, site)
                .iter()
                .zip(&expected)
                .map(|(x, y)| x - y)
                .collect();
            assert!(
                norm(&apart) < 1e-5 * norm(&expected),
                "{name}: {} of {}",
                norm(&apart),
                norm(&expected)
            );
        }
    }
}
