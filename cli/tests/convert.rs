//! `ruvllm convert` against llama.cpp's converter: `tests/data/convert.json`, which
//! `tests/reference_convert.py` makes.
#![cfg(feature = "convert")]

use ruvllm::Model;
use ruvllm::gguf::{Array, Gguf, Value, Writer};
use ruvllm::quant::DType;
use serde_json::{Value as Json, json};
use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};

#[path = "convert/packed.rs"]
mod packed;
#[cfg(feature = "vision")]
#[path = "convert/projectors.rs"]
mod projectors;

/// A folder that is gone afterwards, with a folder `tiny-model` in it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "ruvllm-convert-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let folder = Folder(std::env::temp_dir().join(name));
        std::fs::create_dir_all(folder.model()).unwrap();
        folder
    }

    fn model(&self) -> PathBuf {
        self.0.join("tiny-model")
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.model().join(name), bytes).unwrap();
    }

    fn convert(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ruvllm"));
        command
            .arg("convert")
            .arg(self.model())
            .args(["-t", "1"])
            .args(args)
            .output()
            .unwrap()
    }

    /// What the program says when it refuses the folder.
    fn refusal(&self) -> String {
        let output = self.convert(&[]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert_eq!(
            std::fs::read_dir(&self.0).unwrap().count(),
            1,
            "something was left behind"
        );
        String::from_utf8(output.stderr).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn fnv(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The values of a tensor, as `values` in the script.
fn values(name: &str, n: usize) -> impl Iterator<Item = f32> {
    let seed = fnv(name.bytes());
    (0..n as u64).map(move |i| {
        let x = i.wrapping_add(seed).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 57) as f32 / 64.0 - 1.0
    })
}

/// A safetensors file of tensors with names and shapes, of a type of PyTorch's.
fn safetensors(tensors: &[(String, Vec<usize>)], dtype: &str) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape) in tensors {
        let start = data.len();
        // Of MXFP4.
        let dtype = if name.ends_with("_blocks") || name.ends_with("_scales") {
            "uint8"
        } else {
            dtype
        };
        for x in values(name, shape.iter().product()) {
            let number = ((x + 1.0) * 64.0) as u32;
            match dtype {
                "uint8" if name.ends_with("_scales") => data.push(118 + (number % 8) as u8),
                "uint8" => data.push((number * 37 % 256) as u8),
                "bfloat16" => data.extend(&x.to_le_bytes()[2..]),
                "float16" => data.extend(half(x).to_le_bytes()),
                _ => data.extend(x.to_le_bytes()),
            }
        }
        let dtype = json!({"bfloat16": "BF16", "float16": "F16", "float32": "F32", "uint8": "U8"})
            [dtype]
            .clone();
        header.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}),
        );
    }
    with_header(&Json::Object(header).to_string(), &data)
}

fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// A multiple of 1/64 below 1, in half precision.
fn half(x: f32) -> u16 {
    let bits = x.to_bits();
    if x == 0.0 {
        0
    } else {
        (bits >> 16 & 0x8000 | ((bits >> 23 & 255) - 112) << 10 | bits >> 13 & 0x3ff) as u16
    }
}

/// The first line has the tokenizers' files, the others a model each.
fn fixture() -> (Json, Vec<Json>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/convert.json");
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text
        .lines()
        .map(|line| serde_json::from_str::<Json>(line).unwrap());
    (lines.next().unwrap()["tokenizers"].take(), lines.collect())
}

/// Writes the folder of a model.
fn write_folder(folder: &Folder, tokenizers: &Json, model: &Json) {
    folder.write("config.json", model["config"].to_string());
    folder.write(
        "generation_config.json",
        r#"{"temperature": 0.7, "top_k": 20, "top_p": 0.8, "do_sample": true}"#,
    );
    for (name, content) in tokenizers[model["tokenizer"].as_str().unwrap()]
        .as_object()
        .unwrap()
    {
        match content.as_str() {
            Some(hex) => {
                let byte = |i: usize| u8::from_str_radix(&hex[i..i + 2], 16).unwrap();
                folder.write(
                    name,
                    (0..hex.len()).step_by(2).map(byte).collect::<Vec<u8>>(),
                );
            }
            None => folder.write(name, content.to_string()),
        }
    }
    for (name, content) in model["files"].as_object().unwrap() {
        std::fs::create_dir_all(folder.model().join(name).parent().unwrap()).unwrap();
        match name.ends_with(".safetensors") {
            true => folder.write(
                name,
                safetensors(
                    &serde_json::from_value::<Tensors>(content.clone()).unwrap(),
                    "float32",
                ),
            ),
            false => folder.write(name, content.to_string()),
        }
    }
    folder.write(
        "model.safetensors",
        safetensors(&checkpoint(model), model["dtype"].as_str().unwrap()),
    );
}

/// Names and shapes.
type Tensors = Vec<(String, Vec<usize>)>;

fn checkpoint(model: &Json) -> Tensors {
    serde_json::from_value(model["checkpoint"].clone()).unwrap()
}

