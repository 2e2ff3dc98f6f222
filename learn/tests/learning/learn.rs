//! Learning while running, from outside.

use crate::common::long;
use crate::run::{Pass, session_on};
use crate::tiny::{N_VOCAB, Tiny};
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::SessionOptions;
use ruvllm::gguf::Gguf;
use ruvllm::lora::Adapter;
use ruvllm::quant::DType;
use ruvllm_learn::LearnError;
use ruvllm_learn::bench::{Contender, LearningOptions, learning};
use ruvllm_learn::{Learner, LearnerOptions, Learning, Losses};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

fn model() -> Model {
    model_of(Tiny::Llama)
}

fn model_of(kind: Tiny) -> Model {
    Model::from_gguf(kind.parts(DType::Q8_0).gguf()).unwrap()
}

fn options() -> LearnerOptions {
    LearnerOptions {
        control_tokens: 64,
        recent_tokens: 64,
        cache_tokens: 1024,
        neighbours: 256,
        ..Default::default()
    }
}

fn session(model: &Model) -> Session {
    session_on(model, 1, &SessionOptions::default())
}

fn learning_session(model: &Model) -> Session {
    let mut session = session(model);
    session
        .set_learner(Learner::new(model, &options()).unwrap())
        .unwrap();
    session
}

/// Numbers below `n`, by chance.
fn chance(seed: u64, n: usize) -> impl Iterator<Item = u32> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize % n) as u32
    })
}

/// Two phrases, in turn by chance: which token comes is a matter of the one before.
fn phrases(seed: u64) -> impl Iterator<Item = u32> {
    const PHRASES: [[u32; 4]; 2] = [[3, 14, 15, 9], [26, 5, 35, 8]];
    chance(seed, 2).flat_map(|i| PHRASES[i as usize])
}

/// Lets a session observe a stream, 32 tokens at a time, and checks the bound after each piece.
fn observe_all(session: &mut Session, stream: &[u32]) -> Losses {
    for piece in stream.chunks(32) {
        if session.position() + piece.len() > session.sequence().n_ctx() {
            session.clear();
        }
        session.observe(piece).unwrap();
        let total = session.learner().unwrap().losses();
        // Losses of n tokens are sums of n rounded logarithms.
        let rounding = 1e-9 * total.n as f64;
        assert!(
            total.mixture <= total.base + std::f64::consts::LN_2 + rounding,
            "{total:?}"
        );
    }
    session.learner().unwrap().losses()
}

#[test]
fn mixture_is_never_much_worse_than_the_base() {
    let all: Vec<u32> = (0..N_VOCAB as u32).collect();
    let phrase = [3u32, 14, 15, 9, 26, 5, 35, 8];
    // The same contexts lead elsewhere as soon as they have been learnt.
    let bait = |flip: usize| {
        phrase.iter().enumerate().map(move |(i, &t)| {
            if flip % 2 == 1 && i % 3 == 2 {
                (t + 17) % N_VOCAB as u32
            } else {
                t
            }
        })
    };
    let streams: [(&str, Vec<u32>); 5] = [
        ("random", chance(1, N_VOCAB).take(600).collect()),
        (
            "repeats",
            phrase.iter().copied().cycle().take(600).collect(),
        ),
        (
            "alternating",
            (0..12)
                .flat_map(|i| {
                    let (low, high) = if i % 2 == 0 { (0, 12) } else { (25, 50) };
                    chance(i, (high - low) as usize)
                        .map(move |t| low + t)
                        .take(50)
                })
                .collect(),
        ),
        (
            "bait and switch",
            (0..80).flat_map(|i| bait(i / 4)).collect(),
        ),
        (
            "every token but the expected",
            all.iter()
                .rev()
                .copied()
                .cycle()
                .enumerate()
                .map(|(i, t)| (t + (i / 50) as u32) % N_VOCAB as u32)
                .take(600)
                .collect(),
        ),
    ];
    for kind in [Tiny::Llama, Tiny::Gemma2] {
        let model = model_of(kind);
        for (name, stream) in &streams {
            let total = observe_all(&mut learning_session(&model), stream);
            println!(
                "{kind:?}, {name}: base {:.3}, mixture {:.3}",
                total.base, total.mixture
            );
            if *name == "repeats" {
                assert!(
                    total.mixture < 0.2 * total.base,
                    "{name}: what repeats is learnt: {total:?}"
                );
            }
        }
    }
}

#[test]
fn adapter_learns_within_the_bound() {
    let model = model();
    let mut session = learning_session(&model);
    let control: Vec<u32> = chance(5, N_VOCAB).take(200).collect();
    session.calibrate(&control).unwrap();
    assert_eq!(session.learner().unwrap().n_control(), 64);
    let stream: Vec<u32> = phrases(7).take(800).collect();
    let total = observe_all(&mut session, &stream);
    let learner = session.learner().unwrap();
    assert!(learner.n_updates() > 10 && learner.scale() > 0.0);
    assert!(total.adapter < total.base - 1.0, "{total:?}");
    let most = learner.options().max_divergence;
    assert!(learner.divergence() <= most, "{}", learner.divergence());
    // Control text that breaks off counts as far as it was read.
    let mut broken: Vec<u32> = chance(6, N_VOCAB).take(300).collect();
    for at in [250, 299] {
        broken[at] = u32::MAX;
        assert!(matches!(
            session.calibrate(&broken),
            Err(LearnError::Session(_))
        ));
        assert!(session.learner().unwrap().divergence() <= most);
        broken[at] = 0;
    }
}

