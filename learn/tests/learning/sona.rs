//! Learning that goes on by itself, from outside.

use crate::common::long;
use crate::tiny::{N_VOCAB, Tiny};
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::compute::TokenKind;
use ruvllm::engine::{EngineOptions, Outputs, Sequence, Slot};
use ruvllm::lora::Adapter;
use ruvllm::quant::DType;
use ruvllm::{CancelToken, Engine, SessionOptions};
use ruvllm_learn::sona::SonaError;
use ruvllm_learn::sona::{EventKind, FolderOptions, Sona, SonaBuilder, SonaFolder, Trajectory};
use ruvllm_learn::{Learner, LearnerOptions, Learning, Losses};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A folder of its own for each test, gone afterwards.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "ruvllm-sona-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        Folder(std::env::temp_dir().join(name))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn engine() -> Engine {
    let model = Model::from_gguf(Tiny::Llama.parts(DType::Q8_0).gguf()).unwrap();
    Engine::new(
        &model,
        &EngineOptions {
            n_threads: 2.try_into().ok(),
            ..Default::default()
        },
    )
    .unwrap()
}

fn builder() -> SonaBuilder {
    let learner = LearnerOptions {
        control_tokens: 64,
        recent_tokens: 64,
        cache_tokens: 1024,
        neighbours: 256,
        ..Default::default()
    };
    Sona::builder().learner(learner).keep_text(true)
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

/// A first token of its own, then two phrases, in turn by chance.
fn phrases(seed: u64, phrases: [[u32; 4]; 2]) -> Vec<u32> {
    let first = (seed % N_VOCAB as u64) as u32;
    std::iter::once(first)
        .chain(chance(seed, 2).flat_map(|i| phrases[i as usize]))
        .take(96)
        .collect()
}

const PHRASES: [[u32; 4]; 2] = [[3, 14, 15, 9], [26, 5, 35, 8]];

fn request(session: &str, tokens: Vec<u32>) -> Trajectory {
    let (session_id, n_prompt) = (session.to_owned(), tokens.len());
    Trajectory {
        session_id,
        n_prompt,
        tokens,
        ..Default::default()
    }
}

/// Requests of a session that can be learnt from, with control text before.
fn teach(sona: &Sona, session: &str, n: u64) {
    for seed in 0..n {
        sona.record(request(session, phrases(seed, PHRASES)))
            .unwrap();
    }
}

/// As much as inner layers take.
fn control() -> Vec<u32> {
    chance(5, N_VOCAB).take(1200).collect()
}

fn all(folder: &SonaFolder) -> Vec<Trajectory> {
    let mut found = Vec::new();
    folder
        .trajectories(|trajectory| found.push(trajectory))
        .unwrap();
    found
}

fn open(path: &Path) -> SonaFolder {
    SonaFolder::open(path, &FolderOptions::default()).unwrap()
}

/// Everything that is recorded comes back, tokens only if the owner says so; others cannot read it.
#[test]
fn trajectories_are_recorded() {
    let engine = engine();
    for keep in [false, true] {
        let folder = Folder::new();
        let sona = builder()
            .keep_text(keep)
            .tenant("mill")
            .open(&folder.0, &engine)
            .unwrap();
        let sent = Trajectory {
            request_id: "r1".into(),
            session_id: "s1".into(),
            n_prompt: 3,
            n_answer: 2,
            query_embedding: vec![0.5, -1.0],
            response_embedding: vec![2.0],
            latency: Duration::from_millis(12),
            adapters: vec!["a".into(), "b".into()],
            timestamp: 77,
            tokens: vec![1, 2, 3, 4, 5],
            ..Default::default()
        };
        assert_eq!(sona.record(sent.clone()).unwrap(), 1);
        sona.rate("r1", 1.0).unwrap();
        sona.rate("r1", 0.25).unwrap();
        // The conversation goes on: what is known is not new.
        let next = Trajectory {
            n_prompt: 7,
            n_answer: 1,
            tokens: vec![1, 2, 3, 4, 9, 6, 7, 8],
            ..sent.clone()
        };
        sona.record(Trajectory {
            request_id: "r2".into(),
            ..next
        })
        .unwrap();
        assert!(matches!(
            sona.rate("r3", 1.0),
            Err(SonaError::NoSuchRequest { .. })
        ));
        assert!(matches!(
            sona.rate("r2", 1.5),
            Err(SonaError::Option { .. })
        ));
        let short = Trajectory {
            n_prompt: 1,
            tokens: vec![1, 2],
            ..Default::default()
        };
        assert!(matches!(
            sona.record(short),
            Err(SonaError::Trajectory { .. })
        ));
        let foreign = Trajectory {
            n_prompt: 1,
            tokens: vec![u32::MAX],
            ..Default::default()
        };
        assert!(matches!(
            sona.record(foreign),
            Err(SonaError::Trajectory { .. })
        ));
        // Nobody else has the folder open meanwhile.
        assert!(matches!(
            SonaFolder::open(&folder.0, &FolderOptions::default()),
            Err(SonaError::Locked { .. })
        ));
        drop(sona);
        let opened = open(&folder.0);
        let found = all(&opened);
        let tokens = if keep {
            sent.tokens.clone()
        } else {
            Vec::new()
        };
        assert_eq!(
            found[0],
            Trajectory {
                number: 1,
                tenant: "mill".into(),
                quality_score: Some(0.25),
                tokens,
                ..sent
            }
        );
        assert_eq!((found.len(), found[1].n_known, found[1].number), (2, 4, 2));
        let status = opened.status().unwrap();
        assert_eq!(
            (
                status.n_trajectories,
                status.n_rated,
                status.n_sessions,
                status.quality
            ),
            (2, 1, 1, 0.25)
        );
        assert_eq!(status.n_with_tokens, if keep { 2 } else { 0 });
        #[cfg(unix)]
        for entry in std::fs::read_dir(&folder.0).unwrap() {
            use std::os::unix::fs::PermissionsExt;
            let entry = entry.unwrap();
            assert_eq!(
                entry.metadata().unwrap().permissions().mode() & 0o077,
                0,
                "{entry:?}"
            );
        }
    }
}

/// What is recorded is learnt and takes effect, within the bound; its owner goes back, and forth,
/// and takes it elsewhere.
#[test]
fn what_helps_takes_effect_and_can_be_undone() {
    let (engine, folder) = (engine(), Folder::new());
    let sona = builder().open(&folder.0, &engine).unwrap();
    assert_eq!(sona.generation(), 0);
    sona.calibrate(&control()).unwrap();
    assert_eq!(sona.generation(), 1);
    assert!(sona.adapter(&PHRASES.concat()).unwrap().is_none());
    teach(&sona, "a", 24);
    sona.work().unwrap();
    let history = sona.history();
    let event = history.last().unwrap();
    assert_eq!(
        (event.kind, event.version, event.n_learnt[0], event.through),
        (EventKind::Accepted, 2, 24, 24)
    );
    let (n, before, after) = event.judged;
    assert!(n == 6 * 95 && after < before - 0.001, "{event:?}");
    assert!(event.divergence > 0.0 && event.divergence <= LearnerOptions::default().max_divergence);
    assert_eq!(sona.generation(), 2);
    // In effect the same way for sessions and for schedules.
    let adapter = sona.adapter(&PHRASES.concat()).unwrap().unwrap();
    let [mut learning, mut adapted] = [(); 2].map(|()| engine.session().unwrap());
    let mut learner = sona.learner();
    learner.set_topic(sona.topic(&PHRASES.concat()).unwrap());
    learning.set_learner(learner).unwrap();
    adapted.adapters().attach(adapter, 1.0).unwrap();
    for session in [&mut learning, &mut adapted] {
        session.prefill(&PHRASES[0]).unwrap();
    }
    let apart = learning
        .logits()
        .iter()
        .zip(adapted.logits())
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    // Two ways of rounding the same sums.
    assert!(apart < 1e-4, "{apart}");

    let learnt = sona.learner().to_bytes().unwrap();
    let file = folder.0.join("exported.gguf");
    sona.export(&file).unwrap();
    sona.rollback(1).unwrap();
    assert!(sona.generation() == 1 && sona.adapter(&PHRASES.concat()).unwrap().is_none());
    assert!(matches!(
        sona.rollback(9),
        Err(SonaError::NoSuchVersion { version: 9 })
    ));
    sona.rollback(2).unwrap();
    assert_eq!(sona.learner().to_bytes().unwrap(), learnt);
    sona.rollback(0).unwrap();
    assert!(sona.generation() == 0 && sona.adapter(&PHRASES.concat()).unwrap().is_none());
    sona.import(&file).unwrap();
    assert_eq!(
        (sona.generation(), sona.learner().to_bytes().unwrap()),
        (3, learnt.clone())
    );
    drop(sona);
    let sona = builder().open(&folder.0, &engine).unwrap();
    assert_eq!(
        (sona.generation(), sona.learner().to_bytes().unwrap()),
        (3, learnt)
    );
    assert_eq!(sona.n_pending(), (0, 0));
}

/// Text that contradicts what was learnt, or has no order, takes no effect, and is not learnt on.
#[test]
fn poison_takes_no_effect() {
    let (engine, folder) = (engine(), Folder::new());
    let sona = builder().open(&folder.0, &engine).unwrap();
    sona.calibrate(&control()).unwrap();
    teach(&sona, "a", 24);
    sona.work().unwrap();
    assert_eq!(sona.generation(), 2);
    let learnt = sona.learner().to_bytes().unwrap();
    for seed in 0..48 {
        sona.record(request(
            "poison",
            chance(100 + seed, N_VOCAB).take(96).collect(),
        ))
        .unwrap();
        sona.work().unwrap();
    }
    let kinds: Vec<_> = sona.history().iter().map(|event| event.kind).collect();
    // One at a time there is nothing to judge by.
    assert!(!kinds[2..].contains(&EventKind::Accepted), "{kinds:?}");
    assert_eq!(sona.learner().to_bytes().unwrap(), learnt);
    for seed in 0..64 {
        sona.record(request(
            "poison",
            chance(200 + seed, N_VOCAB).take(96).collect(),
        ))
        .unwrap();
    }
    sona.work().unwrap();
    let event = sona.history().pop().unwrap();
    assert!(event.judged.0 > 1000, "{event:?}");
    // What was learnt before may lose its effect on such text; nothing else comes of it.
    let is_unchanged = sona.learner().to_bytes().unwrap() == learnt;
    assert!(
        is_unchanged || sona.adapter(&PHRASES.concat()).unwrap().is_none(),
        "{event:?}"
    );
    assert!(event.divergence <= LearnerOptions::default().max_divergence);
}

/// Inner layers learn within the bound, what the order of words teaches; unless they are left
/// alone.
#[test]
fn inner_layers_learn() {
    let engine = engine();
    let learnt = |inner_layers: bool, shuffled: bool| {
        let folder = Folder::new();
        let learner = LearnerOptions {
            control_tokens: 1024,
            ..Default::default()
        };
        let sona = builder()
            .learner(learner)
            .inner_layers(inner_layers)
            .open(&folder.0, &engine)
            .unwrap();
        sona.calibrate(&control()).unwrap();
        for seed in 0..40 {
            let mut tokens = phrases(seed, PHRASES);
            if shuffled {
                let mut rng = chance(seed, tokens.len());
                (0..tokens.len()).for_each(|i| tokens.swap(i, rng.next().unwrap() as usize));
            }
            sona.record(request("a", tokens)).unwrap();
        }
        sona.work().unwrap();
        let (_, before, after) = sona.history().pop().unwrap().judged;
        (
            sona.adapter(&phrases(99, PHRASES)).unwrap(),
            sona.learner().divergence(),
            after - before,
        )
    };
    let has_layers = |adapter: &Adapter| {
        adapter
            .terms()
            .any(|(site, _)| adapter.sites()[site].layer().is_some())
    };
    assert!(!has_layers(&learnt(false, false).0.unwrap()));
    let (both, told, change) = learnt(true, false);
    let both = both.unwrap();
    let bound = LearnerOptions::default().max_divergence;
    assert!(
        has_layers(&both) && change < -0.01 && told <= bound,
        "{change} {told}"
    );
    assert!(
        !learnt(true, true)
            .0
            .is_some_and(|adapter| has_layers(&adapter))
    );
    // The mean divergence on control text of both together, from ln p of all tokens.
    let mut session = engine.session().unwrap();
    let predicted = |session: &mut Session| {
        let mut all = Vec::new();
        for window in control().chunks(64) {
            session.clear();
            session
                .hooks()
                .prefill_each(window, 0, |_, logits| {
                    let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
                    all.push(
                        logits
                            .iter()
                            .map(|&x| f64::from(x) - sum.ln())
                            .collect::<Vec<_>>(),
                    );
                })
                .unwrap();
        }
        all
    };
    let alone = predicted(&mut session);
    session.adapters().attach(both, 1.0).unwrap();
    let adapted = predicted(&mut session);
    let divergences = alone
        .iter()
        .zip(&adapted)
        .map(|(p, q)| p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>());
    let mean = divergences.sum::<f64>() / alone.len() as f64;
    println!("both together {mean:.5}, told {told:.5}, bound {bound}");
    // Head and layers are held to it on a part of the text each.
    assert!(mean > 0.0 && mean < 1.5 * bound, "{mean}");
}

/// Texts of two kinds get adapters of their own, which prompts choose; ordinary text chooses none.
/// Versions cover them.
#[test]
fn topics_have_adapters_of_their_own() {
    const OTHER: [[u32; 4]; 2] = [[40, 41, 42, 43], [44, 45, 46, 47]];
    let (engine, folder) = (engine(), Folder::new());
    let learner = LearnerOptions {
        control_tokens: 1024,
        ..Default::default()
    };
    let sona = builder().learner(learner).open(&folder.0, &engine).unwrap();
    sona.calibrate(&control()).unwrap();
    for seed in 0..32 {
        sona.record(request("a", phrases(seed, PHRASES))).unwrap();
        sona.record(request("b", phrases(seed, OTHER))).unwrap();
    }
    sona.work().unwrap();
    let topics = sona.learner().topics();
    assert_eq!(
        topics.iter().filter(|topic| topic.has_adapter).count(),
        2,
        "{topics:?}"
    );
    // A quarter is counted from the next batch on.
    assert!(
        topics.len() == 2 && topics.iter().all(|topic| topic.n_requests == 24),
        "{topics:?}"
    );
    let prompts = [PHRASES, OTHER].map(|kind| phrases(99, kind));
    let chosen = [0, 1].map(|i| sona.topic(&prompts[i]).unwrap());
    assert_eq!(chosen, [Some(topics[0].id), Some(topics[1].id)]);
    assert_eq!(sona.topic(&control()[..64]).unwrap(), None);
    // A long prompt, of which a sample is read, too.
    assert_eq!(sona.topic(&prompts[0].repeat(4)).unwrap(), chosen[0]);
    let [one, again, other] = [&prompts[0], &prompts[0].repeat(2), &prompts[1]]
        .map(|prompt| sona.adapter(prompt).unwrap().unwrap());
    assert!(std::sync::Arc::ptr_eq(&one, &again) && *one != *other);
    // Within the bound, whichever is chosen; what the head gives up for one topic it has again with
    // the next.
    let mut learner = sona.learner();
    assert!(learner.divergence() <= LearnerOptions::default().max_divergence);
    let saved = learner.to_bytes().unwrap();
    let mut scales = || {
        [chosen[0], chosen[1], None].map(|topic| {
            learner.set_topic(topic);
            learner.scale()
        })
    };
    let first = scales();
    assert!(
        first[0] > 0.0 && first[0] < first[2] && first[1] < first[2],
        "{first:?}"
    );
    for _ in 0..8 {
        assert_eq!(scales().map(f32::to_bits), first.map(f32::to_bits));
    }
    learner.set_topic(chosen[0]);
    assert_eq!(learner.to_bytes().unwrap(), saved);
    let mut loaded = Learner::from_bytes(saved, engine.model()).unwrap();
    assert_eq!(loaded.scale(), first[2]);
    loaded.set_topic(chosen[0]);
    loaded.set_topic(None);
    assert_eq!(loaded.scale(), first[2]);
    let version = sona.generation();
    sona.rollback(1).unwrap();
    assert!(sona.learner().topics().is_empty() && sona.topic(&prompts[0]).unwrap().is_none());
    sona.rollback(version).unwrap();
    assert_eq!(sona.learner().topics(), topics);
    drop(sona);
    let opened = open(&folder.0);
    assert_eq!(opened.topics(version).unwrap(), topics);
    assert!(matches!(
        opened.topics(77),
        Err(SonaError::NoSuchVersion { version: 77 })
    ));
}

/// An answer is learnt if it was rated well, its prompt if it was not rated, nothing of what was
/// rated badly.
#[test]
fn ratings_choose_what_is_learnt() {
    let (engine, folder) = (engine(), Folder::new());
    let sona = builder().open(&folder.0, &engine).unwrap();
    for (i, score) in [None, Some(0.5), Some(0.49), Some(1.0)]
        .into_iter()
        .enumerate()
    {
        let request = Trajectory {
            quality_score: score,
            ..request(&format!("s{i}"), phrases(i as u64, PHRASES))
        };
        sona.record(Trajectory {
            n_prompt: 40,
            n_answer: 56,
            request_id: i.to_string(),
            ..request
        })
        .unwrap();
    }
    // A rating that comes in time counts.
    sona.rate("3", 0.0).unwrap();
    sona.work().unwrap();
    assert_eq!(sona.history().last().unwrap().n_learnt, [2, 39 + 95]);
}

/// Forgetting a session leaves what would be there if it had never been.
#[test]
fn forgotten_is_as_if_it_had_never_been() {
    let engine = engine();
    let learnt = |with: bool| {
        let folder = Folder::new();
        let sona = builder().open(&folder.0, &engine).unwrap();
        sona.calibrate(&control()).unwrap();
        let other = [[40, 41, 42, 43], [44, 45, 46, 47]];
        for seed in 0..24 {
            sona.record(request("stays", phrases(seed, PHRASES)))
                .unwrap();
            if with {
                sona.record(request("goes", phrases(seed, other))).unwrap();
            }
        }
        sona.work().unwrap();
        if with {
            assert_eq!(sona.generation(), 2);
            assert_eq!(sona.forget("goes").unwrap(), 24);
            assert_eq!((sona.generation(), sona.n_pending().0), (1, 24));
            sona.work().unwrap();
            assert!(matches!(
                sona.forget("nobody"),
                Err(SonaError::NoSuchSession { .. })
            ));
        }
        assert!(sona.generation() > 1);
        let bytes = sona.learner().to_bytes().unwrap();
        drop(sona);
        let working = std::fs::read(folder.0.join("working.gguf")).unwrap();
        let versions = std::fs::read_dir(folder.0.join("versions"))
            .unwrap()
            .count();
        assert_eq!(versions, 2);
        assert!(
            all(&open(&folder.0))
                .iter()
                .all(|found| found.session_id == "stays")
        );
        (bytes, working)
    };
    assert!(learnt(true) == learnt(false));
}

/// Without stored tokens nothing can be learnt again: the version before the session is what is
/// left.
#[test]
fn without_text_forgetting_goes_back() {
    let (engine, folder) = (engine(), Folder::new());
    let sona = builder().keep_text(false).open(&folder.0, &engine).unwrap();
    sona.calibrate(&control()).unwrap();
    teach(&sona, "a", 24);
    sona.work().unwrap();
    let before = sona.learner().to_bytes().unwrap();
    teach(&sona, "b", 24);
    sona.work().unwrap();
    assert_eq!(sona.forget("b").unwrap(), 24);
    assert_eq!((sona.generation(), sona.n_pending().0), (2, 0));
    assert_eq!(sona.learner().to_bytes().unwrap(), before);
    assert_eq!(sona.forget("a").unwrap(), 24);
    assert_eq!(
        (sona.generation(), sona.status().unwrap().n_trajectories),
        (1, 0)
    );
}

/// The thread learns beside a session that decodes, and ends when it is told to.
#[test]
fn the_background_learns_while_others_decode() {
    let (engine, folder) = (engine(), Folder::new());
    let sona = builder()
        .background_interval_ms(1)
        .open(&folder.0, &engine)
        .unwrap();
    sona.calibrate(&control()).unwrap();
    let background = sona.start().unwrap();
    teach(&sona, "a", 9);
    let mut session = engine.session().unwrap();
    session.prefill(&[1, 2, 3]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(sona.history().len(), 1, "nine are too few");
    teach(&sona, "a", 24);
    let begun = Instant::now();
    while sona.n_pending().0 >= 10 && begun.elapsed() < Duration::from_secs(300) {
        if session.position() == session.sequence().n_ctx() {
            session.rewind(3).unwrap();
        }
        session.decode(7).unwrap();
        // A reader's pause, longer than a slice of learning and the rest behind it, also where cores are slow: the
        // thread has a fiftieth of the time where it meets passes of others after each.
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(
        sona.n_pending().0 < 10 && sona.failure().is_none(),
        "{:?}",
        sona.failure()
    );
    // What the owner does is not kept waiting by a batch, and ends no thread.
    teach(&sona, "a", 400);
    let begun = Instant::now();
    sona.rollback(1).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(10));
    drop(background);
    let learnt = sona.history().len();
    teach(&sona, "a", 24);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(sona.history().len(), learnt);
}

#[test]
fn options_and_places_that_cannot_be_are_told() {
    let (engine, folder) = (engine(), Folder::new());
    let refused = |builder: SonaBuilder| {
        matches!(
            builder.open(&folder.0, &engine),
            Err(SonaError::Option { .. })
        )
    };
    assert!(refused(builder().background_min_samples(0)));
    assert!(refused(builder().max_pending_samples(0)));
    assert!(refused(builder().quality_threshold(f32::NAN)));
    assert!(matches!(
        builder().instant_lr(f32::NAN).open(&folder.0, &engine),
        Err(SonaError::Learn(_))
    ));
    // More than may wait are recorded, not learnt.
    let sona = builder()
        .max_pending_samples(5)
        .open(&folder.0, &engine)
        .unwrap();
    teach(&sona, "a", 8);
    assert_eq!(
        (sona.n_pending(), sona.status().unwrap().n_trajectories),
        ((5, 3), 8)
    );
    drop(sona);
    // Of another model, a file in place of a folder, damaged.
    let other = Model::from_gguf(Tiny::Llama.parts(DType::F32).gguf()).unwrap();
    let sona = builder().open(&folder.0, &engine).unwrap();
    sona.calibrate(&control()).unwrap();
    drop(sona);
    // A rate holds for what a folder has learnt, too, as long as it is asked for.
    let rate = |builder: SonaBuilder| {
        builder
            .open(&folder.0, &engine)
            .unwrap()
            .learner()
            .options()
            .rate
    };
    assert_eq!(
        [rate(builder().instant_lr(2.0)), rate(builder())],
        [2.0, 1.0]
    );
    let mine = other.engine().unwrap();
    assert!(matches!(
        builder().open(&folder.0, &mine),
        Err(SonaError::Learn(
            ruvllm_learn::LearnError::OtherModel { .. }
        ))
    ));
    let file = folder.0.join("file");
    std::fs::write(&file, "no folder").unwrap();
    assert!(matches!(
        builder().open(&file, &engine),
        Err(SonaError::Io { .. })
    ));
    let log = folder.0.join("events-000001.log");
    let mut bytes = std::fs::read(&log).unwrap();
    bytes[30] ^= 1;
    std::fs::write(&log, bytes).unwrap();
    assert!(matches!(
        builder().open(&folder.0, &engine),
        Err(SonaError::Damaged { .. })
    ));
}

const PLACE: &str = "RUVLLM_TEST_SONA";

/// Records, learns and forgets without end; run by the test below, in a process of its own.
#[test]
#[ignore = "a helper of the next test"]
fn go_on_for_ever() {
    let Some(path) = std::env::var_os(PLACE) else {
        return;
    };
    let engine = engine();
    let sona = builder().open(Path::new(&path), &engine).unwrap();
    if sona.generation() == 0 {
        sona.calibrate(&control()).unwrap();
    }
    for seed in 0.. {
        let session = format!("s{}", seed % 3);
        let number = sona
            .record(request(&session, phrases(seed, PHRASES)))
            .unwrap();
        println!("{number}");
        if seed % 8 == 7 {
            sona.work().unwrap();
        }
        if seed % 29 == 28 {
            sona.forget("s1").unwrap();
        }
    }
}

/// A process that ends at any moment leaves whole files; nothing that was recorded is lost.
#[test]
fn killed_at_any_moment_the_folder_is_whole() {
    let folder = Folder::new();
    let rounds = if long() { 200 } else { 12 };
    let mut most = 0;
    for round in 0..rounds {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "sona::go_on_for_ever",
                "--ignored",
                "--nocapture",
            ])
            .env(PLACE, &folder.0)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
        // Waits until it works, then for a moment.
        let mut line = String::new();
        while line.trim().parse::<u64>().is_err() {
            line.clear();
            assert!(
                std::io::BufRead::read_line(&mut out, &mut line).unwrap() > 0,
                "round {round}: it ended by itself"
            );
        }
        std::thread::sleep(Duration::from_millis(7 * round % 61));
        child.kill().unwrap();
        child.wait().unwrap();
        let mut told = line;
        std::io::Read::read_to_string(&mut out, &mut told).unwrap();
        most = told
            .lines()
            .filter_map(|line| line.trim().parse::<u64>().ok())
            .fold(most, u64::max);
        let opened = open(&folder.0);
        let found = all(&opened);
        assert!(found.windows(2).all(|pair| pair[0].number < pair[1].number));
        // The last line may have been cut off by the end of its process, the record is there.
        let last = found
            .iter()
            .rev()
            .find(|found| found.session_id != "s1")
            .map_or(0, |found| found.number);
        assert!(last + 1 >= most, "{last} of {most}");
    }
    // It can be learnt on from what is left.
    let sona = builder().open(&folder.0, &engine()).unwrap();
    sona.work().unwrap();
}

