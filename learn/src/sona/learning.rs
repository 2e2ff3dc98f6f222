//! Learning from what is recorded.

use crate::clock::Timer;
use crate::learn::{
    Evidence, LearnError, Learner, LearnerOptions, Learning, Losses, Pause, Slices, UPDATE_TOKENS,
    learning,
};
use crate::sona::SonaError;
use crate::sona::event::{Event, EventKind};
use crate::sona::folder::{FolderOptions, FolderStatus, SonaFolder, check_score, session_hash};
use crate::sona::trajectory::Trajectory;
use ruvllm::Session;
use ruvllm::compute::TokenKind;
use ruvllm::engine::Engine;
use ruvllm::engine::Outputs;
use ruvllm::engine::Slot;
use ruvllm::engine::{CancelToken, SessionOptions};
use ruvllm::lora::Adapter;
use ruvllm::session::log_sum;
use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Tokens of a pass of the background, of which other passes wait for one at most, and of what text
/// is judged by.
const SLICE: usize = 16;
/// Longest context that text is learnt in, in tokens.
const CONTEXT: usize = 512;
/// Most trajectories that are learnt before they are judged.
const BATCH: usize = 64;
/// One in so many trajectories is kept from what is learnt of a batch, to judge it by: what is learnt
/// of fewer has no effect yet.
pub const JUDGED: usize = 4;
/// Most tokens of trajectories that wait to be learnt.
const PENDING_TOKENS: usize = 4 << 20;
/// Latest requests whose tokens are compared with those of the next one.
const RECENT: usize = 8;
/// A sample of one in so many tokens of a prompt chooses its topic, and how many tokens it has at
/// least and at most.
const SAMPLED: usize = 128;
const LEAST_SAMPLE: usize = 8;
const LONGEST_SAMPLE: usize = 64;
/// While others compute, it rests so many times as long as it computed: it takes at most 2 % of the
/// time.
const BUSY_REST: u32 = 49;
/// Time after which one that rests looks whether its owner waits.
const NAP: Duration = Duration::from_millis(10);
/// Longest time between two attempts of the background, after failures.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Options of a [`Sona`]; begins with [`Sona::builder`].
#[derive(Clone, Debug)]
pub struct SonaBuilder {
    tenant: String,
    keep_text: bool,
    background_interval_ms: u64,
    background_min_samples: usize,
    max_pending_samples: usize,
    quality_threshold: f32,
    deep_trigger_threshold: f64,
    instant_lr: Option<f32>,
    inner_layers: bool,
    mixture: Option<bool>,
    folder: FolderOptions,
    learner: LearnerOptions,
}

