//! The OpenAI API: `/v1/chat/completions`, `/v1/completions`, `/v1/models`.

use super::super::output::unix_time;
use super::answer::{Answer, Delta, Step, Usage, chat_logprob, timings, token_text};
use super::error::ApiError;
use super::fields::Fields;
use super::http::{event, events, json_response};
use super::params::{Format, Params, mask};
use super::{App, Shared, Tenant, blocking};
use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use futures_util::future::try_join_all;
use futures_util::stream::{self, StreamExt};
use ruvllm::chat::tools::{Tool, ToolCall, ToolChoice, ToolMask, TurnParser};
use ruvllm::exec::{Piece, Request};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Most alternatives to a token that are told.
const MAX_TOP_LOGPROBS: usize = 20;
/// Most prompts of a request.
const MAX_PROMPTS: usize = 64;

pub(super) async fn models(State(shared): State<Shared>) -> Result<Response, ApiError> {
    let app = shared.app()?;
    let model = json!({
        "id": app.name, "object": "model", "created": app.created, "owned_by": "ruvllm",
        "meta": {"n_ctx_train": app.model.hparams().n_ctx_train, "n_vocab": app.tokenizer.n_vocab()},
    });
    Ok(json_response(StatusCode::OK, &json!({"object": "list", "data": [model]})))
}

/// What answers to a request have in common.
struct Call {
    app: Arc<App>,
    id: String,
    created: u64,
    /// Whether its answers are messages.
    is_chat: bool,
    params: Params,
    /// Alternatives to each token that are told.
    logprobs: Option<usize>,
    tenant: Tenant,
}

impl Call {
    fn new(app: Arc<App>, tenant: Tenant, is_chat: bool, params: Params, logprobs: Option<usize>) -> Call {
        let id = format!("{}-{:016x}", if is_chat { "chatcmpl" } else { "cmpl" }, super::random());
        Call { app, id, created: unix_time(), is_chat, params, logprobs, tenant }
    }

    /// A request for `tokens`, with what all have in common.
    fn request(
        &self,
        tokens: Vec<u32>,
        i: usize,
        mask: Option<Box<dyn ruvllm::sample::TokenMask>>,
    ) -> Result<Request, ApiError> {
        let request = Request::new(tokens, self.params.sampler(i, mask)?);
        let mut request = request.stop(self.params.stop.iter().cloned()).priority(self.params.priority);
        request = request.salt(&self.tenant.0);
        if let Some(n) = self.params.max_tokens {
            request = request.max_tokens(n);
        }
        if let Some(n) = self.logprobs {
            request = request.logprobs(n);
        }
        for (adapter, scale) in &self.app.adapters {
            request = request.adapter(Arc::clone(adapter), *scale);
        }
        Ok(if self.is_chat { request.special() } else { request })
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.app.name,
            "system_fingerprint": super::FINGERPRINT, "choices": choices,
        })
    }

    /// The answers, all at once or as they come.
    async fn respond(self, answers: Vec<Answer>, prompts: usize) -> Result<Response, ApiError> {
        let per_prompt = answers.len() / prompts;
        if self.params.stream { Ok(self.stream(answers, per_prompt)) } else { self.collect(answers, per_prompt).await }
    }

    async fn collect(self, answers: Vec<Answer>, per_prompt: usize) -> Result<Response, ApiError> {
        // Together, as an answer that nobody reads pauses.
        let answers = try_join_all(answers.into_iter().map(|answer| self.whole(answer))).await?;
        let (mut choices, mut usage, mut times) = (Vec::new(), Usage::default(), Value::Null);
        for (whole, answer) in answers {
            let finish = answer.finish().ok_or_else(|| ApiError::internal("the answer has no end"))?;
            usage.add(&finish, answer.index % per_prompt == 0);
            if times.is_null() {
                times = timings(&finish);
            }
            choices.push(whole.choice(&self, answer.index, answer.finish_reason()));
        }
        let mut response = self.envelope(if self.is_chat { "chat.completion" } else { "text_completion" }, choices);
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
        let chunks = answers.into_iter().map(|answer| Box::pin(chunks_of(Arc::clone(&call), answer)));
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
                        if call.params.include_usage {
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
        if self.is_chat { "chat.completion.chunk" } else { "text_completion" }
    }

    /// A chunk of an answer.
    fn chunk(&self, index: usize, delta: Value, logprobs: Value, reason: Option<&str>) -> Value {
        let mut choice = json!({"index": index, "logprobs": logprobs, "finish_reason": reason});
        choice[if self.is_chat { "delta" } else { "text" }] = delta;
        self.envelope(self.chunk_object(), vec![choice])
    }

    /// What is told of the tokens of `pieces`, the first of which begins at byte `offset` of the text.
    fn logprobs(&self, pieces: &[Piece], mut offset: usize) -> Value {
        if self.logprobs.is_none() || pieces.is_empty() {
            return Value::Null;
        }
        let app = &self.app;
        if self.is_chat {
            let content = pieces.iter().map(|piece| {
                let mut token = chat_logprob(app, piece.token, piece.logprob.unwrap_or(f32::NAN));
                let top = piece.top_logprobs.iter().map(|&(token, logprob)| chat_logprob(app, token, logprob));
                token["top_logprobs"] = top.collect();
                token
            });
            return json!({"content": content.collect::<Vec<_>>(), "refusal": null});
        }
        let (mut tokens, mut of_tokens, mut top, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for piece in pieces {
            tokens.push(token_text(app, piece.token));
            of_tokens.push(piece.logprob);
            let best = piece.top_logprobs.iter().map(|&(token, logprob)| (token_text(app, token), logprob.into()));
            top.push(Value::Object(best.collect()));
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
    End(usize, Option<ruvllm::exec::Finish>),
}

/// Where a streamed answer is.
enum Stage {
    Begin,
    Text,
    /// Its end, then that of the stream.
    End(Option<ruvllm::exec::Finish>),
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
                let chunk = call.chunk(index, role, Value::Null, None);
                Some((Chunk::Value(chunk), (call, answer, Stage::Text, offset)))
            }
            Stage::Begin | Stage::Text => loop {
                match answer.next().await {
                    Some(Ok(step)) => {
                        let delta = call.delta(&step.deltas);
                        let logprobs = call.logprobs(step.piece.as_slice(), offset);
                        offset += step.piece.as_ref().map_or(0, |piece| piece.text.len());
                        if delta.is_none() && logprobs.is_null() {
                            continue;
                        }
                        let delta = delta.unwrap_or_else(|| call.empty_delta());
                        let chunk = call.chunk(index, delta, logprobs, None);
                        break Some((Chunk::Value(chunk), (call, answer, Stage::Text, offset)));
                    }
                    Some(Err(error)) => {
                        break Some((Chunk::Value(error.json()), (call, answer, Stage::End(None), offset)));
                    }
                    None => {
                        let reason = answer.finish_reason();
                        let mut chunk = call.chunk(index, call.empty_delta(), Value::Null, Some(reason));
                        let finish = answer.finish();
                        if !call.params.include_usage {
                            chunk["timings"] = finish.as_ref().map(timings).into();
                        }
                        break Some((Chunk::Value(chunk), (call, answer, Stage::End(finish), offset)));
                    }
                }
            },
            Stage::End(finish) => Some((Chunk::End(index, finish), (call, answer, Stage::Over, offset))),
            Stage::Over => None,
        }
    })
}

