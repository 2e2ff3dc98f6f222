//! How many threads a session takes unless told otherwise.

use std::collections::BTreeSet;

/// With at most this many cores their second hardware threads are used as well: so few cannot ask for
/// memory fast enough (on one Sapphire Rapids core the second thread adds a third to the bandwidth).
const FEW_CORES: usize = 2;

/// Threads for a session: one for each fast core this process may use. Its CPU affinity and cgroup quota
/// are respected; of a core's hardware threads one is used, unless there are only two cores or one; of
/// a processor with fast and slow cores, the fast ones.
pub fn default_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, Into::into);
    match fast_cores() {
        Some(cores) if cores > FEW_CORES => cores.min(allowed),
        _ => allowed,
    }
}

/// Physical cores of the fastest kind among the CPUs this process may use, where the system tells.
#[cfg(target_os = "linux")]
fn fast_cores() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let cpus = cpu_list(allowed)?;
    let of = |cpu: usize, file: &str| std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/{file}")).ok();
    // Arm kernels and recent hybrid x86 ones tell what a CPU can do, out of 1024.
    let capacity = |cpu: usize| of(cpu, "cpu_capacity").and_then(|c| c.trim().parse::<u32>().ok()).unwrap_or(1024);
    let siblings =
        |cpu: usize| of(cpu, "topology/thread_siblings_list").and_then(|list| cpu_list(&list)?.first().copied());
    Some(count_fast(cpus.into_iter().map(|cpu| (capacity(cpu), siblings(cpu).unwrap_or(cpu)))))
}

/// Different cores, each named by its first CPU, whose capacity is at least three quarters of the largest.
#[cfg(any(target_os = "linux", test))]
fn count_fast(cpus: impl Iterator<Item = (u32, usize)> + Clone) -> usize {
    let largest = cpus.clone().map(|(capacity, _)| capacity).max().unwrap_or(0);
    cpus.filter(|(capacity, _)| capacity * 4 >= largest * 3).map(|(_, core)| core).collect::<BTreeSet<_>>().len()
}

/// `0-3,8` as the kernel prints sets of CPUs.
#[cfg(any(target_os = "linux", test))]
fn cpu_list(text: &str) -> Option<Vec<usize>> {
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

/// Cores of the first performance level.
#[cfg(target_os = "macos")]
fn fast_cores() -> Option<usize> {
    // A command instead of the C function: it needs no unsafe code, and runs once per session.
    let output =
        std::process::Command::new("/usr/sbin/sysctl").args(["-n", "hw.perflevel0.physicalcpu"]).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn fast_cores() -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_cpus() {
        assert_eq!(cpu_list("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(cpu_list("5"), Some(vec![5]));
        assert_eq!((cpu_list(""), cpu_list("a-b"), cpu_list("0-99999999999")), (None, None, None));
    }

    #[test]
    fn counts_fast_cores_once() {
        // Two threads on each of two cores; four fast and four slow ones.
        assert_eq!(count_fast([(1024, 0), (1024, 1), (1024, 0), (1024, 1)].into_iter()), 2);
        assert_eq!(count_fast((0..8).map(|cpu| (if cpu < 4 { 400 } else { 1024 }, cpu))), 4);
        assert_eq!(count_fast(std::iter::empty()), 0);
    }

    #[test]
    fn at_least_one() {
        assert!(default_threads() >= 1);
    }
}
