//! Several sequences in one pass, and several sessions on one engine.

use crate::run::{OnLevel, Pass, engine};
use crate::tiny::{N_VOCAB, Tiny};
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::arch::Arch;
use ruvllm::compute::{Cut, OutputHook, OutputRows, TokenKind};
use ruvllm::engine::{Outputs, Sequence, Slot};
use ruvllm::lora::Adapter;
use ruvllm::quant::DType;
use ruvllm::{CancelToken, Engine, SessionOptions};
use ruvllm::{Generation, Session, SessionError};
use std::sync::{Arc, Mutex};

fn options(n_ctx: usize) -> SessionOptions {
    SessionOptions {
        n_ctx: Some(n_ctx),
        kv_type: KvType::F32,
        ..Default::default()
    }
}

fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n)
        .map(|i| ((i * 31 + seed * 7 + i * i % 11) % N_VOCAB) as u32)
        .collect()
}

/// Numbers that look random, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }
}

#[test]
fn handles_go_anywhere() {
    fn anywhere<T: Send + Sync + 'static>() {}
    fn to_a_thread<T: Send + 'static>() {}
    anywhere::<Model>();
    anywhere::<Engine>();
    to_a_thread::<Session>();
    to_a_thread::<Sequence>();
    to_a_thread::<Generation>();
    to_a_thread::<Outputs>();
}

#[test]
fn a_pass_of_nothing_computes_nothing() {
    let engine = engine(&Tiny::ALL[0].model(DType::Q8_0), 1);
    let mut outputs = Outputs::default();
    assert!(
        engine
            .step(&mut [], &mut outputs, &CancelToken::default())
            .is_ok()
    );
}

/// On the scalar level a row's bits do not depend on who is computed beside it: prompts, single
/// tokens, adapters, and rows without logits of several sequences in one pass give what each gives
/// alone.
#[test]
fn a_pass_of_many_equals_passes_of_each() {
    for tiny in Tiny::ALL {
        let model = tiny.model(DType::Q8_0).on(Arch::scalar());
        let mut adapter = Adapter::zeros(&model, 2, 1, |_| true).unwrap();
        adapter.terms_mut().for_each(|(i, term)| {
            let (a, b) = term.parts_mut();
            a.iter_mut()
                .chain(b)
                .enumerate()
                .for_each(|(j, x)| *x = ((i + j) % 7) as f32 * 0.01 - 0.03);
        });
        let adapter = Arc::new(adapter);
        for n_threads in [1, 2] {
            let engine = engine(&model, n_threads);
            // Lengths of what each has, of what it is given, and from where on logits are wanted.
            let cases = [
                (0, 70, 69),
                (5, 1, 0),
                (130, 1, 0),
                (3, 4, 0),
                (64, 2, 2),
                (1, 1, 0),
                (20, 1, 1),
            ];
            let mut sequences: Vec<Sequence> = cases
                .iter()
                .map(|_| engine.sequence(&options(256)).unwrap())
                .collect();
            for (i, seq) in sequences.iter_mut().enumerate().filter(|(i, _)| i % 2 == 1) {
                seq.attach(Arc::clone(&adapter), 1.0 + i as f32).unwrap();
            }
            let (mut outputs, cancel) = (Outputs::default(), CancelToken::default());
            let mut expected = Vec::new();
            for (i, (seq, &(n_past, n, first))) in sequences.iter_mut().zip(&cases).enumerate() {
                if n_past > 0 {
                    let past = tokens(n_past, i);
                    engine
                        .step(
                            &mut [Slot::new(seq, &past, TokenKind::Prompt)],
                            &mut outputs,
                            &cancel,
                        )
                        .unwrap();
                }
                let new = tokens(n, i + 10);
                let mut alone = seq.fork().unwrap();
                let slot = Slot::new(&mut alone, &new, TokenKind::Prompt).outputs_from(first);
                engine.step(&mut [slot], &mut outputs, &cancel).unwrap();
                expected.push(outputs.logits(0).to_vec());
                assert_eq!(expected[i].len(), (n - first) * N_VOCAB);
            }
            let new: Vec<Vec<u32>> = cases
                .iter()
                .enumerate()
                .map(|(i, &(_, n, _))| tokens(n, i + 10))
                .collect();
            let slots = sequences.iter_mut().zip(&new).zip(&cases);
            let mut slots: Vec<Slot<'_>> = slots
                .map(|((seq, new), &(_, _, first))| {
                    Slot::new(seq, new, TokenKind::Prompt).outputs_from(first)
                })
                .collect();
            engine.step(&mut slots, &mut outputs, &cancel).unwrap();
            for (i, expected) in expected.iter().enumerate() {
                assert_eq!(
                    outputs.logits(i),
                    expected,
                    "{tiny:?}, {n_threads} threads, slot {i}"
                );
            }
            drop(slots);
            // And they go on as if each had been alone.
            for (i, seq) in sequences.iter_mut().enumerate() {
                assert_eq!(seq.position(), cases[i].0 + cases[i].1);
                let all = seq.tokens().to_vec();
                let mut fresh = engine.sequence(&options(256)).unwrap();
                if i % 2 == 1 {
                    fresh.attach(Arc::clone(&adapter), 1.0 + i as f32).unwrap();
                }
                let all = [&all[..], &[5]].concat();
                engine
                    .step(
                        &mut [Slot::new(&mut fresh, &all, TokenKind::Prompt)],
                        &mut outputs,
                        &cancel,
                    )
                    .unwrap();
                let expected = outputs.logits(0).to_vec();
                engine
                    .step(
                        &mut [Slot::new(seq, &[5], TokenKind::Generated)],
                        &mut outputs,
                        &cancel,
                    )
                    .unwrap();
                assert_eq!(outputs.logits(0), expected, "{tiny:?} slot {i}");
            }
        }
    }
}

