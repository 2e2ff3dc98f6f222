//! Storage formats of weights: block layouts, and their conversion from and to `f32`.
//!
//! One file per family of formats, one line per format in [`FORMATS`].

/// Element type of a tensor, numbered as in the GGUF specification.
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
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
}

/// How a format stores its values, and how to convert them.
#[derive(Debug)]
pub struct Format {
    /// The type this describes.
    pub dtype: DType,
    /// Its name as printed and typed (`Q4_K`).
    pub name: &'static str,
    /// Values per block.
    pub block_elems: usize,
    /// Bytes per block.
    pub block_bytes: usize,
    /// Expands whole blocks: `out.len() == blocks · block_elems`.
    pub dequantize: fn(blocks: &[u8], out: &mut [f32]),
    /// Packs whole blocks, if this build can write the format. `importance`, if given, weighs the
    /// squared error of each value of the row (`importance.len() == x.len()`).
    pub quantize: Option<fn(x: &[f32], importance: Option<&[f32]>, blocks: &mut [u8])>,
}

// Placeholder until the formats land.
impl DType {
    /// The format of a weight type.
    pub fn float_format(self) -> &'static Format {
        FORMATS.iter().find(|f| f.dtype == self).expect("a weight format")
    }
}
/// All formats.
pub static FORMATS: &[Format] = &[];