/// Mean change in nats per token with its 95 % interval, from a bootstrap over requests.
fn estimate(changes: &[f64], n_tokens: &[usize]) -> [f64; 3] {
    let n = changes.len();
    let mean = |picked: &[usize]| {
        let tokens: usize = picked.iter().map(|&i| n_tokens[i]).sum();
        picked.iter().map(|&i| changes[i]).sum::<f64>() / tokens as f64
    };
    let mut rng = chance(3, n);
    let mut means: Vec<f64> = (0..2000)
        .map(|_| {
            mean(
                &(0..n)
                    .map(|_| rng.next().unwrap() as usize)
                    .collect::<Vec<_>>(),
            )
        })
        .collect();
    means.sort_by(f64::total_cmp);
    [mean(&(0..n).collect::<Vec<_>>()), means[50], means[1949]]
}

fn shown(name: &str, changes: &[f64], n_tokens: &[usize]) {
    let percent = estimate(changes, n_tokens).map(|nats| 100.0 * nats.exp_m1());
    println!(
        "{name}: {:+.1} % ({:+.1} to {:+.1})",
        percent[0], percent[1], percent[2]
    );
}

/// Tokens of a request of the streams, and of its prompt, which chooses a topic.
const REQUEST: usize = 128;
const PROMPT: usize = 32;

