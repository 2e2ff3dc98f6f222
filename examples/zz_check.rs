// usage: zz_check DIR... : compares model-f16.gguf against goldens.
use ruvllm::exec::{KvType, SessionOptions};
use ruvllm::model::OpenOptions;
use serde_json::Value;
fn f32s(p: &std::path::Path) -> Vec<f32> {
    std::fs::read(p).unwrap().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}
fn main() {
    for dir in std::env::args().skip(1) {
        let dir = std::path::PathBuf::from(dir);
        let m: Value = serde_json::from_slice(&std::fs::read(dir.join("manifest.json")).unwrap()).unwrap();
        let model = match OpenOptions::new().open(dir.join("model-f16.gguf")) {
            Ok(m) => m,
            Err(e) => {
                println!("{}: {e}", dir.display());
                continue;
            }
        };
        let n_vocab = model.hparams().n_vocab;
        for test in m["tests"].as_array().unwrap() {
            let tokens: Vec<u32> =
                test["tokens"].as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect();
            let pos: Vec<usize> =
                test["positions"].as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as usize).collect();
            let want = f32s(&dir.join(test["logits_file"].as_str().unwrap()));
            for n_batch in [512, 7, 1] {
                let mut s = model
                    .session_with(&SessionOptions {
                        n_ctx: Some(256),
                        n_batch,
                        kv_type: KvType::F32,
                        ..Default::default()
                    })
                    .unwrap();
                let mut all = Vec::new();
                s.prefill_each(&tokens, 0, |_, l| all.extend_from_slice(l)).unwrap();
                let mut max = 0f32;
                for (i, &p) in pos.iter().enumerate() {
                    for v in 0..n_vocab {
                        let d = (all[p * n_vocab + v] - want[i * n_vocab + v]).abs();
                        if d.is_nan() {
                            max = f32::NAN
                        } else if d > max {
                            max = d
                        }
                    }
                }
                println!("{} {} batch {n_batch}: {max:.2e}", dir.file_name().unwrap().to_string_lossy(), test["id"]);
            }
        }
    }
}
