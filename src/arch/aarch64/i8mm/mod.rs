//! NEON with `smmla`: FEAT_I8MM, ARMv8.6, among them Neoverse V1 and Apple M2 and later.
//!
//! There is no level for `bfmmla` and none for half precision, which such cores have, too, for the
//! reasons below. Per instruction, `bfmmla` makes 16 products, `fmla` 4, `sdot` 16 and `smmla` 32.
//!
//! - F16, BF16 and F32 weights stay exact: 0.58, 0.46 and 0.43 instructions per product with eight
//!   activation rows, 0.25 of them `fmla`. An activation is the sum of three bf16 numbers, an F16
//!   weight that of two, an F32 weight of three: BF16 weights would take 3/16 = 0.19 for
//!   multiplications alone, F16 weights 6/16 = 0.38 and F32 weights more. With two for each factor
//!   (17 bits) it is 2/16 and 4/16: only prompts of BF16 models would gain, from 0.46 to about 0.2,
//!   and `bfmmla` rounds to odd and drops denormals.
//! - Block formats take 0.11 to 0.23 by `smmla`. `bfmmla` with both factors rounded to eight bits
//!   would be at 1/16 for multiplications and as much again for loads, which is no less than
//!   `smmla` with 8-bit activations takes, and errs more than the 16-bit ones of formats of 32
//!   weights.
//! - `fmla` on half precision makes 8 products but adds them with eleven bits: a sum of a thousand
//!   loses all but one or two digits. `fmlal` adds in `f32`, 4 products each, as `fmla` does, of
//!   activations rounded to eleven bits. Conversions (`fcvtl`, `fcvtn`) are part of ARMv8.0.

mod gemm;
mod peak;

use super::dotprod;
use crate::arch::table::Kernels;

pub(crate) const KERNELS: Kernels = Kernels {
    name: "neon_i8mm",
    supported,
    gemm: gemm::gemm_for,
    peak: peak::peak,
    ..dotprod::KERNELS
};

fn supported() -> bool {
    (dotprod::KERNELS.supported)() && std::arch::is_aarch64_feature_detected!("i8mm")
}