/// Three streams that take turns in blocks of 2,000 tokens, 8,000 of each: (stream, whether it is
/// its first visit, request).
fn turns(read: impl Fn(&str) -> Vec<u32>) -> Vec<(usize, bool, Vec<u32>)> {
    let streams = ["river-station", "project-docs", "bakery-papers"]
        .map(|name| read(&format!("tests/data/{name}.txt")));
    let mut requests = Vec::new();
    for visit in 0..4 {
        for (i, stream) in streams.iter().enumerate() {
            let block = stream.chunks(2000).nth(visit).unwrap_or_default();
            requests.extend(
                block
                    .chunks(REQUEST)
                    .filter(|r| r.len() > 1)
                    .map(|r| (i, visit == 0, r.to_vec())),
            );
        }
    }
    requests
}

/// Losses of a text with the adapters of a session and its learner, which learns nothing meanwhile.
fn score(session: &mut Session, text: &[u32]) -> Losses {
    let learner = session.learner().unwrap().clone();
    session.clear();
    let losses = session.record(text).unwrap();
    session.set_learner(learner).unwrap();
    losses
}

/// What learning by itself gains: three streams in turns, as requests that are scored before they
/// are recorded. Of each, the first tokens are a prompt that chooses a topic; second and later
/// visits count. `RUVLLM_ARMS` names the arms to measure.
#[test]
#[ignore = "measures"]
fn topics_in_turns() {
    let (engine, read) = shipped();
    let model = engine.model();
    let control = read("models/demo-heldout.txt");
    let (known, unknown) = control.split_at(control.len() / 2);
    let requests = turns(read);
    let wanted = std::env::var("RUVLLM_ARMS").unwrap_or_default();
    let session = |learner: Learner| {
        let mut session = engine
            .session_with(&SessionOptions {
                n_ctx: Some(256),
                ..Default::default()
            })
            .unwrap();
        session.set_learner(learner).unwrap();
        session
    };
    let new = || Learner::new(model, &LearnerOptions::default()).unwrap();
    // Losses of the prompt and of what follows.
    let observe = |session: &mut Session, request: &[u32]| {
        session.clear();
        let (prompt, rest) = request.split_at(PROMPT.min(request.len() - 1));
        [prompt, rest].map(|part| session.observe(part).unwrap())
    };
    let mut plain = session(new());
    let alone: Vec<Losses> = requests
        .iter()
        .map(|(.., request)| score(&mut plain, request))
        .collect();
    let windows: Vec<&[u32]> = unknown
        .chunks(REQUEST)
        .filter(|window| window.len() > 1)
        .collect();
    let control_alone: Vec<f64> = windows
        .iter()
        .map(|window| score(&mut plain, window).base)
        .collect();
    let mut instant = session(new());
    instant.calibrate(known).unwrap();
    let instant_alone: Vec<[Losses; 2]> = requests
        .iter()
        .map(|(.., r)| observe(&mut instant, r))
        .collect();

    let arms = [
        ("head", 1, false, ""),
        ("layers", 1, true, ""),
        ("folders", 3, true, ""),
        ("words shuffled", 1, true, "words"),
        ("topics shuffled", 1, true, "topics"),
    ];
    for (name, n_folders, inner_layers, shuffled) in arms {
        if !wanted.is_empty() && !wanted.split(',').any(|arm| arm == name) {
            continue;
        }
        let folders: Vec<Folder> = (0..n_folders).map(|_| Folder::new()).collect();
        let open = |folder: &Folder| {
            Sona::builder()
                .inner_layers(inner_layers)
                .open(&folder.0, &engine)
                .unwrap()
        };
        let sonas: Vec<Sona> = folders.iter().map(open).collect();
        sonas.iter().for_each(|sona| sona.calibrate(known).unwrap());
        // The topic that the prompt chooses, that of none, one by chance, and the best in
        // hindsight.
        let choices = ["by the prompt", "none", "by chance", "in hindsight"];
        let mut learning: Vec<Vec<Session>> = sonas
            .iter()
            .map(|_| choices.iter().map(|_| session(new())).collect())
            .collect();
        let mut judges: Vec<Session> = sonas.iter().map(|sona| session(sona.learner())).collect();
        let mut generations = vec![u64::MAX; n_folders];
        let mut at_once: Vec<Vec<[Losses; 2]>> = vec![Vec::new(); choices.len()];
        // With the version in effect, which learns nothing at once.
        let mut still = vec![Vec::new(); 2];
        let (mut rng, mut round, mut counts, mut n_chosen) =
            (chance(17, 1 << 20), Vec::new(), [0; 3], [[0; 12]; 3]);
        for (n, (i, _, request)) in requests.iter().enumerate() {
            let at = i % n_folders;
            let sona = &sonas[at];
            if sona.generation() != generations[at] {
                generations[at] = sona.generation();
                learning[at]
                    .iter_mut()
                    .for_each(|session| session.set_learner(sona.learner()).unwrap());
            }
            let learner = sona.learner();
            let topics = learner.topics();
            let topics: Vec<u32> = topics
                .iter()
                .filter(|topic| topic.has_adapter)
                .map(|topic| topic.id)
                .collect();
            let mut with = |topic: Option<u32>| {
                let mut learner = learner.clone();
                learner.set_topic(topic);
                judges[at].set_learner(learner).unwrap();
                score(&mut judges[at], request).adapter
            };
            let options: Vec<Option<u32>> = [None]
                .into_iter()
                .chain(topics.iter().copied().map(Some))
                .collect();
            let losses: Vec<f64> = options.iter().map(|&topic| with(topic)).collect();
            let best = (0..options.len())
                .min_by(|&a, &b| losses[a].total_cmp(&losses[b]))
                .unwrap();
            let chosen = sona.topic(&request[..PROMPT.min(request.len())]).unwrap();
            let by_chance = options[rng.next().unwrap() as usize % options.len()];
            still[0].push(losses[options.iter().position(|&topic| topic == chosen).unwrap()]);
            still[1].push(losses[0]);
            counts[0] += usize::from(chosen.is_none());
            counts[1] += usize::from(chosen == options[best]);
            counts[2] += 1;
            n_chosen[*i][chosen.map_or(11, |topic| topic as usize % 11)] += 1;
            for (choice, topic) in [chosen, None, by_chance, options[best]]
                .into_iter()
                .enumerate()
            {
                let session = &mut learning[at][choice];
                let mut learner = session.take_learner().unwrap();
                learner.set_topic(topic);
                session.set_learner(learner).unwrap();
                at_once[choice].push(observe(session, request));
            }
            let record = |sona: &Sona, i: usize, tokens: Vec<u32>| {
                sona.record(request_of(i, tokens)).unwrap();
            };
            match shuffled {
                "topics" => round.push((*i, request.clone())),
                "words" => {
                    let mut tokens = request.clone();
                    let mut rng = chance(n as u64, tokens.len());
                    (0..tokens.len()).for_each(|j| tokens.swap(j, rng.next().unwrap() as usize));
                    record(sona, *i, tokens);
                }
                _ => record(sona, *i, request.clone()),
            }
            // A round of visits, each request made of pieces of all three.
            if round.len() == 48 {
                for j in 0..48 {
                    let piece = |p: usize| {
                        round[(j % 16) + 16 * ((j / 16 + p) % 3)]
                            .1
                            .chunks(PROMPT)
                            .nth(p)
                    };
                    let tokens = (0..REQUEST / PROMPT)
                        .filter_map(piece)
                        .flatten()
                        .copied()
                        .collect::<Vec<u32>>();
                    record(sona, j / 16, tokens);
                    if j % 10 == 9 {
                        sona.work().unwrap();
                    }
                }
                round.clear();
            } else if n % 10 == 9 && shuffled != "topics" {
                sonas.iter().for_each(|sona| sona.work().unwrap());
            }
        }
        println!("{name}:");
        let later: Vec<usize> = (0..requests.len()).filter(|&n| !requests[n].1).collect();
        let streams = [
            ("river", Some(0)),
            ("docs", Some(1)),
            ("bakery", Some(2)),
            ("all", None),
        ];
        for (stream, which) in streams {
            let picked: Vec<usize> = later
                .iter()
                .copied()
                .filter(|&n| which.is_none_or(|i| requests[n].0 == i))
                .collect();
            let sizes: Vec<usize> = picked.iter().map(|&n| alone[n].n).collect();
            for (what, still) in ["by the prompt", "none"].iter().zip(&still) {
                let changes: Vec<f64> = picked.iter().map(|&n| still[n] - alone[n].base).collect();
                shown(
                    &format!("  {stream}, {what}, against the model alone"),
                    &changes,
                    &sizes,
                );
            }
        }
        for (c, choice) in choices.iter().enumerate() {
            for (stream, which) in streams {
                let picked = later
                    .iter()
                    .copied()
                    .filter(|&n| which.is_none_or(|i| requests[n].0 == i));
                let picked: Vec<usize> = picked.filter(|_| which.is_none() || c == 0).collect();
                if picked.is_empty() {
                    continue;
                }
                let change = |n: usize, part: usize| {
                    // A prompt is read before its topic is known.
                    let ours = if part == 0 {
                        &at_once[1][n][0]
                    } else {
                        &at_once[c][n][1]
                    };
                    [
                        ours.adapter - instant_alone[n][part].adapter,
                        ours.mixture - instant_alone[n][part].mixture,
                    ]
                };
                let parts = |n: usize, part: usize| instant_alone[n][part].n;
                for (which, what) in ["adapter", "mixture"].into_iter().enumerate() {
                    let after: Vec<f64> = picked.iter().map(|&n| change(n, 1)[which]).collect();
                    let sizes: Vec<usize> = picked.iter().map(|&n| parts(n, 1)).collect();
                    shown(
                        &format!("  {stream}, {choice}, against the instant loop, {what}"),
                        &after,
                        &sizes,
                    );
                    let all: Vec<f64> = picked
                        .iter()
                        .map(|&n| change(n, 0)[which] + change(n, 1)[which])
                        .collect();
                    let sizes: Vec<usize> =
                        picked.iter().map(|&n| parts(n, 0) + parts(n, 1)).collect();
                    shown("    prompts included", &all, &sizes);
                }
            }
        }
        for (at, sona) in sonas.iter().enumerate() {
            let learner = sona.learner();
            for topic in [None]
                .into_iter()
                .chain(learner.topics().iter().map(|topic| Some(topic.id)))
            {
                let mut learner = learner.clone();
                learner.set_topic(topic);
                judges[at].set_learner(learner).unwrap();
                let (mut rises, mut n) = (Vec::new(), Vec::new());
                for (window, alone) in windows.iter().zip(&control_alone) {
                    let losses = score(&mut judges[at], window);
                    rises.push(losses.adapter - alone);
                    n.push(losses.n);
                }
                shown(&format!("  control text, topic {topic:?}"), &rises, &n);
            }
            let count = |kind| {
                sona.history()
                    .iter()
                    .filter(|event| event.kind == kind)
                    .count()
            };
            let [yes, same, no] = [
                EventKind::Accepted,
                EventKind::Unchanged,
                EventKind::Refused,
            ]
            .map(count);
            println!(
                "  {yes} accepted, {same} unchanged, {no} refused; divergence {}",
                learner.divergence()
            );
            for topic in learner.topics() {
                println!(
                    "  topic {}: {} requests, adapter {}",
                    topic.id, topic.n_requests, topic.has_adapter
                );
            }
        }
        println!(
            "  chosen: none {} of {}, the best {}; {n_chosen:?}",
            counts[0], counts[2], counts[1]
        );
    }
}

