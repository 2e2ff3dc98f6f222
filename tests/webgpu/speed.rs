//! Times of single kernels, on a real GPU: `cargo test --release --features webgpu --test webgpu --
//! --ignored --nocapture speed`.

use crate::devices;
use ruvllm::gpu::kernels::*;
use ruvllm::gpu::webgpu::{DeviceStage, Options};
use ruvllm::quant::DType;

/// Bytes that look random and are no NaN in any format that is measured.
fn bytes(n: u64) -> Vec<u8> {
    let block: Vec<u8> = (0..1u32 << 16)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 & 0x3B)
        .collect();
    let mut all = Vec::with_capacity(n as usize);
    while all.len() < n as usize {
        let rest = (n as usize - all.len()).min(block.len());
        all.extend_from_slice(&block[..rest]);
    }
    all
}

fn row_bytes(format: DType, n_in: u32) -> u32 {
    let (values, bytes) = format.block();
    n_in / values as u32 * bytes as u32
}

/// Formats that are measured: those of `RUVLLM_SPEED`, or some.
fn formats() -> Vec<DType> {
    let all = [
        DType::Q4_K,
        DType::Q6_K,
        DType::Q8_0,
        DType::Q4_0,
        DType::F16,
    ];
    let wanted = std::env::var("RUVLLM_SPEED").ok();
    let is_wanted = |f: &DType| {
        let name = f.to_string();
        wanted
            .as_ref()
            .is_none_or(|w| w.split(',').any(|w| w == name))
    };
    all.into_iter().filter(is_wanted).collect()
}

/// Prints what a product takes.
fn measure(stage: &DeviceStage<'_>, dispatch: &Dispatch, what: &str, flops: f64) {
    let buffers: Vec<Vec<u8>> = dispatch.lens.iter().map(|&len| bytes(len)).collect();
    let n = if flops > 1e10 { 20 } else { 100 };
    match stage.seconds(dispatch, &buffers, n) {
        Ok(seconds) => println!(
            "{what}: {:.1} us, {:.0} GB/s, {:.1} TFLOP/s",
            seconds * 1e6,
            dispatch.lens[0] as f64 / seconds / 1e9,
            flops / seconds / 1e12
        ),
        Err(e) => println!("{what}: {e}"),
    }
}

/// The products of a model of 8 billion weights and of one with a billion, and a kernel without
/// work, whose time is what a dispatch costs.
#[test]
#[ignore = "measures"]
fn speed_of_products() {
    for device in devices(Options::default()) {
        println!("{:?}", device.info());
        let stage = DeviceStage::new(&device, 1);
        let nothing = GELU.dispatch(DType::F32, 0, &ElementwiseArgs { n: 256 });
        let seconds = stage.seconds(&nothing, &[bytes(1024)], 1000).unwrap();
        println!("a dispatch: {:.2} us", seconds * 1e6);
        let norm = NormArgs {
            n: 4096,
            n_rows: 1,
            eps: 1e-6,
        };
        let norm = RMS_NORM.dispatch(DType::F32, 0, &norm);
        let buffers: Vec<Vec<u8>> = norm.lens.iter().map(|&len| bytes(len)).collect();
        let seconds = stage.seconds(&norm, &buffers, 1000).unwrap();
        println!("rms_norm of 4096: {:.2} us", seconds * 1e6);
        for format in formats() {
            // The last one does not fit into any cache.
            let shapes = [
                (4096, 1024),
                (4096, 4096),
                (4096, 12288),
                (12288, 4096),
                (2048, 8192),
                (8192, 2048),
                (4096, 131_072),
            ];
            for (n_in, n_out) in shapes {
                let one = [32, 64, 128]
                    .into_iter()
                    .flat_map(|lanes| [(lanes, 4, 1), (lanes, 8, 1)]);
                for (lanes, outs, n_rows) in one.chain([(0, 0, 8), (0, 0, 64)]) {
                    device.force_lanes(lanes);
                    device.force_outs(outs);
                    let args = MatvecArgs {
                        n_in,
                        n_out,
                        n_rows,
                        row_bytes: row_bytes(format, n_in),
                    };
                    let dispatch = MATVEC.dispatch(format, n_rows.min(8), &args);
                    let what = format!(
                        "matvec {format} {n_in} x {n_out}, {n_rows} rows, lanes {lanes}, outs {outs}"
                    );
                    let flops = 2.0 * f64::from(n_in) * f64::from(n_out) * f64::from(n_rows);
                    if n_rows < 64 || n_out < 100_000 {
                        measure(&stage, &dispatch, &what, flops);
                    }
                }
            }
            device.force_lanes(0);
            device.force_outs(0);
            for (n_in, n_out, n_rows) in [(2048, 2048, 512), (2048, 8192, 512), (4096, 4096, 512)] {
                let args = MatmulArgs {
                    n_in,
                    n_out,
                    n_rows,
                    row_bytes: row_bytes(format, n_in),
                };
                let dispatch = MATMUL.dispatch(format, 0, &args);
                let flops = 2.0 * f64::from(n_in) * f64::from(n_out) * f64::from(n_rows);
                let what = format!("matmul {format} {n_in} x {n_out}, {n_rows} rows");
                measure(&stage, &dispatch, &what, flops);
            }
        }
    }
}
