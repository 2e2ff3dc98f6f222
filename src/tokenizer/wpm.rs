//! WordPiece (arXiv 1609.08144, §4.1): words are split from the front into the longest tokens in
//! the vocabulary.
//!
//! Files mark the beginning of a word by `▁` and omit BERT's `##` inside a word. Texts are
//! normalised as by Hugging Face's `BertNormalizer`, in Unicode 15.1, where llama.cpp keeps only
//! the first character of a decomposition (of Hangul the first jamo) and removes vowel signs with
//! the accents; but all white space separates words, as in llama.cpp, where Hugging Face removes
//! U+000B, U+000C and U+0085.

use crate::tokenizer::SPACE;
use crate::tokenizer::unicode::{self, Char, P, S, WS};
use crate::tokenizer::vocab::Vocab;

/// Maximum number of characters of a word, as in all published models; a longer one is unknown.
const MAX_WORD: usize = 100;

/// A WordPiece vocabulary.
pub(super) struct Wpm {
    /// Bytes of the longest token.
    longest: usize,
    lowercase: bool,
    strip_accents: bool,
    /// Token for a word that cannot be split into tokens.
    unknown: Option<u32>,
}

impl Wpm {
    pub(super) fn new(
        vocab: &Vocab,
        lowercase: bool,
        strip_accents: bool,
        unknown: Option<u32>,
    ) -> Wpm {
        let longest = (0..vocab.len() as u32)
            .map(|id| vocab.text(id).len())
            .max()
            .unwrap_or(0);
        Wpm {
            longest,
            lowercase,
            strip_accents,
            unknown,
        }
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(&self, vocab: &Vocab, text: &[u8], out: &mut Vec<u32>) {
        let mut word = Word {
            text: SPACE.to_vec(),
            n_chars: 0,
        };
        for c in String::from_utf8_lossy(text).chars() {
            let is_white = Char::new(c).is(WS);
            if !is_white && (is_control(c) || c == char::REPLACEMENT_CHARACTER) {
                continue;
            }
            let mut add = |c: char| {
                let class = Char::new(c);
                let alone = class.is(P) || c.is_ascii() && class.is(S) || is_cjk(c);
                if alone || is_white {
                    self.word(vocab, &mut word, out);
                }
                if !is_white {
                    word.push(c);
                }
                if alone {
                    self.word(vocab, &mut word, out);
                }
            };
            let mut cased = |c: char| {
                if self.lowercase {
                    c.to_lowercase().for_each(&mut add)
                } else {
                    add(c)
                }
            };
            if self.strip_accents {
                unicode::without_accents(c, cased)
            } else {
                cased(c)
            }
        }
        self.word(vocab, &mut word, out);
    }

    /// Appends the tokens of a word, and leaves the start of the next one.
    fn word(&self, vocab: &Vocab, word: &mut Word, out: &mut Vec<u32>) {
        let is_long = std::mem::take(&mut word.n_chars) > MAX_WORD;
        let word = &mut word.text;
        if is_long {
            out.extend(self.unknown);
            word.truncate(SPACE.len());
        }
        let (before, mut at) = (out.len(), 0);
        while word.len() > SPACE.len() && at < word.len() {
            let longest = word.len().min(at + self.longest);
            let found = (at + 1..=longest)
                .rev()
                .find_map(|end| Some((end, vocab.find(&word[at..end])?)));
            let Some((end, id)) = found else {
                out.truncate(before);
                out.extend(self.unknown);
                break;
            };
            out.push(id);
            at = end;
        }
        word.truncate(SPACE.len());
    }
}

/// A word that is being read.
struct Word {
    /// `▁` and its characters.
    text: Vec<u8>,
    /// Number of these characters.
    n_chars: usize,
}

impl Word {
    fn push(&mut self, c: char) {
        self.text
            .extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
        self.n_chars += 1;
    }
}

/// Control, format and private-use characters (`Cc`, `Cf`, `Co` of Unicode 15.1), which are left
/// out.
fn is_control(c: char) -> bool {
    let format = matches!(u32::from(c),
        0xAD | 0x600..=0x605 | 0x61C | 0x6DD | 0x70F | 0x890..=0x891 | 0x8E2 | 0x180E | 0x200B..=0x200F
        | 0x202A..=0x202E | 0x2060..=0x2064 | 0x2066..=0x206F | 0xFEFF | 0xFFF9..=0xFFFB | 0x110BD | 0x110CD
        | 0x13430..=0x1343F | 0x1BCA0..=0x1BCA3 | 0x1D173..=0x1D17A | 0xE0001 | 0xE0020..=0xE007F);
    let private =
        matches!(u32::from(c), 0xE000..=0xF8FF | 0xF0000..=0xFFFFD | 0x10_0000..=0x10_FFFD);
    c.is_control() || format || private
}

/// Chinese characters; each is a word of its own.
fn is_cjk(c: char) -> bool {
    matches!(u32::from(c),
        0x4E00..=0x9FFF | 0x3400..=0x4DBF | 0x20000..=0x2A6DF | 0x2A700..=0x2B73F | 0x2B740..=0x2B81F
        | 0x2B920..=0x2CEAF | 0xF900..=0xFAFF | 0x2F800..=0x2FA1F)
}