fn request_of(i: usize, tokens: Vec<u32>) -> Trajectory {
    request(&format!("{i}"), tokens)
}

/// What consolidating adapters would gain: the same streams, against the instant loop alone.
#[test]
#[ignore = "measures"]
fn streams_in_turns() {
    use ruvllm::compute::{EvalCallback, HookPoint};
    use ruvllm::engine::AdapterId;
    use ruvllm::lora::{MergeMethod, MergeOptions, merge_adapters};
    use std::sync::Arc;
    const BLOCK: usize = 2000;
    let (engine, read) = shipped();
    let model = engine.model();
    let control = read("models/demo-heldout.txt");
    let (known, unknown) = control.split_at(control.len() / 2);
    let requests = turns(read);
    let session = |options: &LearnerOptions| {
        let mut session = engine
            .session_with(&SessionOptions {
                n_ctx: Some(256),
                ..Default::default()
            })
            .unwrap();
        session
            .set_learner(Learner::new(model, options).unwrap())
            .unwrap();
        session.calibrate(known).unwrap();
        session
    };

    // The instant loop alone, and with its adapter consolidated into a base adapter at the end of
    // each block.
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Strategy {
        Alone,
        Average,
        BestOnly,
        /// Average, each input of the head weighted by its mean square in the blocks that the
        /// adapters learnt: the input's factor of their Fisher information.
        EwcMerge,
        /// Average, of adapters that learnt the blocks in another order of words.
        Shuffled,
    }
    /// Sum of the squares of each input of the head.
    struct Squares(Vec<f64>);
    impl EvalCallback for Squares {
        fn tensor(&mut self, tap: HookPoint, _: usize, values: &[f32]) {
            if tap == HookPoint::ResultNorm {
                let n = self.0.len();
                values
                    .iter()
                    .enumerate()
                    .for_each(|(i, x)| self.0[i % n] += f64::from(x * x));
            }
        }
    }
    let mut by_strategy = Vec::new();
    for strategy in [
        Strategy::Alone,
        Strategy::Average,
        Strategy::BestOnly,
        Strategy::EwcMerge,
        Strategy::Shuffled,
    ] {
        // The bound is shared by the two adapters: divergences of small changes that add up grow
        // with the square.
        let most = LearnerOptions::default().max_divergence;
        let share = if strategy == Strategy::Alone {
            most
        } else {
            most / 4.0
        };
        let options = LearnerOptions {
            max_divergence: share,
            ..Default::default()
        };
        let mut learning = session(&options);
        let mut other = session(&options);
        let mut base: Option<(AdapterId, Arc<Adapter>)> = None;
        let mut n_blocks = 0f32;
        let mut earlier = vec![0.0; model.hparams().n_embd];
        let (mut losses, mut sizes) = ([Vec::new(), Vec::new()], Vec::new());
        let mut at = 0;
        while at < requests.len() {
            let (stream, visit) = (requests[at].0, at);
            while at < requests.len()
                && requests[at].0 == stream
                && at - visit < BLOCK.div_ceil(REQUEST)
            {
                let (_, is_first, request) = &requests[at];
                learning.clear();
                let found = learning.observe(request).unwrap();
                if strategy == Strategy::Shuffled {
                    let mut tokens = request.to_vec();
                    let mut rng = chance(at as u64, tokens.len());
                    (0..tokens.len()).for_each(|j| tokens.swap(j, rng.next().unwrap() as usize));
                    other.clear();
                    other.observe(&tokens).unwrap();
                }
                if !is_first {
                    losses[0].push(found.adapter);
                    losses[1].push(found.mixture);
                    sizes.push(found.n);
                }
                at += 1;
            }
            if strategy == Strategy::Alone {
                continue;
            }
            let from = if strategy == Strategy::Shuffled {
                &other
            } else {
                &learning
            };
            let Ok(instant) = from.learner().unwrap().to_adapter(model) else {
                continue;
            };
            n_blocks += 1.0;
            let mut latest = Squares(vec![0.0; earlier.len()]);
            let mut reader = engine
                .session_with(&SessionOptions {
                    n_ctx: Some(256),
                    ..Default::default()
                })
                .unwrap();
            for (.., request) in &requests[visit..at] {
                reader.clear();
                reader
                    .hooks()
                    .prefill_probed(request, 0, &mut latest, |_, _| ())
                    .unwrap();
            }
            // Columns of `A` times the part of the precision that is the adapter's own.
            let weighted = |adapter: &Adapter, own: &[f64]| {
                let mut adapter = adapter.clone();
                for (_, term) in adapter.terms_mut() {
                    for row in term.parts_mut().0.chunks_exact_mut(own.len()) {
                        let parts = own.iter().zip(earlier.iter().zip(&latest.0));
                        row.iter_mut()
                            .zip(parts)
                            .for_each(|(a, (own, (x, y)))| *a *= (own / (x + y)) as f32);
                    }
                }
                adapter
            };
            let merged = match &base {
                None => instant,
                Some((_, base)) if strategy == Strategy::EwcMerge => {
                    let (base, instant) = (weighted(base, &earlier), weighted(&instant, &latest.0));
                    let options = MergeOptions {
                        rank: Some(8),
                        ..Default::default()
                    };
                    merge_adapters(&[(&base, 1.0), (&instant, 1.0)], &options).unwrap()
                }
                Some((_, base)) => {
                    let options = MergeOptions {
                        method: MergeMethod::Linear,
                        rank: Some(8),
                        ..Default::default()
                    };
                    let weights = [(&**base, n_blocks - 1.0), (&instant, 1.0)];
                    merge_adapters(&weights, &options).unwrap()
                }
            };
            earlier
                .iter_mut()
                .zip(&latest.0)
                .for_each(|(sum, x)| *sum += x);
            // The better of what is there and the new one on the latest block, or the mean.
            let candidates = match (strategy, &base) {
                (Strategy::BestOnly, Some((_, old))) => {
                    vec![
                        Adapter::clone(old),
                        from.learner().unwrap().to_adapter(model).unwrap(),
                    ]
                }
                _ => vec![merged],
            };
            let mut plain = engine
                .session_with(&SessionOptions {
                    n_ctx: Some(256),
                    ..Default::default()
                })
                .unwrap();
            plain
                .set_learner(Learner::new(model, &options).unwrap())
                .unwrap();
            let mut judged: Vec<(f64, Adapter)> = candidates
                .into_iter()
                .map(|adapter| {
                    plain.clear();
                    let id = plain
                        .adapters()
                        .attach(Arc::new(adapter.clone()), 1.0)
                        .unwrap();
                    let loss = requests[visit..at]
                        .iter()
                        .map(|(.., request)| score(&mut plain, request).base)
                        .sum();
                    plain.clear();
                    plain.adapters().detach(id).unwrap();
                    (loss, adapter)
                })
                .collect();
            judged.sort_by(|a, b| a.0.total_cmp(&b.0));
            let chosen = Arc::new(judged.swap_remove(0).1);
            let learner = learning.take_learner().unwrap();
            if let Some((id, _)) = base.take() {
                learning.adapters().detach(id).unwrap();
            }
            let id = learning
                .adapters()
                .attach(Arc::clone(&chosen), 1.0)
                .unwrap();
            learning.set_learner(learner).unwrap();
            base = Some((id, chosen));
        }
        // Against the model without any adapter.
        let mut plain = session(&options);
        let (mut rises, mut n) = (Vec::new(), Vec::new());
        for window in unknown.chunks(REQUEST).filter(|window| window.len() > 1) {
            rises.push(score(&mut learning, window).adapter - score(&mut plain, window).base);
            n.push(window.len() - 1);
        }
        shown(&format!("{strategy:?}, control text"), &rises, &n);
        by_strategy.push((strategy, losses, sizes));
    }
    let (alone, sizes) = (by_strategy[0].1.clone(), by_strategy[0].2.clone());
    for (strategy, losses, _) in &by_strategy[1..] {
        for (what, (with, without)) in ["adapter", "mixture"]
            .into_iter()
            .zip(losses.iter().zip(&alone))
        {
            let changes: Vec<f64> = with.iter().zip(without).map(|(a, b)| a - b).collect();
            shown(
                &format!("{strategy:?} against the instant loop alone, {what}"),
                &changes,
                &sizes,
            );
        }
    }
}

