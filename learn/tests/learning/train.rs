//! Training adapters: what is learnt, interruptions, refusals.

use crate::tiny::Tiny;
use ruvllm::Model;
use ruvllm::gguf::Gguf;
use ruvllm::lora::Adapter;
use ruvllm::quant::DType;
use ruvllm_learn::LearnError;
use ruvllm_learn::train::{Example, Loss, Schedule, TargetSet, TrainOptions, Trainer};
use std::path::PathBuf;

/// Sentences with a rule: after `7 x` comes `x + 1`, for 12 values of `x`.
fn examples() -> Vec<Example> {
    (0..24)
        .map(|i| Example::completion(&[1, 7, 10 + i % 12], &[11 + i % 12, 2]))
        .collect()
}

/// A text that has nothing to do with them.
fn control() -> Vec<u32> {
    (0..200).map(|i| (i * i + 3 * i) % 40).collect()
}

fn options() -> TrainOptions {
    TrainOptions {
        rank: 4,
        rate: 0.02,
        epochs: 6.0,
        batch: 4,
        n_ctx: 64,
        eval_every: 4,
        ..Default::default()
    }
}

fn model() -> Model {
    Tiny::SHAPES[0].model(DType::Q8_0)
}

fn trainer(model: &Model, control: &[u32], options: &TrainOptions) -> Trainer {
    Trainer::new(&model.engine().unwrap(), &examples(), control, options).unwrap()
}

fn run(trainer: &mut Trainer) {
    while trainer.step().unwrap().is_some() {}
}

fn refused(examples: &[Example], control: &[u32], options: &TrainOptions) -> String {
    Trainer::new(&model().engine().unwrap(), examples, control, options)
        .err()
        .unwrap()
        .to_string()
}

fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("ruvllm-train-{name}-{}", std::process::id()))
}

#[test]
fn it_learns_the_task_and_the_adapter_is_a_file_like_others() {
    let model = model();
    let mut trainer = trainer(&model, &[], &options());
    run(&mut trainer);
    let report = trainer.report();
    assert_eq!(report.evaluations[0].step, 0);
    assert_eq!(report.steps.len(), report.n_steps);
    assert!(
        report.best().held_out < 0.7 * report.evaluations[0].held_out,
        "{report:?}"
    );
    // Early steps are worse than late ones, and what was measured is what the saved adapter does.
    assert!(report.steps[report.n_steps - 1].loss < report.steps[0].loss);
    let saved = Adapter::from_bytes(trainer.adapter().to_bytes().unwrap(), &model).unwrap();
    assert_eq!(saved, *trainer.adapter());
}

/// With a bound, control text keeps its predictions, where they change without one.
#[test]
fn control_text_is_kept_within_the_bound() {
    let model = model();
    let bound = TrainOptions {
        max_divergence: 0.002,
        ..options()
    };
    let mut kept = trainer(&model, &control(), &bound);
    run(&mut kept);
    let mut free = trainer(
        &model,
        &control(),
        &TrainOptions {
            max_divergence: 10.0,
            ..options()
        },
    );
    run(&mut free);
    assert!(
        kept.report()
            .evaluations
            .iter()
            .all(|e| e.divergence <= 0.002),
        "{:?}",
        kept.report()
    );
    assert!(
        free.report().best().divergence > 0.01,
        "{:?}",
        free.report()
    );
    assert!(kept.report().best().held_out < kept.report().evaluations[0].held_out);
}

/// Not only evaluations keep the bound: steps are held back as well, so that evaluations find an
/// adapter that is nearly within it, however long the steps were to be. The first steps tell how
/// long they can be.
#[test]
fn steps_keep_the_bound_on_control_text() {
    let model = model();
    for rate in [0.02, 0.2] {
        let options = TrainOptions {
            max_divergence: 0.002,
            eval_every: 1,
            patience: 0,
            rate,
            ..options()
        };
        let mut trainer = trainer(&model, &control(), &options);
        run(&mut trainer);
        let evaluations = &trainer.report().evaluations;
        let over = evaluations.iter().skip(5).map(|e| 1.0 / e.scale.powi(2));
        let most = over.fold(0.0, f32::max);
        assert!(most < 10.0, "rate {rate}: {most} times the bound");
        let steps = &trainer.report().steps;
        assert!(steps[10].rate < 0.9 * f64::from(rate), "{:?}", steps[10]);
    }
}

