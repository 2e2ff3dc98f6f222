//! What is remembered, and its record in a log.

use crate::memory::MemoryError;
use crate::sona::record::{Decoder, Encoder};
use half::f16;

/// Most bytes of an entry's text.
const MAX_TEXT: usize = 2048;
/// Most bytes of the name of a session.
const MAX_SESSION: usize = 256;

/// How what is remembered turned out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// It is right.
    #[default]
    Success,
    /// It is right in part.
    Partial,
    /// It was wrong, or did not work: what to avoid.
    Failure,
}

impl Verdict {
    /// All verdicts with their names.
    pub const ALL: [(&'static str, Verdict); 3] = [
        ("success", Verdict::Success),
        ("partial", Verdict::Partial),
        ("failure", Verdict::Failure),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        let mut all = Verdict::ALL.iter();
        all.find(|(_, verdict)| *verdict == self)
            .map_or("", |(name, _)| name)
    }
}

/// What is to be remembered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewEntry {
    /// What was said; spaces and control characters become single spaces.
    pub text: String,
    /// How it turned out.
    pub verdict: Verdict,
    /// The conversation or user that it comes from: what is forgotten together. May be empty.
    pub session: String,
    /// Whether it corrects what is remembered already: the entry that is most like it, if one is,
    /// takes no effect from then on, until the correction is forgotten.
    pub is_correction: bool,
}

impl NewEntry {
    /// Something that was taught.
    pub fn taught(text: impl Into<String>) -> NewEntry {
        NewEntry {
            text: text.into(),
            ..Default::default()
        }
    }

    /// Something that corrects what was taught before.
    pub fn correction(text: impl Into<String>) -> NewEntry {
        NewEntry {
            is_correction: true,
            ..NewEntry::taught(text)
        }
    }
}

/// An entry of a [`Memory`](super::Memory).
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Entry {
    /// Its number, from 1; a later entry has a larger one, whatever the clock says.
    pub number: u64,
    /// How often it was changed.
    pub revision: u64,
    /// Milliseconds since 1970.
    pub timestamp: u64,
    /// What was said.
    pub text: String,
    /// How it turned out.
    pub verdict: Verdict,
    /// The conversation or user that it comes from.
    pub session: String,
    /// The entry that it corrects; 0 is none.
    pub corrects: u64,
    /// Fingerprint of the model that `vector` was computed with; 0 without a vector.
    pub(super) space: u64,
    /// Of unit length; empty without one.
    pub(super) vector: Vec<f16>,
}

/// What a log of a memory contains.
pub(super) enum Record {
    Entry(Box<Entry>),
    /// The entry of this number is forgotten.
    Forgotten(u64),
}

impl Record {
    pub(super) fn forgotten(number: u64) -> Vec<u8> {
        let mut e = Encoder::default();
        e.u8(1).u64(number);
        e.0
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Record, String> {
        let mut d = Decoder(bytes);
        let kind = d.u8()?;
        let number = d.u64()?;
        let record = match kind {
            0 => Record::Entry(Box::new(Entry::decode(number, &mut d)?)),
            1 => Record::Forgotten(number),
            kind => return Err(format!("a record is of the unknown kind {kind}")),
        };
        d.end()?;
        Ok(record)
    }
}

impl Entry {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut e = Encoder::default();
        let verdict = Verdict::ALL.iter().position(|(_, v)| *v == self.verdict);
        e.u8(0)
            .u64(self.number)
            .u64(self.revision)
            .u64(self.timestamp)
            .u8(verdict.unwrap_or_default() as u8)
            .text(&self.session)
            .text(&self.text)
            .u64(self.corrects)
            .u64(self.space);
        let bits: Vec<u16> = self.vector.iter().map(|x| x.to_bits()).collect();
        e.list(&bits);
        e.0
    }

    fn decode(number: u64, d: &mut Decoder<'_>) -> Result<Entry, String> {
        let (revision, timestamp) = (d.u64()?, d.u64()?);
        let verdict = usize::from(d.u8()?);
        let (_, verdict) = Verdict::ALL
            .get(verdict)
            .ok_or_else(|| format!("entry {number} has the unknown verdict {verdict}"))?;
        let (session, text) = (d.text()?, d.text()?);
        let (corrects, space) = (d.u64()?, d.u64()?);
        let bits: Vec<u16> = d.list()?;
        let vector: Vec<f16> = bits.into_iter().map(f16::from_bits).collect();
        if cleaned(&text).is_ok_and(|clean| clean == text)
            && session.len() <= MAX_SESSION
            && vector.iter().all(|x| x.is_finite())
        {
            Ok(Entry {
                number,
                revision,
                timestamp,
                text,
                verdict: *verdict,
                session,
                corrects,
                space,
                vector,
            })
        } else {
            Err(format!("entry {number} is not one that can be remembered"))
        }
    }
}

/// A text on one line: runs of spaces and control characters, those included that change the
/// direction of text or cannot be seen, become one space.
pub(super) fn cleaned(text: &str) -> Result<String, MemoryError> {
    // Before anything is computed of it.
    if text.len() > MAX_TEXT {
        return Err(MemoryError::TooLong {
            n: text.len(),
            limit: MAX_TEXT,
        });
    }
    let is_gap = |c: char| {
        let hides = matches!(c, '\u{ad}' | '\u{61c}' | '\u{115f}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}'
            | '\u{feff}' | '\u{e0000}'..='\u{e01ef}');
        c.is_whitespace() || c.is_control() || hides
    };
    let words: Vec<&str> = text.split(is_gap).filter(|word| !word.is_empty()).collect();
    let text = words.join(" ");
    match text.chars().any(char::is_alphanumeric) {
        true => Ok(text),
        false => Err(MemoryError::Empty),
    }
}

/// The name of a session, cut to what is stored.
pub(super) fn short(session: &str) -> String {
    let mut end = session.len().min(MAX_SESSION);
    while !session.is_char_boundary(end) {
        end -= 1;
    }
    session[..end].to_owned()
}
