//! Blocks for multi-token prediction: their logits against a reference (`tests/reference_mtp.py`),
//! the states that they read against Hugging Face's, and texts that they draft for.

use crate::common::{conformance, few_or_many, numbers, read_f32, read_json};
use crate::mutants::Shapes;
use crate::run::{OnLevel, engine, level, open};
use crate::tiny::Parts;
use ruvllm::KvType;
use ruvllm::arch::Arch;
use ruvllm::decode::{Draft, DraftStats, Drafter, MtpDrafter, Speculation};
use ruvllm::engine::{CacheMode, EngineOptions, Outputs, PlanOptions, Slot};
use ruvllm::gguf::{Array, StringArray, Value};
use ruvllm::model::ModelError;
use ruvllm::model::OpenOptions;
use ruvllm::scheduler::{Request, Schedule, ScheduleOptions};
use ruvllm::{CancelToken, Engine, SessionOptions};
use ruvllm::{Model, Sampler, SamplerOptions, Session, SessionError};
use serde_json::Value as Json;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// As in `tests/it/families.rs`: the same sizes, and as many roundings.
const TOLERANCE: f32 = 1e-4;

fn lines() -> Vec<Json> {
    include_str!("../data/mtp.json")
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The file, with a vocabulary.
fn parts(line: &Json) -> Parts {
    let mut parts = Shapes::of_line(line).parts();
    set_vocabulary(&mut parts, 50);
    parts
}

/// A tokenizer of `n` tokens, each of which is a character.
pub(crate) fn set_vocabulary(parts: &mut Parts, n: usize) {
    let texts: Vec<String> = ('A'..).take(n).map(String::from).collect();
    parts.set("tokenizer.ggml.model", "llama");
    parts.set(
        "tokenizer.ggml.tokens",
        Value::Array(Array::Strings(StringArray::from_iter(
            texts.iter().map(String::as_str),
        ))),
    );
    parts.set(
        "tokenizer.ggml.scores",
        Value::Array(Array::F32(vec![0.0; n])),
    );
    parts.set(
        "tokenizer.ggml.token_type",
        Value::Array(Array::I32(vec![1; n])),
    );
    parts.set("tokenizer.ggml.unknown_token_id", 0u32);
}

fn models() -> Vec<(String, Model)> {
    let model = |line: &Json| {
        (
            line["name"].as_str().unwrap().to_owned(),
            open(parts(line).gguf()).unwrap(),
        )
    };
    lines().iter().map(model).collect()
}

/// Values between -1 and 1 as `tests/reference_mtp.py` takes them for a matrix.
fn hashed(name: &str, dims: [usize; 2]) -> Vec<f32> {
    let mut parts = Parts::new();
    parts.hashed(name, &dims);
    let mut values = Vec::new();
    parts.edit(name, |of_tensor| values = of_tensor.to_vec());
    values
}

fn f32s(json: &Json) -> Vec<f32> {
    json.as_array()
        .unwrap()
        .iter()
        .map(|x| x.as_f64().unwrap() as f32)
        .collect()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |m, d| if d.is_nan() { f32::NAN } else { d.max(m) })
}

fn f32_options(n_ctx: usize) -> SessionOptions {
    SessionOptions {
        n_ctx: Some(n_ctx),
        kv_type: KvType::F32,
        ..Default::default()
    }
}

/// Computes the passes for a draft of `n` tokens; the logits of the last.
fn passes(drafter: &mut dyn Drafter, n: usize, states: &[f32]) -> Vec<f32> {
    let engine = drafter.engine().unwrap().clone();
    let (mut outputs, mut logits) = (Outputs::default(), Vec::new());
    while let Some(slot) = drafter.next_pass(n, states) {
        engine
            .step(&mut [slot], &mut outputs, &CancelToken::default())
            .unwrap();
        drafter.end_pass(Some((outputs.logits(0), outputs.states(0))));
        logits = outputs.logits(0).to_vec();
    }
    logits
}

