//! The prefix cache on disk: a folder of blocks, the second level below the radix tree.
//!
//! A block is a file with the keys and values of 64 positions, in all groups, in the precision tier
//! that is never released. Where windows, precision by age or recurrent layers release or overwrite
//! data, there is a file for each checkpoint, too, with that data and the page that is not yet
//! full. A file's name is a hash of everything on which its bits depend, including all tokens up to
//! its end. It begins with these in full, so that neither a collision nor another tenant's file is
//! ever mistaken for it, and ends with a checksum: a file that is incomplete or damaged is removed
//! and counts as missing.

use crate::arch::KV_BLOCK;
use crate::kv::file_cache::FileCache;
use crate::kv::hash::{SEED, mix};
use crate::kv::{CachedToken, ImageKey};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

const MAGIC: &[u8; 8] = b"ruvllmKB";
/// Version of the file format.
const VERSION: u32 = 2;
const EXTENSION: &str = "kv";

/// A folder of blocks, with a limit on their size.
#[derive(Debug)]
pub(crate) struct PrefixFolder {
    files: FileCache,
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
        format!("{:016x}{:016x}", hash[0], hash[1])
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
            let is_image = t.image != ImageKey::default();
            head.push(u8::from(t.generated) | u8::from(is_image) << 1);
            if is_image {
                head.extend(image_bytes(t));
            }
        }
        head
    }
}

fn with_tokens(hash: [u64; 2], tokens: &[CachedToken]) -> [u64; 2] {
    let bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|t| (2 * u64::from(t.token) + u64::from(t.generated)).to_le_bytes())
        .collect();
    let is_image = |t: &&CachedToken| t.image != ImageKey::default();
    let images: Vec<u8> = tokens
        .iter()
        .filter(is_image)
        .flat_map(image_bytes)
        .collect();
    hash.map(|hash| {
        let hash = mix(hash, &bytes);
        // Without images the names are as they were before there were any.
        if images.is_empty() {
            hash
        } else {
            mix(hash, &images)
        }
    })
}

fn image_bytes(token: &CachedToken) -> impl Iterator<Item = u8> {
    token.image.0.into_iter().flat_map(u64::to_le_bytes)
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
        Ok(PrefixFolder {
            files: FileCache::open(path, budget, EXTENSION)?,
            tokens_loaded: AtomicU64::new(0),
            damaged: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        })
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
        let path = self.files.path(&keys.name(end));
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
        if self.files.path(&name).exists() {
            return;
        }
        let mut head = keys.head(end);
        head.extend_from_slice(&(pages.len() as u32).to_le_bytes());
        head.extend(
            pages
                .iter()
                .flat_map(|(place, _)| place)
                .flat_map(|n| n.to_le_bytes()),
        );
        let parts: Vec<&[u8]> = [&head[..]]
            .into_iter()
            .chain(pages.iter().map(|(_, page)| *page))
            .collect();
        if self.files.write(&name, &parts).is_err() {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
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
