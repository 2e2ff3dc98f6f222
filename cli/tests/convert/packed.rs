//! Checkpoints of GPTQ, AWQ and FP8 against `tests/data/packed.json`, which
//! `tests/reference_packed.py` makes from the formats' definitions; and folders that are opened as
//! they are.

use super::*;
use ruvllm::model::quantize::{Importance, ImportanceFormat, Sums};

/// The checkpoints of the script.
fn lines() -> Vec<Json> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/packed.json");
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn line(name: &str) -> Json {
    lines()
        .into_iter()
        .find(|line| line["name"] == name)
        .unwrap()
}

/// The folder of a checkpoint: a Qwen 3 of which some matrices are packed.
fn write_packed(line: &Json) -> Folder {
    let (folder, mut model) = good("qwen3");
    for (key, value) in line["config"].as_object().unwrap() {
        model["config"][key] = value.clone();
    }
    folder.write("config.json", model["config"].to_string());
    let packed = line["tensors"].as_object().unwrap();
    let inner = line["config"]["intermediate_size"].as_u64().unwrap() as usize;
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    let mut add = |name: &str, dtype: &str, shape: &Json, bytes: &[u8]| {
        let offsets = [data.len(), data.len() + bytes.len()];
        data.extend(bytes);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
        header.insert(name.to_owned(), entry);
    };
    for (name, shape) in checkpoint(&model) {
        let module = name.trim_end_matches("weight");
        if name.contains("layers.1.") || packed.keys().any(|key| key.starts_with(module)) {
            continue;
        }
        let resized = |n: usize| if n == 96 { inner } else { n };
        let shape: Vec<usize> = shape.into_iter().map(resized).collect();
        let numbers = values(&name, shape.iter().product()).map(half);
        let bytes: Vec<u8> = numbers.flat_map(u16::to_le_bytes).collect();
        add(&name, "F16", &json!(shape), &bytes);
    }
    for (name, tensor) in packed {
        let bytes = base64(tensor[2].as_str().unwrap());
        add(name, tensor[0].as_str().unwrap(), &tensor[1], &bytes);
    }
    let header = Json::Object(header).to_string();
    folder.write("model.safetensors", with_header(&header, &data));
    folder
}

fn base64(text: &str) -> Vec<u8> {
    let letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let place = |letter: u8| letters.iter().position(|&l| l == letter).unwrap() as u32;
    let mut bytes = Vec::new();
    for four in text.trim_end_matches('=').as_bytes().chunks(4) {
        let bits = four
            .iter()
            .fold(0, |bits, &letter| bits << 6 | place(letter));
        let bits = bits << (6 * (4 - four.len()));
        bytes.extend(&bits.to_be_bytes()[1..four.len()]);
    }
    bytes
}

/// The name of a module's matrix in the GGUF file.
fn gguf_name(name: &str) -> &'static str {
    match name {
        name if name.contains("q_proj") => "blk.0.attn_q.weight",
        name if name.contains("down_proj") => "blk.0.ffn_down.weight",
        _ => "blk.0.ffn_gate.weight",
    }
}

/// The values of a tensor, as F32.
fn floats(gguf: &Gguf, name: &str) -> (DType, Vec<f32>) {
    let tensor = gguf.tensor(name).unwrap();
    let mut values = vec![0.0; tensor.n_elems() as usize];
    ruvllm::quant::dequantize_row(tensor.dtype, gguf.data(tensor), &mut values).unwrap();
    (tensor.dtype, values)
}

fn hash(values: &[f32]) -> String {
    format!("{:016x}", fnv(values.iter().flat_map(|x| x.to_le_bytes())))
}

/// Values are exact as F32, and in the blocks that hold them; where none do, the loss is told.
#[test]
fn values_are_those_of_the_definitions() {
    for line in lines() {
        let name = line["name"].as_str().unwrap();
        let folder = write_packed(&line);
        let convert = |file: &str, outtype: &str| {
            let out = folder.0.join(file);
            let output = folder.convert(&["-o", out.to_str().unwrap(), "--outtype", outtype]);
            let told = String::from_utf8(output.stderr).unwrap();
            assert!(output.status.success(), "{name}: {told}");
            (Gguf::open(out).unwrap(), told)
        };
        let (plain, _) = convert("f32.gguf", "f32");
        let (auto, told) = convert("auto.gguf", "auto");
        for (module, expected) in line["values"].as_object().unwrap() {
            let (dtype, exact) = floats(&plain, gguf_name(module));
            assert_eq!(
                (dtype, json!(hash(&exact))),
                (DType::F32, expected.clone()),
                "{name} {module}"
            );
            let (dtype, found) = floats(&auto, gguf_name(module));
            match line["exact"].as_str() {
                Some(blocks) => {
                    assert_eq!(dtype.to_string(), blocks, "{name} {module}");
                    assert_eq!(json!(hash(&found)), *expected, "{name} {module}");
                }
                None if name.starts_with("fp8") => assert_eq!(dtype, DType::F16),
                None => {
                    assert_eq!(dtype, DType::Q8_0, "{name} {module}");
                    let square = |x: f32| f64::from(x) * f64::from(x);
                    let error: f64 = exact.iter().zip(&found).map(|(x, y)| square(y - x)).sum();
                    let all: f64 = exact.iter().map(|&x| square(x)).sum();
                    // A value is off by half a step of 1/127 of its block's largest at most.
                    assert!(
                        error > 0.0 && (error / all).sqrt() < 0.01,
                        "{error} of {all}"
                    );
                    assert!(
                        told.contains("3 matrices") && told.contains("rounded again"),
                        "{told}"
                    );
                }
            }
        }
    }
}

