//! Default number of threads.

/// With at most this many cores their second hardware threads are used, too: so few cores cannot
/// saturate the memory bandwidth (on one Sapphire Rapids core the second thread adds a third).
const FEW_CORES: usize = 2;

/// Number of threads for a session: one for each fast core this process may use. CPU affinity and
/// cgroup quota are respected. One hardware thread per core is used, unless there are only one or
/// two cores; on a processor with fast and slow cores, only fast ones are used.
pub fn default_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, Into::into);
    let wanted = match fast_cores() {
        Some(fast) if fast.cores > FEW_CORES => fast.cores,
        Some(fast) => fast.cpus,
        None => allowed,
    };
    wanted.clamp(1, allowed)
}

/// The fast cores this process may use, and their hardware threads.
#[derive(Debug, PartialEq, Eq)]
struct Fast {
    cores: usize,
    cpus: usize,
}

/// Reads the topology from Linux's `/sys`.
#[cfg(target_os = "linux")]
fn fast_cores() -> Option<Fast> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let allowed = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let cpus = cpu_list(allowed)?;
    let of = |cpu: usize, file: &str| {
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/{file}")).ok()
    };
    // Arm kernels and recent hybrid x86 ones report the relative performance of a CPU, out of 1024.
    let capacity = |cpu: usize| {
        of(cpu, "cpu_capacity")
            .and_then(|c| c.trim().parse::<u32>().ok())
            .unwrap_or(1024)
    };
    let siblings = |cpu: usize| {
        of(cpu, "topology/thread_siblings_list").and_then(|list| cpu_list(&list)?.first().copied())
    };
    let cpus: Vec<_> = cpus
        .into_iter()
        .map(|cpu| (capacity(cpu), siblings(cpu).unwrap_or(cpu)))
        .collect();
    Some(count_fast(&cpus))
}

/// Counts fast CPUs, each given by its capacity and its core's first CPU: those with at least three
/// quarters of the largest capacity, or clearly more than the smallest, since phones have cores of
/// three sizes, often only one of the largest.
#[cfg(any(target_os = "linux", test))]
fn count_fast(cpus: &[(u32, usize)]) -> Fast {
    let largest = cpus.iter().map(|cpu| cpu.0).max().unwrap_or(0);
    let smallest = cpus.iter().map(|cpu| cpu.0).min().unwrap_or(0);
    let is_fast = |capacity: u32| 4 * capacity >= 3 * largest || 4 * capacity > 5 * smallest;
    let fast = cpus.iter().filter(|cpu| is_fast(cpu.0));
    let cores: std::collections::BTreeSet<_> = fast.clone().map(|cpu| cpu.1).collect();
    Fast {
        cores: cores.len(),
        cpus: fast.count(),
    }
}

/// Parses `0-3,8`, the kernel's notation for sets of CPUs.
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

/// The cores of the first performance level; Intel CPUs have no levels.
#[cfg(target_os = "macos")]
fn fast_cores() -> Option<Fast> {
    // A command instead of the C function: it needs no unsafe code, and runs once per session.
    let number = |name: &str| {
        let output = std::process::Command::new("/usr/sbin/sysctl")
            .args(["-n", name])
            .output()
            .ok()?;
        String::from_utf8(output.stdout).ok()?.trim().parse().ok()
    };
    let of = |level: &str| {
        let (cores, cpus) = (
            number(&format!("{level}.physicalcpu"))?,
            number(&format!("{level}.logicalcpu"))?,
        );
        Some(Fast { cores, cpus })
    };
    of("hw.perflevel0").or_else(|| of("hw"))
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn fast_cores() -> Option<Fast> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let Fast { cores, cpus } = count_fast(cpus);
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

    #[test]
    fn at_least_one() {
        assert!(default_threads() >= 1);
    }
}