/// What a file says of the strength is not believed.
#[test]
fn the_bound_holds_for_loaded_states() {
    let model = model();
    for calibrated in [true, false] {
        let mut session = learning_session(&model);
        if calibrated {
            session
                .calibrate(&chance(5, N_VOCAB).take(200).collect::<Vec<_>>())
                .unwrap();
        }
        observe_all(&mut session, &phrases(7).take(400).collect::<Vec<_>>());
        let scale = session.learner().unwrap().scale();
        assert!(scale > 0.0);
        let bytes = session.learner().unwrap().to_bytes().unwrap();
        let mut set = |scale: f32| {
            let mut bytes = bytes.clone();
            let key = b"learned.scale";
            let at = bytes.windows(key.len()).position(|w| w == key).unwrap() + key.len() + 4;
            bytes[at..at + 4].copy_from_slice(&scale.to_le_bytes());
            session
                .set_learner(Learner::from_bytes(bytes, &model).unwrap())
                .unwrap();
            let learner = session.learner().unwrap();
            assert!(learner.divergence() <= learner.options().max_divergence);
            learner.scale()
        };
        assert_eq!(set(scale), scale);
        for strong in [1e6, f32::MAX] {
            // The search for the largest scale within the bound ends a few per cent below it.
            let found = set(strong);
            assert!(found < 1e3 * scale, "{found} {scale}");
        }
    }
}

/// What is saved and loaded in between costs nothing of the promise.
#[test]
fn saving_keeps_the_promise() {
    let model = model();
    let mut session = learning_session(&model);
    let stream: Vec<u32> = phrases(7)
        .take(400)
        .chain(chance(3, N_VOCAB).take(400))
        .collect();
    for piece in stream.chunks(40) {
        session.clear();
        session.observe(piece).unwrap();
        let learner = session.take_learner().unwrap();
        let total = learner.losses();
        assert!(
            total.mixture <= total.base + std::f64::consts::LN_2 + 1e-9 * total.n as f64,
            "{total:?}"
        );
        let copy = Learner::from_bytes(learner.to_bytes().unwrap(), &model).unwrap();
        session.set_learner(copy).unwrap();
    }
}

#[test]
fn tokens_one_by_one_are_learnt() {
    let model = model();
    let mut session = learning_session(&model);
    session
        .calibrate(&chance(5, N_VOCAB).take(200).collect::<Vec<_>>())
        .unwrap();
    for token in phrases(7).take(800) {
        if session.position() == session.sequence().n_ctx() {
            session.clear();
        }
        session.observe(&[token]).unwrap();
    }
    let learner = session.learner().unwrap();
    let total = learner.losses();
    println!("{total:?}");
    assert!(learner.n_updates() > 100 && learner.scale() > 0.0);
    assert!(total.adapter < total.base - 1.0, "{total:?}");
}

#[test]
fn nothing_learnt_changes_no_bit() {
    let model = model();
    let (mut plain, mut learning) = (session(&model), learning_session(&model));
    let tokens = crate::tiny::TOKENS;
    assert_eq!(plain.prefilled(&tokens), learning.prefilled(&tokens));
    assert_eq!(plain.decoded(4), learning.decoded(4));
}

/// The adapter as a session applies it, and as a LoRA adapter of the head: `W·B` was rounded on its
/// way by the 16-bit form of activations, the same for both; the order of sums differs.
#[test]
fn it_exports_as_a_plain_adapter() {
    let model = model();
    let mut learning = learning_session(&model);
    observe_all(&mut learning, &phrases(7).take(400).collect::<Vec<_>>());
    let bytes = learning
        .learner()
        .unwrap()
        .to_adapter(&model)
        .unwrap()
        .to_bytes()
        .unwrap();
    let adapter = Adapter::from_bytes(bytes, &model).unwrap();
    let (mut plain, mut attached) = (session(&model), session(&model));
    attached.adapters().attach(adapter.into(), 1.0).unwrap();
    learning.clear();
    let (a, b) = (
        learning.prefilled(&crate::tiny::TOKENS),
        attached.prefilled(&crate::tiny::TOKENS),
    );
    let unchanged = plain.prefilled(&crate::tiny::TOKENS);
    assert!(
        a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4),
        "{a:?} {b:?}"
    );
    assert!(a.iter().zip(unchanged).any(|(a, b)| (a - b).abs() > 1e-2));
    let empty = Learner::new(&model, &options()).unwrap();
    assert!(matches!(
        empty.to_adapter(&model),
        Err(LearnError::NothingLearnt)
    ));
}

#[test]
fn ratings_move_answers() {
    let model = model();
    for (reward, sign) in [(1.0f32, 1.0f64), (-1.0, -1.0)] {
        let mut session = learning_session(&model);
        session
            .calibrate(&chance(5, N_VOCAB).take(200).collect::<Vec<_>>())
            .unwrap();
        // Directions come from text.
        observe_all(
            &mut session,
            &chance(3, N_VOCAB).take(128).collect::<Vec<_>>(),
        );
        let log_p = |session: &mut Session, answer: &[u32]| {
            session.clear();
            let mut log_p = 0.0f64;
            let mut logits = session.prefilled(&[1, 2]);
            for &token in answer {
                let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
                log_p += f64::from(logits[token as usize]) - sum.ln();
                logits = session.decoded(token);
            }
            log_p
        };
        let (one, other) = ([7u32, 7, 21, 7, 7, 21], [30u32, 41, 41, 30, 41, 30]);
        let preference = |session: &mut Session| log_p(session, &one) - log_p(session, &other);
        let before = preference(&mut session);
        for _ in 0..8 {
            log_p(&mut session, &one);
            session.feedback(reward).unwrap();
            log_p(&mut session, &other);
            session.feedback(-reward).unwrap();
        }
        let after = preference(&mut session);
        assert!(sign * (after - before) > 0.0, "{reward}: {before} {after}");
        let learner = session.learner().unwrap();
        assert!(learner.divergence() <= learner.options().max_divergence);
    }
    let mut session = learning_session(&model);
    assert!(matches!(session.feedback(1.0), Err(LearnError::NoAnswer)));
    session.prefill(&[1, 2]).unwrap();
    session.decode(3).unwrap();
    assert!(matches!(
        session.feedback(f32::NAN),
        Err(LearnError::Reward { .. })
    ));
}

#[test]
fn results_do_not_depend_on_threads() {
    let model = model();
    let stream: Vec<u32> = phrases(7).take(300).collect();
    let saved = [1, 2, 3].map(|n_threads| {
        let mut session = session_on(&model, n_threads, &SessionOptions::default());
        session
            .set_learner(Learner::new(&model, &options()).unwrap())
            .unwrap();
        observe_all(&mut session, &stream);
        session.learner().unwrap().to_bytes().unwrap()
    });
    assert!(saved[0] == saved[1] && saved[1] == saved[2]);
}

