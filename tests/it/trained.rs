//! Drafters that were trained for a model: the text is that of plain decoding whoever drafts, guesses
//! come true where they should, numbers are another engine's, and broken files are refused.

use crate::common::{conformance, few_or_many, numbers, read_f32, read_json};
use crate::mtp::set_vocabulary;
use crate::mutants::models;
use crate::run::{engine, level, open};
use crate::tiny::Parts;
use ruvllm::KvType;
use ruvllm::decode::{Draft, DraftStats, Drafter, Speculation, TrainedDrafter};
use ruvllm::engine::{CacheMode, PlanOptions, Sequence};
use ruvllm::gguf::{Array, Gguf, Value};
use ruvllm::kv::KvTiers;
use ruvllm::model::{ModelError, OpenOptions};
use ruvllm::scheduler::{Request, Schedule, ScheduleOptions};
use ruvllm::{Engine, Model, Sampler, SamplerOptions, Session, SessionError, SessionOptions};
use serde_json::Value as Json;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Tokens, and width of states, of the model that is drafted for.
const N_VOCAB: usize = 50;
const N_EMBD: usize = 64;
const KINDS: [&str; 3] = ["eagle3", "dflash", "gemma4-assistant"];

/// A Gemma 4 with windows of 16. If it is `blind`, no layer adds anything: a token follows from the
/// one before it alone.
fn target(blind: bool) -> Model {
    let shapes = models().iter().find(|shapes| shapes.name == "gemma4-moe");
    let mut parts = shapes.unwrap().parts();
    set_vocabulary(&mut parts, N_VOCAB);
    for i in (0..6).filter(|_| blind) {
        parts.fill(&format!("blk.{i}.post_attention_norm.weight"), 0.0);
        parts.fill(&format!("blk.{i}.post_ffw_norm.weight"), 0.0);
    }
    open(parts.gguf()).unwrap()
}

/// A drafter of that kind for the model.
fn drafter(kind: &str) -> Parts {
    let mut parts = Parts::new();
    set_vocabulary(&mut parts, N_VOCAB);
    parts.set("general.architecture", kind);
    let assists = kind == "gemma4-assistant";
    let n_layer: u32 = if kind == "eagle3" { 1 } else { 3 };
    let n_in = if kind == "eagle3" { 2 * N_EMBD } else { N_EMBD };
    let number = |parts: &mut Parts, key: &str, n: u32| parts.set(&format!("{kind}.{key}"), n);
    let sizes = [
        ("block_count", n_layer),
        ("context_length", 512),
        ("embedding_length", N_EMBD as u32),
        ("feed_forward_length", 48),
        ("attention.head_count", 4),
    ];
    sizes
        .iter()
        .for_each(|&(key, n)| number(&mut parts, key, n));
    parts.set(&format!("{kind}.attention.layer_norm_rms_epsilon"), 1e-5f32);
    // The assistant's last layer sees everything, its others windows, with heads as the model's.
    let pattern = Value::Array(Array::Bool(vec![true, true, false]));
    if assists {
        let heads = Value::Array(Array::U32(vec![2, 2, 1]));
        parts.set(&format!("{kind}.attention.head_count_kv"), heads);
        for (key, n) in [
            ("attention.key_length", 32),
            ("attention.value_length", 32),
            ("attention.key_length_swa", 16),
            ("attention.value_length_swa", 16),
            ("rope.dimension_count", 32),
            ("rope.dimension_count_swa", 16),
            ("attention.shared_kv_layers", n_layer),
            ("nextn_predict_layers", n_layer),
            ("embedding_length_out", N_EMBD as u32),
        ] {
            number(&mut parts, key, n);
        }
        parts.hashed("token_embd.weight", &[N_EMBD, N_VOCAB]);
        parts.hashed("nextn.pre_projection.weight", &[2 * N_EMBD, N_EMBD]);
        parts.hashed("nextn.post_projection.weight", &[N_EMBD, N_EMBD]);
    } else {
        for (key, n) in [
            ("attention.head_count_kv", 2),
            ("attention.key_length", 16),
            ("attention.value_length", 16),
        ] {
            number(&mut parts, key, n);
        }
        let layers = Value::Array(Array::U32(vec![1, 3, 6]));
        parts.set(&format!("{kind}.target_layers"), layers);
        parts.hashed("fc.weight", &[3 * N_EMBD, N_EMBD]);
    }
    if kind == "dflash" {
        number(&mut parts, "block_size", 6);
        parts.set("tokenizer.ggml.mask_token_id", N_VOCAB as u32 - 1);
        parts.hashed("enc.output_norm.weight", &[N_EMBD]);
    }
    if kind != "eagle3" {
        number(&mut parts, "attention.sliding_window", 16);
        parts.set(&format!("{kind}.attention.sliding_window_pattern"), pattern);
    }
    parts.hashed("output_norm.weight", &[N_EMBD]);
    for i in 0..n_layer {
        let mut tensor = |part: &str, dims: &[usize]| {
            parts.hashed(&format!("blk.{i}.{part}.weight"), dims);
        };
        let d = if assists && i == 2 { 32 } else { 16 };
        tensor("attn_norm", &[N_EMBD]);
        tensor("attn_q", &[n_in, 4 * d]);
        tensor("attn_output", &[4 * d, N_EMBD]);
        tensor("ffn_norm", &[N_EMBD]);
        tensor("ffn_gate", &[N_EMBD, 48]);
        tensor("ffn_up", &[N_EMBD, 48]);
        tensor("ffn_down", &[48, N_EMBD]);
        if kind == "eagle3" {
            tensor("attn_norm_2", &[N_EMBD]);
        } else {
            tensor("attn_q_norm", &[d]);
        }
        if !assists {
            tensor("attn_k", &[n_in, 2 * d]);
            tensor("attn_v", &[n_in, 2 * d]);
        }
        if kind == "dflash" {
            tensor("attn_k_norm", &[d]);
        }
    }
    parts
}