/// All tokens at once, as a prompt or as generated ones, and one after the other; then with the
/// block's own state.
#[test]
fn logits_equal_those_of_the_reference() {
    let mut n = 0;
    for line in lines() {
        let tokens: Vec<u32> = numbers(&line["tokens"]);
        let (first, second) = (f32s(&line["first"]), f32s(&line["second"]));
        for arch in Arch::available() {
            let model = OpenOptions::new()
                .arch(arch)
                .open_gguf(parts(&line).gguf())
                .unwrap();
            let n_embd = model.hparams().n_embd;
            let states = hashed("states", [n_embd, tokens.len()]);
            for step in [tokens.len(), 5, 1] {
                let mut drafter = MtpDrafter::new(&engine(&model, 2), &f32_options(64)).unwrap();
                // The first token has no state before it.
                drafter.push(&[7]);
                let mut logits = Vec::new();
                for (i, chunk) in tokens.chunks(step).enumerate() {
                    drafter.push(chunk);
                    logits = passes(
                        &mut drafter,
                        1,
                        &states[..(i * step + chunk.len()) * n_embd],
                    );
                }
                let check = |logits: &[f32], expected: &[f32], what: &str| {
                    let difference = largest_difference(logits, expected);
                    assert!(
                        difference <= TOLERANCE,
                        "{} {} {step} {what}: {difference}",
                        line["name"],
                        arch.name()
                    );
                };
                check(&logits, &first, "first");
                let mut draft = Vec::new();
                check(&passes(&mut drafter, 2, &states), &second, "second");
                drafter.draft(2, &mut draft);
                // Guesses leave nothing behind, and reading again gives the same.
                check(&passes(&mut drafter, 1, &states), &first, "first, again");
                let argmax =
                    |x: &[f32]| (0..x.len()).max_by(|&a, &b| x[a].total_cmp(&x[b])).unwrap() as u32;
                let guessed: Vec<u32> = draft.iter().map(|guess| guess.token).collect();
                assert_eq!(guessed, [argmax(&first), argmax(&second)]);
                n += 1;
            }
        }
    }
    assert!(n >= 18, "{n}");
}

/// More tokens than a few are read as a prompt, and states may begin anywhere.
#[test]
fn many_tokens_are_read_as_one_by_one() {
    for (name, model) in models() {
        let n_embd = model.hparams().n_embd;
        let tokens: Vec<u32> = (0..101u32).map(|i| i * i % 50).collect();
        let states = hashed("states", [n_embd, 100]);
        let drafter = || MtpDrafter::new(&engine(&model, 2), &f32_options(128)).unwrap();
        let (mut whole, mut pieces) = (drafter(), drafter());
        whole.push(&tokens);
        let of_whole = passes(&mut whole, 1, &states);
        pieces.push(&tokens[..1]);
        let mut of_pieces = Vec::new();
        for i in 0..100 {
            pieces.push(&tokens[i + 1..i + 2]);
            of_pieces = passes(&mut pieces, 1, &states[..(i + 1) * n_embd]);
        }
        let difference = largest_difference(&of_whole, &of_pieces);
        assert!(difference <= TOLERANCE, "{name}: {difference}");
        // A text of which only the end is known is like a text that begins there.
        let (mut end, mut short) = (drafter(), drafter());
        end.push(&tokens);
        short.push(&tokens[60..]);
        let of_end = passes(&mut end, 1, &states[60 * n_embd..]);
        assert_eq!(
            of_end,
            passes(&mut short, 1, &states[60 * n_embd..]),
            "{name}"
        );
        assert!(largest_difference(&of_end, &of_whole) > TOLERANCE, "{name}");
        // Where states are missing between, it begins anew.
        pieces.push(&[1, 2, 3, 4]);
        short = drafter();
        short.push(&[2, 3, 4]);
        let between = &states[90 * n_embd..92 * n_embd];
        assert_eq!(
            passes(&mut pieces, 1, between),
            passes(&mut short, 1, between),
            "{name}"
        );
        // And nothing is drafted where none is known.
        pieces.push(&[5]);
        passes(&mut pieces, 3, &[]);
        let mut draft = Vec::new();
        pieces.draft(3, &mut draft);
        assert!(draft.is_empty(), "{name}");
    }
}

