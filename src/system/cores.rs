//! CPUs, and which of them are fast.

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
pub(super) fn count_fast(cpus: &[Cpu]) -> Fast {
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
}