fn trained(kind: &str, engine: &Engine) -> TrainedDrafter {
    let drafter = TrainedDrafter::open(drafter(kind).gguf(), engine);
    drafter.unwrap().unwrap()
}

fn sampler(seed: u64) -> Sampler {
    let greedy = seed.is_multiple_of(3);
    Sampler::new(SamplerOptions {
        temperature: if greedy { 0.0 } else { 0.9 },
        seed: Some(seed),
        repeat_penalty: if greedy { 1.0 } else { 1.05 },
        ..Default::default()
    })
    .unwrap()
}

/// The text behind a prompt, and behind what a session holds then; and what became of drafts.
fn texts(
    session: Session,
    (prompt, seed, n): (&[u32], u64, usize),
    speculation: Option<&Speculation>,
) -> (Vec<Vec<u32>>, DraftStats) {
    let (mut all, mut stats) = (Vec::new(), DraftStats::default());
    let (mut session, mut sampler, mut prompt) = (session, sampler(seed), prompt.to_vec());
    for _ in 0..2 {
        let mut generation = session.into_generation(&prompt, sampler).max_tokens(n);
        if let Some(speculation) = speculation {
            generation = generation.speculate(speculation.clone());
        }
        generation.by_ref().for_each(|piece| drop(piece.unwrap()));
        all.push(generation.tokens().to_vec());
        for (_, of) in generation.drafters() {
            stats.n_passes += of.n_passes;
            stats.n_drafted += of.n_drafted;
            stats.n_accepted += of.n_accepted;
        }
        (session, sampler) = generation.into_parts();
        all.push(session.tokens().to_vec());
        // The next turn begins where a part of the text was taken back.
        let n = session.tokens().len();
        session.rewind(n - n.min(5)).unwrap();
        prompt = vec![3, 4];
    }
    (all, stats)
}

#[test]
fn the_text_is_that_of_plain_decoding() {
    let model = target(false);
    let engine = engine(&model, 2);
    let options = [
        SessionOptions::default(),
        SessionOptions {
            n_batch: 7,
            exact: true,
            ..SessionOptions::default()
        },
        SessionOptions {
            kv_tiers: Some(KvTiers {
                recent: 64,
                middle: 128,
            }),
            ..SessionOptions::default()
        },
        SessionOptions {
            kv_type: KvType::Q8,
            ..SessionOptions::default()
        },
    ];
    let mut n_drafted = [0; KINDS.len()];
    for seed in 0..few_or_many(4, 8, 60) {
        let options = SessionOptions {
            n_ctx: Some(400),
            ..options[seed as usize % 4].clone()
        };
        let prompt: Vec<u32> = (0..20 + 31 * seed as u32 % 140)
            .map(|i| i * i % 47)
            .collect();
        let session = || engine.session_with(&options).unwrap();
        let of = (&prompt[..], seed, 90);
        let (plain, _) = texts(session(), of, None);
        for (i, kind) in KINDS.iter().enumerate() {
            let by = || Speculation::by(trained(kind, &engine));
            let length = [1, 4, 15][seed as usize % 3];
            for speculation in [by().fixed_length(length), by()] {
                let (drafted, stats) = texts(session(), of, Some(&speculation));
                assert_eq!(drafted, plain, "{kind} {seed} {options:?}");
                n_drafted[i] += stats.n_drafted;
            }
        }
    }
    assert!(n_drafted.iter().all(|&n| n > 100), "{n_drafted:?}");
}

