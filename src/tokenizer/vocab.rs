//! Token texts, merges and the tables that find them by text.
//!
//! A large vocabulary has 128 000 tokens and 280 000 merges, and a model should open in tens of
//! milliseconds. So texts stay in the file, and a table maps the hash of a text to its number: one
//! pass over the texts, no allocation per entry, and merges are resolved only when needed.

use crate::gguf::StringArray;
use crate::tokenizer::TokenizerError;

/// String `i` of an array; empty if it does not exist.
pub(super) fn text(strings: &StringArray, i: u32) -> &[u8] {
    strings.get(i as usize).unwrap_or_default()
}

/// Hash of a text, or of a merge from the hashes of its two sides. Seeded randomly per tokenizer,
/// so that no file can be built to make the tables slow.
#[derive(Clone, Copy)]
pub(super) struct Hasher(u64);

impl Hasher {
    pub(super) fn new() -> Self {
        use std::hash::{BuildHasher, RandomState};
        Hasher(RandomState::new().hash_one(0u8) | 1)
    }

    /// Mixes in eight bytes: the two halves of a 128-bit product.
    fn fold(self, h: u64, word: u64) -> u64 {
        let product = u128::from(h ^ word) * u128::from(self.0 ^ 0x9e37_79b9_7f4a_7c15);
        product as u64 ^ (product >> 64) as u64
    }

    pub(super) fn text(self, text: &[u8]) -> u64 {
        let len = text.len();
        // The last eight bytes overlap the previous ones, which saves assembling the rest byte by
        // byte.
        let tail = if let Some(last) = text.last_chunk() {
            u64::from_le_bytes(*last)
        } else if let (Some(first), Some(last)) = (text.first_chunk(), text.last_chunk()) {
            u64::from(u32::from_le_bytes(*first)) << 32 | u64::from(u32::from_le_bytes(*last))
        } else if let [first, .., last] = text {
            u64::from(*first) << 16 | u64::from(text[len / 2]) << 8 | u64::from(*last)
        } else {
            text.first().copied().map_or(0, u64::from)
        };
        let h = text.as_chunks().0.iter().fold(self.0 ^ len as u64, |h, w| {
            self.fold(h, u64::from_le_bytes(*w))
        });
        self.fold(h, tail)
    }

    pub(super) fn pair(self, left: u64, right: u64) -> u64 {
        self.fold(left.rotate_left(23), right)
    }
}

/// Open-addressing table from hash to number. A slot holds the hash's high half in its high half
/// and the number plus one in its low half; zero is a free slot. At most two thirds are in use.
#[derive(Default)]
pub(super) struct Index {
    slots: Vec<u64>,
}

impl Index {
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&self.slots[..])
    }

    pub(super) fn with_capacity(n: usize) -> Self {
        Index {
            slots: vec![0; (n + n / 2 + 1).next_power_of_two()],
        }
    }

    /// The number stored under `hash` that `same` accepts, or the free slot at which the search
    /// ended.
    fn probe(&self, hash: u64, same: impl Fn(u32) -> bool) -> Result<u32, usize> {
        let mask = self.slots.len() - 1;
        let mut i = hash as usize & mask;
        loop {
            let slot = self.slots[i];
            if slot == 0 {
                return Err(i);
            }
            let number = slot as u32 - 1;
            if slot >> 32 == hash >> 32 && same(number) {
                return Ok(number);
            }
            i = (i + 1) & mask;
        }
    }

    /// The number stored under `hash` that `same` accepts.
    pub(super) fn find(&self, hash: u64, same: impl Fn(u32) -> bool) -> Option<u32> {
        if self.slots.is_empty() {
            None
        } else {
            self.probe(hash, same).ok()
        }
    }

    /// Inserts `number`, unless `same` accepts one that is already there: that one is returned.
    /// Panics or loops if more numbers are inserted than the capacity.
    pub(super) fn insert(
        &mut self,
        hash: u64,
        number: u32,
        same: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        match self.probe(hash, same) {
            Ok(there) => Some(there),
            Err(free) => {
                self.slots[free] = hash >> 32 << 32 | u64::from(number + 1);
                None
            }
        }
    }
}

/// Attributes of a token, as bits; `tokenizer.ggml.token_type` gives one of the first six.
pub(super) type Attr = u8;
pub(super) const NORMAL: Attr = 1;
pub(super) const UNKNOWN: Attr = 2;
pub(super) const CONTROL: Attr = 4;
pub(super) const USER_DEFINED: Attr = 8;
pub(super) const BYTE: Attr = 16;
/// Strips white space before the token when it is parsed.
pub(super) const LSTRIP: Attr = 32;
/// Strips white space after the token when it is parsed.
pub(super) const RSTRIP: Attr = 64;
/// Is parsed only where no letter, mark, digit or underscore adjoins it.
pub(super) const SINGLE_WORD: Attr = 128;

