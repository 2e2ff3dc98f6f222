//! Learning from what is recorded.

use crate::learn::{LearnError, Learner, Learning, Pause, Slices};
use crate::sona::SonaError;
use crate::sona::batch::{Outcome, Worker, learn_batch};
use crate::sona::builder::SonaBuilder;
use crate::sona::event::{Event, EventKind};
use crate::sona::folder::{FolderStatus, SonaFolder, check_score};
use crate::sona::topic::choose;
use crate::sona::trajectory::Trajectory;
use ruvllm::Session;
use ruvllm::lora::Adapter;
use ruvllm::{Engine, SessionOptions};
use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Longest context that text is learnt in, in tokens.
const CONTEXT: usize = 512;
/// Most trajectories that are learnt before they are judged.
const BATCH: usize = 64;
/// Most tokens of trajectories that wait to be learnt.
const PENDING_TOKENS: usize = 4 << 20;
/// Latest requests whose tokens are compared with those of the next one.
const RECENT: usize = 8;

impl SonaBuilder {
    /// Opens a folder, or makes it, to learn with the model of `engine`.
    ///
    /// # Errors
    /// As [`SonaFolder::open`]; if an option is invalid, what was learnt belongs to another model,
    /// or there is no memory for a session.
    pub fn open(self, path: impl AsRef<Path>, engine: &Engine) -> Result<Sona, SonaError> {
        let sizes = [
            ("background_min_samples", self.background_min_samples),
            ("max_pending_samples", self.max_pending_samples),
        ];
        for (option, value) in sizes {
            if value == 0 {
                return Err(SonaError::Option {
                    option,
                    value: 0.0,
                    expected: "at least 1",
                });
            }
        }
        if !(0.0..=1.0).contains(&self.quality_threshold) {
            let value = f64::from(self.quality_threshold);
            return Err(SonaError::Option {
                option: "quality_threshold",
                value,
                expected: "0 to 1",
            });
        }
        let folder = SonaFolder::open(path, &self.folder)?;
        let n_ctx = Some(CONTEXT.min(engine.model().hparams().n_ctx_train.max(2)));
        let mut session = engine.session_with(&SessionOptions {
            n_ctx,
            ..Default::default()
        })?;
        let (learner, generation) = in_effect(&folder, &self, &mut session)?;
        let working = working(&folder, &self, &learner, &mut session)?;
        let pending: VecDeque<Trajectory> = folder.pending()?.into();
        let state = State {
            folder,
            learner,
            generation,
            pending,
            recent: VecDeque::new(),
            n_dropped: 0,
            failure: None,
        };
        let worker = Worker { session, working };
        Ok(Sona {
            shared: Arc::new(Shared {
                engine: engine.clone(),
                options: self,
                state: Mutex::new(state),
                worker: Mutex::new(worker),
                adapters: Mutex::default(),
                owners: AtomicUsize::new(0),
            }),
        })
    }
}

/// A learner that goes on by itself; a handle that is cheap to clone. See the [module](super).
///
/// **Gate.** One in four of the trajectories that are learnt together is kept back. What was learnt
/// takes effect as a new version only if the kept ones became likelier than with the version in
/// effect, and the bound on control text holds; if they became less likely than for the model
/// alone, it is thrown away. Until then it is learnt on, without effect.
#[derive(Clone)]
pub struct Sona {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub(super) engine: Engine,
    pub(super) options: SonaBuilder,
    state: Mutex<State>,
    /// Locked while something is learnt; before `state`, where both are.
    worker: Mutex<Worker>,
    /// Adapters of a version, by topic.
    adapters: Mutex<(u64, Vec<Chosen>)>,
    /// Calls that wait for the worker to change what is learnt: learning gives up for them.
    owners: AtomicUsize,
}

/// A topic, or none, and the adapter that a request has with it, if it has one.
type Chosen = (Option<u32>, Option<Arc<Adapter>>);