/// Evaluations read a part of a long control text, and say so before they begin.
#[test]
fn long_control_text_is_read_at_equal_distances() {
    let model = model();
    let long: Vec<u32> = (0..20_000).map(|i| (i * i + 3 * i) % 40).collect();
    let mut trainer = trainer(&model, &long, &options());
    let read = trainer.report().control_tokens.iter().sum::<usize>();
    let left_out = trainer.report().n_control_left_out;
    assert!(read <= 16 * 64 && left_out >= 20_000 - (64 + 16) * 64);
    let plan = trainer.plan();
    assert_eq!(plan.n_steps, trainer.report().n_steps);
    assert!(
        plan.evaluation_tokens < 3_000 && plan.step_tokens > 0,
        "{plan:?}"
    );
    trainer.begin().unwrap();
    let first = &trainer.report().evaluations[0];
    assert_eq!((first.divergence, first.scale), (0.0, 1.0));
    assert!(first.rises.iter().all(|&rise| rise == 0.0));
    while trainer.step().unwrap().is_some() {}
    assert_eq!(trainer.plan().n_tokens(), 0);
}

/// An interruption anywhere changes no bit of what follows, nor does the number of threads.
#[test]
fn an_interrupted_training_ends_as_one_that_was_not() {
    let model = model();
    let path = file("resume");
    let options = TrainOptions {
        epochs: 2.0,
        schedule: Schedule::OneCycle,
        ..options()
    };
    let mut whole = trainer(&model, &control(), &options);
    run(&mut whole);
    for stop in [0, 1, 4, 7] {
        let mut first = trainer(&model, &control(), &options);
        (0..stop).for_each(|_| assert!(first.step().unwrap().is_some()));
        first.save(&path).unwrap();
        drop(first);
        let mut second = trainer(&model, &control(), &options);
        second.resume(&path).unwrap();
        run(&mut second);
        assert_eq!(second.adapter(), whole.adapter(), "after {stop}");
        assert_eq!(
            format!("{:?}", second.report()),
            format!("{:?}", whole.report())
        );
    }
    // One that has ended stays ended.
    whole.save(&path).unwrap();
    let mut ended = trainer(&model, &control(), &options);
    ended.resume(&path).unwrap();
    assert!(ended.step().unwrap().is_none());
    assert_eq!(ended.adapter(), whole.adapter());

    // Other options, other examples, other control text, damage.
    let mut other = trainer(
        &model,
        &control(),
        &TrainOptions {
            rate: 0.01,
            ..options.clone()
        },
    );
    assert!(matches!(
        other.resume(&path),
        Err(LearnError::OtherTraining)
    ));
    let mut other = trainer(&model, &control()[1..], &options);
    assert!(matches!(
        other.resume(&path),
        Err(LearnError::OtherTraining)
    ));
    let bytes = std::fs::read(&path).unwrap();
    for n in (0..bytes.len()).step_by(bytes.len() / 23) {
        std::fs::write(&path, &bytes[..n]).unwrap();
        assert!(
            trainer(&model, &control(), &options).resume(&path).is_err(),
            "{n} bytes"
        );
    }
    std::fs::write(
        &path,
        trainer(&model, &[], &options).adapter().to_bytes().unwrap(),
    )
    .unwrap();
    let error = trainer(&model, &control(), &options)
        .resume(&path)
        .unwrap_err();
    assert!(matches!(error, LearnError::NotTraining { .. }), "{error}");
    std::fs::remove_file(&path).unwrap();
}

