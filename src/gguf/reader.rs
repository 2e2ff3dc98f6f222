//! Parser of GGUF headers. Every byte comes through [`Reader::take`], which knows the size of the
//! file, and every count is checked against the bytes that are left before memory is allocated for
//! it. Memory is bounded by a small multiple of the header, whatever the file says: a vocabulary
//! takes another half of its own bytes, a tensor five times its shortest description, and in the
//! worst case an array of empty arrays of strings ten times its own bytes. A metadata value takes a
//! hundred bytes where a short entry has 17, but the number of entries is limited.

use crate::gguf::bytes::Bytes;
use crate::gguf::metadata::{Array, Metadata, StringArray, Value, id};
use crate::gguf::{GgufError, Header, TensorInfo};
use crate::quant::DType;
use std::fmt;
use std::sync::Arc;

/// Longest key and tensor name, in bytes. GGUF limits keys to 65535; the same limit applies to
/// names.
pub(super) const MAX_NAME: u64 = 65535;
/// Deepest nesting of arrays.
pub(super) const MAX_ARRAY_DEPTH: usize = 4;
/// Maximum number of metadata entries; models have a few dozen.
pub(super) const MAX_ENTRIES: usize = 1 << 16;
/// Maximum number of dimensions of a tensor.
pub(super) const MAX_DIMS: u32 = 4;
/// Largest `general.alignment`.
pub(super) const MAX_ALIGNMENT: u64 = 1 << 20;
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;
/// Longest header, an order of magnitude above the largest vocabularies. It also ensures that no
/// length or offset inside a header overflows 32 bits, signed or not.
pub(super) const MAX_HEADER: u64 = 1 << 28;

/// Item being read, for error messages.
#[derive(Clone, Copy)]
enum Item<'a> {
    Preamble,
    TensorCount,
    EntryCount,
    Key(u64),
    Value(&'a str),
    Length(&'a str),
    TensorName(u64),
    Tensor(&'a str),
}

impl fmt::Display for Item<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Item::Preamble => write!(f, "the preamble"),
            Item::TensorCount => write!(f, "the number of tensors"),
            Item::EntryCount => write!(f, "the number of metadata entries"),
            Item::Key(i) => write!(f, "the key of metadata entry {i}"),
            Item::Value(key) => write!(f, "the value of `{key}`"),
            Item::Length(key) => write!(f, "the number of elements of `{key}`"),
            Item::TensorName(i) => write!(f, "the name of tensor {i}"),
            Item::Tensor(name) => write!(f, "the description of tensor `{name}`"),
        }
    }
}

struct Reader<'a> {
    /// The start of the file, possibly not all of it.
    bytes: &'a [u8],
    pos: usize,
    file_size: u64,
}

impl<'a> Reader<'a> {
    fn offset(&self) -> u64 {
        self.pos as u64
    }

    /// Checks that the file has `n` more bytes, and that they are in `bytes`.
    fn need(&self, n: u64, item: Item<'_>) -> Result<(), GgufError> {
        let offset = self.offset();
        let end = offset.checked_add(n);
        if end.is_none_or(|end| end > self.file_size) {
            let item = item.to_string();
            return Err(GgufError::UnexpectedEnd {
                item,
                offset,
                need: n,
                file_size: self.file_size,
            });
        }
        let end = offset + n;
        if end > MAX_HEADER {
            return Err(GgufError::HeaderTooLarge {
                item: item.to_string(),
                offset,
                need: n,
                limit: MAX_HEADER,
            });
        }
        if end > self.bytes.len() as u64 {
            return Err(GgufError::HeaderIncomplete {
                have: self.bytes.len() as u64,
                need: end,
            });
        }
        Ok(())
    }