/// On every level, whose products of few rows may round differently.
#[test]
fn passes_of_many_are_close_on_every_level() {
    for arch in Arch::available() {
        let model = Tiny::Llama.model(DType::F32).on(arch);
        let engine = engine(&model, 2);
        let (mut outputs, cancel) = (Outputs::default(), CancelToken::default());
        let mut sequences: Vec<Sequence> = (0..8)
            .map(|_| engine.sequence(&options(128)).unwrap())
            .collect();
        let prompts: Vec<Vec<u32>> = (0..8).map(|i| tokens(3 + 5 * i, i)).collect();
        let mut slots: Vec<Slot<'_>> = sequences
            .iter_mut()
            .zip(&prompts)
            .map(|(seq, p)| Slot::new(seq, p, TokenKind::Prompt))
            .collect();
        engine.step(&mut slots, &mut outputs, &cancel).unwrap();
        drop(slots);
        let together: Vec<f32> = (0..8).flat_map(|i| outputs.logits(i).to_vec()).collect();
        let mut alone = Vec::new();
        for prompt in &prompts {
            alone.extend(
                engine
                    .session_with(&options(128))
                    .unwrap()
                    .prefilled(prompt),
            );
        }
        let apart = together
            .iter()
            .zip(&alone)
            .fold(0.0f32, |max, (a, b)| max.max((a - b).abs()));
        assert!(apart < 1e-4, "{arch:?}: {apart}");
    }
}

#[test]
fn a_pass_that_fails_changes_nothing() {
    let (model, other) = (Tiny::Llama.model(DType::F32), Tiny::Llama.model(DType::F32));
    let engine = engine(&model, 1);
    let (mut outputs, cancel) = (Outputs::default(), CancelToken::default());
    let mut a = engine.sequence(&options(16)).unwrap();
    let mut b = crate::run::engine(&other, 1)
        .sequence(&options(16))
        .unwrap();
    let mut step = |a: &mut Sequence, new: &[u32]| {
        engine.step(
            &mut [Slot::new(a, new, TokenKind::Prompt)],
            &mut outputs,
            &cancel,
        )
    };
    step(&mut a, &[1, 2, 3]).unwrap();
    assert!(matches!(step(&mut b, &[1]), Err(SessionError::OtherModel)));
    assert!(matches!(step(&mut a, &[]), Err(SessionError::NoTokens)));
    assert!(matches!(
        step(&mut a, &[1; 14]),
        Err(SessionError::ContextFull {
            n_ctx: 16,
            n_past: 3,
            n_new: 14
        })
    ));
    assert!(matches!(
        step(&mut a, &[N_VOCAB as u32]),
        Err(SessionError::TokenOutOfRange { .. })
    ));
    assert_eq!((a.position(), b.position()), (3, 0));
    cancel.cancel();
    let cancelled = engine.step(
        &mut [Slot::new(&mut a, &[4], TokenKind::Prompt)],
        &mut outputs,
        &cancel,
    );
    assert!(matches!(cancelled, Err(SessionError::Cancelled)));
    assert_eq!(a.tokens(), [1, 2, 3]);
}

