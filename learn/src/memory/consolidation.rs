//! Consolidation: what is remembered is learnt by an adapter, so that it is known without notes.

use crate::learn::LearnError;
use crate::memory::question_file::{read_questions, write_questions};
use crate::memory::questions::{Writer, is_answered, varied};
use crate::memory::versions::{Version, adapter_path, checkpoint, hashes, text_hash};
use crate::memory::{Entry, Memory, MemoryError, QuestionAnswer, QuestionOptions};
use crate::sona::SonaError;
use crate::sona::folder::remove;
use crate::train::{TrainOptions, Trainer};
use ruvllm::Model;
use ruvllm::lora::Adapter;
use ruvllm::{CancelToken, Engine, Sampler, SamplerOptions, SessionError};
use std::path::PathBuf;
use std::sync::Arc;

/// Questions of an entry from which on one is not trained on, but judged by.
const JUDGED: usize = 3;
/// Most tokens of an answer.
const MOST: usize = 32;
/// Of the questions that the version in effect answers, the share that the next must.
const RETAINED: f64 = 0.8;
/// Steps of training between two states on disk.
const SAVED: usize = 10;

/// How what is remembered is learnt.
#[derive(Clone, Debug, PartialEq)]
pub struct ConsolidationOptions {
    /// Most entries, of which the latest are learnt. Default 256.
    pub max_entries: usize,
    /// Questions about each.
    pub questions: QuestionOptions,
    /// The training: by default of rank 16, 10 epochs, within 0.2 nats of the model on control text.
    pub train: TrainOptions,
    /// Most rise of the loss on control text, in nats per token. Default 0.005: half a percent of
    /// perplexity.
    pub max_rise: f64,
}

impl Default for ConsolidationOptions {
    fn default() -> Self {
        ConsolidationOptions {
            max_entries: 256,
            questions: QuestionOptions::default(),
            train: TrainOptions {
                rank: 16,
                rate: 1e-3,
                epochs: 10.0,
                batch: 16,
                held_out: 0.0,
                patience: 0,
                // More than an evaluation at the beginning and one at the end tells nothing.
                eval_every: usize::MAX,
                max_divergence: 0.2,
                ..Default::default()
            },
            max_rise: 0.005,
        }
    }
}

/// What a consolidation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The model writes questions about entries.
    Questions,
    /// An adapter is trained on questions and answers.
    Training,
    /// Questions that were kept from it are asked.
    Judging,
}

/// How far a consolidation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConsolidationProgress {
    /// What it does.
    pub stage: Stage,
    /// Entries, steps or questions done of this stage.
    pub done: usize,
    /// Of so many.
    pub of: usize,
}

/// What came of a consolidation.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ConsolidationReport {
    /// Entries that were learnt.
    pub n_entries: usize,
    /// Questions, answers and entries that were trained on.
    pub n_trained: usize,
    /// Questions that were not trained on.
    pub n_asked: usize,
    /// Of them, those that the model alone answers.
    pub n_said_alone: usize,
    /// Those that it answers with the version in effect before, if there was one.
    pub n_said_before: Option<usize>,
    /// Those that it answers with the new adapter.
    pub n_said: usize,
    /// Rise of the loss on control text that nothing was trained on, in nats per token.
    pub control_rise: f64,
    /// Divergence from the model alone on other control text, in nats per token.
    pub divergence: f64,
    /// Number of the new version, or why there is none.
    pub outcome: Result<u64, String>,
}

/// A consolidation, step by step: it does not hold the memory, whose owner goes on meanwhile.
pub struct Consolidation {
    engine: Engine,
    control: Vec<u32>,
    options: ConsolidationOptions,
    entries: Vec<Entry>,
    /// Questions and answers of the first `n_written` entries.
    pairs: Vec<QuestionAnswer>,
    n_written: usize,
    writer: Option<Writer>,
    trainer: Option<Trainer>,
    checkpoint: PathBuf,
    /// What the training has led to, once it has ended.
    trained: Option<Arc<Adapter>>,
    /// Why there is no adapter.
    failed: Option<String>,
    in_effect: Option<Arc<Adapter>>,
    /// Whether each question judged by was answered: by the model alone, with the version in effect,
    /// and with the new adapter.
    said: Vec<[bool; 3]>,
    cancel: CancelToken,
}

