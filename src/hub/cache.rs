//! The folder in which Hugging Face's tools keep what they downloaded, which models are shared
//! with: `models--OWNER--NAME/blobs/SHA256` hold the bytes, `snapshots/COMMIT/PATH` link to them,
//! `refs/REVISION` tell the commit (<https://huggingface.co/docs/huggingface_hub/guides/manage-cache>).

use super::client::{HubFile, Listing, home, variable};
use super::error::HubError;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Cache of the hub's files, shared with Hugging Face's tools: `HF_HUB_CACHE`, or `$HF_HOME/hub`, or
/// `~/.cache/huggingface/hub`.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

/// GGUF file in the cache.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CachedFile {
    /// `OWNER/NAME`.
    pub repo: String,
    /// Path within the snapshot, with slashes.
    pub file: String,
    /// Path on this machine.
    pub path: PathBuf,
    /// Size.
    pub bytes: u64,
}

impl Cache {
    /// The cache of this user; its folder need not be there.
    ///
    /// # Errors
    /// If the environment names none, and no home folder.
    pub fn open() -> Result<Cache, HubError> {
        let folder = variable("HF_HUB_CACHE").or_else(|| Some(home()?.join("hub")));
        let folder = folder
            .ok_or_else(|| HubError::Asked("there is no home folder: set HF_HUB_CACHE".into()))?;
        Ok(Cache { folder })
    }

    fn repo(&self, repo: &str) -> PathBuf {
        self.folder
            .join(format!("models--{}", repo.replace('/', "--")))
    }

    fn blob(&self, repo: &str, file: &HubFile) -> PathBuf {
        self.repo(repo).join("blobs").join(&file.sum)
    }

    /// Whether the bytes of a file are there.
    pub(super) fn has(&self, repo: &str, file: &HubFile) -> bool {
        fs::metadata(self.blob(repo, file)).is_ok_and(|blob| blob.len() == file.bytes)
    }

    /// The folder of a snapshot.
    pub(super) fn snapshot(&self, listing: &Listing) -> PathBuf {
        self.snapshot_at(&listing.repo, &listing.commit)
    }

    fn snapshot_at(&self, repo: &str, commit: &str) -> PathBuf {
        self.repo(repo).join("snapshots").join(commit)
    }

    /// The newest snapshot of a model's revision that is known here.
    fn known(&self, repo: &str, revision: &str) -> Option<PathBuf> {
        let commit = fs::read_to_string(self.repo(repo).join("refs").join(revision)).ok()?;
        Some(self.snapshot_at(repo, commit.trim()))
    }

    /// Where a file of a snapshot is.
    pub(super) fn path(&self, listing: &Listing, file: &HubFile) -> PathBuf {
        self.snapshot(listing).join(&file.path)
    }

    /// Gets the bytes of a file, unless they are there. `get` gets them from a place on and gives
    /// them to its second argument. They lie beside the blob until they are complete and have
    /// the right sum.
    pub(super) fn download(
        &self,
        repo: &str,
        file: &HubFile,
        mut get: impl FnMut(u64, &mut dyn FnMut(&[u8]) -> io::Result<()>) -> Result<(), HubError>,
    ) -> Result<(), HubError> {
        if self.has(repo, file) {
            return Ok(());
        }
        let blob = self.blob(repo, file);
        let partial = blob.with_file_name(format!("{}.incomplete", file.sum));
        let failed = HubError::io(&partial);
        fs::create_dir_all(self.repo(repo).join("blobs")).map_err(&failed)?;
        let mut out = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(&partial)
            .map_err(&failed)?;
        match out.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(HubError::Busy {
                    file: file.path.clone(),
                });
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        // Whoever held the lock before may have completed it.
        if self.has(repo, file) {
            return Ok(());
        }
        let mut there = out.metadata().map_err(&failed)?.len();
        if there > file.bytes {
            out.set_len(0).map_err(&failed)?;
            there = 0;
        }
        if there < file.bytes {
            get(there, &mut |bytes| out.write_all(bytes))?;
        }
        out.sync_all().map_err(&failed)?;
        let found = sum(&mut out, file).map_err(&failed)?;
        if found != file.sum {
            fs::remove_file(&partial).map_err(&failed)?;
            return Err(HubError::Sum {
                file: file.path.clone(),
                found,
                expected: file.sum.clone(),
            });
        }
        fs::rename(&partial, &blob).map_err(&failed)
    }

