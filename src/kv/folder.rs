//! The prefix cache on disk: a folder of blocks, the second level below the radix tree.
//!
//! A block is a file with the keys and values of 64 positions, in all groups, in the precision tier
//! that is never released. Where windows, precision by age or recurrent layers release or overwrite
//! data, there is a file for each checkpoint, too, with that data and the page that is not yet
//! full. A file's name is a hash of everything on which its bits depend, including all tokens up to
//! its end. It begins with these in full, so that neither a collision nor another tenant's file is
//! ever mistaken for it, and ends with a checksum: a file that is incomplete or damaged is removed
//! and counts as missing. Files are put in place by renaming, so that any number of processes can
//! share a folder; nothing is synced, as the checksum detects the results of a crash.

use crate::arch::KV_BLOCK;
use crate::kv::CachedToken;
use crate::kv::hash::{SEED, mix};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

const MAGIC: &[u8; 8] = b"ruvllmKB";
/// Version of the file format.
const VERSION: u32 = 2;
const EXTENSION: &str = "kv";
/// Extension of blocks being written; a killed process may leave some.
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

/// A page's table, and its number in it.
pub(super) type TableEntry = [u32; 2];

/// File names: hashes of everything up to a block's end.
#[derive(Debug)]
pub(super) struct Keys<'a> {
    identity: &'a str,
    tokens: &'a [CachedToken],
    /// Hash of everything before each page.
    borders: Vec<[u64; 2]>,
}

impl<'a> Keys<'a> {
    /// Names for the files of a prefix of `tokens`. `identity` describes everything else on which
    /// bits depend.
    pub(super) fn new(identity: &'a str, tokens: &'a [CachedToken]) -> Keys<'a> {
        let start = [0, 1].map(|lane| mix(SEED + lane, identity.as_bytes()));
        let pages = tokens.chunks_exact(KV_BLOCK).scan(start, |hash, page| {
            *hash = with_tokens(*hash, page);
            Some(*hash)
        });
        Keys {
            identity,
            tokens,
            borders: [start].into_iter().chain(pages).collect(),
        }
    }

    /// Name of the file that ends at position `end`.
    fn name(&self, end: usize) -> String {
        let page = end / KV_BLOCK;
        let hash = match &self.tokens[page * KV_BLOCK..end] {
            [] => self.borders[page],
            rest => with_tokens(self.borders[page], rest),
        };
        format!("{:016x}{:016x}.{EXTENSION}", hash[0], hash[1])
    }

    /// First bytes of the file: everything its bits depend on.
    fn head(&self, end: usize) -> Vec<u8> {
        let mut head = MAGIC.to_vec();
        for n in [VERSION, self.identity.len() as u32, end as u32] {
            head.extend_from_slice(&n.to_le_bytes());
        }
        head.extend_from_slice(self.identity.as_bytes());
        for t in &self.tokens[..end] {
            head.extend_from_slice(&t.token.to_le_bytes());
            head.push(u8::from(t.generated));
        }
        head
    }
}

fn with_tokens(hash: [u64; 2], tokens: &[CachedToken]) -> [u64; 2] {
    let bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|t| (2 * u64::from(t.token) + u64::from(t.generated)).to_le_bytes())
        .collect();
    hash.map(|hash| mix(hash, &bytes))
}

/// An open file; everything but its pages has been read.
#[derive(Debug)]
pub(super) struct Found {
    file: File,
    path: PathBuf,
    /// Checksum of the bytes read so far.
    hash: u64,
    pub(super) places: Vec<TableEntry>,
}

