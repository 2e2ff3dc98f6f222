//! Learning judged by behaviour, from outside.

use ruvllm::Model;
use ruvllm_learn::bench::behaviour::{
    BehaviourArm, BehaviourError, BehaviourOptions, BehaviourReport, behaviour,
};

fn model() -> Model {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/ruvllm-rust-6m-q8_0.gguf"
    );
    Model::open(path).unwrap()
}

const CONTROL: &str = include_str!("../../../models/demo-heldout.txt");

fn measured(model: &Model, arms: Vec<BehaviourArm>) -> (BehaviourReport, usize) {
    let options = BehaviourOptions {
        n_facts: 16,
        arms,
        ..Default::default()
    };
    let mut asked = 0;
    let report = behaviour(model, CONTROL, &options, &mut |_, n| asked = n).unwrap();
    assert_eq!(asked + 1, options.n_questions());
    (report, asked)
}

#[test]
fn nothing_is_known_before_and_notes_are_read() {
    let model = model();
    let arms = vec![BehaviourArm::Nothing, BehaviourArm::Retrieval];
    let (report, _) = measured(&model, arms);
    let [nothing, retrieval] = &report.arms[..] else {
        panic!("{report:?}");
    };
    for score in &nothing.scores {
        assert_eq!(score.said.right, 0, "{score:?}");
    }
    assert_eq!(
        (nothing.locality.value(), nothing.control_percent),
        (1.0, 0.0)
    );
    assert_eq!((nothing.bytes, nothing.found), (0, None));
    let kinds: Vec<&str> = nothing.scores.iter().map(|score| score.kind).collect();
    assert_eq!(
        kinds,
        [
            "recall",
            "paraphrase",
            "reverse",
            "task",
            "conflict",
            "retention"
        ]
    );
    assert_eq!(nothing.score("conflict").unwrap().chosen.n, 4);

    // Even this model copies what stands before the question.
    let found = retrieval.found.unwrap();
    assert!(found.n == 64 && found.value() > 0.9, "{found:?}");
    let gain = |kind: &str| {
        let chosen = |arm: &ruvllm_learn::bench::behaviour::ArmReport| {
            arm.score(kind).map_or(0.0, |score| score.chosen.value())
        };
        chosen(retrieval) - chosen(nothing)
    };
    assert!(gain("recall") > 0.3, "{report:?}");
    assert!(retrieval.note_tokens > 0.0 && retrieval.note_tokens <= 96.0);
    assert!(retrieval.bytes > 0);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let model = model();
    let options = |n_facts, n_ctx| BehaviourOptions {
        n_facts,
        n_ctx,
        ..Default::default()
    };
    for (n_facts, n_ctx, name) in [(15, 0, "n_facts"), (1001, 0, "n_facts"), (16, 100, "n_ctx")] {
        let error =
            behaviour(&model, CONTROL, &options(n_facts, n_ctx), &mut |_, _| ()).unwrap_err();
        assert!(error.to_string().starts_with(name), "{error}");
    }
    let error = behaviour(&model, "short", &options(16, 0), &mut |_, _| ()).unwrap_err();
    assert!(matches!(error, BehaviourError::Learn(_)), "{error}");
}
