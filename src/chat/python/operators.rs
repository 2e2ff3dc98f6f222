//! Python's operators, which templates call as functions once they are translated.

use super::limits::{charge, charge_items, charged, check, error};
use super::numbers::Number;
use super::print::{to_repr, to_str};
use super::values::{elements, is_sequence, is_tuple, list, tuple};
use crate::chat::translate::PREFIX;
use minijinja::value::{Rest, Value, ValueKind};
use minijinja::{Environment, Error, FormatStyle};

/// Adds the functions to an environment.
pub(super) fn add_to(env: &mut Environment<'_>) {
    let fold = |of: fn(&Value, &Value) -> Result<Value, Error>| {
        move |args: Rest<Value>| -> Result<Value, Error> {
            let mut args = args.iter();
            let first = args.next().cloned().unwrap_or_default();
            args.try_fold(first, |left, right| charged(of(&left, right)?))
        }
    };
    let name = |name: &str| format!("{PREFIX}{name}");
    env.add_function(name("add"), fold(add));
    env.add_function(name("mul"), fold(mul));
    env.add_function(name("mod"), fold(modulo));
    env.add_function(name("div"), fold(divide));
    env.add_function(name("floordiv"), fold(floor_divide));
    env.add_function(
        name("concat"),
        |args: Rest<Value>| -> Result<Value, Error> {
            let mut out = String::new();
            for value in args.iter() {
                out.push_str(&to_str(value)?);
                check(out.len(), 0)?;
            }
            charged(out.into())
        },
    );
    env.add_function(name("slice"), slice);
    env.add_function(name("list"), |items: &Value| {
        let items = elements(items)?;
        charge_items(items.len())?;
        Ok(list(items))
    });
    env.add_function(name("tuple"), |items: &Value| {
        let items = elements(items)?;
        charge_items(items.len())?;
        Ok(tuple(items))
    });
    env.add_function(name("text"), |n: usize| charge(n).map(|()| ""));
}

fn unsupported(operator: &str, left: &Value, right: &Value) -> Error {
    error(format!(
        "unsupported operand types for {operator}: {} and {}",
        left.kind(),
        right.kind()
    ))
}

/// `left + right`.
pub(super) fn add(left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        check(left.len() + right.len(), 0)?;
        return Ok([left, right].concat().into());
    }
    if is_sequence(left) && is_sequence(right) {
        if is_tuple(left) != is_tuple(right) {
            return Err(error("a list and a tuple cannot be added"));
        }
        let mut items = elements(left)?;
        let more = elements(right)?;
        charge_items(more.len())?;
        items.extend(more);
        return Ok(if is_tuple(left) {
            tuple(items)
        } else {
            list(items)
        });
    }
    match (Number::of(left), Number::of(right)) {
        (Some(Number::Int(a)), Some(Number::Int(b))) => Number::int(a.checked_add(b)),
        (Some(a), Some(b)) => Ok((a.float() + b.float()).into()),
        _ => Err(unsupported("+", left, right)),
    }
}

/// `left * right`.
fn mul(left: &Value, right: &Value) -> Result<Value, Error> {
    let repeats = |value: &Value| value.as_str().is_some() || is_sequence(value);
    let (what, times) = if repeats(left) {
        (left, right)
    } else {
        (right, left)
    };
    match (Number::of(what), Number::of(times)) {
        (Some(Number::Int(a)), Some(Number::Int(b))) => Number::int(a.checked_mul(b)),
        (Some(a), Some(b)) => Ok((a.float() * b.float()).into()),
        (None, Some(Number::Int(times))) if repeats(what) => {
            let times = usize::try_from(times.max(0)).unwrap_or(usize::MAX);
            if let Some(text) = what.as_str() {
                check(text.len().saturating_mul(times), 0)?;
                return Ok(text.repeat(times).into());
            }
            let items = elements(what)?;
            charge_items(items.len().saturating_mul(times))?;
            let repeated = std::iter::repeat_n(items, times).flatten().collect();
            Ok(if is_tuple(what) {
                tuple(repeated)
            } else {
                list(repeated)
            })
        }
        _ => Err(unsupported("*", left, right)),
    }
}

