//! GGUF files: open, look inside, write.
//!
//! [`Gguf::open`] maps the file and reads its header; tensors stay in place and are borrowed by
//! [`Gguf::data`]. Nothing is trusted: the whole header is validated before `open` returns (the
//! limits are in `reader.rs`), and after that nothing about a file's layout can fail. [`Header`] is
//! the header without the tensor data, to inspect a file that is large or remote. [`Writer`] makes
//! files; [`NewFile`] replaces any file safely.
//!
//! The format: magic `GGUF`, version, counts, metadata, tensor table, padding, tensor data, all
//! little-endian; see <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. Versions 2 and 3
//! differ only in that 3 allows big-endian files, which are refused here.
//!
//! # Files that change while they are open
//!
//! A mapped file is read from disk when its bytes are touched. If another program truncates it
//! meanwhile, the operating system stops this process with `SIGBUS`; if one rewrites it in place,
//! the model changes during use. Replace model files by renaming a new one over the old, as
//! [`Writer`] does: a process that has the old one open keeps it.

mod bytes;
mod error;
mod hash;
mod metadata;
mod reader;
mod resident;
mod writer;

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use error::GgufError;
pub use hash::content_hash;
pub use metadata::{Array, Metadata, StringArray, Value};
pub use writer::{NewFile, Writer};

use crate::quant::DType;
use bytes::Bytes;
use writer::WriteError;

/// A tensor as the file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorInfo {
    /// Its name, unique in the model.
    pub name: String,
    /// Its dimensions, one to four, none of them zero, in ggml's order: the first is the length of
    /// a row and varies fastest.
    pub dims: Vec<u64>,
    /// Type of its elements.
    pub dtype: DType,
    /// Offset of its data from the start of its file.
    pub offset: u64,
    /// Length of its data in bytes.
    pub n_bytes: u64,
    /// Index of its file in a split model, from 0.
    pub shard: usize,
}

impl TensorInfo {
    /// Number of elements.
    pub fn n_elems(&self) -> u64 {
        self.dims.iter().product()
    }
}

/// Bytes at each end of a tensor that [`Gguf::fingerprint`] includes.
const FINGERPRINT_BYTES: usize = 256;

/// The header of a GGUF file: everything but the tensor data.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Header {
    /// Version of the format.
    pub version: u32,
    /// Keys and values.
    pub metadata: Metadata,
    /// The tensors of this file, in its order.
    pub tensors: Vec<TensorInfo>,
    /// Tensors begin at multiples of this, counted from `data_offset`.
    pub alignment: u64,
    /// Offset of the tensor data from the start of the file.
    pub data_offset: u64,
    /// Indices of `tensors`, sorted by name.
    tensor_index: Vec<u32>,
}

impl Header {
    /// The first weight of a type that this build cannot read.
    pub fn unsupported_weight(&self) -> Option<&TensorInfo> {
        let mut weights = self.tensors.iter();
        weights.find(|t| t.name.ends_with(".weight") && t.dtype.format().is_none())
    }

    /// Parses the header of a file of `file_size` bytes that begins with `prefix`.
    ///
    /// # Errors
    /// [`GgufError::HeaderIncomplete`] if the header continues after the prefix: try again with
    /// more. Any other error is final.
    pub fn parse(prefix: &[u8], file_size: u64) -> Result<Header, GgufError> {
        Header::parse_owned(prefix.to_vec(), file_size)
    }

    /// Reads the header of a file, and little more.
    ///
    /// For a split model this is the header of one part.
    pub fn read(path: impl AsRef<Path>) -> Result<Header, GgufError> {
        let path = path.as_ref();
        let (file, file_size) = open_file(path)?;
        let mut prefix_len = 1 << 20;
        loop {
            let mut prefix = Vec::new();
            (&file)
                .take(prefix_len)
                .read_to_end(&mut prefix)
                .map_err(io_error(path))?;
            match Header::parse_owned(prefix, file_size) {
                Err(GgufError::HeaderIncomplete { have, need }) if have == prefix_len => {
                    prefix_len = need.max(4 * prefix_len);
                    io::Seek::rewind(&mut &file).map_err(io_error(path))?;
                }
                other => return other.map_err(in_file(path)),
            }
        }
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.position(name).map(|i| &self.tensors[i])
    }

    /// The index in `tensors` of the tensor called `name`.
    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        let name_of = |i: u32| self.tensors[i as usize].name.as_str();
        let found = self
            .tensor_index
            .binary_search_by(|&i| name_of(i).cmp(name))
            .ok()?;
        Some(self.tensor_index[found] as usize)
    }

    fn parse_owned(prefix: Vec<u8>, file_size: u64) -> Result<Header, GgufError> {
        reader::parse(&Arc::new(Bytes::in_memory(prefix.into())), file_size)
    }
}

