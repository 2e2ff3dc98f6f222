//! What a request asks for, in the words of chat completions: the other APIs are put into them.

use crate::serve::app::App;
use crate::serve::blocking::{CancelOnDrop, blocking};
use crate::serve::http::error::ApiError;
use crate::serve::http::fields::Fields;
use crate::serve::http::images::ImageSources;
use crate::serve::ids::Caller;
use crate::serve::jobs::answer::{Answer, Echo, Reader};
use crate::serve::jobs::params::{ChosenAdapter, Format, Params, mask};
use crate::serve::jobs::recorder::Recorder;
use crate::serve::observe::log::CHAT;
use crate::serve::slots::SlotText;
use ruvllm::CancelToken;
use ruvllm::Tokenizer;
use ruvllm::chat::tools::{AfterReasoning, Tool, ToolChoice, ToolMask, TurnParser};
use ruvllm::sample::TokenMask;
use ruvllm::scheduler::{Request, Stream};
use ruvllm::session::EncodedPrompt;
use ruvllm::tokenizer::TextStream;
use serde_json::{Map, Value, json};
use std::ops::Range;
use std::sync::Arc;

/// Most alternatives to a token that are told.
const MAX_TOP_LOGPROBS: usize = 20;

/// Whose request it is, and how to answer it.
pub(crate) struct Job {
    pub(crate) app: Arc<App>,
    pub(crate) caller: Caller,
    pub(crate) params: Params,
    /// Alternatives to each token that are told.
    pub(crate) logprobs: Option<usize>,
}

impl Job {
    /// A request for answer `i`, to `prompt`.
    fn request(
        &self,
        prompt: EncodedPrompt,
        i: usize,
        mask: Option<Box<dyn TokenMask>>,
    ) -> Result<Request, ApiError> {
        let learnt = self
            .app
            .learner(&self.caller)
            .map(|learner| learner.adapter(prompt.tokens()))
            .transpose()?
            .flatten();
        let remembered = match self.params.uses_memory {
            true => {
                let app = &self.app;
                app.memories.adapter(&self.caller, app.engine.model())?
            }
            false => None,
        };
        let request = Request::of_prompt(prompt, self.params.sampler(i, mask)?);
        let mut request = request
            .stop(self.params.stop.iter().cloned())
            .priority(self.params.priority);
        request = request.salt(&*self.caller.tenant);
        if let Some(n) = self.params.max_tokens {
            request = request.max_tokens(n);
        }
        if let Some(n) = self.logprobs {
            request = request.logprobs(n);
        }
        if let Some(mode) = self.params.cache {
            request = request.cache(mode);
        }
        if let Some(n) = self.params.min_cache_tokens {
            request = request.min_cache_tokens(n);
        }
        if let Some(kind) = self.params.kv_type {
            request = request.kv_type(kind);
        }
        if let Some(speculation) = &self.app.speculation {
            request = request.speculate(speculation.clone());
        }
        for ChosenAdapter { adapter, scale, .. } in &self.params.adapters {
            request = request.adapter(Arc::clone(adapter), *scale);
        }
        for adapter in [learnt, remembered].into_iter().flatten() {
            request = request.adapter(adapter, 1.0);
        }
        Ok(request)
    }

    /// What records answer `i` to `tokens`, if answers are recorded.
    fn recorder(&self, tokens: &[u32], i: usize) -> Option<Recorder> {
        let learner = self.app.learner(&self.caller)?;
        Some(Recorder::new(
            learner,
            &self.caller,
            self.params.user.as_deref(),
            tokens,
            i,
        ))
    }

    /// The text of answer `i` to `tokens`, if it will be in a slot.
    fn slot(&self, tokens: &[u32], i: usize) -> Option<SlotText> {
        let (slots, id) = (self.app.slots.as_ref()?, self.params.slot?);
        (i == 0).then(|| slots.text(&self.caller.tenant, id, tokens))
    }

