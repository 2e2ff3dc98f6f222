//! What comes into the program: files, stdin, lists of tokens.

use super::failure::Failure;
use super::terminal::stdin_is_terminal;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Most bytes of an input that is held in memory.
const MAX_INPUT: u64 = 1 << 30;

/// The bytes of a file, a pipe or a device; `-` is stdin.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    if path == Path::new("-") {
        read_all(io::stdin().lock(), Path::new("standard input"))
    } else {
        read_all(File::open(path).map_err(Failure::file(path))?, path)
    }
}

fn read_all(input: impl Read, path: &Path) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    input
        .take(MAX_INPUT + 1)
        .read_to_end(&mut bytes)
        .map_err(Failure::file(path))?;
    if bytes.len() as u64 > MAX_INPUT {
        let message = format!(
            "{}: more than {} MiB, the most that is read",
            path.display(),
            MAX_INPUT >> 20
        );
        return Err(Failure::Work(message));
    }
    Ok(bytes)
}

/// The text of a regular file, which does not wait for someone to write it; `-` is stdin.
#[cfg(feature = "chat")]
pub(crate) fn read_regular(path: &Path) -> Result<String, Failure> {
    let is_regular = path == Path::new("-")
        || std::fs::metadata(path)
            .map_err(Failure::file(path))?
            .is_file();
    if is_regular {
        read_text(path)
    } else {
        Err(Failure::Work(format!(
            "{}: not a regular file",
            path.display()
        )))
    }
}

/// What messages call a file.
pub(crate) fn name(path: &Path) -> String {
    if path == Path::new("-") {
        "standard input".into()
    } else {
        path.display().to_string()
    }
}

/// The text of a file; `-` is stdin.
pub(crate) fn read_text(path: &Path) -> Result<String, Failure> {
    String::from_utf8(read(path)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::Work(format!("{}: not UTF-8 text (byte {at})", name(path)))
    })
}

/// Where a subcommand reads from: `-f FILE`, or else a pipe.
pub(crate) fn file_or_pipe(file: Option<&PathBuf>, flags: &str) -> Result<PathBuf, Failure> {
    match file {
        Some(path) => Ok(path.clone()),
        None if !stdin_is_terminal() => Ok("-".into()),
        None => Err(Failure::Usage(format!(
            "no input: give {flags}, or send it through a pipe"
        ))),
    }
}

/// Without the line end that editors put at the end of a file, as llama.cpp does.
pub(crate) fn without_last_newline(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
    }
    text
}

/// Token ids: separated by commas or spaces, with or without brackets.
pub(crate) fn token_ids(text: &str) -> Result<Vec<u32>, String> {
    let text = text.trim();
    let text = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'))
        .unwrap_or(text);
    let words = text
        .split(|c: char| c == ',' || c.is_whitespace())
        .filter(|word| !word.is_empty());
    words
        .map(|word| {
            word.parse()
                .map_err(|_| format!("{word:?} is not a token id"))
        })
        .collect()
}

/// [`token_ids`] as one value of a flag.
#[derive(Clone, Debug)]
pub(crate) struct TokenIds(pub(crate) Vec<u32>);

impl std::str::FromStr for TokenIds {
    type Err = String;

    fn from_str(text: &str) -> Result<TokenIds, String> {
        match token_ids(text)? {
            ids if ids.is_empty() => Err("no token ids".into()),
            ids => Ok(TokenIds(ids)),
        }
    }
}

/// Turns `\n`, `\r`, `\t`, `\'`, `\"`, `\\` and `\xHH` into what they stand for; anything else
/// stays as it is.
pub(crate) fn unescape(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'\\' {
            out.push(*first);
            continue;
        }
        let (byte, taken) = match rest {
            [b'n', ..] => (b'\n', 1),
            [b'r', ..] => (b'\r', 1),
            [b't', ..] => (b'\t', 1),
            [c @ (b'\'' | b'"' | b'\\'), ..] => (*c, 1),
            [b'x', high, low, ..] => match (
                char::from(*high).to_digit(16),
                char::from(*low).to_digit(16),
            ) {
                (Some(high), Some(low)) => ((high * 16 + low) as u8, 3),
                _ => (b'\\', 0),
            },
            _ => (b'\\', 0),
        };
        out.push(byte);
        rest = &rest[taken..];
    }
    String::from_utf8(out)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes() {
        for (text, expected) in [
            (r"a\nb", "a\nb"),
            (r"\\n \q \", "\\n \\q \\"),
            (r"\x41\x4g\x4", "A\\x4g\\x4"),
            (r"\xc3\xa4 \xff", "ä \u{fffd}"),
            ("ä\\tö", "ä\tö"),
        ] {
            assert_eq!(unescape(text), expected, "{text}");
        }
    }

    #[test]
    fn ids() {
        assert_eq!(token_ids("1,2, 3").unwrap(), [1, 2, 3]);
        assert_eq!(token_ids("[ 4294967295,\n0 ]\n").unwrap(), [u32::MAX, 0]);
        assert!(token_ids("").unwrap().is_empty());
        for wrong in ["1,x", "-1", "4294967296", "[1", "1.0"] {
            assert!(token_ids(wrong).is_err(), "{wrong}");
        }
    }
}
