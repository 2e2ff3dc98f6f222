//! Models that do not continue one text token by token, and drafters that were made for a model: with
//! the reference data (`RUVLLM_CONFORMANCE`) as far as they need models.

use super::{Folder, fails, parsed, run, text, tiny};
use ruvllm::Model;
use ruvllm::decode::{DenoiseOptions, Denoiser};
use ruvllm::vision::{Projector, VisionError};
use ruvllm::{Sampler, SamplerOptions};
use serde_json::Value;
use std::path::PathBuf;

/// The folder of a model of the reference data.
fn folder(name: &str) -> Option<PathBuf> {
    let root = std::env::var_os("RUVLLM_CONFORMANCE")?;
    Some(PathBuf::from(root).join("models3").join(name))
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn flags_of_denoising_are_for_models_that_denoise() {
    let folder = Folder::new();
    let model = tiny(&folder);
    for flag in [
        &["--diffusion-steps", "4"][..],
        &["--diffusion-block-length", "4"],
        &["--diffusion-algorithm", "2"],
        &["--diffusion-visual"],
    ] {
        let call = [&["generate", "-m", &model, "-p", "x"], flag].concat();
        fails(&call, 2, &[flag[0], "denoise"]);
    }
    let call = [
        "generate",
        "-m",
        &model,
        "-p",
        "x",
        "--diffusion-steps",
        "0",
    ];
    fails(&call, 2, &["--diffusion-steps"]);
}

#[test]
fn texts_are_denoised() {
    for name in ["dream", "llada", "llada-moe", "rnd1"] {
        let Some(path) = folder(name).map(|dir| dir.join("model-f16.gguf")) else {
            return;
        };
        let file = path.to_str().unwrap();
        let base = ["generate", "-m", file, "-p", "ab", "-n", "12"];
        let call = [&base[..], &["--diffusion-steps", "5", "--json"]].concat();
        let answer = parsed(&run(&call));
        let model = Model::open(&path).unwrap();
        let tokenizer = model.tokenizer().unwrap();
        let denoiser = Denoiser::new(&model.engine().unwrap()).unwrap();
        let mut options = DenoiseOptions::default();
        options.n_steps = 5;
        let prompt = tokenizer.encode_prompt("ab");
        let mut n_steps = 0;
        let mut count = |_: &[u32]| {
            n_steps += 1;
            true
        };
        let expected = denoiser.denoise(&prompt, 12, &options, &mut count).unwrap();
        assert_eq!(ids(&answer["ids"]), expected, "{name}");
        assert_eq!(ids(&answer["prompt_ids"]), prompt);
        assert_eq!(answer["timings"]["diffusion_steps"], n_steps);
        let written = text(&run(&[&base[..], &["--diffusion-steps", "5"]].concat()));
        assert_eq!(
            written.trim_end_matches('\n'),
            answer["text"].as_str().unwrap().trim_end_matches('\n')
        );
        // In blocks, by chance, with a temperature: as often as it is asked for with a seed.
        let more = [
            "--diffusion-block-length",
            "4",
            "--diffusion-algorithm",
            "random",
        ];
        let call = [&base[..], &more, &["--temp", "1", "-s", "7", "--json"]].concat();
        assert_eq!(parsed(&run(&call))["ids"], parsed(&run(&call))["ids"]);
        fails(&[&base[..], &["-r", "x"]].concat(), 2, &["-r", "denoises"]);
        let images = ["--image", "x.png"];
        let of_images = ["--image", name, "denoises"];
        fails(&[&base[..], &images].concat(), 2, &of_images);
        let projector = Projector::open(&path, &model);
        assert!(
            matches!(&projector, Err(VisionError::Denoises { arch }) if arch == name),
            "{projector:?}"
        );
    }
}

#[test]
fn an_encoder_reads_the_prompt() {
    let Some(path) = folder("t5").map(|dir| dir.join("model-f16.gguf")) else {
        return;
    };
    let file = path.to_str().unwrap();
    let model = Model::open(&path).unwrap();
    let mut sets = Vec::new();
    for prompt in ["ab", "the cat"] {
        let call = [
            "generate", "-m", file, "-p", prompt, "-n", "8", "--temp", "0", "--json",
        ];
        let answer = parsed(&run(&call));
        let mut session = model.session().unwrap();
        let read = model.tokenizer().unwrap().encode(prompt, true, true);
        session.cache().encode(&read).unwrap();
        let start = model.hparams().encoder.unwrap().start;
        let sampler = Sampler::new(SamplerOptions {
            temperature: 0.0,
            ..Default::default()
        });
        let mut generation = session
            .into_generation(&[start], sampler.unwrap())
            .max_tokens(8);
        generation.by_ref().for_each(|piece| drop(piece.unwrap()));
        assert_eq!(ids(&answer["ids"]), generation.tokens());
        assert_eq!(ids(&answer["prompt_ids"]), [start]);
        sets.push(answer["ids"].clone());
    }
    assert_ne!(
        sets[0], sets[1],
        "what the encoder read makes no difference"
    );
}

#[test]
fn drafters_of_a_model() {
    for (kind, name) in [
        ("eagle3", "eagle3"),
        ("dflash", "dflash"),
        ("gemma4-assistant", "assistant"),
    ] {
        let Some(dir) = folder(kind) else { return };
        let [target, draft] = ["target-f16.gguf", "draft-f16.gguf"]
            .map(|file| dir.join(file).to_str().unwrap().to_owned());
        let base = [
            "generate", "-m", &target, "-p", "ab", "-n", "40", "-s", "3", "--json",
        ];
        let plain = parsed(&run(&[&base[..], &["--no-spec"]].concat()));
        let drafted = parsed(&run(&[&base[..], &["-md", &draft]].concat()));
        assert_eq!(drafted["ids"], plain["ids"], "{kind}");
        assert!(drafted["drafts"]["drafters"][name].is_object(), "{drafted}");
        fails(&["generate", "-m", &draft, "-p", "ab"], 1, &["-md", kind]);
        // One of another model.
        let other = folder("laguna").unwrap().join("model-f16.gguf");
        let call = [
            "generate",
            "-m",
            other.to_str().unwrap(),
            "-p",
            "ab",
            "-md",
            &draft,
        ];
        if kind == "gemma4-assistant" {
            fails(&call, 1, &["draft"]);
        }
    }
}
