//! Images beside others: many requests, prefixes that are found again, sessions that were saved,
//! encoded images on disk.

use crate::vision::Case;
use ruvllm::Engine;
use ruvllm::engine::{CacheMode, EngineOptions};
use ruvllm::scheduler::{Request, Schedule, ScheduleOptions};
use ruvllm::session::{EncodedPrompt, Part};
use ruvllm::vision::Projector;
use ruvllm::{KvType, Session, SessionError, SessionOptions};
use ruvllm::{Sampler, SamplerOptions};
use serde_json::Value;
use std::num::NonZeroUsize;

/// Images whose tokens see each other, in all layers and in those with windows; positions of rows and
/// columns; deepstack; several spans of an image; a recurrent model.
const KINDS: [&str; 6] = [
    "gemma3",
    "gemma4",
    "qwen25vl",
    "qwen3vl",
    "mistral3",
    "minicpmv46",
];

fn options(n_batch: usize, cache: CacheMode) -> SessionOptions {
    SessionOptions {
        kv_type: KvType::F32,
        n_batch,
        prefix: cache.into(),
        ..Default::default()
    }
}

fn engine(case: &Case, kv_budget: Option<u64>) -> Engine {
    let options = EngineOptions {
        kv_budget,
        ..Default::default()
    };
    Engine::new(&case.model, &options).unwrap()
}

fn greedy() -> Sampler {
    Sampler::new(SamplerOptions {
        temperature: 0.0,
        ..Default::default()
    })
    .unwrap()
}

/// Tokens and bits of the log-probabilities of an answer.
type Answer = Vec<(u32, u32)>;

/// The answers to prompts, all at a time, and how many tokens were found in the cache.
fn scheduled(
    engine: &Engine,
    session: &SessionOptions,
    prompts: &[EncodedPrompt],
) -> (Vec<Answer>, usize) {
    let options = ScheduleOptions {
        session: session.clone(),
        n_pieces: 1000,
        ..Default::default()
    };
    let mut schedule = Schedule::new(engine, &options).unwrap();
    let submit = |prompt: &EncodedPrompt| {
        let request = Request::of_prompt(prompt.clone(), greedy());
        schedule.submit(request.max_tokens(12).logprobs(0)).unwrap()
    };
    let mut streams: Vec<_> = prompts.iter().map(submit).collect();
    while schedule.step() {}
    let mut n_cached = 0;
    let answer = |stream: &mut ruvllm::scheduler::Stream| {
        let pieces: Answer = stream
            .map(|piece| piece.unwrap())
            .map(|piece| (piece.token, piece.logprob.unwrap().to_bits()))
            .collect();
        n_cached += stream.finish().unwrap().n_cached.total();
        pieces
    };
    (streams.iter_mut().map(answer).collect(), n_cached)
}

fn tokens_of(value: &Value) -> Vec<u32> {
    let tokens = value.as_array().unwrap().iter();
    tokens.map(|n| n.as_u64().unwrap() as u32).collect()
}

/// Requests with images have the bits of one alone, whatever the passes, the others and the cache, and
/// whether they lost their pages meanwhile; the first tokens are those of the models' authors.
#[test]
fn requests_with_images() {
    for name in KINDS {
        let Some(case) = Case::open(name) else { return };
        let mut prompts = Vec::new();
        let mut alone = Vec::new();
        for test in case.tests() {
            let mut session = case.session(test, 512);
            let prompt = case.prompt(&mut session, test);
            let all = options(512, CacheMode::Off);
            let (mut answer, _) =
                scheduled(&engine(&case, None), &all, std::slice::from_ref(&prompt));
            let answer = answer.remove(0);
            let generated = tokens_of(&test["generated"]);
            let own: Vec<u32> = answer.iter().map(|(token, _)| *token).collect();
            let n = own.len().min(generated.len());
            assert_eq!(own[..n], generated[..n], "{name} {}", test["id"]);
            prompts.push(prompt);
            alone.push(answer);
        }
        // Each twice, so that there is something to share.
        let twice = [&prompts[..], &prompts[..]].concat();
        let expected = [&alone[..], &alone[..]].concat();
        let longest = prompts.iter().map(|of| of.tokens().len()).max().unwrap();
        let mut session = case
            .model
            .session_with(&options(512, CacheMode::Off))
            .unwrap();
        session.prefill(&vec![1; longest + 13]).unwrap();
        let of_one = session.state().memory().kv.total();
        for (n_batch, cache, budget) in [
            (512, CacheMode::Off, None),
            (7, CacheMode::Off, None),
            (40, CacheMode::On, None),
            (32, CacheMode::Off, Some(2 * of_one)),
            (16, CacheMode::On, Some(3 * of_one)),
        ] {
            let engine = engine(&case, budget);
            for round in 0..2 {
                let (found, n_cached) = scheduled(&engine, &options(n_batch, cache), &twice);
                let id = format!("{name}, passes of {n_batch}, {cache:?}, {budget:?}, {round}");
                assert!(found == expected, "{id}: other bits");
                // Recurrent layers go on at borders of pages alone.
                let is_found = name != "minicpmv46";
                let finds = is_found && round == 1 && cache == CacheMode::On && budget.is_none();
                assert!(!finds || n_cached > 0, "{id}: nothing was found again");
                assert!(cache == CacheMode::On || n_cached == 0, "{id}");
            }
        }
    }
}

