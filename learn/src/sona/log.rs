//! Append-only files of records that survive a crash at any byte.
//!
//! A log is a sequence of segment files. A segment begins with a header: 8 bytes of magic, `u32`
//! version, `u32` kind, `u64` number. Records follow, each in a block: `u32` length, `u64` time,
//! `u32` checksum of these two, `u64` checksum of the payload, the payload. Checksums depend on a
//! block's place, so that no block can stand in for another. All numbers are little-endian.
//!
//! A block that the end of the last segment cuts off was being written when the process ended: it
//! is dropped. Anything else that does not fit its checksum is damage, and the log is refused.

use crate::sona::SonaError;
use ruvllm::gguf::NewFile;
use ruvllm::kv::hash::{SEED, mix};
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"RUVSONA\n";
/// Incremented when a file of the new form could be misread as one of the old.
const VERSION: u32 = 1;
const SEGMENT_HEADER: usize = 24;
const BLOCK_HEADER: usize = 24;
/// Largest payload.
const MAX_RECORD: usize = 16 << 20;
/// Largest segment, so that reading one takes bounded memory.
const MAX_SEGMENT: u64 = 256 << 20;
/// A full log has about so many segments; the oldest goes as a whole.
const SEGMENTS: u64 = 8;

/// What a log may hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of all segments; `None`: no bound.
    pub(crate) bytes: Option<u64>,
    /// Milliseconds after which a segment's last record is too old to keep; `None`: no bound.
    pub(crate) age: Option<u64>,
}

#[derive(Debug)]
struct Segment {
    number: u64,
    path: PathBuf,
    bytes: u64,
    /// Blocks in it.
    n: u64,
    /// Times of its earliest and of its latest record.
    times: (u64, u64),
}

/// The name of the segment `number` of the log `name`.
fn file_name(name: &str, number: u64) -> String {
    format!("{name}-{number:06}.log")
}

/// The number of the segment of the log `name` that a file is: none has two names, so a copy with
/// fewer zeros, or a sign, is none.
fn number_of(name: &str, file: &str) -> Option<u64> {
    let number = file
        .strip_prefix(name)?
        .strip_prefix('-')?
        .strip_suffix(".log")?;
    let number = number.parse().ok()?;
    (file == file_name(name, number)).then_some(number)
}

/// A log in a folder, open for writing.
#[derive(Debug)]
pub(crate) struct Log {
    folder: PathBuf,
    name: &'static str,
    kind: u32,
    limits: Limits,
    segments: Vec<Segment>,
    /// The last segment, once something was appended to it.
    file: Option<File>,
    /// Whether something was appended that may not be on disk yet.
    is_dirty: bool,
}

