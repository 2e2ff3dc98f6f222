//! Text to tokens and back, from the GGUF file alone.
//!
//! The models are SentencePiece-style BPE (`spm`, `llama`), byte-level BPE (`bpe`, `gpt2`, `gemma4`
//! and `whitespace`), which is preceded by one of the pre-tokenisers of `split`, WordPiece (`wpm`, `bert`),
//! unigram (`unigram`, `t5`) RWKV's and PLaMo 2's. Everything that affects ids follows llama.cpp exactly,
//! because GGUF files are tested with it: special tokens (`special`), defaults of the flags, the
//! clean-up of spaces. Only WordPiece follows Hugging Face, as its models were trained with that.
//! Nothing is guessed: an unknown tokenizer model or pre-tokeniser is refused by name.
//!
//! As in llama.cpp, there is no Unicode normalisation (Qwen2's own tokenizer applies NFC), except
//! in WordPiece and where a unigram file has its own (`charsmap`).

mod bpe;
mod charsmap;
mod error;
mod plamo2;
mod rwkv;
mod special;
mod special_ids;
mod split;
mod spm;
mod stream;
#[allow(clippy::module_inception)]
pub(crate) mod tokenizer;
mod unicode;
mod unicode_table;
mod unigram;
mod vocab;
mod wpm;

pub use error::TokenizerError;
pub use stream::TextStream;
pub(crate) use tokenizer::Tokenizer;

/// Fill-in-the-middle tokens ("FIM"), in the order `prefix`, text before the gap, `suffix`, text
/// after the gap, `middle`; then the model writes the missing text (Bavarian et al., "Efficient
/// training of language models to fill in the middle", 2022).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FillInTheMiddle {
    /// Before the text that precedes the gap.
    pub prefix: u32,
    /// Before the text that follows the gap.
    pub suffix: u32,
    /// Before the missing text.
    pub middle: u32,
    /// Before the name of a repository.
    pub repository: Option<u32>,
    /// Before the name of a file.
    pub file: Option<u32>,
}

/// SentencePiece's visible space, U+2581.
const SPACE: &[u8] = "▁".as_bytes();

/// `text` with `▁` for spaces, and one more at the start if `prefix`.
fn escape_spaces(text: &[u8], prefix: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len() + text.len() / 2 + SPACE.len());
    if prefix {
        out.extend_from_slice(SPACE);
    }
    for &b in text {
        if b == b' ' {
            out.extend_from_slice(SPACE)
        } else {
            out.push(b)
        }
    }
    out
}

/// Appends `text` with spaces for `▁`.
fn append_unescaped(text: &[u8], out: &mut Vec<u8>) {
    let mut rest = text;
    while let Some((&b, tail)) = rest.split_first() {
        if let Some(tail) = rest.strip_prefix(SPACE) {
            out.push(b' ');
            rest = tail;
        } else {
            out.push(b);
            rest = tail;
        }
    }
}

/// Removes the spaces in ` ?`, ` !`, ` .`, ` ,`, both in ` ' `, and those before `'s`, `'m`, `'re`
/// and `'ve`: three passes, each over the result of the one before.
fn clean_spaces(text: &[u8]) -> Vec<u8> {
    let marks =
        |before: u8, after: &[u8]| before == b' ' && matches!(after[0], b'?' | b'!' | b'.' | b',');
    let contractions = |before: u8, after: &[u8]| {
        before == b' '
            && matches!(
                after,
                [b'\'', b's' | b'm', ..] | [b'\'', b'r' | b'v', b'e', ..]
            )
    };
    let text = without_spaces_before(text, marks);
    let text = without_lone_apostrophe_spaces(&text);
    without_spaces_before(&text, contractions)
}

/// Drops each byte that `drop` accepts, given it and what follows.
fn without_spaces_before(text: &[u8], drop: impl Fn(u8, &[u8]) -> bool) -> Vec<u8> {
    let kept = |i: usize| i + 1 == text.len() || !drop(text[i], &text[i + 1..]);
    (0..text.len())
        .filter(|&i| kept(i))
        .map(|i| text[i])
        .collect()
}

/// Drops both spaces in ` ' `.
fn without_lone_apostrophe_spaces(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&b, tail)) = rest.split_first() {
        if let Some(tail) = rest.strip_prefix(b" ' ") {
            out.push(b'\'');
            rest = tail;
        } else {
            out.push(b);
            rest = tail;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use crate::tokenizer::*;

    #[test]
    fn spaces_are_cleaned_in_three_passes() {
        for (text, clean) in [
            ("Hello , world !", "Hello, world!"),
            (" ?", "?"),
            ("a  ?", "a ?"),
            ("a ' b", "a'b"),
            ("a ' ' b", "a'' b"),
            ("it 's we 've I 'm they 're", "it's we've I'm they're"),
            ("don 't I 'll he 'd", "don 't I 'll he 'd"),
            ("a '", "a '"),
            ("a 's", "a's"),
            ("a 'r", "a 'r"),
            ("", ""),
            (" ", " "),
        ] {
            assert_eq!(
                String::from_utf8(clean_spaces(text.as_bytes())).unwrap(),
                clean,
                "{text:?}"
            );
        }
    }

    #[test]
    fn visible_spaces_round_trip() {
        let escaped = escape_spaces(b" a b", true);
        assert_eq!(escaped, "▁▁a▁b".as_bytes());
        let unescaped = |text: &[u8]| {
            let mut out = Vec::new();
            append_unescaped(text, &mut out);
            out
        };
        assert_eq!(unescaped(&escaped), b"  a b");
        assert_eq!(unescaped(b"\xe2\x96"), b"\xe2\x96");
    }
}