/// Two thousand random operations on some sessions of one engine, with and without a window: each
/// goes on as a session that never did anything else, and pages come back.
#[test]
fn random_operations_leave_no_trace() {
    let n_operations = if crate::common::emulated() { 100 } else { 2000 };
    for tiny in [Tiny::Llama, Tiny::Gemma2] {
        let model = tiny.model(DType::F32).on(Arch::scalar());
        let (engine, reference) = (engine(&model, 1), engine(&model, 1));
        let new = |engine: &Engine, n_batch| {
            engine
                .session_with(&SessionOptions {
                    n_batch,
                    ..options(300)
                })
                .unwrap()
        };
        let mut sessions: Vec<Session> = (0..3).map(|i| new(&engine, [7, 64, 512][i])).collect();
        let mut random = Random(tiny as u64 + 1);
        for operation in 0..n_operations {
            let i = random.below(sessions.len());
            let n_sessions = sessions.len();
            let session = &mut sessions[i];
            let room = session.sequence().n_ctx() - session.position();
            match random.below(10) {
                0..3 if room > 1 => session
                    .prefill(&tokens(1 + random.below(room.min(90)), operation))
                    .unwrap(),
                3..6 if room > 0 => session.decode(random.below(N_VOCAB) as u32).unwrap(),
                6 => session
                    .rewind(random.below(session.position() + 1))
                    .unwrap(),
                7 if n_sessions < 6 => {
                    let fork = session.fork().unwrap();
                    assert_eq!(fork.tokens(), session.tokens());
                    sessions.push(fork);
                    continue;
                }
                7 if n_sessions > 1 => {
                    sessions.swap_remove(i);
                    continue;
                }
                8 => {
                    let mut other = session.tokens().to_vec();
                    if !other.is_empty() {
                        let at = random.below(other.len());
                        other[at] = (other[at] + 1) % N_VOCAB as u32;
                    }
                    session.cache().keep(&other);
                }
                9 if random.below(4) == 0 => session.clear(),
                _ => continue,
            }
            if operation % 20 == 0
                && session.position() > 0
                && session.position() < session.sequence().n_ctx()
            {
                let all = [session.tokens(), &[9]].concat();
                let expected = new(&reference, 512).prefilled(&all);
                assert!(
                    session.fork().unwrap().decoded(9) == expected,
                    "{tiny:?} after operation {operation}"
                );
            }
        }
        let stats = engine.pool().stats();
        assert!(stats.used > 0, "{stats:?}");
        drop(sessions);
        let stats = engine.pool().stats();
        assert_eq!((stats.used, stats.n_pages), (0, 0), "{tiny:?}");
    }
}

/// A hook that notes what it sees.
#[derive(Default)]
struct Noting(Arc<Mutex<Vec<String>>>);

impl OutputHook for Noting {
    fn rows(&mut self, rows: OutputRows<'_>) {
        let n = rows.tokens.len() - rows.first;
        assert_eq!(rows.logits.len(), n * N_VOCAB);
        assert_eq!(rows.states.len() % n.max(1), 0);
        self.0.lock().unwrap().push(format!(
            "{}..{} {:?}",
            rows.start,
            rows.tokens.len(),
            rows.kind
        ));
        rows.logits.fill(7.0);
    }

    fn cut(&mut self, cut: Cut) {
        self.0.lock().unwrap().push(format!("{cut:?}"));
    }

    fn fork(&self) -> Box<dyn OutputHook> {
        Box::<Noting>::default()
    }
}

#[test]
fn a_hook_sees_every_pass_and_makes_the_logits() {
    let model = Tiny::Llama.model(DType::F32);
    let engine = engine(&model, 1);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let mut hooked = engine.session_with(&options(64)).unwrap();
    hooked.hooks().set(Box::new(Noting(Arc::clone(&seen))));
    assert!(hooked.prefilled(&[1, 2, 3]).iter().all(|&x| x == 7.0));
    assert!(hooked.decoded(4).iter().all(|&x| x == 7.0));
    hooked.rewind(2).unwrap();
    assert_eq!(
        *seen.lock().unwrap(),
        ["0..3 Prompt", "3..4 Generated", "Rewound"]
    );
    assert!(
        hooked.sequence().hook::<Noting>().is_some()
            && hooked.fork().unwrap().sequence().hook::<Noting>().is_some()
    );
    assert!(hooked.hooks().take::<Noting>().is_some());
    assert!(hooked.decoded(4).iter().any(|&x| x != 7.0));
}
