//! The log on stderr: lines of text, or of JSON for programs.

use crate::io::{Failure, note, notes_to};
use crate::serve::ids::{Caller, new_id};
use axum::extract::Request;
use axum::http::HeaderValue;
use axum::middleware::Next;
use axum::response::Response;
use clap::ValueEnum;
use std::io::stderr;
use std::time::Instant;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Requests as they are answered.
pub(crate) const HTTP: &str = "http";
/// What the scheduler does.
pub(crate) const SCHEDULE: &str = "schedule";
/// What becomes of conversations.
pub(crate) const CHAT: &str = "chat";
/// Start and end of the server.
const SERVER: &str = "server";

#[derive(clap::Args)]
#[command(next_help_heading = "Logs")]
pub(crate) struct LogArgs {
    /// What is logged: off, error, warn, info (requests), debug (their stages); or by part, as in
    /// warn,http=info
    #[arg(long, value_name = "LEVEL", default_value = "warn", env = "RUVLLM_LOG")]
    log_level: Targets,
    /// Form of the log
    #[arg(
        long,
        value_name = "FORMAT",
        default_value = "text",
        env = "RUVLLM_LOG_FORMAT"
    )]
    log_format: LogFormat,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum LogFormat {
    /// A line of text per event
    Text,
    /// A JSON object per event
    Json,
}

impl LogArgs {
    /// Starts the log of this process.
    pub(crate) fn start(&self) -> Result<(), Failure> {
        let layer = tracing_subscriber::fmt::layer().with_writer(stderr);
        let layer = match self.log_format {
            LogFormat::Text => layer.boxed(),
            LogFormat::Json => layer.json().flatten_event(true).boxed(),
        };
        let filter = self
            .log_level
            .clone()
            .with_target(SERVER, tracing::Level::INFO);
        tracing_subscriber::registry()
            .with(layer.with_filter(filter))
            .try_init()?;
        if let LogFormat::Json = self.log_format {
            notes_to(|text| tracing::info!(target: SERVER, "{text}"));
        }
        Ok(())
    }

    /// Says what is said whatever the level.
    pub(crate) fn say(&self, text: impl std::fmt::Display) {
        match self.log_format {
            LogFormat::Text => note(text),
            LogFormat::Json => tracing::info!(target: SERVER, "{text}"),
        }
    }
}

/// Gives a request its name, which its answer and its lines in logs have, and logs how it was
/// answered.
pub(crate) async fn name_and_log(mut request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let caller = Caller {
        request: new_id("req_").into(),
        path: path.as_str().into(),
        tenant: "".into(),
    };
    request.extensions_mut().insert(caller.clone());
    let mut response = next.run(request).await;
    if let Ok(name) = HeaderValue::from_str(&caller.request) {
        response.headers_mut().insert("x-request-id", name);
    }
    let (status, ms) = (
        response.status().as_u16(),
        crate::io::milliseconds(begun.elapsed()),
    );
    let request = &*caller.request;
    if status == 500 {
        tracing::error!(target: HTTP, request, %method, path, status, ms, "failed");
    } else {
        tracing::info!(target: HTTP, request, %method, path, status, ms, "answered");
    }
    response
}
