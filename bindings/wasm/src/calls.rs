//! The calls of the library: a model, its sessions, and an answer under way.

use crate::failure::Failure;
use crate::fields::Fields;
use crate::tools::Reader;
use ruvllm::arch::Arch;
use ruvllm::chat::{ChatInputs, ChatTemplate, LocalTime};
use ruvllm::engine::{AdapterId, SessionOptions};
use ruvllm::gguf::Gguf;
use ruvllm::grammar::{Grammar, TokenTrie};
use ruvllm::lora::Adapter;
use ruvllm::model::OpenOptions;
use ruvllm::sample::TokenMask;
use ruvllm::{Generation, Sampler, StopReason, Tokenizer};
use ruvllm_learn::{Learner, LearnerOptions, Learning};
use serde_json::{Value, json};
use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;

/// Most tokens of a prompt that are computed at a time: between two calls a signal may come.
const BATCH: usize = 64;
/// Most bytes of the values of a chat template.
const TEMPLATE_BYTES: usize = 64 << 20;

/// A model and what is made of it once.
pub(crate) struct Model {
    model: ruvllm::Model,
    /// The texts of the tokens, for grammars.
    trie: Rc<OnceCell<TokenTrie>>,
}

fn tokenizer_of(model: &ruvllm::Model) -> Result<&Arc<Tokenizer>, Failure> {
    model
        .tokenizer()
        .ok_or_else(|| Failure::new("ModelError", "the file has no tokenizer"))
}

impl Model {
    pub(crate) fn open(file: Vec<u8>, options: &str) -> Result<Model, Failure> {
        let mut fields = Fields::parse(options)?;
        let mut options = OpenOptions::new();
        if let Some(level) = fields.text("level")? {
            options = options.arch(Arch::named(&level).map_err(Failure::of("OptionsError"))?);
        }
        fields.finish()?;
        let gguf = Gguf::from_bytes(file).map_err(Failure::of("ModelError"))?;
        let model = options.open_gguf(gguf).map_err(Failure::of("ModelError"))?;
        let trie = Rc::new(OnceCell::new());
        Ok(Model { model, trie })
    }

    pub(crate) fn info(&self) -> String {
        let (model, h) = (&self.model, self.model.hparams());
        json!({
            "architecture": h.arch,
            "n_params": model.n_params(),
            "n_ctx_train": h.n_ctx_train,
            "n_vocab": h.n_vocab,
            "n_embd": h.n_embd,
            "type": model.main_type().to_string(),
            "level": model.arch().name(),
            "chat_template": model.chat_template(),
        })
        .to_string()
    }

    pub(crate) fn tokenize(&self, text: &str) -> Result<Vec<u32>, Failure> {
        Ok(tokenizer_of(&self.model)?.encode_prompt(text))
    }

    pub(crate) fn detokenize(&self, tokens: &[u32]) -> Result<String, Failure> {
        tokenizer_of(&self.model)?
            .decode_lossy(tokens, true)
            .map_err(Failure::of("ModelError"))
    }

    pub(crate) fn embed(&self, texts: &[String]) -> Result<Vec<Vec<f32>>, Failure> {
        let failed = Failure::of("SessionError");
        let embedder = self.model.embedder().map_err(&failed)?.n_batch(BATCH);
        embedder.embed(texts).map_err(&failed)
    }

    pub(crate) fn session(&self, options: &str) -> Result<Session, Failure> {
        let mut fields = Fields::parse(options)?;
        let mut options = SessionOptions {
            n_ctx: fields.size("n_ctx")?,
            context_shift: fields.size("context_shift")?,
            n_batch: BATCH,
            ..Default::default()
        };
        if let Some(name) = fields.text("kv_type")? {
            let kv_type = name.parse();
            options.kv_type =
                kv_type.map_err(|e| Failure::new("OptionsError", format!("kv_type {name:?}: {e}")))?;
        }
        options.exact = fields.flag("exact")?.unwrap_or(false);
        fields.finish()?;
        let session = self.model.session_with(&options);
        Ok(Session {
            state: State::Idle(Box::new(session.map_err(Failure::of("SessionError"))?)),
            model: self.model.clone(),
            trie: self.trie.clone(),
            adapters: Vec::new(),
            outcome: Outcome::default(),
            reader: None,
        })
    }
}

