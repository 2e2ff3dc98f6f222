//! Formats against blocks and values made by ggml (`RUVLLM_CONFORMANCE` names the folder).

use crate::common::conformance;
use ruvllm::gguf::Header;
use ruvllm::quant::{DType, FORMATS, FileType, Format, ModelShape};

fn floats(path: &std::path::Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|&b| f32::from_le_bytes(b))
        .collect()
}

fn dequantize(format: &Format, blocks: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; blocks.len() / format.block_bytes * format.block_elems];
    (format.dequantize)(blocks, &mut out);
    out
}

#[test]
fn dequantizes_bit_for_bit() {
    let Some(dir) = conformance() else { return };
    for format in FORMATS.iter().filter(|f| f.name != "F32") {
        let set = match format.name {
            "Q1_0" | "Q2_0" => dir.join("models3/quant_blocks"),
            _ => dir.join("quant_blocks"),
        };
        let blocks = std::fs::read(set.join(format!("{}.bin", format.name))).unwrap();
        let expected = floats(&set.join(format!("{}.f32", format.name)));
        let values = dequantize(format, &blocks);
        assert_eq!(values.len(), expected.len(), "{}", format.name);
        for (i, (v, e)) in values.iter().zip(&expected).enumerate() {
            let same = v.to_bits() == e.to_bits() || v.is_nan() && e.is_nan();
            assert!(same, "{}: value {i}: {v:e} instead of {e:e}", format.name);
        }
    }
}

fn rms(x: &[f32], y: &[f32]) -> f64 {
    let sum: f64 = x
        .iter()
        .zip(y)
        .map(|(x, y)| (*x as f64 - *y as f64).powi(2))
        .sum();
    (sum / x.len() as f64).sqrt()
}

#[test]
fn quantizes_no_worse_than_ggml() {
    let Some(dir) = conformance() else { return };
    let mut compared = 0;
    for format in FORMATS {
        let source = dir.join(format!("quant_blocks/{}.src.f32", format.name));
        let Some(quantize) = format.quantize.filter(|_| source.exists()) else {
            continue;
        };
        let x = floats(&source);
        let mut blocks = vec![0; x.len() / format.block_elems * format.block_bytes];
        quantize(&x, None, &mut blocks);
        let theirs = std::fs::read(dir.join(format!("quant_blocks/{}.bin", format.name))).unwrap();
        let theirs = &theirs[..blocks.len()];
        if matches!(format.dtype, DType::F16 | DType::BF16) {
            assert_eq!(blocks, theirs, "{}", format.name);
        }
        let ours = rms(&x, &dequantize(format, &blocks));
        let theirs = rms(&x, &dequantize(format, theirs));
        println!(
            "{}: {ours} against {theirs}, {:.4}",
            format.name,
            ours / theirs
        );
        assert!(ours <= theirs, "{}: {ours} against {theirs}", format.name);
        compared += 1;
    }
    assert_eq!(compared, 7);
}

#[test]
fn mixes_are_those_of_llama_quantize() {
    let Some(dir) = conformance() else { return };
    let mut compared = 0;
    for model in [
        "models/quantised/q-llama",
        "models/quantised/q-qwen2",
        "models3/quantised/q-qwen3",
    ] {
        for entry in std::fs::read_dir(dir.join(model)).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            let Some(file_type) = name
                .strip_suffix(".gguf")
                .and_then(|name| FileType::from_name(name.rsplit('.').next()?))
            else {
                continue;
            };
            let header = Header::read(&path).unwrap();
            let arch = header
                .metadata
                .str("general.architecture")
                .unwrap()
                .to_owned();
            let number = |key: &str| header.metadata.u32(&format!("{arch}.{key}"));
            let shape = ModelShape {
                n_layer: number("block_count").unwrap() as usize,
                n_head: number("attention.head_count").unwrap() as usize,
                n_head_kv: number("attention.head_count_kv").unwrap() as usize,
                n_expert: number("expert_count").unwrap_or(0) as usize,
                tied_embeddings: header.tensor("output.weight").is_none(),
                importance: false,
            };
            assert_eq!(
                header.metadata.u32("general.file_type").unwrap(),
                file_type as u32,
                "{name}"
            );
            for t in &header.tensors {
                let dtype = file_type
                    .tensor_type(&t.name, &t.dims, &shape)
                    .unwrap_or(DType::F32);
                assert_eq!(dtype, t.dtype, "{name}: {}", t.name);
            }
            compared += 1;
        }
    }
    assert!(compared >= 17, "only {compared} files");
}
