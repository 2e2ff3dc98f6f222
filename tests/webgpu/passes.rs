//! Whole passes: engines on each adapter of this machine, against the CPU's scalar level with the
//! same keys and values in half precision, and against themselves.

use crate::common::{conformance, long, subdirectories};
use crate::mutants;
use crate::run::{OnLevel, engine, open};
use crate::tiny::{N_VOCAB, Tiny};
use crate::{CHECKED, devices};
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::arch::Arch;
use ruvllm::compute::TokenKind;
use ruvllm::decode::Speculation;
use ruvllm::engine::{EngineOptions, Outputs, Slot};
use ruvllm::gguf::Gguf;
use ruvllm::gpu::GpuError;
use ruvllm::gpu::GpuRunner;
use ruvllm::gpu::webgpu::{Device, Options, WebGpu};
use ruvllm::quant::DType;
use ruvllm::scheduler::{Request, Schedule, ScheduleOptions};
use ruvllm::{CancelToken, Engine, SessionOptions};
use ruvllm::{Sampler, SamplerOptions, Session, SessionError};
use std::num::NonZeroUsize;
use std::sync::{Arc, LazyLock};

/// As a program opens them; their compiled kernels serve all tests.
static DEVICES: LazyLock<Vec<Device>> = LazyLock::new(|| devices(Options::default()));
/// Likewise with cooperative matrices, those that have some.
static MATRICES: LazyLock<Vec<Device>> = LazyLock::new(|| {
    let mut all = devices(Options {
        matrices: true,
        ..Options::default()
    });
    all.retain(|device| device.info().matrix.is_some());
    all
});
/// With nothing above what every adapter has: attention binds two slabs at most.
static LIMITED: LazyLock<Vec<Device>> = LazyLock::new(|| devices(CHECKED));
static DEMO: LazyLock<Model> = LazyLock::new(|| {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/models/ruvllm-rust-6m-q8_0.gguf"
    );
    open(Gguf::open(path).unwrap()).unwrap()
});

/// Largest difference of logits from the scalar level's, as for Metal's kernels: those of tiny
/// models are below 10, and a key that rounds the other way moves them by some 1e-4.
const CLOSE: f32 = 1e-3;
/// Likewise where weights and activations of a prompt are rounded to `f16`, which was seen to move
/// logits by up to 5e-3.
const CLOSE_HALVES: f32 = 2e-2;

fn options() -> SessionOptions {
    SessionOptions {
        n_ctx: Some(256),
        kv_type: KvType::F16,
        ..Default::default()
    }
}

fn runner(device: &Device, model: &Model, n_layers: usize) -> Result<GpuRunner<WebGpu>, GpuError> {
    GpuRunner::new(WebGpu::new(device.clone()), model, n_layers)
}

fn engine_with(device: &Device, model: &Model, n_layers: usize, options: EngineOptions) -> Engine {
    let runner = runner(device, model, n_layers).unwrap_or_else(|e| panic!("{e}"));
    let options = EngineOptions {
        n_threads: NonZeroUsize::new(1),
        ..options
    };
    Engine::with_runner(model, &options, Arc::new(runner)).unwrap()
}

/// The last `n_layers` layers of a model on a GPU.
fn on_gpu(device: &Device, model: &Model, n_layers: usize) -> Engine {
    engine_with(device, model, n_layers, EngineOptions::default())
}

fn tokens(n: usize, seed: usize, n_vocab: usize) -> Vec<u32> {
    (0..n)
        .map(|i| ((i * 31 + seed * 7 + i * i % 11) % n_vocab) as u32)
        .collect()
}

fn max_abs(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |m, d| if d.is_nan() { f32::NAN } else { d.max(m) })
}

/// Logits of all tokens: a prompt of `n_prompt`, then one by one.
fn logits(session: &mut Session, tokens: &[u32], n_prompt: usize) -> Vec<f32> {
    let mut all = Vec::new();
    session
        .hooks()
        .prefill_each(&tokens[..n_prompt], 0, |_, logits| {
            all.extend_from_slice(logits)
        })
        .unwrap_or_else(|e| panic!("{e}"));
    for &token in &tokens[n_prompt..] {
        session.decode(token).unwrap_or_else(|e| panic!("{e}"));
        all.extend_from_slice(session.logits());
    }
    all
}