/// Of a model whose tokens follow from the one before, an assistant that knows as much guesses every
/// token: so many come with each pass.
#[test]
fn guesses_come_true() {
    let (model, n) = (target(true), 4);
    let engine = engine(&model, 2);
    let mut parts = drafter("gemma4-assistant");
    for i in 0..3 {
        parts.fill(&format!("blk.{i}.attn_output.weight"), 0.0);
        parts.fill(&format!("blk.{i}.ffn_down.weight"), 0.0);
    }
    // Of embedding and state, the embedding.
    parts.edit("nextn.pre_projection.weight", |values| {
        for (i, value) in values.iter_mut().enumerate() {
            *value = f32::from(u8::from(i % (2 * N_EMBD) == i / (2 * N_EMBD)));
        }
    });
    let drafter = TrainedDrafter::open(parts.gguf(), &engine)
        .unwrap()
        .unwrap();
    let speculation = Speculation::by(drafter).fixed_length(n);
    for prompt in [&[5u32, 9, 2][..], &[7; 40]] {
        let session = || engine.session().unwrap();
        let (plain, _) = texts(session(), (prompt, 0, 60), None);
        let (drafted, stats) = texts(session(), (prompt, 0, 60), Some(&speculation));
        assert_eq!(drafted, plain);
        assert_eq!(stats.n_accepted, stats.n_drafted);
        // At the end of a page fewer are drafted.
        let per_pass = stats.n_accepted as f64 / stats.n_passes as f64;
        assert!(per_pass > 0.8 * n as f64, "{per_pass} a pass: {stats:?}");
    }
}

/// Many requests, with the prefix cache and without, some of them preempted.
#[test]
fn requests_are_drafted_for() {
    let model = target(false);
    let session = SessionOptions {
        n_ctx: Some(300),
        ..SessionOptions::default()
    };
    let prompt = |i: u32| -> Vec<u32> { (0..30 + 17 * i).map(|j| j * j % 43).collect() };
    let n = few_or_many(4, 6, 40);
    let plain = |i: u32| {
        let session = engine(&model, 1).session_with(&session).unwrap();
        texts(session, (&prompt(i), i.into(), 50), None)
            .0
            .swap_remove(0)
    };
    let expected: Vec<Vec<u32>> = (0..n).map(plain).collect();
    for (kind, cache) in KINDS
        .iter()
        .zip([CacheMode::On, CacheMode::Off, CacheMode::On])
    {
        let engine = engine(&model, 2);
        let options = ScheduleOptions {
            session: SessionOptions {
                prefix: cache.into(),
                ..session.clone()
            },
            n_pieces: 1000,
            ..Default::default()
        };
        let mut schedule = Schedule::new(&engine, &options).unwrap();
        let all = Speculation::by(trained(kind, &engine));
        let mut streams = Vec::new();
        for i in 0..n {
            let request = Request::new(prompt(i), sampler(i.into())).max_tokens(50);
            let request = request.speculate(all.clone().fixed_length(1 + i as usize % 5));
            streams.push(schedule.submit(request).unwrap());
            schedule.step();
        }
        while schedule.step() {}
        let mut n_drafted = 0;
        for (mut stream, expected) in streams.into_iter().zip(&expected) {
            let tokens: Vec<u32> = stream.by_ref().map(|piece| piece.unwrap().token).collect();
            assert_eq!(&tokens, expected, "{kind}");
            n_drafted += stream.finish().unwrap().drafts.n_drafted;
        }
        assert!(n_drafted > 0, "{kind}");
    }
}

