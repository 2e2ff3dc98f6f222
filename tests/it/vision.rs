//! Images against the models' authors' code: pixels, embeddings, tokens, positions, logits.

use ruvllm::gguf::Gguf;
use ruvllm::lora::{Adapter, Gradients, TargetModule};
use ruvllm::session::{EncodedPrompt, Part, PartsError};
use ruvllm::vision::VisionError;
use ruvllm::vision::{Image, ImageOptions, Projector};
use ruvllm::{KvType, Model, Session, SessionError, SessionOptions};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tolerances on normalised pixels, embeddings and logits, as the data's README derives them: twice
/// what single precision itself costs, and more.
const PIXELS: f32 = 1e-5;
const EMBEDDINGS: f32 = 1e-4;
const LOGITS: f32 = 1e-3;

/// The folder of the data, if it is there.
pub(crate) fn folder() -> Option<PathBuf> {
    let folder = std::env::var_os("RUVLLM_CONFORMANCE")?;
    Some(PathBuf::from(folder).join("vision"))
}

pub(crate) fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub(crate) fn floats(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    let (values, _) = bytes.as_chunks::<4>();
    values
        .iter()
        .map(|&bytes| f32::from_le_bytes(bytes))
        .collect()
}

fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

/// An image as it was decoded, laid over white.
pub(crate) fn image(root: &Path, name: &str) -> Image {
    let all = json(&root.join("images/manifest.json"));
    let entry = all["images"].as_array().unwrap().iter();
    let entry = entry.clone().find(|entry| entry["file"] == name).unwrap();
    let file = entry["white_rgb_file"]
        .as_str()
        .or(entry["rgb_file"].as_str());
    let rgb = std::fs::read(root.join("images").join(file.unwrap())).unwrap();
    let side = |key: &str| entry[key].as_u64().unwrap() as u32;
    Image::rgb8(side("width"), side("height"), &rgb).unwrap()
}

/// A model with its projector, and its tests.
pub(crate) struct Case {
    pub(crate) root: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) model: Model,
    pub(crate) projector: Projector,
    pub(crate) manifest: Value,
}

impl Case {
    pub(crate) fn open(name: &str) -> Option<Case> {
        let root = folder()?;
        let dir = root.join(name);
        let model = Model::open(dir.join("model-f16.gguf")).unwrap();
        let projector = Projector::open(dir.join("mmproj-f32.gguf"), &model).unwrap();
        let manifest = json(&dir.join("manifest.json"));
        Some(Case {
            root,
            dir,
            model,
            projector,
            manifest,
        })
    }

    pub(crate) fn tests(&self) -> &[Value] {
        self.manifest["tests"].as_array().unwrap()
    }

    pub(crate) fn images(&self, test: &Value) -> Vec<Image> {
        let names = test["images"].as_array().unwrap().iter();
        names
            .map(|name| image(&self.root, name.as_str().unwrap()))
            .collect()
    }

    pub(crate) fn options(&self, test: &Value) -> ImageOptions {
        let bound = |key: &str| test[key].as_u64().map(|n| n as usize);
        // Files do not say how many tokens Gemma 4 takes; the configuration of the data does.
        let config = json(&self.dir.join("hf_preprocessor_config.json"));
        let of_config = config["max_soft_tokens"].as_u64().map(|n| n as usize);
        ImageOptions {
            min_tokens: bound("image_min_tokens"),
            max_tokens: bound("image_max_tokens").or(of_config),
        }
    }

    pub(crate) fn session(&self, test: &Value, n_batch: usize) -> Session {
        let options = SessionOptions {
            kv_type: KvType::F32,
            n_batch,
            ..Default::default()
        };
        let mut session = self.model.session_with(&options).unwrap();
        session
            .images()
            .set_projector(&self.projector, self.options(test))
            .unwrap();
        session
    }

    /// The prompt of a test.
    pub(crate) fn prompt(&self, session: &mut Session, test: &Value) -> EncodedPrompt {
        let (images, text) = (self.images(test), test["prompt_hf"].as_str().unwrap());
        let texts = self.projector.texts_around(text);
        assert_eq!(texts.len(), images.len() + 1);
        let mut parts = vec![Part::Text(texts[0])];
        for (image, text) in images.iter().zip(&texts[1..]) {
            parts.extend([Part::Image(image), Part::Text(text)]);
        }
        session.images().encode(&parts).unwrap()
    }
}