/// Checkpoints that lie about what they hold.
#[test]
fn packed_refusals() {
    type Change = fn(&mut Json);
    let q = "model.layers.0.self_attn.q_proj";
    let cases: &[(&str, Change, &str)] = &[
        (
            "gptq",
            |l| {
                drop(
                    l["tensors"]
                        .as_object_mut()
                        .unwrap()
                        .remove("model.layers.0.self_attn.q_proj.scales"),
                )
            },
            "there are no .scales",
        ),
        (
            "gptq",
            |l| l["tensors"]["model.layers.0.self_attn.q_proj.qzeros"][1] = json!([16, 2]),
            "are not of one matrix",
        ),
        (
            "gptq",
            |l| {
                l["tensors"]["model.layers.0.self_attn.q_proj.g_idx"][2] =
                    json!("////".repeat(85) + "/w==")
            },
            "into group -1",
        ),
        (
            "gptq",
            |l| {
                l["tensors"]["model.layers.0.self_attn.q_proj.scales"][2] =
                    json!("////".repeat(170) + "//8=")
            },
            "NaN",
        ),
        (
            "gptq",
            |l| l["config"]["quantization_config"]["bits"] = json!(3),
            "3 bits",
        ),
        (
            "gptq",
            |l| l["config"]["quantization_config"]["checkpoint_format"] = json!("marlin"),
            "marlin",
        ),
        (
            "awq",
            |l| l["config"]["quantization_config"]["version"] = json!("gemv"),
            "gemv",
        ),
        (
            "awq",
            |l| l["config"]["quantization_config"]["quant_method"] = json!("aqlm"),
            "aqlm",
        ),
        (
            "fp8",
            |l| {
                drop(
                    l["tensors"]
                        .as_object_mut()
                        .unwrap()
                        .remove("model.layers.0.self_attn.q_proj.weight_scale"),
                )
            },
            "no weight_scale",
        ),
        (
            "fp8-blocks",
            |l| l["config"]["quantization_config"]["weight_block_size"] = json!([64, 0]),
            "weight_block_size",
        ),
        (
            "fp8-blocks",
            |l| l["config"]["quantization_config"]["weight_block_size"] = json!([32, 32]),
            "in blocks of 32 x 32",
        ),
    ];
    for (name, change, expected) in cases {
        let mut line = line(name);
        assert!(
            line["tensors"]
                .as_object()
                .unwrap()
                .keys()
                .any(|key| key.starts_with(q))
        );
        change(&mut line);
        let told = write_packed(&line).refusal();
        assert!(told.contains(expected), "{name}: {told}");
    }
}

/// Runs `ruvllm logits` with a folder or a file.
fn logits(model: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ruvllm"));
    command.arg("logits").arg("-m").arg(model);
    command
        .args(["--tokens", "1,2,3", "-o", "-"])
        .args(args)
        .output()
        .unwrap()
}

