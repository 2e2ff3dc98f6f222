//! The folder in which everything is kept; what its owner can see and undo without the model.

use crate::clock::unix_millis;
use crate::learn::{TopicStatus, topics_in};
use crate::sona::SonaError;
use crate::sona::event::{Event, EventKind};
use crate::sona::log::{Limits, Log};
use crate::sona::trajectory::{Record, Trajectory};
use ruvllm::kv::hash::{SEED, mix};
use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

const LOCK: &str = "lock";
const TRAJECTORIES: &str = "trajectories";
const EVENTS: &str = "events";
const VERSIONS: &str = "versions";
const WORKING: &str = "working.gguf";
/// Events from which on old ones are summed up, and how many of the latest are left as they are.
const MAX_EVENTS: usize = 1024;
const LATEST_EVENTS: usize = 256;
/// Versions that are kept, besides that of the first and of the latest control text.
const KEPT_VERSIONS: usize = 8;

/// What a folder may hold. `..Default::default()` sets the remaining fields.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderOptions {
    /// Most bytes of trajectories; the oldest go first. Default 64 MiB.
    pub max_bytes: u64,
    /// Days after which trajectories are removed, and events summed up. Default 90.
    pub max_age_days: u64,
}

impl Default for FolderOptions {
    fn default() -> Self {
        FolderOptions {
            max_bytes: 64 << 20,
            max_age_days: 90,
        }
    }
}

/// What is in a folder.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct FolderStatus {
    /// Trajectories, how many of them with their tokens, and how many are rated.
    pub n_trajectories: usize,
    /// Of them, those with their tokens.
    pub n_with_tokens: usize,
    /// Of them, those that were rated.
    pub n_rated: usize,
    /// Different sessions.
    pub n_sessions: usize,
    /// Bytes of trajectories and events.
    pub log_bytes: u64,
    /// Bytes of all versions.
    pub version_bytes: u64,
    /// The version in effect, 0 if it is the model alone.
    pub version: u64,
    /// All versions that can be gone back to.
    pub versions: Vec<u64>,
    /// Sum of the ratings of trajectories that no adapter was trained on yet.
    pub quality: f64,
}

/// A folder of trajectories, events and versions, which this process alone has open.
///
/// Files are readable by their owner only, and are whole whenever the process ends. Without the
/// model its owner can see what was learnt, go back to a version, and forget a session;
/// [`Sona`](super::Sona) learns.
#[derive(Debug)]
pub struct SonaFolder {
    path: PathBuf,
    _lock: File,
    log: Log,
    events: Log,
    history: Vec<Event>,
    /// Number of the next trajectory.
    next: u64,
}