/// A table, an output matrix or a last norm of its own takes the place of the model's.
#[test]
fn what_a_block_lacks_is_the_models() {
    for line in lines() {
        let arch = line["metadata"]["general.architecture"].as_str().unwrap();
        let i = line["metadata"][format!("{arch}.block_count")]
            .as_u64()
            .unwrap()
            - 1;
        let tokens: Vec<u32> = numbers(&line["tokens"]);
        let first = f32s(&line["first"]);
        let check = |change: &dyn Fn(&mut Parts), is_same: bool| {
            let mut parts = parts(&line);
            change(&mut parts);
            let model = open(parts.gguf()).unwrap();
            let mut drafter = MtpDrafter::new(&engine(&model, 1), &f32_options(64)).unwrap();
            drafter.push(&[7]);
            drafter.push(&tokens);
            let logits = passes(
                &mut drafter,
                1,
                &hashed("states", [model.hparams().n_embd, tokens.len()]),
            );
            let difference = largest_difference(&logits, &first);
            assert_eq!(
                difference <= TOLERANCE,
                is_same,
                "{} {difference}",
                line["name"]
            );
        };
        let double = |values: &mut [f32]| {
            values
                .iter_mut()
                .enumerate()
                .for_each(|(i, x)| *x *= 1.0 + (i % 3) as f32)
        };
        let output = if parts(&line).has_tensor("output.weight") {
            "output.weight"
        } else {
            "token_embd.weight"
        };
        let own = |part: &str| format!("blk.{i}.nextn.{part}.weight");
        let has_own = |parts: &mut Parts| {
            parts.copy_tensor("token_embd.weight", &own("embed_tokens"));
            parts.copy_tensor(output, &own("shared_head_head"));
        };
        let changed = |parts: &mut Parts| {
            for name in BTreeSet::from(["token_embd.weight", "output_norm.weight", output]) {
                parts.edit(name, double);
            }
        };
        check(&has_own, true);
        check(&changed, false);
        check(
            &|parts| {
                has_own(parts);
                changed(parts);
            },
            true,
        );
        check(
            &|parts| parts.remove_tensor(&own("shared_head_norm")),
            false,
        );
        check(
            &|parts| {
                parts.remove_tensor("output_norm.weight");
                parts.rename_tensor(&own("shared_head_norm"), "output_norm.weight");
            },
            true,
        );
    }
}

/// Tells what it is shown.
#[derive(Clone, Debug)]
struct Recorder(Engine, Arc<Mutex<Vec<Vec<f32>>>>);

impl Drafter for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }
    fn push(&mut self, _: &[u32]) {}
    fn reads_states(&self) -> bool {
        true
    }
    fn engine(&self) -> Option<&Engine> {
        Some(&self.0)
    }
    fn next_pass<'a>(&'a mut self, _: usize, states: &'a [f32]) -> Option<Slot<'a>> {
        self.1.lock().unwrap().push(states.to_vec());
        None
    }
    fn draft(&mut self, _: usize, _: &mut Vec<Draft>) {}
    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

fn recorded(session: Session, prompt: &[u32], sampler: Sampler, n: usize) -> Vec<Vec<f32>> {
    let recorder = Recorder(session.engine().clone(), Arc::default());
    let mut generation = session.into_generation(prompt, sampler).max_tokens(n);
    generation = generation.speculate(Speculation::by(recorder.clone()).fixed_length(1));
    generation.by_ref().for_each(|piece| drop(piece.unwrap()));
    let states = recorder.1.lock().unwrap();
    states.clone()
}