/// Prompt and answer are pooled over the tokens that passes compute, whatever the batches, for
/// sessions and schedules.
#[test]
fn hidden_states_are_pooled() {
    use ruvllm::SessionOptions;
    use ruvllm::compute::{EvalCallback, HookPoint, PooledStates};
    use ruvllm::scheduler::{Request, Schedule, ScheduleOptions};
    use ruvllm::{Sampler, SamplerOptions};
    use ruvllm_learn::sona::pooled_layer;
    /// Rows of the residual stream after a layer.
    struct Rows(usize, Vec<f32>);
    impl EvalCallback for Rows {
        fn tensor(&mut self, tap: HookPoint, layer: usize, values: &[f32]) {
            if tap == HookPoint::LOut && layer == self.0 {
                self.1.extend_from_slice(values);
            }
        }
    }
    let model = Model::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    ))
    .unwrap();
    let engine = Engine::new(
        &model,
        &EngineOptions {
            n_threads: 2.try_into().ok(),
            ..Default::default()
        },
    )
    .unwrap();
    let prompt = model
        .tokenizer()
        .unwrap()
        .encode_prompt("The gauge at Ossen Weir reads 1.84 m and is rising.");
    let (layer, n) = (pooled_layer(&model).unwrap(), model.hparams().n_embd);
    let greedy = || {
        Sampler::new(SamplerOptions {
            temperature: 0.0,
            ..Default::default()
        })
        .unwrap()
    };
    // `exact`: prompts have the arithmetic of generated tokens, so that one pass can tell what all
    // of them should be.
    let options = |n_batch: usize| SessionOptions {
        n_batch,
        exact: true,
        pooled_layer: Some(layer),
        n_ctx: Some(64),
        ..Default::default()
    };
    let mut expected = None;
    for n_batch in [64, 5] {
        let mut session = engine.session_with(&options(n_batch)).unwrap();
        let mut sampler = greedy();
        let mut generation = session
            .generate(&prompt, &mut sampler)
            .unwrap()
            .max_tokens(9);
        generation.by_ref().for_each(|piece| drop(piece.unwrap()));
        let answer = generation.tokens().to_vec();
        drop(generation);
        let pooled = session.hooks().take_pooled();
        assert_eq!(session.hooks().take_pooled(), PooledStates::default());
        // The last token of an answer was computed by no pass.
        let all = [&prompt[..], &answer[..answer.len() - 1]].concat();
        let mut rows = Rows(layer, Vec::new());
        let mut other = engine
            .session_with(&SessionOptions {
                pooled_layer: None,
                ..options(64)
            })
            .unwrap();
        other
            .hooks()
            .prefill_probed(&all, 0, &mut rows, |_, _| ())
            .unwrap();
        let mean = |tokens: std::ops::Range<usize>| {
            let mut sum = vec![0.0f32; n];
            for row in rows.1[tokens.start * n..tokens.end * n].chunks_exact(n) {
                sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
            sum.iter()
                .map(|x| x / tokens.len() as f32)
                .collect::<Vec<f32>>()
        };
        // All but the first, which says nothing.
        let found = PooledStates {
            prompt: mean(1..prompt.len()),
            answer: mean(prompt.len()..all.len()),
        };
        assert!(pooled == found && answer.len() == 9);
        expected = Some(pooled);
        // The next turn begins with that token.
        session.prefill(&[5, 6, 7]).unwrap();
        assert_eq!(session.hooks().take_pooled().answer.len(), n);
    }
    let schedule = ScheduleOptions {
        session: options(16),
        ..Default::default()
    };
    let mut schedule = Schedule::new(&engine, &schedule).unwrap();
    let submit = |schedule: &mut Schedule, tokens: &[u32]| {
        schedule
            .submit(Request::new(tokens.to_vec(), greedy()).max_tokens(9))
            .unwrap()
    };
    let mut stream = submit(&mut schedule, &prompt);
    let mut beside = submit(&mut schedule, &prompt[2..]);
    while schedule.step() {}
    for stream in [&mut stream, &mut beside] {
        stream.by_ref().for_each(|piece| drop(piece.unwrap()));
    }
    assert_eq!(stream.take_pooled(), expected.unwrap());
    assert_ne!(beside.take_pooled(), PooledStates::default());
    for layer in [model.hparams().n_layer - 1, usize::MAX] {
        let last = SessionOptions {
            pooled_layer: Some(layer),
            ..Default::default()
        };
        assert!(matches!(
            engine.session_with(&last),
            Err(ruvllm::SessionError::Option {
                option: "pooled_layer",
                ..
            })
        ));
    }
}