impl SonaFolder {
    /// Opens a folder; makes it if it does not exist.
    ///
    /// # Errors
    /// If another process has it open, its files are damaged or of another version, or cannot be
    /// read or written.
    pub fn open(path: impl AsRef<Path>, options: &FolderOptions) -> Result<SonaFolder, SonaError> {
        let path = path.as_ref();
        make_folder(path)?;
        let file = lock(path, LOCK)?;
        make_folder(&path.join(VERSIONS))?;
        let mut history = Vec::new();
        let events = Log::open(
            path,
            EVENTS,
            2,
            Limits {
                bytes: None,
                age: None,
            },
            &mut |record| {
                history.push(Event::decode(record)?);
                Ok(())
            },
        )?;
        let age = options.max_age_days.saturating_mul(24 * 3600 * 1000);
        let limits = Limits {
            bytes: Some(options.max_bytes),
            age: Some(age),
        };
        let mut next = 1 + history.iter().map(|event| event.through).max().unwrap_or(0);
        let mut log = Log::open(path, TRAJECTORIES, 1, limits, &mut |record| {
            if let Record::Trajectory(found) = Record::decode(record)? {
                next = next.max(found.number.saturating_add(1));
            }
            Ok(())
        })?;
        log.prune(unix_millis());
        let mut folder = SonaFolder {
            path: path.to_owned(),
            _lock: file,
            log,
            events,
            history,
            next,
        };
        // A process may have ended while it forgot.
        if let Some(Event {
            kind: EventKind::Forget,
            sessions,
            ..
        }) = folder.history.last()
            && let Some(&session) = sessions.first()
        {
            folder.finish_forgetting(session)?;
        }
        let too_old = |event: &&Event| event.timestamp.saturating_add(age) < unix_millis();
        let n_old = folder.history.iter().take_while(too_old).count();
        // Where there is no room for it, they stay.
        let _ = folder.summarise(n_old);
        Ok(folder)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a trajectory and numbers it; without its tokens unless `with_tokens`.
    ///
    /// # Errors
    /// If it cannot be written; nothing is changed then.
    pub fn record(
        &mut self,
        trajectory: &mut Trajectory,
        with_tokens: bool,
    ) -> Result<(), SonaError> {
        trajectory.number = self.next;
        if trajectory.timestamp == 0 {
            trajectory.timestamp = unix_millis();
        }
        let tokens = std::mem::take(&mut trajectory.tokens);
        let record = match with_tokens {
            true => {
                trajectory.tokens = tokens;
                trajectory.encode()
            }
            false => {
                let record = trajectory.encode();
                trajectory.tokens = tokens;
                record
            }
        };
        self.log.append(unix_millis(), &record)?;
        self.next += 1;
        Ok(())
    }

    /// Appends the rating of trajectory `number`.
    ///
    /// # Errors
    /// If the rating is not between 0 and 1, or cannot be written.
    pub fn rate(&mut self, number: u64, score: f32) -> Result<(), SonaError> {
        check_score(score)?;
        self.log
            .append(unix_millis(), &Record::rating(number, score))
    }

    /// Calls `visit` with all trajectories, in order, each with its latest rating.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn trajectories(&self, mut visit: impl FnMut(Trajectory)) -> Result<(), SonaError> {
        let mut ratings = HashMap::new();
        self.log.read(&mut |record| {
            if let Record::Rating { number, score } = Record::decode(record)? {
                ratings.insert(number, score);
            }
            Ok(())
        })?;
        self.log.read(&mut |record| {
            if let Record::Trajectory(mut found) = Record::decode(record)? {
                found.quality_score = ratings.get(&found.number).copied().or(found.quality_score);
                visit(*found);
            }
            Ok(())
        })
    }

    /// Trajectories that are still to be learnt, with their tokens.
    pub(super) fn pending(&self) -> Result<Vec<Trajectory>, SonaError> {
        let (through, mut pending) = (self.through(), Vec::new());
        self.trajectories(|found| {
            if found.number > through && !found.tokens.is_empty() {
                pending.push(found);
            }
        })?;
        Ok(pending)
    }

    /// All events, in order.
    pub fn history(&self) -> &[Event] {
        &self.history
    }

    /// Trajectories up to this number were learnt or passed over.
    pub(super) fn through(&self) -> u64 {
        self.history.last().map_or(0, |event| event.through)
    }

    /// The version in effect; 0 is the model alone.
    pub fn version(&self) -> u64 {
        for event in self.history.iter().rev() {
            if event.version == 0 || self.version_path(event.version).exists() {
                return event.version;
            }
            // The file was not written before the process ended; what was undone does not come back
            // for that.
            if matches!(event.kind, EventKind::RolledBack | EventKind::Forgotten) {
                break;
            }
        }
        0
    }

    /// All versions that can be gone back to, in order.
    pub fn versions(&self) -> Vec<u64> {
        let mut versions: Vec<u64> = self
            .history
            .iter()
            .map(|event| event.version)
            .filter(|&v| v > 0)
            .collect();
        versions.sort_unstable();
        versions.dedup();
        versions.retain(|&version| self.version_path(version).exists());
        versions
    }