fn check(name: &str) {
    let Some(case) = Case::open(name) else { return };
    for test in case.tests() {
        let id = format!("{name}/{}", test["id"].as_str().unwrap());
        let file = |entry: &Value| floats(&case.dir.join(entry["file"].as_str().unwrap()));
        let (images, options) = (case.images(test), case.options(test));
        // Pixels.
        let of_image = |image| case.projector.pixels(image, options).unwrap();
        let pixels: Vec<_> = images.iter().flat_map(of_image).collect();
        let expected = test["preprocessed"].as_array().unwrap();
        assert_eq!(pixels.len(), expected.len(), "{id}: tiles");
        for (i, (pixels, expected)) in pixels.iter().zip(expected).enumerate() {
            let shape = [3, pixels.height, pixels.width].map(|n| n as u64);
            let of_test: Vec<u64> = expected["shape"]
                .as_array()
                .unwrap()
                .iter()
                .map(|n| n.as_u64().unwrap())
                .collect();
            assert_eq!(shape[..], of_test[..], "{id}: size of tile {i}");
            let d = difference(&pixels.values, &file(expected));
            assert!(d <= PIXELS, "{id}: pixels of tile {i} differ by {d}");
        }
        // Embeddings.
        let mut session = case.session(test, 512);
        let cancel = session.cancel_token();
        let of_image = |image| {
            let engine = session.engine();
            engine
                .encode_image(&case.projector, image, options, &cancel)
                .unwrap()
        };
        let rows: Vec<f32> = images
            .iter()
            .flat_map(|i| of_image(i).embeddings().to_vec())
            .collect();
        let d = difference(&rows, &file(&test["embeddings"]));
        println!("{id}: embeddings {d:.1e}");
        assert!(d <= EMBEDDINGS, "{id}: embeddings differ by {d}");
        // Tokens and positions.
        let prompt = case.prompt(&mut session, test);
        let ids: Vec<u32> = test["hf"]["input_ids"]
            .as_array()
            .unwrap()
            .iter()
            .map(|n| n.as_u64().unwrap() as u32)
            .collect();
        assert_eq!(prompt.tokens(), ids, "{id}: tokens");
        if let Some(expected) = test["hf"]["positions_thw"].as_array() {
            for (axis, expected) in expected.iter().enumerate() {
                let expected = expected
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|n| n.as_u64().unwrap() as usize);
                let own: Vec<usize> = prompt
                    .positions()
                    .iter()
                    .map(|position| position[axis])
                    .collect();
                assert_eq!(
                    own,
                    expected.collect::<Vec<_>>(),
                    "{id}: positions of axis {axis}"
                );
            }
        }
        check_logits(&case, test, &id, &prompt);
    }
}

/// Logits of the last positions and greedy tokens, with the same bits under any size of passes.
fn check_logits(case: &Case, test: &Value, id: &str, prompt: &EncodedPrompt) {
    let n_vocab = case.model.hparams().n_vocab;
    let expected = floats(&case.dir.join(test["logits"]["file"].as_str().unwrap()));
    let generated: Vec<u32> = test["generated"]
        .as_array()
        .unwrap()
        .iter()
        .map(|n| n.as_u64().unwrap() as u32)
        .collect();
    let n_rows = expected.len() / n_vocab - (generated.len() - 1);
    let mut all_bits: Option<Vec<u32>> = None;
    for n_batch in [512, 1, 7, 40] {
        let mut session = case.session(test, n_batch);
        let mut rows = Vec::new();
        let first = prompt.tokens().len() - n_rows;
        session
            .images()
            .prefill_encoded(prompt, first, |_, logits| rows.extend_from_slice(logits))
            .unwrap();
        for &token in &generated[..generated.len() - 1] {
            session.decode(token).unwrap();
            rows.extend_from_slice(session.logits());
        }
        let bits: Vec<u32> = rows.iter().map(|x| x.to_bits()).collect();
        match &all_bits {
            Some(all) => assert!(*all == bits, "{id}: passes of {n_batch} tokens change bits"),
            None => {
                let d = difference(&rows, &expected);
                println!("{id}: logits {d:.1e}");
                assert!(d <= LOGITS, "{id}: logits differ by {d}");
                let best = |row: &[f32]| {
                    let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]));
                    best.unwrap() as u32
                };
                let own: Vec<u32> = rows
                    .chunks_exact(n_vocab)
                    .skip(n_rows - 1)
                    .map(best)
                    .collect();
                assert_eq!(own, generated, "{id}: greedy tokens");
                all_bits = Some(bits);
            }
        }
    }
}