/// A value of the metadata as the script describes it.
fn describe(value: &Value) -> Json {
    let array = |kind: &str, texts: Vec<String>, values: Vec<Json>| match texts.len() {
        0..=16 => json!([format!("ARRAY {kind}"), values]),
        len => {
            let hash = format!("{:016x}", fnv(texts.join("\n").into_bytes()));
            json!([format!("ARRAY {kind}"), {"len": len, "hash": hash}])
        }
    };
    // Python writes 1.0 for what is whole.
    let float = |x: f32| format!("{:?}", f64::from(x));
    match value {
        Value::U32(x) => json!(["UINT32", x]),
        Value::I32(x) => json!(["INT32", x]),
        Value::F32(x) => json!(["FLOAT32", f64::from(*x)]),
        Value::Bool(x) => json!(["BOOL", x]),
        Value::String(x) => json!(["STRING", x]),
        Value::Array(Array::U8(x)) => array(
            "UINT8",
            x.iter().map(u8::to_string).collect(),
            x.iter().map(|&x| x.into()).collect(),
        ),
        Value::Array(Array::I32(x)) => array(
            "INT32",
            x.iter().map(i32::to_string).collect(),
            x.iter().map(|&x| x.into()).collect(),
        ),
        Value::Array(Array::F32(x)) => array(
            "FLOAT32",
            x.iter().map(|&x| float(x)).collect(),
            x.iter().map(|&x| f64::from(x).into()).collect(),
        ),
        Value::Array(Array::Bool(x)) => array(
            "BOOL",
            x.iter().map(bool::to_string).collect(),
            x.iter().map(|&x| x.into()).collect(),
        ),
        Value::Array(Array::Strings(x)) => {
            let texts: Vec<String> = (0..x.len()).map(|i| x.str(i).unwrap().to_owned()).collect();
            array(
                "STRING",
                texts.clone(),
                texts.into_iter().map(Json::from).collect(),
            )
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn equals_llama_cpp() {
    let (tokenizers, models) = fixture();
    for model in &models {
        let name = model["name"].as_str().unwrap();
        let folder = Folder::new();
        write_folder(&folder, &tokenizers, model);
        let out = folder.0.join("out.gguf");
        let output = folder.convert(&[
            "-o",
            out.to_str().unwrap(),
            "--outtype",
            model["outtype"].as_str().unwrap(),
        ]);
        assert!(
            output.status.success(),
            "{name}: {}",
            String::from_utf8_lossy(&output.stderr)
        );

        let gguf = Gguf::open(&out).unwrap();
        let found: serde_json::Map<_, _> = gguf
            .metadata()
            .iter()
            .map(|(key, value)| (key.to_owned(), describe(value)))
            .collect();
        let expected = model["metadata"].as_object().unwrap();
        for (key, value) in expected {
            assert_eq!(found.get(key), Some(value), "{name}: {key}");
        }
        // Of some old families llama.cpp leaves the type out.
        let is_new = |key: &str| !expected.contains_key(key) && key != "general.file_type";
        assert_eq!(found.keys().find(|key| is_new(key)), None, "{name}");

        let tensors = model["tensors"].as_object().unwrap();
        for tensor in gguf.tensors() {
            let (key, data) = (&tensor.name, gguf.data(tensor));
            let expected = tensors
                .get(key)
                .unwrap_or_else(|| panic!("{name}: {key} is too much"));
            assert_eq!(
                json!([tensor.dims, tensor.dtype.to_string()]),
                json!([expected[0], expected[1]]),
                "{name}: {key}"
            );
            // Of Q8_0 the scales: llama.cpp rounds with the scale before it is stored, we with the
            // one that is.
            let bytes = if tensor.dtype == DType::Q8_0 { 2 } else { 34 };
            let data: Vec<u8> = data
                .chunks(34)
                .flat_map(|block| &block[..bytes.min(block.len())])
                .copied()
                .collect();
            match expected[2].as_array() {
                None => assert_eq!(
                    format!("{:016x}", fnv(data.iter().copied())),
                    expected[2],
                    "{name}: {key}"
                ),
                // Powers and quotients of different libraries: two units in the last place.
                Some(expected) => {
                    for (found, expected) in data.chunks(4).zip(expected) {
                        let (found, expected) = (
                            f32::from_le_bytes(found.try_into().unwrap()),
                            expected.as_f64().unwrap(),
                        );
                        let bound = 2.0 * f64::from(f32::EPSILON) * expected.abs();
                        assert!(
                            (f64::from(found) - expected).abs() <= bound,
                            "{name}: {key}: {found} {expected}"
                        );
                    }
                }
            }
        }
        assert_eq!(gguf.tensors().len(), tensors.len(), "{name}");

        // The file runs.
        let model = Model::open(&out).unwrap_or_else(|error| panic!("{name}: {error}"));
        if name == "xlm-roberta-reranker" {
            assert!(model.reranker().unwrap().rank("the", &["thin"]).unwrap()[0].is_finite());
            continue;
        }
        if matches!(
            name,
            "qwen3-embedding"
                | "embeddinggemma"
                | "bert"
                | "jina-bert-v2"
                | "xlm-roberta"
                | "modern-bert"
        ) || name.starts_with("nomic-bert")
        {
            let embedder = model.embedder().unwrap();
            assert!(
                embedder.embed(&["the thin the"]).unwrap()[0]
                    .iter()
                    .all(|x| x.is_finite())
            );
            continue;
        }
        let mut session = model.session().unwrap();
        session
            .prefill(&model.tokenizer().unwrap().encode_prompt("the thin the"))
            .unwrap();
        assert!(session.logits().iter().all(|x| x.is_finite()), "{name}");
    }
}

/// A folder that can be converted: the model of the fixture with this name.
fn good(name: &str) -> (Folder, Json) {
    let (tokenizers, models) = fixture();
    let model = models
        .into_iter()
        .find(|model| model["name"] == name)
        .unwrap();
    let folder = Folder::new();
    write_folder(&folder, &tokenizers, &model);
    (folder, model)
}

/// all-MiniLM-L6-v2 as it is published, in a folder `all-minilm-l6-v2` of the one that
/// `RUVLLM_REAL_MODELS` names: the vectors of sentences in many languages are those of its
/// checkpoint's own arithmetic (`tests/reference_wordpiece.py`).
#[test]
fn a_real_checkpoint() {
    let Some(root) = std::env::var_os("RUVLLM_REAL_MODELS") else {
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED a_real_checkpoint: RUVLLM_REAL_MODELS names no folder of real models"
        );
        return;
    };
    let folder = Folder::new();
    let out = folder.0.join("minilm.gguf");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ruvllm"));
    let command = command
        .arg("convert")
        .arg(Path::new(&root).join("all-minilm-l6-v2"))
        .args(["--outtype", "f32", "-o"]);
    let output = command.arg(&out).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let embedder = Model::open(&out).unwrap().embedder().unwrap();
    let lines = include_str!("../../tests/data/wordpiece.jsonl").lines();
    let lines: Vec<Json> = lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let texts: Vec<&str> = lines
        .iter()
        .map(|line| line["text"].as_str().unwrap())
        .collect();
    let mut least = 1.0f64;
    for (line, vector) in lines.iter().zip(embedder.embed(&texts).unwrap()) {
        assert_eq!(
            json!(embedder.tokens(line["text"].as_str().unwrap()).unwrap()),
            line["tokens"]
        );
        let codes = line["vector"].as_str().unwrap();
        let code = |i: usize| {
            u16::from_str_radix(&codes[4 * i..4 * i + 4], 16)
                .unwrap()
                .swap_bytes() as i16
        };
        let expected: Vec<f64> = (0..codes.len() / 4)
            .map(|i| f64::from(code(i)) / 32768.0)
            .collect();
        assert_eq!(vector.len(), expected.len());
        let found: Vec<f64> = vector.into_iter().map(f64::from).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let cosine =
            dot(&found, &expected) / (dot(&found, &found) * dot(&expected, &expected)).sqrt();
        assert!(cosine >= 0.9999, "{}: {cosine}", line["text"]);
        least = least.min(cosine);
    }
    println!("{} texts, least cosine {least}", lines.len());

    // A smaller file by a text is nearer to it than one of the same size by importance, also for texts
    // of another kind.
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo-heldout.txt");
    let vectors = embedder.embed(&texts).unwrap();
    let (imatrix, small) = (folder.0.join("i.gguf"), folder.0.join("small.gguf"));
    let ruvllm = |args: &[&OsStr]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ruvllm"));
        let output = command.args(args).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    let (of, file, text) = ("-m".as_ref(), "-f".as_ref(), text.as_ref());
    let line: [&OsStr; 7] = [
        "imatrix".as_ref(),
        of,
        out.as_ref(),
        file,
        text,
        "-o".as_ref(),
        imatrix.as_ref(),
    ];
    ruvllm(&line);
    let distance = |more: &[&OsStr]| {
        let mut line: Vec<&OsStr> = vec![
            "quantize".as_ref(),
            out.as_ref(),
            small.as_ref(),
            "Q4_0".as_ref(),
        ];
        line.extend([
            OsStr::new("--overwrite"),
            "--imatrix".as_ref(),
            imatrix.as_ref(),
        ]);
        line.extend(more);
        ruvllm(&line);
        let embedder = Model::open(&small).unwrap().embedder().unwrap();
        let pairs = embedder.embed(&texts).unwrap().into_iter().zip(&vectors);
        let cosine =
            |(a, b): (Vec<f32>, &Vec<f32>)| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        1.0 - pairs.map(cosine).sum::<f32>() / texts.len() as f32
    };
    let (plain, fed) = (distance(&[]), distance(&["--feedback-text".as_ref(), text]));
    assert!(fed < plain, "{fed} of {plain}");
}

/// Encoders are measured, too: of whole chunks, with the tokens that texts have at both ends.
#[test]
fn importances_of_an_encoder() {
    let (folder, _) = good("bert");
    let [model, text, imatrix, small] = ["model.gguf", "text.txt", "i.gguf", "small.gguf"]
        .map(|name| folder.0.join(name).to_str().unwrap().to_owned());
    std::fs::write(&text, "the thin the ".repeat(200)).unwrap();
    assert!(folder.convert(&["-o", &model]).status.success());
    let ruvllm = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ruvllm"));
        let output = command.args(args).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    ruvllm(&[
        "imatrix", "-m", &model, "-f", &text, "-c", "16", "--chunks", "3", "-o", &imatrix,
    ]);
    let sums = Gguf::open(&imatrix).unwrap();
    let all = |name: &str| {
        let data = sums.data(sums.tensor(name).unwrap());
        data.as_chunks::<4>()
            .0
            .iter()
            .map(|&x| f32::from_le_bytes(x))
            .collect::<Vec<f32>>()
    };
    let of_q = all("blk.0.attn_q.weight.in_sum2");
    assert!(of_q.iter().all(|&x| x > 0.0), "{of_q:?}");
    assert_eq!(all("blk.0.attn_q.weight.counts"), [48.0]);
    ruvllm(&["quantize", &model, &small, "Q4_0", "--feedback-text", &text]);
    let embedder = Model::open(&small).unwrap().embedder().unwrap();
    assert_eq!(embedder.embed(&["the thin the"]).unwrap().len(), 1);
}

#[test]
fn splits_and_default_name() {
    let (folder, model) = good("llama");
    let out = folder.0.join("whole.gguf");
    assert!(
        folder
            .convert(&["-o", out.to_str().unwrap()])
            .status
            .success()
    );
    // The same tensors in two files.
    let tensors = checkpoint(&model);
    let (first, second) = tensors.split_at(7);
    std::fs::remove_file(folder.model().join("model.safetensors")).unwrap();
    let mut map = serde_json::Map::new();
    for (name, part) in [
        ("model-00001-of-00002.safetensors", first),
        ("model-00002-of-00002.safetensors", second),
    ] {
        folder.write(name, safetensors(part, "bfloat16"));
        map.extend(part.iter().map(|(tensor, _)| (tensor.clone(), name.into())));
    }
    folder.write(
        "model.safetensors.index.json",
        json!({ "weight_map": map }).to_string(),
    );
    let output = folder.convert(&[]);
    assert!(output.status.success(), "{output:?}");
    let beside = folder.0.join("tiny-model-BF16.gguf");
    assert_eq!(
        std::fs::read(&beside).unwrap(),
        std::fs::read(&out).unwrap()
    );
    // It is not replaced unasked.
    let output = folder.convert(&[]);
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .contains("--overwrite")
    );
    assert!(folder.convert(&["--overwrite"]).status.success());
}

/// Buffers that checkpoints have beside their weights change nothing, whatever their types: the
/// positions of BERT (I64), the masks of GPT-NeoX (BOOL or U8). A weight of such a type is refused
/// by name.
#[test]
fn buffers_of_any_type() {
    for (name, buffers, weight) in [
        (
            "bert",
            &[("bert.embeddings.position_ids", "I64", &[1, 128][..], 8)][..],
            (
                "encoder.layer.0.attention.self.query.weight",
                "I64",
                &[1, 1][..],
                8,
            ),
        ),
        (
            "gptneox",
            &[
                ("gpt_neox.layers.0.attention.bias", "BOOL", &[1, 1, 8, 8], 1),
                ("gpt_neox.layers.1.attention.bias", "U8", &[1, 1, 8, 8], 1),
                ("gpt_neox.layers.0.attention.masked_bias", "F16", &[], 2),
                (
                    "gpt_neox.layers.1.attention.rotary_emb.inv_freq",
                    "F64",
                    &[4],
                    8,
                ),
            ],
            ("gpt_neox.layers.0.attention.dense.weight", "U8", &[1, 1], 1),
        ),
    ] {
        let (folder, _) = good(name);
        let out = folder.0.join("plain.gguf");
        assert!(
            folder
                .convert(&["-o", out.to_str().unwrap()])
                .status
                .success(),
            "{name}"
        );
        let plain = std::fs::read(folder.model().join("model.safetensors")).unwrap();
        let with = |buffers: &[(&str, &str, &[usize], usize)]| {
            let n = u64::from_le_bytes(plain[..8].try_into().unwrap()) as usize;
            let mut header: serde_json::Map<String, Json> =
                serde_json::from_slice(&plain[8..8 + n]).unwrap();
            let mut data = plain[8 + n..].to_vec();
            for (name, dtype, shape, size) in buffers {
                let start = data.len();
                data.resize(start + shape.iter().product::<usize>() * size, 1);
                let tensor =
                    json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]});
                header.insert((*name).to_owned(), tensor);
            }
            folder.write(
                "model.safetensors",
                with_header(&Json::Object(header).to_string(), &data),
            );
        };
        with(buffers);
        let with_buffers = folder.0.join("with-buffers.gguf");
        let output = folder.convert(&["-o", with_buffers.to_str().unwrap()]);
        assert!(output.status.success(), "{name}: {output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("tensors are left out"), "{said}");
        assert!(
            std::fs::read(&with_buffers).unwrap() == std::fs::read(&out).unwrap(),
            "{name}"
        );
        [out, with_buffers]
            .iter()
            .for_each(|file| std::fs::remove_file(file).unwrap());
        // Of another name than the model's own, which would be there twice.
        let weight = (&*format!("x.{}", weight.0), weight.1, weight.2, weight.3);
        with(&[weight]);
        let said = folder.refusal();
        assert!(said.contains(weight.0) && said.contains(weight.1), "{said}");
    }
}

