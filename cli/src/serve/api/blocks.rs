//! Answers as lists of blocks, which is how Anthropic's API and OpenAI's Responses tell them:
//! stretches of text, stretches of reasoning, and calls.

use crate::serve::http::error::ApiError;
use crate::serve::http::response::{PING, events};
use crate::serve::jobs::answer::{Answer, Delta, Step};
use axum::response::Response;
use axum::response::sse::Event;
use futures_util::stream::{self, StreamExt};
use ruvllm::decode::Piece;
use serde_json::Value;
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

/// What happens to the block that is being written.
pub(super) enum Change {
    /// It begins, empty.
    Begin(Block),
    /// Text, and the tokens that came with it, if their log-probabilities are wanted.
    More(String, Vec<Piece>),
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
    pieces: Vec<Piece>,
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
    let named = |value: Value| {
        let event = Event::default().event(value["type"].as_str().unwrap_or_default());
        Ok(event.data(value.to_string()))
    };
    events(values.flat_map(move |values| stream::iter(values.into_iter().map(named))))
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
