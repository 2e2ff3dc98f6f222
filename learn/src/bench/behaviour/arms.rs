//! Ways of being taught.

use crate::bench::behaviour::facts::{Fact, conversation};
use crate::bench::behaviour::{BehaviourError, BehaviourOptions};
use crate::clock::Timer;
use crate::memory::{
    ConsolidationOptions, Memory, MemoryOptions, NewEntry, Notes, NotesOptions, Vectors,
};
use crate::sona::{Sona, Trajectory};
use crate::train::{Example, TrainOptions, Trainer};
use ruvllm::lora::Adapter;
use ruvllm::{Engine, Session, SessionOptions, Tokenizer};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Tokens of a context that stay free for a question and its answers.
const FREE: usize = 192;

/// A way of being taught.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BehaviourArm {
    /// The model alone.
    Nothing,
    /// All conversations in the context, the latest of them where it is too short.
    Context,
    /// Notes of a [`Memory`], found by words and by vectors of the model.
    Retrieval,
    /// Notes of a [`Memory`], found by words alone.
    Words,
    /// What [`Sona`] learnt and let take effect, with its defaults.
    Adapter,
    /// Notes and what [`Sona`] learnt.
    Both,
    /// An adapter of [`Trainer`] on the conversations, with its defaults and without a bound.
    Training,
    /// What a [`Memory`] was [consolidated](crate::memory::Consolidation) to, if it takes effect.
    Consolidation,
}

impl BehaviourArm {
    /// All with their names.
    pub const ALL: [(&'static str, BehaviourArm); 8] = [
        ("nothing", BehaviourArm::Nothing),
        ("context", BehaviourArm::Context),
        ("retrieval", BehaviourArm::Retrieval),
        ("words", BehaviourArm::Words),
        ("adapter", BehaviourArm::Adapter),
        ("both", BehaviourArm::Both),
        ("training", BehaviourArm::Training),
        ("consolidation", BehaviourArm::Consolidation),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        let mut all = BehaviourArm::ALL.iter();
        all.find(|(_, arm)| *arm == self)
            .map_or("", |(name, _)| name)
    }

    fn has_notes(self) -> bool {
        use BehaviourArm::{Both, Retrieval, Words};
        matches!(self, Retrieval | Words | Both)
    }

    fn has_sona(self) -> bool {
        matches!(self, BehaviourArm::Adapter | BehaviourArm::Both)
    }
}

/// Something that the user says, and what it means.
#[derive(Clone, Debug)]
pub(super) struct Taught {
    said: String,
    is_correction: bool,
}

impl Taught {
    /// Lessons of facts: all are taught, some of them wrong, then those are corrected.
    pub(super) fn of(facts: &[Fact]) -> Vec<Taught> {
        let taught = facts.iter().map(|fact| Taught {
            said: fact.taught(),
            is_correction: false,
        });
        let corrected = facts.iter().filter_map(|fact| {
            Some(Taught {
                said: fact.corrected()?,
                is_correction: true,
            })
        });
        taught.chain(corrected).collect()
    }
}

/// A folder of its own, which is gone afterwards.
struct Folder(PathBuf);

/// Names that are tried before it is given up.
const NAMES: u64 = 1000;

impl Folder {
    /// Makes one in `place` that was not there before, whatever others make there.
    fn new(place: &Path) -> Result<Folder, BehaviourError> {
        static MADE: AtomicU64 = AtomicU64::new(0);
        for _ in 0..NAMES {
            let number = MADE.fetch_add(1, Ordering::Relaxed);
            let name = format!("ruvllm-behaviour-{}-{number}", std::process::id());
            let path = place.join(name);
            match std::fs::create_dir(&path) {
                Ok(()) => return Ok(Folder(path)),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(source) => return Err(BehaviourError::Folder { path, source }),
            }
        }
        Err(BehaviourError::Folder {
            path: place.to_owned(),
            source: ErrorKind::AlreadyExists.into(),
        })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A model that is taught in one of the ways.
pub(super) struct Pupil<'a> {
    pub(super) arm: BehaviourArm,
    engine: Engine,
    tokenizer: &'a Tokenizer,
    options: &'a BehaviourOptions,
    /// Text on which nothing may change.
    control: &'a [u32],
    lessons: Vec<Taught>,
    /// What every question follows.
    stem: Session,
    memory: Option<(Memory, Option<Vectors>)>,
    sona: Option<Sona>,
    adapter: Option<Arc<Adapter>>,
    /// After what uses it.
    _folder: Option<Folder>,
}

impl<'a> Pupil<'a> {
    pub(super) fn new(
        arm: BehaviourArm,
        engine: &Engine,
        tokenizer: &'a Tokenizer,
        control: &'a [u32],
        options: &'a BehaviourOptions,
    ) -> Result<Pupil<'a>, BehaviourError> {
        let remembers = arm.has_notes() || arm == BehaviourArm::Consolidation;
        let folder = if remembers || arm.has_sona() {
            Some(Folder::new(&options.folder)?)
        } else {
            None
        };
        let (mut memory, mut sona) = (None, None);
        if let Some(Folder(path)) = &folder {
            if remembers {
                let memory_of = Memory::open(path, &MemoryOptions::default())?;
                let vectors = match arm {
                    BehaviourArm::Words | BehaviourArm::Consolidation => None,
                    _ => Some(Vectors::new(engine)?),
                };
                memory = Some((memory_of, vectors));
            }
            if arm.has_sona() {
                let new = Sona::builder().keep_text(true).open(path, engine)?;
                new.calibrate(control)?;
                sona = Some(new);
            }
        }
        Ok(Pupil {
            arm,
            engine: engine.clone(),
            tokenizer,
            options,
            control,
            lessons: Vec::new(),
            stem: stem(engine, tokenizer, options.context(engine), &[])?,
            memory,
            sona,
            adapter: None,
            _folder: folder,
        })
    }

