//! Element types of GGUF tensors and the size of their blocks: enough to compute a tensor's length.
//! Sizes are those of ggml's block structures.

use std::fmt;

/// Element type of a tensor, numbered as in the GGUF specification.
///
/// The plain integers and `F64` appear in real files as tables; they are not formats of weights and
/// have no [`Format`](super::Format).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
#[allow(non_camel_case_types, missing_docs)] // the field's own names
#[non_exhaustive]
pub enum DType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    I8 = 24,
    I16 = 25,
    I32 = 26,
    I64 = 27,
    F64 = 28,
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    NVFP4 = 40,
}

impl DType {
    /// Every type, in the order of the numbers.
    pub const ALL: &'static [DType] = &[
        DType::F32,
        DType::F16,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q2_K,
        DType::Q3_K,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
        DType::IQ2_XXS,
        DType::IQ2_XS,
        DType::IQ3_XXS,
        DType::IQ1_S,
        DType::IQ4_NL,
        DType::IQ3_S,
        DType::IQ2_S,
        DType::IQ4_XS,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::F64,
        DType::IQ1_M,
        DType::BF16,
        DType::TQ1_0,
        DType::TQ2_0,
        DType::MXFP4,
        DType::NVFP4,
    ];

    /// The type numbered `id` in files; `None` for types that were removed from GGUF or that this
    /// build does not know.
    pub fn from_ggml(id: u32) -> Option<DType> {
        DType::ALL.iter().copied().find(|dtype| *dtype as u32 == id)
    }

    /// `(elements, bytes)` of one block; plain types have blocks of one element.
    pub const fn block(self) -> (u64, u64) {
        match self {
            DType::I8 => (1, 1),
            DType::F16 | DType::BF16 | DType::I16 => (1, 2),
            DType::F32 | DType::I32 => (1, 4),
            DType::I64 | DType::F64 => (1, 8),
            DType::Q4_0 | DType::IQ4_NL => (32, 18),
            DType::Q4_1 => (32, 20),
            DType::Q5_0 => (32, 22),
            DType::Q5_1 => (32, 24),
            DType::Q8_0 => (32, 34),
            DType::MXFP4 => (32, 17),
            DType::NVFP4 => (64, 36),
            DType::Q2_K => (256, 84),
            DType::Q3_K | DType::IQ3_S => (256, 110),
            DType::Q4_K => (256, 144),
            DType::Q5_K => (256, 176),
            DType::Q6_K => (256, 210),
            DType::IQ1_S => (256, 50),
            DType::IQ1_M => (256, 56),
            DType::IQ2_XXS | DType::TQ2_0 => (256, 66),
            DType::IQ2_XS => (256, 74),
            DType::IQ2_S => (256, 82),
            DType::IQ3_XXS => (256, 98),
            DType::IQ4_XS => (256, 136),
            DType::TQ1_0 => (256, 54),
        }
    }
}

/// The usual name: `Q4_K`.
impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}"))
    }
}

#[cfg(test)]
mod tests {
    use crate::quant::dtype::*;

    #[test]
    fn ids_and_block_sizes() {
        let known: Vec<u32> = (0..64)
            .filter(|&id| DType::from_ggml(id).is_some())
            .collect();
        assert_eq!(known.len(), DType::ALL.len());
        for &dtype in DType::ALL {
            assert_eq!(DType::from_ggml(dtype as u32), Some(dtype));
        }
        // Removed (Q4_2, Q4_3, Q4_0_4_4, IQ4_NL_4_4), intermediate (Q8_1, Q8_K) or never assigned.
        for id in [4, 5, 9, 15, 31, 36, 41, u32::MAX] {
            assert_eq!(DType::from_ggml(id), None, "{id}");
        }
        // Bits per weight as ggml's documentation states them.
        for (dtype, bits) in [
            (DType::Q8_0, 8.5),
            (DType::Q4_K, 4.5),
            (DType::Q5_K, 5.5),
            (DType::Q6_K, 6.5625),
            (DType::Q3_K, 3.4375),
            (DType::Q2_K, 2.625),
            (DType::IQ2_XXS, 2.0625),
            (DType::IQ2_XS, 2.3125),
            (DType::IQ3_XXS, 3.0625),
            (DType::IQ1_S, 1.5625),
            (DType::IQ1_M, 1.75),
            (DType::IQ4_XS, 4.25),
            (DType::IQ4_NL, 4.5),
            (DType::TQ1_0, 1.6875),
            (DType::TQ2_0, 2.0625),
            (DType::MXFP4, 4.25),
        ] {
            let (elems, bytes) = dtype.block();
            assert_eq!(bytes as f64 * 8.0 / elems as f64, bits, "{dtype}");
        }
    }
}