impl Call {
    fn empty_delta(&self) -> Value {
        if self.is_chat { json!({}) } else { json!("") }
    }

    /// What some parts of an answer add to it.
    fn delta(&self, deltas: &[Delta]) -> Option<Value> {
        if deltas.is_empty() {
            return None;
        }
        let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
        for delta in deltas {
            match delta {
                Delta::Text(more) => text.push_str(more),
                Delta::Reasoning(more) => reasoning.push_str(more),
                Delta::Call(i, call) => {
                    let mut call = tool_call(call);
                    call["index"] = (*i).into();
                    calls.push(call);
                }
            }
        }
        if !self.is_chat {
            return Some(text.into());
        }
        let mut delta = Map::new();
        let mut add =
            |name: &str, is_there: bool, value: Value| drop(is_there.then(|| delta.insert(name.into(), value)));
        add("content", !text.is_empty(), text.clone().into());
        add("reasoning_content", !reasoning.is_empty(), reasoning.clone().into());
        add("tool_calls", !calls.is_empty(), calls.into());
        Some(delta.into())
    }
}

/// A call in the API's form, its arguments as text.
fn tool_call(call: &ToolCall) -> Value {
    let id = call.id.clone().unwrap_or_else(|| format!("call_{:016x}", super::random()));
    let arguments = Value::Object(call.arguments.clone()).to_string();
    json!({"id": id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
}

/// A whole answer.
#[derive(Default)]
struct Collected {
    text: String,
    reasoning: String,
    calls: Vec<Value>,
    pieces: Vec<Piece>,
}

impl Collected {
    fn add(&mut self, call: &Call, step: Step) {
        for delta in step.deltas {
            match delta {
                Delta::Text(text) => self.text.push_str(&text),
                Delta::Reasoning(text) => self.reasoning.push_str(&text),
                Delta::Call(_, call) => self.calls.push(tool_call(&call)),
            }
        }
        self.pieces.extend(step.piece.filter(|_| call.logprobs.is_some()));
    }

    fn choice(self, call: &Call, index: usize, reason: &str) -> Value {
        let logprobs = call.logprobs(&self.pieces, 0);
        let mut choice = json!({"index": index, "logprobs": logprobs, "finish_reason": reason});
        if !call.is_chat {
            choice["text"] = self.text.into();
            return choice;
        }
        let only_calls = self.text.is_empty() && !self.calls.is_empty();
        let mut message =
            json!({"role": "assistant", "content": if only_calls { Value::Null } else { self.text.into() }});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = self.reasoning.into();
        }
        if !self.calls.is_empty() {
            message["tool_calls"] = self.calls.into();
        }
        choice["message"] = message;
        choice
    }
}

pub(super) async fn completions(
    State(shared): State<Shared>,
    Extension(tenant): Extension<Tenant>,
    mut fields: Fields,
) -> Result<Response, ApiError> {
    let app = shared.app()?;
    app.check_model(&mut fields)?;
    let prompts = prompts(&app, fields.need("prompt")?)?;
    let params = Params::of(&app, &mut fields)?;
    let format = Format::of(&mut fields)?;
    let logprobs = top_logprobs("logprobs", fields.take("logprobs")?)?;
    if fields.flag("echo")? || fields.take::<String>("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::wrong("echo and suffix are not supported"));
    }
    if fields.take::<usize>("best_of")?.is_some_and(|n| n != params.n) {
        return Err(ApiError::field("best_of", "only as many answers as n are made"));
    }
    fields.finish()?;
    // Where the API's default is a limit of 16 tokens, llama-server's, and ours, is none.
    let call = Call::new(app, tenant, false, params, logprobs);
    let (call, answers, n_prompts) = blocking(move || {
        let mask = mask(&call.app, &format)?;
        let mut answers = Vec::new();
        for tokens in &prompts {
            for _ in 0..call.params.n {
                let request = call.request(tokens.clone(), answers.len(), mask.clone())?;
                answers.push(Answer::new(answers.len(), call.app.scheduler.submit(request)?, None, false));
            }
        }
        Ok((call, answers, prompts.len()))
    })
    .await?;
    call.respond(answers, n_prompts).await
}

/// The prompts of a completion: a text, tokens, or several of either.
fn prompts(app: &App, value: Value) -> Result<Vec<Vec<u32>>, ApiError> {
    const NAME: &str = "prompt";
    let wrong = || ApiError::field(NAME, "expected a text, an array of tokens, or an array of either");
    let of = |value: &Value| match value {
        Value::String(text) => Ok(app.tokenizer.encode_prompt(text)),
        Value::Array(tokens) => {
            tokens.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong)).collect()
        }
        _ => Err(wrong()),
    };
    let prompts = match &value {
        Value::Array(list) if list.first().is_some_and(|first| !first.is_number()) => list.iter().map(of).collect(),
        value => of(value).map(|tokens| vec![tokens]),
    }?;
    match prompts.len() {
        0..=MAX_PROMPTS => Ok(prompts),
        n => Err(ApiError::field(NAME, format!("expected at most {MAX_PROMPTS} prompts, found {n}"))),
    }
}

