//! `ruvllm batch`: a file of requests in the form of OpenAI's batches, computed side by side.

use super::generate::no_tokenizer;
use super::input::{on_interrupt, read_text};
use super::model::{ModelArgs, ResidenceArgs, SessionArgs};
use super::output::{Failure, Progress, note, paint, unix_time};
use super::sampling::SamplingArgs;
use ruvllm::exec::{Finish, KvType, Request, Schedule, ScheduleOptions, StopReason, Stream};
use ruvllm::lora::Adapter;
use ruvllm::model::Model;
use ruvllm::sample::TokenMask;
use ruvllm::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ruvllm batch -m model.gguf -f requests.jsonl -o results.jsonl
  ruvllm batch -m model.gguf -f requests.jsonl -o results.jsonl --parallel 32 -n 200 --temp 0

requests.jsonl, a request per line:
  {\"custom_id\": \"a\", \"method\": \"POST\", \"url\": \"/v1/completions\",
   \"body\": {\"prompt\": \"Ownership is\", \"max_tokens\": 32, \"temperature\": 0}}
  {\"custom_id\": \"b\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\",
   \"body\": {\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"seed\": 1}}

A result is written as soon as it is there, as a line of its own. Called again, the program goes on: requests whose \
custom_id is in the results already are skipped. What a request does not say is as the flags say; a key that is not \
understood fails that request alone. Exit code 1 if any failed.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    residence: ResidenceArgs,
    /// File of requests, one JSON object per line; - is stdin
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// File that results are appended to
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Sequences that are computed side by side [short: -np]
    #[arg(long, value_name = "N", default_value_t = 16, env = "LLAMA_ARG_N_PARALLEL", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    parallel: u32,
    /// Most tokens of an answer whose request does not say; -1 is as many as the context holds
    #[arg(short, long, alias = "predict", value_name = "N", default_value_t = -1, env = "LLAMA_ARG_N_PREDICT",
          allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..))]
    n_predict: i64,
    /// Jinja file to use instead of the model's chat template
    #[cfg(feature = "chat")]
    #[arg(long, value_name = "FILE", alias = "chat-template-file")]
    template: Option<PathBuf>,
    #[command(flatten)]
    session: SessionArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// A line of the file of requests.
struct Line {
    custom_id: String,
    url: String,
    body: Map<String, Value>,
}

/// The requests of a file; a line that is none is a failure, before anything is computed.
fn parse(path: &Path, text: &str) -> Result<Vec<Line>, Failure> {
    let mut ids = HashSet::new();
    let mut lines = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let fail = |what: String| Failure::Work(format!("{}, line {}: {what}", path.display(), i + 1));
        let mut object: Map<String, Value> = serde_json::from_str(line).map_err(|error| fail(error.to_string()))?;
        let mut take = |key: &str| match object.remove(key) {
            Some(Value::String(text)) => Ok(text),
            _ => Err(fail(format!("{key:?} is missing or no text"))),
        };
        let (custom_id, method, url) = (take("custom_id")?, take("method")?, take("url")?);
        if method != "POST" {
            return Err(fail(format!("method {method:?}, expected \"POST\"")));
        }
        let Some(Value::Object(body)) = object.remove("body") else {
            return Err(fail("\"body\" is missing or no object".into()));
        };
        if let Some(key) = object.keys().next() {
            return Err(fail(format!("{key:?} is not understood")));
        }
        if !ids.insert(custom_id.clone()) {
            return Err(fail(format!("custom_id {custom_id:?} occurs twice")));
        }
        lines.push(Line { custom_id, url, body });
    }
    Ok(lines)
}

/// The file of results, opened at its end, and the ids that are in it. A last line that was cut short is taken off.
fn results(path: &Path) -> Result<(File, HashSet<String>), Failure> {
    let fail = Failure::file(path);
    let old = if path.exists() { read_text(path)? } else { String::new() };
    let whole = old.rfind('\n').map_or(0, |end| end + 1);
    let mut ids = HashSet::new();
    for (i, line) in old[..whole].lines().enumerate() {
        let value: Value = serde_json::from_str(line).unwrap_or_default();
        let Some(id) = value["custom_id"].as_str() else {
            let what = "not a result of a batch, so nothing is appended; give another -o";
            return Err(Failure::Work(format!("{}, line {}: {what}", path.display(), i + 1)));
        };
        ids.insert(id.to_owned());
    }
    let file = OpenOptions::new().create(true).append(true).open(path).map_err(&fail)?;
    if whole < old.len() {
        file.set_len(whole as u64).map_err(&fail)?;
    }
    Ok((file, ids))
}