/// A checkpoint whose table of losses has a single column.
#[test]
fn a_training_with_one_held_out_example_can_be_resumed() {
    let (model, path) = (model(), file("one"));
    let options = TrainOptions {
        held_out: 0.04,
        ..options()
    };
    let mut whole = trainer(&model, &[], &options);
    assert_eq!(whole.report().held_out_tokens.len(), 1);
    for _ in 0..5 {
        whole.step().unwrap();
    }
    whole.save(&path).unwrap();
    let mut resumed = trainer(&model, &[], &options);
    resumed.resume(&path).unwrap();
    run(&mut whole);
    run(&mut resumed);
    assert_eq!(resumed.adapter(), whole.adapter());
    let told = |trainer: &Trainer| format!("{:?}", trainer.report());
    assert_eq!(told(&resumed), told(&whole));
    std::fs::remove_file(&path).unwrap();
}

/// Only the tokens to be learnt count: the loss of a prompt that cannot be predicted is not in it.
#[test]
fn loss_is_the_mean_over_the_tokens_to_be_learnt() {
    // Products of block formats would round the last layer's activations otherwise than for logits.
    let model = Tiny::SHAPES[0].model(DType::F32);
    let options = TrainOptions {
        held_out: 0.0,
        batch: 24,
        epochs: 1.0,
        ..options()
    };
    let mut trainer = Trainer::new(&model.engine().unwrap(), &examples(), &[], &options).unwrap();
    let step = trainer.step().unwrap().unwrap();
    let mut session = model.session().unwrap();
    let (mut sum, mut n) = (0.0, 0);
    for example in examples() {
        session.clear();
        let tokens = example.tokens();
        session
            .hooks()
            .prefill_each(&tokens[..tokens.len() - 1], 2, |i, logits| {
                let logits: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
                let lse = logits.iter().map(|x| x.exp()).sum::<f64>().ln();
                sum += lse - logits[tokens[i + 1] as usize];
                n += 1;
            })
            .unwrap();
    }
    assert_eq!(n, 48);
    // Sums of some dozens of f32 exponentials.
    assert!(
        (step.loss - sum / f64::from(n)).abs() < 1e-5,
        "{} {}",
        step.loss,
        sum / f64::from(n)
    );
}

#[test]
fn schedules() {
    let factors = |schedule: Schedule, n, warmup| -> Vec<f64> {
        (0..n).map(|i| schedule.factor(i, n, warmup)).collect()
    };
    let close = |x: &[f64], y: &[f64]| {
        x.iter().zip(y).all(|(x, y)| (x - y).abs() < 1e-6) && x.len() == y.len()
    };
    assert!(close(
        &factors(Schedule::Constant, 4, 2),
        &[0.5, 1.0, 1.0, 1.0]
    ));
    let cosine = [
        0.5,
        1.0,
        1.0,
        0.5 + 0.5f64.sqrt() / 2.0,
        0.5,
        0.5 - 0.5f64.sqrt() / 2.0,
    ];
    assert!(close(&factors(Schedule::Cosine, 6, 2), &cosine));
    // torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1, total_steps=10), torch 2.
    let one_cycle = [
        0.04,
        0.52,
        1.0,
        0.950_484_6,
        0.811_745_7,
        0.611_262,
        0.388_742,
        0.188_258_3,
        0.049_519_4,
        0.000_004,
    ];
    assert!(
        close(&factors(Schedule::OneCycle, 10, 0), &one_cycle),
        "{:?}",
        factors(Schedule::OneCycle, 10, 0)
    );
}

#[test]
fn sets_of_matrices() {
    let model = model();
    let parts = |set: TargetSet| -> Vec<String> {
        let sites = model
            .sites()
            .iter()
            .filter(|site| set.contains(site) && site.layer() == Some(0));
        sites.map(|site| site.part().to_owned()).collect()
    };
    assert_eq!(parts(TargetSet::Qv), ["attn_q", "attn_v"]);
    assert_eq!(
        parts(TargetSet::Qkvo),
        ["attn_q", "attn_k", "attn_v", "attn_output"]
    );
    assert_eq!(parts(TargetSet::All).len(), 7);
    assert_eq!(parts(TargetSet::Parts(vec!["ffn_up".into()])), ["ffn_up"]);
    assert!(
        model
            .sites()
            .iter()
            .all(|site| site.layer().is_some() || !TargetSet::All.contains(site))
    );
}

