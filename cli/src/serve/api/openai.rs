//! The OpenAI API: `/v1/chat/completions`, `/v1/completions`.

use crate::io::unix_time;
use crate::serve::api::body::Body;
use crate::serve::app::App;
use crate::serve::blocking::blocking;
use crate::serve::http::error::ApiError;
use crate::serve::http::fields::Fields;
use crate::serve::http::response::{event, events, json_response};
use crate::serve::ids::{Caller, new_id};
use crate::serve::jobs::answer::{
    Answer, Delta, Step, Usage, chat_logprob, finite, timings, token_text,
};
use crate::serve::jobs::params::{Format, Params};
use crate::serve::jobs::turn::{Job, Turn, top_logprobs};
use crate::serve::models::Shared;
use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use futures_util::future::try_join_all;
use futures_util::stream::{self, StreamExt};
use ruvllm::SessionError;
use ruvllm::TokenText;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Most prompts of a request.
const MAX_PROMPTS: usize = 64;

/// What answers to a request have in common.
struct Call {
    job: Job,
    id: String,
    created: u64,
    /// Whether its answers are messages.
    is_chat: bool,
    /// Whether calls are told in the API's first form.
    is_legacy: bool,
}

impl Call {
    fn new(job: Job, is_chat: bool, is_legacy: bool) -> Call {
        let id = new_id(if is_chat { "chatcmpl-" } else { "cmpl-" });
        Call {
            job,
            id,
            created: unix_time(),
            is_chat,
            is_legacy,
        }
    }

    /// Why an answer ended.
    fn reason(&self, answer: &Answer) -> &'static str {
        match answer.finish_reason() {
            "tool_calls" if self.is_legacy => "function_call",
            reason => reason,
        }
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.job.app.name,
            "system_fingerprint": crate::serve::ids::FINGERPRINT, "choices": choices,
        })
    }

    /// The answers, all at once or as they come.
    async fn respond(self, answers: Vec<Answer>, prompts: usize) -> Result<Response, ApiError> {
        let per_prompt = answers.len() / prompts;
        if self.job.params.stream {
            Ok(self.stream(answers, per_prompt))
        } else {
            self.collect(answers, per_prompt).await
        }
    }

    async fn collect(self, answers: Vec<Answer>, per_prompt: usize) -> Result<Response, ApiError> {
        // Together, as an answer that nobody reads pauses.
        let answers = try_join_all(answers.into_iter().map(|answer| self.whole(answer))).await?;
        let (mut choices, mut usage, mut times) = (Vec::new(), Usage::default(), Value::Null);
        for (whole, answer) in answers {
            let finish = answer
                .finish()
                .ok_or_else(|| ApiError::internal("the answer has no end"))?;
            usage.add(&finish, answer.index % per_prompt == 0);
            if times.is_null() {
                times = timings(&finish);
            }
            choices.push(whole.choice(&self, answer.index, self.reason(&answer)));
        }
        let mut response = self.envelope(
            if self.is_chat {
                "chat.completion"
            } else {
                "text_completion"
            },
            choices,
        );
        response["usage"] = usage.json();
        response["timings"] = times;
        Ok(json_response(StatusCode::OK, &response))
    }

    /// An answer to its end.
    async fn whole(&self, mut answer: Answer) -> Result<(Collected, Answer), ApiError> {
        let mut whole = Collected::default();
        while let Some(step) = answer.next().await {
            whole.add(self, step?);
        }
        Ok((whole, answer))
    }

    fn stream(self, answers: Vec<Answer>, per_prompt: usize) -> Response {
        let call = Arc::new(self);
        let chunks = answers
            .into_iter()
            .map(|answer| Box::pin(chunks_of(Arc::clone(&call), answer)));
        let (mut usage, mut n_left) = (Usage::default(), chunks.len());
        let all = stream::select_all(chunks).flat_map(move |chunk| {
            let mut out = Vec::new();
            match chunk {
                Chunk::Value(value) => out.push(event(&value)),
                Chunk::End(index, finish) => {
                    n_left -= 1;
                    if let Some(finish) = &finish {
                        usage.add(finish, index % per_prompt == 0);
                    }
                    if n_left == 0 {
                        if call.job.params.include_usage {
                            let mut last = call.envelope(call.chunk_object(), Vec::new());
                            last["usage"] = usage.json();
                            last["timings"] = finish.as_ref().map(timings).into();
                            out.push(event(&last));
                        }
                        out.push(axum::response::sse::Event::default().data("[DONE]"));
                    }
                }
            }
            stream::iter(out.into_iter().map(Ok))
        });
        events(all)
    }

    fn chunk_object(&self) -> &'static str {
        if self.is_chat {
            "chat.completion.chunk"
        } else {
            "text_completion"
        }
    }

    /// A chunk of an answer.
    fn chunk(&self, answer: &Answer, delta: Value, logprobs: Value, reason: Option<&str>) -> Value {
        let mut choice =
            json!({"index": answer.index, "logprobs": logprobs, "finish_reason": reason});
        choice[if self.is_chat { "delta" } else { "text" }] = delta;
        let mut chunk = self.envelope(self.chunk_object(), vec![choice]);
        if self.job.params.continuous_usage {
            let (prompt, completion) = (answer.n_prompt, answer.n_generated);
            chunk["usage"] = json!({
                "prompt_tokens": prompt, "completion_tokens": completion,
                "total_tokens": prompt + completion,
            });
        }
        chunk
    }

    /// What is told of the tokens of `pieces`, the first of which begins at byte `offset` of the
    /// text.
    fn logprobs(&self, pieces: &[TokenText], mut offset: usize) -> Value {
        if self.job.logprobs.is_none() || pieces.is_empty() {
            return Value::Null;
        }
        let app = &self.job.app;
        if self.is_chat {
            let content = pieces.iter().map(|piece| {
                let mut token = chat_logprob(app, piece.token, piece.logprob.unwrap_or(f32::NAN));
                let top = piece
                    .top_logprobs
                    .iter()
                    .map(|&(token, logprob)| chat_logprob(app, token, logprob));
                token["top_logprobs"] = top.collect();
                token
            });
            return json!({"content": content.collect::<Vec<_>>(), "refusal": null});
        }
        let (mut tokens, mut of_tokens, mut top, mut offsets) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for piece in pieces {
            tokens.push(token_text(app, piece.token));
            of_tokens.push(piece.logprob.map(finite));
            let best = piece
                .top_logprobs
                .iter()
                .map(|&(token, logprob)| (token_text(app, token), finite(logprob).into()));
            // Nothing comes before the first token of a prompt.
            top.push(match piece.logprob {
                Some(_) => Value::Object(best.collect()),
                None => Value::Null,
            });
            offsets.push(offset);
            offset += piece.text.len();
        }
        json!({"tokens": tokens, "token_logprobs": of_tokens, "top_logprobs": top, "text_offset": offsets})
    }
}