impl Memory {
    /// Adapters that were trained on what is remembered; the last is in effect, the one before it what
    /// [`Memory::roll_back`] goes back to.
    pub fn versions(&self) -> &[Version] {
        &self.versions.all
    }

    /// The adapter in effect, if there is one for this model.
    ///
    /// # Errors
    /// If its file cannot be read.
    pub fn adapter(&mut self, model: &Model) -> Result<Option<Arc<Adapter>>, MemoryError> {
        let Some(version) = self.versions.all.last() else {
            return Ok(None);
        };
        if self.versions.model != model.fingerprint() {
            return Ok(None);
        }
        if self.versions.adapter.is_none() {
            let file = adapter_path(self.path(), version.number);
            let adapter = Adapter::open(&file, model).map_err(SonaError::from)?;
            self.versions.adapter = Some(Arc::new(adapter));
        }
        Ok(self.versions.adapter.clone())
    }

    /// Goes back to the version before the one in effect, or to none; returns the version that is in
    /// effect then.
    ///
    /// # Errors
    /// If no version is in effect, or a file cannot be written.
    pub fn roll_back(&mut self) -> Result<Option<u64>, MemoryError> {
        let path = self.path().to_owned();
        let versions = &mut self.versions;
        let gone = versions.all.pop().ok_or(MemoryError::NoVersion)?;
        versions.adapter = None;
        versions.save(&path)?;
        remove(&adapter_path(&path, gone.number))?;
        Ok(self.versions.all.last().map(|version| version.number))
    }

    /// Entries that the latest consolidation did not know, and those that it knew and that were corrected
    /// since.
    pub fn n_unconsolidated(&self) -> usize {
        let now = hashes(self.in_effect());
        now.symmetric_difference(&self.versions.tried).count()
    }

    /// Begins to consolidate what is remembered, or goes on where an earlier attempt was interrupted.
    /// `control` is text that the model must stay good at.
    ///
    /// # Errors
    /// If nothing is remembered, there is no control text, or a file of the folder is damaged.
    pub fn consolidation(
        &mut self,
        engine: &Engine,
        control: &[u32],
        options: &ConsolidationOptions,
    ) -> Result<Consolidation, MemoryError> {
        let mut entries: Vec<Entry> = self.in_effect().cloned().collect();
        entries.drain(..entries.len().saturating_sub(options.max_entries.max(1)));
        if entries.is_empty() {
            return Err(MemoryError::Empty);
        }
        if control.is_empty() {
            return Err(SonaError::Learn(LearnError::TooLittleText { n: 0, least: 4 }).into());
        }
        let model = engine.model();
        let written = read_questions(self.path(), (model.fingerprint(), &options.questions))?;
        let is_written = |entry: &Entry| written.iter().any(|pair| pair.number == entry.number);
        // Those that have questions come first.
        entries.sort_by_key(|entry| !is_written(entry));
        let n_written = entries.iter().filter(|entry| is_written(entry)).count();
        let of_entries = |pair: &QuestionAnswer| entries.iter().any(|e| e.number == pair.number);
        Ok(Consolidation {
            engine: engine.clone(),
            control: control.to_vec(),
            options: options.clone(),
            pairs: written
                .iter()
                .filter(|pair| of_entries(pair))
                .cloned()
                .collect(),
            entries,
            n_written,
            writer: None,
            trainer: None,
            checkpoint: checkpoint(self.path()),
            trained: None,
            failed: None,
            in_effect: self.adapter(model)?,
            said: Vec::new(),
            cancel: CancelToken::default(),
        })
    }