    /// Submits a request for an answer to `tokens`.
    fn start(&self, request: Request, tokens: &[u32]) -> Result<Stream, ApiError> {
        let Job {
            app,
            caller,
            params,
            ..
        } = self;
        let stream = app.scheduler.submit(request)?;
        if let Some(audit_log) = &app.audit_log {
            let adapters: Map<_, _> = params
                .adapters
                .iter()
                .map(|of| (of.name.clone(), json!(of.scale)))
                .collect();
            let mut asked = json!({"adapters": adapters, "seed": params.seed});
            if audit_log.with_prompts {
                asked["prompt"] = app
                    .tokenizer
                    .decode_lossy(tokens, true)
                    .unwrap_or_default()
                    .into();
            }
            audit_log.describe(stream.id(), caller, &app.name, asked);
        }
        Ok(stream)
    }

    /// What an answer to `tokens` begins with, if it `echoes` them.
    fn echo(&self, tokens: &[u32], echoes: bool) -> Result<Echo, ApiError> {
        if !echoes {
            return Ok(Echo::None);
        }
        let texts = texts_of(&self.app.tokenizer, tokens)?;
        Ok(match self.logprobs {
            Some(_) => Echo::Tokens(texts.into_iter()),
            None => Echo::Text(texts.concat()),
        })
    }

    /// As many answers to each prompt as are asked for, prompt by prompt; if they echo, each
    /// begins with its prompt.
    pub(crate) async fn submit(
        self,
        prompts: Vec<Vec<u32>>,
        format: Format,
        echoes: bool,
    ) -> Result<(Job, Vec<Answer>), ApiError> {
        let app = Arc::clone(&self.app);
        app.can_hold(prompts.len() * self.params.n)?;
        // A moment, unless a learner's adapter or the prompt's text has to be written: another
        // thread would take longer to wake up.
        let is_quick = format.is_text()
            && self.params.n == 1
            && !echoes
            && matches!(&prompts[..], [tokens] if tokens.len() <= QUICK_TOKENS)
            && app.learner(&self.caller).is_none()
            && app.audit_log.is_none();
        let work = move || {
            let mask = mask(&self.app, &format)?;
            let mut answers = Vec::new();
            for tokens in &prompts {
                for _ in 0..self.params.n {
                    let mut request =
                        self.request(tokens.clone().into(), answers.len(), mask.clone())?;
                    if echoes && self.logprobs.is_some() {
                        request = request.prompt_logprobs();
                    }
                    let stream = self.start(request, tokens)?;
                    let recorder = self.recorder(tokens, answers.len());
                    let slot = self.slot(tokens, answers.len());
                    let echo = self.echo(tokens, echoes)?;
                    answers.push(
                        Answer::new(answers.len(), tokens.len(), stream, None, echo)
                            .recorded(recorder, slot),
                    );
                }
            }
            Ok((self, answers))
        };
        if is_quick {
            work()
        } else {
            app.prepare(work).await
        }
    }
}

/// The text that each token of a prompt completes; that of the start of a text is empty.
fn texts_of(tokenizer: &Arc<Tokenizer>, tokens: &[u32]) -> Result<Vec<String>, ApiError> {
    let mut stream = TextStream::new(tokenizer, true);
    let mut texts = Vec::with_capacity(tokens.len());
    for (i, &token) in tokens.iter().enumerate() {
        texts.push(match i == 0 && tokenizer.bos() == Some(token) {
            true => String::new(),
            false => stream
                .push(token)
                .map_err(|error| ApiError::field("prompt", error))?
                .to_owned(),
        });
    }
    if let Some(last) = texts.last_mut() {
        last.push_str(stream.finish());
    }
    Ok(texts)
}

/// Most tokens of a prompt that is copied on the thread that answers other connections too.
const QUICK_TOKENS: usize = 1 << 16;

/// What the next message of a conversation has to be.
pub(crate) struct Turn {
    pub(crate) job: Job,
    format: Format,
    conversation: Conversation,
    tools: Vec<Tool>,
    choice: ToolChoice,
    /// The tools that the model may call. If there are none, nothing in the text is a call,
    /// whatever it looks like.
    callable: Vec<Tool>,
    /// It ends behind so many calls.
    max_calls: usize,
}