/// How fast tokens come while the background learns: bursts with it and without it in turns, with
/// one core free and with none, on a machine that does nothing else.
#[test]
#[ignore = "measures"]
fn decoding_beside_the_loop() {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let model = Model::open(root.join("models/ruvllm-rust-6m-q8_0.gguf")).unwrap();
    let text = std::fs::read_to_string(root.join("tests/data/river-station.txt")).unwrap();
    let tokens = model.tokenizer().unwrap().encode(&text, true, false);
    let n_cores = std::thread::available_parallelism().unwrap().get();
    for n_threads in [n_cores.max(2) - 1, n_cores] {
        let engine = Engine::new(
            &model,
            &EngineOptions {
                n_threads: n_threads.try_into().ok(),
                ..Default::default()
            },
        )
        .unwrap();
        let folder = Folder::new();
        let sona = Sona::builder().open(&folder.0, &engine).unwrap();
        sona.calibrate(&tokens[..1024]).unwrap();
        let mut session = engine.session().unwrap();
        let mut times = [Vec::new(), Vec::new()];
        for burst in 0..16 {
            let learns = burst % 2 == 1;
            let background = learns.then(|| sona.start().unwrap());
            for piece in tokens.chunks_exact(128).take(100).filter(|_| learns) {
                sona.record(request("a", piece.to_vec())).unwrap();
            }
            session.clear();
            session.prefill(&tokens[..16]).unwrap();
            if learns {
                // Its first look is 100 ms from now.
                std::thread::sleep(Duration::from_millis(150));
            }
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(1200) {
                if session.position() == 256 {
                    session.rewind(16).unwrap();
                }
                let start = Instant::now();
                session.decode(7).unwrap();
                times[usize::from(learns)].push(start.elapsed().as_secs_f64() * 1e3);
            }
            drop(background);
        }
        let [alone, beside] = times.map(|mut times| {
            let mean = times.iter().sum::<f64>() / times.len() as f64;
            times.sort_by(f64::total_cmp);
            (mean, times[times.len() * 99 / 100])
        });
        println!(
            "{n_threads} of {n_cores} cores: {:.3} ms per token alone, {:.3} beside the loop: speed x {:.3}; p99 {:.3} and \
             {:.3} ms: x {:.3}; {} requests learnt",
            alone.0,
            beside.0,
            alone.0 / beside.0,
            alone.1,
            beside.1,
            beside.1 / alone.1,
            sona.history()
                .iter()
                .map(|event| event.n_learnt[0])
                .sum::<u64>()
        );
    }
}

