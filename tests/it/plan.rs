//! Memory is planned: what a model takes is what was said before, and what does not fit is refused
//! before it is begun.

use crate::common::emulated;
use crate::run::level;
use crate::tiny::{N_VOCAB, Tiny};
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::engine::{CacheMode, EngineOptions, MemoryPlan, PlanOptions};
use ruvllm::gguf::Gguf;
use ruvllm::kv::KvError;
use ruvllm::kv::KvTiers;
use ruvllm::lora::{Adapter, Gradients};
use ruvllm::model::ModelError;
use ruvllm::model::{Hparams, Mixer, OpenOptions, WeightPlacement};
use ruvllm::quant::DType;
use ruvllm::scheduler::{Request, Schedule, ScheduleOptions};
use ruvllm::session::Profile;
use ruvllm::{Engine, SessionOptions};
use ruvllm::{Sampler, SamplerOptions, SessionError};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

fn tokens(n: usize) -> Vec<u32> {
    (0..n)
        .map(|i| ((i * 31 + i * i % 11) % N_VOCAB) as u32)
        .collect()
}

fn session(n_ctx: usize) -> SessionOptions {
    SessionOptions {
        n_ctx: Some(n_ctx),
        ..Default::default()
    }
}

/// What an engine takes at the peak of a prompt that fills the context but for one token, which is
/// decoded: keys and values, buffers, and the rest.
fn taken(model: &Model, options: &PlanOptions) -> [u64; 3] {
    let engine = Engine::new(
        model,
        &EngineOptions {
            n_threads: options.n_threads,
            ..Default::default()
        },
    )
    .unwrap();
    let n_ctx = options.session.n_ctx.unwrap();
    let mut sessions: Vec<_> = (0..options.n_sequences)
        .map(|_| engine.session_with(&options.session).unwrap())
        .collect();
    for session in &mut sessions {
        for adapter in &options.adapters {
            session.adapters().attach(Arc::clone(adapter), 1.0).unwrap();
        }
        session
            .hooks()
            .prefill_each(&tokens(n_ctx - 1), n_ctx - 1 - options.n_logits, |_, _| ())
            .unwrap();
        session.decode(3).unwrap();
    }
    // Pages that are given back stay in the pool.
    let stats = engine.pool().stats();
    let rest = sessions
        .iter()
        .map(|session| session.state().memory().rest)
        .sum();
    [stats.used + stats.free, engine.memory().buffers, rest]
}

/// Every shape of a layer, precision and size; within 5 % of what is there, or a kilobyte where
/// there is hardly anything.
#[test]
fn plans_are_what_engines_take() {
    let long = |tiny: Tiny| {
        let mut parts = tiny.parts(DType::Q8_0);
        parts.set(&format!("{}.context_length", tiny.name()), 4096u32);
        if tiny == Tiny::Gemma2 {
            parts.set("gemma2.attention.sliding_window", 200u32);
        }
        OpenOptions::new()
            .arch(level())
            .open_gguf(parts.gguf())
            .unwrap()
    };
    let tiered = SessionOptions {
        kv_tiers: Some(KvTiers {
            recent: 64,
            middle: 192,
        }),
        ..session(1024)
    };
    let plans: Vec<PlanOptions> = vec![
        session(1024).into(),
        SessionOptions {
            n_batch: 100,
            ..session(1024)
        }
        .into(),
        SessionOptions {
            kv_type: KvType::Q8,
            kv_type_v: Some(KvType::Q4),
            ..session(700)
        }
        .into(),
        SessionOptions {
            kv_type: KvType::F32,
            exact: true,
            n_batch: 64,
            ..session(1024)
        }
        .into(),
        tiered.clone().into(),
        PlanOptions {
            n_sequences: 3,
            ..tiered.into()
        },
        PlanOptions {
            n_sequences: 3,
            n_threads: NonZeroUsize::new(2),
            ..session(300).into()
        },
        PlanOptions {
            n_logits: 60,
            n_threads: NonZeroUsize::new(1),
            ..session(512).into()
        },
    ];
    for tiny in Tiny::SHAPES
        .into_iter()
        .take(if emulated() { 2 } else { usize::MAX })
    {
        let model = long(tiny);
        for options in &plans {
            let plan = model.memory_plan(options).unwrap();
            let planned = [plan.kv, plan.buffers, plan.rest];
            for (part, (planned, taken)) in ["kv", "buffers", "rest"]
                .iter()
                .zip(planned.into_iter().zip(taken(&model, options)))
            {
                let off = planned.abs_diff(taken);
                assert!(
                    20 * off <= taken.max(20 << 10),
                    "{tiny:?} {options:?}: {part} {taken}, planned {planned}"
                );
            }
            assert_eq!(
                plan.weights,
                model
                    .gguf()
                    .tensors()
                    .iter()
                    .map(|t| t.n_bytes)
                    .sum::<u64>()
            );
        }
    }
}