impl Turn {
    pub(crate) fn of(app: Arc<App>, caller: Caller, fields: &mut Fields) -> Result<Turn, ApiError> {
        let params = Params::of(&app, fields)?;
        let format = Format::of(fields)?;
        let n_top = top_logprobs("top_logprobs", fields.take("top_logprobs")?)?;
        let logprobs = match (fields.flag("logprobs")?, n_top) {
            (true, n) => Some(n.unwrap_or(0)),
            (false, None | Some(0)) => None,
            (false, Some(_)) => {
                return Err(ApiError::field("top_logprobs", "logprobs has to be true"));
            }
        };
        let is_parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
        let max_calls = fields.take("max_tool_calls")?.unwrap_or(usize::MAX);
        let max_calls = if is_parallel {
            max_calls
        } else {
            max_calls.min(1)
        };
        let choice = fields
            .take::<Value>("tool_choice")?
            .map(|choice| ToolChoice::from_json(&choice));
        let choice = choice
            .transpose()
            .map_err(|error| ApiError::field("tool_choice", error))?;
        let conversation = app.conversation(fields)?;
        let tools = conversation.tools()?;
        let choice = match (choice.unwrap_or(ToolChoice::Auto), max_calls) {
            (choice, 0) if choice.is_required() => {
                let message = "it is 0, and tool_choice requires a call";
                return Err(ApiError::field("max_tool_calls", message));
            }
            (_, 0) => ToolChoice::None,
            (choice, _) => choice,
        };
        let callable = choice
            .allowed(&tools)
            .map_err(|error| ApiError::field("tool_choice", error))?;
        let job = Job {
            app,
            caller,
            params,
            logprobs,
        };
        Ok(Turn {
            job,
            format,
            conversation,
            tools,
            choice,
            callable,
            max_calls,
        })
    }

    /// Has the arguments of a tool obey a schema, which the prompt does not show.
    pub(crate) fn narrow(&mut self, tool: &str, parameters: Value) {
        for tool in self.tools.iter_mut().filter(|found| found.name == tool) {
            tool.parameters = parameters.clone();
        }
    }

    /// Tokens of its prompt.
    pub(crate) async fn count_tokens(self) -> Result<usize, ApiError> {
        let Turn {
            job,
            mut conversation,
            ..
        } = self;
        blocking(move || {
            if job.params.uses_memory {
                conversation.tell(&job)?;
            }
            conversation
                .render(&job.app)?
                .n_tokens(&job.app, &conversation.images)
        })
        .await
    }

