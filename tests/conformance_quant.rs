//! Formats against blocks and values made by ggml (`RUVLLM_CONFORMANCE` names the folder).

use ruvllm::quant::{FORMATS, Format};
use std::path::PathBuf;

/// The reference data, or `None`, said loudly, where there is none.
fn conformance(what: &str) -> Option<PathBuf> {
    let dir = std::env::var_os("RUVLLM_CONFORMANCE").map(PathBuf::from);
    if dir.is_none() {
        eprintln!("SKIPPED {what}: RUVLLM_CONFORMANCE is not set");
    }
    dir
}

fn floats(path: &std::path::Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

fn dequantize(format: &Format, blocks: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; blocks.len() / format.block_bytes * format.block_elems];
    (format.dequantize)(blocks, &mut out);
    out
}

#[test]
fn dequantizes_bit_for_bit() {
    let Some(dir) = conformance("dequantizes_bit_for_bit") else { return };
    for format in FORMATS.iter().filter(|f| f.name != "F32") {
        let blocks = std::fs::read(dir.join(format!("quant_blocks/{}.bin", format.name))).unwrap();
        let expected = floats(&dir.join(format!("quant_blocks/{}.f32", format.name)));
        let values = dequantize(format, &blocks);
        assert_eq!(values.len(), expected.len(), "{}", format.name);
        for (i, (v, e)) in values.iter().zip(&expected).enumerate() {
            let same = v.to_bits() == e.to_bits() || v.is_nan() && e.is_nan();
            assert!(same, "{}: value {i}: {v:e} instead of {e:e}", format.name);
        }
    }
}
