//! Training adapters: what is learnt, interruptions, refusals.

use crate::tiny::Tiny;
use ruvllm::gguf::Gguf;
use ruvllm::lora::Adapter;
use ruvllm::model::Model;
use ruvllm::quant::DType;
use ruvllm::train::{Example, Schedule, TargetSet, TrainOptions, Trainer};
use ruvllm::{Error, LearnError};
use std::path::PathBuf;

/// Sentences with a rule: after `7 x` comes `x + 1`, for 12 values of `x`.
fn examples() -> Vec<Example> {
    (0..24).map(|i| Example::completion(&[1, 7, 10 + i % 12], &[11 + i % 12, 2])).collect()
}

/// A text that has nothing to do with them.
fn control() -> Vec<u32> {
    (0..200).map(|i| (i * i + 3 * i) % 40).collect()
}

fn options() -> TrainOptions {
    TrainOptions { rank: 4, rate: 0.02, epochs: 6.0, batch: 4, n_ctx: 64, eval_every: 4, ..Default::default() }
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
    Trainer::new(&model().engine().unwrap(), examples, control, options).err().unwrap().to_string()
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
    assert!(report.best().held_out < 0.7 * report.evaluations[0].held_out, "{report:?}");
    // Early steps are worse than late ones, and what was measured is what the saved adapter does.
    assert!(report.steps[report.n_steps - 1].loss < report.steps[0].loss);
    let saved = Adapter::from_bytes(trainer.adapter().to_bytes().unwrap(), &model).unwrap();
    assert_eq!(saved, *trainer.adapter());
}

/// With a bound, control text keeps its predictions, where they change without one.
#[test]
fn control_text_is_kept_within_the_bound() {
    let model = model();
    let bound = TrainOptions { max_divergence: 0.002, ..options() };
    let mut kept = trainer(&model, &control(), &bound);
    run(&mut kept);
    let mut free = trainer(&model, &control(), &TrainOptions { max_divergence: 10.0, ..options() });
    run(&mut free);
    assert!(kept.report().evaluations.iter().all(|e| e.divergence <= 0.002), "{:?}", kept.report());
    assert!(free.report().best().divergence > 0.01, "{:?}", free.report());
    assert!(kept.report().best().held_out < kept.report().evaluations[0].held_out);
}

/// An interruption anywhere changes no bit of what follows, nor does the number of threads.
#[test]
fn an_interrupted_training_ends_as_one_that_was_not() {
    let model = model();
    let path = file("resume");
    let options = TrainOptions { epochs: 2.0, schedule: Schedule::OneCycle, ..options() };
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
        assert_eq!(format!("{:?}", second.report()), format!("{:?}", whole.report()));
    }
    // One that has ended stays ended.
    whole.save(&path).unwrap();
    let mut ended = trainer(&model, &control(), &options);
    ended.resume(&path).unwrap();
    assert!(ended.step().unwrap().is_none());
    assert_eq!(ended.adapter(), whole.adapter());

    // Other options, other examples, other control text, damage.
    let mut other = trainer(&model, &control(), &TrainOptions { rate: 0.01, ..options.clone() });
    assert!(matches!(other.resume(&path), Err(Error::Learn(LearnError::OtherTraining))));
    let mut other = trainer(&model, &control()[1..], &options);
    assert!(matches!(other.resume(&path), Err(Error::Learn(LearnError::OtherTraining))));
    let bytes = std::fs::read(&path).unwrap();
    for n in (0..bytes.len()).step_by(bytes.len() / 23) {
        std::fs::write(&path, &bytes[..n]).unwrap();
        assert!(trainer(&model, &control(), &options).resume(&path).is_err(), "{n} bytes");
    }
    std::fs::write(&path, trainer(&model, &[], &options).adapter().to_bytes().unwrap()).unwrap();
    let error = trainer(&model, &control(), &options).resume(&path).unwrap_err();
    assert!(matches!(error, Error::Learn(LearnError::NotTraining { .. })), "{error}");
    std::fs::remove_file(&path).unwrap();
}

