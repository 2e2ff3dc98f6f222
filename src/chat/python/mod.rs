//! The parts of Python that chat templates rely on: how values print (`str`, `repr`, `json.dumps`),
//! operators, the methods of strings, dictionaries and lists, and the filters and tests of Jinja2
//! that `minijinja` lacks or implements differently.
//!
//! Results of operators, filters and methods are counted, so that a rendering takes bounded memory.

mod arguments;
mod filters;
mod limits;
mod numbers;
mod operators;
mod print;
mod sequences;
mod strings;
mod text;
mod values;
mod wrap;

use limits::{charge, charged, error};
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use std::borrow::Cow;

pub(super) use limits::{Raised, TooMuch, begin};
pub(super) use values::from_json;

/// Makes an environment behave like Jinja2's.
pub(super) fn add_to(env: &mut Environment<'_>) {
    env.set_formatter(|out, _, value| {
        let text = match value.as_str() {
            Some(text) => Cow::Borrowed(text),
            None => Cow::Owned(print::to_str(value)?),
        };
        charge(text.len())?;
        Ok(out.write_str(&text)?)
    });
    env.set_unknown_method_callback(call_method);
    env.remove_global("debug");
    env.add_function(
        "raise_exception",
        |message: &Value| -> Result<Value, Error> {
            Err(error("raise_exception").with_source(Raised(print::to_str(message)?)))
        },
    );
    operators::add_to(env);
    filters::add_to(env);
}

/// The methods of `str`, `dict` and `list` that templates call. Those that would modify an input
/// are refused, as by the sandbox of transformers.
fn call_method(
    _: &State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    charged(match (value.kind(), value.as_str()) {
        (_, Some(s)) => strings::string_method(s, method, args)?,
        (ValueKind::Map, _) => sequences::dict_method(value, method, args)?,
        (ValueKind::Seq | ValueKind::Iterable, _) => sequences::list_method(value, method, args)?,
        _ => return Err(ErrorKind::UnknownMethod.into()),
    })
}