/// A folder answers as the file that `convert` and `quantize` make of it.
#[test]
fn folders_are_opened() {
    let folder = write_packed(&line("awq"));
    let out = folder.0.join("out.gguf");
    assert!(
        folder
            .convert(&["-o", out.to_str().unwrap()])
            .status
            .success()
    );
    let of_file = logits(&out, &[]);
    assert!(of_file.status.success(), "{of_file:?}");
    let of_folder = logits(&folder.model(), &[]);
    assert_eq!(of_folder.stdout, of_file.stdout, "{of_folder:?}");
    let told = String::from_utf8(logits(&folder.model(), &["-q", "Q8_0"]).stderr).unwrap();
    assert!(told.contains("lose twice"), "{told}");

    let (folder, _) = good("qwen3");
    let (file, small) = (folder.0.join("file.gguf"), folder.0.join("small.gguf"));
    let converted = folder.convert(&["-o", file.to_str().unwrap()]);
    assert!(converted.status.success(), "{converted:?}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ruvllm"));
    let quantized = command
        .arg("quantize")
        .args([&file, &small])
        .arg("Q4_K_M")
        .output();
    assert!(quantized.unwrap().status.success());
    let expected = logits(&small, &[]);
    assert!(expected.status.success(), "{expected:?}");
    let cache = folder.0.join("cache");
    let cached = ["-q", "Q4_K_M", "--quantize-cache", cache.to_str().unwrap()];
    for (model, args) in [
        (&folder.model(), &cached[..2]),
        (&folder.model(), &cached),
        (&file, &cached[..2]),
        (&file, &cached),
    ] {
        let found = logits(model, args);
        assert_eq!(found.stdout, expected.stdout, "{found:?}");
    }
    let kept = || -> Vec<_> {
        let entries = std::fs::read_dir(&cache).unwrap().map(Result::unwrap);
        let mut all: Vec<_> = entries
            .map(|entry| (entry.path(), entry.metadata().unwrap().modified().unwrap()))
            .collect();
        all.sort();
        all
    };
    let before = kept();
    assert_eq!(before.len(), 2, "one of the folder, one of the file");
    assert_eq!(logits(&folder.model(), &cached).stdout, expected.stdout);
    assert_eq!(logits(&file, &cached).stdout, expected.stdout);
    assert_eq!(kept(), before, "made once");
    // Another content is another file, and one that is damaged is made anew.
    for (path, _) in &before {
        std::fs::write(path, b"GGUF").unwrap();
    }
    assert_eq!(logits(&file, &cached).stdout, expected.stdout);
    let told = String::from_utf8(logits(&small, &["-q", "Q8_0"]).stderr).unwrap();
    assert!(told.contains("quantised already"), "{told}");
}

/// Types by tensor and an importance matrix, of a file and of a folder: what `quantize` makes.
#[test]
fn recipes_of_quantising_while_opening() {
    let (folder, _) = good("qwen3");
    let name = |name: &str| folder.0.join(name).to_str().unwrap().to_owned();
    let [file, small, matrix, cache] =
        ["file.gguf", "small.gguf", "matrix.gguf", "cache"].map(name);
    let converted = folder.convert(&["-o", &file]);
    assert!(converted.status.success(), "{converted:?}");

    let gguf = Gguf::open(&file).unwrap();
    let mut importance = Importance::default();
    for t in gguf.tensors().iter().filter(|t| t.name.starts_with("blk")) {
        let squares = (0..t.dims[0]).map(|i| (i % 7 * i % 11) as f32 + 0.1);
        let (squares, counts) = (squares.collect(), vec![1.0]);
        importance
            .of
            .insert(t.name.clone(), Sums { squares, counts });
    }
    let format = ImportanceFormat::Gguf;
    importance.write(Path::new(&matrix), format).unwrap();

    let types = [
        "--tensor-type",
        "ffn_down=Q8_0",
        "--token-embedding-type",
        "Q5_0",
    ];
    let guided = ["--imatrix", &matrix];
    let all = [&types[..], &guided, &["--exclude-weights", "attn_k"]].concat();
    let mut seen = Vec::new();
    for flags in [&[][..], &types, &guided, &all, &["--pure"]] {
        let made = Command::new(env!("CARGO_BIN_EXE_ruvllm"))
            .args(["quantize", &file, &small, "Q4_0", "--overwrite"])
            .args(flags)
            .output();
        assert!(made.unwrap().status.success(), "{flags:?}");
        let expected = logits(Path::new(&small), &[]).stdout;
        assert!(!seen.contains(&expected), "{flags:?} change something");
        let on_open = [&["-q", "Q4_0", "--quantize-cache", &cache], flags].concat();
        for model in [Path::new(&file), &folder.model()] {
            // The second time from the cache.
            for _ in 0..2 {
                let found = logits(model, &on_open);
                assert_eq!(found.stdout, expected, "{flags:?}: {found:?}");
            }
        }
        seen.push(expected);
        let kept = std::fs::read_dir(&cache).unwrap().count();
        assert_eq!(kept, 2 * seen.len(), "one of the folder, one of the file");
    }

    // What does not go with the model, or with the call.
    let other = name("other.gguf");
    let of_another = Importance {
        of: [(
            "blk.0.attn_q.weight".into(),
            Sums {
                squares: vec![1.0; 3],
                counts: vec![1.0],
            },
        )]
        .into(),
        ..Importance::default()
    };
    of_another.write(Path::new(&other), format).unwrap();
    for (flags, told) in [
        (
            &["-q", "Q4_0", "--tensor-type", "ffn_dawn=Q8_0"][..],
            "ffn_down",
        ),
        (&["-q", "Q4_0", "--imatrix", &other], "of another model"),
        (
            &["-q", "Q4_0", "--imatrix", &small],
            "not an importance matrix",
        ),
        (&["--imatrix", &matrix], "--quantize"),
        (&["--pure"], "--quantize"),
    ] {
        for model in [Path::new(&file), &folder.model()] {
            let failed = logits(model, flags);
            let text = String::from_utf8(failed.stderr).unwrap();
            assert!(!failed.status.success() && text.contains(told), "{text}");
        }
    }
}