/// A part of a streamed response.
enum Chunk {
    Value(Value),
    /// An answer ended, unless by an error.
    End(usize, Option<ruvllm::Finish>),
}

/// Where a streamed answer is.
enum Stage {
    Begin,
    /// With so many calls so far.
    Text(usize),
    /// Its end, then that of the stream.
    End(Option<ruvllm::Finish>),
    Over,
}

/// The chunks of an answer.
fn chunks_of(call: Arc<Call>, answer: Answer) -> impl stream::Stream<Item = Chunk> + Send {
    let begin = (call, answer, Stage::Begin, 0);
    stream::unfold(begin, |(call, mut answer, stage, mut offset)| async move {
        let index = answer.index;
        match stage {
            Stage::Begin if call.is_chat => {
                let role = json!({"role": "assistant", "content": ""});
                let chunk = call.chunk(&answer, role, Value::Null, None);
                Some((Chunk::Value(chunk), (call, answer, Stage::Text(0), offset)))
            }
            Stage::Begin | Stage::Text(_) => loop {
                let mut n_calls = match stage {
                    Stage::Text(n) => n,
                    _ => 0,
                };
                match answer.next().await {
                    Some(Ok(step)) => {
                        let delta = call.delta(&step.deltas, &mut n_calls);
                        let logprobs = call.logprobs(step.piece.as_slice(), offset);
                        offset += step.piece.as_ref().map_or(0, |piece| piece.text.len());
                        if delta.is_none() && logprobs.is_null() {
                            continue;
                        }
                        let delta = delta.unwrap_or_else(|| call.empty_delta());
                        let chunk = call.chunk(&answer, delta, logprobs, None);
                        let stage = Stage::Text(n_calls);
                        break Some((Chunk::Value(chunk), (call, answer, stage, offset)));
                    }
                    Some(Err(error)) => {
                        break Some((
                            Chunk::Value(error.json()),
                            (call, answer, Stage::End(None), offset),
                        ));
                    }
                    None => {
                        let reason = Some(call.reason(&answer));
                        let mut chunk =
                            call.chunk(&answer, call.empty_delta(), Value::Null, reason);
                        let finish = answer.finish();
                        if !call.job.params.include_usage {
                            chunk["timings"] = finish.as_ref().map(timings).into();
                        }
                        break Some((
                            Chunk::Value(chunk),
                            (call, answer, Stage::End(finish), offset),
                        ));
                    }
                }
            },
            Stage::End(finish) => Some((
                Chunk::End(index, finish),
                (call, answer, Stage::Over, offset),
            )),
            Stage::Over => None,
        }
    })
}

