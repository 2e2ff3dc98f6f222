//! The GGUF loader against files made by hand, byte by byte: what it must read, what it must refuse
//! and with which error, and how little memory it may take to do so. Then the writer against the
//! loader.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::path::PathBuf;

use crate::common::cases;
use proptest::prelude::*;
use ruvllm::gguf::GgufError;
use ruvllm::gguf::{Array, Gguf, Header, StringArray, Value, Writer};
use ruvllm::quant::DType;

/// Counts the bytes that each thread asks for.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all calls go to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.set(ALLOCATED.get().saturating_add(layout.size()));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// ---------------------------------------------------------------- files made by hand

const U8: u32 = 0;
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const U64: u32 = 10;

fn string(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

fn array(element_type: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [
        &element_type.to_le_bytes(),
        &count.to_le_bytes()[..],
        elements,
    ]
    .concat()
}

/// A file by its parts, each of which may be a lie.
#[derive(Clone)]
struct Raw {
    magic: [u8; 4],
    version: u32,
    n_tensors: Option<u64>,
    n_entries: Option<u64>,
    entries: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    alignment: usize,
    data: Vec<u8>,
}

impl Raw {
    fn new() -> Raw {
        let (entries, tensors, data) = (Vec::new(), Vec::new(), Vec::new());
        Raw {
            magic: *b"GGUF",
            version: 3,
            n_tensors: None,
            n_entries: None,
            entries,
            tensors,
            alignment: 32,
            data,
        }
    }

    fn entry(mut self, key: impl AsRef<[u8]>, value_type: u32, value: impl AsRef<[u8]>) -> Raw {
        self.entries
            .push([&string(key), &value_type.to_le_bytes()[..], value.as_ref()].concat());
        self
    }

    fn tensor(mut self, name: impl AsRef<[u8]>, dims: &[u64], dtype: u32, offset: u64) -> Raw {
        let mut info = string(name);
        info.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| info.extend(dim.to_le_bytes()));
        info.extend(dtype.to_le_bytes());
        info.extend(offset.to_le_bytes());
        self.tensors.push(info);
        self
    }

    fn data(mut self, n: usize) -> Raw {
        self.data = (0..n).map(|i| i as u8).collect();
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(
            self.n_tensors
                .unwrap_or(self.tensors.len() as u64)
                .to_le_bytes(),
        );
        out.extend(
            self.n_entries
                .unwrap_or(self.entries.len() as u64)
                .to_le_bytes(),
        );
        out.extend(self.entries.concat());
        out.extend(self.tensors.concat());
        if !self.data.is_empty() {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(&self.data);
        }
        out
    }
}

/// A small valid file with every kind of thing in it.
fn valid() -> Raw {
    let tokens = [string("a"), string(""), string([0xff, 0xfe]), string("é")].concat();
    let nested = [array(U8, 2, &[1, 2]), array(STRING, 1, &string("x"))].concat();
    Raw::new()
        .entry("general.architecture", STRING, string("llama"))
        .entry("u8", U8, [200])
        .entry("i8", 1, [0xff])
        .entry("u16", 2, 40000u16.to_le_bytes())
        .entry("i16", 3, (-2i16).to_le_bytes())
        .entry("u32", U32, 3_000_000_000u32.to_le_bytes())
        .entry("i32", I32, (-7i32).to_le_bytes())
        .entry("f32", F32, 0.5f32.to_le_bytes())
        .entry("bool", BOOL, [1])
        .entry("u64", U64, (1u64 << 40).to_le_bytes())
        .entry("i64", 11, (-1i64 << 40).to_le_bytes())
        .entry("f64", 12, 0.1f64.to_le_bytes())
        .entry("tokens", ARRAY, array(STRING, 4, &tokens))
        .entry(
            "types",
            ARRAY,
            array(I32, 2, &[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]),
        )
        .entry("flags", ARRAY, array(BOOL, 2, &[0, 1]))
        .entry("nested", ARRAY, array(ARRAY, 2, &nested))
        .entry("latin-1", STRING, string([0xe9]))
        .tensor("blocks", &[64, 2], 8, 0) // Q8_0: 4 blocks of 34 bytes
        .tensor("scalar", &[], 0, 160)
        .tensor("table", &[2, 1, 3], 24, 192) // I8
        .data(198)
}

/// The error a file is refused with, after a check that memory was bounded by the file's size.
#[track_caller]
fn refusal(bytes: Vec<u8>) -> GgufError {
    // A message, or the parts of an error; and the largest multiple any entry of a file may take.
    let allowed = 4096 + 32 * bytes.len();
    let before = ALLOCATED.get();
    let error = Gguf::from_bytes(bytes).expect_err("this file must be refused");
    let allocated = ALLOCATED.get() - before;
    assert!(
        allocated <= allowed,
        "{allocated} bytes allocated, {allowed} allowed: {error}"
    );
    assert!(!error.to_string().is_empty());
    error
}

/// Asserts which error, and which parts of it.
macro_rules! refused {
    ($file:expr, $pattern:pat $(if $condition:expr)?) => {{
        let error = refusal($file.bytes());
        assert!(matches!(&error, $pattern $(if $condition)?), "{error:?}");
    }};
}

// ---------------------------------------------------------------- what must be read

