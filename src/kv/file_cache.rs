//! A folder of files that may be removed at any time, with a limit on their size.
//!
//! A file ends with a checksum. Files are put in place by renaming, so that any number of processes
//! can share a folder; nothing is synced, as the checksum detects the results of a crash.

use crate::kv::hash::{SEED, mix};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// Extension of files being written; a killed process may leave some.
const TEMPORARY: &str = "tmp";
/// Age from which those are removed.
const ABANDONED: Duration = Duration::from_secs(3600);

/// Files with one extension in a folder.
#[derive(Debug)]
pub(crate) struct FileCache {
    folder: PathBuf,
    budget: u64,
    extension: &'static str,
    /// Bytes of all files known to this process.
    bytes: Mutex<u64>,
    n_files: AtomicU64,
}

impl FileCache {
    /// Opens the folder, creating it if necessary; files may take `budget` bytes.
    pub(crate) fn open(
        folder: &Path,
        budget: u64,
        extension: &'static str,
    ) -> io::Result<FileCache> {
        fs::create_dir_all(folder)?;
        let files = FileCache {
            folder: folder.to_owned(),
            budget,
            extension,
            bytes: Mutex::default(),
            n_files: AtomicU64::new(0),
        };
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let age = |path: &Path| {
                fs::metadata(path)?
                    .modified()?
                    .elapsed()
                    .map_err(io::Error::other)
            };
            if path.extension().is_some_and(|e| e == TEMPORARY)
                && age(&path).is_ok_and(|age| age > ABANDONED)
            {
                let _ = fs::remove_file(&path);
            }
        }
        files.make_room(0)?;
        Ok(files)
    }

    /// Where the file of this name is, if it exists.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.{}", self.extension))
    }

    /// The contents of a file without their checksum, unless they are longer than `max` or damaged:
    /// those of a damaged file are removed.
    #[cfg_attr(not(feature = "vision"), allow(dead_code))]
    pub(crate) fn read(&self, name: &str, max: u64) -> Option<Vec<u8>> {
        let path = self.path(name);
        let file = File::open(&path).ok()?;
        let n = file.metadata().ok()?.len();
        let mut bytes = fs::read(&path).ok().filter(|_| n <= max)?;
        let is_intact = bytes
            .split_last_chunk::<8>()
            .is_some_and(|(contents, sum)| mix(SEED, contents).to_le_bytes() == *sum);
        if !is_intact {
            let _ = fs::remove_file(&path);
            return None;
        }
        bytes.truncate(bytes.len() - size_of::<u64>());
        // The least recently used are removed first. Without write permission, the time of writing
        // counts.
        let _ = file.set_modified(SystemTime::now());
        Some(bytes)
    }

    /// Writes a file of these parts and their checksum, unless it exists.
    pub(crate) fn write(&self, name: &str, parts: &[&[u8]]) -> io::Result<()> {
        let path = self.path(name);
        if path.exists() {
            return Ok(());
        }
        let n = self.n_files.fetch_add(1, Ordering::Relaxed);
        let temporary = self
            .folder
            .join(format!(".{name}.{}.{n}.{TEMPORARY}", std::process::id()));
        let written = self
            .write_new(&temporary, parts)
            .and_then(|()| fs::rename(&temporary, &path));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    fn write_new(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()> {
        let n_bytes = parts.iter().map(|part| part.len()).sum::<usize>() + size_of::<u64>();
        self.make_room(n_bytes as u64)?;
        let mut options = File::options();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600); // it is of the user's texts
        let mut file = options.open(path)?;
        let mut hash = SEED;
        for part in parts {
            hash = mix(hash, part);
            file.write_all(part)?;
        }
        file.write_all(&hash.to_le_bytes())
    }

    /// Removes the least recently used files until `need` more bytes fit, and a tenth more, so that
    /// this happens rarely.
    fn make_room(&self, need: u64) -> io::Result<()> {
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if need > 0 && bytes.saturating_add(need) <= self.budget {
            *bytes += need;
            return Ok(());
        }
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            // Another process may have removed the file in the meantime.
            if let Ok(found) = fs::metadata(&path)
                && path.extension().is_some_and(|e| e == self.extension)
            {
                files.push((found.modified()?, found.len(), path));
            }
        }
        files.sort();
        *bytes = files.iter().map(|file| file.1).sum();
        let most = if bytes.saturating_add(need) > self.budget {
            self.budget / 10 * 9
        } else {
            self.budget
        };
        for (_, n, path) in files {
            if bytes.saturating_add(need) <= most {
                break;
            }
            let _ = fs::remove_file(&path);
            *bytes -= n;
        }
        if bytes.saturating_add(need) > self.budget {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        *bytes += need;
        Ok(())
    }
}
