//! Learning that goes on by itself, from outside.

use crate::tiny::{N_VOCAB, Tiny};
use ruvllm::exec::{Engine, EngineOptions};
use ruvllm::learn::LearnerOptions;
use ruvllm::model::Model;
use ruvllm::quant::DType;
use ruvllm::sona::{EventKind, FolderOptions, Sona, SonaBuilder, SonaFolder, Trajectory};
use ruvllm::{Error, SonaError};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A folder of its own for each test, gone afterwards.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("ruvllm-sona-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
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
    Engine::new(&model, &EngineOptions { n_threads: 2.try_into().ok(), ..Default::default() }).unwrap()
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
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize % n) as u32
    })
}

/// A first token of its own, then two phrases, in turn by chance.
fn phrases(seed: u64, phrases: [[u32; 4]; 2]) -> Vec<u32> {
    let first = (seed % N_VOCAB as u64) as u32;
    std::iter::once(first).chain(chance(seed, 2).flat_map(|i| phrases[i as usize])).take(96).collect()
}

const PHRASES: [[u32; 4]; 2] = [[3, 14, 15, 9], [26, 5, 35, 8]];

fn request(session: &str, tokens: Vec<u32>) -> Trajectory {
    let (session_id, n_prompt) = (session.to_owned(), tokens.len());
    Trajectory { session_id, n_prompt, tokens, ..Default::default() }
}

/// Requests of a session that can be learnt from, with control text before.
fn teach(sona: &Sona, session: &str, n: u64) {
    for seed in 0..n {
        sona.record(request(session, phrases(seed, PHRASES))).unwrap();
    }
}

fn control() -> Vec<u32> {
    chance(5, N_VOCAB).take(200).collect()
}

fn all(folder: &SonaFolder) -> Vec<Trajectory> {
    let mut found = Vec::new();
    folder.trajectories(|trajectory| found.push(trajectory)).unwrap();
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
        let sona = builder().keep_text(keep).tenant("mill").open(&folder.0, &engine).unwrap();
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
        let next = Trajectory { n_prompt: 7, n_answer: 1, tokens: vec![1, 2, 3, 4, 9, 6, 7, 8], ..sent.clone() };
        sona.record(Trajectory { request_id: "r2".into(), ..next }).unwrap();
        assert!(matches!(sona.rate("r3", 1.0), Err(SonaError::NoSuchRequest { .. })));
        assert!(matches!(sona.rate("r2", 1.5), Err(SonaError::Option { .. })));
        let short = Trajectory { n_prompt: 1, tokens: vec![1, 2], ..Default::default() };
        assert!(matches!(sona.record(short), Err(SonaError::Trajectory { .. })));
        let foreign = Trajectory { n_prompt: 1, tokens: vec![u32::MAX], ..Default::default() };
        assert!(matches!(sona.record(foreign), Err(SonaError::Trajectory { .. })));
        // Nobody else has the folder open meanwhile.
        assert!(matches!(SonaFolder::open(&folder.0, &FolderOptions::default()), Err(SonaError::Locked { .. })));
        drop(sona);
        let opened = open(&folder.0);
        let found = all(&opened);
        let tokens = if keep { sent.tokens.clone() } else { Vec::new() };
        assert_eq!(
            found[0],
            Trajectory { number: 1, tenant: "mill".into(), quality_score: Some(0.25), tokens, ..sent }
        );
        assert_eq!((found.len(), found[1].n_known, found[1].number), (2, 4, 2));
        let status = opened.status().unwrap();
        assert_eq!((status.n_trajectories, status.n_rated, status.n_sessions, status.quality), (2, 1, 1, 0.25));
        assert_eq!(status.n_with_tokens, if keep { 2 } else { 0 });
        #[cfg(unix)]
        for entry in std::fs::read_dir(&folder.0).unwrap() {
            use std::os::unix::fs::PermissionsExt;
            let entry = entry.unwrap();
            assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o077, 0, "{entry:?}");
        }
    }
}

