//! Numbers of workgroups, where WGSL's kernels have other tiles than the table's.

use crate::gpu::GpuError;
use crate::gpu::kernels::*;
use crate::gpu::webgpu::shaders::{Instance, attends_generated};

/// Most workgroups per dimension that WebGPU promises.
const MOST: u32 = 65535;

/// Kernels that take their workgroup's number from two dimensions, see `folded` in `common.wgsl`.
const FOLDED: &[&str] = &[
    "silu_mul",
    "gelu_mul",
    "swiglu_oai",
    "gelu",
    "squared_relu",
    "unary",
    "gated",
    "add_scaled",
    "finish_logits",
    "rms_norm",
    "rms_norm_add",
    "layer_norm",
    "layer_norm_add",
    "rms_norm_heads",
    "gated_norm_heads",
    "hadamard",
];

/// Number of workgroups of a call of an instance. `more` are the rows of further matrices of a matvec
/// that have workgroups of their own.
///
/// # Errors
/// [`GpuError::Kernel`] if a dimension is too long.
pub(super) fn grid(
    dispatch: &Dispatch,
    instance: &Instance,
    more: &[u32],
) -> Result<[u32; 3], GpuError> {
    let args = &dispatch.args;
    let outs = 128 / instance.lanes.max(1) * instance.outs;
    let tile = instance.matrix.map_or([64, 64], |matrix| matrix.tile());
    let grid = match dispatch.name {
        "matvec" => {
            let a: MatvecArgs = bytemuck::pod_read_unaligned(args);
            let all = std::iter::once(&a.n_out).chain(more);
            let tiles: u32 = all.map(|n_out| n_out.div_ceil(outs)).sum();
            [
                a.n_rows.div_ceil(dispatch.variant),
                tiles.min(MOST),
                tiles.div_ceil(MOST),
            ]
        }
        "matvec_experts" => {
            let a: MatvecExpertsArgs = bytemuck::pod_read_unaligned(args);
            [a.n_out.div_ceil(outs), a.n_chosen, 1]
        }
        "matmul" => {
            let a: MatmulArgs = bytemuck::pod_read_unaligned(args);
            [a.n_out.div_ceil(tile[0]), a.n_rows.div_ceil(tile[1]), 1]
        }
        "matmul_experts" => {
            let a: MatmulExpertsArgs = bytemuck::pod_read_unaligned(args);
            [
                a.n_out.div_ceil(tile[0]),
                a.n_rows.div_ceil(tile[1]),
                a.n_expert,
            ]
        }
        name if attends_generated(name) => {
            let a: AttentionArgs = bytemuck::pod_read_unaligned(args);
            let chunks = (a.n_head / a.n_head_kv).div_ceil(instance.heads_each());
            [a.n_splits, a.n_head_kv * chunks, a.n_rows]
        }
        name if FOLDED.contains(&name) && dispatch.grid[0] > MOST => {
            [MOST, dispatch.grid[0].div_ceil(MOST), 1]
        }
        _ => dispatch.grid,
    };
    if grid.iter().any(|&n| n > MOST) {
        return Err(GpuError::Kernel {
            kernel: dispatch.kernel(),
            message: format!("{grid:?} workgroups are more than {MOST} in a dimension"),
        });
    }
    Ok(grid)
}