/// `left % right`: the remainder, which has the sign of `right`; or a formatted string.
fn modulo(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(format) = left.as_str() {
        if is_tuple(right) {
            return percent(format, &elements(right)?, None).map(Value::from);
        }
        return percent(format, std::slice::from_ref(right), Some(right)).map(Value::from);
    }
    match (Number::of(left), Number::of(right)) {
        (Some(_), Some(b)) if b.float() == 0.0 => Err(error("division by zero")),
        (Some(Number::Int(a)), Some(Number::Int(b))) => {
            let rest = a.wrapping_rem(b);
            let other_sign = rest != 0 && (rest < 0) != (b < 0);
            Number::int(Some(if other_sign { rest + b } else { rest }))
        }
        (Some(a), Some(b)) => {
            let (a, b) = (a.float(), b.float());
            let rest = a % b;
            let other_sign = rest != 0.0 && (rest < 0.0) != (b < 0.0);
            Ok(if other_sign { rest + b } else { rest }.into())
        }
        _ => Err(unsupported("%", left, right)),
    }
}

/// `left / right`, which is no integer.
fn divide(left: &Value, right: &Value) -> Result<Value, Error> {
    match (Number::of(left), Number::of(right)) {
        (Some(_), Some(b)) if b.float() == 0.0 => Err(error("division by zero")),
        (Some(a), Some(b)) => Ok((a.float() / b.float()).into()),
        _ => Err(unsupported("/", left, right)),
    }
}

/// `left // right`, rounded down.
fn floor_divide(left: &Value, right: &Value) -> Result<Value, Error> {
    match (Number::of(left), Number::of(right)) {
        (Some(_), Some(b)) if b.float() == 0.0 => Err(error("division by zero")),
        (Some(Number::Int(a)), Some(Number::Int(b))) => {
            let down = a
                .checked_rem(b)
                .is_some_and(|rest| rest != 0 && (rest < 0) != (b < 0));
            Number::int(a.checked_div(b).map(|n| n - i128::from(down)))
        }
        (Some(a), Some(b)) => Ok((a.float() / b.float()).floor().into()),
        _ => Err(unsupported("//", left, right)),
    }
}

/// `value[start:stop:step]`.
fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value, Error> {
    let bound = |value: &Value| match Number::of(value) {
        _ if value.is_none() => Ok(None),
        Some(Number::Int(n)) => Ok(Some(n.clamp(i64::MIN.into(), i64::MAX.into()) as i64)),
        _ => Err(error("the bounds of a slice are integers")),
    };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(error("the step of a slice cannot be zero"));
    }
    let picked = |len: usize| {
        let len = len as i64;
        // The first and last position that the direction allows.
        let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
        let clamp = |n: i64| {
            if n < 0 {
                n.saturating_add(len).max(low)
            } else {
                n.min(high)
            }
        };
        let begin = start.map_or(if step > 0 { low } else { high }, clamp);
        let end = stop.map_or(if step > 0 { high } else { low }, clamp);
        std::iter::successors(Some(begin), move |&i| i.checked_add(step))
            .take_while(move |&i| if step > 0 { i < end } else { i > end })
            .map(|i| i as usize)
    };
    if let Some(text) = value.as_str() {
        charge(text.len().saturating_mul(size_of::<char>()))?;
        let chars: Vec<char> = text.chars().collect();
        let text: String = picked(chars.len()).map(|i| chars[i]).collect();
        return charged(text.into());
    }
    if !is_sequence(value) {
        return Err(error(format!("{} cannot be sliced", value.kind())));
    }
    let items = elements(value)?;
    let sliced = picked(items.len()).map(|i| items[i].clone()).collect();
    charged(if is_tuple(value) {
        tuple(sliced)
    } else {
        list(sliced)
    })
}

