//! The body of a request, read field by field, so that each is used, refused or told as ignored.

use crate::serve::http::error::ApiError;
use crate::serve::http::ignored::Ignored;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Fields of these APIs, and of other servers, that would change an answer and are not done here.
/// One that says nothing (`false`, an empty text, list or object) is as if it were not there, and
/// so is one with the number or the flag behind its name, for what happens here anyway.
const UNSUPPORTED: &[(&str, Option<f64>)] = &[
    // OpenAI's.
    ("audio", None),
    ("best_of", Some(1.0)),
    ("conversation", None),
    ("echo", None),
    ("function_call", None),
    ("functions", None),
    ("prompt", None),
    ("suffix", None),
    ("web_search_options", None),
    // vLLM's, SGLang's and those of Hugging Face's servers.
    ("add_generation_prompt", None),
    ("add_special_tokens", Some(1.0)),
    ("allowed_token_ids", None),
    ("bad_words", None),
    ("chat_template", None),
    ("continue_final_message", None),
    ("documents", None),
    ("early_stopping", None),
    ("ebnf", None),
    ("guided_choice", None),
    ("guided_decoding_backend", None),
    ("guided_grammar", None),
    ("guided_json", None),
    ("guided_regex", None),
    ("include_stop_str_in_output", None),
    ("input_embeds", None),
    ("length_penalty", Some(1.0)),
    ("lora_path", None),
    ("min_new_tokens", Some(0.0)),
    ("min_tokens", Some(0.0)),
    ("mm_processor_kwargs", None),
    ("no_repeat_ngram_size", Some(0.0)),
    ("prompt_embeds", None),
    ("prompt_logprobs", None),
    ("regex", None),
    ("spaces_between_special_tokens", Some(1.0)),
    ("stop_regex", None),
    ("stop_token_ids", None),
    ("structured_outputs", None),
    ("truncate_prompt_tokens", None),
    ("use_beam_search", None),
    // llama-server's and Ollama's.
    ("control_vectors", None),
    ("image_data", None),
    ("images", None),
    ("multimodal_data", None),
    ("n_discard", Some(0.0)),
    ("n_keep", Some(0.0)),
    ("n_probs", Some(0.0)),
    ("options", None),
    ("raw", None),
    ("think", None),
];

/// Whether a field that is not done here has a value for what happens anyway.
fn is_nothing(value: &Value, usual: Option<f64>) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(is_set) => !is_set || usual == Some(1.0),
        Value::Number(number) => usual.is_some() && number.as_f64() == usual,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

/// The fields that are left.
#[derive(Default)]
pub(crate) struct Fields {
    left: Map<String, Value>,
    /// What comes before their names: `reasoning.` in an object of that name.
    prefix: String,
    /// Takes the names of fields without an effect.
    ignored: Ignored,
}

impl Fields {
    /// The fields of an object. Those that the server does not know are told to `ignored`, or
    /// refused if it is strict.
    pub(crate) fn parse(body: &[u8], ignored: Ignored) -> Result<Fields, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(left)) => Ok(Fields {
                left,
                prefix: String::new(),
                ignored,
            }),
            Ok(_) => Err(ApiError::wrong("the body is not a JSON object")),
            Err(error) => Err(ApiError::wrong(format!("the body is not JSON: {error}"))),
        }
    }

    /// The value of a field; `null` is as if it were not there.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        match self.left.shift_remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => from_value(value)
                .map(Some)
                .map_err(|message| ApiError::field(name, message)),
        }
    }

    /// The value of a field that has to be there.
    pub(crate) fn need<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, ApiError> {
        self.take(name)?
            .ok_or_else(|| ApiError::field(name, "this field is required"))
    }

    /// Whether a flag is set; false if it is not there.
    pub(crate) fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        Ok(self.take(name)?.unwrap_or(false))
    }

    /// The fields of an object in a field.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Fields>, ApiError> {
        let left = self.take(name)?;
        Ok(left.map(|left| Fields {
            left,
            prefix: format!("{}{name}.", self.prefix),
            ignored: self.ignored.clone(),
        }))
    }

    /// The value of a field, which stays.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.left.get(name)
    }

    /// Gives a field the name that it has elsewhere.
    pub(crate) fn rename(&mut self, name: &str, elsewhere: &str) -> Result<(), ApiError> {
        match self.take::<Value>(name)? {
            Some(value) => self.set(elsewhere, value),
            None => Ok(()),
        }
    }

    /// Adds a field, which must not be there.
    pub(crate) fn set(&mut self, name: &str, value: Value) -> Result<(), ApiError> {
        match self.left.insert(name.to_owned(), value) {
            None | Some(Value::Null) => Ok(()),
            Some(_) => Err(ApiError::field(name, "this server does not know the field")),
        }
    }

    /// What takes the names of parts without an effect.
    pub(crate) fn ignored(&self) -> &Ignored {
        &self.ignored
    }

    /// Fields that are known, and have no effect here: their names are told.
    pub(crate) fn without_effect(&mut self, names: &[&str]) {
        for name in names {
            let value = self.left.shift_remove(*name).unwrap_or_default();
            if !value.is_null() && !is_nothing(&value, None) {
                self.ignored.add(&format!("{}{name}", self.prefix));
            }
        }
    }

    /// Fields that change nothing here.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        names
            .iter()
            .for_each(|name| drop(self.left.shift_remove(*name)));
    }

    /// A field of other servers, with the value for what happens here anyway.
    pub(crate) fn only(&mut self, name: &str, value: impl Into<Value>) -> Result<(), ApiError> {
        let value = value.into();
        let is_value = |other: &Value| {
            *other == value || value.is_number() && other.as_f64() == value.as_f64()
        };
        match self.take::<Value>(name)? {
            Some(other) if !is_value(&other) => {
                Err(ApiError::field(name, format!("only {value} is supported")))
            }
            _ => Ok(()),
        }
    }

    /// Tells what is left as ignored, or refuses it. A field that is `null` is as if it were not
    /// there.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        let Fields {
            left,
            prefix,
            ignored,
        } = self;
        let named = |name: &str| format!("{prefix}{name}");
        let mut names = Vec::new();
        for (name, value) in left.iter().filter(|(_, value)| !value.is_null()) {
            match UNSUPPORTED.iter().find(|(known, _)| known == name) {
                Some((_, usual)) if is_nothing(value, *usual) => {}
                Some(_) => {
                    let message = "it would change the answer, and this server does not support it";
                    return Err(ApiError::field(&named(name), message));
                }
                None => names.push(named(name)),
            }
        }
        for name in names {
            if ignored.is_strict() {
                let message = "this server does not know the field";
                return Err(ApiError::field(&name, message));
            }
            ignored.add(&name);
        }
        Ok(())
    }
}