/// Indices of the tensors sorted by name; names must be unique.
fn index_by_name(tensors: &[TensorInfo]) -> Result<Vec<u32>, GgufError> {
    let name = |i: u32| tensors[i as usize].name.as_str();
    let mut index: Vec<u32> = (0..tensors.len() as u32).collect();
    index.sort_unstable_by_key(|&i| name(i));
    if let Some(twice) = index.windows(2).find(|pair| name(pair[0]) == name(pair[1])) {
        return Err(GgufError::DuplicateTensor {
            name: name(twice[0]).to_owned(),
        });
    }
    Ok(index)
}

/// An open GGUF model: one file, or all parts of a split one.
///
/// Clones share the same map.
#[derive(Clone)]
pub struct Gguf(Arc<Inner>);

struct Inner {
    /// Header of the first file, with the tensors of all files.
    header: Header,
    shards: Vec<Arc<Bytes>>,
}

impl Inner {
    /// Copies the next part that is not copied yet. Returns whether there was one.
    fn copy_step(&self) -> io::Result<bool> {
        for (i, bytes) in self.shards.iter().enumerate() {
            let first = self
                .header
                .tensors
                .iter()
                .filter(|t| t.shard == i)
                .map(|t| t.offset)
                .min();
            if let Some(first) = first
                && bytes.copy_step(first as usize)?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Gguf {
    /// Whether all of it is mapped from files, so that it begins and ends at pages.
    #[cfg(all(feature = "metal", target_vendor = "apple"))]
    pub(crate) fn is_mapped(&self) -> bool {
        self.0.shards.iter().all(|bytes| bytes.is_mapped())
    }

    /// The same model with other metadata: `entries` replace those with the same keys.
    pub(crate) fn overriding(&self, entries: &[(String, Value)]) -> Gguf {
        let Inner { header, shards } = &*self.0;
        let header = Header {
            metadata: header.metadata.overriding(entries),
            ..header.clone()
        };
        Gguf(Arc::new(Inner {
            header,
            shards: shards.clone(),
        }))
    }

    /// Maps a file and reads its header. Any part of a split model opens all of it: the parts lie
    /// in one folder under names that end in `-00001-of-00003.gguf`.
    ///
    /// # Errors
    /// Wrapped in [`GgufError::InFile`], which names the file, except for [`GgufError::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf, GgufError> {
        let path = path.as_ref();
        let (bytes, header) = map(path)?;
        let Some(split) = Split::of(&header).map_err(in_file(path))? else {
            return Ok(Gguf(Arc::new(Inner {
                header,
                shards: vec![bytes],
            })));
        };
        let first = split.sibling(path, 0).map_err(in_file(path))?;
        let (bytes, header) = if split.no == 0 {
            (bytes, header)
        } else {
            map(&first)?
        };
        Gguf::open_split(&first, Split { no: 0, ..split }, bytes, header)
    }

    fn open_split(
        path: &Path,
        split: Split,
        bytes: Arc<Bytes>,
        mut header: Header,
    ) -> Result<Gguf, GgufError> {
        split.check(&header, 0).map_err(in_file(path))?;
        let mut shards = vec![bytes];
        for no in 1..split.count {
            let path = split.sibling(path, no).map_err(in_file(path))?;
            let (bytes, mut part) = map(&path)?;
            split.check(&part, no).map_err(in_file(&path))?;
            part.tensors.iter_mut().for_each(|t| t.shard = shards.len());
            header.tensors.append(&mut part.tensors);
            shards.push(bytes);
        }
        if let Some(expected) = header
            .metadata
            .opt_u64(SPLIT_TENSORS)
            .map_err(in_file(path))?
        {
            let found = header.tensors.len() as u64;
            if found != expected {
                return Err(in_file(path)(GgufError::SplitMismatch {
                    key: SPLIT_TENSORS,
                    expected,
                    found,
                }));
            }
        }
        header.tensor_index = index_by_name(&header.tensors).map_err(in_file(path))?;
        Ok(Gguf(Arc::new(Inner { header, shards })))
    }

    /// Reads a model from memory: embedded in the program, or downloaded on systems without files.
    /// Bytes whose address is not a multiple of 8 are copied once.
    pub fn from_bytes(bytes: impl Into<Cow<'static, [u8]>>) -> Result<Gguf, GgufError> {
        let bytes = Arc::new(Bytes::in_memory(bytes.into()));
        let header = reader::parse(&bytes, bytes.len() as u64)?;
        if let Some(split) = Split::of(&header)? {
            return Err(GgufError::SplitInMemory { count: split.count });
        }
        Ok(Gguf(Arc::new(Inner {
            header,
            shards: vec![bytes],
        })))
    }

    /// A model that is written to memory of this process, in huge pages where the system has them:
    /// a copy of it would not be read faster.
    ///
    /// # Errors
    /// As [`Writer::write`], and [`GgufError::Io`] if there is no memory.
    pub fn from_writer(writer: Writer<'_>) -> Result<Gguf, GgufError> {
        let header = writer.header()?;
        let len = usize::try_from(header.file_size).map_err(|_| {
            WriteError::from(io::Error::from(io::ErrorKind::OutOfMemory)).in_memory()
        })?;
        let bytes = Bytes::filled(len, |out| writer.write_behind(&header, out));
        let bytes = Arc::new(bytes.map_err(WriteError::in_memory)?);
        let header = reader::parse(&bytes, bytes.len() as u64)?;
        Ok(Gguf(Arc::new(Inner {
            header,
            shards: vec![bytes],
        })))
    }

    /// The header; of a split model that of the first part, with the tensors of all parts.
    pub fn header(&self) -> &Header {
        &self.0.header
    }

    /// Version of the format.
    pub fn version(&self) -> u32 {
        self.0.header.version
    }

    /// Keys and values.
    pub fn metadata(&self) -> &Metadata {
        &self.0.header.metadata
    }

    /// All tensors, in the order of the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.0.header.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.0.header.tensor(name)
    }

    /// The data of a tensor of this model, in place; it begins at a multiple of 8 bytes in memory.
    ///
    /// # Panics
    /// If `info` comes from another model and does not fit this one.
    pub fn data(&self, info: &TensorInfo) -> &[u8] {
        // The header was checked against the length of the map, so these fit `usize`.
        let start = info.offset as usize;
        self.0.shards[info.shard].part(start..start + info.n_bytes as usize)
    }

    /// Part of the data of a tensor, from the copy in huge pages as soon as that has this part.
    ///
    /// # Panics
    /// If the tensor has no such part.
    pub(crate) fn data_part(&self, info: &TensorInfo, part: Range<usize>) -> &[u8] {
        assert!(
            part.end <= info.n_bytes as usize,
            "{part:?} of {}",
            info.name
        );
        let start = info.offset as usize;
        self.0.shards[info.shard].part(start + part.start..start + part.end)
    }

    /// A hash (FNV-1a) of the metadata, the tensor table, and the first and last bytes of every
    /// tensor.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut bytes = Vec::new();
        for (key, value) in self.metadata().iter() {
            bytes.extend_from_slice(key.as_bytes());
            value.write(&mut bytes);
        }
        for t in self.tensors() {
            bytes.extend_from_slice(t.name.as_bytes());
            bytes.extend_from_slice(&(t.dtype as u32).to_le_bytes());
            t.dims
                .iter()
                .for_each(|dim| bytes.extend_from_slice(&dim.to_le_bytes()));
            let data = self.data(t);
            let n = data.len().min(FINGERPRINT_BYTES);
            bytes.extend_from_slice(&data[..n]);
            bytes.extend_from_slice(&data[data.len() - n..]);
        }
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &b| {
            (hash ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    /// A hash of all bytes of its files; those are read once, on several threads.
    pub(crate) fn content_hash(&self) -> u64 {
        content_hash(self.0.shards.iter().map(|bytes| &bytes[..]))
    }

    /// Size of the file, or of all files of a split model, in bytes.
    pub fn file_size(&self) -> u64 {
        self.0.shards.iter().map(|bytes| bytes.len() as u64).sum()
    }

    /// Whether it comes from mapped files, copied or not.
    pub(crate) fn is_map(&self) -> bool {
        self.0.shards.iter().all(|bytes| bytes.is_map())
    }

    /// Copies the tensors into memory of this process, in huge pages where the system has them:
    /// decoding then reads about a fifth faster. The pages of a mapped file are released. Other
    /// threads can use the model meanwhile. `progress` is called with the share done every few
    /// megabytes, and may stop the copying by returning `false`; what was copied stays.
    ///
    /// # Errors
    /// If there is no address space for a copy.
    pub fn make_resident(&self, progress: &mut dyn FnMut(f32) -> bool) -> std::io::Result<()> {
        let total = self.file_size().max(1) as f32;
        while self.0.copy_step()? {
            if !progress(self.resident_bytes() as f32 / total) {
                break;
            }
        }
        Ok(())
    }

    /// Bytes of tensors that [`Gguf::make_resident`] has copied so far.
    pub fn resident_bytes(&self) -> u64 {
        self.0.shards.iter().map(|bytes| bytes.copied()).sum()
    }

    /// Whether a copy would have huge pages and leave the same amount of memory free for other
    /// processes. Files of less than 32 MiB stay in the caches anyway.
    pub fn worth_copying(&self) -> bool {
        let is_copied = self.0.shards.iter().all(|bytes| bytes.is_anonymous());
        !is_copied
            && self.file_size() >= 32 << 20
            && resident::worth_it(self.file_size() - self.resident_bytes())
    }

    /// Runs [`Gguf::make_resident`] on a thread, which ends when the last clone of `self` is
    /// dropped.
    pub(crate) fn make_resident_in_background(&self) {
        let inner = Arc::downgrade(&self.0);
        // If there is no thread or memory for it, the map is used.
        let _ = std::thread::Builder::new()
            .name("ruvllm-resident".into())
            .spawn(move || {
                while let Some(inner) = inner.upgrade() {
                    if !inner.copy_step().unwrap_or(false) {
                        return;
                    }
                }
            });
    }

    /// Asks the system to start reading all tensors from disk, and returns at once.
    pub fn prefetch(&self) {
        self.0.shards.iter().for_each(|bytes| bytes.prefetch());
    }
}

/// Shows the header.
impl std::fmt::Debug for Gguf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.header.fmt(f)
    }
}

const SPLIT_NO: &str = "split.no";
const SPLIT_COUNT: &str = "split.count";
const SPLIT_TENSORS: &str = "split.tensors.count";

/// Place of a file in a split model.
#[derive(Clone, Copy)]
struct Split {
    /// Index of the part, from 0.
    no: u64,
    count: u64,
}

impl Split {
    /// The split that the header describes; `None` for a file that is a whole model.
    fn of(header: &Header) -> Result<Option<Split>, GgufError> {
        let count = header.metadata.opt_u64(SPLIT_COUNT)?.unwrap_or(1);
        if count <= 1 {
            return Ok(None);
        }
        Ok(Some(Split {
            no: header.metadata.u64(SPLIT_NO)?,
            count,
        }))
    }

