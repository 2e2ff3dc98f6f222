//! `ruvllm doctor`: what this build and this machine can do.

use crate::flags::{ModelArgs, ResidenceArgs, forced_level, level};
use crate::io::measured::Entry;
use crate::io::memory::Report;
use crate::io::{Failure, print, print_json, size};
use ruvllm::SystemMemory;
use ruvllm::arch::Arch;
use ruvllm::engine::default_threads;
use serde_json::json;
use std::fmt::Write;

const EXAMPLES: &str = "\
Examples:
  ruvllm doctor
  ruvllm doctor --json
  ruvllm doctor -m model.gguf           what a model takes here, and how to run it
  RUVLLM_ARCH=scalar ruvllm doctor      fails if the level is not there";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Run every kernel of the GPU against the scalar level instead
    #[cfg(any(feature = "metal", target_os = "macos"))]
    #[arg(long, conflicts_with = "json")]
    metal: bool,
}

/// A line about the GPU.
#[cfg(any(feature = "metal", target_os = "macos"))]
fn gpu() -> Option<String> {
    Some(match ruvllm::gpu::metal::device_info() {
        Ok(Some(gpu)) => {
            format!(
                "{} (Metal: {}), {} of memory for it",
                gpu.name,
                gpu.families.join(", "),
                size(gpu.memory_limit)
            )
        }
        Ok(None) => "none that Metal knows".into(),
        Err(error) => error.to_string(),
    })
}

#[cfg(not(any(feature = "metal", target_os = "macos")))]
fn gpu() -> Option<String> {
    None
}

/// A report that is worth attaching to an issue.
#[cfg(any(feature = "metal", target_os = "macos"))]
fn check_gpu() -> Result<(), Failure> {
    let mut out = format!(
        "ruvllm {} on {}\n",
        env!("CARGO_PKG_VERSION"),
        gpu().unwrap_or_default()
    );
    let mut failed = 0;
    ruvllm::gpu::metal::check_device(|kernels, result| {
        let result = result.err().map_or("ok".to_string(), |error| {
            failed += 1;
            format!("FAILED: {error}")
        });
        let _ = writeln!(out, "{kernels:<18} {result}");
    })?;
    print(out)?;
    if failed > 0 {
        return Err(Failure::Work(format!(
            "{failed} of the GPU's kernels fail: please report the lines above"
        )));
    }
    Ok(())
}

const FEATURES: &[(&str, bool)] = &[
    ("chat", cfg!(feature = "chat")),
    ("convert", cfg!(feature = "convert")),
    ("demo-model", cfg!(feature = "demo-model")),
    ("grammar", cfg!(feature = "grammar")),
    ("metal", cfg!(any(feature = "metal", target_os = "macos"))),
    ("pull", cfg!(feature = "pull")),
    ("serve", cfg!(feature = "serve")),
];

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    #[cfg(any(feature = "metal", target_os = "macos"))]
    if args.metal {
        return check_gpu();
    }
    let used = level()?.name();
    let levels: Vec<_> = Arch::available().map(Arch::name).collect();
    let features: Vec<_> = FEATURES
        .iter()
        .filter(|(_, on)| *on)
        .map(|(name, _)| *name)
        .collect();
    let forced = forced_level();
    let cpu = crate::io::measured::cpu_name();
    let memory = SystemMemory::now();
    let model = if args.model.is_demo() && cfg!(not(feature = "demo-model")) {
        None
    } else {
        Some(Report::of(&args.model.open(&ResidenceArgs::default())?)?)
    };
    let measured = crate::io::measured::read();
    let best = crate::io::measured::best(measured.clone().unwrap_or_default());
    let architectures: Vec<_> = ruvllm::model::supported_architectures().collect();
    if args.json {
        return print_json(&json!({
            "version": env!("CARGO_PKG_VERSION"),
            "target": format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            "optimised": !cfg!(debug_assertions),
            "features": features,
            "cpu": cpu,
            "levels": levels,
            "level": used,
            "level_forced": forced.is_some(),
            "gpu": gpu(),
            "threads": default_threads(),
            "memory_total": memory.map(|memory| memory.total),
            "memory_available": memory.map(|memory| memory.available),
            "memory_limit": memory.and_then(|memory| memory.limit),
            "model": model.as_ref().map(|report| json!({"label": args.model.label(), "memory": report.json()})),
            "measured": best.iter().map(Entry::json).collect::<Vec<_>>(),
            "architectures": architectures,
        }));
    }
    let mut out = String::new();
    let mut line = |label: &str, value: String| {
        let _ = writeln!(out, "{label:<14} {value}");
    };
    line(
        "ruvllm",
        format!(
            "{} for {} on {}",
            env!("CARGO_PKG_VERSION"),
            std::env::consts::ARCH,
            std::env::consts::OS
        ),
    );
    let build = if cfg!(debug_assertions) {
        "debug: several times slower than --release"
    } else {
        "release"
    };
    line("build", build.into());
    line("features", features.join(", "));
    if let Some(cpu) = cpu {
        line("cpu", cpu);
    }
    line("levels", format!("{} (best first)", levels.join(", ")));
    let why = forced.map_or("", |_| ", as RUVLLM_ARCH asks");
    line("level used", format!("{used}{why}"));
    if let Some(gpu) = gpu() {
        line("gpu", gpu);
    }
    line("threads", format!("{} by default", default_threads()));
    line(
        "memory",
        memory.map_or("not told by this system".into(), memory_line),
    );
    if let Some(report) = &model {
        line("model", args.model.label());
        report
            .lines()
            .into_iter()
            .for_each(|(label, text)| line(&format!("  {label}"), text));
    }
    if let Err(why) = measured {
        line("measured", why);
    }
    for entry in &best {
        line("measured", entry.line());
    }
    line("architectures", architectures.join(", "));
    print(out)
}

/// What there is of memory.
fn memory_line(memory: SystemMemory) -> String {
    let limit = memory.limit.map_or(String::new(), |limit| {
        format!(", limited to {}", size(limit))
    });
    let (total, available) = (size(memory.total), size(memory.available));
    format!("{total}{limit}, {available} of it available")
}