/// What a model hands out is what Hugging Face's passes to its head: behind the last norm, for
/// every token of a prompt.
#[test]
fn states_are_those_of_hugging_face() {
    let Some(root) = conformance() else { return };
    for name in ["glm4moe-mtp", "qwen35-mtp"] {
        let dir = root.join("models2").join(name);
        let manifest = read_json(&dir.join("manifest.json"));
        let test = manifest["tests"]
            .as_array()
            .unwrap()
            .iter()
            .find(|test| test["id"] == "len17")
            .unwrap();
        let tokens: Vec<u32> = numbers(&test["tokens"]);
        let hidden = read_f32(&dir.join("len17.hidden.f32"));
        for arch in Arch::available() {
            let model = Model::open(dir.join("model-f16.gguf")).unwrap().on(arch);
            assert!(model.has_mtp().unwrap());
            assert!(model.unknown().is_empty());
            let expected = &hidden[hidden.len() - tokens.len() * model.hparams().n_embd..];
            for n_batch in [512, 7, 2] {
                let options = SessionOptions {
                    n_batch,
                    ..f32_options(64)
                };
                // Not a text that ends at once.
                let of_seed = |seed: u64| {
                    let session = engine(&model, 2).session_with(&options).unwrap();
                    recorded(session, &tokens, sampled(seed), 3)
                        .into_iter()
                        .next()
                };
                let states = (0..20).find_map(of_seed).unwrap();
                let difference = largest_difference(&states, expected);
                // That of the manifest's logits.
                assert!(
                    difference <= 1e-3,
                    "{name} {} {n_batch}: {difference}",
                    arch.name()
                );
            }
        }
    }
}

/// The block of Step 3.5, whose states are those before the norms, beside llama.cpp's.
#[test]
fn states_before_the_norm() {
    let Some(root) = conformance() else { return };
    let dir = root.join("models3").join("step35-mtp");
    let manifest = read_json(&dir.join("manifest.json"));
    let tokens: Vec<u32> = numbers(&manifest["tests"][0]["tokens"]);
    let [trunk, logits] =
        ["trunk", "logits"].map(|what| read_f32(&dir.join(format!("mtp.{what}.f32"))));
    for arch in Arch::available() {
        let model = Model::open(dir.join("model-f16.gguf")).unwrap().on(arch);
        assert!(model.has_mtp().unwrap() && model.unknown().is_empty());
        let n_vocab = model.hparams().n_vocab;
        let engine = engine(&model, 2);
        let session = engine.session_with(&f32_options(64)).unwrap();
        let of_prompt = recorded(session, &tokens[..23], sampled(1), 3);
        if let Some(states) = of_prompt.first() {
            assert!(largest_difference(states, &trunk) <= 1e-3);
        }
        let mut drafter = MtpDrafter::new(&engine, &f32_options(64)).unwrap();
        drafter.push(&tokens);
        for (i, expected) in logits.chunks_exact(n_vocab).skip(22).enumerate() {
            let ours = passes(&mut drafter, i + 1, &trunk);
            assert!(largest_difference(&ours, expected) <= 1e-3, "{i}");
        }
    }
}

fn greedy() -> Sampler {
    Sampler::new(SamplerOptions {
        temperature: 0.0,
        ..Default::default()
    })
    .unwrap()
}

fn sampled(seed: u64) -> Sampler {
    let options = SamplerOptions {
        temperature: 0.9,
        seed: Some(seed),
        repeat_penalty: 1.1,
        ..Default::default()
    };
    Sampler::new(if seed.is_multiple_of(2) {
        options
    } else {
        SamplerOptions {
            xtc_probability: 0.3,
            ..options
        }
    })
    .unwrap()
}

/// Knows the text that comes, and says it, or something else; behind its end the block guesses.
/// Compares the block with one that reads everything anew.
#[derive(Debug)]
struct Helped {
    block: Box<dyn Drafter>,
    known: Vec<u32>,
    n: usize,
    /// Of a thousand guesses, how many are wrong.
    n_wrong: u64,
    random: u64,
    states: Vec<f32>,
    /// Guesses that were equal, and all.
    compared: Arc<Mutex<(usize, usize)>>,
}