#[test]
fn state_goes_on_where_it_was() {
    let model = model();
    let mut session = learning_session(&model);
    session
        .calibrate(&chance(5, N_VOCAB).take(200).collect::<Vec<_>>())
        .unwrap();
    observe_all(&mut session, &phrases(7).take(400).collect::<Vec<_>>());
    assert!(session.learner().unwrap().scale() > 0.0);
    let bytes = session.learner().unwrap().to_bytes().unwrap();
    let copy = Learner::from_bytes(bytes.clone(), &model).unwrap();
    assert!(
        copy.to_bytes().unwrap() == bytes,
        "a copy of a copy is the same"
    );
    let mut other = self::session(&model);
    other.set_learner(copy).unwrap();
    session.clear();
    let more: Vec<u32> = phrases(9).take(32).collect();
    let (a, b) = (
        session.observe(&more).unwrap(),
        other.observe(&more).unwrap(),
    );
    assert_eq!(a, b);
}

#[test]
fn unusable_states_are_refused() {
    let model = model();
    let bytes = learning_session(&model)
        .learner()
        .unwrap()
        .to_bytes()
        .unwrap();
    let gemma = model_of(Tiny::Gemma2);
    assert!(matches!(
        Learner::from_bytes(bytes.clone(), &gemma),
        Err(LearnError::OtherModel { .. })
    ));
    assert!(matches!(
        Learner::from_bytes(Tiny::Llama.parts(DType::F32).bytes(), &model),
        Err(LearnError::NotLearned { .. })
    ));
    let find = |needle: &[u8]| {
        bytes
            .windows(needle.len())
            .position(|w| w == needle)
            .unwrap()
            + needle.len()
    };
    // A key is followed by the type of its value, 4 bytes.
    let mut newer = bytes.clone();
    newer[find(b"learned.version") + 4] = 9;
    assert!(matches!(
        Learner::from_bytes(newer, &model),
        Err(LearnError::Version { found: 9, .. })
    ));
    let mut huge = bytes.clone();
    huge[find(b"learned.cache_tokens") + 7] = 0x7f;
    assert!(matches!(
        Learner::from_bytes(huge, &model),
        Err(LearnError::Option {
            option: "cache_tokens",
            ..
        })
    ));
    for cut in [0, 10, bytes.len() / 2, bytes.len() - 32] {
        assert!(matches!(
            Learner::from_bytes(bytes[..cut].to_vec(), &model),
            Err(LearnError::Gguf(_))
        ));
    }
    let mut calibrated = learning_session(&model);
    calibrated
        .calibrate(&chance(5, N_VOCAB).take(200).collect::<Vec<_>>())
        .unwrap();
    let mut twice = calibrated.learner().unwrap().to_bytes().unwrap();
    let gguf = Gguf::from_bytes(twice.clone()).unwrap();
    let ids = gguf.tensor("control.ids").unwrap().offset as usize;
    twice.copy_within(ids..ids + 4, ids + 4);
    let refused = Learner::from_bytes(twice, &model).unwrap_err().to_string();
    assert!(
        refused.contains("control.ids") && refused.contains("twice"),
        "{refused}"
    );
    let wrong = LearnerOptions {
        rank: 5,
        ..options()
    };
    assert!(matches!(
        Learner::new(&model, &wrong),
        Err(LearnError::Option { option: "rank", .. })
    ));
    let mut session = session(&model);
    assert!(matches!(
        session.observe(&[1]),
        Err(LearnError::NotLearning)
    ));
    session
        .set_learner(Learner::new(&model, &options()).unwrap())
        .unwrap();
    assert!(matches!(
        session.calibrate(&[1; 10]),
        Err(LearnError::TooLittleText { .. })
    ));
    let measured = |n_ctx| {
        learning(
            &model,
            &[1; 512],
            &[1; 1024],
            &LearningOptions {
                n_ctx,
                ..Default::default()
            },
        )
    };
    for n_ctx in [1, 7] {
        assert!(matches!(
            measured(n_ctx),
            Err(LearnError::Option {
                option: "n_ctx",
                ..
            })
        ));
    }
    assert!(matches!(
        measured(4096),
        Err(LearnError::TooLittleText {
            n: 1024,
            least: 2048
        })
    ));
}

/// Every byte of a state, changed: an error or a learner that works, never a panic.
#[test]
fn damaged_states_do_no_harm() {
    let model = model();
    let mut session = learning_session(&model);
    observe_all(&mut session, &chance(7, 9).take(100).collect::<Vec<_>>());
    let bytes = session.learner().unwrap().to_bytes().unwrap();
    for (i, what) in chance(11, bytes.len()).zip(chance(12, 256)).take(400) {
        let mut damaged = bytes.clone();
        damaged[i as usize] = what as u8;
        if let Ok(learner) = Learner::from_bytes(damaged, &model) {
            goes_on(&mut session, learner);
        }
    }
}

/// A learner from a file, however it came about, learns more, computes numbers, and can be saved
/// and loaded.
fn goes_on(session: &mut Session, learner: Learner) {
    let finite = |logits: &[f32]| logits.iter().all(|x| x.is_finite());
    session.clear();
    session.set_learner(learner).unwrap();
    for piece in phrases(7).take(160).collect::<Vec<_>>().chunks(40) {
        session.clear();
        session.observe(piece).unwrap();
        assert!(finite(&session.prefilled(&[1, 2])));
        assert!(finite(&session.decoded(3)));
    }
    for reward in [f32::MAX, f32::MIN] {
        session.decode(4).unwrap();
        assert!(matches!(
            session.feedback(reward),
            Ok(_) | Err(LearnError::NothingToCompare)
        ));
    }
    session
        .calibrate(&chance(5, N_VOCAB).take(64).collect::<Vec<_>>())
        .unwrap();
    let learner = session.learner().unwrap();
    assert!(
        learner.scale().is_finite() && learner.divergence() <= learner.options().max_divergence
    );
    Learner::from_bytes(learner.to_bytes().unwrap(), session.model()).unwrap();
}