impl Call {
    fn empty_delta(&self) -> Value {
        if self.is_chat { json!({}) } else { json!("") }
    }

    /// What some parts of an answer, which had `n_calls`, add to it.
    fn delta(&self, deltas: &[Delta], n_calls: &mut usize) -> Option<Value> {
        if deltas.is_empty() {
            return None;
        }
        let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
        for delta in deltas {
            match delta {
                Delta::Text(more) => text.push_str(more),
                Delta::Reasoning(more) => reasoning.push_str(more),
                Delta::Call { id, name } => {
                    *n_calls += 1;
                    let mut call = tool_call(id, name, "");
                    call["index"] = (*n_calls - 1).into();
                    calls.push(call);
                }
                Delta::Arguments(more) => {
                    let index = n_calls.saturating_sub(1);
                    calls.push(json!({"index": index, "function": {"arguments": more}}));
                }
            }
        }
        if !self.is_chat {
            return Some(text.into());
        }
        let mut delta = Map::new();
        let mut add = |name: &str, is_there: bool, value: Value| {
            drop(is_there.then(|| delta.insert(name.into(), value)))
        };
        add("content", !text.is_empty(), text.clone().into());
        add(
            "reasoning_content",
            !reasoning.is_empty(),
            reasoning.clone().into(),
        );
        if self.is_legacy {
            let functions = calls.iter().map(|call| call["function"].clone());
            add("function_call", !calls.is_empty(), joined(functions));
        } else {
            add("tool_calls", !calls.is_empty(), calls.into());
        }
        Some(delta.into())
    }
}

/// A call in the API's form, its arguments as text.
fn tool_call(id: &str, name: &str, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// Parts of one call as one part.
fn joined(parts: impl Iterator<Item = Value>) -> Value {
    let mut whole = json!({});
    let mut arguments = String::new();
    for part in parts {
        if let Some(name) = part.get("name") {
            whole["name"] = name.clone();
        }
        arguments += part["arguments"].as_str().unwrap_or_default();
    }
    whole["arguments"] = arguments.into();
    whole
}

/// A whole answer.
#[derive(Default)]
struct Collected {
    text: String,
    reasoning: String,
    /// The id of each call, its name, and its arguments.
    calls: Vec<[String; 3]>,
    pieces: Vec<TokenText>,
}

impl Collected {
    fn add(&mut self, call: &Call, step: Step) {
        for delta in step.deltas {
            match delta {
                Delta::Text(text) => self.text.push_str(&text),
                Delta::Reasoning(text) => self.reasoning.push_str(&text),
                Delta::Call { id, name } => self.calls.push([id, name, String::new()]),
                Delta::Arguments(more) => {
                    if let Some([.., arguments]) = self.calls.last_mut() {
                        arguments.push_str(&more);
                    }
                }
            }
        }
        self.pieces
            .extend(step.piece.filter(|_| call.job.logprobs.is_some()));
    }

    fn choice(self, call: &Call, index: usize, reason: &str) -> Value {
        let logprobs = call.logprobs(&self.pieces, 0);
        let mut choice = json!({"index": index, "logprobs": logprobs, "finish_reason": reason});
        if !call.is_chat {
            choice["text"] = self.text.into();
            return choice;
        }
        let only_calls = self.text.is_empty() && !self.calls.is_empty();
        let mut message = json!({"role": "assistant", "content": if only_calls { Value::Null } else { self.text.into() }});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = self.reasoning.into();
        }
        let mut calls = self
            .calls
            .iter()
            .map(|[id, name, arguments]| tool_call(id, name, arguments));
        if call.is_legacy {
            if let Some(mut first) = calls.next() {
                message["function_call"] = first["function"].take();
            }
        } else if !self.calls.is_empty() {
            message["tool_calls"] = calls.collect();
        }
        choice["message"] = message;
        choice
    }
}

pub(super) async fn completions(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, share): Body,
) -> Result<Response, ApiError> {
    let app = shared.app_with_room(&fields).await?;
    let prompts = prompts(&app, fields.need("prompt")?).await?;
    let params = Params::of(&app, &mut fields)?;
    let format = Format::of(&mut fields)?;
    let logprobs = top_logprobs("logprobs", fields.take("logprobs")?)?;
    let echoes = fields.flag("echo")?;
    if fields
        .take::<usize>("best_of")?
        .is_some_and(|n| n != params.n)
    {
        return Err(ApiError::field(
            "best_of",
            "only as many answers as n are made",
        ));
    }
    fields.finish()?;
    // Where the API's default is a limit of 16 tokens, llama-server's, and ours, is none.
    let n_prompts = prompts.len();
    let (job, answers) = Job {
        app,
        caller,
        params,
        logprobs,
    }
    .submit(prompts, format, echoes)
    .await?;
    drop(share);
    Call::new(job, false, false)
        .respond(answers, n_prompts)
        .await
}