/// What is recorded is learnt and takes effect, within the bound; its owner goes back, and forth, and takes it elsewhere.
#[test]
fn what_helps_takes_effect_and_can_be_undone() {
    let (engine, folder) = (engine(), Folder::new());
    let sona = builder().open(&folder.0, &engine).unwrap();
    assert_eq!(sona.generation(), 0);
    sona.calibrate(&control()).unwrap();
    assert_eq!(sona.generation(), 1);
    assert!(sona.adapter().unwrap().is_none());
    teach(&sona, "a", 24);
    sona.work().unwrap();
    let history = sona.history();
    let event = history.last().unwrap();
    assert_eq!((event.kind, event.version, event.n_learnt[0], event.through), (EventKind::Accepted, 2, 24, 24));
    let (n, before, after) = event.judged;
    assert!(n == 6 * 95 && after < before - 0.001, "{event:?}");
    assert!(event.divergence > 0.0 && event.divergence <= LearnerOptions::default().max_divergence);
    assert_eq!(sona.generation(), 2);
    // In effect the same way for sessions and for schedules.
    let adapter = sona.adapter().unwrap().unwrap();
    let [mut learning, mut adapted] = [(); 2].map(|()| engine.session().unwrap());
    learning.set_learner(sona.learner()).unwrap();
    adapted.attach(adapter.into(), 1.0).unwrap();
    for session in [&mut learning, &mut adapted] {
        session.prefill(&PHRASES[0]).unwrap();
    }
    let apart = learning.logits().iter().zip(adapted.logits()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    // Two ways of rounding the same sums.
    assert!(apart < 1e-4, "{apart}");

    let learnt = sona.learner().to_bytes().unwrap();
    let file = folder.0.join("exported.gguf");
    sona.export(&file).unwrap();
    sona.rollback(1).unwrap();
    assert!(sona.generation() == 1 && sona.adapter().unwrap().is_none());
    assert!(matches!(sona.rollback(9), Err(Error::Sona(SonaError::NoSuchVersion { version: 9 }))));
    sona.rollback(2).unwrap();
    assert_eq!(sona.learner().to_bytes().unwrap(), learnt);
    sona.rollback(0).unwrap();
    assert!(sona.generation() == 0 && sona.adapter().unwrap().is_none());
    sona.import(&file).unwrap();
    assert_eq!((sona.generation(), sona.learner().to_bytes().unwrap()), (3, learnt.clone()));
    drop(sona);
    let sona = builder().open(&folder.0, &engine).unwrap();
    assert_eq!((sona.generation(), sona.learner().to_bytes().unwrap()), (3, learnt));
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
        sona.record(request("poison", chance(100 + seed, N_VOCAB).take(96).collect())).unwrap();
        sona.work().unwrap();
    }
    let kinds: Vec<_> = sona.history().iter().map(|event| event.kind).collect();
    // One at a time there is nothing to judge by.
    assert!(!kinds[2..].contains(&EventKind::Accepted), "{kinds:?}");
    assert_eq!(sona.learner().to_bytes().unwrap(), learnt);
    for seed in 0..64 {
        sona.record(request("poison", chance(200 + seed, N_VOCAB).take(96).collect())).unwrap();
    }
    sona.work().unwrap();
    let event = sona.history().pop().unwrap();
    assert!(event.judged.0 > 1000 && event.kind != EventKind::Accepted || event.judged.2 < event.judged.1, "{event:?}");
    assert!(event.divergence <= LearnerOptions::default().max_divergence);
}

/// An answer is learnt if it was rated well, its prompt if it was not rated, nothing of what was rated badly.
#[test]
fn ratings_choose_what_is_learnt() {
    let (engine, folder) = (engine(), Folder::new());
    let sona = builder().open(&folder.0, &engine).unwrap();
    for (i, score) in [None, Some(0.5), Some(0.49), Some(1.0)].into_iter().enumerate() {
        let request = Trajectory { quality_score: score, ..request(&format!("s{i}"), phrases(i as u64, PHRASES)) };
        sona.record(Trajectory { n_prompt: 40, n_answer: 56, request_id: i.to_string(), ..request }).unwrap();
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
            sona.record(request("stays", phrases(seed, PHRASES))).unwrap();
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
            assert!(matches!(sona.forget("nobody"), Err(Error::Sona(SonaError::NoSuchSession { .. }))));
        }
        assert!(sona.generation() > 1);
        let bytes = sona.learner().to_bytes().unwrap();
        drop(sona);
        let working = std::fs::read(folder.0.join("working.gguf")).unwrap();
        let versions = std::fs::read_dir(folder.0.join("versions")).unwrap().count();
        assert_eq!(versions, 2);
        assert!(all(&open(&folder.0)).iter().all(|found| found.session_id == "stays"));
        (bytes, working)
    };
    assert!(learnt(true) == learnt(false));
}

/// Without stored tokens nothing can be learnt again: the version before the session is what is left.
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
    assert_eq!((sona.generation(), sona.status().unwrap().n_trajectories), (1, 0));
}

