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
        for format in [
            DType::Q4_K,
            DType::Q6_K,
            DType::Q8_0,
            DType::Q4_0,
            DType::F16,
        ] {
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
                for lanes in [0, 32, 64, 128] {
                    device.force_lanes(lanes);
                    let args = MatvecArgs {
                        n_in,
                        n_out,
                        n_rows: 1,
                        row_bytes: row_bytes(format, n_in),
                    };
                    let dispatch = MATVEC.dispatch(format, 1, &args);
                    let buffers: Vec<Vec<u8>> =
                        dispatch.lens.iter().map(|&len| bytes(len)).collect();
                    let seconds = stage.seconds(&dispatch, &buffers, 100).unwrap();
                    println!(
                        "matvec {format} {n_in} x {n_out}, lanes {lanes}: {:.1} us, {:.0} GB/s",
                        seconds * 1e6,
                        dispatch.lens[0] as f64 / seconds / 1e9
                    );
                }
            }
            device.force_lanes(0);
            for (n_in, n_out, n_rows) in [(2048, 2048, 512), (2048, 8192, 512), (4096, 4096, 512)] {
                let args = MatmulArgs {
                    n_in,
                    n_out,
                    n_rows,
                    row_bytes: row_bytes(format, n_in),
                };
                let dispatch = MATMUL.dispatch(format, 0, &args);
                let buffers: Vec<Vec<u8>> = dispatch.lens.iter().map(|&len| bytes(len)).collect();
                let seconds = stage.seconds(&dispatch, &buffers, 20).unwrap();
                println!(
                    "matmul {format} {n_in} x {n_out}, {n_rows} rows: {:.0} us, {:.1} TFLOP/s",
                    seconds * 1e6,
                    2.0 * f64::from(n_in) * f64::from(n_out) * f64::from(n_rows) / seconds / 1e12
                );
            }
        }
    }
}