#[test]
fn reads_every_type() {
    for version in [2, 3] {
        let gguf = Gguf::from_bytes(Raw { version, ..valid() }.bytes()).unwrap();
        let m = gguf.metadata();
        assert_eq!(gguf.version(), version);
        assert_eq!(m.len(), 17);
        assert_eq!(m.iter().nth(1).unwrap(), ("u8", &Value::U8(200)));
        assert_eq!(m.str("general.architecture").unwrap(), "llama");
        assert_eq!(m.get("i8"), Some(&Value::I8(-1)));
        assert_eq!(m.get("u16"), Some(&Value::U16(40000)));
        assert_eq!(m.get("i16"), Some(&Value::I16(-2)));
        assert_eq!(m.u32("u32").unwrap(), 3_000_000_000);
        assert_eq!(m.i32("i32").unwrap(), -7);
        assert_eq!(m.f32("f32").unwrap(), 0.5);
        assert!(m.bool("bool").unwrap());
        assert_eq!(m.u64("u64").unwrap(), 1 << 40);
        assert_eq!(m.get("i64"), Some(&Value::I64(-1 << 40)));
        assert_eq!(m.get("f64"), Some(&Value::F64(0.1)));
        assert_eq!(*m.i32s("types").unwrap(), [1, -1]);
        assert_eq!(*m.bools("flags").unwrap(), [false, true]);
        assert_eq!(m.get("latin-1"), Some(&Value::Bytes(vec![0xe9])));
        let nested = vec![
            Array::U8(vec![1, 2]),
            Array::Strings(["x"].iter().collect()),
        ];
        assert_eq!(m.get("nested"), Some(&Value::Array(Array::Arrays(nested))));

        let tokens = m.strings("tokens").unwrap();
        assert_eq!(tokens.len(), 4);
        let expected: [&[u8]; 4] = [b"a", b"", &[0xff, 0xfe], "é".as_bytes()];
        assert!(tokens.iter().eq(expected));
        assert_eq!(tokens.get(2), Some(&[0xff, 0xfe][..]));
        assert_eq!((tokens.str(2), tokens.str(3)), (None, Some("é")));
        assert_eq!((tokens.get(4), tokens.get(usize::MAX)), (None, None));

        let t = gguf.tensor("blocks").unwrap();
        assert_eq!(
            (&*t.dims, t.dtype, t.n_bytes),
            (&[64, 2][..], DType::Q8_0, 136)
        );
        assert_eq!(t.offset, gguf.header().data_offset);
        assert_eq!(gguf.data(t), (0..136).map(|i| i as u8).collect::<Vec<_>>());
        let t = gguf.tensor("scalar").unwrap();
        assert_eq!(
            (&*t.dims, gguf.data(t)),
            (&[1][..], &[160, 161, 162, 163][..])
        );
        let t = gguf.tensor("table").unwrap();
        assert_eq!(
            (t.n_elems(), gguf.data(t)),
            (6, &[192, 193, 194, 195, 196, 197][..])
        );
        assert_eq!(gguf.tensor("absent"), None);
        assert_eq!(gguf.tensors().len(), 3);
    }
}

#[test]
fn accessors_say_what_is_wrong() {
    let gguf = Gguf::from_bytes(valid().bytes()).unwrap();
    let m = gguf.metadata();
    assert_eq!(m.opt_u32("absent").unwrap(), None);
    let error = m.u32("absent").unwrap_err();
    assert!(
        matches!(&error, GgufError::MissingKey { key } if key == "absent"),
        "{error:?}"
    );
    // Integers of any type, as long as they fit.
    assert_eq!(
        (
            m.u32("u8").unwrap(),
            m.i32("u16").unwrap(),
            m.u64("u32").unwrap()
        ),
        (200, 40000, 3_000_000_000)
    );
    for (error, number) in [
        (m.opt_u32("i32").unwrap_err(), "-7"),
        (m.opt_i32("u32").unwrap_err(), "3000000000"),
        (m.u32("u64").unwrap_err(), "1099511627776"),
        (m.u32s("types").map(drop).unwrap_err(), "-1"),
    ] {
        assert!(
            matches!(&error, GgufError::OutOfRange { found, .. } if found == number),
            "{error:?}"
        );
    }
    for (error, expected, found) in [
        (m.opt_u32("f32").unwrap_err(), "u32", "f32"),
        (m.opt_f32("u32").unwrap_err(), "f32", "u32"),
        (m.opt_bool("u8").unwrap_err(), "bool", "u8"),
        (
            m.opt_str("tokens").unwrap_err(),
            "string",
            "array of strings",
        ),
        (
            m.opt_strings("types").map(drop).unwrap_err(),
            "array of strings",
            "array of i32",
        ),
        (
            m.opt_u32s("u32").map(drop).unwrap_err(),
            "array of u32",
            "u32",
        ),
        (
            m.opt_bools("types").map(drop).unwrap_err(),
            "array of bool",
            "array of i32",
        ),
    ] {
        let right = matches!(&error, GgufError::WrongType { expected: e, found: f, .. } if (*e, *f) == (expected, found));
        assert!(right, "{error:?}");
    }
    assert!(
        matches!(m.str("latin-1").unwrap_err(), GgufError::NotUtf8 { item } if item.contains("latin-1"))
    );
}

/// A vocabulary costs no allocation per string.
#[test]
fn strings_stay_in_place() {
    let n = 100_000u64;
    let tokens = string("tok").repeat(n as usize);
    let bytes = Raw::new()
        .entry("tokens", ARRAY, array(STRING, n, &tokens))
        .bytes();
    let before = ALLOCATED.get();
    let gguf = Gguf::from_bytes(bytes).unwrap();
    let allocated = ALLOCATED.get() - before;
    assert_eq!(
        gguf.metadata().strings("tokens").unwrap().str(99_999),
        Some("tok")
    );
    // Four bytes of offset each, held twice for a moment, and a few hundred bytes for the rest.
    assert!(allocated <= 2 * 4 * (n as usize + 1) + 1024, "{allocated}");
}

#[test]
fn memory_of_any_address_is_read() {
    let bytes = valid().bytes();
    for shift in 0..8 {
        let mut shifted = vec![0; shift];
        shifted.extend(&bytes);
        let leaked: &'static [u8] = Vec::leak(shifted);
        let gguf = Gguf::from_bytes(&leaked[shift..]).unwrap();
        for t in gguf.tensors() {
            assert_eq!(gguf.data(t).as_ptr().addr() % 8, 0);
        }
        assert_eq!(
            gguf.data(gguf.tensor("table").unwrap()),
            [192, 193, 194, 195, 196, 197]
        );
    }
}

/// The header is found from every prefix that holds it; every shorter one asks for more, but never
/// for more than the header needs.
#[test]
fn header_from_a_prefix() {
    let bytes = valid().bytes();
    let file_size = bytes.len() as u64;
    let whole = Header::parse(&bytes, file_size).unwrap();
    let header_len = bytes.len() - valid().data.len();
    let mut complete = None;
    for len in 0..bytes.len() {
        match Header::parse(&bytes[..len], file_size) {
            Ok(header) => {
                complete.get_or_insert(len);
                assert_eq!(header.tensors, whole.tensors);
                assert_eq!(header.data_offset, header_len as u64);
                assert!(header.metadata.iter().eq(whole.metadata.iter()));
            }
            Err(GgufError::HeaderIncomplete { have, need }) => {
                assert_eq!(complete, None);
                assert_eq!(have, len as u64);
                assert!(
                    need > have && need <= header_len as u64,
                    "{need} of {header_len}"
                );
            }
            Err(other) => panic!("prefix of {len}: {other:?}"),
        }
    }
    let complete = complete.unwrap();
    assert!(
        complete <= header_len && header_len - complete < 32,
        "only padding follows"
    );
}