/// A directive of a format: `%(key)-5.2f`.
struct Directive<'a> {
    key: Option<&'a str>,
    /// Flags, width and precision, with `*` replaced.
    options: String,
    conversion: char,
}

/// `format % args`; `mapping` is what `%(key)s` looks in.
pub(super) fn percent(
    format: &str,
    args: &[Value],
    mapping: Option<&Value>,
) -> Result<String, Error> {
    let mut args = args.iter();
    let mut out = String::new();
    let mut rest = format;
    let mut has_keys = false;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let (directive, behind) = directive(&rest[at + 1..], &mut args)?;
        rest = behind;
        if directive.conversion == '%' {
            out.push('%');
            continue;
        }
        let value = match (directive.key, mapping) {
            (Some(key), Some(mapping)) if mapping.kind() == ValueKind::Map => {
                has_keys = true;
                let value = mapping.get_item(&key.into())?;
                if value.is_undefined() {
                    return Err(error(format!("the format's key {key:?} is not there")));
                }
                value
            }
            (Some(_), _) => return Err(error("the format requires a mapping")),
            (None, _) => {
                let next = args.next().cloned();
                next.ok_or_else(|| error("not enough arguments for the format"))?
            }
        };
        let number = Number::of(&value);
        let (conversion, value) = match (directive.conversion, number) {
            ('s', _) => ('s', to_str(&value)?.into()),
            ('r' | 'a', _) => ('s', to_repr(&value)?.into()),
            ('d' | 'i' | 'u', Some(Number::Int(n))) => ('d', Number::int(Some(n))?),
            ('d' | 'i' | 'u', Some(Number::Float(x))) => ('d', Number::int(Some(x as i128))?),
            ('c', _) => ('c', value),
            (other @ ('x' | 'X' | 'o'), Some(Number::Int(n))) => (other, Number::int(Some(n))?),
            (other @ ('e' | 'E' | 'f' | 'F' | 'g' | 'G'), Some(n)) => (other, n.float().into()),
            (other, _) => return Err(error(format!("%{other} does not format {}", value.kind()))),
        };
        let longest = value.as_str().map_or(0, str::len);
        check(out.len().saturating_add(longest), 0)?;
        let directive = format!("%{}{conversion}", directive.options);
        out += &minijinja::format_filter(FormatStyle::Printf, &directive, &[value])?;
    }
    out.push_str(rest);
    let is_mapping = mapping.is_some_and(|value| value.kind() == ValueKind::Map);
    if args.next().is_some() && !has_keys && !is_mapping {
        return Err(error("not all arguments of the format were used"));
    }
    check(out.len(), 0)?;
    Ok(out)
}

/// The directive at the start of `text`, and the rest.
fn directive<'a, 'b>(
    text: &'a str,
    args: &mut impl Iterator<Item = &'b Value>,
) -> Result<(Directive<'a>, &'a str), Error> {
    let incomplete = || error("the format ends in the middle of a directive");
    let mut rest = text;
    let mut key = None;
    if let Some(behind) = rest.strip_prefix('(') {
        let (inner, behind) = behind.split_once(')').ok_or_else(incomplete)?;
        (key, rest) = (Some(inner), behind);
    }
    let mut options = String::new();
    loop {
        let c = rest.chars().next().ok_or_else(incomplete)?;
        match c {
            '#' | '0'..='9' | ' ' | '+' | '-' | '.' => options.push(c),
            '*' => {
                let n = args.next().and_then(|value| value.as_usize());
                options += &n
                    .ok_or_else(|| error("* in a format wants a number"))?
                    .to_string();
            }
            'h' | 'l' | 'L' => {}
            conversion => {
                for number in options.split(|c: char| !c.is_ascii_digit()) {
                    check(
                        number
                            .parse()
                            .unwrap_or(usize::from(!number.is_empty()) * usize::MAX),
                        0,
                    )?;
                }
                let directive = Directive {
                    key,
                    options,
                    conversion,
                };
                return Ok((directive, &rest[c.len_utf8()..]));
            }
        }
        rest = &rest[c.len_utf8()..];
    }
}