    /// As many answers as are asked for.
    pub(crate) async fn submit(self) -> Result<(Job, Vec<Answer>), ApiError> {
        let app = Arc::clone(&self.job.app);
        app.can_hold(self.job.params.n)?;
        // Of images that are being encoded.
        let cancel = CancelToken::default();
        let _cancel = CancelOnDrop(cancel.clone());
        app.prepare(move || {
            let Turn {
                job,
                format,
                mut conversation,
                tools,
                choice,
                callable,
                max_calls,
            } = self;
            let app = &job.app;
            if job.params.uses_memory {
                let n = conversation.tell(&job)?;
                app.metrics.memory_tokens.inc_by(n as u64);
            }
            let rendered = conversation.render(app)?;
            let encoded = rendered.encode(app, &conversation.images, &cancel)?;
            let (tokens, prompt) = (encoded.tokens(), rendered.text);
            let has_images = encoded.has_images();
            if has_images && app.slots.is_some() && job.params.slot.is_some() {
                let message = "a slot keeps a text alone, and the conversation has images";
                return Err(ApiError::field("id_slot", message));
            }
            let may_call = !callable.is_empty();
            // Where calls are required there is no text.
            let text = match choice.is_required() {
                true => None,
                false => mask(app, &format)?,
            };
            let parser = TurnParser::new(app.tool_format, &callable, &prompt).eager();
            let form = app.tool_format;
            let (mask, parser, either) = match text {
                Some(text) if may_call => {
                    let mask =
                        ToolMask::with_text(&app.trie()?, form, &tools, &choice, &prompt, text)?;
                    format.ignore_in_tools(mask.loosened());
                    (boxed(&mask), parser.undecided(), Some(mask))
                }
                Some(text) => {
                    // Half of the tokens are left for what the grammar describes.
                    let room = app.n_ctx.saturating_sub(tokens.len());
                    let most = job.params.max_tokens.unwrap_or(room).min(room) / 2;
                    let mask = AfterReasoning::wrap(text, &app.trie()?, form, &prompt, most);
                    (Some(mask), parser.verbatim(), None)
                }
                None if tools.is_empty() => (None, parser, None),
                None => {
                    let mask = ToolMask::new(&app.trie()?, form, &tools, &choice, &prompt)?;
                    format.ignore_in_tools(mask.loosened());
                    let parser = match choice.is_required() {
                        true => parser.calls(),
                        false => parser,
                    };
                    (boxed(&mask), parser, None)
                }
            };
            let parser = match conversation.continue_final_message {
                true => parser.within_text(),
                false => parser,
            };
            let reader = Reader::new(parser, either, max_calls);
            let mut answers = Vec::new();
            for i in 0..job.params.n {
                // What tells text from calls may be special tokens.
                let request = job.request(encoded.clone(), i, mask.clone())?;
                let stream = job.start(request.special(), tokens)?;
                let reader = Some(reader.clone());
                let answer = Answer::new(i, tokens.len(), stream, reader, Echo::None);
                // A learner reads text alone.
                let recorder = job.recorder(tokens, i).filter(|_| !has_images);
                answers.push(answer.recorded(recorder, job.slot(tokens, i)));
            }
            Ok((job, answers))
        })
        .await
    }
}

fn boxed(mask: &ToolMask) -> Option<Box<dyn TokenMask>> {
    Some(Box::new(mask.clone()))
}

pub(crate) fn top_logprobs(name: &str, n: Option<usize>) -> Result<Option<usize>, ApiError> {
    match n {
        Some(n) if n > MAX_TOP_LOGPROBS => Err(ApiError::field(
            name,
            format!("expected at most {MAX_TOP_LOGPROBS}, found {n}"),
        )),
        n => Ok(n),
    }
}

/// A conversation, and what its template is told besides.
pub(crate) struct Conversation {
    messages: Vec<Value>,
    /// In the order of the messages.
    images: ImageSources,
    tools: Option<Value>,
    kwargs: Map<String, Value>,
    add_generation_prompt: bool,
    /// Whether the last message goes on.
    continue_final_message: bool,
}

impl App {
    pub(crate) fn conversation(&self, fields: &mut Fields) -> Result<Conversation, ApiError> {
        let messages: Vec<Value> = fields.need("messages")?;
        if messages.is_empty() {
            return Err(ApiError::field("messages", "there are none"));
        }
        let mut kwargs = self.kwargs.clone();
        if let Some(effort) = fields.take::<String>("reasoning_effort")? {
            kwargs.insert("reasoning_effort".into(), effort.into());
        }
        kwargs.extend(
            fields
                .take::<Map<String, Value>>("chat_template_kwargs")?
                .unwrap_or_default(),
        );
        let continue_final_message = fields.flag("continue_final_message")?;
        let add_generation_prompt = fields
            .take("add_generation_prompt")?
            .unwrap_or(!continue_final_message);
        if continue_final_message && add_generation_prompt {
            return Err(ApiError::field(
                "continue_final_message",
                "a message that goes on and add_generation_prompt, which begins another, exclude each other",
            ));
        }
        let mut images = ImageSources::default();
        let mut messages = messages
            .into_iter()
            .enumerate()
            .map(|(i, message)| message_for_template(i, message, self.knows_developer, &mut images))
            .collect::<Result<Vec<_>, _>>()?;
        if continue_final_message {
            mark_end(&mut messages)?;
        }
        match &self.images {
            Some(reader) => {
                for message in &mut messages {
                    reader.template.fit(&mut message["content"]);
                }
                if !reader.has_details() {
                    images.ignore_details(fields.ignored());
                }
            }
            None => images.refuse()?,
        }
        Ok(Conversation {
            messages,
            images,
            tools: fields.take("tools")?,
            kwargs,
            add_generation_prompt,
            continue_final_message,
        })
    }
}

