//! Replacement of characters before a unigram vocabulary splits a text: Unicode normalisation as
//! SentencePiece has compiled it into `tokenizer.ggml.precompiled_charsmap`.
//!
//! The bytes are the length of a tree, the tree, and the replacements, each ended by a zero. The
//! tree is a double array with XOR (Kanda et al., "Compressed double-array tries for string
//! dictionaries supporting fast lookup", 2017; the library `darts-clone`), one 32-bit unit per
//! node: bits 0 to 7 are the byte that leads to the node, bit 8 says that what was read so far has
//! a replacement, bits 10 to 30 are the offset to the node's children (times 256 with bit 9). A
//! unit with bit 31 holds where a replacement begins.

use crate::gguf::{Array, Metadata, Value};
use crate::tokenizer::TokenizerError;

const KEY: &str = "tokenizer.ggml.precompiled_charsmap";
const HAS_VALUE: u32 = 1 << 8;
const IS_VALUE: u32 = 1 << 31;
/// Maximum number of bytes that are replaced at once, and that a replacement has: so no file makes
/// long work of a short text. (NFKC has at most 33 bytes for a character.)
const LONGEST: usize = 256;

/// The replacements of texts.
pub(super) struct Charsmap {
    units: Vec<u32>,
    replacements: Vec<u8>,
}

impl Charsmap {
    /// The replacements of a file, if it has some.
    pub(super) fn from_metadata(m: &Metadata) -> Result<Option<Charsmap>, TokenizerError> {
        let bytes: &[u8] = match m.get(KEY) {
            None => return Ok(None),
            Some(Value::Array(array)) if array.is_empty() => return Ok(None),
            Some(Value::Array(Array::U8(bytes))) => bytes,
            Some(Value::Array(Array::I8(bytes))) => bytemuck::cast_slice(bytes),
            Some(_) => {
                return Err(TokenizerError::Charsmap {
                    wrong: "not an array of bytes",
                });
            }
        };
        Charsmap::new(bytes).map(Some)
    }

    fn new(bytes: &[u8]) -> Result<Charsmap, TokenizerError> {
        let wrong = |wrong: &'static str| TokenizerError::Charsmap { wrong };
        let (len, rest) = bytes
            .split_first_chunk()
            .ok_or(wrong("shorter than its length field"))?;
        let (tree, replacements) = usize::try_from(u32::from_le_bytes(*len))
            .ok()
            .and_then(|len| rest.split_at_checked(len))
            .ok_or(wrong("shorter than its tree"))?;
        let (units, []) = tree.as_chunks() else {
            return Err(wrong("a tree that is not of whole units"));
        };
        let units: Vec<u32> = units.iter().map(|&unit| u32::from_le_bytes(unit)).collect();
        if units.is_empty() || units[0] & IS_VALUE != 0 {
            return Err(wrong("a tree without a root"));
        }
        let charsmap = Charsmap {
            units,
            replacements: replacements.to_vec(),
        };
        for (i, &unit) in charsmap.units.iter().enumerate() {
            if unit & IS_VALUE != 0 {
                continue;
            }
            let child = charsmap
                .units
                .get(i ^ offset(unit))
                .ok_or(wrong("a node whose children lie outside of the tree"))?;
            if unit & HAS_VALUE != 0 {
                let text = Some(child)
                    .filter(|child| **child & IS_VALUE != 0)
                    .and_then(|child| charsmap.replacement(*child));
                let text =
                    text.ok_or(wrong("a replacement that does not exist, or is too long"))?;
                if str::from_utf8(text).is_err() {
                    return Err(wrong("a replacement that is not UTF-8"));
                }
            }
        }
        Ok(charsmap)
    }

    /// The longest beginning of `text` that is replaced: its length, and the replacement.
    pub(super) fn longest(&self, text: &[u8]) -> Option<(usize, &[u8])> {
        let mut found = None;
        let mut node = offset(self.units[0]);
        for (i, &byte) in text.iter().take(LONGEST).enumerate() {
            node ^= usize::from(byte);
            let Some(&unit) = self.units.get(node) else {
                break;
            };
            if byte == 0 || unit & (IS_VALUE | 0xFF) != u32::from(byte) {
                break;
            }
            node ^= offset(unit);
            if unit & HAS_VALUE != 0 {
                found = self
                    .units
                    .get(node)
                    .and_then(|&value| Some((i + 1, self.replacement(value)?)));
            }
        }
        found
    }

    /// The replacement that a unit points to.
    fn replacement(&self, value: u32) -> Option<&[u8]> {
        let text = self.replacements.get((value & !IS_VALUE) as usize..)?;
        Some(&text[..text.iter().take(LONGEST + 1).position(|&byte| byte == 0)?])
    }
}

/// Offset of a node's children: their indices are `index ^ offset ^ byte`.
fn offset(unit: u32) -> usize {
    ((unit >> 10) << ((unit & 1 << 9) >> 6)) as usize
}

#[cfg(test)]
mod tests {
    use crate::tokenizer::charsmap::*;

    /// A tree that replaces `a` by `xy`, and `ab` by nothing.
    fn small() -> Vec<u8> {
        let mut units = [0u32; 768];
        // The root's children are at 256 ^ byte, those of `a` at 512 ^ byte, and of `ab` at 768 −
        // 1.
        units[0] = 256 << 10;
        let a = 256 ^ usize::from(b'a');
        units[a] = u32::from(b'a') | HAS_VALUE | ((a ^ 512) as u32) << 10;
        units[512] = IS_VALUE;
        let ab = 512 ^ usize::from(b'b');
        units[ab] = u32::from(b'b') | HAS_VALUE | ((ab ^ 767) as u32) << 10;
        units[767] = IS_VALUE | 2;
        let mut bytes = (4 * units.len() as u32).to_le_bytes().to_vec();
        bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
        bytes.extend(b"xy\0");
        bytes
    }

    #[test]
    fn the_longest_text_is_replaced() {
        let charsmap = Charsmap::new(&small()).unwrap();
        assert_eq!(charsmap.longest(b"ac"), Some((1, &b"xy"[..])));
        assert_eq!(charsmap.longest(b"abc"), Some((2, &b""[..])));
        for text in ["", "b", "ba", "\0a"] {
            assert_eq!(charsmap.longest(text.as_bytes()), None, "{text:?}");
        }
    }

    /// Each of these is refused, or reads as some other tree; none panics.
    #[test]
    fn damaged_trees_are_refused_or_read() {
        let good = small();
        for len in 0..good.len() {
            assert!(Charsmap::new(&good[..len]).is_err(), "{len} bytes");
        }
        let mut refused = 0;
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bytes = good.clone();
                bytes[at] ^= 1 << bit;
                match Charsmap::new(&bytes) {
                    Ok(charsmap) => {
                        assert!(charsmap.longest(b"abab").is_none_or(|(len, _)| len <= 4))
                    }
                    Err(_) => refused += 1,
                }
            }
        }
        assert!(refused > 1000, "{refused}");
        let mut endless = good;
        endless.pop();
        endless.extend([b'z'; 2 * LONGEST]);
        endless.push(0);
        assert!(Charsmap::new(&endless).is_err());
    }
}
