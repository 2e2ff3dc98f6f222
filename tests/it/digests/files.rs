//! Files that the code before a change of structure wrote, in `tests/data/digests/files`: later
//! code loads them and goes on to the same text. They are of the portable level, so that every CPU
//! has it; `texts.txt` has the texts.
//!
//! `RUVLLM_WRITE_DIGESTS=1` makes those that are missing. Whoever changes arithmetic or a format on
//! purpose, so that older files are refused, deletes them first.

use super::learning::{chance, phrases};
use super::passes::{Folder, adapter, greedy, tokens};
use crate::run::{OnLevel, engine};
use crate::tiny::Tiny;
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::arch::Arch;
use ruvllm::engine::{CacheMode, EngineOptions};
use ruvllm::lora::Adapter;
use ruvllm::quant::DType;
use ruvllm::{Engine, SessionOptions};
use ruvllm_learn::sona::{FolderOptions, Sona, SonaBuilder, Trajectory};
use ruvllm_learn::train::{Example, TargetSet, TrainOptions, Trainer};
use ruvllm_learn::{Learner, LearnerOptions, Learning};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// What is kept in a folder of its own: its name, how it is made, and how a text goes on with it.
struct Kept {
    name: &'static str,
    make: fn(&Path),
    go_on: fn(&Path) -> Vec<u32>,
}

const KEPT: [Kept; 6] = [
    Kept {
        name: "session",
        make: make_session,
        go_on: go_on_with_session,
    },
    Kept {
        name: "prefixes",
        make: make_prefixes,
        go_on: go_on_with_prefixes,
    },
    Kept {
        name: "adapter",
        make: make_adapter,
        go_on: go_on_with_adapter,
    },
    Kept {
        name: "learner",
        make: make_learner,
        go_on: go_on_with_learner,
    },
    Kept {
        name: "training",
        make: make_training,
        go_on: go_on_with_training,
    },
    Kept {
        name: "requests",
        make: make_requests,
        go_on: go_on_with_requests,
    },
];

fn model(tiny: Tiny) -> Model {
    tiny.model(DType::Q8_0).on(Arch::scalar())
}

/// With keys and values of 4 bits, which make small files.
fn options() -> SessionOptions {
    SessionOptions {
        n_ctx: Some(200),
        kv_type: KvType::Q4,
        ..Default::default()
    }
}

fn session(model: &Model) -> Session {
    engine(model, 1).session_with(&options()).unwrap()
}

/// What follows a prompt.
fn text_of(mut session: Session) -> Vec<u32> {
    session.prefill(&tokens(session.model(), 20, 0)).unwrap();
    greedy(&mut session, 24, &mut Vec::new())
}

fn make_session(folder: &Path) {
    let mut session = session(&model(Tiny::Llama));
    session.prefill(&tokens(session.model(), 40, 0)).unwrap();
    greedy(&mut session, 4, &mut Vec::new());
    session.state().save(folder.join("session.gguf")).unwrap();
}

fn go_on_with_session(folder: &Path) -> Vec<u32> {
    let mut session = session(&model(Tiny::Llama));
    session.cache().load(folder.join("session.gguf")).unwrap();
    assert_eq!(
        (session.position(), &session.tokens()[..40]),
        (44, &tokens(session.model(), 40, 0)[..])
    );
    greedy(&mut session, 24, &mut Vec::new())
}

/// A model that keeps all keys and values, and one with windows, which has checkpoints, too.
const OF_PREFIXES: [Tiny; 2] = [Tiny::Llama, Tiny::Gemma2];

fn with_prefixes(tiny: Tiny, folder: &Path) -> Session {
    let options_of_engine = EngineOptions {
        prefix_folder: Some(folder.to_owned()),
        ..Default::default()
    };
    let engine = Engine::new(&model(tiny), &options_of_engine).unwrap();
    engine
        .session_with(&SessionOptions {
            prefix: CacheMode::On.into(),
            ..options()
        })
        .unwrap()
}

fn make_prefixes(folder: &Path) {
    for tiny in OF_PREFIXES {
        let mut session = with_prefixes(tiny, folder);
        session.prefill(&tokens(session.model(), 64, 0)).unwrap();
    }
}

fn go_on_with_prefixes(folder: &Path) -> Vec<u32> {
    let mut text = Vec::new();
    for tiny in OF_PREFIXES {
        let mut session = with_prefixes(tiny, folder);
        session.prefill(&tokens(session.model(), 90, 0)).unwrap();
        // Keys of 4 bits without what they have in common are others; those of a model that caps scores
        // are whole.
        let least = if tiny == Tiny::Gemma2 { 64 } else { 0 };
        let cached = session.sequence().cached_tokens();
        assert!(cached.prompt >= least, "{tiny:?}: {cached:?}");
        text.extend(greedy(&mut session, 24, &mut Vec::new()));
    }
    text
}

fn make_adapter(folder: &Path) {
    let file = adapter(&model(Tiny::Llama), |site| site.part() == "attn_q")
        .to_bytes()
        .unwrap();
    std::fs::write(folder.join("adapter.gguf"), file).unwrap();
}

fn go_on_with_adapter(folder: &Path) -> Vec<u32> {
    let mut session = session(&model(Tiny::Llama));
    let adapter = Adapter::open(folder.join("adapter.gguf"), session.model()).unwrap();
    session.adapters().attach(Arc::new(adapter), 4.0).unwrap();
    text_of(session)
}

fn learner_options() -> LearnerOptions {
    LearnerOptions {
        rank: 2,
        control_tokens: 16,
        recent_tokens: 64,
        cache_tokens: 64,
        neighbours: 16,
        ..Default::default()
    }
}

