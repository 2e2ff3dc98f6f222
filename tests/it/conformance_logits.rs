//! Logits of every model family against other engines' (`RUVLLM_CONFORMANCE`).
//!
//! Tolerances are those of the reference data: on files whose weights are exact in `f32`, a level
//! that multiplies in `f32` has to agree to 1e-3 (the references agree with each other to 3e-4);
//! on quantised files the root-mean-square difference must not exceed what llama.cpp's 8-bit
//! activations cost on the same file.

use crate::common::{conformance, emulated, long, numbers, read_f32, read_json};
use crate::run::{OnLevel, Pass, engine, session_on};
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::Session;
use ruvllm::arch::Arch;
use ruvllm::decode::{DenoiseOptions, Denoiser, Order};
use ruvllm::gguf::{Gguf, Writer};
use ruvllm::model::{OpenOptions, supported_architectures};
use ruvllm::quant::{FileType, ModelShape, dequantize_row, quantize_row};
use ruvllm::{SessionError, SessionOptions};
use std::path::{Path, PathBuf};

const MAX_ABS: f32 = 1e-3;

/// The same for a model whose reference has more noise of its own (its manifest's `tolerance`).
fn max_abs_of(name: &str) -> f32 {
    if name == "glm5-next" { 3e-3 } else { MAX_ABS }
}

/// Of the reference's files, those with logits of the arithmetic that ours is: Hunyuan 4 is rotated
/// as llama.cpp does it, for which its files are made.
fn logits_file(name: &str, file: &str) -> String {
    match name {
        "hy_v4" => file.replace(".logits.", ".logits.pairs."),
        _ => file.to_owned(),
    }
}

/// Families that are quantised here, and all that an emulated CPU has time for, with one test of
/// each and two sizes of batches.
const FAMILIES: [&str; 8] = [
    "gemma3",
    "granite",
    "llama-gqa-tied-rope3",
    "mixtral",
    "olmo2",
    "phi3-gqa",
    "qwen2-tied",
    "qwen3-tied",
];

/// On the best level all of these sizes of batches, on others and on an emulated CPU the longest
/// and the shortest.
fn batches<const N: usize>(arch: Arch, all: [usize; N]) -> Vec<usize> {
    let few = emulated() || !long() && arch.name() != Arch::detect().name();
    all.into_iter()
        .filter(|&n| !few || [512, 1].contains(&n))
        .collect()
}

fn session(model: &Model, n_ctx: usize, n_batch: usize) -> Session {
    session_with(model, n_ctx, n_batch, KvType::F32)
}

fn session_with(model: &Model, n_ctx: usize, n_batch: usize, kv_type: KvType) -> Session {
    let options = SessionOptions {
        n_ctx: Some(n_ctx),
        n_batch,
        kv_type,
        ..Default::default()
    };
    session_on(model, 2, &options)
}

/// Logits of all tokens, flat.
fn logits(session: &mut Session, tokens: &[u32]) -> Vec<f32> {
    let mut all = Vec::new();
    session
        .hooks()
        .prefill_each(tokens, 0, |_, logits| all.extend_from_slice(logits))
        .unwrap();
    all
}

fn max_abs(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |m, d| if d.is_nan() { f32::NAN } else { d.max(m) })
}

fn rows(flat: &[f32], positions: &[usize], n_vocab: usize) -> Vec<f32> {
    positions
        .iter()
        .flat_map(|&p| flat[p * n_vocab..][..n_vocab].to_vec())
        .collect()
}

