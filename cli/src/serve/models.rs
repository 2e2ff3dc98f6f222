//! The models that requests may name: which are loaded, when one is, and when it goes again.
//!
//! A request for a model that is not loaded loads it, once for all that wait. At most
//! `--models-max` are loaded, and as many as fit into memory: those that were used least recently
//! go first, after their last answer. Loads come one after the other.

use super::app::{App, Loader};
use super::blocking::blocking;
use super::entry::Entry;
use super::http::budget::Budget;
use super::http::error::ApiError;
use super::http::fields::Fields;
use super::memories::Memories;
use super::observe::metrics::Metrics;
use crate::flags::ModelArgs;
use crate::io::{Failure, size};
use axum::http::{HeaderValue, StatusCode, Uri};
use ruvllm::SystemMemory;
use ruvllm::scheduler::ScheduleError;
use serde_json::Value;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Most time that a request waits for others to be loaded, or for answers of a model that has to
/// go, before it is told to come again.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// How often is looked whether a model that goes has given its last answer.
const POLL: Duration = Duration::from_millis(10);
/// How often is looked whether a model was idle for long enough.
const TICK: Duration = Duration::from_millis(250);

/// For how long a model stays that nobody asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Keep {
    /// As `--sleep-idle-seconds` says.
    Usual,
    For(Duration),
    Always,
}

/// What a model is now.
enum State {
    /// With why it could not be loaded, if it was tried.
    Unloaded(Option<String>),
    /// For the first time: requests do not wait.
    Starting,
    Loading,
    Loaded(Loaded),
}

struct Loaded {
    app: Arc<App>,
    /// Bytes that it takes with one whole context.
    need: u64,
    used: Instant,
    keep: Keep,
}

/// A model that was unloaded, and answers what it was asked before.
struct Leaving {
    place: usize,
    app: Weak<App>,
    need: u64,
}

struct Table {
    states: Vec<State>,
    leaving: Vec<Leaving>,
}

/// A model as lists tell it.
pub(super) struct Listed<'a> {
    pub(super) entry: &'a Entry,
    pub(super) app: Option<Arc<App>>,
    /// `loaded`, `loading` or `unloaded`, as llama-server says.
    pub(super) state: &'static str,
    pub(super) failure: Option<String>,
    /// When it goes, if nobody asks for it.
    pub(super) expires: Option<Duration>,
}

pub(super) struct Models {
    entries: Vec<Entry>,
    table: Mutex<Table>,
    gate: Arc<tokio::sync::Mutex<()>>,
    /// Requests that wait for a model.
    n_waiting: AtomicUsize,
    n_loads: AtomicU64,
    max_loaded: usize,
    /// Bytes that all of them may take together.
    max_bytes: Option<u64>,
    idle: Option<Duration>,
    /// Nothing is loaded again without it.
    loader: Option<Loader>,
}

impl Models {
    /// Those of a server, none of which is loaded yet.
    pub(super) fn new(entries: Vec<Entry>, loader: Loader) -> Arc<Models> {
        let args = loader.args();
        let max_loaded = match args.models.models_max as usize {
            0 => usize::MAX,
            n => n,
        };
        let of_system = || SystemMemory::now().map(|memory| memory.total / 10 * 9);
        let states = entries.iter().map(|entry| match entry.at_start {
            true => State::Starting,
            false => State::Unloaded(None),
        });
        Arc::new(Models {
            table: Mutex::new(Table {
                states: states.collect(),
                leaving: Vec::new(),
            }),
            gate: Arc::default(),
            n_waiting: AtomicUsize::new(0),
            n_loads: AtomicU64::new(0),
            max_loaded,
            max_bytes: args.app.placement.memory_limit().or_else(of_system),
            idle: args.models.sleep_idle(),
            entries,
            loader: Some(loader),
        })
    }

