//! The metadata of a file: keys and typed values.
//!
//! Numbers are copied out; a vocabulary is not. A [`StringArray`] keeps the bytes where they are
//! and remembers where each string begins, so that opening a file with 400 000 tokens and merges
//! costs one pass over their lengths and one allocation.

use crate::gguf::GgufError;
use crate::gguf::bytes::Bytes;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// The numbers of the metadata types.
pub(super) mod id {
    pub(in crate::gguf) const U8: u32 = 0;
    pub(in crate::gguf) const I8: u32 = 1;
    pub(in crate::gguf) const U16: u32 = 2;
    pub(in crate::gguf) const I16: u32 = 3;
    pub(in crate::gguf) const U32: u32 = 4;
    pub(in crate::gguf) const I32: u32 = 5;
    pub(in crate::gguf) const F32: u32 = 6;
    pub(in crate::gguf) const BOOL: u32 = 7;
    pub(in crate::gguf) const STRING: u32 = 8;
    pub(in crate::gguf) const ARRAY: u32 = 9;
    pub(in crate::gguf) const U64: u32 = 10;
    pub(in crate::gguf) const I64: u32 = 11;
    pub(in crate::gguf) const F64: u32 = 12;
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the types of the specification
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    /// A string that is not valid UTF-8. Only using it as text is an error.
    Bytes(Vec<u8>),
    Array(Array),
}

/// A metadata array: elements of one type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the types of the specification
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    Strings(StringArray),
    Arrays(Vec<Array>),
}

/// Array of strings in the file's encoding. They need not be UTF-8: byte-level vocabularies contain
/// fragments of characters.
#[derive(Clone)]
pub struct StringArray {
    file: Arc<Bytes>,
    /// Offset in `file` of the first string's length field.
    start: usize,
    /// Start of each string relative to `start`, and the end of the last one.
    offsets: Arc<[u32]>,
}

/// Size in bytes of the length field before each string.
const LEN: usize = 8;

impl Array {
    /// Bytes that it takes beside the file.
    fn bytes(&self) -> u64 {
        let bytes = match self {
            Array::U8(x) => size_of_val(&x[..]),
            Array::I8(x) => size_of_val(&x[..]),
            Array::U16(x) => size_of_val(&x[..]),
            Array::I16(x) => size_of_val(&x[..]),
            Array::U32(x) => size_of_val(&x[..]),
            Array::I32(x) => size_of_val(&x[..]),
            Array::U64(x) => size_of_val(&x[..]),
            Array::I64(x) => size_of_val(&x[..]),
            Array::F32(x) => size_of_val(&x[..]),
            Array::F64(x) => size_of_val(&x[..]),
            Array::Bool(x) => size_of_val(&x[..]),
            Array::Strings(x) => size_of_val(&x.offsets[..]),
            Array::Arrays(all) => return all.iter().map(Array::bytes).sum(),
        };
        bytes as u64
    }
}

impl StringArray {
    pub(super) fn new(file: Arc<Bytes>, start: usize, offsets: Vec<u32>) -> Self {
        StringArray {
            file,
            start,
            offsets: offsets.into(),
        }
    }

    /// Number of strings.
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of string `i`, if it exists.
    pub fn get(&self, i: usize) -> Option<&[u8]> {
        let end = *self.offsets.get(i.checked_add(1)?)? as usize;
        let start = self.offsets[i] as usize;
        Some(&self.encoded()[start + LEN..end])
    }

