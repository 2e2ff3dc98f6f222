//! The model that ships writes the same text on every level; `data/greedy.txt` holds the prompt and
//! what follows. `tests/wasm.sh`, `tests/old_cpus.sh` and `tests/arm.sh` compare other builds with
//! it.

use crate::run::{OnLevel, Pass};
use ruvllm::Model;
use ruvllm::arch::Arch;

const N_TOKENS: usize = 32;

/// The least by which scalar prefers a token to the next likely one: levels differ by less.
const MARGIN: f32 = 0.05;

/// The likeliest token, and by how much its logit is above the second's.
fn likeliest(logits: &[f32]) -> (u32, f32) {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    (
        order[0],
        logits[order[0] as usize] - logits[order[1] as usize],
    )
}

#[test]
fn every_level_writes_the_same_text() {
    let (prompt, expected) = include_str!("../data/greedy.txt").split_once('\n').unwrap();
    for arch in Arch::available() {
        let model = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/models/ruvllm-rust-6m-q8_0.gguf"
        );
        let model = Model::open(model).unwrap().on(arch);
        let tokenizer = model.tokenizer().unwrap();
        let mut session = model.session().unwrap();
        let mut logits = session.prefilled(&tokenizer.encode(prompt, true, true));
        let (mut tokens, mut least) = (Vec::new(), f32::INFINITY);
        while tokens.len() < N_TOKENS {
            let (token, margin) = likeliest(&logits);
            tokens.push(token);
            least = least.min(margin);
            logits = session.decoded(token);
        }
        assert_eq!(
            tokenizer.decode_lossy(&tokens, false).unwrap(),
            expected.trim_end(),
            "{}",
            arch.name()
        );
        eprintln!("{}: least margin {least}", arch.name());
        assert!(
            least >= MARGIN || arch.name() != "scalar",
            "the text hangs on {least}: choose another prompt"
        );
    }
}