/// What a session is doing.
enum State {
    Idle(Box<ruvllm::Session>),
    /// Computing the tokens of a prompt, from the given one on.
    Prompt(Box<Begun>, usize),
    Answer(Box<Generation>),
    /// Only while another state is made of it.
    Changing,
}

/// A request whose prompt is not computed yet.
struct Begun {
    session: ruvllm::Session,
    sampler: Sampler,
    tokens: Vec<u32>,
    max_tokens: usize,
    stop: Vec<String>,
}

/// What became of a request.
#[derive(Default)]
struct Outcome {
    n_prompt: usize,
    n_cached: usize,
    n_computed: usize,
    n_generated: usize,
    reason: Option<&'static str>,
}

/// A session and the request it answers.
pub(crate) struct Session {
    state: State,
    model: ruvllm::Model,
    trie: Rc<OnceCell<TokenTrie>>,
    adapters: Vec<AdapterId>,
    outcome: Outcome,
    reader: Option<Reader>,
}

/// The prompt of a request.
struct Prompt {
    text: String,
    /// Whether it is all that the session is to hold, or comes after what it holds.
    whole: bool,
    template: String,
}

impl Session {
    /// The session itself, which must not be busy.
    fn idle(&mut self) -> Result<&mut ruvllm::Session, Failure> {
        match &mut self.state {
            State::Idle(session) => Ok(session),
            _ => Err(Failure::new(
                "SessionError",
                "the session is generating; end that first, or take another session",
            )),
        }
    }

    pub(crate) fn begin(&mut self, request: &str) -> Result<(), Failure> {
        self.idle()?;
        let mut fields = Fields::parse(request)?;
        let tools = fields.value("tools");
        let choice = fields.value("tool_choice");
        let prompt = self.prompt(&mut fields, tools.as_ref())?;
        let mut sampler = fields.sampler()?;
        let max_tokens = fields.size("max_tokens")?.unwrap_or(usize::MAX);
        let stop = fields.texts("stop")?;
        let mask = self.mask(&mut fields)?;
        fields.finish()?;
        let tokenizer = tokenizer_of(&self.model)?.clone();
        self.reader = None;
        match (tools, mask) {
            (Some(_), Some(_)) => {
                return Err(Failure::new("OptionsError", "tools and a format of the answer exclude each other"));
            }
            (Some(tools), None) => {
                let (reader, mask) = Reader::new(
                    &tokenizer,
                    self.trie()?,
                    &prompt.template,
                    &tools,
                    choice.as_ref(),
                    &prompt.text,
                )?;
                self.reader = Some(reader);
                sampler.set_mask(Some(Box::new(mask)));
            }
            (None, mask) => sampler.set_mask(mask),
        }
        let session = self.idle()?;
        let (tokens, n_cached) = if prompt.whole {
            let tokens = tokenizer.encode_prompt(&prompt.text);
            let kept = session.keep(&tokens);
            (tokens[kept..].to_vec(), kept)
        } else {
            let tokens = match session.tokens().last() {
                Some(&last) => tokenizer.encode_continuation(&prompt.text, last),
                None => tokenizer.encode_prompt(&prompt.text),
            };
            (tokens, session.position())
        };
        let State::Idle(session) = std::mem::replace(&mut self.state, State::Changing) else {
            unreachable!("checked above")
        };
        self.outcome = Outcome {
            n_prompt: tokens.len(),
            n_cached,
            ..Outcome::default()
        };
        let begun = Begun {
            session: *session,
            sampler,
            tokens,
            max_tokens,
            stop,
        };
        self.state = State::Prompt(Box::new(begun), 0);
        Ok(())
    }

