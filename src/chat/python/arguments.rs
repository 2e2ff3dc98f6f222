//! Arguments of filters, by position or by name.

use minijinja::Error;
use minijinja::value::{Kwargs, Value};

/// Argument `i` of a filter, by position or by name; undefined if it is missing.
pub(super) fn argument(
    args: &[Value],
    kwargs: &Kwargs,
    i: usize,
    name: &str,
) -> Result<Value, Error> {
    let named: Option<Value> = kwargs.get(name)?;
    Ok(named.or_else(|| args.get(i).cloned()).unwrap_or_default())
}
