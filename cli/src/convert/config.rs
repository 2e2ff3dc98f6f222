//! `config.json` and the other JSON files of a folder.

use crate::io::Failure;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Largest JSON file that is read: tokenizers have tens of megabytes.
const MAX_JSON: u64 = 256 << 20;

/// Widest head, and most heads.
pub(super) const MAX_HEAD: u32 = 1 << 16;

/// Reads a JSON object, if the file exists.
pub(super) fn read_json(path: &Path) -> Result<Option<Value>, Failure> {
    match read_any_json(path)? {
        Some(value) if !value.is_object() => Err(Failure::Work(format!(
            "{}: not a JSON object",
            path.display()
        ))),
        value => Ok(value),
    }
}

/// Reads JSON, if the file exists.
pub(super) fn read_any_json(path: &Path) -> Result<Option<Value>, Failure> {
    let Some(bytes) = read_file(path, MAX_JSON)? else {
        return Ok(None);
    };
    let value = serde_json::from_slice(&bytes)
        .or_else(|_| serde_json::from_slice(&without_infinities(&bytes)));
    value
        .map(Some)
        .map_err(|error| Failure::Work(format!("{}: {error}", path.display())))
}

/// JSON as Python writes it (`time_step_limit` of Mamba 2 is `[0.0, Infinity]`) with `null` for
/// numbers that JSON has not.
fn without_infinities(json: &[u8]) -> Vec<u8> {
    let (mut out, mut rest, mut in_string) = (Vec::with_capacity(json.len()), json, false);
    while let [byte, tail @ ..] = rest {
        let number = [&b"-Infinity"[..], b"Infinity", b"NaN"]
            .into_iter()
            .find(|number| rest.starts_with(number));
        if let Some(number) = number.filter(|_| !in_string) {
            out.extend(b"null");
            rest = &rest[number.len()..];
            continue;
        }
        in_string ^= *byte == b'"';
        // What is escaped ends no string.
        let n = if in_string && *byte == b'\\' && !tail.is_empty() {
            2
        } else {
            1
        };
        out.extend(&rest[..n]);
        rest = &rest[n..];
    }
    out
}

/// The bytes of a file of at most `limit` bytes, if it exists.
pub(super) fn read_file(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, Failure> {
    let failed = Failure::file(path);
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
        Ok(found) if !found.is_file() => {
            return Err(Failure::Work(format!("{}: not a file", path.display())));
        }
        Ok(found) if found.len() > limit => {
            return Err(Failure::Work(format!(
                "{}: {} bytes, more than {limit}",
                path.display(),
                found.len()
            )));
        }
        Ok(_) => {}
    }
    std::fs::read(path).map(Some).map_err(failed)
}

/// The hyper-parameters of a model, by the names of Hugging Face. A key that is `null` counts as
/// absent.
pub(super) struct Config {
    path: PathBuf,
    keys: Map<String, Value>,
    nulls: Vec<String>,
    /// Of the rope, by the names of transformers 5: `rope_theta`, `rope_type`, `factor`, …
    rope: Map<String, Value>,
    /// Of the layers with a window, where they have a rope of their own.
    rope_swa: Map<String, Value>,
}

impl Config {
    /// Reads `config.json`. The text part of a model with several counts as all of it.
    pub(super) fn open(folder: &Path) -> Result<Config, Failure> {
        let path = folder.join("config.json");
        let missing = || {
            Failure::Work(format!(
                "{}: no such file, and a folder of Hugging Face has one",
                path.display()
            ))
        };
        let Some(Value::Object(mut keys)) = read_json(&path)? else {
            return Err(missing());
        };
        if let Some(Value::Object(text)) = keys.remove("text_config") {
            let architectures = keys.remove("architectures");
            keys.extend(text);
            keys.extend(architectures.map(|value| ("architectures".to_owned(), value)));
        }
        Ok(Config::of(path, keys))
    }

    /// The keys of an object in a file.
    pub(super) fn of(path: PathBuf, mut keys: Map<String, Value>) -> Config {
        let nulls = keys
            .iter()
            .filter(|(_, value)| value.is_null())
            .map(|(name, _)| name.clone())
            .collect();
        keys.retain(|_, value| !value.is_null());
        // Older code has names of its own for what everything is read by.
        let alternatives = [
            ("n_layer", "num_hidden_layers"),
            ("n_layers", "num_hidden_layers"),
            ("num_layers", "num_hidden_layers"),
            ("n_embd", "hidden_size"),
            ("d_model", "hidden_size"),
            ("n_head", "num_attention_heads"),
            ("n_heads", "num_attention_heads"),
        ];
        for (old, name) in alternatives {
            if let Some(value) = keys.get(old).cloned() {
                keys.entry(name).or_insert(value);
            }
        }
        if let Some(layers) = keys
            .get("layers_block_type")
            .and_then(Value::as_array)
            .map(Vec::len)
        {
            keys.entry("num_hidden_layers").or_insert(layers.into());
        }
        let mut config = Config {
            path,
            keys,
            nulls,
            rope: Map::new(),
            rope_swa: Map::new(),
        };
        config.read_rope();
        config
    }

