//! Checkpoints of a training: GGUF files, so that reading is bounded and validated as it is for
//! models, and writing leaves either the old file or the new one.

use crate::learn::rein::Rein;
use crate::learn::{LearnError, number, put, values};
use crate::train::flat::{flat, set_flat};
use crate::train::trainer::{Evaluation, Step, Trainer};
use ruvllm::gguf::{Gguf, Metadata, Writer};
use ruvllm::quant::DType;
use std::path::Path;

const TYPE: &str = "training";
/// Incremented when a file of the new form could be misread as one of the old.
const VERSION: u32 = 2;
/// Most steps and evaluations of a file.
const MAX_STEPS: usize = 1 << 24;

impl Trainer {
    /// Saves the state of the training. The file gets its name only when it is complete on disk,
    /// and then replaces an older one: a process that is killed meanwhile leaves the older one
    /// intact.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), LearnError> {
        let mut w = Writer::new();
        w.overwrite().private();
        w.metadata("general.type", TYPE);
        w.metadata("training.version", VERSION);
        w.metadata("training.model", self.session.model().fingerprint());
        w.metadata("training.fingerprint", self.fingerprint);
        w.metadata("training.kept", self.report.kept as u32);
        w.metadata("training.finished", self.is_finished);
        w.metadata("training.alpha", self.best.alpha());
        let rein = self.replay.as_ref().map(|replay| replay.rein);
        let Rein {
            strength,
            pace,
            divergence,
        } = rein.unwrap_or_else(Rein::new);
        w.metadata("training.strength", f64::from(strength));
        w.metadata("training.pace", pace);
        w.metadata("training.divergence", divergence);
        let adapter = self
            .session
            .sequence()
            .adapters()
            .find(|(id, ..)| *id == self.id)
            .map(|(_, adapter, _)| adapter);
        for (name, adapter) in [
            ("adapter", adapter.map(|a| &**a)),
            ("best", Some(&self.best)),
        ] {
            let flat: Vec<f32> = adapter.map(flat).unwrap_or_default();
            put(&mut w, name, &[flat.len()], DType::F32, &flat);
        }
        let [means, squares] = self.adam.moments();
        put(&mut w, "adam.mean", &[means.len()], DType::F32, &means);
        put(
            &mut w,
            "adam.square",
            &[squares.len()],
            DType::F32,
            &squares,
        );
        // Before the first step it can be measured again.
        let fisher = self
            .ewc
            .as_ref()
            .filter(|_| !self.report.steps.is_empty())
            .map_or(&[][..], |ewc| &ewc.fisher);
        put(&mut w, "ewc.fisher", &[fisher.len()], DType::F32, fisher);
        let report = &self.report;
        let steps: Vec<f64> = report
            .steps
            .iter()
            .flat_map(|s| [s.loss, s.rate, s.norm])
            .collect();
        put(
            &mut w,
            "steps",
            &[3, report.steps.len()],
            DType::F64,
            &steps,
        );
        let evaluations = &report.evaluations;
        let n = evaluations.len();
        let numbers: Vec<f64> = evaluations
            .iter()
            .flat_map(|e| {
                [
                    e.step as f64,
                    e.held_out,
                    f64::from(e.scale),
                    e.divergence,
                    e.control,
                ]
            })
            .collect();
        put(&mut w, "evaluations", &[5, n], DType::F64, &numbers);
        let [losses, rises] = [
            |e: &Evaluation| e.losses.clone(),
            |e: &Evaluation| e.rises.clone(),
        ]
        .map(|part| evaluations.iter().flat_map(part).collect::<Vec<f64>>());
        put(
            &mut w,
            "evaluations.losses",
            &[report.held_out_tokens.len(), n],
            DType::F64,
            &losses,
        );
        put(
            &mut w,
            "evaluations.rises",
            &[report.control_tokens.len(), n],
            DType::F64,
            &rises,
        );
        Ok(w.write(path)?)
    }

    /// Continues where [`Trainer::save`] left off; what follows is what would have followed without
    /// the interruption.
    ///
    /// # Errors
    /// If the file is invalid, or was saved with another model, other examples, control text or
    /// options. The trainer is unchanged then.
    pub fn resume(&mut self, path: impl AsRef<Path>) -> Result<(), LearnError> {
        let gguf = Gguf::open(path).map_err(LearnError::Gguf)?;
        let state = self.read(&gguf)?;
        let State {
            adapter,
            best,
            moments,
            rein,
            fisher,
            report,
            is_finished,
        } = state;
        self.session
            .adapters()
            .update(self.id, |held| set_flat(held, &adapter))?;
        set_flat(&mut self.best, &best.0);
        self.best.set_alpha(best.1)?;
        self.adam.restore(&self.gradients, report.0.len(), &moments);
        if let Some(replay) = &mut self.replay {
            replay.rein = rein;
        }
        if let Some(ewc) = &mut self.ewc {
            ewc.fisher = fisher;
        }
        (self.report.steps, self.report.evaluations, self.report.kept) = report;
        self.is_finished = is_finished;
        Ok(())
    }

    fn read(&self, gguf: &Gguf) -> Result<State, LearnError> {
        let metadata = gguf.metadata();
        let found = metadata.opt_str("general.type")?.unwrap_or_default();
        if found != TYPE {
            return Err(LearnError::NotTraining {
                found: found.to_owned(),
            });
        }
        let found = metadata.u32("training.version")?;
        if found != VERSION {
            return Err(LearnError::Version {
                found,
                supported: VERSION,
            });
        }
        let (found, expected) = (
            metadata.u64("training.model")?,
            self.session.model().fingerprint(),
        );
        if found != expected {
            return Err(LearnError::OtherModel { found, expected });
        }
        if metadata.u64("training.fingerprint")? != self.fingerprint {
            return Err(LearnError::OtherTraining);
        }
        let n = self.best.n_params();
        let finite = |x: &f32| x.is_finite();
        let flat = |name, n| values(gguf, name, 1, n..=n, DType::F32, finite);
        let numbers = |name, width: usize, rows| {
            values(gguf, name, width.max(1), rows, DType::F64, |_: &f64| true)
        };
        let steps = numbers("steps", 3, 0..=MAX_STEPS)?;
        let steps: Vec<Step> = steps
            .chunks_exact(3)
            .enumerate()
            .map(|(i, s)| Step {
                step: i + 1,
                loss: s[0],
                rate: s[1],
                norm: s[2],
            })
            .collect();
        let n_fisher = if steps.is_empty() || self.ewc.is_none() {
            0
        } else {
            n
        };
        let n_moments = if steps.is_empty() { 0 } else { n };
        let read = numbers("evaluations", 5, 0..=MAX_STEPS)?;
        let n_evaluations = read.len() / 5;
        let per = |name, width: usize| -> Result<Vec<Vec<f64>>, LearnError> {
            if width == 0 {
                return Ok(vec![Vec::new(); n_evaluations]);
            }
            let all = numbers(name, width, n_evaluations..=n_evaluations)?;
            Ok(all.chunks_exact(width).map(<[f64]>::to_vec).collect())
        };
        let losses = per("evaluations.losses", self.report.held_out_tokens.len())?;
        let rises = per("evaluations.rises", self.report.control_tokens.len())?;
        let evaluations: Vec<Evaluation> = read
            .chunks_exact(5)
            .zip(losses.into_iter().zip(rises))
            .map(|(e, (losses, rises))| Evaluation {
                step: e[0] as usize,
                held_out: e[1],
                scale: e[2] as f32,
                divergence: e[3],
                control: e[4],
                losses,
                rises,
            })
            .collect();
        let kept = metadata.u32("training.kept")? as usize;
        if steps.len() > self.report.n_steps || (kept >= n_evaluations && kept + n_evaluations > 0)
        {
            return Err(LearnError::Value {
                name: "steps",
                what: format!("{} steps, kept {kept}", steps.len()),
            });
        }
        Ok(State {
            adapter: flat("adapter", n)?,
            best: (flat("best", n)?, metadata.f32("training.alpha")?),
            moments: [
                flat("adam.mean", n_moments)?,
                flat("adam.square", n_moments)?,
            ],
            fisher: values(
                gguf,
                "ewc.fisher",
                1,
                n_fisher..=n_fisher,
                DType::F32,
                |x: &f32| x.is_finite() && *x >= 0.0,
            )?,
            rein: rein(metadata)?,
            report: (steps, evaluations, kept),
            is_finished: metadata.bool("training.finished")?,
        })
    }
}

fn rein(metadata: &Metadata) -> Result<Rein, LearnError> {
    Ok(Rein {
        strength: number(metadata, "training.strength", 0.0..=1e6)? as f32,
        pace: number(metadata, "training.pace", 0.0..=1.0)?,
        divergence: number(metadata, "training.divergence", 0.0..=1e9)?,
    })
}

/// The contents of a checkpoint.
struct State {
    adapter: Vec<f32>,
    /// Values and alpha.
    best: (Vec<f32>, f32),
    moments: [Vec<f32>; 2],
    rein: Rein,
    fisher: Vec<f32>,
    report: (Vec<Step>, Vec<Evaluation>, usize),
    is_finished: bool,
}