/// Preferences and consolidation, too, go on with the same bits, and depend on what is said of the
/// examples.
#[test]
fn an_interrupted_training_on_preferences_ends_as_one_that_was_not() {
    let model = model();
    let path = file("preferences");
    let pair = |i: u32, swapped: bool| {
        let [x, y] =
            [11 + i % 12, 25].map(|next| Example::completion(&[1, 7, 10 + i % 12], &[next, 2]));
        if swapped {
            Example::preference(y, x)
        } else {
            Example::preference(x, y)
        }
    };
    let label = |i: u32| {
        let next = if i.is_multiple_of(2) { 11 + i % 12 } else { 25 };
        Example::labelled(
            Example::completion(&[1, 7, 10 + i % 12], &[next, 2]),
            i.is_multiple_of(2),
        )
    };
    let options = TrainOptions {
        epochs: 2.0,
        ewc_lambda: 0.5,
        beta: 0.5,
        ..options()
    };
    for (loss, examples) in [
        (Loss::Dpo, (0..24).map(|i| pair(i, false)).collect()),
        (Loss::Kto, (0..24).map(label).collect::<Vec<_>>()),
    ] {
        let options = TrainOptions {
            loss,
            ..options.clone()
        };
        let new = |examples: &[Example]| {
            Trainer::new(&model.engine().unwrap(), examples, &control(), &options).unwrap()
        };
        let mut whole = new(&examples);
        run(&mut whole);
        let evaluations = &whole.report().evaluations;
        let start = if loss == Loss::Dpo {
            std::f64::consts::LN_2
        } else {
            0.5
        };
        assert!(
            (evaluations[0].held_out - start).abs() < 1e-9,
            "nothing differs from the reference at first"
        );
        assert!(
            whole.report().best().held_out < 0.97 * start,
            "{:?}",
            whole.report()
        );
        for stop in [0, 1, 5] {
            let mut first = new(&examples);
            (0..stop).for_each(|_| assert!(first.step().unwrap().is_some()));
            first.save(&path).unwrap();
            let mut second = new(&examples);
            second.resume(&path).unwrap();
            run(&mut second);
            assert_eq!(second.adapter(), whole.adapter(), "{loss:?} after {stop}");
            assert_eq!(
                format!("{:?}", second.report()),
                format!("{:?}", whole.report())
            );
        }
        let mut other = examples.clone();
        other[5] = if loss == Loss::Dpo {
            pair(5, true)
        } else {
            Example::labelled(examples[5].clone(), true)
        };
        assert!(matches!(
            new(&other).resume(&path),
            Err(LearnError::OtherTraining)
        ));
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn what_cannot_be_trained_on_is_refused() {
    let good = examples();
    let with = |change: &dyn Fn(&mut TrainOptions)| {
        let mut options = options();
        change(&mut options);
        refused(&good, &[], &options)
    };
    assert!(with(&|o| o.rate = f32::NAN).contains("rate"));
    assert!(with(&|o| o.betas.1 = 1.0).contains("beta"));
    assert!(with(&|o| o.batch = 0).contains("batch"));
    assert!(with(&|o| o.held_out = 0.9).contains("held_out"));
    assert!(with(&|o| (o.schedule, o.warmup) = (Schedule::OneCycle, 3)).contains("warmup"));
    assert!(with(&|o| o.rank = 0).contains("rank"));
    assert!(with(&|o| o.targets = TargetSet::Parts(vec!["ffn_upp".into()])).contains("no matrix"));
    assert!(refused(&[], &[], &options()).contains("too few"));
    let mut bad = examples();
    let (one, other) = (
        || Example::completion(&[4], &[5]),
        |x| Example::completion(&[4], x),
    );
    bad[3] = Example::preference(one(), one());
    assert!(refused(&bad, &[], &options()).contains("example 3 is for the loss dpo, not sft"));
    let dpo = TrainOptions {
        loss: Loss::Dpo,
        ..options()
    };
    for (rejected, part) in [
        (&[1 << 20][..], "vocabulary"),
        (&[], "no token to learn"),
        (&[1; 65], "66 tokens"),
    ] {
        assert!(
            refused(&[Example::preference(one(), other(rejected))], &[], &dpo).contains(part),
            "{part}"
        );
    }
    let kto = TrainOptions {
        loss: Loss::Kto,
        ..options()
    };
    assert!(refused(&[Example::labelled(one(), true)], &[], &kto).contains("at least 2"));
    assert!(with(&|o| o.ewc_lambda = 1.0).contains("no control text"));
    assert!(with(&|o| o.beta = 0.0).contains("beta"));
    bad[3] = Example::text(&vec![1; 65]);
    assert!(refused(&bad, &[], &options()).contains("example 3 has 65 tokens"));
    bad[3] = Example::text(&[1, 1 << 20]);
    assert!(refused(&bad, &[], &options()).contains("vocabulary"));
    for empty in [
        Example::text(&[]),
        Example::text(&[4]),
        Example::completion(&[4, 5], &[]),
    ] {
        bad[3] = empty;
        assert!(refused(&bad, &[], &options()).contains("no token to learn"));
    }
    assert!(refused(&good, &[1, 2], &options()).contains("too short"));
    let mut wild = trainer(
        &model(),
        &[],
        &TrainOptions {
            rate: 10.0,
            clip: f32::MAX,
            epochs: 100.0,
            ..options()
        },
    );
    let error = std::iter::repeat_with(|| wild.step()).find_map(|step| match step {
        Err(error) => Some(error.to_string()),
        Ok(None) => Some("ended".into()),
        Ok(Some(_)) => None,
    });
    // It may survive, but then nothing worse than the model itself is kept.
    let error = error.unwrap();
    assert!(error == "ended" || error.contains("diverged"), "{error}");
    assert!(wild.report().best().held_out <= wild.report().evaluations[0].held_out);
}

/// A loss that is no number is never better than one that is: training ends with what is wrong, and
/// what was best stays.
#[test]
fn what_is_no_number_is_not_kept() {
    let mut n_diverged = 0;
    for (rate, weight_decay) in [(0.1, 0.01), (10.0, 0.01), (10.0, 100.0)] {
        let options = TrainOptions {
            rate,
            weight_decay,
            eval_every: 1,
            held_out: 0.25,
            patience: 0,
            clip: f32::MAX,
            ..options()
        };
        let mut trainer = trainer(&model(), &[], &options);
        let outcome = loop {
            match trainer.step() {
                Ok(Some(_)) => {}
                Ok(None) => break None,
                Err(error) => break Some(error),
            }
        };
        let is_diverged = matches!(outcome, Some(LearnError::Diverged { .. }));
        assert!(outcome.is_none() || is_diverged, "{rate}: {outcome:?}");
        n_diverged += usize::from(is_diverged);
        let report = trainer.report();
        let losses = report.evaluations.iter().map(|e| e.held_out);
        assert!(losses.clone().all(f64::is_finite), "{rate}: {report:?}");
        let least = losses.fold(f64::INFINITY, f64::min);
        assert_eq!(report.best().held_out, least, "{rate}");
    }
    assert!(n_diverged > 0);
}

#[test]
fn texts_are_cut_so_that_every_token_is_learnt_once() {
    let tokens: Vec<u32> = (0..50).collect();
    for n in [2, 7, 50, 80] {
        let pieces = Example::pieces(&tokens, None, n);
        let learnt = |example: &Example| example.tokens()[1..].to_vec();
        assert_eq!(
            pieces.iter().flat_map(learnt).collect::<Vec<_>>(),
            tokens[1..],
            "{n}"
        );
        assert!(
            pieces
                .iter()
                .all(|piece| piece.tokens().len() <= n && piece.n_learnt() > 0)
        );
    }
    assert!(Example::pieces(&[3], None, 4).is_empty());
}

/// A model that was trained on texts that begin with a token is bad at texts without it.
#[test]
fn every_piece_of_a_text_begins_as_texts_do() {
    let tokens: Vec<u32> = (0..50).collect();
    for n in [2, 7, 50, 80] {
        let pieces = Example::pieces(&tokens, Some(0), n);
        let learnt = |example: &Example| example.tokens()[1..].to_vec();
        assert_eq!(
            pieces.iter().flat_map(learnt).collect::<Vec<_>>(),
            tokens[1..],
            "{n}"
        );
        assert!(
            pieces
                .iter()
                .all(|piece| piece.tokens()[0] == 0 && piece.tokens().len() <= n)
        );
    }
    assert!(Example::pieces(&[0], Some(0), 4).is_empty());
    // A text without it is cut as before.
    let pieces = Example::pieces(&tokens, Some(9), 7);
    assert_eq!(pieces[1].tokens()[0], 6);
}

/// Losses of training the adapter of `tests/data/peft` on all `examples` in every step.
fn losses(examples: &[Example], control: &[u32], options: TrainOptions) -> Vec<f64> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/peft");
    let model = Model::open(format!("{folder}/llama.gguf")).unwrap();
    let adapter = Adapter::open(format!("{folder}/llama-adapter.gguf"), &model).unwrap();
    // All examples in every step, so that their order does not matter.
    let options = TrainOptions {
        rate: 0.01,
        weight_decay: 0.1,
        schedule: Schedule::Constant,
        batch: examples.len(),
        held_out: 0.0,
        n_ctx: 64,
        ..options
    };
    let mut trainer = Trainer::continuing(
        &model.engine().unwrap(),
        adapter,
        examples,
        control,
        &options,
    )
    .unwrap();
    run(&mut trainer);
    trainer
        .report()
        .steps
        .iter()
        .map(|step| step.loss)
        .collect()
}

fn reference(file: &str, name: &str) -> Vec<f32> {
    let path = format!(
        "{}/../tests/data/peft/{file}.gguf",
        env!("CARGO_MANIFEST_DIR")
    );
    let file = Gguf::open(path).unwrap();
    bytemuck::pod_collect_to_vec(file.data(file.tensor(name).unwrap()))
}

fn close(found: &[f64], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - f64::from(*expected)).abs() < 1e-3,
            "step {step}: {found} {expected}"
        );
    }
}

