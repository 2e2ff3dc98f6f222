//! A model that requests may name: what it is called, and where it is.

use super::args::AppArgs;
use crate::flags::ModelArgs;
use std::path::PathBuf;
use std::sync::OnceLock;

/// A model that requests may name.
pub(super) struct Entry {
    /// Not known before a model of the hub is here.
    name: OnceLock<String>,
    pub(super) model: ModelArgs,
    /// Its own flags, if a preset has some.
    pub(super) args: Option<Box<AppArgs>>,
    /// Whether it is loaded when the server starts.
    pub(super) at_start: bool,
    /// Its file, if that is here.
    pub(super) path: Option<PathBuf>,
}

impl Entry {
    pub(super) fn new(name: Option<String>, model: ModelArgs, at_start: bool) -> Entry {
        let path = model.local_path().map(PathBuf::from);
        Entry {
            name: name.map(OnceLock::from).unwrap_or_default(),
            model,
            args: None,
            at_start,
            path,
        }
    }

    /// Says what it is called, now that it is known.
    pub(super) fn is_called(&self, name: &str) {
        let _ = self.name.set(name.to_owned());
    }

    pub(super) fn name(&self) -> Option<&str> {
        self.name.get().map(String::as_str)
    }
}
