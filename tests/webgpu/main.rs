//! The WGSL shaders: every kernel against the scalar level, on each adapter of this machine (Mesa's
//! CPU Vulkan, package `mesa-vulkan-drivers`, is one), every instance against `wgpu`'s validation,
//! and broken shaders.
//!
//! Without an adapter, nothing is tested, which the tests say; `RUVLLM_WEBGPU=1` makes that an
//! error, and with `RUVLLM_WEBGPU=0` nothing is tested in any case.

#[path = "../it/common/mod.rs"]
#[allow(dead_code)] // each test program uses its part
mod common;
#[path = "../it/mutants/mod.rs"]
mod mutants;
mod mutations;
mod passes;
#[path = "../it/run/mod.rs"]
mod run;
mod speed;
#[path = "../it/tiny/mod.rs"]
mod tiny;

use ruvllm::gpu::check::{CASES, Checker};
use ruvllm::gpu::kernels::{FORMATS, joined_declarations};
use ruvllm::gpu::webgpu::shaders::{FILES, Instance, declaration, instances};
use ruvllm::gpu::webgpu::{Device, DeviceStage, Options, adapters};
use ruvllm::quant::DType;

/// The adapters' devices, with checks of bounds.
fn devices(options: Options) -> Vec<Device> {
    let wanted = std::env::var("RUVLLM_WEBGPU").ok();
    if wanted.as_deref() == Some("0") {
        println!("SKIPPED: RUVLLM_WEBGPU=0");
        return Vec::new();
    }
    let found = adapters();
    if found.is_empty() {
        assert!(wanted.is_none(), "there is no adapter");
        println!("SKIPPED: there is no adapter; install mesa-vulkan-drivers");
    }
    let open = |i: usize| {
        let device = Device::open(i, options).unwrap_or_else(|e| panic!("{}: {e}", found[i].name));
        if let Some(changes) = changed_files() {
            device.change_shaders(changes);
        }
        device
    };
    (0..found.len()).map(open).collect()
}

/// Shaders of the folder `RUVLLM_WGSL`, which are tried without building the library again.
fn changed_files() -> Option<Vec<(String, String)>> {
    let folder = std::env::var("RUVLLM_WGSL").ok()?;
    let read = |(name, _): &(&str, &str)| {
        let text = std::fs::read_to_string(format!("{folder}/{name}.wgsl")).ok()?;
        Some((name.to_string(), text))
    };
    Some(FILES.iter().filter_map(read).collect())
}

const CHECKED: Options = Options {
    checked: true,
    default_limits: true,
    matrices: false,
};

/// With as many buffers as the adapter offers, and its matrices.
const OFFERED: Options = Options {
    checked: true,
    default_limits: false,
    matrices: true,
};

/// One of each way to read weights: plain, aligned blocks, unaligned ones, a table of values.
const SOME_FORMATS: &[DType] = &[DType::F16, DType::Q4_K, DType::Q6_K, DType::IQ4_NL];

/// `RUVLLM_WEBGPU_CASE` runs one case alone.
#[test]
fn kernels_yield_what_the_scalar_level_does() {
    let only = std::env::var("RUVLLM_WEBGPU_CASE").ok();
    for device in devices(CHECKED) {
        println!("{:?}", device.info());
        let mut failures = Vec::new();
        for case in CASES {
            if only.as_ref().is_some_and(|only| only != case.name) {
                continue;
            }
            // Each number of threads per row that some shape of weights has, or one.
            let long = std::env::var_os("RUVLLM_LONG").is_some();
            let all_lanes = match case.name.starts_with("matvec") {
                true if long => &[32, 64, 128][..],
                true => &[64],
                false => &[0],
            };
            for &lanes in all_lanes {
                device.force_lanes(lanes);
                let start = std::time::Instant::now();
                let mut stage = DeviceStage::new(&device, 2);
                // A driver compiles a matvec for each of them and of four numbers of rows.
                let formats = match case.name {
                    "matvec" if !long => SOME_FORMATS,
                    _ => FORMATS,
                };
                let result = (case.run)(&mut Checker::new(&mut stage, formats, true));
                println!("{}: {:.1} s", case.name, start.elapsed().as_secs_f32());
                if let Err(e) = result {
                    failures.push(format!("{}, {lanes} lanes: {e}", case.name));
                }
            }
        }
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    }
}

/// Products of prompts with cooperative matrices, where an adapter has them.
#[test]
fn matrices_yield_what_the_scalar_level_does() {
    for device in devices(OFFERED) {
        let Some(matrix) = device.info().matrix else {
            println!("SKIPPED: {} has no such matrices", device.info().name);
            continue;
        };
        println!("{}: {matrix:?}", device.info().name);
        for case in CASES.iter().filter(|c| c.name.starts_with("matmul")) {
            let mut stage = DeviceStage::new(&device, 1);
            let result = (case.run)(&mut Checker::new(&mut stage, FORMATS, true));
            result.unwrap_or_else(|e| panic!("{}: {e}", case.name));
        }
    }
}

/// Storage buffers that an instance binds.
fn n_buffers(instance: &Instance) -> u32 {
    let declaration = declaration(instance.name).expect("a kernel of the table");
    declaration.buffers.len() as u32 + instance.slabs
}

/// A device with WebGPU's default limits does without kernels that do the work of several others
/// where these bind more buffers.
#[test]
fn every_instance_is_valid() {
    let joined = joined_declarations();
    for (options, room) in [(CHECKED, 8), (OFFERED, 16)] {
        for device in devices(options) {
            let room = room.min(device.info().max_buffers);
            let (fit, other): (Vec<Instance>, Vec<Instance>) =
                instances(device.max_slabs(), device.info().matrix)
                    .into_iter()
                    .partition(|instance| n_buffers(instance) <= room);
            for instance in other {
                let is_joined = joined.iter().any(|kernel| kernel.name == instance.name);
                assert!(is_joined, "{} does not fit into {room}", instance.name);
            }
            let refused: Vec<String> = fit
                .iter()
                .filter_map(|instance| Some(device.compile(instance).err()?.to_string()))
                .collect();
            assert!(refused.is_empty(), "{}", refused.join("\n"));
        }
    }
}

/// All of them with `RUVLLM_LONG`, otherwise some.
#[test]
fn broken_shaders_are_caught() {
    let step = if std::env::var_os("RUVLLM_LONG").is_some() {
        1
    } else {
        9
    };
    let (plain, offered) = (devices(CHECKED), devices(OFFERED));
    if let (Some(device), Some(offered)) = (plain.last(), offered.last()) {
        mutations::run(device, offered, step);
    }
}