/// Header::read starts with a prefix of 1 MiB; this header is larger.
#[test]
fn header_of_a_file() {
    let folder = Folder::new("header");
    let tokens = string("a token").repeat(200_000);
    let file = valid()
        .entry("more", ARRAY, array(STRING, 200_000, &tokens))
        .bytes();
    assert!(file.len() > 2 << 20);
    let path = folder.file("large.gguf", &file);
    let header = Header::read(&path).unwrap();
    assert_eq!(header.metadata.strings("more").unwrap().len(), 200_000);
    assert_eq!(header.tensors, Gguf::open(&path).unwrap().tensors());
    assert_eq!(header.tensor("table").unwrap().dims, [2, 1, 3]);
}

// ---------------------------------------------------------------- what must be refused

#[test]
fn not_gguf() {
    let hinted = |start: &[u8], word: &str| {
        let error = refusal(start.to_vec());
        assert!(
            matches!(&error, GgufError::BadMagic { hint, .. } if hint.contains(word)),
            "{error:?}"
        );
    };
    hinted(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
        "LFS",
    );
    hinted(b"<!DOCTYPE html><html>", "web page");
    hinted(b"tjgg\x01\0\0\0", "before GGUF");
    hinted(b"PK\x03\x04\0\0", "ZIP");
    hinted(
        &[&64u64.to_le_bytes()[..], b"{\"__metadata__\":"].concat(),
        "safetensors",
    );
    refused!(Raw { magic: *b"FUGU", ..valid() }, GgufError::BadMagic { found, .. } if found == b"FUGU");
    let error = refusal(Vec::new());
    assert!(
        matches!(error, GgufError::UnexpectedEnd { file_size: 0, .. }),
        "{error:?}"
    );
}

#[test]
fn versions() {
    for version in [0, 1, 4, u32::MAX] {
        refused!(Raw { version, ..valid() }, GgufError::Version { found } if *found == version);
    }
    for version in [1u32, 2, 3] {
        let swapped = Raw {
            version: version.swap_bytes(),
            ..valid()
        };
        refused!(swapped, GgufError::BigEndian { version: v } if *v == version);
    }
}

#[test]
fn counts() {
    for count in [1 << 20, i64::MAX as u64, u64::MAX] {
        refused!(
            Raw { n_tensors: Some(count), ..valid() },
            GgufError::CountTooLarge { item, offset: 8, count: c, .. } if *c == count && item.contains("tensors")
        );
        refused!(
            Raw { n_entries: Some(count), ..valid() },
            GgufError::CountTooLarge { item, offset: 16, count: c, .. } if *c == count && item.contains("entries")
        );
        for element_type in [U8, U32, U64, BOOL, STRING, ARRAY] {
            let file = Raw::new().entry("tokens", ARRAY, array(element_type, count, &[0; 64]));
            refused!(file, GgufError::CountTooLarge { item, count: c, left: 64, .. }
                if *c == count && item.contains("`tokens`"));
        }
    }
    let many = (0..1 << 16).fold(Raw::new(), |file, i| file.entry(format!("k{i}"), BOOL, [1]));
    assert_eq!(
        Gguf::from_bytes(many.bytes()).unwrap().metadata().len(),
        1 << 16
    );
    refused!(
        many.entry("k", BOOL, [1]),
        GgufError::TooManyEntries {
            count: 65537,
            max: 65536
        }
    );
    // One more than there is: what follows is read as what it is not.
    refused!(Raw { n_entries: Some(18), ..valid() }, GgufError::NameLength { item, .. } if item.contains("tensor 0"));
    refused!(Raw { n_tensors: Some(4), ..valid() }, GgufError::NameLength { item, .. } if item.contains("tensor 3"));
}

#[test]
fn keys() {
    let long = |len| Raw::new().entry("k".repeat(len), U8, [0]);
    assert!(Gguf::from_bytes(long(65535).bytes()).is_ok());
    refused!(
        long(65536),
        GgufError::NameLength {
            found: 65536,
            max: 65535,
            offset: 24,
            ..
        }
    );
    refused!(Raw::new().entry([0xc3], U8, [0]), GgufError::NotUtf8 { item } if item.contains("entry 0"));
    let twice = Raw::new()
        .entry("a", U8, [0])
        .entry("b", U8, [0])
        .entry("a", U32, [0; 4]);
    refused!(twice, GgufError::DuplicateKey { key } if key == "a");
}

#[test]
fn values() {
    for found in [13, 255, u32::MAX] {
        let file = Raw::new().entry("k", found, [0; 64]);
        refused!(file, GgufError::ValueType { key, offset: 33, found: f } if key == "k" && *f == found);
        let file = Raw::new().entry("k", ARRAY, array(found, 1, &[0; 64]));
        refused!(file, GgufError::ArrayElementType { key, offset: 37, found: f } if key == "k" && *f == found);
    }
    // The element type is judged even if there are no elements.
    refused!(
        Raw::new().entry("k", ARRAY, array(99, 0, &[])),
        GgufError::ArrayElementType { found: 99, .. }
    );
    refused!(
        Raw::new().entry("k", BOOL, [2]),
        GgufError::InvalidBool {
            found: 2,
            offset: 37,
            ..
        }
    );
    refused!(
        Raw::new().entry("k", ARRAY, array(BOOL, 3, &[0, 1, 7])),
        GgufError::InvalidBool { found: 7, .. }
    );
    let nested = |depth| {
        let inner = (1..depth).fold(array(U8, 0, &[]), |inner, _| array(ARRAY, 1, &inner));
        Raw::new().entry("k", ARRAY, inner)
    };
    assert!(Gguf::from_bytes(nested(4).bytes()).is_ok());
    refused!(nested(5), GgufError::ArrayDepth { key, max: 4, .. } if key == "k");
    refused!(nested(100_000), GgufError::ArrayDepth { max: 4, .. });
}