    /// The file of a version, as [`Learner::open`](crate::learn::Learner::open) reads it.
    pub fn version_path(&self, version: u64) -> PathBuf {
        self.path.join(VERSIONS).join(format!("{version:06}.gguf"))
    }

    /// What is known of the topics of a version.
    ///
    /// # Errors
    /// If there is no such version, or its file cannot be read.
    pub fn topics(&self, version: u64) -> Result<Vec<TopicStatus>, SonaError> {
        if !self.versions().contains(&version) {
            return Err(SonaError::NoSuchVersion { version });
        }
        Ok(topics_in(&self.version_path(version))?)
    }

    /// What is learnt from on, which has not taken effect yet.
    pub(super) fn working_path(&self) -> PathBuf {
        self.path.join(WORKING)
    }

    /// Number of the next version.
    pub(super) fn next_version(&self) -> u64 {
        1 + self
            .history
            .iter()
            .map(|event| event.version)
            .max()
            .unwrap_or(0)
    }

    /// Appends an event. It is on disk before anything is written that it announces, so that what a
    /// file was made of is always known.
    pub(super) fn push(&mut self, event: Event) -> Result<(), SonaError> {
        self.log.sync()?;
        self.events.append(event.timestamp, &event.encode())?;
        self.events.sync()?;
        self.history.push(event);
        if self.history.len() > MAX_EVENTS {
            // What fails takes space; the next time it succeeds.
            let _ = self.summarise(self.history.len() - LATEST_EVENTS);
        }
        Ok(())
    }

    /// Sums up the first `n_old` events, if that makes them fewer; the last one stays.
    fn summarise(&mut self, n_old: usize) -> Result<(), SonaError> {
        let n_old = n_old.min(self.history.len().saturating_sub(1));
        let left = Event::summarised(&self.history, n_old, |version| {
            self.version_path(version).exists()
        });
        if left.len() < self.history.len() {
            let records: Vec<_> = left
                .iter()
                .map(|event| (event.timestamp, event.encode()))
                .collect();
            if self.events.replace(&records)? {
                self.history = left;
            }
        }
        Ok(())
    }

    /// Removes versions that are too many.
    pub(super) fn prune_versions(&self) {
        let current = self.version();
        let versions = self.versions();
        let is_there = |event: &&Event| {
            event.kind == EventKind::Calibrated && versions.contains(&event.version)
        };
        let mut calibrated = self.history.iter().filter(is_there);
        let first = calibrated.next().map(|event| event.version);
        let latest = calibrated.next_back().map(|event| event.version);
        let excess = versions.len().saturating_sub(KEPT_VERSIONS);
        for &version in &versions[..excess] {
            if version != current && Some(version) != first && Some(version) != latest {
                // What remains takes space; the next time it goes.
                let _ = fs::remove_file(self.version_path(version));
            }
        }
    }

    /// Goes back to a version; 0 is the model alone. Later versions stay, so that this can be
    /// undone, too.
    ///
    /// # Errors
    /// If there is no such version, or the folder cannot be written.
    pub fn rollback(&mut self, version: u64) -> Result<(), SonaError> {
        if version != 0 && !self.versions().contains(&version) {
            return Err(SonaError::NoSuchVersion { version });
        }
        let through = self.next - 1;
        self.push(Event::new(EventKind::RolledBack, version, through))?;
        remove(&self.working_path())
    }