/// Stands where a message goes on, in a prompt that is cut there: a template may put anything
/// behind the message.
const GOES_ON: &str = "\u{e000}goes on here\u{e001}";

/// Marks the end of the last message, which has to be text of the assistant.
fn mark_end(messages: &mut [Value]) -> Result<(), ApiError> {
    let last = messages
        .last_mut()
        .filter(|last| last["role"] == "assistant" && last["tool_calls"].is_null());
    match last.map(|last| &mut last["content"]) {
        Some(Value::String(content)) => {
            content.push_str(GOES_ON);
            Ok(())
        }
        _ => Err(ApiError::field(
            "continue_final_message",
            "the last message is not text of the assistant",
        )),
    }
}

/// A rendered conversation.
pub(crate) struct Prompt {
    pub(crate) text: String,
    /// Where messages of users and tools have texts of control tokens, which are plain text.
    plain: Vec<Range<usize>>,
}

impl Prompt {
    /// Its tokens, with the embeddings of its images.
    fn encode(
        &self,
        app: &App,
        images: &ImageSources,
        cancel: &CancelToken,
    ) -> Result<EncodedPrompt, ApiError> {
        let rendered = (&self.text[..], &self.plain[..]);
        match app.images.as_ref().filter(|_| !images.is_empty()) {
            Some(reader) => reader.encode(&app.engine, app.n_ctx, rendered, images, cancel),
            None => Ok(app
                .tokenizer
                .encode_prompt_but(&self.text, &self.plain)
                .into()),
        }
    }

    /// Number of its tokens, those in the places of images included.
    fn n_tokens(&self, app: &App, images: &ImageSources) -> Result<usize, ApiError> {
        let rendered = (&self.text[..], &self.plain[..]);
        match app.images.as_ref().filter(|_| !images.is_empty()) {
            Some(reader) => reader.count(&app.engine, rendered, images),
            None => {
                let tokens = app.tokenizer.encode_prompt_but(&self.text, &self.plain);
                Ok(tokens.len())
            }
        }
    }
}

impl Conversation {
    fn tools(&self) -> Result<Vec<Tool>, ApiError> {
        let tools = self.tools.as_ref().map(Tool::from_json).transpose();
        Ok(tools
            .map_err(|error| ApiError::field("tools", error))?
            .unwrap_or_default())
    }

    /// Puts before the last message of the user what they have had remembered and is like it;
    /// returns the tokens of that.
    fn tell(&mut self, job: &Job) -> Result<usize, ApiError> {
        let mut messages = self.messages.iter_mut().rev();
        let Some(last) = messages.find(|message| message["role"] == "user") else {
            return Ok(0);
        };
        let content = &mut last["content"];
        let question = match &*content {
            Value::Array(parts) => {
                let texts = parts.iter().filter_map(|part| part["text"].as_str());
                texts.collect::<Vec<_>>().join(" ")
            }
            text => text.as_str().unwrap_or_default().to_owned(),
        };
        let app = &job.app;
        let notes = (app.memories).notes(&job.caller, &question, &app.tokenizer)?;
        match content {
            Value::String(text) => text.insert_str(0, &notes.text),
            Value::Array(parts) if !notes.text.is_empty() => {
                parts.insert(0, json!({"type": "text", "text": notes.text}));
            }
            _ => {}
        }
        Ok(notes.n_tokens)
    }

