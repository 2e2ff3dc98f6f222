//! A memory in a folder.

use crate::clock::unix_millis;
use crate::memory::entry::{Record, cleaned, short};
use crate::memory::index::Index;
use crate::memory::versions::Versions;
use crate::memory::words::names;
use crate::memory::{Entry, Hit, MemoryError, NewEntry, Vectors, Verdict};
use crate::sona::folder::{lock, make_folder};
use crate::sona::log::{Limits, Log};
use ruvllm::arch::Arch;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};

const LOCK: &str = "memory-lock";
const LOG: &str = "memory";
/// Most entries that are searched one by one.
const MOST_ENTRIES: usize = 100_000;
/// One in this many entries goes when there are too many.
const PRUNED: usize = 8;
/// Least likeness of words of an entry that a correction is of.
const CORRECTED: f32 = 0.3;
/// Entries that are looked at for the one that is corrected.
const LIKE: usize = 16;
/// Likeness of words from which on vectors are not asked.
const SURE: f32 = 0.5;

/// What a memory may hold. `..Default::default()` sets the remaining fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryOptions {
    /// Most entries, 8 to 100,000; the oldest go first. Default 10,000.
    pub max_entries: usize,
    /// Most bytes on disk, at least 65,536; the oldest entries go first. Default 64 MiB.
    pub max_bytes: u64,
}

impl Default for MemoryOptions {
    fn default() -> Self {
        MemoryOptions {
            max_entries: 10_000,
            max_bytes: 64 << 20,
        }
    }
}

/// What one owner taught and corrected, in a folder that this process alone has open for it. It may
/// be the folder of a [`SonaFolder`](crate::sona::SonaFolder).
///
/// The folder is what separates owners: notes come from all entries in it, of whatever session, and
/// from nothing else. So each tenant has a folder of its own.
///
/// The file is readable by its owner only, and whole whenever the process ends; damage is refused
/// with its position. What is forgotten, or was changed, is no longer in the file when the call
/// returns, nor is an adapter that learnt it.
#[derive(Debug)]
pub struct Memory {
    path: PathBuf,
    _lock: File,
    log: Log,
    options: MemoryOptions,
    /// In the order of their numbers.
    entries: Vec<Entry>,
    /// Number of the next entry: no other has or names it.
    next: u64,
    index: Index,
    arch: Arch,
    pub(super) versions: Versions,
}

