//! `ruvllm doctor`: what this build and this machine can do.

#[cfg(feature = "vision")]
use crate::flags::ProjectorArgs;
use crate::flags::{ModelArgs, PlacementArgs, drafter_memory, forced_level, level};
use crate::io::measured::Entry;
use crate::io::memory::Report;
use crate::io::{Failure, print, print_json, size};
use ruvllm::Model;
use ruvllm::SystemMemory;
use ruvllm::arch::Arch;
use ruvllm::engine::default_threads;
use serde_json::json;
use std::fmt::Write;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  ruvllm doctor
  ruvllm doctor --json
  ruvllm doctor -m model.gguf           what a model takes here, and how to run it
  ruvllm doctor -m model.gguf --mmproj mmproj.gguf     and what a picture takes
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
    /// Run every kernel of a GPU against the scalar level instead, and sessions with the demo model:
    /// of the GPU with this number, or of the first that is not the CPU
    #[cfg(feature = "webgpu")]
    #[arg(long, value_name = "N", conflicts_with = "json", num_args = 0..=1)]
    gpu: Option<Option<usize>>,
    /// Drafter whose memory is told: a smaller model, or one that was trained for the model [short: -md]
    #[arg(long, value_name = "FILE", help_heading = "Speculative decoding")]
    model_draft: Option<PathBuf>,
    #[cfg(feature = "vision")]
    #[command(flatten)]
    projector: ProjectorArgs,
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

/// The GPUs that `--device` chooses from, a line each.
fn gpus() -> Vec<String> {
    #[cfg(feature = "webgpu")]
    return ruvllm::gpu::webgpu::adapters()
        .iter()
        .enumerate()
        .map(|(number, adapter)| format!("{number}: {}", gpu_line(adapter)))
        .collect();
    #[cfg(not(feature = "webgpu"))]
    Vec::new()
}

/// Name, limits and features of a GPU.
#[cfg(feature = "webgpu")]
fn gpu_line(adapter: &ruvllm::gpu::webgpu::AdapterInfo) -> String {
    let kind = match (adapter.is_cpu, adapter.is_discrete) {
        (true, _) => "the CPU, only if asked for",
        (_, true) => "memory of its own",
        _ => "the system's memory",
    };
    let mut line = format!(
        "{} ({}, {kind}), buffers of {}, bindings of {}, {} per kernel",
        adapter.name,
        adapter.backend,
        size(adapter.max_buffer),
        size(adapter.max_binding),
        adapter.max_buffers
    );
    if !adapter.features.is_empty() {
        let _ = write!(line, "; {}", adapter.features.join(", "));
    }
    line
}

/// A report that is worth attaching to an issue: every kernel against the scalar level, and
/// sessions against those of the CPU, and against themselves in other batches.
#[cfg(feature = "webgpu")]
fn check_adapter(args: &Args, number: Option<usize>) -> Result<(), Failure> {
    let adapters = ruvllm::gpu::webgpu::adapters();
    let first = || adapters.iter().position(|adapter| !adapter.is_cpu);
    let index = number
        .or_else(first)
        .filter(|&i| i < adapters.len())
        .ok_or(ruvllm::gpu::GpuError::NoDevice)?;
    print(format!(
        "ruvllm {} on {}\n",
        env!("CARGO_PKG_VERSION"),
        gpu_line(&adapters[index])
    ))?;
    let mut failed = 0;
    let mut report = |name: &str, result: Result<String, String>| {
        let text = result.unwrap_or_else(|error| {
            failed += 1;
            format!("FAILED: {error}")
        });
        print(format!("{name:<18} {text}\n"))
    };
    let mut printed = Ok(());
    ruvllm::gpu::webgpu::check_device(index, |kernels, result| {
        let outcome = report(kernels, result.map(|()| "ok".to_string()));
        printed = std::mem::replace(&mut printed, Ok(())).and(outcome);
    })?;
    printed?;
    if args.model.is_demo() && cfg!(not(feature = "demo-model")) {
        report("sessions", Ok("not checked: give a model (-m)".into()))?;
    } else {
        let model = args.model.open(&PlacementArgs::default())?;
        match check_sessions(&model, index) {
            Err(Failure::Work(error)) => report("sessions", Err(error))?,
            outcome => report("sessions", Ok(outcome?))?,
        }
    }
    if failed > 0 {
        return Err(Failure::Work(format!(
            "{failed} of the GPU's checks fail: please report the lines above"
        )));
    }
    Ok(())
}

