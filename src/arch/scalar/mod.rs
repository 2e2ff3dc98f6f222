//! The portable level: every kernel in its plainest form. It is the reference for tests of all
//! other levels, and the level of CPUs without any known extension.

mod attention;
mod elementwise;
mod matmul;
mod peak;

#[cfg(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_feature = "simd128"
))]
pub(super) use elementwise::ERFC;

use super::acts::ActForm;
use super::kv;
use super::table::{Gemm, Kernels, Matvec, PanelElement, Transposed};

pub(crate) const KERNELS: Kernels = Kernels {
    name: "scalar",
    supported: || true,
    matvec: |_| Matvec {
        form: ActForm::F32,
        kernel: matmul::matvec,
    },
    gemm: |_| Gemm {
        element: (PanelElement::F32, 1),
        tile: 32,
        small_batch: 0,
        mixed: None,
        group: 16,
        packed_len: matmul::packed_len,
        pack: matmul::pack,
        workspace: 0,
        kernel: matmul::gemm,
    },
    transposed: |_| Transposed {
        tile: 256,
        group: 16,
        packed_len: matmul::packed_len,
        pack: matmul::pack,
        workspace: 0,
        kernel: matmul::transposed,
    },
    dequantize: |dtype, blocks, x| (dtype.float_format().dequantize)(blocks, x),
    quantize_q16: matmul::quantize_q16,
    quantize_p16: matmul::quantize_p16,
    peak: peak::peak,
    slices: elementwise::TABLE,
    attention_queries: attention::attention_queries,
    attention_keys: attention::attention_keys,
    attention_f32: attention::attention,
    attention_f16: attention::attention,
    attention_stored: attention::attention_stored,
    hadamard: kv::hadamard,
    quantize_kv: kv::quantize,
    load_kv: kv::load,
    attention_merge: attention::attention_merge,
    attention_finish: attention::attention_finish,
    attention_element: (PanelElement::F32, 1),
};
