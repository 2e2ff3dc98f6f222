//! JSON that several commands read or print.

#[cfg(feature = "chat")]
use super::failure::Failure;
#[cfg(feature = "chat")]
use super::input::{name, read};
use ruvllm::StopReason;
#[cfg(feature = "chat")]
use std::path::Path;

/// The JSON in a file; `-` is stdin.
#[cfg(feature = "chat")]
pub(crate) fn read_json(path: &Path) -> Result<serde_json::Value, Failure> {
    serde_json::from_slice(&read(path)?)
        .map_err(|error| Failure::Work(format!("{}: {error}", name(path))))
}

#[cfg(feature = "chat")]
pub(crate) fn json_object(
    text: &str,
) -> Result<serde_json::Map<String, serde_json::Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("not a JSON object: {error}"))
}

/// Why a text ended, as JSON and logs call it.
pub(crate) fn reason_name(reason: StopReason) -> &'static str {
    match reason {
        StopReason::EndOfGeneration => "end_of_generation",
        StopReason::StopString => "stop_string",
        StopReason::MaxTokens => "max_tokens",
        StopReason::ContextFull => "context_full",
        StopReason::MaskLimit => "grammar_limit",
        StopReason::Cancelled => "cancelled",
        StopReason::Deadline => "deadline",
        _ => "other",
    }
}
