//! Memory and cores as Windows tells of them. The standard library has nothing for either; the
//! three functions are declared here as their documentation says.

#[cfg(windows)]
use super::SystemMemory;
use super::cores::Cpu;

/// `MEMORYSTATUSEX`.
#[cfg(windows)]
#[repr(C)]
#[derive(Default)]
struct MemoryStatus {
    length: u32,
    load: u32,
    total_phys: u64,
    avail_phys: u64,
    total_page_file: u64,
    avail_page_file: u64,
    total_virtual: u64,
    avail_virtual: u64,
    avail_extended_virtual: u64,
}

#[cfg(windows)]
#[allow(unsafe_code)] // calls of the system
#[link(name = "kernel32")]
unsafe extern "system" {
    fn GlobalMemoryStatusEx(status: *mut MemoryStatus) -> i32;
    fn GetLogicalProcessorInformationEx(relation: i32, buffer: *mut u8, length: *mut u32) -> i32;
    safe fn GetCurrentProcess() -> isize;
    fn GetProcessAffinityMask(process: isize, own: *mut usize, system: *mut usize) -> i32;
}

/// Memory; what can be had is what is free of it, and no more than the system promises to back
/// (it refuses memory that neither chips nor page files could hold).
#[cfg(windows)]
#[allow(unsafe_code)] // a call of the system
pub(super) fn memory() -> Option<SystemMemory> {
    let mut status = MemoryStatus {
        length: size_of::<MemoryStatus>() as u32,
        ..MemoryStatus::default()
    };
    // SAFETY: the structure is the one that the function documents, with its length.
    let done = unsafe { GlobalMemoryStatusEx(&raw mut status) };
    (done != 0).then(|| SystemMemory {
        total: status.total_phys,
        available: status.avail_phys.min(status.avail_page_file),
        limit: None,
    })
}

/// The CPUs that this process may use.
#[cfg(windows)]
pub(super) fn cpus() -> Option<Vec<Cpu>> {
    parse(&core_records()?, affinity())
}

/// Records of the processor's cores.
#[cfg(windows)]
#[allow(unsafe_code)] // calls of the system
fn core_records() -> Option<Vec<u8>> {
    const RELATION_PROCESSOR_CORE: i32 = 0;
    let mut length = 0u32;
    // SAFETY: with a length of zero nothing is written but the length that is needed.
    unsafe {
        GetLogicalProcessorInformationEx(
            RELATION_PROCESSOR_CORE,
            std::ptr::null_mut(),
            &raw mut length,
        )
    };
    // Whole words, as the records have 8-byte fields.
    let mut words = vec![0u64; (length as usize).div_ceil(8)];
    // SAFETY: the buffer has at least `length` bytes, aligned for the records.
    let done = unsafe {
        GetLogicalProcessorInformationEx(
            RELATION_PROCESSOR_CORE,
            words.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    let bytes = bytemuck::cast_slice::<_, u8>(&words).get(..length as usize)?;
    (done != 0).then(|| bytes.to_vec())
}

/// The CPUs of its group that this process may use, as a mask; 0 if it has threads in several
/// groups or the system does not tell.
#[cfg(windows)]
#[allow(unsafe_code)] // a call of the system
fn affinity() -> u64 {
    let (mut own, mut system) = (0, 0);
    // SAFETY: both masks are this function's, and the pseudo handle of this process is always valid.
    let done =
        unsafe { GetProcessAffinityMask(GetCurrentProcess(), &raw mut own, &raw mut system) };
    if done == 0 { 0 } else { own as u64 }
}

/// CPUs of `SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX` records of cores: relationship and size of the
/// record (`u32`), flags, efficiency class (`u8`), 20 reserved bytes, a number of groups (`u16`), and
/// for each a mask of CPUs (a word), the group (`u16`) and 6 reserved bytes. Where there is one group,
/// only CPUs of the mask `affinity` count, unless that is 0. Higher efficiency classes are faster.
fn parse(records: &[u8], affinity: u64) -> Option<Vec<Cpu>> {
    const WORD: usize = size_of::<usize>();
    // Core, class, group, CPUs.
    let mut found = Vec::new();
    let mut rest = records;
    let mut n_cores = 0;
    while !rest.is_empty() {
        let size = u32::from_le_bytes(*rest.get(4..)?.first_chunk()?) as usize;
        let record = rest.get(..size)?;
        let n_groups = u16::from_le_bytes(*record.get(30..)?.first_chunk()?);
        let groups = record.get(32..)?.chunks_exact(WORD + 8);
        for group in groups.take(n_groups.into()) {
            let mask = usize::from_le_bytes(*group.first_chunk()?) as u64;
            let number = u16::from_le_bytes(*group.get(WORD..)?.first_chunk()?);
            found.push((n_cores, record[9], number, mask));
        }
        n_cores += 1;
        rest = &rest[size..];
    }
    let one_group = found.iter().all(|core| core.2 == found[0].2);
    let fastest = found.iter().map(|core| core.1).max()?;
    let mut cpus = Vec::new();
    for (core, class, _, mask) in found {
        let mask = match one_group && affinity != 0 {
            true => mask & affinity,
            false => mask,
        };
        let capacity = if class == fastest { 1024 } else { 512 };
        cpus.extend((0..mask.count_ones()).map(|_| Cpu { capacity, core }));
    }
    (!cpus.is_empty()).then_some(cpus)
}

#[cfg(test)]
mod tests {
    use crate::system::cores::Cpu;
    use crate::system::windows::parse;

    /// The record of a core.
    fn core(class: u8, group: u16, mask: usize) -> Vec<u8> {
        let mut record = vec![0; 32];
        record[9] = class;
        record[30] = 1;
        record.extend(mask.to_le_bytes());
        record.extend(group.to_le_bytes());
        record.extend([0; 6]);
        record[4] = record.len() as u8;
        record
    }

    fn cpus(of: &[(u32, usize)]) -> Option<Vec<Cpu>> {
        let cpus = of.iter().map(|&(capacity, core)| Cpu { capacity, core });
        Some(cpus.collect())
    }

    #[test]
    fn records_of_cores() {
        // A fast core of two CPUs, and two slow ones.
        let hybrid = [core(1, 0, 0b11), core(0, 0, 0b100), core(0, 0, 0b1000)].concat();
        let all = cpus(&[(1024, 0), (1024, 0), (512, 1), (512, 2)]);
        assert_eq!(parse(&hybrid, 0), all);
        assert_eq!(parse(&hybrid, 0b1111), all);
        assert_eq!(parse(&hybrid, 0b110), cpus(&[(1024, 0), (512, 1)]));
        // A mask says nothing of other groups.
        let groups = [core(0, 0, 1), core(0, 1, 1)].concat();
        assert_eq!(parse(&groups, 2), cpus(&[(1024, 0), (1024, 1)]));
        // Damaged: no record, cut off, of no size.
        assert_eq!(parse(&[], 0), None);
        assert_eq!(parse(&hybrid[..hybrid.len() - 1], 0), None);
        assert_eq!(parse(&[0; 48], 0), None);
    }

    #[test]
    #[cfg(windows)]
    fn of_this_machine() {
        let cpus = super::cpus().unwrap();
        let allowed = std::thread::available_parallelism().unwrap().get();
        assert!((1..=allowed).contains(&cpus.len()), "{cpus:?}");
    }
}