#[test]
fn refusals_say_what_is_wrong() {
    let tensors = |change: &dyn Fn(&mut Tensors)| {
        let (folder, model) = good("mixtral");
        let mut tensors = checkpoint(&model);
        change(&mut tensors);
        folder.write("model.safetensors", safetensors(&tensors, "bfloat16"));
        folder.refusal()
    };
    let says = |text: String, part: &str| assert!(text.contains(part), "{text:?} lacks {part:?}");
    says(
        tensors(&|t| t.push(("model.layers.0.self_attn.rotor.weight".into(), vec![4, 4]))),
        "self_attn.rotor",
    );
    says(
        tensors(&|t| t.push(("model.layers.7.input_layernorm.weight".into(), vec![64]))),
        "layers.7",
    );
    says(
        tensors(&|t| t.push(("model.layers.0.self_attn.q_proj.qweight".into(), vec![4, 4]))),
        "quantised",
    );
    says(
        tensors(&|t| t.push(("embed_tokens.weight".into(), vec![288, 64]))),
        "the same tensor",
    );
    says(
        tensors(&|t| t.push(("lm_head.bias".into(), vec![]))),
        "output.bias",
    );
    says(
        tensors(&|t| t.retain(|(name, _)| !name.contains("experts.2.w1"))),
        "experts",
    );
    says(
        tensors(&|t| t.retain(|(name, _)| !name.contains("layers.1.self_attn.v_proj"))),
        "blk.1.attn_v",
    );
    says(
        tensors(&|t| {
            t.iter_mut()
                .filter(|(name, _)| name.contains("experts.3.w2"))
                .for_each(|t| t.1 = vec![96, 64])
        }),
        "shapes",
    );
    says(
        tensors(&|t| {
            t.iter_mut()
                .filter(|(name, _)| name.ends_with("q_proj.weight"))
                .for_each(|t| t.1[0] = 62)
        }),
        "heads",
    );
    says(
        tensors(&|t| {
            t.iter_mut()
                .filter(|(name, _)| name.contains("q_proj"))
                .for_each(|t| t.1 = vec![0, 64])
        }),
        "empty",
    );

    let config = |change: &dyn Fn(&mut Json)| {
        let (folder, mut model) = good("llama");
        change(&mut model["config"]);
        folder.write("config.json", model["config"].to_string());
        folder.refusal()
    };
    says(
        config(&|c| c["architectures"] = json!(["TeapotForCausalLM"])),
        "TeapotForCausalLM",
    );
    says(config(&|c| c["architectures"] = json!(1)), "architectures");
    says(
        config(&|c| c["quantization_config"] = json!({"quant_method": "gptq"})),
        "gptq",
    );
    says(
        config(&|c| c["num_hidden_layers"] = json!("two")),
        "num_hidden_layers",
    );
    says(
        config(&|c| c["num_hidden_layers"] = json!(u64::MAX)),
        "num_hidden_layers",
    );
    says(
        config(&|c| c["num_hidden_layers"] = json!(null)),
        "num_hidden_layers",
    );
    says(config(&|c| c["num_attention_heads"] = json!(0)), "heads");
    says(config(&|c| c["vocab_size"] = json!(u32::MAX)), "vocab_size");
    says(config(&|c| c["vocab_size"] = json!(100)), "vocab_size");
    says(
        config(&|c| c["rms_norm_eps"] = json!("1e-5")),
        "rms_norm_eps",
    );
    says(config(&|c| c["head_dim"] = json!(u32::MAX)), "head_dim");
    says(
        config(&|c| c["rope_parameters"]["rope_type"] = json!("spiral")),
        "spiral",
    );
    says(config(&|c| *c = json!([])), "not a JSON object");

    let (folder, mut model) = good("qwen35");
    model["config"]["linear_num_value_heads"] = json!(u32::MAX);
    folder.write("config.json", model["config"].to_string());
    says(folder.refusal(), "linear_num_value_heads");
    let (folder, model) = good("gpt-oss-mxfp4");
    let mut blocks = checkpoint(&model);
    blocks
        .iter_mut()
        .filter(|(name, _)| name.ends_with("_scales"))
        .for_each(|(_, shape)| shape[2] = 5);
    folder.write("model.safetensors", safetensors(&blocks, "bfloat16"));
    says(folder.refusal(), "scales");
    blocks.retain(|(name, _)| !name.ends_with("_scales"));
    folder.write("model.safetensors", safetensors(&blocks, "bfloat16"));
    says(folder.refusal(), "_scales");

    let file = |name: &str, bytes: &[u8]| {
        let (folder, _) = good("llama");
        folder.write(name, bytes);
        folder.refusal()
    };
    says(file("config.json", b"{"), "config.json");
    says(file("tokenizer.json", b"{}"), "BPE");
    says(
        file("tokenizer.json", br#"{"model": {"type": "WordLevel"}}"#),
        "WordLevel",
    );
    says(
        file(
            "tokenizer.json",
            br#"{"model": {"type": "Unigram", "vocab": [["a"]]}}"#,
        ),
        "token",
    );
    says(
        file(
            "tokenizer.json",
            br#"{"model": {"type": "BPE", "vocab": {"a": -1}}}"#,
        ),
        "token",
    );
    says(
        file(
            "tokenizer.json",
            br#"{"model": {"type": "BPE", "vocab": {"a": 9e15}}}"#,
        ),
        "token",
    );
    says(
        file(
            "tokenizer.model",
            b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        ),
        "SentencePiece",
    );
    says(
        file("tokenizer.model", b"\x0a\xff\xff\xff\xff\x0f"),
        "SentencePiece",
    );
    says(
        file("rwkv_vocab_v20230424.txt", b"1 'a' 2\n"),
        "not a vocabulary of RWKV",
    );
    says(
        file(
            "rwkv_vocab_v20230424.txt",
            b"1 'a' 1\n".repeat(2).as_slice(),
        ),
        "not a vocabulary of RWKV",
    );
    says(file("model.safetensors", b""), "model.safetensors");
    says(
        file("model.safetensors", &with_header("{", b"")),
        "model.safetensors",
    );
    says(
        file("model.safetensors", &u64::MAX.to_le_bytes()),
        "model.safetensors",
    );
    let header = |dtype: &str, shape: Json, end: u64| {
        let header =
            json!({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}).to_string();
        file("model.safetensors", &with_header(&header, &[0; 16]))
    };
    says(header("F8_E4M3", json!([16]), 16), "quantised");
    says(header("F32", json!([4]), 32), "model.safetensors");
    says(
        header("F32", json!([1u64 << 62, 1u64 << 62]), 16),
        "model.safetensors",
    );
    says(
        file(
            "model.safetensors.index.json",
            br#"{"weight_map": {"a": "../secret.safetensors"}}"#,
        ),
        "weight_map",
    );
    says(
        file(
            "model.safetensors.index.json",
            br#"{"weight_map": {"a": "absent.safetensors"}}"#,
        ),
        "absent.safetensors",
    );

    says(
        file(
            "modules.json",
            br#"[{"type": "x.Pooling", "path": "../1_Pooling"}]"#,
        ),
        "modules.json",
    );
    says(
        file(
            "modules.json",
            br#"[{"type": "x.Pooling", "path": "1_Pooling"}]"#,
        ),
        "pooling",
    );

    let (folder, _) = good("llama");
    std::fs::remove_file(folder.model().join("model.safetensors")).unwrap();
    says(folder.refusal(), "safetensors");
    std::fs::remove_file(folder.model().join("config.json")).unwrap();
    says(folder.refusal(), "config.json");
}

/// RWKV's folders may have no chat template; llama.cpp writes one of its own then, and so do we.
#[cfg(feature = "chat")]
#[test]
fn rwkv_has_a_chat_template() {
    use ruvllm::chat::{ChatInputs, ChatTemplate, Message};
    let (folder, _) = good("rwkv7");
    folder.write("tokenizer_config.json", "{}");
    let out = folder.0.join("out.gguf");
    assert!(
        folder
            .convert(&["-o", out.to_str().unwrap()])
            .status
            .success()
    );
    let gguf = Gguf::open(&out).unwrap();
    let Some(Value::String(template)) = gguf.metadata().get("tokenizer.chat_template") else {
        panic!("there is none")
    };
    let messages = [
        Message::system("Be brief."),
        Message::user(" Hi "),
        Message::assistant("<think>hm</think> Hello.\n"),
        Message::user("Bye"),
    ];
    let text = ChatTemplate::parse(template)
        .unwrap()
        .render(&ChatInputs::new(&messages))
        .unwrap();
    assert_eq!(
        text,
        "System: Be brief.\n\nUser: Hi\n\nAssistant: Hello.\n\nUser: Bye\n\nAssistant:"
    );
}

/// What the configuration says and the file cannot is refused by name; it would be another model.
#[test]
fn what_files_cannot_say_is_refused() {
    let (tokenizers, models) = fixture();
    let refused = |name: &str, key: &str, value: Json| {
        let mut model = models
            .iter()
            .find(|model| model["name"] == name)
            .unwrap()
            .clone();
        let folder = Folder::new();
        let config = &mut model["config"];
        // Some configurations have their language part in a part of its own.
        let config = if config["text_config"].is_object() {
            &mut config["text_config"]
        } else {
            config
        };
        match key.split_once('.') {
            Some((outer, key)) => config[outer][key] = value,
            None => config[key] = value,
        }
        write_folder(&folder, &tokenizers, &model);
        let text = folder.refusal();
        let key = if key == "rope_parameters" {
            "rope"
        } else {
            key.rsplit('.').next().unwrap()
        };
        assert!(
            text.contains(key) || text.contains("rope type"),
            "{name}: {text:?} lacks {key}"
        );
    };
    for model in &models {
        let name = model["name"].as_str().unwrap();
        match name {
            // They have no function of their own choice.
            "gpt-oss" | "gpt-oss-mxfp4" | "bloom" | "mpt" => continue,
            "dbrx" => refused(name, "ffn_config.ffn_act_fn", json!({"name": "relu"})),
            "falcon" | "falcon-7b" => refused(name, "activation", json!("relu")),
            "gpt2" | "starcoder" => refused(name, "activation_function", json!("relu")),
            _ if name.starts_with("gemma") || matches!(name, "embeddinggemma" | "modern-bert") => {
                refused(name, "hidden_activation", json!("relu"));
            }
            "nemotron_h_moe" => refused(name, "mlp_hidden_act", json!("relu")),
            "nomic-bert" | "nomic-bert-moe" => refused(name, "activation_function", json!("relu")),
            _ => refused(name, "hidden_act", json!("relu")),
        }
    }
    refused("gemma2", "tie_word_embeddings", json!(false));
    refused("gemma2", "attn_logit_softcapping", json!(null));
    refused("gemma2", "final_logit_softcapping", json!(null));
    refused("gemma3", "attn_logit_softcapping", json!(50.0));
    refused("gemma3", "use_bidirectional_attention", json!(true));
    refused(
        "gemma3",
        "rope_parameters.sliding_attention",
        json!({"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}),
    );
    refused(
        "embeddinggemma",
        "use_bidirectional_attention",
        json!(false),
    );
    refused("gemma4-e", "use_bidirectional_attention", json!("all"));
    for name in ["qwen2moe", "qwen3moe", "qwen3next"] {
        refused(name, "decoder_sparse_step", json!(2));
        refused(name, "mlp_only_layers", json!([0]));
    }
    refused("olmoe", "clip_qkv", json!(8.0));
    refused("olmoe", "sliding_window", json!(8));
    refused("smollm3", "use_sliding_window", json!(true));
    refused("smollm3", "no_rope_layers", json!([1, 0]));
    refused(
        "exaone4",
        "layer_types",
        json!(["full_attention", "full_attention"]),
    );
    refused("gpt-oss", "swiglu_limit", json!(6.0));
    refused("gpt-oss", "swiglu_alpha", json!(1.0));
    refused("mamba", "mixer_rms_eps", json!(1e-5));
    refused("mamba2", "time_step_limit", json!([0.001, 0.1]));
    refused("bert", "is_decoder", json!(true));
    refused("bert", "position_embedding_type", json!("relative_key"));
    refused("deepseek3", "rope_interleave", json!(false));
    refused("deepseek3", "moe_layer_freq", json!(2));
    refused("deepseek3", "rope_parameters.mscale_all_dim", json!(0.5));
    refused("deepseek2-lite", "n_group", json!(2));
    refused("deepseek2-lite", "topk_method", json!("random"));
    refused("deepseek2-lite", "norm_topk_prob", json!(true));
    refused(
        "glm4moe-lite",
        "mlp_layer_types",
        json!(["sparse", "dense"]),
    );
    refused("afmoe", "mup_enabled", json!(false));
    refused("ernie4_5-moe", "moe_layer_interval", json!(2));
    refused("gemma3n", "altup_correct_scale", json!(false));
    refused("granitehybrid", "position_embedding_type", json!("rope"));
    refused("jamba", "rms_norm_eps", json!("x"));
    refused("lfm2moe", "norm_topk_prob", json!(false));
    refused("llama4", "attention_chunk_size", json!(32));
    refused("llama4", "use_qk_norm", json!(false));
    refused("modern-bert", "global_attn_every_n_layers", json!(4));
    refused("nomic-bert", "prenorm", json!(true));
    refused("jina-bert-v2", "position_embedding_type", json!("absolute"));
    refused("minicpm3", "scale_emb", json!(1));
    refused("cohere2moe", "num_shared_experts", json!(1));
    refused("falcon-h1", "mamba_norm_before_gate", json!(true));
    refused("smallthinker", "rope_layout", json!([1, 1]));
    refused(
        "granite-swa",
        "layer_rope_theta",
        json!([1e4, 1e4, 1e4, 2e4]),
    );
    refused("mimo2", "swa_head_dim", json!(8));
    refused("hunyuan-moe", "moe_topk", json!([1, 2]));
    refused(
        "bloom",
        "apply_residual_connection_post_layernorm",
        json!(true),
    );
    refused("mpt", "attn_config.qk_ln", json!(true));
    refused("falcon", "alibi", json!(true));
    refused("gpt2", "scale_attn_by_inverse_layer_idx", json!(true));
    refused("starcoder", "multi_query", json!(false));
    refused("nomic-bert-moe", "n_positions", json!(4096));
    refused(
        "qwen2",
        "rope_parameters",
        json!({"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}),
    );
    // The factors of these ropes are written for some families only.
    for (name, kind) in [
        ("llama", "longrope"),
        ("llama", "proportional"),
        ("phi3", "llama3"),
        ("gemma4-e", "llama3"),
    ] {
        let rope = json!({"rope_type": kind, "factor": 8.0, "rope_theta": 1e4});
        refused(name, "rope_parameters", rope);
    }
    refused(
        "phi3",
        "rope_parameters",
        json!({"rope_type": "linear", "factor": 2.0}),
    );
    refused(
        "command-r",
        "rope_parameters",
        json!({"rope_type": "linear", "factor": 2.0}),
    );
    refused(
        "cohere2",
        "rope_parameters",
        json!({"rope_type": "linear", "factor": 2.0}),
    );
}

/// Settings that llama.cpp leaves out, and that ruvllm's files have.
#[test]
fn unusual_settings_are_written() {
    let written = |name: &str, change: &dyn Fn(&mut Json), key: &str| {
        let (folder, mut model) = good(name);
        change(&mut model["config"]);
        folder.write("config.json", model["config"].to_string());
        let out = folder.0.join("out.gguf");
        let output = folder.convert(&["-o", out.to_str().unwrap()]);
        assert!(
            output.status.success(),
            "{name}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Gguf::open(&out).unwrap().metadata().get(key).map(describe)
    };
    let truncate =
        |value: Json| move |c: &mut Json| c["rope_parameters"]["truncate"] = value.clone();
    let key = "qwen2.rope.scaling.yarn_truncate";
    assert_eq!(written("qwen2", &truncate(json!(true)), key), None);
    assert_eq!(
        written("qwen2", &truncate(json!(false)), key),
        Some(json!(["BOOL", false]))
    );
    let key = "gpt-oss.rope.scaling.yarn_truncate";
    assert_eq!(written("gpt-oss", &truncate(json!(false)), key), None);
    assert_eq!(
        written("gpt-oss", &truncate(json!(true)), key),
        Some(json!(["BOOL", true]))
    );
    let factor = |c: &mut Json| c["rope_parameters"]["attention_factor"] = json!(1.5);
    assert_eq!(
        written("phi3", &factor, "phi3.rope.scaling.attn_factor"),
        Some(json!(["FLOAT32", 1.5]))
    );
    // The list counts.
    let by_layer = |c: &mut Json| c["first_k_dense_replace"] = json!(0);
    let key = "deepseek2.leading_dense_block_count";
    assert_eq!(
        written("glm4moe-lite", &by_layer, key),
        Some(json!(["UINT32", 1]))
    );
}

/// Real files of tokenisers have what the small ones of the fixture have not.
#[test]
fn tokenisers_as_they_are_published() {
    let (folder, _) = good("qwen2");
    let file: Json =
        serde_json::from_slice(&std::fs::read(folder.model().join("tokenizer.json")).unwrap())
            .unwrap();
    let with = |part: &str, value: Json| {
        let mut file = file.clone();
        file[part] = value;
        folder.write("tokenizer.json", file.to_string());
    };
    // Composed letters and ligatures would become others.
    with(
        "normalizer",
        json!({"type": "Sequence", "normalizers": [{"type": "NFKC"}]}),
    );
    assert!(folder.refusal().contains("NFKC"));
    let out = folder.0.join("out.gguf");
    let written = |key: &str| {
        let output = folder.convert(&["-o", out.to_str().unwrap(), "--overwrite"]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        Gguf::open(&out).unwrap().metadata().get(key).map(describe)
    };
    with("normalizer", json!({"type": "NFC"}));
    assert_eq!(written("tokenizer.ggml.added_tokens.lstrip"), None);
    // DeepSeek's patterns have line ends in them, where others write `\r\n`.
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let steps = [
        split(r"\p{N}{1,3}"),
        split("[一-龥\u{3040}-ゟ゠-ヿ]+"),
        split(
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
        ),
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}),
    ];
    with(
        "pre_tokenizer",
        json!({"type": "Sequence", "pretokenizers": steps}),
    );
    assert_eq!(
        written("tokenizer.ggml.pre"),
        Some(json!(["STRING", "deepseek-v3"]))
    );
    let mut added = file["added_tokens"].clone();
    added[1]["single_word"] = json!(true);
    let id = added[1]["id"].as_i64().unwrap();
    with("added_tokens", added);
    assert!(written("tokenizer.ggml.added_tokens.single_word").is_some());
    let metadata = Gguf::open(&out).unwrap();
    let ids = metadata
        .metadata()
        .opt_i32s("tokenizer.ggml.added_tokens.single_word");
    assert_eq!(ids.unwrap().unwrap()[..], [id as i32]);
}

/// Only a proportional rope leaves pairs of Gemma 4's full layers as they are.
#[test]
fn plain_rope_of_gemma4_turns_all_pairs() {
    let (folder, mut model) = good("gemma4-e");
    model["config"]["rope_parameters"]["full_attention"] =
        json!({"rope_type": "default", "rope_theta": 1e5});
    folder.write("config.json", model["config"].to_string());
    let out = folder.0.join("out.gguf");
    assert!(
        folder
            .convert(&["-o", out.to_str().unwrap()])
            .status
            .success()
    );
    let gguf = Gguf::open(&out).unwrap();
    let factors = gguf.data(gguf.tensor("rope_freqs.weight").unwrap());
    assert!(factors.chunks(4).all(|factor| factor == 1f32.to_le_bytes()));
}

/// Blocks for multi-token prediction are layers behind the others, or Qwen's `mtp`. What is not
/// whole is left out.
#[test]
fn blocks_for_multi_token_prediction() {
    const PARTS: [&str; 4] = ["eh_proj", "enorm", "hnorm", "shared_head_norm"];
    let behind = (
        "model.layers.2.",
        "model.layers.2.",
        ["eh_proj", "enorm", "hnorm", "shared_head.norm"],
    );
    let of_qwen = (
        "mtp.layers.0.",
        "mtp.",
        ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"],
    );
    for (name, arch, (of_layer, own, parts)) in [
        ("glm4moe", "glm4moe", behind),
        ("deepseek3", "deepseek2", behind),
        ("qwen35", "qwen35", of_qwen),
        ("qwen35moe", "qwen35moe", of_qwen),
        ("qwen3next", "qwen3next", of_qwen),
    ] {
        let (folder, mut model) = good(name);
        if own != "mtp." {
            model["config"]["num_nextn_predict_layers"] = json!(1);
            folder.write("config.json", model["config"].to_string());
        }
        // The last of two layers once more, and the block's own parts.
        let mut tensors = checkpoint(&model);
        tensors.retain(|(name, _)| !name.contains("layers.2."));
        let last = |(name, shape): &(String, Vec<usize>)| {
            Some((
                format!("{of_layer}{}", name.split_once("layers.1.")?.1),
                shape.clone(),
            ))
        };
        let layer: Tensors = tensors.iter().filter_map(last).collect();
        assert!(layer.len() > 5, "{name} {layer:?}");
        tensors.extend(layer);
        let shapes = [vec![64, 128], vec![64], vec![64], vec![64]];
        tensors.extend(
            parts
                .iter()
                .zip(shapes)
                .map(|(part, shape)| (format!("{own}{part}.weight"), shape)),
        );
        let run = |tensors: &Tensors, args: &[&str]| {
            folder.write(
                "model.safetensors",
                safetensors(tensors, model["dtype"].as_str().unwrap()),
            );
            let out = folder.0.join("out.gguf");
            let args = [
                &[
                    "-o",
                    out.to_str().unwrap(),
                    "--overwrite",
                    "--outtype",
                    "f32",
                ],
                args,
            ]
            .concat();
            let output = folder.convert(&args);
            assert!(
                output.status.success(),
                "{name}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            let gguf = Gguf::from_bytes(std::fs::read(out).unwrap()).unwrap();
            let key = |key: &str| gguf.metadata().opt_u64(&format!("{arch}.{key}")).unwrap();
            let n_of_block = gguf
                .tensors()
                .iter()
                .filter(|tensor| tensor.name.starts_with("blk.2."))
                .count();
            (
                key("block_count"),
                key("nextn_predict_layers"),
                n_of_block,
                gguf,
            )
        };
        let (n_layer, n_block, n_of_block, gguf) = run(&tensors, &[]);
        assert_eq!((n_layer, n_block), (Some(3), Some(1)), "{name}");
        assert!(n_of_block > 8, "{name}");
        let opened = Model::from_gguf(gguf.clone()).unwrap();
        assert!(
            opened
                .has_mtp()
                .unwrap_or_else(|error| panic!("{name}: {error}"))
        );
        assert!(opened.unknown().is_empty());
        for (part, to) in parts.iter().zip(PARTS) {
            // Qwen's norms are stored less one.
            let plus = if own == "mtp." && to != "eh_proj" {
                1.0
            } else {
                0.0
            };
            let n = if to == "eh_proj" { 64 * 128 } else { 64 };
            let source = format!("{own}{part}.weight");
            let expected: Vec<u8> = values(&source, n)
                .flat_map(|x| (x + plus).to_le_bytes())
                .collect();
            let tensor = gguf.tensor(&format!("blk.2.nextn.{to}.weight")).unwrap();
            assert_eq!(gguf.data(tensor), expected, "{name} {to}");
        }
        // It drafts, and the text stays the same.
        let generate = |more: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_ruvllm"));
            command
                .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
                .arg("generate")
                .arg("-m")
                .arg(folder.0.join("out.gguf"))
                .args(["-p", "the thin", "-n", "30", "--json"]);
            let output = command
                .args(["-s", "5", "-c", "64"])
                .args(more)
                .output()
                .unwrap();
            assert!(
                output.status.success(),
                "{name}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            serde_json::from_slice::<Json>(&output.stdout).unwrap()
        };
        let (plain, drafted) = (
            generate(&["--no-spec"]),
            generate(&["--spec", "draft-mtp,ngram"]),
        );
        assert_eq!(plain["ids"], drafted["ids"], "{name}");
        assert!(
            drafted["drafts"]["drafters"]["mtp"].is_object(),
            "{name}: {drafted}"
        );
        let without = run(&tensors, &["--no-mtp"]);
        assert_eq!(
            (without.0, without.1, without.2),
            (Some(2), None, 0),
            "{name}"
        );
        tensors.retain(|(name, _)| *name != format!("{own}{}.weight", parts[2]));
        let broken = run(&tensors, &[]);
        assert_eq!((broken.0, broken.1, broken.2), (Some(2), None, 0), "{name}");
    }
}

/// Blocks of families whose blocks nothing is known of: `convert` leaves them out, and a file that
/// has them makes the same model with a word about it.
#[test]
fn blocks_that_nobody_can_compute() {
    let own = ["eh_proj", "enorm", "hnorm"];
    let of_exaone = ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden"];
    for (name, n_layer, of_layer, around, parts) in [
        ("bailingmoe2", 2, "model.layers.2.", "model.layers.2.", own),
        (
            "mimo2",
            2,
            "model.mtp.layers.0.",
            "model.mtp.layers.0.",
            own,
        ),
        ("exaone-moe", 4, "mtp.layers.0.", "mtp.", of_exaone),
    ] {
        let (folder, mut model) = good(name);
        model["config"]["num_nextn_predict_layers"] = json!(1);
        folder.write("config.json", model["config"].to_string());
        let out = folder.0.join("out.gguf");
        let convert = |tensors: &Tensors| {
            folder.write("model.safetensors", safetensors(tensors, "bfloat16"));
            let output = folder.convert(&["-o", out.to_str().unwrap(), "--overwrite"]);
            assert!(
                output.status.success(),
                "{name}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            (
                String::from_utf8(output.stderr).unwrap(),
                std::fs::read(&out).unwrap(),
            )
        };
        let mut tensors = checkpoint(&model);
        let (quiet, plain) = convert(&tensors);
        assert!(!quiet.contains("multi-token"), "{name}: {quiet}");
        let last = format!("layers.{}.", n_layer - 1);
        let layer: Tensors = tensors
            .iter()
            .filter_map(|(name, shape)| {
                Some((
                    format!("{of_layer}{}", name.split_once(&last)?.1),
                    shape.clone(),
                ))
            })
            .collect();
        assert!(layer.len() > 5, "{name}");
        tensors.extend(layer);
        let shapes = [vec![64, 128], vec![64], vec![64]];
        tensors.extend(
            parts
                .iter()
                .zip(shapes)
                .map(|(part, shape)| (format!("{around}{part}.weight"), shape)),
        );
        let (words, left_out) = convert(&tensors);
        assert!(
            words.contains("blocks for multi-token prediction"),
            "{name}: {words}"
        );
        assert!(left_out == plain, "{name}");

        // As llama.cpp's converter writes the block: the last layer once more, and how its input is
        // made.
        let gguf = Gguf::from_bytes(plain).unwrap();
        let (mut writer, mut n_of_block) = (Writer::new(), 3);
        let Some(Value::String(arch)) = gguf.metadata().get("general.architecture").cloned() else {
            panic!("{name}")
        };
        for (key, value) in gguf.metadata().iter() {
            let value = match (value, key.strip_prefix(&format!("{arch}."))) {
                (_, Some("block_count")) => Value::U32(n_layer + 1),
                (Value::Array(Array::I32(values)), Some(_)) => Value::Array(Array::I32(
                    [&values[..], &values[values.len() - 1..]].concat(),
                )),
                _ => value.clone(),
            };
            writer.metadata(key, value);
        }
        writer.metadata(format!("{arch}.nextn_predict_layers"), 1u32);
        for tensor in gguf.tensors() {
            let mut put = |name: &str| {
                writer.tensor(name, &tensor.dims, tensor.dtype, gguf.data(tensor).to_vec());
            };
            put(&tensor.name);
            if let Some(part) = tensor.name.strip_prefix(&format!("blk.{}.", n_layer - 1)) {
                put(&format!("blk.{n_layer}.{part}"));
                n_of_block += 1;
            }
        }
        for (part, dims) in [
            ("eh_proj", &[128, 64][..]),
            ("enorm", &[64]),
            ("hnorm", &[64]),
        ] {
            let n: u64 = dims.iter().product();
            let name = format!("blk.{n_layer}.nextn.{part}.weight");
            writer.tensor(name, dims, DType::F32, vec![0; 4 * n as usize]);
        }
        let path = folder.0.join("block.gguf");
        writer.write(&path).unwrap();
        let with = Model::open(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        let error = with.has_mtp().unwrap_err().to_string();
        assert!(error.contains("not known here"), "{name}: {error}");
        assert_eq!(with.unknown().len(), n_of_block, "{name}");
        let logits = |model: &Model| {
            let mut session = model.session().unwrap();
            session.prefill(&[1, 2, 3, 4]).unwrap();
            session.logits().to_vec()
        };
        assert_eq!(
            logits(&with),
            logits(&Model::from_gguf(gguf).unwrap()),
            "{name}"
        );
    }
}
