//! Files that requests name: by a name alone, in a folder that was given when the server started.

use super::http::error::ApiError;
use axum::http::StatusCode;
use std::path::{Path, PathBuf};

/// Most bytes of a file's name.
const MAX_NAME: usize = 255;

/// The path of file `name` of a folder, which may be there or not. `field` is where it was named.
pub(super) fn place(folder: &Path, field: &str, name: &str) -> Result<PathBuf, ApiError> {
    let is_sound = (1..=MAX_NAME).contains(&name.len())
        && !name.starts_with('.')
        && !name.contains(|c: char| c.is_control() || matches!(c, '/' | '\\' | ':'));
    if !is_sound {
        let message = "expected the name of a file of the server's folder, without a path";
        return Err(ApiError::field(field, message));
    }
    Ok(folder.join(name))
}

/// The same of a file that has to be there, and not elsewhere behind a link.
pub(super) fn existing(folder: &Path, field: &str, name: &str) -> Result<PathBuf, ApiError> {
    let path = place(folder, field, name)?;
    let missing = || {
        let message = format!("there is no file {name:?} in the server's folder");
        ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message)
    };
    let (folder, whole) = (folder.canonicalize(), path.canonicalize());
    match (folder, whole) {
        (Ok(folder), Ok(whole)) if whole.starts_with(&folder) && whole.is_file() => Ok(path),
        _ => Err(missing()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_in_their_folder() {
        let folder = std::env::temp_dir().join(format!("ruvllm-folder-{}", std::process::id()));
        let inner = folder.join("inner");
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::write(folder.join("out"), "x").unwrap();
        std::fs::write(inner.join("in"), "x").unwrap();
        assert_eq!(existing(&inner, "f", "in").unwrap(), inner.join("in"));
        for name in [
            "",
            ".",
            "..",
            "../out",
            "/etc/passwd",
            "a\0b",
            "a/b",
            "a\\b",
            "c:d",
            ".x",
        ] {
            assert!(place(&inner, "f", name).is_err(), "{name:?}");
        }
        assert!(place(&inner, "f", &"x".repeat(256)).is_err());
        assert!(existing(&inner, "f", "none").is_err());
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(folder.join("out"), inner.join("link")).unwrap();
            assert!(existing(&inner, "f", "link").is_err());
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
