//! Options that come as JSON objects: a field that nothing reads is refused.

use crate::failure::Failure;
use ruvllm::{Sampler, SamplerOptions};
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
        read(&value).map(Some).ok_or_else(|| {
            Failure::new("OptionsError", format!("{name}: {value} is not {expected}"))
        })
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, Failure> {
        self.read(name, "a text", |v| Some(v.as_str()?.to_owned()))
    }

    pub(crate) fn flag(&mut self, name: &str) -> Result<Option<bool>, Failure> {
        self.read(name, "true or false", Value::as_bool)
    }

    /// A whole number that a JavaScript number holds exactly.
    fn whole(&mut self, name: &str) -> Result<Option<u64>, Failure> {
        self.read(name, "a whole number", |v| {
            let number = v.as_f64()?;
            (number.fract() == 0.0 && (0.0..=9.0e15).contains(&number)).then_some(number as u64)
        })
    }

    /// A number of tokens; what exceeds 32 bits is as good as no limit.
    pub(crate) fn size(&mut self, name: &str) -> Result<Option<usize>, Failure> {
        let size = self.whole(name)?;
        Ok(size.map(|size| usize::try_from(size).unwrap_or(usize::MAX)))
    }

    /// A JSON object, empty if missing.
    pub(crate) fn object(&mut self, name: &str) -> Result<Map<String, Value>, Failure> {
        let object = self.read(name, "an object", |v| v.as_object().cloned())?;
        Ok(object.unwrap_or_default())
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
            Some(name) => Err(Failure::new(
                "OptionsError",
                format!("there is no option {name:?}"),
            )),
            None => Ok(()),
        }
    }

    /// The sampler of a request.
    pub(crate) fn sampler(&mut self) -> Result<Sampler, Failure> {
        let mut options = SamplerOptions::default();
        for (name, field) in [
            ("temperature", &mut options.temperature),
            ("top_p", &mut options.top_p),
            ("min_p", &mut options.min_p),
            ("repeat_penalty", &mut options.repeat_penalty),
            ("presence_penalty", &mut options.presence_penalty),
            ("frequency_penalty", &mut options.frequency_penalty),
        ] {
            if let Some(number) = self.number(name)? {
                *field = number;
            }
        }
        if let Some(k) = self.size("top_k")? {
            options.top_k = k;
        }
        options.seed = self.whole("seed")?;
        Sampler::new(options).map_err(Failure::of("OptionsError"))
    }
}
