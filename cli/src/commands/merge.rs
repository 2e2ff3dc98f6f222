//! `ruvllm merge`: a new model file with adapters folded into its weights.

use crate::flags::{LoraArgs, ModelArgs, OverwriteArg, PlacementArgs, ThreadsArg};
use crate::io::{Failure, Progress, note, on_interrupt, size};
use ruvllm::Model;
use ruvllm::lora::Adapter;
use ruvllm::quant::{DType, FORMATS};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ruvllm merge -m model.gguf --lora adapter.gguf                     writes model-merged.gguf
  ruvllm merge -m model.gguf --lora-scaled a.gguf:0.5 -o half.gguf
  ruvllm merge -m model-q4_k_m.gguf --lora a.gguf --type F16         changed matrices without loss

Only the matrices that the adapters change are written anew. Weights of few bits lie on a grid on which small \
changes round away, so it is measured how much of the adapters is left. The output appears under its name when it \
is complete.";

/// Part of the adapters' change that has to be left for a type to be chosen.
const LEAST_KEPT: f64 = 0.95;

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// GGUF file to write [default: the model's name with -merged]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Type of the changed matrices: F32, F16, BF16, Q8_0, Q4_K, … [default: their own, or where that
    /// leaves less than 95 % of the adapters the first of Q8_0, F16 and F32 that leaves more]
    #[arg(long = "type", value_name = "TYPE", value_parser = tensor_type)]
    dtype: Option<DType>,
    #[command(flatten)]
    overwrite: OverwriteArg,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    lora: LoraArgs,
}

fn tensor_type(name: &str) -> Result<DType, String> {
    let writable = || FORMATS.iter().filter(|f| f.quantize.is_some());
    writable()
        .find(|f| f.name.eq_ignore_ascii_case(name))
        .map(|f| f.dtype)
        .ok_or_else(|| {
            let names: Vec<&str> = writable().map(|f| f.name).collect();
            format!(
                "there is no type {name:?} to write; there are {}",
                names.join(", ")
            )
        })
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let start = Instant::now();
    let output = match &args.output {
        Some(path) => path.clone(),
        None => {
            let stem = args.model.file_name();
            let stem = Path::new(&stem)
                .file_stem()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            PathBuf::from(format!("{stem}-merged.gguf"))
        }
    };
    args.overwrite.check(&output)?;
    args.threads.pool().build_global()?;
    let model = args.model.open(&PlacementArgs::default())?;
    let adapters = args.lora.open(&model)?;
    if adapters.is_empty() {
        return Err(Failure::Usage(
            "no adapter: give --lora FILE or --lora-scaled FILE:SCALE".into(),
        ));
    }

    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&interrupted);
    // Without a handler, Ctrl-C would leave half of a temporary file behind.
    on_interrupt(move || flag.store(true, Ordering::Relaxed))?;
    let bar = Progress::new("merging", model.n_params());
    let progress = |done| {
        bar.set(done);
        !interrupted.load(Ordering::Relaxed)
    };
    let dtype = chosen_type(args.dtype, &model, &adapters)?;
    let mut writer = model.merged(&adapters, dtype, &progress)?;
    args.overwrite.apply(&mut writer);
    let written = writer.write(&output);
    if interrupted.load(Ordering::Relaxed) {
        return Err(Failure::Interrupted);
    }
    written?;
    drop(bar);
    let bytes = std::fs::metadata(&output)
        .map_err(Failure::file(&output))?
        .len();
    note(format!(
        "{}: {} in {:.1} s",
        output.display(),
        size(bytes),
        start.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// The type of the changed matrices, `None` for their own; says what is left of the adapters.
fn chosen_type(
    asked: Option<DType>,
    model: &Model,
    adapters: &[(Arc<Adapter>, f32)],
) -> Result<Option<DType>, Failure> {
    let kept = model.kept_by_merging(adapters, asked)?;
    let percent = |kept: f64| format!("{:.1} %", 100.0 * kept);
    if kept >= LEAST_KEPT {
        note(format!("{} of the adapters is kept", percent(kept)));
        return Ok(asked);
    }
    if let Some(asked) = asked {
        let hint = "--type Q8_0 or F16 keeps more";
        note(format!(
            "only {} of the adapters is kept in {asked}: {hint}",
            percent(kept)
        ));
        return Ok(Some(asked));
    }
    for dtype in [DType::Q8_0, DType::F16] {
        // Rows of another length than blocks have are no reason to stop.
        if let Ok(more) = model.kept_by_merging(adapters, Some(dtype))
            && more >= LEAST_KEPT
        {
            note(format!(
                "only {} of the adapters would be left in the types of this model: the changed matrices become \
                 {dtype}, which keeps {}",
                percent(kept),
                percent(more)
            ));
            return Ok(Some(dtype));
        }
    }
    note(
        "the changed matrices become F32, as other types would lose more than 5 % of the adapters",
    );
    Ok(Some(DType::F32))
}
