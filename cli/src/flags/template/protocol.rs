//! What the program and the process that renders its templates write to each other: frames of a
//! length (four bytes, little-endian) and that many bytes of JSON.
//!
//! The first frame is the template's source. Its answer, like that to each conversation after it,
//! is `{"text": …, "adjusted": […]}` or an error.

use ruvllm::chat::ChatError;
use ruvllm::chat::{Adjustment, ChatInputs, Rendered};
use serde_json::{Map, Value, json};
use std::io::{self, Read, Write};
use std::time::Duration;

pub(super) fn write_frame(out: &mut impl Write, value: &Value) -> io::Result<()> {
    let bytes = serde_json::to_vec(value)?;
    let len = u32::try_from(bytes.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
    out.write_all(&len.to_le_bytes())?;
    out.write_all(&bytes)?;
    out.flush()
}

/// The next frame.
///
/// # Errors
/// [`io::ErrorKind::UnexpectedEof`] if there is none.
pub(super) fn read_frame(input: &mut impl Read) -> io::Result<Value> {
    let mut len = [0; 4];
    input.read_exact(&mut len)?;
    // Grows as bytes come: a broken length takes no memory.
    let mut bytes = Vec::new();
    let len = u64::from(u32::from_le_bytes(len));
    if input.take(len).read_to_end(&mut bytes)? as u64 != len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&bytes)?)
}

pub(super) fn inputs_to_json(inputs: &ChatInputs) -> Value {
    json!({
        "messages": inputs.messages,
        "tools": inputs.tools,
        "add_generation_prompt": inputs.add_generation_prompt,
        "bos_token": inputs.bos_token,
        "eos_token": inputs.eos_token,
        "kwargs": inputs.kwargs,
        "now": inputs.now.map(|now| now.to_string()),
    })
}

pub(super) fn inputs_from_json(mut json: Value) -> ChatInputs {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let tools = json["tools"].take();
    ChatInputs {
        messages: json["messages"].take(),
        tools: (!tools.is_null()).then_some(tools),
        add_generation_prompt: json["add_generation_prompt"] == true,
        bos_token: text(&json["bos_token"]),
        eos_token: text(&json["eos_token"]),
        now: json["now"].as_str().and_then(|now| now.parse().ok()),
        kwargs: match json["kwargs"].take() {
            Value::Object(kwargs) => kwargs,
            _ => Map::new(),
        },
    }
}

pub(super) fn outcome_to_json(outcome: Result<Rendered, ChatError>) -> Value {
    let error = |kind: &str, number: u64, text: String| json!({"error": kind, "number": number, "message": text});
    match outcome {
        Ok(Rendered { text, adjusted }) => {
            let adjusted: Vec<&str> = adjusted.iter().map(Adjustment::name).collect();
            json!({"text": text, "adjusted": adjusted})
        }
        Err(ChatError::Syntax { line, message }) => error("syntax", line as u64, message),
        Err(ChatError::Render { line, message }) => error("render", line as u64, message),
        Err(ChatError::Raised(message)) => error("raised", 0, message),
        Err(ChatError::OutOfSteps { steps }) => error("steps", steps, String::new()),
        Err(ChatError::OutOfTime { limit }) => {
            error("time", limit.as_millis() as u64, String::new())
        }
        Err(ChatError::OutOfMemory { limit }) => error("memory", limit, String::new()),
        Err(ChatError::OutputTooLong { limit }) => error("output", limit as u64, String::new()),
        Err(other) => error("render", 0, other.to_string()),
    }
}

/// The outcome that a frame tells; a frame that tells none is [`None`].
pub(super) fn outcome_from_json(mut json: Value) -> Option<Result<Rendered, ChatError>> {
    if let Value::String(text) = json["text"].take() {
        let adjusted = json["adjusted"].as_array()?.iter();
        let adjusted = adjusted
            .map(|name| Adjustment::by_name(name.as_str()?))
            .collect::<Option<_>>()?;
        return Some(Ok(Rendered { text, adjusted }));
    }
    let number = json["number"].as_u64()?;
    let message = json["message"].as_str()?.to_owned();
    let (line, limit) = (number as usize, number as usize);
    Some(Err(match json["error"].as_str()? {
        "syntax" => ChatError::Syntax { line, message },
        "render" => ChatError::Render { line, message },
        "raised" => ChatError::Raised(message),
        "steps" => ChatError::OutOfSteps { steps: number },
        "time" => ChatError::OutOfTime {
            limit: Duration::from_millis(number),
        },
        "memory" => ChatError::OutOfMemory { limit: number },
        "output" => ChatError::OutputTooLong { limit },
        _ => return None,
    }))
}
