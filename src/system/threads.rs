//! Default number of threads.

use super::cores::Fast;
#[cfg(any(target_os = "linux", target_os = "android", windows))]
use super::cores::count_fast;
#[cfg(target_os = "macos")]
use super::macos;
#[cfg(windows)]
use super::windows;
#[cfg(any(target_os = "linux", target_os = "android"))]
use super::{cgroup, file, linux};

/// With at most this many cores their second hardware threads are used, too: so few cores cannot
/// saturate the memory bandwidth (on one Sapphire Rapids core the second thread adds a third).
const FEW_CORES: usize = 2;

/// Number of threads for a session: one for each fast core this process may use. CPU affinity and
/// the quota of control groups are respected, so that a container of one CPU gets one thread on any
/// machine. One hardware thread per core is used, unless there are only one or two cores; on a
/// processor with fast and slow cores, only fast ones are used.
pub fn default_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, Into::into);
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let (quota, fast) = (
        cgroup::cpus(&file),
        linux::cpus(&file).map(|cpus| count_fast(&cpus)),
    );
    #[cfg(target_os = "macos")]
    let (quota, fast) = (None, macos::fast_cores(&macos::output));
    #[cfg(windows)]
    let (quota, fast) = (None, windows::cpus().map(|cpus| count_fast(&cpus)));
    #[cfg(not(any(
        target_os = "linux",
        target_os = "android",
        target_os = "macos",
        windows
    )))]
    let (quota, fast) = (None, None);
    threads(allowed, quota, fast)
}

/// Threads where the standard library counts `allowed` CPUs, and control groups allow the time of
/// `quota` of them.
fn threads(allowed: usize, quota: Option<usize>, fast: Option<Fast>) -> usize {
    let allowed = allowed.min(quota.unwrap_or(usize::MAX));
    let wanted = match fast {
        Some(fast) if fast.cores > FEW_CORES => fast.cores,
        Some(fast) => fast.cpus,
        None => allowed,
    };
    wanted.min(allowed).max(1)
}

#[cfg(test)]
mod tests {
    use crate::system::cores::count_fast;
    use crate::system::threads::{default_threads, threads};
    use crate::system::{cgroup, fake, linux};

    /// Threads on a machine of 64 cores with two hardware threads each, in a group of this quota.
    fn of_64_cores(quota: &str, allowed_by_std: usize) -> usize {
        let mut files = vec![
            ("/proc/self/cgroup".into(), "0::/\n".to_owned()),
            ("/sys/fs/cgroup/cpu.max".into(), quota.to_owned()),
            (
                "/proc/self/status".into(),
                "Name:\truvllm\nCpus_allowed_list:\t0-127\n".into(),
            ),
        ];
        for cpu in 0..128 {
            files.push((
                format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"),
                format!("{},{}\n", cpu % 64, cpu % 64 + 64),
            ));
        }
        let files: Vec<_> = files
            .iter()
            .map(|(path, text)| (&**path, &**text))
            .collect();
        let read = fake(&files);
        let fast = linux::cpus(&read).map(|cpus| count_fast(&cpus));
        threads(allowed_by_std, cgroup::cpus(&read), fast)
    }

    #[test]
    fn a_container_takes_its_share_of_a_large_machine() {
        assert_eq!(of_64_cores("max 100000\n", 128), 64);
        assert_eq!(of_64_cores("100000 100000\n", 128), 1);
        assert_eq!(of_64_cores("250000 100000\n", 128), 2);
        // The narrower of both counts.
        assert_eq!(of_64_cores("9600000 100000\n", 3), 3);
        assert_eq!(threads(5, None, None), 5);
        assert_eq!(threads(5, Some(2), None), 2);
    }

    #[test]
    fn at_least_one() {
        assert!(default_threads() >= 1);
    }
}
