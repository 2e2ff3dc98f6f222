//! AVX2 with AVX-VNNI: Intel's CPUs since Alder Lake (2021), which have no AVX-512, and AMD's since
//! Zen 5.
//!
//! The kernels are those of AVX2, with other instructions for products of integers ([`dot`]), and
//! with the bytes of AVX-512's arithmetic where those make it the better one: generated rows
//! multiply planes of bytes, and prompts all formats but two as bytes.

mod dot;
mod gemm;
mod matmul;
mod peak;

use super::avx2;
use crate::arch::table::Kernels;
use dot::Vnni;

pub(crate) const KERNELS: Kernels = Kernels {
    name: "avx_vnni",
    supported,
    matvec: avx2::matmul::matvec_for::<matmul::Planes>,
    quantize_p16: matmul::quantize_p16,
    gemm: gemm::gemm_for,
    peak: peak::peak,
    attention_stored: avx2::attention_codes::attention_stored::<Vnni>,
    ..avx2::KERNELS
};

fn supported() -> bool {
    (avx2::KERNELS.supported)() && dot::supported()
}
