//! What `ruvllm-benches` measures with: its package has no tests, which would build criterion.

use crate::run::engine;
use crate::tiny::Tiny;
use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::quant::{DType, FileType};
use ruvllm_benches::{Load, Shape, Test, run, synthetic};

/// What nobody could mean is refused.
#[test]
fn absurd_sizes_of_measurements_are_refused() {
    let model = Tiny::Llama.model(DType::F32);
    let options = SessionOptions::default();
    let test = Test {
        n_prompt: usize::MAX,
        n_gen: 2,
        depth: 0,
        rows: 0,
    };
    assert!(run(&engine(&model, 1), &[], test, &options, 1).is_err());
    let test = Test {
        n_prompt: 2,
        n_gen: 0,
        depth: 0,
        rows: 0,
    };
    let mut outcome = run(&engine(&model, 1), &[], test, &options, 1).unwrap();
    outcome.rates.clear();
    assert!(outcome.median().is_nan());
}

/// Some layers of every made-up shape: all can be opened, and every tensor is read; but encoders of
/// images and drafters are no models.
#[test]
fn synthetic_shapes_are_models() {
    const PARTS: [&str; 5] = [
        "siglip-400m",
        "qwen3-vl-vision",
        "llama-1b-eagle3",
        "llama-1b-dflash",
        "gemma4-e4b-assistant",
    ];
    for shape in Shape::all() {
        let file = synthetic(&shape.clone().reduced(), FileType::Q4_K_M).unwrap();
        let model = Model::from_gguf(file);
        if PARTS.contains(&&*shape.name) {
            assert!(model.is_err(), "{}", shape.name);
            continue;
        }
        let model = model.unwrap_or_else(|e| panic!("{}: {e}", shape.name));
        assert!(
            model.unknown().is_empty(),
            "{}: {:?}",
            shape.name,
            model.unknown()
        );
        let mut session = model.session().unwrap();
        session.prefill(&[1, 2, 3]).unwrap();
        session.decode(4).unwrap();
        assert!(
            session.logits().iter().all(|x| x.is_finite()),
            "{}",
            shape.name
        );
    }
}

#[test]
fn noise_is_a_share() {
    let then = Load::now();
    if cfg!(target_os = "linux") {
        assert!(then.is_some());
        while Load::since(then).is_none() {
            std::hint::spin_loop();
        }
        assert!((0.0..=1.0).contains(&Load::since(then).unwrap()));
    }
}