/// What all requests of a file share.
struct Batch<'a> {
    args: &'a Args,
    model: &'a Model,
    tokenizer: &'a Tokenizer,
    /// Of the flags.
    mask: Option<Box<dyn TokenMask>>,
    adapters: Vec<(Arc<Adapter>, f32)>,
    #[cfg(feature = "chat")]
    template: Option<ruvllm::chat::ChatTemplate>,
    #[cfg(feature = "grammar")]
    trie: std::cell::OnceCell<ruvllm::grammar::TokenTrie>,
}

/// Takes the values of a request's body, key by key, in words if one makes no sense.
struct Body(Map<String, Value>);

impl Body {
    /// The value of `key`, if it is there and not null.
    fn take<T>(&mut self, key: &str, expected: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>, String> {
        match self.0.remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match read(&value) {
                Some(read) => Ok(Some(read)),
                None => Err(format!("{key} is {value}, expected {expected}")),
            },
        }
    }

    fn number(&mut self, key: &str) -> Result<Option<f32>, String> {
        self.take(key, "a number", |value| value.as_f64().map(|x| x as f32))
    }

    /// A value that changes nothing.
    fn only(&mut self, key: &str, value: &Value) -> Result<(), String> {
        self.take(key, &value.to_string(), |found| (found == value).then_some(())).map(drop)
    }
}

fn stop_strings(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Array(texts) => texts.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
        _ => None,
    }
}

/// `{"15043": -100}`; −100 and less forbid a token, as OpenAI says.
fn logit_bias(value: &Value) -> Option<Vec<(u32, f32)>> {
    let one = |(id, bias): (&String, &Value)| {
        let bias = bias.as_f64()? as f32;
        Some((id.parse().ok()?, if bias <= -100.0 { f32::NEG_INFINITY } else { bias }))
    };
    value.as_object()?.iter().map(one).collect()
}