/// With another engine's files: the same text, and how many guesses come true.
#[test]
fn files_of_another_engine_draft() {
    let Some(root) = conformance() else { return };
    for kind in KINDS {
        let dir = root.join("models3").join(kind);
        let model = Model::open(dir.join("target-f16.gguf")).unwrap();
        let engine = engine(&model, 2);
        let draft = Gguf::open(dir.join("draft-f16.gguf")).unwrap();
        let drafter = TrainedDrafter::open(draft, &engine).unwrap().unwrap();
        let speculation = Speculation::by(drafter).fixed_length(4);
        let (mut n_passes, mut n_accepted) = (0, 0);
        for seed in 0..6 {
            let prompt: Vec<u32> = (0..30).map(|i| (i * 7 + seed as u32) % 300 + 20).collect();
            let session = || engine.session().unwrap();
            let (plain, _) = texts(session(), (&prompt, seed, 60), None);
            let (drafted, stats) = texts(session(), (&prompt, seed, 60), Some(&speculation));
            assert_eq!(drafted, plain, "{kind} {seed}");
            n_passes += stats.n_passes;
            n_accepted += stats.n_accepted;
        }
        eprintln!("{kind}: {n_accepted} tokens accepted in {n_passes} passes");
        assert!(n_passes > 50);
    }
}

/// Such a file does not run alone, and another model's is none of these.
#[test]
fn drafters_are_no_models() {
    let model = target(false);
    let engine = engine(&model, 1);
    for kind in KINDS {
        let error = Model::from_gguf(drafter(kind).gguf()).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, ModelError::NotAModel { .. }));
        assert!(text.contains("-md") && text.contains(kind), "{text}");
    }
    let other = models()
        .iter()
        .find(|shapes| shapes.arch == "llama")
        .unwrap();
    assert!(
        TrainedDrafter::open(other.parts().gguf(), &engine)
            .unwrap()
            .is_none()
    );
    // Its layers are not those of another model.
    let mut other = other.parts();
    set_vocabulary(&mut other, N_VOCAB);
    if let Ok(model) = open(other.gguf()) {
        let engine = crate::run::engine(&model, 1);
        let refused = TrainedDrafter::open(drafter("gemma4-assistant").gguf(), &engine);
        assert!(
            matches!(refused, Err(SessionError::Drafter(_))),
            "{refused:?}"
        );
    }
}

/// What is missing, too much, of another shape or beyond its limits is refused by name; nothing panics.
#[test]
fn broken_files_are_refused() {
    let model = target(false);
    let engine = engine(&model, 1);
    let refusal = |parts: Parts| match TrainedDrafter::open(parts.gguf(), &engine) {
        Err(error) => Some(error.to_string()),
        Ok(drafter) => {
            // It drafts, then.
            let speculation = Speculation::by(drafter.unwrap()).fixed_length(3);
            texts(
                engine.session().unwrap(),
                (&[1, 2, 3], 1, 6),
                Some(&speculation),
            );
            None
        }
    };
    for kind in KINDS {
        for name in drafter(kind).tensor_names() {
            let mut without = drafter(kind);
            without.remove_tensor(&name);
            let message = refusal(without);
            // Values can be normed keys.
            let is_optional = kind == "dflash" && name.contains("attn_v");
            assert!(
                is_optional || message.is_some_and(|text| text.contains("tensor")),
                "{name}"
            );
            for dimension in 0..2 {
                let mut other = drafter(kind);
                other.resize(&name, dimension, 40);
                let message = refusal(other).unwrap_or_default();
                assert!(
                    message.contains("tensor") || message.contains("wide"),
                    "{name} {message}"
                );
            }
        }
        let mut more = drafter(kind);
        more.hashed("blk.0.unknown.weight", &[4]);
        assert!(refusal(more).unwrap().contains("blk.0.unknown.weight"));
        for key in drafter(kind).keys() {
            let Some(part) = key.strip_prefix(&format!("{kind}.")) else {
                continue;
            };
            for value in [0u32, 1, 7, 1 << 30, u32::MAX] {
                let mut other = drafter(kind);
                other.set(&key, value);
                let message = refusal(other);
                // Any epsilon, window or pattern can be computed.
                let any = ["epsilon", "window", "pattern", "context_length"];
                assert!(
                    value < 1 << 30
                        || message.is_some()
                        || any.iter().any(|end| part.contains(end)),
                    "{part} {value}"
                );
            }
            let mut text = drafter(kind);
            text.set(&key, "many");
            assert!(refusal(text).is_some(), "{key}");
        }
        let mut layers = drafter(kind);
        layers.set(
            &format!("{kind}.target_layers"),
            Value::Array(Array::U32(vec![1, 3, 9])),
        );
        assert!(refusal(layers).is_some());
    }
    // Keys that stand for values are as wide as these.
    let mut narrow = drafter("dflash");
    for name in narrow.tensor_names() {
        if name.ends_with("attn_v.weight") {
            narrow.remove_tensor(&name);
        }
    }
    narrow.set("dflash.attention.value_length", 8u32);
    let message = refusal(narrow).unwrap();
    assert!(message.contains("no values of its own"), "{message}");
    let mut tokens = drafter("dflash");
    tokens.set("tokenizer.ggml.mask_token_id", N_VOCAB as u32);
    assert!(refusal(tokens).unwrap().contains("mask_token_id"));
}

