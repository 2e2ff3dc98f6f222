//! Drafts change the speed, never the text: whoever drafts, and however much, all is as in plain
//! decoding.

use crate::common::few_or_many;
use crate::run::{engine, level, open};
use ruvllm::KvType;
use ruvllm::SessionOptions;
use ruvllm::compute::{Cut, OutputHook, OutputRows};
use ruvllm::decode::{Draft, DraftStats, Drafter, ModelDrafter, Speculation};
use ruvllm::engine::{DrafterMemory, PlanOptions};
use ruvllm::gguf::{Array, Gguf, Value, Writer};
use ruvllm::kv::KvTiers;
use ruvllm::model::OpenOptions;
use ruvllm::{Finish, Generation, TokenText};
use ruvllm::{Model, Sampler, SamplerOptions, Session, SessionError, StopReason};
use std::num::NonZeroUsize;
use std::sync::LazyLock;

const PATH: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/models/ruvllm-rust-6m-q8_0.gguf"
);

static MODEL: LazyLock<Model> = LazyLock::new(|| open(Gguf::open(PATH).unwrap()).unwrap());

/// The same weights with a window, which the family has not.
pub(crate) static WINDOWED: LazyLock<Model> = LazyLock::new(|| {
    let gguf = Gguf::open(PATH).unwrap();
    let mut writer = Writer::new();
    for (key, value) in gguf.metadata().iter() {
        let value = if key == "general.architecture" {
            Value::from("granite_swa")
        } else {
            value.clone()
        };
        writer.metadata(key.replacen("llama.", "granite_swa.", 1), value);
    }
    writer.metadata("granite_swa.attention.sliding_window", 70u32);
    for tensor in gguf.tensors() {
        writer.tensor(&*tensor.name, &tensor.dims, tensor.dtype, gguf.data(tensor));
    }
    let gguf = Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap();
    let model = OpenOptions::new().arch(level()).open_gguf(gguf).unwrap();
    assert!(
        model
            .hparams()
            .attention()
            .all(|attn| attn.window == Some(70))
    );
    model
});

/// The same weights with other tokens.
static RENAMED: LazyLock<Model> = LazyLock::new(|| {
    let gguf = Gguf::open(PATH).unwrap();
    let mut writer = Writer::new();
    for (key, value) in gguf.metadata().iter() {
        let value = match value {
            Value::Array(Array::Strings(texts)) if key == "tokenizer.ggml.tokens" => {
                let mut texts: Vec<String> = texts
                    .iter()
                    .map(|text| String::from_utf8_lossy(text).into_owned())
                    .collect();
                texts[0] = "<|end|>".into();
                Value::from(Array::Strings(texts.into_iter().collect()))
            }
            value => value.clone(),
        };
        writer.metadata(key, value);
    }
    for tensor in gguf.tensors() {
        writer.tensor(&*tensor.name, &tensor.dims, tensor.dtype, gguf.data(tensor));
    }
    open(Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap()).unwrap()
});

const TEXTS: [&str; 6] = [
    "Ownership is",
    "fn main() {\n    let mut x = 5;\n    println!(\"The value of x is: {x}\");\n    x = 6;\n    println!(\"The value",
    "{\"name\": \"one\", \"value\": 1}, {\"name\": \"two\", \"value\": 2}, {\"name\": \"three\", \"value\":",
    "The",
    "Closures can capture values from their environment in three ways, which directly map to the three ways a function",
    "use std::collections::HashMap;\nuse std::collections::HashSet;\nuse std::collections::",
];

fn tokens(text: &str) -> Vec<u32> {
    MODEL.tokenizer().unwrap().encode_prompt(text)
}

fn greedy() -> Sampler {
    Sampler::new(SamplerOptions {
        temperature: 0.0,
        ..Default::default()
    })
    .unwrap()
}

/// Everything that has a state: penalties over the history, random numbers in filters and draws.
fn sampled(seed: u64) -> Sampler {
    let options = SamplerOptions {
        temperature: 0.9,
        seed: Some(seed),
        repeat_penalty: 1.1,
        ..Default::default()
    };
    Sampler::new(match seed % 3 {
        0 => options,
        1 => SamplerOptions {
            xtc_probability: 0.3,
            dry_multiplier: 0.5,
            ..options
        },
        _ => SamplerOptions {
            mirostat: ruvllm::sample::Mirostat::V2,
            ..options
        },
    })
    .unwrap()
}