#[test]
fn alignments() {
    let with = |alignment: u32| {
        let file = Raw::new()
            .entry("general.alignment", U32, alignment.to_le_bytes())
            .tensor("t", &[1], 0, 0);
        Raw {
            alignment: alignment.clamp(1, 1 << 20) as usize,
            ..file.data(4)
        }
    };
    for alignment in [8, 32, 64, 1 << 20] {
        let gguf = Gguf::from_bytes(with(alignment).bytes()).unwrap();
        assert_eq!(gguf.data(&gguf.tensors()[0]), [0, 1, 2, 3]);
    }
    for alignment in [0, 1, 4, 33, 48, 1 << 21, 1 << 31] {
        refused!(with(alignment), GgufError::Alignment { found, .. } if *found == u64::from(alignment));
    }
    let text = Raw::new().entry("general.alignment", STRING, string("32"));
    refused!(
        text,
        GgufError::WrongType {
            found: "string",
            ..
        }
    );
}

#[test]
fn tensor_shapes() {
    let one = |dims: &[u64], dtype| Raw::new().tensor("t", dims, dtype, 0).data(1024);
    refused!(one(&[1; 5], 0), GgufError::TensorRank { name, found: 5, max: 4 } if name == "t");
    refused!(one(&[4, 0, 2], 0), GgufError::ZeroDim { axis: 1, dims, .. } if *dims == [4, 0, 2]);
    refused!(one(&[0], 2), GgufError::ZeroDim { axis: 0, .. });
    refused!(one(&[33, 2], 2), GgufError::PartialBlock { dtype, row: 33, block: 32, .. } if dtype == "Q4_0");
    // A row of 128 is whole blocks of 32, not of 256; two rows do not make up for it.
    refused!(one(&[128, 2], 12), GgufError::PartialBlock { dtype, block: 256, .. } if dtype == "Q4_K");
    refused!(one(&[], 8), GgufError::PartialBlock { row: 1, .. });
    for removed in [4, 5, 31, 36] {
        let error = refusal(one(&[32], removed).bytes());
        assert!(
            matches!(&error, GgufError::TensorType { name, found } if name == "t" && *found == removed),
            "{error:?}"
        );
        assert!(error.to_string().contains("removed"), "{error}");
    }
    for unknown in [9, 15, 43, u32::MAX] {
        refused!(one(&[32], unknown), GgufError::TensorType { found, .. } if *found == unknown);
    }
    for dims in [
        &[u64::MAX][..],
        &[1 << 32, 1 << 32],
        &[1 << 31, 1 << 31, 1 << 31, 1 << 31],
        &[1 << 61],
    ] {
        refused!(one(dims, 0), GgufError::TensorTooLarge { dims: d, .. } if d == dims);
    }
}

#[test]
fn tensor_names() {
    let named = |name: &[u8]| Raw::new().tensor(name, &[1], 0, 0).data(4);
    refused!(named(b""), GgufError::NameLength { item, found: 0, .. } if item.contains("tensor 0"));
    refused!(
        named(&[b'n'; 65536]),
        GgufError::NameLength { found: 65536, .. }
    );
    refused!(named(&[0xff]), GgufError::NotUtf8 { item } if item.contains("tensor 0"));
    let twice = Raw::new()
        .tensor("t", &[1], 0, 0)
        .tensor("t", &[1], 0, 32)
        .data(36);
    refused!(twice, GgufError::DuplicateTensor { name } if name == "t");
}

#[test]
fn tensor_places() {
    let two = |first, second| {
        Raw::new()
            .tensor("a", &[16], 0, first)
            .tensor("b", &[16], 0, second)
            .data(128)
    };
    assert!(Gguf::from_bytes(two(0, 64).bytes()).is_ok());
    assert!(
        Gguf::from_bytes(two(64, 0).bytes()).is_ok(),
        "the order does not matter"
    );
    refused!(two(0, 65), GgufError::TensorMisaligned { name, offset: 65, alignment: 32 } if name == "b");
    refused!(two(0, 32), GgufError::TensorOverlap { name, other, .. } if (&**name, &**other) == ("b", "a"));
    refused!(two(0, 0), GgufError::TensorOverlap { .. });
    // Beyond the file, and beyond what all tensors together would fill: not a matter of truncation.
    refused!(two(0, 96), GgufError::TensorOutOfFile { name, n_bytes: 64, .. } if name == "b");
    refused!(two(1 << 40, 0), GgufError::TensorOutOfFile { name, .. } if name == "a");
    refused!(two(0, u64::MAX - 31), GgufError::TensorOutOfFile { name, .. } if name == "b");
}

/// Every truncation is refused for what it is.
#[test]
fn truncated_at_every_byte() {
    let bytes = valid().bytes();
    let header_len = bytes.len() - valid().data.len();
    for len in 0..bytes.len() {
        let error = refusal(bytes[..len].to_vec());
        let file_len = len as u64;
        let right = match &error {
            GgufError::UnexpectedEnd {
                file_size,
                need,
                offset,
                ..
            } => len < header_len && *file_size == file_len && offset + need > file_len,
            GgufError::CountTooLarge { left, .. } => len < header_len && *left < file_len,
            GgufError::Truncated { expected, actual } => {
                header_len - len.min(header_len) < 32
                    && *expected == bytes.len() as u64
                    && *actual == file_len
            }
            _ => false,
        };
        assert!(right, "cut to {len} bytes: {error:?}");
    }
}

/// Any one byte of the header changed: an error or a model, but neither a panic nor a large
/// allocation.
#[test]
fn every_byte_flipped() {
    let bytes = valid().bytes();
    for i in 0..bytes.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = bytes.clone();
            bytes[i] ^= flip;
            let allowed = 4096 + 32 * bytes.len();
            let before = ALLOCATED.get();
            let result = Gguf::from_bytes(bytes);
            assert!(ALLOCATED.get() - before <= allowed, "byte {i}");
            if let Ok(gguf) = result {
                assert!(
                    gguf.tensors()
                        .iter()
                        .all(|t| gguf.data(t).len() as u64 == t.n_bytes)
                );
            }
        }
    }
}

// ---------------------------------------------------------------- published cases

/// CVE-2025-49847 (llama.cpp): the length of a token overflowed a signed 32-bit integer. No token
/// can be that long here, not even in a file that is long enough.
#[test]
fn cve_2025_49847_token_length() {
    let len = (1u64 << 31) + 1;
    let token = [&len.to_le_bytes()[..], b"short"].concat();
    let file = Raw::new().entry("tokenizer.ggml.tokens", ARRAY, array(STRING, 1, &token));
    refused!(file, GgufError::UnexpectedEnd { item, need, .. }
        if *need == len && item.contains("`tokenizer.ggml.tokens`"));
    let error = Header::parse(&file.bytes(), 1 << 33).unwrap_err();
    assert!(
        matches!(&error, GgufError::HeaderTooLarge { need, .. } if *need == len),
        "{error:?}"
    );
}

