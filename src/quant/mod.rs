//! Storage formats of weights: block layouts, and their conversion from and to `f32`.
//!
//! One file per family of formats, one line per format in the list of `formats.rs`. A format is a
//! block structure of bytes, so that blocks can be read in place at any address of a memory-mapped
//! file; `dequantize` is written in the plainest way and is the definition that every kernel is
//! tested against. Layouts are ggml's.
//!
//! Any bytes may be dequantised: a damaged file yields odd values (infinities and NaN included, as
//! the f16 scales can hold them), never a panic.

mod block;
mod coded;
mod converter;
mod error;
mod feedback;
mod fit;
mod float;
mod formats;
mod grid_fit;
mod iq;
pub(crate) mod iq_grids;
mod iq_pack;
mod k;
mod legacy;
mod mix;
mod mxfp4;
mod nvfp4;
mod q1_0;
mod q2_0;
mod scalar_fit;
mod ternary;
#[cfg(test)]
mod unaccelerated;

pub use coded::{Coded, CodedScales};
pub use converter::{Conversion, Converter, Loss, RowChange, RowError};
pub use error::QuantError;
pub use feedback::{Feedback, Moments};
pub use formats::{DType, DequantizeFn, FORMATS, Format, QuantizeFn};
pub use iq::{
    BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs, BlockIq4Nl,
    BlockIq4Xs,
};
pub use iq_grids::IQ4_VALUES;
pub use k::{
    BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, unpack_scales_mins, unpack_scales_q3_k,
};
pub use legacy::{BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0};
pub use mix::{FileType, ModelShape};
pub use mxfp4::{BlockMxfp4, MXFP4_VALUES};
pub use nvfp4::BlockNvfp4;
pub use q1_0::BlockQ1_0;
pub use q2_0::BlockQ2_0;
pub use ternary::{BlockTq1_0, BlockTq2_0};

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
    check_finite(x)?;
    quantize(x, importance, blocks);
    Ok(())
}

/// Refuses values of which one is infinite or NaN.
fn check_finite(values: &[f32]) -> Result<(), QuantError> {
    match values.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(index) => Err(QuantError::NotFinite {
            index,
            value: values[index],
        }),
    }
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