fn make_learner(folder: &Path) {
    let mut session = session(&model(Tiny::Llama));
    session
        .set_learner(Learner::new(session.model(), &learner_options()).unwrap())
        .unwrap();
    session
        .calibrate(
            &chance(5, session.model().hparams().n_vocab)
                .take(80)
                .collect::<Vec<_>>(),
        )
        .unwrap();
    for piece in phrases(7).take(160).collect::<Vec<_>>().chunks(32) {
        session.clear();
        session.observe(piece).unwrap();
    }
    let mut learner = session.take_learner().unwrap();
    learner.set_generate_with_mixture(true);
    learner.save(folder.join("learner.gguf")).unwrap();
}

fn go_on_with_learner(folder: &Path) -> Vec<u32> {
    let mut session = session(&model(Tiny::Llama));
    let learner = Learner::open(folder.join("learner.gguf"), session.model()).unwrap();
    assert!(learner.n_updates() > 0 && learner.losses().n > 100);
    session.set_learner(learner).unwrap();
    text_of(session)
}

fn trainer() -> Trainer {
    let examples: Vec<_> = (0..24)
        .map(|i| Example::completion(&[1, 7, 10 + i % 12], &[11 + i % 12, 2]))
        .collect();
    let targets = TargetSet::Qv;
    let options = TrainOptions {
        targets,
        rank: 1,
        rate: 0.1,
        epochs: 3.0,
        batch: 4,
        n_ctx: 32,
        ..Default::default()
    };
    Trainer::new(&engine(&model(Tiny::Llama), 1), &examples, &[], &options).unwrap()
}

fn make_training(folder: &Path) {
    let mut trainer = trainer();
    (0..4).for_each(|_| assert!(trainer.step().unwrap().is_some()));
    trainer.save(folder.join("training.gguf")).unwrap();
}

fn go_on_with_training(folder: &Path) -> Vec<u32> {
    let mut trainer = trainer();
    trainer.resume(folder.join("training.gguf")).unwrap();
    assert_eq!(trainer.report().steps.len(), 4);
    while trainer.step().unwrap().is_some() {}
    let mut session = session(&model(Tiny::Llama));
    session
        .adapters()
        .attach(Arc::new(trainer.adapter().clone()), 1.0)
        .unwrap();
    text_of(session)
}

/// Of requests without an age at which they go.
fn builder() -> SonaBuilder {
    let folder = FolderOptions {
        max_age_days: 1_000_000,
        ..Default::default()
    };
    Sona::builder()
        .learner(learner_options())
        .folder(folder)
        .inner_layers(false)
        .keep_text(true)
}

/// Requests that wait to be learnt.
fn make_requests(folder: &Path) {
    let engine = engine(&model(Tiny::Llama), 1);
    let sona = builder().open(folder, &engine).unwrap();
    sona.calibrate(
        &chance(5, engine.model().hparams().n_vocab)
            .take(100)
            .collect::<Vec<_>>(),
    )
    .unwrap();
    for seed in 0..24 {
        let tokens: Vec<u32> = phrases(seed).take(32).collect();
        let request = Trajectory {
            session_id: "a".into(),
            n_prompt: tokens.len(),
            tokens,
            ..Default::default()
        };
        sona.record(request).unwrap();
    }
}

fn go_on_with_requests(folder: &Path) -> Vec<u32> {
    let engine = engine(&model(Tiny::Llama), 1);
    let sona = builder().open(folder, &engine).unwrap();
    assert_eq!(
        (sona.generation(), sona.n_pending(), sona.history().len()),
        (1, (24, 0), 1)
    );
    sona.work().unwrap();
    assert_eq!(sona.generation(), 2);
    let mut session = engine.session_with(&options()).unwrap();
    session.set_learner(sona.learner()).unwrap();
    text_of(session)
}

/// A folder's files in another one: what opens them may change them.
fn copied(from: &Path) -> Folder {
    fn copy(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
            let to = to.join(entry.file_name());
            match entry.file_type().unwrap().is_dir() {
                true => copy(&entry.path(), &to),
                false => drop(std::fs::copy(entry.path(), to).unwrap()),
            }
        }
    }
    let folder = Folder::new();
    copy(from, &folder.0);
    folder
}

#[test]
fn files_of_earlier_versions_load_and_go_on() {
    let root = Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/data/digests/files"
    ));
    let writes = super::writes();
    let line = |line: &str| {
        let (name, text) = line.split_once(": ").unwrap();
        (name.to_owned(), text.to_owned())
    };
    let path = root.join("texts.txt");
    let mut texts: BTreeMap<String, String> = match std::fs::read_to_string(&path) {
        Ok(all) => all.lines().map(line).collect(),
        Err(_) if writes => BTreeMap::new(),
        Err(e) => panic!("{}: {e}", path.display()),
    };
    for Kept { name, make, go_on } in KEPT {
        let folder = root.join(name);
        if writes && !folder.exists() {
            std::fs::create_dir_all(&folder).unwrap();
            make(&folder);
        }
        let text = go_on(&copied(&folder).0)
            .iter()
            .map(u32::to_string)
            .collect::<Vec<_>>()
            .join(" ");
        if writes {
            texts.entry(name.to_owned()).or_insert_with(|| text.clone());
        }
        assert_eq!(texts.get(name), Some(&text), "{name}");
    }
    if writes {
        std::fs::write(
            &path,
            texts
                .iter()
                .map(|(name, text)| format!("{name}: {text}\n"))
                .collect::<String>(),
        )
        .unwrap();
    }
}
