//! Options of training.

use crate::learn::LearnError;
use ruvllm::lora::TargetModule;
use std::f64::consts::PI;

/// Which matrices an adapter changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetSet {
    /// Query and value projections of attention (also where they are fused with others).
    Qv,
    /// All projections of attention.
    Qkvo,
    /// Every matrix of the layers except routers of experts.
    All,
    /// Matrices with one of these [parts](TargetModule::part) of a name, in every layer.
    Parts(Vec<String>),
}

impl TargetSet {
    /// The sets that have a name.
    pub const NAMED: [(&'static str, TargetSet); 3] = [
        ("qv", TargetSet::Qv),
        ("qkvo", TargetSet::Qkvo),
        ("all", TargetSet::All),
    ];

    /// Whether a matrix is in the set.
    pub fn contains(&self, site: &TargetModule) -> bool {
        let starts = |names: &[&str]| names.iter().any(|name| site.part().starts_with(name));
        match self {
            TargetSet::Qv => starts(&["attn_q", "attn_v", "attn_kv"]),
            TargetSet::Qkvo => starts(&["attn_"]),
            TargetSet::All => site.layer().is_some() && site.part() != "ffn_gate_inp",
            TargetSet::Parts(parts) => parts.iter().any(|part| part == site.part()),
        }
    }
}

/// What is minimised. The names are those of TRL, Hugging Face's library for training on
/// preferences.
///
/// `r = ln p(y|x) − ln p₀(y|x)` of a prompt `x` and a completion `y` compares the adapted model
/// with the reference `p₀`, the model without the adapter; a logarithm of a probability is the sum
/// over the tokens to be learnt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Mean negative log-likelihood of the tokens to be learnt, in nats per token.
    Sft,
    /// Direct preference optimisation (Rafailov et al., arXiv 2305.18290): the mean over pairs of
    /// `−ln σ(β·(r(chosen) − r(rejected)))`; `ln 2` where the adapter changes nothing.
    Dpo,
    /// Kahneman-Tversky optimisation (Ethayarajh et al., arXiv 2402.01306): the mean over
    /// completions of `w·σ(∓β·(r − z))`, with `−` and the weight of desirable ones for those
    /// that are, else with `+` and the other weight. `z` is the mean of `r` over the prompts of
    /// the batch, each with the completion of the example before it in the list, or 0 if that
    /// is negative; it is a constant of the step.
    Kto,
}

impl Loss {
    /// All losses with their names.
    pub const ALL: [(&'static str, Loss); 3] =
        [("sft", Loss::Sft), ("dpo", Loss::Dpo), ("kto", Loss::Kto)];

    /// Its name.
    pub fn name(self) -> &'static str {
        Loss::ALL
            .iter()
            .find(|(_, loss)| *loss == self)
            .map_or("", |(name, _)| name)
    }
}

/// How the learning rate changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// It stays.
    Constant,
    /// It falls to 0 along half a cosine (arXiv 1608.03983).
    Cosine,
    /// It rises from a 25th to its full value over three tenths of the steps, then falls to 10⁻⁴ of
    /// where it began, both along half a cosine (arXiv 1708.07120, with PyTorch's constants).
    /// It has no further warm-up.
    OneCycle,
}

