//! What goes wrong with a request, as clients of OpenAI's and of Anthropic's API expect it.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use ruvllm::chat::ChatError;
use ruvllm::scheduler::ScheduleError;
use ruvllm::{Error, SessionError};
use ruvllm_learn::sona::SonaError;
use serde_json::{Value, json};

/// Most characters of a message.
const MAX_MESSAGE: usize = 1000;

/// A request that was refused, or failed.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    /// The field that is wrong.
    param: Option<String>,
    code: Option<&'static str>,
    /// What Anthropic's API says otherwise.
    anthropic: Option<Box<Anthropic>>,
}

/// What only Anthropic's API says of an error.
#[derive(Clone, Debug, Default)]
struct Anthropic {
    message: Option<String>,
    /// What a client's program reads instead of the message.
    details: Option<Value>,
}

impl ApiError {
    pub(crate) fn new(
        status: StatusCode,
        kind: &'static str,
        message: impl Into<String>,
    ) -> ApiError {
        ApiError {
            status,
            kind,
            message: message.into(),
            param: None,
            code: None,
            anthropic: None,
        }
    }

    /// The request makes no sense.
    pub(crate) fn wrong(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A field makes no sense.
    pub(crate) fn field(name: &str, message: impl std::fmt::Display) -> ApiError {
        ApiError {
            param: Some(name.to_owned()),
            ..ApiError::wrong(format!("{name}: {message}"))
        }
    }

    /// The same, with a code by which programs know it.
    pub(crate) fn with_code(self, code: &'static str) -> ApiError {
        ApiError {
            code: Some(code),
            ..self
        }
    }

    /// A request of a kind that a client can do without, as it learns from `details`.
    pub(crate) fn with_details(self, details: Value) -> ApiError {
        ApiError {
            anthropic: Some(Box::new(Anthropic {
                details: Some(details),
                ..Anthropic::default()
            })),
            ..self
        }
    }

    /// The model is not there yet.
    pub(crate) fn loading() -> ApiError {
        ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "unavailable_error",
            "the model is being loaded",
        )
    }

    /// It failed here.
    pub(crate) fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// The conversation, or the text, has more tokens than a context.
    fn too_long(n_tokens: usize, n_ctx: usize) -> ApiError {
        // Clients look for these words to make it shorter.
        let message = format!(
            "the maximum context length is {n_ctx} tokens, and this request has {n_tokens}"
        );
        let in_anthropic = format!("prompt is too long: {n_tokens} tokens > {n_ctx} maximum");
        ApiError {
            code: Some("context_length_exceeded"),
            anthropic: Some(Box::new(Anthropic {
                message: Some(in_anthropic),
                ..Anthropic::default()
            })),
            ..ApiError::wrong(message)
        }
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// In the form of Ollama's API.
    pub(crate) fn ollama_json(&self) -> Value {
        json!({"error": shortened(&self.message)})
    }

    /// In the form of OpenAI's API.
    pub(crate) fn json(&self) -> Value {
        let code = self
            .code
            .map_or_else(|| json!(self.status.as_u16()), |code| json!(code));
        json!({"error": {
            "message": shortened(&self.message), "type": self.kind, "param": self.param, "code": code,
        }})
    }

    /// In the form of Anthropic's API.
    pub(crate) fn anthropic_json(&self) -> Value {
        let kind = match self.anthropic_status().as_u16() {
            408 | 504 => "timeout_error",
            413 => "request_too_large",
            OVERLOADED => "overloaded_error",
            500.. => "api_error",
            _ => self.kind,
        };
        let said = self.anthropic.as_deref();
        let message = said.and_then(|said| said.message.as_ref());
        let message = shortened(message.unwrap_or(&self.message));
        let mut error = json!({"type": kind, "message": message});
        if let Some(details) = said.and_then(|said| said.details.as_ref()) {
            error["details"] = details.clone();
        }
        json!({"type": "error", "error": error})
    }

    pub(super) fn anthropic_status(&self) -> StatusCode {
        match self.status {
            StatusCode::SERVICE_UNAVAILABLE => {
                StatusCode::from_u16(OVERLOADED).unwrap_or(self.status)
            }
            status => status,
        }
    }

    /// What went wrong with an answer that has begun: the error of a response of OpenAI's API.
    pub(crate) fn response_error(&self) -> Value {
        let code = self.code.unwrap_or("server_error");
        json!({"code": code, "message": shortened(&self.message)})
    }
}

/// Status of Anthropic's API for a server that answers nobody now.
const OVERLOADED: u16 = 529;

/// A message, which may have a value of the request in it.
fn shortened(message: &str) -> String {
    match message.char_indices().nth(MAX_MESSAGE) {
        None => message.to_owned(),
        Some((end, _)) => format!("{}…", &message[..end]),
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = crate::serve::http::response::json_response(self.status, &self.json());
        let more = match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                Some((header::RETRY_AFTER, "1"))
            }
            StatusCode::UNAUTHORIZED => Some((header::WWW_AUTHENTICATE, "Bearer")),
            _ => None,
        };
        response
            .headers_mut()
            .extend(more.map(|(name, value)| (name, HeaderValue::from_static(value))));
        // For callers of another API (`dialect`).
        response.extensions_mut().insert(self);
        response
    }
}