/// Numbers that are finite but too large, or too small, to compute with: refused by the name of
/// their tensor, or harmless.
#[test]
fn extreme_states_do_no_harm() {
    let model = model();
    let mut session = learning_session(&model);
    session
        .calibrate(&chance(5, N_VOCAB).take(200).collect::<Vec<_>>())
        .unwrap();
    observe_all(&mut session, &phrases(7).take(400).collect::<Vec<_>>());
    let bytes = session.learner().unwrap().to_bytes().unwrap();
    let gguf = Gguf::from_bytes(bytes.clone()).unwrap();
    let (mut refused, mut loaded) = (0, 0);
    let mut attempt = |name: &str, at: usize, n: usize, value: &[u8]| {
        let mut damaged = bytes.clone();
        damaged[at..at + n]
            .chunks_exact_mut(value.len())
            .for_each(|old| old.copy_from_slice(value));
        match Learner::from_bytes(damaged, &model) {
            Ok(learner) => {
                loaded += 1;
                goes_on(&mut session, learner);
                true
            }
            Err(LearnError::Value { name: found, .. }) => {
                assert_eq!(found, name);
                refused += 1;
                false
            }
            Err(error) => panic!("{name}: {error}"),
        }
    };
    let both = |values: [f64; 8]| values.into_iter().flat_map(|x| [x, -x]);
    for tensor in gguf.tensors() {
        for value in both([1e300, 1e38, 9e14, 1e10, 65504.0, 1e-7, 1e-44, 0.0]) {
            let bytes = match tensor.dtype {
                DType::F32 => (value as f32).to_le_bytes().to_vec(),
                DType::F64 => value.to_le_bytes().to_vec(),
                DType::F16 => half::f16::from_f64(value).to_le_bytes().to_vec(),
                _ => continue,
            };
            // One value among the others, and all.
            for n in [bytes.len(), tensor.n_bytes as usize] {
                let taken = attempt(&tensor.name, tensor.offset as usize, n, &bytes);
                assert!(!taken || value.abs() < 1e38, "{} of {value}", tensor.name);
            }
        }
    }
    for key in [
        "learned.evidence.sum",
        "learned.evidence.squares",
        "learned.losses.base",
        "learned.losses.mixture",
    ] {
        for value in both([f64::MAX, 1e300, 1e200, 1e150, 1.0, 1e-150, 1e-300, 0.0]) {
            // A key is followed by the type of its value, 4 bytes.
            let at = bytes
                .windows(key.len())
                .position(|w| w == key.as_bytes())
                .unwrap()
                + key.len()
                + 4;
            attempt(key, at, 8, &value.to_le_bytes());
        }
    }
    println!("{refused} refused, {loaded} loaded");
    assert!(refused > 20 && loaded > 20);
}

/// Makes the seeds of the fuzz target `learn_state`.
#[test]
#[ignore = "writes into the source tree"]
fn write_fuzz_seeds() {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let model = Model::open(root.join("tests/data/peft/qwen2.gguf")).unwrap();
    let folder = root.join("fuzz/seeds/learn_state");
    std::fs::create_dir_all(&folder).unwrap();
    let options = LearnerOptions {
        neighbours: 64,
        cache_tokens: 64,
        ..options()
    };
    let learner = Learner::new(&model, &options).unwrap();
    learner.save(folder.join("empty.gguf")).unwrap();
    let mut session = session(&model);
    session.set_learner(learner).unwrap();
    let n_vocab = model.hparams().n_vocab;
    session
        .calibrate(&chance(5, n_vocab).take(64).collect::<Vec<_>>())
        .unwrap();
    observe_all(&mut session, &chance(7, 6).take(96).collect::<Vec<_>>());
    session
        .learner()
        .unwrap()
        .save(folder.join("learnt.gguf"))
        .unwrap();
    // An adapter as large as it may be.
    let mut bytes = session.learner().unwrap().to_bytes().unwrap();
    let gguf = Gguf::from_bytes(bytes.clone()).unwrap();
    for name in ["head.a", "head.b"] {
        let tensor = gguf.tensor(name).unwrap();
        let values = &mut bytes[tensor.offset as usize..][..tensor.n_bytes as usize];
        values
            .chunks_exact_mut(4)
            .for_each(|x| x.copy_from_slice(&1e15f32.to_le_bytes()));
    }
    std::fs::write(folder.join("extreme.gguf"), bytes).unwrap();
}

const STATE: &str = "RUVLLM_TEST_STATE";

/// Saves without end; run by the test below, in a process of its own.
#[test]
#[ignore = "a helper of the next test"]
fn save_for_ever() {
    let Some(path) = std::env::var_os(STATE) else {
        return;
    };
    let model = model();
    let mut session = learning_session(&model);
    for seed in 0.. {
        session.clear();
        session
            .observe(&chance(seed, N_VOCAB).take(32).collect::<Vec<_>>())
            .unwrap();
        session.learner().unwrap().save(&path).unwrap();
    }
}