/// What a drafter guesses, from which logits, and the state behind them.
type Guesses = (Vec<u32>, [Vec<f32>; 2]);

/// Has a drafter guess behind a text of its own, once the sequence holds all of that but its last
/// token.
#[derive(Debug)]
struct Told {
    drafter: TrainedDrafter,
    text: Vec<u32>,
    guesses: Arc<Mutex<Vec<Guesses>>>,
}

impl Drafter for Told {
    fn name(&self) -> &'static str {
        "told"
    }

    fn push(&mut self, _: &[u32]) {}

    fn reads_states(&self) -> bool {
        self.drafter.reads_states()
    }

    fn reads_inputs(&self) -> &[usize] {
        self.drafter.reads_inputs()
    }

    fn read(&mut self, _: usize, seq: &Sequence, n_text: usize) {
        if n_text != self.text.len() {
            return;
        }
        self.drafter.push(&self.text);
        for n in 1..=5 {
            self.drafter.read(n, seq, n_text);
            let mut draft = Vec::new();
            self.drafter.draft(n, &mut draft);
            let tokens = draft.iter().map(|guess| guess.token).collect();
            let guesses = (tokens, self.drafter.computed.clone());
            self.guesses.lock().unwrap().push(guesses);
        }
    }

    fn draft(&mut self, _: usize, _: &mut Vec<Draft>) {}

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(Told {
            drafter: self.drafter.clone(),
            text: self.text.clone(),
            guesses: Arc::clone(&self.guesses),
        })
    }
}

/// Another engine's numbers for a text.
struct Reference {
    text: Vec<u32>,
    drafted: Vec<u32>,
    /// For the first guess on, `(rows, n_vocab)` and `(rows, n_embd)`: how many rows lie before.
    logits: Vec<f32>,
    states: Vec<f32>,
}

impl Reference {
    /// Those of a test of the manifest. Gemma's assistant has llama.cpp's windows: where Hugging Face
    /// has others, its states are not compared.
    fn of(dir: &Path, kind: &str, test: &Json) -> Reference {
        let file = |what: &str| {
            read_f32(&dir.join(format!("{}.{what}.f32", test["id"].as_str().unwrap())))
        };
        let text: Vec<u32> = numbers(&test["tokens"]);
        let shorter = &test["alternative"]["drafted"];
        let (drafted, logits) = match shorter.is_null() {
            true => (numbers(&test["drafted"]), file("logits")),
            false => (numbers(shorter), file("logits.shorter")),
        };
        let states = match kind {
            "dflash" => Vec::new(),
            _ if !shorter.is_null() => Vec::new(),
            _ => file("state"),
        };
        // Rows for earlier tokens; the block's first one; the model's own state.
        let (n_logits, n_states) = match kind {
            "eagle3" => (text.len() - 2, text.len() - 2),
            "dflash" => (1, 0),
            _ => (0, 1),
        };
        let n_vocab = test["shape"][1].as_u64().unwrap() as usize;
        Reference {
            text,
            drafted,
            logits: logits[n_logits * n_vocab..].to_vec(),
            states: states.get(n_states * N_EMBD..).unwrap_or(&[]).to_vec(),
        }
    }