/// GHSA-vgg9-87g3-85w8 (ggml): the sum of the tensor sizes wrapped around, so that the buffer for
/// all of them was too small. And the way around its fix: one size that wraps when it is padded.
#[test]
fn ghsa_vgg9_87g3_85w8_tensor_size_overflow() {
    let quarter = 1u64 << 62; // bytes
    let mut file = Raw::new().data(64);
    for i in 0..4 {
        file = file.tensor(format!("t{i}"), &[quarter / 4], 0, quarter.wrapping_mul(i));
    }
    refused!(file, GgufError::TensorOutOfFile { name, .. } if name == "t0");
    let padded = Raw::new()
        .tensor("a", &[u64::MAX / 4], 0, 0)
        .tensor("b", &[1], 0, 0)
        .data(64);
    refused!(padded, GgufError::TensorTooLarge { name, .. } if name == "a");
}

/// GHSA-96jg-mvhq-q7q7 (ggml): unchecked arithmetic on sizes and alignment. Elements that fit 63
/// bits and bytes that do not; and a last tensor whose padding would go beyond 2⁶⁴.
#[test]
fn ghsa_96jg_mvhq_q7q7_alignment() {
    let elements = Raw::new().tensor("t", &[1 << 62], 0, 0).data(64);
    refused!(elements, GgufError::TensorTooLarge { .. });
    let padding = Raw::new().tensor("a", &[i64::MAX as u64], 24, 0).tensor(
        "b",
        &[i64::MAX as u64],
        24,
        1 << 63,
    );
    refused!(padding.data(64), GgufError::TensorOutOfFile { name, .. } if name == "a");
    for alignment in [0u32, 3, 1 << 31] {
        let file = Raw::new().entry("general.alignment", U32, alignment.to_le_bytes());
        refused!(file, GgufError::Alignment { .. });
    }
}

/// llama.cpp #18674: a dimension of 2⁴² + 1 whose stride wrapped to zero, in front of tensors that
/// stayed where they were.
#[test]
fn llama_cpp_18674_dimension() {
    let file = Raw::new()
        .tensor("token_embd.weight", &[1152, (1 << 42) + 1], 8, 0)
        .tensor("next", &[1], 0, 64);
    refused!(file.data(128), GgufError::TensorOverlap { name, other, .. }
        if (&**name, &**other) == ("next", "token_embd.weight"));
    let alone = Raw::new()
        .tensor("token_embd.weight", &[1152, (1 << 42) + 1], 8, 0)
        .data(128);
    refused!(alone, GgufError::Truncated { .. });
}

/// llama.cpp #26690: scores and token types stored as bytes were read as four bytes each.
#[test]
fn llama_cpp_26690_array_element_type() {
    let file = Raw::new()
        .entry("tokenizer.ggml.scores", ARRAY, array(U8, 3, &[1, 2, 3]))
        .entry("tokenizer.ggml.token_type", ARRAY, array(U8, 3, &[1, 2, 3]));
    let gguf = Gguf::from_bytes(file.bytes()).unwrap();
    let error = gguf.metadata().f32s("tokenizer.ggml.scores").unwrap_err();
    assert!(
        matches!(
            error,
            GgufError::WrongType {
                expected: "array of f32",
                found: "array of u8",
                ..
            }
        ),
        "{error:?}"
    );
    assert_eq!(
        *gguf.metadata().i32s("tokenizer.ggml.token_type").unwrap(),
        [1, 2, 3],
        "widened, not reinterpreted"
    );
}

/// ggml #1516: an alignment of 2³⁰ made gigabytes of padding, a string of 2³⁰ bytes was allocated
/// before it was read.
#[test]
fn ggml_1516_alignment_and_string() {
    let file = Raw::new().entry("general.alignment", U32, (1u32 << 30).to_le_bytes());
    refused!(file, GgufError::Alignment { found, max } if (*found, *max) == (1 << 30, 1 << 20));
    let file = Raw::new().entry("k", STRING, (1u64 << 30).to_le_bytes());
    refused!(file, GgufError::UnexpectedEnd { need, .. } if *need == 1 << 30);
}

/// candle #3533: a file of 60 bytes asked for gigabytes through its counts.
#[test]
fn candle_3533_allocation() {
    for count in [1u64 << 24, 1 << 32, 1 << 60] {
        let counts = [
            Raw {
                n_tensors: Some(count),
                ..Raw::new()
            },
            Raw {
                n_entries: Some(count),
                ..Raw::new()
            },
        ];
        for mut file in counts {
            file.entries.push(vec![0; 60 - 24]);
            assert_eq!(file.bytes().len(), 60);
            refused!(file, GgufError::CountTooLarge { count: c, .. } if *c == count);
        }
        let file = Raw::new().entry("k", ARRAY, array(F32, count, &[0; 11]));
        assert_eq!(file.bytes().len(), 60);
        refused!(file, GgufError::CountTooLarge { count: c, .. } if *c == count);
    }
}

/// CVE-2025-66960 (ollama): an empty string of a version 1 file underflowed; and its sibling
/// (ollama #17032), a string length that is huge, or negative as a signed number.
#[test]
fn cve_2025_66960_string_length() {
    refused!(
        Raw {
            version: 1,
            ..valid()
        },
        GgufError::Version { found: 1 }
    );
    for len in [1 << 40, i64::MAX as u64, u64::MAX, u64::MAX - 7] {
        let file = Raw::new().entry("k", STRING, len.to_le_bytes());
        refused!(file, GgufError::UnexpectedEnd { item, need, .. } if *need == len && item.contains("`k`"));
        let mut key = Raw::new();
        key.entries.push(
            [&len.to_le_bytes()[..], b"four"]
                .concat()
                .into_iter()
                .chain([0; 8])
                .collect(),
        );
        refused!(key, GgufError::NameLength { found, .. } if *found == len);
    }
}

/// CVE-2026-7482 (ollama): a tensor outside the file was read from whatever lay behind it in
/// memory.
#[test]
fn cve_2026_7482_tensor_outside_the_file() {
    let file = Raw::new().tensor("t", &[16], 0, 1 << 20).data(64);
    refused!(file, GgufError::TensorOutOfFile { n_bytes: 64, .. });
    refused!(Raw::new().tensor("t", &[1 << 20], 0, 0).data(64), GgufError::Truncated { expected, actual: 128 }
        if *expected == 64 + (4 << 20));
}