impl Drafter for Helped {
    fn name(&self) -> &'static str {
        "helped"
    }

    fn push(&mut self, tokens: &[u32]) {
        self.block.push(tokens);
        self.n += tokens.len();
    }

    fn reads_states(&self) -> bool {
        true
    }

    fn engine(&self) -> Option<&Engine> {
        self.block.engine()
    }

    fn next_pass<'a>(&'a mut self, n: usize, states: &'a [f32]) -> Option<Slot<'a>> {
        self.states = states.to_vec();
        self.block.next_pass(n, states)
    }

    fn end_pass(&mut self, rows: Option<(&[f32], &[f32])>) {
        self.block.end_pass(rows);
    }

    fn draft(&mut self, n: usize, draft: &mut Vec<Draft>) {
        let mut anew = self.block.boxed_clone();
        passes(&mut *anew, n, &self.states);
        let (mut guesses, mut of_anew) = (Vec::new(), Vec::new());
        self.block.draft(n, &mut guesses);
        anew.draft(n, &mut of_anew);
        assert_eq!(
            (guesses.len(), of_anew.len()),
            if self.states.is_empty() {
                (0, 0)
            } else {
                (n, n)
            }
        );
        let n_same = guesses
            .iter()
            .zip(&of_anew)
            .filter(|(a, b)| a.token == b.token)
            .count();
        let mut compared = self.compared.lock().unwrap();
        *compared = (compared.0 + n_same, compared.1 + n);
        let known = &self.known[self.n.min(self.known.len())..];
        draft.extend(if known.is_empty() {
            guesses
        } else {
            Vec::new()
        });
        for &token in known.iter().take(n) {
            self.random = self
                .random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let is_wrong = (self.random >> 33) % 1000 < self.n_wrong;
            draft.push(Draft {
                token: if is_wrong { token ^ 1 } else { token },
                confidence: 7,
            });
        }
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        let (block, compared) = (self.block.boxed_clone(), Arc::clone(&self.compared));
        Box::new(Helped {
            block,
            known: self.known.clone(),
            states: Vec::new(),
            compared,
            ..*self
        })
    }
}

/// Pieces' tokens, how it ended, what the session holds, and what it and the sampler write next.
type Outcome = (Vec<u32>, String, Vec<u32>, Vec<u32>);

fn outcome(
    session: Session,
    case: &Case,
    speculation: Option<Speculation>,
) -> (Outcome, DraftStats) {
    let mut generation = session.into_generation(&case.prompt, case.sampler.clone());
    generation = generation
        .max_tokens(case.max_tokens)
        .stop(case.stop.clone());
    if let Some(speculation) = speculation.clone() {
        generation = generation.speculate(speculation);
    }
    let pieces: Vec<u32> = generation
        .by_ref()
        .take(case.n_taken)
        .map(|piece| piece.unwrap().token)
        .collect();
    let (finish, drafts) = (generation.finish(), generation.drafters());
    let reason = format!("{:?}", finish.map(|finish| finish.reason));
    let (session, sampler) = generation.into_parts();
    let held = session.tokens().to_vec();
    // The next turn, which drafts, too.
    let mut next = session
        .into_generation(&[held[0], 3, 4], sampler)
        .max_tokens(15);
    if let Some(speculation) = speculation {
        next = next.speculate(speculation);
    }
    next.by_ref().for_each(drop);
    (
        (pieces, reason, held, next.tokens().to_vec()),
        drafts.first().map(|(_, stats)| *stats).unwrap_or_default(),
    )
}

#[derive(Clone)]
struct Case {
    prompt: Vec<u32>,
    sampler: Sampler,
    max_tokens: usize,
    n_taken: usize,
    stop: Vec<String>,
}

impl Case {
    fn numbered(i: usize) -> Case {
        Case {
            prompt: (0..[3, 40, 1, 150][i % 4])
                .map(|j| ((j * 7 + i * 11 + j * j % 5) % 50) as u32)
                .collect(),
            sampler: if i.is_multiple_of(3) {
                greedy()
            } else {
                sampled(i as u64)
            },
            max_tokens: [40, 70, 2, 90][i % 4],
            n_taken: if i % 5 == 4 { 1 + i % 13 } else { usize::MAX },
            stop: if i % 4 == 1 {
                vec!["KL".into(), "Q".into()]
            } else {
                vec![]
            },
        }
    }
}

