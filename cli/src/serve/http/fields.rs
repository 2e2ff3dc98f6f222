//! The body of a request, read field by field, so that one that nobody understands is an error.

use crate::serve::http::error::ApiError;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The fields that are left.
#[derive(Default)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    pub(crate) fn parse(body: &[u8]) -> Result<Fields, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Fields(fields)),
            Ok(_) => Err(ApiError::wrong("the body is not a JSON object")),
            Err(error) => Err(ApiError::wrong(format!("the body is not JSON: {error}"))),
        }
    }

    /// The value of a field; `null` is as if it were not there.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        match self.0.shift_remove(name) {
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
        Ok(self.take(name)?.map(Fields))
    }

    /// The value of a field, which stays.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
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
        match self.0.insert(name.to_owned(), value) {
            None => Ok(()),
            Some(_) => Err(ApiError::field(name, "this server does not know the field")),
        }
    }

    /// Fields that change nothing here.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        names
            .iter()
            .for_each(|name| drop(self.0.shift_remove(*name)));
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

    /// Refuses what is left.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => Err(ApiError::field(name, "this server does not know the field")),
        }
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
            Fields::parse(json!({"a": found}).to_string().as_bytes())
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
}