    /// String `i` as text, if it exists and is UTF-8.
    pub fn str(&self, i: usize) -> Option<&str> {
        str::from_utf8(self.get(i)?).ok()
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> + Clone {
        let encoded = self.encoded();
        self.offsets
            .windows(2)
            .map(move |w| &encoded[w[0] as usize + LEN..w[1] as usize])
    }

    /// All strings in the file's encoding: each preceded by its length.
    pub(super) fn encoded(&self) -> &[u8] {
        let len = self.offsets[self.len()] as usize;
        &self.file[self.start..][..len]
    }
}

/// # Panics
/// If the strings take 4 GiB or more.
impl<S: AsRef<[u8]>> FromIterator<S> for StringArray {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> Self {
        let mut encoded = Vec::new();
        let mut offsets = vec![0];
        for string in strings {
            let string = string.as_ref();
            encoded.extend_from_slice(&(string.len() as u64).to_le_bytes());
            encoded.extend_from_slice(string);
            offsets.push(u32::try_from(encoded.len()).expect("string arrays stay below 4 GiB"));
        }
        StringArray::new(Arc::new(Bytes::in_memory(encoded.into())), 0, offsets)
    }
}

impl PartialEq for StringArray {
    fn eq(&self, other: &Self) -> bool {
        self.encoded() == other.encoded()
    }
}

/// Shows the first strings and how many there are.
impl fmt::Debug for StringArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        let first = self.iter().take(SHOWN).map(String::from_utf8_lossy);
        write!(f, "{} strings: ", self.len())?;
        f.debug_list().entries(first).finish()
    }
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::F64(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::Strings(v) => v.len(),
            Array::Arrays(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn type_name(&self) -> &'static str {
        match self {
            Array::U8(_) => "array of u8",
            Array::I8(_) => "array of i8",
            Array::U16(_) => "array of u16",
            Array::I16(_) => "array of i16",
            Array::U32(_) => "array of u32",
            Array::I32(_) => "array of i32",
            Array::U64(_) => "array of u64",
            Array::I64(_) => "array of i64",
            Array::F32(_) => "array of f32",
            Array::F64(_) => "array of f64",
            Array::Bool(_) => "array of bool",
            Array::Strings(_) => "array of strings",
            Array::Arrays(_) => "array of arrays",
        }
    }

    /// Appends element type, count and elements.
    fn write(&self, out: &mut Vec<u8>) {
        fn numbers<T: Copy, const N: usize>(
            out: &mut Vec<u8>,
            id: u32,
            v: &[T],
            bytes: fn(T) -> [u8; N],
        ) {
            out.extend_from_slice(&id.to_le_bytes());
            out.extend_from_slice(&(v.len() as u64).to_le_bytes());
            v.iter().for_each(|&x| out.extend_from_slice(&bytes(x)));
        }
        match self {
            Array::U8(v) => numbers(out, id::U8, v, u8::to_le_bytes),
            Array::I8(v) => numbers(out, id::I8, v, i8::to_le_bytes),
            Array::U16(v) => numbers(out, id::U16, v, u16::to_le_bytes),
            Array::I16(v) => numbers(out, id::I16, v, i16::to_le_bytes),
            Array::U32(v) => numbers(out, id::U32, v, u32::to_le_bytes),
            Array::I32(v) => numbers(out, id::I32, v, i32::to_le_bytes),
            Array::U64(v) => numbers(out, id::U64, v, u64::to_le_bytes),
            Array::I64(v) => numbers(out, id::I64, v, i64::to_le_bytes),
            Array::F32(v) => numbers(out, id::F32, v, f32::to_le_bytes),
            Array::F64(v) => numbers(out, id::F64, v, f64::to_le_bytes),
            Array::Bool(v) => numbers(out, id::BOOL, v, |b| [u8::from(b)]),
            Array::Strings(v) => {
                out.extend_from_slice(&id::STRING.to_le_bytes());
                out.extend_from_slice(&(v.len() as u64).to_le_bytes());
                out.extend_from_slice(v.encoded());
            }
            Array::Arrays(v) => {
                out.extend_from_slice(&id::ARRAY.to_le_bytes());
                out.extend_from_slice(&(v.len() as u64).to_le_bytes());
                v.iter().for_each(|array| array.write(out));
            }
        }
    }
}

impl Value {
    /// Name of the type, for messages.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::U8(_) => "u8",
            Value::I8(_) => "i8",
            Value::U16(_) => "u16",
            Value::I16(_) => "i16",
            Value::U32(_) => "u32",
            Value::I32(_) => "i32",
            Value::U64(_) => "u64",
            Value::I64(_) => "i64",
            Value::F32(_) => "f32",
            Value::F64(_) => "f64",
            Value::Bool(_) => "bool",
            Value::String(_) | Value::Bytes(_) => "string",
            Value::Array(array) => array.type_name(),
        }
    }

    pub(crate) fn integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// Appends type and value.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        fn put<const N: usize>(out: &mut Vec<u8>, id: u32, bytes: [u8; N]) {
            out.extend_from_slice(&id.to_le_bytes());
            out.extend_from_slice(&bytes);
        }
        match self {
            Value::U8(v) => put(out, id::U8, v.to_le_bytes()),
            Value::I8(v) => put(out, id::I8, v.to_le_bytes()),
            Value::U16(v) => put(out, id::U16, v.to_le_bytes()),
            Value::I16(v) => put(out, id::I16, v.to_le_bytes()),
            Value::U32(v) => put(out, id::U32, v.to_le_bytes()),
            Value::I32(v) => put(out, id::I32, v.to_le_bytes()),
            Value::U64(v) => put(out, id::U64, v.to_le_bytes()),
            Value::I64(v) => put(out, id::I64, v.to_le_bytes()),
            Value::F32(v) => put(out, id::F32, v.to_le_bytes()),
            Value::F64(v) => put(out, id::F64, v.to_le_bytes()),
            Value::Bool(v) => put(out, id::BOOL, [u8::from(*v)]),
            Value::String(v) => {
                put(out, id::STRING, (v.len() as u64).to_le_bytes());
                out.extend_from_slice(v.as_bytes());
            }
            Value::Bytes(v) => {
                put(out, id::STRING, (v.len() as u64).to_le_bytes());
                out.extend_from_slice(v);
            }
            Value::Array(v) => {
                out.extend_from_slice(&id::ARRAY.to_le_bytes());
                v.write(out);
            }
        }
    }
}

