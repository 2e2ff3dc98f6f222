//! Code points with the character classes that pre-tokenisers test.
//!
//! A [`Char`] stores its class when it is decoded, so that each code point is looked up once,
//! however many alternatives of a pattern test it.

use crate::tokenizer::unicode_table::{BASES, LONGER, RUNS};

/// `\p{L}`: letters.
pub(super) const L: u16 = 1;
/// `\p{N}`: numbers.
pub(super) const N: u16 = 2;
/// `\p{P}`: punctuation.
pub(super) const P: u16 = 4;
/// `\p{S}`: symbols.
pub(super) const S: u16 = 8;
/// `\p{M}`: marks.
pub(super) const M: u16 = 16;
/// `\s`: white space. Such a code point is in no other class.
pub(super) const WS: u16 = 32;
/// `\p{Mn}`: nonspacing marks, such as accents; they are in `M`, too.
pub(super) const MN: u16 = 64;
/// `[\p{Lu}\p{Lt}]`: letters in upper and title case; they are in `L`, too.
pub(super) const UPPER: u16 = 128;
/// `\p{Ll}`: letters in lower case; they are in `L`, too.
pub(super) const LOWER: u16 = 256;

/// Bits of a code point, below those of its class.
const CP_BITS: u32 = 21;
/// Bits above it.
const CLASS_BITS: u32 = u32::BITS - CP_BITS;

/// Calls `each` with the characters of the canonical decomposition (Unicode, NFD) that are no
/// nonspacing marks.
pub(super) fn without_accents(c: char, mut each: impl FnMut(char)) {
    const HANGUL: std::ops::Range<u32> = 0xAC00..0xD7A4;
    let cp = u32::from(c);
    let mut code = |cp| each(char::from_u32(cp).unwrap_or(c));
    if let Ok(i) = BASES.binary_search_by_key(&cp, |&(cp, _)| cp) {
        code(BASES[i].1);
    } else if HANGUL.contains(&cp) {
        // A leading consonant, a vowel, and a trailing consonant, if there is one.
        let i = cp - HANGUL.start;
        code(0x1100 + i / 588);
        code(0x1161 + i % 588 / 28);
        let trailing = i % 28;
        if trailing > 0 {
            code(0x11A7 + trailing);
        }
    } else if let Ok(i) = LONGER.binary_search_by_key(&cp, |&(cp, _)| cp) {
        LONGER[i].1.chars().for_each(each);
    } else if !Char::new(c).is(MN) {
        each(c);
    }
}

/// A code point (low 21 bits) and its class (high 11 bits).
#[derive(Clone, Copy)]
pub(super) struct Char(u32);

impl Char {
    pub(super) fn new(c: char) -> Self {
        let cp = c as u32;
        let class = if cp < 128 {
            ASCII[cp as usize]
        } else {
            class(cp)
        };
        Char(cp | u32::from(class) << CP_BITS)
    }

    /// The code point.
    pub(super) fn cp(self) -> u32 {
        self.0 & ((1 << CP_BITS) - 1)
    }

    /// Whether the class is one of `classes`.
    pub(super) fn is(self, classes: u16) -> bool {
        (self.0 >> CP_BITS) as u16 & classes != 0
    }

    /// Whether this is the ASCII character `c`.
    pub(super) fn eq(self, c: u8) -> bool {
        self.cp() == u32::from(c)
    }

    /// The ASCII character, if it is one.
    pub(super) fn ascii(self) -> Option<u8> {
        u8::try_from(self.cp()).ok().filter(u8::is_ascii)
    }

    /// The UTF-8 bytes.
    pub(super) fn utf8(self) -> impl Iterator<Item = u8> {
        let c = char::from_u32(self.cp()).unwrap_or(char::REPLACEMENT_CHARACTER);
        let mut bytes = [0; 4];
        let len = c.encode_utf8(&mut bytes).len();
        bytes.into_iter().take(len)
    }
}

const fn class(cp: u32) -> u16 {
    let (mut lo, mut hi) = (0, RUNS.len());
    while hi - lo > 1 {
        let mid = (lo + hi) / 2;
        if RUNS[mid] >> CLASS_BITS <= cp {
            lo = mid
        } else {
            hi = mid
        }
    }
    RUNS[lo] as u16 & ((1 << CLASS_BITS) - 1)
}

static ASCII: [u16; 128] = {
    let mut table = [0; 128];
    let mut cp = 0;
    while cp < 128 {
        table[cp] = class(cp as u32);
        cp += 1;
    }
    table
};

/// Decodes `text`; each byte that is not part of a well-formed sequence becomes one U+FFFD.
pub(super) fn chars(text: &[u8]) -> Vec<Char> {
    let mut out = Vec::with_capacity(text.len());
    for chunk in text.utf8_chunks() {
        out.extend(chunk.valid().chars().map(Char::new));
        out.extend(
            chunk
                .invalid()
                .iter()
                .map(|_| Char::new(char::REPLACEMENT_CHARACTER)),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use crate::tokenizer::unicode::*;

    #[test]
    fn classes_of_known_code_points() {
        for (c, class) in [
            ('a', L | LOWER),
            ('Z', L | UPPER),
            ('é', L | LOWER),
            ('ª', L),
            ('中', L),
            ('ʰ', L),
            ('ǅ', L | UPPER),
            ('\u{2ebf0}', L),
            ('7', N),
            ('٣', N),
            ('Ⅷ', N),
            ('²', N),
            ('!', P),
            ('、', P),
            ('“', P),
            ('_', P),
            ('$', S),
            ('+', S),
            ('😀', S),
            ('\u{fffd}', S),
            ('\u{301}', M | MN),
            ('\u{fe0f}', M | MN),
            ('\u{93e}', M),
            ('\u{20dd}', M),
            (' ', WS),
            ('\n', WS),
            ('\u{85}', WS),
            ('\u{a0}', WS),
            ('\u{3000}', WS),
            ('\0', 0),
            ('\u{1c}', 0),
            ('\u{200b}', 0),
            ('\u{10ffff}', 0),
            ('\u{e000}', 0),
        ] {
            assert_eq!((Char::new(c).0 >> CP_BITS) as u16, class, "{c:?}");
        }
    }

    #[test]
    fn accents_are_left_out() {
        for (c, rest) in [
            ('a', "a"),
            ('é', "e"),
            ('ệ', "e"),
            ('\u{301}', ""),
            ('\u{344}', ""),
            ('\u{93e}', "\u{93e}"),
            ('\u{20dd}', "\u{20dd}"),
            ('\u{9cb}', "\u{9c7}\u{9be}"),
            ('가', "\u{1100}\u{1161}"),
            ('한', "\u{1112}\u{1161}\u{11ab}"),
            ('힣', "\u{1112}\u{1175}\u{11c2}"),
        ] {
            let mut found = String::new();
            without_accents(c, |c| found.push(c));
            assert_eq!(found, rest, "{c:?}");
        }
    }

    #[test]
    fn each_stray_byte_becomes_one_replacement() {
        let cps = |b: &[u8]| chars(b).iter().map(|c| c.cp()).collect::<Vec<_>>();
        assert_eq!(cps(b"a\xc3("), [0x61, 0xfffd, 0x28]);
        assert_eq!(cps(b"\xe2\x82"), [0xfffd, 0xfffd]);
        assert_eq!(cps("\u{10ffff}é".as_bytes()), [0x10ffff, 0xe9]);
    }
}