    /// One that is there from the start, and stays.
    pub(super) fn fixed(app: App) -> Arc<Models> {
        let entry = Entry::new(Some(app.name.clone()), ModelArgs::default(), false);
        let loaded = Loaded {
            app: Arc::new(app),
            need: 0,
            used: Instant::now(),
            keep: Keep::Always,
        };
        Arc::new(Models {
            entries: vec![entry],
            table: Mutex::new(Table {
                states: vec![State::Loaded(loaded)],
                leaving: Vec::new(),
            }),
            gate: Arc::default(),
            n_waiting: AtomicUsize::new(0),
            n_loads: AtomicU64::new(0),
            max_loaded: 1,
            max_bytes: None,
            idle: None,
            loader: None,
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether requests have to name one.
    pub(super) fn are_several(&self) -> bool {
        self.entries.len() > 1
    }

    /// Whether one is being loaded.
    pub(super) fn are_starting(&self) -> bool {
        self.table().states.iter().any(is_starting)
    }

    /// What loads them, unless they were there from the start.
    pub(super) fn loader(&self) -> Option<&Loader> {
        self.loader.as_ref()
    }

    /// The figures of all of them.
    pub(super) fn metrics(&self) -> Metrics {
        let of_fixed = || self.all_loaded().first().map(|app| app.metrics.clone());
        match &self.loader {
            Some(loader) => loader.metrics.clone(),
            None => of_fixed().unwrap_or_default(),
        }
    }

    /// How often one was loaded.
    pub(super) fn n_loads(&self) -> u64 {
        self.n_loads.load(Ordering::Relaxed)
    }

    /// The model of this name. Ollama's clients add a tag, and leave out a file's ending; behind
    /// the colon there may be an adapter, too.
    pub(super) fn find(&self, name: &str) -> Option<usize> {
        let place = |name: &str| {
            let is_it = |entry: &Entry| {
                entry
                    .name()
                    .is_some_and(|own| own == name || own.strip_suffix(".gguf") == Some(name))
            };
            self.entries.iter().position(is_it)
        };
        place(name).or_else(|| {
            let (model, tag) = name.rsplit_once(':')?;
            let i = place(model)?;
            let app = self.loaded(i);
            let knows = |app: &Arc<App>| app.adapters().iter().any(|of| of.name == tag);
            // Of a model that is not loaded, what adapters it has is seen later.
            (tag == "latest" || app.as_ref().is_none_or(knows)).then_some(i)
        })
    }

    fn loaded(&self, i: usize) -> Option<Arc<App>> {
        match &self.table().states[i] {
            State::Loaded(loaded) => Some(Arc::clone(&loaded.app)),
            _ => None,
        }
    }

    /// All of them, in the order in which the server was given them.
    pub(super) fn list(&self) -> Vec<Listed<'_>> {
        let table = self.table();
        let states = self.entries.iter().zip(&table.states);
        states
            .map(|(entry, state)| {
                let (app, state, failure, expires) = match state {
                    State::Unloaded(failure) => (None, "unloaded", failure.clone(), None),
                    State::Starting | State::Loading => (None, "loading", None, None),
                    State::Loaded(loaded) => {
                        let left = |time: Duration| time.saturating_sub(loaded.used.elapsed());
                        let expires = self.stays(loaded.keep).map(left);
                        (Some(Arc::clone(&loaded.app)), "loaded", None, expires)
                    }
                };
                Listed {
                    entry,
                    app,
                    state,
                    failure,
                    expires,
                }
            })
            .collect()
    }

    /// Those that are loaded.
    pub(super) fn all_loaded(&self) -> Vec<Arc<App>> {
        self.list().into_iter().filter_map(|of| of.app).collect()
    }

    /// For how long an idle model stays.
    fn stays(&self, keep: Keep) -> Option<Duration> {
        match keep {
            Keep::Usual => self.idle,
            Keep::For(time) => Some(time),
            Keep::Always => None,
        }
    }

    /// The model that was used last, without loading any.
    fn current(&self) -> Result<Arc<App>, ApiError> {
        let table = self.table();
        let loaded = table.states.iter().filter_map(|state| match state {
            State::Loaded(loaded) => Some(loaded),
            _ => None,
        });
        let last = loaded.max_by_key(|loaded| loaded.used);
        last.map(|loaded| Arc::clone(&loaded.app)).ok_or_else(|| {
            match table.states.iter().any(is_starting) {
                true => ApiError::loading(),
                false => ApiError::new(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "unavailable_error",
                    "no model is loaded now; a request that names one loads it",
                ),
            }
        })
    }

    /// The model, if it is loaded; it was used now.
    fn touch(&self, i: usize) -> Result<Option<Arc<App>>, ApiError> {
        match &mut self.table().states[i] {
            State::Loaded(loaded) => {
                loaded.used = Instant::now();
                Ok(Some(Arc::clone(&loaded.app)))
            }
            State::Starting => Err(ApiError::loading()),
            _ => Ok(None),
        }
    }

    /// Model `i`, which is loaded first if it is not there.
    pub(super) async fn app(self: &Arc<Self>, i: usize) -> Result<Arc<App>, ApiError> {
        if let Some(app) = self.touch(i)? {
            return Ok(app);
        }
        let Some(loader) = &self.loader else {
            return Err(ApiError::internal("nothing is loaded again here"));
        };
        let max = loader.args().max_requests as usize;
        let _waits = Waits::new(&self.n_waiting, max)?;
        let turn = tokio::time::timeout(MAX_WAIT, Arc::clone(&self.gate).lock_owned());
        let Ok(turn) = turn.await else {
            return Err(busy("other models are being loaded"));
        };
        if let Some(app) = self.touch(i)? {
            return Ok(app);
        }
        // A client that goes away does not stop what others may wait for.
        let models = Arc::clone(self);
        let load = tokio::spawn(blocking(move || {
            let _turn = turn;
            models.load(i).map_err(|both| both.0)
        }));
        load.await
            .unwrap_or_else(|error| Err(ApiError::internal(error.to_string())))
    }

    /// Loads model `i` on this thread; the caller has its turn. What is wrong is told in words for
    /// clients and in those for the terminal.
    fn load(&self, i: usize) -> Result<Arc<App>, Box<(ApiError, Failure)>> {
        if !matches!(self.table().states[i], State::Starting) {
            self.table().states[i] = State::Loading;
        }
        let mut loading = Loading {
            models: self,
            i,
            failure: Some("loading it failed".into()),
        };
        let outcome = self.open(i);
        loading.failure = outcome
            .as_ref()
            .err()
            .map(|both| both.0.message().to_owned());
        self.n_loads
            .fetch_add(u64::from(outcome.is_ok()), Ordering::Relaxed);
        outcome
    }

    fn open(&self, i: usize) -> Result<Arc<App>, Box<(ApiError, Failure)>> {
        let entry = &self.entries[i];
        let name = entry.name().unwrap_or("the model").to_owned();
        let Some(loader) = &self.loader else {
            let message = "nothing is loaded here";
            let both = (ApiError::internal(message), Failure::Work(message.into()));
            return Err(Box::new(both));
        };
        let (mut need, mut refused) = (0, None);
        let mut has_room = |bytes: u64| {
            need = bytes;
            self.make_room(i, &name, bytes).map_err(|error| {
                let failure = Failure::Work(error.message().to_owned());
                refused = Some(error);
                failure
            })
        };
        let app = match loader.open(entry, self.are_several(), &mut has_room) {
            Ok(app) => app,
            Err(failure) => {
                let error = refused.unwrap_or_else(|| {
                    ApiError::internal(format!("{name} cannot be loaded: {}", failure.text()))
                });
                return Err(Box::new((error, failure)));
            }
        };
        entry.is_called(&app.name);
        let app = Arc::new(app);
        self.table().states[i] = State::Loaded(Loaded {
            app: Arc::clone(&app),
            need,
            used: Instant::now(),
            keep: Keep::Usual,
        });
        Ok(app)
    }

    /// Unloads what was used least recently until there is room for a model of so many bytes.
    fn make_room(&self, i: usize, name: &str, need: u64) -> Result<(), ApiError> {
        let begun = Instant::now();
        loop {
            let mut table = self.table();
            table.leaving.retain(|of| of.app.strong_count() > 0);
            let loaded = || {
                table.states.iter().filter_map(|state| match state {
                    State::Loaded(loaded) => Some(loaded),
                    _ => None,
                })
            };
            let n = loaded().count() + table.leaving.len();
            let others: u64 = loaded()
                .map(|of| of.need)
                .chain(table.leaving.iter().map(|of| of.need))
                .sum();
            let fits = |max: u64| others.saturating_add(need) <= max;
            // What it learns, and its measurements, are in files that one at a time may have.
            let is_back = table.leaving.iter().any(|of| of.place == i);
            // One alone may try: its weights stay in its file.
            let has_room = n < self.max_loaded && (n == 0 || self.max_bytes.is_none_or(fits));
            if has_room && !is_back {
                return Ok(());
            }
            if table.leaving.is_empty() {
                let victims = table.states.iter().enumerate();
                let victims = victims.filter_map(|(j, state)| match state {
                    State::Loaded(loaded) if loaded.keep != Keep::Always => {
                        // One that has nothing to answer goes at once.
                        Some((loaded.app.is_busy(), loaded.used, j))
                    }
                    _ => None,
                });
                let Some((_, _, j)) = victims.min() else {
                    let max = self.max_bytes.unwrap_or(u64::MAX);
                    return Err(busy(&format!(
                        "{name} takes {}, {n} models that stay loaded take {}, and there are {} for at most {} models",
                        size(need),
                        size(others),
                        size(max),
                        self.max_loaded,
                    )));
                };
                self.remove(&mut table, j);
            }
            drop(table);
            if begun.elapsed() > MAX_WAIT {
                return Err(busy(&format!(
                    "{name} has to wait for answers of a model that goes"
                )));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Unloads model `i`: it answers what it was asked, then its memory is free.
    fn remove(&self, table: &mut Table, i: usize) {
        let state = std::mem::replace(&mut table.states[i], State::Unloaded(None));
        let State::Loaded(Loaded { app, need, .. }) = state else {
            table.states[i] = state;
            return;
        };
        table.leaving.push(Leaving {
            place: i,
            app: Arc::downgrade(&app),
            need,
        });
        // Its threads end meanwhile.
        let end = move || {
            app.keep_measured();
            drop(app);
        };
        // Without a thread for it, it ends here.
        drop(std::thread::Builder::new().name("unload".into()).spawn(end));
    }

    /// Unloads model `i`; whether it was loaded.
    pub(super) fn unload(&self, i: usize) -> Result<bool, ApiError> {
        if self.loader.is_none() {
            return Err(ApiError::wrong("the model stays as long as the server"));
        }
        let mut table = self.table();
        let is_loaded = matches!(table.states[i], State::Loaded(_));
        self.remove(&mut table, i);
        Ok(is_loaded)
    }

    /// Says for how long model `i` stays when nobody asks for it.
    pub(super) fn keep(&self, i: usize, keep: Keep) {
        if let State::Loaded(loaded) = &mut self.table().states[i] {
            loaded.keep = keep;
        }
    }

    /// Loads what is loaded at the start, one after the other; the names of those that are there.
    pub(super) fn start(&self) -> Result<Vec<String>, Failure> {
        let mut names = Vec::new();
        for (i, entry) in self.entries.iter().enumerate() {
            if entry.at_start {
                let app = self.load(i).map_err(|both| both.1)?;
                names.push(app.name.clone());
            }
        }
        Ok(names)
    }

    /// Unloads models that nobody has asked for in a while, for ever.
    pub(super) async fn unload_idle(self: Arc<Self>) {
        if self.loader.is_none() {
            return;
        }
        loop {
            tokio::time::sleep(TICK).await;
            let mut table = self.table();
            table.leaving.retain(|of| of.app.strong_count() > 0);
            for i in 0..table.states.len() {
                let State::Loaded(loaded) = &mut table.states[i] else {
                    continue;
                };
                if loaded.app.is_busy() {
                    loaded.used = Instant::now();
                } else if self
                    .stays(loaded.keep)
                    .is_some_and(|time| loaded.used.elapsed() >= time)
                {
                    self.remove(&mut table, i);
                }
            }
        }
    }
}

fn is_starting(state: &State) -> bool {
    matches!(state, State::Starting | State::Loading)
}

fn busy(message: &str) -> ApiError {
    ApiError::new(
        StatusCode::SERVICE_UNAVAILABLE,
        "unavailable_error",
        message,
    )
}

/// A model on its way: one whose load fails, or panics, is not loading for ever.
struct Loading<'a> {
    models: &'a Models,
    i: usize,
    failure: Option<String>,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        if let Some(failure) = self.failure.take() {
            self.models.table().states[self.i] = State::Unloaded(Some(failure));
        }
    }
}

/// A request that waits for a model.
struct Waits<'a>(&'a AtomicUsize);

impl Waits<'_> {
    fn new(n: &AtomicUsize, max: usize) -> Result<Waits<'_>, ApiError> {
        let before = n.fetch_add(1, Ordering::Relaxed);
        let waits = Waits(n);
        if before < max {
            Ok(waits)
        } else {
            Err(ScheduleError::QueueFull { max }.into())
        }
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What every request reaches.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) models: Arc<Models>,
    pub(super) keys: Arc<Vec<String>>,
    pub(super) memories: Arc<Memories>,
    pub(super) bodies: Arc<Budget>,
    /// Pages of others that may ask.
    pub(super) origins: Arc<Vec<HeaderValue>>,
    /// Whether a field that the server does not know is an error.
    pub(super) strict: bool,
}