impl Batch<'_> {
    /// The request of a line, and the name of the model that it asks for.
    fn request(&self, url: &str, body: Map<String, Value>) -> Result<(Request, Value), String> {
        let mut body = Body(body);
        let name = body.0.remove("model").unwrap_or(Value::Null);
        let prompt = match url {
            "/v1/completions" => {
                let prompt = body.take("prompt", "a text", |value| value.as_str().map(str::to_owned))?;
                self.tokenizer.encode_prompt(&prompt.ok_or("prompt is missing")?)
            }
            "/v1/chat/completions" => self.chat(&mut body)?,
            _ => return Err(format!("url {url:?}, expected /v1/completions or /v1/chat/completions")),
        };
        let integer = |value: &Value| value.as_u64().map(|n| n as usize);
        let [max_tokens, max_completion] = [
            body.take("max_tokens", "a number of tokens", integer)?,
            body.take("max_completion_tokens", "a number of tokens", integer)?,
        ];
        let n_predict = usize::try_from(self.args.n_predict).unwrap_or(usize::MAX);
        let mut sampling = self.args.sampling.clone();
        sampling.temp = body.number("temperature")?.or(sampling.temp);
        sampling.top_p = body.number("top_p")?.or(sampling.top_p);
        sampling.presence_penalty = body.number("presence_penalty")?.unwrap_or(sampling.presence_penalty);
        sampling.frequency_penalty = body.number("frequency_penalty")?.unwrap_or(sampling.frequency_penalty);
        if let Some(seed) = body.take("seed", "0 to 2^64 - 1", Value::as_u64)? {
            sampling.set_seed(seed);
        }
        let bias = body.take("logit_bias", "an object of token ids and numbers", logit_bias)?;
        sampling.logit_bias.extend(bias.into_iter().flatten());
        let stop = body.take("stop", "a text or a list of texts", stop_strings)?.unwrap_or_default();
        let mask = self.mask(&mut body)?;
        body.only("n", &json!(1))?;
        body.only("stream", &json!(false))?;
        if let Some(key) = body.0.keys().next() {
            return Err(format!("{key:?} is not understood"));
        }
        let mut sampler = sampling.chain(self.model.gguf().metadata(), self.tokenizer).map_err(Failure::into_text)?;
        sampler.set_mask(mask.or_else(|| self.mask.clone()));
        let max_tokens = max_completion.or(max_tokens).unwrap_or(n_predict);
        let mut request = Request::new(prompt, sampler).max_tokens(max_tokens).stop(stop);
        for (adapter, scale) in &self.adapters {
            request = request.adapter(Arc::clone(adapter), *scale);
        }
        Ok((request, name))
    }

    #[cfg(feature = "chat")]
    fn chat(&self, body: &mut Body) -> Result<Vec<u32>, String> {
        use super::template::{bos_text, eos_text};
        let template = self.template.as_ref().ok_or("the model has no chat template; give one with --template FILE")?;
        let messages = body.take("messages", "a list", |value| value.is_array().then(|| value.clone()))?;
        let inputs = ruvllm::chat::ChatInputs {
            messages: messages.ok_or("messages is missing")?,
            add_generation_prompt: true,
            bos_token: bos_text(Some(self.tokenizer)),
            eos_token: eos_text(Some(self.tokenizer)),
            ..ruvllm::chat::ChatInputs::new(&[])
        };
        let text = template.render(&inputs).map_err(|error| error.to_string())?;
        Ok(self.tokenizer.encode_prompt(&text))
    }

    #[cfg(not(feature = "chat"))]
    fn chat(&self, _: &mut Body) -> Result<Vec<u32>, String> {
        Err("this build does without chat templates (feature chat)".into())
    }

    /// What `response_format` asks for.
    fn mask(&self, body: &mut Body) -> Result<Option<Box<dyn TokenMask>>, String> {
        let Some(format) = body.0.remove("response_format") else { return Ok(None) };
        let schema = match format["type"].as_str() {
            Some("text") => return Ok(None),
            Some("json_object") => json!({"type": "object"}),
            Some("json_schema") if format["json_schema"]["schema"].is_object() => {
                format["json_schema"]["schema"].clone()
            }
            _ => return Err(format!("response_format is {format}, expected text, json_object or json_schema")),
        };
        self.json(&schema)
    }

    #[cfg(feature = "grammar")]
    fn json(&self, schema: &Value) -> Result<Option<Box<dyn TokenMask>>, String> {
        use ruvllm::grammar::{Grammar, TokenTrie};
        if self.trie.get().is_none() {
            let trie = TokenTrie::new(self.tokenizer).map_err(|error| error.to_string())?;
            let _ = self.trie.set(trie);
        }
        let trie = self.trie.get().ok_or("no vocabulary for grammars")?;
        let grammar = Grammar::json_schema(trie, &schema.to_string()).map_err(|error| error.to_string())?;
        Ok(Some(Box::new(grammar.matcher())))
    }

    #[cfg(not(feature = "grammar"))]
    fn json(&self, _: &Value) -> Result<Option<Box<dyn TokenMask>>, String> {
        Err("this build does without grammars (feature grammar)".into())
    }
}

/// A request that is computed, and what came of it so far.
struct Running {
    custom_id: String,
    is_chat: bool,
    model: Value,
    stream: Stream,
    text: String,
}

impl Running {
    /// Takes what has come; the result's line once all has.
    fn line(&mut self) -> Option<Value> {
        loop {
            match self.stream.poll_next(&mut Context::from_waker(Waker::noop())) {
                Poll::Pending => return None,
                Poll::Ready(Some(Ok(piece))) => self.text.push_str(&piece.text),
                Poll::Ready(Some(Err(error))) => return Some(failed(&self.custom_id, 500, &error.to_string())),
                Poll::Ready(None) => return self.stream.finish().map(|finish| self.done(&finish)),
            }
        }
    }

    fn done(&self, finish: &Finish) -> Value {
        let reason = match finish.reason {
            StopReason::EndOfGeneration | StopReason::StopString => "stop",
            _ => "length",
        };
        let n_prompt = finish.n_prompt + finish.n_cached.total();
        let (object, choice) = if self.is_chat {
            let message = json!({"role": "assistant", "content": self.text});
            ("chat.completion", json!({"index": 0, "message": message, "finish_reason": reason}))
        } else {
            ("text_completion", json!({"index": 0, "text": self.text, "finish_reason": reason}))
        };
        json!({
            "id": format!("batch_req_{}", self.stream.id().0),
            "custom_id": self.custom_id,
            "response": {
                "status_code": 200,
                "request_id": format!("req_{}", self.stream.id().0),
                "body": {
                    "id": format!("cmpl-{}", self.stream.id().0),
                    "object": object,
                    "created": unix_time(),
                    "model": self.model,
                    "choices": [choice],
                    "usage": {
                        "prompt_tokens": n_prompt,
                        "completion_tokens": finish.n_generated,
                        "total_tokens": n_prompt + finish.n_generated,
                    },
                },
            },
            "error": null,
        })
    }
}

