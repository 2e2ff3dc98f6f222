//! Storage formats of weights: block layouts, and their conversion from and to `f32`.
//!
//! One file per family of formats, one line per format in [`FORMATS`].

mod dtype;
pub use dtype::DType;

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
