//! A block of any format, read in place, and its conversion from and to `f32`.

use bytemuck::{Pod, Zeroable};
use half::f16;

/// One block of a format, read in place: its structure consists of bytes, so it may lie at any
/// address.
pub(super) trait Block: Pod {
    /// `[f32; values per block]`.
    type Values: Pod + AsRef<[f32]> + AsMut<[f32]>;

    /// Expands the block.
    fn dequantize(&self, out: &mut Self::Values);
}

/// A block that can be written.
pub(super) trait Pack: Block {
    /// The block before it is stored: scales and codes.
    type Fit: Recode;

    /// Chooses scales and codes with a small `Σ weight·error²`. Values are finite and at most 65504
    /// in magnitude, weights finite and not negative.
    fn fit(x: &Self::Values, weights: &Self::Values) -> Self::Fit;

    /// The block with those scales and codes.
    fn store(fit: &Self::Fit) -> Self;
}

/// A block whose codes may still change.
pub(super) trait Recode {
    /// Values that get their codes together.
    const RUN: usize;

    /// Chooses the codes of the values `at..at + RUN` for other values `x`, with a small
    /// `Σ w·error²` under the scales that are there; `x` becomes what is stored.
    fn recode(&mut self, at: usize, x: &mut [f32], w: &[f32]);
}

pub(super) fn dequantize_blocks<B: Block>(bytes: &[u8], out: &mut [f32]) {
    let blocks: &[B] = bytemuck::cast_slice(bytes);
    let values: &mut [B::Values] = bytemuck::cast_slice_mut(out);
    assert_eq!(blocks.len(), values.len(), "blocks and room for blocks");
    for (block, values) in blocks.iter().zip(values) {
        block.dequantize(values);
    }
}

pub(super) fn quantize_blocks<B: Pack>(x: &[f32], importance: Option<&[f32]>, bytes: &mut [u8]) {
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
        *block = B::store(&B::fit(&x, &weights));
    }
}

/// Weights of the squared errors in a block: `importance · √(2 + x²/σ²)` with `σ²` the mean of
/// `x²`. Errors of large values do more harm; ggml weighs them in the same way.
pub(super) fn weights<B: Block>(x: &B::Values, importance: Option<&B::Values>) -> B::Values {
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
pub(super) fn f16_value(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

/// The f16 nearest to `x`, as stored.
#[inline]
pub(super) fn to_f16(x: f32) -> [u8; 2] {
    f16::from_f32(x).to_le_bytes()
}

/// `x` clamped to the range of [`Format::quantize`](super::Format::quantize); NaN becomes 0.
#[inline]
pub(super) fn storable(x: f32) -> f32 {
    const MAX: f32 = 65504.0;
    if x.is_nan() { 0.0 } else { x.clamp(-MAX, MAX) }
}