impl Log {
    /// Opens the log `name` in `folder`, and calls `visit` with its records in order. `kind` tells
    /// logs of different records apart.
    pub(crate) fn open(
        folder: &Path,
        name: &'static str,
        kind: u32,
        limits: Limits,
        visit: &mut dyn FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<Log, SonaError> {
        let mut numbers = Vec::new();
        for entry in fs::read_dir(folder).map_err(SonaError::io(folder))? {
            let file = entry.map_err(SonaError::io(folder))?.file_name();
            numbers.extend(file.to_str().and_then(|file| number_of(name, file)));
        }
        numbers.sort_unstable();
        let mut log = Log {
            folder: folder.to_owned(),
            name,
            kind,
            limits,
            segments: Vec::new(),
            file: None,
            is_dirty: false,
        };
        let last = numbers.last().copied();
        for number in numbers {
            let path = log.path(number);
            let segment = log.read_segment(number, &path, Some(number) == last, visit)?;
            log.segments.push(segment);
        }
        Ok(log)
    }

    fn path(&self, number: u64) -> PathBuf {
        self.folder.join(file_name(self.name, number))
    }

    fn header(&self, number: u64) -> Vec<u8> {
        [
            &MAGIC[..],
            &VERSION.to_le_bytes(),
            &self.kind.to_le_bytes(),
            &number.to_le_bytes(),
        ]
        .concat()
    }

    fn read_segment(
        &self,
        number: u64,
        path: &Path,
        is_last: bool,
        visit: &mut dyn FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<Segment, SonaError> {
        let len = fs::metadata(path).map_err(SonaError::io(path))?.len();
        let damaged = |offset: usize, what: String| SonaError::Damaged {
            path: path.to_owned(),
            offset: offset as u64,
            what,
        };
        if len > MAX_SEGMENT + (MAX_RECORD + BLOCK_HEADER) as u64 {
            return Err(damaged(
                0,
                format!("it has {len} bytes, more than any segment"),
            ));
        }
        let data = fs::read(path).map_err(SonaError::io(path))?;
        let mut segment = Segment {
            number,
            path: path.to_owned(),
            bytes: 0,
            n: 0,
            times: (u64::MAX, 0),
        };
        let header = self.header(number);
        if data.len() < SEGMENT_HEADER {
            return match is_last
                && (header.starts_with(&data) || data.iter().all(|&byte| byte == 0))
            {
                true => Ok(segment), // was being begun
                false => Err(damaged(0, "its header is incomplete".into())),
            };
        }
        if data[..8] != header[..8] || data[12..SEGMENT_HEADER] != header[12..] {
            return Err(damaged(
                0,
                format!("it does not begin as segment {number} of {}", self.name),
            ));
        }
        let found = u32::from_le_bytes([data[8], data[9], data[10], data[11]]);
        if found != VERSION {
            return Err(SonaError::Version {
                path: path.to_owned(),
                found,
                supported: VERSION,
            });
        }
        let mut at = SEGMENT_HEADER;
        while at < data.len() {
            let rest = &data[at..];
            // Some file systems give a file its length before its data.
            let is_void = rest.iter().all(|&byte| byte == 0);
            let torn = |begun: bool| is_last && (begun || is_void);
            let Some((head, body)) = rest.split_at_checked(BLOCK_HEADER) else {
                if torn(true) {
                    break;
                }
                return Err(damaged(at, "a block is cut off".into()));
            };
            let (n, time) = (u32_at(head, 0) as usize, u64_at(head, 4));
            if u32_at(head, 12) != head_sum(number, segment.n, &head[..12]) || n > MAX_RECORD {
                if torn(false) {
                    break;
                }
                return Err(damaged(
                    at,
                    "the header of a block does not fit its checksum".into(),
                ));
            }
            let Some(payload) = body.get(..n) else {
                if torn(true) {
                    break;
                }
                return Err(damaged(at, "a block is cut off".into()));
            };
            if u64_at(head, 16) != payload_sum(number, segment.n, payload) {
                if torn(body.len() == n) {
                    break;
                }
                return Err(damaged(at, "a block does not fit its checksum".into()));
            }
            visit(payload).map_err(|what| damaged(at, what))?;
            segment.n += 1;
            segment.times = (segment.times.0.min(time), segment.times.1.max(time));
            at += BLOCK_HEADER + n;
        }
        segment.bytes = at as u64;
        Ok(segment)
    }

    /// Bytes of all segments.
    pub(crate) fn bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.bytes).sum()
    }

    /// Appends a record of this time in milliseconds. If it fails, the log is as before.
    pub(crate) fn append(&mut self, time: u64, payload: &[u8]) -> Result<(), SonaError> {
        if payload.len() > MAX_RECORD {
            return Err(SonaError::TooLong {
                n: payload.len(),
                limit: MAX_RECORD,
            });
        }
        let full = self.limits.bytes.map_or(MAX_SEGMENT, |bytes| {
            (bytes / SEGMENTS).clamp(1 << 12, MAX_SEGMENT)
        });
        let too_late = |first: u64| {
            self.limits
                .age
                .is_some_and(|age| time.saturating_sub(first) > age / SEGMENTS)
        };
        let begins = self.segments.last().is_none_or(|last| {
            last.n > 0 && (last.bytes + payload.len() as u64 > full || too_late(last.times.0))
        });
        if begins {
            let number = self.segments.last().map_or(1, |last| last.number + 1);
            self.file = None;
            self.segments.push(Segment {
                number,
                path: self.path(number),
                bytes: 0,
                n: 0,
                times: (u64::MAX, 0),
            });
        }
        let (header, Some(last)) = (
            self.segments.last().map(|last| self.header(last.number)),
            self.segments.last_mut(),
        ) else {
            return Ok(());
        };
        let outcome = append_block(
            &mut self.file,
            last,
            &header.unwrap_or_default(),
            time,
            payload,
        );
        let failed = outcome.map_err(SonaError::io(&last.path));
        if failed.is_err() {
            self.file = None;
            if begins {
                let _ = fs::remove_file(&last.path);
                self.segments.pop();
            }
        }
        failed?;
        self.is_dirty = true;
        self.prune(time);
        Ok(())
    }

