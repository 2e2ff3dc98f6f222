//! Writing GGUF files: metadata first, then tensor by tensor, so that a file much larger than
//! memory can be written.

use crate::gguf::metadata::Value;
use crate::gguf::reader::{DEFAULT_ALIGNMENT, MAX_ALIGNMENT, tensor_bytes};
use crate::gguf::{GgufError, Header, in_file, io_error};
use crate::quant::DType;
use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process;

type Produce<'a> = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + 'a>;

struct Tensor<'a> {
    name: String,
    dims: Vec<u64>,
    dtype: DType,
    produce: Produce<'a>,
}

/// Collects metadata and tensors, then writes them as a GGUF file of version 3.
///
/// The result can be read: the header is checked by the parser, with all its limits, before the
/// first byte is written.
///
/// ```
/// # fn main() -> Result<(), ruvllm::gguf::GgufError> {
/// use ruvllm::{gguf::{Gguf, Writer}, quant::DType};
///
/// let mut writer = Writer::new();
/// writer.metadata("general.architecture", "llama");
/// writer.tensor("ones", &[2], DType::F32, [1f32.to_le_bytes(), 1f32.to_le_bytes()].concat());
/// let gguf = Gguf::from_bytes(writer.to_bytes()?)?;
/// assert_eq!(gguf.metadata().str("general.architecture")?, "llama");
/// assert_eq!(gguf.tensors()[0].dims, [2]);
/// # Ok(()) }
/// ```
#[derive(Default)]
pub struct Writer<'a> {
    metadata: Vec<(String, Value)>,
    tensors: Vec<Tensor<'a>>,
    overwrite: bool,
    private: bool,
}

impl<'a> Writer<'a> {
    /// A writer with neither metadata nor tensors.
    pub fn new() -> Self {
        Writer::default()
    }

    /// Sets a key; a key set twice keeps its place and takes the new value. The file's alignment is
    /// `general.alignment`, or 32 without it.
    pub fn metadata(&mut self, key: impl Into<String>, value: impl Into<Value>) -> &mut Self {
        let (key, value) = (key.into(), value.into());
        match self.metadata.iter_mut().find(|(known, _)| *known == key) {
            Some(entry) => entry.1 = value,
            None => self.metadata.push((key, value)),
        }
        self
    }

    /// Adds a tensor: `dims` in ggml's order (row length first), `data` as whole blocks of `dtype`.
    pub fn tensor(
        &mut self,
        name: impl Into<String>,
        dims: &[u64],
        dtype: DType,
        data: impl Into<Cow<'a, [u8]>>,
    ) -> &mut Self {
        let data = data.into();
        self.tensor_with(name, dims, dtype, move |out| out.write_all(&data))
    }

    /// Adds a tensor; `produce` writes its data when the file is written, in any number of chunks.
    /// An error it returns stops the writing and is returned as [`GgufError::Io`].
    pub fn tensor_with(
        &mut self,
        name: impl Into<String>,
        dims: &[u64],
        dtype: DType,
        produce: impl FnOnce(&mut dyn Write) -> io::Result<()> + 'a,
    ) -> &mut Self {
        self.tensors.push(Tensor {
            name: name.into(),
            dims: dims.to_vec(),
            dtype,
            produce: Box::new(produce),
        });
        self
    }

    /// Lets [`write`](Self::write) replace a file that exists.
    pub fn overwrite(&mut self) -> &mut Self {
        self.overwrite = true;
        self
    }

    /// Makes a new file unreadable for other users, where the system has such permissions.
    pub fn private(&mut self) -> &mut Self {
        self.private = true;
        self
    }

    /// Writes the file by way of a [`NewFile`].
    ///
    /// # Errors
    /// [`GgufError::Exists`]; the errors of [`Header::parse`]; [`GgufError::TensorData`] if the
    /// data of a tensor does not have the length of its shape; [`GgufError::Io`].
    pub fn write(self, path: impl AsRef<Path>) -> Result<(), GgufError> {
        let path = path.as_ref();
        let refuse = !self.overwrite;
        let exists = || GgufError::Exists {
            path: path.to_owned(),
        };
        if refuse && path.exists() {
            return Err(exists());
        }
        let io_error = io_error(path);
        let mut out = NewFile::create(path, self.private).map_err(&io_error)?;
        self.write_to(&mut out).map_err(|error| match error {
            WriteError::Gguf(error) => in_file(path)(error),
            WriteError::Io(source) => io_error(source),
        })?;
        // The file may have appeared while tensors were quantised.
        if refuse && path.exists() {
            return Err(exists());
        }
        out.finish().map_err(&io_error)
    }

