//! What the system tells of its memory and cores.

#[cfg(any(target_os = "linux", target_os = "android", test))]
mod cgroup;
mod cores;
#[cfg(any(target_os = "linux", target_os = "android", test))]
mod linux;
#[cfg(any(target_os = "macos", test))]
mod macos;
mod threads;
#[cfg(any(windows, test))]
mod windows;

pub use threads::default_threads;

/// Whether the standard library has threads and a clock: on wasm32-unknown-unknown it has neither.
pub(crate) const HAS_THREADS: bool = !cfg!(all(target_arch = "wasm32", target_os = "unknown"));

/// Memory of the machine, as this process may use it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SystemMemory {
    /// Memory of the machine.
    pub total: u64,
    /// What this process can take without swapping, and within the limit of its control group.
    pub available: u64,
    /// The narrowest limit of the control groups that it is in, if that is less than the machine
    /// has.
    pub limit: Option<u64>,
}

impl SystemMemory {
    /// As it is now; `None` where the system does not tell (all but Linux, Android, macOS and
    /// Windows).
    pub fn now() -> Option<SystemMemory> {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        return linux::memory(&file);
        #[cfg(target_os = "macos")]
        return macos::memory(&macos::output);
        #[cfg(windows)]
        return windows::memory();
        #[cfg(not(any(
            target_os = "linux",
            target_os = "android",
            target_os = "macos",
            windows
        )))]
        return None;
    }
}

/// The text of a file, if it can be read.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn file(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// Reads a file, or what a test says stands in it.
#[cfg(any(target_os = "linux", target_os = "android", test))]
type Read<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Files as tests make them: a path, and what stands there.
#[cfg(test)]
fn fake(files: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
    let files: std::collections::HashMap<_, _> = files
        .iter()
        .map(|&(path, text)| (path.to_owned(), text.to_owned()))
        .collect();
    move |path| files.get(path).cloned()
}

#[cfg(all(
    test,
    any(
        target_os = "linux",
        target_os = "android",
        target_os = "macos",
        windows
    )
))]
mod tests {
    use crate::system::SystemMemory;

    #[test]
    fn this_machine_tells() {
        let memory = SystemMemory::now().unwrap();
        assert!(memory.total > 64 << 20, "{memory:?}");
        assert!((1..=memory.total).contains(&memory.available), "{memory:?}");
        assert!(memory.limit.is_none_or(|limit| limit < memory.total));
    }
}
