//! Storage formats of weights: block layouts, and their conversion from and to `f32`.
//!
//! One file per family of formats, one line per format in [`FORMATS`]. A format is a block
//! structure of bytes, so that blocks can be read in place at any address of a memory-mapped file;
//! `dequantize` is written in the plainest way and is the definition that every kernel is tested
//! against. Layouts are ggml's.
//!
//! Any bytes may be dequantised: a damaged file yields odd values (infinities and NaN included, as
//! the f16 scales can hold them), never a panic.

mod coded;
mod dtype;
mod error;
mod fit;
mod float;
mod iq;
pub(crate) mod iq_grids;
mod k;
mod legacy;
mod mix;
mod mxfp4;
mod nvfp4;
mod ternary;

pub use coded::{Coded, CodedScales};
pub use dtype::DType;
pub use error::QuantError;
pub use iq::{
    BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs, BlockIq4Nl,
    BlockIq4Xs, IQ4_VALUES,
};
pub use k::{
    BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, unpack_scales_mins, unpack_scales_q3_k,
};
pub use legacy::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0};
pub use mix::{FileType, ModelShape};
pub use mxfp4::{BlockMxfp4, MXFP4_VALUES};
pub use nvfp4::BlockNvfp4;
pub use ternary::{BlockTq1_0, BlockTq2_0};

use bytemuck::{Pod, Zeroable};
use half::f16;

/// Expands whole blocks, see [`Format::dequantize`].
pub type DequantizeFn = fn(blocks: &[u8], out: &mut [f32]);

/// Packs whole blocks, see [`Format::quantize`].
pub type QuantizeFn = fn(x: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]);

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
    const fn blocks<B: Block>(dtype: DType, name: &'static str) -> Format {
        Format {
            dtype,
            name,
            block_elems: size_of::<B::Values>() / size_of::<f32>(),
            block_bytes: size_of::<B>(),
            dequantize: dequantize_blocks::<B>,
            quantize: None,
        }
    }

    /// A block format that is read and written.
    const fn packed<B: Pack>(dtype: DType, name: &'static str) -> Format {
        Format {
            quantize: Some(quantize_blocks::<B>),
            ..Format::blocks::<B>(dtype, name)
        }
    }
}

/// Every format that this build reads.
pub static FORMATS: &[Format] = &[
    Format {
        dtype: DType::F32,
        name: "F32",
        block_elems: 1,
        block_bytes: 4,
        dequantize: float::dequantize_f32,
        quantize: Some(float::quantize_f32),
    },
    Format {
        dtype: DType::F16,
        name: "F16",
        block_elems: 1,
        block_bytes: 2,
        dequantize: float::dequantize_f16,
        quantize: Some(float::quantize_f16),
    },
    Format {
        dtype: DType::BF16,
        name: "BF16",
        block_elems: 1,
        block_bytes: 2,
        dequantize: float::dequantize_bf16,
        quantize: Some(float::quantize_bf16),
    },
    Format::packed::<BlockQ4_0>(DType::Q4_0, "Q4_0"),
    Format::packed::<BlockQ4_1>(DType::Q4_1, "Q4_1"),
    Format::packed::<BlockQ5_0>(DType::Q5_0, "Q5_0"),
    Format::packed::<BlockQ5_1>(DType::Q5_1, "Q5_1"),
    Format::packed::<BlockQ8_0>(DType::Q8_0, "Q8_0"),
    Format::packed::<BlockQ2K>(DType::Q2_K, "Q2_K"),
    Format::packed::<BlockQ3K>(DType::Q3_K, "Q3_K"),
    Format::packed::<BlockQ4K>(DType::Q4_K, "Q4_K"),
    Format::packed::<BlockQ5K>(DType::Q5_K, "Q5_K"),
    Format::packed::<BlockQ6K>(DType::Q6_K, "Q6_K"),
    Format::packed::<BlockIq4Nl>(DType::IQ4_NL, "IQ4_NL"),
    Format::blocks::<BlockIq4Xs>(DType::IQ4_XS, "IQ4_XS"),
    Format::blocks::<BlockMxfp4>(DType::MXFP4, "MXFP4"),
    Format::blocks::<BlockNvfp4>(DType::NVFP4, "NVFP4"),
    Format::blocks::<BlockTq1_0>(DType::TQ1_0, "TQ1_0"),
    Format::blocks::<BlockTq2_0>(DType::TQ2_0, "TQ2_0"),
    Format::blocks::<BlockIq1S>(DType::IQ1_S, "IQ1_S"),
    Format::blocks::<BlockIq1M>(DType::IQ1_M, "IQ1_M"),
    Format::blocks::<BlockIq2Xxs>(DType::IQ2_XXS, "IQ2_XXS"),
    Format::blocks::<BlockIq2Xs>(DType::IQ2_XS, "IQ2_XS"),
    Format::blocks::<BlockIq2S>(DType::IQ2_S, "IQ2_S"),
    Format::blocks::<BlockIq3Xxs>(DType::IQ3_XXS, "IQ3_XXS"),
    Format::blocks::<BlockIq3S>(DType::IQ3_S, "IQ3_S"),
];

