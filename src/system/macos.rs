//! Memory and cores as macOS tells of them. Its commands are asked instead of its C functions: that
//! needs no unsafe code, and takes some milliseconds where a model is opened.

use super::SystemMemory;
use super::cores::Fast;

/// Runs a program with arguments, or says what a test says it prints.
type Run<'a> = &'a dyn Fn(&str, &[&str]) -> Option<String>;

/// What a program prints.
#[cfg(target_os = "macos")]
pub(super) fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = std::process::Command::new(program)
        .args(arguments)
        .output()
        .ok()?;
    String::from_utf8(output.stdout).ok()
}

fn sysctl(run: Run<'_>, name: &str) -> Option<u64> {
    run("/usr/sbin/sysctl", &["-n", name])?.trim().parse().ok()
}

/// Memory; available are pages that are free, read ahead of need, or not used of late.
pub(super) fn memory(run: Run<'_>) -> Option<SystemMemory> {
    let total = sysctl(run, "hw.memsize")?;
    let text = run("/usr/bin/vm_stat", &[])?;
    let page = text.split("page size of ").nth(1)?.split(' ').next()?;
    let page: u64 = page.parse().ok()?;
    let pages = |of: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(of))?;
        line.trim().trim_end_matches('.').parse().ok()
    };
    let mut available: u64 = 0;
    for of in ["Pages free:", "Pages inactive:", "Pages speculative:"] {
        available = available.checked_add(pages(of)?)?;
    }
    Some(SystemMemory {
        total,
        available: available.checked_mul(page)?.min(total),
        limit: None,
    })
}

/// The cores of the first performance level; Intel CPUs have no levels.
pub(super) fn fast_cores(run: Run<'_>) -> Option<Fast> {
    let number = |name: &str| usize::try_from(sysctl(run, name)?).ok();
    let of = |level: &str| {
        Some(Fast {
            cores: number(&format!("{level}.physicalcpu"))?,
            cpus: number(&format!("{level}.logicalcpu"))?,
        })
    };
    of("hw.perflevel0").or_else(|| of("hw"))
}

#[cfg(test)]
mod tests {
    use crate::system::cores::Fast;
    use crate::system::{SystemMemory, macos};

    const VM_STAT: &str = "Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            200000.
Pages inactive:                          190000.
Pages speculative:                         1000.
Pages throttled:                              0.
Pages wired down:                         90000.
\"Translation faults\":                 123456789.
";

    /// What the commands print on a machine whose values of `sysctl` are these.
    fn machine<'a>(
        values: &'a [(&'a str, &'a str)],
        vm_stat: &'a str,
    ) -> impl Fn(&str, &[&str]) -> Option<String> {
        move |program, arguments| match (program, arguments) {
            ("/usr/bin/vm_stat", []) => Some(vm_stat.into()),
            ("/usr/sbin/sysctl", ["-n", name]) => {
                let value = values.iter().find(|value| value.0 == *name)?;
                Some(format!("{}\n", value.1))
            }
            other => panic!("{other:?} is not asked"),
        }
    }

    #[test]
    fn memory_of_a_mac() {
        let of = |total, vm_stat| macos::memory(&machine(&[("hw.memsize", total)], vm_stat));
        let expected = SystemMemory {
            total: 8 << 30,
            available: 201_000 * 16384,
            limit: None,
        };
        assert_eq!(of("8589934592", VM_STAT), Some(expected));
        // What the system does not tell is not made up.
        assert_eq!(of("", VM_STAT), None);
        assert_eq!(of("8589934592", ""), None);
        let unknown = VM_STAT.replace("inactive", "idle");
        assert_eq!(of("8589934592", &unknown), None);
        let vast = VM_STAT.replace("190000", "18446744073709551615");
        assert_eq!(of("8589934592", &vast), None);
    }

    #[test]
    fn fast_cores_of_a_mac() {
        let of = |values: &[(&str, &str)]| macos::fast_cores(&machine(values, VM_STAT));
        let levels = [
            ("hw.perflevel0.physicalcpu", "4"),
            ("hw.perflevel0.logicalcpu", "4"),
            ("hw.physicalcpu", "8"),
            ("hw.logicalcpu", "8"),
        ];
        assert_eq!(of(&levels), Some(Fast { cores: 4, cpus: 4 }));
        let intel = [("hw.physicalcpu", "2"), ("hw.logicalcpu", "4")];
        assert_eq!(of(&intel), Some(Fast { cores: 2, cpus: 4 }));
        assert_eq!(of(&[]), None);
    }
}
