//! Digests of what learners, trainings and folders of requests have learnt.

use super::compare::{Case, Group, Item};
use super::passes::{Folder, bytes, is_causal, tokens};
use crate::run::{Pass, engine};
use ruvllm::SessionError;
use ruvllm_learn::LearnError;
use ruvllm_learn::sona::{Sona, Trajectory};
use ruvllm_learn::train::{Example, TrainOptions, Trainer};
use ruvllm_learn::{Learner, LearnerOptions, Learning};

pub(super) const GROUPS: [Group; 3] = [
    Group {
        compute: learner,
        always: false,
    },
    Group {
        compute: training,
        always: false,
    },
    Group {
        compute: requests,
        always: false,
    },
];

pub(super) fn options() -> LearnerOptions {
    LearnerOptions {
        control_tokens: 64,
        recent_tokens: 64,
        cache_tokens: 256,
        neighbours: 64,
        ..Default::default()
    }
}

/// Numbers below `n`, by chance.
pub(super) fn chance(seed: u64, n: usize) -> impl Iterator<Item = u32> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize % n) as u32
    })
}

/// Two phrases, in turn by chance: which token comes is a matter of the one before.
pub(super) fn phrases(seed: u64) -> impl Iterator<Item = u32> {
    const PHRASES: [[u32; 4]; 2] = [[3, 14, 15, 9], [26, 5, 12, 8]];
    chance(seed, 2).flat_map(|i| PHRASES[i as usize])
}

/// The state of a learner that has observed text in pieces, with control text before; and the
/// logits that follow with it.
fn learner(case: &Case<'_>) -> Vec<Item> {
    if !is_causal(case.model) {
        return Vec::new();
    }
    let n_vocab = case.model.hparams().n_vocab;
    let mut session = engine(case.model, case.n_threads)
        .session_with(&case.options)
        .unwrap();
    session
        .set_learner(Learner::new(case.model, &options()).unwrap())
        .unwrap();
    session
        .calibrate(&chance(5, n_vocab).take(80).collect::<Vec<_>>())
        .unwrap();
    for piece in phrases(7).take(160).collect::<Vec<_>>().chunks(32) {
        session.clear();
        session.observe(piece).unwrap();
    }
    let state = session.learner().unwrap().to_bytes().unwrap();
    session.clear();
    let logits = session.prefilled(&tokens(case.model, 9, 0));
    vec![("learner", Some(state)), ("learnt", Some(bytes(&logits)))]
}

/// The checkpoint of a short training, with control text. Chunks are no part of its options.
fn training(case: &Case<'_>) -> Vec<Item> {
    if !is_causal(case.model) || case.options.n_batch != 7 {
        return Vec::new();
    }
    let examples: Vec<_> = (0..8)
        .map(|i| Example::completion(&[1, 7, 10 + i], &[11 + i, 2]))
        .collect();
    let control: Vec<u32> = chance(5, case.model.hparams().n_vocab).take(40).collect();
    let options = TrainOptions {
        rank: 2,
        rate: 0.02,
        epochs: 2.0,
        batch: 4,
        n_ctx: 32,
        ..Default::default()
    };
    let mut trainer = match Trainer::new(
        &engine(case.model, case.n_threads),
        &examples,
        &control,
        &options,
    ) {
        Err(LearnError::Session(SessionError::NoGradient { .. })) => {
            return vec![("training", None)];
        }
        trainer => trainer.unwrap(),
    };
    loop {
        match trainer.step() {
            Ok(Some(_)) => {}
            Ok(None) => break,
            Err(LearnError::Session(SessionError::NoGradient { .. })) => {
                return vec![("training", None)];
            }
            Err(e) => panic!("{}: {e}", case.name),
        }
    }
    let folder = Folder::new();
    std::fs::create_dir(&folder.0).unwrap();
    let path = folder.0.join("training.gguf");
    trainer.save(&path).unwrap();
    vec![("training", Some(std::fs::read(&path).unwrap()))]
}

/// What a folder of requests has learnt of them, as learner and as adapter. Its files are left out,
/// as they contain times.
fn requests(case: &Case<'_>) -> Vec<Item> {
    if !case.name.starts_with("tiny/") || case.options.n_batch != 7 {
        return Vec::new();
    }
    let (engine, folder) = (engine(case.model, case.n_threads), Folder::new());
    let sona = Sona::builder()
        .learner(options())
        .keep_text(true)
        .open(&folder.0, &engine)
        .unwrap();
    sona.calibrate(
        &chance(5, case.model.hparams().n_vocab)
            .take(1200)
            .collect::<Vec<_>>(),
    )
    .unwrap();
    for seed in 0..24 {
        let tokens: Vec<u32> = phrases(seed).take(64).collect();
        let request = Trajectory {
            session_id: "a".into(),
            n_prompt: tokens.len(),
            tokens,
            ..Default::default()
        };
        sona.record(request).unwrap();
    }
    sona.work().unwrap();
    let adapter = sona
        .adapter(&phrases(99).take(32).collect::<Vec<_>>())
        .unwrap();
    let adapter = adapter.map(|adapter| adapter.to_bytes().unwrap());
    vec![
        ("requests", Some(sona.learner().to_bytes().unwrap())),
        ("requests-adapter", adapter),
    ]
}