impl DType {
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

/// Expands a row of whole blocks.
///
/// # Errors
/// [`QuantError`] if the type is not used for weights or a length does not fit.
pub fn dequantize_row(dtype: DType, blocks: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    let format = row_format(dtype, blocks.len(), out.len())?;
    (format.dequantize)(blocks, out);
    Ok(())
}

/// Packs a row of values; `importance` as in [`Format::quantize`].
///
/// # Errors
/// [`QuantError`] if this build cannot write the type, a length does not fit, or a value is
/// infinite or NaN: such a row is no weight, and packing it would hide that.
///
/// # Panics
/// If there is not one importance per value.
pub fn quantize_row(
    dtype: DType,
    x: &[f32],
    importance: Option<&[f32]>,
    blocks: &mut [u8],
) -> Result<(), QuantError> {
    let format = row_format(dtype, blocks.len(), x.len())?;
    let quantize = format.quantize.ok_or_else(|| QuantError::ReadOnly {
        dtype: dtype.to_string(),
    })?;
    if let Some(index) = x.iter().position(|x| !x.is_finite()) {
        return Err(QuantError::NotFinite {
            index,
            value: x[index],
        });
    }
    quantize(x, importance, blocks);
    Ok(())
}

/// The format of `dtype`, if `bytes` is the length of `values` values.
fn row_format(dtype: DType, bytes: usize, values: usize) -> Result<&'static Format, QuantError> {
    let format = dtype.format().ok_or_else(|| QuantError::NotAWeight {
        dtype: dtype.to_string(),
    })?;
    let fits = values.is_multiple_of(format.block_elems)
        && bytes.is_multiple_of(format.block_bytes)
        && values / format.block_elems == bytes / format.block_bytes;
    if !fits {
        return Err(QuantError::RowLength {
            dtype: dtype.to_string(),
            values,
            bytes,
            block_elems: format.block_elems,
            block_bytes: format.block_bytes,
        });
    }
    Ok(format)
}

/// One block of a format, read in place: its structure consists of bytes, so it may lie at any
/// address.
trait Block: Pod {
    /// `[f32; values per block]`.
    type Values: Pod + AsRef<[f32]> + AsMut<[f32]>;

    /// Expands the block.
    fn dequantize(&self, out: &mut Self::Values);
}

/// A block that can be written.
trait Pack: Block {
    /// Chooses the block with a small `Σ weight·error²`. Values are finite and at most 65504 in
    /// magnitude, weights finite and not negative.
    fn pack(x: &Self::Values, weights: &Self::Values) -> Self;
}

fn dequantize_blocks<B: Block>(bytes: &[u8], out: &mut [f32]) {
    let blocks: &[B] = bytemuck::cast_slice(bytes);
    let values: &mut [B::Values] = bytemuck::cast_slice_mut(out);
    assert_eq!(blocks.len(), values.len(), "blocks and room for blocks");
    for (block, values) in blocks.iter().zip(values) {
        block.dequantize(values);
    }
}

fn quantize_blocks<B: Pack>(x: &[f32], importance: Option<&[f32]>, bytes: &mut [u8]) {
    let values: &[B::Values] = bytemuck::cast_slice(x);
    let importance: Option<&[B::Values]> = importance.map(bytemuck::cast_slice);
    let blocks: &mut [B] = bytemuck::cast_slice_mut(bytes);
    assert_eq!(blocks.len(), values.len(), "blocks and room for blocks");
    assert!(
        importance.is_none_or(|i| i.len() == values.len()),
        "one importance per value"
    );
    for (i, (block, &x)) in blocks.iter_mut().zip(values).enumerate() {
        let mut x = x;
        for x in x.as_mut() {
            *x = storable(*x);
        }
        let weights = weights::<B>(&x, importance.map(|importance| &importance[i]));
        *block = B::pack(&x, &weights);
    }
}

/// Weights of the squared errors in a block: `importance · √(2 + x²/σ²)` with `σ²` the mean of
/// `x²`. Errors of large values do more harm; ggml weighs them in the same way.
fn weights<B: Block>(x: &B::Values, importance: Option<&B::Values>) -> B::Values {
    let x = x.as_ref();
    let mean_square = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    let per_square = if mean_square > f32::MIN_POSITIVE {
        1.0 / mean_square
    } else {
        0.0
    };
    // Relative to the largest, so that no sum overflows; unusable importances are ignored.
    let largest = importance.map_or(0.0, |i| i.as_ref().iter().fold(0.0, |m: f32, &i| m.max(i)));
    let importance = importance.filter(|_| largest > 0.0 && largest.is_finite());

    let mut weights = B::Values::zeroed();
    for (i, w) in weights.as_mut().iter_mut().enumerate() {
        let relative = importance.map_or(1.0, |v| v.as_ref()[i].max(0.0) / largest);
        *w = relative * (2.0 + x[i] * x[i] * per_square).sqrt();
    }
    weights
}

/// The value of a stored f16.
#[inline]
fn f16_value(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

/// The f16 nearest to `x`, as stored.
#[inline]
fn to_f16(x: f32) -> [u8; 2] {
    f16::from_f32(x).to_le_bytes()
}

/// `x` clamped to the range of [`Format::quantize`]; NaN becomes 0.
#[inline]
fn storable(x: f32) -> f32 {
    const MAX: f32 = 65504.0;
    if x.is_nan() { 0.0 } else { x.clamp(-MAX, MAX) }
}
