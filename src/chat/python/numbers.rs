//! Numbers, as Python computes with them.

use super::arguments::argument;
use super::limits::error;
use minijinja::Error;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};

/// A number; Python's booleans are integers.
#[derive(Clone, Copy)]
pub(super) enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    pub(super) fn of(value: &Value) -> Option<Number> {
        match value.kind() {
            ValueKind::Bool => Some(Number::Int(value.is_true().into())),
            ValueKind::Number if value.is_integer() => {
                i128::try_from(value.clone()).ok().map(Number::Int)
            }
            ValueKind::Number => f64::try_from(value.clone()).ok().map(Number::Float),
            _ => None,
        }
    }

    pub(super) fn float(self) -> f64 {
        match self {
            Number::Int(n) => n as f64,
            Number::Float(x) => x,
        }
    }

    /// The value of an integer, unless it was too large to compute.
    pub(super) fn int(n: Option<i128>) -> Result<Value, Error> {
        let n = n.ok_or_else(|| error("an integer has more than 127 bits"))?;
        Ok(i64::try_from(n).map_or_else(|_| n.into(), Value::from))
    }
}

/// `int(default=0, base=10)`.
pub(super) fn int_filter(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let default = argument(&args, &kwargs, 0, "default")?;
    let default = if default.is_undefined() {
        0.into()
    } else {
        default
    };
    let base = argument(&args, &kwargs, 1, "base")?
        .as_usize()
        .unwrap_or(10);
    kwargs.assert_all_used()?;
    let float = |x: f64| {
        if x.is_finite() {
            Number::int(Some(x as i128))
        } else {
            Ok(default.clone())
        }
    };
    let Some(text) = value.as_str() else {
        return match Number::of(value) {
            Some(Number::Int(n)) => Number::int(Some(n)),
            Some(Number::Float(x)) => float(x),
            None => Ok(default),
        };
    };
    let text = text.trim().replace('_', "").to_lowercase();
    let marks = [(16, "0x"), (8, "0o"), (2, "0b")];
    let digits = marks
        .iter()
        .find(|(of, _)| *of == base)
        .map_or(&text[..], |(_, mark)| {
            text.strip_prefix(mark).unwrap_or(&text)
        });
    let radix = u32::try_from(base)
        .ok()
        .filter(|base| (2..=36).contains(base));
    match radix.and_then(|radix| i128::from_str_radix(digits, radix).ok()) {
        Some(n) => Number::int(Some(n)),
        None => text.parse().map_or(Ok(default.clone()), float),
    }
}

/// `round(precision=0, method='common')`: half to even like Python; an integer stays one.
pub(super) fn round_filter(
    value: &Value,
    args: Rest<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let precision = argument(&args, &kwargs, 0, "precision")?;
    let method = argument(&args, &kwargs, 1, "method")?;
    kwargs.assert_all_used()?;
    let precision = i32::try_from(precision).unwrap_or(0).clamp(-300, 300);
    let number = Number::of(value).ok_or_else(|| error("round takes a number"))?;
    let scale = 10f64.powi(precision);
    Ok(match (method.as_str(), number) {
        (Some("ceil"), number) => ((number.float() * scale).ceil() / scale).into(),
        (Some("floor"), number) => ((number.float() * scale).floor() / scale).into(),
        (None | Some("common"), Number::Int(_)) if precision >= 0 => value.clone(),
        (None | Some("common"), Number::Int(n)) => {
            Number::int(Some(round(n as f64, precision) as i128))?
        }
        (None | Some("common"), Number::Float(x)) => round(x, precision).into(),
        (Some(_), _) => return Err(error("round knows the methods common, ceil and floor")),
    })
}

fn round(value: f64, precision: i32) -> f64 {
    match usize::try_from(precision) {
        // Formatting is exact where multiplying by a power of ten is not.
        Ok(digits) => format!("{value:.digits$}").parse().unwrap_or(value),
        Err(_) => {
            let scale = 10f64.powi(-precision);
            (value / scale).round_ties_even() * scale
        }
    }
}

/// `filesizeformat(binary=False)`.
pub(super) fn file_size(value: &Value, binary: Option<bool>) -> Result<String, Error> {
    let bytes = float(value, None);
    let binary = binary.unwrap_or(false);
    let base: f64 = if binary { 1024.0 } else { 1000.0 };
    if bytes == 1.0 {
        return Ok("1 Byte".into());
    }
    if bytes < base {
        return Ok(format!("{} Bytes", bytes as i64));
    }
    let exponent = ((bytes.ln() / base.ln()) as usize).clamp(1, 8);
    // At a power itself, the logarithm may be a little less.
    let exponent = exponent + usize::from(bytes >= base.powi(exponent as i32 + 1) && exponent < 8);
    let unit = ["k", "M", "G", "T", "P", "E", "Z", "Y"][exponent - 1];
    let unit = if binary {
        format!("{}iB", unit.to_uppercase())
    } else {
        format!("{unit}B")
    };
    Ok(format!("{:.1} {unit}", bytes / base.powi(exponent as i32)))
}

/// The filter `float`.
pub(super) fn float(value: &Value, default: Option<f64>) -> f64 {
    let default = default.unwrap_or(0.0);
    match value.as_str() {
        Some(text) => text.trim().parse().unwrap_or(default),
        None => Number::of(value).map_or(default, Number::float),
    }
}