    /// The largest difference of logits, and of states, of `n` guesses.
    fn difference(&self, kind: &str, n: usize, [logits, state]: &[Vec<f32>; 2]) -> (f32, f32) {
        let apart = |a: &[f32], b: &[f32]| {
            assert_eq!(a.len(), b.len());
            let all = a.iter().zip(b).map(|(a, b)| (a - b).abs());
            all.fold(0.0, |most: f32, d| if d.is_nan() { d } else { most.max(d) })
        };
        let n_vocab = self.logits.len() / if kind == "eagle3" { 6 } else { 5 };
        // All rows of a block are there, of other drafters the last.
        let rows = if kind == "dflash" { 0..n } else { n - 1..n };
        let expected = &self.logits[rows.start * n_vocab..rows.end * n_vocab];
        let of_logits = match logits.len() == expected.len() {
            true => apart(logits, expected),
            // An output of some tokens alone, in ascending order.
            false => {
                let some: Vec<f32> = expected.iter().copied().filter(|x| x.is_finite()).collect();
                apart(logits, &some)
            }
        };
        match self.states.get((n - 1) * N_EMBD..n * N_EMBD) {
            Some(expected) => (of_logits, apart(state, expected)),
            None => (of_logits, 0.0),
        }
    }
}

/// Logits, states and tokens are another engine's, at every length and however the text was read.
#[test]
fn numbers_are_those_of_the_reference() {
    let Some(root) = conformance() else { return };
    for kind in KINDS {
        let dir = root.join("models3").join(kind);
        let model = Model::open(dir.join("target-f16.gguf")).unwrap();
        let engine = engine(&model, 2);
        let draft = || Gguf::open(dir.join("draft-f16.gguf")).unwrap();
        let manifest = read_json(&dir.join("manifest.json"));
        let (mut largest, mut n_all) = (0f32, 0);
        for test in manifest["tests"].as_array().unwrap() {
            let reference = Reference::of(&dir, kind, test);
            for n_batch in [512, 64, 7, 1] {
                let options = SessionOptions {
                    n_ctx: Some(256),
                    n_batch,
                    kv_type: KvType::F32,
                    ..SessionOptions::default()
                };
                let told = Told {
                    drafter: TrainedDrafter::open(draft(), &engine).unwrap().unwrap(),
                    text: reference.text.clone(),
                    guesses: Arc::default(),
                };
                let guesses = Arc::clone(&told.guesses);
                let session = engine.session_with(&options).unwrap();
                let prompt = &reference.text[..reference.text.len() - 1];
                let generation = session.into_generation(prompt, sampler(0)).max_tokens(4);
                let speculation = Speculation::by(told).fixed_length(1);
                generation.speculate(speculation).for_each(drop);
                for (i, (tokens, computed)) in guesses.lock().unwrap().iter().enumerate() {
                    let n = i % 5 + 1;
                    let (logits, states) = reference.difference(kind, n, computed);
                    let case = format!("{kind} {} {n_batch} {n}: {logits} {states}", test["id"]);
                    assert!(logits <= 1e-3 && states <= 1e-3, "{case}");
                    assert_eq!(tokens[..], reference.drafted[..n], "{case}");
                    (largest, n_all) = (largest.max(logits).max(states), n_all + 1);
                }
            }
        }
        eprintln!("{kind}: {n_all} drafts, {largest} apart at most");
        assert!(n_all > 0);
    }
}

/// A drafter that tells how often it was asked for guesses, and the most bytes that it held.
#[derive(Debug)]
struct Counted {
    drafter: TrainedDrafter,
    told: Arc<Mutex<(usize, u64)>>,
}

impl Counted {
    fn new(drafter: TrainedDrafter) -> Counted {
        let told = Arc::default();
        Counted { drafter, told }
    }
}

impl Drafter for Counted {
    fn name(&self) -> &'static str {
        self.drafter.name()
    }

    fn push(&mut self, tokens: &[u32]) {
        self.drafter.push(tokens);
    }

    fn reads_states(&self) -> bool {
        self.drafter.reads_states()
    }

    fn reads_inputs(&self) -> &[usize] {
        self.drafter.reads_inputs()
    }

    fn read(&mut self, n: usize, seq: &Sequence, n_text: usize) {
        self.drafter.read(n, seq, n_text);
        let mut told = self.told.lock().unwrap();
        told.0 += 1;
        told.1 = told.1.max(self.drafter.bytes());
    }

    fn draft(&mut self, n: usize, draft: &mut Vec<Draft>) {
        self.drafter.draft(n, draft);
    }

    fn release(&mut self) {
        self.drafter.release();
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(Counted {
            drafter: self.drafter.clone(),
            told: Arc::clone(&self.told),
        })
    }
}