macro_rules! kinds {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            check(stringify!($name));
        }
    )*};
}

kinds! {
    gemma3 gemma4 qwen2vl qwen25vl qwen3vl idefics3 mistral3 llava15 llavanext internvl3 lfm2vl glm4v
    minicpmv46 llama4
}

/// Two roundings of the same precision have errors of the same size, but not the same errors: over
/// 768 values or more that are sums of many, with 16 rows that are independent at least, root mean
/// squares stay within a quarter of each other (five deviations of `1/√(2·16·16)`).
const SAME_PRECISION: f32 = 1.25;

fn rms(a: &[f32], b: &[f32]) -> f32 {
    let sum: f32 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    (sum / a.len() as f32).sqrt()
}

/// F16 files hold the same numbers; those of Q8_0 may cost as much as 8-bit activations do on the
/// same file elsewhere, which the data say.
#[test]
fn types_of_files() {
    for name in ["gemma3", "qwen25vl"] {
        let Some(case) = Case::open(name) else { return };
        for (kind, variant) in case.manifest["mmproj_variants"].as_object().unwrap() {
            let path = case.dir.join(variant["file"].as_str().unwrap());
            let projector = Projector::open(path, &case.model).unwrap();
            for test in case.tests() {
                let id = test["id"].as_str().unwrap();
                let of_test = &variant["tests"][id];
                let expected = floats(&case.dir.join(of_test["embed_file"].as_str().unwrap()));
                let session = case.session(test, 512);
                let (cancel, options) = (session.cancel_token(), case.options(test));
                let encode = |image: &Image| {
                    let encoded = session
                        .engine()
                        .encode_image(&projector, image, options, &cancel);
                    encoded.unwrap().embeddings().to_vec()
                };
                let rows: Vec<f32> = case.images(test).iter().flat_map(encode).collect();
                let (d, rms) = (difference(&rows, &expected), rms(&rows, &expected));
                let of_others = &of_test["mtmd_native"]["rms"];
                println!("{name}/{id} {kind}: {d:.1e}, rms {rms:.1e}, of others {of_others}");
                if kind == "f16" {
                    assert!(d <= EMBEDDINGS, "{name}/{id}: embeddings differ by {d}");
                }
                let bound = SAME_PRECISION * of_others.as_f64().unwrap() as f32;
                assert!(rms <= bound, "{name}/{id} {kind}: {rms} above {bound}");
            }
        }
    }
}

/// The second turn about an image computes no encoder; its bits are those of one session.
#[test]
fn images_are_encoded_once() {
    let Some(case) = Case::open("gemma3") else {
        return;
    };
    let test = &case.tests()[0];
    let image = &case.images(test)[0];
    let turns = [Part::Text("one "), Part::Image(image), Part::Text(" two")];
    let mut first = case.session(test, 512);
    first.images().prefill(&turns).unwrap();
    assert_eq!(case.projector.n_encoded(), 1);
    let mut second = case.session(test, 5);
    second.images().prefill(&turns[..2]).unwrap();
    second.images().prefill(&turns[2..]).unwrap();
    assert_eq!(
        (case.projector.n_encoded(), first.logits()),
        (1, second.logits())
    );
    let mut fork = second.fork().unwrap();
    fork.images().prefill(&turns[1..]).unwrap();
    assert_eq!(case.projector.n_encoded(), 1);
    case.projector.set_cache_budget(0);
    second.images().prefill(&turns[1..]).unwrap();
    assert_eq!(
        (case.projector.n_encoded(), fork.logits()),
        (2, second.logits())
    );
}

