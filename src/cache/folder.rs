//! The prefix cache on disk: a folder of blocks, the second level below the radix tree.
//!
//! A block is a file with the keys and values of 64 positions, in all groups, of sequences that never release pages.
//! Its name is a hash of everything on which its bits depend, including all tokens up to its end. The file begins with
//! these in full, so that neither a collision nor another tenant's file is ever mistaken for it, and ends with a
//! checksum: a block that is incomplete or damaged is removed and counts as missing. Blocks are put in place by
//! renaming, so that any number of processes can share a folder; nothing is synced, as the checksum detects the results
//! of a crash.

use super::CachedToken;
use super::hash::{SEED, mix};
use crate::arch::KV_BLOCK;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

const MAGIC: &[u8; 8] = b"ruvllmKB";
/// Incremented when the form of a block changes.
const VERSION: u32 = 1;
const EXTENSION: &str = "kv";
/// Extension of blocks being written, which a killed process leaves behind.
const TEMPORARY: &str = "tmp";

/// A folder of blocks, with a limit on their size.
#[derive(Debug)]
pub(crate) struct PrefixFolder {
    path: PathBuf,
    budget: u64,
    /// Bytes of all blocks known to this process.
    bytes: Mutex<u64>,
    n_files: AtomicU64,
    tokens_loaded: AtomicU64,
    damaged: AtomicU64,
    failed: AtomicU64,
}

/// Identifies a block by everything up to its end.
#[derive(Debug)]
pub(super) struct BlockKey {
    name: String,
    head: Vec<u8>,
}

/// The keys of all whole pages of `tokens`, from page `first` on. `identity` describes everything else on which bits
/// depend.
pub(super) fn block_keys<'a>(
    identity: &'a str,
    tokens: &'a [CachedToken],
    first: usize,
) -> impl Iterator<Item = BlockKey> + 'a {
    let start = [0, 1].map(|lane| mix(SEED + lane, identity.as_bytes()));
    let mut hash = start;
    tokens.chunks_exact(KV_BLOCK).enumerate().filter_map(move |(i, page)| {
        let bytes: Vec<u8> =
            page.iter().flat_map(|t| (2 * u64::from(t.token) + u64::from(t.generated)).to_le_bytes()).collect();
        hash = hash.map(|hash| mix(hash, &bytes));
        (i >= first).then(|| {
            let all = &tokens[..(i + 1) * KV_BLOCK];
            let mut head = MAGIC.to_vec();
            for n in [VERSION, identity.len() as u32, all.len() as u32] {
                head.extend_from_slice(&n.to_le_bytes());
            }
            head.extend_from_slice(identity.as_bytes());
            for t in all {
                head.extend_from_slice(&t.token.to_le_bytes());
                head.push(u8::from(t.generated));
            }
            BlockKey { name: format!("{:016x}{:016x}.{EXTENSION}", hash[0], hash[1]), head }
        })
    })
}

impl PrefixFolder {
    /// Opens the folder `path`, creating it if necessary; blocks may take `budget` bytes.
    pub(crate) fn open(path: &Path, budget: u64) -> io::Result<PrefixFolder> {
        fs::create_dir_all(path)?;
        let folder = PrefixFolder {
            path: path.to_owned(),
            budget,
            bytes: Mutex::default(),
            n_files: AtomicU64::new(0),
            tokens_loaded: AtomicU64::new(0),
            damaged: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        };
        for entry in fs::read_dir(path)? {
            let (path, abandoned) = (entry?.path(), std::time::Duration::from_secs(3600));
            let age = |path: &Path| fs::metadata(path)?.modified()?.elapsed().map_err(io::Error::other);
            if path.extension().is_some_and(|e| e == TEMPORARY) && age(&path).is_ok_and(|age| age > abandoned) {
                let _ = fs::remove_file(&path);
            }
        }
        folder.make_room(0)?;
        Ok(folder)
    }

    /// Tokens loaded from the folder, damaged blocks, and blocks that could not be written.
    pub(super) fn counts(&self) -> [u64; 3] {
        [&self.tokens_loaded, &self.damaged, &self.failed].map(|n| n.load(Ordering::Relaxed))
    }

