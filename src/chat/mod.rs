//! Chat templates: from messages to the prompt a model was trained on.
//!
//! A template is a Jinja program inside the model file. It is rendered as Hugging Face
//! transformers' `apply_chat_template` renders it: `trim_blocks` and `lstrip_blocks`, loop
//! controls, `raise_exception`, `strftime_now`, `{% generation %}`, a `tojson` that is Python's
//! `json.dumps`, and `tools` and `documents` that are `None` when absent.
//!
//! The engine is `minijinja`; where it differs from Jinja2 on Python, `python/` has the Python
//! behaviour: how values print, operators, methods, tests, filters. `translate/` turns the
//! operators of a template into calls of these functions.
//!
//! A template comes with a file from an unknown source, so it is hostile input. It can access only
//! its inputs: no files, no other templates, no attributes of host objects (as in the published
//! attack CVE-2024-34359). Its length, steps, recursion and output are limited, and so is each
//! value that an operator, filter, method or printed text makes, and the sum of all of them in one
//! rendering (1 GiB, [`ChatTemplate::set_max_memory`]); parsing and rendering end with an error
//! after ten seconds ([`ChatTemplate::set_max_time`]), or when they are cancelled (not on
//! wasm32-unknown-unknown, which has neither threads nor a clock).
//!
//! **Not limited**:
//! - Work that has begun. Lists that contain the same list twice, nested forty deep, take
//!   practically forever to compare (`==`, `in`, as keys). The call ends in time, but its thread
//!   cannot be stopped and keeps a core busy until the process ends.
//! - The memory of many tiny values is estimated, not measured: names and empty lists take more
//!   than is counted, up to some hundred bytes for each of two million steps.
//!
//! The program `ruvllm` renders in a process of its own with a memory limit, which is killed when
//! it takes too long; do the same with templates that you do not trust.
//!
//! A conversation that a template refuses (two system messages, roles that do not alternate) can be
//! fitted to it: [`ChatTemplate::render_fitted`].
//!
//! ```
//! # fn main() -> Result<(), ruvllm::chat::ChatError> {
//! use ruvllm::chat::{ChatInputs, ChatTemplate, Message};
//! let template = ChatTemplate::parse(
//!     "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}\
//!      {% if add_generation_prompt %}<|assistant|>{% endif %}",
//! )?;
//! let prompt = template.render(&ChatInputs::new(&[Message::user("Hi!")]))?;
//! assert_eq!(prompt, "<|user|>Hi!\n<|assistant|>");
//! # Ok(())
//! # }
//! ```
//!
//! A conversation, printed as it is generated. The template renders the whole conversation for each
//! turn, and the session computes only the part that it does not have yet:
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use ruvllm::chat::{ChatInputs, ChatTemplate, Message};
//! use ruvllm::{Model, Sampler, SamplerOptions};
//!
//! let model = Model::open("models/ruvllm-rust-6m-q8_0.gguf")?;
//! let tokenizer = model.tokenizer().ok_or("this model has no tokenizer")?;
//! // For models that have none.
//! let transcript = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";
//! let template = ChatTemplate::parse(model.chat_template().unwrap_or(transcript))?;
//! let text = |token: Option<u32>| {
//!     token.and_then(|t| tokenizer.token_text(t)).map_or_else(String::new, |t| String::from_utf8_lossy(t).into_owned())
//! };
//! let (mut session, mut sampler) = (model.session()?, Sampler::new(SamplerOptions { seed: Some(1), ..Default::default() })?);
//! let mut messages = vec![];
//! for question in ["What is a borrow?", "And a move?"] {
//!     messages.push(Message::user(question));
//!     let inputs = ChatInputs {
//!         bos_token: text(tokenizer.bos()),
//!         eos_token: text(tokenizer.eos()),
//!         ..ChatInputs::new(&messages)
//!     };
//!     let prompt = tokenizer.encode_prompt(&template.render(&inputs)?);
//!     let kept = session.cache().keep(&prompt);
//!     let mut answer = String::new();
//!     for piece in session.generate(&prompt[kept..], &mut sampler)?.stop(["\nuser:"]).max_tokens(16) {
//!         let piece = piece?;
//!         print!("{}", piece.text);
//!         answer += &piece.text;
//!     }
//!     messages.push(Message::assistant(answer));
//! }
//! # Ok(())
//! # }
//! ```