pub(super) struct State {
    pub(super) folder: SonaFolder,
    /// The version in effect.
    learner: Arc<Learner>,
    generation: u64,
    pub(super) pending: VecDeque<Trajectory>,
    /// Request, session, number and tokens of the latest.
    recent: VecDeque<(String, String, u64, Vec<u32>)>,
    n_dropped: u64,
    pub(super) failure: Option<String>,
}

impl std::fmt::Debug for Sona {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sona {{ generation: {}, .. }}", self.generation())
    }
}

impl Sona {
    /// Options, with their defaults.
    pub fn builder() -> SonaBuilder {
        SonaBuilder::default()
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared.state)
    }

    /// Locks the worker; what is being learnt is given up for it, and learnt again later.
    fn owner(&self) -> MutexGuard<'_, Worker> {
        self.shared.owners.fetch_add(1, Ordering::Relaxed);
        let worker = lock(&self.shared.worker);
        self.shared.owners.fetch_sub(1, Ordering::Relaxed);
        worker
    }

    /// Whether a call waits for the worker.
    pub(super) fn has_owner(&self) -> bool {
        self.shared.owners.load(Ordering::Relaxed) > 0
    }

    /// The version in effect; 0 is the model alone. Changes when another one takes effect.
    pub fn generation(&self) -> u64 {
        self.state().generation
    }

    /// The version in effect, for [`Learning::set_learner`], with the adapter of no
    /// [topic](Sona::topic).
    pub fn learner(&self) -> Learner {
        Learner::clone(&self.state().learner)
    }

    /// The topic whose adapter of inner layers helps a prompt, if one does: the topic to whose text
    /// it belongs, by how often it uses each token, unless a sample of it speaks against its
    /// adapter by two standard errors. The sample, one in 128 of the prompt's tokens, is read
    /// with the adapter and without it side by side, if it is at least eight tokens.
    ///
    /// # Errors
    /// If the pass fails.
    pub fn topic(&self, prompt: &[u32]) -> Result<Option<u32>, SonaError> {
        let learner = Arc::clone(&self.state().learner);
        choose(&self.shared.engine, &learner, prompt)
    }

    /// The version in effect as an adapter of the output head, and of inner layers as far as they
    /// help a `prompt` ([`Sona::topic`]), for
    /// [`Request::adapter`](ruvllm::scheduler::Request::adapter); nothing while it changes nothing. As
    /// long as the version is in effect, the same topic has the same adapter.
    ///
    /// # Errors
    /// As [`Sona::topic`], or if the learner belongs to another model.
    pub fn adapter(&self, prompt: &[u32]) -> Result<Option<Arc<Adapter>>, SonaError> {
        let (learner, generation) = {
            let state = self.state();
            (Arc::clone(&state.learner), state.generation)
        };
        let topic = choose(&self.shared.engine, &learner, prompt)?;
        let mut made = lock(&self.shared.adapters);
        if made.0 != generation {
            *made = (generation, Vec::new());
        }
        if let Some((_, adapter)) = made.1.iter().find(|(of, _)| *of == topic) {
            return Ok(adapter.clone());
        }
        let mut learner = Learner::clone(&learner);
        learner.set_topic(topic);
        let adapter = match learner.to_adapter(self.shared.engine.model()) {
            Ok(adapter) => Some(Arc::new(adapter)),
            Err(LearnError::NothingLearnt | LearnError::NoEffect) => None,
            Err(error) => return Err(error.into()),
        };
        made.1.push((topic, adapter.clone()));
        Ok(adapter)
    }

    /// Records a request, and learns from its tokens in time; returns its number. The first tokens
    /// that the latest requests of its session had are not learnt again.
    ///
    /// # Errors
    /// If its numbers do not fit together, or it cannot be written.
    pub fn record(&self, mut trajectory: Trajectory) -> Result<u64, SonaError> {
        let options = &self.shared.options;
        let t = &mut trajectory;
        let wrong = |what: String| SonaError::Trajectory { what };
        let n = t
            .n_prompt
            .checked_add(t.n_answer)
            .ok_or_else(|| wrong("has too many tokens".into()))?;
        if !t.tokens.is_empty() && t.tokens.len() != n {
            return Err(wrong(format!(
                "has {} tokens, its prompt and answer {n}",
                t.tokens.len()
            )));
        }
        let n_vocab = self.shared.engine.model().hparams().n_vocab;
        if let Some(token) = t.tokens.iter().find(|&&token| token as usize >= n_vocab) {
            return Err(wrong(format!(
                "has the token {token}, the vocabulary {n_vocab}"
            )));
        }
        if let Some(score) = t.quality_score {
            check_score(score)?;
        }
        let mut state = self.state();
        t.tenant.clone_from(&options.tenant);
        t.generation = state.generation;
        let known = |earlier: &[u32]| {
            earlier
                .iter()
                .zip(&t.tokens)
                .take_while(|(a, b)| a == b)
                .count()
        };
        let theirs = state
            .recent
            .iter()
            .filter(|(_, session, ..)| *session == t.session_id);
        let n_known = theirs.map(|(.., tokens)| known(tokens)).max().unwrap_or(0);
        t.n_known = t.n_known.max(n_known);
        state.folder.record(t, options.keep_text)?;
        let number = t.number;
        state.recent.push_back((
            t.request_id.clone(),
            t.session_id.clone(),
            number,
            t.tokens.clone(),
        ));
        while state.recent.len() > RECENT {
            state.recent.pop_front();
        }
        if !t.tokens.is_empty() {
            state.pending.push_back(trajectory);
            let mut n_tokens: usize = state.pending.iter().map(|found| found.tokens.len()).sum();
            while state.pending.len() > options.max_pending_samples || n_tokens > PENDING_TOKENS {
                n_tokens -= state
                    .pending
                    .pop_front()
                    .map_or(n_tokens, |found| found.tokens.len());
                state.n_dropped += 1;
            }
        }
        Ok(number)
    }

    /// Rates the answer to a request, 0 to 1.
    ///
    /// # Errors
    /// If there is no such request, or the rating cannot be written.
    pub fn rate(&self, request_id: &str, score: f32) -> Result<(), SonaError> {
        let mut state = self.state();
        let recent = state
            .recent
            .iter()
            .rev()
            .find(|(request, ..)| request == request_id)
            .map(|(_, _, number, _)| *number);
        let mut number = recent;
        if number.is_none() {
            state.folder.trajectories(|found| {
                if found.request_id == request_id {
                    number = Some(found.number);
                }
            })?;
        }
        let Some(number) = number else {
            return Err(SonaError::NoSuchRequest {
                request_id: request_id.into(),
            });
        };
        state.folder.rate(number, score)?;
        if let Some(found) = state
            .pending
            .iter_mut()
            .find(|found| found.number == number)
        {
            found.quality_score = Some(score);
        }
        Ok(())
    }

    /// Reads control text, on which nothing that is learnt may change the model much, as
    /// [`Learning::calibrate`] does. Takes effect at once.
    ///
    /// # Errors
    /// As [`Learning::calibrate`], and if the folder cannot be written.
    pub fn calibrate(&self, tokens: &[u32]) -> Result<(), SonaError> {
        let mut worker = self.owner();
        let learner = self.learner();
        worker.session.set_learner(learner)?;
        let outcome = worker.session.calibrate(tokens);
        let learner = worker.session.take_learner();
        outcome?;
        let mut learner = learner.ok_or(LearnError::NotLearning)?;
        learner.limit_layers(&mut worker.session)?;
        let learner = ready(&mut worker.session, learner, &self.shared.options)?;
        self.begin_version(&mut worker, EventKind::Calibrated, learner)
    }

    /// Saves the version in effect as a file that [`Sona::import`] and [`Learner::open`] read.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn export(&self, path: impl AsRef<Path>) -> Result<(), LearnError> {
        let learner = Arc::clone(&self.state().learner);
        learner.save(path)
    }

    /// Takes what was exported as the version in effect. The bound on forgetting holds for its
    /// control text from then on.
    ///
    /// # Errors
    /// As [`Learner::open`], and if the folder cannot be written.
    pub fn import(&self, path: impl AsRef<Path>) -> Result<(), SonaError> {
        let mut learner = Learner::open(path, self.shared.engine.model())?;
        let mut worker = self.owner();
        learner.limit_layers(&mut worker.session)?;
        let learner = ready(&mut worker.session, learner, &self.shared.options)?;
        self.begin_version(&mut worker, EventKind::Imported, learner)
    }

    /// A new version that no trajectory was learnt for.
    fn begin_version(
        &self,
        worker: &mut Worker,
        kind: EventKind,
        learner: Learner,
    ) -> Result<(), SonaError> {
        let mut state = self.state();
        let version = state.folder.next_version();
        let divergence = learner.divergence();
        let event = Event::new(kind, version, state.folder.through());
        state.folder.push(Event {
            divergence,
            ..event
        })?;
        learner.save(state.folder.version_path(version))?;
        let learner = Arc::new(learner);
        (state.learner, state.generation) = (Arc::clone(&learner), version);
        worker.working = learner;
        worker.working.save(state.folder.working_path())?;
        state.folder.prune_versions();
        Ok(())
    }

    /// Goes back to a version; see [`SonaFolder::rollback`].
    ///
    /// # Errors
    /// As [`SonaFolder::rollback`].
    pub fn rollback(&self, version: u64) -> Result<(), SonaError> {
        let mut worker = self.owner();
        let mut state = self.state();
        state.folder.rollback(version)?;
        state.pending.clear();
        self.reload(&mut worker, &mut state)
    }

    /// Forgets a session, and learns again what is left of others in time; see
    /// [`SonaFolder::forget`].
    ///
    /// # Errors
    /// As [`SonaFolder::forget`].
    pub fn forget(&self, session_id: &str) -> Result<usize, SonaError> {
        let mut worker = self.owner();
        let mut state = self.state();
        let n = state.folder.forget(session_id)?;
        state
            .recent
            .retain(|(_, session, ..)| session != session_id);
        // What was not stored is pending only here.
        let mut pending = state.folder.pending()?;
        let others = state
            .pending
            .iter()
            .filter(|found| found.session_id != session_id);
        pending.extend(
            others
                .filter(|found| pending.iter().all(|known| known.number != found.number))
                .cloned()
                .collect::<Vec<_>>(),
        );
        pending.sort_by_key(|found| found.number);
        state.pending = pending.into();
        self.reload(&mut worker, &mut state)?;
        Ok(n)
    }

    /// Loads what the folder says is in effect.
    fn reload(&self, worker: &mut Worker, state: &mut State) -> Result<(), SonaError> {
        let options = &self.shared.options;
        let (learner, generation) = in_effect(&state.folder, options, &mut worker.session)?;
        worker.working = working(&state.folder, options, &learner, &mut worker.session)?;
        (state.learner, state.generation) = (learner, generation);
        Ok(())
    }

    /// Tells that an adapter was trained on the trajectories; see [`Sona::is_training_due`].
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn trained(&self) -> Result<(), SonaError> {
        self.state().folder.trained()
    }

    /// Whether the ratings since the last training add up to the threshold of the deep loop.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn is_training_due(&self) -> Result<bool, SonaError> {
        Ok(self.status()?.quality >= self.shared.options.deep_trigger_threshold)
    }

    /// What is in the folder.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn status(&self) -> Result<FolderStatus, SonaError> {
        self.state().folder.status()
    }

    /// All events, in order.
    pub fn history(&self) -> Vec<Event> {
        self.state().folder.history().to_vec()
    }

    /// Trajectories that wait to be learnt, and how many were not learnt since there were too many.
    pub fn n_pending(&self) -> (usize, u64) {
        let state = self.state();
        (state.pending.len(), state.n_dropped)
    }

    /// Why the background failed the last time it worked, if it did.
    pub fn failure(&self) -> Option<String> {
        self.state().failure.clone()
    }

    /// Learns all that is pending, however little it is; for the end of a program, or where there
    /// are no threads.
    ///
    /// # Errors
    /// If a pass fails, or the folder cannot be written.
    pub fn work(&self) -> Result<(), SonaError> {
        self.work_in_slices(&mut |_| true)
    }

    /// The same in slices, for programs that have no thread to spare: after each, `pause` gets the
    /// time that it took, and ends the work with `false`; then the batch at hand stays pending.
    ///
    /// # Errors
    /// As [`Sona::work`].
    pub fn work_in_slices(&self, pause: &mut dyn FnMut(Duration) -> bool) -> Result<(), SonaError> {
        while self.learn(1, &mut *pause)? {}
        self.state().folder.sync()
    }

    /// Learns a batch if at least `least` trajectories are pending; returns whether it did.
    pub(super) fn learn(&self, least: usize, pause: Pause<'_>) -> Result<bool, SonaError> {
        let mut worker = lock(&self.shared.worker);
        let (batch, before) = {
            let state = self.state();
            if state.pending.len() < least {
                return Ok(false);
            }
            (
                state
                    .pending
                    .iter()
                    .take(BATCH)
                    .cloned()
                    .collect::<Vec<_>>(),
                Arc::clone(&state.learner),
            )
        };
        let mut pause = |took| !self.has_owner() && pause(took);
        let slices = &mut Slices::new(&mut pause);
        let Some(outcome) =
            learn_batch(&mut worker, &batch, &before, &self.shared.options, slices)?
        else {
            return Ok(false);
        };
        let Outcome {
            kind,
            candidate,
            working,
            mut event,
        } = outcome;
        let mut state = self.state();
        if kind == EventKind::Accepted {
            event.version = state.folder.next_version();
        } else {
            event.version = state.generation;
        }
        event.through = batch
            .last()
            .map_or(0, |last| last.number)
            .max(state.folder.through());
        let version = event.version;
        state.folder.push(event)?;
        state
            .pending
            .retain(|found| batch.iter().all(|learnt| learnt.number != found.number));
        working.save(state.folder.working_path())?;
        worker.working = working;
        if kind == EventKind::Accepted {
            candidate.save(state.folder.version_path(version))?;
            (state.learner, state.generation) = (candidate, version);
            state.folder.prune_versions();
        }
        Ok(true)
    }
}