/// Of a prompt that is computed in pieces beside a sequence that decodes; the buffers go with the
/// schedule.
#[test]
fn prompts_in_pieces_are_planned() {
    let mut parts = Tiny::Llama.parts(DType::Q8_0);
    crate::mtp::set_vocabulary(&mut parts, N_VOCAB);
    let model = OpenOptions::new()
        .arch(level())
        .open_gguf(parts.gguf())
        .unwrap();
    let n_threads = NonZeroUsize::new(2);
    let engine = Engine::new(
        &model,
        &EngineOptions {
            n_threads,
            ..Default::default()
        },
    )
    .unwrap();
    let session = SessionOptions {
        n_batch: 64,
        ..session(128)
    };
    // No time at all: 64 rows at least, and the second prompt has 60.
    let max_itl = Some(Duration::ZERO);
    let options = ScheduleOptions {
        session: session.clone(),
        n_parallel: 2,
        max_itl,
        ..Default::default()
    };
    let mut schedule = Schedule::new(&engine, &options).unwrap();
    let sampler = || {
        Sampler::new(SamplerOptions {
            temperature: 0.0,
            ..Default::default()
        })
        .unwrap()
    };
    let request = |n| Request::new(tokens(n), sampler()).max_tokens(40);
    let streams = [64, 60].map(|n| {
        let stream = schedule.submit(request(n)).unwrap();
        for _ in 0..4 {
            schedule.step();
        }
        stream
    });
    let plan = |n_layered| {
        let options = PlanOptions {
            n_sequences: 2,
            n_threads,
            n_layered,
            ..session.clone().into()
        };
        model.memory_plan(&options).unwrap().buffers
    };
    let taken = engine.memory().buffers;
    assert!(
        20 * plan(60).abs_diff(taken) <= taken,
        "{taken}, planned {}",
        plan(60)
    );
    drop((schedule, streams));
    let left = engine.memory().buffers;
    assert!(
        left < taken && 20 * plan(0).abs_diff(left) <= left,
        "{left}, planned {}",
        plan(0)
    );
}

