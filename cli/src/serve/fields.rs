//! The body of a request, read field by field, so that one that nobody understands is an error.

use super::error::ApiError;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The fields that are left.
#[derive(Default)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    pub(super) fn parse(body: &[u8]) -> Result<Fields, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Fields(fields)),
            Ok(_) => Err(ApiError::wrong("the body is not a JSON object")),
            Err(error) => Err(ApiError::wrong(format!("the body is not JSON: {error}"))),
        }
    }

    /// The value of a field; `null` is as if it were not there.
    pub(super) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        match self.0.shift_remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value).map(Some).map_err(|error| ApiError::field(name, error)),
        }
    }

    /// The value of a field that has to be there.
    pub(super) fn need<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, ApiError> {
        self.take(name)?.ok_or_else(|| ApiError::field(name, "this field is required"))
    }

    /// Whether a flag is set; false if it is not there.
    pub(super) fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        Ok(self.take(name)?.unwrap_or(false))
    }

    /// The fields of an object in a field.
    pub(super) fn object(&mut self, name: &str) -> Result<Option<Fields>, ApiError> {
        Ok(self.take(name)?.map(Fields))
    }

    /// The value of a field, which stays.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// Gives a field the name that it has elsewhere.
    pub(super) fn rename(&mut self, name: &str, elsewhere: &str) -> Result<(), ApiError> {
        match self.take::<Value>(name)? {
            Some(value) => self.set(elsewhere, value),
            None => Ok(()),
        }
    }

    /// Adds a field, which must not be there.
    pub(super) fn set(&mut self, name: &str, value: Value) -> Result<(), ApiError> {
        match self.0.insert(name.to_owned(), value) {
            None => Ok(()),
            Some(_) => Err(ApiError::field(name, "this server does not know the field")),
        }
    }

    /// Fields that change nothing here.
    pub(super) fn ignore(&mut self, names: &[&str]) {
        names.iter().for_each(|name| drop(self.0.shift_remove(*name)));
    }

    /// A field of other servers, with the value for what happens here anyway.
    pub(super) fn only(&mut self, name: &str, value: impl Into<Value>) -> Result<(), ApiError> {
        let value = value.into();
        match self.take::<Value>(name)? {
            Some(other) if other != value => Err(ApiError::field(name, format!("only {value} is supported"))),
            _ => Ok(()),
        }
    }

    /// Refuses what is left.
    pub(super) fn finish(self) -> Result<(), ApiError> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => Err(ApiError::field(name, "this server does not know the field")),
        }
    }
}
