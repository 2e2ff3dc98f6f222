//! Digests of results and files, compared with those in `tests/data/digests`: a change of structure
//! may not change a bit.
//!
//! A line of a table is a model, an instruction-set level and chunks (prompt tokens per pass), with
//! a digest per result: the first 16 hexadecimal digits of its SHA-256, as all 64 would make the
//! tables three times as large. `-` stands for a result that the model does not have, or refuses.
//! By default all models run on all levels of the CPU in chunks of 7, and a sample of the rest;
//! with `RUVLLM_LONG` everything does, with one thread and with two. `RUVLLM_WRITE_DIGESTS=1`
//! computes everything and adds what is missing; a digest that differs is an error even then, so
//! whoever changes arithmetic on purpose deletes it first.
//!
//! No kernel uses an instruction whose result the vendors of CPUs may choose (approximate
//! reciprocals and roots). `exp`, `ln` and their like come from the system's C library, so each
//! table names the digest of their values; where these are others, nothing is compared. What
//! contains times is left out: the files of a folder of requests (what it has learnt is compared).
//! Levels that the CPU lacks, or that a table lacks, are skipped aloud; the tables' `amx`, if they
//! have it, was made with the emulated tiles of `--cfg ruvllm_emulate_amx`, and `avx512_bf16`,
//! which is chosen on AMD's CPUs alone, is to be made there.

mod compare;
mod files;
mod learning;
mod passes;
mod sha256;

use crate::common::{conformance, emulated, subdirectories};
use crate::conformance_logits::open_reference;
use crate::invariance::Shape;
use crate::tiny::{Parts, Tiny};
use compare::{Job, check};
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::gguf::Gguf;
use ruvllm::kv::KvTiers;
use ruvllm::model::supported_architectures;
use ruvllm::quant::{DType, FORMATS};
use std::path::Path;

/// Models that the repository makes in memory, and the one that it ships.
fn own_models() -> Vec<Job> {
    let plain = SessionOptions::default();
    let mut jobs = Vec::new();
    let mut add = |name: String, options: &SessionOptions, open: Box<dyn Fn() -> Model + Sync>| {
        jobs.push(Job {
            name,
            options: options.clone(),
            open,
        });
    };
    let parts = |parts: fn() -> Parts| Box::new(move || crate::run::open(parts().gguf()).unwrap());
    add("tiny/granite-swa".into(), &plain, parts(Tiny::granite_swa));
    add(
        "tiny/gpt-oss".into(),
        &plain,
        parts(|| Tiny::gpt_oss(DType::MXFP4)),
    );
    add("tiny/gpt2".into(), &plain, parts(Tiny::gpt2));
    for tiny in Tiny::SHAPES {
        for dtype in [DType::F32, DType::Q8_0] {
            add(
                format!("tiny/{}-{dtype}", tiny.name()),
                &plain,
                Box::new(move || tiny.model(dtype)),
            );
        }
    }
    let tiers = KvTiers {
        recent: 64,
        middle: 64,
    };
    let precisions = [
        (
            "f32",
            SessionOptions {
                kv_type: KvType::F32,
                ..plain.clone()
            },
        ),
        (
            "q8-q4",
            SessionOptions {
                kv_type: KvType::Q8,
                kv_type_v: Some(KvType::Q4),
                ..plain.clone()
            },
        ),
        (
            "tiers",
            SessionOptions {
                kv_tiers: Some(tiers),
                ..plain.clone()
            },
        ),
        (
            "exact",
            SessionOptions {
                exact: true,
                ..plain.clone()
            },
        ),
    ];
    for tiny in [Tiny::Llama, Tiny::Gemma2] {
        for (what, options) in &precisions {
            let name = format!("tiny/{}-Q8_0+{what}", tiny.name());
            add(name, options, Box::new(move || tiny.model(DType::Q8_0)));
        }
    }
    for (i, shapes) in crate::mutants::models().iter().enumerate() {
        let open = || {
            let mut parts = shapes.parts();
            let n_vocab = crate::run::open(shapes.parts().gguf())
                .unwrap()
                .hparams()
                .n_vocab;
            crate::mtp::set_vocabulary(&mut parts, n_vocab);
            crate::run::open(parts.gguf()).unwrap()
        };
        // Two files have a model of this name.
        let is_second = crate::mutants::models()[..i]
            .iter()
            .any(|other| other.name == shapes.name);
        add(
            format!(
                "family/{}{}",
                shapes.name,
                if is_second { "-2" } else { "" }
            ),
            &plain,
            Box::new(open),
        );
    }
    let formats = FORMATS
        .iter()
        .filter(|f| f.quantize.is_some())
        .map(|f| (Shape::Dense, f.dtype));
    let others = Shape::ALL
        .into_iter()
        .filter(|&shape| shape != Shape::Dense)
        .map(|shape| (shape, DType::Q8_0));
    for (shape, dtype) in formats.chain(others) {
        let open = Box::new(move || crate::invariance::model(shape, dtype));
        add(format!("shape/{shape:?}-{dtype}"), &plain, open);
    }
    let shipped = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/models/ruvllm-rust-6m-q8_0.gguf"
    );
    add(
        "shipped".into(),
        &plain,
        Box::new(move || Model::open(shipped).unwrap()),
    );
    let mut names: Vec<_> = jobs.iter().map(|job| &job.name).collect();
    names.sort();
    assert!(
        names.windows(2).all(|two| two[0] != two[1]),
        "a name is there twice: {names:?}"
    );
    jobs.retain(|job| !emulated() || job.name.starts_with("tiny/"));
    jobs
}