    /// Keys that a family's configuration may leave out, `defaults` (a JSON object) by name.
    pub(super) fn add_defaults(&mut self, defaults: &str) {
        let Ok(Value::Object(defaults)) = serde_json::from_str(defaults) else {
            unreachable!("{defaults}")
        };
        for (key, value) in defaults {
            self.keys.entry(key).or_insert(value);
        }
        self.read_rope();
    }

    /// Gathers what older files have beside `rope_scaling`.
    fn read_rope(&mut self) {
        let object = |name: &str| self.keys.get(name).and_then(Value::as_object);
        let all = object("rope_parameters")
            .or(object("rope_scaling"))
            .cloned()
            .unwrap_or_default();
        let by_type = |name: &str| all.get(name).and_then(Value::as_object);
        self.rope_swa = by_type("sliding_attention").cloned().unwrap_or_default();
        self.rope = by_type("full_attention").cloned().unwrap_or(all);
        let alternatives: [(&str, &[&str]); 3] = [
            (
                "rope_theta",
                &["global_rope_theta", "rope_theta", "rotary_emb_base"],
            ),
            (
                "partial_rotary_factor",
                &[
                    "partial_rotary_factor",
                    "rope_pct",
                    "rope_percent",
                    "rotary_pct",
                ],
            ),
            (
                "original_max_position_embeddings",
                &["original_max_position_embeddings"],
            ),
        ];
        for (name, keys) in alternatives {
            if let Some(value) = keys
                .iter()
                .find_map(|key| self.keys.get(*key))
                .filter(|_| !self.rope.contains_key(name))
            {
                self.rope.insert(name.to_owned(), value.clone());
            }
        }
        if let Some(value) = self.rope.get("type").cloned() {
            self.rope.entry("rope_type").or_insert(value);
        }
        let local = ["local_rope_theta", "swa_rope_theta", "rope_local_base_freq"]
            .iter()
            .find_map(|key| self.keys.get(*key));
        if let Some(theta) = local.filter(|_| !self.rope_swa.contains_key("rope_theta")) {
            self.rope_swa.insert("rope_theta".to_owned(), theta.clone());
        }
    }

    /// The first of `names` that is there; `attn_config.clip_qkv` is a key of an object.
    pub(super) fn get(&self, names: &[&str]) -> Option<(String, &Value)> {
        names.iter().find_map(|name| {
            let mut parts = name.split('.');
            let first = self.keys.get(parts.next()?)?;
            let value = parts
                .try_fold(first, |object, part| object.get(part))
                .filter(|value| !value.is_null());
            value.map(|value| ((*name).to_owned(), value))
        })
    }

    /// Whether the file says this text.
    pub(super) fn is(&self, name: &str, text: &str) -> bool {
        self.keys.get(name).and_then(Value::as_str) == Some(text)
    }

    /// Whether the file says `null`, which for some keys is not the same as nothing.
    pub(super) fn is_null(&self, name: &str) -> bool {
        self.nulls.iter().any(|null| null == name)
    }