/// Greedy and sampled, dense, recurrent and mixtures: with the block, with drafts that are right
/// more often, to the end and dropped half-way, for two turns; in contexts that are full soon, and
/// with adapters' and other caches' precision.
#[test]
fn the_text_is_that_of_plain_decoding() {
    let compared = Arc::new(Mutex::new((0, 0)));
    let (mut n_accepted, mut n_rejected) = (0, 0);
    for (name, model) in models() {
        for i in 0..few_or_many(4, 12, 200) {
            let case = Case::numbered(i);
            let n_ctx = [300, 64, 300, 200][i % 4];
            let kv_type = [KvType::F16, KvType::F32, KvType::Q8][i % 3];
            let options = SessionOptions {
                n_ctx: Some(n_ctx.max(case.prompt.len() + 4)),
                kv_type,
                ..Default::default()
            };
            let engine = engine(&model, 1 + i % 2);
            let session = || engine.session_with(&options).unwrap();
            let (plain, _) = outcome(session(), &case, None);
            let whole = Case {
                n_taken: usize::MAX,
                ..case.clone()
            };
            let (full, _) = outcome(session(), &whole, None);
            let text = [&case.prompt[..], &full.0].concat();
            let block = || MtpDrafter::new(&engine, &options).unwrap();
            let helped = |n_wrong| Helped {
                block: block().boxed_clone(),
                known: text.clone(),
                n: 0,
                n_wrong,
                random: 5,
                states: Vec::new(),
                compared: Arc::clone(&compared),
            };
            let all = [
                Speculation::by(block()).fixed_length([1, 3, 15][i % 3]),
                Speculation::by(helped(0)).fixed_length(7),
                Speculation::by(helped(400)).fixed_length(15),
                Speculation::default().and(block()),
            ];
            for (j, speculation) in all.into_iter().enumerate() {
                let (drafted, stats) = outcome(session(), &case, Some(speculation));
                assert_eq!(drafted, plain, "{name} {i} {j}");
                n_accepted += stats.n_accepted;
                n_rejected += stats.n_drafted - stats.n_accepted;
            }
        }
    }
    let (n_same, n_compared) = *compared.lock().unwrap();
    eprintln!(
        "{n_accepted} drafts accepted, {n_rejected} rejected; {n_same} of {n_compared} guesses equal"
    );
    // Prompts' rows are rounded otherwise: where the best two tokens nearly tie, guesses may part.
    assert!(
        n_accepted > 100 && n_rejected > 100 && n_compared > 1000 && 50 * n_same >= 49 * n_compared
    );
}

/// A text longer than the states that are kept: the block goes on with what it has read, and none
/// is missing.
#[test]
fn long_texts_and_prompts() {
    let (_, model) = models().swap_remove(0);
    let options = SessionOptions {
        n_batch: 200,
        ..f32_options(900)
    };
    let engine = engine(&model, 2);
    let prompt: Vec<u32> = (0..700u32).map(|i| i * i % 47).collect();
    let states = recorded(
        engine.session_with(&options).unwrap(),
        &prompt,
        greedy(),
        100,
    );
    let n_embd = model.hparams().n_embd;
    // Of the prompt the last 512; with each token one more, up to a bound. At the end of a page
    // nothing is drafted.
    let rows: Vec<usize> = states.iter().map(|states| states.len() / n_embd).collect();
    assert!(
        rows.iter().all(|&n| (512..=576).contains(&n))
            && rows[..20]
                .windows(2)
                .all(|n| (n[0] + 1..=n[0] + 2).contains(&n[1])),
        "{rows:?}"
    );
    // The same prompt with states of its end alone, and of all of it that is in the last pieces.
    let mut session = engine
        .session_with(&SessionOptions {
            keep_states: true,
            ..options.clone()
        })
        .unwrap();
    prompt[..400]
        .chunks(100)
        .for_each(|piece| session.prefill(piece).unwrap());
    let pieces = recorded(session, &prompt[400..], greedy(), 3);
    assert!(largest_difference(&pieces[0], &states[0]) <= TOLERANCE);
    // As computed in small pieces.
    let small = SessionOptions {
        n_batch: 3,
        ..options.clone()
    };
    let others = recorded(engine.session_with(&small).unwrap(), &prompt, greedy(), 3);
    let last = 300 * n_embd;
    let ends = [&states[0], &others[0]].map(|states| &states[states.len() - last..]);
    assert!(largest_difference(ends[0], ends[1]) <= TOLERANCE);
    let case = Case {
        prompt,
        sampler: sampled(5),
        max_tokens: 150,
        n_taken: usize::MAX,
        stop: vec![],
    };
    let session = || engine.session_with(&options).unwrap();
    let (plain, _) = outcome(session(), &case, None);
    let block = Speculation::by(MtpDrafter::new(&engine, &options).unwrap()).fixed_length(2);
    assert_eq!(outcome(session(), &case, Some(block)).0, plain);
}