impl PrefixFolder {
    /// Opens the folder `path`, creating it if necessary; files may take `budget` bytes.
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
            let age = |path: &Path| {
                fs::metadata(path)?
                    .modified()?
                    .elapsed()
                    .map_err(io::Error::other)
            };
            if path.extension().is_some_and(|e| e == TEMPORARY)
                && age(&path).is_ok_and(|age| age > abandoned)
            {
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

    /// Adds to the number of tokens that sequences loaded from the folder.
    pub(super) fn add_loaded(&self, n_tokens: usize) {
        self.tokens_loaded
            .fetch_add(n_tokens as u64, Ordering::Relaxed);
    }

    /// The file that ends at position `end`, if it exists; `page_bytes` are the sizes of pages,
    /// table by table.
    pub(super) fn find(&self, keys: &Keys<'_>, end: usize, page_bytes: &[usize]) -> Option<Found> {
        let path = self.path.join(keys.name(end));
        let mut file = File::open(&path).ok()?;
        match read_head(&mut file, &keys.head(end), end, page_bytes) {
            Ok(Some((hash, places))) => Some(Found {
                file,
                path,
                hash,
                places,
            }),
            _ => {
                self.remove_damaged(&path);
                None
            }
        }
    }

    /// Reads the pages of a file into `parts`; returns false if it is not intact.
    pub(super) fn read(&self, mut found: Found, parts: &mut [&mut [u8]]) -> bool {
        if !read_pages(&mut found, parts).unwrap_or(false) {
            self.remove_damaged(&found.path);
            return false;
        }
        // The least recently used are removed first. Without write permission, the time of writing
        // counts.
        let _ = found.file.set_modified(SystemTime::now());
        true
    }

    fn remove_damaged(&self, path: &Path) {
        self.damaged.fetch_add(1, Ordering::Relaxed);
        let _ = fs::remove_file(path);
    }

    /// Writes the file that ends at position `end`, unless it exists. Failure is counted but not an
    /// error: the file is then missing.
    pub(super) fn write(&self, keys: &Keys<'_>, end: usize, pages: &[(TableEntry, &[u8])]) {
        let name = keys.name(end);
        let path = self.path.join(&name);
        if path.exists() {
            return;
        }
        let n = self.n_files.fetch_add(1, Ordering::Relaxed);
        let temporary = self
            .path
            .join(format!(".{name}.{}.{n}.{TEMPORARY}", std::process::id()));
        let written = self
            .write_new(&temporary, keys.head(end), pages)
            .and_then(|()| fs::rename(&temporary, &path));
        if written.is_err() {
            self.failed.fetch_add(1, Ordering::Relaxed);
            let _ = fs::remove_file(&temporary);
        }
    }

    fn write_new(
        &self,
        path: &Path,
        mut head: Vec<u8>,
        pages: &[(TableEntry, &[u8])],
    ) -> io::Result<()> {
        head.extend_from_slice(&(pages.len() as u32).to_le_bytes());
        head.extend(
            pages
                .iter()
                .flat_map(|(place, _)| place)
                .flat_map(|n| n.to_le_bytes()),
        );
        let n_bytes =
            head.len() + pages.iter().map(|(_, page)| page.len()).sum::<usize>() + size_of::<u64>();
        self.make_room(n_bytes as u64)?;
        let mut options = File::options();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600); // it contains text of the user
        let mut file = options.open(path)?;
        let mut hash = SEED;
        for bytes in [&head[..]]
            .into_iter()
            .chain(pages.iter().map(|(_, page)| *page))
        {
            hash = mix(hash, bytes);
            file.write_all(bytes)?;
        }
        file.write_all(&hash.to_le_bytes())
    }

    /// Removes the least recently used blocks until `need` more bytes fit, and a tenth more, so
    /// that this happens rarely.
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
        let most = if bytes.saturating_add(need) > self.budget {
            self.budget / 10 * 9
        } else {
            self.budget
        };
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

/// Reads up to the pages of a file that ends at position `end` and must begin with `head`: returns
/// the checksum and the places of the pages, or `None` if it is another file or has another length.
fn read_head(
    file: &mut File,
    head: &[u8],
    end: usize,
    page_bytes: &[usize],
) -> io::Result<Option<(u64, Vec<TableEntry>)>> {
    let n_bytes = file.metadata()?.len();
    let mut read = vec![0; head.len() + size_of::<u32>()];
    file.read_exact(&mut read)?;
    let Some(n_places) = read
        .strip_prefix(head)
        .and_then(|n| n.try_into().ok())
        .map(u32::from_le_bytes)
    else {
        return Ok(None);
    };
    let of_places = u64::from(n_places) * size_of::<TableEntry>() as u64;
    if of_places > n_bytes {
        return Ok(None);
    }
    let start = read.len();
    read.resize(start + of_places as usize, 0);
    file.read_exact(&mut read[start..])?;
    let (words, _) = read[start..].as_chunks::<4>();
    let (places, _) = words.as_chunks::<2>();
    let places: Vec<TableEntry> = places
        .iter()
        .map(|place| place.map(u32::from_le_bytes))
        .collect();
    let mut expected = (read.len() + size_of::<u64>()) as u64;
    for &[table, page] in &places {
        let Some(&n) = page_bytes
            .get(table as usize)
            .filter(|_| (page as usize) < end.div_ceil(KV_BLOCK))
        else {
            return Ok(None);
        };
        expected += n as u64;
    }
    Ok((expected == n_bytes).then(|| (mix(SEED, &read), places)))
}

/// Reads the pages of a file; returns whether it is intact.
fn read_pages(found: &mut Found, parts: &mut [&mut [u8]]) -> io::Result<bool> {
    for part in parts {
        found.file.read_exact(part)?;
        found.hash = mix(found.hash, part);
    }
    let mut checksum = [0; 8];
    found.file.read_exact(&mut checksum)?;
    Ok(checksum == found.hash.to_le_bytes())
}