macro_rules! into_value {
    ($($from:ty => $to:expr),* $(,)?) => {
        $(impl From<$from> for Value {
            fn from(value: $from) -> Value {
                $to(value)
            }
        })*
    };
}

into_value! {
    u8 => Value::U8, i8 => Value::I8, u16 => Value::U16, i16 => Value::I16,
    u32 => Value::U32, i32 => Value::I32, u64 => Value::U64, i64 => Value::I64,
    f32 => Value::F32, f64 => Value::F64, bool => Value::Bool, String => Value::String,
    &str => |v: &str| Value::String(v.to_owned()),
    Array => Value::Array,
    Vec<u32> => |v| Value::Array(Array::U32(v)),
    Vec<i32> => |v| Value::Array(Array::I32(v)),
    Vec<f32> => |v| Value::Array(Array::F32(v)),
    Vec<bool> => |v| Value::Array(Array::Bool(v)),
    StringArray => |v| Value::Array(Array::Strings(v)),
}

/// Keys and values in the order of the file.
///
/// Every type has two accessors. If the key is absent, `opt_…` returns `Ok(None)` and the plain one
/// [`GgufError::MissingKey`]; both fail if the value has another type ([`GgufError::WrongType`]) or
/// does not fit ([`GgufError::OutOfRange`]). Any integer type is accepted for any other as long as
/// the number fits, since writers disagree about them.
#[derive(Clone, Debug)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    /// Indices of `entries`, sorted by key.
    by_key: Vec<u32>,
}

/// Type in which metadata can be read.
trait Typed<'a>: Sized {
    const NAME: &'static str;
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError>;
}

fn wrong_type(key: &str, expected: &'static str, found: &Value) -> GgufError {
    GgufError::WrongType {
        key: key.to_owned(),
        expected,
        found: found.type_name(),
    }
}

macro_rules! typed_integer {
    ($($int:ident),*) => {
        $(impl Typed<'_> for $int {
            const NAME: &'static str = stringify!($int);
            fn from_value(key: &str, value: &Value) -> Result<Self, GgufError> {
                let integer = value.integer().ok_or_else(|| wrong_type(key, Self::NAME, value))?;
                integer.try_into().map_err(|_| out_of_range(key, Self::NAME, integer))
            }
        })*
    };
}

typed_integer!(u32, i32, u64);

fn out_of_range(key: &str, expected: &'static str, found: impl fmt::Display) -> GgufError {
    GgufError::OutOfRange {
        key: key.to_owned(),
        expected,
        found: found.to_string(),
    }
}

/// Arrays of integers: borrowed if the file has the requested type, otherwise converted.
macro_rules! typed_integers {
    ($($int:ident $variant:ident),*) => {
        $(impl<'a> Typed<'a> for Cow<'a, [$int]> {
            const NAME: &'static str = concat!("array of ", stringify!($int));
            fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
                fn fit<T: Copy + TryInto<$int> + fmt::Display>(
                    key: &str,
                    elements: &[T],
                ) -> Result<Cow<'static, [$int]>, GgufError> {
                    let fit = |&x: &T| x.try_into().map_err(|_| out_of_range(key, stringify!($int), x));
                    elements.iter().map(fit).collect::<Result<Vec<$int>, _>>().map(Cow::Owned)
                }
                let Value::Array(array) = value else { return Err(wrong_type(key, Self::NAME, value)) };
                #[allow(unreachable_patterns)] // `$variant` comes first, so that it is borrowed
                match array {
                    Array::$variant(v) => Ok(Cow::Borrowed(v)),
                    Array::U8(v) => fit(key, v),
                    Array::I8(v) => fit(key, v),
                    Array::U16(v) => fit(key, v),
                    Array::I16(v) => fit(key, v),
                    Array::U32(v) => fit(key, v),
                    Array::I32(v) => fit(key, v),
                    Array::U64(v) => fit(key, v),
                    Array::I64(v) => fit(key, v),
                    _ => Err(wrong_type(key, Self::NAME, value)),
                }
            }
        })*
    };
}

typed_integers!(u32 U32, i32 I32);

impl Typed<'_> for f32 {
    const NAME: &'static str = "f32";
    fn from_value(key: &str, value: &Value) -> Result<Self, GgufError> {
        match *value {
            Value::F32(v) => Ok(v),
            Value::F64(v) if v.is_finite() && !(v as f32).is_finite() => {
                Err(out_of_range(key, Self::NAME, v))
            }
            Value::F64(v) => Ok(v as f32),
            _ => Err(wrong_type(key, Self::NAME, value)),
        }
    }
}

