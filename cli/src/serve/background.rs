//! Work that is done while others are answered.

use std::io;
use std::panic::resume_unwind;

/// How nice the thread is: of a core that a pass computes on, it gets a quarter.
#[cfg(any(target_os = "linux", target_os = "android"))]
const NICENESS: i32 = 5;

/// Does it on a thread that gives way to those that compute passes, and so do the threads that it
/// starts. Where the system has no priorities of threads, it is a thread like others.
pub(super) fn in_background<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("background".into());
        let thread = thread.spawn_scoped(scope, || {
            // Not allowed, it is done as other work is.
            #[cfg(any(target_os = "linux", target_os = "android"))]
            let _ = rustix::process::nice(NICENESS);
            work()
        })?;
        Ok(thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caller_stays_what_it_was() {
        assert_eq!(in_background(|| 5).unwrap(), 5);
        #[cfg(target_os = "linux")]
        {
            let niceness = || rustix::process::getpriority_process(None).unwrap();
            let before = niceness();
            let within = in_background(|| std::thread::spawn(niceness).join().unwrap());
            assert_eq!(within.unwrap(), (before + NICENESS).min(19));
            assert_eq!(niceness(), before);
        }
        let panics = std::panic::catch_unwind(|| in_background(|| panic!("as it should")));
        assert!(panics.is_err());
    }
}
