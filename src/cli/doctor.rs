//! `ruvllm doctor`: what this build and this machine can do.

use super::model::{available_memory, meminfo};
use super::output::{Failure, print, print_json, size};
use ruvllm::arch::Arch;
use ruvllm::exec::default_threads;
use serde_json::json;
use std::fmt::Write;

const EXAMPLES: &str = "\
Examples:
  ruvllm doctor
  ruvllm doctor --json
  RUVLLM_ARCH=scalar ruvllm doctor      fails if the level is not there";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

const FEATURES: &[(&str, bool)] =
    &[("cli", cfg!(feature = "cli")), ("chat", cfg!(feature = "chat")), ("demo-model", cfg!(feature = "demo-model"))];

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let used = Arch::detect()?.name();
    let levels: Vec<_> = Arch::available().map(Arch::name).collect();
    let features: Vec<_> = FEATURES.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    let optimised = !cfg!(debug_assertions);
    let forced = std::env::var("RUVLLM_ARCH").ok().filter(|name| !name.is_empty());
    let cpu = cpu_name();
    let (total, available) = (meminfo("MemTotal"), available_memory());
    let architectures: Vec<_> = ruvllm::model::supported_architectures().collect();
    if args.json {
        return print_json(&json!({
            "version": env!("CARGO_PKG_VERSION"),
            "target": format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            "optimised": optimised,
            "features": features,
            "cpu": cpu,
            "levels": levels,
            "level": used,
            "level_forced": forced.is_some(),
            "threads": default_threads(),
            "memory_total": total,
            "memory_available": available,
            "architectures": architectures,
        }));
    }
    let mut out = String::new();
    let mut line = |label: &str, value: String| {
        let _ = writeln!(out, "{label:<14} {value}");
    };
    line("ruvllm", format!("{} for {} on {}", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH, std::env::consts::OS));
    line("build", if optimised { "release".into() } else { "debug: several times slower than --release".into() });
    line("features", features.join(", "));
    if let Some(cpu) = cpu {
        line("cpu", cpu);
    }
    line("levels", format!("{} (best first)", levels.join(", ")));
    line("level used", format!("{used}{}", if forced.is_some() { ", as RUVLLM_ARCH asks" } else { "" }));
    line("threads", format!("{} by default", default_threads()));
    match (total, available) {
        (Some(total), Some(available)) => {
            line("memory", format!("{}, {} of it available", size(total), size(available)))
        }
        _ => line("memory", "not told by this system".into()),
    }
    line("architectures", architectures.join(", "));
    print(out)
}

fn cpu_name() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start_matches([' ', '\t', ':']).to_owned())
}