    /// Writes the file to memory.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn to_bytes(self) -> Result<Vec<u8>, GgufError> {
        let mut out = Vec::new();
        self.write_to(&mut out).map_err(WriteError::in_memory)?;
        Ok(out)
    }

    fn write_to(self, out: &mut dyn Write) -> Result<(), WriteError> {
        let header = self.header()?;
        self.write_behind(&header, out)
    }

    /// The header, and the size that the file will have.
    pub(super) fn header(&self) -> Result<FileHeader, GgufError> {
        // A wrong value does no harm here; the parser below refuses it.
        let alignment = self
            .metadata
            .iter()
            .find(|(key, _)| key == "general.alignment");
        let alignment = alignment
            .and_then(|(_, value)| u64::try_from(value.integer()?).ok())
            .filter(|alignment| alignment.is_power_of_two() && *alignment <= MAX_ALIGNMENT)
            .unwrap_or(DEFAULT_ALIGNMENT);

        let mut header = b"GGUF".to_vec();
        header.extend_from_slice(&3u32.to_le_bytes());
        header.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        header.extend_from_slice(&(self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut header, key);
            value.write(&mut header);
        }
        let mut data_size = 0u64;
        for t in &self.tensors {
            string(&mut header, &t.name);
            header.extend_from_slice(&(t.dims.len() as u32).to_le_bytes());
            t.dims
                .iter()
                .for_each(|dim| header.extend_from_slice(&dim.to_le_bytes()));
            header.extend_from_slice(&(t.dtype as u32).to_le_bytes());
            header.extend_from_slice(&data_size.to_le_bytes());
            let end = tensor_bytes(&t.name, &t.dims, t.dtype)?.checked_add(data_size);
            data_size = end
                .and_then(|end| end.checked_next_multiple_of(alignment))
                .ok_or_else(|| {
                    let (name, dtype) = (t.name.clone(), t.dtype.to_string());
                    GgufError::TensorTooLarge {
                        name,
                        dtype,
                        dims: t.dims.clone(),
                    }
                })?;
        }
        header.resize(header.len().next_multiple_of(alignment as usize), 0);
        let file_size = (header.len() as u64).saturating_add(data_size);

        Ok(FileHeader {
            checked: Header::parse(&header, file_size)?,
            bytes: header,
            file_size,
            alignment,
        })
    }

    /// Writes all of the file, whose header is [`Writer::header`]'s.
    pub(super) fn write_behind(
        self,
        header: &FileHeader,
        out: &mut dyn Write,
    ) -> Result<(), WriteError> {
        let alignment = header.alignment;
        out.write_all(&header.bytes)?;
        for (t, info) in self.tensors.into_iter().zip(&header.checked.tensors) {
            let mut counted = Counted {
                out,
                written: 0,
                expected: info.n_bytes,
            };
            let produced = (t.produce)(&mut counted);
            let found = counted.written;
            // `produce` was stopped because of too much data; this error says more than the one it
            // returned.
            if found > info.n_bytes || (found < info.n_bytes && produced.is_ok()) {
                return Err(GgufError::TensorData {
                    name: t.name,
                    expected: info.n_bytes,
                    found,
                }
                .into());
            }
            produced?;
            let padding = info.n_bytes.next_multiple_of(alignment) - info.n_bytes;
            io::copy(&mut io::repeat(0).take(padding), out)?;
        }
        Ok(())
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// The header of a file that will be written.
pub(super) struct FileHeader {
    bytes: Vec<u8>,
    checked: Header,
    pub(super) file_size: u64,
    alignment: u64,
}

pub(super) enum WriteError {
    Gguf(GgufError),
    Io(io::Error),
}

impl WriteError {
    /// The error of a file that is written to memory.
    pub(super) fn in_memory(self) -> GgufError {
        match self {
            WriteError::Gguf(error) => error,
            WriteError::Io(error) => GgufError::Io {
                path: PathBuf::from("(memory)"),
                error,
            },
        }
    }
}

impl From<GgufError> for WriteError {
    fn from(error: GgufError) -> Self {
        WriteError::Gguf(error)
    }
}

impl From<io::Error> for WriteError {
    fn from(error: io::Error) -> Self {
        WriteError::Io(error)
    }
}

/// Passes on the bytes of one tensor, up to its length.
struct Counted<'a> {
    out: &'a mut dyn Write,
    /// Bytes that were to be written, including those beyond `expected`.
    written: u64,
    expected: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if data.len() as u64 > self.expected.saturating_sub(self.written) {
            self.written += data.len() as u64;
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "more data than the tensor holds",
            ));
        }
        let n = self.out.write(data)?;
        self.written += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A file being written: it has a temporary name in the same folder until [`finish`](Self::finish)