mod conversation;
mod error;
mod python;
mod time;
pub mod tools;
mod translate;
mod user_text;

use crate::clock::Timer;
use crate::system::HAS_THREADS;
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, json};
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

pub use conversation::{Adjustment, Rendered};
pub use error::ChatError;
pub use time::LocalTime;
use tools::ToolFormat;
pub use user_text::render_guarded;

/// Longest template, in bytes. The longest published ones have about 20 kB.
const MAX_SOURCE: usize = 256 << 10;
/// Maximum number of virtual-machine steps of one rendering. A message takes a template some
/// hundred.
const MAX_STEPS: u64 = 2_000_000;
/// Longest time to parse, and to render unless another is set. A long conversation takes some ten
/// milliseconds.
const MAX_TIME: Duration = Duration::from_secs(10);
/// Interval at which cancellation is checked.
const LOOK: Duration = Duration::from_millis(20);
/// Maximum number of bytes that one rendering makes, unless another limit is set.
const MAX_MEMORY: usize = 1 << 30;
/// Longest rendering, in bytes.
const MAX_OUTPUT: usize = 64 << 20;
/// Deepest recursion of macros and loops.
const MAX_RECURSION: usize = 100;
/// Stack size for parsing and rendering. The engine recurses where expressions nest, which is
/// bounded by [`MAX_SOURCE`], and where values nest, which is bounded by [`MAX_STEPS`]. Only the
/// part used takes memory.
const STACK: usize = 256 << 20;
/// Name of the only template in the environment.
const NAME: &str = "chat";

/// One message of a conversation, in the common layout; [`ChatInputs::messages`] accepts any other
/// JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user`, `assistant` or another role that the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
        }
    }

    /// A message of the role `system`.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// A message of the role `user`.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// A message of the role `assistant`.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }
}

/// Inputs of a template.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatInputs {
    /// The conversation, an array of objects.
    pub messages: serde_json::Value,
    /// Descriptions of tools, an array in the OpenAI form.
    pub tools: Option<serde_json::Value>,
    /// Whether the prompt ends with the start of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Text of the beginning-of-sequence token.
    pub bos_token: String,
    /// Text of the end-of-sequence token.
    pub eos_token: String,
    /// Additional variables, such as `enable_thinking`; they may replace those above.
    pub kwargs: Map<String, serde_json::Value>,
    /// Current time for `strftime_now`; if `None`, the clock's, in UTC, since the standard library
    /// knows no time zones.
    pub now: Option<LocalTime>,
}

impl ChatInputs {
    /// A conversation that the assistant should continue, without tools.
    pub fn new(messages: &[Message]) -> Self {
        let message = |m: &Message| json!({"role": m.role, "content": m.content});
        Self {
            messages: messages.iter().map(message).collect(),
            tools: None,
            add_generation_prompt: true,
            bos_token: String::new(),
            eos_token: String::new(),
            kwargs: Map::new(),
            now: None,
        }
    }
}

/// A parsed template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    env: Environment<'static>,
    max_time: Duration,
    max_memory: usize,
    source: Arc<str>,
}