/// A limit leaves room for the prompts in pieces of a schedule, and refuses the schedule up front
/// where there is none.
#[test]
fn limits_leave_room_for_prompts_in_pieces() {
    let gguf = || {
        let mut parts = Tiny::Llama.parts(DType::Q8_0);
        parts.set("llama.context_length", 1024u32);
        crate::mtp::set_vocabulary(&mut parts, N_VOCAB);
        parts.gguf()
    };
    let open = |limit| {
        let model = OpenOptions::new()
            .arch(level())
            .memory_limit(limit)
            .open_gguf(gguf())
            .unwrap();
        Engine::new(
            &model,
            &EngineOptions {
                n_threads: NonZeroUsize::new(2),
                ..Default::default()
            },
        )
        .unwrap()
    };
    let session = session(1024);
    let options = ScheduleOptions {
        session: session.clone(),
        n_parallel: 2,
        max_itl: Some(Duration::ZERO),
        ..Default::default()
    };
    let n_threads = NonZeroUsize::new(2);
    let plan = |n_layered| {
        let options = PlanOptions {
            n_threads,
            n_layered,
            ..session.clone().into()
        };
        OpenOptions::new()
            .arch(level())
            .open_gguf(gguf())
            .unwrap()
            .memory_plan(&options)
            .unwrap()
            .total()
    };
    // What a session fits into does not suffice.
    let engine = open(plan(0));
    engine.session_with(&session).unwrap();
    assert!(matches!(
        Schedule::new(&engine, &options).map(drop),
        Err(SessionError::MemoryLimit { .. })
    ));
    assert_eq!(engine.pool().stats().reserved, 0);

    let limit = plan(session.n_batch);
    let engine = open(limit);
    let mut schedule = Schedule::new(&engine, &options).unwrap();
    assert!(engine.pool().stats().reserved >= limit - plan(0));
    let sampler = || {
        Sampler::new(SamplerOptions {
            temperature: 0.0,
            ..Default::default()
        })
        .unwrap()
    };
    let streams = [100, 900].map(|n| {
        schedule
            .submit(Request::new(tokens(n), sampler()).max_tokens(20))
            .unwrap()
    });
    let (mut peak, mut n_steps) = (0, 0);
    while schedule.step() && n_steps < 10_000 {
        (peak, n_steps) = (peak.max(engine.memory().total()), n_steps + 1);
        assert!(peak <= limit, "{peak} of {limit}");
    }
    drop((schedule, streams));
    assert_eq!(engine.pool().stats().reserved, 0);
}

#[test]
fn adapters_are_planned() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let adapters: Vec<_> = [3, 8]
        .map(|rank| Arc::new(Adapter::zeros(&model, rank, 1, |_| true).unwrap()))
        .into();
    let options = PlanOptions {
        adapters,
        ..session(256).into()
    };
    let (plan, bare) = (
        model.memory_plan(&options).unwrap(),
        model.memory_plan(&session(256).into()).unwrap(),
    );
    let n_params: usize = options
        .adapters
        .iter()
        .map(|adapter| adapter.n_params())
        .sum();
    assert_eq!(plan.adapters, 4 * n_params as u64);
    assert!(plan.buffers > bare.buffers);
    let [_, buffers, _] = taken(&model, &options);
    assert!(
        20 * plan.buffers.abs_diff(buffers) <= buffers,
        "{buffers}, planned {}",
        plan.buffers
    );
}

/// Buffers and rows that gradients of adapters take, of all matrices and of the last layer's, at
/// the end of a context; and the adapters themselves, as the pool counts them.
#[test]
fn gradients_are_planned() {
    let mut n_planned = 0;
    for tiny in Tiny::SHAPES {
        let model = tiny.model(DType::Q8_0);
        let last = model.hparams().n_layer - 1;
        for (n_past, lowest, rank) in [(0, 0, 4), (40, last, 8)] {
            let adapter = Adapter::zeros(&model, rank, 1, |site| {
                site.layer().is_some_and(|layer| layer >= lowest)
            });
            let adapter = Arc::new(adapter.unwrap());
            let (n, session, n_threads) = (120 - n_past, session(120), NonZeroUsize::new(2));
            let engine = Engine::new(
                &model,
                &EngineOptions {
                    n_threads,
                    ..Default::default()
                },
            )
            .unwrap();
            let mut found = engine.session_with(&session).unwrap();
            let id = found.adapters().attach(Arc::clone(&adapter), 1.0).unwrap();
            let text = tokens(121);
            if n_past > 0 {
                found.prefill(&text[..n_past]).unwrap();
            }
            let (weights, mut gradients) = (vec![1.0; n], Gradients::zeros(&adapter));
            let outcome = found.training().nll_gradient(
                id,
                &text[n_past..120],
                &text[n_past + 1..],
                &weights,
                &mut gradients,
            );
            let has_divergence = n_past == 0 && outcome.is_ok();
            if has_divergence {
                let text = &text[..120];
                found.clear();
                let reference = found.training().reference(text).unwrap();
                found.clear();
                let mut training = found.training();
                training
                    .divergence_gradient(id, text, &reference, 1.0, &mut gradients, None)
                    .unwrap();
            }
            let options = PlanOptions {
                adapters: vec![Arc::clone(&adapter)],
                n_gradient: n,
                has_divergence,
                n_threads,
                ..session.into()
            };
            let plan = model.memory_plan(&options).unwrap();
            if outcome.is_err() {
                assert_eq!(plan.gradients, 0, "{tiny:?}");
                continue;
            }
            n_planned += 1;
            let memory = engine.memory();
            let taken = [
                found.state().memory().gradients + adapter.bytes(),
                memory.buffers,
                memory.adapters,
            ];
            let planned = [plan.gradients, plan.buffers, plan.adapters];
            for (i, (planned, taken)) in planned.into_iter().zip(taken).enumerate() {
                assert!(
                    20 * planned.abs_diff(taken) <= taken,
                    "{tiny:?} {n_past}: {i}: {taken}, planned {planned}"
                );
            }
        }
    }
    assert!(n_planned > 4);
}