impl From<SessionError> for ApiError {
    fn from(error: SessionError) -> ApiError {
        let message = error.to_string();
        match error {
            SessionError::ContextFull {
                n_ctx,
                n_past,
                n_new,
            } => ApiError::too_long(n_past + n_new, n_ctx),
            SessionError::NoTokens
            | SessionError::TokenOutOfRange { .. }
            | SessionError::NoTokenizer
            | SessionError::Encoder
            | SessionError::NoEncoder
            | SessionError::NotEncoded
            | SessionError::Denoises
            | SessionError::DoesNotDenoise
            | SessionError::NoMask
            | SessionError::NoClassifier => ApiError::wrong(message),
            _ => ApiError::internal(message),
        }
    }
}

impl From<ScheduleError> for ApiError {
    fn from(error: ScheduleError) -> ApiError {
        let message = error.to_string();
        match error {
            ScheduleError::Session(error) => error.into(),
            ScheduleError::Sample(_) => ApiError::wrong(message),
            ScheduleError::QueueFull { .. } => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
            }
            ScheduleError::PoolTooSmall { .. } => ApiError::wrong(message),
            ScheduleError::Ended => ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable_error",
                message,
            ),
            _ => ApiError::internal(message),
        }
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> ApiError {
        Error::from(error).into()
    }
}

impl From<SonaError> for ApiError {
    fn from(error: SonaError) -> ApiError {
        match error {
            SonaError::Session(error) => error.into(),
            _ => ApiError::internal(error.to_string()),
        }
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> ApiError {
        match error {
            Error::Session(error) => error.into(),
            Error::Schedule(error) => error.into(),
            // A template that refuses the conversation, tools or a grammar that cannot be obeyed, a
            // sampler's settings.
            Error::Chat(_) | Error::Grammar(_) | Error::Sample(_) => {
                ApiError::wrong(error.to_string())
            }
            _ => ApiError::internal(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_form_of_each_api() {
        let full = ScheduleError::QueueFull { max: 1 };
        for (error, status, anthropic_status, kind) in [
            (ApiError::loading(), 503, 529, "overloaded_error"),
            (full.into(), 429, 429, "rate_limit_error"),
            (ApiError::internal("a"), 500, 500, "api_error"),
            (ApiError::field("a", "b"), 400, 400, "invalid_request_error"),
        ] {
            assert_eq!(error.status.as_u16(), status);
            assert_eq!(error.anthropic_status().as_u16(), anthropic_status);
            assert_eq!(error.anthropic_json()["error"]["type"], kind);
            assert!(error.json()["error"]["message"].is_string());
        }
        let error = ApiError::too_long(9, 8);
        let message = "the maximum context length is 8 tokens, and this request has 9";
        assert_eq!(error.json()["error"]["message"], message);
        let message = "prompt is too long: 9 tokens > 8 maximum";
        assert_eq!(error.anthropic_json()["error"]["message"], message);
        let details = json!({"error_code": "a"});
        let error = ApiError::wrong("é".repeat(2000)).with_details(details.clone());
        let json = error.anthropic_json();
        assert_eq!(json["error"]["details"], details);
        let message = json["error"]["message"].as_str().unwrap();
        assert_eq!(message.chars().count(), MAX_MESSAGE + 1);
    }
}
