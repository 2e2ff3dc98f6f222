//! The calls of the library: a model, its sessions, and an answer under way.

use crate::failure::Failure;
use crate::fields::Fields;
use crate::reader::Reader;
use crate::request::{Prompt, Request};
use ruvllm::arch::Arch;
use ruvllm::engine::{AdapterId, EngineOptions};
use ruvllm::gguf::Gguf;
use ruvllm::grammar::TokenTrie;
use ruvllm::lora::Adapter;
use ruvllm::model::OpenOptions;
use ruvllm::{Embedder, Engine, Generation, Sampler, SessionOptions, StopReason, Tokenizer};
use ruvllm_learn::{Learner, LearnerOptions, Learning};
use serde_json::json;
use std::cell::OnceCell;
use std::num::NonZeroUsize;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

/// Most tokens of a prompt that are computed at a time: between two calls a signal may come.
const BATCH: usize = 64;

/// A model and what is made of it once.
#[derive(Clone)]
pub(crate) struct Model {
    engine: Engine,
    /// The texts of the tokens, for grammars.
    trie: Rc<OnceCell<TokenTrie>>,
}

impl Deref for Model {
    type Target = ruvllm::Model;

    fn deref(&self) -> &ruvllm::Model {
        self.engine.model()
    }
}

pub(crate) fn tokenizer_of(model: &ruvllm::Model) -> Result<&Arc<Tokenizer>, Failure> {
    let missing = || Failure::new("ModelError", "the file has no tokenizer");
    model.tokenizer().ok_or_else(missing)
}

impl Model {
    pub(crate) fn open(file: Vec<u8>, options: &str) -> Result<Model, Failure> {
        let mut fields = Fields::parse(options)?;
        let mut options = OpenOptions::new();
        if let Some(level) = fields.text("level")? {
            options = options.arch(Arch::named(&level).map_err(Failure::of("OptionsError"))?);
        }
        let of_engine = EngineOptions {
            n_threads: fields.size("threads")?.and_then(NonZeroUsize::new),
            ..Default::default()
        };
        fields.finish()?;
        let gguf = Gguf::from_bytes(file).map_err(Failure::of("ModelError"))?;
        let model = options.open_gguf(gguf).map_err(Failure::of("ModelError"))?;
        let engine = Engine::new(&model, &of_engine).map_err(Failure::of("EngineError"))?;
        let trie = Rc::new(OnceCell::new());
        Ok(Model { engine, trie })
    }

    pub(crate) fn info(&self) -> String {
        let h = self.hparams();
        json!({
            "architecture": h.arch,
            "n_params": self.n_params(),
            "n_ctx_train": h.n_ctx_train,
            "n_vocab": h.n_vocab,
            "n_embd": h.n_embd,
            "type": self.main_type().to_string(),
            "level": self.arch().name(),
            "threads": self.engine.n_threads(),
            "chat_template": self.chat_template(),
        })
        .to_string()
    }

    pub(crate) fn tokenize(&self, text: &str) -> Result<Vec<u32>, Failure> {
        Ok(tokenizer_of(self)?.encode_prompt(text))
    }

    pub(crate) fn detokenize(&self, tokens: &[u32]) -> Result<String, Failure> {
        let text = tokenizer_of(self)?.decode_lossy(tokens, true);
        text.map_err(Failure::of("ModelError"))
    }

    pub(crate) fn embed(&self, texts: &[String]) -> Result<Vec<Vec<f32>>, Failure> {
        let embedder = Embedder::new(&self.engine).map_err(Failure::of("SessionError"))?;
        let vectors = embedder.n_batch(BATCH).embed(texts);
        vectors.map_err(Failure::of("SessionError"))
    }