fn top_logprobs(name: &str, n: Option<usize>) -> Result<Option<usize>, ApiError> {
    match n {
        Some(n) if n > MAX_TOP_LOGPROBS => {
            Err(ApiError::field(name, format!("expected at most {MAX_TOP_LOGPROBS}, found {n}")))
        }
        n => Ok(n),
    }
}

pub(super) async fn chat(
    State(shared): State<Shared>,
    Extension(tenant): Extension<Tenant>,
    mut fields: Fields,
) -> Result<Response, ApiError> {
    let app = shared.app()?;
    app.check_model(&mut fields)?;
    let params = Params::of(&app, &mut fields)?;
    let format = Format::of(&mut fields)?;
    let n_top = top_logprobs("top_logprobs", fields.take("top_logprobs")?)?;
    let logprobs = match (fields.flag("logprobs")?, n_top) {
        (true, n) => Some(n.unwrap_or(0)),
        (false, None | Some(0)) => None,
        (false, Some(_)) => return Err(ApiError::field("top_logprobs", "logprobs has to be true")),
    };
    let one_call = !fields.take("parallel_tool_calls")?.unwrap_or(true);
    let choice = fields.take::<Value>("tool_choice")?.map(|choice| ToolChoice::from_json(&choice));
    let choice = choice.transpose().map_err(|error| ApiError::field("tool_choice", error))?;
    let conversation = app.conversation(&mut fields)?;
    fields.finish()?;
    let tools = conversation.tools()?;
    if !tools.is_empty() && !format.is_text() {
        return Err(ApiError::wrong("an answer with tools cannot have a format or a grammar as well"));
    }
    let call = Call::new(app, tenant, true, params, logprobs);
    let (call, answers) = blocking(move || {
        let app = &call.app;
        let prompt = conversation.render(app)?;
        let choice = choice.unwrap_or(if tools.is_empty() { ToolChoice::None } else { ToolChoice::Auto });
        let mask = if tools.is_empty() && choice == ToolChoice::None {
            mask(app, &format)?
        } else {
            let mask = ToolMask::new(&app.trie, app.tool_format, &tools, &choice, &prompt)?;
            Some(Box::new(mask) as Box<dyn ruvllm::sample::TokenMask>)
        };
        let tokens = app.tokenizer.encode_prompt(&prompt);
        let mut answers = Vec::new();
        for i in 0..call.params.n {
            let stream = app.scheduler.submit(call.request(tokens.clone(), i, mask.clone())?)?;
            answers.push(Answer::new(i, stream, Some(TurnParser::new(app.tool_format, &tools, &prompt)), one_call));
        }
        Ok((call, answers))
    })
    .await?;
    call.respond(answers, 1).await
}

