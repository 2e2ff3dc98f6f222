//! Memory and CPUs as Linux and Android tell of them, in `/proc` and `/sys`.

use super::cores::{Cpu, cpu_list};
use super::{Read, SystemMemory, cgroup};

/// Memory, within the limits of control groups.
pub(super) fn memory(read: Read<'_>) -> Option<SystemMemory> {
    let meminfo = read("/proc/meminfo")?;
    let of_machine = |key: &str| {
        let line = meminfo
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        line.trim()
            .strip_suffix("kB")?
            .trim()
            .parse::<u64>()
            .ok()?
            .checked_mul(1024)
    };
    let total = of_machine("MemTotal")?;
    let groups: Vec<_> = cgroup::memory(read)
        .into_iter()
        .filter(|group| group.limit < total)
        .collect();
    let left = groups
        .iter()
        .map(|group| group.limit.saturating_sub(group.used))
        .min();
    Some(SystemMemory {
        total,
        available: of_machine("MemAvailable")?.min(left.unwrap_or(u64::MAX)),
        limit: groups.iter().map(|group| group.limit).min(),
    })
}

/// The CPUs that this process may use.
pub(super) fn cpus(read: Read<'_>) -> Option<Vec<Cpu>> {
    let status = read("/proc/self/status")?;
    let allowed = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let of = |cpu: usize, file: &str| read(&format!("/sys/devices/system/cpu/cpu{cpu}/{file}"));
    let cpus = cpu_list(allowed)?.into_iter().map(|cpu| Cpu {
        // Arm kernels and recent hybrid x86 ones report the relative performance of a CPU, out of
        // 1024.
        capacity: of(cpu, "cpu_capacity")
            .and_then(|c| c.trim().parse().ok())
            .unwrap_or(1024),
        core: of(cpu, "topology/thread_siblings_list")
            .and_then(|list| cpu_list(&list)?.first().copied())
            .unwrap_or(cpu),
    });
    Some(cpus.collect())
}

#[cfg(test)]
mod tests {
    use crate::system::{SystemMemory, fake, linux};

    const MEMINFO: &str = "MemTotal:        1000 kB\nMemFree:  10 kB\nMemAvailable:     600 kB\n";
    const KIB: u64 = 1024;

    fn of(files: &[(&str, &str)]) -> Option<SystemMemory> {
        linux::memory(&fake(files))
    }

    fn memory(available: u64, limit: Option<u64>) -> Option<SystemMemory> {
        let limit = limit.map(|kib| kib * KIB);
        Some(SystemMemory {
            total: 1000 * KIB,
            available: available * KIB,
            limit,
        })
    }

    #[test]
    fn of_a_machine_without_limits() {
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("/proc/meminfo", MEMINFO)]), memory(600, None));
        let files = [
            ("/proc/meminfo", MEMINFO),
            ("/proc/self/cgroup", "0::/\n"),
            ("/sys/fs/cgroup/memory.max", "max\n"),
        ];
        assert_eq!(of(&files), memory(600, None));
        assert_eq!(
            of(&[(
                "/proc/meminfo",
                "MemTotal: 1000 kB\nMemAvailable: many kB\n"
            )]),
            None
        );
    }

    #[test]
    fn of_nested_groups() {
        // Files that were not used of late count as free; the group around it is the narrower one.
        let files = [
            ("/proc/meminfo", MEMINFO),
            ("/proc/self/cgroup", "1:name=systemd:/x\n0::/outer/inner\n"),
            ("/sys/fs/cgroup/outer/inner/memory.max", "512000\n"),
            ("/sys/fs/cgroup/outer/inner/memory.current", "307200\n"),
            (
                "/sys/fs/cgroup/outer/inner/memory.stat",
                "anon 1\ninactive_file 102400\nactive_file 7\n",
            ),
            ("/sys/fs/cgroup/outer/memory.max", "409600\n"),
            ("/sys/fs/cgroup/outer/memory.current", "102400\n"),
        ];
        assert_eq!(of(&files), memory(300, Some(400)));
        assert_eq!(of(&files[..5]), memory(300, Some(500)));
        assert_eq!(of(&files[..4]), memory(200, Some(500)));
    }

    #[test]
    fn of_a_container() {
        let files = [
            ("/proc/meminfo", MEMINFO),
            (
                "/proc/self/cgroup",
                "5:cpu:/docker/ab\n4:memory,hugetlb:/docker/ab\n",
            ),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "204800\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "204900\n"),
            (
                "/sys/fs/cgroup/memory/memory.stat",
                "inactive_file 1\ntotal_inactive_file 51300\n",
            ),
        ];
        assert_eq!(of(&files), memory(50, Some(200)));
        // What version 1 calls no limit.
        let unlimited = (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "9223372036854771712\n",
        );
        assert_eq!(of(&[files[0], files[1], unlimited]), memory(600, None));
    }
}
