//! Flags of learning while running, and the file that what was learnt lives in.

use super::output::{Failure, note, paint};
use clap::Args;
use ruvllm::LearnError;
use ruvllm::exec::Session;
use ruvllm::lora::{Learner, LearnerOptions};
use ruvllm::model::Model;
use std::path::{Path, PathBuf};

/// Name of the file in its folder.
const FILE: &str = "learned.gguf";

/// Whether and how to learn.
#[derive(Args)]
pub(super) struct LearningArgs {
    /// Learn from what you write, and keep it in this folder (`ruvllm calibrate` prepares one)
    #[arg(long, value_name = "DIR")]
    learn: Option<PathBuf>,
    /// Save after so many updates, besides at the end
    #[arg(long, value_name = "N", default_value_t = 16, requires = "learn",
          value_parser = clap::value_parser!(u64).range(1..))]
    learn_every: u64,
    /// Generate with the mixture of the adapted model, n-grams and neighbours of what was learnt
    #[arg(long, requires = "learn")]
    learn_mixture: bool,
    /// Write what was learnt as a plain LoRA adapter of the output head, at the end
    #[arg(long, value_name = "FILE", requires = "learn")]
    learn_export: Option<PathBuf>,
}

/// A folder being learnt into.
pub(super) struct Learning<'a> {
    args: &'a LearningArgs,
    path: Option<PathBuf>,
    saved_at: u64,
}

impl LearningArgs {
    /// Lets `session` learn, if the flags say so.
    pub(super) fn begin(&self, session: &mut Session<'_>) -> Result<Learning<'_>, Failure> {
        let mut learning = Learning { args: self, path: None, saved_at: 0 };
        if let Some(folder) = &self.learn {
            let (path, mut learner) = open(folder, session.model())?;
            if learner.n_control() == 0 {
                note(paint(
                    "33",
                    &format!(
                        "{} has no control text: what must not be forgotten is not known. \
                         `ruvllm calibrate -f TEXT -o {0}` tells.",
                        folder.display()
                    ),
                ));
            }
            learner.set_generate_with_mixture(self.learn_mixture);
            learning.saved_at = learner.n_updates();
            session.set_learner(learner)?;
            learning.path = Some(path);
        }
        Ok(learning)
    }
}

impl Learning<'_> {
    /// Learns from what was read meanwhile, and saves if that is due.
    pub(super) fn idle(&mut self, session: &mut Session<'_>) -> Result<(), Failure> {
        session.update();
        match session.learner() {
            Some(learner) if learner.n_updates() >= self.saved_at + self.args.learn_every => self.save(session),
            _ => Ok(()),
        }
    }

    fn save(&mut self, session: &Session<'_>) -> Result<(), Failure> {
        if let (Some(learner), Some(path)) = (session.learner(), &self.path) {
            learner.save(path)?;
            self.saved_at = learner.n_updates();
        }
        Ok(())
    }

    /// Learns the last, saves, and exports if that was asked for.
    pub(super) fn end(&mut self, session: &mut Session<'_>) -> Result<(), Failure> {
        session.update();
        self.save(session)?;
        if let (Some(learner), Some(path)) = (session.learner(), &self.args.learn_export) {
            learner.to_adapter(session.model())?.save(path)?;
            note(format!("wrote {}", path.display()));
        }
        Ok(())
    }
}

/// The file in `folder`, and what is in it; nothing learnt if there is none yet. A file that cannot be
/// used ends the program: it is never written over.
pub(super) fn open(folder: &Path, model: &Model) -> Result<(PathBuf, Learner), Failure> {
    std::fs::create_dir_all(folder).map_err(Failure::file(folder))?;
    let path = folder.join(FILE);
    let exists = path.try_exists().map_err(Failure::file(&path))?;
    let learner = if exists { Learner::open(&path, model) } else { Learner::new(model, &LearnerOptions::default()) };
    match learner {
        Ok(learner) => Ok((path, learner)),
        Err(LearnError::Gguf(error)) => Err(Failure::Work(error.to_string())), // names the file
        Err(error) => Err(Failure::Work(format!("{}: {error}", path.display()))),
    }
}
