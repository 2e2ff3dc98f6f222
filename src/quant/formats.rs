//! The list of formats, and the types that it makes: [`DType`], [`Format`], [`FORMATS`].

use super::block::{Block, Pack, dequantize_blocks, quantize_blocks};
use super::feedback::{self, Feedback};
use super::float::{
    dequantize_bf16, dequantize_f16, dequantize_f32, quantize_bf16, quantize_f16, quantize_f32,
};
use super::iq::{
    BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs, BlockIq4Nl,
    BlockIq4Xs,
};
use super::k::{BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K};
use super::legacy::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0};
use super::mxfp4::BlockMxfp4;
use super::nvfp4::BlockNvfp4;
use super::q1_0::BlockQ1_0;
use super::q2_0::BlockQ2_0;
use super::ternary::{BlockTq1_0, BlockTq2_0};
#[cfg(test)]
use super::unaccelerated::BlockUnaccelerated;
use std::fmt;

/// Makes [`DType`], [`FORMATS`] and the constants of block structures from the list of formats.
macro_rules! formats {
    (
        floats { $($float:ident = $float_id:literal: $bytes:literal, $dequantize:ident, $quantize:ident;)* }
        blocks { $($(#[$attr:meta])* $name:ident = $id:literal: $access:ident $block:ident;)* }
        others { $($other:ident = $other_id:literal: $other_bytes:literal;)* }
    ) => {
        /// Element type of a tensor, numbered as in the GGUF specification.
        ///
        /// The plain integers and `F64` appear in real files as tables; they are not formats of
        /// weights and have no [`Format`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        #[allow(non_camel_case_types, missing_docs)] // the field's own names
        #[non_exhaustive]
        pub enum DType {
            $($float = $float_id,)*
            $($(#[$attr])* $name = $id,)*
            $($other = $other_id,)*
        }

        impl DType {
            /// Every type: those of [`FORMATS`] in their order, then the others.
            pub const ALL: &'static [DType] = &[
                $(DType::$float,)*
                $($(#[$attr])* DType::$name,)*
                $(DType::$other,)*
            ];

            /// `(elements, bytes)` of one block; plain types have blocks of one element.
            pub const fn block(self) -> (u64, u64) {
                match self {
                    $(DType::$float => (1, $bytes),)*
                    $($(#[$attr])* DType::$name => (values_of::<$block>() as u64, size_of::<$block>() as u64),)*
                    $(DType::$other => (1, $other_bytes),)*
                }
            }
        }

        /// Every format that this build reads.
        pub static FORMATS: &[Format] = &[
            $(Format::float(DType::$float, stringify!($float), $bytes, $dequantize, $quantize),)*
            $($(#[$attr])* Format::$access::<$block>(DType::$name, stringify!($name)),)*
        ];

        $(
            $(#[$attr])*
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64", target_feature = "simd128"))]
            #[allow(dead_code)] // those of a format that no level knows yet
            impl $block {
                pub(crate) const DTYPE: DType = DType::$name;
                /// Blocks that hold 256 values.
                pub(crate) const PER_256: usize = 256 / values_of::<$block>();
            }
        )*
    };
}

// A line has the name, the number in files, and what this build can do with the format: `read` it,
// or also make it (`written`). With its block structure a format is complete on every
// instruction-set level: one that does not know it runs the scalar kernels.
formats! {
    floats {
        F32 = 0: 4, dequantize_f32, quantize_f32;
        F16 = 1: 2, dequantize_f16, quantize_f16;
        BF16 = 30: 2, dequantize_bf16, quantize_bf16;
    }
    blocks {
        Q4_0 = 2: written BlockQ4_0;
        Q4_1 = 3: written BlockQ4_1;
        Q5_0 = 6: written BlockQ5_0;
        Q5_1 = 7: written BlockQ5_1;
        Q8_0 = 8: written BlockQ8_0;
        Q2_K = 10: written BlockQ2K;
        Q3_K = 11: written BlockQ3K;
        Q4_K = 12: written BlockQ4K;
        Q5_K = 13: written BlockQ5K;
        Q6_K = 14: written BlockQ6K;
        IQ4_NL = 20: written BlockIq4Nl;
        IQ4_XS = 23: written BlockIq4Xs;
        MXFP4 = 39: written BlockMxfp4;
        NVFP4 = 40: written BlockNvfp4;
        Q1_0 = 41: written BlockQ1_0;
        Q2_0 = 42: written BlockQ2_0;
        TQ1_0 = 34: written BlockTq1_0;
        TQ2_0 = 35: written BlockTq2_0;
        IQ1_S = 19: written BlockIq1S;
        IQ1_M = 29: written BlockIq1M;
        IQ2_XXS = 16: written BlockIq2Xxs;
        IQ2_XS = 17: written BlockIq2Xs;
        IQ2_S = 22: written BlockIq2S;
        IQ3_XXS = 18: written BlockIq3Xxs;
        IQ3_S = 21: written BlockIq3S;
        #[cfg(test)] // no vector level knows it: shows that all of them run such a format
        UNACCELERATED = 63: read BlockUnaccelerated;
    }
    others {
        I8 = 24: 1;
        I16 = 25: 2;
        I32 = 26: 4;
        I64 = 27: 8;
        F64 = 28: 8;
    }
}

/// Values per block.
const fn values_of<B: Block>() -> usize {
    size_of::<B::Values>() / size_of::<f32>()
}

impl DType {
    /// The type numbered `id` in files; `None` for types that were removed from GGUF or that this
    /// build does not know.
    pub fn from_ggml(id: u32) -> Option<DType> {
        DType::ALL.iter().copied().find(|dtype| *dtype as u32 == id)
    }

    /// The format of this type; `None` for types that are not used for weights (integers, F64).
    pub fn format(self) -> Option<&'static Format> {
        FORMATS.iter().find(|f| f.dtype == self)
    }

    /// The format of a type that is known to be used for weights.
    ///
    /// # Panics
    /// On a type without a [`format`](DType::format).
    pub fn float_format(self) -> &'static Format {
        self.format()
            .unwrap_or_else(|| panic!("{self} is not a weight format"))
    }
}

/// The usual name: `Q4_K`.
impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}"))
    }
}

/// Expands whole blocks, see [`Format::dequantize`].
pub type DequantizeFn = fn(blocks: &[u8], out: &mut [f32]);

/// Packs whole blocks, see [`Format::quantize`].
pub type QuantizeFn = fn(x: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]);

/// Packs rows of whole blocks, see [`Format::quantize_with_feedback`].
pub(super) type FeedbackFn = fn(rows: &[f32], feedback: &Feedback, blocks: &mut [u8]);

/// How a format stores its values, and how to convert them.
#[derive(Debug)]
pub struct Format {
    /// The type described here.
    pub dtype: DType,
    /// Its name as printed and typed (`Q4_K`).
    pub name: &'static str,
    /// Values per block.
    pub block_elems: usize,
    /// Bytes per block.
    pub block_bytes: usize,
    /// Expands whole blocks: `out.len() == blocks · block_elems`. Panics on other lengths.
    pub dequantize: DequantizeFn,
    /// Packs whole blocks, if this build can write the format. `importance`, if given, weighs the
    /// squared error of each value of the row (`importance.len() == x.len()`). Panics on other
    /// lengths.
    ///
    /// NaN counts as 0, and magnitudes beyond 65504, the largest that an f16 scale is sure to
    /// hold, saturate there, so that the block is finite for any input. (F32 and BF16 have no
    /// scale and keep every value.)
    pub quantize: Option<QuantizeFn>,
    /// Packs whole rows so that later columns make up for the errors of earlier ones, if it has
    /// blocks and this build can write it.
    pub(super) quantize_with_feedback: Option<FeedbackFn>,
}

impl Format {
    /// Bytes of `rows` rows of `n` values; `None` if rows are not whole blocks, or there are too
    /// many.
    pub fn bytes_of(&self, rows: usize, n: usize) -> Option<usize> {
        let blocks = n
            .is_multiple_of(self.block_elems)
            .then(|| rows.checked_mul(n / self.block_elems));
        blocks.flatten()?.checked_mul(self.block_bytes)
    }

    /// A block format that is only read.
    const fn read<B: Block>(dtype: DType, name: &'static str) -> Format {
        Format {
            dtype,
            name,
            block_elems: values_of::<B>(),
            block_bytes: size_of::<B>(),
            dequantize: dequantize_blocks::<B>,
            quantize: None,
            quantize_with_feedback: None,
        }
    }

    /// A block format that is read and written.
    const fn written<B: Pack>(dtype: DType, name: &'static str) -> Format {
        Format {
            quantize: Some(quantize_blocks::<B>),
            quantize_with_feedback: Some(feedback::quantize_blocks::<B>),
            ..Format::read::<B>(dtype, name)
        }
    }

    /// A format without blocks.
    const fn float(
        dtype: DType,
        name: &'static str,
        bytes: usize,
        dequantize: DequantizeFn,
        quantize: QuantizeFn,
    ) -> Format {
        Format {
            dtype,
            name,
            block_elems: 1,
            block_bytes: bytes,
            dequantize,
            quantize: Some(quantize),
            quantize_with_feedback: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::feedback::tests::{inputs, moments, noise};
    use super::*;

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
        for id in [4, 5, 9, 15, 31, 36, 43, u32::MAX] {
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

    /// Columns that do not move together have nothing to make up for.
    #[test]
    fn without_correlation_nothing_changes() {
        let n = 512;
        let w = noise(3 * n, 4);
        let mut unit_vectors = vec![0.0; n * n];
        (0..n).for_each(|i| unit_vectors[i * n + i] = 2.0);
        let feedback = Feedback::new(moments(&unit_vectors, n)).unwrap();
        for format in FORMATS {
            let (Some(quantize), Some(with_feedback)) =
                (format.quantize, format.quantize_with_feedback)
            else {
                continue;
            };
            let mut plain = vec![0; format.bytes_of(3, n).unwrap()];
            let mut blocks = plain.clone();
            quantize(&w, None, &mut plain);
            with_feedback(&w, &feedback, &mut blocks);
            assert!(blocks == plain, "{}", format.name);
        }
    }

    /// The error of products with the inputs is smaller in every format: 0.03 to 0.3 of what it was.
    #[test]
    fn errors_are_made_up_for() {
        let (n, rows) = (512, 5);
        let x = inputs(600, n);
        let w = noise(rows * n, 5);
        let feedback = Feedback::new(moments(&x, n)).unwrap();
        let importance: Vec<f32> = (0..n)
            .map(|k| x.chunks(n).map(|x| x[k] * x[k]).sum())
            .collect();
        for format in FORMATS {
            let (Some(quantize), Some(with_feedback)) =
                (format.quantize, format.quantize_with_feedback)
            else {
                continue;
            };
            let loss = |blocks: &[u8]| {
                let mut q = vec![0.0; rows * n];
                (format.dequantize)(blocks, &mut q);
                let error = |w: &[f32], q: &[f32], x: &[f32]| {
                    let e = w.iter().zip(q).zip(x).map(|((w, q), x)| (q - w) * x);
                    f64::from(e.sum::<f32>()).powi(2)
                };
                let rows = w.chunks(n).zip(q.chunks(n));
                rows.map(|(w, q)| x.chunks(n).map(|x| error(w, q, x)).sum::<f64>())
                    .sum::<f64>()
            };
            let mut plain = vec![0; format.bytes_of(rows, n).unwrap()];
            let mut blocks = plain.clone();
            for (row, blocks) in w.chunks(n).zip(plain.chunks_mut(blocks.len() / rows)) {
                quantize(row, Some(&importance), blocks);
            }
            with_feedback(&w, &feedback, &mut blocks);
            let ratio = loss(&blocks) / loss(&plain);
            assert!(ratio < 0.35, "{}: {ratio}", format.name);
        }
    }
}