/// How long the background takes to learn the 1,000 requests that wait at most, while eight
/// sequences decode without a pause.
#[test]
#[ignore = "measures"]
fn a_thousand_requests_beside_eight_sequences() {
    let (engine, read) = shipped();
    let folder = Folder::new();
    let sona = Sona::builder().open(&folder.0, &engine).unwrap();
    sona.calibrate(&read("models/demo-heldout.txt")[..8192])
        .unwrap();
    let texts = ["river-station", "project-docs", "bakery-papers"]
        .map(|name| read(&format!("tests/data/{name}.txt")));
    let pieces = texts
        .iter()
        .flat_map(|text| text.chunks_exact(REQUEST))
        .cycle();
    for piece in pieces.take(1000) {
        sona.record(request("a", piece.to_vec())).unwrap();
    }
    let options = SessionOptions {
        n_ctx: Some(256),
        ..Default::default()
    };
    let eight = || {
        (0..8)
            .map(|_| engine.sequence(&options).unwrap())
            .collect::<Vec<Sequence>>()
    };
    let mut sequences = eight();
    let (mut outputs, mut n_tokens) = (Outputs::default(), 0);
    let background = sona.start().unwrap();
    let begun = Instant::now();
    while sona.n_pending().0 >= 10 && begun.elapsed() < Duration::from_secs(600) {
        if sequences[0].position() == 256 {
            sequences = eight();
        }
        let generated = |seq| Slot::new(seq, &[7], TokenKind::Generated).outputs_from(0);
        let mut slots: Vec<Slot<'_>> = sequences.iter_mut().map(generated).collect();
        engine
            .step(&mut slots, &mut outputs, &CancelToken::default())
            .unwrap();
        n_tokens += slots.len();
    }
    let took = begun.elapsed();
    drop(background);
    println!(
        "{} wait after {took:?}, in which {n_tokens} tokens were decoded",
        sona.n_pending().0
    );
}

/// Which layer's pooled states find text that helps: each request of three texts is read behind the
/// request whose vector is nearest, of all that are not its neighbours in the text, and behind one
/// chosen at random.
#[test]
#[ignore = "measures"]
fn layers_of_pooled_states() {
    use ruvllm::SessionOptions;
    const REQUEST: usize = 128;
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let model = Model::open(root.join("models/ruvllm-rust-6m-q8_0.gguf")).unwrap();
    let engine = Engine::new(
        &model,
        &EngineOptions {
            n_threads: 2.try_into().ok(),
            ..Default::default()
        },
    )
    .unwrap();
    let mut requests = Vec::new();
    for (i, name) in ["river-station", "project-docs", "bakery-papers"]
        .into_iter()
        .enumerate()
    {
        let text = std::fs::read_to_string(root.join(format!("tests/data/{name}.txt"))).unwrap();
        let tokens = model.tokenizer().unwrap().encode(&text, true, false);
        requests.extend(
            tokens
                .chunks_exact(REQUEST)
                .take(48)
                .enumerate()
                .map(|(at, r)| (i, at, r.to_vec())),
        );
    }
    let n = requests.len();
    let may_serve = |i: usize, j: usize| {
        requests[i].0 != requests[j].0 || requests[i].1.abs_diff(requests[j].1) > 1
    };
    // Loss of request `i` behind request `j`.
    let mut reader = engine
        .session_with(&SessionOptions {
            n_ctx: Some(2 * REQUEST),
            ..Default::default()
        })
        .unwrap();
    let mut loss = |i: usize, j: usize| {
        let tokens = [&requests[j].2[..], &requests[i].2].concat();
        let mut sum = 0.0;
        reader.clear();
        reader
            .hooks()
            .prefill_each(&tokens, REQUEST - 1, |at, logits| {
                if let Some(&next) = tokens.get(at + 1) {
                    let most = logits.iter().copied().fold(f32::MIN, f32::max);
                    let total: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
                    sum += total.ln() - f64::from(logits[next as usize] - most);
                }
            })
            .unwrap();
        sum
    };
    let mut rng = chance(11, n);
    let by_chance: Vec<f64> = (0..n)
        .map(|i| {
            let j = rng.find(|&j| may_serve(i, j as usize)).unwrap();
            loss(i, j as usize)
        })
        .collect();
    for layer in 0..model.hparams().n_layer - 1 {
        let options = SessionOptions {
            pooled_layer: Some(layer),
            ..Default::default()
        };
        let mut session = engine.session_with(&options).unwrap();
        let mut vectors: Vec<Vec<f32>> = Vec::new();
        for (.., tokens) in &requests {
            session.clear();
            session.prefill(tokens).unwrap();
            vectors.push(session.hooks().take_pooled().prompt);
        }
        for centred in [false, true] {
            let mut vectors = vectors.clone();
            if centred {
                let mean: Vec<f32> = (0..vectors[0].len())
                    .map(|k| vectors.iter().map(|v| v[k]).sum::<f32>() / n as f32)
                    .collect();
                vectors
                    .iter_mut()
                    .for_each(|v| v.iter_mut().zip(&mean).for_each(|(x, m)| *x -= m));
            }
            let cosine = |i: usize, j: usize| {
                let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f32>();
                let (x, y) = (&vectors[i], &vectors[j]);
                dot(x, y) / (dot(x, x) * dot(y, y)).sqrt()
            };
            let nearest: Vec<usize> = (0..n)
                .map(|i| {
                    let others = (0..n).filter(|&j| may_serve(i, j));
                    others
                        .max_by(|&a, &b| cosine(i, a).total_cmp(&cosine(i, b)))
                        .unwrap()
                })
                .collect();
            let hits = (0..n)
                .filter(|&i| requests[nearest[i]].0 == requests[i].0)
                .count();
            let changes: Vec<f64> = (0..n).map(|i| loss(i, nearest[i]) - by_chance[i]).collect();
            let name = format!(
                "layer {layer}, centred {centred}: {hits} of {n} of the same text, against random"
            );
            shown(&name, &changes, &vec![REQUEST; n]);
        }
    }
}

