//! Flags of learning while running, and what is learnt by them.

use crate::io::{Failure, note, paint, read_text, unix_time};
use ruvllm::Engine;
use ruvllm::Session;
use ruvllm_learn::sona::{Background, Event, JUDGED, Sona, SonaBuilder, SonaError, Trajectory};
use ruvllm_learn::{LearnError, Learning as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// File in which earlier releases kept what was learnt.
const EARLIER: &str = "learned.gguf";

/// Whether and how to learn.
#[derive(clap::Args)]
#[command(next_help_heading = "Learning")]
pub(crate) struct LearnArgs {
    /// Record requests in this folder and learn from them; what is learnt takes effect once text
    /// that was kept from it confirms it (see `ruvllm learn`)
    #[arg(id = "learn", long = "learn", value_name = "DIR")]
    pub(crate) folder: Option<PathBuf>,
    /// Store the tokens of requests, too: to learn the rest again after a session is forgotten,
    /// and to train on; `generate` and `chat` always do, so that what waits is not lost
    #[arg(long, requires = "learn")]
    learn_text: bool,
    /// Text that must not be forgotten, for a folder that has none yet
    #[arg(long, value_name = "FILE", requires = "learn")]
    learn_control: Option<PathBuf>,
    /// The rating, 0 to 1, from which on an answer is learnt; of worse ones nothing is [default:
    /// 0.5]
    #[arg(long, value_name = "RATING", requires = "learn")]
    learn_quality_threshold: Option<f32>,
    /// Factor on the steps of learning [default: that of the folder, at first 1]
    #[arg(long, value_name = "FACTOR", requires = "learn")]
    learn_rate: Option<f32>,
    /// Requests from which on the background learns [default: 10]
    #[arg(long, value_name = "N", requires = "learn")]
    learn_min_samples: Option<usize>,
    /// Most requests that wait to be learnt; older ones are not learnt [default: 1000]
    #[arg(long, value_name = "N", requires = "learn")]
    learn_max_pending: Option<usize>,
    /// Milliseconds between two looks of the background at what waits [default: 100]
    #[arg(long, value_name = "MS", requires = "learn")]
    learn_interval_ms: Option<u64>,
    /// Adapt the output alone, not inner layers, too, which takes some seven more prefills of what
    /// is learnt
    #[arg(long, requires = "learn")]
    learn_head_only: bool,
}

impl LearnArgs {
    /// What is recorded and learnt from requests of others in `folder`.
    #[cfg(feature = "serve")]
    pub(crate) fn open(
        &self,
        folder: &Path,
        tenant: &str,
        engine: &Engine,
    ) -> Result<Sona, Failure> {
        let builder = Sona::builder().tenant(tenant).keep_text(self.learn_text);
        self.open_with(builder, folder, engine)
    }

    /// As `builder` and the flags say.
    fn open_with(
        &self,
        mut builder: SonaBuilder,
        folder: &Path,
        engine: &Engine,
    ) -> Result<Sona, Failure> {
        builder = builder.inner_layers(!self.learn_head_only);
        if let Some(rating) = self.learn_quality_threshold {
            builder = builder.quality_threshold(rating);
        }
        if let Some(rate) = self.learn_rate {
            builder = builder.instant_lr(rate);
        }
        if let Some(n) = self.learn_min_samples {
            builder = builder.background_min_samples(n);
        }
        if let Some(n) = self.learn_max_pending {
            builder = builder.max_pending_samples(n);
        }
        if let Some(ms) = self.learn_interval_ms {
            builder = builder.background_interval_ms(ms);
        }
        let sona = open_folder(builder, folder, engine)?;
        if sona.learner().n_control() == 0 {
            match (&self.learn_control, engine.model().tokenizer()) {
                (Some(path), Some(tokenizer)) => {
                    sona.calibrate(&tokenizer.encode(&read_text(path)?, true, false))?
                }
                _ => {
                    let why = "has no control text: what must not be forgotten is not known.";
                    note(paint(
                        "33",
                        &format!("{} {why} --learn-control FILE tells.", folder.display()),
                    ));
                }
            }
        }
        Ok(sona)
    }

    /// Begins to learn what is said in a session of that name, if the flags say so; with `mixture`
    /// text is generated, and what is learnt judged, with the mixture of all that was learnt.
    pub(crate) fn begin(
        &self,
        engine: &Engine,
        mixture: bool,
        session_id: String,
    ) -> Result<Option<Learning>, Failure> {
        let Some(folder) = &self.folder else {
            return Ok(None);
        };
        let builder = Sona::builder().keep_text(true).mixture(mixture);
        let sona = self.open_with(builder, folder, engine)?;
        let background = sona.start()?;
        Ok(Some(Learning {
            sona,
            background,
            session_id,
            begun: unix_time(),
            n: 0,
            generation: None,
        }))
    }
}

/// Opens a folder of what is learnt. What an earlier release learnt there becomes its first
/// version.
pub(crate) fn open_folder(
    builder: SonaBuilder,
    folder: &Path,
    engine: &Engine,
) -> Result<Sona, Failure> {
    let sona = builder.open(folder, engine)?;
    if let Some(file) = earlier_file(folder)
        && sona.status()?.versions.is_empty()
    {
        sona.import(&file).map_err(|error| match error {
            SonaError::Learn(LearnError::Gguf(error)) => error.into(), // names the file
            error => Failure::Work(format!("{}: {error}", file.display())),
        })?;
        note(format!(
            "{}, which an earlier release wrote, is version {} now; the file itself is not read any more",
            file.display(),
            sona.generation()
        ));
    }
    Ok(sona)
}

/// The file in which an earlier release kept what was learnt in a folder, if there is one.
pub(crate) fn earlier_file(folder: &Path) -> Option<PathBuf> {
    Some(folder.join(EARLIER)).filter(|file| file.exists())
}

/// What is learnt while a session runs: by the session at once, and from what is recorded in the
/// background, for this session and later ones.
pub(crate) struct Learning {
    sona: Sona,
    /// Learns until it is dropped.
    background: Background,
    /// The session's name.
    session_id: String,
    /// When this part of it began, in seconds since 1970, and answers since.
    begun: u64,
    n: usize,
    /// The version that the session goes on from.
    generation: Option<u64>,
}

impl Learning {
    /// Lets the session go on from the version in effect, with what that learnt of the prompt's
    /// topic, if it is another one than before.
    pub(crate) fn refresh(&mut self, session: &mut Session, prompt: &[u32]) -> Result<(), Failure> {
        let generation = self.sona.generation();
        if self.generation != Some(generation) {
            let mut learner = self.sona.learner();
            learner.set_topic(self.sona.topic(prompt)?);
            session.set_learner(learner)?;
            self.generation = Some(generation);
        }
        Ok(())
    }

    /// Records the answer that the session has given.
    pub(crate) fn record(
        &mut self,
        session: &mut Session,
        prompt: &[u32],
        answer: &[u32],
        latency: Duration,
    ) -> Result<(), Failure> {
        let pooled = session.hooks().take_pooled();
        self.n += 1;
        self.sona.record(Trajectory {
            request_id: self.request_id(),
            session_id: self.session_id.clone(),
            n_prompt: prompt.len(),
            n_answer: answer.len(),
            query_embedding: pooled.prompt,
            response_embedding: pooled.answer,
            latency,
            tokens: [prompt, answer].concat(),
            ..Default::default()
        })?;
        Ok(())
    }

    fn request_id(&self) -> String {
        format!("{}-{}", self.begun, self.n)
    }

    /// Rates the latest answer; whether the session has learnt from it at once.
    #[cfg(feature = "chat")]
    pub(crate) fn rate(&self, session: &mut Session, is_good: bool) -> Result<bool, SonaError> {
        if self.n == 0 {
            return Err(LearnError::NoAnswer.into());
        }
        let (score, reward) = if is_good { (1.0, 1.0) } else { (0.0, -1.0) };
        self.sona.rate(&self.request_id(), score)?;
        match session.feedback(reward) {
            Ok(_) => Ok(true),
            // Rated before, or without any text to compare it with: the record counts.
            Err(LearnError::NoAnswer | LearnError::NothingToCompare) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Learns what is left, however the work ended; an interrupt ends that. Requests too few to be
    /// judged by one another wait for the next time.
    ///
    /// # Errors
    /// What went wrong in the work, then what went wrong here.
    pub(crate) fn end(self, session: &Session, work: Result<(), Failure>) -> Result<(), Failure> {
        drop(self.background);
        if self.sona.n_pending().0 < JUDGED {
            return work;
        }
        // What was interrupted was the work.
        let cancel = session.cancel_token();
        cancel.reset();
        let learnt = self
            .sona
            .work_in_slices(&mut |_| !cancel.is_cancelled())
            .map_err(Failure::from);
        both(work, learnt)
    }
}

/// What two pieces of work came to: all that went wrong.
pub(crate) fn both(first: Result<(), Failure>, then: Result<(), Failure>) -> Result<(), Failure> {
    match (first, then) {
        (Err(Failure::Work(first)), Err(Failure::Work(then))) => {
            Err(Failure::Work(format!("{first}\n{then}")))
        }
        (Ok(()) | Err(Failure::Closed | Failure::Interrupted), Err(failure)) => Err(failure),
        (first, _) => first,
    }
}

/// The event that judged a version on text that was kept from it, if it is not the model alone.
pub(crate) fn judged_of(history: &[Event], version: u64) -> Option<&Event> {
    let mut judged = history.iter().rev().filter(|event| event.judged.0 > 0);
    judged.find(|event| event.version == version && version > 0)
}
