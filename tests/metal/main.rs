//! The Metal shaders on an emulated GPU: every kernel against the scalar reference, the shaders'
//! declarations against the table that the host dispatches from, and detectors against shaders that
//! are broken on purpose.

#![cfg(target_os = "linux")] // whose linker and processes the emulator relies on

#[path = "../../build.rs"]
#[allow(dead_code)] // what it does in a build
mod build;
#[path = "../it/common/mod.rs"]
#[allow(dead_code)] // each test program uses its part
mod common;
mod emulated;
mod emulator;
#[path = "../it/mutants/mod.rs"]
mod mutants;
mod mutations;
mod operations;
mod passes;
mod predictions;
#[path = "../it/run/mod.rs"]
mod run;
mod separate;
mod shaders;
#[path = "../it/tiny/mod.rs"]
mod tiny;

use emulator::Emulator;
use ruvllm::gpu::check::{CASES, Checker, Data, Stage};
use ruvllm::gpu::kernels::{
    Access, Declaration, Dispatch, Element, ElementwiseArgs, FORMATS, GELU, declarations,
};
use ruvllm::quant::DType;
use shaders::{Kernel, Parameter, Structure};
use std::path::PathBuf;

fn all_shaders() -> PathBuf {
    emulator::build_all().unwrap_or_else(|e| panic!("{e}"))
}

/// `RUVLLM_METAL_CASE` runs one case alone.
#[test]
fn kernels_yield_what_the_scalar_level_does() {
    let program = all_shaders();
    let only = std::env::var("RUVLLM_METAL_CASE").ok();
    let failures: Vec<String> = CASES
        .iter()
        .filter(|case| only.as_ref().is_none_or(|only| only == case.name))
        .filter_map(|case| {
            let start = std::time::Instant::now();
            let result = (case.run)(&mut Checker::new(
                &mut Emulator::start(&program),
                FORMATS,
                true,
            ));
            println!("{}: {:.1} s", case.name, start.elapsed().as_secs_f32());
            result.err().map(|e| format!("{}: {e}", case.name))
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn broken_shaders_are_caught() {
    mutations::run();
}

/// Parameters that the table declares for a kernel.
fn declared_parameters(d: &Declaration) -> Vec<Parameter> {
    let buffer = |i: usize, space: &str, constant, element: &str, name: &str| Parameter::Buffer {
        space: space.to_string(),
        constant,
        element: element.to_string(),
        name: name.to_string(),
        index: i as u32,
    };
    let buffers = d.buffers.iter().enumerate();
    let buffers = buffers
        .map(|(i, (name, e, access))| buffer(i, "device", *access == Access::Read, e.msl(), name));
    buffers
        .chain([buffer(d.buffers.len(), "constant", true, d.args, "p")])
        .collect()
}

#[test]
fn shaders_declare_what_the_table_says() {
    let mut kernels: Vec<(String, Kernel)> = Vec::new();
    let mut structures: Vec<Structure> = Vec::new();
    for (file, text) in shaders::files("metal")
        .into_iter()
        .chain(shaders::files("h"))
    {
        let translated =
            shaders::translate(&file, &text, false, None).unwrap_or_else(|e| panic!("{e}"));
        kernels.extend(
            translated
                .kernels
                .into_iter()
                .map(|kernel| (file.clone(), kernel)),
        );
        structures.extend(translated.structures);
    }
    let table = declarations();
    for (file, kernel) in &kernels {
        assert!(
            table
                .iter()
                .any(|d| d.name == kernel.name && d.source == file),
            "{file}: {} is in no table",
            kernel.name
        );
    }
    let program = all_shaders();
    let mut gpu = Emulator::start(&program);
    for d in &table {
        let (_, kernel) = kernels
            .iter()
            .find(|(_, kernel)| kernel.name == d.name)
            .expect(d.name);
        let buffers: Vec<&Parameter> = kernel
            .parameters
            .iter()
            .filter(|p| matches!(p, Parameter::Buffer { .. }))
            .collect();
        assert_eq!(
            buffers,
            declared_parameters(d).iter().collect::<Vec<_>>(),
            "{}",
            d.name
        );
        let structure = structures.iter().find(|s| s.name == d.args).expect(d.args);
        let fields = d.fields.iter().map(|(name, of)| {
            (
                name.to_string(),
                if *of == "u32" { "uint" } else { "float" },
            )
        });
        let fields: Vec<(String, String)> =
            fields.map(|(name, of)| (name, of.to_string())).collect();
        assert_eq!(structure.fields, fields, "{}", d.args);
        for (instance, _) in &d.instances {
            let nothing = Dispatch {
                name: instance.clone().leak(),
                format: DType::F32,
                variant: 0,
                per_format: false,
                lens: vec![],
                args: vec![],
                grid: [0; 3],
                threads: d.threads,
                threadgroup_bytes: 0,
            };
            let report = gpu.run(&nothing, &[], &[]).unwrap_err();
            assert!(report.ends_with("a buffer is not bound"), "{report}");
        }
    }
}

/// As `build.rs` hands it to Apple's compiler: one text, whose names must not clash.
#[test]
fn the_library_is_one_text() {
    let text = build::library(&shaders::folder()).unwrap();
    let types = emulator::Build {
        types: true,
        ..emulator::Build::default()
    };
    emulator::build_text("library.metal", &text, types).unwrap_or_else(|e| panic!("{e}"));
}

/// Dispatches without a fence between them, which a GPU may overlap.
#[test]
fn hazards_between_dispatches_are_caught() {
    let program = all_shaders();
    let mut gpu = Emulator::start(&program);
    let x = gpu.filled(bytemuck::cast_slice(&[1.0f32; 100]), Element::F32.align());
    let dispatch = GELU.dispatch(DType::F32, 0, &ElementwiseArgs { n: 100 });
    let whole = [(x, 0, u64::MAX)];
    gpu.run_parts(&dispatch, &whole, &[]).unwrap();
    gpu.fence();
    gpu.run_parts(&dispatch, &whole, &[]).unwrap();
    let report = gpu.run_parts(&dispatch, &whole, &[]).unwrap_err();
    assert!(report.contains("hazard: read of buffer 0"), "{report}");
}

/// A buffer that is a value shorter than the table says, and arguments of another size.
#[test]
fn short_buffers_are_caught() {
    let program = all_shaders();
    let mut gpu = Emulator::start(&program);
    let x = gpu.filled(bytemuck::cast_slice(&[1.0f32; 99]), Element::F32.align());
    let mut dispatch = GELU.dispatch(DType::F32, 0, &ElementwiseArgs { n: 100 });
    let report = gpu.run(&dispatch, &[x], &[]).unwrap_err();
    assert!(
        report.contains("out of bounds: read of 4 bytes, 0 bytes behind the 396 of buffer 0"),
        "{report}"
    );
    dispatch.args.push(0);
    let report = gpu.run(&dispatch, &[x], &[]).unwrap_err();
    assert!(report.contains("arguments: buffer 1"), "{report}");
    let args = ElementwiseArgs { n: 99 };
    Checker::new(&mut gpu, FORMATS, true)
        .call(&GELU, DType::F32, 0, &args, &[Data::F32(&[1.0; 99])], &[])
        .unwrap();
}