/// What is not in a file: constants of the real models that the small ones differ in, and how the
/// reference of the file in MXFP4 rounds.
pub(crate) fn open_reference(path: &Path, name: &str) -> Model {
    let options = OpenOptions::new();
    let options = match name {
        "llama4" => options
            .override_kv("llama4.attention.sliding_window", 32u32)
            .override_kv("llama4.attention.temperature_length", 32u32),
        "q-gpt-oss-mxfp4" => options.override_kv("gpt-oss.rope.scaling.yarn_truncate", true),
        _ => options,
    };
    options.open(path).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Name and folder of every model with logits that this build runs; prints the others.
fn models(root: &Path) -> Vec<(String, PathBuf)> {
    let (mut runs, mut others) = (Vec::new(), Vec::new());
    for dir in ["models", "models2", "models3"]
        .iter()
        .flat_map(|set| crate::common::subdirectories(&root.join(set)))
    {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        if !dir.join("len17.logits.f32").exists() || !dir.join("model-f16.gguf").exists() {
            continue;
        }
        let gguf = Gguf::open(dir.join("model-f16.gguf")).unwrap();
        let arch = gguf.metadata().str("general.architecture").unwrap();
        if supported_architectures().any(|supported| supported == arch) {
            runs.push((name, dir));
        } else {
            others.push(name);
        }
    }
    eprintln!(
        "{} models, {} not supported: {}",
        runs.len() + others.len(),
        others.len(),
        others.join(" ")
    );
    runs
}

#[test]
fn f16_models_of_every_family() {
    let Some(root) = conformance() else { return };
    let mut worst = Vec::new();
    let mut n_models = 0;
    for (name, dir) in models(&root) {
        if emulated() && !FAMILIES.contains(&name.as_str()) {
            continue;
        }
        n_models += 1;
        let manifest = read_json(&dir.join("manifest.json"));
        for arch in Arch::available() {
            let model = open_reference(&dir.join("model-f16.gguf"), &name).on(arch);
            let n_vocab = model.hparams().n_vocab;
            let mut tests: Vec<_> = manifest["tests"].as_array().unwrap().iter().collect();
            if model.hparams().diffusion.is_some() {
                worst.extend(denoisers(&model, (&name, arch), &dir, &tests));
                continue;
            }
            tests.push(&manifest["greedy"]);
            tests.retain(|test| !emulated() || test["id"] == "len17");
            for test in tests {
                let greedy = test["id"].as_str().unwrap() == "greedy";
                let tokens = match (name.as_str(), greedy) {
                    ("hy_v4", true) => &manifest["alternative_goldens"]["pairs"]["greedy_tokens"],
                    _ => &test["tokens"],
                };
                let tokens = numbers::<u32>(tokens);
                let n_ctx = if greedy {
                    256
                } else {
                    test["n_ctx"].as_u64().unwrap() as usize
                };
                let positions: Vec<usize> = if greedy {
                    (0..tokens.len() - 1).collect()
                } else {
                    numbers(&test["positions"])
                };
                let file = if greedy {
                    "greedy.logits.f32"
                } else {
                    test["logits_file"].as_str().unwrap()
                };
                let expected = read_f32(&dir.join(logits_file(&name, file)));
                let tokens = if greedy {
                    &tokens[..tokens.len() - 1]
                } else {
                    &tokens[..]
                };
                for n_batch in batches(arch, [512, 64, 7, 1]) {
                    let ours = logits(&mut session(&model, n_ctx, n_batch), tokens);
                    let difference = max_abs(&rows(&ours, &positions, n_vocab), &expected);
                    if difference.is_nan() || difference > max_abs_of(&name) {
                        worst.push(format!(
                            "{name} {} {} batch {n_batch}: {difference}",
                            arch.name(),
                            test["id"].as_str().unwrap()
                        ));
                    }
                }
            }
        }
    }
    assert!(
        worst.is_empty(),
        "{} beyond {MAX_ABS}:\n{}",
        worst.len(),
        worst.join("\n")
    );
    assert!(
        n_models >= if emulated() { FAMILIES.len() } else { 116 },
        "only {n_models} models found"
    );
}

/// Differences of the logits of whole texts, of models that denoise.
fn denoisers(
    model: &Model,
    (name, arch): (&str, Arch),
    dir: &Path,
    tests: &[&serde_json::Value],
) -> Vec<String> {
    let n_vocab = model.hparams().n_vocab;
    let denoiser = Denoiser::new(&engine(model, 2)).unwrap();
    assert!(matches!(
        session(model, 64, 64).prefill(&[1]),
        Err(SessionError::Denoises)
    ));
    let mut beyond = Vec::new();
    for test in tests {
        let expected = read_f32(&dir.join(test["logits_file"].as_str().unwrap()));
        let tokens = numbers::<u32>(&test["tokens"]);
        let ours = denoiser.logits(&tokens, 0).unwrap();
        let ours = rows(&ours, &numbers(&test["positions"]), n_vocab);
        let difference = max_abs(&ours, &expected);
        if difference.is_nan() || difference > MAX_ABS {
            let id = test["id"].as_str().unwrap();
            beyond.push(format!("{name} {} {id}: {difference}", arch.name()));
        }
    }
    beyond
}

/// Denoised texts do not depend on threads, have what was decided first kept, and no masks.
#[test]
fn denoised_texts() {
    let Some(root) = conformance() else { return };
    for name in ["dream", "llada", "llada-moe", "rnd1"] {
        let model = Model::open(root.join("models3").join(name).join("model-f16.gguf")).unwrap();
        let mut options = DenoiseOptions::default();
        for (order, n_steps, block, temperature) in [
            (Order::Confidence, 5, None, 0.0),
            (Order::Margin, 6, Some(5), 0.0),
            (Order::Entropy, 1, Some(20), 0.8),
            (Order::Random, 40, None, 0.8),
        ] {
            (options.order, options.n_steps) = (order, n_steps);
            (options.block, options.temperature) = (block, temperature);
            let texts = [1, 2].map(|n_threads| {
                let denoiser = Denoiser::new(&engine(&model, n_threads)).unwrap();
                let mut before = vec![denoiser.mask(); 17];
                let mut each = |now: &[u32]| {
                    let kept = before
                        .iter()
                        .zip(now)
                        .all(|(a, b)| a == b || *a == denoiser.mask());
                    assert!(kept && now != before, "{before:?} {now:?}");
                    before = now.to_vec();
                    true
                };
                let text = denoiser
                    .denoise(&[5, 6, 7], 17, &options, &mut each)
                    .unwrap();
                assert!(!text.contains(&denoiser.mask()));
                assert_eq!(text, before);
                text
            });
            assert_eq!(texts[0], texts[1], "{name} {order:?}");
        }
    }
}

/// Root-mean-square difference.
fn rms(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    (a.iter()
        .zip(b)
        .map(|(a, b)| f64::from(a - b).powi(2))
        .sum::<f64>()
        / a.len() as f64)
        .sqrt()
}

/// Keys and values in half precision cost what they were rounded by: how a level multiplies them
/// adds an eighth to it at most.
#[test]
fn half_precision_caches() {
    let Some(root) = conformance() else { return };
    let mut failures = Vec::new();
    for dir in crate::common::subdirectories(&root.join("models")) {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        if name == "quantised" || emulated() {
            continue;
        }
        let manifest = read_json(&dir.join("manifest.json"));
        let test = manifest["tests"]
            .as_array()
            .unwrap()
            .iter()
            .find(|test| test["id"] == "len150")
            .unwrap();
        let tokens = numbers::<u32>(&test["tokens"]);
        let n_ctx = test["n_ctx"].as_u64().unwrap() as usize;
        let open = |arch| Model::open(dir.join("model-f16.gguf")).unwrap().on(arch);
        let exact = logits(&mut session(&open(Arch::scalar()), n_ctx, 512), &tokens);
        let cost = |arch| {
            rms(
                &logits(
                    &mut session_with(&open(arch), n_ctx, 512, KvType::F16),
                    &tokens,
                ),
                &exact,
            )
        };
        let scalar = cost(Arch::scalar());
        for arch in Arch::available() {
            let ours = cost(arch);
            eprintln!("{name} {}: {ours:.2e} (scalar {scalar:.2e})", arch.name());
            if ours.is_nan() || ours > 1.125 * scalar {
                failures.push(format!(
                    "{name} {}: {ours:e}, scalar {scalar:e}",
                    arch.name()
                ));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The golden is HF in `f32` on the dequantised weights: `f32` activations have to reach it, and
/// other levels may not be worse than llama.cpp's 8-bit activations, of which the manifests tell
/// the root-mean-square difference by test or, for some files, of all tests together.
#[test]
fn quantised_models() {
    let Some(root) = conformance() else { return };
    let mut failures = Vec::new();
    let mut n_files = 0;
    for dir in ["models", "models2", "models3"]
        .iter()
        .flat_map(|set| crate::common::subdirectories(&root.join(set).join("quantised")))
    {
        let folder = dir.file_name().unwrap().to_string_lossy().into_owned();
        let manifest = read_json(&dir.join("manifest.json"));
        for file in manifest["variants"].as_array().unwrap() {
            let (name, kind) = (
                file["file"].as_str().unwrap(),
                file["type"].as_str().unwrap(),
            );
            if emulated()
                && (folder == "q-gpt-oss-mxfp4" || !["Q8_0", "Q4_0", "Q4_K_M"].contains(&kind))
            {
                continue;
            }
            let gguf = Gguf::open(dir.join(name)).unwrap();
            let architecture = gguf.metadata().str("general.architecture").unwrap();
            if !supported_architectures().any(|supported| supported == architecture) {
                eprintln!("{folder}: {architecture} is not supported");
                continue;
            }
            n_files += 1;
            for arch in Arch::available() {
                let model = open_reference(&dir.join(name), &folder).on(arch);
                let n_vocab = model.hparams().n_vocab;
                let exact = arch.name() == "scalar";
                let peer_of_file = file["llama_cpp_native_rms"].as_f64();
                // Of its three experts the first token of two texts nearly ties two, which the
                // 8-bit activations of prompts turn round (rms 2.3 in those two
                // rows, 0.1 to 1 in all others): judged by the arithmetic of generated
                // tokens.
                let ties = folder == "q-qwen3next" && kind == "Q4_K_M";
                for n_batch in batches(arch, [512, 4, 1]) {
                    let (mut all_ours, mut all_expected) = (Vec::new(), Vec::new());
                    let mut judge = |what: &str, ours: &[f32], expected: &[f32], peer: f64| {
                        let (rms, max) = (rms(ours, expected), max_abs(ours, expected));
                        let line = format!(
                            "{name} {what} {} batch {n_batch}: rms {rms:.2e} (llama.cpp {peer:.2e}) max {max:.2e}",
                            arch.name()
                        );
                        eprintln!("{line}");
                        let agrees = if exact { max <= MAX_ABS } else { rms <= peer };
                        if !agrees {
                            failures.push(line);
                        }
                    };
                    for test in manifest["tests"].as_array().unwrap() {
                        let id = test["id"].as_str().unwrap();
                        if emulated() && id != "len17" {
                            continue;
                        }
                        let about = &file["tests"][id];
                        let logits_file = about["logits_file"].as_str().map(str::to_owned);
                        let logits_file =
                            logits_file.unwrap_or_else(|| format!("{kind}.{id}.logits.f32"));
                        let expected = read_f32(&dir.join(logits_file));
                        let kv_type = KvType::F32;
                        let options = SessionOptions {
                            n_ctx: Some(256),
                            n_batch,
                            kv_type,
                            exact: ties,
                            ..Default::default()
                        };
                        let mut session = session_on(&model, 2, &options);
                        let all = logits(&mut session, &numbers::<u32>(&test["tokens"]));
                        let ours = rows(&all, &numbers(&test["positions"]), n_vocab);
                        let peer = about["llama_cpp_native_rms"].as_f64();
                        if let Some(peer) = peer.or(about["llama_cpp_native"]["rms"].as_f64()) {
                            judge(id, &ours, &expected, peer);
                        } else {
                            all_ours.extend(ours);
                            all_expected.extend(expected);
                        }
                    }
                    if !all_ours.is_empty() {
                        judge(
                            "all",
                            &all_ours,
                            &all_expected,
                            peer_of_file.expect("a difference by file"),
                        );
                    }
                }
            }
        }
    }
    assert!(
        n_files >= if emulated() { 5 } else { 29 },
        "only {n_files} files found"
    );
    assert!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

/// The F16 model at `path` as `file_type`, for families of which there is no quantised reference.
fn quantised(path: &Path, file_type: FileType) -> Model {
    let gguf = Gguf::open(path).unwrap();
    let h = Model::open(path).unwrap();
    let h = h.hparams();
    let attn = h.attention().next().unwrap();
    let shape = ModelShape {
        n_layer: h.n_layer,
        n_head: attn.n_head,
        n_head_kv: attn.n_head_kv,
        n_expert: h.mixtures().next().map_or(0, |moe| moe.n_expert),
        tied_embeddings: gguf.tensor("output.weight").is_none(),
        importance: false,
    };
    let mut writer = Writer::new();
    for (key, value) in gguf.metadata().iter() {
        writer.metadata(key, value.clone());
    }
    for t in gguf.tensors() {
        let (row, data) = (t.dims[0] as usize, gguf.data(t).to_vec());
        let to = file_type
            .tensor_type(&t.name, &t.dims, &shape)
            .unwrap_or(t.dtype);
        let data = if to == t.dtype {
            data
        } else {
            let mut values = vec![0.0; t.n_elems() as usize];
            dequantize_row(t.dtype, &data, &mut values).unwrap();
            let f = to.float_format();
            let mut blocks = vec![0; values.len() / f.block_elems * f.block_bytes];
            let rows = values
                .chunks_exact(row)
                .zip(blocks.chunks_exact_mut(row / f.block_elems * f.block_bytes));
            rows.for_each(|(values, blocks)| quantize_row(to, values, None, blocks).unwrap());
            blocks
        };
        writer.tensor(&t.name, &t.dims, to, data);
    }
    Model::from_gguf(Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap()).unwrap()
}

/// Every level against scalar, which multiplies the same weights exactly.
///
/// Decoding rounds activations to 16 bits: a step is 2⁻¹⁵ or 2⁻¹⁶ of the largest of 32 values,
/// where rounding to f16 takes 2⁻¹¹ of each. So it may not move logits further than f16 activations
/// do, which the manifest tells of llama.cpp on the F16 file. Panels of 8 bits have steps of 1/127
/// of the largest, 16 times those of f16 there; four times that for the values that are smaller.
#[test]
fn quantised_families() {
    let Some(root) = conformance() else { return };
    let mut failures = Vec::new();
    for name in FAMILIES {
        let dir = root.join("models").join(name);
        let manifest = read_json(&dir.join("manifest.json"));
        let f16 = manifest["llama_cpp_check"]["max_abs_diff"]["f16"]["len17.batch"]
            .as_f64()
            .unwrap() as f32;
        let test = manifest["tests"]
            .as_array()
            .unwrap()
            .iter()
            .find(|t| t["id"] == "len17")
            .unwrap();
        let tokens = numbers::<u32>(&test["tokens"]);
        for file_type in [FileType::Q8_0, FileType::Q4_K_M] {
            let mut model = quantised(&dir.join("model-f16.gguf"), file_type).on(Arch::scalar());
            let expected = logits(&mut session(&model, 64, 512), &tokens);
            for arch in Arch::available() {
                model = model.on(arch);
                for (exact, allowed) in [(true, f16), (false, 64.0 * f16)] {
                    let options = SessionOptions {
                        n_ctx: Some(64),
                        kv_type: KvType::F32,
                        exact,
                        ..Default::default()
                    };
                    let difference = max_abs(
                        &logits(&mut session_on(&model, 2, &options), &tokens),
                        &expected,
                    );
                    let line = format!(
                        "{name} {file_type} {} exact {exact}: {difference:.2e} ({allowed:.2e})",
                        arch.name()
                    );
                    eprintln!("{line}");
                    if difference.is_nan() || difference > allowed {
                        failures.push(line);
                    }
                }
            }
        }
    }
    assert!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

/// The story model, in every format, continues its prompt with the very tokens of the reference:
/// 200 of them, by margins down to 0.006.
#[test]
fn stories() {
    let Some(root) = conformance() else { return };
    let dir = root.join("stories");
    let manifest = read_json(&dir.join("manifest.json"));
    let prompt: Vec<u32> = numbers(&manifest["prompt_ids"]);
    let variants = manifest["variants"].as_array().unwrap();
    assert_eq!(variants.len(), 5);
    for variant in variants {
        let expected: Vec<u32> = numbers(&variant["greedy_tokens"]);
        for arch in Arch::available() {
            let file = variant["file"].as_str().unwrap();
            let model = Model::open(dir.join(file)).unwrap().on(arch);
            let mut session = session(&model, 512, 512);
            let mut tokens = prompt.clone();
            let mut logits = session.prefilled(&prompt);
            while tokens.len() < expected.len() {
                let next = logits
                    .iter()
                    .enumerate()
                    .max_by(|a, b| a.1.total_cmp(b.1))
                    .unwrap()
                    .0 as u32;
                tokens.push(next);
                logits = session.decoded(next);
            }
            assert_eq!(tokens, expected, "{file} {}", arch.name());
        }
    }
}