/// Many requests, some preempted, with the prefix cache and without.
#[test]
fn requests_are_drafted_for() {
    for (name, model) in models() {
        let n = few_or_many(4, 10, 60);
        let session = SessionOptions {
            n_ctx: Some(300),
            ..Default::default()
        };
        let cases: Vec<Case> = (0..n)
            .map(|i| Case {
                n_taken: usize::MAX,
                ..Case::numbered(i)
            })
            .collect();
        let expected: Vec<Vec<u32>> = cases
            .iter()
            .map(|case| {
                outcome(
                    engine(&model, 1).session_with(&session).unwrap(),
                    case,
                    None,
                )
                .0
                .0
            })
            .collect();
        let one = {
            let mut session = engine(&model, 1).session_with(&session).unwrap();
            session.prefill(&[1; 250]).unwrap();
            session.engine().pool().stats().used
        };
        for (kv_budget, cache) in [
            (None, CacheMode::Off),
            (None, CacheMode::On),
            (Some(3 * one), CacheMode::Off),
        ] {
            let engine = Engine::new(
                &model,
                &EngineOptions {
                    kv_budget,
                    ..Default::default()
                },
            )
            .unwrap();
            let session = SessionOptions {
                prefix: cache.into(),
                ..session.clone()
            };
            let options = ScheduleOptions {
                session: session.clone(),
                n_pieces: 1000,
                ..Default::default()
            };
            let mut schedule = Schedule::new(&engine, &options).unwrap();
            let block = Speculation::by(MtpDrafter::new(&engine, &session).unwrap());
            let mut streams = Vec::new();
            for (i, case) in cases.iter().enumerate() {
                let speculation = if i % 3 == 2 {
                    block.clone()
                } else {
                    block.clone().fixed_length(1 + i % 4)
                };
                let request = Request::new(case.prompt.clone(), case.sampler.clone())
                    .max_tokens(case.max_tokens)
                    .stop(case.stop.clone())
                    .speculate(speculation);
                streams.push(schedule.submit(request).unwrap());
                schedule.step();
            }
            while schedule.step() {}
            let mut n_drafted = 0;
            for (i, (mut stream, expected)) in streams.into_iter().zip(&expected).enumerate() {
                let tokens: Vec<u32> = stream.by_ref().map(|piece| piece.unwrap().token).collect();
                assert_eq!(&tokens, expected, "{name} {i} {kv_budget:?} {cache:?}");
                n_drafted += stream.finish().unwrap().drafts.n_drafted;
            }
            assert!(n_drafted > 20, "{n_drafted}");
        }
    }
}