#[test]
fn killed_while_saving_leaves_a_whole_file() {
    let model = model();
    let folder = std::env::temp_dir().join(format!("ruvllm-learn-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path: PathBuf = folder.join("learned.gguf");
    for round in 0..12u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "learn::save_for_ever", "--ignored"])
            .env(STATE, &path)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        while !path.exists() {
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_millis(3 + 7 * round % 31));
        child.kill().unwrap();
        child.wait().unwrap();
        Learner::open(&path, &model).unwrap();
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// What the table of `docs/lab/learning.md` claims of whole streams, with a margin, on the
/// beginning of each: it takes seconds, and an adapter has learnt less by then.
#[test]
fn the_shipped_model_learns() {
    let (model, tokens) = shipped();
    let control = tokens("models/demo-heldout.txt");
    let streams = [
        ("bakery-papers", true),
        ("river-station", false),
        ("project-docs", false),
    ];
    for (name, deep_controls) in streams.into_iter().take(if long() { 3 } else { 1 }) {
        let deep_controls = deep_controls && long();
        let stream = tokens(&format!("tests/data/{name}.txt"));
        let options = LearningOptions {
            n_bootstrap: 500,
            deep_controls,
            ..Default::default()
        };
        let report = learning(&model, &stream[..6144], &control, &options).unwrap();
        let gain = |name: &str| report.contender(name).unwrap().gain;
        // Nats per token: 0.02 are 2 % of perplexity, 0.05 are 5 %; whole streams have 0.033 and
        // 0.157 or more.
        for (name, least) in [
            ("head adapter, rank 4", 0.02),
            ("mixture", 0.25),
            ("last quarter of the layers, backpropagation", 0.05),
        ] {
            let gain = gain(name);
            assert!(gain.value > least && gain.low > 0.0, "{name}: {gain:?}");
        }
        // The bootstrap's middle; with the control text's own noise the upper end is about 0.3 %
        // higher.
        for contender in report.contenders.iter().filter(|c| !c.negative) {
            let Some(forgetting) = contender.forgetting else {
                continue;
            };
            assert!(
                forgetting.loss.value < 0.005,
                "{}: {forgetting:?}",
                contender.name
            );
        }
        for negative in report.contenders.iter().filter(|c| c.negative) {
            assert!(
                negative.gain.value < 0.005,
                "{}: {:?}",
                negative.name,
                negative.gain
            );
        }
        let base = report.contender("base").unwrap().loss;
        for mixture in report
            .contenders
            .iter()
            .filter(|c| c.name.starts_with("mixture"))
        {
            let more = (mixture.loss - base) * report.n_tokens as f64;
            assert!(more <= std::f64::consts::LN_2, "{}: {more}", mixture.name);
        }
        // More than how sure to be, and than which words are frequent.
        for name in [
            "head adapter, rank 4",
            "mixture",
            "last quarter of the layers, backpropagation",
        ] {
            let contender = report.contender(name).unwrap();
            for beyond in [contender.beyond_temperature, contender.beyond_words]
                .into_iter()
                .flatten()
            {
                println!("{name}: {beyond:?}");
                assert!(beyond.low > 0.0, "{name}: {beyond:?}");
            }
        }
        // What does harm is soon noticed.
        if let Some(harm) = report.contender("control: backpropagation of the opposite") {
            let judged = report
                .contender("control: backpropagation of the opposite, while it helps")
                .unwrap();
            assert!(
                harm.gain.value < -0.05 && judged.gain.value.abs() < 0.005,
                "{harm:?} {judged:?}"
            );
        }
    }
}

/// What a rating means decides what is learnt: answers of one text rated good and of another bad,
/// the other way round, and without regard to the text.
#[test]
fn a_flipped_rating_teaches_the_opposite() {
    let (model, tokens) = shipped();
    let control = tokens("models/demo-heldout.txt");
    let texts = [
        "tests/data/bakery-papers.txt",
        "tests/data/river-station.txt",
    ]
    .map(tokens);
    // Nats per token by which the first text is likelier than the second, where neither was rated.
    let preference = |session: &mut Session| -> f64 {
        let mut mean = |text: &[u32]| {
            let mut sum = 0.0;
            for piece in text[4096..5120].chunks(128) {
                session.clear();
                sum += session.record(piece).unwrap().adapter;
            }
            sum / 1024.0
        };
        mean(&texts[1]) - mean(&texts[0])
    };
    let learnt = |answers: usize, reward: &dyn Fn(usize, usize) -> f32| {
        let mut session = session(&model);
        session
            .set_learner(Learner::new(&model, &LearnerOptions::default()).unwrap())
            .unwrap();
        session.calibrate(&control[..4096]).unwrap();
        let before = preference(&mut session.fork().unwrap());
        for answer in 0..answers {
            for (which, text) in texts.iter().enumerate() {
                let piece = &text[answer * 64..][..64];
                session.clear();
                session.prefill(&piece[..32]).unwrap();
                for &token in &piece[32..] {
                    session.decode(token).unwrap();
                }
                session.feedback(reward(answer, which)).unwrap();
            }
        }
        let saved = session.learner().unwrap().to_bytes().unwrap();
        let after = preference(&mut session);
        (after - before, saved)
    };
    let sign = |which: usize| if which == 0 { 1.0 } else { -1.0 };
    let (right, _) = learnt(48, &|_, which| sign(which));
    let (flipped, _) = learnt(48, &|_, which| -sign(which));
    let (regardless, _) = learnt(48, &|answer, _| if answer % 2 == 0 { 1.0 } else { -1.0 });
    println!(
        "preference by ratings {right:+.4}, flipped {flipped:+.4}, regardless of the text {regardless:+.4}"
    );
    assert!(right > 0.0 && flipped < 0.0, "{right} {flipped}");
    assert!(regardless.abs() < 0.5 * right.min(-flipped), "{regardless}");
    // The first rating is compared with 0, the others with what is usual.
    let (unmoved, never) = learnt(4, &|_, _| 0.0);
    assert_eq!(unmoved, 0.0);
    assert_eq!(Learner::from_bytes(never, &model).unwrap().n_updates(), 0);
    let (_, once) = learnt(4, &|_, _| 1.0);
    assert_eq!(Learner::from_bytes(once, &model).unwrap().n_updates(), 1);
}

/// Half and double the rates that were chosen while looking at two of the texts:
/// `cargo test --release --test it -- --ignored --nocapture half_and_double`.
#[test]
#[ignore = "measures"]
fn half_and_double_rates() {
    let (model, tokens) = shipped();
    let control = tokens("models/demo-heldout.txt");
    let row = |name: &str, factor: f32| {
        let rates = LearningOptions {
            n_threads: std::num::NonZeroUsize::new(1),
            deep_controls: false,
            ..Default::default()
        };
        let rates = LearningOptions {
            head_rate: factor,
            deep_rate: factor * rates.deep_rate,
            ..rates
        };
        let report = learning(
            &model,
            &tokens(&format!("tests/data/{name}.txt")),
            &control,
            &rates,
        )
        .unwrap();
        let mut row = format!("| {name}, rates times {factor} |");
        for name in [
            "head adapter, rank 4",
            "mixture",
            "last quarter of the layers, backpropagation",
        ] {
            let Contender {
                gain, forgetting, ..
            } = report.contender(name).unwrap();
            let [value, low, high] =
                [gain.value, gain.high, gain.low].map(|nats| 100.0 * (-nats).exp_m1());
            row += &format!(" {value:+.1} % ({low:+.1} to {high:+.1})");
            row += &forgetting.map_or(" |".into(), |f| {
                format!(" | {:+.2} % |", 100.0 * f.loss.value.exp_m1())
            });
        }
        println!("{row}");
    };
    std::thread::scope(|scope| {
        for name in ["river-station", "project-docs", "bakery-papers"] {
            for factor in [0.5, 2.0] {
                let row = &row;
                scope.spawn(move || row(name, factor));
            }
        }
    });
}

fn shipped() -> (Model, impl Fn(&str) -> Vec<u32>) {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let model = Model::open(root.join("models/ruvllm-rust-6m-q8_0.gguf")).unwrap();
    let tokenizer = Model::open(root.join("models/ruvllm-rust-6m-q8_0.gguf")).unwrap();
    let tokens = move |path: &str| {
        let text = std::fs::read_to_string(root.join(path)).unwrap();
        tokenizer.tokenizer().unwrap().encode(&text, true, false)
    };
    (model, tokens)
}

/// Lets a session observe a text 64 tokens at a time, each behind 64 others; the losses of all.
fn observe_text(session: &mut Session, text: &[u32]) -> Losses {
    let mut total = Losses::default();
    for piece in text.chunks(64) {
        if session.position() + piece.len() > 128 {
            session.clear();
        }
        total += session.observe(piece).unwrap();
    }
    total
}

/// Days of another domain must not cost much when ordinary text comes back, though the base model's
/// weight has fallen to nothing by then.
#[test]
fn ordinary_text_after_a_domain() {
    let (model, tokens) = shipped();
    let (river, control) = (
        tokens("tests/data/river-station.txt"),
        tokens("models/demo-heldout.txt"),
    );
    let (known, unknown) = control.split_at(control.len() / 2);
    let mut session = session(&model);
    session
        .set_learner(Learner::new(&model, &LearnerOptions::default()).unwrap())
        .unwrap();
    session.calibrate(known).unwrap();
    let domain = observe_text(&mut session, &river[..4096]);
    assert!(session.learner().unwrap().scale() > 0.0);
    let back = observe_text(&mut session, &unknown[..2048]);
    println!("{domain:?}\n{back:?}");
    assert!(domain.mixture < 0.8 * domain.base, "{domain:?}");
    assert!(back.adapter < back.base + 0.005 * back.n as f64, "{back:?}");
    assert!(back.mixture < back.base + 0.02 * back.n as f64, "{back:?}");
    let all = session.learner().unwrap().losses();
    assert_eq!(all.n, domain.n + back.n);
    assert!(all.mixture <= all.base + std::f64::consts::LN_2);
    // What was learnt from goes on counting where it is read again.
    let bytes = session.learner().unwrap().to_bytes().unwrap();
    assert_eq!(Learner::from_bytes(bytes, &model).unwrap().losses(), all);
}

/// The mean rise of the loss on a text by the adapter, in nats per token; nothing is learnt from
/// it.
fn rise(session: &Session, text: &[u32]) -> f64 {
    let mut session = session.fork().unwrap();
    let mut total = Losses::default();
    for piece in text.chunks(128) {
        session.clear();
        total += session.record(piece).unwrap();
    }
    (total.adapter - total.base) / total.n as f64
}

/// Text that is meant to do harm costs less than ln 2 nats in all, does not reach control text, and
/// is overcome within 500 tokens of what was learnt before.
#[test]
fn a_stream_that_attacks_does_no_lasting_harm() {
    let (model, tokens) = shipped();
    let (river, control) = (
        tokens("tests/data/river-station.txt"),
        tokens("models/demo-heldout.txt"),
    );
    let (known, unknown) = control.split_at(control.len() / 2);
    let n_poison = if long() { 100_000 } else { 1000 };
    let n_vocab = model.hparams().n_vocab;
    // The opposite: what followed a word follows it no more, but something else each time.
    let opposite = |seed: u64| river[..4096].iter().zip(chance(seed, n_vocab)).enumerate();
    let opposite =
        |seed| opposite(seed).map(|(i, (&token, other))| if i % 2 == 0 { token } else { other });
    let attacks: [(&str, Vec<u32>); 3] = [
        ("gibberish", chance(9, n_vocab).take(n_poison).collect()),
        (
            "opposite",
            (0..).flat_map(opposite).take(n_poison).collect(),
        ),
        (
            "one word",
            [river[100]].into_iter().cycle().take(n_poison).collect(),
        ),
    ];
    let mut taught = session(&model);
    taught
        .set_learner(Learner::new(&model, &LearnerOptions::default()).unwrap())
        .unwrap();
    taught.calibrate(known).unwrap();
    observe_text(&mut taught, &river[..4096]);
    for (name, attack) in attacks {
        let mut session = taught.fork().unwrap();
        session.clear();
        for piece in attack.chunks(1000) {
            observe_text(&mut session, piece);
            let total = session.learner().unwrap().losses();
            let rounding = 1e-9 * total.n as f64;
            assert!(
                total.mixture <= total.base + std::f64::consts::LN_2 + rounding,
                "{name}: {total:?}"
            );
        }
        let risen = rise(&session, unknown);
        assert!(
            risen <= 0.003,
            "{name}: control text rises by {risen} nats per token"
        );
        let fresh = observe_text(&mut taught.fork().unwrap(), &river[4096..5120]);
        session.clear();
        observe_text(&mut session, &river[4096..4596]);
        let after = observe_text(&mut session, &river[4596..5120]);
        println!(
            "{name}: control {risen:+.5}, river afterwards {after:?}, without the attack {fresh:?}"
        );
        assert!(after.mixture < after.base, "{name}: {after:?}");
    }
}

/// However wrong ratings are, control text stays within the bound.
#[test]
fn ratings_never_reach_control_text() {
    let (model, tokens) = shipped();
    let (river, control) = (
        tokens("tests/data/river-station.txt"),
        tokens("models/demo-heldout.txt"),
    );
    let (known, unknown) = control.split_at(control.len() / 2);
    let reward = |name: &str, i: usize| match name {
        "good" => 1.0,
        "bad" => -1.0,
        "contradictory" => [1.0, -1.0][i % 2],
        "equal" => 0.5,
        _ => [-1e30, 1e30, 1e30][i % 3],
    };
    let mut fresh = session(&model);
    fresh
        .set_learner(Learner::new(&model, &LearnerOptions::default()).unwrap())
        .unwrap();
    fresh.calibrate(known).unwrap();
    for name in ["good", "bad", "contradictory", "equal", "huge"] {
        let mut session = fresh.fork().unwrap();
        for i in 0..20 {
            // Each text is rated twice.
            let piece = &river[i / 2 * 64..][..64];
            session.clear();
            session.prefill(&piece[..32]).unwrap();
            for &token in &piece[32..] {
                session.decode(token).unwrap();
            }
            session.feedback(reward(name, i)).unwrap();
            let learner = session.learner().unwrap();
            assert!(
                learner.divergence() <= learner.options().max_divergence,
                "{name} {i}"
            );
            if [1, 5, 20].contains(&(i + 1)) {
                let risen = rise(&session, &unknown[..2048]);
                println!("{name}, {} ratings: control {risen:+.5}", i + 1);
                assert!(
                    risen <= 0.003,
                    "{name}, {} ratings: control text rises by {risen} nats per token",
                    i + 1
                );
            }
        }
    }
}

/// However much is learnt, memory stays what it was, numbers stay numbers, and files say it to the
/// bit.
#[test]
fn many_updates() {
    let model = model();
    let mut session = learning_session(&model);
    session
        .calibrate(&chance(5, N_VOCAB).take(200).collect::<Vec<_>>())
        .unwrap();
    let n = if long() { 100_000 } else { 1000 };
    let (mut stream, mut noise) = (phrases(7), chance(8, N_VOCAB));
    let mut full = 0;
    for i in 0..n {
        let piece: Vec<u32> = match i / 500 % 2 {
            0 => stream.by_ref().take(4).collect(),
            _ => noise.by_ref().take(4).collect(),
        };
        if session.position() + piece.len() > session.sequence().n_ctx() {
            session.clear();
        }
        session.observe(&piece).unwrap();
        if i % (n / 10) == n / 10 - 1 {
            let learner = session.learner().unwrap();
            assert!(
                learner.n_updates() > i / 2
                    && learner.divergence() <= learner.options().max_divergence
            );
            let bytes = learner.to_bytes().unwrap();
            assert!(
                Learner::from_bytes(bytes.clone(), &model)
                    .unwrap()
                    .to_bytes()
                    .unwrap()
                    == bytes
            );
            // All caches are full by the second time, but for the beginnings of texts between their
            // tokens.
            full = if i < n / 5 {
                full.max(bytes.len())
            } else {
                full
            };
            assert!(
                i < n / 5 || bytes.len() <= full + full / 50,
                "{} {full}",
                bytes.len()
            );
        }
    }
    let total = session.learner().unwrap().losses();
    assert!(
        total.mixture <= total.base + std::f64::consts::LN_2 + 1e-9 * total.n as f64,
        "{total:?}"
    );
}

/// Text in its order takes effect; the same tokens in another order never do, however well they are
/// learnt.
#[test]
fn what_has_no_order_teaches_nothing() {
    let (model, tokens) = shipped();
    let (river, control) = (
        tokens("tests/data/river-station.txt"),
        tokens("models/demo-heldout.txt"),
    );
    let river = &river[..2048];
    let mut shuffled = river.to_vec();
    for (i, random) in chance(1, usize::MAX >> 33)
        .enumerate()
        .take(shuffled.len())
        .skip(1)
    {
        shuffled.swap(i, random as usize % (i + 1));
    }
    for (text, learns) in [(river, true), (&shuffled[..], false)] {
        let mut session = session(&model);
        session
            .set_learner(Learner::new(&model, &LearnerOptions::default()).unwrap())
            .unwrap();
        session.calibrate(&control[..4096]).unwrap();
        let losses = observe_text(&mut session, text);
        let learner = session.learner().unwrap();
        assert!(learner.n_updates() > 20);
        assert_eq!(learner.scale() > 0.0, learns, "{losses:?}");
        assert_eq!(
            losses.adapter < losses.base - 0.02 * losses.n as f64,
            learns,
            "{losses:?}"
        );
    }
}

#[test]
fn a_rating_needs_something_to_compare_with() {
    let model = model();
    let mut session = learning_session(&model);
    session.prefill(&[1, 2]).unwrap();
    session.decode(3).unwrap();
    assert!(matches!(
        session.feedback(1.0),
        Err(LearnError::NothingToCompare)
    ));
    session
        .calibrate(&chance(5, N_VOCAB).take(200).collect::<Vec<_>>())
        .unwrap();
    let p = |session: &mut Session| {
        session.clear();
        let logits = session.prefilled(&[1, 2]);
        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        f64::from(logits[3]).exp() / sum
    };
    let before = p(&mut session);
    session.decode(3).unwrap();
    assert_eq!(session.feedback(0.0).unwrap(), 0.0);
    assert_eq!(p(&mut session), before, "neither good nor bad");
    session.decode(3).unwrap();
    session.feedback(1.0).unwrap();
    let after = p(&mut session);
    assert!(after > before, "the first rating counts: {before} {after}");
    session.decode(3).unwrap();
    session.feedback(-1.0).unwrap();
    assert!(p(&mut session) < after);
}

/// Text that says nothing about what was rated does not take it back, and has no effect without a
/// rating.
#[test]
fn a_rating_outlasts_text() {
    let model = model();
    for rated in [true, false] {
        let mut session = learning_session(&model);
        session
            .calibrate(&chance(5, N_VOCAB).take(200).collect::<Vec<_>>())
            .unwrap();
        if rated {
            session.prefill(&[1, 2]).unwrap();
            session.decode(3).unwrap();
            session.feedback(1.0).unwrap();
        }
        let (mut n, mut effective) = (0, 0);
        for piece in chance(11, N_VOCAB).take(640).collect::<Vec<_>>().chunks(32) {
            session.clear();
            session.observe(piece).unwrap();
            let learner = session.learner().unwrap();
            assert!(learner.divergence() <= learner.options().max_divergence);
            (n, effective) = (n + 1, effective + usize::from(learner.scale() > 0.0));
        }
        assert!(
            if rated {
                effective == n
            } else {
                effective < n / 4
            },
            "{rated}: {effective} of {n}"
        );
    }
}

/// Rests change nothing of what is learnt; who gives up has learnt nothing yet, and learns the same
/// later.
#[test]
fn slices_change_no_bit() {
    let model = Model::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    ))
    .unwrap();
    let tokens = model.tokenizer().unwrap().encode(
        include_str!("../../../tests/data/river-station.txt"),
        true,
        false,
    );
    let learnt = |rest: Option<usize>| {
        let mut session = session_on(
            &model,
            2,
            &SessionOptions {
                n_ctx: Some(1024),
                ..Default::default()
            },
        );
        session
            .set_learner(Learner::new(&model, &LearnerOptions::default()).unwrap())
            .unwrap();
        session.record(&tokens[..512]).unwrap();
        let mut n = 0;
        if let Some(most) = rest {
            // Gives up once, in the middle of the choice of directions.
            session
                .update_in_slices(&mut |_| {
                    n += 1;
                    n < most
                })
                .unwrap();
            assert_eq!((n, session.learner().unwrap().n_updates()), (most, 0));
            session.update_in_slices(&mut |_| true).unwrap();
        } else {
            session.update().unwrap();
        }
        session.record(&tokens[512..640]).unwrap();
        session.update().unwrap();
        assert!(session.learner().unwrap().n_updates() > 0);
        session.learner().unwrap().to_bytes().unwrap()
    };
    let whole = learnt(None);
    assert!(learnt(Some(1)) == whole && learnt(Some(4)) == whole);
}