/// A prefix cache that was filled, beside sequences that fill their contexts; a limit does not
/// count it.
#[test]
fn prefix_caches_are_planned() {
    for kv_type in [KvType::F16, KvType::Q4] {
        let model = Tiny::Llama.model(DType::Q8_0);
        let options = SessionOptions {
            kv_type,
            prefix: CacheMode::On.into(),
            ..session(512)
        };
        let prefix_budget = 1 << 20;
        let plan = PlanOptions {
            n_sequences: 2,
            prefix_budget,
            ..options.clone().into()
        };
        let plan = model.memory_plan(&plan).unwrap();
        let with_budget = EngineOptions {
            prefix_budget: Some(prefix_budget),
            ..Default::default()
        };
        let engine = Engine::new(&model, &with_budget).unwrap();
        for i in 0..40 {
            let text = [&[i][..], &tokens(499)].concat();
            engine
                .session_with(&options)
                .unwrap()
                .prefill(&text)
                .unwrap();
        }
        let cold = SessionOptions {
            prefix: CacheMode::Off.into(),
            ..options
        };
        let mut sessions = [0; 2].map(|_| engine.session_with(&cold).unwrap());
        sessions
            .iter_mut()
            .for_each(|session| session.prefill(&tokens(512)).unwrap());
        let stats = engine.pool().stats();
        let (taken, planned) = (stats.used + stats.free, plan.kv + plan.prefixes);
        assert!(
            20 * planned.abs_diff(taken) <= taken,
            "{kv_type}: {taken}, planned {planned}"
        );
        assert_eq!(
            (plan.prefixes, plan.total() - plan.needed()),
            (prefix_budget, prefix_budget)
        );
    }
}

/// A download that has just begun tells the same as the whole file.
#[test]
fn a_header_is_enough() {
    for tiny in Tiny::SHAPES {
        let gguf: Gguf = tiny.parts(DType::Q8_0).gguf();
        let h = Hparams::of(gguf.metadata(), gguf.tensors()).unwrap();
        let plan = MemoryPlan::of_header(gguf.header(), &h, &PlanOptions::default()).unwrap();
        assert_eq!(
            plan,
            Model::from_gguf(gguf)
                .unwrap()
                .memory_plan(&PlanOptions::default())
                .unwrap(),
            "{tiny:?}"
        );
    }
}

/// What nobody could mean is planned as large, or refused, but never as small.
#[test]
fn absurd_sizes_do_not_wrap() {
    let model = Tiny::Llama.model(DType::F32);
    let plan = |n_ctx, n_batch| {
        model.memory_plan(
            &SessionOptions {
                n_batch,
                ..session(n_ctx)
            }
            .into(),
        )
    };
    assert_eq!(plan(64, usize::MAX).unwrap(), plan(64, 64).unwrap());
    assert!(plan(i32::MAX as usize, usize::MAX).unwrap().total() > 1 << 40);
    for (n_ctx, n_batch, name) in [
        (usize::MAX, 64, "n_ctx"),
        (0, 64, "n_ctx"),
        (64, 0, "n_batch"),
    ] {
        assert!(
            matches!(plan(n_ctx, n_batch), Err(SessionError::Option { option, .. }) if option == name)
        );
    }
    let many = PlanOptions {
        n_sequences: 1 << 20,
        ..session(64).into()
    };
    assert!(model.memory_plan(&many).unwrap().kv >= 1 << 30);
}