    /// Tells that an adapter was trained on the trajectories.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn trained(&mut self) -> Result<(), SonaError> {
        let event = Event::new(EventKind::Trained, self.version(), self.through());
        self.push(event)
    }

    /// Forgets a session: its trajectories, and every version that was made after the first of them
    /// was learnt. What is left is the latest version before that; trajectories of others since
    /// then are learnt again, if their tokens are stored. Returns the number of trajectories
    /// that are gone.
    ///
    /// # Errors
    /// If nothing of such a session is there, or the folder cannot be written. What was begun is
    /// finished when the folder is opened again.
    pub fn forget(&mut self, session_id: &str) -> Result<usize, SonaError> {
        let session = session_hash(session_id);
        let mut n = 0;
        self.trajectories(|found| n += usize::from(found.session_id == session_id))?;
        if n == 0 && !self.history.iter().any(|event| event.has_learnt(session)) {
            return Err(SonaError::NoSuchSession {
                session_id: session_id.into(),
            });
        }
        let event = Event::new(EventKind::Forget, self.version(), self.through());
        self.push(Event {
            sessions: vec![session],
            ..event
        })?;
        self.finish_forgetting(session)?;
        Ok(n)
    }

    fn finish_forgetting(&mut self, session: u64) -> Result<(), SonaError> {
        // What an earlier request to forget has undone is no reason to undo more.
        let undone = self.history.iter().rposition(|event| {
            event.kind == EventKind::Forgotten && event.sessions.contains(&session)
        });
        let since = undone.map_or(0, |at| at + 1);
        let first = self.history[since..]
            .iter()
            .position(|event| event.has_learnt(session))
            .map(|at| since + at);
        let (mut version, mut through) = (self.version(), self.through());
        if let Some(first) = first {
            let before = &self.history[..first];
            let made_before = |version: u64| before.iter().any(|event| event.version == version);
            for version in self
                .versions()
                .into_iter()
                .filter(|&version| !made_before(version))
            {
                remove(&self.version_path(version))?;
            }
            remove(&self.working_path())?;
            let left = before
                .iter()
                .rev()
                .find(|event| event.version == 0 || self.version_path(event.version).exists());
            version = left.map_or(0, |event| event.version);
            // Where it took effect. The model alone did so before the first trajectory, unless its
            // owner went back to it.
            let made = before
                .iter()
                .rev()
                .find(|event| event.version == version && event.kind.is_start());
            through = made.map_or(0, |event| event.through);
        }
        let mut numbers = Vec::new();
        let is_theirs = |found: &Trajectory| session_hash(&found.session_id) == session;
        self.trajectories(|found| numbers.extend(is_theirs(&found).then_some(found.number)))?;
        self.log
            .retain(&mut |record| match Record::decode(record) {
                Ok(Record::Trajectory(found)) => !is_theirs(&found),
                Ok(Record::Rating { number, .. }) => numbers.binary_search(&number).is_err(),
                Err(_) => true,
            })?;
        let event = Event::new(EventKind::Forgotten, version, through);
        self.push(Event {
            sessions: vec![session],
            ..event
        })
    }

    /// What is in it.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn status(&self) -> Result<FolderStatus, SonaError> {
        let trained = self
            .history
            .iter()
            .rev()
            .find(|event| event.kind == EventKind::Trained);
        let trained = trained.map_or(0, |event| event.timestamp);
        let (mut status, mut sessions) = (FolderStatus::default(), Vec::new());
        self.trajectories(|found| {
            status.n_trajectories += 1;
            status.n_with_tokens += usize::from(!found.tokens.is_empty());
            status.n_rated += usize::from(found.quality_score.is_some());
            if found.timestamp > trained {
                status.quality += f64::from(found.quality_score.unwrap_or(0.0));
            }
            sessions.push(session_hash(&found.session_id));
        })?;
        sessions.sort_unstable();
        sessions.dedup();
        status.n_sessions = sessions.len();
        status.log_bytes = self.log.bytes() + self.events.bytes();
        (status.version, status.versions) = (self.version(), self.versions());
        let paths = status
            .versions
            .iter()
            .map(|&version| self.version_path(version))
            .chain([self.working_path()]);
        status.version_bytes = paths
            .filter_map(|path| Some(fs::metadata(path).ok()?.len()))
            .sum();
        Ok(status)
    }

    /// Makes sure that all trajectories are on disk.
    pub(super) fn sync(&mut self) -> Result<(), SonaError> {
        self.log.prune(unix_millis());
        self.log.sync()
    }
}