/// Difference of logits where sums alone are rounded otherwise: 2⁻²⁴ of each of some thousand terms,
/// of logits of some 10, whose errors add up like a random walk.
const SUMS: f64 = 1e-4;

/// Tiny models of every kind of layer, and gpt-oss, whose experts have biases and attention sinks.
fn models(dtype: DType) -> Vec<(&'static str, Model)> {
    let gpt_oss = ("gpt-oss", open(Tiny::gpt_oss(dtype).gguf()).unwrap());
    if dtype == DType::MXFP4 {
        return vec![gpt_oss];
    }
    let shapes = Tiny::SHAPES.iter();
    shapes
        .map(|tiny| (tiny.name(), tiny.model(dtype)))
        .chain([gpt_oss])
        .chain(recurrent(dtype))
        .collect()
}

/// Tiny models with states.
fn recurrent(dtype: DType) -> Vec<(&'static str, Model)> {
    [("lfm2", Tiny::lfm2(dtype)), ("qwen35", Tiny::qwen35(dtype))]
        .map(|(name, parts)| (name, open(parts.gguf()).unwrap()))
        .to_vec()
}

/// A tiny model of an architecture of the reference data.
fn of_family(name: &str) -> Model {
    let family = mutants::models().iter().find(|family| family.name == name);
    open(family.unwrap().parts().gguf()).unwrap()
}

#[test]
fn passes_of_every_shape_of_a_layer() {
    let exact = DEVICES.iter().map(|device| (device, CLOSE));
    let halves = MATRICES.iter().map(|device| (device, CLOSE_HALVES));
    for (device, close) in exact.chain(halves) {
        for dtype in [DType::F32, DType::Q8_0, DType::MXFP4] {
            for (name, model) in models(dtype) {
                let model = model.on(Arch::scalar());
                let tokens = tokens(41, 3, N_VOCAB);
                let cpu = engine(&model, 1);
                let mut session = cpu.session_with(&options()).unwrap();
                let expected = logits(&mut session, &tokens, 37);
                for n_layers in [usize::MAX, 1] {
                    let gpu = on_gpu(device, &model, n_layers);
                    let mut session = gpu.session_with(&options()).unwrap();
                    let ours = logits(&mut session, &tokens, 37);
                    let difference = max_abs(&ours, &expected);
                    println!("{name} {dtype}, {n_layers} layers: {difference:.1e}");
                    assert!(difference <= close, "{name} {dtype}: {difference}");
                    // A copied page, of whose layers some may be the CPU's.
                    let mut fork = session.fork().unwrap();
                    fork.decode(3).unwrap();
                    session.decode(3).unwrap();
                    assert_eq!(fork.logits(), session.logits());
                }
            }
        }
    }
}

/// Queries, keys and values by one dispatch, as gate and up with their activation, what happens to
/// heads, and attention with its merge.
#[test]
fn joined_calls_have_the_bits_of_single_ones() {
    for device in &*DEVICES {
        for dtype in [DType::F32, DType::Q8_0, DType::Q4_0] {
            for (name, model) in models(dtype) {
                joined_like_single(device, &model)
                    .unwrap_or_else(|e| panic!("{name} {dtype}: {e}"));
            }
        }
    }
}

/// Compares the logits of a model whose calls are joined with those of single calls.
pub(crate) fn joined_like_single(device: &Device, model: &Model) -> Result<(), String> {
    let tokens = tokens(9, 3, N_VOCAB);
    let gpu = on_gpu(device, model, usize::MAX);
    let of = |most: u32, join: bool| {
        device.group_products(most);
        device.join_calls(join);
        let mut session = gpu.session_with(&options()).unwrap();
        logits(&mut session, &tokens, 5)
    };
    let single = of(1, false);
    for (most, join) in [(2, false), (3, true)] {
        let joined = of(most, join);
        let differs = single.iter().zip(&joined).position(|(a, b)| a != b);
        if let Some(i) = differs {
            return Err(format!(
                "result: logit {i} is {} instead of {}",
                joined[i], single[i]
            ));
        }
    }
    Ok(())
}