/// Knows the text that comes, and says it, or something else.
#[derive(Clone, Debug)]
pub(crate) struct Oracle {
    tokens: Vec<u32>,
    n: usize,
    /// Of a thousand guesses, how many are wrong.
    n_wrong: u64,
    state: u64,
}

impl Oracle {
    pub(crate) fn new(tokens: Vec<u32>, n_wrong: u64) -> Oracle {
        Oracle {
            tokens,
            n: 0,
            n_wrong,
            state: 5,
        }
    }
}

impl Drafter for Oracle {
    fn name(&self) -> &'static str {
        "oracle"
    }

    fn push(&mut self, tokens: &[u32]) {
        let known = &self.tokens[self.n.min(self.tokens.len())..];
        let n_same = known.len().min(tokens.len());
        assert_eq!(
            known[..n_same],
            tokens[..n_same],
            "drafters are told the text"
        );
        self.n += tokens.len();
    }

    fn draft(&mut self, n: usize, draft: &mut Vec<Draft>) {
        let known = &self.tokens[self.n.min(self.tokens.len())..];
        for &token in known.iter().take(n) {
            self.state = self
                .state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let is_wrong = (self.state >> 33) % 1000 < self.n_wrong;
            draft.push(Draft {
                token: if is_wrong { token ^ 1 } else { token },
                confidence: 7,
            });
        }
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

/// Guesses at random, tokens outside the vocabulary and grades that there are not among them; more
/// than asked for.
#[derive(Clone, Debug)]
pub(crate) struct Scatter(pub(crate) u64);

impl Drafter for Scatter {
    fn name(&self) -> &'static str {
        "random"
    }

    fn push(&mut self, _: &[u32]) {}

    fn draft(&mut self, n: usize, draft: &mut Vec<Draft>) {
        for _ in 0..n + 3 {
            self.0 = self
                .0
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            draft.push(Draft {
                token: (self.0 >> 33) as u32 % 4500,
                confidence: (self.0 >> 50) as u8,
            });
        }
    }

    fn boxed_clone(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

/// How a text is generated.
#[derive(Clone)]
struct Case {
    prompt: Vec<u32>,
    sampler: Sampler,
    max_tokens: usize,
    stop: Vec<String>,
    logprobs: Option<usize>,
}

impl Case {
    fn numbered(i: usize) -> Case {
        Case {
            prompt: tokens(TEXTS[i % TEXTS.len()]),
            sampler: if i.is_multiple_of(3) {
                greedy()
            } else {
                sampled(i as u64)
            },
            max_tokens: [70, 90, 1, 33, 2, 120, 0][i % 7],
            stop: if i % 4 == 1 {
                vec!["the ".into(), ";\n".into()]
            } else {
                vec![]
            },
            logprobs: (i % 5 == 2).then_some(2),
        }
    }

    fn generation(&self, session: Session) -> Generation {
        let generation = session.into_generation(&self.prompt, self.sampler.clone());
        let generation = generation
            .max_tokens(self.max_tokens)
            .stop(self.stop.clone());
        match self.logprobs {
            Some(n_top) => generation.logprobs(n_top),
            None => generation,
        }
    }
}

/// Pieces, the end, and what is left behind: the session's tokens, and what it and the sampler
/// write next.
type Outcome = (
    Vec<TokenText>,
    StopReason,
    usize,
    String,
    Vec<u32>,
    Vec<u32>,
);

/// Takes the first `n` pieces, then whatever comes from the same session and sampler.
fn outcome(
    mut generation: Generation,
    n: usize,
) -> (Outcome, Option<Finish>, Vec<(&'static str, DraftStats)>) {
    let pieces: Vec<TokenText> = generation.by_ref().take(n).map(Result::unwrap).collect();
    let (finish, drafters) = (generation.finish(), generation.drafters());
    let rest = generation.rest().to_owned();
    let (session, sampler) = generation.into_parts();
    let held = session.tokens().to_vec();
    let mut next = session.into_generation(&[held[0]], sampler).max_tokens(12);
    // Of a full context nothing.
    next.by_ref().for_each(drop);
    let (reason, n) = finish.map_or((StopReason::Cancelled, 0), |finish| {
        (finish.reason, finish.n_generated)
    });
    (
        (pieces, reason, n, rest, held, next.tokens().to_vec()),
        finish,
        drafters,
    )
}

/// Answers by whoever drafts, for a text whose tokens are known.
fn drafters(text: Vec<u32>, i: usize) -> Vec<(&'static str, Speculation)> {
    let lengths = [1, 2, 3, 7, 15];
    let length = lengths[i % lengths.len()];
    let oracle = |n_wrong| Oracle::new(text.clone(), n_wrong);
    vec![
        ("ngram", Speculation::default().fixed_length(length)),
        ("ngram, as many as pay", Speculation::default()),
        (
            "random",
            Speculation::by(Scatter(i as u64)).fixed_length(length),
        ),
        (
            "always right",
            Speculation::by(oracle(0)).fixed_length(length),
        ),
        (
            "always wrong",
            Speculation::by(oracle(1000)).fixed_length(length),
        ),
        (
            "right and wrong",
            Speculation::by(oracle(300)).fixed_length(15),
        ),
        (
            "right, as many as pay",
            Speculation::by(oracle(100)).and(Scatter(1)),
        ),
        ("none", Speculation::default().fixed_length(0)),
    ]
}

fn check(model: &Model, options: &SessionOptions, cases: impl Iterator<Item = usize>) {
    let engine = engine(model, 2);
    let session = || engine.session_with(options).unwrap();
    let (mut n_accepted, mut n_rejected) = (0, 0);
    for i in cases {
        let case = Case::numbered(i);
        // Once to the end, and dropped half-way.
        for n in [usize::MAX, 1 + i % 23] {
            let (plain, _, _) = outcome(case.generation(session()), n);
            let mut full = case.generation(session());
            full.by_ref().for_each(|piece| drop(piece.unwrap()));
            let text = [&case.prompt[..], full.tokens()].concat();
            for (name, speculation) in drafters(text, i) {
                let (drafted, finish, drafters) =
                    outcome(case.generation(session()).speculate(speculation), n);
                assert_eq!(drafted, plain, "case {i}, {name}, {options:?}");
                let sum = |of: fn(&DraftStats) -> usize| {
                    drafters.iter().map(|(_, stats)| of(stats)).sum::<usize>()
                };
                let (accepted, all) = (sum(|stats| stats.n_accepted), sum(|stats| stats.n_drafted));
                assert!(accepted <= all);
                let Some(finish) = finish else { continue };
                assert_eq!(
                    (finish.drafts.n_accepted, finish.drafts.n_drafted),
                    (accepted, all)
                );
                match name {
                    // Each pass gives one token that was not drafted; the last token is not
                    // computed, the first comes with the prompt.
                    _ if case.stop.is_empty() && finish.reason == StopReason::MaxTokens => {
                        assert_eq!(
                            finish.n_generated.saturating_sub(1),
                            finish.drafts.n_passes + accepted,
                            "{name}"
                        );
                    }
                    "always wrong" | "none" => assert_eq!(accepted, 0),
                    _ => {}
                }
                assert!(
                    name != "always right"
                        || accepted == all
                        || finish.reason != StopReason::MaxTokens
                );
                n_accepted += accepted;
                n_rejected += all - accepted;
            }
        }
    }
    eprintln!("{n_accepted} drafts were accepted, {n_rejected} rejected");
    assert!(n_accepted > 100 && n_rejected > 100);
}

/// Greedy and sampled, with stop strings, limits, log-probabilities; to the end and dropped
/// half-way.
#[test]
fn the_text_is_that_of_plain_decoding() {
    let n = few_or_many(6, 14, 1000);
    check(
        &MODEL,
        &SessionOptions {
            n_ctx: Some(300),
            ..Default::default()
        },
        0..n,
    );
    // Whose context is full soon, at the end of a page and within one.
    for n_ctx in [64, 75] {
        check(
            &MODEL,
            &SessionOptions {
                n_ctx: Some(n_ctx),
                exact: true,
                ..Default::default()
            },
            0..n.min(12),
        );
    }
}

/// A stop string inside a run of right guesses: what lies behind it is neither counted, nor in the
/// text or the session.
#[test]
fn a_stop_string_ends_a_text_within_a_run() {
    let session = || {
        engine(&MODEL, 1)
            .session_with(&SessionOptions {
                n_ctx: Some(100),
                ..Default::default()
            })
            .unwrap()
    };
    let case = Case {
        sampler: greedy(),
        max_tokens: 24,
        stop: vec![],
        logprobs: None,
        ..Case::numbered(0)
    };
    let (plain, ..) = outcome(case.generation(session()), usize::MAX);
    let text = [
        &case.prompt[..],
        &plain.0.iter().map(|piece| piece.token).collect::<Vec<_>>(),
    ]
    .concat();
    let mut n_inside = 0;
    for piece in plain.0.iter().filter(|piece| piece.text.len() > 2) {
        let case = Case {
            stop: vec![piece.text.clone()],
            ..case.clone()
        };
        let (stopped, ..) = outcome(case.generation(session()), usize::MAX);
        let guesses = Speculation::by(Oracle::new(text.clone(), 0)).fixed_length(15);
        let (drafted, finish, _) =
            outcome(case.generation(session()).speculate(guesses), usize::MAX);
        assert_eq!(drafted, stopped, "{:?}", piece.text);
        let finish = finish.unwrap();
        assert_eq!(finish.reason, StopReason::StopString);
        assert!(finish.n_generated <= 24);
        // The pass that ended the text had guessed further.
        n_inside += usize::from(finish.drafts.n_drafted > finish.drafts.n_accepted);
    }
    assert!(n_inside > 5, "{n_inside}");
}

/// What is rewound leaves no trace in keys and values of any precision, precision by age and
/// windows included.
#[test]
fn rejected_drafts_leave_no_trace_in_any_cache() {
    let n = few_or_many(2, 4, 80);
    for kv_type in [KvType::F32, KvType::Bf16, KvType::Q8, KvType::Q4] {
        check(
            &MODEL,
            &SessionOptions {
                n_ctx: Some(300),
                kv_type,
                ..Default::default()
            },
            0..n,
        );
    }
    let kv_tiers = Some(KvTiers {
        recent: 64,
        middle: 64,
    });
    check(
        &MODEL,
        &SessionOptions {
            n_ctx: Some(300),
            kv_tiers,
            n_batch: 6,
            ..Default::default()
        },
        0..n,
    );
    check(
        &WINDOWED,
        &SessionOptions {
            n_ctx: Some(300),
            ..Default::default()
        },
        0..2 * n,
    );
}

/// A model drafts for itself, and is right in most of what is greedy; its own session follows what
/// was rejected.
#[test]
fn a_model_drafts() {
    let options = SessionOptions {
        n_ctx: Some(200),
        ..Default::default()
    };
    let drafter = || ModelDrafter::new(&engine(&WINDOWED, 1), &MODEL, &options).unwrap();
    for i in 0..6 {
        let case = Case {
            max_tokens: 60,
            stop: vec![],
            ..Case::numbered(i)
        };
        let session = || engine(&MODEL, 1).session_with(&options).unwrap();
        let (plain, ..) = outcome(case.generation(session()), usize::MAX);
        for (speculation, is_fixed) in [
            (Speculation::by(drafter()).fixed_length(5), true),
            (Speculation::default().and(drafter()), false),
        ] {
            let (drafted, finish, _) = outcome(
                case.generation(session()).speculate(speculation),
                usize::MAX,
            );
            assert_eq!(drafted, plain, "{i}");
            let drafts = finish.unwrap().drafts;
            assert!(
                !is_fixed || i % 3 != 0 || drafts.n_accepted > drafts.n_passes,
                "{drafts:?}"
            );
        }
    }
    let refused = ModelDrafter::new(&engine(&RENAMED, 1), &MODEL, &options);
    assert!(
        matches!(refused, Err(SessionError::DraftVocabulary { token: 0, .. })),
        "{refused:?}"
    );
}

/// A model that drafts takes no more than its part of the plan, for each text.
#[test]
fn a_model_that_drafts_is_in_the_plan() {
    let options = SessionOptions {
        n_ctx: Some(300),
        ..Default::default()
    };
    let memory = DrafterMemory::open(Gguf::open(PATH).unwrap(), &MODEL).unwrap();
    let [shared, of_text] = [memory.shared(300), memory.of_text(300, options.n_batch)];
    let plain = PlanOptions {
        n_sequences: 3,
        n_threads: NonZeroUsize::new(1),
        ..options.clone().into()
    };
    let drafted = PlanOptions {
        drafters: vec![memory],
        ..plain.clone()
    };
    let [plain, drafted] = [plain, drafted].map(|plan| MODEL.memory_plan(&plan).unwrap());
    assert_eq!(drafted.drafters, shared + 3 * of_text);
    assert_eq!(drafted.needed() - plain.needed(), drafted.drafters);
    let of_drafts = engine(&MODEL, 1);
    let drafter = ModelDrafter::new(&of_drafts, &MODEL, &options).unwrap();
    let case = Case {
        max_tokens: 280,
        stop: vec![],
        ..Case::numbered(0)
    };
    let session = engine(&MODEL, 1).session_with(&options).unwrap();
    let generation = case.generation(session);
    let speculation = Speculation::by(drafter).fixed_length(5);
    let (_, finish, _) = outcome(generation.speculate(speculation), usize::MAX);
    assert!(finish.unwrap().drafts.n_accepted > 0);
    let taken = of_drafts.memory();
    assert!(
        taken.kv_free > of_text / 2 && taken.total() <= shared + of_text,
        "{taken:?} of {shared} and {of_text}"
    );
}

/// A pool with no room for a guess's page: drafts take none, so that a text which fits without them
/// fits with them.
#[test]
fn drafts_take_no_pages() {
    use ruvllm::Engine;
    use ruvllm::engine::EngineOptions;
    let options = SessionOptions {
        n_ctx: Some(300),
        ..Default::default()
    };
    let case = Case {
        max_tokens: 100,
        stop: vec![],
        ..Case::numbered(1)
    };
    let run = |kv_budget: Option<u64>, speculation: Option<Speculation>| {
        let engine = Engine::new(
            &MODEL,
            &EngineOptions {
                kv_budget,
                ..Default::default()
            },
        )
        .unwrap();
        let mut generation = case.generation(engine.session_with(&options).unwrap());
        if let Some(speculation) = speculation {
            generation = generation.speculate(speculation);
        }
        let mut n_pages = 0;
        let mut outcome = Ok(());
        for piece in generation.by_ref() {
            n_pages = n_pages.max(engine.pool().stats().n_pages);
            outcome = outcome.and(piece.map(drop));
        }
        (
            generation.tokens().to_vec(),
            n_pages,
            engine.pool().stats().used,
            outcome.map_err(|error| error.to_string()),
        )
    };
    let plain = run(None, None);
    assert!(plain.1 > 1 && plain.3.is_ok());
    let text = [&case.prompt[..], &plain.0].concat();
    for budget in [plain.2, plain.2 / 2] {
        let expected = run(Some(budget), None);
        assert_eq!(expected.3.is_ok(), budget == plain.2);
        for n_wrong in [0, 500, 1000] {
            let speculation = Speculation::by(Oracle::new(text.clone(), n_wrong)).fixed_length(15);
            assert_eq!(run(Some(budget), Some(speculation)), expected, "{n_wrong}");
        }
    }
}

/// A hook is shown the tokens of the text, and no others: there nothing is drafted.
#[test]
fn hooks_see_no_drafts() {
    struct Count;
    impl OutputHook for Count {
        fn rows(&mut self, rows: OutputRows<'_>) {
            assert_eq!(rows.tokens.len(), rows.first + 1);
        }
        fn cut(&mut self, _: Cut) {}
        fn fork(&self) -> Box<dyn OutputHook> {
            Box::new(Count)
        }
    }
    let mut session = MODEL.session().unwrap();
    session.hooks().set(Box::new(Count));
    let mut generation = session.into_generation(TEXTS[1], greedy()).max_tokens(40);
    generation = generation.speculate(Speculation::default().fixed_length(4));
    generation.by_ref().for_each(|piece| drop(piece.unwrap()));
    let drafts = generation.finish().unwrap().drafts;
    assert_eq!((drafts.n_passes, drafts.n_drafted), (39, 0));
}

/// Who looks at a session while it generates, or copies or saves it, sees the text and no drafts.
#[test]
fn drafts_are_nobodys_business() {
    let case = Case {
        max_tokens: 60,
        stop: vec![],
        logprobs: None,
        ..Case::numbered(0)
    };
    let options = SessionOptions {
        n_ctx: Some(200),
        ..Default::default()
    };
    let session = || engine(&MODEL, 1).session_with(&options).unwrap();
    let mut plain = case.generation(session());
    let mut texts = vec![case.prompt.clone()];
    while plain.next().is_some() {
        texts.push([&case.prompt[..], plain.tokens()].concat());
    }
    let text = texts.last().unwrap().clone();
    let mut drafted = case.generation(session());
    drafted = drafted.speculate(Speculation::by(Oracle::new(text.clone(), 200)).fixed_length(15));
    for n in 1.. {
        if drafted.next().is_none() {
            break;
        }
        let session = drafted.session();
        assert_eq!(
            (session.tokens(), session.position()),
            (&texts[n][..], texts[n].len())
        );
        let mut fork = session.fork().unwrap();
        let mut loaded = engine(&MODEL, 1).session_with(&options).unwrap();
        loaded
            .cache()
            .load_bytes(session.state().to_bytes().unwrap())
            .unwrap();
        for session in [&mut fork, &mut loaded] {
            assert_eq!(session.tokens(), &texts[n]);
            let mut sampler = greedy();
            let next = session
                .generate(&[text[0]], &mut sampler)
                .unwrap()
                .max_tokens(3)
                .text()
                .unwrap();
            let mut again = engine(&MODEL, 1).session_with(&options).unwrap();
            again.prefill(&case.prompt).unwrap();
            texts[n][case.prompt.len()..]
                .iter()
                .for_each(|&token| again.decode(token).unwrap());
            assert_eq!(
                again
                    .generate(&[text[0]], &mut sampler)
                    .unwrap()
                    .max_tokens(3)
                    .text()
                    .unwrap(),
                next
            );
        }
    }
    assert!(drafted.finish().unwrap().drafts.n_accepted > 20);
}

#[cfg(feature = "grammar")]
mod forced {
    use super::*;
    use ruvllm::grammar::{Grammar, TokenTrie};

    /// What a grammar forces and what is drafted meet in the middle of a pass: braces are not
    /// doubled (vLLM #48516), the mask has accepted each token once.
    #[test]
    fn grammars_and_drafts_agree() {
        let trie = TokenTrie::new(MODEL.tokenizer().unwrap()).unwrap();
        let regexes = [
            "The owner of the value is (moved|borrowed) and then it is dropped by (the caller|nobody)\\. So it ends\\.",
            "\\{\"points\": \\[\\{\"x\": [0-9]{1,3}, \"y\": [0-9]{1,3}\\}(, \\{\"x\": [0-9]{1,3}, \"y\": [0-9]{1,3}\\}){5}\\]\\}",
            "[a-z ]{30,60}",
        ];
        for (i, regex) in regexes.iter().enumerate() {
            for seed in 0..6 {
                let mut case = Case {
                    max_tokens: 200,
                    stop: vec![],
                    ..Case::numbered(0)
                };
                case.logprobs = (seed % 2 == 1).then_some(1);
                case.sampler = if seed == 0 { greedy() } else { sampled(seed) };
                case.sampler.set_mask(Some(Box::new(
                    Grammar::regex(&trie, regex).unwrap().matcher(),
                )));
                for max_tokens in [200, 9 + seed as usize] {
                    case.max_tokens = max_tokens;
                    let session = || engine(&MODEL, 1).session().unwrap();
                    let run = |speculation: Option<Speculation>| {
                        let mut generation = case.generation(session());
                        if let Some(speculation) = speculation {
                            generation = generation.speculate(speculation);
                        }
                        let pieces: Vec<TokenText> =
                            generation.by_ref().map(Result::unwrap).collect();
                        let (finish, n) = (generation.finish().unwrap(), generation.tokens().len());
                        let (session, mut sampler) = generation.into_parts();
                        let at_end = usize::from(finish.reason == StopReason::EndOfGeneration);
                        assert!(
                            sampler.rollback(n + at_end).is_ok() && sampler.rollback(1).is_err()
                        );
                        (
                            (pieces, finish.reason, session.tokens().to_vec()),
                            finish.drafts,
                        )
                    };
                    let (plain, before) = run(None);
                    for (name, speculation) in drafters(plain.2.clone(), i + seed as usize) {
                        let (drafted, drafts) = run(Some(speculation));
                        assert_eq!(drafted, plain, "{regex} {name} {seed}");
                        assert!(
                            drafts.n_passes <= before.n_passes,
                            "{name}: {drafts:?}, without {before:?}"
                        );
                    }
                }
            }
        }
    }
}
