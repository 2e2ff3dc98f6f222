//! Options that come as JSON objects: a field that nothing reads is refused.

use crate::failure::Failure;
use ruvllm::Sampler;
use serde_json::{Map, Value};

/// Fields of an object that were not read yet.
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    pub(crate) fn parse(json: &str) -> Result<Fields, Failure> {
        match serde_json::from_str(json) {
            Ok(Value::Object(map)) => Ok(Fields(map)),
            Ok(_) => Err(Failure::new("OptionsError", "options have to be an object")),
            Err(e) => Err(Failure::new("OptionsError", format!("options: {e}"))),
        }
    }

    /// A field as it is; null counts as missing.
    pub(crate) fn value(&mut self, name: &str) -> Option<Value> {
        self.0.shift_remove(name).filter(|value| !value.is_null())
    }

    /// A field as `read` reads it.
    fn read<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, Failure> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        read(&value)
            .map(Some)
            .ok_or_else(|| Failure::new("OptionsError", format!("{name}: {value} is not {expected}")))
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, Failure> {
        self.read(name, "a text", |v| Some(v.as_str()?.to_owned()))
    }

    pub(crate) fn flag(&mut self, name: &str) -> Result<Option<bool>, Failure> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub(crate) fn size(&mut self, name: &str) -> Result<Option<usize>, Failure> {
        let whole = |v: &Value| v.as_f64().filter(|x| x.fract() == 0.0 && (0.0..=9.0e15).contains(x));
        self.read(name, "a whole number", |v| usize::try_from(whole(v)? as u64).ok())
    }

    fn number(&mut self, name: &str) -> Result<Option<f32>, Failure> {
        self.read(name, "a number", |v| Some(v.as_f64()? as f32))
    }

    /// One text or several.
    pub(crate) fn texts(&mut self, name: &str) -> Result<Vec<String>, Failure> {
        let texts = self.read(name, "a text or a list of texts", |v| match v {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(all) => all.iter().map(|v| Some(v.as_str()?.to_owned())).collect(),
            _ => None,
        })?;
        Ok(texts.unwrap_or_default())
    }

    /// Refuses fields that were not read.
    pub(crate) fn finish(self) -> Result<(), Failure> {
        match self.0.keys().next() {
            Some(name) => Err(Failure::new("OptionsError", format!("there is no option {name:?}"))),
            None => Ok(()),
        }
    }

    /// The sampler of a request.
    pub(crate) fn sampler(&mut self) -> Result<Sampler, Failure> {
        let mut builder = Sampler::builder();
        if let Some(t) = self.number("temperature")? {
            builder = builder.temperature(t);
        }
        if let Some(k) = self.size("top_k")? {
            builder = builder.top_k(k);
        }
        if let Some(p) = self.number("top_p")? {
            builder = builder.top_p(p);
        }
        if let Some(p) = self.number("min_p")? {
            builder = builder.min_p(p);
        }
        if let Some(penalty) = self.number("repeat_penalty")? {
            builder = builder.repeat_penalty(penalty);
        }
        if let Some(penalty) = self.number("presence_penalty")? {
            builder = builder.presence_penalty(penalty);
        }
        if let Some(penalty) = self.number("frequency_penalty")? {
            builder = builder.frequency_penalty(penalty);
        }
        if let Some(seed) = self.size("seed")? {
            builder = builder.seed(seed as u64);
        }
        builder.build().map_err(Failure::of("OptionsError"))
    }
}