fn failed(custom_id: &str, status: u16, message: &str) -> Value {
    let kind = if status == 400 { "invalid_request_error" } else { "server_error" };
    json!({
        "id": null,
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": null, "body": {"error": {"message": message, "type": kind}}},
        "error": {"code": kind, "message": message},
    })
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let lines = parse(&args.file, &read_text(&args.file)?)?;
    let (mut file, done) = results(&args.output)?;
    let total = lines.len();
    let mut waiting = lines.into_iter().filter(|line| !done.contains(&line.custom_id)).collect::<Vec<_>>().into_iter();
    let n_skipped = total - waiting.len();

    let model = args.model.open(&args.residence)?;
    let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
    let options = args.session.for_model(&args.session.options(None, KvType::default()), &model);
    let adapters = args.session.lora.open(&model)?;
    let engine = args.session.engine(&model, !adapters.is_empty(), &options)?;
    let n_parallel = args.parallel as usize;
    let max_requests = 2 * n_parallel;
    let options = ScheduleOptions { session: options, n_parallel, max_requests, ..Default::default() };
    let mut schedule = Schedule::new(&engine, &options)?;
    let batch = Batch {
        args,
        model: &model,
        tokenizer,
        mask: args.sampling.mask(tokenizer)?,
        adapters,
        #[cfg(feature = "chat")]
        template: template(args, &model)?,
        #[cfg(feature = "grammar")]
        trie: std::cell::OnceCell::new(),
    };
    let interrupted = Arc::new(AtomicBool::new(false));
    let interrupt = Arc::clone(&interrupted);
    on_interrupt(move || interrupt.store(true, Ordering::Relaxed))?;

    let (start, progress) = (Instant::now(), Progress::new("requests", total as u64));
    let mut running = Vec::<Running>::new();
    let (mut n_failed, mut n_done, mut n_tokens) = (0, n_skipped, 0);
    let mut write = |result: &Value| {
        // In one call, so that a line is there or not.
        file.write_all(format!("{result}\n").as_bytes()).map_err(Failure::file(&args.output))?;
        n_failed += usize::from(!result["error"].is_null());
        n_tokens += result["response"]["body"]["usage"]["completion_tokens"].as_u64().unwrap_or(0);
        n_done += 1;
        progress.set(n_done as u64);
        Ok::<(), Failure>(())
    };
    loop {
        while running.len() < max_requests {
            let Some(Line { custom_id, url, body }) = waiting.next() else { break };
            let submitted = batch.request(&url, body).and_then(|(request, model)| {
                let stream = schedule.submit(request).map_err(|error| error.to_string())?;
                Ok((stream, model))
            });
            match submitted {
                Ok((stream, model)) => {
                    let is_chat = url.contains("chat");
                    running.push(Running { custom_id, is_chat, model, stream, text: String::new() });
                }
                Err(message) => write(&failed(&custom_id, 400, &message))?,
            }
        }
        if running.is_empty() {
            break;
        }
        if interrupted.load(Ordering::Relaxed) {
            return Err(Failure::Interrupted);
        }
        schedule.step();
        let mut i = 0;
        while let Some(request) = running.get_mut(i) {
            match request.line() {
                Some(result) => {
                    write(&result)?;
                    running.swap_remove(i);
                }
                None => i += 1,
            }
        }
    }
    drop(progress);
    if io::stderr().is_terminal() {
        let seconds = start.elapsed().as_secs_f64();
        let speed = n_tokens as f64 / seconds.max(1e-9);
        let line = format!(
            "{} requests, {n_skipped} of them done before; {n_tokens} tokens in {seconds:.1} s, {speed:.1}/s",
            total
        );
        note(paint("2", &line));
    }
    match n_failed {
        0 => Ok(()),
        n => Err(Failure::Work(format!(
            "{n} of {total} requests failed; their lines in {} say why",
            args.output.display()
        ))),
    }
}

#[cfg(feature = "chat")]
fn template(args: &Args, model: &Model) -> Result<Option<ruvllm::chat::ChatTemplate>, Failure> {
    let source = match &args.template {
        Some(path) => Some(super::input::read_regular(path)?),
        None => model.chat_template().map(str::to_owned),
    };
    Ok(source.map(|source| ruvllm::chat::ChatTemplate::parse(&source)).transpose()?)
}
