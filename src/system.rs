//! What the system has, and what it tells of its memory.

/// Whether the system has threads and a clock: wasm32-unknown-unknown has neither.
#[cfg(any(feature = "chat", feature = "grammar"))]
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
    /// As it is now; `None` where the system does not tell (all but Linux).
    pub fn now() -> Option<SystemMemory> {
        SystemMemory::from_files(&|path| std::fs::read_to_string(path).ok())
    }

    /// From the files that `read` reads.
    fn from_files(read: &dyn Fn(&str) -> Option<String>) -> Option<SystemMemory> {
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
        let groups: Vec<_> = groups(read)
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
}

/// A control group with a limit.
struct Group {
    limit: u64,
    /// Without what the kernel takes back before it refuses memory.
    used: u64,
}

/// Where a version of control groups has what: the folder, limit, usage, and which line of
/// `memory.stat` counts the pages of files that were not used of late.
type Layout = [&'static str; 4];
const V1: Layout = [
    "/sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file ",
];
const V2: Layout = [
    "/sys/fs/cgroup",
    "memory.max",
    "memory.current",
    "inactive_file ",
];

/// The groups with a limit that this process is in: its own and those around it (cgroups(7)).
fn groups(read: &dyn Fn(&str) -> Option<String>) -> Vec<Group> {
    let mut found = Vec::new();
    for line in read("/proc/self/cgroup").unwrap_or_default().lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let [root, limit, usage, inactive] = match controllers {
            "" => V2,
            _ if controllers
                .split(',')
                .any(|controller| controller == "memory") =>
            {
                V1
            }
            _ => continue,
        };
        // Inside a container the group's own folder is the root, whatever its path says.
        for (at, _) in path.match_indices('/').chain([(path.len(), "")]) {
            let folder = format!("{root}{}", path[..at].trim_end_matches('/'));
            // "max" is none.
            let number = |file: &str| {
                read(&format!("{folder}/{file}"))?
                    .trim()
                    .parse::<u64>()
                    .ok()
            };
            let Some(limit) = number(limit) else { continue };
            let stat = read(&format!("{folder}/memory.stat")).unwrap_or_default();
            let inactive = stat
                .lines()
                .find_map(|line| line.strip_prefix(inactive)?.trim().parse::<u64>().ok());
            let used = number(usage)
                .unwrap_or(0)
                .saturating_sub(inactive.unwrap_or(0));
            found.push(Group { limit, used });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use crate::system::*;

    const MEMINFO: &str = "MemTotal:        1000 kB\nMemFree:  10 kB\nMemAvailable:     600 kB\n";
    const KIB: u64 = 1024;

    fn of(files: &[(&str, &str)]) -> Option<SystemMemory> {
        let read = |path: &str| {
            files
                .iter()
                .find(|file| file.0 == path)
                .map(|file| file.1.to_owned())
        };
        SystemMemory::from_files(&read)
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
