//! Resampling of images, with the bits of Pillow 11.3 or of torchvision, by which the authors' image
//! processors differ.
//!
//! A separable filter whose weights are stretched when an image shrinks, so that every pixel
//! counts. Weights are rounded to fixed point, with 22 bits in Pillow; in torchvision with as many
//! as the largest weight of the axis leaves of 16. The horizontal pass comes first, and the image
//! between both passes is rounded to 8 bits.

use crate::vision::image::Image;
use std::f64::consts::PI;

/// Fractional bits of weights: 32 less those of a pixel and of overshoot.
const BITS: u32 = 32 - 8 - 2;

/// A resampling filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Filter {
    /// Triangle of radius 1.
    Bilinear,
    /// Cubic of radius 2 (Keys 1981) with `a = -1/2`.
    Bicubic,
    /// Windowed sinc of radius 3.
    Lanczos,
}

impl Filter {
    fn radius(self) -> f64 {
        match self {
            Filter::Bilinear => 1.0,
            Filter::Bicubic => 2.0,
            Filter::Lanczos => 3.0,
        }
    }

    fn at(self, x: f64) -> f64 {
        const A: f64 = -0.5;
        let sinc = |x: f64| {
            if x == 0.0 {
                1.0
            } else {
                (x * PI).sin() / (x * PI)
            }
        };
        match (self, x.abs()) {
            (Filter::Bilinear, x) if x < 1.0 => 1.0 - x,
            (Filter::Bicubic, x) if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            (Filter::Bicubic, x) if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            (Filter::Lanczos, _) if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
            _ => 0.0,
        }
    }
}

/// Whose fixed point weights have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rounding {
    Pillow,
    Torch,
}

impl Rounding {
    /// Fractional bits of weights.
    fn bits(self, weights: &[(usize, Vec<f64>)]) -> u32 {
        let largest = weights
            .iter()
            .flat_map(|(_, weights)| weights)
            .fold(0.0, |a: f64, b| a.max(*b));
        let is_over = |bits: &u32| (0.5 + largest * f64::from(1 << (bits + 1))) as i32 >= 1 << 15;
        match self {
            Rounding::Pillow => BITS,
            Rounding::Torch => (0..BITS).find(is_over).unwrap_or(BITS),
        }
    }
}

/// Weights of the inputs of one output.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// Inputs and weights, which sum to 1, of each of `n_out` outputs along an axis of `n_in`.
pub(super) fn weights(filter: Filter, n_in: usize, n_out: usize) -> Vec<(usize, Vec<f64>)> {
    let scale = n_in as f64 / n_out as f64;
    let stretch = scale.max(1.0);
    let radius = filter.radius() * stretch;
    let of = |i: usize| {
        let centre = (i as f64 + 0.5) * scale;
        let first = (centre - radius + 0.5).max(0.0) as usize;
        let end = ((centre + radius + 0.5) as usize).min(n_in);
        let mut weights: Vec<f64> = (first..end)
            .map(|x| filter.at((x as f64 - centre + 0.5) * (1.0 / stretch)))
            .collect();
        let sum: f64 = weights.iter().sum();
        if sum != 0.0 {
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        (first, weights)
    };
    (0..n_out).map(of).collect()
}

/// Weights in fixed point, and its fractional bits.
fn taps(filter: Filter, rounding: Rounding, n_in: usize, n_out: usize) -> (Vec<Taps>, u32) {
    let weights = weights(filter, n_in, n_out);
    let bits = rounding.bits(&weights);
    let fixed = |w: f64| (w * f64::from(1 << bits) + 0.5_f64.copysign(w)) as i32;
    let of = |(first, weights): (usize, Vec<f64>)| Taps {
        first,
        weights: weights.into_iter().map(fixed).collect(),
    };
    (weights.into_iter().map(of).collect(), bits)
}

fn rounded(sum: i32, bits: u32) -> u8 {
    (sum >> bits).clamp(0, 255) as u8
}

/// `image`, stretched to `width × height`, which are not 0, as Pillow does it.
pub(super) fn resize(image: &Image, size: (usize, usize), filter: Filter) -> Image {
    resize_as(Rounding::Pillow, image, size, filter)
}

/// [`resize`] with this fixed point.
pub(super) fn resize_as(
    rounding: Rounding,
    image: &Image,
    (width, height): (usize, usize),
    filter: Filter,
) -> Image {
    let (n_in, n_rows) = image.size();
    if (width, height) == (n_in, n_rows) {
        return image.clone();
    }
    let wide = if width == n_in {
        image.clone()
    } else {
        let (taps, bits) = taps(filter, rounding, n_in, width);
        let mut rgb = Vec::with_capacity(3 * width * n_rows);
        for row in image.rgb().chunks_exact(3 * n_in) {
            for Taps { first, weights } in &taps {
                let mut sums = [1 << (bits - 1); 3];
                for (pixel, &w) in row[3 * first..].chunks_exact(3).zip(weights) {
                    for (sum, &x) in sums.iter_mut().zip(pixel) {
                        *sum += i32::from(x) * w;
                    }
                }
                rgb.extend(sums.map(|sum| rounded(sum, bits)));
            }
        }
        Image::of(width, n_rows, rgb)
    };
    if height == n_rows {
        return wide;
    }
    let stride = 3 * width;
    let mut rgb = Vec::with_capacity(stride * height);
    let mut sums = vec![0; stride];
    let (taps, bits) = taps(filter, rounding, n_rows, height);
    for Taps { first, weights } in taps {
        sums.fill(1 << (bits - 1));
        for (row, &w) in wide.rgb()[first * stride..]
            .chunks_exact(stride)
            .zip(&weights)
        {
            for (sum, &x) in sums.iter_mut().zip(row) {
                *sum += i32::from(x) * w;
            }
        }
        rgb.extend(sums.iter().map(|&sum| rounded(sum, bits)));
    }
    Image::of(width, height, rgb)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_sum_to_one_and_overshoot_fits() {
        for filter in [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos] {
            for (n_in, n_out) in [(1, 7), (7, 1), (5, 5), (200, 33), (33, 200), (65_535, 1)] {
                for (first, weights) in weights(filter, n_in, n_out) {
                    assert!(!weights.is_empty() && first + weights.len() <= n_in);
                    let (sum, all) = (
                        weights.iter().sum::<f64>(),
                        weights.iter().map(|w| w.abs()).sum::<f64>(),
                    );
                    // Sums in fixed point stay below 2^31 where weights of one sign are below 2.
                    assert!((sum - 1.0).abs() < 1e-9 && all < 2.0, "{filter:?} {all}");
                }
            }
        }
    }

    #[test]
    fn one_colour_stays() {
        let image = Image::rgb8(5, 3, &[200, 7, 255].repeat(15)).unwrap();
        for filter in [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos] {
            let other = resize(&image, (17, 2), filter);
            assert_eq!(other.rgb(), [200, 7, 255].repeat(34));
        }
    }
}
