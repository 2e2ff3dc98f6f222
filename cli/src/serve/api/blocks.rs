//! Answers as lists of blocks, which is how Anthropic's API and OpenAI's Responses tell them:
//! stretches of text, stretches of reasoning, and calls.

use crate::serve::http::error::ApiError;
use crate::serve::http::response::{PING, events};
use crate::serve::jobs::answer::{Answer, Delta, Step};
use axum::response::Response;
use axum::response::sse::Event;
use futures_util::stream::{self, StreamExt};
use ruvllm::TokenText;
use serde_json::{Value, json};
use std::mem::take;
use tokio::time::{Instant, timeout_at};

/// A part of an answer.
#[derive(Clone)]
pub(super) enum Block {
    Reasoning(String),
    Text(String),
    Call {
        /// The name under which its result is given.
        id: String,
        /// That of the function.
        name: String,
        /// A JSON object.
        arguments: String,
    },
}

impl Block {
    fn text(&mut self) -> &mut String {
        match self {
            Block::Reasoning(text)
            | Block::Text(text)
            | Block::Call {
                arguments: text, ..
            } => text,
        }
    }

    fn goes_on_as(&self, next: &Block) -> bool {
        matches!(
            (self, next),
            (Block::Text(_), Block::Text(_)) | (Block::Reasoning(_), Block::Reasoning(_))
        )
    }
}

/// The arguments of a call; of one that was cut, the values that are whole.
pub(super) fn arguments_of(arguments: &str) -> Value {
    // Up to which byte values are whole, and the brackets that are open there.
    let (mut whole, mut open) = ((0, String::new()), String::new());
    let (mut is_text, mut is_escaped) = (false, false);
    for (at, c) in arguments.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_text => is_escaped = true,
            '"' => is_text = !is_text,
            _ if is_text => {}
            '{' | '[' => {
                open.insert(0, if c == '{' { '}' } else { ']' });
                whole = (at + 1, open.clone());
            }
            '}' | ']' => {
                open = open.chars().skip(1).collect();
                whole = (at + 1, open.clone());
            }
            ',' => whole = (at, open.clone()),
            _ => {}
        }
    }
    // The last value may be whole without a comma behind it; a number might go on.
    let ends_in_digit = arguments.ends_with(|c: char| c.is_ascii_digit());
    let all = (!ends_in_digit).then(|| format!("{arguments}{open}"));
    let (len, open) = whole;
    let certain = format!("{}{open}", &arguments[..len]);
    let parsed = all.into_iter().chain([certain]);
    let mut parsed = parsed.filter_map(|text| serde_json::from_str(&text).ok());
    parsed.next().unwrap_or_else(|| json!({}))
}

/// What happens to the block that is being written.
pub(super) enum Change {
    /// It begins, empty.
    Begin(Block),
    /// Text, and the tokens that came with it, if their log-probabilities are wanted.
    More(String, Vec<TokenText>),
    /// It is whole.
    End(Block),
    /// It ends, as the answer was cut.
    Cut(Block),
}

/// The block that is being written, and how many there were before it.
#[derive(Default)]
struct Blocks {
    open: Option<Block>,
    n_whole: usize,
    /// Tokens that are part of no change yet.
    pieces: Vec<TokenText>,
}

impl Blocks {
    /// Adds to the answer; hands every change and its block's place over.
    fn push(&mut self, step: Step, each: &mut dyn FnMut(usize, Change)) {
        self.pieces
            .extend(step.piece.filter(|piece| piece.logprob.is_some()));
        for delta in step.deltas {
            let (block, more) = match delta {
                Delta::Text(text) => (Block::Text(String::new()), text),
                Delta::Reasoning(text) => (Block::Reasoning(String::new()), text),
                Delta::Call { id, name } => {
                    self.end(false, each);
                    let block = Block::Call {
                        id,
                        name,
                        arguments: String::new(),
                    };
                    each(self.n_whole, Change::Begin(block.clone()));
                    self.open = Some(block);
                    continue;
                }
                Delta::Arguments(more) => {
                    if let Some(call) = &mut self.open {
                        call.text().push_str(&more);
                        each(self.n_whole, Change::More(more, take(&mut self.pieces)));
                    }
                    continue;
                }
            };
            if !self
                .open
                .as_ref()
                .is_some_and(|open| open.goes_on_as(&block))
            {
                self.end(false, each);
                each(self.n_whole, Change::Begin(block.clone()));
            }
            self.open.get_or_insert(block).text().push_str(&more);
            each(self.n_whole, Change::More(more, take(&mut self.pieces)));
        }
    }

    fn end(&mut self, is_cut: bool, each: &mut dyn FnMut(usize, Change)) {
        if let Some(block) = self.open.take() {
            let change = if is_cut { Change::Cut } else { Change::End };
            each(self.n_whole, change(block));
            self.n_whole += 1;
        }
    }
}

