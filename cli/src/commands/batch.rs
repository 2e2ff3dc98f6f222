//! `ruvllm batch`: a file of requests in the form of OpenAI's batches, answered side by side as the
//! server answers them.

use crate::io::{Failure, Progress, note, on_interrupt, paint, read_text};
use crate::serve::{self, AppArgs};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use futures_util::future::{Either, FutureExt, select};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use ruvllm::gguf::NewFile;
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Instant;
use tokio::sync::watch;
use tokio::task::JoinSet;

const EXAMPLES: &str = "\
Examples:
  ruvllm batch -m model.gguf -f requests.jsonl -o results.jsonl
  ruvllm batch -m model.gguf -f requests.jsonl -o results.jsonl --parallel 32 -n 200 --temp 0

requests.jsonl, a request per line:
  {\"custom_id\": \"a\", \"method\": \"POST\", \"url\": \"/v1/completions\",
   \"body\": {\"prompt\": \"Ownership is\", \"max_tokens\": 32, \"temperature\": 0}}
  {\"custom_id\": \"b\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\",
   \"body\": {\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"seed\": 1}}

Any path of `ruvllm serve` that takes a POST is a url: embeddings, responses and others, too. A result is written as \
soon as it is there, as a line of its own. Called again, the program goes on: requests whose custom_id is in the results \
already are skipped, also those that failed: --retry-failed asks them again. What a request does not say is as the \
flags say; a key that is not understood fails that request alone. Exit code 1 if any failed, now or before.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// File of requests, one JSON object per line; - is stdin
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// File that results are appended to
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Ask requests again whose results are errors; their lines are taken off the results
    #[arg(long)]
    retry_failed: bool,
    #[command(flatten)]
    app: AppArgs,
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
    for (i, line) in text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
    {
        let fail =
            |what: String| Failure::Work(format!("{}, line {}: {what}", path.display(), i + 1));
        let mut object: Map<String, Value> =
            serde_json::from_str(line).map_err(|error| fail(error.to_string()))?;
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
        lines.push(Line {
            custom_id,
            url,
            body,
        });
    }
    Ok(lines)
}

/// The results that a file has.
struct Results {
    file: File,
    /// By id, whether the request failed.
    failed: HashMap<String, bool>,
}

impl Results {
    /// The file, opened at its end. A last line that was cut short is taken off; so are, to
    /// `retry_failed`, those of requests that failed.
    fn open(path: &Path, retry_failed: bool) -> Result<Results, Failure> {
        let fail = Failure::file(path);
        let old = if path.exists() {
            read_text(path)?
        } else {
            String::new()
        };
        let whole = old.rfind('\n').map_or(0, |end| end + 1);
        let (mut failed, mut kept) = (HashMap::new(), String::new());
        for (i, line) in old[..whole].split_inclusive('\n').enumerate() {
            let value: Value = serde_json::from_str(line).unwrap_or_default();
            let Some(id) = value["custom_id"].as_str() else {
                let what = "not a result of a batch, so nothing is appended; give another -o";
                return Err(Failure::Work(format!(
                    "{}, line {}: {what}",
                    path.display(),
                    i + 1
                )));
            };
            let has_failed = !value["error"].is_null();
            if !(has_failed && retry_failed) {
                kept += line;
                failed.insert(id.to_owned(), has_failed);
            }
        }
        if kept.len() < whole {
            let mut new = NewFile::create(path, false).map_err(&fail)?;
            new.write_all(kept.as_bytes()).map_err(&fail)?;
            new.finish().map_err(&fail)?;
        }
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(&fail)?;
        if kept.len() == whole && whole < old.len() {
            file.set_len(whole as u64).map_err(&fail)?;
        }
        Ok(Results { file, failed })
    }
}

/// The result of a request, as the server answers it.
async fn answer(
    server: TowerToHyperService<Router>,
    Line {
        custom_id,
        url,
        body,
    }: Line,
) -> Value {
    let refuse = |status: StatusCode, message: String| {
        let kind = if status == StatusCode::BAD_REQUEST {
            "invalid_request_error"
        } else {
            "server_error"
        };
        result(
            &custom_id,
            status,
            None,
            json!({"error": {"message": message, "type": kind}}),
        )
    };
    if body.get("stream").is_some_and(|stream| stream == true) {
        return refuse(
            StatusCode::BAD_REQUEST,
            "stream: a file of results has no streams".into(),
        );
    }
    let request = match Request::post(&url).body(Body::from(Value::Object(body).to_string())) {
        Ok(request) => request,
        Err(error) => return refuse(StatusCode::BAD_REQUEST, format!("url {url:?}: {error}")),
    };
    // Whose request fails so is told, and the others go on.
    let response = match AssertUnwindSafe(server.call(request)).catch_unwind().await {
        Ok(response) => response.unwrap_or_else(|never| match never {}),
        Err(_) => {
            return refuse(
                StatusCode::INTERNAL_SERVER_ERROR,
                "the program failed; stderr says where".into(),
            );
        }
    };
    let (parts, body) = response.into_parts();
    let request_id = parts
        .headers
        .get("x-request-id")
        .and_then(|id| id.to_str().ok())
        .map(str::to_owned);
    let body = to_bytes(body, usize::MAX)
        .await
        .ok()
        .and_then(|body| serde_json::from_slice(&body).ok());
    result(
        &custom_id,
        parts.status,
        request_id,
        body.unwrap_or_default(),
    )
}

/// The line of a result.
fn result(custom_id: &str, status: StatusCode, request_id: Option<String>, body: Value) -> Value {
    let error = match &body["error"] {
        _ if status == StatusCode::OK => Value::Null,
        Value::Null => {
            json!({"code": null, "message": format!("{status}: this path takes no such request")})
        }
        error => json!({"code": error["type"], "message": error["message"]}),
    };
    json!({
        "id": request_id.as_ref().map(|id| format!("batch_{id}")),
        "custom_id": custom_id,
        "response": {"status_code": status.as_u16(), "request_id": request_id, "body": body},
        "error": error,
    })
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let lines = parse(&args.file, &read_text(&args.file)?)?;
    let Results { mut file, failed } = Results::open(&args.output, args.retry_failed)?;
    let total = lines.len();
    let failed_before = |line: &&Line| failed.get(&line.custom_id).is_some_and(|failed| *failed);
    let mut n_failed = lines.iter().filter(failed_before).count();
    let mut waiting = lines
        .into_iter()
        .filter(|line| !failed.contains_key(&line.custom_id))
        .collect::<Vec<_>>()
        .into_iter();
    let n_skipped = total - waiting.len();

    let server = TowerToHyperService::new(serve::local(&args.app)?);
    let (stop, mut stopped) = watch::channel(false);
    on_interrupt(move || stop.send_modify(|stopped| *stopped = true))?;

    let (start, progress) = (Instant::now(), Progress::new("requests", total as u64));
    let (mut n_done, mut n_tokens) = (n_skipped, 0);
    let mut write = |result: &Value| {
        let response = &result["response"];
        if response["status_code"] == StatusCode::SERVICE_UNAVAILABLE.as_u16() {
            // Nothing is computed any more: what is left is for the next call.
            return Err(Failure::Work(
                result["error"]["message"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned(),
            ));
        }
        // In one call, so that a line is there or not.
        file.write_all(format!("{result}\n").as_bytes())
            .map_err(Failure::file(&args.output))?;
        n_failed += usize::from(!result["error"].is_null());
        let usage = &response["body"]["usage"];
        let n = usage["completion_tokens"]
            .as_u64()
            .or(usage["output_tokens"].as_u64());
        n_tokens += n.unwrap_or(0);
        n_done += 1;
        progress.set(n_done as u64);
        Ok::<(), Failure>(())
    };
    // Twice as many as are computed side by side, so that the next ones wait with their tokens.
    let max_running = 2 * args.app.parallel as usize;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let written: Result<(), Failure> = runtime.block_on(async {
        let mut running = JoinSet::new();
        loop {
            for line in waiting.by_ref().take(max_running - running.len()) {
                running.spawn(answer(server.clone(), line));
            }
            match select(
                pin!(running.join_next()),
                pin!(stopped.wait_for(|&stopped| stopped)),
            )
            .await
            {
                Either::Left((Some(result), _)) => write(&result?)?,
                Either::Left((None, _)) => return Ok(()),
                Either::Right(_) => return Err(Failure::Interrupted),
            }
        }
    });
    runtime.shutdown_background();
    written?;
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