/// llama.cpp #27200: bytes of block types computed as elements · bytes / block wrapped around;
/// #27203: the product of the dimensions became negative.
#[test]
fn llama_cpp_27200_27203_block_bytes() {
    let file = Raw::new()
        .tensor("t", &[5_124_095_576_030_431_008], 2, 0)
        .data(64);
    refused!(file, GgufError::Truncated { expected, .. } if *expected == 2_882_303_761_517_117_442 + 64);
    let file = Raw::new()
        .tensor("t", &[i64::MAX as u64, 2], 24, 0)
        .data(64);
    refused!(file, GgufError::TensorTooLarge { .. });
}

/// llama.cpp #24884: an empty key ran into an assertion.
#[test]
fn llama_cpp_24884_empty_key() {
    refused!(Raw::new().entry("", U8, [0]), GgufError::NameLength { item, offset: 24, found: 0, .. }
        if item.contains("entry 0"));
}

/// gguf-py #27188: an array of 2⁶³ elements, also as element of an array, was read for ever.
#[test]
fn gguf_py_27188_array_length() {
    refused!(
        Raw::new().entry("k", ARRAY, array(U8, 1 << 63, &[])),
        GgufError::CountTooLarge { .. }
    );
    let nested = array(ARRAY, 1, &array(U8, 1 << 62, &[]));
    refused!(Raw::new().entry("k", ARRAY, nested), GgufError::CountTooLarge { count, .. } if *count == 1 << 62);
}

// ---------------------------------------------------------------- files on disk

/// A folder that is removed at the end of its test.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("ruvllm-gguf-{}-{test}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn names(&self) -> Vec<String> {
        let name = |entry: std::io::Result<fs::DirEntry>| {
            entry.unwrap().file_name().into_string().unwrap()
        };
        fs::read_dir(&self.0).unwrap().map(name).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn opens_a_mapped_file() {
    let folder = Folder::new("mapped");
    let path = folder.file("m.gguf", &valid().bytes());
    let gguf = Gguf::open(&path).unwrap();
    gguf.prefetch();
    assert_eq!(gguf.file_size(), valid().bytes().len() as u64);
    assert_eq!(
        gguf.data(gguf.tensor("table").unwrap()),
        [192, 193, 194, 195, 196, 197]
    );
    let clone = gguf.clone();
    let thread = std::thread::spawn(move || clone.metadata().strings("tokens").unwrap().len());
    assert_eq!(
        thread.join().unwrap(),
        gguf.metadata().strings("tokens").unwrap().len()
    );
}

#[test]
fn errors_name_the_file() {
    let folder = Folder::new("errors");
    let bytes = valid().bytes();
    let path = folder.file("partial.gguf", &bytes[..bytes.len() - 10]);
    for error in [
        Gguf::open(&path).unwrap_err(),
        Header::read(&path).unwrap_err(),
    ] {
        assert!(error.to_string().contains("partial.gguf"), "{error}");
        let GgufError::Truncated { expected, actual } = error.cause() else {
            panic!("{error:?}")
        };
        assert_eq!(
            (*expected, *actual),
            (bytes.len() as u64, bytes.len() as u64 - 10)
        );
    }
    for path in [folder.0.clone(), folder.0.join("absent.gguf")] {
        for error in [
            Gguf::open(&path).unwrap_err(),
            Header::read(&path).unwrap_err(),
        ] {
            assert!(
                matches!(&error, GgufError::Io { path: p, .. } if *p == path),
                "{error:?}"
            );
        }
    }
    let empty = folder.file("empty.gguf", b"");
    let error = Gguf::open(empty).unwrap_err();
    assert!(
        matches!(error.cause(), GgufError::UnexpectedEnd { file_size: 0, .. }),
        "{error:?}"
    );
}

fn part(no: u16, count: u16, n_tensors: u32, tensor: &str) -> Raw {
    Raw::new()
        .entry("split.no", 2, no.to_le_bytes())
        .entry("split.count", 2, count.to_le_bytes())
        .entry("split.tensors.count", I32, n_tensors.to_le_bytes())
        .tensor(tensor, &[4], 24, 0)
        .data(4 + usize::from(no))
}

#[test]
fn split_models() {
    let folder = Folder::new("split");
    let names = [
        "m-00001-of-00003.gguf",
        "m-00002-of-00003.gguf",
        "m-00003-of-00003.gguf",
    ];
    let paths: Vec<PathBuf> = (0u16..)
        .zip(names)
        .map(|(no, name)| folder.file(name, &part(no, 3, 3, &format!("t{no}")).bytes()))
        .collect();
    let size: u64 = paths
        .iter()
        .map(|path| fs::metadata(path).unwrap().len())
        .sum();
    // Any part opens the whole model.
    for path in &paths {
        let gguf = Gguf::open(path).unwrap();
        assert_eq!(gguf.metadata().u32("split.no").unwrap(), 0);
        assert_eq!(gguf.file_size(), size);
        let shards: Vec<_> = gguf
            .tensors()
            .iter()
            .map(|t| (t.name.as_str(), t.shard))
            .collect();
        assert_eq!(shards, [("t0", 0), ("t1", 1), ("t2", 2)]);
        assert_eq!(gguf.data(gguf.tensor("t2").unwrap()), [0, 1, 2, 3]);
    }
    assert_eq!(Header::read(&paths[1]).unwrap().tensors.len(), 1);

    let error = Gguf::from_bytes(fs::read(&paths[0]).unwrap()).unwrap_err();
    assert!(
        matches!(error, GgufError::SplitInMemory { count: 3 }),
        "{error:?}"
    );

    let renamed = folder.file("renamed.gguf", &fs::read(&paths[0]).unwrap());
    let error = Gguf::open(renamed).unwrap_err();
    let expected = matches!(error.cause(), GgufError::SplitName { no: 1, count: 3, expected } if expected == "-00001-of-00003.gguf");
    assert!(expected, "{error:?}");

    let open_with = |no: usize, file: Raw| {
        let original = fs::read(&paths[no]).unwrap();
        fs::write(&paths[no], file.bytes()).unwrap();
        let error = Gguf::open(&paths[0]).unwrap_err();
        fs::write(&paths[no], original).unwrap();
        assert!(error.to_string().contains(names[no]) || no == 1, "{error}");
        error
    };
    let error = open_with(2, part(1, 3, 3, "t2"));
    assert!(
        matches!(
            error.cause(),
            GgufError::SplitMismatch {
                key: "split.no",
                expected: 2,
                found: 1
            }
        ),
        "{error:?}"
    );
    let error = open_with(2, part(2, 4, 3, "t2"));
    assert!(matches!(
        error.cause(),
        GgufError::SplitMismatch {
            key: "split.count",
            expected: 3,
            found: 4
        }
    ));
    let error = open_with(2, Raw::new().tensor("t2", &[1], 24, 0).data(1));
    assert!(
        matches!(error.cause(), GgufError::MissingKey { key } if key == "split.count"),
        "{error:?}"
    );
    let error = open_with(0, part(0, 3, 7, "t0"));
    let expected = GgufError::SplitMismatch {
        key: "split.tensors.count",
        expected: 7,
        found: 3,
    };
    assert_eq!(error.cause().to_string(), expected.to_string());
    let error = open_with(1, part(1, 3, 3, "t0"));
    assert!(
        matches!(error.cause(), GgufError::DuplicateTensor { name } if name == "t0"),
        "{error:?}"
    );
    let error = open_with(0, part(5, 3, 3, "t0"));
    assert!(
        matches!(error.cause(), GgufError::SplitName { no: 6, .. }),
        "{error:?}"
    );

    fs::remove_file(&paths[1]).unwrap();
    for path in [&paths[0], &paths[2]] {
        let error = Gguf::open(path).unwrap_err();
        assert!(
            matches!(&error, GgufError::Io { path, .. } if *path == paths[1]),
            "{error:?}"
        );
    }
}