impl ChatTemplate {
    /// Parses a template, such as the metadata value `tokenizer.chat_template`.
    ///
    /// # Errors
    /// [`ChatError::Syntax`] with the line, [`ChatError::TooLong`], [`ChatError::OutOfTime`].
    pub fn parse(source: &str) -> Result<Self, ChatError> {
        if source.len() > MAX_SOURCE {
            return Err(ChatError::TooLong {
                len: source.len(),
                limit: MAX_SOURCE,
            });
        }
        let given: Arc<str> = source.into();
        // As in Jinja2; Rust's end of a last line is kept.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let env = on_own_thread(
            MAX_TIME,
            || false,
            move || {
                let translated = translate::translate(&source);
                let mut env = Environment::new();
                python::add_to(&mut env);
                env.set_trim_blocks(true);
                env.set_lstrip_blocks(true);
                env.set_recursion_limit(MAX_RECURSION);
                env.set_fuel(Some(MAX_STEPS));
                let (dialect, fault) = match translated {
                    Ok(dialect) => (dialect, None),
                    // The engine's own message is better, if it finds a fault, too.
                    Err(fault) => (source, Some(fault)),
                };
                env.add_template_owned(NAME, dialect)
                    .map_err(|e| ChatError::Syntax {
                        line: e.line().unwrap_or(0),
                        message: e
                            .detail()
                            .map_or_else(|| e.kind().to_string(), str::to_owned),
                    })?;
                match fault {
                    Some(fault) => Err(ChatError::Syntax {
                        line: fault.line,
                        message: fault.message,
                    }),
                    None => Ok(env),
                }
            },
        )?;
        Ok(Self {
            env,
            max_time: MAX_TIME,
            max_memory: MAX_MEMORY,
            source: given,
        })
    }

    /// Sets the longest time that a rendering may take, ten seconds before.
    pub fn set_max_time(&mut self, max_time: Duration) {
        self.max_time = max_time;
    }

    /// Sets the most bytes of all values together that a rendering may make, 1 GiB before.
    pub fn set_max_memory(&mut self, max_memory: usize) {
        self.max_memory = max_memory;
    }

    /// Renders a conversation without changes.
    ///
    /// # Errors
    /// [`ChatError::Raised`] if the template refuses the conversation, [`ChatError::Render`] if the
    /// template fails, [`ChatError::OutOfSteps`], [`ChatError::OutOfTime`],
    /// [`ChatError::OutOfMemory`] and [`ChatError::OutputTooLong`] at the limits.
    pub fn render(&self, inputs: &ChatInputs) -> Result<String, ChatError> {
        self.render_unless(inputs, || false)
    }

    /// Renders a conversation. If the template refuses it, or leaves out its system messages or its
    /// tools, the conversation is changed as little as possible until the template accepts it.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], of the conversation as it is.
    pub fn render_fitted(&self, inputs: &ChatInputs) -> Result<Rendered, ChatError> {
        self.render_fitted_unless(inputs, || false)
    }

    /// [`ChatTemplate::render_fitted`] that stops once `cancelled` returns `true`.
    ///
    /// # Errors
    /// As [`ChatTemplate::render_fitted`], and [`ChatError::Cancelled`].
    pub fn render_fitted_unless(
        &self,
        inputs: &ChatInputs,
        cancelled: impl Fn() -> bool,
    ) -> Result<Rendered, ChatError> {
        let mut inputs = inputs.clone();
        conversation::prepare(&mut inputs, &self.source);
        let format = ToolFormat::of(&self.source);
        let begun = Timer::start();
        conversation::fit(&inputs, format, |inputs| {
            let left = self.max_time.saturating_sub(begun.elapsed());
            self.render_within(inputs, left, &cancelled)
        })
    }

    /// [`ChatTemplate::render`] that stops once `cancelled` returns `true`; it is called every few
    /// milliseconds.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], and [`ChatError::Cancelled`].
    pub fn render_unless(
        &self,
        inputs: &ChatInputs,
        cancelled: impl Fn() -> bool,
    ) -> Result<String, ChatError> {
        self.render_within(inputs, self.max_time, cancelled)
    }

    fn render_within(
        &self,
        inputs: &ChatInputs,
        max_time: Duration,
        cancelled: impl Fn() -> bool,
    ) -> Result<String, ChatError> {
        let now = inputs.now.unwrap_or_else(LocalTime::now_utc);
        let mut env = self.env.clone();
        env.add_function("strftime_now", move |format: &str| now.strftime(format));
        let mut variables = Map::new();
        let tools = inputs.tools.clone().unwrap_or(serde_json::Value::Null);
        variables.insert("messages".into(), inputs.messages.clone());
        variables.insert("tools".into(), tools);
        variables.insert("documents".into(), serde_json::Value::Null);
        variables.insert(
            "add_generation_prompt".into(),
            inputs.add_generation_prompt.into(),
        );
        variables.insert("bos_token".into(), inputs.bos_token.clone().into());
        variables.insert("eos_token".into(), inputs.eos_token.clone().into());
        variables.extend(inputs.kwargs.clone());

        let max_memory = self.max_memory;
        on_own_thread(max_time, cancelled, move || {
            python::begin(max_memory);
            let mut out = Bounded {
                bytes: Vec::new(),
                exceeded: false,
            };
            let variables = python::from_json(serde_json::Value::Object(variables));
            let done = env
                .get_template(NAME)
                .and_then(|t| t.render_captured_to(variables, &mut out).map(drop));
            if out.exceeded {
                return Err(ChatError::OutputTooLong { limit: MAX_OUTPUT });
            }
            done.map_err(|e| explain(&e))?;
            // Only whole strings are written.
            Ok(String::from_utf8_lossy(&out.bytes).into_owned())
        })
    }
}