/// Only the tokens to be learnt count: the loss of a prompt that cannot be predicted is not in it.
#[test]
fn loss_is_the_mean_over_the_tokens_to_be_learnt() {
    let model = model();
    let options = TrainOptions { held_out: 0.0, batch: 24, epochs: 1.0, ..options() };
    let mut trainer = trainer(&model, &[], &options);
    let step = trainer.step().unwrap().unwrap();
    let mut session = model.session().unwrap();
    let (mut sum, mut n) = (0.0, 0);
    for example in examples() {
        session.clear();
        let tokens = example.tokens();
        session
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
    assert!((step.loss - sum / f64::from(n)).abs() < 1e-5, "{} {}", step.loss, sum / f64::from(n));
}

#[test]
fn schedules() {
    let factors =
        |schedule: Schedule, n, warmup| -> Vec<f64> { (0..n).map(|i| schedule.factor(i, n, warmup)).collect() };
    let close = |x: &[f64], y: &[f64]| x.iter().zip(y).all(|(x, y)| (x - y).abs() < 1e-6) && x.len() == y.len();
    assert!(close(&factors(Schedule::Constant, 4, 2), &[0.5, 1.0, 1.0, 1.0]));
    let cosine = [0.5, 1.0, 1.0, 0.5 + 0.5f64.sqrt() / 2.0, 0.5, 0.5 - 0.5f64.sqrt() / 2.0];
    assert!(close(&factors(Schedule::Cosine, 6, 2), &cosine));
    // torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1, total_steps=10), torch 2.
    let one_cycle =
        [0.04, 0.52, 1.0, 0.950_484_6, 0.811_745_7, 0.611_262, 0.388_742, 0.188_258_3, 0.049_519_4, 0.000_004];
    assert!(close(&factors(Schedule::OneCycle, 10, 0), &one_cycle), "{:?}", factors(Schedule::OneCycle, 10, 0));
}

#[test]
fn sets_of_matrices() {
    let model = model();
    let parts = |set: TargetSet| -> Vec<String> {
        let sites = model.sites().iter().filter(|site| set.contains(site) && site.layer() == Some(0));
        sites.map(|site| site.part().to_owned()).collect()
    };
    assert_eq!(parts(TargetSet::Qv), ["attn_q", "attn_v"]);
    assert_eq!(parts(TargetSet::Qkvo), ["attn_q", "attn_k", "attn_v", "attn_output"]);
    assert_eq!(parts(TargetSet::All).len(), 7);
    assert_eq!(parts(TargetSet::Parts(vec!["ffn_up".into()])), ["ffn_up"]);
    assert!(model.sites().iter().all(|site| site.layer().is_some() || !TargetSet::All.contains(site)));
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
    bad[3] = Example::text(&vec![1; 65]);
    assert!(refused(&bad, &[], &options()).contains("example 3 has 65 tokens"));
    bad[3] = Example::text(&[1, 1 << 20]);
    assert!(refused(&bad, &[], &options()).contains("vocabulary"));
    for empty in [Example::text(&[]), Example::text(&[4]), Example::completion(&[4, 5], &[])] {
        bad[3] = empty;
        assert!(refused(&bad, &[], &options()).contains("no token to learn"));
    }
    assert!(refused(&good, &[1, 2], &options()).contains("too short"));
    let mut wild = trainer(&model(), &[], &TrainOptions { rate: 10.0, clip: f32::MAX, epochs: 100.0, ..options() });
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

#[test]
fn texts_are_cut_so_that_every_token_is_learnt_once() {
    let tokens: Vec<u32> = (0..50).collect();
    for n in [2, 7, 50, 80] {
        let pieces = Example::pieces(&tokens, n);
        let learnt = |example: &Example| example.tokens()[1..].to_vec();
        assert_eq!(pieces.iter().flat_map(learnt).collect::<Vec<_>>(), tokens[1..], "{n}");
        assert!(pieces.iter().all(|piece| piece.tokens().len() <= n && piece.n_learnt() > 0));
    }
    assert!(Example::pieces(&[3], 4).is_empty());
}

/// `tests/reference_peft.py` makes the files.
#[test]
fn peft_has_the_same_losses() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/peft");
    let reference = Gguf::open(format!("{folder}/training.gguf")).unwrap();
    let expected = bytemuck::pod_collect_to_vec::<u8, f32>(reference.data(reference.tensor("losses").unwrap()));
    let model = Model::open(format!("{folder}/llama.gguf")).unwrap();
    let adapter = Adapter::open(format!("{folder}/llama-adapter.gguf"), &model).unwrap();
    let examples = [
        Example::completion(&[1, 17, 4], &[42, 9, 9]),
        Example::completion(&[1, 33, 0, 28], &[5]),
        Example::completion(&[1, 12, 7, 7], &[8, 30, 2]),
        Example::completion(&[1, 44], &[3, 6, 19, 21]),
    ];
    // All examples in every step, so that their order does not matter.
    let options = TrainOptions {
        rate: 0.01,
        weight_decay: 0.1,
        schedule: Schedule::Constant,
        epochs: 100.0,
        batch: 4,
        held_out: 0.0,
        n_ctx: 64,
        ..Default::default()
    };
    let mut trainer = Trainer::continuing(&model.engine().unwrap(), adapter, &examples, &[], &options).unwrap();
    run(&mut trainer);
    let losses: Vec<f64> = trainer.report().steps.iter().map(|step| step.loss).collect();
    assert_eq!(losses.len(), expected.len());
    assert!(expected[0] > 3.0 && expected[99] < 0.05, "it learns: {expected:?}");
    for (step, (found, expected)) in losses.iter().zip(&expected).enumerate() {
        assert!((found - f64::from(*expected)).abs() < 1e-3, "step {step}: {found} {expected}");
    }
}