impl SonaBuilder {
    /// Whom the folder belongs to. Default: nobody.
    #[must_use]
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = tenant.into();
        self
    }

    /// Whether tokens of requests are stored, so that others can be learnt again after a session is
    /// forgotten, and adapters trained. Default: no.
    #[must_use]
    pub fn keep_text(mut self, keep: bool) -> Self {
        self.keep_text = keep;
        self
    }

    /// Milliseconds between two looks of the background at what is pending. Default 100.
    #[must_use]
    pub fn background_interval_ms(mut self, ms: u64) -> Self {
        self.background_interval_ms = ms;
        self
    }

    /// Trajectories from which on the background learns. Default 10.
    #[must_use]
    pub fn background_min_samples(mut self, n: usize) -> Self {
        self.background_min_samples = n;
        self
    }

    /// Most trajectories that wait to be learnt: when there are so many, the background does not
    /// rest until they are learnt, and for each further one the oldest is not learnt. All that
    /// wait have at most four million tokens. Default 1000.
    #[must_use]
    pub fn max_pending_samples(mut self, n: usize) -> Self {
        self.max_pending_samples = n;
        self
    }

    /// The rating from which on an answer is learnt; of a request with a worse one nothing is.
    /// Default 0.5.
    #[must_use]
    pub fn quality_threshold(mut self, threshold: f32) -> Self {
        self.quality_threshold = threshold;
        self
    }

    /// The sum of ratings from which on [`Sona::is_training_due`]. Default 100.
    #[must_use]
    pub fn deep_trigger_threshold(mut self, threshold: f64) -> Self {
        self.deep_trigger_threshold = threshold;
        self
    }

    /// Factor on the steps of what is learnt from now on. Default: what the folder's learner has,
    /// at first 1.
    #[must_use]
    pub fn instant_lr(mut self, rate: f32) -> Self {
        self.instant_lr = Some(rate);
        self
    }

    /// Whether inner layers are adapted, too, by backpropagation: seven more prefills of what is
    /// learnt, in the background. It takes control text of at least 1,024 tokens. Default: yes.
    #[must_use]
    pub fn inner_layers(mut self, on: bool) -> Self {
        self.inner_layers = on;
        self
    }

    /// Whether text is generated with the mixture of all experts, by which what is learnt is then
    /// judged. Default: as the folder's learner has it, at first no.
    #[must_use]
    pub fn mixture(mut self, on: bool) -> Self {
        self.mixture = Some(on);
        self
    }

    /// Options of the learner, where a folder has none yet.
    #[must_use]
    pub fn learner(mut self, options: LearnerOptions) -> Self {
        self.learner = options;
        self
    }

    /// What the folder may hold.
    #[must_use]
    pub fn folder(mut self, options: FolderOptions) -> Self {
        self.folder = options;
        self
    }

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
    shared: Arc<Shared>,
}

struct Shared {
    engine: Engine,
    options: SonaBuilder,
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

struct State {
    folder: SonaFolder,
    /// The version in effect.
    learner: Arc<Learner>,
    generation: u64,
    pending: VecDeque<Trajectory>,
    /// Request, session, number and tokens of the latest.
    recent: VecDeque<(String, String, u64, Vec<u32>)>,
    n_dropped: u64,
    failure: Option<String>,
}

struct Worker {
    session: Session,
    /// All that was learnt, whether or not it is in effect.
    working: Arc<Learner>,
}

impl std::fmt::Debug for Sona {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sona {{ generation: {}, .. }}", self.generation())
    }
}

