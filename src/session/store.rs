//! Sessions that are kept by name: each in a folder of its own, in a common one.

use crate::session::session::Session;
use crate::session::{KeptError, StateError};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// The saved session.
const STATE: &str = "state.gguf";
/// Locked by whoever has the session.
const LOCK: &str = "lock";

/// Name of a kept session: 1 to 64 letters, digits, `-` and `_`, which is the name of a folder on
/// every system.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionName(String);

impl std::fmt::Display for SessionName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::str::FromStr for SessionName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<SessionName, &'static str> {
        let is_sound = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        if (1..=64).contains(&text.len()) && text.chars().all(is_sound) {
            Ok(SessionName(text.into()))
        } else {
            Err("expected 1 to 64 letters, digits, - and _")
        }
    }
}

/// A folder of sessions that are kept by name.
///
/// ```
/// use ruvllm::session::{KeptSessions, SessionName};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = ruvllm::Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
/// # let folder = std::env::temp_dir().join(format!("ruvllm-kept-{}", std::process::id()));
/// let kept = KeptSessions::new(&folder);
/// let (trip, mut session) = (kept.open(&"trip".parse()?)?, model.session()?);
/// trip.load(&mut session)?; // false: it is new
/// session.prefill(&model.tokenizer().unwrap().encode("Ownership is", true, false))?;
/// trip.save(&session)?;
/// drop(trip); // another process may go on with it
/// kept.rename(&"trip".parse()?, &"paris".parse()?)?;
/// assert_eq!(kept.names()?, ["paris".parse::<SessionName>()?]);
/// kept.delete(&"paris".parse()?)?;
/// # std::fs::remove_dir(&folder)?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct KeptSessions {
    folder: PathBuf,
}

impl KeptSessions {
    /// Those in `folder`, which need not exist yet.
    pub fn new(folder: impl Into<PathBuf>) -> KeptSessions {
        KeptSessions {
            folder: folder.into(),
        }
    }

    /// Folder of the session `name`, whether or not there is one.
    pub fn folder_of(&self, name: &SessionName) -> PathBuf {
        self.folder.join(&name.0)
    }

    /// All names, sorted. Folders with other names are not sessions.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn names(&self) -> Result<Vec<SessionName>, KeptError> {
        let mut names = Vec::new();
        match fs::read_dir(&self.folder) {
            Ok(entries) => {
                for entry in entries {
                    let name = entry.map_err(KeptError::io(&self.folder))?.file_name();
                    names.extend(
                        name.to_str()
                            .and_then(|name| name.parse::<SessionName>().ok()),
                    );
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(KeptError::io(&self.folder)(error)),
        }
        names.sort();
        Ok(names)
    }

    /// The session `name`, old or new; nobody else can open it until the returned value is dropped.
    ///
    /// # Errors
    /// If somebody else has it, or its folder cannot be made.
    pub fn open(&self, name: &SessionName) -> Result<KeptSession, KeptError> {
        let folder = self.folder_of(name);
        fs::create_dir_all(&folder).map_err(KeptError::io(&folder))?;
        KeptSession::lock(folder)
    }

    /// Gives the session `name` another name.
    ///
    /// # Errors
    /// If there is none, one of the new name exists already, or somebody has it.
    pub fn rename(&self, name: &SessionName, to: &SessionName) -> Result<(), KeptError> {
        let target = self.folder_of(to);
        let folder = self.unused(name)?;
        if target.exists() {
            return Err(KeptError::Exists {
                name: to.to_string(),
            });
        }
        fs::rename(&folder, &target).map_err(KeptError::io(&folder))
    }

    /// Deletes the session `name`, and all that its folder holds.
    ///
    /// # Errors
    /// If there is none, or somebody has it.
    pub fn delete(&self, name: &SessionName) -> Result<(), KeptError> {
        let folder = self.unused(name)?;
        fs::remove_dir_all(&folder).map_err(KeptError::io(&folder))
    }

    /// Folder of an existing session that nobody has.
    fn unused(&self, name: &SessionName) -> Result<PathBuf, KeptError> {
        let folder = self.folder_of(name);
        if !folder.is_dir() {
            return Err(KeptError::Missing {
                name: name.to_string(),
            });
        }
        // Locked for a moment only: Windows neither renames nor deletes folders with open files.
        Ok(KeptSession::lock(folder)?.folder)
    }
}

/// A session of [`KeptSessions`], which nobody else has meanwhile.
#[derive(Debug)]
pub struct KeptSession {
    folder: PathBuf,
    _lock: File,
}

impl KeptSession {
    fn lock(folder: PathBuf) -> Result<KeptSession, KeptError> {
        let path = folder.join(LOCK);
        let lock = File::options()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(KeptError::io(&path))?;
        match lock.try_lock() {
            Ok(()) => Ok(KeptSession {
                folder,
                _lock: lock,
            }),
            Err(TryLockError::WouldBlock) => Err(KeptError::InUse { folder }),
            Err(TryLockError::Error(error)) => Err(KeptError::io(&path)(error)),
        }
    }

    /// Its folder, in which there is room for other files than the state.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Continues `session` from the saved state; returns whether there is one.
    ///
    /// # Errors
    /// As [`SessionCache::load`](crate::session::SessionCache::load).
    pub fn load(&self, session: &mut Session) -> Result<bool, StateError> {
        let path = self.folder.join(STATE);
        let exists = path.exists();
        if exists {
            session.cache().load(path)?;
        }
        Ok(exists)
    }

    /// Saves the state of `session`, in place of an older one.
    ///
    /// # Errors
    /// As [`SessionState::save`](crate::session::SessionState::save).
    pub fn save(&self, session: &Session) -> Result<(), StateError> {
        session.save(&self.folder.join(STATE))
    }

    /// Removes the saved state, if there is one.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn forget(&self) -> Result<(), KeptError> {
        let path = self.folder.join(STATE);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(KeptError::io(&path)(error))
            }
            _ => Ok(()),
        }
    }
}
