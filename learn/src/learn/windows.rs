//! Texts in windows, with what the head computed for each token.

use ruvllm::{Model, Session, SessionError};
use std::ops::Range;

/// Callback with a token's index, and the hidden state and head product that predicted it.
type Visit<'v> = dyn FnMut(usize, &[f32], &[f32]) + 'v;

/// Reads a text in windows that overlap by half, and calls `visit` with each token `i` and the
/// hidden state and head product that predicted it. Contexts are between half of the session's
/// length and all of it, and begin as the text does, if that is the model's token for it.
pub(crate) fn windows(
    session: &mut Session,
    tokens: &[u32],
    mut each: impl FnMut(usize, &[f32], &[f32]),
) -> Result<(), SessionError> {
    let half = (session.sequence().n_ctx() / 2).max(1);
    for start in (0..tokens.len()).step_by(half) {
        let chunk = start..(start + half).min(tokens.len());
        window(session, tokens, chunk, half, &mut each)?;
    }
    Ok(())
}

/// The part `chunk` of [`windows`], after at most `context` tokens.
pub(crate) fn window(
    session: &mut Session,
    tokens: &[u32],
    chunk: Range<usize>,
    context: usize,
    each: &mut Visit<'_>,
) -> Result<(), SessionError> {
    let h = session.model().hparams();
    let (n, n_vocab) = (h.n_embd, h.n_vocab);
    session.clear();
    let (read, begin) = from(session, tokens, chunk.start, context);
    if chunk.end - begin < 2 {
        return Ok(());
    }
    // Row `i` predicts token `i + 1`; nothing predicts the first token.
    let first = (chunk.start - begin + read.len()).saturating_sub(1);
    let n_read = read.len();
    let read = [&read[..], &tokens[begin..chunk.end - 1]].concat();
    session.hooks().prefill_rows(&read, first, &mut |rows| {
        let states = rows.states.chunks_exact(n);
        for (j, (h, raw)) in states.zip(rows.logits.chunks_exact(n_vocab)).enumerate() {
            each(begin + rows.first + j + 1 - n_read, h, raw);
        }
    })
}

/// What is read before token `start` of a text with at most `context` tokens before it: the token
/// that the text begins with, if that is the model's and would be left out, and the place from
/// which on tokens are read.
pub(crate) fn from(
    session: &Session,
    tokens: &[u32],
    start: usize,
    context: usize,
) -> (Vec<u32>, usize) {
    let begin = start.saturating_sub(context);
    let bos = bos_of(session.model(), tokens).filter(|_| begin > 0);
    (bos.into_iter().collect(), begin)
}

/// The model's token for the beginning of a text, if a text has it.
pub(crate) fn bos_of(model: &Model, tokens: &[u32]) -> Option<u32> {
    let bos = model.tokenizer().and_then(|t| t.bos());
    bos.filter(|bos| tokens.first() == Some(bos))
}