impl Sona {
    /// Options, with their defaults.
    pub fn builder() -> SonaBuilder {
        SonaBuilder {
            tenant: String::new(),
            keep_text: false,
            background_interval_ms: 100,
            background_min_samples: 10,
            max_pending_samples: 1000,
            quality_threshold: 0.5,
            deep_trigger_threshold: 100.0,
            instant_lr: None,
            inner_layers: true,
            mixture: None,
            folder: FolderOptions::default(),
            learner: LearnerOptions::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
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
    fn has_owner(&self) -> bool {
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

    /// Begins to learn in the background, until the result is dropped.
    ///
    /// A thread looks at what is pending at each interval. It learns in passes of a few tokens, of
    /// which other passes wait for one at most, and rests after each for as long as it took, or
    /// 49 times as long if somebody else computes meanwhile.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(&self) -> std::io::Result<Background> {
        let (stop, stopped) = channel::<()>();
        let sona = self.clone();
        let SonaBuilder {
            background_interval_ms,
            background_min_samples,
            max_pending_samples,
            ..
        } = self.shared.options;
        let interval = Duration::from_millis(background_interval_ms);
        let thread = std::thread::Builder::new()
            .name("sona".into())
            .spawn(move || {
                let mut wait = interval;
                // Too many wait: until they are learnt it does not rest.
                let mut forced = false;
                while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                    // False if it is to end, or its owner waits.
                    let rest = |time: Duration| {
                        let timer = Timer::start();
                        loop {
                            let left = time.saturating_sub(timer.elapsed()).min(NAP);
                            let goes_on =
                                stopped.recv_timeout(left) == Err(RecvTimeoutError::Timeout);
                            if left.is_zero() || !goes_on || sona.has_owner() {
                                return goes_on && !sona.has_owner();
                            }
                        }
                    };
                    let outcome = sona.learn(background_min_samples, &mut |took| {
                        forced |= sona.state().pending.len() >= max_pending_samples;
                        if forced {
                            return rest(Duration::ZERO);
                        }
                        let engine = &sona.shared.engine;
                        let n_turns = engine.n_turns();
                        rest(took)
                            && (!engine.is_busy_since(n_turns)
                                || rest(BUSY_REST.saturating_sub(1) * took))
                    });
                    let outcome = outcome.and_then(|learnt| {
                        forced &= learnt;
                        if !learnt {
                            sona.state().folder.sync()?;
                        }
                        Ok(())
                    });
                    // What fails, such as a full disk, is not tried again at once.
                    wait = if outcome.is_ok() {
                        interval
                    } else {
                        (2 * wait).clamp(interval, LONGEST_WAIT.max(interval))
                    };
                    sona.state().failure = outcome.err().map(|error| error.to_string());
                }
            })?;
        Ok(Background {
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Learns a batch if at least `least` trajectories are pending; returns whether it did.
    fn learn(&self, least: usize, pause: Pause<'_>) -> Result<bool, SonaError> {
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

/// The background at work; ends when this is dropped.
#[derive(Debug)]
#[must_use = "the background ends when this is dropped"]
pub struct Background {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop = None;
        // One that panicked has said so.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// What came of a batch.
struct Outcome {
    kind: EventKind,
    /// What was judged.
    candidate: Arc<Learner>,
    /// What to learn on from.
    working: Arc<Learner>,
    event: Event,
}

/// Learns a batch from what is worked on, and judges the result against the learner `before`;
/// nothing if `slices` gave up.
fn learn_batch(
    worker: &mut Worker,
    batch: &[Trajectory],
    before: &Arc<Learner>,
    options: &SonaBuilder,
    slices: &mut Slices<'_>,
) -> Result<Option<Outcome>, SonaError> {
    let lessons = batch
        .iter()
        .map(|found| (found, found.lesson(options.quality_threshold)));
    let lessons: Vec<(&Trajectory, Range<usize>)> =
        lessons.filter(|(_, lesson)| !lesson.is_empty()).collect();
    let Worker { session, working } = worker;
    let mut learner = Learner::clone(working);
    let has_layers = options.inner_layers && learner.can_learn_layers();
    // Some of each topic are kept from what is learnt of it.
    let (mut topics, mut judged, mut learnt) = (Vec::new(), Vec::new(), Vec::new());
    for (i, (found, lesson)) in lessons.iter().enumerate() {
        slices.tick();
        let text = &found.tokens[lesson.clone()];
        let topic = if has_layers { learner.sort(text) } else { 0 };
        if topics.iter().filter(|&&other| other == topic).count() % JUDGED == JUDGED - 1 {
            judged.push(i);
        } else {
            learnt.push(i);
            learner.add_to_topic(topic, text);
        }
        topics.push(topic);
    }
    let read = |session: &mut Session,
                learner: &Learner,
                which: &[usize],
                learns: bool,
                slices: &mut Slices<'_>| {
        slices.tick();
        let mut learner = learner.clone();
        let mut losses = Vec::new();
        for &i in which {
            let (trajectory, lesson) = &lessons[i];
            match read_lesson(
                session,
                learner,
                &trajectory.tokens,
                lesson.clone(),
                learns,
                slices,
            )? {
                Some((next, more)) => {
                    learner = next;
                    losses.extend(more);
                }
                None => return Ok::<_, SonaError>(None),
            }
        }
        Ok(Some((learner, losses)))
    };
    let texts = |which: &[usize], topic: u32| -> Vec<(&[u32], Range<usize>)> {
        let which = which.iter().filter(|&&i| topics[i] == topic);
        which
            .map(|&i| (&*lessons[i].0.tokens, lessons[i].1.clone()))
            .collect()
    };
    let learn_layers =
        |session: &mut Session, learner: &mut Learner, which: &[usize], slices: &mut Slices<'_>| {
            for topic in learner.layers.topics.ids() {
                let texts = texts(which, topic);
                if has_layers
                    && !texts.is_empty()
                    && !learner.learn_layers(session, topic, &texts, slices)?
                {
                    return Ok::<_, SonaError>(false);
                }
            }
            Ok(true)
        };
    if !learn_layers(session, &mut learner, &learnt, slices)? {
        return Ok(None);
    }
    // What is not supported yet is learnt on without effect, unless text speaks against it.
    let (mut layers, mut supported) = (learner.layers.clone(), learner.layers.clone());
    for topic in layers.topics.ids() {
        let texts = texts(&judged, topic);
        let Some(evidence) = learner.evidence_of_layers(before, session, topic, &texts, slices)?
        else {
            return Ok(None);
        };
        let earlier = before.layers.topics.trained(topic);
        if evidence.sum < 0.0 {
            layers.topics.set_trained(topic, earlier.clone());
        }
        if evidence.verdict() != Some(true) {
            supported.topics.set_trained(topic, earlier);
        }
    }
    learner.set_layers(supported, slices);
    let Some((candidate, _)) = read(session, &learner, &learnt, true, slices)? else {
        return Ok(None);
    };
    let candidate = Arc::new(candidate);
    let Some((_, with)) = read(session, &candidate, &judged, false, slices)? else {
        return Ok(None);
    };
    let Some((_, without)) = read(session, before, &judged, false, slices)? else {
        return Ok(None);
    };
    // What is in effect when text is generated.
    let mixes = candidate.options().generate_with_mixture;
    let loss = |slice: &Losses| if mixes { slice.mixture } else { slice.adapter };
    let total = |slices: &[Losses]| slices.iter().map(loss).sum::<f64>();
    // Judged on little text, chance would let some changes pass: what is gained has to be two
    // standard errors.
    let mut gain = Evidence::default();
    for (with, without) in with.iter().zip(&without) {
        gain.add(loss(without) - loss(with), SLICE);
    }
    let divergence = candidate.divergence();
    let is_bounded = candidate.n_control() == 0 || divergence <= candidate.options().max_divergence;
    let is_valid = is_bounded && total(&with).is_finite();
    let is_likelier = total(&with) < total(&without);
    let kind = match () {
        () if is_valid && total(&with) == total(&without) => EventKind::Unchanged,
        () if is_valid && is_likelier && gain.verdict() == Some(true) => EventKind::Accepted,
        () => EventKind::Refused,
    };
    // With nothing learnt, in inner layers either.
    let is_harmful = if kind == EventKind::Refused && is_valid {
        let Some((_, alone)) = read(session, &before.without_layers(), &judged, false, slices)?
        else {
            return Ok(None);
        };
        total(&with) > alone.iter().map(|slice| slice.base).sum()
    } else {
        kind == EventKind::Refused
    };
    let from = if is_harmful { before } else { &candidate };
    // Judged once, the rest is learnt, too, unless it is what spoke against the candidate.
    let rest = if kind == EventKind::Refused && !is_likelier {
        &[]
    } else {
        &judged[..]
    };
    let Some((mut next, _)) = read(session, from, rest, true, slices)? else {
        return Ok(None);
    };
    if !is_harmful {
        next.set_layers(layers, slices);
        for &i in rest {
            next.add_to_topic(topics[i], &lessons[i].0.tokens[lessons[i].1.clone()]);
        }
        if !learn_layers(session, &mut next, rest, slices)? {
            return Ok(None);
        }
    }
    let mut sessions: Vec<u64> = lessons
        .iter()
        .map(|(found, _)| session_hash(&found.session_id))
        .collect();
    sessions.sort_unstable();
    sessions.dedup();
    let n_tokens: usize = lessons.iter().map(|(_, lesson)| lesson.len()).sum();
    let n_judged: usize = with.iter().map(|slice| slice.n).sum();
    let mean = |slices: &[Losses]| total(slices) / n_judged.max(1) as f64;
    let event = Event {
        n_learnt: [lessons.len() as u64, n_tokens as u64],
        judged: (n_judged as u64, mean(&without), mean(&with)),
        divergence,
        sessions,
        ..Event::new(kind, 0, 0)
    };
    Ok(Some(Outcome {
        kind,
        candidate,
        working: Arc::new(next),
        event,
    }))
}

/// Scores `tokens[lesson]`, the losses of [`SLICE`] tokens each, and learns them if `learns`;
/// nothing if `slices` gave up.
fn read_lesson(
    session: &mut Session,
    mut learner: Learner,
    tokens: &[u32],
    lesson: Range<usize>,
    learns: bool,
    slices: &mut Slices<'_>,
) -> Result<Option<(Learner, Vec<Losses>)>, SonaError> {
    let mut losses = Vec::new();
    session.clear();
    learner.set_topic_in_slices(learner.nearest_topic(&tokens[lesson.clone()]), slices);
    learning::set_learner(session, learner, slices)?;
    let outcome = read_text(session, tokens, lesson, learns, &mut losses, slices);
    let learner = session.take_learner();
    session.clear();
    outcome?;
    Ok(learner.filter(|_| slices.goes_on()).map(|mut learner| {
        learner.set_topic_in_slices(None, slices);
        (learner, losses)
    }))
}

/// [`read_lesson`] with the session's learner, unless `slices` give up.
fn read_text(
    session: &mut Session,
    tokens: &[u32],
    lesson: Range<usize>,
    learns: bool,
    losses: &mut Vec<Losses>,
    slices: &mut Slices<'_>,
) -> Result<(), SonaError> {
    let n_ctx = session.n_ctx();
    let mut at = lesson.start;
    while at < lesson.end {
        // Half of the context is what came before.
        let begin = at.saturating_sub(n_ctx / 2);
        let end = (begin + n_ctx).min(lesson.end);
        session.clear();
        for slice in tokens[begin..at].chunks(SLICE) {
            session.prefill(slice)?;
            if slices.tick().is_none() {
                return Ok(());
            }
        }
        for chunk in tokens[at..end].chunks(UPDATE_TOKENS) {
            for slice in chunk.chunks(SLICE) {
                losses.push(learning::record(session, slice, slices)?);
                if !slices.goes_on() {
                    return Ok(());
                }
            }
            if learns {
                learning::update(session, slices)?;
            }
        }
        at = end;
    }
    Ok(())
}

/// The topic of a learner whose adapter helps a prompt; see [`Sona::topic`].
fn choose(engine: &Engine, learner: &Learner, prompt: &[u32]) -> Result<Option<u32>, SonaError> {
    let Some(topic) = learner.nearest_topic(prompt) else {
        return Ok(None);
    };
    let Some(adapter) = learner.layers.topics.trained(topic).adapter else {
        return Ok(None);
    };
    let sample = &prompt[prompt.len() - (prompt.len() / SAMPLED).min(LONGEST_SAMPLE)..];
    if sample.len() < LEAST_SAMPLE {
        return Ok(Some(topic));
    }
    let options = SessionOptions {
        n_ctx: Some(sample.len()),
        ..Default::default()
    };
    let [mut with, mut without] = [engine.sequence(&options)?, engine.sequence(&options)?];
    with.attach(adapter, 1.0)?;
    let (known, predicted) = (&sample[..sample.len() - 1], &sample[1..]);
    let mut outputs = Outputs::default();
    let mut slots = [&mut with, &mut without]
        .map(|seq| Slot::new(seq, known, TokenKind::Prompt).outputs_from(0));
    engine.step(&mut slots, &mut outputs, &CancelToken::default())?;
    let n_vocab = engine.model().hparams().n_vocab;
    let gains = predicted.iter().enumerate().map(|(i, &token)| {
        let [with, without] = [0, 1].map(|slot| {
            let logits = &outputs.logits(slot)[i * n_vocab..][..n_vocab];
            f64::from(logits[token as usize] - log_sum(logits))
        });
        with - without
    });
    let (sum, squares) = gains.fold((0.0, 0.0), |(sum, squares), gain| {
        (sum + gain, squares + gain * gain)
    });
    Ok((sum >= -2.0 * squares.sqrt()).then_some(topic))
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
