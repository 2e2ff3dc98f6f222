//! Limits of Linux's control groups (cgroups(7)), as containers have them.

use super::Read;

/// A control group with a limit of memory, in bytes.
pub(super) struct MemoryGroup {
    pub(super) limit: u64,
    /// Without what the kernel takes back before it refuses memory.
    pub(super) used: u64,
}

/// The groups with a limit of memory that this process is in: its own and those around it.
pub(super) fn memory(read: Read<'_>) -> Vec<MemoryGroup> {
    let mut groups = Vec::new();
    for Folder { path, is_v2 } in folders(read, "memory") {
        // The last is the line that counts pages of files that were not used of late.
        let [limit, usage, inactive] = match is_v2 {
            true => ["memory.max", "memory.current", "inactive_file "],
            false => [
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file ",
            ],
        };
        // "max" is none.
        let number =
            |file: &str| -> Option<u64> { read(&format!("{path}/{file}"))?.trim().parse().ok() };
        let Some(limit) = number(limit) else { continue };
        let stat = read(&format!("{path}/memory.stat")).unwrap_or_default();
        let inactive = stat
            .lines()
            .find_map(|line| line.strip_prefix(inactive)?.trim().parse::<u64>().ok());
        let used = number(usage)
            .unwrap_or(0)
            .saturating_sub(inactive.unwrap_or(0));
        groups.push(MemoryGroup { limit, used });
    }
    groups
}

/// CPUs that the narrowest quota of this process's groups is worth, rounded down but at least one:
/// threads that wait for each other gain nothing from a part of a CPU. `None` without a quota.
pub(super) fn cpus(read: Read<'_>) -> Option<usize> {
    let quotas = folders(read, "cpu").into_iter().filter_map(|folder| {
        let text = |file: &str| read(&format!("{}/{file}", folder.path));
        let (quota, period) = if folder.is_v2 {
            let both = text("cpu.max")?;
            let (quota, period) = both.trim().split_once(' ')?;
            (quota.to_owned(), period.to_owned())
        } else {
            (text("cpu.cfs_quota_us")?, text("cpu.cfs_period_us")?)
        };
        // "max" and -1 are none.
        let (quota, period): (u64, u64) = (quota.trim().parse().ok()?, period.trim().parse().ok()?);
        quota.checked_div(period)
    });
    let cpus = quotas.min()?;
    Some(usize::try_from(cpus).unwrap_or(usize::MAX).max(1))
}

/// The folder of a control group, and which version of control groups it is of.
struct Folder {
    path: String,
    is_v2: bool,
}

/// Folders of this process's groups that a controller is in, and of those around them. Inside a
/// container the group's own folder is the root, whatever its path says.
fn folders(read: Read<'_>, controller: &str) -> Vec<Folder> {
    let mut folders = Vec::new();
    for line in read("/proc/self/cgroup").unwrap_or_default().lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else {
            continue;
        };
        let is_v2 = controllers.is_empty();
        let root = match is_v2 {
            true => "/sys/fs/cgroup".into(),
            false if controllers.split(',').any(|name| name == controller) => {
                format!("/sys/fs/cgroup/{controller}")
            }
            false => continue,
        };
        for (at, _) in group.match_indices('/').chain([(group.len(), "")]) {
            folders.push(Folder {
                path: format!("{root}{}", group[..at].trim_end_matches('/')),
                is_v2,
            });
        }
    }
    folders
}

#[cfg(test)]
mod tests {
    use crate::system::{cgroup, fake};

    #[test]
    fn quotas_of_cpus() {
        let cpus = |files: &[(&str, &str)]| cgroup::cpus(&fake(files));
        let root = ("/proc/self/cgroup", "0::/\n");
        assert_eq!(cpus(&[]), None);
        assert_eq!(cpus(&[root]), None);
        let of = |quota| cpus(&[root, ("/sys/fs/cgroup/cpu.max", quota)]);
        assert_eq!(of("max 100000\n"), None);
        assert_eq!(of("100000 100000\n"), Some(1));
        assert_eq!(of("390000 100000\n"), Some(3));
        assert_eq!(of("50000 100000\n"), Some(1));
        // Damaged.
        assert_eq!(
            (of("100000 0\n"), of("100000"), of("-5 7"), of("")),
            (None, None, None, None)
        );
        // A group around it is narrower.
        let nested = [
            ("/proc/self/cgroup", "0::/pod/main\n"),
            ("/sys/fs/cgroup/pod/main/cpu.max", "800000 100000\n"),
            ("/sys/fs/cgroup/pod/cpu.max", "200000 100000\n"),
        ];
        assert_eq!(cpus(&nested), Some(2));
        // Version 1, in a container whose path outside does not exist inside.
        let quota = |text| {
            cpus(&[
                (
                    "/proc/self/cgroup",
                    "7:cpuset:/\n3:cpu,cpuacct:/docker/ab\n",
                ),
                ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", text),
                ("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "50000\n"),
            ])
        };
        assert_eq!((quota("200000\n"), quota("-1\n")), (Some(4), None));
    }
}
