//! Dictionaries, lists and tuples: those of the inputs, and those that a template makes.

use super::limits::{charge_items, error};
use minijinja::Error;
use minijinja::value::{Enumerator, Object, ObjectRepr, Value, ValueKind};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of values that are looked at to find out whether a list would contain itself.
const MAX_VISITS: usize = 10_000;

/// A dictionary of the inputs.
#[derive(Debug)]
struct Dict {
    keys: Vec<Value>,
    values: HashMap<String, Value>,
}

/// A list or tuple.
#[derive(Debug)]
pub(super) struct Sequence {
    items: Mutex<Vec<Value>>,
    kind: SequenceKind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum SequenceKind {
    /// A list of the inputs, which cannot change.
    Input,
    /// A list of the template.
    List,
    Tuple,
}

impl Sequence {
    fn value(items: Vec<Value>, kind: SequenceKind) -> Value {
        let items = Mutex::new(items);
        Value::from_object(Sequence { items, kind })
    }

    pub(super) fn items(&self) -> MutexGuard<'_, Vec<Value>> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A list of the template.
pub(super) fn list(items: Vec<Value>) -> Value {
    Sequence::value(items, SequenceKind::List)
}

pub(super) fn tuple(items: Vec<Value>) -> Value {
    Sequence::value(items, SequenceKind::Tuple)
}

pub(super) fn is_tuple(value: &Value) -> bool {
    let sequence = value.downcast_object_ref::<Sequence>();
    sequence.is_some_and(|sequence| sequence.kind == SequenceKind::Tuple)
}

/// Whether a value is a list or a tuple, and not a mere iteration.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

/// Converts JSON to a template value.
pub(in crate::chat) fn from_json(json: serde_json::Value) -> Value {
    match json {
        serde_json::Value::Object(map) => {
            let keys = map.keys().map(|k| Value::from(k.as_str())).collect();
            let values = map.into_iter().map(|(k, v)| (k, from_json(v))).collect();
            Value::from_object(Dict { keys, values })
        }
        serde_json::Value::Array(items) => Sequence::value(
            items.into_iter().map(from_json).collect(),
            SequenceKind::Input,
        ),
        scalar => Value::from_serialize(scalar),
    }
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.values.get(key.as_str()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.keys.clone())
    }
}

impl Object for Sequence {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items().get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items().len())
    }
}

/// The list of the template that `value` is.
///
/// # Errors
/// For other values: the inputs of a template cannot change, as in transformers' sandbox.
pub(super) fn growing(value: &Value) -> Result<Arc<Sequence>, Error> {
    let sequence = value.downcast_object::<Sequence>();
    let sequence = sequence.filter(|sequence| sequence.kind == SequenceKind::List);
    sequence.ok_or_else(|| error("only a list that the template has made can change"))
}

/// Inserts a value before item `at` of a list, at its end if there are fewer.
///
/// # Errors
/// If the list would contain itself.
pub(super) fn insert(list: &Arc<Sequence>, at: usize, value: Value) -> Result<(), Error> {
    charge_items(1)?;
    let mut pending = vec![value.clone()];
    let mut n_visits = 0;
    while let Some(value) = pending.pop() {
        n_visits += 1;
        if n_visits > MAX_VISITS {
            return Err(error("the value has too many parts to be put into a list"));
        }
        if let Some(sequence) = value.downcast_object::<Sequence>() {
            if Arc::ptr_eq(&sequence, list) {
                return Err(error("a list cannot contain itself"));
            }
            // Inputs contain nothing that a template makes.
            if sequence.kind != SequenceKind::Input {
                pending.extend(
                    sequence
                        .items()
                        .iter()
                        .filter(|v| v.as_object().is_some())
                        .cloned(),
                );
            }
            continue;
        }
        if value.downcast_object_ref::<Dict>().is_some() || value.kind() == ValueKind::Iterable {
            continue;
        }
        let Some(object) = value.as_object() else {
            continue;
        };
        let parts = object.try_iter_pairs().into_iter().flatten();
        pending.extend(
            parts
                .map(|(_, part)| part)
                .filter(|v| v.as_object().is_some()),
        );
    }
    let mut items = list.items();
    let at = at.min(items.len());
    items.insert(at, value);
    Ok(())
}

/// The items of an iteration over a value; none for an undefined one.
pub(super) fn elements(value: &Value) -> Result<Vec<Value>, Error> {
    if value.is_undefined() {
        return Ok(Vec::new());
    }
    charge_items(value.len().unwrap_or(0))?;
    Ok(value.try_iter()?.collect())
}

pub(super) fn length(value: &Value) -> Result<usize, Error> {
    match value.len() {
        Some(n) => Ok(n),
        None => elements(value).map(|l| l.len()),
    }
}

/// The pairs of a dictionary.
pub(super) fn items(value: &Value) -> Result<Value, Error> {
    let pair = |key: Value| value.get_item(&key).map(|v| tuple(vec![key, v]));
    value
        .try_iter()?
        .map(pair)
        .collect::<Result<Vec<_>, _>>()
        .map(list)
}

/// The attribute at a path such as `a.b` or `0`.
pub(super) fn attribute(value: &Value, path: &Value) -> Result<Value, Error> {
    let Some(path) = path.as_str() else {
        return value.get_item(path);
    };
    path.split('.').try_fold(value.clone(), |value, part| {
        if value.is_undefined() {
            return Ok(value);
        }
        match part.parse::<i64>() {
            Ok(index) => value.get_item(&index.into()),
            Err(_) => value.get_item(&part.into()),
        }
    })
}