// ---------------------------------------------------------------- the writer

#[test]
fn writes_through_a_temporary_file() {
    let folder = Folder::new("writer");
    let path = folder.0.join("out.gguf");
    let make = |byte: u8| {
        let mut writer = Writer::new();
        writer.metadata("general.architecture", "llama");
        writer.tensor_with("t", &[3], DType::I8, move |out| {
            (0..3).try_for_each(|_| out.write_all(&[byte]))
        });
        writer
    };
    make(1).write(&path).unwrap();
    let first = Gguf::open(&path).unwrap();
    let error = make(2).write(&path).unwrap_err();
    assert!(
        matches!(&error, GgufError::Exists { path: p } if *p == path),
        "{error:?}"
    );
    let mut writer = make(2);
    writer.overwrite();
    writer.write(&path).unwrap();
    let second = Gguf::open(&path).unwrap();
    assert_eq!(
        first.data(&first.tensors()[0]),
        [1, 1, 1],
        "whoever has the old file open keeps it"
    );
    assert_eq!(second.data(&second.tensors()[0]), [2, 2, 2]);

    // Data of the wrong length, and a failure while it is made: the old file stays, nothing else
    // does.
    for n in [0, 2, 4, 100] {
        let mut writer = make(3);
        writer
            .overwrite()
            .tensor("wrong", &[3], DType::I8, vec![0; n]);
        let error = writer.write(&path).unwrap_err();
        let right = matches!(error.cause(), GgufError::TensorData { name, expected: 3, found } if name == "wrong" && *found == n as u64);
        assert!(right, "{error:?}");
    }
    let mut writer = make(3);
    writer
        .overwrite()
        .tensor_with("cancelled", &[3], DType::I8, |_| {
            Err(std::io::Error::other("cancelled"))
        });
    let error = writer.write(&path).unwrap_err();
    assert!(
        matches!(&error, GgufError::Io { error, .. } if error.to_string() == "cancelled"),
        "{error:?}"
    );
    assert_eq!(folder.names(), ["out.gguf"]);
    let third = Gguf::open(&path).unwrap();
    assert_eq!(third.data(&third.tensors()[0]), [2, 2, 2]);
    let absent = make(1).write(folder.0.join("absent/out.gguf")).unwrap_err();
    assert!(matches!(absent, GgufError::Io { .. }));
    // Whoever prints a chain of errors reads what the system said once.
    assert!(std::error::Error::source(&absent).is_none(), "{absent}");
}

#[cfg(unix)]
#[test]
fn replaces_files_alone_and_keeps_who_may_read_them() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = Folder::new("replace");
    let write = |name: &str, private: bool| {
        let mut writer = Writer::new();
        writer.metadata("general.architecture", "llama").overwrite();
        if private {
            writer.private();
        }
        writer.write(folder.0.join(name))
    };
    let mode = |name: &str| {
        fs::metadata(folder.0.join(name))
            .unwrap()
            .permissions()
            .mode()
            & 0o777
    };
    write("secret", true).unwrap();
    assert_eq!(mode("secret"), 0o600);
    write("secret", false).unwrap();
    assert_eq!(mode("secret"), 0o600);
    fs::set_permissions(folder.0.join("secret"), fs::Permissions::from_mode(0o640)).unwrap();
    write("secret", true).unwrap();
    assert_eq!(mode("secret"), 0o640);

    symlink("secret", folder.0.join("link")).unwrap();
    fs::write(folder.0.join("secret"), "older").unwrap();
    write("link", false).unwrap();
    assert!(
        fs::symlink_metadata(folder.0.join("link"))
            .unwrap()
            .is_symlink()
    );
    assert!(Gguf::open(folder.0.join("secret")).is_ok());
    symlink("nowhere", folder.0.join("dangling")).unwrap();
    assert!(write("dangling", false).is_err());

    let _socket = std::os::unix::net::UnixListener::bind(folder.0.join("socket")).unwrap();
    let error = write("socket", false).unwrap_err().to_string();
    assert!(error.contains("not a regular file"), "{error}");
    assert!(!fs::metadata(folder.0.join("socket")).unwrap().is_file());
    let error = Writer::new().write("-").unwrap_err().to_string();
    assert!(error.contains("standard output"), "{error}");
    let mut names = folder.names();
    names.sort();
    assert_eq!(names, ["dangling", "link", "secret", "socket"]);
}

