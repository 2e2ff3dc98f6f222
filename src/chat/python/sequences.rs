//! The methods of `dict` and `list`, and Jinja2's filters of sequences.

use super::arguments::argument;
use super::limits::{check, error};
use super::numbers::Number;
use super::operators::add;
use super::print::to_str;
use super::values::{attribute, elements, growing, insert, items, list, tuple};
use minijinja::value::{Kwargs, Rest, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind};

pub(super) fn dict_method(dict: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    Ok(match method {
        "get" => {
            let (key, default): (&Value, Option<Value>) = from_args(args)?;
            match dict.get_item(key)? {
                v if v.is_undefined() => default.unwrap_or_else(|| Value::from(())),
                v => v,
            }
        }
        "items" => items(dict)?,
        "keys" => list(elements(dict)?),
        "values" => {
            let keys = elements(dict)?;
            keys.iter()
                .map(|k| dict.get_item(k))
                .collect::<Result<Vec<_>, _>>()
                .map(list)?
        }
        "copy" => dict.clone(),
        _ => return Err(ErrorKind::UnknownMethod.into()),
    })
}

pub(super) fn list_method(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let done = Value::from(());
    Ok(match method {
        "count" => {
            let (what,): (&Value,) = from_args(args)?;
            elements(value)?
                .iter()
                .filter(|v| *v == what)
                .count()
                .into()
        }
        "index" => {
            let (what,): (&Value,) = from_args(args)?;
            let at = elements(value)?.iter().position(|v| v == what);
            at.ok_or_else(|| error("the value is not in the list"))?
                .into()
        }
        "copy" => list(elements(value)?),
        "append" => {
            let (what,): (Value,) = from_args(args)?;
            insert(&growing(value)?, usize::MAX, what)?;
            done
        }
        "extend" => {
            let (more,): (&Value,) = from_args(args)?;
            let list = growing(value)?;
            for what in elements(more)? {
                insert(&list, usize::MAX, what)?;
            }
            done
        }
        "insert" => {
            let (at, what): (i64, Value) = from_args(args)?;
            let list = growing(value)?;
            let n = list.items().len();
            let from_end = n.saturating_sub(at.unsigned_abs() as usize);
            insert(&list, usize::try_from(at).unwrap_or(from_end), what)?;
            done
        }
        "pop" => {
            let (at,): (Option<i64>,) = from_args(args)?;
            let list = growing(value)?;
            let mut items = list.items();
            let at = at.unwrap_or(-1);
            let at = if at < 0 { at + items.len() as i64 } else { at };
            let at = usize::try_from(at).ok().filter(|&at| at < items.len());
            items.remove(at.ok_or_else(|| error("pop: there is no such item"))?)
        }
        "clear" => {
            growing(value)?.items().clear();
            done
        }
        "reverse" => {
            growing(value)?.items().reverse();
            done
        }
        _ => return Err(ErrorKind::UnknownMethod.into()),
    })
}

pub(super) fn join(value: &Value, d: Option<&Value>, kwargs: Kwargs) -> Result<String, Error> {
    let d = match (d, kwargs.get::<Option<Value>>("d")?) {
        (Some(d), _) => to_str(d)?,
        (None, d) => d.map_or(Ok(String::new()), |d| to_str(&d))?,
    };
    let path: Option<Value> = kwargs.get("attribute")?;
    kwargs.assert_all_used()?;
    let mut out = String::new();
    for (i, item) in elements(value)?.iter().enumerate() {
        check(out.len(), 0)?;
        if i > 0 {
            out.push_str(&d);
        }
        match &path {
            Some(path) => out.push_str(&to_str(&attribute(item, path)?)?),
            None => out.push_str(&to_str(item)?),
        }
    }
    Ok(out)
}

pub(super) fn default(
    value: &Value,
    other: Option<Value>,
    boolean: Option<bool>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let other = match other {
        Some(v) => v,
        None => kwargs
            .get::<Option<Value>>("default_value")?
            .unwrap_or_else(|| "".into()),
    };
    let boolean = boolean.or(kwargs.get("boolean")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    let replace = value.is_undefined() || boolean && !value.is_true();
    Ok(if replace { other } else { value.clone() })
}

/// `dictsort(case_sensitive=False, by='key', reverse=False)`.
pub(super) fn dict_sort(dict: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let is_exact = argument(&args, &kwargs, 0, "case_sensitive")?.is_true();
    let by = argument(&args, &kwargs, 1, "by")?;
    let reverse = argument(&args, &kwargs, 2, "reverse")?.is_true();
    kwargs.assert_all_used()?;
    let by_value = match by.as_str() {
        None | Some("key") => false,
        Some("value") => true,
        Some(_) => return Err(error("dictsort sorts by key or by value")),
    };
    if dict.kind() != ValueKind::Map {
        return Err(error("dictsort takes a dictionary"));
    }
    let mut pairs = Vec::new();
    for key in dict.try_iter()? {
        let value = dict.get_item(&key)?;
        let order = if by_value { &value } else { &key };
        let order = match order.as_str() {
            Some(text) if !is_exact => text.to_lowercase().into(),
            _ => order.clone(),
        };
        pairs.push((order, tuple(vec![key, value])));
    }
    pairs.sort_by(|(a, _), (b, _)| if reverse { b.cmp(a) } else { a.cmp(b) });
    Ok(list(pairs.into_iter().map(|(_, pair)| pair).collect()))
}

/// `sum(attribute=None, start=0)`.
pub(super) fn sum(values: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let path = argument(&args, &kwargs, 0, "attribute")?;
    let start = argument(&args, &kwargs, 1, "start")?;
    kwargs.assert_all_used()?;
    let start = if start.is_undefined() {
        0.into()
    } else {
        start
    };
    elements(values)?.iter().try_fold(start, |total, value| {
        let is_whole = path.is_undefined() || path.is_none();
        add(
            &total,
            &if is_whole {
                value.clone()
            } else {
                attribute(value, &path)?
            },
        )
    })
}

/// `min` and `max`, `(case_sensitive=False, attribute=None)`: the first of the values that is the
/// least or greatest; undefined if there is none.
pub(super) fn extreme(
    values: &Value,
    args: &[Value],
    kwargs: &Kwargs,
    wanted: std::cmp::Ordering,
) -> Result<Value, Error> {
    let is_exact = argument(args, kwargs, 0, "case_sensitive")?.is_true();
    let path = argument(args, kwargs, 1, "attribute")?;
    kwargs.assert_all_used()?;
    let mut best: Option<(Value, Value)> = None;
    for value in elements(values)? {
        let key = if path.is_undefined() || path.is_none() {
            value.clone()
        } else {
            attribute(&value, &path)?
        };
        let key = match key.as_str() {
            Some(text) if !is_exact => text.to_lowercase().into(),
            _ => key,
        };
        match &best {
            Some((other, _)) => {
                let order = match (Number::of(&key), Number::of(other)) {
                    (Some(a), Some(b)) => a.float().total_cmp(&b.float()),
                    (None, None) if key.kind() == other.kind() => key.cmp(other),
                    _ => {
                        let (a, b) = (other.kind(), key.kind());
                        return Err(error(format!("{a} and {b} cannot be compared")));
                    }
                };
                if order == wanted {
                    best = Some((key, value));
                }
            }
            None => best = Some((key, value)),
        }
    }
    Ok(best.map(|(_, value)| value).unwrap_or_default())
}