/// A conversation, and what its template is told besides.
pub(super) struct Conversation {
    messages: Vec<Value>,
    tools: Option<Value>,
    kwargs: Map<String, Value>,
    add_generation_prompt: bool,
}

impl App {
    pub(super) fn conversation(&self, fields: &mut Fields) -> Result<Conversation, ApiError> {
        let messages: Vec<Value> = fields.need("messages")?;
        if messages.is_empty() {
            return Err(ApiError::field("messages", "there are none"));
        }
        let mut kwargs: Map<String, Value> = fields.take("chat_template_kwargs")?.unwrap_or_default();
        if let Some(effort) = fields.take::<String>("reasoning_effort")? {
            kwargs.entry("reasoning_effort").or_insert_with(|| effort.into());
        }
        Ok(Conversation {
            messages: messages
                .into_iter()
                .enumerate()
                .map(|(i, message)| message_for_template(i, message))
                .collect::<Result<_, _>>()?,
            tools: fields.take("tools")?,
            kwargs,
            add_generation_prompt: fields.take("add_generation_prompt")?.unwrap_or(true),
        })
    }
}

impl Conversation {
    fn tools(&self) -> Result<Vec<Tool>, ApiError> {
        let tools = self.tools.as_ref().map(Tool::from_json).transpose();
        Ok(tools.map_err(|error| ApiError::field("tools", error))?.unwrap_or_default())
    }

    /// The prompt; at most ten seconds.
    pub(super) fn render(&self, app: &App) -> Result<String, ApiError> {
        let inputs = ruvllm::chat::ChatInputs {
            messages: self.messages.clone().into(),
            tools: self.tools.clone().filter(|tools| tools.as_array().is_some_and(|tools| !tools.is_empty())),
            kwargs: self.kwargs.clone(),
            add_generation_prompt: self.add_generation_prompt,
            bos_token: app.bos.clone(),
            eos_token: app.eos.clone(),
            ..ruvllm::chat::ChatInputs::new(&[])
        };
        Ok(app.template.render(&inputs).map_err(ruvllm::Error::from)?)
    }
}

/// A message as templates expect it: text that came in parts in one, arguments of calls as objects.
fn message_for_template(i: usize, mut message: Value) -> Result<Value, ApiError> {
    let wrong = |what: &str| ApiError::field(&format!("messages[{i}]"), what);
    let Some(fields) = message.as_object_mut() else { return Err(wrong("expected an object")) };
    if fields.get("role").and_then(Value::as_str).is_none() {
        return Err(wrong("it has no role"));
    }
    match fields.get_mut("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            let texts = parts.iter().map(|part| match part["type"].as_str() {
                Some("text") => part["text"].as_str().ok_or_else(|| wrong("a part has no text")),
                Some("refusal") => part["refusal"].as_str().ok_or_else(|| wrong("a part has no refusal")),
                other => Err(wrong(&format!("parts of the type {other:?} are not supported, only text"))),
            });
            let text = texts.collect::<Result<Vec<_>, _>>()?.concat();
            fields.insert("content".into(), text.into());
        }
        None | Some(Value::Null) => drop(fields.insert("content".into(), "".into())),
        Some(_) => return Err(wrong("its content is neither text nor parts")),
    }
    for call in fields.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let arguments = call.get_mut("function").and_then(|function| function.get_mut("arguments"));
        if let Some(arguments) = arguments
            && let Some(object) = arguments.as_str().and_then(|text| serde_json::from_str::<Map<_, _>>(text).ok())
        {
            *arguments = object.into();
        }
    }
    Ok(message)
}
