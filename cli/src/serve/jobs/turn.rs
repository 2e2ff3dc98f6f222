//! What a request asks for, in the words of chat completions: the other APIs are put into them.

use crate::serve::app::App;
use crate::serve::blocking::blocking;
use crate::serve::http::error::ApiError;
use crate::serve::http::fields::Fields;
use crate::serve::ids::Caller;
use crate::serve::jobs::answer::Answer;
use crate::serve::jobs::params::{ChosenAdapter, Format, Params, mask};
use crate::serve::jobs::recorder::Recorder;
use crate::serve::observe::log::CHAT;
use ruvllm::chat::tools::{AfterReasoning, Tool, ToolChoice, ToolMask, TurnParser};
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
                        Answer::new(answers.len(), tokens.len(), stream, None, false)
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
    /// Whether it ends behind the first call.
    one_call: bool,
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
        let one_call = !fields.take("parallel_tool_calls")?.unwrap_or(true);
        let choice = fields
            .take::<Value>("tool_choice")?
            .map(|choice| ToolChoice::from_json(&choice));
        let choice = choice
            .transpose()
            .map_err(|error| ApiError::field("tool_choice", error))?;
        let conversation = app.conversation(fields)?;
        let tools = conversation.tools()?;
        let choice = choice.unwrap_or(ToolChoice::Auto);
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
            one_call,
        })
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
                one_call,
            } = self;
            let app = &job.app;
            let prompt = conversation.render(app)?;
            let tokens = app.tokenizer.encode_prompt(&prompt);
            let grammar = if may_call { None } else { mask(app, &format)? };
            let is_free = grammar.is_none();
            let mask = match grammar {
                None if may_call || !tools.is_empty() => {
                    let mask = ToolMask::new(&app.trie, app.tool_format, &tools, &choice, &prompt)?;
                    Some(Box::new(mask) as Box<dyn TokenMask>)
                }
                // Half of the tokens are left for what the grammar describes.
                grammar => grammar.map(|mask| {
                    let room = app.n_ctx.saturating_sub(tokens.len());
                    let most = job.params.max_tokens.unwrap_or(room).min(room) / 2;
                    AfterReasoning::wrap(mask, &app.trie, app.tool_format, &prompt, most)
                }),
            };
            let callable = if may_call { &tools[..] } else { &[] };
            let parser = TurnParser::new(app.tool_format, callable, &prompt);
            let parser = if is_free { parser } else { parser.verbatim() };
            let mut answers = Vec::new();
            for i in 0..job.params.n {
                // What tells text from calls may be special tokens.
                let stream = job.start(
                    job.request(tokens.clone(), i, mask.clone())?.special(),
                    &tokens,
                )?;
                let answer = Answer::new(i, tokens.len(), stream, Some(parser.clone()), one_call);
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
        Ok(Conversation {
            messages: messages
                .into_iter()
                .enumerate()
                .map(|(i, message)| message_for_template(i, message, self.knows_developer))
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
        Ok(tools
            .map_err(|error| ApiError::field("tools", error))?
            .unwrap_or_default())
    }

    /// The prompt; at most ten seconds. What had to be changed of the conversation is logged.
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
        let rendered = app.template.render(&inputs)?;
        for adjustment in rendered.adjusted {
            tracing::info!(target: CHAT, "a conversation was changed: {adjustment}");
        }
        Ok(rendered.text)
    }
}

/// A message as templates expect it: text that came in parts in one.
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
    Ok(message)
}