    /// The prompt; at most ten seconds. What had to be changed of the conversation is logged.
    pub(crate) fn render(&self, app: &App) -> Result<Prompt, ApiError> {
        let inputs = ruvllm::chat::ChatInputs {
            messages: self.messages.clone().into(),
            tools: self
                .tools
                .clone()
                .filter(|tools| tools.as_array().is_some_and(|tools| !tools.is_empty())),
            kwargs: self.kwargs.clone(),
            add_generation_prompt: self.add_generation_prompt,
            bos_token: app.bos.clone(),
            eos_token: app.eos.clone(),
            ..ruvllm::chat::ChatInputs::new(&[])
        };
        let guard = Some(&*app.tokenizer).filter(|_| !app.parses_user_special);
        let reader = app.images.as_ref().filter(|_| !self.images.is_empty());
        let markers =
            |text: &str| reader.map_or_else(Vec::new, |of| of.template.find_in_text(text));
        let (rendered, plain) = app
            .template
            .render_guarded(&inputs, guard, markers, || false)?;
        for adjustment in rendered.adjusted {
            tracing::info!(target: CHAT, "a conversation was changed: {adjustment}");
        }
        let mut prompt = rendered.text;
        if self.continue_final_message {
            let end = prompt.rfind(GOES_ON).ok_or_else(|| {
                let message = "the template does not show the last message";
                ApiError::field("continue_final_message", message)
            })?;
            prompt.truncate(end);
        }
        Ok(Prompt {
            plain: plain
                .into_iter()
                .filter(|range| range.end <= prompt.len())
                .collect(),
            text: prompt,
        })
    }
}

/// A message as templates expect it: text that came in parts in one, or texts and images in their
/// order, if there are `images`, to which they are added.
fn message_for_template(
    i: usize,
    mut message: Value,
    knows_developer: bool,
    images: &mut ImageSources,
) -> Result<Value, ApiError> {
    let wrong = |what: &str| ApiError::field(&format!("messages[{i}]"), what);
    let Some(fields) = message.as_object_mut() else {
        return Err(wrong("expected an object"));
    };
    legacy_call(i, fields);
    match fields.get("role").and_then(Value::as_str) {
        None => return Err(wrong("it has no role")),
        // OpenAI's newer name of it.
        Some("developer") if !knows_developer => {
            drop(fields.insert("role".into(), "system".into()))
        }
        Some(_) => {}
    }
    match fields.get_mut("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            let mut content: Vec<Value> = Vec::new();
            for (n, part) in parts.iter_mut().enumerate() {
                let text = match part["type"].as_str() {
                    Some("text") => part["text"]
                        .as_str()
                        .ok_or_else(|| wrong("a part has no text"))?,
                    Some("refusal") => part["refusal"]
                        .as_str()
                        .ok_or_else(|| wrong("a part has no refusal"))?,
                    Some("image_url") => {
                        images.add(&format!("messages[{i}].content[{n}]"), part)?;
                        content.push(json!({"type": "image"}));
                        continue;
                    }
                    Some(kind) => {
                        return Err(wrong(&format!(
                            "the model reads text and images alone, and a part of the message is of the type {kind}"
                        )));
                    }
                    None => return Err(wrong("a part has no type")),
                };
                match content.last_mut().map(|last| &mut last["text"]) {
                    Some(Value::String(last)) => last.push_str(text),
                    _ => content.push(json!({"type": "text", "text": text})),
                }
            }
            let is_text = content.iter().all(|part| part["text"].is_string());
            let content = match is_text {
                true => content
                    .pop()
                    .map_or("".into(), |mut part| part["text"].take()),
                false => content.into(),
            };
            fields.insert("content".into(), content);
        }
        None | Some(Value::Null) => drop(fields.insert("content".into(), "".into())),
        Some(_) => return Err(wrong("its content is neither text nor parts")),
    }
    Ok(message)
}

/// Puts a call and a result of the API's first form into the words of tools: a message had one call
/// at most, so that its place names it.
fn legacy_call(i: usize, message: &mut Map<String, Value>) {
    if message.get("role").is_some_and(|role| role == "function") {
        message.insert("role".into(), "tool".into());
        message.insert(
            "tool_call_id".into(),
            format!("call_{}", i.max(1) - 1).into(),
        );
    }
    if let Some(call) = message
        .shift_remove("function_call")
        .filter(|call| !call.is_null())
    {
        let call = json!({"id": format!("call_{i}"), "type": "function", "function": call});
        message.insert("tool_calls".into(), json!([call]));
    }
}