/// syncs it to disk and renames it, so that there is never half a file under its name, and a
/// process that has an older one open keeps it. Dropped before that, it is removed.
///
/// Only regular files are replaced, and keep their permissions; for a symbolic link, its target is
/// replaced.
#[derive(Debug)]
pub struct NewFile {
    out: BufWriter<File>,
    temporary: Temporary,
    target: PathBuf,
}

impl NewFile {
    /// Begins the file `path`; `private` makes it unreadable for other users unless it replaces one
    /// that is not.
    ///
    /// # Errors
    /// If `path` is `-`, or something other than a regular file is there, or as
    /// [`File::create_new`].
    pub fn create(path: &Path, private: bool) -> io::Result<NewFile> {
        if path == Path::new("-") {
            let text = "a file has to be named: this cannot go to standard output";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let is_link = fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink());
        let target = if is_link {
            fs::canonicalize(path)?
        } else {
            path.to_owned()
        };
        let replaced = fs::metadata(&target).ok();
        if replaced.as_ref().is_some_and(|found| !found.is_file()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file, and not replaced by one",
            ));
        }
        let private = private || replaced.is_some();
        let (file, temporary) = Temporary::create(&target, private)?;
        #[cfg(unix)]
        if let Some(replaced) = replaced {
            file.set_permissions(replaced.permissions())?;
        }
        Ok(NewFile {
            out: BufWriter::with_capacity(1 << 20, file),
            temporary,
            target,
        })
    }

    /// Syncs the file to disk and renames it to its final name.
    ///
    /// # Errors
    /// If the disk is full or fails, or the folder does not allow it.
    pub fn finish(self) -> io::Result<()> {
        let file = self
            .out
            .into_inner()
            .map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        drop(file); // Windows does not rename open files
        self.temporary.rename(&self.target)
    }
}

impl Write for NewFile {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.out.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A file that is removed again unless it is renamed.
#[derive(Debug)]
struct Temporary(PathBuf);

impl Temporary {
    fn create(beside: &Path, private: bool) -> io::Result<(File, Temporary)> {
        let mut options = File::options();
        options.write(true).create_new(true);
        #[cfg(unix)]
        if private {
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        }
        #[cfg(not(unix))]
        let _ = private;
        let name = beside
            .file_name()
            .ok_or(io::Error::from(io::ErrorKind::InvalidFilename))?;
        remove_abandoned(beside, name);
        for attempt in 0.. {
            let mut hidden = OsString::from(".");
            hidden.push(name);
            hidden.push(format!(".{}.{attempt}.tmp", process::id()));
            let path = beside.with_file_name(hidden);
            match options.open(&path) {
                Ok(file) => {
                    // Tells others that it is in use; a file system without locks is no failure.
                    let _ = file.try_lock();
                    return Ok((file, Temporary(path)));
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempt < 99 => {}
                Err(error) => return Err(error),
            }
        }
        unreachable!("the last attempt returns")
    }

    fn rename(self, to: &Path) -> io::Result<()> {
        fs::rename(&self.0, to).map_err(|error| in_use(error, to))?;
        // The new name is on disk once the folder is synced; failure of that is ignored, as the
        // file is in place.
        #[cfg(unix)]
        if let Some(folder) = to.parent() {
            let folder = if folder.as_os_str().is_empty() {
                Path::new(".")
            } else {
                folder
            };
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        Ok(())
    }
}

/// What is to be done about a file that could not be replaced: Windows refuses while a program has it
/// open or mapped, as this library has models and sessions, and says only that access is denied.
fn in_use(error: io::Error, path: &Path) -> io::Error {
    const ACCESS_DENIED: i32 = 5;
    const SHARING_VIOLATION: i32 = 32;
    const USER_MAPPED_FILE: i32 = 1224;
    let codes = [ACCESS_DENIED, SHARING_VIOLATION, USER_MAPPED_FILE];
    let is_refused = error
        .raw_os_error()
        .is_some_and(|code| codes.contains(&code));
    if !(cfg!(windows) && is_refused && path.exists()) {
        return error;
    }
    let text = format!(
        "{error} {} may be open in a program, for example as its model: close that, or write to another name",
        path.display()
    );
    io::Error::new(error.kind(), text)
}

/// Removes temporary files of `name` that processes left behind which were killed: those that
/// nobody has locked.
fn remove_abandoned(beside: &Path, name: &OsStr) {
    let Some(name) = name.to_str() else { return };
    let folder = match beside.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let is_temporary = |file: &str| {
        let numbers = file.strip_prefix('.').and_then(|rest| {
            rest.strip_prefix(name)?
                .strip_prefix('.')?
                .strip_suffix(".tmp")
        });
        let numbers = numbers.and_then(|numbers| numbers.split_once('.'));
        numbers.is_some_and(|(process, attempt)| digits(process) && digits(attempt))
    };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(is_temporary)
            && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok())
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