    /// The file of a block, if it exists.
    pub(super) fn find(&self, key: &BlockKey) -> Option<File> {
        File::open(self.path.join(&key.name)).ok()
    }

    /// Reads the pages of a block into `parts`; returns false if the block is not intact.
    pub(super) fn read(&self, mut file: File, key: &BlockKey, parts: &mut [&mut [u8]]) -> bool {
        if !is_whole(&mut file, key, parts).unwrap_or(false) {
            self.damaged.fetch_add(1, Ordering::Relaxed);
            let _ = fs::remove_file(self.path.join(&key.name));
            return false;
        }
        // The least recently used are removed first. Without write permission, the time of writing counts.
        let _ = file.set_modified(SystemTime::now());
        self.tokens_loaded.fetch_add(KV_BLOCK as u64, Ordering::Relaxed);
        true
    }

    /// Writes a block, unless it exists. Failure is counted but not an error: the block is then missing.
    pub(super) fn write(&self, key: &BlockKey, parts: &[&[u8]]) {
        let path = self.path.join(&key.name);
        if path.exists() {
            return;
        }
        let n = self.n_files.fetch_add(1, Ordering::Relaxed);
        let temporary = self.path.join(format!(".{}.{}.{n}.{TEMPORARY}", key.name, std::process::id()));
        let written = self.write_new(&temporary, key, parts).and_then(|()| fs::rename(&temporary, &path));
        if written.is_err() {
            self.failed.fetch_add(1, Ordering::Relaxed);
            let _ = fs::remove_file(&temporary);
        }
    }

    fn write_new(&self, path: &Path, key: &BlockKey, parts: &[&[u8]]) -> io::Result<()> {
        let n_bytes = key.head.len() + parts.iter().map(|part| part.len()).sum::<usize>() + size_of::<u64>();
        self.make_room(n_bytes as u64)?;
        let mut options = File::options();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600); // it contains text of the user
        let mut file = options.open(path)?;
        let mut hash = SEED;
        for bytes in [&key.head[..]].into_iter().chain(parts.iter().copied()) {
            hash = mix(hash, bytes);
            file.write_all(bytes)?;
        }
        file.write_all(&hash.to_le_bytes())
    }

    /// Removes the least recently used blocks until `need` more bytes fit, and a tenth more, so that this happens
    /// rarely.
    fn make_room(&self, need: u64) -> io::Result<()> {
        let mut bytes = self.bytes.lock().unwrap_or_else(|e| e.into_inner());
        if need > 0 && bytes.saturating_add(need) <= self.budget {
            *bytes += need;
            return Ok(());
        }
        let mut blocks = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            // Another process may have removed the file in the meantime.
            if let Ok(found) = fs::metadata(&path)
                && path.extension().is_some_and(|e| e == EXTENSION)
            {
                blocks.push((found.modified()?, found.len(), path));
            }
        }
        blocks.sort();
        *bytes = blocks.iter().map(|block| block.1).sum();
        let most = if bytes.saturating_add(need) > self.budget { self.budget / 10 * 9 } else { self.budget };
        for (_, n, path) in blocks {
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

/// Reads a block; returns whether it is the one that the key names, and intact.
fn is_whole(file: &mut File, key: &BlockKey, parts: &mut [&mut [u8]]) -> io::Result<bool> {
    let n_bytes = key.head.len() + parts.iter().map(|part| part.len()).sum::<usize>() + size_of::<u64>();
    if file.metadata()?.len() != n_bytes as u64 {
        return Ok(false);
    }
    let mut head = vec![0; key.head.len()];
    file.read_exact(&mut head)?;
    if head != key.head {
        return Ok(false);
    }
    let mut hash = mix(SEED, &head);
    for part in parts {
        file.read_exact(part)?;
        hash = mix(hash, part);
    }
    let mut checksum = [0; 8];
    file.read_exact(&mut checksum)?;
    Ok(checksum == hash.to_le_bytes())
}