    /// Removes the oldest segments while there are too many bytes, and those that are too old.
    pub(crate) fn prune(&mut self, now: u64) {
        let Limits { bytes, age } = self.limits;
        while let [first, rest @ ..] = &self.segments[..] {
            let is_old =
                age.is_some_and(|age| first.n > 0 && first.times.1.saturating_add(age) < now);
            let is_excess = !rest.is_empty() && bytes.is_some_and(|most| self.bytes() > most);
            if !(is_old || is_excess) || fs::remove_file(&first.path).is_err() {
                break;
            }
            if rest.is_empty() {
                self.file = None;
            }
            self.segments.remove(0);
        }
    }

    /// Makes sure that what was appended is on disk.
    pub(crate) fn sync(&mut self) -> Result<(), SonaError> {
        if let (true, Some(file), Some(last)) = (self.is_dirty, &self.file, self.segments.last()) {
            file.sync_data().map_err(SonaError::io(&last.path))?;
        }
        self.is_dirty = false;
        Ok(())
    }

    /// Calls `visit` with all records, in order.
    pub(crate) fn read(
        &self,
        visit: &mut dyn FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<(), SonaError> {
        let last = self.segments.last().map(|last| last.number);
        for Segment {
            number, path, n, ..
        } in self.segments.iter().filter(|segment| segment.n > 0)
        {
            let found = self
                .read_segment(*number, path, Some(*number) == last, visit)?
                .n;
            if found != *n {
                let what = format!("{found} blocks are left of {n}");
                return Err(SonaError::Damaged {
                    path: path.clone(),
                    offset: 0,
                    what,
                });
            }
        }
        Ok(())
    }

    /// Removes the records that `keep` does not want, a segment at a time: after a crash the
    /// segments are whole, old or new.
    pub(crate) fn retain(&mut self, keep: &mut dyn FnMut(&[u8]) -> bool) -> Result<(), SonaError> {
        self.file = None;
        let last = self.segments.last().map(|last| last.number);
        for i in 0..self.segments.len() {
            let Segment {
                number,
                path,
                times,
                ..
            } = &self.segments[i];
            let (number, path, latest) = (*number, path.clone(), times.1);
            let (mut kept, mut any_gone) = (Vec::new(), false);
            self.read_segment(number, &path, Some(number) == last, &mut |payload| {
                match keep(payload) {
                    // The segment is as old as its latest record was; more is not asked of it.
                    true => kept.push((latest, payload.to_vec())),
                    false => any_gone = true,
                }
                Ok(())
            })?;
            if !any_gone {
                continue;
            }
            self.rewrite(i, &kept)?;
        }
        Ok(())
    }

    /// Replaces all records by these, with their times: after a crash the log is the old one or the
    /// new one. Does it, and returns true, if the log is one segment, as it is up to
    /// [`MAX_SEGMENT`] bytes.
    pub(crate) fn replace(&mut self, records: &[(u64, Vec<u8>)]) -> Result<bool, SonaError> {
        self.file = None;
        if self.segments.len() != 1 {
            return Ok(false);
        }
        self.rewrite(0, records).map(|()| true)
    }

    /// Writes segment `i` anew.
    fn rewrite(&mut self, i: usize, records: &[(u64, Vec<u8>)]) -> Result<(), SonaError> {
        let Segment { number, path, .. } = &self.segments[i];
        let mut data = self.header(*number);
        for (n, (time, payload)) in records.iter().enumerate() {
            data.extend(block(*number, n as u64, *time, payload));
        }
        let written = NewFile::create(path, true).and_then(|mut file| {
            file.write_all(&data)?;
            file.finish()
        });
        written.map_err(SonaError::io(path))?;
        (self.segments[i].bytes, self.segments[i].n) = (data.len() as u64, records.len() as u64);
        Ok(())
    }
}

fn append_block(
    open: &mut Option<File>,
    segment: &mut Segment,
    header: &[u8],
    time: u64,
    payload: &[u8],
) -> io::Result<()> {
    let file = match open {
        Some(file) => file,
        None => {
            let mut options = File::options();
            options.create(true).write(true).truncate(false);
            #[cfg(unix)]
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            let mut file = options.open(&segment.path)?;
            // What a crash or a failure left behind the last whole block.
            file.set_len(segment.bytes)?;
            file.seek(SeekFrom::End(0))?;
            open.insert(file)
        }
    };
    let mut data = if segment.bytes == 0 {
        header.to_vec()
    } else {
        Vec::new()
    };
    data.extend(block(segment.number, segment.n, time, payload));
    file.write_all(&data)?;
    segment.bytes += data.len() as u64;
    segment.n += 1;
    segment.times = (segment.times.0.min(time), segment.times.1.max(time));
    Ok(())
}

fn block(segment: u64, place: u64, time: u64, payload: &[u8]) -> Vec<u8> {
    let mut data = (payload.len() as u32).to_le_bytes().to_vec();
    data.extend(time.to_le_bytes());
    data.extend(head_sum(segment, place, &data).to_le_bytes());
    data.extend(payload_sum(segment, place, payload).to_le_bytes());
    data.extend(payload);
    data
}

fn payload_sum(segment: u64, place: u64, payload: &[u8]) -> u64 {
    mix(
        mix(mix(SEED, &segment.to_le_bytes()), &place.to_le_bytes()),
        payload,
    )
}

fn head_sum(segment: u64, place: u64, head: &[u8]) -> u32 {
    let sum = payload_sum(segment, place, head);
    (sum ^ (sum >> 32)) as u32
}

fn u32_at(data: &[u8], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&data[at..at + 4]);
    u32::from_le_bytes(bytes)
}