impl Shared {
    /// Of a server whose models are still to be loaded.
    pub(super) fn new(entries: Vec<Entry>, loader: Loader) -> Shared {
        let args = loader.args();
        Shared {
            keys: loader.keys(),
            memories: loader.memories(),
            bodies: Budget::new(usize::try_from(args.body_budget).unwrap_or(usize::MAX)),
            origins: Arc::new(args.cors_origins.clone()),
            strict: args.strict,
            models: Models::new(entries, loader),
        }
    }

    /// The model that a request names; a server with one model answers whatever the name.
    pub(super) async fn app(&self, model: Option<&str>) -> Result<Arc<App>, ApiError> {
        if !self.models.are_several() {
            return self.models.app(0).await;
        }
        match model {
            Some(name) => self.models.app(self.place(name)?).await,
            None => {
                let message = "there are several models here: say which; /v1/models lists them";
                Err(ApiError::field("model", message))
            }
        }
    }

    /// The place of a model of this name.
    pub(super) fn place(&self, name: &str) -> Result<usize, ApiError> {
        self.models.find(name).ok_or_else(|| {
            let message = format!("no model is called {name:?} here; /v1/models lists them");
            ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message)
        })
    }

    /// The one that the fields of a body name.
    pub(super) async fn app_of(&self, fields: &Fields) -> Result<Arc<App>, ApiError> {
        self.app(fields.get("model").and_then(Value::as_str)).await
    }

    /// The same, if it takes another request.
    pub(super) async fn app_with_room(&self, fields: &Fields) -> Result<Arc<App>, ApiError> {
        let app = self.app_of(fields).await?;
        app.has_room()?;
        Ok(app)
    }

    /// The one that a query names (`?model=NAME`), or the one that was used last.
    pub(super) async fn app_of_query(&self, uri: &Uri) -> Result<Arc<App>, ApiError> {
        let query = uri.query().unwrap_or_default();
        let named = query
            .split('&')
            .find_map(|pair| pair.strip_prefix("model="));
        match named {
            _ if !self.models.are_several() => self.models.app(0).await,
            Some(name) => self.app(Some(&decoded(name))).await,
            None => self.models.current(),
        }
    }
}

/// The text that a part of a query stands for, in which `%` begins the two digits of a byte.
pub(super) fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, behind @ ..] = rest {
        let digits = behind
            .get(..2)
            .and_then(|two| std::str::from_utf8(two).ok());
        let byte = digits.and_then(|two| u8::from_str_radix(two, 16).ok());
        rest = match byte.filter(|_| *first == b'%') {
            Some(byte) => {
                bytes.push(byte);
                &behind[2..]
            }
            None => {
                bytes.push(*first);
                behind
            }
        };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
