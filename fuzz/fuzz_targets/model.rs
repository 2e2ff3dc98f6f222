//! A tiny model of any architecture with changed metadata, tensors and bytes: it is refused, or
//! computes a prompt and tokens.

#![no_main]

#[path = "../../tests/it/mutants/mod.rs"]
mod mutants;
#[path = "../../tests/it/run/mod.rs"]
mod run;
#[path = "../../tests/it/tiny/mod.rs"]
mod tiny;

use libfuzzer_sys::fuzz_target;

// The first byte chooses the model; every change takes six.
fuzz_target!(|bytes: &[u8]| {
    let [model, changes @ ..] = bytes else { return };
    let models = mutants::models();
    let (changes, _) = changes.as_chunks();
    let changes = &changes[..changes.len().min(8)];
    let _ = mutants::compute(mutants::mutant(
        &models[usize::from(*model) % models.len()],
        changes,
    ));
});
