//! Default number of threads.

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

/// The fast cores this process may use, and their hardware threads.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fast {
    pub(super) cores: usize,
    pub(super) cpus: usize,
}

/// A CPU that this process may use.
#[cfg(any(target_os = "linux", target_os = "android", windows, test))]
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cpu {
    /// Performance beside the other CPUs'.
    pub(super) capacity: u32,
    /// Which core it is a hardware thread of.
    pub(super) core: usize,
}

/// Counts fast CPUs: those with at least three quarters of the largest capacity, or clearly more
/// than the smallest, since phones have cores of three sizes, often only one of the largest.
#[cfg(any(target_os = "linux", target_os = "android", windows, test))]
fn count_fast(cpus: &[Cpu]) -> Fast {
    let capacities = || cpus.iter().map(|cpu| u64::from(cpu.capacity));
    let largest = capacities().max().unwrap_or(0);
    let smallest = capacities().min().unwrap_or(0);
    let is_fast = |capacity: u32| {
        4 * u64::from(capacity) >= 3 * largest || 4 * u64::from(capacity) > 5 * smallest
    };
    let fast = cpus.iter().filter(|cpu| is_fast(cpu.capacity));
    let cores: std::collections::BTreeSet<_> = fast.clone().map(|cpu| cpu.core).collect();
    Fast {
        cores: cores.len(),
        cpus: fast.count(),
    }
}

/// Parses `0-3,8`, the kernel's notation for sets of CPUs.
#[cfg(any(target_os = "linux", target_os = "android", test))]
pub(super) fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        if last > 1 << 16 {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use crate::system::cores::*;
    use crate::system::{cgroup, fake, linux};

    #[test]
    fn sets_of_cpus() {
        assert_eq!(cpu_list("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(cpu_list("5"), Some(vec![5]));
        assert_eq!(
            (cpu_list(""), cpu_list("a-b"), cpu_list("0-99999999999")),
            (None, None, None)
        );
    }

    #[test]
    fn counts_fast_cores_once() {
        let count = |cpus: &[(u32, usize)]| {
            let cpus: Vec<_> = cpus
                .iter()
                .map(|&(capacity, core)| Cpu { capacity, core })
                .collect();
            let Fast { cores, cpus } = count_fast(&cpus);
            (cores, cpus)
        };
        // Two threads on each of two cores; such cores beside slow ones; four fast and four slow
        // ones.
        assert_eq!(count(&[(1024, 0), (1024, 1), (1024, 0), (1024, 1)]), (2, 4));
        assert_eq!(
            count(&[(1024, 0), (1024, 0), (600, 2), (600, 3), (600, 4)]),
            (1, 2)
        );
        let eight =
            |capacity: [u32; 8]| count(&std::array::from_fn::<_, 8, _>(|cpu| (capacity[cpu], cpu)));
        assert_eq!(eight([460, 460, 460, 460, 1024, 1024, 1024, 1024]), (4, 4));
        // Three sizes; all equal except for the chip's preferred cores.
        assert_eq!(eight([250, 250, 250, 250, 700, 700, 700, 1024]), (4, 4));
        assert_eq!(eight([980, 980, 980, 980, 980, 980, 1024, 1024]), (8, 8));
        assert_eq!(count(&[]), (0, 0));
    }

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