/// The thread learns beside a session that decodes, and ends when it is told to.
#[test]
fn the_background_learns_while_others_decode() {
    let (engine, folder) = (engine(), Folder::new());
    let sona = builder().background_interval_ms(1).open(&folder.0, &engine).unwrap();
    sona.calibrate(&control()).unwrap();
    let background = sona.start().unwrap();
    teach(&sona, "a", 9);
    let mut session = engine.session().unwrap();
    session.prefill(&[1, 2, 3]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(sona.history().len(), 1, "nine are too few");
    teach(&sona, "a", 24);
    let begun = Instant::now();
    while sona.n_pending().0 >= 10 && begun.elapsed() < Duration::from_secs(60) {
        if session.position() == session.n_ctx() {
            session.rewind(3).unwrap();
        }
        session.decode(7).unwrap();
    }
    assert!(sona.n_pending().0 < 10 && sona.failure().is_none(), "{:?}", sona.failure());
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
    let refused =
        |builder: SonaBuilder| matches!(builder.open(&folder.0, &engine), Err(Error::Sona(SonaError::Option { .. })));
    assert!(refused(builder().background_min_samples(0)));
    assert!(refused(builder().max_pending_samples(0)));
    assert!(refused(builder().quality_threshold(f32::NAN)));
    assert!(matches!(builder().instant_lr(f32::NAN).open(&folder.0, &engine), Err(Error::Learn(_))));
    // More than may wait are recorded, not learnt.
    let sona = builder().max_pending_samples(5).open(&folder.0, &engine).unwrap();
    teach(&sona, "a", 8);
    assert_eq!((sona.n_pending(), sona.status().unwrap().n_trajectories), ((5, 3), 8));
    drop(sona);
    // Of another model, a file in place of a folder, damaged.
    let other = Model::from_gguf(Tiny::Llama.parts(DType::F32).gguf()).unwrap();
    let sona = builder().open(&folder.0, &engine).unwrap();
    sona.calibrate(&control()).unwrap();
    drop(sona);
    let mine = other.engine().unwrap();
    assert!(matches!(builder().open(&folder.0, &mine), Err(Error::Learn(ruvllm::LearnError::OtherModel { .. }))));
    let file = folder.0.join("file");
    std::fs::write(&file, "no folder").unwrap();
    assert!(matches!(builder().open(&file, &engine), Err(Error::Sona(SonaError::Io { .. }))));
    let log = folder.0.join("events-000001.log");
    let mut bytes = std::fs::read(&log).unwrap();
    bytes[30] ^= 1;
    std::fs::write(&log, bytes).unwrap();
    assert!(matches!(builder().open(&folder.0, &engine), Err(Error::Sona(SonaError::Damaged { .. }))));
}

const PLACE: &str = "RUVLLM_TEST_SONA";

/// Records, learns and forgets without end; run by the test below, in a process of its own.
#[test]
#[ignore = "a helper of the next test"]
fn go_on_for_ever() {
    let Some(path) = std::env::var_os(PLACE) else { return };
    let engine = engine();
    let sona = builder().open(Path::new(&path), &engine).unwrap();
    if sona.generation() == 0 {
        sona.calibrate(&control()).unwrap();
    }
    for seed in 0.. {
        let session = format!("s{}", seed % 3);
        let number = sona.record(request(&session, phrases(seed, PHRASES))).unwrap();
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
    let rounds = if std::env::var_os("RUVLLM_LONG").is_some() { 200 } else { 12 };
    let mut most = 0;
    for round in 0..rounds {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "sona::go_on_for_ever", "--ignored", "--nocapture"])
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
            assert!(std::io::BufRead::read_line(&mut out, &mut line).unwrap() > 0, "round {round}: it ended by itself");
        }
        std::thread::sleep(Duration::from_millis(7 * round % 61));
        child.kill().unwrap();
        child.wait().unwrap();
        let mut told = line;
        std::io::Read::read_to_string(&mut out, &mut told).unwrap();
        most = told.lines().filter_map(|line| line.trim().parse::<u64>().ok()).fold(most, u64::max);
        let opened = open(&folder.0);
        let found = all(&opened);
        assert!(found.windows(2).all(|pair| pair[0].number < pair[1].number));
        // The last line may have been cut off by the end of its process, the record is there.
        let last = found.iter().rev().find(|found| found.session_id != "s1").map_or(0, |found| found.number);
        assert!(last + 1 >= most, "{last} of {most}");
    }
    // It can be learnt on from what is left.
    let sona = builder().open(&folder.0, &engine()).unwrap();
    sona.work().unwrap();
}