    /// Keeps the state of a consolidation on disk, so that it goes on behind an interruption; false if
    /// it is of no use any more, as something that it learns was forgotten or changed.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_consolidation(&self, of: &Consolidation) -> Result<bool, MemoryError> {
        if !self.is_current(of) {
            self.versions.end_training(self.path())?;
            return Ok(false);
        }
        match &of.trainer {
            None => {
                let by = (of.engine.model().fingerprint(), &of.options.questions);
                write_questions(self.path(), by, &of.pairs)?;
            }
            Some(trainer) if trainer.report().steps.len().is_multiple_of(SAVED) => {
                trainer.save(&of.checkpoint).map_err(SonaError::from)?;
            }
            Some(_) => {}
        }
        Ok(true)
    }

    fn is_current(&self, of: &Consolidation) -> bool {
        let now = hashes(self.in_effect());
        of.entries
            .iter()
            .all(|entry| now.contains(&text_hash(&entry.text)))
    }

    /// Ends a consolidation: its adapter takes effect as a new version if it answers more of the
    /// questions that were kept from it than the model alone, beyond chance, has not forgotten what the
    /// version in effect answers, and control text is as likely as before.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn conclude(&mut self, of: &Consolidation) -> Result<ConsolidationReport, MemoryError> {
        let mut report = of.report();
        if !self.is_current(of) {
            self.versions.end_training(self.path())?;
            report.outcome =
                Err("something that it learnt was forgotten or changed meanwhile".into());
            return Ok(report);
        }
        let adapter = of.trained.as_deref().filter(|_| report.outcome.is_ok());
        let version = Version {
            number: 0,
            n_asked: report.n_asked,
            n_said: report.n_said,
            texts: hashes(of.entries.iter()),
        };
        let (path, model) = (self.path().to_owned(), of.engine.model().fingerprint());
        if let Some(number) = self.versions.conclude(&path, model, (version, adapter))? {
            report.outcome = Ok(number);
        }
        Ok(report)
    }
}

impl Consolidation {
    /// The next part of the work; `None` when there is nothing left to do but
    /// [`Memory::conclude`].
    ///
    /// # Errors
    /// If a pass fails: the part is done again by the next call.
    pub fn step(&mut self) -> Result<Option<ConsolidationProgress>, MemoryError> {
        if self.n_written < self.entries.len() {
            return self.write().map(Some);
        }
        if self.failed.is_none() && self.trained.is_none() {
            match self.train() {
                Ok(progress) => return Ok(Some(progress)),
                Err(LearnError::Diverged { step }) => {
                    self.failed = Some(format!("the training diverged at step {step}"));
                }
                Err(error) => return Err(SonaError::from(error).into()),
            }
        }
        if self.failed.is_some() {
            return Ok(None);
        }
        self.judge()
    }

    /// What cancels [`Consolidation::step`], in the middle of a pass of training.
    pub(super) fn cancel_tokens(&self) -> Vec<CancelToken> {
        let of_training = self.trainer.as_ref().map(Trainer::cancel_token);
        of_training
            .into_iter()
            .chain([self.cancel.clone()])
            .collect()
    }

    fn write(&mut self) -> Result<ConsolidationProgress, MemoryError> {
        let writer = match self.writer.take() {
            Some(writer) => writer,
            None => Writer::new(&self.engine)?,
        };
        let entry = &self.entries[self.n_written];
        self.pairs
            .extend(writer.about(entry, &self.options.questions, &self.cancel)?);
        self.n_written += 1;
        // Its pages are of no use to the training.
        self.writer = Some(writer).filter(|_| self.n_written < self.entries.len());
        Ok(ConsolidationProgress {
            stage: Stage::Questions,
            done: self.n_written,
            of: self.entries.len(),
        })
    }

    /// Questions that are judged by, with the entry that each is about: of an entry that has enough the
    /// last.
    fn judged(&self) -> Vec<(&QuestionAnswer, &Entry)> {
        let mut judged = Vec::new();
        for entry in &self.entries {
            let of_entry = self.pairs.iter().filter(|pair| pair.number == entry.number);
            let asked: Vec<_> = of_entry.filter(|pair| pair.question.is_some()).collect();
            if asked.len() >= JUDGED {
                judged.extend(asked.last().map(|pair| (*pair, entry)));
            }
        }
        judged
    }

    fn train(&mut self) -> Result<ConsolidationProgress, LearnError> {
        let trainer = match &mut self.trainer {
            Some(trainer) => {
                if trainer.step()?.is_none() {
                    self.trained = Some(Arc::new(trainer.adapter().clone()));
                }
                trainer
            }
            // Without a step, so that the first one can be cancelled, too.
            None => {
                let trainer = self.begin()?;
                self.trainer.insert(trainer)
            }
        };
        Ok(ConsolidationProgress {
            stage: Stage::Training,
            done: trainer.report().steps.len(),
            of: trainer.report().n_steps,
        })
    }