/// A limit that a context of the model's own length just fits into, one byte less, and less still.
#[test]
fn limits_are_kept() {
    let gguf = || {
        let mut parts = Tiny::Llama.parts(DType::Q8_0);
        parts.set("llama.context_length", 4096u32);
        parts.gguf()
    };
    let open = |limit: u64| {
        OpenOptions::new()
            .arch(level())
            .memory_limit(limit)
            .open_gguf(gguf())
    };
    let free = OpenOptions::new().arch(level()).open_gguf(gguf()).unwrap();
    let plan = free.memory_plan(&session(4096).into()).unwrap();
    let model = open(plan.total()).unwrap();
    let mut fits = model.session_with(&session(4096)).unwrap();
    fits.prefill(&tokens(4096)).unwrap();
    let memory = model.engine().unwrap().memory();
    assert!(memory.total() + fits.state().memory().rest <= plan.total());

    let model = open(plan.total() - 1).unwrap();
    let refused = model.session_with(&session(4096)).map(drop).unwrap_err();
    let message = refused.to_string();
    let SessionError::MemoryLimit {
        n_ctx: 4096,
        need,
        limit,
        fits: Some((n_ctx, k, v)),
    } = refused
    else {
        panic!("{message}");
    };
    assert_eq!((need, limit), (plan.total(), plan.total() - 1));
    assert!(
        message.contains(&format!("-c {n_ctx} -ctk {k} -ctv {v}")),
        "{message}"
    );
    // What it says does fit.
    let smaller = SessionOptions {
        kv_type: k,
        kv_type_v: Some(v),
        ..session(n_ctx)
    };
    model
        .session_with(&smaller)
        .unwrap()
        .prefill(&tokens(n_ctx))
        .unwrap();

    // Sessions share what is left: the second one finds the pool full.
    let engine = open(plan.total()).unwrap().engine().unwrap();
    let mut two = [0, 1].map(|_| engine.session_with(&session(4096)).unwrap());
    two[0].prefill(&tokens(4096)).unwrap();
    assert!(matches!(
        two[1].prefill(&tokens(64)),
        Err(SessionError::Kv(KvError::PoolFull { .. }))
    ));

    let none = open(plan.weights + 1).unwrap();
    assert!(matches!(
        none.session().map(drop),
        Err(SessionError::MemoryLimit { fits: None, .. })
    ));
    let heavy = open(plan.weights - 1).map(drop).unwrap_err();
    assert!(
        matches!(heavy, ModelError::MemoryLimit { need, .. } if need == plan.weights),
        "{heavy}"
    );
}