/// What a text with images cannot do is refused, and nothing takes one image for another.
#[test]
fn refusals() {
    let Some(case) = Case::open("gemma3") else {
        return;
    };
    let test = &case.tests()[0];
    let images = case.images(&case.tests()[4]);
    let mut session = case.session(test, 512);
    session
        .images()
        .prefill(&[Part::Text("a"), Part::Image(&images[0]), Part::Text("b")])
        .unwrap();
    let tokens = session.tokens().to_vec();
    let place = tokens
        .iter()
        .position(|&t| t == case.projector.placeholder())
        .unwrap();
    assert!(matches!(
        session.rewind(place + 1),
        Err(SessionError::HasImages { .. })
    ));
    // Placeholders are equal, images are not.
    assert_eq!(session.cache().keep(&tokens), place);
    session
        .images()
        .prefill(&[Part::Image(&images[1])])
        .unwrap();
    // Projectors of other models, and files that are none.
    let of = |name: &str| folder().unwrap().join(name).join("mmproj-f32.gguf");
    let other = Projector::open(of("qwen2vl"), &case.model);
    assert!(matches!(other, Err(VisionError::OtherModel { .. })));
    let none = Projector::open(case.dir.join("model-f16.gguf"), &case.model);
    assert!(matches!(none, Err(VisionError::NotAProjector { .. })));
    let mut session = case.model.session().unwrap();
    assert!(
        session
            .images()
            .prefill(&[Part::Image(&images[0])])
            .is_err()
    );
}

/// A rewind across images, and what a window has released, leave the bits of a fresh session.
#[test]
fn rewinds_across_images() {
    for name in ["gemma3", "qwen25vl"] {
        let Some(case) = Case::open(name) else { return };
        let test = case.tests().last().unwrap();
        let images = case.images(test);
        let parts = [
            Part::Image(&images[0]),
            Part::Text(" and "),
            Part::Image(&images[1]),
            Part::Text("x"),
        ];
        let mut session = case.session(test, 9);
        session.images().prefill(&[Part::Text("look at ")]).unwrap();
        let start = session.position();
        session.images().prefill(&parts[..2]).unwrap();
        let middle = session.position();
        session.images().prefill(&parts[2..]).unwrap();
        let logits = session.logits().to_vec();
        session.prefill(&[5; 40]).unwrap();
        for (position, from) in [(middle, 2), (start, 0)] {
            session.rewind(position).unwrap();
            session.images().prefill(&parts[from..]).unwrap();
            assert_eq!(session.logits(), logits, "{name}: from {position}");
        }
    }
}

/// Files with damaged headers: an error, or an encoder that computes something.
#[test]
fn damaged_projectors() {
    for name in ["gemma3", "qwen3vl", "llavanext", "idefics3", "minicpmv46"] {
        let Some(case) = Case::open(name) else { return };
        let bytes = std::fs::read(case.dir.join("mmproj-f32.gguf")).unwrap();
        let image = &case.images(&case.tests()[0])[0];
        let session = case.session(&case.tests()[0], 512);
        let cancel = session.cancel_token();
        // A step of a linear congruence: the same damage in every run.
        let mut state = 1_u64;
        let mut random = |n: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        };
        for _ in 0..200 {
            let mut bytes = bytes.clone();
            let at = random(bytes.len().min(6000));
            bytes[at] = random(256) as u8;
            let opened =
                Gguf::from_bytes(bytes).map(|gguf| Projector::from_gguf(gguf, &case.model));
            if let Ok(Ok(projector)) = opened {
                let options = ImageOptions::default();
                let _ = session
                    .engine()
                    .encode_image(&projector, image, options, &cancel);
            }
        }
    }
}

