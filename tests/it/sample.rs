//! The sampler through its public interface: reproducible, of the right distribution, and
//! unimpressed by hostile logits and parameters.

use crate::common::cases;
use proptest::prelude::*;
use ruvllm::sample::{Mirostat, SampleError};
use ruvllm::{Sampler, SamplerOptions};

/// `n` logits without pattern, between −5 and 5, from a multiplicative hash of the index.
fn logits(n: usize, salt: u32) -> Vec<f32> {
    let hash = |i: u32| {
        let h = (i ^ salt.rotate_left(20))
            .wrapping_mul(0x9e37_79b1)
            .rotate_left(13);
        (h ^ (h >> 15)).wrapping_mul(0x85eb_ca6b)
    };
    (0..n as u32)
        .map(|i| (hash(i) >> 8) as f32 / (1 << 24) as f32 * 10.0 - 5.0)
        .collect()
}

fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, &l) in logits.iter().enumerate() {
        if l > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// Options whose chain changes nothing.
fn without_filters() -> SamplerOptions {
    SamplerOptions {
        samplers: Some(String::new()),
        ..Default::default()
    }
}

/// With a seed.
fn seeded(options: &SamplerOptions, seed: u64) -> SamplerOptions {
    SamplerOptions {
        seed: Some(seed),
        ..options.clone()
    }
}

/// With a version of Mirostat.
fn with(mirostat: Mirostat) -> SamplerOptions {
    SamplerOptions {
        mirostat,
        ..Default::default()
    }
}

fn run(options: SamplerOptions, n: usize) -> Vec<u32> {
    let mut sampler = Sampler::new(options).unwrap();
    let mut history = vec![];
    for step in 0..n as u32 {
        let token = sampler.sample(&logits(500, step), &history).unwrap();
        history.push(token);
    }
    history
}

#[test]
fn seeded_runs_repeat_and_seeds_differ() {
    let everything = SamplerOptions {
        repeat_penalty: 1.1,
        dry_multiplier: 0.8,
        top_n_sigma: 2.0,
        typical: 0.9,
        xtc_probability: 0.5,
        dynatemp_range: 0.3,
        ..Default::default()
    };
    for builder in [
        SamplerOptions::default(),
        everything,
        without_filters(),
        with(Mirostat::V1),
        with(Mirostat::V2),
    ] {
        let first = run(seeded(&builder, 42), 60);
        assert_eq!(first, run(seeded(&builder, 42), 60));
        assert_ne!(first, run(seeded(&builder, 43), 60));
        assert_ne!(
            run(builder.clone(), 60),
            run(builder, 60),
            "no seed must mean chance"
        );
    }
}

#[test]
fn a_seed_means_the_same_tokens_for_ever() {
    // The generator's first outputs for seed 0, from its published test vector, divided by 2⁶⁴:
    // 0.8833, 0.4318, 0.0264, 0.9741. Over eight equal tokens they pick ⌊8u⌋.
    let mut sampler = Sampler::new(seeded(&without_filters(), 0)).unwrap();
    let tokens: Vec<u32> = (0..4)
        .map(|_| sampler.sample(&[0.0; 8], &[]).unwrap())
        .collect();
    assert_eq!(tokens, [7, 3, 0, 7]);
}

#[test]
fn reset_restarts() {
    for mirostat in [Mirostat::Off, Mirostat::V2] {
        let mut sampler = Sampler::new(SamplerOptions {
            mirostat,
            ..Default::default()
        })
        .unwrap();
        let draw = |sampler: &mut Sampler| -> Vec<u32> {
            (0..40)
                .map(|i| sampler.sample(&logits(300, i), &[]).unwrap())
                .collect()
        };
        let first = draw(&mut sampler);
        let rng_moved_on: Vec<u32> = draw(&mut sampler);
        assert_ne!(first, rng_moved_on);
        sampler.reset();
        assert_eq!(draw(&mut sampler), first);
        let again = seeded(&with(mirostat), sampler.seed());
        assert_eq!(draw(&mut Sampler::new(again).unwrap()), first);
    }
}

#[test]
fn draws_have_the_softmax_distribution() {
    // Weights 1 … 10, 20,000 draws: χ² with 9 degrees of freedom stays below 27.9 with
    // probability 0.999; the seeds are fixed, so a pass is a pass for ever.
    let logits: Vec<f32> = (1..=10).map(|i| (i as f32).ln()).collect();
    for seed in [1, 2, 3] {
        for (temperature, power) in [(1.0, 1.0), (0.5, 2.0)] {
            let mut sampler = Sampler::new(SamplerOptions {
                samplers: Some("temperature".into()),
                temperature,
                seed: Some(seed),
                ..Default::default()
            })
            .unwrap();
            let mut counts = [0.0f64; 10];
            for _ in 0..20_000 {
                counts[sampler.sample(&logits, &[]).unwrap() as usize] += 1.0;
            }
            let weight = |i: usize| ((i + 1) as f64).powf(power);
            let total: f64 = (0..10).map(weight).sum();
            let expected = |i: usize| 20_000.0 * weight(i) / total;
            let chi2: f64 = (0..10)
                .map(|i| (counts[i] - expected(i)).powi(2) / expected(i))
                .sum();
            assert!(
                chi2 < 27.9,
                "seed {seed}, temperature {temperature}: χ² = {chi2}"
            );
        }
    }
}

#[test]
fn mirostat_cuts_below_the_entropy_of_the_model() {
    // Zipf with exponent 1.1 over 2,000 tokens has more than 6 bits of entropy; with tau = 3 the
    // surprise that is fed back averages 3, and the model's own surprise of the same tokens
    // (not renormalised to the kept ones) can only be larger, yet stays well below the entropy.
    let logits: Vec<f32> = (1..=2000).map(|i| -1.1 * (i as f32).ln()).collect();
    let mean_bits = |options: SamplerOptions| {
        let mut sampler = Sampler::new(SamplerOptions {
            temperature: 1.0,
            seed: Some(5),
            ..options
        })
        .unwrap();
        let mut bits = || {
            -sampler
                .sample_with_logprobs(&logits, &[], 0)
                .unwrap()
                .logprob
                .exp()
                .log2()
        };
        // Settle first; then σ of the mean is about 2 / √2000 < 0.05 bits.
        (0..200).for_each(|_| _ = bits());
        (0..2000).map(|_| bits()).sum::<f32>() / 2000.0
    };
    let free = mean_bits(without_filters());
    for version in [Mirostat::V1, Mirostat::V2] {
        let cut = mean_bits(SamplerOptions {
            mirostat_tau: 3.0,
            ..with(version)
        });
        assert!(
            cut > 3.0 - 0.25 && cut < free - 1.0,
            "{version:?}: {cut}, free {free}"
        );
    }
}

#[test]
fn order_is_the_one_given() {
    // p = 0.6, 0.3, 0.1. Excluding top choices after top-k 1 changes nothing; before it, the
    // second is all that is left.
    let logits = [6f32.ln(), 3f32.ln(), 0.0];
    let chain = |names: &str| {
        Sampler::new(SamplerOptions {
            xtc_probability: 1.0,
            xtc_threshold: 0.2,
            top_k: 1,
            samplers: Some(names.into()),
            ..Default::default()
        })
    };
    assert_eq!(chain("top_k;xtc").unwrap().sample(&logits, &[]), Ok(0));
    assert_eq!(chain(" xtc; top-k ").unwrap().sample(&logits, &[]), Ok(1));
}

#[test]
fn a_filter_that_is_not_named_does_not_run() {
    let mut sampler = Sampler::new(SamplerOptions {
        top_k: 1,
        samplers: Some("temperature".into()),
        seed: Some(3),
        ..Default::default()
    })
    .unwrap();
    assert!((0..50).any(|_| sampler.sample(&[0.0; 10], &[]) != Ok(0)));
}

#[test]
fn penalties_and_bias_steer_greedy_choices() {
    let greedy = || SamplerOptions {
        temperature: 0.0,
        ..Default::default()
    };
    let logits = [1.0, 0.9, 0.8];
    let choose = |options: SamplerOptions| {
        let mut sampler = Sampler::new(options).unwrap();
        sampler.sample(&logits, &[0, 0, 1]).unwrap()
    };
    assert_eq!(choose(greedy()), 0);
    assert_eq!(
        choose(SamplerOptions {
            repeat_penalty: 1.5,
            ..greedy()
        }),
        2
    );
    assert_eq!(
        choose(SamplerOptions {
            frequency_penalty: 0.06,
            ..greedy()
        }),
        0
    );
    assert_eq!(
        choose(SamplerOptions {
            frequency_penalty: 0.11,
            ..greedy()
        }),
        2
    );
    assert_eq!(
        choose(SamplerOptions {
            presence_penalty: 0.15,
            ..greedy()
        }),
        0
    );
    assert_eq!(
        choose(SamplerOptions {
            presence_penalty: 0.25,
            ..greedy()
        }),
        2
    );
    assert_eq!(
        choose(SamplerOptions {
            repeat_penalty: 1.5,
            repeat_last_n: 1,
            ..greedy()
        }),
        0
    );
    assert_eq!(
        choose(SamplerOptions {
            logit_bias: vec![(0, f32::NEG_INFINITY)],
            ..greedy()
        }),
        1
    );
    assert_eq!(
        choose(SamplerOptions {
            logit_bias: vec![(2, 0.3)],
            ..greedy()
        }),
        2
    );
}

#[test]
fn dry_stops_a_loop() {
    let looped = [5, 6, 7, 5, 6, 7, 5, 6];
    let mut logits = vec![0.0; 10];
    (logits[7], logits[3]) = (4.0, 3.0);
    let choose = |options: SamplerOptions| {
        let greedy = SamplerOptions {
            temperature: 0.0,
            ..options
        };
        let mut sampler = Sampler::new(greedy).unwrap();
        sampler.sample(&logits, &looped).unwrap()
    };
    assert_eq!(choose(SamplerOptions::default()), 7);
    let dry = SamplerOptions {
        dry_multiplier: 0.8,
        ..Default::default()
    };
    // 5 repeated tokens: 0.8 · 1.75³ ≈ 4.3 > 1.
    assert_eq!(choose(dry.clone()), 3);
    let breaker = SamplerOptions {
        dry_sequence_breakers: vec![vec![6]],
        ..dry
    };
    assert_eq!(choose(breaker), 7);
}

#[test]
fn logprobs_are_those_of_the_model() {
    let logits = [
        1f32.ln(),
        4f32.ln(),
        f32::NAN,
        2f32.ln(),
        3f32.ln(),
        f32::NEG_INFINITY,
    ];
    // Temperature and bias must not show.
    let options = SamplerOptions {
        temperature: 0.0,
        logit_bias: vec![(0, 9.0)],
        ..Default::default()
    };
    let sampled = Sampler::new(options)
        .unwrap()
        .sample_with_logprobs(&logits, &[], 3)
        .unwrap();
    assert_eq!(sampled.token, 0);
    // Below 3 in magnitude and three roundings: well within 1e-6.
    let close = |a: f32, b: f64| assert!((f64::from(a) - b).abs() < 1e-6, "{a} {b}");
    close(sampled.logprob, 0.1f64.ln());
    assert_eq!(
        sampled.top.iter().map(|t| t.0).collect::<Vec<_>>(),
        [1, 4, 3]
    );
    for (&(_, l), p) in sampled.top.iter().zip([0.4f64, 0.3, 0.2]) {
        close(l, p.ln());
    }
    let all = Sampler::new(SamplerOptions::default())
        .unwrap()
        .sample_with_logprobs(&logits, &[], 99)
        .unwrap();
    assert_eq!(all.top.len(), 4);
}

#[test]
fn nothing_to_choose_from_is_an_error() {
    let mut sampler = Sampler::new(SamplerOptions::default()).unwrap();
    let nothing = |n_vocab, n_nan| Err(SampleError::NoCandidates { n_vocab, n_nan });
    assert_eq!(sampler.sample(&[], &[]), Err(SampleError::NoLogits));
    assert_eq!(sampler.sample(&[f32::NAN; 3], &[]), nothing(3, 3));
    assert_eq!(
        sampler.sample(&[f32::NEG_INFINITY, f32::NAN], &[]),
        nothing(2, 1)
    );
    let mut forbidden = Sampler::new(SamplerOptions {
        logit_bias: vec![(0, f32::NEG_INFINITY)],
        ..Default::default()
    })
    .unwrap();
    assert_eq!(forbidden.sample(&[1.0], &[]), nothing(1, 0));
    let mut outside = Sampler::new(SamplerOptions {
        logit_bias: vec![(3, 1.0)],
        ..Default::default()
    })
    .unwrap();
    let error = SampleError::BiasOutsideVocabulary {
        token: 3,
        n_vocab: 3,
    };
    assert_eq!(outside.sample(&[0.0; 3], &[]), Err(error));
}

#[test]
fn senseless_parameters_are_refused_by_name() {
    macro_rules! with {
        ($field:ident, $value:expr) => {
            SamplerOptions {
                $field: $value,
                ..Default::default()
            }
        };
    }
    for (parameter, options) in [
        ("repeat_penalty", with!(repeat_penalty, 0.0)),
        ("presence_penalty", with!(presence_penalty, f32::NAN)),
        ("frequency_penalty", with!(frequency_penalty, f32::INFINITY)),
        ("dry_multiplier", with!(dry_multiplier, -0.1)),
        ("dry_base", with!(dry_base, f32::NAN)),
        ("top_n_sigma", with!(top_n_sigma, f32::NAN)),
        ("typical", with!(typical, 1.1)),
        ("top_p", with!(top_p, -0.1)),
        ("min_p", with!(min_p, f32::NAN)),
        ("xtc_probability", with!(xtc_probability, 2.0)),
        ("xtc_threshold", with!(xtc_threshold, -1.0)),
        ("temperature", with!(temperature, -1.0)),
        ("dynatemp_range", with!(dynatemp_range, f32::INFINITY)),
        ("dynatemp_exponent", with!(dynatemp_exponent, -1.0)),
        ("mirostat_tau", with!(mirostat_tau, f32::NAN)),
        ("mirostat_eta", with!(mirostat_eta, -1.0)),
        (
            "logit_bias",
            with!(logit_bias, vec![(0, 1.0), (1, f32::NAN)]),
        ),
        ("repeat_last_n", with!(repeat_last_n, -2)),
        ("dry_penalty_last_n", with!(dry_penalty_last_n, -2)),
    ] {
        match Sampler::new(options) {
            Err(SampleError::Parameter { name, .. }) => assert_eq!(name, parameter),
            other => panic!("{parameter}: {other:?}"),
        }
    }
    match Sampler::new(with!(samplers, Some("top_k;magic".into()))) {
        Err(SampleError::UnknownSampler { name, known }) => {
            assert_eq!(name, "magic");
            assert!(known.starts_with("penalties, dry, "));
        }
        other => panic!("{other:?}"),
    }
    let empty = Sampler::new(with!(dry_sequence_breakers, vec![vec![]]));
    assert_eq!(empty.err(), Some(SampleError::EmptyBreaker));
}

/// Logits as a hostile model could give them.
fn any_logit() -> impl Strategy<Value = f32> {
    let special = vec![
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN,
        -0.0,
        1e-45,
    ];
    prop_oneof![6 => -20f32..20.0, 1 => any::<f32>(), 1 => prop::sample::select(special)]
}

prop_compose! {
    fn any_options()(
        (last_n, repeat, presence, frequency) in (-1i32..100, 1e-3f32..1e3, -1e30f32..1e30, -2f32..2.0),
        (multiplier, base, allowed, breaker) in (0f32..1e30, 0f32..100.0, 0usize..4, 0u32..70),
        (sigma, k, typical, p, min_p) in (-1f32..4.0, 0usize..80, 0f32..=1.0, 0f32..=1.0, 0f32..=1.0),
        (xtc_p, xtc_t) in (0f32..=1.0, 0f32..=1.0),
        (t, range, exponent) in (0f32..10.0, 0f32..10.0, 0f32..5.0),
        (mirostat, tau, eta) in (0usize..3, 0f32..20.0, 0f32..20.0),
        order in Just(vec![
            "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
        ]).prop_shuffle(),
        names in 0usize..=9,
        bias in prop::collection::vec((0u32..4, -1e30f32..1e30), 0..3),
        seed in any::<u64>(),
    ) -> SamplerOptions {
        let version = [Mirostat::Off, Mirostat::V1, Mirostat::V2][mirostat];
        SamplerOptions {
            repeat_last_n: last_n,
            repeat_penalty: repeat,
            presence_penalty: presence,
            frequency_penalty: frequency,
            dry_multiplier: multiplier,
            dry_base: base,
            dry_allowed_length: allowed,
            dry_penalty_last_n: -1,
            dry_sequence_breakers: vec![vec![breaker], vec![breaker, 1]],
            top_n_sigma: sigma,
            top_k: k,
            typical,
            top_p: p,
            min_p,
            xtc_probability: xtc_p,
            xtc_threshold: xtc_t,
            temperature: t,
            dynatemp_range: range,
            dynatemp_exponent: exponent,
            mirostat: version,
            mirostat_tau: tau,
            mirostat_eta: eta,
            logit_bias: bias,
            samplers: Some(order[..names].join(";")),
            seed: Some(seed),
        }
    }
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn any_chain_on_any_logits_gives_a_valid_token(
        options in any_options(),
        logits in prop::collection::vec(any_logit(), 4..100),
        history in prop::collection::vec(0u32..120, 0..80),
    ) {
        let mut sampler = Sampler::new(options).unwrap();
        let mut again = sampler.clone();
        for _ in 0..3 {
            let token = sampler.sample(&logits, &history);
            prop_assert_eq!(&token, &again.sample(&logits, &history));
            match token {
                Ok(token) => prop_assert!(logits[token as usize] > f32::NEG_INFINITY),
                Err(SampleError::NoCandidates { .. }) => {
                    prop_assert!(!logits.iter().any(|&l| l > f32::NEG_INFINITY));
                }
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
    }

    #[test]
    fn one_candidate_is_greedy(
        logits in prop::collection::vec(prop_oneof![-20f32..20.0, Just(5.0), Just(-0.0), Just(0.0)], 1..300),
        seed in any::<u64>(),
    ) {
        let seed = Some(seed);
        for options in [
            SamplerOptions { top_k: 1, seed, ..Default::default() },
            SamplerOptions { temperature: 0.0, seed, ..Default::default() },
            SamplerOptions { top_p: 0.0, seed, ..Default::default() },
            SamplerOptions { top_k: 0, top_p: 0.0, seed, ..Default::default() },
        ] {
            let token = Sampler::new(options).unwrap().sample(&logits, &[]);
            prop_assert_eq!(token, Ok(argmax(&logits)));
        }
    }

    // A bias, even of 0, lets all logits be loaded; without one the sampler looks for the best alone.
    #[test]
    fn the_best_alone_give_the_same_tokens(
        options in any_options(),
        greedy in any::<bool>(),
        off in any::<bool>(),
        logits in prop::collection::vec(any_logit(), 4..300),
        history in prop::collection::vec(0u32..120, 0..80),
    ) {
        let mut options = SamplerOptions { logit_bias: vec![], mirostat: Mirostat::Off, ..options };
        if greedy {
            (options.temperature, options.dynatemp_range) = (0.0, 0.0);
        }
        if off {
            (options.repeat_last_n, options.dry_multiplier, options.xtc_probability) = (0, 0.0, 0.0);
            (options.top_n_sigma, options.typical) = (0.0, 1.0);
        }
        let all = SamplerOptions { logit_bias: vec![(0, 0.0)], ..options.clone() };
        let (mut all, mut best) = (Sampler::new(all).unwrap(), Sampler::new(options).unwrap());
        for _ in 0..3 {
            prop_assert_eq!(best.sample(&logits, &history), all.sample(&logits, &history));
        }
    }

    #[test]
    fn logprobs_sum_to_one(logits in prop::collection::vec(-50f32..50.0, 1..200)) {
        let mut sampler = Sampler::new(SamplerOptions::default()).unwrap();
        let sampled = sampler.sample_with_logprobs(&logits, &[], logits.len()).unwrap();
        let sum: f64 = sampled.top.iter().map(|t| f64::from(t.1).exp()).sum();
        // Each term is rounded to f32 near magnitude 100: relative error 100 · ε / 2 < 1e-5.
        prop_assert!((sum - 1.0).abs() < 1e-5, "{}", sum);
        prop_assert!(sampled.top.contains(&(sampled.token, sampled.logprob)));
        prop_assert!(sampled.top.windows(2).all(|w| w[0].1 >= w[1].1));
    }
}