    /// Teaches; returns the seconds that it took.
    pub(super) fn teach(&mut self, lessons: &[Taught]) -> Result<f64, BehaviourError> {
        let before = Timer::start();
        let n_known = self.lessons.len();
        self.lessons.extend_from_slice(lessons);
        if let Some((memory, vectors)) = &mut self.memory {
            for lesson in lessons {
                let entry = NewEntry {
                    is_correction: lesson.is_correction,
                    ..NewEntry::taught(lesson.said.as_str())
                };
                memory.remember(entry, vectors.as_ref())?;
            }
        }
        if let Some(sona) = &self.sona {
            for (i, lesson) in lessons.iter().enumerate() {
                let tokens = self
                    .tokenizer
                    .encode(&conversation(&lesson.said), true, false);
                sona.record(Trajectory {
                    session_id: format!("conversation {}", n_known + i),
                    n_prompt: tokens.len(),
                    tokens,
                    ..Default::default()
                })?;
            }
            sona.work()?;
        }
        match self.arm {
            BehaviourArm::Context => self.read()?,
            BehaviourArm::Training => {
                let texts = self.lessons.iter().map(|lesson| conversation(&lesson.said));
                let examples = texts.map(|text| {
                    let tokens = self.tokenizer.encode(&text, true, false);
                    Example::text(&tokens)
                });
                self.adapter = Some(self.train(
                    examples.collect(),
                    TrainOptions {
                        held_out: 0.0,
                        ..Default::default()
                    },
                )?);
            }
            BehaviourArm::Consolidation => {
                let Some((memory, _)) = &mut self.memory else {
                    return Ok(0.0);
                };
                let mut options = ConsolidationOptions::default();
                options.train.epochs = self.options.epochs;
                options.train.max_divergence = self.options.max_divergence;
                let mut of = memory.consolidation(&self.engine, self.control, &options)?;
                while of.step()?.is_some() {}
                memory.conclude(&of)?;
                self.adapter = memory.adapter(self.engine.model())?;
            }
            _ => {}
        }
        Ok(before.elapsed().as_secs_f64())
    }

    /// Reads all conversations, the latest of them where there are too many.
    fn read(&mut self) -> Result<(), BehaviourError> {
        let texts = self.lessons.iter().map(|lesson| conversation(&lesson.said));
        let texts: Vec<Vec<u32>> = texts
            .map(|text| self.tokenizer.encode(&text, false, false))
            .collect();
        let n_ctx = self.options.context(&self.engine);
        let mut room = n_ctx.saturating_sub(FREE);
        let fits = texts.iter().rev().take_while(|text| {
            let fits = text.len() <= room;
            room -= if fits { text.len() } else { 0 };
            fits
        });
        let first = texts.len() - fits.count();
        self.stem = stem(
            &self.engine,
            self.tokenizer,
            n_ctx,
            &texts[first..].concat(),
        )?;
        Ok(())
    }

    /// An adapter that is trained on examples.
    fn train(
        &self,
        examples: Vec<Example>,
        options: TrainOptions,
    ) -> Result<Arc<Adapter>, BehaviourError> {
        let mut trainer = Trainer::new(&self.engine, &examples, &[], &options)?;
        while trainer.step()?.is_some() {}
        Ok(Arc::new(trainer.adapter().clone()))
    }

    /// What the model is told before `question`, and the session that then continues.
    pub(super) fn prepare(&mut self, question: &str) -> Result<(Notes, Session), BehaviourError> {
        let notes = match &mut self.memory {
            Some((memory, vectors)) if self.arm.has_notes() => {
                let options = NotesOptions::default();
                memory.notes(question, vectors.as_ref(), self.tokenizer, &options)?
            }
            _ => Notes::default(),
        };
        let mut session = self.stem.fork()?;
        let adapter = match &self.sona {
            Some(sona) => sona.adapter(&self.tokenizer.encode(question, true, false))?,
            None => self.adapter.clone(),
        };
        if let Some(adapter) = adapter {
            session.adapters().attach(adapter, 1.0)?;
        }
        Ok((notes, session))
    }

    /// Whether an entry with this text is among `notes`.
    pub(super) fn tells(&self, notes: &Notes, text: &str) -> Option<bool> {
        let (memory, _) = self.memory.as_ref().filter(|_| self.arm.has_notes())?;
        let mut told = notes.numbers.iter().filter_map(|&n| memory.entry(n));
        Some(told.any(|entry| entry.text == text))
    }

    /// Bytes that it keeps of what it was taught.
    pub(super) fn bytes(&self) -> Result<u64, BehaviourError> {
        let memory = self.memory.as_ref().map_or(0, |(memory, _)| memory.bytes());
        let adapter = self.adapter.as_ref().map_or(0, |adapter| adapter.bytes());
        let versions = match &self.sona {
            Some(sona) => sona.status()?.version_bytes,
            None => 0,
        };
        let context = match self.arm {
            BehaviourArm::Context => self.stem.state().memory().kv.total(),
            _ => 0,
        };
        Ok(memory + adapter + versions + context)
    }
}

/// A session that has read the token that texts begin with, then `tokens`.
fn stem(
    engine: &Engine,
    tokenizer: &Tokenizer,
    n_ctx: usize,
    tokens: &[u32],
) -> Result<Session, BehaviourError> {
    let mut session = engine.session_with(&SessionOptions {
        n_ctx: Some(n_ctx),
        ..Default::default()
    })?;
    let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
    let tokens: Vec<u32> = bos.into_iter().chain(tokens.iter().copied()).collect();
    if !tokens.is_empty() {
        session.prefill(&tokens)?;
    }
    Ok(session)
}