/// The words of an API for an answer: its events, each an object whose field `type` is its name.
/// It keeps what is whole.
pub(super) trait Events: Send + 'static {
    fn begin(&mut self) -> Vec<Value>;
    /// Of block `i`.
    fn change(&mut self, i: usize, change: Change) -> Vec<Value>;
    /// That the answer goes on, though there is nothing to tell of it.
    fn goes_on(&mut self) -> Value;
    fn end(&mut self, answer: &Answer) -> Vec<Value>;
    fn failed(&mut self, error: ApiError) -> Vec<Value>;
}

/// An answer to its end, whose blocks are in `api` then.
pub(super) async fn whole(api: &mut impl Events, mut answer: Answer) -> Result<Answer, ApiError> {
    let mut blocks = Blocks::default();
    let mut keep = |i, change| drop(api.change(i, change));
    while let Some(step) = answer.next().await {
        blocks.push(step?, &mut keep);
    }
    blocks.end(answer.is_cut(), &mut keep);
    Ok(answer)
}

/// An answer as it comes.
pub(super) fn stream(api: impl Events, answer: Answer) -> Response {
    let named = |value: Value| {
        let event = Event::default().event(value["type"].as_str().unwrap_or_default());
        Ok(event.data(value.to_string()))
    };
    events(values(api, answer).map(named))
}

/// The values that tell an answer as it comes.
pub(super) fn values(
    api: impl Events,
    answer: Answer,
) -> impl stream::Stream<Item = Value> + Send + 'static {
    let streaming = Streaming {
        api,
        answer,
        blocks: Blocks::default(),
        stage: Stage::Begin,
        due: Instant::now(),
    };
    let values = stream::unfold(streaming, async |mut streaming| {
        let values = streaming.next().await?;
        streaming.due = Instant::now() + PING;
        Some((values, streaming))
    });
    values.flat_map(stream::iter)
}

/// Where a streamed answer is.
enum Stage {
    Begin,
    Blocks,
    Over,
}

/// An answer on its way to a client.
struct Streaming<A> {
    api: A,
    answer: Answer,
    blocks: Blocks,
    stage: Stage,
    /// When an event has to be sent at the latest: clients close streams that bring none, and
    /// comments are none to them.
    due: Instant,
}

impl<A: Events> Streaming<A> {
    /// The events that are sent next; nothing behind the last.
    async fn next(&mut self) -> Option<Vec<Value>> {
        match self.stage {
            Stage::Begin => {
                self.stage = Stage::Blocks;
                return Some(self.api.begin());
            }
            Stage::Blocks => {}
            Stage::Over => return None,
        }
        loop {
            let Ok(step) = timeout_at(self.due, self.answer.next()).await else {
                return Some(vec![self.api.goes_on()]);
            };
            let mut values = Vec::new();
            let mut each = |i, change| values.extend(self.api.change(i, change));
            match step {
                Some(Ok(step)) => self.blocks.push(step, &mut each),
                Some(Err(error)) => {
                    values = self.api.failed(error);
                    self.stage = Stage::Over;
                }
                None => {
                    self.blocks.end(self.answer.is_cut(), &mut each);
                    values.extend(self.api.end(&self.answer));
                    self.stage = Stage::Over;
                }
            }
            if !values.is_empty() {
                return Some(values);
            }
            if self.due <= Instant::now() {
                return Some(vec![self.api.goes_on()]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_call_has_the_values_that_are_whole() {
        let arguments = r#"{"path": "a\"}{,b", "n": [1, {"x": true}, 25], "o": {"p": null}}"#;
        let whole: Value = serde_json::from_str(arguments).unwrap();
        assert_eq!(arguments_of(arguments), whole);
        for (n, expected) in [
            (0, json!({})),
            (1, json!({})),
            (6, json!({})),
            (15, json!({})),
            (20, json!({"path": "a\"}{,b"})),
            (26, json!({"path": "a\"}{,b", "n": []})),
            (27, json!({"path": "a\"}{,b", "n": []})),
            (28, json!({"path": "a\"}{,b", "n": [1]})),
            (38, json!({"path": "a\"}{,b", "n": [1, {}]})),
            (39, json!({"path": "a\"}{,b", "n": [1, {"x": true}]})),
            (44, json!({"path": "a\"}{,b", "n": [1, {"x": true}]})),
            (45, json!({"path": "a\"}{,b", "n": [1, {"x": true}, 25]})),
        ] {
            assert_eq!(
                arguments_of(&arguments[..n]),
                expected,
                "{}",
                &arguments[..n]
            );
        }
        // Whatever is cut, what is left of it is in the whole, or stands empty.
        for n in 0..arguments.len() {
            let cut = arguments_of(&arguments[..n]);
            assert!(cut.is_object(), "{n}");
            for (key, value) in cut.as_object().unwrap() {
                let of_whole = &whole[key];
                assert!(
                    value == of_whole || value.is_array() || value.is_object(),
                    "{n}"
                );
            }
        }
    }
}
