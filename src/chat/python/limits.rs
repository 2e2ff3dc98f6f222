//! Memory limits of a rendering, and their errors.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::cell::Cell;

/// Deepest nesting of a value that is printed.
const MAX_DEPTH: usize = 200;
/// Longest string that one operation makes, in bytes.
pub(super) const MAX_STRING: usize = 64 << 20;
/// Maximum number of lists that `batch` and `slice` make, or items in one of them.
const MAX_ITEMS: usize = 1 << 16;
/// Bytes of a value in a list.
const ITEM: usize = 32;

thread_local! {
    /// Bytes made by the rendering on this thread; each has a thread of its own.
    static MADE: Cell<usize> = const { Cell::new(0) };
    /// Maximum number of bytes that it may make.
    static LIMIT: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Starts counting a rendering on this thread; `limit` in bytes.
pub(in crate::chat) fn begin(limit: usize) {
    MADE.set(0);
    LIMIT.set(limit);
}

/// The message of `raise_exception`, carried through the engine.
#[derive(Debug)]
pub(in crate::chat) struct Raised(pub(in crate::chat) String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// The results exceed this limit, in bytes.
#[derive(Debug)]
pub(in crate::chat) struct TooMuch(pub(in crate::chat) usize);

impl std::fmt::Display for TooMuch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "more than {} bytes", self.0)
    }
}

impl std::error::Error for TooMuch {}

pub(super) fn error(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Counts `n` bytes that are about to be made.
pub(super) fn charge(n: usize) -> Result<(), Error> {
    let made = MADE.get().saturating_add(n);
    MADE.set(made);
    let limit = LIMIT.get();
    if made > limit {
        return Err(error("too much memory").with_source(TooMuch(limit)));
    }
    Ok(())
}

/// A value that an operation made, counted.
pub(super) fn charged(value: Value) -> Result<Value, Error> {
    let n = match value.kind() {
        ValueKind::String => value.as_str().map_or(0, str::len),
        ValueKind::Seq | ValueKind::Map => value.len().unwrap_or(0).saturating_mul(ITEM),
        _ => 0,
    };
    charge(n)?;
    Ok(value)
}

/// Counts the items of a list that is about to be made.
pub(super) fn charge_items(n: usize) -> Result<(), Error> {
    charge(n.saturating_mul(ITEM))
}

pub(super) fn check(len: usize, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(error(format!(
            "a value is nested more than {MAX_DEPTH} deep"
        )));
    }
    if len > MAX_STRING {
        return Err(error(format!("a string is longer than {MAX_STRING} bytes")));
    }
    Ok(())
}

pub(super) fn check_items(n: usize) -> Result<usize, Error> {
    if n > MAX_ITEMS {
        Err(error(format!("more than {MAX_ITEMS} items")))
    } else {
        Ok(n)
    }
}