    /// The text of the field `prompt`, or the rendered `messages`.
    fn prompt(&self, fields: &mut Fields, tools: Option<&Value>) -> Result<Prompt, Failure> {
        let failed = Failure::of("ChatError");
        let now = fields.text("now")?;
        let kwargs = fields.value("chat_template_kwargs");
        let given = fields.text("chat_template")?;
        let messages = match (fields.text("prompt")?, fields.value("messages")) {
            (Some(text), None) if tools.is_none() => {
                return Ok(Prompt {
                    text,
                    whole: false,
                    template: String::new(),
                });
            }
            (None, Some(messages)) => messages,
            _ => return Err(Failure::new("OptionsError", "a request has either a prompt or messages; tools go with messages")),
        };
        let Some(template) = given.or_else(|| self.model.chat_template().map(str::to_owned)) else {
            return Err(Failure::new("ChatError", "the file has no chat template; pass one as chat_template"));
        };
        let mut parsed = ChatTemplate::parse(&template).map_err(&failed)?;
        parsed.set_max_memory(TEMPLATE_BYTES);
        let tokenizer = tokenizer_of(&self.model)?;
        let text_of = |token: Option<u32>| {
            let text = token.and_then(|token| tokenizer.token_text(token));
            String::from_utf8_lossy(text.unwrap_or_default()).into_owned()
        };
        let inputs = ChatInputs {
            messages,
            tools: tools.cloned(),
            bos_token: text_of(tokenizer.bos()),
            eos_token: text_of(tokenizer.eos()),
            kwargs: match kwargs {
                Some(Value::Object(map)) => map,
                _ => Default::default(),
            },
            now: match now {
                Some(now) => Some(now.parse::<LocalTime>().map_err(&failed)?),
                None => None,
            },
            ..ChatInputs::new(&[])
        };
        let text = parsed.render_fitted(&inputs).map_err(&failed)?.text;
        Ok(Prompt {
            text,
            whole: true,
            template,
        })
    }

    fn trie(&self) -> Result<&TokenTrie, Failure> {
        if self.trie.get().is_none() {
            let trie = self.model.token_trie().map_err(Failure::of("GrammarError"))?;
            let _ = self.trie.set(trie);
        }
        Ok(self.trie.get().expect("just made"))
    }

    /// What the answer has to obey: `response_format` as in the OpenAI API, llama.cpp's
    /// `json_schema` and `grammar`, or `regex`.
    fn mask(&self, fields: &mut Fields) -> Result<Option<Box<dyn TokenMask>>, Failure> {
        let failed = Failure::of("GrammarError");
        let mut schema = fields.value("json_schema");
        let mut any_json = false;
        if let Some(format) = fields.value("response_format") {
            match format["type"].as_str() {
                Some("json_schema") => schema = Some(format["json_schema"]["schema"].clone()),
                Some("json_object") => any_json = true,
                Some("text") => (),
                _ => {
                    return Err(Failure::new(
                        "OptionsError",
                        format!("response_format: {format} has none of the types text, json_object, json_schema"),
                    ));
                }
            }
        }
        let (gbnf, regex) = (fields.text("grammar")?, fields.text("regex")?);
        let grammar = match (schema, any_json, gbnf, regex) {
            (None, false, None, None) => return Ok(None),
            (Some(schema), false, None, None) => Grammar::json_schema(self.trie()?, &schema.to_string()),
            (None, true, None, None) => Grammar::json(self.trie()?),
            (None, false, Some(gbnf), None) => Grammar::gbnf(self.trie()?, &gbnf),
            (None, false, None, Some(regex)) => Grammar::regex(self.trie()?, &regex),
            _ => return Err(Failure::new("OptionsError", "an answer obeys one format: json_schema, response_format, grammar or regex")),
        };
        Ok(Some(Box::new(grammar.map_err(&failed)?.matcher())))
    }

    pub(crate) fn advance(&mut self) -> Result<Option<String>, Failure> {
        let done = match &mut self.state {
            State::Prompt(begun, at) if begun.tokens.len() - *at > BATCH => {
                let tokens = &begun.tokens[*at..][..BATCH];
                match begun.session.prefill(tokens) {
                    Ok(()) => {
                        *at += BATCH;
                        self.outcome.n_computed = *at;
                        return Ok(Some(String::new()));
                    }
                    Err(e) => Err(Failure::of("SessionError")(e)),
                }
            }
            State::Prompt(..) => {
                self.answer();
                Ok(())
            }
            State::Answer(_) => Ok(()),
            _ => return Ok(None),
        };
        let piece = done.and_then(|()| self.piece());
        if !matches!(piece, Ok(Some(_))) {
            self.end();
        }
        piece
    }

    /// Begins the answer with the rest of the prompt.
    fn answer(&mut self) {
        if let State::Prompt(begun, at) = std::mem::replace(&mut self.state, State::Changing) {
            let Begun {
                session,
                sampler,
                tokens,
                max_tokens,
                stop,
            } = *begun;
            let generation = session
                .into_generation_from(&tokens[at..], sampler)
                .max_tokens(max_tokens)
                .stop(stop);
            self.outcome.n_computed = tokens.len();
            self.state = State::Answer(Box::new(generation));
        }
    }