    fn begin(&self) -> Result<Trainer, LearnError> {
        let tokenizer = self.engine.model().tokenizer();
        let tokenizer = tokenizer.ok_or(SessionError::NoTokenizer)?;
        let judged = self.judged();
        let is_judged = |pair: &QuestionAnswer| judged.iter().any(|(other, _)| *other == pair);
        let trained = self.pairs.iter().filter(|pair| !is_judged(pair));
        let varied = varied(&trained.cloned().collect::<Vec<_>>(), &self.entries);
        let mut examples = Vec::new();
        for entry in &self.entries {
            let of_entry = varied.iter().filter(|pair| pair.number == entry.number);
            let trained: Vec<_> = of_entry.collect();
            // Who is asked about seldom is repeated, so that every entry is read equally often.
            let n = (2 * self.options.questions.each + 1).max(trained.len());
            let repeated = trained.iter().cycle().take(n);
            examples.extend(repeated.map(|pair| pair.example(tokenizer)));
        }
        let (engine, options) = (&self.engine, &self.options.train);
        let mut trainer = match &self.in_effect {
            Some(adapter) => Trainer::continuing(
                engine,
                Adapter::clone(adapter),
                &examples,
                &self.control,
                options,
            )?,
            None => Trainer::new(engine, &examples, &self.control, options)?,
        };
        // A state of other questions or of another build is worth nothing.
        if self.checkpoint.exists() && trainer.resume(&self.checkpoint).is_err() {
            let _ = std::fs::remove_file(&self.checkpoint);
        }
        Ok(trainer)
    }

    fn judge(&mut self) -> Result<Option<ConsolidationProgress>, MemoryError> {
        let judged = self.judged();
        let (done, of) = (self.said.len(), judged.len());
        let Some((pair, entry)) = judged.get(done) else {
            return Ok(None);
        };
        let asked = [None, self.in_effect.clone(), self.trained.clone()];
        let mut said = [false; 3];
        for (i, adapter) in asked.into_iter().enumerate() {
            if i == 0 || adapter.is_some() {
                said[i] = self.is_said(pair, entry, adapter)?;
            }
        }
        self.said.push(said);
        let stage = Stage::Judging;
        Ok(Some(ConsolidationProgress {
            stage,
            done: done + 1,
            of,
        }))
    }

    /// Whether a question is answered, with an adapter.
    fn is_said(
        &self,
        pair: &QuestionAnswer,
        entry: &Entry,
        adapter: Option<Arc<Adapter>>,
    ) -> Result<bool, MemoryError> {
        let tokenizer = self.engine.model().tokenizer();
        let tokenizer = tokenizer.ok_or(SessionError::NoTokenizer)?;
        let mut session = self.engine.session()?;
        if let Some(adapter) = adapter {
            let attached = session.adapters().attach(adapter, 1.0);
            attached.map_err(SonaError::from)?;
        }
        let (given, _) = pair.text();
        let mut sampler = Sampler::new(SamplerOptions {
            temperature: 0.0,
            ..Default::default()
        })?;
        let tokens = tokenizer.encode(&given, true, false);
        let generation = session.generate(&tokens[..], &mut sampler)?;
        let mut said = String::new();
        for piece in generation.stop(["\n".to_owned()]).max_tokens(MOST) {
            said.push_str(&piece?.text);
            if self.cancel.is_cancelled() {
                return Err(SessionError::Cancelled.into());
            }
        }
        let question = pair.question.as_deref().unwrap_or_default();
        Ok(is_answered(said.trim(), question, &entry.text))
    }

    /// What is known so far, and whether the adapter is to take effect.
    fn report(&self) -> ConsolidationReport {
        let n_said = |i: usize| self.said.iter().filter(|said| said[i]).count();
        let training = self.trainer.as_ref().map(Trainer::report);
        // There is none before the first step, or if that one diverged.
        let best = training.and_then(|report| report.evaluations.get(report.kept));
        let mut report = ConsolidationReport {
            n_entries: self.entries.len(),
            n_trained: training.map_or(0, |report| report.n_trained),
            n_asked: self.said.len(),
            n_said_alone: n_said(0),
            n_said_before: self.in_effect.as_ref().map(|_| n_said(1)),
            n_said: n_said(2),
            control_rise: best.map_or(0.0, |best| best.control),
            divergence: best.map_or(0.0, |best| best.divergence),
            outcome: Ok(0),
        };
        if let Some(why) = self.refusal(&report) {
            report.outcome = Err(why);
        }
        report
    }