    pub(super) fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.keys.insert(name.to_owned(), value.into());
    }

    /// Counts `n` more layers with attention in lists with a text per layer.
    pub(super) fn add_layers(&mut self, n: u32) -> Result<(), Failure> {
        if n > 0
            && let Some(layers) = self.opt_strs("layer_types")?
        {
            let more = std::iter::repeat_n("full_attention", n as usize);
            let layers: Vec<String> = layers.into_iter().chain(more).map(String::from).collect();
            self.set("layer_types", layers);
        }
        Ok(())
    }

    pub(super) fn opt_u32(&self, names: &[&str]) -> Result<Option<u32>, Failure> {
        let value = self.get(names).map(|(name, value)| {
            let number = value.as_u64().and_then(|n| u32::try_from(n).ok());
            number.ok_or_else(|| self.wrong(&name, value, "a whole number below 2^32"))
        });
        value.transpose()
    }

    pub(super) fn u32(&self, name: &str) -> Result<u32, Failure> {
        self.opt_u32(&[name])?.ok_or_else(|| self.missing(name))
    }

    /// A list of counts.
    pub(super) fn opt_counts(&self, name: &str) -> Result<Option<Vec<i32>>, Failure> {
        let Some((_, value)) = self.get(&[name]) else {
            return Ok(None);
        };
        let counts = value.as_array().and_then(|list| {
            list.iter()
                .map(|n| i32::try_from(n.as_u64()?).ok())
                .collect()
        });
        counts
            .ok_or_else(|| self.wrong(name, value, "a list of whole numbers below 2^31"))
            .map(Some)
    }

    /// A list of numbers.
    pub(super) fn opt_numbers(&self, name: &str) -> Result<Option<Vec<f64>>, Failure> {
        let Some((_, value)) = self.get(&[name]) else {
            return Ok(None);
        };
        let numbers = value
            .as_array()
            .and_then(|list| list.iter().map(Value::as_f64).collect());
        numbers
            .ok_or_else(|| self.wrong(name, value, "a list of numbers"))
            .map(Some)
    }

    pub(super) fn opt_f32(&self, names: &[&str]) -> Result<Option<f32>, Failure> {
        let value = self
            .get(names)
            .map(|(name, value)| self.finite(&name, value));
        value.transpose()
    }

    pub(super) fn f64(&self, name: &str) -> Result<f64, Failure> {
        let (name, value) = self.get(&[name]).ok_or_else(|| self.missing(name))?;
        value
            .as_f64()
            .ok_or_else(|| self.wrong(&name, value, "a number"))
    }

    pub(super) fn opt_bool(&self, names: &[&str]) -> Result<Option<bool>, Failure> {
        let value = self.get(names);
        value
            .map(|(name, value)| {
                value
                    .as_bool()
                    .ok_or_else(|| self.wrong(&name, value, "true or false"))
            })
            .transpose()
    }

    /// A list of texts.
    pub(super) fn opt_strs(&self, name: &str) -> Result<Option<Vec<&str>>, Failure> {
        let Some(value) = self.keys.get(name) else {
            return Ok(None);
        };
        let texts = value
            .as_array()
            .and_then(|list| list.iter().map(Value::as_str).collect());
        texts
            .ok_or_else(|| self.wrong(name, value, "a list of texts"))
            .map(Some)
    }

    pub(super) fn rope_type(&self) -> Option<&str> {
        self.rope
            .get("rope_type")
            .and_then(Value::as_str)
            .filter(|name| *name != "default")
    }

    pub(super) fn rope_type_swa(&self) -> Option<&str> {
        self.rope_swa
            .get("rope_type")
            .and_then(Value::as_str)
            .filter(|name| *name != "default")
    }

    pub(super) fn rope_bool(&self, name: &str) -> Result<Option<bool>, Failure> {
        let value = self.rope.get(name).filter(|value| !value.is_null());
        value
            .map(|value| {
                value
                    .as_bool()
                    .ok_or_else(|| self.wrong(name, value, "true or false"))
            })
            .transpose()
    }

    pub(super) fn rope_f32(&self, name: &str) -> Result<Option<f32>, Failure> {
        let value = self.rope.get(name).filter(|value| !value.is_null());
        value
            .map(|value| self.finite(&format!("rope_parameters.{name}"), value))
            .transpose()
    }

    pub(super) fn rope_theta_swa(&self) -> Result<Option<f32>, Failure> {
        let value = self.rope_swa.get("rope_theta");
        value
            .map(|value| self.finite("rope_parameters.sliding_attention.rope_theta", value))
            .transpose()
    }

    /// A list of counts of the rope.
    pub(super) fn rope_counts(&self, name: &str) -> Result<Option<Vec<i32>>, Failure> {
        let Some(value) = self.rope.get(name).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let counts = value.as_array().filter(|list| list.len() <= 4);
        let counts = counts.and_then(|list| {
            list.iter()
                .map(|n| i32::try_from(n.as_u64()?).ok())
                .collect()
        });
        counts
            .ok_or_else(|| self.wrong(name, value, "a list of up to four whole numbers"))
            .map(Some)
    }

    /// A list of factors of the rope.
    pub(super) fn rope_factors(&self, name: &str) -> Result<Option<Vec<f32>>, Failure> {
        let Some(value) = self.rope.get(name) else {
            return Ok(None);
        };
        let list = value
            .as_array()
            .ok_or_else(|| self.wrong(name, value, "a list of numbers"))?;
        list.iter()
            .map(|value| self.finite(name, value))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// Width of a head; that of a query, where the file does not say.
    pub(super) fn head_dim(&self) -> Result<u32, Failure> {
        let n = match self.opt_u32(&["head_dim"])? {
            Some(n) => Some(n),
            None => self
                .u32("hidden_size")?
                .checked_div(self.u32("num_attention_heads")?),
        };
        let n = n.filter(|n| *n <= MAX_HEAD);
        n.ok_or_else(|| {
            self.refuse(format_args!(
                "head_dim, or hidden_size / num_attention_heads, is above {MAX_HEAD} or no number"
            ))
        })
    }

    fn finite(&self, name: &str, value: &Value) -> Result<f32, Failure> {
        let number = value.as_f64().map(|x| x as f32).filter(|x| x.is_finite());
        number.ok_or_else(|| self.wrong(name, value, "a number"))
    }

    fn wrong(&self, name: &str, value: &Value, expected: &str) -> Failure {
        self.refuse(format_args!("{name} is {value}, not {expected}"))
    }

    pub(super) fn missing(&self, name: &str) -> Failure {
        self.refuse(format_args!("{name} is missing"))
    }

    /// An error about this file.
    pub(super) fn refuse(&self, what: impl std::fmt::Display) -> Failure {
        Failure::Work(format!("{}: {what}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_json_has_not_count_as_absent() {
        let python =
            br#"{"a": [0.0, Infinity], "b": NaN, "c": -Infinity, "d \\\" NaN": "Infinity \\"}"#;
        let value: Value = serde_json::from_slice(&without_infinities(python)).unwrap();
        assert_eq!(
            value,
            serde_json::json!({"a": [0.0, null], "b": null, "c": null, "d \\\" NaN": "Infinity \\"})
        );
    }
}