/// As long as the model was trained for, in half precision, where there is room; then fewer bits;
/// then less context.
#[test]
fn recommendations_fit_and_are_used() {
    let shipped = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/models/ruvllm-rust-6m-q8_0.gguf"
    );
    let auto = || {
        OpenOptions::new()
            .arch(level())
            .auto()
            .override_kv("llama.context_length", 4096u32)
    };
    let open = |limit| auto().memory_limit(limit).open(shipped).unwrap();
    let model = open(u64::MAX);
    let at = |n_ctx, kind| {
        model
            .memory_plan(
                &SessionOptions {
                    kv_type: kind,
                    ..session(n_ctx)
                }
                .into(),
            )
            .unwrap()
            .total()
    };
    for (limit, expected) in [
        (u64::MAX, Some((4096, KvType::F16))),
        (at(4096, KvType::F16), Some((4096, KvType::F16))),
        (at(4096, KvType::F16) - 1, Some((4096, KvType::Q8))),
        (at(4096, KvType::Q8) - 1, Some((2048, KvType::F16))),
        (at(512, KvType::Q8), Some((512, KvType::Q8))),
        (at(512, KvType::Q8) - 1, None),
    ] {
        let found = model.recommend(&PlanOptions::default(), limit).unwrap();
        let found = found.inspect(|found| assert!(found.plan.total() <= limit));
        let found = found.map(|found| (found.plan.n_ctx, found.session.kv_policy()));
        assert_eq!(
            found,
            expected.map(|(n_ctx, kind)| (n_ctx, kind.into())),
            "{limit}"
        );
        let session = open(limit).session();
        match expected {
            Some((n_ctx, _)) => assert_eq!(session.unwrap().sequence().n_ctx(), n_ctx),
            None => assert!(matches!(
                session.map(drop),
                Err(SessionError::MemoryLimit { fits: None, .. })
            )),
        }
    }
    // Within what the machine has, where it tells.
    let auto = auto().open(shipped).unwrap();
    let memory = ruvllm::SystemMemory::now();
    assert_eq!(auto.memory_limit().is_some(), memory.is_some());
    if let (Some(limit), Some(memory)) = (auto.memory_limit(), memory) {
        assert!(limit <= memory.total && memory.available <= memory.limit.unwrap_or(memory.total));
    }
    assert_eq!(auto.session().unwrap().sequence().n_ctx(), 4096);
}

/// Sequences of a model of the 1B shape (16 layers, eight heads of 64 for keys and values) whose
/// keys and values take 8 GiB: the table in `docs/guide/memory.md`.
#[test]
fn presets_take_what_is_documented() {
    let gguf = Tiny::Llama.parts(DType::Q8_0).gguf();
    let mut h = Hparams::of(gguf.metadata(), gguf.tensors()).unwrap();
    h.n_ctx_train = 131_072;
    h.layers = vec![h.layers[0].clone(); 16];
    for layer in &mut h.layers {
        let Mixer::Attention(attn) = &mut layer.mixer else {
            panic!("a llama")
        };
        (attn.n_head, attn.n_head_kv, attn.head_dim, attn.head_dim_v) = (32, 8, 64, 64);
    }
    let table = include_str!("../../docs/guide/memory.md");
    for preset in Profile::ALL {
        let options = preset.options(&h);
        let plan = MemoryPlan::of_header(gguf.header(), &h, &options.into()).unwrap();
        let row = format!(
            "| `{}` | {} | {:.0} MiB | {} |",
            preset.name(),
            plan.n_ctx,
            plan.kv as f64 / 1048576.0,
            (8 << 30) / plan.kv
        );
        assert!(table.contains(&row), "{row}");
        assert_eq!(preset.name().parse(), Ok(preset));
    }
    h.n_ctx_train = 512;
    assert!(
        Profile::ALL
            .iter()
            .all(|preset| preset.options(&h).n_ctx == Some(512))
    );
}

/// A copy counts once where it replaces a map, and besides where the file lies in memory.
#[test]
fn copies_of_weights_count() {
    let bytes = Tiny::Llama.parts(DType::Q8_0).bytes();
    let path = std::env::temp_dir().join(format!("ruvllm-plan-{}.gguf", std::process::id()));
    std::fs::write(&path, &bytes).unwrap();
    let plan = |model: Model| {
        let plan = model.memory_plan(&PlanOptions::default()).unwrap();
        (plan.weights, plan.weights_copy)
    };
    let open = |placement| OpenOptions::new().placement(placement);
    let n = plan(open(WeightPlacement::Mapped).open(&path).unwrap()).0;
    assert!(n > 0);
    assert_eq!(
        plan(open(WeightPlacement::Copied).open(&path).unwrap()),
        (0, n)
    );
    let in_memory = || Gguf::from_bytes(bytes.clone()).unwrap();
    assert_eq!(
        plan(
            open(WeightPlacement::Mapped)
                .open_gguf(in_memory())
                .unwrap()
        ),
        (n, 0)
    );
    assert_eq!(
        plan(
            open(WeightPlacement::Copied)
                .open_gguf(in_memory())
                .unwrap()
        ),
        (n, n)
    );
    std::fs::remove_file(&path).unwrap();
}