impl Schedule {
    /// All schedules with their names.
    pub const ALL: [(&'static str, Schedule); 3] = [
        ("constant", Schedule::Constant),
        ("cosine", Schedule::Cosine),
        ("one-cycle", Schedule::OneCycle),
    ];

    /// Factor on the rate in step `step`, from 0, of `n_steps`, of which the first `warmup` rise
    /// linearly.
    pub fn factor(self, step: usize, n_steps: usize, warmup: usize) -> f64 {
        let cosine = |from: f64, to: f64, t: f64| {
            to + (from - to) * 0.5 * (1.0 + (PI * t.clamp(0.0, 1.0)).cos())
        };
        match self {
            Schedule::OneCycle => {
                let (first, peak) = (1.0 / 25.0, 0.3 * n_steps as f64 - 1.0);
                let (step, last) = (step as f64, n_steps as f64 - 1.0);
                if step <= peak {
                    cosine(first, 1.0, step / peak)
                } else {
                    cosine(1.0, first * 1e-4, (step - peak) / (last - peak))
                }
            }
            _ if step < warmup => (step + 1) as f64 / warmup as f64,
            Schedule::Constant => 1.0,
            Schedule::Cosine => cosine(
                1.0,
                0.0,
                (step - warmup) as f64 / (n_steps - warmup).max(1) as f64,
            ),
        }
    }
}

/// Options of a [`Trainer`](super::Trainer). `..Default::default()` sets the remaining fields.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainOptions {
    /// What is minimised; all examples must be for it. Default [`Loss::Sft`].
    pub loss: Loss,
    /// Factor `β` of the losses of preferences: the larger, the less the model moves from the
    /// reference. Default 0.1.
    pub beta: f32,
    /// Weight of desirable completions in [`Loss::Kto`]. Default 1.
    pub desirable_weight: f32,
    /// Weight of undesirable completions in [`Loss::Kto`]. Default 1.
    pub undesirable_weight: f32,
    /// Rank of the adapter. Default 8.
    pub rank: usize,
    /// Strength: `ΔW = alpha/rank·B·A`. Default: the rank.
    pub alpha: Option<f32>,
    /// The matrices that it changes. Default [`TargetSet::All`].
    pub targets: TargetSet,
    /// Learning rate of Adam. Default 0.002.
    pub rate: f32,
    /// Fractions of the mean gradient, and of its mean square, that a step keeps. Default 0.9 and
    /// 0.999.
    pub betas: (f32, f32),
    /// Decoupled weight decay, as a fraction of the rate. Default 0.
    pub weight_decay: f32,
    /// Default [`Schedule::Cosine`].
    pub schedule: Schedule,
    /// Number of first steps in which the rate rises linearly. Default 0.
    pub warmup: usize,
    /// How often every example is read. Default 3.
    pub epochs: f32,
    /// Examples whose gradients one step adds up. Default 8.
    pub batch: usize,
    /// Largest Euclidean norm of a step's gradient; a longer one is scaled down. Default 1.
    pub clip: f32,
    /// Longest example in tokens; 0 means the context that the model was trained for, at most
    /// 2048. Default 0.
    pub n_ctx: usize,
    /// Fraction of the examples, drawn at random, that are not trained on but tell when to stop; 0
    /// to 0.5. Default 0.1.
    pub held_out: f32,
    /// Steps between two evaluations; 0 means once per epoch. Default 0.
    pub eval_every: usize,
    /// Evaluations without a gain after which training ends; 0 means never. Default 3.
    pub patience: usize,
    /// Mean `KL(base ‖ adapted)` in nats per token on the replayed half of the control text above
    /// which an adapter is not kept. Default 0.0015, as for a
    /// [`Learner`](crate::learn::Learner).
    pub max_divergence: f64,
    /// Weight `λ` of elastic weight consolidation (Kirkpatrick et al., arXiv 1612.00796): `λ/2·Σ
    /// F·(θ − θ₀)²` is added to the loss, over the adapter's values `θ`, with those before the
    /// first step and the diagonal of the Fisher information of the replayed control text per
    /// token there, so that 1 weighs a token's divergence about once. 0 means none. Default 0.
    pub ewc_lambda: f32,
    /// Seed of the adapter's first values, of the order of the examples, and of which are held
    /// out. Default 1.
    pub seed: u64,
}

impl Default for TrainOptions {
    fn default() -> Self {
        TrainOptions {
            loss: Loss::Sft,
            beta: 0.1,
            desirable_weight: 1.0,
            undesirable_weight: 1.0,
            rank: 8,
            alpha: None,
            targets: TargetSet::All,
            rate: 2e-3,
            betas: (0.9, 0.999),
            weight_decay: 0.0,
            schedule: Schedule::Cosine,
            warmup: 0,
            epochs: 3.0,
            batch: 8,
            clip: 1.0,
            n_ctx: 0,
            held_out: 0.1,
            eval_every: 0,
            patience: 3,
            max_divergence: 0.0015,
            ewc_lambda: 0.0,
            seed: 1,
        }
    }
}

impl TrainOptions {
    /// # Errors
    /// If an option is out of its range; names the first.
    pub(super) fn check(&self) -> Result<(), LearnError> {
        let numbers = [
            ("beta", self.beta, 1e-6, 1e3),
            ("desirable_weight", self.desirable_weight, 0.0, 1e3),
            ("undesirable_weight", self.undesirable_weight, 0.0, 1e3),
            ("ewc_lambda", self.ewc_lambda, 0.0, 1e9),
            ("rate", self.rate, 0.0, 10.0),
            ("the first beta", self.betas.0, 0.0, 0.9999),
            ("the second beta", self.betas.1, 0.0, 0.999_999),
            ("weight_decay", self.weight_decay, 0.0, 100.0),
            ("epochs", self.epochs, 1e-3, 1e6),
            ("clip", self.clip, 1e-6, f32::MAX),
            ("held_out", self.held_out, 0.0, 0.5),
            ("max_divergence", self.max_divergence as f32, 0.0, 10.0),
        ];
        for (option, value, least, most) in numbers {
            if !(least..=most).contains(&value) {
                let expected = format!("{least} to {most}");
                return Err(LearnError::Option {
                    option,
                    value: f64::from(value),
                    expected,
                });
            }
        }
        if self.batch == 0 {
            return Err(LearnError::Option {
                option: "batch",
                value: 0.0,
                expected: "at least 1".into(),
            });
        }
        if self.schedule == Schedule::OneCycle && self.warmup > 0 {
            let (option, value) = ("warmup", self.warmup as f64);
            return Err(LearnError::Option {
                option,
                value,
                expected: "0: one-cycle begins slowly itself".into(),
            });
        }
        Ok(())
    }
}