    /// Why the adapter is not to take effect.
    fn refusal(&self, report: &ConsolidationReport) -> Option<String> {
        if let Some(why) = &self.failed {
            return Some(why.clone());
        }
        if self.trained.is_none() || self.said.len() < self.judged().len() {
            return Some("it has not ended".into());
        }
        // A sign test: of the answers that differ, so many more are right that two standard errors
        // lie between.
        let better = self.said.iter().filter(|said| said[2] && !said[0]).count();
        let worse = self.said.iter().filter(|said| said[0] && !said[2]).count();
        let (gain, differing) = (better as f64 - worse as f64, (better + worse) as f64);
        if gain <= 2.0 * differing.sqrt().max(1.0) {
            return Some(format!(
                "of {} questions that were kept from it, it answers {}, the model alone {}: too few more",
                report.n_asked, report.n_said, report.n_said_alone
            ));
        }
        let known = self.said.iter().filter(|said| said[1]);
        let (known, still) = known.fold((0, 0), |(n, still), said| {
            (n + 1, still + usize::from(said[2]))
        });
        if (still as f64) < RETAINED * f64::from(known) {
            return Some(format!(
                "of {known} questions that the version in effect answers, it answers {still}"
            ));
        }
        if report.control_rise > self.options.max_rise {
            return Some(format!(
                "the loss on control text rose by {:.4} nats a token, more than {}",
                report.control_rise, self.options.max_rise
            ));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{MemoryOptions, NewEntry};
    use ruvllm::Model;
    use std::path::Path;

    type Tested = Result<(), Box<dyn std::error::Error>>;

    const NAMES: [(&str, &str); 6] = [
        ("Vintal", "Brumvik"),
        ("Morsen", "Drelan"),
        ("Steltor", "Kolmar"),
        ("Fanix", "Brulin"),
        ("Gruna", "Zeld"),
        ("Talvo", "Renning"),
    ];
    const CONTROL: &str = include_str!("../../../models/demo-heldout.txt");

    fn engine() -> Result<Engine, Box<dyn std::error::Error>> {
        Ok(Model::open("../models/ruvllm-rust-6m-q8_0.gguf")?.engine()?)
    }

    fn control(engine: &Engine) -> Result<Vec<u32>, Box<dyn std::error::Error>> {
        let tokenizer = engine.model().tokenizer().ok_or("no tokenizer")?;
        Ok(tokenizer.encode(&CONTROL[..2000], true, false))
    }

    fn folder(name: &str) -> PathBuf {
        let name = format!("ruvllm-consolidation-{name}-{}", std::process::id());
        std::env::temp_dir().join(name)
    }

    fn memory(path: &Path) -> Result<Memory, MemoryError> {
        let mut memory = Memory::open(path, &MemoryOptions::default())?;
        for (who, what) in NAMES {
            let text = format!("The town of {who} is {what}.");
            memory.remember(NewEntry::taught(text), None)?;
        }
        Ok(memory)
    }

    /// Strong enough for a small model, and not held back.
    fn options() -> ConsolidationOptions {
        let mut options = ConsolidationOptions {
            max_rise: 10.0,
            ..Default::default()
        };
        options.train.rate = 5e-3;
        options.train.epochs = 30.0;
        options.train.max_divergence = 10.0;
        options
    }

    /// What a larger model would have written.
    fn ask(of: &mut Consolidation) {
        for entry in &of.entries {
            let who = entry.text.split(' ').nth(3).unwrap_or_default();
            let asked = ["Which is the town of", "Where is", "What is the town of"];
            let question = |asked| Some(format!("{asked} {who}?"));
            let asked = asked.into_iter().map(question).chain([None]);
            of.pairs.extend(asked.map(|question| QuestionAnswer {
                number: entry.number,
                question,
                lead: String::new(),
                answer: entry.text.clone(),
            }));
        }
        of.n_written = of.entries.len();
    }

    #[test]
    fn what_is_learnt_takes_effect_and_is_forgotten() -> Tested {
        let (engine, path) = (engine()?, folder("effect"));
        let control = control(&engine)?;
        let mut first = memory(&path)?;
        assert!(first.adapter(engine.model())?.is_none());
        let mut of = first.consolidation(&engine, &control, &options())?;
        ask(&mut of);
        // Interrupted: after the questions, and in the middle of the training.
        assert!(first.save_consolidation(&of)?);
        let mut n = 0;
        while n < 2 * SAVED {
            n = of.step()?.map_or(usize::MAX, |progress| progress.done);
            assert!(first.save_consolidation(&of)?);
        }
        drop(first);
        let mut memory = Memory::open(&path, &MemoryOptions::default())?;
        let mut again = memory.consolidation(&engine, &control, &options())?;
        assert_eq!(again.n_written, NAMES.len());
        let progress = again.step()?.ok_or("it has not ended")?;
        assert_eq!((progress.stage, progress.done), (Stage::Training, n));
        while again.step()?.is_some() {}
        while of.step()?.is_some() {}
        let adapters = [&of, &again].map(|of| of.trainer.as_ref().map(|t| t.adapter().to_bytes()));
        let [Some(Ok(whole)), Some(Ok(interrupted))] = adapters else {
            return Err("no adapters".into());
        };
        assert_eq!(whole, interrupted);

        let report = memory.conclude(&again)?;
        assert_eq!(report.outcome, Ok(1), "{report:?}");
        assert!(report.n_said > report.n_said_alone && report.n_asked == NAMES.len());
        assert_eq!(memory.n_unconsolidated(), 0);
        drop(memory);
        let mut memory = Memory::open(&path, &MemoryOptions::default())?;
        assert_eq!(memory.versions().len(), 1);
        let adapter = memory.adapter(engine.model())?.ok_or("none in effect")?;
        assert_eq!(adapter.to_bytes()?, whole);

        // What corrects something is consolidated again, from the version in effect.
        memory.remember(
            NewEntry::correction("The town of Fanix is Kolmar now."),
            None,
        )?;
        assert_eq!(memory.n_unconsolidated(), 2);
        let of = memory.consolidation(&engine, &control, &options())?;
        assert!(of.in_effect.is_some());
        // What has not changed is not asked about again.
        assert_eq!(
            (of.entries.len(), of.n_written),
            (NAMES.len(), NAMES.len() - 1)
        );
        // Who forgets, forgets what was learnt of it, too.
        let number = memory.entries()[0].number;
        memory.forget(number)?;
        assert!(!memory.save_consolidation(&of)?);
        assert!(memory.conclude(&of)?.outcome.is_err());
        assert!(memory.versions().is_empty());
        assert!(matches!(memory.roll_back(), Err(MemoryError::NoVersion)));
        drop(memory);
        for file in std::fs::read_dir(&path)? {
            let name = file?.file_name().into_string().unwrap_or_default();
            assert!(!name.starts_with("memory-adapter"), "{name}");
            assert!(!name.starts_with("memory-questions"), "{name}");
        }
        std::fs::remove_dir_all(&path)?;
        Ok(())
    }

    #[test]
    fn what_helps_nobody_takes_no_effect() -> Tested {
        let (engine, path) = (engine()?, folder("none"));
        let mut memory = memory(&path)?;
        let mut options = options();
        options.train.epochs = 0.1;
        let mut of = memory.consolidation(&engine, &control(&engine)?, &options)?;
        ask(&mut of);
        assert!(of.report().outcome.is_err(), "it has not ended");
        of.step()?;
        assert!(of.report().outcome.is_err(), "nothing was measured yet");
        while of.step()?.is_some() {}
        let report = memory.conclude(&of)?;
        assert!(report.outcome.is_err_and(|why| why.contains("too few")));
        assert!(memory.versions().is_empty() && memory.adapter(engine.model())?.is_none());
        // It is not tried again before something changes.
        assert_eq!(memory.n_unconsolidated(), 0);
        drop(memory);
        std::fs::remove_dir_all(&path)?;
        Ok(())
    }
}