/// What a drafter takes is what the plan says; when the generation ends, it is gone.
#[test]
fn memory_is_planned_and_freed() {
    let model = target(false);
    for (kind, n_ctx) in KINDS.iter().flat_map(|kind| [(kind, 500), (kind, 2000)]) {
        let engine = engine(&model, 2);
        let drafter = trained(kind, &engine);
        let options = SessionOptions {
            n_ctx: Some(n_ctx),
            ..SessionOptions::default()
        };
        let memory = drafter.memory();
        let [weights, of_text] = [
            memory.shared(n_ctx),
            memory.of_text(n_ctx, options.n_batch.min(n_ctx)),
        ];
        let plain = PlanOptions {
            n_threads: NonZeroUsize::new(2),
            ..options.clone().into()
        };
        let planned = PlanOptions {
            drafters: vec![memory],
            n_sequences: 3,
            ..plain.clone()
        };
        let without = PlanOptions {
            n_sequences: 3,
            ..plain
        };
        let [plan, without] = [&planned, &without].map(|plan| model.memory_plan(plan).unwrap());
        assert_eq!(plan.drafters, weights + 3 * of_text);
        assert_eq!(
            plan.needed() - without.needed(),
            plan.drafters + plan.buffers - without.buffers
        );
        let told = Counted::new(drafter);
        let most = Arc::clone(&told.told);
        let speculation = Speculation::by(told).fixed_length(15);
        let mut session = engine.session_with(&options).unwrap();
        let rest = |session: &Session| session.state().memory().rest;
        let before = rest(&session);
        let prompt: Vec<u32> = (0..n_ctx as u32 - 200).map(|i| i * i % 47).collect();
        let mut greedy = sampler(0);
        let generation = session.generate(&prompt, &mut greedy).unwrap();
        drop(generation);
        session.clear();
        let plain = rest(&session);
        let mut generation = session
            .generate(&[1u32], &mut greedy)
            .unwrap()
            .max_tokens(1)
            .speculate(speculation.clone());
        generation.by_ref().for_each(|piece| drop(piece.unwrap()));
        drop(generation);
        assert_eq!(
            rest(&session),
            plain,
            "{kind}: kept when the generation has ended"
        );
        // Of a prompt the end is read.
        session.clear();
        speculation.keep_in(&mut session).unwrap();
        let mut generation = session
            .generate(&prompt, &mut greedy)
            .unwrap()
            .max_tokens(199)
            .speculate(speculation.clone());
        generation.by_ref().for_each(|piece| drop(piece.unwrap()));
        let kept = rest(generation.session()) - plain;
        drop(generation);
        let taken = most.lock().unwrap().1 + kept;
        eprintln!("{kind}: {taken} bytes taken, {of_text} planned");
        assert!(before <= plain);
        // The list of tokens grows, too, by doubling.
        let tokens = 2 * 8 * n_ctx as u64;
        assert!(
            taken <= of_text + tokens && of_text <= taken + taken / 2,
            "{kind} {n_ctx}: {taken} bytes taken, {of_text} planned"
        );
        assert!(engine.memory().buffers <= plan.buffers, "{kind}");
    }
}

/// Where memory is limited, drafters have a part of it: what does not fit is refused, or not drafted
/// for; the text is the same, and what was taken comes back.
#[test]
fn memory_limits_hold_for_drafters() {
    let model = |limit: Option<u64>| {
        let shapes = models().iter().find(|shapes| shapes.name == "gemma4-moe");
        let mut parts = shapes.unwrap().parts();
        set_vocabulary(&mut parts, N_VOCAB);
        let options = OpenOptions::new().arch(level());
        let options = match limit {
            Some(limit) => options.memory_limit(limit),
            None => options,
        };
        options.open_gguf(parts.gguf()).unwrap()
    };
    let options = SessionOptions {
        n_ctx: Some(400),
        ..SessionOptions::default()
    };
    let of_engine = PlanOptions {
        n_threads: NonZeroUsize::new(2),
        ..SessionOptions::default().into()
    };
    let plan = model(None).memory_plan(&of_engine).unwrap();
    for kind in KINDS {
        let free = engine(&model(None), 2);
        let of = (&[5u32, 9, 2][..], 0, 60);
        let (expected, _) = texts(free.session_with(&options).unwrap(), of, None);
        let drafter = trained(kind, &free);
        let weights = drafter.memory().shared(400);
        let kv = drafter.memory().of_text(400, 512);
        let session_kv = model(None).memory_plan(&options.clone().into()).unwrap().kv;
        for (room, drafts) in [
            (weights + kv + 2 * session_kv, true),
            (weights + session_kv, false),
        ] {
            let limit = plan.needed() - plan.kv + room;
            let model = model(Some(limit));
            let engine = engine(&model, 2);
            let speculation = Speculation::by(trained(kind, &engine)).fixed_length(4);
            assert_eq!(engine.pool().stats().drafters, weights);
            let session = engine.session_with(&options).unwrap();
            let (tokens, stats) = texts(session, of, Some(&speculation));
            assert_eq!(tokens, expected, "{kind}");
            // What is small fits beside the pages that a short text leaves.
            if drafts || kv > session_kv {
                assert_eq!(stats.n_drafted > 0, drafts, "{kind} {room}: {stats:?}");
            }
            assert_eq!(engine.pool().stats().drafters, weights);
            drop(speculation);
            assert_eq!(engine.pool().stats().drafters, 0);
        }
        let engine = engine(&model(Some(plan.needed() - plan.kv + weights / 2)), 2);
        let refused = TrainedDrafter::open(drafter_file(kind), &engine);
        assert!(
            matches!(&refused, Err(SessionError::DrafterMemory { need, .. }) if *need == weights),
            "{refused:?}"
        );
    }
}

