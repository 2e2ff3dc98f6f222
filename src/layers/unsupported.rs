//! What a backend does not compute.
//!
//! Each backend (backward pass, context shift, GPU) has a function `supports` that names every
//! field of every specification, so that a new field does not compile until each backend has said
//! whether it computes it.

/// Name of a feature that a backend does not compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unsupported(pub(crate) &'static str);

/// Refuses the first of these features that is there.
pub(crate) fn refuse(features: &[(bool, &'static str)]) -> Result<(), Unsupported> {
    match features.iter().find(|(is_there, _)| *is_there) {
        Some((_, name)) => Err(Unsupported(name)),
        None => Ok(()),
    }
}