/// A file whose block lacks something, or has something else, runs without it, and says why.
#[test]
fn broken_blocks_are_refused_by_name() {
    let is_of_block = |name: &str, i: u64| name.starts_with(&format!("blk.{i}."));
    for line in lines() {
        let name = line["name"].as_str().unwrap();
        let arch = line["metadata"]["general.architecture"].as_str().unwrap();
        let i = line["metadata"][format!("{arch}.block_count")]
            .as_u64()
            .unwrap()
            - 1;
        let tensors: Vec<String> = parts(&line)
            .tensor_names()
            .into_iter()
            .filter(|tensor| is_of_block(tensor, i))
            .collect();
        assert!(tensors.len() > 10);
        let whole = open(parts(&line).gguf()).unwrap();
        assert_eq!((whole.has_mtp().unwrap(), whole.unknown().len()), (true, 0));
        let logits = |model: &Model| {
            let mut session = model.session_with(&f32_options(32)).unwrap();
            session.prefill(&[1, 2, 3, 4]).unwrap();
            session.logits().to_vec()
        };
        let expected = logits(&whole);
        for tensor in &tensors {
            for change in 0..3 {
                let mut parts = parts(&line);
                match change {
                    0 => parts.remove_tensor(tensor),
                    1 => parts.resize(tensor, 0, 7),
                    _ => parts.rename_tensor(tensor, &format!("blk.{i}.other.weight")),
                }
                let model = open(parts.gguf())
                    .unwrap_or_else(|error| panic!("{name} {tensor} {change}: {error}"));
                assert_eq!(logits(&model), expected);
                // It may do without its own last norm, and without biases.
                let is_bias = tensor.contains(".attn_") && tensor.ends_with(".bias");
                let optional = is_bias || tensor.ends_with("shared_head_norm.weight");
                if change == 0 && optional {
                    assert!(model.has_mtp().unwrap(), "{name} {tensor}");
                    continue;
                }
                let error = model
                    .has_mtp()
                    .expect_err(&format!("{name} {tensor} {change}"));
                assert!(!matches!(error, ModelError::UnknownMtp { .. }));
                let refused =
                    MtpDrafter::new(&model.engine().unwrap(), &f32_options(32)).unwrap_err();
                assert!(
                    matches!(&refused, SessionError::NoMtp { why: Some(why) } if *why == error.to_string())
                );
                let n_left = tensors.len() - usize::from(change == 0);
                assert_eq!(model.unknown().len(), n_left, "{name} {tensor} {change}");
            }
        }
    }
    let plain = crate::tiny::Tiny::Llama.model(ruvllm::quant::DType::F32);
    assert!(!plain.has_mtp().unwrap());
    let refused = MtpDrafter::new(&plain.engine().unwrap(), &f32_options(32));
    assert!(matches!(refused, Err(SessionError::NoMtp { why: None })));
}

/// Unused, a block takes nothing; used, what the plan says; and a limit is kept.
#[test]
fn memory_is_planned() {
    for (name, model) in models() {
        let options = SessionOptions {
            n_ctx: Some(700),
            ..Default::default()
        };
        let keeping = SessionOptions {
            keep_states: true,
            ..options.clone()
        };
        let plan = |options: &SessionOptions| {
            model
                .memory_plan(&PlanOptions::from(options.clone()))
                .unwrap()
        };
        let taken = |options: &SessionOptions| {
            let engine = engine(&model, 2);
            let mut session = engine.session_with(options).unwrap();
            session.prefill(&[3; 650]).unwrap();
            session.decode(1).unwrap();
            (engine.memory().buffers, session.state().memory().rest)
        };
        let (with, without) = (taken(&keeping), taken(&options));
        let (plan_with, plan_without) = (plan(&keeping), plan(&options));
        assert!(with.1 > without.1 + 512 * 4 * model.hparams().n_embd as u64);
        let near = |planned: u64, taken: u64| 20 * planned.abs_diff(taken) <= taken.max(20 << 10);
        assert!(
            near(plan_without.buffers, without.0) && near(plan_without.rest, without.1),
            "{name} {plan_without:?}"
        );
        // The block's own tokens and logits are planned besides.
        let of_block = 715 * 5 + 4 * model.hparams().n_vocab as u64;
        assert!(plan_with.buffers >= with.0, "{name} {plan_with:?} {with:?}");
        assert!(
            plan_with.rest >= with.1 && plan_with.rest <= with.1 + 2 * of_block + (64 << 10),
            "{name} {plan_with:?} {with:?}"
        );
        assert!(
            plan_with.kv > plan_without.kv && plan_with.kv < 3 * plan_without.kv,
            "{name}"
        );
        // A limit with room for all, and one without room for the block.
        let limited = |limit: u64, kv_budget: u64| {
            let model = OpenOptions::new()
                .arch(level())
                .memory_limit(limit)
                .open_gguf(model.gguf().clone())
                .unwrap();
            let options = EngineOptions {
                kv_budget: Some(kv_budget),
                ..Default::default()
            };
            let engine = Engine::new(&model, &options).unwrap();
            MtpDrafter::new(&engine, &keeping).map(drop)
        };
        let kv = plan_without.kv;
        limited(plan_with.total() + (1 << 20), kv).unwrap();
        assert!(matches!(
            limited(plan_with.total() + (1 << 20), u64::MAX),
            Err(SessionError::MemoryLimit { .. })
        ));
    }
}
