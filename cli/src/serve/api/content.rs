//! Content of a message: texts and images, in their order, in the words of chat completions.

use crate::serve::http::error::ApiError;
use crate::serve::http::images::{base64_part, image_part};
use serde_json::{Value, json};

/// Texts and images.
#[derive(Default)]
pub(super) struct Content(Vec<Value>);

impl Content {
    /// Adds text, to the text before it if there is some.
    pub(super) fn text(&mut self, more: &str) {
        if more.is_empty() {
            return;
        }
        match self.0.last_mut().map(|last| &mut last["text"]) {
            Some(Value::String(text)) => text.push_str(more),
            _ => self.0.push(json!({"type": "text", "text": more})),
        }
    }

    /// Adds a part that is an image.
    pub(super) fn image(&mut self, part: Value) {
        self.0.push(part);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Its text alone, and the images that it had.
    pub(super) fn split(self) -> (String, Vec<Value>) {
        let (texts, images): (Vec<_>, Vec<_>) = self
            .0
            .into_iter()
            .partition(|part| part["text"].is_string());
        let text = texts.iter().filter_map(|part| part["text"].as_str());
        (text.collect(), images)
    }

    /// A text, or parts where there are images.
    pub(super) fn into_value(self) -> Value {
        match self.0.iter().all(|part| part["text"].is_string()) {
            true => self.split().0.into(),
            false => self.0.into(),
        }
    }
}

/// The image of a block of Anthropic's API.
pub(super) fn image_of_block(place: &str, source: &Value) -> Result<Value, ApiError> {
    let text = |name: &str| {
        source[name].as_str().ok_or_else(|| {
            ApiError::field(place, format!("an image's source has no text {name:?}"))
        })
    };
    match source["type"].as_str() {
        Some("base64") => Ok(base64_part(text("media_type")?, text("data")?)),
        Some("url") => Ok(image_part(text("url")?, None)),
        _ => Err(ApiError::field(
            place,
            format!(
                "images of the source {} are not supported, only base64 and url",
                source["type"]
            ),
        )),
    }
}