/// Work that a program does slice by slice can end after any, with the batch still to be learnt,
/// and learns what work in one piece does.
#[test]
fn work_in_slices_can_end_after_any() {
    let engine = engine();
    let learnt = [None, Some(0), Some(1), Some(5)].map(|ends| {
        let folder = Folder::new();
        let sona = builder().open(&folder.0, &engine).unwrap();
        sona.calibrate(&control()).unwrap();
        teach(&sona, "s", 20);
        if let Some(ends) = ends {
            let (mut n, generation) = (0, sona.generation());
            sona.work_in_slices(&mut |_| {
                n += 1;
                n <= ends
            })
            .unwrap();
            assert_eq!(
                (n, sona.n_pending().0, sona.generation()),
                (ends + 1, 20, generation)
            );
        }
        sona.work().unwrap();
        assert_eq!(sona.n_pending(), (0, 0));
        sona.learner().to_bytes().unwrap()
    });
    assert!(learnt.iter().all(|other| *other == learnt[0]));
}

/// Others may compute between slices, also within a gradient of inner layers: what is learnt is the
/// same to the bit.
#[test]
fn others_may_compute_between_slices() {
    let engine = engine();
    let learnt = [false, true].map(|others| {
        let (folder, mut session) = (Folder::new(), engine.session().unwrap());
        let learner = LearnerOptions {
            control_tokens: 1024,
            ..Default::default()
        };
        let sona = builder().learner(learner).open(&folder.0, &engine).unwrap();
        sona.calibrate(&control()).unwrap();
        teach(&sona, "s", 40);
        let mut n_slices = 0;
        sona.work_in_slices(&mut |_| {
            n_slices += 1;
            if others {
                session.clear();
                session.prefill(&phrases(n_slices, PHRASES)).unwrap();
            }
            true
        })
        .unwrap();
        assert!(n_slices > 10, "{n_slices}");
        sona.learner().to_bytes().unwrap()
    });
    assert!(learnt[0] == learnt[1]);
}

/// How long the slices of the background are, with all between them, on a machine that does nothing
/// else.
#[test]
#[ignore = "measures"]
fn slices() {
    let (engine, tokens) = shipped();
    let (folder, text) = (Folder::new(), tokens("tests/data/river-station.txt"));
    let sona = Sona::builder().open(&folder.0, &engine).unwrap();
    sona.calibrate(&text[..1024]).unwrap();
    for piece in text.chunks_exact(128).take(100) {
        sona.record(request("a", piece.to_vec())).unwrap();
    }
    let (mut times, mut began) = (Vec::new(), Instant::now());
    sona.work_in_slices(&mut |_| {
        times.push(began.elapsed());
        began = Instant::now();
        true
    })
    .unwrap();
    times.sort();
    let at = |share: f64| times[(times.len() as f64 * share) as usize].as_secs_f64() * 1e3;
    let over = times.iter().filter(|time| time.as_millis() > 0).count();
    println!(
        "{} slices: median {:.3} ms, p99 {:.3}, p99.9 {:.3}, the longest {:?}; {over} over 1 ms",
        times.len(),
        at(0.5),
        at(0.99),
        at(0.999),
        &times[times.len().saturating_sub(8)..]
    );
}

/// What choosing a topic adds to the time to the first token, on a machine that does nothing else.
#[test]
#[ignore = "measures"]
fn choosing_a_topic() {
    let (engine, read) = shipped();
    let (folder, text) = (Folder::new(), read("tests/data/river-station.txt"));
    let sona = Sona::builder().open(&folder.0, &engine).unwrap();
    let control = read("models/demo-heldout.txt");
    sona.calibrate(&control[..control.len() / 2]).unwrap();
    for piece in text.chunks_exact(128).take(60) {
        sona.record(request("a", piece.to_vec())).unwrap();
    }
    sona.work().unwrap();
    let mut session = engine.session().unwrap();
    for n in [128, 512] {
        let mut shares: Vec<f64> = (0..41)
            .map(|i| {
                let prompt = &text[4000 + i * 64..][..n];
                let begun = Instant::now();
                assert!(sona.topic(prompt).unwrap().is_some());
                let choosing = begun.elapsed();
                session.clear();
                let begun = Instant::now();
                session.prefill(prompt).unwrap();
                choosing.as_secs_f64() / begun.elapsed().as_secs_f64()
            })
            .collect();
        shares.sort_by(f64::total_cmp);
        let [median, low, high] = [20, 14, 27].map(|i| 100.0 * shares[i]);
        println!("a prompt of {n} tokens: +{median:.1} % ({low:.1} to {high:.1})");
    }
}

/// The model that ships, on two threads, and what turns a file of the repository into its tokens.
fn shipped() -> (Engine, impl Fn(&str) -> Vec<u32>) {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let model = Model::open(root.join("models/ruvllm-rust-6m-q8_0.gguf")).unwrap();
    let engine = Engine::new(
        &model,
        &EngineOptions {
            n_threads: 2.try_into().ok(),
            ..Default::default()
        },
    )
    .unwrap();
    let read = move |path: &str| {
        let text = std::fs::read_to_string(root.join(path)).unwrap();
        model.tokenizer().unwrap().encode(&text, true, false)
    };
    (engine, read)
}

/// What options of the learner gain by use: one text at a time (the first 8,000 tokens), and three
/// in turns every 256 tokens. Perplexity against the default options.
#[test]
#[ignore = "measures"]
fn options_by_use() {
    use ruvllm::SessionOptions;
    use ruvllm_learn::Learner;
    const REQUEST: usize = 128;
    const STREAM: usize = 8000;
    let (engine, read) = shipped();
    let model = engine.model();
    let control = read("models/demo-heldout.txt");
    let (known, _) = control.split_at(control.len() / 2);
    let streams = ["river-station", "project-docs", "bakery-papers"].map(|name| {
        let text = read(&format!("tests/data/{name}.txt"));
        text[..STREAM]
            .chunks(REQUEST)
            .filter(|r| r.len() > 1)
            .map(<[u32]>::to_vec)
            .collect::<Vec<_>>()
    });
    let turns: Vec<Vec<u32>> = (0..streams[0].len())
        .step_by(2)
        .flat_map(|i| {
            streams
                .iter()
                .flat_map(move |s| s[i..(i + 2).min(s.len())].to_vec())
        })
        .collect();
    let [river, docs, bakery] = streams;
    let uses = [
        ("river", river),
        ("docs", docs),
        ("bakery", bakery),
        ("in turns", turns),
    ];
    let default = LearnerOptions::default;
    let all = [
        ("default", default()),
        (
            "rate 2",
            LearnerOptions {
                rate: 2.0,
                ..default()
            },
        ),
        (
            "rate 0.5",
            LearnerOptions {
                rate: 0.5,
                ..default()
            },
        ),
        (
            "recent 512",
            LearnerOptions {
                recent_tokens: 512,
                ..default()
            },
        ),
        (
            "recent 2048",
            LearnerOptions {
                recent_tokens: 2048,
                ..default()
            },
        ),
        (
            "decay 0.02",
            LearnerOptions {
                decay: 0.02,
                ..default()
            },
        ),
        (
            "decay 0",
            LearnerOptions {
                decay: 0.0,
                ..default()
            },
        ),
    ];
    for (place, requests) in uses {
        let mut first: Option<[Vec<f64>; 2]> = None;
        for (name, options) in &all {
            let mut session = engine
                .session_with(&SessionOptions {
                    n_ctx: Some(256),
                    ..Default::default()
                })
                .unwrap();
            session
                .set_learner(Learner::new(model, options).unwrap())
                .unwrap();
            session.calibrate(known).unwrap();
            let (mut found, mut sizes) = ([Vec::new(), Vec::new()], Vec::new());
            for request in &requests {
                session.clear();
                let losses = session.observe(request).unwrap();
                found[0].push(losses.adapter);
                found[1].push(losses.mixture);
                sizes.push(losses.n);
            }
            let before = first.get_or_insert_with(|| found.clone());
            for (what, (found, before)) in ["adapter", "mixture"]
                .iter()
                .zip(found.iter().zip(before.iter()))
            {
                let changes: Vec<f64> = found.iter().zip(before).map(|(a, b)| a - b).collect();
                shown(&format!("{place}, {name}, {what}"), &changes, &sizes);
            }
        }
    }
}