    /// The next piece of the answer.
    fn piece(&mut self) -> Result<Option<String>, Failure> {
        let State::Answer(generation) = &mut self.state else {
            return Ok(None);
        };
        let piece = generation.next().transpose().map_err(Failure::of("SessionError"))?;
        self.outcome.n_generated = generation.tokens().len();
        let ended = generation.finish().map(|finish| finish.reason);
        self.outcome.reason = ended.map(|reason| match reason {
            StopReason::EndOfGeneration | StopReason::StopString => "stop",
            StopReason::MaxTokens | StopReason::ContextFull => "length",
            StopReason::MaskLimit => "grammar",
            _ => "cancelled",
        });
        let Some(reader) = &mut self.reader else {
            return Ok(piece.map(|piece| piece.text));
        };
        let mut text = reader.read(generation.tokens())?;
        if piece.is_none() {
            text += &reader.finish();
            let (calls, _) = reader.calls();
            if calls.as_array().is_some_and(|calls| !calls.is_empty()) {
                self.outcome.reason = Some("tool_calls");
            }
            // What was held back, then the end.
            if !text.is_empty() {
                return Ok(Some(text));
            }
        }
        Ok(piece.map(|_| text))
    }

    pub(crate) fn status(&self) -> String {
        let position = match &self.state {
            State::Idle(session) => session.position(),
            State::Prompt(begun, _) => begun.session.position(),
            State::Answer(generation) => generation.session().position(),
            State::Changing => 0,
        };
        let calls = self.reader.as_ref().map(Reader::calls);
        json!({
            "prompt_tokens": self.outcome.n_prompt,
            "cached_tokens": self.outcome.n_cached,
            "computed_tokens": self.outcome.n_computed,
            "completion_tokens": self.outcome.n_generated,
            "finish_reason": self.outcome.reason,
            "tool_calls": calls.as_ref().map(|(calls, _)| calls),
            "reasoning_content": calls.as_ref().map(|(_, reasoning)| reasoning),
            "n_past": position,
        })
        .to_string()
    }

    pub(crate) fn end(&mut self) {
        self.state = match std::mem::replace(&mut self.state, State::Changing) {
            State::Prompt(begun, _) => State::Idle(Box::new(begun.session)),
            State::Answer(generation) => State::Idle(Box::new(generation.into_parts().0)),
            other => other,
        };
    }

    pub(crate) fn save(&mut self) -> Result<Vec<u8>, Failure> {
        self.idle()?.to_bytes().map_err(Failure::of("SessionError"))
    }

    pub(crate) fn load(&mut self, bytes: Vec<u8>) -> Result<(), Failure> {
        self.idle()?.load_bytes(bytes).map_err(Failure::of("SessionError"))
    }

    pub(crate) fn clear(&mut self) -> Result<(), Failure> {
        self.idle()?.clear();
        Ok(())
    }

    pub(crate) fn attach(&mut self, file: Vec<u8>, scale: f32) -> Result<u32, Failure> {
        let failed = Failure::of("AdapterError");
        let adapter = Adapter::from_bytes(file, &self.model).map_err(&failed)?;
        let id = self.idle()?.attach(Arc::new(adapter), scale).map_err(&failed)?;
        self.adapters.push(id);
        Ok(self.adapters.len() as u32 - 1)
    }

    pub(crate) fn detach(&mut self, adapter: u32) -> Result<(), Failure> {
        let Some(&id) = self.adapters.get(adapter as usize) else {
            return Err(Failure::new("AdapterError", format!("there is no adapter {adapter}")));
        };
        self.idle()?.detach(id).map_err(Failure::of("AdapterError"))?;
        Ok(())
    }

    /// Losses of the text before and while it is learnt, in nats.
    pub(crate) fn learn(&mut self, text: &str) -> Result<String, Failure> {
        let failed = Failure::of("SessionError");
        let tokens = tokenizer_of(&self.model)?.encode(text, true, false);
        let model = self.model.clone();
        let session = self.idle()?;
        if session.learner().is_none() {
            let learner = Learner::new(&model, &LearnerOptions::default()).map_err(&failed)?;
            session.set_learner(learner).map_err(&failed)?;
        }
        let losses = session.observe(&tokens).map_err(&failed)?;
        Ok(json!({"tokens": tokens.len(), "base": losses.base, "learnt": losses.mixture}).to_string())
    }
}