impl Memory {
    /// Opens the memory in a folder; makes both if they do not exist.
    ///
    /// # Errors
    /// If another process has it open, its file is damaged or of another version or cannot be read
    /// or written, or an option is out of its range.
    pub fn open(path: impl AsRef<Path>, options: &MemoryOptions) -> Result<Memory, MemoryError> {
        let ranges = [
            (
                "max_entries",
                options.max_entries as u64,
                8..=MOST_ENTRIES as u64,
                "8 to 100,000",
            ),
            (
                "max_bytes",
                options.max_bytes,
                1 << 16..=u64::MAX,
                "at least 65,536",
            ),
        ];
        for (option, value, range, expected) in ranges {
            if !range.contains(&value) {
                return Err(MemoryError::Option {
                    option,
                    value,
                    expected,
                });
            }
        }
        let path = path.as_ref();
        make_folder(path)?;
        let file = lock(path, LOCK)?;
        let limits = Limits {
            bytes: None,
            age: None,
        };
        let (mut found, mut forgotten) = (HashMap::<u64, Entry>::new(), HashSet::new());
        let (mut is_clean, mut last) = (true, 0);
        let log = Log::open(path, LOG, 3, limits, &mut |record| {
            match Record::decode(record)? {
                Record::Entry(entry) => {
                    last = last.max(entry.number).max(entry.corrects);
                    is_clean &= found.insert(entry.number, *entry).is_none();
                }
                Record::Forgotten(number) => {
                    forgotten.insert(number);
                }
            }
            Ok(())
        })?;
        let mut entries: Vec<Entry> = found
            .into_values()
            .filter(|entry| !forgotten.contains(&entry.number))
            .collect();
        entries.sort_by_key(|entry| entry.number);
        let mut memory = Memory {
            versions: Versions::open(path, &entries, is_clean && forgotten.is_empty())?,
            path: path.to_owned(),
            _lock: file,
            log,
            options: options.clone(),
            index: Index::new(&entries, 0),
            entries,
            next: last.saturating_add(1),
            arch: Arch::detect(),
        };
        // A process may have ended while it forgot.
        if !is_clean || !forgotten.is_empty() {
            memory.rewrite()?;
        }
        memory.prune()?;
        Ok(memory)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All entries, in the order of their numbers.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The entry of a number.
    pub fn entry(&self, number: u64) -> Option<&Entry> {
        self.place(number).map(|i| &self.entries[i])
    }

    fn place(&self, number: u64) -> Option<usize> {
        self.entries
            .binary_search_by_key(&number, |entry| entry.number)
            .ok()
    }

    /// The entry that corrects entry `number`, which therefore takes no effect.
    pub fn corrected_by(&self, number: u64) -> Option<u64> {
        let mut entries = self.entries.iter().rev();
        entries
            .find(|entry| entry.corrects == number && number != 0)
            .map(|entry| entry.number)
    }

    /// Bytes on disk.
    pub fn bytes(&self) -> u64 {
        self.log.bytes()
    }

    /// Entries that are also found by vectors of the model of the latest search; others are found by
    /// their words alone, until [`Memory::refresh`].
    pub fn n_with_vectors(&self) -> usize {
        self.index.n_vectors()
    }

    /// Remembers something, with its vector if `vectors` make one; returns its number. What is
    /// remembered already, in the same words, becomes the latest.
    ///
    /// # Errors
    /// If the text is too long or empty, its vector cannot be computed, or it cannot be written;
    /// nothing is changed then.
    pub fn remember(
        &mut self,
        new: NewEntry,
        vectors: Option<&Vectors>,
    ) -> Result<u64, MemoryError> {
        let text = cleaned(&new.text)?;
        let (space, vector) = match vectors {
            Some(vectors) => vectors.stored(&text)?,
            None => (0, Vec::new()),
        };
        let corrects = match new.is_correction {
            true => self.corrected_of(&text),
            false => 0,
        };
        let same = |entry: &&Entry| entry.text == text && entry.session == short(&new.session);
        let same = self.entries.iter().find(same);
        // What is said again goes on correcting what it has corrected.
        let corrects = match same {
            Some(same) if corrects == 0 || corrects == same.number => same.corrects,
            _ => corrects,
        };
        let same = same.map(|entry| entry.number);
        let entry = Entry {
            number: self.next,
            revision: 0,
            timestamp: unix_millis(),
            text,
            verdict: new.verdict,
            session: short(&new.session),
            corrects,
            space,
            vector,
        };
        let number = entry.number;
        self.log.append(entry.timestamp, &entry.encode())?;
        self.log.sync()?;
        self.next = self.next.saturating_add(1);
        self.index.push(&entry);
        self.entries.push(entry);
        if let Some(same) = same {
            self.forget(same)?;
        }
        self.prune()?;
        Ok(number)
    }

    /// Changes the text and the verdict of an entry.
    ///
    /// # Errors
    /// If there is no such entry, otherwise as [`Memory::remember`].
    pub fn edit(
        &mut self,
        number: u64,
        text: &str,
        verdict: Verdict,
        vectors: Option<&Vectors>,
    ) -> Result<(), MemoryError> {
        let place = self
            .place(number)
            .ok_or(MemoryError::NoSuchEntry { number })?;
        let text = cleaned(text)?;
        let (space, vector) = match vectors {
            Some(vectors) => vectors.stored(&text)?,
            None => (0, Vec::new()),
        };
        let old = &self.entries[place];
        let entry = Entry {
            revision: old.revision.saturating_add(1),
            text,
            verdict,
            space,
            vector,
            ..old.clone()
        };
        self.log.append(unix_millis(), &entry.encode())?;
        self.log.sync()?;
        self.entries[place] = entry;
        self.versions.forget(&self.path, &self.entries)?;
        self.rewrite()
    }

    /// Forgets an entry.
    ///
    /// # Errors
    /// If there is no such entry, or the file cannot be written.
    pub fn forget(&mut self, number: u64) -> Result<(), MemoryError> {
        self.place(number)
            .ok_or(MemoryError::NoSuchEntry { number })?;
        self.forget_all(&[number])
    }

    /// Forgets what comes from a session; returns how many entries that were.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn forget_session(&mut self, session: &str) -> Result<usize, MemoryError> {
        let session = short(session);
        let theirs = self.entries.iter().filter(|entry| entry.session == session);
        let numbers: Vec<u64> = theirs.map(|entry| entry.number).collect();
        self.forget_all(&numbers)?;
        Ok(numbers.len())
    }