/// Models whose calls are joined by all kernels that do: each rope, norms of heads, each activation.
pub(crate) fn joined_models() -> Vec<Model> {
    let shapes = [Tiny::Llama, Tiny::Gemma2, Tiny::Qwen3Moe];
    shapes.map(|tiny| tiny.model(DType::Q8_0)).to_vec()
}

/// Rows whose attention has one split, for which there is a kernel, beside one with several.
#[test]
fn bits_do_not_depend_on_the_splits_of_neighbours() {
    for device in &*DEVICES {
        for tiny in [Tiny::Llama, Tiny::Gemma2] {
            let model = tiny.model(DType::Q8_0);
            let engine = on_gpu(device, &model, usize::MAX);
            let begun = |n: usize| {
                let mut sequence = engine.sequence(&options()).unwrap();
                let prompt = tokens(n, n, N_VOCAB);
                step(
                    &engine,
                    &mut [Slot::new(&mut sequence, &prompt, TokenKind::Prompt)],
                );
                sequence
            };
            let mut alone = Vec::new();
            for n in [5, 127, 150] {
                let slot = &mut begun(n);
                alone.extend(step(
                    &engine,
                    &mut [Slot::new(slot, &[9], TokenKind::Generated)],
                ));
            }
            let mut three = [5, 127, 150].map(begun);
            let mut slots: Vec<_> = three
                .iter_mut()
                .map(|sequence| Slot::new(sequence, &[9], TokenKind::Generated))
                .collect();
            assert_eq!(step(&engine, &mut slots), alone, "{}", tiny.name());
        }
    }
}

/// Dispatches of a generated token: those of a layer, and embedding, last norm and head.
#[test]
fn a_token_is_few_dispatches() {
    for device in devices(Options::default()) {
        for (tiny, single, joined) in [(Tiny::Phi3, 15, 8), (Tiny::Gemma2, 17, 10)] {
            let model = tiny.model(DType::Q8_0);
            let n_layer = model.hparams().n_layer;
            let engine = on_gpu(&device, &model, usize::MAX);
            let dispatches = |most: u32, join: bool| {
                device.group_products(most);
                device.join_calls(join);
                let mut session = engine.session_with(&options()).unwrap();
                session.prefill(&[1, 2, 3]).unwrap();
                session.decode(4).unwrap();
                device.dispatches()
            };
            let finish = usize::from(model.hparams().logit_transform().cap > 0.0);
            assert_eq!(
                dispatches(1, false),
                n_layer * single + 3 + finish,
                "{}",
                tiny.name()
            );
            assert_eq!(
                dispatches(3, true),
                n_layer * joined + 3 + finish,
                "{}",
                tiny.name()
            );
        }
    }
}

/// Weights that are longer than what a kernel sees of a buffer: the same bits from parts of them.
/// The CPU looks up the embeddings, which it takes from the same values.
#[test]
fn long_weights_are_split_by_rows() {
    for device in &*DEVICES {
        for tiny in [Tiny::Llama, Tiny::Phi3] {
            let model = tiny.model(DType::Q8_0);
            let tokens = tokens(41, 3, N_VOCAB);
            let whole = on_gpu(device, &model, usize::MAX);
            let expected = logits(&mut whole.session_with(&options()).unwrap(), &tokens, 37);
            let gpu = WebGpu::with_weights_of(device.clone(), 1500);
            let runner = GpuRunner::new(gpu, &model, usize::MAX).unwrap();
            let split =
                Engine::with_runner(&model, &EngineOptions::default(), Arc::new(runner)).unwrap();
            let ours = logits(&mut split.session_with(&options()).unwrap(), &tokens, 37);
            assert_eq!(ours, expected, "{}", tiny.name());
        }
    }
}

