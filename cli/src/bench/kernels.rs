//! `ruvllm bench kernels`: every kernel of every level against its bound.

use crate::flags::{forced_level, level};
use crate::io::Failure;
use crate::io::table::{Format, Printer};
use ruvllm::arch::Arch;
use ruvllm_benches::{KernelRow, kernels};
use serde_json::{Value, json};

const EXAMPLES: &str = "\
Examples:
  ruvllm bench kernels                       every level that this CPU has; takes minutes
  RUVLLM_ARCH=avx2 ruvllm bench kernels      one of them

A bound is the time that the bytes take at the read bandwidth, or the operations at the peak of the level's fastest \
instructions, whichever is longer; both are measured in the same run.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// How to print
    #[arg(short, long, value_enum, default_value_t = Format::Md)]
    output: Format,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let levels = if forced_level().is_some() {
        vec![level()?]
    } else {
        Arch::available().collect()
    };
    let mut printer = Printer::new(args.output);
    let mut outcome = Ok(());
    for arch in levels {
        kernels(arch, &mut |row| {
            if outcome.is_ok() {
                outcome = printer.row(&kernel_cells(&row), || kernel_json(&row));
            }
        })?;
    }
    outcome?;
    printer.end()
}

fn kernel_cells(row: &KernelRow) -> Vec<(&'static str, String)> {
    let rate = |amount: u64| match amount {
        0 => String::new(),
        n => format!("{:.1}", n as f64 / row.seconds / 1e9),
    };
    vec![
        ("level", row.level.to_owned()),
        ("kernel", row.kernel.clone()),
        ("µs", format!("{:.2}", row.seconds * 1e6)),
        ("GB/s", rate(row.bytes)),
        ("GFLOP/s", rate(row.flops)),
        ("% of bound", format!("{:.0} %", 100.0 * row.share())),
    ]
}

fn kernel_json(row: &KernelRow) -> Value {
    json!({
        "level": row.level,
        "kernel": row.kernel,
        "seconds": row.seconds,
        "bytes": row.bytes,
        "flops": row.flops,
        "bound_seconds": row.bound,
        "share": row.share(),
    })
}