/// Times that `docs/lab/learning.md` states:
/// `cargo test --release --test learning -- --ignored --nocapture learn::times`, on a machine that does nothing else.
#[test]
#[ignore = "measures"]
fn times_on_a_1b_shape() {
    use ruvllm::quant::FileType;
    use ruvllm_benches::{Shape, synthetic};
    let gguf = synthetic(
        &Shape::from_name("llama-1b").unwrap(),
        FileType::from_name("Q4_K_M").unwrap(),
    )
    .unwrap();
    let model = Model::from_gguf(gguf).unwrap();
    let n_vocab = model.hparams().n_vocab;
    let session_of = |n_threads| session_on(&model, n_threads, &SessionOptions::default());
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let mut learner = Some(Learner::new(&model, &LearnerOptions::default()).unwrap());
    for n_threads in [2, 1] {
        let mut session = session_of(n_threads);
        session.set_learner(learner.take().unwrap()).unwrap();
        if session.learner().unwrap().n_control() == 0 {
            session
                .calibrate(&chance(5, n_vocab).take(1024).collect::<Vec<_>>())
                .unwrap();
        }
        // A phrase that comes again and again, so that what is learnt takes effect.
        let phrase: Vec<u32> = chance(7, n_vocab).take(24).collect();
        let (mut updates, mut effects, mut longest, mut of_longest) =
            (Vec::new(), Vec::new(), 0.0f64, [0.0; 3]);
        for piece in 0..40 {
            session.clear();
            session
                .record(
                    &phrase
                        .iter()
                        .copied()
                        .cycle()
                        .skip(piece * 64)
                        .take(65)
                        .collect::<Vec<_>>(),
                )
                .unwrap();
            let start = std::time::Instant::now();
            let mut slices = Vec::new();
            session
                .update_in_slices(&mut |took| {
                    slices.push(took.as_secs_f64() * 1e3);
                    true
                })
                .unwrap();
            let took = start.elapsed().as_secs_f64() * 1e3;
            if took > longest {
                longest = took;
                slices.sort_by(f64::total_cmp);
                let at = |i: usize| slices.get(i).copied().unwrap_or(took);
                of_longest = [
                    slices.len() as f64,
                    at(slices.len() / 2),
                    at(slices.len().saturating_sub(1)),
                ];
            }
            if session.learner().unwrap().scale() > 0.0 {
                let [_, update, effect] = session.learner().unwrap().last_times();
                updates.push(update);
                effects.push(effect);
            }
        }
        println!(
            "{n_threads} threads: update of 64 tokens {:.2} ms, its effect {:.2} ms (medians of {}); with a choice of \
             directions {longest:.0} ms, in {} slices of {:.2} ms (median) and at most {:.2} ms",
            median(updates),
            median(effects.clone()),
            effects.len(),
            of_longest[0],
            of_longest[1],
            of_longest[2],
        );
        learner = session.take_learner();
    }
    // In turns, by the clock: a token takes milliseconds, which the system's accounts are too
    // coarse for.
    let mut sessions = [session_of(2), session_of(2)];
    sessions[1].set_learner(learner.take().unwrap()).unwrap();
    let mut times = [Vec::new(), Vec::new()];
    for token in 1..=100 {
        for (session, times) in sessions.iter_mut().zip(&mut times) {
            let start = std::time::Instant::now();
            session.decode(token).unwrap();
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    let [alone, with] = times.map(median);
    println!(
        "decode: {alone:.2} ms alone, {with:.2} ms with a learner: {:+.2} %",
        100.0 * (with / alone - 1.0)
    );
}

#[test]
fn a_panic_of_the_caller_loses_nothing_learnt() {
    let model = Model::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    ))
    .unwrap();
    let mut session = model.session().unwrap();
    session
        .set_learner(Learner::new(&model, &LearnerOptions::default()).unwrap())
        .unwrap();
    let panics = std::panic::AssertUnwindSafe(|| {
        session
            .hooks()
            .prefill_each(&[1, 2, 3], 0, |_, _| panic!("on purpose"))
    });
    assert!(std::panic::catch_unwind(panics).is_err());
    assert!(session.learner().is_some());
    session.observe(&[1, 2, 3]).unwrap();
}

#[test]
fn nothing_to_observe_is_no_tokens() {
    let model = Model::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    ))
    .unwrap();
    let mut session = model.session().unwrap();
    let nothing = |outcome| {
        matches!(
            outcome,
            Err(LearnError::Session(ruvllm::SessionError::NoTokens))
        )
    };
    assert!(nothing(session.observe(&[])));
    session
        .set_learner(Learner::new(&model, &LearnerOptions::default()).unwrap())
        .unwrap();
    assert!(nothing(session.observe(&[])));
}