/// A value of a type, or what is wrong with it, in words of JSON.
fn from_value<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    let whole = value
        .as_f64()
        .filter(|x| value.is_f64() && x.fract() == 0.0 && x.abs() < 2f64.powi(53));
    let value = whole.map_or(value, |x| (x as i64).into());
    serde_json::from_value(value).map_err(|error| {
        let message = error.to_string();
        let Some((found, expected)) = message.rsplit_once("expected ") else {
            return message;
        };
        let expected = match expected {
            "i64" => "an integer",
            "usize" | "u32" | "u8" => "an integer of 0 or more",
            "i32" => "an integer of 32 bits",
            "f32" => "a number",
            other => other,
        };
        format!("{found}expected {expected}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers() {
        assert_eq!(from_value::<i64>(json!(5.0)), Ok(5));
        assert_eq!(from_value::<f32>(json!(-1)), Ok(-1.0));
        assert_eq!(
            from_value::<f32>(json!(1e300)),
            Ok(f32::INFINITY),
            "a sampler says what is wrong with it"
        );
        for (value, message) in [
            (json!(5.5), "an integer"),
            (json!("5"), "an integer"),
            (json!(1e300), "an integer"),
        ] {
            assert!(
                from_value::<i64>(value.clone())
                    .unwrap_err()
                    .ends_with(message),
                "{value}"
            );
        }
        assert!(
            from_value::<usize>(json!(-1.0))
                .unwrap_err()
                .ends_with("0 or more")
        );
        let only = |found: Value, value: Value| {
            Fields::parse(
                json!({"a": found}).to_string().as_bytes(),
                Ignored::strict(),
            )
            .unwrap()
            .only("a", value)
        };
        assert!(only(json!(1), json!(1.0)).is_ok() && only(json!(null), json!(1)).is_ok());
        assert!(
            only(json!(2), json!(1.0)).is_err()
                && only(json!("1"), json!(1)).is_err()
                && only(json!(false), json!(0)).is_err()
        );
    }

    #[test]
    fn what_is_left() {
        let body = json!({"a": null, "b": 1, "c": {"d": 2, "e": null, "f": 3}});
        let fields = |ignored| Fields::parse(body.to_string().as_bytes(), ignored).unwrap();
        let read = |mut fields: Fields| {
            let mut inner = fields.object("c")?.expect("an object");
            inner.need::<i64>("d")?;
            inner.finish()?;
            fields.finish()
        };
        let error = read(fields(Ignored::strict())).unwrap_err().json();
        assert_eq!(error["error"]["param"], "c.f");
        let ignored = Ignored::default();
        read(fields(ignored.clone())).unwrap();
        assert_eq!(ignored.list(), "c.f, b");
        let body = |value: Value| json!({"guided_regex": value}).to_string();
        let finish = |value: Value| {
            Fields::parse(body(value).as_bytes(), Ignored::default())
                .unwrap()
                .finish()
        };
        assert!(finish(json!("a+")).is_err(), "it would change the answer");
        assert!(finish(json!("")).is_ok() && finish(json!(null)).is_ok());
        // What an API knows is taken even then.
        let strict = Ignored::strict();
        let body = json!({"a": 1, "b": false, "c": null, "d": {"e": 1}});
        let mut fields = Fields::parse(body.to_string().as_bytes(), strict.clone()).unwrap();
        let mut inner = fields.object("d").unwrap().unwrap();
        inner.without_effect(&["e"]);
        inner.finish().unwrap();
        fields.without_effect(&["a", "b", "c"]);
        fields.finish().unwrap();
        assert_eq!(strict.list(), "d.e, a");
    }
}