fn drafter_file(kind: &str) -> Gguf {
    drafter(kind).gguf()
}

/// Several at a time, which read others' inputs: each drafts.
#[test]
fn drafters_of_different_inputs_draft_together() {
    let engine = engine(&target(false), 2);
    let options = SessionOptions {
        n_ctx: Some(400),
        ..SessionOptions::default()
    };
    let mut other = drafter("eagle3");
    let layers = Value::Array(Array::U32(vec![2, 4]));
    other.set("eagle3.target_layers", layers);
    other.remove_tensor("fc.weight");
    other.hashed("fc.weight", &[2 * N_EMBD, N_EMBD]);
    let other = TrainedDrafter::open(other.gguf(), &engine)
        .unwrap()
        .unwrap();
    let all = KINDS.map(|kind| Counted::new(trained(kind, &engine)));
    let other = Counted::new(other);
    let told: Vec<_> = all
        .iter()
        .chain([&other])
        .map(|told| Arc::clone(&told.told))
        .collect();
    let [first, second, third] = all;
    let speculation = Speculation::by(first)
        .and(second)
        .and(other)
        .and(third)
        .fixed_length(3);
    let of = (&[5u32, 9, 2][..], 1, 60);
    let (plain, _) = texts(engine.session_with(&options).unwrap(), of, None);
    let (drafted, stats) = texts(
        engine.session_with(&options).unwrap(),
        of,
        Some(&speculation),
    );
    assert_eq!(drafted, plain);
    assert!(stats.n_drafted > 0);
    for told in told {
        let (n_asked, bytes) = *told.lock().unwrap();
        assert!(n_asked > 20 && bytes > 0, "{n_asked} times, {bytes} bytes");
    }
}

/// A drafter whose guesses do not come true is turned off, and asked again seldom: of so many passes
/// few have drafts.
#[test]
fn who_guesses_wrong_is_turned_off() {
    let engine = engine(&target(false), 2);
    let options = SessionOptions {
        n_ctx: Some(1600),
        ..SessionOptions::default()
    };
    for kind in KINDS {
        let told = Counted::new(trained(kind, &engine));
        let asked = Arc::clone(&told.told);
        let speculation = Speculation::by(told);
        let session = engine.session_with(&options).unwrap();
        // The end of the text is not sampled.
        let of = Sampler::new(SamplerOptions {
            temperature: 0.9,
            seed: Some(1),
            logit_bias: vec![(2, f32::NEG_INFINITY)],
            ..Default::default()
        })
        .unwrap();
        let mut generation = session
            .into_generation(&[5u32, 9, 2], of)
            .max_tokens(1500)
            .speculate(speculation);
        generation.by_ref().for_each(|piece| drop(piece.unwrap()));
        let (_, stats) = generation.drafters()[0];
        let n_asked = asked.lock().unwrap().0;
        eprintln!(
            "{kind}: asked {n_asked} times, {stats:?}, {} passes",
            generation.n_passes()
        );
        // A drafter that is believed at first, and a retry each 256 tokens.
        assert!(n_asked < 100, "{kind}: asked {n_asked} times");
        assert!(stats.n_drafted < 100, "{kind}: {stats:?}");
        assert!(generation.n_passes() + 60 > 1500, "{kind}");
    }
}
