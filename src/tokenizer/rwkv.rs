//! RWKV's vocabulary: a text is split from its start into the longest possible tokens. Texts of
//! tokens are any bytes; files write them with escapes.

use crate::tokenizer::vocab::Vocab;

/// An RWKV vocabulary.
pub(super) struct Rwkv {
    /// Bytes of the longest token.
    longest: usize,
    /// Token for a byte that no token begins with.
    unknown: Option<u32>,
}

impl Rwkv {
    pub(super) fn new(vocab: &Vocab, unknown: Option<u32>) -> Rwkv {
        let longest = (0..vocab.len() as u32)
            .map(|id| vocab.text(id).len())
            .max()
            .unwrap_or(0);
        Rwkv { longest, unknown }
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(&self, vocab: &Vocab, text: &[u8], out: &mut Vec<u32>) {
        let mut rest = text;
        while !rest.is_empty() {
            let lengths = (1..=self.longest.min(rest.len())).rev();
            let found = lengths
                .filter_map(|n| Some((n, vocab.find(&rest[..n])?)))
                .next();
            let (n, id) = found.map_or((1, self.unknown), |(n, id)| (n, Some(id)));
            out.extend(id);
            rest = &rest[n..];
        }
    }
}

/// Bytes of a token from its text in the file, with the escapes `\t`, `\n`, `\r`, `\xHH`, and a
/// backslash before any other character, which stands for itself.
pub(super) fn unescape(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        let Some((&escaped, tail)) = rest.split_first() else {
            break;
        };
        rest = tail;
        let digits = rest
            .get(..2)
            .and_then(|digits| std::str::from_utf8(digits).ok());
        let hexadecimal = digits
            .and_then(|digits| u8::from_str_radix(digits, 16).ok())
            .filter(|_| escaped == b'x');
        out.push(match (escaped, hexadecimal) {
            (_, Some(byte)) => {
                rest = &rest[2..];
                byte
            }
            (b't', _) => b'\t',
            (b'n', _) => b'\n',
            (b'r', _) => b'\r',
            (other, _) => other,
        });
    }
    out
}

#[cfg(test)]
mod tests {
    use crate::tokenizer::rwkv::*;

    #[test]
    fn escapes_stand_for_bytes() {
        assert_eq!(unescape(br"a\tb\\n\x00\xff\'\q"), b"a\tb\\n\x00\xff'q");
        assert_eq!(unescape(br"\x4"), b"x4");
        assert_eq!(unescape(br"\"), b"");
    }
}