/// Runs `f` on a thread with [`STACK`]; the thread is abandoned if it takes more than `max_time` or
/// is `cancelled`; a panic of the engine becomes an error. Without threads it runs here, within the
/// limits of steps and memory.
fn on_own_thread<T: Send + 'static>(
    max_time: Duration,
    cancelled: impl Fn() -> bool,
    f: impl FnOnce() -> Result<T, ChatError> + Send + 'static,
) -> Result<T, ChatError> {
    if !HAS_THREADS {
        return f();
    }
    let failed = |message: String| ChatError::Render { line: 0, message };
    let (send, receive) = sync_channel(1);
    std::thread::Builder::new()
        .name("chat template".into())
        .stack_size(STACK)
        // The result of an abandoned thread is dropped.
        .spawn(move || drop(send.send(f())))
        .map_err(|e| failed(format!("no thread for the template: {e}")))?;
    let start = Timer::start();
    loop {
        match receive.recv_timeout(LOOK) {
            Ok(outcome) => return outcome,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(failed("the template engine panicked".into()));
            }
            Err(RecvTimeoutError::Timeout) if cancelled() => return Err(ChatError::Cancelled),
            Err(RecvTimeoutError::Timeout) if start.elapsed() > max_time => {
                return Err(ChatError::OutOfTime { limit: max_time });
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// A buffer that refuses to grow past [`MAX_OUTPUT`].
struct Bounded {
    bytes: Vec<u8>,
    exceeded: bool,
}

impl Write for Bounded {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + data.len() > MAX_OUTPUT {
            self.exceeded = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Converts an error of the engine.
fn explain(error: &minijinja::Error) -> ChatError {
    let mut source = Some(error as &(dyn std::error::Error + 'static));
    while let Some(e) = source {
        if let Some(raised) = e.downcast_ref::<python::Raised>() {
            return ChatError::Raised(raised.0.to_string());
        }
        if let Some(python::TooMuch(limit)) = e.downcast_ref() {
            return ChatError::OutOfMemory {
                limit: *limit as u64,
            };
        }
        if e.downcast_ref::<minijinja::Error>()
            .is_some_and(|e| e.kind() == ErrorKind::OutOfFuel)
        {
            return ChatError::OutOfSteps { steps: MAX_STEPS };
        }
        source = e.source();
    }
    ChatError::Render {
        line: error.line().unwrap_or(0),
        message: match error.detail() {
            Some(detail) => format!("{}: {detail}", error.kind()),
            None => error.kind().to_string(),
        },
    }
}