    /// Puts a file that was downloaded into its snapshot.
    pub(super) fn link(&self, listing: &Listing, file: &HubFile) -> Result<(), HubError> {
        let (blob, path) = (self.blob(&listing.repo, file), self.path(listing, file));
        let failed = HubError::io(&path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(&failed)?;
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        #[cfg(unix)]
        {
            // From the file up to the folder of the model, as the other tools have it.
            let up = "../".repeat(2 + file.path.split('/').count() - 1);
            std::os::unix::fs::symlink(format!("{up}blobs/{}", file.sum), &path).map_err(failed)?;
            debug_assert!(blob.exists());
        }
        #[cfg(not(unix))]
        fs::hard_link(&blob, &path).map_err(failed)?;
        Ok(())
    }

    /// Remembers the commit of a revision.
    pub(super) fn set_revision(&self, listing: &Listing, revision: &str) -> Result<(), HubError> {
        let refs = self.repo(&listing.repo).join("refs");
        let (path, new) = (refs.join(revision), refs.join(format!("{revision}.new")));
        let failed = HubError::io(&path);
        fs::create_dir_all(&refs).map_err(&failed)?;
        fs::write(&new, &listing.commit)
            .and_then(|()| fs::rename(&new, &path))
            .map_err(failed)
    }

    /// All GGUF files, by name.
    ///
    /// # Errors
    /// If the system refuses to read a folder.
    pub fn models(&self) -> Result<Vec<CachedFile>, HubError> {
        let mut models = Vec::new();
        for folder in entries(&self.folder)? {
            let name = folder
                .file_name()
                .and_then(|name| name.to_str())
                .unwrap_or_default();
            let Some((owner, name)) = name
                .strip_prefix("models--")
                .and_then(|name| name.split_once("--"))
            else {
                continue;
            };
            for snapshot in entries(&folder.join("snapshots"))? {
                walk(
                    &snapshot,
                    &snapshot,
                    &format!("{owner}/{name}"),
                    &mut models,
                    0,
                )?;
            }
        }
        models.sort_by(|a, b| (&a.repo, &a.file, &a.path).cmp(&(&b.repo, &b.file, &b.path)));
        Ok(models)
    }

    /// GGUF files of the newest snapshot of a model's revision that is known here.
    pub(super) fn newest(&self, repo: &str, revision: &str) -> Result<Vec<CachedFile>, HubError> {
        let Some(snapshot) = self.known(repo, revision) else {
            return Ok(Vec::new());
        };
        let models = self.models()?.into_iter();
        Ok(models
            .filter(|m| m.repo == repo && m.path.starts_with(&snapshot))
            .collect())
    }

    /// The folder of a checkpoint in safetensors whose revision is known here.
    pub(super) fn checkpoint(&self, repo: &str, revision: &str) -> Option<PathBuf> {
        let snapshot = self.known(repo, revision)?;
        let has_weights = entries(&snapshot)
            .ok()?
            .iter()
            .any(|path| path.extension().is_some_and(|end| end == "safetensors") && path.exists());
        (has_weights && snapshot.join("config.json").exists()).then_some(snapshot)
    }

    /// Removes a file from its snapshot, and its bytes if no other snapshot has them.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn remove(&self, model: &CachedFile) -> Result<(), HubError> {
        let failed = HubError::io(&model.path);
        let blob = fs::canonicalize(&model.path).ok();
        fs::remove_file(&model.path).map_err(&failed)?;
        let blobs = fs::canonicalize(self.repo(&model.repo).join("blobs")).ok();
        if let (Some(blob), Some(blobs)) = (blob, blobs)
            && blob.starts_with(&blobs)
            && !self
                .models()?
                .iter()
                .any(|other| fs::canonicalize(&other.path).is_ok_and(|other| other == blob))
        {
            fs::remove_file(&blob).map_err(&failed)?;
        }
        // Folders that are empty now.
        let mut folder = model.path.parent();
        while let Some(empty) =
            folder.filter(|folder| **folder != self.folder && fs::remove_dir(folder).is_ok())
        {
            folder = empty.parent();
        }
        if entries(&self.repo(&model.repo).join("snapshots"))?.is_empty() {
            fs::remove_dir_all(self.repo(&model.repo)).map_err(failed)?;
        }
        Ok(())
    }
}

/// What is in a folder; nothing if it is not there.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, HubError> {
    match fs::read_dir(folder) {
        Ok(entries) => entries
            .map(|entry| Ok(entry?.path()))
            .collect::<io::Result<_>>()
            .map_err(HubError::io(folder)),
        Err(error)
            if [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory].contains(&error.kind()) =>
        {
            Ok(Vec::new())
        }
        Err(error) => Err(HubError::io(folder)(error)),
    }
}

/// Adds the GGUF files below `folder` of a snapshot.
fn walk(
    snapshot: &Path,
    folder: &Path,
    repo: &str,
    models: &mut Vec<CachedFile>,
    depth: usize,
) -> Result<(), HubError> {
    for path in entries(folder)? {
        // A link whose bytes are not there is no model.
        let Ok(metadata) = fs::metadata(&path) else {
            continue;
        };
        if metadata.is_dir() && depth < 8 {
            walk(snapshot, &path, repo, models, depth + 1)?;
        } else if metadata.is_file() && path.extension().is_some_and(|end| end == "gguf") {
            let file = path
                .strip_prefix(snapshot)
                .unwrap_or(&path)
                .to_string_lossy()
                .replace('\\', "/");
            models.push(CachedFile {
                repo: repo.to_owned(),
                file,
                bytes: metadata.len(),
                path,
            });
        }
    }
    Ok(())
}

/// Sum of the bytes in `out` of the kind that the hub tells of `file`, in hexadecimal digits.
fn sum(out: &mut File, file: &HubFile) -> io::Result<String> {
    if file.sum.len() == 64 {
        return digest(out, Sha256::new());
    }
    // As git names what it keeps.
    digest(out, Sha1::new_with_prefix(format!("blob {}\0", file.bytes)))
}

fn digest(file: &mut File, mut hash: impl Digest) -> io::Result<String> {
    file.seek(SeekFrom::Start(0))?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => {
                let bytes = hash.finalize();
                return Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect());
            }
            n => hash.update(&buffer[..n]),
        }
    }
}