/// The engine's step with these slots; logits by slot.
fn step(engine: &Engine, slots: &mut [Slot<'_>]) -> Vec<Vec<f32>> {
    let mut outputs = Outputs::default();
    engine
        .step(slots, &mut outputs, &CancelToken::default())
        .unwrap_or_else(|e| panic!("{e}"));
    (0..slots.len())
        .map(|slot| outputs.logits(slot).to_vec())
        .collect()
}

/// A row's bits depend on its kind and the tokens before it: not on who is computed beside it, on
/// how many rows there are, on how a prompt was split, or on pages that are shared.
#[test]
fn bits_do_not_depend_on_the_batch() {
    use TokenKind::{Generated, Prompt};
    let quantised = SessionOptions {
        kv_type: KvType::Q4,
        kv_type_v: Some(KvType::Q5),
        ..options()
    };
    let mut cases: Vec<_> = models(DType::Q8_0)
        .into_iter()
        .map(|(name, model)| (name, model, options()))
        .collect();
    cases.push(("gemma2", Tiny::Gemma2.model(DType::Q8_0), quantised.clone()));
    // ALiBi; gates; chunks and temperature; latent attention in both forms; keys and values of other
    // layers, embeddings for each layer; recurrences beside attention; halves of layers; Mamba 1.
    for name in [
        "bloom",
        "afmoe",
        "llama4",
        "deepseek2-lite-legacy",
        "deepseek2-lite",
        "gemma4-e",
        "gemma4-moe",
        "falcon-h1",
        "nemotron-h-moe",
        "jamba",
    ] {
        cases.push((name, of_family(name), options()));
    }
    cases.push(("deepseek3", of_family("deepseek3"), quantised));
    for (device, limited) in DEVICES.iter().zip(&*LIMITED) {
        for (name, model, options) in &cases {
            let device = if *name == "llama" { limited } else { device };
            let engine = on_gpu(device, model, usize::MAX);
            let n_vocab = model.hparams().n_vocab;
            let (prompt, other) = (tokens(70, 1, n_vocab), tokens(21, 2, n_vocab));
            let draft = [7, 8, 9];
            let sequence = || engine.sequence(options).unwrap();

            // Alone: a prompt in one piece, then token by token; another prompt.
            let (mut a, mut b) = (sequence(), sequence());
            let slot = Slot::new(&mut a, &prompt, Prompt).outputs_from(60);
            let of_prompt = step(&engine, &mut [slot]).remove(0);
            let mut shared = a.fork().unwrap();
            let one_by_one: Vec<f32> = draft
                .iter()
                .flat_map(|t| step(&engine, &mut [Slot::new(&mut a, &[*t], Generated)]).remove(0))
                .collect();
            let of_other = step(&engine, &mut [Slot::new(&mut b, &other, Prompt)]).remove(0);

            // Together: the prompt in two pieces, the draft on shared pages, the other prompt.
            let (mut c, mut d, mut e) = (sequence(), sequence(), shared.fork().unwrap());
            let slot = Slot::new(&mut c, &prompt[..33], Prompt).outputs_from(33);
            step(&engine, &mut [slot]);
            let together = step(
                &engine,
                &mut [
                    Slot::new(&mut c, &prompt[33..], Prompt).outputs_from(60 - 33),
                    Slot::new(&mut shared, &draft, Generated).outputs_from(0),
                    Slot::new(&mut d, &other, Prompt),
                    Slot::new(&mut e, &draft[..1], Generated),
                ],
            );
            let first = one_by_one[..n_vocab].to_vec();
            assert_eq!(
                together,
                [of_prompt, one_by_one.clone(), of_other, first],
                "{name}"
            );

            // Nine rows in one pass, then a rewind.
            let mut many = vec![];
            for _ in 0..9 {
                many.push(e.fork().unwrap());
            }
            let mut slots: Vec<_> = many
                .iter_mut()
                .map(|seq| Slot::new(seq, &draft[1..2], Generated))
                .collect();
            for logits in step(&engine, &mut slots) {
                assert_eq!(logits, one_by_one[n_vocab..2 * n_vocab], "{name}");
            }
            let mut session = engine.session_with(options).unwrap();
            session.prefill(&prompt).unwrap();
            session.decode(draft[0]).unwrap();
            session.decode(40).unwrap();
            session.rewind(prompt.len() + 1).unwrap();
            session.decode(draft[1]).unwrap();
            assert_eq!(session.logits(), &one_by_one[n_vocab..2 * n_vocab]);
            // A session that was saved goes on with the same bits.
            let saved = session.state().to_bytes().unwrap();
            let mut loaded = engine.session_with(options).unwrap();
            loaded.cache().load_bytes(saved).unwrap();
            loaded.decode(draft[2]).unwrap();
            assert_eq!(loaded.logits(), &one_by_one[2 * n_vocab..], "{name}: saved");
        }
    }
}

/// States of recurrent layers are those of their sequences: after rewinds, which replay inputs or go
/// back to a checkpoint, in forks, and in sessions that were saved.
#[test]
fn states_follow_their_sequences() {
    for device in &*DEVICES {
        let of_families = ["falcon-h1", "jamba", "mamba2"].map(|name| (name, of_family(name)));
        for (name, model) in recurrent(DType::Q8_0).into_iter().chain(of_families) {
            for n_layers in [usize::MAX, 1] {
                let engine = on_gpu(device, &model, n_layers);
                let prompt = tokens(150, 1, model.hparams().n_vocab);
                let mut session = engine.session_with(&options()).unwrap();
                session.prefill(&prompt).unwrap();
                let expected = session.logits().to_vec();
                for place in [148, 120, 90, 64, 20, 0] {
                    let of = |session: &mut Session| {
                        session.prefill(&prompt[session.position()..]).unwrap();
                        assert_eq!(session.logits(), expected, "{name}, {place}");
                    };
                    session.rewind(place).unwrap();
                    let mut fork = session.fork().unwrap();
                    let saved = session.state().to_bytes().unwrap();
                    of(&mut session);
                    fork.prefill(&prompt[place..place + 1]).unwrap();
                    of(&mut fork);
                    let mut loaded = engine.session_with(&options()).unwrap();
                    loaded.cache().load_bytes(saved).unwrap();
                    of(&mut loaded);
                }
                drop(session);
                assert_eq!(engine.pool().stats().used, 0, "{name}");
            }
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

fn of_text(text: &str) -> Vec<u32> {
    DEMO.tokenizer().unwrap().encode_prompt(text)
}

fn text(
    session: &mut Session,
    prompt: &[u32],
    speculation: Option<Speculation>,
) -> (String, usize) {
    let mut sampler = greedy();
    let mut generation = session
        .generate(prompt, &mut sampler)
        .unwrap()
        .max_tokens(24);
    if let Some(speculation) = speculation {
        generation = generation.speculate(speculation);
    }
    let mut text = String::new();
    for piece in generation.by_ref() {
        text += &piece.unwrap().text;
    }
    (text, generation.n_passes())
}

/// Many requests on a pool for few, which lose their pages again and again, and drafts: every text
/// is that of a session alone.
#[test]
fn requests_and_drafts_have_the_text_of_a_session_alone() {
    let texts = [
        "Ownership is",
        "fn main() {\n    let mut x = 5;\n    println!(\"The value of x is: {x}\");\n    x = 6;\n    println!(\"The value",
        "The",
    ];
    for device in &*DEVICES {
        let engine = on_gpu(device, &DEMO, usize::MAX);
        let mut alone = Vec::new();
        for prompt in texts {
            let mut session = engine.session_with(&options()).unwrap();
            let (plain, n_plain) = text(&mut session, &of_text(prompt), None);
            session.clear();
            let drafts = Some(Speculation::default());
            let (drafted, n_drafted) = text(&mut session, &of_text(prompt), drafts);
            assert_eq!(drafted, plain, "{prompt}");
            println!("{n_plain} passes, {n_drafted} with drafts");
            alone.push(plain);
        }
        let mut session = engine.session_with(&options()).unwrap();
        session.prefill(&[1; 130]).unwrap();
        let budget = engine.pool().stats().used;
        drop(session);
        let few = EngineOptions {
            kv_budget: Some(budget),
            ..EngineOptions::default()
        };
        let engine = engine_with(device, &DEMO, usize::MAX, few);
        let schedule = ScheduleOptions {
            session: options(),
            n_pieces: 1000,
            ..ScheduleOptions::default()
        };
        let mut schedule = Schedule::new(&engine, &schedule).unwrap();
        let mut streams = Vec::new();
        for i in 0..5 {
            let request = Request::new(of_text(texts[i % 3]), greedy()).max_tokens(24);
            streams.push(schedule.submit(request.priority((i % 4) as i32)).unwrap());
            schedule.step();
        }
        while schedule.step() {}
        for (i, stream) in streams.into_iter().enumerate() {
            assert_eq!(stream.text().unwrap(), alone[i % 3], "{i}");
        }
    }
}

/// Passes of the same shape make no bindings, and sessions that end leave no memory taken.
#[test]
fn nothing_grows() {
    for device in &*DEVICES {
        let engine = on_gpu(device, &DEMO, usize::MAX);
        let prompt = tokens(70, 1, 1000);
        let run = || {
            let mut session = engine.session_with(&options()).unwrap();
            session.prefill(&prompt).unwrap();
            (0..10).for_each(|_| session.decode(5).unwrap());
        };
        run();
        run();
        let (made, free) = (device.bindings_made(), engine.pool().stats().free);
        let n = if long() { 1000 } else { 20 };
        (0..n).for_each(|_| run());
        let stats = engine.pool().stats();
        assert_eq!((stats.used, stats.free), (0, free));
        // Other tests run beside this one on the same device.
        println!("{} bindings made since", device.bindings_made() - made);
    }
}

/// A device that is lost between passes, and in one: an error of the call, after which the session
/// is as before; or the CPU goes on, with the bits of one that computed all.
#[test]
fn the_cpu_goes_on_when_the_device_is_lost() {
    let model = Tiny::Gemma2.model(DType::Q8_0).on(Arch::scalar());
    let all = tokens(80, 4, N_VOCAB);
    let cpu = engine(&model, 1);
    let mut session = cpu.session_with(&options()).unwrap();
    session.prefill(&all[..70]).unwrap();
    session.decode(all[70]).unwrap();
    session.decode(all[71]).unwrap();
    let expected = session.logits().to_vec();
    for cpu_fallback in [false, true] {
        for device in devices(Options::default()) {
            for n_layers in [usize::MAX, 1] {
                let device = if n_layers == 1 {
                    let found = devices(Options::default());
                    let same = |d: &Device| d.info().name == device.info().name;
                    found.into_iter().find(same).unwrap()
                } else {
                    device.clone()
                };
                let engine_options = EngineOptions {
                    cpu_fallback,
                    ..EngineOptions::default()
                };
                let engine = engine_with(&device, &model, n_layers, engine_options);
                let mut session = engine.session_with(&options()).unwrap();
                session.prefill(&all[..70]).unwrap();
                session.decode(all[70]).unwrap();
                // While a pass may run: another thread gives the device up.
                let destroyer = std::thread::spawn(move || device.destroy());
                let mut outcome = session.decode(all[71]);
                destroyer.join().unwrap();
                if outcome.is_ok() && engine.gpu_failure().is_none() {
                    session.rewind(71).unwrap();
                    outcome = session.decode(all[71]);
                }
                match outcome {
                    Ok(()) => {
                        assert!(cpu_fallback && engine.gpu_failure().is_some());
                        assert_eq!(session.logits(), expected);
                    }
                    Err(SessionError::Gpu(error)) => {
                        assert!(!cpu_fallback, "{error}");
                        println!("{error}");
                        assert_eq!(session.tokens(), &all[..71]);
                        assert!(session.state().to_bytes().is_err());
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
}

/// Root of the mean square difference.
fn rms(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let squares = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2));
    (squares.sum::<f64>() / a.len() as f64).sqrt()
}

/// What the logits of a model on a device differ from the scalar level's by, over texts of `n` tokens
/// with these seeds, and whether that is at most a part of what keys and values in half precision
/// cost there, as with Metal's kernels: the same are rounded but for those near a border. An error is
/// what lacks a kernel.
fn compared(
    device: &Device,
    model: &Model,
    (n, seeds): (usize, [usize; 3]),
    most_of_cost: f64,
) -> Result<(String, bool), String> {
    let runner = match runner(device, model, usize::MAX) {
        Ok(runner) => Arc::new(runner),
        Err(GpuError::Unsupported { what }) => return Err(what),
        Err(error) => panic!("{error}"),
    };
    let gpu = Engine::with_runner(model, &EngineOptions::default(), runner).unwrap();
    let cpu = engine(model, 2);
    let of = |engine: &Engine, kv_type: KvType| {
        let logits_of = |seed: usize| {
            let tokens = tokens(n, seed, model.hparams().n_vocab);
            let options = SessionOptions {
                kv_type,
                ..options()
            };
            let mut session = engine.session_with(&options).unwrap();
            logits(&mut session, &tokens, n * 9 / 10)
        };
        seeds.map(logits_of).concat()
    };
    let (ours, expected) = (of(&gpu, KvType::F16), of(&cpu, KvType::F16));
    let apart = rms(&ours, &expected);
    let cost = rms(&expected, &of(&cpu, KvType::F32));
    let most = max_abs(&ours, &expected);
    let text = format!("rms {apart:.1e} (f16 costs {cost:.1e}), most {most:.1e}");
    // Without keys and values nothing is rounded, but sums have other orders.
    let bound = if cost == 0.0 {
        SUMS
    } else {
        most_of_cost * cost
    };
    let is_close = !most.is_nan() && apart <= bound;
    Ok((text, is_close))
}

/// Seeds of the texts of a model: others where a single token of the usual ones differs as if it had
/// another expert, which is chance where two are all but equally good (their routers were not
/// looked at).
fn seeds(name: &str) -> [usize; 3] {
    match name {
        "glm4moe" | "glm4moe-mtp" => [2, 3, 4],
        "smallthinker" => [1, 2, 3],
        _ => [7, 1, 2],
    }
}

/// The models of the reference data whose layers have kernels.
#[test]
fn conformance_models() {
    let Some(root) = conformance() else { return };
    let folders = ["models", "models2", "models3"];
    let wanted = std::env::var("RUVLLM_WEBGPU_MODEL").ok();
    let (mut n_tested, mut refused, mut failures) = (0, Vec::new(), Vec::new());
    for dir in folders
        .into_iter()
        .flat_map(|folder| subdirectories(&root.join(folder)))
    {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        let is_one = |name: &str| ["llama-gqa-tied-rope3", "gemma3", "qwen3moe"].contains(&name);
        if wanted
            .as_ref()
            .map_or(!long() && !is_one(&name), |w| *w != name)
        {
            continue;
        }
        let path = dir.join("model-f16.gguf");
        let Ok(Ok(model)) = Gguf::open(&path).map(open) else {
            continue;
        };
        let model = model.on(Arch::scalar());
        for device in &*DEVICES {
            match compared(device, &model, (80, seeds(&name)), 0.25) {
                Ok((text, close)) => {
                    println!("{name}: {text}");
                    n_tested += 1;
                    if !close {
                        failures.push(format!("{name}: {text}"));
                    }
                }
                Err(what) => refused.push(format!("{name}: {what}")),
            }
        }
    }
    println!("{n_tested} tested; refused: {}", refused.join("; "));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Tiny models of every architecture: those whose layers have kernels. Their weights are random, so
/// that a key that rounds the other way counts more than in models that were trained;
/// `RUVLLM_WEBGPU_MODEL` names one that is tested alone. Every other one of them, all with
/// `RUVLLM_LONG`: [`conformance_models`] has most architectures, too.
#[test]
fn families() {
    let (mut n_tested, mut failures) = (0, Vec::new());
    let wanted = std::env::var("RUVLLM_WEBGPU_MODEL").ok();
    let is_wanted = |name: &str| wanted.as_ref().is_none_or(|wanted| wanted == name);
    let is_long = wanted.is_some() || std::env::var_os("RUVLLM_LONG").is_some();
    let step = if is_long { 1 } else { 2 };
    for family in mutants::models().iter().step_by(step) {
        if !is_wanted(&family.name) {
            continue;
        }
        let model = open(family.parts().gguf()).unwrap().on(Arch::scalar());
        for device in &*DEVICES {
            match compared(device, &model, (40, seeds(&family.name)), 0.35) {
                Ok((text, close)) => {
                    println!("{}: {text}", family.name);
                    n_tested += 1;
                    if !close {
                        failures.push(format!("{}: {text}", family.name));
                    }
                }
                Err(what) => println!("{} is refused: {what}", family.name),
            }
        }
    }
    println!("{n_tested} tested");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