/// The writer refuses what the reader would.
#[test]
fn writes_only_what_can_be_read() {
    let refused = |make: &dyn Fn(&mut Writer<'_>)| {
        let mut writer = Writer::new();
        make(&mut writer);
        writer.to_bytes().unwrap_err()
    };
    let error = refused(&|w| _ = w.metadata("", 1u32));
    assert!(matches!(error, GgufError::NameLength { .. }), "{error:?}");
    for alignment in [0u32, 7, 48, 1 << 30] {
        let error = refused(&|w| _ = w.metadata("general.alignment", alignment));
        assert!(matches!(error, GgufError::Alignment { .. }), "{error:?}");
    }
    let error = refused(&|w| _ = w.tensor("t", &[1; 5], DType::I8, &[0][..]));
    assert!(matches!(error, GgufError::TensorRank { .. }), "{error:?}");
    let error = refused(&|w| _ = w.tensor("t", &[33], DType::Q4_0, &[][..]));
    assert!(matches!(error, GgufError::PartialBlock { .. }), "{error:?}");
    let error = refused(&|w| {
        _ = w
            .tensor("t", &[1], DType::I8, &[0][..])
            .tensor("t", &[1], DType::I8, &[0][..])
    });
    assert!(
        matches!(error, GgufError::DuplicateTensor { .. }),
        "{error:?}"
    );
}

#[test]
fn alignment_of_any_integer_type_is_obeyed() {
    for value in [
        Value::U32(64),
        Value::U64(64),
        Value::I32(64),
        Value::U8(64),
    ] {
        let mut writer = Writer::new();
        writer
            .metadata("general.alignment", 32u32)
            .metadata("general.alignment", value);
        writer
            .tensor("a", &[1], DType::I8, vec![1])
            .tensor("b", &[1], DType::I8, vec![2]);
        let gguf = Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap();
        assert_eq!(gguf.metadata().len(), 1);
        assert_eq!(gguf.tensors()[1].offset, gguf.header().data_offset + 64);
        assert_eq!(gguf.data(&gguf.tensors()[1]), [2]);
    }
}

fn any_array() -> impl Strategy<Value = Array> {
    use proptest::collection::vec;
    // Equality is compared, so no NaN.
    let f32s = vec(any::<f32>().prop_filter("NaN", |x| !x.is_nan()), 0..9);
    let f64s = vec(any::<f64>().prop_filter("NaN", |x| !x.is_nan()), 0..9);
    let strings = vec(vec(any::<u8>(), 0..9), 0..9)
        .prop_map(|v| Array::Strings(v.iter().collect::<StringArray>()));
    let flat = prop_oneof![
        vec(any::<u8>(), 0..9).prop_map(Array::U8),
        vec(any::<i8>(), 0..9).prop_map(Array::I8),
        vec(any::<u16>(), 0..9).prop_map(Array::U16),
        vec(any::<i16>(), 0..9).prop_map(Array::I16),
        vec(any::<u32>(), 0..9).prop_map(Array::U32),
        vec(any::<i32>(), 0..9).prop_map(Array::I32),
        vec(any::<u64>(), 0..9).prop_map(Array::U64),
        vec(any::<i64>(), 0..9).prop_map(Array::I64),
        f32s.prop_map(Array::F32),
        f64s.prop_map(Array::F64),
        vec(any::<bool>(), 0..9).prop_map(Array::Bool),
        strings,
    ];
    flat.prop_recursive(3, 32, 4, |inner| vec(inner, 0..4).prop_map(Array::Arrays))
}

fn any_value() -> impl Strategy<Value = Value> {
    let bytes = proptest::collection::vec(any::<u8>(), 0..20);
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        any::<f32>()
            .prop_filter("NaN", |x| !x.is_nan())
            .prop_map(Value::F32),
        any::<f64>()
            .prop_filter("NaN", |x| !x.is_nan())
            .prop_map(Value::F64),
        any::<bool>().prop_map(Value::Bool),
        ".{0,20}".prop_map(Value::String),
        bytes
            .prop_filter("text", |b| str::from_utf8(b).is_err())
            .prop_map(Value::Bytes),
        any_array().prop_map(Value::Array),
    ]
}

fn any_tensor() -> impl Strategy<Value = (Vec<u64>, DType, Vec<u8>)> {
    let shape = (
        1u64..3,
        proptest::collection::vec(1u64..4, 0..4),
        proptest::sample::select(DType::ALL),
    );
    shape.prop_flat_map(|(blocks, rest, dtype)| {
        let (block, block_bytes) = dtype.block();
        let dims: Vec<u64> = [blocks * block]
            .into_iter()
            .chain(rest.iter().copied())
            .collect();
        let n_bytes = (blocks * rest.iter().product::<u64>() * block_bytes) as usize;
        (
            Just(dims),
            Just(dtype),
            proptest::collection::vec(any::<u8>(), n_bytes),
        )
    })
}

proptest! {
    #![proptest_config(cases(200))]

    /// What was written is what is read.
    #[test]
    fn round_trip(
        entries in proptest::collection::btree_map(".{1,20}", any_value(), 0..12),
        tensors in proptest::collection::btree_map(".{1,20}", any_tensor(), 0..6),
        alignment in proptest::option::of(proptest::sample::select(vec![8u32, 32, 256])),
    ) {
        let mut writer = Writer::new();
        for (key, value) in &entries {
            writer.metadata(key, value.clone());
        }
        if let Some(alignment) = alignment {
            writer.metadata("general.alignment", alignment);
        }
        for (name, (dims, dtype, data)) in &tensors {
            writer.tensor(name, dims, *dtype, data);
        }
        let gguf = Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap();
        let read: Vec<_> = gguf.metadata().iter().filter(|(key, _)| *key != "general.alignment").collect();
        let written: Vec<_> = entries.iter().map(|(key, value)| (key.as_str(), value)).collect();
        prop_assert_eq!(read, written);
        prop_assert_eq!(gguf.tensors().len(), tensors.len());
        for ((name, (dims, dtype, data)), t) in tensors.iter().zip(gguf.tensors()) {
            prop_assert_eq!((&t.name, &t.dims, t.dtype), (name, dims, *dtype));
            prop_assert_eq!(gguf.data(t), data);
            prop_assert_eq!(t.offset % u64::from(alignment.unwrap_or(32)), 0);
            prop_assert_eq!(gguf.tensor(name), Some(t));
        }
    }

    /// No bytes, however wild, make the parser panic.
    #[test]
    fn arbitrary_bytes(mut bytes in proptest::collection::vec(any::<u8>(), 0..400), version in 2u8..4) {
        let _ = Gguf::from_bytes(bytes.clone());
        bytes.splice(0..bytes.len().min(8), [b'G', b'G', b'U', b'F', version, 0, 0, 0]);
        let _ = Gguf::from_bytes(bytes);
    }
}