/// A learner whose products are there, so that it has its effect; it learns and generates as the
/// options say.
fn ready(
    session: &mut Session,
    mut learner: Learner,
    options: &SonaBuilder,
) -> Result<Learner, SonaError> {
    if let Some(rate) = options.instant_lr {
        learner.set_rate(rate)?;
    }
    if let Some(on) = options.mixture {
        learner.set_generate_with_mixture(on);
    }
    session.set_learner(learner)?;
    session
        .take_learner()
        .ok_or_else(|| LearnError::NotLearning.into())
}

/// The version in effect, and its number.
fn in_effect(
    folder: &SonaFolder,
    options: &SonaBuilder,
    session: &mut Session,
) -> Result<(Arc<Learner>, u64), SonaError> {
    let version = folder.version();
    let learner = match version {
        0 => Learner::new(session.model(), &options.learner)?,
        version => Learner::open(folder.version_path(version), session.model())?,
    };
    Ok((Arc::new(ready(session, learner, options)?), version))
}

/// What was learnt, whether or not it is in effect.
fn working(
    folder: &SonaFolder,
    options: &SonaBuilder,
    in_effect: &Arc<Learner>,
    session: &mut Session,
) -> Result<Arc<Learner>, SonaError> {
    let path = folder.working_path();
    if !path.exists() {
        return Ok(Arc::clone(in_effect));
    }
    let learner = Learner::open(path, session.model())?;
    Ok(Arc::new(ready(session, learner, options)?))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
