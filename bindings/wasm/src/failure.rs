//! Failures as exceptions.

use wasm_bindgen::JsValue;

/// An exception to be thrown: its name and its message.
pub(crate) struct Failure {
    name: &'static str,
    message: String,
}

impl Failure {
    pub(crate) fn new(name: &'static str, message: impl Into<String>) -> Failure {
        Failure {
            name,
            message: message.into(),
        }
    }

    /// Makes failures of this name from errors.
    pub(crate) fn of<E: std::fmt::Display>(name: &'static str) -> impl Fn(E) -> Failure {
        move |e| Failure::new(name, e.to_string())
    }
}

impl From<Failure> for JsValue {
    fn from(failure: Failure) -> JsValue {
        let error = js_sys::Error::new(&failure.message);
        error.set_name(failure.name);
        error.into()
    }
}