/// Another image in the place of one is never taken for it.
#[test]
fn prefixes_know_images() {
    for name in ["gemma3", "qwen25vl"] {
        let Some(case) = Case::open(name) else { return };
        let test = &case.tests()[0];
        let image = &case.images(test)[0];
        // The same size, and so the same tokens.
        let mut rgb = image.rgb().to_vec();
        rgb.iter_mut().for_each(|x| *x = 255 - *x);
        let other = ruvllm::vision::Image::rgb8(image.width(), image.height(), &rgb).unwrap();
        let long = "what is it ? ".repeat(24);
        let question = "and what else ?";
        let turns = |image| [Part::Text(&long), Part::Image(image), Part::Text(question)];
        let folder =
            std::env::temp_dir().join(format!("ruvllm-seen-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let cached = EngineOptions {
            prefix_folder: Some(folder.clone()),
            ..Default::default()
        };
        let mut first = Engine::new(&case.model, &cached).unwrap();
        let logits = |engine: &Engine, cache, image| {
            let mut session = engine.session_with(&options(16, cache)).unwrap();
            session
                .images()
                .set_projector(&case.projector, case.options(test))
                .unwrap();
            session.images().prefill(&turns(image)).unwrap();
            (
                session.sequence().cached_tokens().total(),
                session.logits().to_vec(),
            )
        };
        let plain = engine(&case, None);
        let [of_image, of_other] =
            [image, &other].map(|image| logits(&plain, CacheMode::Off, image).1);
        assert!(of_image != of_other, "{name}: images make no difference");
        let place = {
            let session = first.session().unwrap();
            let mut session = session;
            session
                .images()
                .set_projector(&case.projector, case.options(test))
                .unwrap();
            let prompt = session.images().encode(&turns(image)).unwrap();
            prompt.images().next().unwrap()
        };
        // The second engine finds them on disk.
        for engine in 0..2 {
            for round in 0..2 {
                let id = format!("{name}, engine {engine}, round {round}");
                let (n, found) = logits(&first, CacheMode::On, image);
                assert!(found == of_image, "{id}: other bits");
                // Files hold whole pages.
                let is_new = (round, engine) == (0, 0);
                assert!(is_new || n >= 64, "{id}: {n}");
                assert!(round == 0 || n >= place.end, "{id}: {n} of {place:?}");
                let (n, found) = logits(&first, CacheMode::On, &other);
                assert!(found == of_other, "{id}: another's bits");
                assert!(!is_new || n <= place.start, "{id}: {n} of {place:?}");
            }
            first = Engine::new(&case.model, &cached).unwrap();
        }
        drop(first);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

/// A prompt of less than a page, and one whose pages end inside an image, are found up to the end of
/// the image, also where windows release pages.
#[test]
fn images_are_found_behind_windows() {
    for name in ["gemma3", "gemma4", "qwen25vl"] {
        let Some(case) = Case::open(name) else { return };
        let test = &case.tests()[0];
        let image = &case.images(test)[0];
        for n_before in [0, 12] {
            let before = "a cat ".repeat(n_before);
            let turns = |question| {
                [
                    Part::Text(&before),
                    Part::Image(image),
                    Part::Text(question),
                ]
            };
            let engine = engine(&case, None);
            let ask = |cache, question| {
                let mut session = engine.session_with(&options(512, cache)).unwrap();
                let projector = (&case.projector, case.options(test));
                session
                    .images()
                    .set_projector(projector.0, projector.1)
                    .unwrap();
                let prompt = session.images().encode(&turns(question)).unwrap();
                session.images().prefill(&turns(question)).unwrap();
                let n_cached = session.sequence().cached_tokens().total();
                let end = prompt.images().last().unwrap().end;
                (n_cached, end, session.logits().to_vec())
            };
            let questions = ["what ?", "what ?", " and why is it so ?"];
            for (i, question) in questions.into_iter().enumerate() {
                let (n, end, found) = ask(CacheMode::On, question);
                let id = format!("{name}, {n_before}, {i}: {n} of {end}");
                assert!(if i == 0 { n == 0 } else { n >= end }, "{id}");
                assert!(found == ask(CacheMode::Off, question).2, "{id}: other bits");
            }
        }
    }
}

/// A saved session with images goes on with the same bits where there is no encoder, also behind what
/// windows have released; a session continues a rendered conversation with the image that it has.
#[test]
fn saved_sessions_keep_images() {
    for name in KINDS {
        let Some(case) = Case::open(name) else { return };
        let test = case.tests().last().unwrap();
        let mut session = case.session(test, 64);
        let prompt = case.prompt(&mut session, test);
        let last = prompt.tokens().len() - 1;
        session
            .images()
            .prefill_encoded(&prompt, last, |_, _| ())
            .unwrap();
        let bytes = session.state().to_bytes().unwrap();
        let more: Vec<u32> = (0..40).map(|i| 3 + i % 7).collect();
        let continued = |session: &mut Session| {
            session.prefill(&more).unwrap();
            let logits = session.logits().to_vec();
            let end = prompt.images().last().unwrap().end;
            session.rewind(end).unwrap();
            session.prefill(&prompt.tokens()[end..]).unwrap();
            session.prefill(&more).unwrap();
            assert!(session.logits() == logits, "{name}: rewound");
            logits
        };
        let expected = continued(&mut session);
        let mut loaded = case
            .model
            .session_with(&options(9, CacheMode::Off))
            .unwrap();
        loaded.cache().load_bytes(bytes.clone()).unwrap();
        assert_eq!(loaded.tokens(), prompt.tokens());
        let kept = loaded.images().keep(&prompt);
        assert_eq!(
            kept, last,
            "{name}: images of the file are those of the prompt"
        );
        loaded.prefill(&prompt.tokens()[kept..]).unwrap();
        assert!(continued(&mut loaded) == expected, "{name}: other bits");
        // Damage is found, or harms nothing.
        for at in (0..bytes.len()).step_by(bytes.len() / 50 + 1) {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0x55;
            let _ = loaded.cache().load_bytes(bytes);
        }
    }
}

/// What is encoded once is not encoded again by another process with the same folder.
#[test]
fn encoded_images_on_disk() {
    let Some(case) = Case::open("qwen3vl") else {
        return;
    };
    let test = &case.tests()[0];
    let folder = std::env::temp_dir().join(format!("ruvllm-encoded-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let open = || Projector::open(case.dir.join("mmproj-f32.gguf"), &case.model).unwrap();
    let engine = engine(&case, None);
    let encode = |projector: &Projector| {
        let (options, cancel) = (case.options(test), ruvllm::CancelToken::default());
        let image = &case.images(test)[0];
        let encoded = engine
            .encode_image(projector, image, options, &cancel)
            .unwrap();
        (encoded.embeddings().to_vec(), projector.n_encoded())
    };
    let first = open();
    first.set_cache_folder(&folder, 1 << 20).unwrap();
    let (rows, n) = encode(&first);
    assert_eq!(n, 1);
    let second = open();
    second.set_cache_folder(&folder, 1 << 20).unwrap();
    assert_eq!(encode(&second), (rows.clone(), 0));
    // A damaged file is as if it were not there.
    let file = std::fs::read_dir(&folder).unwrap().next().unwrap().unwrap();
    let mut bytes = std::fs::read(file.path()).unwrap();
    bytes[100] ^= 1;
    std::fs::write(file.path(), bytes).unwrap();
    let third = open();
    third.set_cache_folder(&folder, 1 << 20).unwrap();
    assert_eq!(encode(&third), (rows, 1));
    std::fs::remove_dir_all(&folder).unwrap();
}

/// The number of tokens is known without encoding.
#[test]
fn tokens_are_counted() {
    for name in [
        "gemma3",
        "gemma4",
        "qwen2vl",
        "idefics3",
        "mistral3",
        "llava15",
        "llavanext",
        "internvl3",
        "lfm2vl",
        "glm4v",
        "minicpmv46",
        "llama4",
    ] {
        let Some(case) = Case::open(name) else { return };
        for test in case.tests() {
            let session = case.session(test, 512);
            let (images, text) = (case.images(test), test["prompt_hf"].as_str().unwrap());
            let texts = case.projector.texts_around(text);
            let mut parts = vec![Part::Text(texts[0])];
            for (image, text) in images.iter().zip(&texts[1..]) {
                parts.extend([Part::Image(image), Part::Text(text)]);
            }
            let reader = (&case.projector, case.options(test));
            let n = session.engine().count_parts(reader, &parts).unwrap();
            assert_eq!(
                (n, case.projector.n_encoded()),
                (tokens_of(&test["hf"]["input_ids"]).len(), 0)
            );
        }
    }
}

/// A learner that comes after an image is refused by name.
#[test]
fn hooks_behind_images() {
    #[derive(Clone)]
    struct Nothing;
    impl ruvllm::compute::OutputHook for Nothing {
        fn rows(&mut self, _: ruvllm::compute::OutputRows<'_>) {}
        fn cut(&mut self, _: ruvllm::compute::Cut) {}
        fn fork(&self) -> Box<dyn ruvllm::compute::OutputHook> {
            Box::new(self.clone())
        }
    }
    let Some(case) = Case::open("gemma3") else {
        return;
    };
    let test = &case.tests()[0];
    let mut session = case.session(test, 512);
    let image = &case.images(test)[0];
    session
        .images()
        .prefill(&[Part::Text("a"), Part::Image(image)])
        .unwrap();
    session.hooks().set(Box::new(Nothing));
    let refused = |outcome| matches!(outcome, Err(SessionError::HasImages { .. }));
    assert!(refused(session.prefill(&[5])) && refused(session.decode(5)));
    session.hooks().take::<Nothing>().unwrap();
    session.prefill(&[5]).unwrap();
}

/// What is told of an image's memory is what encoding it takes.
#[test]
fn memory_is_told() {
    for name in ["gemma3", "qwen3vl", "idefics3"] {
        let Some(case) = Case::open(name) else { return };
        let test = &case.tests()[0];
        let (image, bounds) = (&case.images(test)[0], case.options(test));
        let options = EngineOptions {
            n_threads: NonZeroUsize::new(1),
            ..Default::default()
        };
        let engine = Engine::new(&case.model, &options).unwrap();
        let told = case.projector.memory(image, bounds, 1).unwrap();
        assert_eq!(
            (engine.memory().buffers, case.projector.n_encoded()),
            (0, 0)
        );
        let cancel = ruvllm::CancelToken::default();
        let encoded = engine.encode_image(&case.projector, image, bounds, &cancel);
        let n_bytes = size_of_val(encoded.unwrap().embeddings()) as u64;
        assert_eq!(engine.memory().buffers, told.encoder, "{name}");
        assert_eq!(n_bytes, told.embeddings, "{name}");
        let parts = [Part::Image(image)];
        let n = engine
            .count_parts((&case.projector, bounds), &parts)
            .unwrap();
        assert!(
            (told.n_tokens..told.n_tokens + 40).contains(&n),
            "{name}: {n}"
        );
        let file = std::fs::metadata(case.dir.join("mmproj-f32.gguf"))
            .unwrap()
            .len();
        assert!(told.weights < file && told.weights > file / 2, "{name}");
    }
}