    fn forget_all(&mut self, numbers: &[u64]) -> Result<(), MemoryError> {
        if numbers.is_empty() {
            return Ok(());
        }
        // On disk first: what is interrupted from here on is finished when it is opened again.
        for &number in numbers {
            self.log.append(unix_millis(), &Record::forgotten(number))?;
        }
        self.log.sync()?;
        let gone: HashSet<u64> = numbers.iter().copied().collect();
        self.entries.retain(|entry| !gone.contains(&entry.number));
        self.versions.forget(&self.path, &self.entries)?;
        self.rewrite()
    }

    /// Removes from the file all but the entries as they are now.
    fn rewrite(&mut self) -> Result<(), MemoryError> {
        let entries: HashMap<u64, u64> = self
            .entries
            .iter()
            .map(|entry| (entry.number, entry.revision))
            .collect();
        self.log
            .retain(&mut |record| match Record::decode(record) {
                Ok(Record::Entry(entry)) => entries.get(&entry.number) == Some(&entry.revision),
                Ok(Record::Forgotten(_)) | Err(_) => false,
            })?;
        self.index = Index::new(&self.entries, self.index.space());
        Ok(())
    }

    /// Forgets the oldest while there are too many.
    fn prune(&mut self) -> Result<(), MemoryError> {
        while self.entries.len() > self.options.max_entries
            || (self.log.bytes() > self.options.max_bytes && !self.entries.is_empty())
        {
            let oldest = self
                .entries
                .iter()
                .take(self.entries.len().div_ceil(PRUNED));
            let oldest: Vec<u64> = oldest.map(|entry| entry.number).collect();
            self.forget_all(&oldest)?;
        }
        Ok(())
    }

    /// Computes the vectors of entries that have none of this model, such as those of another one.
    /// Returns how many.
    ///
    /// # Errors
    /// If a pass fails, or the file cannot be written.
    pub fn refresh(&mut self, vectors: &Vectors) -> Result<usize, MemoryError> {
        let mut n = 0;
        for i in 0..self.entries.len() {
            let entry = &self.entries[i];
            if entry.space == vectors.space {
                continue;
            }
            let (space, vector) = vectors.stored(&entry.text)?;
            let entry = Entry {
                revision: entry.revision.saturating_add(1),
                space,
                vector,
                ..entry.clone()
            };
            self.log.append(unix_millis(), &entry.encode())?;
            self.entries[i] = entry;
            n += 1;
        }
        if n > 0 {
            self.log.sync()?;
            self.rewrite()?;
        }
        Ok(n)
    }

    /// The entries that are most like a text, the likest first, at most `n`, without those that were
    /// corrected. Every entry is compared: by words, and by vectors where the words of none are as
    /// good as the text's own.
    ///
    /// # Errors
    /// If the vector of the text cannot be computed.
    pub fn search(
        &mut self,
        text: &str,
        vectors: Option<&Vectors>,
        n: usize,
    ) -> Result<Vec<Hit>, MemoryError> {
        let Some(vectors) = vectors else {
            return Ok(self.likest(text, None, n));
        };
        if self.entries.is_empty() {
            return Ok(Vec::new());
        }
        if self.index.space() != vectors.space {
            self.index = Index::new(&self.entries, vectors.space);
        }
        // Where words are enough, nobody waits for a vector.
        let by_words = self.likest(text, None, n);
        if by_words.first().is_some_and(|hit| hit.words >= SURE) {
            return Ok(by_words);
        }
        let vector = vectors.of(text)?;
        Ok(self.likest(text, Some(&vector), n))
    }

    /// The entry that a text corrects, 0 if there is none: of those that are like it the one that it shares
    /// most names with, since words as "that has changed" make corrections like each other.
    fn corrected_of(&self, text: &str) -> u64 {
        let (names_of_text, mut best) = (names(text), (0, None));
        for hit in self.likest(text, None, LIKE) {
            let entry = self.entry(hit.number).filter(|_| hit.words >= CORRECTED);
            let Some(entry) = entry else { continue };
            let n = names(&entry.text).intersection(&names_of_text).count();
            // The likest comes first.
            if best.1.is_none() || n > best.0 {
                best = (n, Some(hit.number));
            }
        }
        best.1.unwrap_or(0)
    }

    fn likest(&self, text: &str, vector: Option<&[f32]>, n: usize) -> Vec<Hit> {
        let corrected: HashSet<u64> = self.entries.iter().map(|entry| entry.corrects).collect();
        let is_active = |number| !corrected.contains(&number);
        self.index.search(self.arch, text, vector, n, is_active)
    }
}
