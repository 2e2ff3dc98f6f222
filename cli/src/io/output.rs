//! Standard output.

use super::failure::Failure;
use std::io::{self, Write};
use std::path::Path;

/// Writes to stdout at once.
pub(crate) fn print(bytes: impl AsRef<[u8]>) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(bytes.as_ref())
        .and_then(|()| out.flush())
        .map_err(Failure::file(Path::new("standard output")))
}

/// Prints a JSON value and a line end.
pub(crate) fn print_json(value: &serde_json::Value) -> Result<(), Failure> {
    print(format!("{value:#}\n"))
}
