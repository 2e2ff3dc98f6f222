//! How much a submission may contain: systems stop a GPU that computes one for some seconds, and show
//! nothing meanwhile.

use crate::gpu::kernels::{
    AttentionArgs, ChannelScanArgs, Dispatch, MatmulExpertsArgs, MatvecArgs, MatvecExpertsArgs,
    PAGE_POSITIONS, ScanArgs,
};

/// Seconds of a submission, a half of what it may take.
const SECONDS: f64 = 0.25;
/// Operations per second of a slow GPU, until more is known.
const SLOW: f64 = 5e10;
/// Seconds from which on a pass's time is the GPU's.
const LONG: f64 = 0.02;

/// Operations per second of a GPU.
pub(super) struct Pace(f64);

impl Default for Pace {
    fn default() -> Pace {
        Pace(SLOW)
    }
}

impl Pace {
    /// Operations of a submission.
    pub(super) fn most(&self) -> f64 {
        self.0 * SECONDS
    }

    /// Takes note of what a pass took.
    pub(super) fn took(&mut self, operations: f64, seconds: f64) {
        let pace = operations / seconds.max(1e-6);
        if pace > self.0 || (seconds > LONG && operations > 0.0) {
            self.0 = pace;
        }
    }
}

/// About the number of operations of a dispatch, without those that are few.
pub(super) fn operations(dispatch: &Dispatch) -> f64 {
    let args = &dispatch.args;
    let factors = match dispatch.name {
        "matvec" | "matmul" => {
            // Both have the same arguments.
            let a: MatvecArgs = bytemuck::pod_read_unaligned(args);
            [a.n_in, a.n_out, a.n_rows]
        }
        "matvec_experts" => {
            let a: MatvecExpertsArgs = bytemuck::pod_read_unaligned(args);
            [a.n_in, a.n_out, a.n_chosen]
        }
        "matmul_experts" => {
            let a: MatmulExpertsArgs = bytemuck::pod_read_unaligned(args);
            [a.n_in, a.n_out, a.n_chosen]
        }
        "attention_prompt" => {
            let a: AttentionArgs = bytemuck::pod_read_unaligned(args);
            let values = a.n_head * (a.head_dim + a.head_dim_v);
            [a.n_rows, values, a.n_pages.saturating_mul(PAGE_POSITIONS)]
        }
        "delta_rule" | "ssm_scan" => {
            let a: ScanArgs = bytemuck::pod_read_unaligned(args);
            [a.n_rows, a.n_head * a.head_dim_v, 3 * a.head_dim_k]
        }
        "channel_scan" => {
            let a: ChannelScanArgs = bytemuck::pod_read_unaligned(args);
            [a.n_rows, a.n_channel, 3 * a.n_state]
        }
        _ => return 0.0,
    };
    2.0 * factors.iter().map(|&n| f64::from(n)).product::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::kernels::MATMUL;
    use crate::gpu::kernels::MatmulArgs;
    use crate::quant::DType;

    #[test]
    fn a_submission_takes_no_longer_than_passes_show() {
        let args = MatmulArgs {
            n_in: 4096,
            n_out: 14336,
            n_rows: 512,
            row_bytes: 2304,
        };
        let one = operations(&MATMUL.dispatch(DType::Q4_K, 0, &args));
        assert_eq!(one, 2.0 * 4096.0 * 14336.0 * 512.0);
        let mut pace = Pace::default();
        assert!(pace.most() < one);
        // A short pass tells little of a GPU, but that it is not slower.
        pace.took(1e6, 0.001);
        assert_eq!(pace.most(), SLOW * SECONDS);
        pace.took(one, 0.01);
        assert!((pace.most() / (25.0 * one) - 1.0).abs() < 1e-9);
        pace.took(one, 1.0);
        assert!((pace.most() / (0.25 * one) - 1.0).abs() < 1e-9);
    }
}