fn completions() -> [Example; 4] {
    [
        Example::completion(&[1, 17, 4], &[42, 9, 9]),
        Example::completion(&[1, 33, 0, 28], &[5]),
        Example::completion(&[1, 12, 7, 7], &[8, 30, 2]),
        Example::completion(&[1, 44], &[3, 6, 19, 21]),
    ]
}

/// `tests/reference_peft.py` makes the files.
#[test]
fn peft_has_the_same_losses() {
    let expected = reference("training", "losses");
    assert!(
        expected[0] > 3.0 && expected[99] < 0.05,
        "it learns: {expected:?}"
    );
    close(
        &losses(
            &completions(),
            &[],
            TrainOptions {
                epochs: 100.0,
                ..Default::default()
            },
        ),
        &expected,
    );
}

/// `tests/reference_preferences.py` makes the file.
#[test]
fn pytorch_has_the_same_losses_of_preferences() {
    let pair = |prompt: &[u32], chosen: &[u32], rejected: &[u32]| {
        Example::preference(
            Example::completion(prompt, chosen),
            Example::completion(prompt, rejected),
        )
    };
    let pairs = [
        pair(&[1, 17, 4], &[42, 9, 9], &[5, 6]),
        pair(&[1, 33, 0, 28], &[5], &[12, 12, 40]),
        pair(&[1, 12, 7, 7], &[8, 30, 2], &[8, 31, 2]),
        pair(&[1, 44], &[3, 6, 19, 21], &[21, 19, 6, 3]),
    ];
    let labelled = [
        (&[1, 17, 4][..], &[42, 9, 9][..], true),
        (&[1, 33, 0, 28], &[5, 2], false),
        (&[1, 12, 7, 7], &[8, 30, 2], true),
        (&[1, 44], &[3, 6, 19, 21], false),
        (&[1, 2, 3], &[4], true),
    ];
    let labelled =
        labelled.map(|(prompt, y, label)| Example::labelled(Example::completion(prompt, y), label));
    let options = TrainOptions {
        epochs: 40.0,
        beta: 0.5,
        undesirable_weight: 1.5,
        ..Default::default()
    };
    for (name, loss, examples) in [
        ("dpo", Loss::Dpo, &pairs[..]),
        ("kto", Loss::Kto, &labelled),
    ] {
        let expected = reference("preferences", name);
        assert!(expected[39] < 0.8 * expected[0], "it learns: {expected:?}");
        close(
            &losses(
                examples,
                &[],
                TrainOptions {
                    loss,
                    ..options.clone()
                },
            ),
            &expected,
        );
    }
}

