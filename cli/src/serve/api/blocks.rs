//! Answers as lists of blocks, which is how Anthropic's API and OpenAI's Responses tell them:
//! stretches of text, stretches of reasoning, and calls.

use crate::serve::http::error::ApiError;
use crate::serve::http::response::events;
use crate::serve::jobs::answer::{Answer, Delta};
use axum::response::Response;
use axum::response::sse::Event;
use futures_util::stream::{self, StreamExt};
use serde_json::Value;

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
    More(String),
    /// It is whole.
    End(Block),
}

/// The block that is being written, and how many there were before it.
#[derive(Default)]
struct Blocks {
    open: Option<Block>,
    n_whole: usize,
}

impl Blocks {
    /// Adds to the answer; hands every change and its block's place over.
    fn push(&mut self, delta: Delta, each: &mut dyn FnMut(usize, Change)) {
        let (block, more) = match delta {
            Delta::Text(text) => (Block::Text(String::new()), text),
            Delta::Reasoning(text) => (Block::Reasoning(String::new()), text),
            Delta::Call { id, name } => {
                self.end(each);
                let block = Block::Call {
                    id,
                    name,
                    arguments: String::new(),
                };
                each(self.n_whole, Change::Begin(block.clone()));
                self.open = Some(block);
                return;
            }
            Delta::Arguments(more) => {
                if let Some(call) = &mut self.open {
                    call.text().push_str(&more);
                    each(self.n_whole, Change::More(more));
                }
                return;
            }
        };
        if !self
            .open
            .as_ref()
            .is_some_and(|open| open.goes_on_as(&block))
        {
            self.end(each);
            each(self.n_whole, Change::Begin(block.clone()));
        }
        self.open.get_or_insert(block).text().push_str(&more);
        each(self.n_whole, Change::More(more));
    }

    fn end(&mut self, each: &mut dyn FnMut(usize, Change)) {
        if let Some(block) = self.open.take() {
            each(self.n_whole, Change::End(block));
            self.n_whole += 1;
        }
    }
}

/// An answer to its end.
pub(super) async fn whole(mut answer: Answer) -> Result<(Vec<Block>, Answer), ApiError> {
    let (mut blocks, mut all) = (Blocks::default(), Vec::new());
    let mut keep = |_, change| {
        if let Change::End(block) = change {
            all.push(block);
        }
    };
    while let Some(step) = answer.next().await {
        step?
            .deltas
            .into_iter()
            .for_each(|delta| blocks.push(delta, &mut keep));
    }
    blocks.end(&mut keep);
    Ok((all, answer))
}

/// The events of an API; the field `type` of each is its name.
pub(super) trait Events: Send + 'static {
    fn begin(&mut self) -> Vec<Value>;
    /// Of block `i`.
    fn change(&mut self, i: usize, change: Change) -> Vec<Value>;
    fn end(&mut self, answer: &Answer) -> Vec<Value>;
    fn failed(&mut self, error: ApiError) -> Vec<Value>;
}

/// An answer as it comes.
pub(super) fn stream(api: impl Events, answer: Answer) -> Response {
    let begin = (api, answer, Blocks::default(), false, false);
    let values = stream::unfold(
        begin,
        |(mut api, mut answer, mut blocks, has_begun, has_ended)| async move {
            if has_ended {
                return None;
            }
            if !has_begun {
                return Some((api.begin(), (api, answer, blocks, true, false)));
            }
            let mut values = Vec::new();
            let (step, mut has_ended) = (answer.next().await, false);
            let mut each = |i, change| values.extend(api.change(i, change));
            match step {
                Some(Ok(step)) => step
                    .deltas
                    .into_iter()
                    .for_each(|delta| blocks.push(delta, &mut each)),
                Some(Err(error)) => {
                    values = api.failed(error);
                    has_ended = true;
                }
                None => {
                    blocks.end(&mut each);
                    values.extend(api.end(&answer));
                    has_ended = true;
                }
            }
            Some((values, (api, answer, blocks, true, has_ended)))
        },
    );
    let named = |value: Value| {
        let event = Event::default().event(value["type"].as_str().unwrap_or_default());
        Ok(event.data(value.to_string()))
    };
    events(values.flat_map(move |values| stream::iter(values.into_iter().map(named))))
}
