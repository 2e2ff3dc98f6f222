//! Digests of what passes compute and of what is kept of them.

use super::compare::{Case, Group, Item};
use crate::run::{Pass, engine};
use ruvllm::Model;
use ruvllm::engine::{CacheMode, EngineOptions};
use ruvllm::lora::TargetModule;
use ruvllm::lora::{Adapter, Gradients};
use ruvllm::scheduler::{Request, Schedule, ScheduleOptions};
use ruvllm::session::GradientError;
use ruvllm::{Embedder, Reranker};
use ruvllm::{Engine, SessionOptions};
use ruvllm::{Sampler, SamplerOptions, Session, SessionError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub(super) const GROUPS: [Group; 4] = [
    Group {
        compute: logits_and_files,
        always: true,
    },
    Group {
        compute: vectors,
        always: true,
    },
    Group {
        compute: answers,
        always: false,
    },
    Group {
        compute: adapters,
        always: false,
    },
];

/// Tokens of a prompt: two pages of keys and values, and two positions more.
const N_PROMPT: usize = 130;
/// Tokens that are generated after it.
const N_TEXT: usize = 10;

/// A folder of its own that goes when the test is over.
pub(super) struct Folder(pub(super) PathBuf);

impl Folder {
    pub(super) fn new() -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "ruvllm-digests-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let folder = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&folder);
        Folder(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Tokens of the model's vocabulary, as many as fit its context with room for `room` more.
pub(super) fn tokens(model: &Model, n: usize, room: usize) -> Vec<u32> {
    let h = model.hparams();
    let n = n.min(h.n_ctx_train.saturating_sub(room));
    (0..n)
        .map(|i| ((i * i * 31 + 7 * i + 3) % h.n_vocab) as u32)
        .collect()
}

pub(super) fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub(super) fn is_causal(model: &Model) -> bool {
    model.hparams().attention().all(|attn| attn.causal) && model.hparams().classifier.is_none()
}

/// The likeliest token, the first of equals.
fn likeliest(logits: &[f32]) -> u32 {
    let better = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).fold(0, better) as u32
}

/// What the model goes on with after the tokens of the session, greedily; adds the logits that
/// follow each to `all`.
pub(super) fn greedy(session: &mut Session, n: usize, all: &mut Vec<u8>) -> Vec<u32> {
    let mut text = Vec::new();
    for _ in 0..n {
        text.push(likeliest(session.logits()));
        all.extend(bytes(&session.decoded(text[text.len() - 1])));
    }
    text
}

/// Names and bytes of the files of a folder.
fn contents(folder: &Path) -> Vec<u8> {
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let named = files.iter().map(|file| {
        (
            file.file_name().unwrap().as_encoded_bytes(),
            std::fs::read(file).unwrap(),
        )
    });
    named
        .flat_map(|(name, bytes)| [name, b"\n", &bytes[..]].concat())
        .collect()
}

/// Whether what is saved of a model is compared: files are of keys and values, so of the models that
/// differ in the format of weights alone one is enough.
fn has_files(name: &str) -> bool {
    let format = name.strip_prefix("shape/Dense-");
    format.is_none_or(|format| format == "Q8_0")
}

/// Logits after every token of a prompt and after generated ones, the generated text, the saved
/// session, and what the prefix cache writes.
fn logits_and_files(case: &Case<'_>) -> Vec<Item> {
    if !is_causal(case.model) {
        return Vec::new();
    }
    let prompt = tokens(case.model, N_PROMPT, N_TEXT);
    let folder = Folder::new();
    let options = EngineOptions {
        n_threads: case.n_threads.try_into().ok(),
        prefix_folder: Some(folder.0.clone()),
        ..Default::default()
    };
    let engine = Engine::new(case.model, &options).unwrap();
    let options = SessionOptions {
        prefix: CacheMode::On.into(),
        ..case.options.clone()
    };
    let mut logits = Vec::new();
    let mut session = engine.session_with(&case.options).unwrap();
    session
        .hooks()
        .prefill_each(&prompt[..prompt.len() / 2], 0, |_, row| {
            logits.extend(bytes(row))
        })
        .unwrap();
    let mut session = engine.session_with(&options).unwrap();
    logits.extend(bytes(&session.prefilled(&prompt)));
    let text = greedy(&mut session, N_TEXT, &mut logits);
    let saved = session.state().to_bytes().unwrap();
    drop(session);
    drop(engine);
    let text = text.iter().flat_map(|token| token.to_le_bytes()).collect();
    let mut items = vec![("logits", Some(logits)), ("text", Some(text))];
    if has_files(case.name) {
        let prefixes = contents(&folder.0);
        items.extend([("session", Some(saved)), ("prefixes", Some(prefixes))]);
    }
    items
}

/// Vectors of texts, or scores of pairs.
fn vectors(case: &Case<'_>) -> Vec<Item> {
    let (model, n_batch) = (case.model, case.options.n_batch);
    let texts = [tokens(model, 70, 0), tokens(model, 5, 0)];
    let engine = engine(model, case.n_threads);
    if model.hparams().classifier.is_some() {
        let scores = Reranker::new(&engine)
            .unwrap()
            .n_batch(n_batch)
            .rank_tokens(&texts)
            .unwrap();
        return vec![("scores", Some(bytes(&scores)))];
    }
    if is_causal(model) && model.hparams().pooling.is_none() {
        return Vec::new();
    }
    let vectors = Embedder::new(&engine)
        .unwrap()
        .n_batch(n_batch)
        .embed_tokens(&texts)
        .unwrap();
    vec![("vectors", Some(bytes(&vectors.concat())))]
}

/// Answers of a schedule to requests that share its passes, greedy and sampled: the same whether
/// prompts have all the time that they take, or pause wherever a pass can pause.
fn answers(case: &Case<'_>) -> Vec<Item> {
    if !is_causal(case.model) || case.model.tokenizer().is_none() {
        return Vec::new();
    }
    let [long, short] = [Duration::from_secs(3600), Duration::from_nanos(1)]
        .map(|limit| answers_within(case, limit));
    assert_eq!(
        short,
        long,
        "{}, {:?}, chunks of {}",
        case.name,
        case.model.arch(),
        case.options.n_batch
    );
    vec![("answers", Some(long.into_bytes()))]
}

fn answers_within(case: &Case<'_>, max_itl: Duration) -> String {
    let engine = engine(case.model, case.n_threads);
    let options = ScheduleOptions {
        session: case.options.clone(),
        max_itl: Some(max_itl),
        ..Default::default()
    };
    let mut schedule = Schedule::new(&engine, &options).unwrap();
    let all = tokens(case.model, 40, 24);
    let samplers = [
        Sampler::new(SamplerOptions {
            temperature: 0.0,
            ..Default::default()
        })
        .unwrap(),
        Sampler::new(SamplerOptions {
            temperature: 0.9,
            seed: Some(3),
            repeat_penalty: 1.1,
            top_p: 0.9,
            ..Default::default()
        })
        .unwrap(),
        Sampler::new(SamplerOptions {
            temperature: 0.7,
            seed: Some(5),
            top_k: 20,
            min_p: 0.02,
            ..Default::default()
        })
        .unwrap(),
    ];
    let mut streams = Vec::new();
    for (sampler, prompt) in samplers.into_iter().zip([&all[..9], &all[..], &all[3..20]]) {
        let request = Request::new(prompt.to_vec(), sampler)
            .max_tokens(16)
            .logprobs(2);
        streams.push(schedule.submit(request).unwrap());
        // The first one decodes while the prompts of the others are read.
        for _ in 0..=prompt.len().div_ceil(case.options.n_batch) {
            schedule.step();
        }
    }
    while schedule.step() {}
    let mut text = String::new();
    for stream in &mut streams {
        let pieces: Vec<_> = stream.by_ref().map(Result::unwrap).collect();
        let finish = stream.finish().unwrap();
        let tokens: Vec<_> = pieces
            .iter()
            .map(|p| (p.token, p.text.as_str(), p.logprob.map(f32::to_bits)))
            .collect();
        text += &format!("{tokens:?} {:?} {}\n", finish.reason, finish.n_generated);
    }
    text
}

/// With something in its `B`.
pub(super) fn adapter(model: &Model, targets: impl Fn(&TargetModule) -> bool) -> Adapter {
    let mut adapter = Adapter::zeros(model, 2, 7, targets).unwrap();
    for (i, term) in adapter.terms_mut() {
        let b = term.parts_mut().1;
        b.iter_mut()
            .enumerate()
            .for_each(|(j, b)| *b = ((5 * i + 3 * j) % 11) as f32 * 0.01 - 0.05);
    }
    adapter
}

/// Logits with an adapter, and the gradients of its values.
fn adapters(case: &Case<'_>) -> Vec<Item> {
    if !is_causal(case.model) {
        return Vec::new();
    }
    let mut session = engine(case.model, case.n_threads)
        .session_with(&case.options)
        .unwrap();
    let adapter = Arc::new(adapter(case.model, |_| true));
    let id = session
        .adapters()
        .attach(Arc::clone(&adapter), 0.5)
        .unwrap();
    let all = tokens(case.model, 41, 0);
    let (prompt, text) = all.split_at(all.len() / 2);
    let mut adapted = bytes(&session.prefilled(prompt));
    adapted.extend(bytes(&session.decoded(1)));
    session.clear();
    session.prefill(&prompt[..9]).unwrap();
    let mut gradients = Gradients::zeros(&adapter);
    let weights: Vec<f32> = (1..text.len()).map(|i| [1.0, 0.5, 0.0][i % 3]).collect();
    let gradient = match session.training().nll_gradient(
        id,
        &text[..text.len() - 1],
        &text[1..],
        &weights,
        &mut gradients,
    ) {
        Ok(loss) => {
            let mut all = loss.to_le_bytes().to_vec();
            all.extend(bytes(&gradients.values().collect::<Vec<f32>>()));
            Some(all)
        }
        Err(GradientError::Session(SessionError::NoGradient { .. })) => None,
        Err(e) => panic!("{e}"),
    };
    vec![("adapted", Some(adapted)), ("gradient", gradient)]
}