/// Attribute for a `tokenizer.ggml.token_type`; unused and undefined tokens have none.
fn attr_of_type(token_type: i32) -> Attr {
    match token_type {
        1 => NORMAL,
        2 => UNKNOWN,
        3 => CONTROL,
        4 => USER_DEFINED,
        6 => BYTE,
        _ => 0,
    }
}

/// Maximum number of entries of a table; numbers and ranks are 32-bit, and some values mean "none".
pub(super) const MAX_ENTRIES: usize = i32::MAX as usize;

/// The tokens of a model.
pub(super) struct Vocab {
    texts: StringArray,
    pub(super) attrs: Vec<Attr>,
    pub(super) hasher: Hasher,
    index: Index,
}

impl Vocab {
    /// Bytes beside the texts, which are in the file.
    pub(super) fn bytes(&self) -> usize {
        self.attrs.len() + self.index.bytes()
    }

    /// Builds the vocabulary. Tokens without a text are kept, but never found.
    pub(super) fn new(texts: StringArray, types: Option<&[i32]>) -> Result<Self, TokenizerError> {
        let n = texts.len();
        if n == 0 {
            return Err(TokenizerError::NoTokens);
        }
        if n >= MAX_ENTRIES {
            return Err(TokenizerError::TooLarge {
                key: "tokenizer.ggml.tokens",
                len: n,
            });
        }
        let attrs = match types {
            None => vec![NORMAL; n],
            Some(types) if types.len() != n => {
                let key = "tokenizer.ggml.token_type";
                return Err(TokenizerError::ArrayLength {
                    key,
                    len: types.len(),
                    n_vocab: n,
                });
            }
            Some(types) => types.iter().map(|&t| attr_of_type(t)).collect(),
        };
        let hasher = Hasher::new();
        let mut index = Index::with_capacity(n);
        for (id, (token, &attr)) in (0u32..).zip(texts.iter().zip(&attrs)) {
            if attr & BYTE != 0 && byte_of(token).is_none() {
                let text = String::from_utf8_lossy(token).into_owned();
                return Err(TokenizerError::ByteToken { id, text });
            }
            if token.is_empty() {
                continue;
            }
            if let Some(first) = index.insert(hasher.text(token), id, |i| text(&texts, i) == token)
            {
                let text = String::from_utf8_lossy(token).into_owned();
                return Err(TokenizerError::DuplicateToken {
                    text,
                    first,
                    second: id,
                });
            }
        }
        Ok(Vocab {
            texts,
            attrs,
            hasher,
            index,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    /// The text of token `id`; empty if there is none.
    pub(super) fn text(&self, id: u32) -> &[u8] {
        text(&self.texts, id)
    }

    /// The token with exactly this text.
    pub(super) fn find(&self, text: &[u8]) -> Option<u32> {
        self.find_hashed(self.hasher.text(text), text)
    }

    /// [`find`](Self::find) for a text whose hash is known.
    pub(super) fn find_hashed(&self, hash: u64, text: &[u8]) -> Option<u32> {
        self.index.find(hash, |id| self.text(id) == text)
    }

    /// The token with the first of these texts that exists. It becomes a control token, whatever
    /// the file says.
    pub(super) fn find_control(&mut self, texts: &[&str]) -> Option<u32> {
        let id = texts.iter().find_map(|text| self.find(text.as_bytes()))?;
        self.attrs[id as usize] |= CONTROL;
        Some(id)
    }

    /// Sets or clears an attribute of the token with this text, if there is one.
    pub(super) fn set(&mut self, text: &[u8], attr: Attr, on: bool) {
        if let Some(id) = self.find(text) {
            let attrs = &mut self.attrs[id as usize];
            *attrs = if on { *attrs | attr } else { *attrs & !attr };
        }
    }

    /// Whether token `id` has any of the attributes.
    pub(super) fn is(&self, id: u32, attrs: Attr) -> bool {
        self.attrs.get(id as usize).is_some_and(|a| a & attrs != 0)
    }
}

/// The byte that a token text `<0xNN>` stands for. Exactly two hexadecimal digits: signs and
/// spaces, which number parsers tend to accept, are refused.
pub(super) fn byte_of(text: &[u8]) -> Option<u8> {
    let [b'<', b'0', b'x', hi, lo, b'>'] = text else {
        return None;
    };
    let digit = |c: &u8| char::from(*c).to_digit(16);
    Some((digit(hi)? * 16 + digit(lo)?) as u8)
}

/// The token text `<0xNN>` of a byte.
pub(super) fn byte_text(byte: u8) -> [u8; 6] {
    let digit = |n: u8| b"0123456789ABCDEF"[usize::from(n)];
    [b'<', b'0', b'x', digit(byte >> 4), digit(byte & 15), b'>']
}