/// The models of the reference data that this build runs.
fn reference_models(root: &Path) -> Vec<Job> {
    let sets = ["models", "models2", "models/quantised", "models2/quantised"];
    let mut folders: Vec<_> = sets
        .iter()
        .flat_map(|set| subdirectories(&root.join(set)))
        .collect();
    folders.push(root.join("stories"));
    let mut jobs = Vec::new();
    for folder in folders {
        let files = std::fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        for path in files.filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "gguf")
        }) {
            let gguf = Gguf::open(&path).unwrap();
            let architecture = gguf.metadata().str("general.architecture").unwrap();
            if supported_architectures().any(|supported| supported == architecture) {
                let name = path
                    .strip_prefix(root)
                    .unwrap()
                    .with_extension("")
                    .to_string_lossy()
                    .replace('\\', "/");
                let folder = folder.file_name().unwrap().to_string_lossy().into_owned();
                let open = Box::new(move || open_reference(&path, &folder));
                jobs.push(Job {
                    name,
                    options: SessionOptions::default(),
                    open,
                });
            }
        }
    }
    jobs
}

/// Whether what is missing is to be written.
fn writes() -> bool {
    std::env::var_os("RUVLLM_WRITE_DIGESTS").is_some()
}

/// Whether a model's digests are made or compared: all but where `RUVLLM_WRITE_DIGESTS` is a part of
/// names.
fn wants(name: &str) -> bool {
    match std::env::var("RUVLLM_WRITE_DIGESTS") {
        Ok(part) => part == "1" || name.contains(&part),
        Err(_) => true,
    }
}

#[test]
fn own_models_compute_the_same_bits() {
    check("own.txt", &passes::GROUPS, own_models());
}

#[test]
fn reference_models_compute_the_same_bits() {
    let Some(root) = conformance() else { return };
    if emulated() {
        return crate::common::skipped(
            "on an emulated CPU only the repository's own models are compared",
        );
    }
    check("reference.txt", &passes::GROUPS, reference_models(&root));
}

#[test]
fn learners_have_the_same_states() {
    check("learning.txt", &learning::GROUPS, own_models());
}

#[test]
fn learners_of_reference_models_have_the_same_states() {
    let Some(root) = conformance() else { return };
    if emulated() {
        return crate::common::skipped(
            "on an emulated CPU only the repository's own models are compared",
        );
    }
    check(
        "reference-learning.txt",
        &learning::GROUPS,
        reference_models(&root),
    );
}
