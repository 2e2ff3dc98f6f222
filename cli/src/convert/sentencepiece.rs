//! `tokenizer.model`, the file of SentencePiece: a message of protocol buffers, of which the pieces
//! are read.

/// A piece of the vocabulary.
pub(super) struct TokenText {
    pub(super) text: Vec<u8>,
    pub(super) score: f32,
    /// 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub(super) kind: u64,
}

/// The pieces of a file; `None` if it is damaged.
pub(super) fn pieces(file: &[u8]) -> Option<Vec<TokenText>> {
    let mut pieces = Vec::new();
    let mut file = Fields(file);
    while let Some((field, value)) = file.next()? {
        // Field 1 of `ModelProto`.
        if let (1, Field::Bytes(message)) = (field, value) {
            let mut piece = TokenText {
                text: Vec::new(),
                score: 0.0,
                kind: 1,
            };
            let mut message = Fields(message);
            while let Some(field) = message.next()? {
                match field {
                    (1, Field::Bytes(text)) => piece.text = text.to_vec(),
                    (2, Field::Word(bits)) => piece.score = f32::from_bits(bits),
                    (3, Field::Number(kind)) => piece.kind = kind,
                    _ => {}
                }
            }
            pieces.push(piece);
        }
    }
    Some(pieces)
}

/// Whether a space is put before a text, which the normaliser's part of the file says.
pub(super) fn adds_space(file: &[u8]) -> Option<bool> {
    let (mut adds, mut file) = (true, Fields(file));
    while let Some((field, value)) = file.next()? {
        // Field 3 of `ModelProto`.
        if let (3, Field::Bytes(message)) = (field, value) {
            let mut message = Fields(message);
            while let Some(field) = message.next()? {
                if let (3, Field::Number(value)) = field {
                    adds = value != 0;
                }
            }
        }
    }
    Some(adds)
}

/// The fields of a message: <https://protobuf.dev/programming-guides/encoding>.
struct Fields<'a>(&'a [u8]);

enum Field<'a> {
    Number(u64),
    Word(u32),
    Bytes(&'a [u8]),
}

impl<'a> Fields<'a> {
    /// The next field's number and value. `None`: damaged; `Some(None)`: the end.
    fn next(&mut self) -> Option<Option<(u64, Field<'a>)>> {
        if self.0.is_empty() {
            return Some(None);
        }
        let tag = self.number()?;
        let value = match tag & 7 {
            0 => Field::Number(self.number()?),
            1 => Field::Bytes(self.take(8)?),
            2 => {
                let n = self.number()?;
                Field::Bytes(self.take(usize::try_from(n).ok()?)?)
            }
            5 => Field::Word(u32::from_le_bytes(self.take(4)?.try_into().ok()?)),
            _ => return None,
        };
        Some(Some((tag >> 3, value)))
    }

    /// Seven bits per byte, the lowest first; the eighth says that more follow.
    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            number |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Some(number);
            }
        }
        None
    }

    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }
}
