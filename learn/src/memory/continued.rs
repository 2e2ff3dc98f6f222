//! Several texts that go on from one, in passes that they share.

use crate::memory::MemoryError;
use ruvllm::compute::TokenKind;
use ruvllm::decode::DecodeError;
use ruvllm::engine::{Outputs, Sequence, Slot};
use ruvllm::{CancelToken, Engine, Sampler, SessionError, Tokenizer};

/// A text that goes on from another.
struct Text {
    seq: Sequence,
    sampler: Sampler,
    /// What is appended by the next pass.
    next: Vec<u32>,
    /// What was sampled.
    tokens: Vec<u32>,
    is_done: bool,
}

/// How texts go on behind `begun` and each of `given`, up to an empty line or `most` tokens.
pub(super) fn continued(
    engine: &Engine,
    begun: &Sequence,
    given: Vec<(Vec<u32>, Sampler)>,
    most: usize,
    cancel: &CancelToken,
) -> Result<Vec<String>, MemoryError> {
    let tokenizer = engine.model().tokenizer();
    let tokenizer = tokenizer.ok_or(SessionError::NoTokenizer)?;
    let n_vocab = engine.model().hparams().n_vocab;
    let text = |(next, sampler)| -> Result<Text, SessionError> {
        Ok(Text {
            seq: begun.fork()?,
            sampler,
            next,
            tokens: Vec::new(),
            is_done: false,
        })
    };
    let mut texts: Vec<Text> = given.into_iter().map(text).collect::<Result<_, _>>()?;
    let (mut outputs, mut kind) = (Outputs::default(), TokenKind::Prompt);
    for _ in 0..most {
        let mut open: Vec<&mut Text> = texts.iter_mut().filter(|text| !text.is_done).collect();
        if open.is_empty() {
            break;
        }
        let slots = open.iter_mut();
        let mut slots: Vec<Slot<'_>> = slots
            .map(|text| Slot::new(&mut text.seq, &text.next, kind))
            .collect();
        engine.step(&mut slots, &mut outputs, cancel)?;
        drop(slots);
        kind = TokenKind::Generated;
        for (i, text) in open.into_iter().enumerate() {
            let logits = &outputs.logits(i)[..n_vocab];
            let token = text.sampler.sample(logits, &text.tokens);
            text.take(token?, tokenizer)?;
        }
    }
    let texts = texts.iter().map(|text| text.read(tokenizer));
    texts.collect::<Result<_, _>>()
}

impl Text {
    fn take(&mut self, token: u32, tokenizer: &Tokenizer) -> Result<(), MemoryError> {
        if tokenizer.is_eog(token) {
            self.is_done = true;
            return Ok(());
        }
        self.tokens.push(token);
        self.next = vec![token];
        let ends = tokenizer.token_bytes(token);
        // Text is put together only where a line may have ended.
        if ends.is_some_and(|bytes| bytes.contains(&b'\n')) {
            self.is_done = self.whole(tokenizer)?.contains(END);
        }
        Ok(())
    }

    fn whole(&self, tokenizer: &Tokenizer) -> Result<String, MemoryError> {
        let text = tokenizer.decode_lossy(&self.tokens, false);
        Ok(text.map_err(DecodeError::from)?)
    }

    /// The text up to an empty line.
    fn read(&self, tokenizer: &Tokenizer) -> Result<String, MemoryError> {
        let mut text = self.whole(tokenizer)?;
        if let Some(end) = text.find(END) {
            text.truncate(end);
        }
        Ok(text)
    }
}

/// An empty line.
const END: &str = "\n\n";