/// Most bytes of text that become tokens on the thread that answers other connections too.
const QUICK_TEXT: usize = 1 << 14;

/// The tokens of prompts, which are to be continued.
pub(super) async fn prompts(app: &App, value: Value) -> Result<Vec<Vec<u32>>, ApiError> {
    let tokenizer = Arc::clone(&app.tokenizer);
    texts("prompt", value, MAX_PROMPTS, move |text| {
        Ok(tokenizer.encode_prompt(text))
    })
    .await
}

/// The tokens of what a field holds: a text, which `encode` makes tokens of, tokens, or several of
/// either, at most `n_max`.
pub(super) async fn texts(
    name: &'static str,
    value: Value,
    n_max: usize,
    encode: impl Fn(&str) -> Result<Vec<u32>, SessionError> + Send + 'static,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let list = match value {
        Value::Array(list) if list.first().is_some_and(|first| !first.is_number()) => list,
        value => vec![value],
    };
    if list.len() > n_max {
        return Err(ApiError::field(
            name,
            format!("expected at most {n_max} of them, found {}", list.len()),
        ));
    }
    let n_bytes: usize = list.iter().filter_map(Value::as_str).map(str::len).sum();
    let work = move || {
        let wrong = || {
            ApiError::field(
                name,
                "expected a text, an array of tokens, or an array of either",
            )
        };
        let of = |value: &Value| match value {
            Value::String(text) => Ok(encode(text)?),
            Value::Array(tokens) => tokens
                .iter()
                .map(|id| {
                    id.as_u64()
                        .and_then(|id| u32::try_from(id).ok())
                        .ok_or_else(wrong)
                })
                .collect(),
            _ => Err(wrong()),
        };
        list.iter().map(of).collect()
    };
    if n_bytes <= QUICK_TEXT {
        work()
    } else {
        blocking(work).await
    }
}

/// Tokens of a chat's prompt, as llama-server tells them.
pub(super) async fn count_tokens(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, _share): Body,
) -> Result<Response, ApiError> {
    translate_functions(&mut fields)?;
    let turn = Turn::of(shared.app_of(&fields).await?, caller, &mut fields)?;
    fields.finish()?;
    Ok(input_tokens(turn.count_tokens().await?))
}

/// The number of a prompt's tokens, as OpenAI's Responses tell it.
pub(super) fn input_tokens(n: usize) -> Response {
    json_response(
        StatusCode::OK,
        &json!({"object": "response.input_tokens", "input_tokens": n}),
    )
}

pub(super) async fn chat(
    State(shared): State<Shared>,
    Extension(caller): Extension<Caller>,
    Body(mut fields, share): Body,
) -> Result<Response, ApiError> {
    let app = shared.app_with_room(&fields).await?;
    let is_legacy = translate_functions(&mut fields)?;
    let turn = Turn::of(app, caller, &mut fields)?;
    fields.finish()?;
    let (job, answers) = turn.submit().await?;
    drop(share);
    Call::new(job, true, is_legacy).respond(answers, 1).await
}

/// Puts the API's first form of tools into the words of today's; whether there was any.
fn translate_functions(fields: &mut Fields) -> Result<bool, ApiError> {
    let choice = match fields.take("function_call")? {
        Some(Value::Object(function)) => {
            Some(json!({"type": "function", "function": {"name": function.get("name")}}))
        }
        choice => choice,
    };
    let Some(functions) = fields.take::<Vec<Value>>("functions")? else {
        // A choice among no functions.
        return match choice {
            Some(Value::String(choice)) if choice != "required" => Ok(false),
            None => Ok(false),
            Some(_) => Err(ApiError::field("function_call", "there are no functions")),
        };
    };
    if fields.get("tools").is_some_and(|tools| !tools.is_null()) {
        let message = "there are tools, too, which are today's form of them";
        return Err(ApiError::field("functions", message));
    }
    let tools = functions
        .into_iter()
        .map(|function| json!({"type": "function", "function": function}))
        .collect::<Vec<_>>();
    fields.set("tools", tools.into())?;
    if let Some(choice) = choice {
        fields.set("tool_choice", choice)?;
    }
    fields.set("parallel_tool_calls", false.into())?;
    Ok(true)
}
