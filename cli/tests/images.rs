//! Images given to the program: what it refuses, and files of images against the models' authors'
//! decoders (`RUVLLM_CONFORMANCE`).
#![cfg(feature = "vision")]

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn run(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ruvllm"));
    command.args(args).output().unwrap()
}

fn refused(args: &[&str]) -> String {
    let output = run(args);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn floats(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    let (values, _) = bytes.as_chunks::<4>();
    values
        .iter()
        .map(|&bytes| f32::from_le_bytes(bytes))
        .collect()
}

#[test]
fn refusals_say_what_to_do() {
    let folder = std::env::temp_dir().join(format!("ruvllm-images-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    // The header of a BMP, whose pixels would be 12 GiB.
    let mut bomb = b"BM".to_vec();
    bomb.extend(
        [54_u32, 0, 54, 40, 65_535, 65_535]
            .map(u32::to_le_bytes)
            .concat(),
    );
    bomb.extend([1_u16, 24].map(u16::to_le_bytes).concat());
    bomb.extend([0; 24]);
    let (bomb, text) = (file("bomb.bmp", &bomb), file("text.png", b"no picture"));
    let out = folder.join("out");
    let out = out.to_str().unwrap();
    let of = |image: &str| refused(&["vision", "--image", image, "-o", out]);
    assert!(of(&bomb).contains("65535 × 65535"), "{}", of(&bomb));
    assert!(of(&text).contains("no PNG"), "{}", of(&text));
    assert!(of("/no/such/file").contains("/no/such/file"));
    assert!(refused(&["vision", "-o", out]).contains("--image FILE"));
    std::fs::remove_dir_all(&folder).unwrap();
}

/// PNG files: pixels to the bit of decoders, so that embeddings are those of the library's tests.
#[test]
fn files_of_images() {
    let Some(root) = std::env::var_os("RUVLLM_CONFORMANCE") else {
        return;
    };
    let root = Path::new(&root).join("vision");
    let out = std::env::temp_dir().join(format!("ruvllm-seen-{}", std::process::id()));
    for name in ["gemma3", "qwen3vl"] {
        let dir = root.join(name);
        let manifest = std::fs::read(dir.join("manifest.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        for test in manifest["tests"].as_array().unwrap() {
            let images = test["images"].as_array().unwrap().iter();
            let images: Vec<_> = images.map(|name| name.as_str().unwrap()).collect();
            let bounded = !test["image_max_tokens"].is_null();
            if bounded || images.iter().any(|name| name.ends_with("jpg")) {
                continue;
            }
            let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
            let (model, projector) = (path("model-f16.gguf"), path("mmproj-f32.gguf"));
            let images = images.iter().map(|name| root.join("images").join(name));
            let images: Vec<String> = images.map(|path| path.to_str().unwrap().into()).collect();
            let mut args = vec!["vision", "-m", &model, "--mmproj", &projector];
            images
                .iter()
                .for_each(|image| args.extend(["--image", image]));
            let text = test["prompt_hf"].as_str().unwrap();
            args.extend(["-p", text, "-o", out.to_str().unwrap()]);
            let output = run(&args);
            assert!(output.status.success(), "{output:?}");
            let layout = std::fs::read(out.join("layout.json")).unwrap();
            let layout: Value = serde_json::from_slice(&layout).unwrap();
            assert_eq!(layout["input_ids"], test["hf"]["input_ids"], "{name}");
            let expected = floats(&dir.join(test["embeddings"]["file"].as_str().unwrap()));
            let own = floats(&out.join("embeddings.f32"));
            assert_eq!(own.len(), expected.len());
            let differ = own.iter().zip(&expected).map(|(a, b)| (a - b).abs());
            assert!(differ.fold(0.0, f32::max) <= 1e-4, "{name} {}", test["id"]);
        }
    }
    let _ = std::fs::remove_dir_all(&out);
}

/// `bench images` encodes another image each time, and its parts are the time to the first token.
#[test]
fn images_are_measured() {
    let Some(root) = std::env::var_os("RUVLLM_CONFORMANCE") else {
        return;
    };
    let dir = Path::new(&root).join("vision/gemma3");
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let (model, projector) = (path("model-f16.gguf"), path("mmproj-f16.gguf"));
    let output = run(&[
        "bench", "images", "-m", &model, "--mmproj", &projector, "--size", "100", "-r", "2", "-o",
        "json",
    ]);
    assert!(output.status.success(), "{output:?}");
    let rows: Value = serde_json::from_slice(&output.stdout).unwrap();
    let row = &rows[0];
    assert_eq!((&row["n_tokens"], &row["width"]), (&16.into(), &100.into()));
    let ms = |key: &str| row[key].as_f64().unwrap();
    let parts = ms("pixels_ms") + ms("encoder_ms") + ms("prompt_ms");
    assert!((parts - ms("first_token_ms")).abs() < 1e-6 * parts);
    // An image that was encoded before would take no time.
    assert!(ms("encoder_ms") > 0.0);
    for part in ["pixels", "encoder", "prompt"] {
        assert_eq!(row["samples_s"][part].as_array().unwrap().len(), 2);
    }
}
