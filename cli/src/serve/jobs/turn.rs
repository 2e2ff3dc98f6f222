//! What a request asks for, in the words of chat completions: the other APIs are put into them.

use crate::serve::app::App;
use crate::serve::blocking::blocking;
use crate::serve::http::error::ApiError;
use crate::serve::http::fields::Fields;
use crate::serve::ids::Caller;
use crate::serve::jobs::answer::Answer;
use crate::serve::jobs::params::{ChosenAdapter, Format, Params, mask};
use crate::serve::jobs::recorder::Recorder;
use ruvllm::chat::tools::{Tool, ToolChoice, ToolMask, TurnParser};
use ruvllm::sample::TokenMask;
use ruvllm::scheduler::{Request, Stream};
use serde_json::{Map, Value, json};
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
    /// A request for answer `i`, to `tokens`.
    fn request(
        &self,
        tokens: Vec<u32>,
        i: usize,
        mask: Option<Box<dyn TokenMask>>,
    ) -> Result<Request, ApiError> {
        let learnt = self
            .app
            .learner(&self.caller)
            .map(|learner| learner.adapter(&tokens))
            .transpose()?
            .flatten();
        let request = Request::new(tokens, self.params.sampler(i, mask)?);
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
        if let Some(speculation) = &self.app.speculation {
            request = request.speculate(speculation.clone());
        }
        for ChosenAdapter { adapter, scale, .. } in &self.params.adapters {
            request = request.adapter(Arc::clone(adapter), *scale);
        }
        if let Some(adapter) = learnt {
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

    /// As many answers to each prompt as are asked for, prompt by prompt.
    pub(crate) async fn submit(
        self,
        prompts: Vec<Vec<u32>>,
        format: Format,
    ) -> Result<(Job, Vec<Answer>), ApiError> {
        let app = Arc::clone(&self.app);
        app.can_hold(prompts.len() * self.params.n)?;
        // A moment, unless a learner's adapter or the prompt's text has to be written: another
        // thread would take longer to wake up.
        let is_quick = format.is_text()
            && self.params.n == 1
            && matches!(&prompts[..], [tokens] if tokens.len() <= QUICK_TOKENS)
            && app.learner(&self.caller).is_none()
            && app.audit_log.is_none();
        let work = move || {
            let mask = mask(&self.app, &format)?;
            let mut answers = Vec::new();
            for tokens in &prompts {
                for _ in 0..self.params.n {
                    let request = self.request(tokens.clone(), answers.len(), mask.clone())?;
                    let stream = self.start(request, tokens)?;
                    let recorder = self.recorder(tokens, answers.len());
                    answers.push(
                        Answer::new(answers.len(), tokens.len(), stream, None, usize::MAX)
                            .recorded(recorder),
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

/// Most tokens of a prompt that is copied on the thread that answers other connections too.
const QUICK_TOKENS: usize = 1 << 16;

/// What the next message of a conversation has to be.
pub(crate) struct Turn {
    pub(crate) job: Job,
    format: Format,
    conversation: Conversation,
    tools: Vec<Tool>,
    choice: ToolChoice,
    /// Whether the model may call tools. If not, nothing in the text is a call, whatever it looks
    /// like.
    may_call: bool,
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
            (ToolChoice::Auto | ToolChoice::None, 0) => ToolChoice::None,
            (_, 0) => {
                let message = "it is 0, and tool_choice requires a call";
                return Err(ApiError::field("max_tool_calls", message));
            }
            (choice, _) => choice,
        };
        let may_call = match choice {
            ToolChoice::None => false,
            ToolChoice::Auto => !tools.is_empty(),
            // Refused later if there are no tools.
            _ => true,
        };
        if may_call && !format.is_text() {
            return Err(ApiError::wrong(
                "an answer with tools cannot have a format or a grammar as well",
            ));
        }
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
            may_call,
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
            job, conversation, ..
        } = self;
        blocking(move || {
            Ok(job
                .app
                .tokenizer
                .encode_prompt(&conversation.render(&job.app)?)
                .len())
        })
        .await
    }

    /// As many answers as are asked for.
    pub(crate) async fn submit(self) -> Result<(Job, Vec<Answer>), ApiError> {
        let app = Arc::clone(&self.job.app);
        app.can_hold(self.job.params.n)?;
        app.prepare(move || {
            let Turn {
                job,
                format,
                conversation,
                tools,
                choice,
                may_call,
                max_calls,
            } = self;
            let app = &job.app;
            let prompt = conversation.render(app)?;
            let grammar = if may_call { None } else { mask(app, &format)? };
            let is_free = grammar.is_none();
            let mask = match grammar {
                None if may_call || !tools.is_empty() => {
                    let mask = ToolMask::new(&app.trie, app.tool_format, &tools, &choice, &prompt)?;
                    Some(Box::new(mask) as Box<dyn TokenMask>)
                }
                grammar => grammar,
            };
            // JSON that a schema describes begins at once, so that nothing of it is reasoning that
            // the prompt began.
            let begun = if format.is_json() { "" } else { &prompt };
            let parser =
                TurnParser::new(app.tool_format, if may_call { &tools } else { &[] }, begun);
            let parser = if is_free { parser } else { parser.verbatim() };
            let parser = if conversation.continue_final_message {
                parser.within_text()
            } else {
                parser
            };
            let tokens = app.tokenizer.encode_prompt(&prompt);
            let mut answers = Vec::new();
            for i in 0..job.params.n {
                // What tells text from calls may be special tokens.
                let stream = job.start(
                    job.request(tokens.clone(), i, mask.clone())?.special(),
                    &tokens,
                )?;
                let answer = Answer::new(i, tokens.len(), stream, Some(parser.clone()), max_calls);
                answers.push(answer.recorded(job.recorder(&tokens, i)));
            }
            Ok((job, answers))
        })
        .await
    }
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
        let continue_final_message = fields.flag("continue_final_message")?;
        let mut kwargs = self.kwargs.clone();
        if let Some(effort) = fields.take::<String>("reasoning_effort")? {
            kwargs.insert("reasoning_effort".into(), effort.into());
        }
        kwargs.extend(
            fields
                .take::<Map<String, Value>>("chat_template_kwargs")?
                .unwrap_or_default(),
        );
        Ok(Conversation {
            messages: messages
                .into_iter()
                .enumerate()
                .map(|(i, message)| message_for_template(i, message, self.knows_developer))
                .collect::<Result<_, _>>()?,
            tools: fields.take("tools")?,
            kwargs,
            add_generation_prompt: fields
                .take("add_generation_prompt")?
                .unwrap_or(!continue_final_message),
            continue_final_message,
        })
    }
}

impl Conversation {
    fn tools(&self) -> Result<Vec<Tool>, ApiError> {
        let tools = self.tools.as_ref().map(Tool::from_json).transpose();
        Ok(tools
            .map_err(|error| ApiError::field("tools", error))?
            .unwrap_or_default())
    }

    /// The prompt; at most ten seconds.
    pub(crate) fn render(&self, app: &App) -> Result<String, ApiError> {
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
        let mut prompt = app.template.render(&inputs).map_err(ruvllm::Error::from)?;
        if self.continue_final_message {
            let last = self
                .messages
                .last()
                .and_then(|last| last["content"].as_str());
            let end = last.and_then(|last| end_of(&prompt, last)).ok_or_else(|| {
                let message = "the template does not show the last message as it is";
                ApiError::field("continue_final_message", message)
            })?;
            prompt.truncate(end);
        }
        Ok(prompt)
    }
}

/// The end of a message's text in a prompt. A template may have left out the white space around it.
fn end_of(prompt: &str, text: &str) -> Option<usize> {
    let text = text.trim_start();
    let trimmed = text.trim_end();
    let begin = prompt.rfind(trimmed)?;
    let is_whole = prompt[begin..].starts_with(text);
    Some(begin + if is_whole { text.len() } else { trimmed.len() })
}

/// A message as templates expect it: text that came in parts in one, arguments of calls as objects.
fn message_for_template(
    i: usize,
    mut message: Value,
    knows_developer: bool,
) -> Result<Value, ApiError> {
    let wrong = |what: &str| ApiError::field(&format!("messages[{i}]"), what);
    let Some(fields) = message.as_object_mut() else {
        return Err(wrong("expected an object"));
    };
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
            let texts = parts.iter().map(|part| match part["type"].as_str() {
                Some("text") => part["text"]
                    .as_str()
                    .ok_or_else(|| wrong("a part has no text")),
                Some("refusal") => part["refusal"]
                    .as_str()
                    .ok_or_else(|| wrong("a part has no refusal")),
                other => Err(wrong(&format!(
                    "parts of the type {other:?} are not supported, only text"
                ))),
            });
            let text = texts.collect::<Result<Vec<_>, _>>()?.concat();
            fields.insert("content".into(), text.into());
        }
        None | Some(Value::Null) => drop(fields.insert("content".into(), "".into())),
        Some(_) => return Err(wrong("its content is neither text nor parts")),
    }
    for call in fields
        .get_mut("tool_calls")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        let arguments = call
            .get_mut("function")
            .and_then(|function| function.get_mut("arguments"));
        if let Some(arguments) = arguments
            && let Some(object) = arguments
                .as_str()
                .and_then(|text| serde_json::from_str::<Map<_, _>>(text).ok())
        {
            *arguments = object.into();
        }
    }
    Ok(message)
}