/// With control text replayed and elastic weight consolidation; `tests/reference_preferences.py`
/// makes the file. Of its 40 steps the first 20 count: keys and values rounded to half precision,
/// as the cache has them, change PyTorch's own losses by up to 8e-4 there and by 3e-3 in step 23.
#[test]
fn pytorch_has_the_same_losses_with_consolidation() {
    let control: Vec<u32> = (0..200).map(|i| (i * i + 3 * i) % 50).collect();
    let options = TrainOptions {
        epochs: 40.0,
        max_divergence: 0.5,
        ..Default::default()
    };
    let found = losses(
        &completions(),
        &control,
        TrainOptions {
            ewc_lambda: 3.0,
            ..options.clone()
        },
    );
    close(&found[..20], &reference("preferences", "ewc")[..20]);
    let without = losses(&completions(), &control, options);
    assert!(
        without[39] < 0.9 * found[39],
        "it holds back: {without:?} {found:?}"
    );
}

/// Tokens per second of training steps, the best of some, beside `tests/speed_peft.py`: `cargo test
/// --release --test it -- --ignored --nocapture train::speed`, on a machine that does nothing else.
/// Of four layers of a 1B shape, or of the file that `RUVLLM_SPEED_MODEL` names.
#[test]
#[ignore = "measures"]
fn speed() {
    use ruvllm::Engine;
    use ruvllm::engine::EngineOptions;
    use ruvllm::quant::FileType;
    use ruvllm_benches::{Shape, synthetic};
    let large = |name: &str| {
        let shape = Shape::from_name("llama-1b").unwrap().with_layers(4);
        Model::from_gguf(synthetic(&shape, FileType::from_name(name).unwrap()).unwrap()).unwrap()
    };
    let file = std::env::var("RUVLLM_SPEED_MODEL").ok();
    for name in file
        .as_deref()
        .map_or(vec!["F32", "Q8_0"], |file| vec![file])
    {
        let model = if file.is_some() {
            Model::open(name).unwrap()
        } else {
            large(name)
        };
        let engine = Engine::new(
            &model,
            &EngineOptions {
                n_threads: 2.try_into().ok(),
                ..Default::default()
            },
        )
        .unwrap();
        let n_vocab = model.hparams().n_vocab;
        let n_steps = if file.is_some() { 40 } else { 4 };
        for n in [32, 128, 511] {
            let text = |i: usize| {
                (0..=n)
                    .map(|j| ((i * 7919 + j * j * 31 + j) % n_vocab) as u32)
                    .collect::<Vec<_>>()
            };
            let examples: Vec<Example> = (0..512 / n).map(|i| Example::text(&text(i))).collect();
            let options = TrainOptions {
                batch: examples.len(),
                held_out: 0.0,
                epochs: n_steps as f32 + 1.0,
                n_ctx: 512,
                ..Default::default()
            };
            let mut trainer = Trainer::new(&engine, &examples, &[], &options).unwrap();
            let mut best = f64::INFINITY;
            for _ in 0..n_steps {
                let begun = std::time::Instant::now();
                trainer.step().unwrap();
                best = best.min(begun.elapsed().as_secs_f64());
            }
            println!(
                "{name}, examples of {n} tokens: {:.0} tokens/s",
                (512 / n * n) as f64 / best
            );
        }
    }
}