    fn take(&mut self, n: u64, item: Item<'_>) -> Result<&'a [u8], GgufError> {
        self.need(n, item)?;
        let taken = &self.bytes[self.pos..][..n as usize];
        self.pos += n as usize;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, item: Item<'_>) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, item)?);
        Ok(out)
    }

    fn u32(&mut self, item: Item<'_>) -> Result<u32, GgufError> {
        self.array(item).map(u32::from_le_bytes)
    }

    fn u64(&mut self, item: Item<'_>) -> Result<u64, GgufError> {
        self.array(item).map(u64::from_le_bytes)
    }

    /// Reads a count of items that take at least `min_bytes` each.
    fn count(&mut self, item: Item<'_>, min_bytes: u64) -> Result<usize, GgufError> {
        let offset = self.offset();
        let count = self.u64(item)?;
        let left = self.file_size - self.offset();
        if count > left / min_bytes {
            return Err(GgufError::CountTooLarge {
                item: item.to_string(),
                offset,
                count,
                left,
            });
        }
        self.need(count * min_bytes, item)?;
        Ok(count as usize)
    }

    fn string(&mut self, item: Item<'_>) -> Result<&'a [u8], GgufError> {
        let len = self.u64(item)?;
        self.take(len, item)
    }

    fn name(&mut self, item: Item<'_>) -> Result<String, GgufError> {
        let offset = self.offset();
        let len = self.u64(item)?;
        if len == 0 || len > MAX_NAME {
            return Err(GgufError::NameLength {
                item: item.to_string(),
                offset,
                found: len,
                max: MAX_NAME,
            });
        }
        let bytes = self.take(len, item)?;
        let name = str::from_utf8(bytes).map_err(|_| GgufError::NotUtf8 {
            item: item.to_string(),
        })?;
        Ok(name.to_owned())
    }

    fn bool(&mut self, key: &str) -> Result<bool, GgufError> {
        let offset = self.offset();
        match self.array::<1>(Item::Value(key))? {
            [0] => Ok(false),
            [1] => Ok(true),
            [found] => Err(GgufError::InvalidBool {
                key: key.to_owned(),
                offset,
                found,
            }),
        }
    }

    fn value(&mut self, key: &str, file: &Arc<Bytes>) -> Result<Value, GgufError> {
        let item = Item::Value(key);
        let offset = self.offset();
        Ok(match self.u32(item)? {
            id::U8 => Value::U8(self.array::<1>(item)?[0]),
            id::I8 => Value::I8(i8::from_le_bytes(self.array(item)?)),
            id::U16 => Value::U16(u16::from_le_bytes(self.array(item)?)),
            id::I16 => Value::I16(i16::from_le_bytes(self.array(item)?)),
            id::U32 => Value::U32(self.u32(item)?),
            id::I32 => Value::I32(i32::from_le_bytes(self.array(item)?)),
            id::F32 => Value::F32(f32::from_le_bytes(self.array(item)?)),
            id::BOOL => Value::Bool(self.bool(key)?),
            id::STRING => {
                let bytes = self.string(item)?;
                match str::from_utf8(bytes) {
                    Ok(text) => Value::String(text.to_owned()),
                    Err(_) => Value::Bytes(bytes.to_vec()),
                }
            }
            id::ARRAY => Value::Array(self.array_value(key, 1, file)?),
            id::U64 => Value::U64(self.u64(item)?),
            id::I64 => Value::I64(i64::from_le_bytes(self.array(item)?)),
            id::F64 => Value::F64(f64::from_le_bytes(self.array(item)?)),
            found => {
                return Err(GgufError::ValueType {
                    key: key.to_owned(),
                    offset,
                    found,
                });
            }
        })
    }

    fn numbers<const N: usize, T>(
        &mut self,
        key: &str,
        read: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, GgufError> {
        let count = self.count(Item::Length(key), N as u64)?;
        let bytes = self.take((count * N) as u64, Item::Value(key))?;
        let (elements, _) = bytes.as_chunks::<N>();
        Ok(elements.iter().map(|&element| read(element)).collect())
    }

    fn array_value(
        &mut self,
        key: &str,
        depth: usize,
        file: &Arc<Bytes>,
    ) -> Result<Array, GgufError> {
        let offset = self.offset();
        if depth > MAX_ARRAY_DEPTH {
            return Err(GgufError::ArrayDepth {
                key: key.to_owned(),
                offset,
                max: MAX_ARRAY_DEPTH,
            });
        }
        Ok(match self.u32(Item::Value(key))? {
            id::U8 => Array::U8(self.numbers(key, u8::from_le_bytes)?),
            id::I8 => Array::I8(self.numbers(key, i8::from_le_bytes)?),
            id::U16 => Array::U16(self.numbers(key, u16::from_le_bytes)?),
            id::I16 => Array::I16(self.numbers(key, i16::from_le_bytes)?),
            id::U32 => Array::U32(self.numbers(key, u32::from_le_bytes)?),
            id::I32 => Array::I32(self.numbers(key, i32::from_le_bytes)?),
            id::F32 => Array::F32(self.numbers(key, f32::from_le_bytes)?),
            id::BOOL => {
                let count = self.count(Item::Length(key), 1)?;
                Array::Bool(
                    (0..count)
                        .map(|_| self.bool(key))
                        .collect::<Result<_, _>>()?,
                )
            }
            id::STRING => Array::Strings(self.strings(key, file)?),
            id::ARRAY => {
                let count = self.count(Item::Length(key), 4 + 8)?;
                Array::Arrays(
                    (0..count)
                        .map(|_| self.array_value(key, depth + 1, file))
                        .collect::<Result<_, _>>()?,
                )
            }
            id::U64 => Array::U64(self.numbers(key, u64::from_le_bytes)?),
            id::I64 => Array::I64(self.numbers(key, i64::from_le_bytes)?),
            id::F64 => Array::F64(self.numbers(key, f64::from_le_bytes)?),
            found => {
                return Err(GgufError::ArrayElementType {
                    key: key.to_owned(),
                    offset,
                    found,
                });
            }
        })
    }

    fn strings(&mut self, key: &str, file: &Arc<Bytes>) -> Result<StringArray, GgufError> {
        let count = self.count(Item::Length(key), 8)?;
        let start = self.pos;
        // The count may be wrong although the file is large: memory beyond a vocabulary's size
        // grows with the strings read.
        let mut offsets = Vec::with_capacity((count + 1).min(1 << 20));
        for _ in 0..count {
            // `MAX_HEADER` keeps every position below 2³².
            offsets.push((self.pos - start) as u32);
            self.string(Item::Value(key))?;
        }
        offsets.push((self.pos - start) as u32);
        Ok(StringArray::new(Arc::clone(file), start, offsets))
    }

    /// One entry of the tensor table; its offset still counts from the start of the tensor data.
    fn tensor(&mut self, index: u64) -> Result<TensorInfo, GgufError> {
        let name = self.name(Item::TensorName(index))?;
        let item = Item::Tensor(&name);
        let rank = self.u32(item)?;
        if rank > MAX_DIMS {
            return Err(GgufError::TensorRank {
                name,
                found: rank,
                max: MAX_DIMS,
            });
        }
        let mut dims = (0..rank)
            .map(|_| self.u64(item))
            .collect::<Result<Vec<u64>, _>>()?;
        if dims.is_empty() {
            dims.push(1); // a scalar, which ggml holds as one row of one value
        }
        let type_id = self.u32(item)?;
        let offset = self.u64(item)?;
        let Some(dtype) = DType::from_ggml(type_id) else {
            return Err(GgufError::TensorType {
                name,
                found: type_id,
            });
        };
        let n_bytes = tensor_bytes(&name, &dims, dtype)?;
        Ok(TensorInfo {
            name,
            dims,
            dtype,
            offset,
            n_bytes,
            shard: 0,
        })
    }

    fn preamble(&mut self) -> Result<u32, GgufError> {
        let start = &self.bytes[..self.bytes.len().min(512)];
        if start.len() < 4 && b"GGUF".starts_with(start) {
            self.need(4, Item::Preamble)?;
        }
        if !start.starts_with(b"GGUF") {
            let found = start[..start.len().min(4)].to_vec();
            return Err(GgufError::BadMagic {
                found,
                hint: guess(start),
            });
        }
        self.pos = 4;
        let version = self.u32(Item::Preamble)?;
        match version {
            2 | 3 => Ok(version),
            // A small version read in the wrong byte order; ggml recognises big-endian files in the
            // same way.
            _ if version != 0 && version & 0xffff == 0 => Err(GgufError::BigEndian {
                version: version.swap_bytes(),
            }),
            _ => Err(GgufError::Version { found: version }),
        }
    }
}

/// Length of a tensor's data; at most 2⁶³ − 1.
pub(super) fn tensor_bytes(name: &str, dims: &[u64], dtype: DType) -> Result<u64, GgufError> {
    let name = || name.to_owned();
    if let Some(axis) = dims.iter().position(|&dim| dim == 0) {
        return Err(GgufError::ZeroDim {
            name: name(),
            axis,
            dims: dims.to_vec(),
        });
    }
    let (block, block_bytes) = dtype.block();
    let row = dims.first().copied().unwrap_or(1);
    if !row.is_multiple_of(block) {
        return Err(GgufError::PartialBlock {
            name: name(),
            dtype: dtype.to_string(),
            row,
            block,
        });
    }
    dims.iter()
        .try_fold(1u64, |n, &dim| n.checked_mul(dim))
        .and_then(|n| (n / block).checked_mul(block_bytes))
        .filter(|&n| i64::try_from(n).is_ok())
        .ok_or_else(|| GgufError::TensorTooLarge {
            name: name(),
            dtype: dtype.to_string(),
            dims: dims.to_vec(),
        })
}

/// Probable kind of a file that is not GGUF, as the end of an error message's sentence.
fn guess(start: &[u8]) -> &'static str {
    match start {
        _ if start.starts_with(b"version https://git-lfs") => {
            "; it is a Git LFS pointer, fetch the real file (`git lfs pull`)"
        }
        _ if start.starts_with(b"lmgg")
            || start.starts_with(b"fmgg")
            || start.starts_with(b"tjgg") =>
        {
            "; it is a GGML file from before GGUF, convert the model again"
        }
        _ if start.starts_with(b"PK\x03\x04") => {
            "; it is a ZIP archive, perhaps PyTorch weights: convert them to GGUF"
        }
        _ if start.get(8) == Some(&b'{') => {
            "; it looks like a safetensors file: convert it to GGUF"
        }
        _ if start.trim_ascii_start().first() == Some(&b'<') => {
            "; it is a web page, the download went wrong"
        }
        _ => "",
    }
}

fn alignment(metadata: &Metadata) -> Result<u64, GgufError> {
    let found = metadata
        .opt_u64("general.alignment")?
        .unwrap_or(DEFAULT_ALIGNMENT);
    // Below 8, which the specification asks for, `f32` data could not be read in place.
    if !found.is_power_of_two() || !(8..=MAX_ALIGNMENT).contains(&found) {
        return Err(GgufError::Alignment {
            found,
            max: MAX_ALIGNMENT,
        });
    }
    Ok(found)
}

pub(super) fn parse(file: &Arc<Bytes>, file_size: u64) -> Result<Header, GgufError> {
    let mut reader = Reader {
        bytes: file,
        pos: 0,
        file_size,
    };
    let version = reader.preamble()?;
    // Smallest tensor entry: length of the name, rank, type, offset. Smallest metadata entry:
    // length of the key, type, a value of one byte.
    let n_tensors = reader.count(Item::TensorCount, 8 + 4 + 4 + 8)?;
    let n_entries = reader.count(Item::EntryCount, 8 + 4 + 1)?;
    if n_entries > MAX_ENTRIES {
        return Err(GgufError::TooManyEntries {
            count: n_entries,
            max: MAX_ENTRIES,
        });
    }

    let mut entries = Vec::new();
    for i in 0..n_entries as u64 {
        let key = reader.name(Item::Key(i))?;
        let value = reader.value(&key, file)?;
        entries.push((key, value));
    }
    let metadata = Metadata::new(entries)?;
    let alignment = alignment(&metadata)?;

    let mut tensors = Vec::new();
    for i in 0..n_tensors as u64 {
        tensors.push(reader.tensor(i)?);
    }
    let data_offset = reader.offset().next_multiple_of(alignment);
    place(&mut tensors, data_offset, alignment, file_size)?;
    let tensor_index = super::index_by_name(&tensors)?;
    Ok(Header {
        version,
        metadata,
        tensors,
        tensor_index,
        alignment,
        data_offset,
    })
}

/// Checks the positions of the tensors, and makes their offsets relative to the start of the file.
fn place(
    tensors: &mut [TensorInfo],
    data_offset: u64,
    alignment: u64,
    file_size: u64,
) -> Result<(), GgufError> {
    // End of the data if tensors follow each other without gaps, as every writer lays them out.
    let mut packed_end = Some(data_offset);
    for t in &*tensors {
        if !t.offset.is_multiple_of(alignment) {
            return Err(GgufError::TensorMisaligned {
                name: t.name.clone(),
                offset: t.offset,
                alignment,
            });
        }
        packed_end = packed_end
            .and_then(|end| end.checked_next_multiple_of(alignment))
            .and_then(|end| end.checked_add(t.n_bytes));
    }

    let mut data_end = 0;
    for t in tensors.iter_mut() {
        let end = data_offset
            .checked_add(t.offset)
            .and_then(|start| start.checked_add(t.n_bytes));
        // A file with gaps, or with sizes beyond all files, is invalid; one that is merely shorter
        // than its tensors is truncated.
        let Some(end) =
            end.filter(|&end| end <= file_size || packed_end.is_some_and(|packed| end <= packed))
        else {
            return Err(GgufError::TensorOutOfFile {
                name: t.name.clone(),
                offset: data_offset.saturating_add(t.offset),
                n_bytes: t.n_bytes,
                file_size,
            });
        };
        data_end = data_end.max(end);
        t.offset += data_offset;
    }

    let mut by_offset: Vec<&TensorInfo> = tensors.iter().collect();
    by_offset.sort_unstable_by_key(|t| t.offset);
    for pair in by_offset.windows(2) {
        let (other, t) = (pair[0], pair[1]);
        let other_end = other.offset + other.n_bytes;
        if t.offset < other_end {
            let (name, other) = (t.name.clone(), other.name.clone());
            return Err(GgufError::TensorOverlap {
                name,
                offset: t.offset,
                other,
                other_end,
            });
        }
    }
    if data_end > file_size {
        return Err(GgufError::Truncated {
            expected: data_end,
            actual: file_size,
        });
    }
    Ok(())
}