/// Gradients of a text behind an image, also where that has positions of rows and columns, against
/// differences of losses. The last layer alone has terms, and none of keys and values, so that what the
/// image left in the cache does not depend on them.
#[test]
fn gradients_behind_images() {
    for name in ["gemma3", "qwen2vl", "qwen3vl", "glm4v"] {
        let Some(case) = Case::open(name) else { return };
        let test = &case.tests()[0];
        let image = &case.images(test)[0];
        let last = case.model.hparams().n_layer - 1;
        let is_target = |site: &TargetModule| {
            site.layer() == Some(last) && !["attn_k", "attn_v"].contains(&site.part())
        };
        let mut adapter = Adapter::zeros(&case.model, 2, 1, is_target).unwrap();
        let wave = |i: usize| (i as f32 * 1.7 + 0.3).sin();
        for (_, term) in adapter.terms_mut() {
            let (_, b) = term.parts_mut();
            (0..).zip(b).for_each(|(i, b)| *b = 0.1 * wave(i));
        }
        let (tokens, targets) = ([20, 31, 7, 44, 9, 12], [31, 7, 44, 9, 12, 3]);
        let loss = |adapter: &Adapter, gradients: &mut Gradients| {
            let mut session = case.session(test, 512);
            let adapter = Arc::new(adapter.clone());
            let id = session.adapters().attach(adapter, 1.0).unwrap();
            let parts = [Part::Text("look at "), Part::Image(image), Part::Text("x")];
            session.images().prefill(&parts).unwrap();
            let mut training = session.training();
            let loss = training.nll_gradient(id, &tokens, &targets, &[1.0; 6], gradients);
            loss.unwrap()
        };
        let mut gradients = Gradients::zeros(&adapter);
        loss(&adapter, &mut gradients);
        for (site, gradient) in gradients.terms() {
            let along = |a: &[f32]| -> f32 { (0..).zip(a).map(|(i, x)| x * wave(7 * i + 1)).sum() };
            let square = |a: &[f32]| -> f32 { a.iter().map(|x| x * x).sum() };
            let expected = along(gradient.a()) + along(gradient.b());
            let size = (square(gradient.a()) + square(gradient.b())).sqrt();
            const STEP: f32 = 5e-3;
            let moved = |step: f32| {
                let mut adapter = adapter.clone();
                let (a, b) = adapter.term_mut(site).unwrap().parts_mut();
                for values in [a, b] {
                    (0..)
                        .zip(values)
                        .for_each(|(i, x)| *x += step * wave(7 * i + 1));
                }
                loss(&adapter, &mut Gradients::zeros(&adapter))
            };
            let found = ((moved(STEP) - moved(-STEP)) / f64::from(2.0 * STEP)) as f32;
            let part = adapter.sites()[site].part();
            println!("{name} {part}: {expected} {found}, of {size}");
            assert!(
                (found - expected).abs() <= 0.02 * size + 4e-3,
                "{name} {part}: {expected} is {found} by differences"
            );
        }
    }
}

/// Thousands of images are refused when they fill the context, not when all are encoded.
#[test]
fn thousands_of_images() {
    let Some(case) = Case::open("gemma3") else {
        return;
    };
    let test = &case.tests()[0];
    let square = |i: u8| Image::rgb8(8, 8, &[i; 192]).unwrap();
    let images: Vec<Image> = (0..=255).map(square).collect();
    let parts: Vec<Part<'_>> = images.iter().cycle().take(5000).map(Part::Image).collect();
    let options = SessionOptions {
        n_ctx: Some(100),
        ..Default::default()
    };
    let mut session = case.model.session_with(&options).unwrap();
    let bounds = case.options(test);
    session
        .images()
        .set_projector(&case.projector, bounds)
        .unwrap();
    let refused = session.images().prefill(&parts);
    let full = |error: &PartsError| {
        matches!(
            error,
            PartsError::Session(SessionError::ContextFull { n_ctx: 100, .. })
        )
    };
    assert!(refused.as_ref().is_err_and(full), "{refused:?}");
    assert!(case.projector.n_encoded() < 10 && session.position() == 0);
}

/// Pictures of odd shapes: pixels, or an error that says what is wrong.
#[test]
fn odd_shapes() {
    for name in [
        "gemma3",
        "gemma4",
        "qwen2vl",
        "qwen25vl",
        "qwen3vl",
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
        let options = case.options(&case.tests()[0]);
        for (width, height) in [(1, 1), (1, 10_000), (10_000, 1), (3, 700), (65_535, 2)] {
            let rgb = vec![90; (3 * width * height) as usize];
            let image = Image::rgb8(width, height, &rgb).unwrap();
            let id = format!("{name}: {width} × {height}");
            match case.projector.pixels(&image, options) {
                Ok(tiles) => {
                    let is_sound = |tile: &ruvllm::vision::Pixels| {
                        tile.values.len() == 3 * tile.width * tile.height
                            && tile.values.iter().all(|x| x.is_finite())
                    };
                    assert!(!tiles.is_empty() && tiles.iter().all(is_sound), "{id}");
                }
                Err(error) => {
                    let is_named = matches!(
                        error,
                        VisionError::TooNarrow { .. }
                            | VisionError::TooManyPatches { .. }
                            | VisionError::ImageSize { .. }
                    );
                    assert!(is_named, "{id}: {error}");
                }
            }
        }
    }
}
