//! Limits of the machine, and the load by other processes.

use ruvllm::arch::{Arch, PanelElement};
use std::io;
use std::thread::Builder;
use std::time::Instant;

/// Bytes read, which exceed any cache.
const BUFFER: usize = 1 << 30;

/// Bytes per second that `n_threads` read from memory in huge pages, if there are any: the best of
/// three passes over 1 GiB; 0 if there is no memory for that.
///
/// # Errors
/// If a thread cannot be started.
pub fn read_bandwidth(n_threads: usize) -> io::Result<f64> {
    let Ok(mut memory) = memmap2::MmapOptions::new().len(BUFFER).map_anon() else {
        return Ok(0.0);
    };
    #[cfg(target_os = "linux")]
    let _ = memory.advise(memmap2::Advice::HugePage);
    memory.fill(1);
    let buffer: &[u64] = bytemuck::cast_slice(&memory);
    let chunk = buffer.len().div_ceil(n_threads.max(1));
    let mut best = 0.0f64;
    for _ in 0..3 {
        let start = Instant::now();
        std::thread::scope(|s| -> io::Result<()> {
            for part in buffer.chunks(chunk) {
                Builder::new().spawn_scoped(s, move || {
                    // Sixteen sums, so that additions need not wait for each other.
                    let sums = part.chunks_exact(16).fold([0u64; 16], |mut sums, x| {
                        sums.iter_mut()
                            .zip(x)
                            .for_each(|(s, x)| *s = s.wrapping_add(*x));
                        sums
                    });
                    std::hint::black_box(sums);
                })?;
            }
            Ok(())
        })?;
        best = best.max(BUFFER as f64 / start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Operations per second of `n_threads` that multiply and add as fast as a level can: the best of
/// ten runs of some milliseconds.
///
/// # Errors
/// If a thread cannot be started.
pub fn arithmetic_peak(arch: Arch, element: PanelElement, n_threads: usize) -> io::Result<f64> {
    // The number of rounds that takes a few milliseconds.
    let mut rounds = 64;
    while time(|| arch.peak(element, rounds)).1 < 0.004 && rounds < 1 << 40 {
        rounds *= 2;
    }
    let mut best = 0.0f64;
    for _ in 0..10 {
        let (operations, seconds) = time(|| {
            std::thread::scope(|s| {
                let spawn = |_| Builder::new().spawn_scoped(s, || arch.peak(element, rounds));
                let threads: Vec<_> = (0..n_threads.max(1))
                    .map(spawn)
                    .collect::<io::Result<_>>()?;
                Ok(threads
                    .into_iter()
                    .map(|t| t.join().unwrap_or(0))
                    .sum::<u64>())
            })
        });
        let operations: io::Result<u64> = operations;
        best = best.max(operations? as f64 / seconds);
    }
    Ok(best)
}

/// The result of `f`, and the seconds it took.
fn time<T>(f: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let value = f();
    (value, start.elapsed().as_secs_f64())
}

/// CPU time used so far by the machine and by this process.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// All processors' time, in clock ticks.
    total: u64,
    /// Part of `total` in which the processors were idle.
    idle: u64,
    /// Part of `total` used by this process.
    own: u64,
}

impl Load {
    /// The current counters; `None` if the system does not have them (Linux does).
    pub fn now() -> Option<Load> {
        let stat = std::fs::read_to_string("/proc/stat").ok()?;
        let ticks: Vec<u64> = stat
            .lines()
            .next()?
            .split_whitespace()
            .skip(1)
            .map_while(|t| t.parse().ok())
            .collect();
        let own = std::fs::read_to_string("/proc/self/stat").ok()?;
        // The process name, in parentheses, may contain anything; user and system time are fields
        // 14 and 15.
        let fields: Vec<&str> = own.rsplit_once(')')?.1.split_whitespace().collect();
        let own = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
        // Guest time is already included in user time.
        Some(Load {
            total: ticks.iter().take(8).sum(),
            idle: ticks.get(3)? + ticks.get(4)?,
            own,
        })
    }

    /// Fraction of the machine that other processes used since `then`.
    pub fn since(then: Option<Load>) -> Option<f64> {
        let (then, now) = (then?, Load::now()?);
        let total = now.total.checked_sub(then.total).filter(|&t| t > 0)?;
        let busy = total.saturating_sub(now.idle.saturating_sub(then.idle));
        Some(busy.saturating_sub(now.own.saturating_sub(then.own)) as f64 / total as f64)
    }
}
