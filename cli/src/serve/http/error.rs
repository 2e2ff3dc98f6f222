//! What goes wrong with a request, as clients of the OpenAI API expect it.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use ruvllm::{ChatError, Error, ScheduleError, SessionError, SonaError};
use serde_json::{Value, json};

/// Most characters of a message.
const MAX_MESSAGE: usize = 1000;

/// A request that was refused, or failed.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    /// The field that is wrong.
    param: Option<String>,
    code: Option<&'static str>,
    /// What a client's program reads instead of the message, in Anthropic's API.
    details: Option<Box<Value>>,
    /// Whether it is told in the form of Anthropic's API.
    is_anthropic: bool,
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
            details: None,
            is_anthropic: false,
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
            details: Some(Box::new(details)),
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

    pub(crate) fn json(&self) -> Value {
        let ApiError {
            status,
            kind,
            message,
            param,
            code,
            details,
            is_anthropic,
        } = self;
        // It may have a value of the request in it.
        let message = match message.char_indices().nth(MAX_MESSAGE) {
            None => message.clone(),
            Some((end, _)) => format!("{}…", &message[..end]),
        };
        if *is_anthropic {
            let mut error = json!({"type": kind, "message": message});
            if let Some(details) = details {
                error["details"] = Value::clone(details);
            }
            return json!({"type": "error", "error": error});
        }
        let code = code.map_or_else(|| json!(status.as_u16()), |code| json!(code));
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }
}

impl ApiError {
    /// The same, in the form of Anthropic's API.
    pub(crate) fn of_anthropic(self) -> ApiError {
        let kind = match self.status {
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => self.kind,
        };
        ApiError {
            kind,
            is_anthropic: true,
            ..self
        }
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
        response
    }
}

impl From<SessionError> for ApiError {
    fn from(error: SessionError) -> ApiError {
        let message = error.to_string();
        match error {
            SessionError::ContextFull { .. } => ApiError {
                code: Some("context_length_exceeded"),
                ..ApiError::wrong(message)
            },
            SessionError::NoTokens
            | SessionError::TokenOutOfRange { .. }
            | SessionError::NoTokenizer
            | SessionError::Encoder
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
        Error::from(error).into()
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