    /// File name suffix of part `no`.
    fn suffix(&self, no: u64) -> String {
        format!("-{:05}-of-{:05}.gguf", no.saturating_add(1), self.count)
    }

    /// The path of part `no`, from that of this part.
    fn sibling(&self, path: &Path, no: u64) -> Result<PathBuf, GgufError> {
        let own = self.suffix(self.no);
        let prefix = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.strip_suffix(&own));
        let Some(prefix) = prefix else {
            return Err(GgufError::SplitName {
                no: self.no.saturating_add(1),
                count: self.count,
                expected: own,
            });
        };
        Ok(path.with_file_name(format!("{prefix}{}", self.suffix(no))))
    }

    /// Checks that a header is that of part `no` of the same model.
    fn check(&self, header: &Header, no: u64) -> Result<(), GgufError> {
        for (key, expected) in [(SPLIT_COUNT, self.count), (SPLIT_NO, no)] {
            let found = header.metadata.u64(key)?;
            if found != expected {
                return Err(GgufError::SplitMismatch {
                    key,
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }
}

fn io_error(path: &Path) -> impl Fn(io::Error) -> GgufError {
    move |error| GgufError::Io {
        path: path.to_owned(),
        error,
    }
}

fn in_file(path: &Path) -> impl Fn(GgufError) -> GgufError {
    move |error| GgufError::InFile {
        path: path.to_owned(),
        error: Box::new(error),
    }
}

/// A file of another format, mapped as [`Gguf::open`] maps its own: read-only, its bytes read from
/// disk when they are touched. The same holds for [files that
/// change](self#files-that-change-while-they-are-open).
pub struct MappedFile(Bytes);

impl MappedFile {
    /// Maps the file.
    ///
    /// # Errors
    /// [`GgufError::Io`] if it is no regular file or cannot be mapped.
    pub fn open(path: impl AsRef<Path>) -> Result<MappedFile, GgufError> {
        let path = path.as_ref();
        let (file, _) = open_file(path)?;
        Bytes::map(&file).map(MappedFile).map_err(io_error(path))
    }
}

impl std::ops::Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Opens a regular file. Other kinds (a folder, a pipe) cannot be mapped, and opening them might
/// block.
fn open_file(path: &Path) -> Result<(File, u64), GgufError> {
    let metadata = std::fs::metadata(path).map_err(io_error(path))?;
    if !metadata.is_file() {
        let error = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
        return Err(GgufError::Io {
            path: path.to_owned(),
            error,
        });
    }
    let file = File::open(path).map_err(io_error(path))?;
    let size = file.metadata().map_err(io_error(path))?.len();
    Ok((file, size))
}

fn map(path: &Path) -> Result<(Arc<Bytes>, Header), GgufError> {
    let (file, _) = open_file(path)?;
    let bytes = Arc::new(Bytes::map(&file).map_err(io_error(path))?);
    let header = reader::parse(&bytes, bytes.len() as u64).map_err(in_file(path))?;
    Ok((bytes, header))
}