impl Typed<'_> for bool {
    const NAME: &'static str = "bool";
    fn from_value(key: &str, value: &Value) -> Result<Self, GgufError> {
        match *value {
            Value::Bool(v) => Ok(v),
            _ => Err(wrong_type(key, Self::NAME, value)),
        }
    }
}

impl<'a> Typed<'a> for &'a str {
    const NAME: &'static str = "string";
    fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
        match value {
            Value::String(v) => Ok(v),
            Value::Bytes(_) => Err(GgufError::NotUtf8 {
                item: format!("the value of `{key}`"),
            }),
            _ => Err(wrong_type(key, Self::NAME, value)),
        }
    }
}

macro_rules! typed_array {
    ($($to:ty, $variant:ident, $name:literal;)*) => {
        $(impl<'a> Typed<'a> for &'a $to {
            const NAME: &'static str = $name;
            fn from_value(key: &str, value: &'a Value) -> Result<Self, GgufError> {
                match value {
                    Value::Array(Array::$variant(v)) => Ok(v),
                    _ => Err(wrong_type(key, Self::NAME, value)),
                }
            }
        })*
    };
}

typed_array! {
    [f32], F32, "array of f32";
    [bool], Bool, "array of bool";
    StringArray, Strings, "array of strings";
}

macro_rules! accessors {
    ($($(#[doc = $doc:literal])* $required:ident $optional:ident -> $ty:ty;)*) => {
        impl Metadata {
            $(
                $(#[doc = $doc])*
                pub fn $optional(&self, key: &str) -> Result<Option<$ty>, GgufError> {
                    self.get(key).map(|value| Typed::from_value(key, value)).transpose()
                }

                $(#[doc = $doc])*
                pub fn $required(&self, key: &str) -> Result<$ty, GgufError> {
                    self.$optional(key)?.ok_or_else(|| GgufError::MissingKey { key: key.to_owned() })
                }
            )*
        }
    };
}

accessors! {
    /// An integer that fits `u32`.
    u32 opt_u32 -> u32;
    /// An integer that fits `i32`.
    i32 opt_i32 -> i32;
    /// An integer that fits `u64`.
    u64 opt_u64 -> u64;
    /// A number; `f64` is rounded.
    f32 opt_f32 -> f32;
    /// A boolean.
    bool opt_bool -> bool;
    /// A string, which has to be UTF-8.
    str opt_str -> &str;
    /// An array of strings.
    strings opt_strings -> &StringArray;
    /// An array of `f32`.
    f32s opt_f32s -> &[f32];
    /// An array of integers that fit `i32`; copied only if the file has another type.
    i32s opt_i32s -> Cow<'_, [i32]>;
    /// An array of integers that fit `u32`; copied only if the file has another type.
    u32s opt_u32s -> Cow<'_, [u32]>;
    /// An array of booleans.
    bools opt_bools -> &[bool];
}

impl Metadata {
    /// Bytes that its arrays take beside the file.
    pub(crate) fn bytes(&self) -> u64 {
        let arrays = self.entries.iter().filter_map(|(_, value)| match value {
            Value::Array(array) => Some(array.bytes()),
            _ => None,
        });
        arrays.sum()
    }

    pub(super) fn new(entries: Vec<(String, Value)>) -> Result<Metadata, GgufError> {
        let mut by_key: Vec<u32> = (0..entries.len() as u32).collect();
        by_key.sort_unstable_by_key(|&i| &entries[i as usize].0);
        let key = |i: u32| &entries[i as usize].0;
        if let Some(twice) = by_key.windows(2).find(|pair| key(pair[0]) == key(pair[1])) {
            return Err(GgufError::DuplicateKey {
                key: key(twice[0]).clone(),
            });
        }
        Ok(Metadata { entries, by_key })
    }

    /// A copy in which `entries`, whose keys are distinct, replace those with the same keys or are
    /// added.
    pub(super) fn overriding(&self, entries: &[(String, Value)]) -> Metadata {
        let mut all = self.entries.clone();
        all.retain(|(key, _)| entries.iter().all(|(other, _)| other != key));
        all.extend_from_slice(entries);
        let mut by_key: Vec<u32> = (0..all.len() as u32).collect();
        by_key.sort_unstable_by_key(|&i| &all[i as usize].0);
        Metadata {
            entries: all,
            by_key,
        }
    }

    /// The value of a key, whatever its type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let entry = |i: u32| &self.entries[i as usize];
        let found = self
            .by_key
            .binary_search_by(|&i| entry(i).0.as_str().cmp(key))
            .ok()?;
        Some(&entry(self.by_key[found]).1)
    }

    /// All entries in the order of the file.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries
            .iter()
            .map(|(key, value)| (key.as_str(), value))
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}