/// Whether a GPU's logits are the same however tokens are batched, and near the CPU's.
#[cfg(feature = "webgpu")]
fn check_sessions(model: &ruvllm::Model, adapter: usize) -> Result<String, Failure> {
    use ruvllm::KvType;
    use ruvllm::engine::EngineOptions;
    use ruvllm::model::Device;
    use ruvllm::{Engine, SessionOptions};
    let on = |device| {
        let options = EngineOptions {
            device: Some(device),
            ..EngineOptions::default()
        };
        Engine::new(model, &options)
    };
    let gpu = on(Device::Gpu {
        n_layers: usize::MAX,
        adapter: Some(adapter),
    })?;
    let options = SessionOptions {
        n_ctx: Some(256),
        kv_type: KvType::F16,
        ..SessionOptions::default()
    };
    let n_vocab = model.hparams().n_vocab as u32;
    let tokens: Vec<u32> = (0..140).map(|i| (i * 31 + i * i % 11) % n_vocab).collect();
    let (prompt, next) = tokens.split_at(130);
    let logits = |engine: &Engine, pieces: &[&[u32]]| -> Result<Vec<f32>, Failure> {
        let mut session = engine.session_with(&options)?;
        for piece in pieces {
            session.prefill(piece)?;
        }
        let mut all = session.logits().to_vec();
        for &token in next {
            session.decode(token)?;
            all.extend_from_slice(session.logits());
        }
        Ok(all)
    };
    let whole = logits(&gpu, &[prompt])?;
    if whole != logits(&gpu, &[&prompt[..70], &prompt[70..]])? {
        return Err(Failure::Work(
            "logits depend on how a prompt is split".into(),
        ));
    }
    let cpu = logits(&on(Device::Cpu)?, &[prompt])?;
    let apart = whole
        .iter()
        .zip(&cpu)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    let most = cpu.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let text = format!("logits are {apart:.1e} from the CPU's, of up to {most:.1}");
    // The CPU rounds activations to 8 bits, see `docs/design/arithmetic.md`.
    if whole.iter().all(|x| x.is_finite()) && apart <= 0.05 * most {
        Ok(format!("ok: {text}"))
    } else {
        Err(Failure::Work(text))
    }
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
    ("completions", cfg!(feature = "completions")),
    ("convert", cfg!(feature = "convert")),
    ("demo-model", cfg!(feature = "demo-model")),
    ("grammar", cfg!(feature = "grammar")),
    ("metal", cfg!(any(feature = "metal", target_os = "macos"))),
    ("pull", cfg!(feature = "pull")),
    ("serve", cfg!(feature = "serve")),
    ("tls", cfg!(feature = "tls")),
    ("vision", cfg!(feature = "vision")),
    ("webgpu", cfg!(feature = "webgpu")),
];

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    #[cfg(any(feature = "metal", target_os = "macos"))]
    if args.metal {
        return check_gpu();
    }
    #[cfg(feature = "webgpu")]
    if let Some(number) = args.gpu {
        return check_adapter(args, number);
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
    let has_model = !args.model.is_demo() || cfg!(feature = "demo-model");
    let open = || args.model.open(&PlacementArgs::default());
    let opened = has_model.then(open).transpose()?;
    let model = opened
        .as_ref()
        .map(|model| report(args, model))
        .transpose()?;
    let is_asked = !args.model.is_demo();
    let (best, ignored) = measured(opened.as_ref().filter(|_| is_asked));
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
            "gpus": gpus(),
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
    line("build", build().into());
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
    for gpu in gpus() {
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
    if let Some(why) = ignored {
        line("measured", why);
    }
    for entry in &best {
        line("measured", entry.line());
    }
    if !is_asked {
        line("architectures", architectures.join(", "));
    }
    print(out)
}

/// What a model takes, and a picture, if there is a projector.
fn report(args: &Args, model: &Model) -> Result<Report, Failure> {
    let mut report = Report::of(model)?;
    if let Some(path) = &args.model_draft {
        report.add_drafter(&drafter_memory(path, model)?);
    }
    #[cfg(feature = "vision")]
    if let Some(projector) = args.projector.any(&args.model, model)? {
        report.add_images(model, &projector, args.projector.options())?;
    }
    Ok(report)
}

/// What was measured, of `model` alone if there is one, and why anything was ignored.
fn measured(model: Option<&Model>) -> (Vec<Entry>, Option<String>) {
    let (entries, ignored) = match crate::io::measured::read() {
        Ok(entries) => (entries, None),
        Err(why) => (Vec::new(), Some(why)),
    };
    let mut best = crate::io::measured::best(entries);
    if let Some(model) = model {
        best.retain(|entry| entry.is_of(model));
    }
    (best, ignored)
}

/// How the program was compiled.
fn build() -> &'static str {
    if cfg!(debug_assertions) {
        "debug: several times slower than --release"
    } else {
        "release"
    }
}

/// What there is of memory.
fn memory_line(memory: SystemMemory) -> String {
    let limit = memory.limit.map_or(String::new(), |limit| {
        format!(", limited to {}", size(limit))
    });
    let (total, available) = (size(memory.total), size(memory.available));
    format!("{total}{limit}, {available} of it available")
}