pub(super) fn session_hash(session_id: &str) -> u64 {
    mix(SEED, session_id.as_bytes())
}

pub(super) fn check_score(score: f32) -> Result<(), SonaError> {
    if (0.0..=1.0).contains(&score) {
        return Ok(());
    }
    Err(SonaError::Option {
        option: "quality_score",
        value: f64::from(score),
        expected: "0 to 1",
    })
}

fn private() -> fs::OpenOptions {
    let mut options = File::options();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.read(true);
    options
}

/// Locks a folder by its file `name`, until what is returned is dropped.
pub(crate) fn lock(path: &Path, name: &str) -> Result<File, SonaError> {
    let lock = path.join(name);
    let file = private()
        .create(true)
        .append(true)
        .open(&lock)
        .map_err(SonaError::io(&lock))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(SonaError::Locked {
            path: path.to_owned(),
        }),
        Err(TryLockError::Error(error)) => Err(SonaError::io(&lock)(error)),
    }
}

pub(crate) fn make_folder(path: &Path) -> Result<(), SonaError> {
    let mut builder = DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
        .recursive(true)
        .create(path)
        .map_err(SonaError::io(path))
}

/// Removes a file that may be gone already.
pub(crate) fn remove(path: &Path) -> Result<(), SonaError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(SonaError::io(path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use crate::sona::event::ANY_SESSION;
    use crate::sona::folder::*;

    fn folder(name: &str) -> SonaFolder {
        let path =
            std::env::temp_dir().join(format!("ruvllm-folder-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        SonaFolder::open(path, &FolderOptions::default()).unwrap()
    }

    fn reopened(folder: SonaFolder) -> SonaFolder {
        let path = folder.path.clone();
        drop(folder);
        SonaFolder::open(path, &FolderOptions::default()).unwrap()
    }

    /// An event as a batch of `sessions` leaves it, with a file if it made a version.
    fn learn(folder: &mut SonaFolder, kind: EventKind, sessions: &[u64]) {
        let (is_new, through) = (kind.is_start(), folder.through() + 1);
        let version = if is_new {
            folder.next_version()
        } else {
            folder.version()
        };
        folder
            .push(Event {
                sessions: sessions.to_vec(),
                n_learnt: [1, 10],
                ..Event::new(kind, version, through)
            })
            .unwrap();
        if is_new {
            fs::write(folder.version_path(version), "learnt").unwrap();
            folder.prune_versions();
        }
    }

    /// Whatever happens: a folder whose history is summed up all the time has the same versions in
    /// effect as one whose is not, and forgetting leaves the same.
    #[test]
    fn a_summary_changes_nothing_but_the_history() {
        let mut random = 1u64;
        let mut below = |n: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % n
        };
        for round in 0..20 {
            let [mut whole, mut summed] = ["whole", "summed"].map(folder);
            for _ in 0..60 {
                let (action, session, other) = (below(20), 1 + below(6), 1 + below(6));
                let at = below(8) as usize;
                for folder in [&mut whole, &mut summed] {
                    match action {
                        0..9 => learn(folder, EventKind::Accepted, &[session, other]),
                        9..13 => learn(folder, EventKind::Unchanged, &[session]),
                        13..15 => learn(folder, EventKind::Refused, &[other]),
                        15 => learn(folder, EventKind::Calibrated, &[]),
                        16 => folder.trained().unwrap(),
                        17 => {
                            let versions = folder.versions();
                            folder
                                .rollback(versions.get(at).copied().unwrap_or(0))
                                .unwrap();
                        }
                        _ => {
                            folder
                                .push(Event {
                                    sessions: vec![session],
                                    ..Event::new(
                                        EventKind::Forget,
                                        folder.version(),
                                        folder.through(),
                                    )
                                })
                                .unwrap();
                            folder.finish_forgetting(session).unwrap();
                        }
                    }
                }
                let n_old = (2 * summed.history.len() / 3).min(summed.history.len() - 1);
                summed.summarise(n_old).unwrap();
                assert_eq!(whole.version(), summed.version(), "round {round}");
                assert_eq!(whole.through(), summed.through(), "round {round}");
                assert_eq!(whole.versions(), summed.versions(), "round {round}");
                assert_eq!(whole.next_version(), summed.next_version(), "round {round}");
            }
            let [learnt, left] = [&whole, &summed]
                .map(|folder| folder.history.iter().map(|e| e.n_learnt[1]).sum::<u64>());
            assert_eq!(learnt, left);
            assert!(summed.history.len() < whole.history.len());
            let history = summed.history.clone();
            let summed = reopened(summed);
            assert_eq!(summed.history, history);
            [whole, summed]
                .into_iter()
                .for_each(|folder| fs::remove_dir_all(&folder.path).unwrap());
        }
    }

    /// What its owner undid does not come back.
    #[test]
    fn a_summary_keeps_what_was_undone() {
        let [mut whole, mut summed] = ["undone-whole", "undone-summed"].map(folder);
        for folder in [&mut whole, &mut summed] {
            (0..4).for_each(|_| learn(folder, EventKind::Accepted, &[1]));
            folder.rollback(3).unwrap();
            learn(folder, EventKind::Refused, &[9]);
            folder.rollback(3).unwrap();
        }
        summed.summarise(summed.history.len() - 1).unwrap();
        for folder in [&mut whole, &mut summed] {
            let event = Event::new(EventKind::Forget, folder.version(), folder.through());
            folder
                .push(Event {
                    sessions: vec![9],
                    ..event
                })
                .unwrap();
            folder.finish_forgetting(9).unwrap();
        }
        assert_eq!(
            (whole.version(), whole.through()),
            (summed.version(), summed.through())
        );
        assert_eq!(summed.version(), 3);
        [whole, summed]
            .into_iter()
            .for_each(|folder| fs::remove_dir_all(&folder.path).unwrap());
    }

    /// The log stays small however much happens, and forgetting goes too far rather than not far
    /// enough.
    #[test]
    fn the_history_is_bounded() {
        let mut folder = folder("bounded");
        learn(&mut folder, EventKind::Calibrated, &[]);
        for i in 0..6000u64 {
            let sessions: Vec<u64> = (1..9).map(|j| 9 * i + j).collect();
            // Few versions: files are not what this is about.
            let kind = if i % 300 == 0 {
                EventKind::Accepted
            } else {
                EventKind::Refused
            };
            learn(&mut folder, kind, &sessions);
        }
        assert!(
            folder.history.len() <= MAX_EVENTS && folder.events.bytes() < 2 << 20,
            "{}",
            folder.events.bytes()
        );
        assert!(
            folder
                .history
                .iter()
                .any(|event| event.sessions == [ANY_SESSION])
        );
        let mut folder = reopened(folder);
        assert_eq!(
            (
                folder.version(),
                folder
                    .history
                    .iter()
                    .map(|event| event.n_learnt[0])
                    .sum::<u64>()
            ),
            (21, 6001)
        );
        // One of the first, whose version is gone, too.
        folder
            .push(Event {
                sessions: vec![6],
                ..Event::new(EventKind::Forget, 21, folder.through())
            })
            .unwrap();
        folder.finish_forgetting(6).unwrap();
        assert_eq!((folder.version(), folder.versions()), (1, vec![1]));
        // Old events are summed up however few they are.
        for event in &mut folder.history {
            event.timestamp = 1;
        }
        let records: Vec<_> = folder
            .history
            .iter()
            .map(|event| (1, event.encode()))
            .collect();
        folder.events.replace(&records).unwrap();
        let folder = reopened(folder);
        assert!(
            folder.history.len() < 12 && folder.version() == 1,
            "{:?}",
            folder.history
        );
        fs::remove_dir_all(&folder.path).unwrap();
    }
}