fn u64_at(data: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&data[at..at + 8]);
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use crate::sona::log::*;

    const FREE: Limits = Limits {
        bytes: None,
        age: None,
    };

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("ruvllm-log-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn open(folder: &Path, limits: Limits) -> Result<(Log, Vec<Vec<u8>>), SonaError> {
        let mut records = Vec::new();
        let log = Log::open(folder, "test", 1, limits, &mut |record| {
            records.push(record.to_vec());
            Ok(())
        })?;
        Ok((log, records))
    }

    fn records() -> Vec<Vec<u8>> {
        (0..5u8).map(|i| vec![i + 1; 3 * i as usize]).collect()
    }

    /// Copies under names that mean the same number are no segments, so that none is read twice.
    #[test]
    fn a_segment_has_one_name() {
        let folder = folder("names");
        let (mut log, _) = open(&folder, FREE).unwrap();
        for record in records() {
            log.append(1, &record).unwrap();
        }
        log.sync().unwrap();
        for name in [
            "test-1.log",
            "test-+000001.log",
            "test-0000001.log",
            "test-000002.log.old",
        ] {
            fs::copy(folder.join("test-000001.log"), folder.join(name)).unwrap();
        }
        assert_eq!(open(&folder, FREE).unwrap().1, records());
        assert_eq!(number_of("test", "test-1234567.log"), Some(1_234_567));
    }

    /// A file that ends anywhere holds the records that were whole, and can be continued.
    #[test]
    fn cut_off_anywhere_the_rest_is_whole() {
        let folder = folder("cut");
        let (mut log, _) = open(&folder, FREE).unwrap();
        records()
            .iter()
            .for_each(|record| log.append(0, record).unwrap());
        let whole = fs::read(log.path(1)).unwrap();
        for n in 0..whole.len() {
            for ending in [&[][..], &[0; 40]] {
                fs::write(log.path(1), [&whole[..n], ending].concat()).unwrap();
                let (mut log, found) = match open(&folder, FREE) {
                    Ok(opened) => opened,
                    // A number that ends in zeros, say, has another meaning with more of them.
                    Err(SonaError::Damaged { .. }) if !ending.is_empty() => continue,
                    Err(error) => panic!("{n}: {error}"),
                };
                assert!(records().starts_with(&found), "{n}: {found:?}");
                log.append(0, b"more").unwrap();
                let (_, after) = open(&folder, FREE).unwrap();
                assert_eq!(after, [&found[..], &[b"more".to_vec()]].concat(), "{n}");
            }
        }
        fs::remove_dir_all(folder).unwrap();
    }

    /// Other damage is refused, or takes the last record only.
    #[test]
    fn a_changed_byte_never_changes_a_record() {
        let folder = folder("changed");
        let (mut log, _) = open(&folder, FREE).unwrap();
        records()
            .iter()
            .for_each(|record| log.append(0, record).unwrap());
        let whole = fs::read(log.path(1)).unwrap();
        let mut refused = 0;
        for i in 0..whole.len() {
            for flip in [1, 0x80, 0xff] {
                let mut data = whole.clone();
                data[i] ^= flip;
                fs::write(log.path(1), data).unwrap();
                match open(&folder, FREE) {
                    Ok((_, found)) => assert!(found == records()[..4], "{i}: {found:?}"),
                    Err(SonaError::Damaged { .. } | SonaError::Version { .. }) => refused += 1,
                    Err(error) => panic!("{i}: {error}"),
                }
            }
        }
        assert!(refused > whole.len());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn size_and_age_are_bounded() {
        let folder = folder("bounds");
        let limits = Limits {
            bytes: Some(64 << 10),
            age: Some(1000),
        };
        let (mut log, _) = open(&folder, limits).unwrap();
        for i in 0..1000u64 {
            log.append(i / 10, &[7; 500]).unwrap();
            assert!(log.bytes() <= 64 << 10);
        }
        let (mut log, found) = open(&folder, limits).unwrap();
        assert!((100..130).contains(&found.len()), "{}", found.len());
        log.append(5000, b"much later").unwrap();
        assert_eq!(open(&folder, limits).unwrap().1, [b"much later"]);
        log.prune(7000);
        log.append(7000, b"last").unwrap();
        assert_eq!(open(&folder, limits).unwrap().1, [b"last"]);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_is_not_wanted_goes() {
        let folder = folder("retain");
        let (mut log, _) = open(
            &folder,
            Limits {
                bytes: Some(1 << 17),
                age: None,
            },
        )
        .unwrap();
        let all: Vec<Vec<u8>> = (0..200u8).map(|i| vec![i; 300]).collect();
        all.iter().for_each(|record| log.append(0, record).unwrap());
        assert!(log.segments.len() > 2);
        log.retain(&mut |record| record[0] % 3 != 0).unwrap();
        log.append(0, b"x").unwrap();
        let mut kept: Vec<_> = all
            .into_iter()
            .filter(|record| record[0] % 3 != 0)
            .collect();
        kept.push(b"x".to_vec());
        assert_eq!(open(&folder, FREE).unwrap().1, kept);
        fs::remove_dir_all(folder).unwrap();
    }

    /// A full disk is told, and what was there before is there after.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_told() {
        let folder = folder("full");
        let (mut log, _) = open(&folder, FREE).unwrap();
        log.append(0, b"before").unwrap();
        log.file = Some(File::options().write(true).open("/dev/full").unwrap());
        let error = log.append(0, b"lost").unwrap_err();
        assert!(
            matches!(&error, SonaError::Io { error, .. } if error.kind() == io::ErrorKind::StorageFull),
            "{error}"
        );
        log.append(0, b"after").unwrap();
        assert_eq!(
            open(&folder, FREE).unwrap().1,
            [b"before".to_vec(), b"after".to_vec()]
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
