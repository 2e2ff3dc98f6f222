//! Filters and tests as Jinja2 has them. The memory of their results is counted.

use super::limits::{charge_items, charged, check_items, error};
use super::numbers::{file_size, float, int_filter, round_filter};
use super::operators::percent;
use super::print::{to_repr, to_str, tojson};
use super::sequences::{default, dict_sort, extreme, join, sum};
use super::strings::{capitalize, is_cased, replace, strip};
use super::text::{center, escape, indent, strip_tags, title, truncate, url_encode};
use super::values::{elements, items, length, list};
use super::wrap::word_wrap;
use minijinja::functions::Function;
use minijinja::value::{FunctionArgs, FunctionResult, Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, State, filters};
use std::cmp::Ordering;

/// Adds a filter whose results are counted.
fn add<F, R, A>(env: &mut Environment<'_>, name: &'static str, filter: F)
where
    F: Function<R, A>,
    R: FunctionResult,
    A: for<'a> FunctionArgs<'a>,
{
    let filter = Value::from_function(filter);
    env.add_filter(name, move |state: &State<'_, '_>, args: Rest<Value>| {
        charged(filter.call(state, &args)?)
    });
}

/// [`add`] for filters whose result is a list.
fn add_list<F, R, A>(env: &mut Environment<'_>, name: &'static str, filter: F)
where
    F: Function<R, A>,
    R: FunctionResult,
    A: for<'a> FunctionArgs<'a>,
{
    let filter = Value::from_function(filter);
    env.add_filter(name, move |state: &State<'_, '_>, args: Rest<Value>| {
        // The filter may take it apart.
        charge_items(args.first().and_then(Value::len).unwrap_or(0))?;
        let made = filter.call(state, &args)?;
        match made.kind() {
            ValueKind::Seq | ValueKind::Iterable => charged(list(elements(&made)?)),
            _ => charged(made),
        }
    });
}

/// Adds all filters and tests to an environment.
pub(super) fn add_to(env: &mut Environment<'_>) {
    add_texts(env);
    add_sequences(env);
    add_numbers(env);
    add_tests(env);
}

fn add_texts(env: &mut Environment<'_>) {
    add(env, "tojson", tojson);
    add(env, "string", |v: &Value| to_str(v));
    add(env, "safe", |v: &Value| to_str(v));
    add(env, "join", join);
    add(env, "trim", |v: &Value, chars: Option<&str>| {
        to_str(v).map(|s| strip(&s, chars, true, true).to_owned())
    });
    add(env, "upper", |v: &Value| {
        to_str(v).map(|s| s.to_uppercase())
    });
    add(env, "lower", |v: &Value| {
        to_str(v).map(|s| s.to_lowercase())
    });
    add(env, "capitalize", |v: &Value| {
        to_str(v).map(|s| capitalize(&s))
    });
    add(env, "title", |v: &Value| to_str(v).map(|s| title(&s)));
    add(
        env,
        "replace",
        |v: &Value, old: &Value, new: &Value, count: Option<i64>| {
            replace(&to_str(v)?, &to_str(old)?, &to_str(new)?, count)
        },
    );
    add(env, "indent", indent);
    add(env, "center", center);
    add(env, "truncate", truncate);
    add(env, "wordwrap", word_wrap);
    add(env, "striptags", strip_tags);
    add(env, "urlencode", url_encode);
    add(
        env,
        "format",
        |v: &Value, args: Rest<Value>, kwargs: Kwargs| {
            let names: Vec<&str> = kwargs.args().collect();
            let pairs = names
                .iter()
                .map(|name| Ok((*name, kwargs.get::<Value>(name)?)));
            let pairs = pairs.collect::<Result<Vec<_>, Error>>()?;
            let mapping = (!pairs.is_empty()).then(|| pairs.into_iter().collect::<Value>());
            percent(&to_str(v)?, &args, mapping.as_ref())
        },
    );
    add(env, "wordcount", |v: &Value| {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        to_str(v).map(|s| {
            s.split(|c| !is_word(c))
                .filter(|word| !word.is_empty())
                .count()
        })
    });
    add(env, "pprint", |v: &Value| to_repr(v));
    for name in ["e", "escape", "forceescape"] {
        add(env, name, |v: &Value| to_str(v).map(|s| escape(&s)));
    }
    add_list(env, "split", filters::split);
    add_list(env, "lines", filters::lines);
}

fn add_sequences(env: &mut Environment<'_>) {
    for name in ["length", "count"] {
        add(env, name, length);
    }
    for name in ["default", "d"] {
        add(env, name, default);
    }
    add(env, "list", |v: &Value| elements(v).map(list));
    add(env, "items", |v: &Value| match v.kind() {
        ValueKind::Undefined => Ok(list(Vec::new())),
        ValueKind::Map => items(v),
        _ => Err(error("Can only get item pairs from a mapping.")),
    });
    add(env, "first", |v: &Value| {
        elements(v).map(|l| l.first().cloned().unwrap_or_default())
    });
    add(env, "last", |v: &Value| {
        elements(v).map(|l| l.last().cloned().unwrap_or_default())
    });
    add_list(
        env,
        "batch",
        |state: &State<'_, '_>, v: Value, n: usize, fill: Option<Value>| {
            filters::batch(state, v, check_items(n)?, fill)
        },
    );
    add_list(
        env,
        "slice",
        |state: &State<'_, '_>, v: Value, n: usize, fill: Option<Value>| {
            charge_items(check_items(n)?)?;
            filters::slice(state, v, n, fill)
        },
    );
    add(env, "sum", sum);
    add(
        env,
        "min",
        |v: &Value, args: Rest<Value>, kwargs: Kwargs| extreme(v, &args, &kwargs, Ordering::Less),
    );
    add(
        env,
        "max",
        |v: &Value, args: Rest<Value>, kwargs: Kwargs| {
            extreme(v, &args, &kwargs, Ordering::Greater)
        },
    );
    add_list(env, "sort", filters::sort);
    add_list(env, "unique", filters::unique);
    add_list(env, "reverse", filters::reverse);
    add(env, "dictsort", dict_sort);
    add_list(env, "map", filters::map);
    add_list(env, "select", filters::select);
    add_list(env, "reject", filters::reject);
    add_list(env, "selectattr", filters::selectattr);
    add_list(env, "rejectattr", filters::rejectattr);
    add_list(env, "groupby", filters::groupby);
    add_list(env, "chain", filters::chain);
    add_list(env, "zip", filters::zip);
}

fn add_numbers(env: &mut Environment<'_>) {
    env.add_filter("int", int_filter);
    env.add_filter("float", float);
    env.add_filter("round", round_filter);
    env.add_filter("filesizeformat", file_size);
}

fn add_tests(env: &mut Environment<'_>) {
    env.add_test("iterable", |v: &Value| {
        v.is_undefined() || v.try_iter().is_ok() && !v.is_none()
    });
    env.add_test("sequence", |v: &Value| {
        let kind = v.kind();
        matches!(
            kind,
            ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable
        )
    });
    env.add_test("number", |v: &Value| {
        matches!(v.kind(), ValueKind::Number | ValueKind::Bool)
    });
    env.add_test("integer", |v: &Value| {
        v.is_integer() && v.kind() == ValueKind::Number
    });
    env.add_test("lower", |v: &Value| {
        to_str(v).map(|s| is_cased(&s, char::is_lowercase, char::is_uppercase))
    });
    env.add_test("upper", |v: &Value| {
        to_str(v).map(|s| is_cased(&s, char::is_uppercase, char::is_lowercase))
    });
    env.add_test("callable", |v: &Value| v.kind() == ValueKind::Plain);
}
