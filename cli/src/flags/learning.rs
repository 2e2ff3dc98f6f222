//! Flags of learning while running, and the file that what was learnt lives in.

use crate::io::{Failure, check_overwrite, note, paint};
use clap::Args;
use ruvllm::model::Model;
use ruvllm::session::Session;
use ruvllm_learn::LearnError;
use ruvllm_learn::{Learner, LearnerOptions, Learning as _};
use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// Name of the file in its folder.
const FILE: &str = "learned.gguf";
/// Name of the file that is locked while a process learns into the folder.
const LOCK: &str = "lock";

/// Whether and how to learn.
#[derive(Args)]
pub(crate) struct LearningArgs {
    /// Learn from what you write, and keep it in this folder (`ruvllm calibrate` prepares one)
    #[arg(long, value_name = "DIR")]
    learn: Option<PathBuf>,
    /// Save after so many updates, besides at the end
    #[arg(long, value_name = "N", default_value_t = 16, requires = "learn", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u64).range(1..))]
    learn_every: u64,
    /// Generate with the mixture of the adapted model, n-grams and neighbours of what was learnt
    #[arg(long, requires = "learn")]
    learn_mixture: bool,
    /// Write what was learnt as a plain LoRA adapter of the output head, at the end
    #[arg(long, value_name = "FILE", requires = "learn")]
    learn_export: Option<PathBuf>,
    /// Replace the file of --learn-export if it exists
    #[arg(long, alias = "force", requires = "learn_export")]
    overwrite: bool,
}

/// What is learnt while the program runs, if anything is.
pub(crate) struct Learning<'a> {
    args: &'a LearningArgs,
    folder: Option<Folder>,
    saved_at: u64,
}

impl LearningArgs {
    /// Whether anything is to be learnt.
    #[cfg(feature = "chat")]
    pub(crate) fn is_on(&self) -> bool {
        self.learn.is_some()
    }

    /// Lets `session` learn, if the flags say so.
    pub(crate) fn begin(&self, session: &mut Session) -> Result<Learning<'_>, Failure> {
        let mut learning = Learning {
            args: self,
            folder: None,
            saved_at: 0,
        };
        if let Some(path) = &self.learn_export {
            check_overwrite(path, self.overwrite)?;
        }
        if let Some(path) = &self.learn {
            let (folder, mut learner) = Folder::open(path, session.model())?;
            if learner.n_control() == 0 {
                note(paint(
                    "33",
                    &format!(
                        "{} has no control text: what must not be forgotten is not known. \
                         `ruvllm calibrate -f TEXT -o {0}` tells.",
                        path.display()
                    ),
                ));
            }
            learner.set_generate_with_mixture(self.learn_mixture);
            learning.saved_at = learner.n_updates();
            session.set_learner(learner)?;
            learning.folder = Some(folder);
        }
        Ok(learning)
    }
}

impl Learning<'_> {
    /// Learns from what was read meanwhile, and saves if that is due.
    #[cfg(feature = "chat")]
    pub(crate) fn idle(&mut self, session: &mut Session) -> Result<(), Failure> {
        session.update()?;
        match session.learner() {
            Some(learner) if learner.n_updates() >= self.saved_at + self.args.learn_every => {
                self.save(session)
            }
            _ => Ok(()),
        }
    }

    fn save(&mut self, session: &Session) -> Result<(), Failure> {
        if let (Some(learner), Some(folder)) = (session.learner(), &self.folder) {
            learner.save(&folder.file)?;
            self.saved_at = learner.n_updates();
        }
        Ok(())
    }

    /// Learns the last, saves, and exports if that was asked for, however the work ended.
    ///
    /// # Errors
    /// What went wrong in the work, then what went wrong here.
    pub(crate) fn end(
        &mut self,
        session: &mut Session,
        work: Result<(), Failure>,
    ) -> Result<(), Failure> {
        let updated = session.update().map_err(Failure::from);
        let learnt = updated
            .and_then(|()| self.save(session))
            .and_then(|()| self.export(session));
        match (work, learnt) {
            (Err(Failure::Work(first)), Err(Failure::Work(then))) => {
                Err(Failure::Work(format!("{first}\n{then}")))
            }
            (Ok(()) | Err(Failure::Closed | Failure::Interrupted), Err(failure)) => Err(failure),
            (work, _) => work,
        }
    }

    fn export(&self, session: &Session) -> Result<(), Failure> {
        if let (Some(learner), Some(path)) = (session.learner(), &self.args.learn_export) {
            learner.to_adapter(session.model())?.save(path)?;
            note(format!("wrote {}", path.display()));
        }
        Ok(())
    }
}

/// A folder of what was learnt. No other process learns into it meanwhile: whoever saved last would
/// undo what the other one learnt.
pub(crate) struct Folder {
    path: PathBuf,
    /// What was learnt.
    pub(crate) file: PathBuf,
    /// Made here, so that it goes again if nothing is saved.
    new: bool,
    _lock: File,
}

impl Folder {
    /// The folder, and what is in it; nothing learnt if there is no file yet. A file that cannot be
    /// used ends the program: it is never written over.
    pub(crate) fn open(path: &Path, model: &Model) -> Result<(Folder, Learner), Failure> {
        let new = match std::fs::create_dir(path) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(Failure::file(path)(error)),
        };
        let lock = path.join(LOCK);
        let opened = File::options()
            .create(true)
            .append(true)
            .open(&lock)
            .map_err(Failure::file(&lock))?;
        match opened.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Failure::Work(format!(
                    "another process is learning into {}: wait until it has ended, or name another folder",
                    path.display()
                )));
            }
            Err(TryLockError::Error(error)) => return Err(Failure::file(&lock)(error)),
        }
        let folder = Folder {
            path: path.to_owned(),
            file: path.join(FILE),
            new,
            _lock: opened,
        };
        let file = &folder.file;
        let exists = file.try_exists().map_err(Failure::file(file))?;
        let learner = if exists {
            Learner::open(file, model)
        } else {
            Learner::new(model, &LearnerOptions::default())
        };
        match learner {
            Ok(learner) => Ok((folder, learner)),
            Err(LearnError::Gguf(error)) => Err(Failure::Work(error.to_string())), /* names the file */
            Err(error) => Err(Failure::Work(format!("{}: {error}", file.display()))),
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.new && !self.file.exists() {
            let _ = std::fs::remove_file(self.path.join(LOCK));
            // With anything else in it, it stays.
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}