    /// The texts of the tokens.
    pub(crate) fn trie(&self) -> Result<&TokenTrie, Failure> {
        if let Some(trie) = self.trie.get() {
            return Ok(trie);
        }
        let trie = self.token_trie().map_err(Failure::of("GrammarError"))?;
        Ok(self.trie.get_or_init(|| trie))
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
            let refused = |e| Failure::new("OptionsError", format!("kv_type {name:?}: {e}"));
            options.kv_type = name.parse().map_err(refused)?;
        }
        options.exact = fields.flag("exact")?.unwrap_or(false);
        fields.finish()?;
        let session = self.engine.session_with(&options);
        Ok(Session {
            state: State::Idle(Box::new(session.map_err(Failure::of("SessionError"))?)),
            model: self.clone(),
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
    model: Model,
    adapters: Vec<AdapterId>,
    outcome: Outcome,
    reader: Option<Reader>,
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
        let n_ctx = self.idle()?.sequence().n_ctx();
        let request = Request::parse(request, &self.model, n_ctx)?;
        let tokenizer = tokenizer_of(&self.model)?.clone();
        let session = self.idle()?;
        let (tokens, n_cached) = match request.prompt {
            Prompt::Whole(tokens) => {
                let kept = session.cache().keep(&tokens);
                (tokens[kept..].to_vec(), kept)
            }
            Prompt::Text(text) => {
                let tokens = match session.tokens().last() {
                    Some(&last) => tokenizer.encode_continuation(&text, last),
                    None => tokenizer.encode_prompt(&text),
                };
                (tokens, session.position())
            }
        };
        // A prompt that does not fit is refused as a whole.
        let fits = session.cache().reuse(&tokens);
        fits.map_err(Failure::of("SessionError"))?;
        let State::Idle(session) = std::mem::replace(&mut self.state, State::Changing) else {
            unreachable!("`idle` has seen it")
        };
        self.outcome = Outcome {
            n_prompt: tokens.len(),
            n_cached,
            ..Outcome::default()
        };
        self.reader = request.reader;
        let begun = Begun {
            session: *session,
            sampler: request.sampler,
            tokens,
            max_tokens: request.max_tokens,
            stop: request.stop,
        };
        self.state = State::Prompt(Box::new(begun), 0);
        Ok(())
    }

    pub(crate) fn advance(&mut self) -> Result<Option<String>, Failure> {
        let done = match &mut self.state {
            State::Prompt(begun, at) if begun.tokens.len() - *at > BATCH => {
                match begun.session.prefill(&begun.tokens[*at..][..BATCH]) {
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
            let generation = session.into_generation(&tokens[at..], sampler);
            let generation = generation.max_tokens(max_tokens).stop(stop);
            self.outcome.n_computed = tokens.len();
            self.state = State::Answer(Box::new(generation));
        }
    }

    /// The next piece of the answer.
    fn piece(&mut self) -> Result<Option<String>, Failure> {
        let State::Answer(generation) = &mut self.state else {
            return Ok(None);
        };
        let piece = generation.next().transpose();
        let piece = piece.map_err(Failure::of("SessionError"))?;
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
        if reader.has_stopped() {
            self.outcome.reason = Some("stop");
        } else if piece.is_some() {
            return Ok(Some(text));
        } else {
            text += &reader.finish(self.outcome.reason != Some("stop"));
        }
        if !reader.calls().is_empty() {
            self.outcome.reason = Some("tool_calls");
        }
        self.end();
        Ok((!text.is_empty()).then_some(text))
    }

    pub(crate) fn status(&self) -> String {
        let position = match &self.state {
            State::Idle(session) => session.position(),
            State::Prompt(begun, _) => begun.session.position(),
            State::Answer(generation) => generation.session().position(),
            State::Changing => 0,
        };
        json!({
            "prompt_tokens": self.outcome.n_prompt,
            "cached_tokens": self.outcome.n_cached,
            "computed_tokens": self.outcome.n_computed,
            "completion_tokens": self.outcome.n_generated,
            "finish_reason": self.outcome.reason,
            "tool_calls": self.reader.as_ref().map(Reader::calls),
            "reasoning_content": self.reader.as_ref().map(Reader::reasoning),
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
        let bytes = self.idle()?.state().to_bytes();
        bytes.map_err(Failure::of("SessionError"))
    }

    pub(crate) fn load(&mut self, bytes: Vec<u8>) -> Result<(), Failure> {
        let loaded = self.idle()?.cache().load_bytes(bytes);
        loaded.map_err(Failure::of("SessionError"))
    }

    pub(crate) fn clear(&mut self) -> Result<(), Failure> {
        self.idle()?.clear();
        Ok(())
    }

    pub(crate) fn attach(&mut self, file: Vec<u8>, scale: f32) -> Result<u32, Failure> {
        let failed = Failure::of("AdapterError");
        let adapter = Adapter::from_bytes(file, &self.model).map_err(&failed)?;
        let attached = self.idle()?.adapters().attach(Arc::new(adapter), scale);
        self.adapters.push(attached.map_err(&failed)?);
        Ok(self.adapters.len() as u32 - 1)
    }

    pub(crate) fn detach(&mut self, adapter: u32) -> Result<(), Failure> {
        let Some(&id) = self.adapters.get(adapter as usize) else {
            let message = format!("there is no adapter {adapter}");
            return Err(Failure::new("AdapterError", message));
        };
        let detached = self.idle()?.adapters().detach(id);
        detached.map(drop).map_err(Failure::of("AdapterError"))
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
        Ok(
            json!({"tokens": tokens.len(), "base": losses.base, "learnt": losses.mixture})
                .to_string(),
        )
    }
}
